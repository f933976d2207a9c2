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
    machine::{
        Machine,
        MAX_QP, //
    },
    recv::RecvQueue,
    ring::Ring, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// How many of the 24 bits of a QP number are its index.
const INDEX_BITS: u32 = MAX_QP.ilog2();
const GENERATIONS: u32 = (1 << (24 - INDEX_BITS)) - 1;

/// Returns the index of the QP of a number, if there is one.
pub(crate) fn index_of(num: u32) -> usize {
    num as usize % MAX_QP
}

macro_rules! attributes {
    ($($mask:ident: $($field:ident: $type:ty),+;)*) => {
        /// Attributes that are kept to be asked for.
        #[derive(Default)]
        pub(crate) struct Attributes {
            $($(pub(crate) $field: $type,)+)*
        }

        impl Attributes {
            fn modify(&mut self, from: &bindings::ib_qp_attr, mask: u32) {
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

/// What a QP is created with.
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

/// The changes of a QP. It is for its users not to make two at once: `ib_modify_qp` takes no lock.
#[derive(Default)]
pub(crate) struct Changes {
    /// How many are under way.
    pub(crate) running: u32,
    /// How many have begun while another was under way.
    pub(crate) overlaps: u32,
    /// How much longer the next one takes, in microseconds.
    pub(crate) dwell: u32,
}

pub(crate) struct Qp {
    pub(crate) config: Config,
    pub(crate) num: u32,
    pub(crate) state: bindings::ib_qp_state,
    pub(crate) attr: Attributes,
    /// Sends whose completions have not been polled.
    pub(crate) sends: u32,
    /// Sends since the last completion that have none of their own.
    pub(crate) unsignaled: u32,
    pub(crate) recvs: RecvQueue,
    pub(crate) plan: Plan,
    pub(crate) stall: Stall,
    pub(crate) changes: Changes,
    /// Completions that are held back, with their CQs.
    pub(crate) held: Ring<(usize, Entry)>,
}

impl Qp {
    pub(crate) fn new(config: Config, recvs: RecvQueue) -> Result<Self> {
        // An SRQ's receives count where they complete, so leave room for some.
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

impl Machine {
    /// Puts a QP in its place, which is vacant, and returns its number.
    pub(crate) fn add_qp(&mut self, index: usize, mut qp: KBox<Qp>) -> u32 {
        // Numbers of 24 bits that are not soon used again; 0 and 1 are special.
        self.generation = self.generation % GENERATIONS + 1;
        qp.num = (self.generation << INDEX_BITS) | index as u32;
        let num = qp.num;
        self.qps.put(index, qp);
        num
    }

    /// Finds a QP by its number.
    pub(crate) fn find_qp(&self, num: u32) -> Option<usize> {
        let index = index_of(num);
        (self.qps.get(index)?.num == num).then_some(index)
    }

    /// Takes a QP out with all that is left of it.
    pub(crate) fn remove_qp(&mut self, index: usize) -> Option<KBox<Qp>> {
        let qp = self.qps.take(index)?;
        self.purge_qp(&qp.config, index);
        Some(qp)
    }

    fn purge_qp(&mut self, config: &Config, index: usize) {
        for cq in [config.send_cq, config.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(cq) {
                cq.purge(index);
            }
        }
    }

    /// Changes the state and other attributes of a QP.
    pub(crate) fn modify_qp(
        &mut self,
        index: usize,
        attr: &bindings::ib_qp_attr,
        mask: u32,
    ) -> Result {
        self.plan.fails_modify()?;
        let qp = self.qps.get_mut(index).ok_or(EINVAL)?;
        qp.plan.fails_modify()?;
        let next = if mask & bindings::ib_qp_attr_mask_IB_QP_STATE != 0 {
            attr.qp_state
        } else {
            qp.state
        };
        // SAFETY: The function takes any values.
        let ok = unsafe { bindings::ib_modify_qp_is_ok(qp.state, next, qp.config.kind, mask) };
        if !ok {
            return Err(EINVAL);
        }
        qp.attr.modify(attr, mask);
        match next {
            bindings::ib_qp_state_IB_QPS_ERR => self.fail_qp(index),
            bindings::ib_qp_state_IB_QPS_RESET => self.reset_qp(index),
            _ => qp.state = next,
        }
        Ok(())
    }

    /// Makes a QP ready to send to another one.
    pub(crate) fn connect_qp(&mut self, index: usize, peer: u32) {
        if let Some(qp) = self.qps.get_mut(index) {
            qp.attr.dest_qp_num = peer;
            qp.state = bindings::ib_qp_state_IB_QPS_RTS;
        }
    }

    /// Forgets all requests of a QP, as hardware does.
    fn reset_qp(&mut self, index: usize) {
        let Some(mut qp) = self.qps.take(index) else {
            return;
        };
        self.purge_qp(&qp.config, index);
        qp.state = bindings::ib_qp_state_IB_QPS_RESET;
        qp.attr = Attributes::default();
        (qp.sends, qp.unsignaled) = (0, 0);
        qp.recvs.clear();
        qp.held.retain(|_| false);
        self.qps.put(index, qp);
    }

    /// Moves a QP to the error state and flushes its receives. Sends are never left.
    pub(crate) fn fail_qp(&mut self, index: usize) {
        if let Some(qp) = self.qps.get_mut(index) {
            qp.state = bindings::ib_qp_state_IB_QPS_ERR;
        }
        while let Some(recv) = self.qps.get_mut(index).and_then(|qp| qp.recvs.take()) {
            self.flush_recv(index, recv.wr_id);
        }
    }
}

/// Says whether a QP can have this many requests and entries.
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
