// SPDX-License-Identifier: GPL-2.0

//! Contexts of transfers by `rdma_rw` that are filled again.

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::{
    check::fail,
    fixture::{
        bounce,
        synced_for_device,
        wait,
        Counter,
        NullEnv, //
    }, //
};
use kernel::{
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*,
    sync::SpinLockIrq,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::InitAttr,
    rw::{
        Ctx,
        Rw, //
    },
    sg::SgList, //
};
use rdma_null::Injection;

const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };
const CAPS: Caps = Caps {
    send_sge: 32,
    ..Caps::new(4, 4)
};

type List = SgList<KVec<u8>>;
type Back = Arc<SpinLockIrq<Option<Pin<KBox<Transfer>>>>>;

/// A transfer whose context is filled again.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx<ToDevice, List>,
    back: Back,
    times: Arc<Counter>,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        let back = this.back.clone();
        this.times.up();
        *back.lock() = Some(this);
    }
}

impl Transfer {
    fn prepare(&self, qp: &Qp<Softirq>, cx: &Sleepable) -> Result {
        qp.prepare_rw(Rw::write(&self.data, .., NOWHERE, cx))
    }
}

/// Pages that are transferred again.
#[derive(HasCqe)]
struct Plain {
    cqe: Cqe<Self>,
    data: Ctx,
    back: Arc<SpinLockIrq<Option<Pin<KBox<Plain>>>>>,
}

impl CqeHandler for Plain {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        let back = this.back.clone();
        *back.lock() = Some(this);
    }
}

struct Test {
    null: NullEnv,
    back: Back,
    times: Arc<Counter>,
}

impl Test {
    fn new() -> Result<Self> {
        Ok(Self {
            null: NullEnv::new()?,
            back: Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?,
            times: Counter::new()?,
        })
    }

    /// Returns a QP for transfers to no peer.
    fn qp(&self) -> Result<Qp<Softirq>> {
        let env = &self.null.env;
        let cq = env.cq::<Softirq>(64)?;
        let qp = InitAttr::new(&env.pd, &cq, &cq, &CAPS)
            .rw_contexts(2, 1)
            .create(&env.cx)?;
        let nobody = Injection::Connect { peer: 0 };
        self.null.dev.inject_qp(qp.num(), nobody)?;
        Ok(qp)
    }

    fn cx(&self) -> &Sleepable {
        &self.null.env.cx
    }

    fn list(&self, len: usize) -> Result<List> {
        SgList::new(KVec::from_elem(0, len, GFP_KERNEL)?, self.cx())
    }

    fn transfer(&self) -> Result<Pin<KBox<Transfer>>> {
        let transfer = Transfer {
            cqe: Cqe::new(),
            data: Ctx::empty(GFP_KERNEL)?,
            back: self.back.clone(),
            times: self.times.clone(),
        };
        Ok(KBox::pin(transfer, GFP_KERNEL)?)
    }

    fn back(&self) -> Result<Pin<KBox<Transfer>>> {
        let mut back = None;
        wait(|| {
            back = self.back.lock().take();
            back.is_some()
        })?;
        back.ok_or(EINVAL)
    }

    /// Posts what was prepared, and waits for it.
    fn run(&self, qp: &Qp<Softirq>, transfer: Pin<KBox<Transfer>>) -> Result<Pin<KBox<Transfer>>> {
        qp.post_rw(transfer, |x| Ok(Rw::prepared(&x.data)))?;
        self.back()
    }
}

#[kunit_tests(rdma_null_rw_fill)]
mod tests {
    use super::*;

    #[test]
    fn empty_context_is_not_transferred() -> Result {
        let test = Test::new()?;
        let (cx, qp, mut transfer) = (test.cx(), test.qp()?, test.transfer()?);
        for again in [false, true] {
            check_eq!(transfer.data.len(), 0);
            check!(transfer.data.take().is_none());
            check_err!(transfer.prepare(&qp, cx), EINVAL);
            for range in [None, Some(0..1)] {
                let posted = qp.post_rw(transfer, |x| match range.clone() {
                    None => Ok(Rw::write(&x.data, .., NOWHERE, cx)),
                    Some(range) => Ok(Rw::write(&x.data, range, NOWHERE, cx)),
                });
                let Err(e) = posted else {
                    return Err(fail("it was posted"));
                };
                check_eq!(e.error(), EINVAL);
                transfer = e.owner.ok_or(EINVAL)?;
            }
            if !again {
                transfer.data.fill(test.list(9)?)?;
                check_eq!(transfer.data.len(), 9);
                check!(transfer.data.take().is_some());
            }
        }
        Ok(())
    }

    #[test]
    fn context_is_filled_with_one_owner_at_a_time() -> Result {
        let test = Test::new()?;
        let (cx, qp, mut transfer) = (test.cx(), test.qp()?, test.transfer()?);
        transfer.data.fill(test.list(9)?)?;
        for is_prepared in [false, true] {
            let Err(e) = transfer.data.fill(test.list(5)?) else {
                return Err(fail("it was filled"));
            };
            check_eq!(e.error, EBUSY);
            check_eq!(e.owner.into_inner().len(), 5);
            check_eq!(transfer.data.len(), 9);
            if !is_prepared {
                transfer.prepare(&qp, cx)?;
            }
        }
        // What was prepared ends.
        let taken = transfer.data.take().ok_or(EINVAL)?;
        check_eq!(taken.into_inner().len(), 9);
        transfer.data.fill(test.list(5)?)?;
        qp.post_rw(transfer, |x| Ok(Rw::write(&x.data, .., NOWHERE, cx)))?;
        check_eq!(test.back()?.data.len(), 5);
        qp.destroy(cx)
    }

    /// From the second transfer on, which is of another owner.
    #[test]
    #[cfg(has_faults)]
    fn context_is_filled_again_without_allocation() -> Result {
        let test = Test::new()?;
        let (cx, qp, mut transfer) = (test.cx(), test.qp()?, test.transfer()?);
        for first in [true, false, false] {
            // In one page.
            let list = test.list(8)?;
            let fill = || -> Result {
                transfer.data.fill(list)?;
                transfer.prepare(&qp, cx)
            };
            let (filled, failed) = match first {
                true => (fill(), false),
                false => with_fault(1, fill),
            };
            filled?;
            transfer = test.run(&qp, transfer)?;
            let (taken, also) = with_fault(1, || transfer.data.take());
            check!(taken.is_some());
            check!(!failed && !also);
        }
        check_eq!(test.times.get(), 3);
        Ok(())
    }

    /// A context that is filled again stays in the list of a QP that it was prepared for.
    #[test]
    fn end_of_the_first_qp_leaves_what_another_has() -> Result {
        let test = Test::new()?;
        let (cx, first, second) = (test.cx(), test.qp()?, test.qp()?);
        let mut transfer = test.transfer()?;
        transfer.data.fill(test.list(PAGE_SIZE)?)?;
        transfer.prepare(&first, cx)?;
        transfer = test.run(&first, transfer)?;
        transfer.data.take().ok_or(EINVAL)?;
        transfer.data.fill(test.list(2 * PAGE_SIZE)?)?;

        // Posted, and held by the device.
        test.null
            .dev
            .inject_qp(second.num(), Injection::Hold { count: 1 })?;
        second.post_rw(transfer, |x| Ok(Rw::write(&x.data, .., NOWHERE, cx)))?;
        first.destroy(cx)?;
        check_eq!(test.times.get(), 1);
        check!(test.back.lock().is_none());
        let all = Injection::Release {
            count: u32::MAX,
            reversed: false,
        };
        test.null.dev.inject_qp(second.num(), all)?;
        let mut transfer = test.back()?;
        check_eq!(test.times.get(), 2);

        // Prepared.
        let (third, fourth) = (test.qp()?, test.qp()?);
        transfer.prepare(&third, cx)?;
        transfer = test.run(&third, transfer)?;
        transfer.data.take().ok_or(EINVAL)?;
        transfer.data.fill(test.list(9)?)?;
        transfer.prepare(&fourth, cx)?;
        third.destroy(cx)?;
        transfer = test.run(&fourth, transfer)?;
        check_eq!(test.times.get(), 4);

        // Idle, and dropped later than the QP.
        transfer.data.take().ok_or(EINVAL)?;
        transfer.data.fill(test.list(1)?)?;
        fourth.destroy(cx)?;
        check_eq!(transfer.data.len(), 1);
        second.destroy(cx)
    }

    /// Who has the memory may fill it between the two, as nvmet does.
    #[test]
    fn prepared_write_is_synchronised_when_it_is_posted() -> Result {
        const LEN: u32 = PAGE_SIZE as u32 + 9;
        let test = Test::new()?;
        let (cx, qp, other, mut transfer) = (test.cx(), test.qp()?, test.qp()?, test.transfer()?);
        transfer.data.fill(test.list(LEN as usize)?)?;
        bounce();
        transfer.prepare(&qp, cx)?;
        check_err!(transfer.prepare(&qp, cx), EBUSY);
        let Err(e) = other.post_rw(transfer, |x| Ok(Rw::prepared(&x.data))) else {
            return Err(fail("it was posted"));
        };
        check_eq!((e.error(), synced_for_device()), (EINVAL, 0));
        transfer = test.run(&qp, e.owner.ok_or(EINVAL)?)?;
        check_eq!(synced_for_device(), LEN);
        // A part, which only that is synchronised of.
        qp.prepare_rw(Rw::write(&transfer.data, 3..8, NOWHERE, cx))?;
        transfer = test.run(&qp, transfer)?;
        check_eq!(synced_for_device(), LEN + 5);
        // What is mapped as it is posted has been written before.
        qp.post_rw(transfer, |x| Ok(Rw::write(&x.data, .., NOWHERE, cx)))?;
        transfer = test.back()?;
        check_eq!(synced_for_device(), LEN + 5);
        // One that is taken back.
        transfer.prepare(&qp, cx)?;
        check!(transfer.data.take().is_some());
        check_eq!((synced_for_device(), test.times.get()), (LEN + 5, 3));
        // And one at the end of its QP.
        transfer.data.fill(test.list(9)?)?;
        transfer.prepare(&other, cx)?;
        other.destroy(cx)?;
        transfer.prepare(&qp, cx)?;
        transfer = test.run(&qp, transfer)?;
        check_eq!((synced_for_device(), transfer.data.len()), (LEN + 14, 9));
        Ok(())
    }

    /// The device writes that memory.
    #[test]
    fn prepared_read_is_not_synchronised() -> Result {
        let test = Test::new()?;
        let (cx, qp) = (test.cx(), test.qp()?);
        let back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        let plain = Plain {
            cqe: Cqe::new(),
            data: Ctx::alloc(PAGE_SIZE, cx)?,
            back: back.clone(),
        };
        let plain = KBox::pin(plain, GFP_KERNEL)?;
        bounce();
        qp.prepare_rw(Rw::read(&plain.data, .., NOWHERE, cx))?;
        qp.post_rw(plain, |x| Ok(Rw::prepared(&x.data)))?;
        wait(|| back.lock().take().is_some())?;
        check_eq!(synced_for_device(), 0);
        Ok(())
    }

    /// What a view that was forgotten holds is neither posted nor taken back before a cancel.
    #[test]
    fn transfer_that_a_forgotten_view_holds_is_cancelled() -> Result {
        let test = Test::new()?;
        let (cx, qp) = (test.cx(), test.qp()?);
        let plain = Plain {
            cqe: Cqe::new(),
            data: Ctx::alloc(PAGE_SIZE, cx)?,
            back: Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?,
        };
        let mut plain = KBox::pin(plain, GFP_KERNEL)?;
        core::mem::forget(plain.data.cpu());
        qp.prepare_rw(Rw::write(&plain.data, .., NOWHERE, cx))?;
        core::mem::forget(plain.data.cpu());
        let Err(e) = qp.post_rw(plain, |x| Ok(Rw::prepared(&x.data))) else {
            return Err(EIO);
        };
        check_eq!(e.error(), EINVAL);
        let mut plain = e.owner.ok_or(EIO)?;
        drop(qp);
        fsleep(Delta::from_millis(30));
        check_eq!(test.null.dev.objects()[1], 1);
        plain.data.cancel();
        wait(|| test.null.dev.objects()[1] == 0)
    }

    /// Threads take and fill what is prepared while the QP ends.
    #[test]
    fn contexts_are_filled_while_the_qp_ends() -> Result {
        const CONTEXTS: usize = 8;
        let test = Test::new()?;
        let cx = test.cx();
        for _ in 0..20 {
            let (qp, other, ended) = (test.qp()?, test.qp()?, Counter::new()?);
            let mut all = KVec::with_capacity(CONTEXTS, GFP_KERNEL)?;
            for n in 0..CONTEXTS {
                let mut transfer = test.transfer()?;
                transfer.data.fill(test.list(PAGE_SIZE)?)?;
                transfer.prepare(&qp, cx)?;
                if n % 2 == 0 {
                    transfer = test.run(&qp, transfer)?;
                }
                all.push((transfer, test.list(PAGE_SIZE)?), GFP_KERNEL)?;
            }
            let end = ended.clone();
            test.null.env.client.spawn(GFP_KERNEL, move |cx| {
                for (mut transfer, list) in all {
                    let taken = transfer.data.take();
                    let filled = taken.is_some() && transfer.data.fill(list).is_ok();
                    if filled && transfer.prepare(&other, cx).is_ok() {
                        end.up();
                    }
                }
            })?;
            qp.destroy(cx)?;
            wait(|| ended.get() == CONTEXTS as i32)?;
        }
        Ok(())
    }
}
