// SPDX-License-Identifier: GPL-2.0

//! The device's own state: everything that its one lock protects.
//!
//! C objects hold indices into these tables, so that what the device does is safe code.

use crate::{
    cq::Cq,
    inject::{
        Arms,
        Creations,
        Deregs,
        Plan, //
    },
    memory::Mr,
    qp::Qp,
    recv::Srq,
    ring::Slots, //
};
use kernel::prelude::*;

pub(crate) const MAX_QP: usize = 16384;
pub(crate) const MAX_CQ: usize = 4096;
pub(crate) const MAX_SRQ: usize = 256;
pub(crate) const MAX_MR: usize = 4096;

pub(crate) struct Machine {
    pub(crate) cqs: Slots<Cq>,
    pub(crate) qps: Slots<Qp>,
    pub(crate) srqs: Slots<Srq>,
    pub(crate) mrs: Slots<Mr>,
    /// How often QP numbers have come round.
    pub(crate) generation: u32,
    /// Injections that any QP can meet.
    pub(crate) plan: Plan,
    pub(crate) creations: Creations,
    pub(crate) deregs: Deregs,
    pub(crate) arms: Arms,
    /// Whether the device is one of iWARP, as siw.
    pub(crate) iwarp: bool,
    /// It does not say how much one request can have.
    pub(crate) vague: bool,
    /// Whether the place of a request is free once it completes, as on rxe, not once its completion
    /// was polled.
    pub(crate) eager: bool,
}

impl Machine {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            cqs: Slots::new(MAX_CQ)?,
            qps: Slots::new(MAX_QP)?,
            srqs: Slots::new(MAX_SRQ)?,
            mrs: Slots::new(MAX_MR)?,
            generation: 0,
            plan: Plan::default(),
            creations: Creations::default(),
            deregs: Deregs::default(),
            arms: Arms::default(),
            iwarp: false,
            vague: false,
            eager: false,
        })
    }
}
