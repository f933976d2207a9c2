// SPDX-License-Identifier: GPL-2.0

//! MRs of a device that does not let go of them.

use crate::{
    check::expect,
    fixture::{
        begin_removal,
        both,
        wait,
        Inbox,
        Null,
        RegOwner, //
    }, //
};
use core::mem::ManuallyDrop;
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;
use rdma_null::Injection;

const LEAKED: &str = "an MR with its memory could not be destroyed (-5); it is leaked";

/// The device still writes to memory, which must be there.
fn written(null: &Null<Softirq>, remote: Remote) -> Result {
    let sent = Inbox::new()?;
    let message = null.env.message(&sent, &[9; 8])?;
    null.a
        .post_send(message, |m| Ok(SendWr::rdma_write([m.buf.whole()], remote)))?;
    null.one(&sent)?.ok()?;
    Ok(())
}

#[kunit_tests(rdma_null_mr)]
mod tests {
    use super::*;

    #[test]
    fn all_that_are_dropped_at_once_are_deregistered() -> Result {
        let null = Null::<Softirq>::new()?;
        let before = null.dev.objects()[3];
        for _ in 0..3 {
            let mut mrs = KVec::new();
            for _ in 0..200 {
                mrs.push(Mr::alloc(&null.env.pd, 1, &null.env.cx)?, GFP_KERNEL)?;
            }
            drop(mrs);
        }
        wait(|| null.dev.objects()[3] == before)
    }

    #[test]
    fn stays_with_its_memory_if_it_cannot_be_deregistered() -> Result {
        let null = Null::<Softirq>::new()?;
        let mr = Mr::alloc(&null.env.pd, 1, &null.env.cx)?;
        // SAFETY: This is dropped only when the other one was, and is leaked.
        let leaked = ManuallyDrop::new(unsafe { core::ptr::read(&mr) });
        let memory = SgBuf::<Bidirectional>::alloc(&null.env.pd, 8, &null.env.cx)?;
        let region = Region::map(mr, memory)?.into_shared();
        let region = Arc::new(region, GFP_KERNEL)?;
        let owner = RegOwner::new(&region)?;
        let registered = owner.registered.clone();
        let remote = null.b.post_send(owner, |o| Ok(both(&*o.region)))?;
        null.wait(|| registered.get() == 1)?;

        null.dev.inject(Injection::Dereg { errno: 5, count: 1 })?;
        expect(1, LEAKED);
        drop(region);
        wait(|| null.dev.deregs() == 0)?;
        let (dev, client) = (null.dev.clone(), null.env.client.clone());
        let (written, mrs) = (written(&null, remote), dev.objects()[3]);
        drop(null);
        begin_removal(&dev, &client)?;
        fsleep(Delta::from_millis(30));
        let early = dev.is_removed();
        // It would be there for ever. The device lets it go now, and the test wants its memory
        // back.
        drop(ManuallyDrop::into_inner(leaked));
        wait(|| dev.is_removed())?;
        written?;
        check_eq!((mrs, early), (1, false));
        check_eq!(dev.objects(), [0; 4]);
        Ok(())
    }
}
