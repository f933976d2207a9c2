// SPDX-License-Identifier: GPL-2.0

//! CQs that are full to the last entry, and those that a device overruns: one that frees the places
//! of its queues before completions are polled, as rxe does.

use crate::{
    check::{
        expect,
        fail,
        OVERRUN, //
    },
    fixture::{
        wait,
        Counted,
        Counter,
        NullEnv,
        Polled, //
    }, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

const ALL: u32 = u32::MAX;

/// The entries that the QP reserves: those of its sends, and of a marker in each queue.
const ENTRIES: u32 = 10;

/// A QP that sends to no peer and has reserved a whole CQ, on a device that frees entries early.
struct Eager<C: Polled> {
    qp: Qp<C>,
    cq: Cq<C>,
    null: NullEnv,
    times: Arc<Counter>,
    counted: Arc<Counted>,
}

impl<C: Polled> Eager<C> {
    fn new() -> Result<Self> {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let cq = null.env.cq::<C>(ENTRIES)?;
        let qp = null.env.raw_qp(&cq, &Caps::new(ENTRIES - 2, 0))?;
        check_eq!((cq.entries(), cq.free_entries()), (ENTRIES, 0));
        null.dev.inject(Injection::Eager { on: true })?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        Ok(Self {
            qp,
            cq,
            null,
            counted: Counted::new(&times)?,
            times,
        })
    }

    fn send(&self, count: u32) -> Result {
        for _ in 0..count {
            self.qp
                .post_send(self.counted.clone(), |_| Ok(SendWr::send([])))?;
        }
        Ok(())
    }

    /// Drains while nothing completes: the drain knows that the CQ has failed as soon as it was
    /// told, which the log has by then.
    fn drain_in_vain(&self) -> Result {
        let (num, dev) = (self.qp.num(), &self.null.dev);
        dev.inject_qp(num, Injection::Hold { count: ALL })?;
        let drained = self.qp.drain(&self.null.env.cx);
        dev.inject_qp(
            num,
            Injection::Release {
                count: ALL,
                reversed: false,
            },
        )?;
        check_err!(drained, EOVERFLOW);
        Ok(())
    }

    /// Makes up for completions that are lost, so that no owner is: others come twice.
    fn make_up(self, lost: u32) -> Result {
        // SAFETY: A completion that comes twice takes the reference to the same owner that one of
        // those that are lost has not.
        unsafe { self.null.dev.duplicate(self.qp.num(), lost) }?;
        for _ in 0..lost {
            self.send(1)?;
            C::poll(&self.cq);
        }
        match Arc::into_unique_or_drop(self.counted) {
            Some(_) => Ok(()),
            None => Err(fail("an owner is lost")),
        }
    }
}

#[kunit_tests(rdma_null_overrun)]
mod tests {
    use super::*;

    #[test]
    fn full_cq_has_lost_nothing() -> Result {
        let eager = Eager::<Direct>::new()?;
        for n in 1..4 {
            eager.send(ENTRIES)?;
            check_eq!(eager.cq.process(100), ENTRIES);
            check_eq!(eager.times.get(), (n * ENTRIES) as i32);
        }
        eager.qp.drain(&eager.null.env.cx)?;
        eager.make_up(0)
    }

    #[test]
    fn completion_beyond_the_cq_is_lost() -> Result {
        expect(1, OVERRUN);
        let eager = Eager::<Direct>::new()?;
        eager.send(ENTRIES + 1)?;
        check_eq!(eager.cq.process(100), ENTRIES);
        check_eq!(eager.times.get(), ENTRIES as i32);
        eager.drain_in_vain()?;
        eager.make_up(1)
    }

    #[test]
    fn all_beyond_the_last_entry_are_lost() -> Result {
        expect(1, OVERRUN);
        let eager = Eager::<Direct>::new()?;
        eager.send(3 * ENTRIES)?;
        check_eq!(eager.cq.process(100), ENTRIES);
        check_eq!(eager.cq.process(100), 0);
        check_eq!(eager.times.get(), ENTRIES as i32);
        eager.drain_in_vain()?;
        eager.make_up(2 * ENTRIES)
    }

    #[test]
    fn waiter_is_told_of_an_overrun() -> Result {
        expect(1, OVERRUN);
        let eager = Eager::<Waited>::new()?;
        eager.send(ENTRIES + 1)?;
        let cx = &eager.null.env.cx;
        // Completions in the queue come first.
        check_eq!(
            eager.cq.wait(Notify::NextComp, 10_000, cx)?,
            cq::Wait::Ready
        );
        check_eq!(eager.cq.process(100), ENTRIES);
        wait(|| eager.cq.wait(Notify::NextComp, 0, cx) == Err(EOVERFLOW))?;
        eager.make_up(1)
    }
}
