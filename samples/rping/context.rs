// SPDX-License-Identifier: GPL-2.0

//! The polling contexts.
//!
//! All handlers of this module are atomic, so they run in every context. What differs is only who
//! polls: the RDMA core, or, for [`Direct`], this module.

use crate::{
    control::Control,
    reason::Reason, //
};
use core::str::FromStr;
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;

/// The number of completions that are taken at once.
const BUDGET: u32 = 16;

/// The time to sleep after a poll without completions, in microseconds.
const NAP: Delta = Delta::from_micros(20);

/// A polling context, chosen at run time.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Direct,
    Softirq,
    Workqueue,
    UnboundWorkqueue,
}

impl Kind {
    const ALL: [Self; 4] = [
        Self::Direct,
        Self::Softirq,
        Self::Workqueue,
        Self::UnboundWorkqueue,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => Direct::NAME,
            Self::Softirq => Softirq::NAME,
            Self::Workqueue => Workqueue::NAME,
            Self::UnboundWorkqueue => UnboundWorkqueue::NAME,
        }
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|kind| kind.name() == name).ok_or(EINVAL)
    }
}

/// A polling context, as a type.
pub(crate) trait Context: PollContext + Provides<Atomic> {
    /// The number of drains until all requests have completed: what handlers post
    /// in the first one is flushed after it, and where only the caller polls, a second one finds
    /// it.
    const DRAINS: usize = 1;

    /// Has the CQ of a connection polled until nothing of the connection is left.
    fn serve(_cq: Cq<Self>, _control: &Arc<Control>) -> Result
    where
        Self: Sized,
    {
        Ok(())
    }

    /// Waits for the end of a connection.
    fn wait(_cq: &Cq<Self>, control: &Control)
    where
        Self: Sized,
    {
        control.wait();
    }
}

impl Context for Softirq {}
impl Context for Workqueue {}
impl Context for UnboundWorkqueue {}

impl Context for Direct {
    const DRAINS: usize = 2;

    fn serve(cq: Cq<Self>, control: &Arc<Control>) -> Result {
        let watched = control.clone();
        control.instance.client.spawn(GFP_KERNEL, move |_cx| {
            while !watched.is_gone() {
                poll(&cq);
            }
        })
    }

    fn wait(cq: &Cq<Self>, control: &Control) {
        while control.over().is_none() {
            poll(cq);
            if current!().signal_pending() {
                control.end(Reason::Interrupted);
            }
        }
    }
}

fn poll(cq: &Cq<Direct>) {
    if cq.process(BUDGET) == 0 {
        fsleep(NAP);
    }
}

/// Calls a generic function for a context that is known at run time only.
macro_rules! in_context {
    ($kind:expr, $f:ident::<_>($($arg:expr),* $(,)?)) => {
        match $kind {
            $crate::context::Kind::Direct => $f::<::rdma::context::Direct>($($arg),*),
            $crate::context::Kind::Softirq => $f::<::rdma::context::Softirq>($($arg),*),
            $crate::context::Kind::Workqueue => $f::<::rdma::context::Workqueue>($($arg),*),
            $crate::context::Kind::UnboundWorkqueue => {
                $f::<::rdma::context::UnboundWorkqueue>($($arg),*)
            }
        }
    };
}
pub(crate) use in_context;
