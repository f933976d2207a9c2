// SPDX-License-Identifier: GPL-2.0

//! Waiting for MADs, by one thread and by many.

use crate::fixture::{
    message,
    own_class,
    wait,
    Counter,
    Mads,
    BACKLOG,
    LONG_MS, //
};
use kernel::prelude::*;
use rdma::{
    mad::Method,
    prelude::*, //
};

const THREADS: u32 = 4;
const EACH: u32 = 8;

/// Waits until the port has received what was sent before: MADs come in order.
fn all_came() -> Result {
    let later = Mads::new()?;
    later.tell(0)?;
    later.told()?;
    Ok(())
}

#[kunit_tests(rdma_mad_wait)]
mod tests {
    use super::*;

    #[test]
    fn zero_timeout_does_not_wait() -> Result {
        let mads = Mads::new()?;
        check_err!(mads.server.recv(Some(0), &mads.env.cx), ETIMEDOUT);
        mads.tell(3)?;
        wait(|| mads.server.recv(Some(0), &mads.env.cx).is_ok())?;
        check_err!(mads.server.recv(Some(0), &mads.env.cx), ETIMEDOUT);
        Ok(())
    }

    #[test]
    fn nothing_comes_in_time() -> Result {
        let mads = Mads::new()?;
        check_err!(mads.server.recv(Some(20), &mads.env.cx), ETIMEDOUT);
        mads.tell(1)?;
        check_eq!(mads.told()?, 1);
        Ok(())
    }

    #[test]
    fn late_reply_is_dropped() -> Result {
        let (mads, cx) = (Mads::new()?, Sleepable::current()?);
        let asked = message(Method::GET, 0, &[]);
        check_err!(
            mads.client.request(&mads.peer, &asked, 20, 0, &cx),
            ETIMEDOUT
        );
        let mad = mads.server.recv(Some(LONG_MS), &cx)?;
        mads.server.reply(&mad, 0, &[], &cx)?;
        check_err!(mads.client.recv(Some(50), &cx), ETIMEDOUT);
        mads.echo()?;
        mads.ask(&[])?;
        Ok(())
    }

    #[test]
    fn in_order() -> Result {
        let mads = Mads::new()?;
        for number in 0..BACKLOG as u32 {
            mads.tell(number)?;
        }
        for number in 0..BACKLOG as u32 {
            check_eq!(mads.told()?, number);
        }
        Ok(())
    }

    #[test]
    fn each_mad_goes_to_one_waiter() -> Result {
        let (mads, ended) = (Mads::new()?, Counter::new()?);
        let mut counts = KVec::new();
        for _ in 0..THREADS * EACH {
            counts.push(Counter::new()?, GFP_KERNEL)?;
        }
        let counts = Arc::new(counts, GFP_KERNEL)?;
        for _ in 0..THREADS {
            let (server, counts, ended) = (mads.server.clone(), counts.clone(), ended.clone());
            mads.env.client.spawn(GFP_KERNEL, move |cx| {
                while let Ok(mad) = server.recv(None, cx) {
                    match counts.get(mad.header().attr_mod.get() as usize) {
                        Some(count) => count.up(),
                        None => 0,
                    };
                }
                ended.up();
            })?;
        }
        for number in 0..THREADS * EACH {
            mads.tell(number)?;
        }
        wait(|| counts.iter().all(|count| count.get() > 0))?;
        check!(counts.iter().all(|count| count.get() == 1));
        mads.server.stop(&mads.env.cx)?;
        wait(|| ended.get() == THREADS as i32)
    }

    #[test]
    fn each_waiter_gets_its_own_reply() -> Result {
        let (mads, right) = (Arc::new(Mads::new()?, GFP_KERNEL)?, Counter::new()?);
        mads.echo()?;
        mads.echo()?;
        let ended = Counter::new()?;
        for thread in 0..THREADS {
            let (client, peer) = (mads.client.clone(), mads.peer.clone());
            let (right, ended) = (right.clone(), ended.clone());
            mads.env.client.spawn(GFP_KERNEL, move |cx| {
                for number in 0..EACH {
                    let payload = (thread * EACH + number).to_be_bytes();
                    let asked = message(Method::GET, 0, &payload);
                    match client.request(&peer, &asked, LONG_MS, 0, cx) {
                        Ok(reply) if reply.payload().starts_with(&payload) => right.up(),
                        Ok(_) => 0,
                        Err(e) => {
                            pr_err!("FAILED: request {e:?}\n");
                            0
                        }
                    };
                }
                ended.up();
            })?;
        }
        wait(|| ended.get() == THREADS as i32)?;
        check_eq!(right.get(), (THREADS * EACH) as i32);
        Ok(())
    }

    #[test]
    fn flood_is_dropped() -> Result {
        const ROOM: u32 = 4;

        let mads = Mads::with(own_class(), ROOM as usize)?;
        for number in 0..5 * ROOM {
            mads.tell(number)?;
        }
        all_came()?;
        for number in 0..ROOM {
            check_eq!(mads.told()?, number);
        }
        check_err!(mads.server.recv(Some(0), &mads.env.cx), ETIMEDOUT);
        mads.tell(99)?;
        check_eq!(mads.told()?, 99);
        Ok(())
    }

    #[test]
    fn no_backlog_receives_nothing() -> Result {
        let mads = Mads::with(own_class(), 0)?;
        mads.tell(0)?;
        all_came()?;
        check_err!(mads.server.recv(Some(0), &mads.env.cx), ETIMEDOUT);
        Ok(())
    }

    #[test]
    fn many_requests_wait_at_once() -> Result {
        let (mads, ended) = (Mads::new()?, Counter::new()?);
        for _ in 0..THREADS {
            let (client, peer, ended) = (mads.client.clone(), mads.peer.clone(), ended.clone());
            mads.env.client.spawn(GFP_KERNEL, move |cx| {
                let asked = message(Method::GET, 0, &[]);
                if client.request(&peer, &asked, LONG_MS, 0, cx).is_ok() {
                    ended.up();
                }
            })?;
        }
        // All ask before any is answered; the last one is answered first.
        let mut asked = KVec::new();
        for _ in 0..THREADS {
            asked.push(mads.server.recv(Some(LONG_MS), &mads.env.cx)?, GFP_KERNEL)?;
        }
        check_eq!(ended.get(), 0);
        while let Some(mad) = asked.pop() {
            mads.server.reply(&mad, 0, &[], &mads.env.cx)?;
        }
        wait(|| ended.get() == THREADS as i32)
    }
}
