// SPDX-License-Identifier: GPL-2.0

//! Completion queues.

use crate::{
    irq::Irq,
    machine::Machine,
    ring::Ring, //
};
use core::{
    mem::ManuallyDrop,
    ptr::NonNull, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The number of completion vectors.
pub(crate) const VECTORS: i32 = 4;

/// What stands in every field of a completion that is not valid, so that nobody relies on it.
pub(crate) const POISON: u32 = 0xdead_beef;

/// The address of a QP, for completions and events.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct QpPtr(pub(crate) NonNull<bindings::ib_qp>);

// SAFETY: It is an address, which only what is unsafe anyway may follow.
unsafe impl Send for QpPtr {}

/// What a completion gives back.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Retires {
    /// Nothing: a duplicate.
    #[default]
    Nothing,
    /// This many places of the send queue.
    Sends(u32),
    /// A place of the receive queue.
    Recv,
    /// A place of the SRQ at this index.
    SrqRecv(usize),
}

/// A completion.
#[derive(Clone, Copy, Default)]
pub(crate) struct Entry {
    pub(crate) wr_id: u64,
    pub(crate) qp: Option<QpPtr>,
    /// The index of the QP.
    pub(crate) index: usize,
    pub(crate) retires: Retires,
    pub(crate) status: u32,
    pub(crate) vendor_err: u32,
    pub(crate) opcode: u32,
    pub(crate) byte_len: u32,
    /// Immediate data, as they came, or an invalidated key.
    pub(crate) ex: u32,
    pub(crate) src_qp: u32,
    pub(crate) flags: u32,
    pub(crate) solicited: bool,
}

impl Entry {
    fn is_recv(&self) -> bool {
        self.opcode & bindings::ib_wc_opcode_IB_WC_RECV != 0
    }

    /// Makes the C completion. What ibv_poll_cq(3) calls invalid is poison.
    #[inline]
    fn into_wc(self) -> bindings::ib_wc {
        let success = self.status == bindings::ib_wc_status_IB_WC_SUCCESS;
        let valid = |valid: bool, value: u32| if success && valid { value } else { POISON };
        let has_length = self.is_recv() || self.opcode == bindings::ib_wc_opcode_IB_WC_RDMA_READ;
        bindings::ib_wc {
            __bindgen_anon_1: bindings::ib_wc__bindgen_ty_1 {
                wr_id: ManuallyDrop::new(self.wr_id),
            },
            status: self.status,
            opcode: valid(true, self.opcode),
            vendor_err: if success { POISON } else { self.vendor_err },
            byte_len: valid(has_length, self.byte_len),
            // Where C finds the QP number, which is always valid.
            qp: self.qp.map_or(core::ptr::null_mut(), |qp| qp.0.as_ptr()),
            ex: bindings::ib_wc__bindgen_ty_2 {
                imm_data: ManuallyDrop::new(valid(self.flags != 0, self.ex)),
            },
            src_qp: valid(self.is_recv(), self.src_qp),
            slid: POISON,
            wc_flags: valid(true, self.flags) as c_int,
            pkey_index: if success { 0 } else { 0xdead },
            sl: 0xde,
            dlid_path_bits: 0xde,
            port_num: valid(true, 1),
            smac: [0xde; 6],
            vlan_id: 0xdead,
            network_hdr_type: 0xde,
        }
    }
}

/// When the consumer wants to be told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Next,
}

pub(crate) struct Cq {
    ring: Ring<Entry>,
    armed: Armed,
    irq: Irq,
    dead: bool,
}

impl Cq {
    pub(crate) fn new(entries: usize, irq: Irq) -> Result<Self> {
        Ok(Self {
            ring: Ring::new(entries)?,
            armed: Armed::No,
            irq,
            dead: false,
        })
    }

    /// Adds a completion. Where there is no room it is lost, and the CQ has failed.
    #[inline]
    pub(crate) fn push(&mut self, entry: Entry) {
        if self.ring.push(entry).is_err() {
            return self.fail();
        }
        let tell = match self.armed {
            Armed::No => false,
            Armed::Next => true,
            Armed::Solicited => entry.solicited || entry.status != 0,
        };
        if tell && !self.dead {
            self.armed = Armed::No;
            self.irq.complete();
        }
    }

    /// Raises `IB_EVENT_CQ_ERR`.
    #[cold]
    pub(crate) fn fail(&self) {
        if !self.dead {
            self.irq.fail();
        }
    }

    /// Asks for the next completion to be told of; says whether there are some already.
    pub(crate) fn arm(&mut self, solicited: bool) -> bool {
        match (solicited, self.armed) {
            (true, Armed::No) => self.armed = Armed::Solicited,
            (true, _) => {}
            (false, _) => self.armed = Armed::Next,
        }
        self.ring.len() != 0
    }

    /// Tells the consumer of nothing from now on.
    pub(crate) fn kill(&mut self) {
        self.dead = true;
    }

    /// Forgets what is left of a QP.
    pub(crate) fn purge(&mut self, index: usize) {
        self.ring.retain(|entry| entry.index != index);
    }

    pub(crate) fn len(&self) -> usize {
        self.ring.len()
    }
}

impl Machine {
    /// Takes the first completion of a CQ. With that the place of its request is free again.
    #[inline]
    pub(crate) fn poll(&mut self, cq: usize) -> Option<bindings::ib_wc> {
        let (_, entry) = self.cqs.get_mut(cq)?.ring.pop()?;
        match entry.retires {
            Retires::Nothing => {}
            Retires::SrqRecv(srq) => {
                if let Some(srq) = self.srqs.get_mut(srq) {
                    srq.queue.retire();
                }
            }
            Retires::Sends(n) => {
                if let Some(qp) = self.qps.get_mut(entry.index) {
                    qp.sends -= n.min(qp.sends);
                }
            }
            Retires::Recv => {
                if let Some(qp) = self.qps.get_mut(entry.index) {
                    qp.recvs.retire();
                }
            }
        }
        Some(entry.into_wc())
    }
}
