// SPDX-License-Identifier: GPL-2.0

//! A client: lends the server its memory for each call, and has it back with the answer.

use crate::proto::{
    checksum,
    pattern,
    Answer,
    Call,
    ANSWER,
    CALL,
    MAX_LEN,
    PUT, //
};
use kernel::{
    new_condvar,
    new_mutex,
    prelude::*,
    sync::{
        CondVar,
        CondVarTimeoutResult,
        Mutex, //
    },
    time::msecs_to_jiffies, //
};
use rdma::{
    op::Op,
    prelude::*, //
};

/// A registration, a call and an invalidation, and the registration and the call of before, whose
/// completions may come later than the answer.
const CAPS: Caps = Caps::new(5, 2);

/// The longest time to resolve an address and a route, each, in milliseconds.
const PATIENCE_MS: u32 = 5_000;

/// The longest time to wait for an answer. A server that ends a connection may be unable to say so.
const ANSWER_MS: u32 = 60_000;

/// The memory that is lent, and the answer that comes with it.
#[pin_data]
#[derive(HasCqe)]
struct InFlight {
    reg: Cqe<Self>,
    region: SharedRegion<Bidirectional, SgBuf<Bidirectional>>,
    #[pin]
    answer: Mutex<Option<Result<Answer>>>,
    #[pin]
    came: CondVar,
}

impl InFlight {
    fn wait(&self) -> Result<Answer> {
        let mut answer = self.answer.lock();
        let mut left = msecs_to_jiffies(ANSWER_MS);
        loop {
            match answer.take() {
                Some(answer) => return answer,
                None if left == 0 => return Err(ETIMEDOUT),
                None => {}
            }
            left = match self.came.wait_interruptible_timeout(&mut answer, left) {
                CondVarTimeoutResult::Signal { .. } => return Err(ERESTARTSYS),
                CondVarTimeoutResult::Timeout => 0,
                CondVarTimeoutResult::Woken { jiffies } => jiffies,
            };
        }
    }

    fn deliver(&self, answer: Result<Answer>) {
        *self.answer.lock() = Some(answer);
        self.came.notify_one();
    }
}

impl CqeHandler for InFlight {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    /// It is registered. If not, the receive of the answer will fail, too.
    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

/// The receive of an answer, and the end of the registration where the answer is no proof of it.
#[derive(HasCqe)]
struct Inbox {
    recv: Cqe<Self>,
    inv: Cqe<Self, 1>,
    buf: Buf<FromDevice>,
    len: usize,
    lent: Arc<InFlight>,
    qp: Qp<Workqueue>,
}

impl Inbox {
    /// Reads the answer. The server no longer has access to the memory.
    fn open(&mut self) -> Result<Answer> {
        let message = self.buf.cpu();
        let answer = message.get(..self.len).ok_or(EBADMSG)?;
        Answer::read_from_bytes(answer).map_err(|_| EBADMSG)
    }
}

impl CqeHandler for Inbox {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    /// An answer has come. Its completion proves that the key is invalid, but on iWARP, and if the
    /// server does not keep to the protocol: then the key is invalidated here.
    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Sleepable) {
        let wc = match wc.result() {
            Ok(wc) => wc,
            Err(e) => return this.lent.deliver(Err(e.into())),
        };
        this.len = wc.byte_len();
        if this.lent.region.remote_invalidated(&wc, &this.qp) {
            let answer = this.open();
            return this.lent.deliver(answer);
        }
        let qp = this.qp.clone();
        let lent = this.lent.clone();
        if let Err(e) = qp.post_send(this, |inbox| {
            Ok(InvWr::new(&inbox.lent.region).done_by::<1>())
        }) {
            lent.deliver(Err(e.error()));
        }
    }
}

impl CqeHandler<1> for Inbox {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    /// The key is invalid.
    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Sleepable) {
        let answer = wc.result().map_err(Error::from).and_then(|_| this.open());
        this.lent.deliver(answer);
    }
}

/// A connection to the server, which ends when this is dropped.
pub(crate) struct Caller {
    id: cm::Id,
    qp: Qp<Workqueue>,
    pd: Pd,
    lent: Arc<InFlight>,
    /// A copy of the memory.
    data: KVec<u8>,
}

impl Caller {
    pub(crate) fn connect(
        client: &ClientRef,
        addr: SocketAddr,
        pd: &Pd,
        cx: &Sleepable,
    ) -> Result<Self> {
        let id = cm::Id::resolve(client, addr, PATIENCE_MS, cx)?;
        let cq = Cq::<Workqueue>::alloc_any(pd.device(), CAPS.entries(), cx)?;
        let lent = try_pin_init!(InFlight {
            reg: Cqe::new(),
            region: Region::new(SgBuf::alloc(pd, MAX_LEN, cx)?, cx)?.into_shared(),
            answer <- new_mutex!(None),
            came <- new_condvar!(),
        });
        let caller = Self {
            qp: Qp::create(&id, pd, &cq, &cq, &CAPS, cx)?,
            id,
            pd: pd.clone(),
            lent: Arc::pin_init(lent, GFP_KERNEL)?,
            data: KVec::from_elem(0, MAX_LEN, GFP_KERNEL)?,
        };
        // Calls that come when the server has no slot left are sent again, always.
        let param = cm::ConnParam {
            rnr_retry_count: 7,
            ..Default::default()
        };
        let handler = Arc::new(caller.qp.clone(), GFP_KERNEL)?;
        caller.id.connect(handler, &param, cx)?;
        Ok(caller)
    }

    /// Begins a call, of at most [`MAX_LEN`] bytes.
    pub(crate) fn call(&mut self, op: u32, number: u32, len: usize, cx: &Sleepable) -> Result {
        let data = self.data.get_mut(..len).ok_or(EINVAL)?;
        data.iter_mut().zip(pattern(number)).for_each(|(to, byte)| {
            // The memory that the server is to write has other bytes before.
            *to = if op == PUT { byte } else { !byte };
        });
        self.lent.region.write(0, data)?;
        // Each call lends the memory under a new key, and for no more than it needs.
        let data = self.qp.post_send(self.lent.clone(), |lent| {
            Ok(match op {
                PUT => RegWr::remote_read(&lent.region),
                _ => RegWr::remote_write(&lent.region),
            })
        })?;
        self.send(Call::new(op, number, len, data).as_bytes(), cx)
    }

    /// Sends what may be a call.
    pub(crate) fn send(&self, call: &[u8], cx: &Sleepable) -> Result {
        let inbox = Inbox {
            recv: Cqe::new(),
            inv: Cqe::new(),
            buf: Buf::alloc(&self.pd, ANSWER, cx)?,
            len: 0,
            lent: self.lent.clone(),
            qp: self.qp.clone(),
        };
        let inbox = KBox::pin(inbox, GFP_KERNEL)?;
        (self.qp).post_recv(inbox, |inbox| Ok(RecvWr::new([inbox.buf.whole_mut()])))?;
        let mut buf = Buf::<ToDevice>::alloc(&self.pd, CALL, cx)?;
        buf.cpu().copy_from_slice(call);
        Ok(Op::<(), _>::new(buf, (), cx)?.send(&self.qp, 0..CALL)?)
    }

    /// Waits for the answer, and looks whether it and the data are right.
    pub(crate) fn answer(&mut self, number: u32, len: usize) -> Result {
        let right = Answer::new(number, checksum(pattern(number).take(len)));
        let answer = self.lent.wait()?;
        let data = self.data.get_mut(..len).ok_or(EINVAL)?;
        self.lent.region.read(0, data)?;
        if answer != right || !data.iter().copied().eq(pattern(number).take(len)) {
            return Err(EBADMSG);
        }
        Ok(())
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.id.disconnect_later();
    }
}
