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
        RecvCredits,
        SendCredits, //
    }, //
};

fn credits(initial: u32, limit: u32) -> Result<Arc<SendCredits>> {
    Arc::pin_init(SendCredits::new(initial, limit), GFP_KERNEL)
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
        check_eq!((credits.untold(), credits.grant(2)), (3, 2));
        check_eq!((credits.untold(), credits.grant(u32::MAX)), (1, 1));
        check_eq!(credits.grant(u32::MAX), 0);
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
        check_eq!(credits.grant(8), 1);
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
}
