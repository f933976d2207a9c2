// SPDX-License-Identifier: GPL-2.0

//! The polling contexts.
//!
//! All handlers of this module are atomic, so they run in every context, and are compiled once.

use core::str::FromStr;
use kernel::{
    fmt,
    prelude::*, //
};
use rdma::prelude::*;

/// A polling context, chosen at run time.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    name: &'static str,
    /// Allocates a CQ with so many entries.
    pub(crate) alloc_cq: fn(&Device, u32, &Sleepable) -> Result<Cq<AnyContext>>,
}

impl Kind {
    pub(crate) const fn of<C: FixedContext>() -> Self {
        Self {
            name: C::NAME,
            alloc_cq: |dev, entries, cx| Ok(Cq::<C>::alloc_any(dev, entries, cx)?.into_any()),
        }
    }

    /// Returns whether this module polls, and not the RDMA core.
    pub(crate) fn is_direct(&self) -> bool {
        self.name == Direct::NAME
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [
            Self::of::<Direct>(),
            Self::of::<Softirq>(),
            Self::of::<Workqueue>(),
            Self::of::<UnboundWorkqueue>(),
        ];
        all.into_iter().find(|kind| kind.name == name).ok_or(EINVAL)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
