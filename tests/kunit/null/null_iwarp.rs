// SPDX-License-Identifier: GPL-2.0

//! Guarantees that iWARP does not give: that a key which a peer has invalidated was valid, and that
//! the key of an RDMA READ's own memory ends with a READ that fails.

use crate::fixture::{
    both,
    wait,
    CountDrop,
    Counter,
    Inbox,
    NullEnv,
    RegOwner,
    CAPS, //
};
use kernel::{
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    dma::Direction,
    prelude::*,
    qp::InitAttr,
    rw::{
        Ctx,
        Rw, //
    },
    sg::{
        SgList,
        SgOwner,
        Sgl, //
    }, //
};
use rdma_null::Injection;

type Shared<T> = Arc<SpinLockIrq<T>>;

fn shared<T>(value: T) -> Result<Shared<T>> {
    Arc::pin_init(new_spinlock_irq!(value), GFP_KERNEL)
}

/// Two QPs that are connected to each other, of which `a` has room for transfers.
struct Link {
    a: Qp<Softirq>,
    b: Qp<Softirq>,
}

impl Link {
    fn new(null: &NullEnv, cq: &Cq<Softirq>, contexts: u32) -> Result<Self> {
        let env = &null.env;
        let a = InitAttr::new(&env.pd, cq, cq, &CAPS)
            .rw_contexts(contexts, 1)
            .create(&env.cx)?;
        let b = env.raw_qp(cq, &CAPS)?;
        null.connect(&a, &b)?;
        Ok(Self { a, b })
    }

    /// Writes to memory of the device, and returns the status.
    fn write(&self, null: &NullEnv, remote: Remote) -> Result<Option<wc::Status>> {
        let sent = Inbox::new()?;
        let message = null.env.message(&sent, &[9; 8])?;
        self.a
            .post_send(message, |m| Ok(SendWr::rdma_write([m.buf.whole()], remote)))?;
        wait(|| sent.len() == 1)?;
        Ok(sent.pop()?.status())
    }

    /// Registers a region with side `b`.
    fn register(&self, region: &Arc<SharedRegion<Bidirectional>>) -> Result<Remote> {
        let owner = RegOwner::new(region)?;
        let registered = owner.registered.clone();
        let remote = self.b.post_send(owner, |o| Ok(both(&*o.region)))?;
        wait(|| registered.get() == 1)?;
        Ok(remote)
    }

    /// Invalidates a region with side `b`.
    fn invalidate(&self, region: &Arc<SharedRegion<Bidirectional>>) -> Result {
        self.b
            .post_send(RegOwner::new(region)?, |o| Ok(InvWr::new(&*o.region)))?;
        wait(|| region.is_idle())
    }

    /// Has side `a` invalidate a key, and returns where side `b` reports whether that was proof for
    /// the region.
    fn end(
        &self,
        null: &NullEnv,
        region: &Arc<SharedRegion<Bidirectional>>,
        rkey: u32,
    ) -> Result<Shared<Option<bool>>> {
        let proved = shared(None)?;
        let receive = Ends {
            cqe: Cqe::new(),
            region: region.clone(),
            qp: self.b.clone(),
            proved: proved.clone(),
        };
        self.b
            .post_recv(KBox::pin(receive, GFP_KERNEL)?, |_| Ok(RecvWr::new([])))?;
        let sent = Inbox::new()?;
        let message = null.env.message(&sent, b"end")?;
        self.a
            .post_send(message, |_| Ok(SendWr::send([]).invalidating(rkey)))?;
        wait(|| sent.len() == 1)?;
        sent.pop()?.ok()?;
        Ok(proved)
    }
}

/// A receive that perhaps ends the registration of a region.
#[derive(HasCqe)]
struct Ends {
    cqe: Cqe<Self>,
    region: Arc<SharedRegion<Bidirectional>>,
    qp: Qp<Softirq>,
    proved: Shared<Option<bool>>,
}

impl CqeHandler for Ends {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if let Ok(wc) = wc.result() {
            let proved = this.region.remote_invalidated(&wc, &this.qp);
            *this.proved.lock() = Some(proved);
        }
    }
}

/// The memory that the tests transfer.
const LEN: usize = 2 * PAGE_SIZE;
const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };
/// The first key of the first MR of a null device, which is the first that a transfer takes.
const KEY: u32 = 0x101;

type Back = Shared<Option<(Pin<KBox<Transfer>>, Option<wc::Status>)>>;

/// A vector that tells when it is dropped.
struct Watched(KBox<(SgList<KVec<u8>>, CountDrop)>);

// SAFETY: What the list promises holds for this.
unsafe impl<D: Direction> SgOwner<D> for Watched {
    fn sgl(&mut self) -> Sgl<D> {
        self.0 .0.sgl()
    }
}

/// The memory of another owner on its way.
#[derive(HasCqe)]
struct Foreign {
    cqe: Cqe<Self>,
    data: Ctx<FromDevice, Watched>,
    back: Shared<Option<Ctx<FromDevice, Watched>>>,
}

impl CqeHandler for Foreign {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        let Self { data, back, .. } = KBox::into_inner(Pin::into_inner(this));
        *back.lock() = Some(data);
    }
}

/// Pages on their way.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    back: Back,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let (back, status) = (this.back.clone(), wc.result().err().map(|e| e.status));
        *back.lock() = Some((this, status));
    }
}

impl Transfer {
    /// Returns a transfer, and where a peer finds its pages.
    fn new(null: &NullEnv) -> Result<(Pin<KBox<Self>>, Remote)> {
        let mut data = Ctx::alloc(LEN, &null.env.cx)?;
        let addr = match data.cpu().pages().next() {
            Some(page) => page.as_ptr() as u64,
            None => return Err(EINVAL),
        };
        let this = Self {
            cqe: Cqe::new(),
            data,
            back: shared(None)?,
        };
        Ok((KBox::pin(this, GFP_KERNEL)?, Remote { addr, rkey: KEY }))
    }

    fn read<'a>(&'a self, remote: Remote, cx: &Sleepable) -> Result<Rw<'a>> {
        Ok(Rw::read(&self.data, .., remote, cx))
    }

    /// Has side `a` transfer, and returns the status and where a peer finds the pages.
    fn run(
        null: &NullEnv,
        link: &Link,
        rw: impl for<'a> FnOnce(&'a Self) -> Result<Rw<'a>>,
    ) -> Result<(Pin<KBox<Self>>, Option<wc::Status>, Remote)> {
        let (transfer, pages) = Self::new(null)?;
        let back = transfer.back.clone();
        link.a.post_rw(transfer, rw)?;
        wait(|| back.lock().is_some())?;
        let (transfer, status) = back.lock().take().ok_or(EINVAL)?;
        Ok((transfer, status, pages))
    }
}

#[kunit_tests(rdma_null_iwarp)]
mod tests {
    use super::*;

    #[test]
    fn remote_invalidation_is_no_proof() -> Result {
        let null = NullEnv::iwarp()?;
        let link = Link::new(&null, &null.env.cq(128)?, 0)?;
        let region = null.env.region(8)?;
        for _ in 0..2 {
            let remote = link.register(&region)?;
            let proved = link.end(&null, &region, remote.rkey)?;
            wait(|| proved.lock().is_some())?;
            check_eq!(*proved.lock(), Some(false));
            check!(!region.is_idle());
            link.invalidate(&region)?;
        }
        Ok(())
    }

    /// The peer invalidates a key before there is one, and the completion is looked at behind it.
    #[test]
    fn key_that_comes_is_invalidated() -> Result {
        let null = NullEnv::iwarp()?;
        let link = Link::new(&null, &null.env.cq(128)?, 0)?;
        let region = null.env.region(8)?;
        let next = link.register(&region)?.rkey + 1;
        let num = link.b.num();
        null.dev.inject_qp(num, Injection::Hold { count: 1 })?;
        let proved = link.end(&null, &region, next)?;
        link.invalidate(&region)?;
        let remote = link.register(&region)?;
        check_eq!(remote.rkey, next);
        null.dev.inject_qp(
            num,
            Injection::Release {
                count: 1,
                reversed: false,
            },
        )?;
        wait(|| proved.lock().is_some())?;
        // The peer reaches the memory.
        check_eq!(link.write(&null, remote)?, None);
        check_eq!(*proved.lock(), Some(false));
        check!(!region.is_idle());
        Ok(())
    }

    #[test]
    fn read_gives_its_pages_back() -> Result {
        let null = NullEnv::iwarp()?;
        let cq = null.env.cq(256)?;
        let (link, other) = (Link::new(&null, &cq, 2)?, Link::new(&null, &cq, 0)?);
        let region = null.env.region(LEN)?;
        region.write(LEN - 4, b"tail")?;
        let remote = link.register(&region)?;
        let (mut transfer, status, pages) =
            Transfer::run(&null, &link, |x| x.read(remote, &null.env.cx))?;
        check_eq!(status, None);
        let mut tail = [0; 4];
        transfer.data.cpu().read(LEN - 4, &mut tail)?;
        check_eq!(&tail, b"tail");
        check_eq!(transfer.data.len(), LEN);
        check_eq!(other.write(&null, pages)?, Some(wc::Status::REM_ACCESS_ERR));
        Ok(())
    }

    #[test]
    fn failed_write_gives_its_pages_back() -> Result {
        let null = NullEnv::iwarp()?;
        let link = Link::new(&null, &null.env.cq(256)?, 2)?;
        let (mut transfer, status, _) = Transfer::run(&null, &link, |x| {
            Ok(Rw::write(&x.data, 0..LEN, NOWHERE, &null.env.cx))
        })?;
        check_eq!(status, Some(wc::Status::REM_ACCESS_ERR));
        transfer.data.cpu().read(0, &mut [0; 4])?;
        Ok(())
    }

    /// Peers can still write to its pages.
    #[test]
    fn pages_of_a_failed_read_stay_until_the_qp_is_gone() -> Result {
        let null = NullEnv::iwarp()?;
        let cq = null.env.cq(256)?;
        let (link, other) = (Link::new(&null, &cq, 2)?, Link::new(&null, &cq, 0)?);
        let (mut transfer, status, pages) =
            Transfer::run(&null, &link, |x| x.read(NOWHERE, &null.env.cx))?;
        check_eq!(status, Some(wc::Status::REM_ACCESS_ERR));
        let shown = transfer.data.cpu().read(0, &mut [0; 4]);
        let len = transfer.data.len();
        drop(transfer);
        check_eq!(other.write(&null, pages)?, None);
        check_err!(shown, EINVAL);
        check_eq!(len, 0);
        link.a.destroy(&null.env.cx)?;
        check_eq!(other.write(&null, pages)?, Some(wc::Status::REM_ACCESS_ERR));
        Ok(())
    }

    #[test]
    fn owner_of_a_failed_read_stays_until_the_qp_is_gone() -> Result {
        let null = NullEnv::iwarp()?;
        let cx = &null.env.cx;
        let link = Link::new(&null, &null.env.cq(256)?, 2)?;
        let gone = Counter::new()?;
        let list = SgList::new(KVec::from_elem(0, LEN, GFP_KERNEL)?, cx)?;
        let watched = (list, CountDrop(gone.clone()));
        let foreign = Foreign {
            cqe: Cqe::new(),
            data: Ctx::new(Watched(KBox::new(watched, GFP_KERNEL)?), GFP_KERNEL)?,
            back: shared(None)?,
        };
        let back = foreign.back.clone();
        link.a.post_rw(KBox::pin(foreign, GFP_KERNEL)?, |x| {
            Ok(Rw::read(&x.data, 0..LEN, NOWHERE, cx))
        })?;
        wait(|| back.lock().is_some())?;
        let mut data = back.lock().take().ok_or(EINVAL)?;
        check_eq!(data.len(), 0);
        check!(data.take().is_none());
        check_eq!(gone.get(), 0);
        // The context has other memory by then.
        let list = SgList::new(KVec::from_elem(0, 9, GFP_KERNEL)?, cx)?;
        let watched = (list, CountDrop(gone.clone()));
        data.fill(Watched(KBox::new(watched, GFP_KERNEL)?))?;
        check_eq!(data.len(), 9);
        link.a.destroy(cx)?;
        check_eq!(gone.get(), 1);
        check!(data.take().is_some());
        check_eq!(gone.get(), 2);
        Ok(())
    }

    /// As the one above, of a READ that was not posted, behind the registration that was.
    #[test]
    fn pages_of_a_read_in_part_stay_until_the_qp_is_gone() -> Result {
        let null = NullEnv::iwarp()?;
        let cq = null.env.cq(256)?;
        let (link, other) = (Link::new(&null, &cq, 2)?, Link::new(&null, &cq, 0)?);
        let (transfer, pages) = Transfer::new(&null)?;
        let num = link.a.num();
        null.dev
            .inject_qp(num, Injection::Refuse { after: 1, errno: 5 })?;
        let posted = link.a.post_rw(transfer, |x| x.read(NOWHERE, &null.env.cx));
        check_err!(posted, EIO);
        // This drops the owner.
        link.a.drain(&null.env.cx)?;
        check_eq!(other.write(&null, pages)?, None);
        link.a.destroy(&null.env.cx)?;
        check_eq!(other.write(&null, pages)?, Some(wc::Status::REM_ACCESS_ERR));
        Ok(())
    }
}
