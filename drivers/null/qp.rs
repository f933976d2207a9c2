// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.

use crate::{
    cq::{
        Entry,
        QpPtr, //
    },
    inject::{
        Plan,
        Stall, //
    },
    recv::RecvQueue,
    ring::Ring, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The number of QPs that a device can have.
pub(crate) const MAX_QP: usize = 16384;

/// A QP number has 24 bits: the QP's index, and above it a generation.
const INDEX_BITS: u32 = MAX_QP.ilog2();
const GENERATIONS: u32 = (1 << (24 - INDEX_BITS)) - 1;

/// Returns the index of the QP with a number, if there is one.
pub(crate) fn index_of(num: u32) -> usize {
    num as usize % MAX_QP
}

/// Returns the next number for an index. It is not used again soon, and never 0 or 1, which are
/// special.
pub(crate) fn next_num(generation: &mut u32, index: usize) -> u32 {
    *generation = *generation % GENERATIONS + 1;
    (*generation << INDEX_BITS) | index as u32
}

macro_rules! attributes {
    ($($mask:ident: $($field:ident: $type:ty),+;)*) => {
        /// The attributes that `query_qp` returns.
        #[derive(Default)]
        pub(crate) struct Attributes {
            $($(pub(crate) $field: $type,)+)*
        }

        impl Attributes {
            pub(crate) fn modify(&mut self, from: &bindings::ib_qp_attr, mask: u32) {
                $(if mask & bindings::$mask != 0 {
                    $(self.$field = from.$field;)+
                })*
            }

            fn query(&self, to: &mut bindings::ib_qp_attr) {
                $($(to.$field = self.$field;)+)*
            }
        }
    };
}

attributes! {
    ib_qp_attr_mask_IB_QP_ACCESS_FLAGS: qp_access_flags: c_int;
    ib_qp_attr_mask_IB_QP_PKEY_INDEX: pkey_index: u16;
    ib_qp_attr_mask_IB_QP_PORT: port_num: u32;
    ib_qp_attr_mask_IB_QP_QKEY: qkey: u32;
    ib_qp_attr_mask_IB_QP_PATH_MTU: path_mtu: bindings::ib_mtu;
    ib_qp_attr_mask_IB_QP_TIMEOUT: timeout: u8;
    ib_qp_attr_mask_IB_QP_RETRY_CNT: retry_cnt: u8;
    ib_qp_attr_mask_IB_QP_RNR_RETRY: rnr_retry: u8;
    ib_qp_attr_mask_IB_QP_RQ_PSN: rq_psn: u32;
    ib_qp_attr_mask_IB_QP_SQ_PSN: sq_psn: u32;
    ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC: max_rd_atomic: u8;
    ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic: u8;
    ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER: min_rnr_timer: u8;
    ib_qp_attr_mask_IB_QP_DEST_QPN: dest_qp_num: u32;
}

/// The attributes that a QP is created with.
pub(crate) struct Config {
    pub(crate) raw: QpPtr,
    pub(crate) kind: bindings::ib_qp_type,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: usize,
    pub(crate) srq: Option<usize>,
    pub(crate) signal_all: bool,
    pub(crate) max_send_wr: u32,
    pub(crate) max_send_sge: usize,
}

/// The calls that modify a QP. Its users must not make two at once: `ib_modify_qp` takes no lock.
#[derive(Default)]
pub(crate) struct Changes {
    /// Number of calls that have not returned.
    pub(crate) running: u32,
    /// Number of calls that have begun while another had not returned.
    pub(crate) overlaps: u32,
    /// Additional time of the next call, in microseconds.
    pub(crate) dwell: u32,
}

pub(crate) struct Qp {
    pub(crate) config: Config,
    pub(crate) num: u32,
    pub(crate) state: bindings::ib_qp_state,
    pub(crate) attr: Attributes,
    /// Number of sends whose completions have not been polled.
    pub(crate) sends: u32,
    /// Number of sends since the last completion that have none of their own.
    pub(crate) unsignaled: u32,
    pub(crate) recvs: RecvQueue,
    pub(crate) plan: Plan,
    pub(crate) stall: Stall,
    pub(crate) changes: Changes,
    /// Number of references that `iw_cm` has.
    pub(crate) iw_refs: u32,
    /// Additional time of the next call that looks for the QP, in microseconds.
    pub(crate) find: u32,
    /// Completions that are held back, with their CQs.
    pub(crate) held: Ring<(usize, Entry)>,
}

impl Qp {
    pub(crate) fn new(config: Config, recvs: RecvQueue) -> Result<Self> {
        // Receives of an SRQ may be held as well, so leave room for some.
        let recv = config.srq.map_or(recvs.capacity().max(16), |_| 64);
        let held = config.max_send_wr as usize + recv;
        Ok(Self {
            config,
            num: 0,
            state: bindings::ib_qp_state_IB_QPS_RESET,
            attr: Attributes::default(),
            sends: 0,
            unsignaled: 0,
            recvs,
            plan: Plan::default(),
            stall: Stall::default(),
            changes: Changes::default(),
            iw_refs: 0,
            find: 0,
            held: Ring::new(held)?,
        })
    }

    pub(crate) fn is_rc(&self) -> bool {
        self.config.kind == bindings::ib_qp_type_IB_QPT_RC
    }

    pub(crate) fn is_ud(&self) -> bool {
        self.config.kind == bindings::ib_qp_type_IB_QPT_UD
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state == bindings::ib_qp_state_IB_QPS_ERR
    }

    pub(crate) fn can_send(&self) -> bool {
        matches!(
            self.state,
            bindings::ib_qp_state_IB_QPS_RTS
                | bindings::ib_qp_state_IB_QPS_SQD
                | bindings::ib_qp_state_IB_QPS_ERR
        )
    }

    pub(crate) fn can_receive(&self) -> bool {
        matches!(
            self.state,
            bindings::ib_qp_state_IB_QPS_RTR
                | bindings::ib_qp_state_IB_QPS_RTS
                | bindings::ib_qp_state_IB_QPS_SQD
                | bindings::ib_qp_state_IB_QPS_SQE
        )
    }

    pub(crate) fn query(&self, attr: &mut bindings::ib_qp_attr) {
        self.attr.query(attr);
        attr.qp_state = self.state;
        attr.cur_qp_state = self.state;
    }
}

/// Fails with `EINVAL` if a QP cannot have this number of requests and entries.
pub(crate) fn check_caps(cap: &bindings::ib_qp_cap) -> Result {
    let requests = cap.max_send_wr.max(cap.max_recv_wr);
    let entries = cap.max_send_sge.max(cap.max_recv_sge);
    if requests > MAX_WR || entries > MAX_SGE {
        return Err(EINVAL);
    }
    Ok(())
}

/// The most requests of a queue.
pub(crate) const MAX_WR: u32 = 16384;

/// The most entries of a request.
pub(crate) const MAX_SGE: u32 = 32;
