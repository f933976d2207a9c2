// SPDX-License-Identifier: GPL-2.0

//! Asking for what a QP is set to.

use super::{
    inner::Inner,
    Access,
    Caps,
    Mtu,
    Qp,
    State, //
};
use crate::{
    ah,
    bindings,
    context::{
        PollContext,
        Sleepable, //
    }, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};

/// The attributes of a QP, as `struct ib_qp_attr`. Those that the QP has not been given mean
/// nothing.
pub struct Info {
    raw: bindings::ib_qp_attr,
    caps: bindings::ib_qp_cap,
    state: State,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $field:ident;)*) => {
        $($(#[$doc])*
        pub fn $name(&self) -> $ty {
            self.raw.$field
        })*
    };
}

impl Info {
    /// Returns the state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Says whether the send queue is still being drained, in [`State::Sqd`].
    pub fn is_sq_draining(&self) -> bool {
        self.raw.sq_draining != 0
    }

    /// Returns the path to the peer. Not every driver tells all of it.
    pub fn path(&self) -> ah::Attr {
        ah::Attr::from_raw(&self.raw.ah_attr)
    }

    /// Returns the path's MTU.
    pub fn path_mtu(&self) -> Option<Mtu> {
        Mtu::from_raw(self.raw.path_mtu)
    }

    /// Returns what peers may do.
    pub fn access(&self) -> Access {
        Access::from_raw(self.raw.qp_access_flags as u32)
    }

    /// Returns the sizes of the queues, the places of the crate's own requests included.
    pub fn caps(&self) -> Caps {
        Caps {
            send_wr: self.caps.max_send_wr,
            recv_wr: self.caps.max_recv_wr,
            send_sge: self.caps.max_send_sge,
            recv_sge: self.caps.max_recv_sge,
        }
    }

    fields! {
        /// Returns the port.
        port: u32 = port_num;
        /// Returns the index of the partition key.
        pkey_index: u16 = pkey_index;
        /// Returns the key that datagrams must carry.
        qkey: u32 = qkey;
        /// Returns the number of the peer's QP.
        dest_qp: u32 = dest_qp_num;
        /// Returns the number of the packet that is expected from the peer.
        rq_psn: u32 = rq_psn;
        /// Returns the number of the next packet to the peer.
        sq_psn: u32 = sq_psn;
        /// Returns how many RDMA READs and atomics may be outstanding at the peer.
        max_rd_atomic: u8 = max_rd_atomic;
        /// Returns how many RDMA READs and atomics the peer may have outstanding here.
        max_dest_rd_atomic: u8 = max_dest_rd_atomic;
        /// Returns how long a peer that found no receive is to wait.
        min_rnr_timer: u8 = min_rnr_timer;
        /// Returns how long an answer may take.
        timeout: u8 = timeout;
        /// Returns how often an unanswered packet is sent again.
        retry_count: u8 = retry_cnt;
        /// Returns how often a message that found no receive is sent again.
        rnr_retry: u8 = rnr_retry;
    }
}

impl Inner {
    /// Asks the driver for the attributes in `mask` and for the sizes of the queues.
    pub(super) fn query(&self, mask: u32) -> Result<(bindings::ib_qp_attr, bindings::ib_qp_cap)> {
        let mut attr = bindings::ib_qp_attr::default();
        let mut init = bindings::ib_qp_init_attr::default();
        // SAFETY: The QP is valid by the type invariant.
        to_result(unsafe {
            bindings::ib_query_qp(
                self.raw.as_ptr(),
                &raw mut attr,
                mask as c_int,
                &raw mut init,
            )
        })?;
        Ok((attr, init.cap))
    }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Asks the driver for the QP's state, attributes and sizes (`ib_query_qp`).
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the driver cannot tell, or its error.
    pub fn query(&self, _cx: &Sleepable) -> Result<Info> {
        let (raw, caps) = self
            .inner
            .query(bindings::ib_qp_attr_mask_IB_QP_ATTR_STANDARD_BITS)?;
        let state = State::from_raw(raw.qp_state).ok_or(EIO)?;
        Ok(Info { raw, caps, state })
    }
}
