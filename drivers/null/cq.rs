// SPDX-License-Identifier: GPL-2.0

//! Completion queues.

use crate::{
    irq::Irq,
    ring::Ring, //
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

/// The value of fields of a completion that are not valid, to catch code that relies on them.
/// Without debug assertions such a field may have an older value instead.
pub(crate) const POISON: u32 = 0xdead_beef;

/// The address of a QP, for completions and events.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct QpPtr(pub(crate) NonNull<bindings::ib_qp>);

// SAFETY: The pointer is only compared and passed to C; to dereference it is unsafe.
unsafe impl Send for QpPtr {}

/// The entries of a queue that a completion frees.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Retires {
    /// Nothing: a duplicate.
    #[default]
    Nothing,
    /// This many entries of the send queue.
    Sends(u32),
    /// An entry of the receive queue.
    Recv,
    /// An entry of the SRQ at this index, 32 bits wide so that a completion is one cache line.
    SrqRecv(u32),
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
    /// `true` for a send that has succeeded: of the other fields only the opcode is valid.
    pub(crate) plain: bool,
}

/// The completion of a send that has succeeded, without its request, opcode and QP. The fields that
/// ibv_poll_cq(3) calls invalid have [`POISON`].
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
        // C finds the QP number by this, which is always valid.
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

    /// Fills in the other fields, and poison where they are not valid.
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

/// The completions that the consumer wants an interrupt for.
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

    /// Adds a completion. If the CQ is full the completion is lost, and the CQ fails.
    #[inline]
    pub(crate) fn push(&mut self, entry: Entry) {
        let Some((_, slot)) = self.ring.add() else {
            return self.fail();
        };
        *slot = entry;
        match self.armed {
            Armed::No => {}
            Armed::Solicited if !entry.solicited && entry.status == 0 => {}
            _ => self.notify(),
        }
    }

    /// Adds the completion of a send that has succeeded.
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
        // Fields that are not valid keep their values.
        slot.wr_id = wr_id;
        slot.opcode = opcode;
        slot.qp = Some(qp);
        slot.index = index;
        slot.retires = retires;
        slot.plain = true;
        if self.armed == Armed::Next {
            self.notify();
        }
    }

    /// Raises the interrupt for a completion.
    #[inline(never)]
    fn notify(&mut self) {
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

    /// Requests an interrupt for the next completion. Returns whether the CQ has completions.
    pub(crate) fn arm(&mut self, solicited: bool) -> bool {
        match (solicited, self.armed) {
            (true, Armed::No) => self.armed = Armed::Solicited,
            (true, _) => {}
            (false, _) => self.armed = Armed::Next,
        }
        self.ring.len() != 0
    }

    /// Ends all interrupts.
    pub(crate) fn kill(&mut self) {
        self.dead = true;
    }

    /// Takes the first completions, at most as many as `wcs` has, and returns their number.
    /// `retire` is called with each of them.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        wcs: &mut [MaybeUninit<bindings::ib_wc>],
        mut retire: impl FnMut(&Entry),
    ) -> usize {
        let mut filled = 0;
        while let Some(rest @ [_, ..]) = wcs.get_mut(filled..) {
            let first = self.ring.first(rest.len());
            if first.is_empty() {
                break;
            }
            for (wc, entry) in rest.iter_mut().zip(first) {
                retire(entry);
                entry.fill(wc);
            }
            let n = first.len();
            self.ring.drop_first(n);
            filled += n;
        }
        filled
    }

    /// Removes the completions of a QP.
    pub(crate) fn purge(&mut self, index: usize) {
        self.ring.retain(|entry| entry.index != index);
    }

    pub(crate) fn len(&self) -> usize {
        self.ring.len()
    }
}
