// SPDX-License-Identifier: GPL-2.0

//! The polling contexts.
//!
//! All handlers of this module are atomic, so they run in every context. Only the poller differs:
//! the RDMA core or, for [`Direct`], this module.

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
use rdma::{
    cq,
    prelude::*,
    qp, //
};

/// What a connection is compiled for: its context is chosen at run time.
pub(crate) type Cq = cq::Cq<AnyContext>;
pub(crate) type Qp = qp::Qp<AnyContext>;

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

impl Kind {
    /// Allocates the CQ of a connection.
    pub(crate) fn alloc_cq(self, dev: &Device, entries: u32, cx: &Sleepable) -> Result<Cq> {
        Ok(match self {
            Self::Direct => cq::Cq::<Direct>::alloc_any(dev, entries, cx)?.into_any(),
            Self::Softirq => cq::Cq::<Softirq>::alloc_any(dev, entries, cx)?.into_any(),
            Self::Workqueue => cq::Cq::<Workqueue>::alloc_any(dev, entries, cx)?.into_any(),
            Self::UnboundWorkqueue => {
                cq::Cq::<UnboundWorkqueue>::alloc_any(dev, entries, cx)?.into_any()
            }
        })
    }

    /// Has the CQ of a connection polled until nothing of the connection is left.
    pub(crate) fn serve(self, cq: Cq, control: &Arc<Control>) -> Result {
        let Self::Direct = self else {
            return Ok(());
        };
        let watched = control.clone();
        control.instance.client.spawn(GFP_KERNEL, move |_cx| {
            while !watched.is_gone() {
                poll(&cq);
            }
        })
    }

    /// Waits for the end of a connection.
    pub(crate) fn wait(self, cq: &Cq, control: &Control) {
        let Self::Direct = self else {
            return control.wait();
        };
        while control.over().is_none() {
            poll(cq);
            if current!().signal_pending() {
                control.end(Reason::Interrupted);
            }
        }
    }
}

fn poll(cq: &Cq) {
    if cq.process(BUDGET) == 0 {
        fsleep(NAP);
    }
}
