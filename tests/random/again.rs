// SPDX-License-Identifier: GPL-2.0

//! The step of connections that are lost, and made again (`Reconnect`).

use crate::{
    steps::Turn,
    tally::Life,
    way::Way,
    Random, //
};
use core::ops::ControlFlow;
use kernel::prelude::*;
use rdma::{
    prelude::*,
    session::{
        Backoff,
        Connector,
        Reconnect, //
    }, //
};

/// A connection, with what is reserved for its loss.
struct Line {
    reconnect: Reconnect,
    /// The attempt that is successful, if there are so many.
    successful: u32,
    /// The attempts keep this.
    life: Life,
}

impl Connector for Line {
    fn connect(
        self: ArcBorrow<'_, Self>,
        attempt: u32,
        _cx: &Sleepable,
    ) -> ControlFlow<Result, Error> {
        match attempt < self.successful {
            true => ControlFlow::Continue(ECONNREFUSED),
            false => ControlFlow::Break(Ok(())),
        }
    }

    fn ended(self: ArcBorrow<'_, Self>, _result: Result, _cx: &Sleepable) {}
}

/// Loses a connection a few times: whatever fails meanwhile, attempts to make it again begin.
pub(crate) fn reconnect<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let client = ClientRef::of::<Random>(t.cx)?;
    let backoff = Backoff {
        first_ms: t.rng.below(3),
        longest_ms: 4,
        attempts: 1 + t.rng.below(3),
    };
    let line = Line {
        reconnect: Reconnect::new(&client, backoff)?,
        successful: 1 + t.rng.below(4),
        life: t.life(),
    };
    let line = Arc::new(line, GFP_KERNEL)?;
    for _ in 0..1 + t.rng.below(3) {
        if line.reconnect.start(line.clone()).is_err() {
            line.life
                .wrong("a connection that is lost is not made again");
        }
    }
    if t.rng.once_in(2) {
        return Ok(());
    }
    line.reconnect.cancel_sync(t.cx)?;
    if line.reconnect.start(line.clone()) != Err(ECANCELED) {
        line.life.wrong("attempts begin that were cancelled");
    }
    Ok(())
}
