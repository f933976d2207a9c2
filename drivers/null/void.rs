// SPDX-License-Identifier: GPL-2.0

//! Requests to nobody, where nothing is to go wrong: done in as few instructions as can be, so that
//! the device can show what the layers above it cost.
//!
//! What is not of this kind takes the long way, which would come to the same.

use crate::{
    cq::Retires,
    machine::Machine,
    qp::Qp, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

impl Qp {
    /// Says whether requests do nothing but complete.
    #[inline]
    fn is_void(&self) -> bool {
        self.state == bindings::ib_qp_state_IB_QPS_RTS
            && self.attr.dest_qp_num == 0
            && !self.is_ud()
            && self.plan.is_idle()
    }
}

impl Machine {
    /// Posts a request to a send queue if all that is to be done for it is to complete it. Says
    /// whether it was.
    #[inline]
    pub(crate) fn post_void(&mut self, index: usize, wr: &bindings::ib_send_wr) -> bool {
        let opcode = match wr.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND => bindings::ib_wc_opcode_IB_WC_SEND,
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE => bindings::ib_wc_opcode_IB_WC_RDMA_WRITE,
            _ => return false,
        };
        let Some(qp) = self.qps.get_mut(index) else {
            return false;
        };
        if !qp.is_void()
            || !self.plan.is_idle()
            || wr.num_sge > qp.config.max_send_sge as c_int
            || qp.sends >= qp.config.max_send_wr
        {
            return false;
        }
        qp.sends += 1;
        // No more than there are sends.
        qp.unsignaled = qp.unsignaled.wrapping_add(1);
        if !qp.config.signal_all && wr.send_flags & bindings::ib_send_flags_IB_SEND_SIGNALED == 0 {
            return true;
        }
        let places = core::mem::take(&mut qp.unsignaled);
        let retires = if self.eager {
            qp.sends = qp.sends.saturating_sub(places);
            Retires::Nothing
        } else {
            Retires::Sends(places)
        };
        if let Some(cq) = self.cqs.get_mut(qp.config.send_cq) {
            // SAFETY: Both members of the union are as wide.
            let wr_id = unsafe { *wr.__bindgen_anon_1.wr_id };
            cq.push_done(wr_id, opcode, qp.config.raw, index, retires);
        }
        true
    }
}
