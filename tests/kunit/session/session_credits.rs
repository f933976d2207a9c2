// SPDX-License-Identifier: GPL-2.0

//! Credits: what one side may send to the other.

use crate::fixture::{
    wait,
    Counter,
    Env, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    session::{
        Credit,
        Grant,
        RecvCredits,
        SendCredits, //
    }, //
};

fn credits(initial: u32, limit: u32) -> Result<Arc<SendCredits>> {
    Arc::pin_init(SendCredits::new(initial, limit), GFP_KERNEL)
}

fn credits_with_reserve(initial: u32, limit: u32) -> Result<Arc<SendCredits>> {
    Arc::pin_init(SendCredits::with_reserve(initial, limit)?, GFP_KERNEL)
}

/// Uses a grant, and returns the number of its credits.
fn tell(grant: Grant<'_>) -> u32 {
    let told = grant.spend(|count| Ok::<_, Error>(count));
    told.unwrap_or(u32::MAX)
}

/// Returns the number of receives that the peer was not told of.
fn untold(credits: &RecvCredits) -> u32 {
    credits.grant(u32::MAX).count()
}

/// Uses a credit.
fn spend(credit: Credit<'_>) -> Result {
    credit.spend(|| Ok(()))
}

/// Waits for a credit in another thread, and counts if the result is this one.
fn wait_for(
    env: &Env,
    credits: &Arc<SendCredits>,
    expected: Result,
    count: &Arc<Counter>,
) -> Result {
    let (credits, count) = (credits.clone(), count.clone());
    env.client.spawn(GFP_KERNEL, move |cx| {
        if credits.wait(u32::MAX / 2, cx).and_then(spend) == expected {
            count.up();
        }
    })
}

/// One of two ends whose messages, those in `inbox`, are the numbers of credits that they grant.
struct End {
    send: Arc<SendCredits>,
    recv: RecvCredits,
    inbox: KVec<u32>,
    /// The number of its receives.
    limit: u32,
    /// The messages that it has yet to send, those that have come, and those that only granted
    /// credits.
    left: u32,
    came: u32,
    grants: u32,
}

impl End {
    /// Posts a message, if there is a credit: one of the ULP's, or one that only grants credits.
    /// Returns the number that it grants, if it was posted and not refused.
    fn post(&self, only_grants: bool, refused: bool) -> Result<Option<u32>> {
        let grant = self.recv.grant(u32::MAX);
        let credit = match only_grants {
            true => self.send.take_to_grant(&grant),
            false => self.send.take(),
        };
        match credit {
            Ok(credit) => {
                let post = |count| if refused { Err(()) } else { Ok(count) };
                Ok(credit.spend(|| grant.spend(post)).ok())
            }
            Err(EAGAIN) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Two ends, and the order of their steps.
struct Ends {
    ends: [End; 2],
    random: u32,
}

impl Ends {
    /// The number of messages that each end sends.
    const MESSAGES: u32 = 40;

    fn new(seed: u32) -> Result<Self> {
        // Each end has three to ten receives, those of the other one's limit.
        let recvs = [3 + seed % 8, 3 + seed / 8 % 8];
        let end = |own: u32, others: u32| {
            Ok::<_, Error>(End {
                send: credits_with_reserve(others, others)?,
                recv: RecvCredits::new(own, own),
                inbox: KVec::new(),
                limit: own,
                left: Self::MESSAGES,
                came: 0,
                grants: 0,
            })
        };
        Ok(Self {
            ends: [end(recvs[0], recvs[1])?, end(recvs[1], recvs[0])?],
            random: seed | 1,
        })
    }

    fn random(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random
    }

    /// Sends a message of an end, if it may. Some posts are refused at first. Returns whether it
    /// was sent.
    fn send(&mut self, from: usize, only_grants: bool) -> Result<bool> {
        if self.random() % 16 == 0 {
            self.ends[from].post(only_grants, true)?;
        }
        let Some(count) = self.ends[from].post(only_grants, false)? else {
            return Ok(false);
        };
        self.ends[1 - from].inbox.push(count, GFP_KERNEL)?;
        Ok(true)
    }

    /// Handles the first message of an end. Returns `false` if there is none.
    fn handle(&mut self, at: usize) -> Result<bool> {
        let end = &mut self.ends[at];
        let Ok(grant) = end.inbox.remove(0) else {
            return Ok(false);
        };
        end.recv.received()?;
        end.send.give(grant)?;
        end.recv.posted(1)?;
        end.came += 1;
        if end.recv.is_due() && self.send(at, true)? {
            let end = &mut self.ends[at];
            end.grants += 1;
            // Each grants more than half of the receives, those of messages that have come.
            check!(end.grants * (end.limit / 2 + 1) <= end.came);
        }
        Ok(true)
    }

    /// Runs until no step is possible, and looks whether all is done.
    fn run(&mut self) -> Result {
        let mut idle = 0;
        while idle < 64 {
            let random = self.random();
            let (at, sends) = ((random >> 8) as usize % 2, random >> 16 & 1 == 0);
            let stepped = match sends {
                true if self.ends[at].left == 0 => false,
                true => self.send(at, false)?,
                false => self.handle(at)?,
            };
            if sends && stepped {
                self.ends[at].left -= 1;
            }
            idle = if stepped { 0 } else { idle + 1 };
        }
        for end in &self.ends {
            check_eq!((end.left, end.inbox.len()), (0, 0));
        }
        Ok(())
    }
}

#[kunit_tests(rdma_session_credits)]
mod tests {
    use super::*;

    #[test]
    fn credits_are_taken_and_given() -> Result {
        let credits = credits(2, 3)?;
        spend(credits.take()?)?;
        spend(credits.take()?)?;
        check_eq!(credits.take().err(), Some(EAGAIN));
        credits.give(3)?;
        check_eq!(credits.available(), 3);
        Ok(())
    }

    /// A credit whose message was not posted is there again.
    #[test]
    fn credit_that_is_not_spent_comes_back() -> Result {
        let credits = credits(1, 1)?;
        drop(credits.take()?);
        check_eq!(credits.take()?.spend(|| Err::<(), _>(ENOMEM)), Err(ENOMEM));
        check_eq!(credits.available(), 1);
        spend(credits.take()?)?;
        check_eq!(credits.available(), 0);
        Ok(())
    }

    #[test]
    fn peer_that_gives_too_many_is_found() -> Result {
        let credits = credits(1, 4)?;
        for too_many in [4, 5, i32::MAX as u32, 1 << 31, u32::MAX] {
            check_err!(credits.give(too_many), EPROTO);
            check_eq!(credits.available(), 1);
        }
        credits.give(3)?;
        check_err!(credits.give(1), EPROTO);
        credits.give(0)?;
        Ok(())
    }

    #[test]
    fn greatest_limit_does_not_wrap() -> Result {
        let credits = credits(u32::MAX, u32::MAX)?;
        check_eq!(credits.available(), i32::MAX as u32);
        check_err!(credits.give(1), EPROTO);
        Ok(())
    }

    #[test]
    fn waiting_ends_by_time() -> Result {
        let (env, credits) = (Env::new()?, credits(0, 1)?);
        check_eq!(credits.wait(1, &env.cx).err(), Some(ETIMEDOUT));
        check_eq!(credits.wait(0, &env.cx).err(), Some(ETIMEDOUT));
        credits.give(1)?;
        spend(credits.wait(0, &env.cx)?)?;
        Ok(())
    }

    #[test]
    fn each_credit_ends_one_wait() -> Result {
        let (env, credits, count) = (Env::new()?, credits(0, 8)?, Counter::new()?);
        for _ in 0..4 {
            wait_for(&env, &credits, Ok(()), &count)?;
        }
        for n in 1..=4 {
            check!(count.get() < n);
            credits.give(1)?;
            wait(|| count.get() == n)?;
        }
        check_eq!(credits.available(), 0);
        Ok(())
    }

    /// The end of the connection wakes all, and those who come later.
    #[test]
    fn closing_fails_all_waits() -> Result {
        let (env, credits, count) = (Env::new()?, credits(0, 8)?, Counter::new()?);
        for _ in 0..4 {
            wait_for(&env, &credits, Err(ENOTCONN), &count)?;
        }
        credits.close(ENOTCONN);
        credits.close(EIO);
        wait(|| count.get() == 4)?;
        check_eq!(credits.take().err(), Some(ENOTCONN));
        check_eq!(credits.wait(1, &env.cx).err(), Some(ENOTCONN));
        check_err!(credits.give(1), ENOTCONN);
        check_eq!(credits.available(), 0);
        Ok(())
    }

    /// The error is that of the ULP, also if it is the one of `take()` where there is no credit.
    #[test]
    fn closing_wakes_with_any_error() -> Result {
        let (env, credits, count) = (Env::new()?, credits(0, 8)?, Counter::new()?);
        wait_for(&env, &credits, Err(EAGAIN), &count)?;
        // The thread waits, or will look.
        check_eq!(credits.wait(10, &env.cx).err(), Some(ETIMEDOUT));
        credits.close(EAGAIN);
        wait(|| count.get() == 1)?;
        check_eq!(credits.wait(u32::MAX / 2, &env.cx).err(), Some(EAGAIN));
        Ok(())
    }

    /// Not with a credit that was taken before, either.
    #[test]
    fn closing_is_for_ever() -> Result {
        let credits = credits(1, 1)?;
        let credit = credits.take()?;
        credits.close(EIO);
        drop(credit);
        check_eq!(credits.take().err(), Some(EIO));
        Ok(())
    }

    #[test]
    fn receives_are_granted_once() -> Result {
        let credits = RecvCredits::new(2, 6);
        credits.received()?;
        credits.posted(3)?;
        check_eq!((untold(&credits), tell(credits.grant(2))), (3, 2));
        check_eq!((untold(&credits), tell(credits.grant(u32::MAX))), (1, 1));
        check_eq!(tell(credits.grant(u32::MAX)), 0);
        for _ in 0..4 {
            credits.received()?;
        }
        Ok(())
    }

    /// A message that the peer had no credit for.
    #[test]
    fn message_without_credit_is_found() -> Result {
        let credits = RecvCredits::new(1, 2);
        credits.received()?;
        check_err!(credits.received(), EPROTO);
        credits.posted(1)?;
        // The peer does not know of it.
        check_err!(credits.received(), EPROTO);
        check_eq!(tell(credits.grant(8)), 1);
        credits.received()
    }

    #[test]
    fn receives_beyond_the_limit_are_refused() -> Result {
        let credits = RecvCredits::new(9, 3);
        check_err!(credits.posted(1), EOVERFLOW);
        credits.received()?;
        check_err!(credits.posted(u32::MAX), EOVERFLOW);
        credits.posted(1)?;
        check_err!(credits.posted(1), EOVERFLOW);
        let most = RecvCredits::new(u32::MAX, u32::MAX);
        check_err!(most.posted(1), EOVERFLOW);
        Ok(())
    }

    /// The message was refused: the next one grants its credits.
    #[test]
    fn grant_that_is_not_sent_is_taken_back() -> Result {
        let credits = RecvCredits::new(4, 4);
        for _ in 0..3 {
            credits.received()?;
            credits.posted(1)?;
        }
        let refused = credits.grant(8).spend(|count| {
            check_eq!(count, 3);
            // The peer may answer before the post has returned.
            credits.received()?;
            credits.posted(1)?;
            Err::<(), _>(ENOMEM)
        });
        check_err!(refused, ENOMEM);
        check_eq!(untold(&credits), 4);
        drop(credits.grant(2));
        check_eq!(untold(&credits), 4);
        check_err!(credits.received(), EPROTO);
        check_eq!(tell(credits.grant(8)), 4);
        Ok(())
    }

    /// A peer that uses credits before it was told of them has no more by their end.
    #[test]
    fn credits_that_were_used_are_not_taken_back() -> Result {
        let credits = RecvCredits::new(2, 2);
        for _ in 0..2 {
            credits.received()?;
            credits.posted(1)?;
        }
        let grant = credits.grant(2);
        credits.received()?;
        credits.received()?;
        drop(grant);
        check_eq!(untold(&credits), 0);
        credits.posted(2)?;
        check_err!(credits.posted(1), EOVERFLOW);
        Ok(())
    }

    /// The last credit is for a message that grants some.
    #[test]
    fn last_credit_is_reserved() -> Result {
        let (send, recv) = (credits_with_reserve(3, 3)?, RecvCredits::new(2, 3));
        check_eq!(send.available(), 2);
        spend(send.take()?)?;
        spend(send.take()?)?;
        check_eq!(send.available(), 0);
        check_eq!(send.take().err(), Some(EAGAIN));
        let env = Env::new()?;
        check_eq!(send.wait(1, &env.cx).err(), Some(ETIMEDOUT));
        let grant = recv.grant(8);
        check_eq!(send.take_to_grant(&grant).err(), Some(EAGAIN));
        drop(grant);
        recv.posted(1)?;
        let grant = recv.grant(8);
        spend(send.take_to_grant(&grant)?)?;
        check_eq!(send.take_to_grant(&grant).err(), Some(EAGAIN));
        send.give(1)?;
        check_eq!(send.take().err(), Some(EAGAIN));
        send.give(1)?;
        spend(send.take()?)?;
        // That one is still there.
        spend(send.take_to_grant(&grant)?)?;
        send.close(ENOTCONN);
        check_eq!(send.take_to_grant(&grant).err(), Some(ENOTCONN));
        Ok(())
    }

    #[test]
    fn reserve_needs_three_credits() -> Result {
        check_err!(credits_with_reserve(2, 2), EINVAL);
        check_err!(credits_with_reserve(8, 0), EINVAL);
        check_eq!(credits_with_reserve(8, 3)?.available(), 2);
        check_eq!(credits_with_reserve(0, 3)?.available(), 0);
        Ok(())
    }

    /// Two ends of any depth, of which each sends as much as it may, in any order of sending and
    /// of handling what has come, until all messages have gone; and then they are silent.
    #[test]
    fn two_ends_that_send_never_stop() -> Result {
        for seed in 0..200 {
            Ends::new(seed)?.run().inspect_err(|_| {
                pr_err!("FAILED with seed {seed}\n");
            })?;
        }
        Ok(())
    }
}
