// SPDX-License-Identifier: GPL-2.0

//! Completions that come late, in another order, or not at all.

use crate::fixture::{
    order,
    wait,
    Counter,
    Inbox,
    Null, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

const ALL: u32 = u32::MAX;

fn release(count: u32, reversed: bool) -> Injection {
    Injection::Release { count, reversed }
}

/// Sends `count` messages, each with its number, of which the first `held` are held.
fn held(null: &Null<Softirq>, sent: &Arc<Inbox>, count: u8, held: u32) -> Result {
    null.disconnect()?;
    null.inject(Injection::Hold { count: held })?;
    for i in 0..count {
        null.send(sent, &[i])?;
    }
    Ok(())
}

#[kunit_tests(rdma_null_order)]
mod tests {
    use super::*;

    #[test]
    fn held_ones_come_when_released() -> Result {
        let (null, sent) = (Null::new()?, Inbox::new()?);
        held(&null, &sent, 4, ALL)?;
        check_eq!(null.dev.held(null.a.num())?, 4);
        check_eq!(sent.len() + sent.dropped() as usize, 0);
        null.inject(release(ALL, false))?;
        check_eq!(order(null.take(&sent, 4)?)?[..], [0, 1, 2, 3]);
        check_eq!(null.dev.held(null.a.num())?, 0);
        Ok(())
    }

    #[test]
    fn release_ends_the_holding() -> Result {
        let (null, sent) = (Null::new()?, Inbox::new()?);
        held(&null, &sent, 1, ALL)?;
        null.inject(release(ALL, false))?;
        null.send(&sent, b"x")?;
        null.take(&sent, 2)?;
        Ok(())
    }

    #[test]
    fn some_are_released() -> Result {
        let (null, sent) = (Null::new()?, Inbox::new()?);
        held(&null, &sent, 5, ALL)?;
        null.inject(release(2, false))?;
        check_eq!(order(null.take(&sent, 2)?)?[..], [0, 1]);
        check_eq!(null.dev.held(null.a.num())?, 3);
        null.inject(release(ALL, false))?;
        check_eq!(order(null.take(&sent, 3)?)?[..], [2, 3, 4]);
        Ok(())
    }

    #[test]
    fn reversed() -> Result {
        let (null, sent) = (Null::new()?, Inbox::new()?);
        held(&null, &sent, 8, ALL)?;
        null.inject(release(ALL, true))?;
        check_eq!(order(null.take(&sent, 8)?)?[..], [7, 6, 5, 4, 3, 2, 1, 0]);
        Ok(())
    }

    #[test]
    fn later_ones_pass() -> Result {
        let (null, sent) = (Null::new()?, Inbox::new()?);
        held(&null, &sent, 4, 2)?;
        check_eq!(order(null.take(&sent, 2)?)?[..], [2, 3]);
        null.inject(release(ALL, false))?;
        check_eq!(order(null.take(&sent, 2)?)?[..], [0, 1]);
        Ok(())
    }

    #[test]
    fn held_ones_keep_their_place_in_the_queue() -> Result {
        let (null, sent) = (Null::new()?, Inbox::new()?);
        held(&null, &sent, 9, ALL)?;
        check_err!(null.send(&sent, b"x"), ENOMEM);
        null.inject(release(1, false))?;
        null.take(&sent, 1)?;
        null.inject(Injection::Hold { count: ALL })?;
        null.send(&sent, &[9])?;
        check_err!(null.send(&sent, b"x"), ENOMEM);
        null.inject(release(ALL, false))?;
        null.take(&sent, 9)?;
        Ok(())
    }

    #[test]
    fn receives_can_be_held_too() -> Result {
        let (null, sent, received) = (Null::<Workqueue>::new()?, Inbox::new()?, Inbox::new()?);
        null.recv(&received, 3)?;
        let num = null.b.num();
        null.dev.inject_qp(num, Injection::Hold { count: ALL })?;
        null.send(&sent, b"abc")?;
        null.one(&sent)?.ok()?;
        check_eq!(null.dev.held(num)?, 1);
        check_eq!(received.len(), 0);
        null.dev.inject_qp(num, release(ALL, false))?;
        check_eq!(&null.one(&received)?.bytes()?[..], b"abc");
        Ok(())
    }

    #[test]
    fn all_qps_of_a_device_can_be_held() -> Result {
        let (null, sent, received) = (Null::<Direct>::new()?, Inbox::new()?, Inbox::new()?);
        null.recv(&received, 3)?;
        null.dev.inject(Injection::Hold { count: ALL })?;
        null.send(&sent, b"abc")?;
        null.cq.process(16);
        check_eq!(sent.len() + received.len(), 0);
        null.dev.inject(release(ALL, false))?;
        null.one(&sent)?.ok()?;
        null.one(&received)?.ok()?;
        Ok(())
    }

    #[test]
    fn drain_waits_for_a_slow_device() -> Result {
        let (null, sent) = (Null::new()?, Inbox::new()?);
        held(&null, &sent, 4, ALL)?;
        let (slow, num) = (null.dev.clone(), null.a.num());
        let released = Counter::new()?;
        let up = released.clone();
        null.env.client.spawn(GFP_KERNEL, move |_| {
            // Four, and both markers of the drain.
            let _ = wait(|| slow.held(num) == Ok(6));
            let _ = slow.inject_qp(num, release(ALL, false));
            // The last handle unregisters the device, which is nothing for this work item.
            drop(slow);
            up.up();
        })?;
        null.a.drain(&null.env.cx)?;
        check_eq!(sent.len(), 4);
        check!(sent.take().iter().all(|completed| completed.ok().is_ok()));
        wait(|| released.get() == 1)
    }
}
