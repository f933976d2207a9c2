// SPDX-License-Identifier: GPL-2.0

//! Work requests: each is executed when it is posted, and completes.

use crate::{
    cq::{
        Entry,
        Retires, //
    },
    machine::Machine,
    memory::{
        atomic,
        length,
        transfer,
        Denied,
        Registration,
        Sge,
        Use,
        LOCAL_KEY, //
    },
    qp::Qp,
    recv::Recv, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The fields that only some requests have: the segment of their operation in hardware's queues.
#[derive(Clone, Copy)]
pub(crate) enum Segment {
    None,
    /// RDMA READ and WRITE.
    Remote {
        addr: u64,
        key: u32,
    },
    /// Atomic operations.
    Atomic {
        addr: u64,
        key: u32,
        compare_add: u64,
        swap: u64,
    },
    /// UD.
    Datagram {
        num: u32,
        qkey: u32,
    },
    /// Registrations.
    Register {
        index: usize,
        registration: Registration,
    },
}

/// A request for a send queue.
pub(crate) struct SendWr<'a> {
    pub(crate) wr_id: u64,
    pub(crate) opcode: bindings::ib_wr_opcode,
    pub(crate) flags: c_int,
    /// Immediate data, as they came, or the key to invalidate.
    pub(crate) ex: u32,
    pub(crate) sges: &'a [Sge],
    pub(crate) segment: Segment,
}

impl SendWr<'_> {
    pub(crate) fn has_imm(&self) -> bool {
        matches!(
            self.opcode,
            bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM
                | bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM
        )
    }

    pub(crate) fn invalidates_remotely(&self) -> bool {
        self.opcode == bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV
    }

    fn completes_as(&self) -> Result<bindings::ib_wc_opcode> {
        Ok(match self.opcode {
            bindings::ib_wr_opcode_IB_WR_SEND
            | bindings::ib_wr_opcode_IB_WR_SEND_WITH_IMM
            | bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV => bindings::ib_wc_opcode_IB_WC_SEND,
            bindings::ib_wr_opcode_IB_WR_RDMA_WRITE
            | bindings::ib_wr_opcode_IB_WR_RDMA_WRITE_WITH_IMM => {
                bindings::ib_wc_opcode_IB_WC_RDMA_WRITE
            }
            bindings::ib_wr_opcode_IB_WR_RDMA_READ
            | bindings::ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV => {
                bindings::ib_wc_opcode_IB_WC_RDMA_READ
            }
            bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP => {
                bindings::ib_wc_opcode_IB_WC_COMP_SWAP
            }
            bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD => {
                bindings::ib_wc_opcode_IB_WC_FETCH_ADD
            }
            bindings::ib_wr_opcode_IB_WR_LOCAL_INV => bindings::ib_wc_opcode_IB_WC_LOCAL_INV,
            bindings::ib_wr_opcode_IB_WR_REG_MR => bindings::ib_wc_opcode_IB_WC_REG_MR,
            _ => return Err(EINVAL),
        })
    }
}

/// Why a request failed, as `enum ib_wc_status`.
pub(crate) type Status = bindings::ib_wc_status;

impl Machine {
    /// Posts a request to a send queue: it is done, and completes, before this returns.
    pub(crate) fn post_send(&mut self, index: usize, wr: &SendWr<'_>) -> Result {
        let opcode = wr.completes_as()?;
        let fenced = wr.flags & bindings::ib_send_flags_IB_SEND_FENCE != 0;
        self.fences = self.fences.wrapping_add(fenced.into());
        let plan_idle = self.plan.is_idle();
        let qp = self.qps.get_mut(index).ok_or(EINVAL)?;
        if !qp.can_send() || wr.sges.len() > qp.config.max_send_sge {
            return Err(EINVAL);
        }
        if qp.sends >= qp.config.max_send_wr {
            return Err(ENOMEM);
        }
        let idle = plan_idle && qp.plan.is_idle();
        let failed = qp.has_failed();
        if !idle {
            self.refuses(index)?;
        }

        let result = if failed {
            Err(bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR)
        } else {
            self.execute(index, wr)
        };
        let qp = self.qps.get_mut(index).ok_or(EINVAL)?;
        let mut entry = Entry {
            wr_id: wr.wr_id,
            qp: Some(qp.config.raw),
            index,
            status: result.err().unwrap_or(bindings::ib_wc_status_IB_WC_SUCCESS),
            opcode,
            byte_len: result.unwrap_or(0),
            ..Entry::default()
        };
        // So do bnxt_re and cxgb4, where it proves nothing.
        if wr.invalidates_remotely() {
            (entry.flags, entry.ex) = (bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE, wr.ex);
        }
        qp.sends += 1;
        qp.unsignaled += 1;
        let cq = qp.config.send_cq;
        let is_rc = qp.is_rc();
        let signaled =
            qp.config.signal_all || wr.flags & bindings::ib_send_flags_IB_SEND_SIGNALED != 0;

        let verdict = (!idle).then(|| self.spoil(&mut entry));
        // A request that failed completes, whether or not it was to.
        if signaled || entry.status != 0 {
            self.retire_sends(&mut entry);
            match verdict {
                None => self.push(cq, entry),
                Some(verdict) => {
                    let fatal = verdict.fatal;
                    self.deliver_planned(cq, entry, verdict);
                    if fatal {
                        self.fail_qp(index);
                    }
                }
            }
        }
        if result.is_err() && is_rc && !failed {
            self.fail_qp(index);
        }
        Ok(())
    }

    /// Lets a completion free the entry of its request and those of the unsignaled ones before it.
    fn retire_sends(&mut self, entry: &mut Entry) {
        let eager = self.eager;
        let Some(qp) = self.qps.get_mut(entry.index) else {
            return;
        };
        let entries = core::mem::take(&mut qp.unsignaled);
        if eager {
            qp.sends -= entries.min(qp.sends);
        } else {
            entry.retires = Retires::Sends(entries);
        }
    }

    /// Posts a request to the receive queue of a QP.
    pub(crate) fn post_recv(&mut self, index: usize, wr_id: u64, sges: &[Sge]) -> Result {
        let plan_idle = self.plan.is_idle();
        let qp = self.qps.get_mut(index).ok_or(EINVAL)?;
        let failed = qp.has_failed();
        if !(plan_idle && qp.plan.is_idle()) {
            self.refuses(index)?;
        }
        let qp = self.qps.get_mut(index).ok_or(EINVAL)?;
        if qp.config.srq.is_some() || qp.state == bindings::ib_qp_state_IB_QPS_RESET {
            return Err(EINVAL);
        }
        qp.recvs.post(wr_id, sges)?;
        if failed {
            self.fail_qp(index);
        }
        Ok(())
    }
}

impl Qp {
    /// Returns whether requests do nothing but complete.
    #[inline]
    fn is_void(&self) -> bool {
        self.state == bindings::ib_qp_state_IB_QPS_RTS
            && self.attr.dest_qp_num == 0
            && !self.is_ud()
            && self.plan.is_idle()
    }
}

impl Machine {
    /// Posts a request to a QP without a peer and without injections, where it only completes, in
    /// as few instructions as possible: the device shows the cost of the layers above it. Returns
    /// `false` for any other request, which [`Machine::post_send`] is for.
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
        // This is at most `sends`.
        qp.unsignaled = qp.unsignaled.wrapping_add(1);
        if !qp.config.signal_all && wr.send_flags & bindings::ib_send_flags_IB_SEND_SIGNALED == 0 {
            return true;
        }
        let entries = core::mem::take(&mut qp.unsignaled);
        let retires = if self.eager {
            qp.sends = qp.sends.saturating_sub(entries);
            Retires::Nothing
        } else {
            Retires::Sends(entries)
        };
        if let Some(cq) = self.cqs.get_mut(qp.config.send_cq) {
            // SAFETY: Both members of the union are as wide.
            let wr_id = unsafe { *wr.__bindgen_anon_1.wr_id };
            cq.push_done(wr_id, opcode, qp.config.raw, index, retires);
        }
        true
    }
}

/// The size of the GRH, for which a UD receive has its first bytes. There is none here.
const GRH_BYTES: u32 = 40;

impl Machine {
    /// Executes a request. Returns the number of bytes that were received.
    pub(crate) fn execute(&mut self, index: usize, wr: &SendWr<'_>) -> Result<u32, Status> {
        match wr.opcode {
            bindings::ib_wr_opcode_IB_WR_REG_MR => {
                if let Segment::Register {
                    index,
                    registration,
                } = wr.segment
                {
                    if let Some(mr) = self.mrs.get_mut(index) {
                        mr.register(registration);
                        return Ok(0);
                    }
                }
                return Err(bindings::ib_wc_status_IB_WC_MW_BIND_ERR);
            }
            bindings::ib_wr_opcode_IB_WR_LOCAL_INV => {
                if self.invalidate(wr.ex) {
                    return Ok(0);
                }
                return Err(bindings::ib_wc_status_IB_WC_LOC_QP_OP_ERR);
            }
            _ => {}
        }
        let Some(peer) = self.peer(index, wr)? else {
            // Without a peer the request succeeds.
            return Ok(u32::try_from(length(wr.sges)).unwrap_or(u32::MAX));
        };
        match (wr.opcode, wr.segment) {
            (
                bindings::ib_wr_opcode_IB_WR_RDMA_READ
                | bindings::ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV,
                Segment::Remote { addr, key },
            ) => {
                let read = self.read(wr, addr, key)?;
                if wr.opcode == bindings::ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV {
                    self.invalidate(wr.ex);
                }
                Ok(read)
            }
            (_, Segment::Remote { addr, key }) => {
                self.write(wr, addr, key)?;
                if wr.has_imm() {
                    let bytes = u32::try_from(length(wr.sges)).unwrap_or(u32::MAX);
                    self.receive(index, peer, wr, Some(bytes))?;
                }
                Ok(0)
            }
            (
                _,
                Segment::Atomic {
                    addr,
                    key,
                    compare_add,
                    swap,
                },
            ) => self.atomic(wr, addr, key, compare_add, swap),
            _ => {
                self.receive(index, peer, wr, None)?;
                Ok(0)
            }
        }
    }

    /// Returns the QP that a request is for, if it is one of this device.
    #[inline]
    fn peer(&self, index: usize, wr: &SendWr<'_>) -> Result<Option<usize>, Status> {
        let Some(qp) = self.qps.get(index) else {
            return Ok(None);
        };
        let num = match wr.segment {
            Segment::Datagram { num, .. } => num,
            _ => qp.attr.dest_qp_num,
        };
        if num == 0 {
            return Ok(None);
        }
        let Some(peer) = self.find_qp(num) else {
            return Ok(None);
        };
        let ready = self.qps.get(peer).is_some_and(|peer| {
            peer.can_receive()
                && peer.config.kind == qp.config.kind
                && match wr.segment {
                    Segment::Datagram { qkey, .. } => peer.attr.qkey == qkey,
                    _ => peer.attr.dest_qp_num == qp.num,
                }
        });
        if ready {
            Ok(Some(peer))
        } else if qp.is_rc() {
            Err(bindings::ib_wc_status_IB_WC_RETRY_EXC_ERR)
        } else {
            Ok(None)
        }
    }

    /// Copies the bytes of a SEND to the entries of a receive, from byte `skip` on: these are
    /// `needed` bytes. Fails with the status of the receive, and that of the SEND.
    #[inline]
    fn scatter(
        &self,
        wr: &SendWr<'_>,
        sges: &[Sge],
        skip: u32,
        needed: u64,
    ) -> Result<(), (Status, Status)> {
        if needed > length(sges) {
            return Err((
                bindings::ib_wc_status_IB_WC_LOC_LEN_ERR,
                bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR,
            ));
        }
        let source = (wr.sges, Use::LocalRead);
        let target = (sges, Use::LocalWrite);
        transfer(&self.mrs, source, target, skip).map_err(|denied| match denied {
            Denied::Source => (
                bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR,
                bindings::ib_wc_status_IB_WC_LOC_PROT_ERR,
            ),
            Denied::Target => (
                bindings::ib_wc_status_IB_WC_LOC_PROT_ERR,
                bindings::ib_wc_status_IB_WC_REM_OP_ERR,
            ),
        })
    }

    /// Completes a receive of `peer`. `written` is the length of an RDMA WRITE, whose bytes do not
    /// go into the receive.
    fn receive(
        &mut self,
        index: usize,
        peer: usize,
        wr: &SendWr<'_>,
        written: Option<u32>,
    ) -> Result<(), Status> {
        let Some((is_rc, src_qp)) = self.qps.get(index).map(|qp| (qp.is_rc(), qp.num)) else {
            return Ok(());
        };
        let Some((recv, retires)) = self.take_recv(peer) else {
            if is_rc {
                return Err(bindings::ib_wc_status_IB_WC_RNR_RETRY_EXC_ERR);
            }
            return Ok(());
        };
        let Some(to) = self.qps.get(peer) else {
            return Ok(());
        };
        let skip = if to.is_ud() { GRH_BYTES } else { 0 };
        let bytes = written.unwrap_or(u32::try_from(length(wr.sges)).unwrap_or(u32::MAX));
        let needed = u64::from(bytes) + u64::from(skip);
        let sges = match retires {
            Retires::SrqRecv(srq) => match self.srqs.get(srq as usize) {
                Some(srq) => srq.queue.entries(&recv),
                None => &[],
            },
            _ => to.recvs.entries(&recv),
        };
        let moved = if written.is_some() {
            Ok(())
        } else {
            self.scatter(wr, sges, skip, needed)
        };
        let mut entry = Entry {
            wr_id: recv.wr_id,
            qp: Some(to.config.raw),
            index: peer,
            retires,
            opcode: if written.is_some() {
                bindings::ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM
            } else {
                bindings::ib_wc_opcode_IB_WC_RECV
            },
            byte_len: bytes.saturating_add(skip),
            src_qp,
            solicited: wr.flags & bindings::ib_send_flags_IB_SEND_SOLICITED != 0,
            ..Entry::default()
        };
        // A completion reports the invalidation of a key that was valid, but on iWARP: ULPs rely on
        // it.
        let moved = moved.and_then(|()| {
            if wr.invalidates_remotely() && !self.invalidate(wr.ex) {
                return Err((
                    bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR,
                    bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR,
                ));
            }
            Ok(())
        });
        if let Err((local, remote)) = moved {
            entry.status = local;
            self.complete_recv(entry);
            if !is_rc {
                return Ok(());
            }
            self.fail_qp(peer);
            return Err(remote);
        }
        if wr.has_imm() {
            (entry.flags, entry.ex) = (bindings::ib_wc_flags_IB_WC_WITH_IMM, wr.ex);
        }
        if wr.invalidates_remotely() {
            (entry.flags, entry.ex) = (bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE, wr.ex);
        }
        self.complete_recv(entry);
        Ok(())
    }

    fn take_recv(&mut self, index: usize) -> Option<(Recv, Retires)> {
        let qp = self.qps.get_mut(index)?;
        match qp.config.srq {
            Some(srq) => {
                let retires = Retires::SrqRecv(srq.try_into().ok()?);
                Some((self.srqs.get_mut(srq)?.queue.take()?, retires))
            }
            None => Some((qp.recvs.take()?, Retires::Recv)),
        }
    }

    fn write(&mut self, wr: &SendWr<'_>, addr: u64, key: u32) -> Result<(), Status> {
        let Ok(length) = u32::try_from(length(wr.sges)) else {
            return Err(bindings::ib_wc_status_IB_WC_LOC_LEN_ERR);
        };
        let remote = [Sge { addr, length, key }];
        self.rdma((wr.sges, Use::LocalRead), (&remote, Use::RemoteWrite), true)
    }

    fn read(&mut self, wr: &SendWr<'_>, addr: u64, key: u32) -> Result<u32, Status> {
        let Ok(length) = u32::try_from(length(wr.sges)) else {
            return Err(bindings::ib_wc_status_IB_WC_LOC_LEN_ERR);
        };
        let remote = [Sge { addr, length, key }];
        self.rdma(
            (&remote, Use::RemoteRead),
            (wr.sges, Use::LocalWrite),
            false,
        )?;
        Ok(length)
    }

    fn rdma(
        &self,
        source: (&[Sge], Use),
        target: (&[Sge], Use),
        target_is_remote: bool,
    ) -> Result<(), Status> {
        transfer(&self.mrs, source, target, 0).map_err(|denied| {
            if matches!(denied, Denied::Target) == target_is_remote {
                bindings::ib_wc_status_IB_WC_REM_ACCESS_ERR
            } else {
                bindings::ib_wc_status_IB_WC_LOC_PROT_ERR
            }
        })
    }

    fn atomic(
        &mut self,
        wr: &SendWr<'_>,
        addr: u64,
        key: u32,
        compare_add: u64,
        swap: u64,
    ) -> Result<u32, Status> {
        let adds = wr.opcode == bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD;
        let remote = Sge {
            addr,
            length: 8,
            key,
        };
        if addr % 8 != 0 {
            return Err(bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR);
        }
        let old = atomic(&self.mrs, remote, |old| {
            if adds {
                old.wrapping_add(compare_add)
            } else if old == compare_add {
                swap
            } else {
                old
            }
        })
        .ok_or(bindings::ib_wc_status_IB_WC_REM_ACCESS_ERR)?;
        let old = [Sge {
            addr: (&raw const old) as u64,
            length: 8,
            key: LOCAL_KEY,
        }];
        self.rdma((&old, Use::LocalRead), (wr.sges, Use::LocalWrite), false)?;
        Ok(8)
    }
}
