// SPDX-License-Identifier: GPL-2.0

//! Completion queues.

use crate::{
    irq::Irq,
    machine::Machine,
    qp::Qp,
    recv::Srq,
    ring::{
        Ring,
        Slots, //
    }, //
};
use core::{
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr::NonNull, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The number of completion vectors.
pub(crate) const VECTORS: i32 = 4;

/// What stands in every field of a completion that is not valid, so that nobody relies on it.
/// Without debug assertions there may be something older instead.
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
    /// Whether it is that of a send that was done, and nothing but its opcode is valid.
    pub(crate) plain: bool,
}

/// The completion of a send that was done, but for the request, the opcode and the QP. What
/// ibv_poll_cq(3) calls invalid is poison.
const DONE: bindings::ib_wc = bindings::ib_wc {
    __bindgen_anon_1: bindings::ib_wc__bindgen_ty_1 {
        wr_id: ManuallyDrop::new(0),
    },
    status: bindings::ib_wc_status_IB_WC_SUCCESS,
    opcode: 0,
    vendor_err: POISON,
    byte_len: POISON,
    qp: core::ptr::null_mut(),
    ex: bindings::ib_wc__bindgen_ty_2 {
        imm_data: ManuallyDrop::new(POISON),
    },
    src_qp: POISON,
    slid: POISON,
    wc_flags: 0,
    pkey_index: 0,
    sl: 0xde,
    dlid_path_bits: 0xde,
    port_num: 1,
    smac: [0xde; 6],
    vlan_id: 0xdead,
    network_hdr_type: 0xde,
};

impl Entry {
    fn is_recv(&self) -> bool {
        self.opcode & bindings::ib_wc_opcode_IB_WC_RECV != 0
    }

    /// Fills in the C completion.
    #[inline]
    fn fill(&self, wc: &mut MaybeUninit<bindings::ib_wc>) {
        let request = bindings::ib_wc__bindgen_ty_1 {
            wr_id: ManuallyDrop::new(self.wr_id),
        };
        // Where C finds the QP number, which is always valid.
        let qp = self.qp.map_or(core::ptr::null_mut(), |qp| qp.0.as_ptr());
        if self.plain && !cfg!(debug_assertions) {
            let wc = wc.as_mut_ptr();
            // SAFETY: It points to memory for a completion. As most drivers do, this leaves there
            // what was there before wherever nothing is valid.
            unsafe {
                (*wc).__bindgen_anon_1 = request;
                (*wc).status = bindings::ib_wc_status_IB_WC_SUCCESS;
                (*wc).opcode = self.opcode;
                (*wc).qp = qp;
                (*wc).wc_flags = 0;
            }
            return;
        }
        let wc = wc.write(bindings::ib_wc {
            __bindgen_anon_1: request,
            opcode: self.opcode,
            qp,
            ..DONE
        });
        if !self.plain {
            self.fill_rest(wc);
        }
    }

    /// Fills in what else is valid, or not.
    #[inline(never)]
    fn fill_rest(&self, wc: &mut bindings::ib_wc) {
        if self.status != bindings::ib_wc_status_IB_WC_SUCCESS {
            wc.status = self.status;
            wc.vendor_err = self.vendor_err;
            wc.opcode = POISON;
            wc.wc_flags = POISON as c_int;
            wc.pkey_index = 0xdead;
            wc.port_num = POISON;
            return;
        }
        wc.wc_flags = self.flags as c_int;
        if self.is_recv() || self.opcode == bindings::ib_wc_opcode_IB_WC_RDMA_READ {
            wc.byte_len = self.byte_len;
        }
        if self.is_recv() {
            wc.src_qp = self.src_qp;
        }
        if self.flags != 0 {
            wc.ex.imm_data = ManuallyDrop::new(self.ex);
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
        let Some((_, slot)) = self.ring.add() else {
            return self.fail();
        };
        *slot = entry;
        match self.armed {
            Armed::No => {}
            Armed::Solicited if !entry.solicited && entry.status == 0 => {}
            _ => self.tell(),
        }
    }

    /// Adds the completion of a send that was done.
    #[inline(always)]
    pub(crate) fn push_done(
        &mut self,
        wr_id: u64,
        opcode: u32,
        qp: QpPtr,
        index: usize,
        retires: Retires,
    ) {
        let Some((_, slot)) = self.ring.add() else {
            return self.fail();
        };
        // What is not valid stays as it was.
        slot.wr_id = wr_id;
        slot.opcode = opcode;
        slot.qp = Some(qp);
        slot.index = index;
        slot.retires = retires;
        slot.plain = true;
        if self.armed == Armed::Next {
            self.tell();
        }
    }

    /// Tells the consumer of a completion.
    #[inline(never)]
    fn tell(&mut self) {
        if !self.dead {
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
    /// Takes the first completions of a CQ, as many as there is room for, and returns their number.
    /// With that the places of their requests are free again.
    #[inline]
    pub(crate) fn poll(&mut self, cq: usize, room: &mut [MaybeUninit<bindings::ib_wc>]) -> usize {
        let Some(cq) = self.cqs.get_mut(cq) else {
            return 0;
        };
        let mut filled = 0;
        while let Some(rest @ [_, ..]) = room.get_mut(filled..) {
            let first = cq.ring.first(rest.len());
            if first.is_empty() {
                break;
            }
            for (wc, entry) in rest.iter_mut().zip(first) {
                retire(entry, &mut self.qps, &mut self.srqs);
                entry.fill(wc);
            }
            let n = first.len();
            cq.ring.drop_first(n);
            filled += n;
        }
        filled
    }
}

/// Frees the places that a completion gives back.
#[inline]
fn retire(entry: &Entry, qps: &mut Slots<Qp>, srqs: &mut Slots<Srq>) {
    match entry.retires {
        Retires::Sends(n) => {
            if let Some(qp) = qps.get_mut(entry.index) {
                qp.sends = qp.sends.saturating_sub(n);
            }
        }
        Retires::Recv => {
            if let Some(qp) = qps.get_mut(entry.index) {
                qp.recvs.retire();
            }
        }
        Retires::SrqRecv(srq) => {
            if let Some(srq) = srqs.get_mut(srq) {
                srq.queue.retire();
            }
        }
        Retires::Nothing => {}
    }
}
