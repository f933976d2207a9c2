// SPDX-License-Identifier: GPL-2.0

//! What iWARP does not promise: that a key which a peer has invalidated was valid.

use crate::fixture::{
    both,
    wait,
    Inbox,
    NullEnv,
    RegOwner,
    CAPS, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::prelude::*;
use rdma_null::Injection;

type Shared<T> = Arc<SpinLockIrq<T>>;

fn shared<T>(value: T) -> Result<Shared<T>> {
    Arc::pin_init(new_spinlock_irq!(value), GFP_KERNEL)
}

/// Two QPs that are connected to each other.
struct Link {
    a: Qp<Softirq>,
    b: Arc<Qp<Softirq>>,
}

impl Link {
    fn new(null: &NullEnv, cq: &Cq<Softirq>) -> Result<Self> {
        let a = null.env.raw_qp(cq, &CAPS)?;
        let b = Arc::new(null.env.raw_qp(cq, &CAPS)?, GFP_KERNEL)?;
        null.connect(&a, &b)?;
        Ok(Self { a, b })
    }

    /// Writes to memory of the device, and returns the status.
    fn write(&self, null: &NullEnv, remote: Remote) -> Result<Option<Status>> {
        let sent = Inbox::new()?;
        let message = null.env.message(&sent, &[9; 8])?;
        self.a
            .post_send(message, |m| Ok(SendWr::rdma_write([m.buf.whole()], remote)))?;
        wait(|| sent.len() == 1)?;
        Ok(sent.pop()?.status())
    }

    /// Registers a region with side `b`.
    fn register(&self, region: &Arc<Region<Bidirectional>>) -> Result<Remote> {
        let owner = RegOwner::new(region)?;
        let registered = owner.registered.clone();
        let remote = self.b.post_reg(owner, |o| both(&*o.region))?;
        wait(|| registered.get() == 1)?;
        Ok(remote)
    }

    /// Invalidates a region with side `b`.
    fn invalidate(&self, region: &Arc<Region<Bidirectional>>) -> Result {
        self.b
            .post_inv(RegOwner::new(region)?, |o| InvWr::new(&*o.region))?;
        wait(|| region.is_idle())
    }

    /// Has side `a` invalidate a key, and returns where side `b` says whether that was proof for the
    /// region.
    fn end(
        &self,
        null: &NullEnv,
        region: &Arc<Region<Bidirectional>>,
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
    region: Arc<Region<Bidirectional>>,
    qp: Arc<Qp<Softirq>>,
    proved: Shared<Option<bool>>,
}

impl CqeHandler for Ends {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        if let Ok(wc) = wc.result() {
            let proved = this.region.remote_invalidated(&wc, &this.qp);
            *this.proved.lock() = Some(proved);
        }
    }
}

#[kunit_tests(rdma_null_iwarp)]
mod tests {
    use super::*;

    #[test]
    fn remote_invalidation_is_no_proof() -> Result {
        let null = NullEnv::iwarp()?;
        let link = Link::new(&null, &null.env.cq(128)?)?;
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
        let link = Link::new(&null, &null.env.cq(128)?)?;
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
}
