// SPDX-License-Identifier: GPL-2.0

//! The states and attributes of a QP.
//!
//! C source: `drivers/infiniband/core/verbs.c` (`ib_modify_qp`)

use super::{
    Inner,
    RnrTimer, //
};
use crate::{
    ah,
    device::{
        Device,
        Gid, //
    },
    prelude::internal::*,
    qp::Qp, //
};
use kernel::sync::atomic::{
    Atomic,
    Full,
    Release, //
};

/// The state of a QP, as `enum ib_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// New, or reset: nothing can be posted.
    Reset = bindings::ib_qp_state_IB_QPS_RESET,
    /// Receives can be posted.
    Init = bindings::ib_qp_state_IB_QPS_INIT,
    /// Ready to receive: what peers send arrives.
    Rtr = bindings::ib_qp_state_IB_QPS_RTR,
    /// Ready to send: all works.
    Rts = bindings::ib_qp_state_IB_QPS_RTS,
    /// The send queue is drained: what is posted to it waits.
    Sqd = bindings::ib_qp_state_IB_QPS_SQD,
    /// A send of an unreliable QP has failed: sends are flushed, receives work.
    Sqe = bindings::ib_qp_state_IB_QPS_SQE,
    /// The error state: requests are flushed.
    Error = bindings::ib_qp_state_IB_QPS_ERR,
}

impl State {
    fn from_raw(raw: bindings::ib_qp_state) -> Option<Self> {
        let all = [
            Self::Reset,
            Self::Init,
            Self::Rtr,
            Self::Rts,
            Self::Sqd,
            Self::Sqe,
            Self::Error,
        ];
        all.into_iter().find(|state| *state as u32 == raw)
    }
}

/// The access of peers, by way of a QP, to memory that is registered for it, as `enum
/// ib_access_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(bindings::ib_access_flags);

impl Access {
    /// Peers may send messages, nothing else.
    pub const NONE: Self = Self(0);
    /// Peers may read.
    pub const REMOTE_READ: Self = Self(bindings::ib_access_flags_IB_ACCESS_REMOTE_READ);
    /// Peers may write.
    pub const REMOTE_WRITE: Self = Self(bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE);
    /// Peers may use atomics.
    pub const REMOTE_ATOMIC: Self = Self(bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC);
}

impl core::ops::BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The number of bytes that a packet carries on a path, as `enum ib_mtu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mtu {
    /// 256 bytes.
    B256 = bindings::ib_mtu_IB_MTU_256,
    /// 512 bytes.
    B512 = bindings::ib_mtu_IB_MTU_512,
    /// 1024 bytes.
    B1024 = bindings::ib_mtu_IB_MTU_1024,
    /// 2048 bytes.
    B2048 = bindings::ib_mtu_IB_MTU_2048,
    /// 4096 bytes.
    B4096 = bindings::ib_mtu_IB_MTU_4096,
}

/// The state that [`Qp::modify`] moves a QP to, with the attributes that this takes, as `struct
/// ib_qp_attr` with its mask. There is no way to the reset state: it forgets requests without
/// completing them.
#[derive(Clone, Copy)]
pub enum Attr {
    /// To [`State::Init`].
    Init {
        /// The port; the first is 1.
        port: u32,
        /// The index of the partition key in the port's table.
        pkey_index: u16,
        /// The access of peers to memory.
        access: Access,
    },
    /// To [`State::Rtr`].
    Rtr {
        /// The path to the peer.
        path: ah::Attr,
        /// The MTU of the path.
        path_mtu: Mtu,
        /// The number of the peer's QP, 24 bits.
        dest_qp: u32,
        /// The number of the first packet from the peer, 24 bits: the peer's `sq_psn`.
        rq_psn: u32,
        /// The number of RDMA READs and atomics that the peer may have outstanding here.
        max_dest_rd_atomic: u8,
        /// The time that a peer which found no receive is to wait.
        min_rnr_timer: RnrTimer,
    },
    /// To [`State::Rts`].
    Rts {
        /// The time that an answer may take: 4.096 µs times two to this, up to 31; 0 is for ever.
        timeout: u8,
        /// The number of times that an unanswered packet is sent again, up to 7. rxe takes 7 for
        /// "always".
        retry_count: u8,
        /// The number of times that a message is sent again when the peer has posted no receive, up
        /// to 7, which means "always".
        rnr_retry: u8,
        /// The number of the first packet to the peer, 24 bits.
        sq_psn: u32,
        /// The number of RDMA READs and atomics that may be outstanding at the peer. With 0 they
        /// wait for ever.
        max_rd_atomic: u8,
    },
    /// To [`State::Error`].
    Error,
}

/// Returns a value that its field and the device can take. Fails with `EINVAL` if it is larger.
fn at_most<T: Copy + Into<u32>>(max: u32, value: T) -> Result<T> {
    (value.into() <= max).then_some(value).ok_or(EINVAL)
}

impl Attr {
    /// Sets C attributes, which are zero, and returns their mask. Fails with `EINVAL` if a value is
    /// too large for its field or for the device: not all drivers look.
    fn set(
        &self,
        raw: &mut bindings::ib_qp_attr,
        dev: &Device,
    ) -> Result<bindings::ib_qp_attr_mask> {
        let limits = dev.attrs();
        let (to, mask) = match *self {
            Self::Init {
                port,
                pkey_index,
                access,
            } => {
                if dev.port(port).is_none() || pkey_index >= limits.max_pkeys {
                    return Err(EINVAL);
                }
                raw.port_num = port;
                raw.pkey_index = pkey_index;
                raw.qp_access_flags = access.0 as c_int;
                let mask = bindings::ib_qp_attr_mask_IB_QP_PORT
                    | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
                    | bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS;
                (State::Init, mask)
            }
            Self::Rtr {
                path,
                path_mtu,
                dest_qp,
                rq_psn,
                max_dest_rd_atomic,
                min_rnr_timer,
            } => {
                raw.ah_attr = path.to_raw(dev)?;
                raw.path_mtu = path_mtu as u32;
                raw.dest_qp_num = at_most(0xff_ffff, dest_qp)?;
                raw.rq_psn = at_most(0xff_ffff, rq_psn)?;
                raw.max_dest_rd_atomic = at_most(limits.max_qp_rd_atom, max_dest_rd_atomic)?;
                raw.min_rnr_timer = min_rnr_timer.as_raw();
                let mask = bindings::ib_qp_attr_mask_IB_QP_AV
                    | bindings::ib_qp_attr_mask_IB_QP_PATH_MTU
                    | bindings::ib_qp_attr_mask_IB_QP_DEST_QPN
                    | bindings::ib_qp_attr_mask_IB_QP_RQ_PSN
                    | bindings::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC
                    | bindings::ib_qp_attr_mask_IB_QP_MIN_RNR_TIMER;
                (State::Rtr, mask)
            }
            Self::Rts {
                timeout,
                retry_count,
                rnr_retry,
                sq_psn,
                max_rd_atomic,
            } => {
                raw.timeout = at_most(31, timeout)?;
                raw.retry_cnt = at_most(7, retry_count)?;
                raw.rnr_retry = at_most(7, rnr_retry)?;
                raw.sq_psn = at_most(0xff_ffff, sq_psn)?;
                raw.max_rd_atomic = at_most(limits.max_qp_init_rd_atom, max_rd_atomic)?;
                let mask = bindings::ib_qp_attr_mask_IB_QP_TIMEOUT
                    | bindings::ib_qp_attr_mask_IB_QP_RETRY_CNT
                    | bindings::ib_qp_attr_mask_IB_QP_RNR_RETRY
                    | bindings::ib_qp_attr_mask_IB_QP_SQ_PSN
                    | bindings::ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC;
                (State::Rts, mask)
            }
            Self::Error => (State::Error, 0),
        };
        raw.qp_state = to as u32;
        Ok(mask | bindings::ib_qp_attr_mask_IB_QP_STATE)
    }
}

/// The sizes of a QP's queues, as `struct ib_qp_cap`.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Requests that can be outstanding on the send queue.
    pub send_wr: u32,
    /// Requests that can be outstanding on the receive queue.
    pub recv_wr: u32,
    /// Entries of a send request.
    pub send_sge: u32,
    /// Entries of a receive request.
    pub recv_sge: u32,
}

impl Caps {
    /// Returns the sizes of queues whose requests have one entry each.
    pub const fn new(send_wr: u32, recv_wr: u32) -> Self {
        Self {
            send_wr,
            recv_wr,
            send_sge: 1,
            recv_sge: 1,
        }
    }

    /// Returns how many CQ entries a QP of this size reserves, at the most, of a CQ that serves
    /// both its queues: one for each request and one for the drain of each queue, rounded up as
    /// drivers do.
    pub const fn entries(&self) -> u32 {
        const fn round_up(wr: u32) -> u32 {
            match wr.saturating_add(2).checked_next_power_of_two() {
                Some(entries) => entries,
                None => u32::MAX,
            }
        }
        round_up(self.send_wr).saturating_add(round_up(self.recv_wr))
    }
}

/// The attributes that [`Qp::query`] returns, of `struct ib_qp_attr`.
pub struct QpAttr {
    /// The state.
    pub state: State,
    /// The number of the peer's QP, from [`State::Rtr`] on.
    pub dest_qp: u32,
    /// The time that a peer which found no receive is to wait, from [`State::Rtr`] on.
    pub min_rnr_timer: RnrTimer,
    /// The sizes of the queues, the places of the crate's own requests included.
    pub caps: Caps,
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Moves the QP to another state (`ib_modify_qp`). Fails with `EPERM` if the QP is a connection
    /// manager's and is to go to any but the error state; `EINVAL` if there is no such transition
    /// (`ib_modify_qp_is_ok`), or if a value is too large for its field or the device; or the
    /// driver's error, also where the device has moved the QP to an error state by itself.
    pub fn modify(&self, attr: Attr, _cx: &Sleepable) -> Result {
        self.inner.modify(&attr)
    }

    /// Asks the driver for the state, the peer, the RNR timer and the sizes of the QP
    /// (`ib_query_qp`). Fails with `EOPNOTSUPP` if the driver cannot tell, or its error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, qp::State};
    /// fn can_send(qp: &Qp<Softirq>, cx: &Sleepable) -> Result<bool> {
    ///     Ok(qp.query(cx)?.state == State::Rts)
    /// }
    /// ```
    pub fn query(&self, _cx: &Sleepable) -> Result<QpAttr> {
        let mask = bindings::ib_qp_attr_mask_IB_QP_ATTR_STANDARD_BITS;
        // SAFETY: The QP is valid by the invariant of `Inner`.
        let (raw, cap) = unsafe { query(self.inner.raw(), mask) }?;
        Ok(QpAttr {
            state: State::from_raw(raw.qp_state).ok_or(EIO)?,
            dest_qp: raw.dest_qp_num,
            min_rnr_timer: RnrTimer::from_raw(raw.min_rnr_timer),
            caps: Caps {
                send_wr: cap.max_send_wr,
                recv_wr: cap.max_recv_wr,
                send_sge: cap.max_send_sge,
                recv_sge: cap.max_recv_sge,
            },
        })
    }
}

/// Asks the driver for the attributes in `mask` and for the sizes of the queues.
///
/// # Safety
///
/// `qp` is valid.
pub(super) unsafe fn query(
    qp: NonNull<bindings::ib_qp>,
    mask: bindings::ib_qp_attr_mask,
) -> Result<(bindings::ib_qp_attr, bindings::ib_qp_cap)> {
    let mut attr = bindings::ib_qp_attr::default();
    let mut init = bindings::ib_qp_init_attr::default();
    let qp = qp.as_ptr();
    let mask = mask as c_int;
    // SAFETY: The QP is valid, as the caller promises.
    to_result(unsafe { bindings::ib_query_qp(qp, &raw mut attr, mask, &raw mut init) })?;
    Ok((attr, init.cap))
}

impl Inner {
    /// Asks the driver for the state. Not inlined, as the structs that this needs are large.
    #[inline(never)]
    fn query_state(&self) -> Result<bindings::ib_qp_state> {
        // SAFETY: The QP is valid by the type invariant.
        let (attr, _) = unsafe { query(self.raw(), bindings::ib_qp_attr_mask_IB_QP_STATE) }?;
        Ok(attr.qp_state)
    }

    fn modify(&self, attr: &Attr) -> Result {
        if self.id.is_some() && !matches!(attr, Attr::Error) {
            return Err(EPERM);
        }
        let mut raw = bindings::ib_qp_attr::default();
        let mask = attr.set(&mut raw, self.pd.device())?;
        let mut modifier = self.modifier();
        let to = raw.qp_state;
        // A connected QP that takes the next step to the state in which it sends: of each, `set`
        // has made all attributes. If a device has moved it to an error state, the driver refuses.
        let is_step = to <= State::Rts as u32
            && self.qp_type() == bindings::ib_qp_type_IB_QPT_RC
            && modifier.state.is_some_and(|from| from as u32 + 1 == to);
        if !is_step {
            let from = State::from_raw(self.query_state()?).ok_or(EIO)?;
            // SAFETY: The function looks these values up in a table, and they are in its range.
            if !unsafe { bindings::ib_modify_qp_is_ok(from as u32, to, self.qp_type(), mask) } {
                return Err(EINVAL);
            }
        }
        // SAFETY: `set` has made all attributes of a step, and `ib_modify_qp_is_ok` has said that
        // those of any other transition are complete. `set` has checked their range.
        unsafe { modifier.modify(&mut raw, mask) }
    }

    /// Moves a new QP for datagrams to the state in which it sends and receives.
    pub(crate) fn start(&self, port: u32, qkey: u32) -> Result {
        let mut modifier = self.modifier();
        for state in [State::Init, State::Rtr, State::Rts] {
            modifier.go_to(state, port, qkey)?;
        }
        Ok(())
    }

    /// Takes the lock under which the QP is modified.
    pub(crate) fn modifier(&self) -> Modifier<'_> {
        // INVARIANT: The lock was just taken.
        Modifier {
            inner: self,
            state: self.context.state.lock(),
        }
    }
}

/// A guard of the lock under which the state and the attributes of a QP are changed: `ib_modify_qp`
/// takes none, and drivers need not have one (rxe frees an array in it).
///
/// # Invariants
///
/// The lock of `inner` is held.
pub(crate) struct Modifier<'a> {
    inner: &'a Inner,
    state: kernel::sync::MutexGuard<'a, Option<State>>,
}

impl Modifier<'_> {
    /// Changes what `mask` selects (`ib_modify_qp`).
    ///
    /// # Safety
    ///
    /// The attributes are complete for this mask, and what they point to is valid.
    pub(crate) unsafe fn modify(
        &mut self,
        attr: &mut bindings::ib_qp_attr,
        mask: bindings::ib_qp_attr_mask,
    ) -> Result {
        let qp = self.inner.raw().as_ptr();
        let before = self.state.take();
        // SAFETY: The QP is valid by the invariant of `Inner`. The attributes are complete for the
        // mask, and what they point to is valid, as the caller promises.
        to_result(unsafe { bindings::ib_modify_qp(qp, attr, mask as c_int) })?;
        if mask & bindings::ib_qp_attr_mask_IB_QP_STATE == 0 {
            *self.state = before;
        } else if self.inner.id.is_none() {
            *self.state = State::from_raw(attr.qp_state);
        }
        if mask & bindings::ib_qp_attr_mask_IB_QP_DEST_QPN != 0 {
            let ah = &attr.ah_attr;
            let has_grh = u32::from(ah.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0;
            let ip = has_grh.then(|| Gid::from_raw(&ah.grh.dgid).ip());
            (self.inner.object).set_peer(crate::objects::PeerAddr::ToQp(attr.dest_qp_num, ip));
        }
        Ok(())
    }

    /// Goes to a state that takes no attributes but these, and those that are zero.
    #[inline(never)]
    fn go_to(&mut self, state: State, port: u32, qkey: u32) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: state as u32,
            port_num: port,
            qkey,
            ..Default::default()
        };
        const INIT: bindings::ib_qp_attr_mask =
            bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX | bindings::ib_qp_attr_mask_IB_QP_PORT;
        let mask = match (state, self.inner.is_ud()) {
            (State::Init, true) => INIT | bindings::ib_qp_attr_mask_IB_QP_QKEY,
            (State::Init, false) => INIT | bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS,
            (State::Rts, true) => bindings::ib_qp_attr_mask_IB_QP_SQ_PSN,
            (State::Rtr | State::Rts, false) => return Err(EINVAL),
            _ => 0,
        };
        // SAFETY: The attributes are those that this state takes, and point to nothing.
        unsafe { self.modify(&mut attr, mask | bindings::ib_qp_attr_mask_IB_QP_STATE) }
    }

    /// Goes to the error state. There is no way there from the reset state, so such a QP is
    /// initialised first: some drivers take receives in that state too, against the rules.
    pub(crate) fn go_to_error(&mut self) -> Result {
        let moved = self.go_to(State::Error, 0, 0);
        let is_reset = || self.inner.query_state() == Ok(State::Reset as u32);
        if moved.is_ok() || !is_reset() {
            return moved;
        }
        self.go_to(State::Init, 1, 0)?;
        self.go_to(State::Error, 0, 0)
    }

    /// Has rxe flush a QP in the error state although an earlier change has failed. Returns `false`
    /// if this is done for another QP: one at a time. rxe waits for the tasks of the QP in a loop
    /// (`rxe_disable_task`), and many such loops would keep its tasks from the processors.
    ///
    /// With the change to RTR rxe stops the receive task and replaces the array of the responder.
    /// Without memory for that the task stays stopped (`rxe_qp_from_attr`), and receives are never
    /// flushed. An array of no entries needs no memory; rxe takes this attribute alone, in any
    /// state, and does not look at the array in the error state.
    pub(crate) fn restart_receiver(&mut self) -> bool {
        static RESTARTING: Atomic<bool> = Atomic::new(false);

        if self.inner.qp_type() != bindings::ib_qp_type_IB_QPT_RC
            || self.inner.ops().driver_id != bindings::rdma_driver_id_RDMA_DRIVER_RXE
        {
            return true;
        }
        if RESTARTING.xchg(true, Full) {
            return false;
        }
        let mut none = bindings::ib_qp_attr::default();
        let mask = bindings::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC;
        // The drain finds out whether the task runs.
        // SAFETY: The attributes are complete for this mask, and point to nothing.
        let restarted = unsafe { self.modify(&mut none, mask) };
        // Work that came while the task was stopped is done after another change of the state.
        let _ = restarted.and_then(|()| self.go_to(State::Error, 0, 0));
        RESTARTING.store(false, Release);
        true
    }

    /// Goes to the reset state, where the device forgets all requests.
    pub(crate) fn reset(&mut self) -> Result {
        self.go_to(State::Reset, 0, 0)
    }

    /// As [`Modifier::reset`], and then to the error state, where new requests are flushed.
    pub(crate) fn restart(&mut self) -> Result {
        self.reset()?;
        self.go_to_error()
    }
}
