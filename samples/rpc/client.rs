// SPDX-License-Identifier: GPL-2.0

//! A client: lends the server its memory for each call, and has it back with the answer.

use crate::proto::{
    checksum,
    parse_answer,
    pattern,
    Call,
    Op,
    ANSWER,
    CALL,
    MAX_LEN, //
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
use rdma::prelude::*;

/// A registration and a call, and those of the call before, whose completions may come later than
/// its answer.
const CAPS: Caps = Caps::new(4, 2);

/// How long to look for an address and for a route, each, and for an answer, in milliseconds.
const PATIENCE_MS: u32 = 5_000;

/// Calls may come when the server has no slot left: then they are sent again, always.
const PARAM: cm::ConnParam<'static> = cm::ConnParam {
    private_data: &[],
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: 7,
};

/// The memory that is lent.
#[derive(HasCqe)]
struct Memory {
    reg: Cqe<Self>,
    region: Region<Bidirectional, SgBuf<Bidirectional>>,
}

impl CqeHandler for Memory {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    /// It is registered. If not, the receive of the answer will fail, too.
    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &Atomic) {}
}

/// A call on its way out.
#[derive(HasCqe)]
struct Message {
    sent: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    /// As above.
    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {}
}

/// The receive of an answer.
#[derive(HasCqe)]
struct Inbox {
    recv: Cqe<Self>,
    buf: Buf<FromDevice>,
    memory: Arc<Memory>,
    qp: Arc<Qp<Workqueue>>,
    answer: Arc<Answer>,
}

impl Inbox {
    /// Looks whether there is an answer, with the proof that the server cannot reach the memory any
    /// more.
    fn open(&mut self, wc: &Wc) -> Result<(u32, u32)> {
        let wc = wc.result()?;
        if !self.memory.region.remote_invalidated(&wc, &self.qp) {
            return Err(EKEYREVOKED);
        }
        let message = self.buf.cpu();
        let answer = message.get(..wc.byte_len()).and_then(parse_answer);
        answer.ok_or(EBADMSG)
    }
}

impl CqeHandler for Inbox {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Sleepable) {
        let answer = this.open(wc);
        *this.answer.is.lock() = Some(answer);
        this.answer.came.notify_one();
    }
}

/// The answer that a client waits for: the number of the call, and a checksum.
#[pin_data]
struct Answer {
    #[pin]
    is: Mutex<Option<Result<(u32, u32)>>>,
    #[pin]
    came: CondVar,
}

impl Answer {
    fn wait(&self) -> Result<(u32, u32)> {
        let (mut is, mut left) = (self.is.lock(), msecs_to_jiffies(PATIENCE_MS));
        loop {
            if let Some(answer) = is.take() {
                return answer;
            }
            left = match self.came.wait_interruptible_timeout(&mut is, left) {
                CondVarTimeoutResult::Woken { jiffies } => jiffies,
                CondVarTimeoutResult::Timeout => return Err(ETIMEDOUT),
                CondVarTimeoutResult::Signal { .. } => return Err(ERESTARTSYS),
            }
        }
    }
}

/// A connection to the server, which ends when this is dropped.
pub(crate) struct Caller {
    id: cm::Id,
    qp: Arc<Qp<Workqueue>>,
    pd: Pd,
    memory: Arc<Memory>,
    answer: Arc<Answer>,
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
        let qp = Arc::new(Qp::create(&id, pd, &cq, &cq, &CAPS, cx)?, GFP_KERNEL)?;
        let memory = Memory {
            reg: Cqe::new(),
            region: Region::new(SgBuf::alloc(pd, MAX_LEN, cx)?, cx)?,
        };
        let answer = pin_init!(Answer {
            is <- new_mutex!(None),
            came <- new_condvar!(),
        });
        let caller = Self {
            id,
            qp,
            pd: pd.clone(),
            memory: Arc::new(memory, GFP_KERNEL)?,
            answer: Arc::pin_init(answer, GFP_KERNEL)?,
            data: KVec::from_elem(0, MAX_LEN, GFP_KERNEL)?,
        };
        caller.id.connect(caller.qp.clone(), &PARAM, cx)?;
        Ok(caller)
    }

    /// Begins a call, of at most [`MAX_LEN`] bytes.
    pub(crate) fn call(&mut self, op: Op, number: u32, len: usize, cx: &Sleepable) -> Result {
        let data = self.data.get_mut(..len).ok_or(EINVAL)?;
        match op {
            Op::Put => (data.iter_mut().zip(pattern(number))).for_each(|(to, byte)| *to = byte),
            Op::Get => data.fill(0),
        }
        self.memory.region.write(0, data)?;
        // Each call lends the memory under a new key, and for no more than it needs.
        let memory = self.memory.clone();
        let data = self.qp.post_reg(memory, |memory| match op {
            Op::Put => RegWr::remote_read(&memory.region),
            Op::Get => RegWr::remote_write(&memory.region),
        })?;
        let call = Call {
            op,
            number,
            len,
            data,
        };
        self.send(&call.to_bytes(), cx)
    }

    /// Sends what may be a call.
    pub(crate) fn send(&self, call: &[u8; CALL], cx: &Sleepable) -> Result {
        let inbox = Inbox {
            recv: Cqe::new(),
            buf: Buf::alloc(&self.pd, ANSWER, cx)?,
            memory: self.memory.clone(),
            qp: self.qp.clone(),
            answer: self.answer.clone(),
        };
        let inbox = KBox::pin(inbox, GFP_KERNEL)?;
        (self.qp).post_recv(inbox, |inbox| Ok(RecvWr::new([inbox.buf.whole_mut()])))?;
        let mut buf = Buf::alloc(&self.pd, CALL, cx)?;
        buf.cpu().copy_from_slice(call);
        let sent = Cqe::new();
        let message = KBox::pin(Message { sent, buf }, GFP_KERNEL)?;
        Ok((self.qp).post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?)
    }

    /// Waits for the answer, and says whether it and the data are right.
    pub(crate) fn answer(&mut self, number: u32, len: usize) -> Result<bool> {
        let (answered, sum) = self.answer.wait()?;
        let data = self.data.get_mut(..len).ok_or(EINVAL)?;
        self.memory.region.read(0, data)?;
        Ok(answered == number
            && sum == checksum(pattern(number).take(len))
            && data.iter().copied().eq(pattern(number).take(len)))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.id.disconnect_later();
    }
}
