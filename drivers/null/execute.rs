// SPDX-License-Identifier: GPL-2.0

//! What a request does: it moves the data, and uses up the peer's receive.

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
        Sge,
        Use, //
    },
    post::{
        Extra,
        SendWr,
        Status, //
    },
    recv::Recv, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// What the first bytes of a UD receive are for: the GRH, which there is none of here.
const GRH_BYTES: u32 = 40;

impl Machine {
    /// Does what a request asks for. Returns the number of bytes that came.
    pub(crate) fn execute(&mut self, index: usize, wr: &SendWr<'_>) -> Result<u32, Status> {
        match wr.opcode {
            bindings::ib_wr_opcode_IB_WR_REG_MR => {
                if let Extra::Register {
                    index,
                    registration,
                } = wr.extra
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
            // Nobody is there: the request is done.
            return Ok(u32::try_from(length(wr.sges)).unwrap_or(u32::MAX));
        };
        match (wr.opcode, wr.extra) {
            (
                bindings::ib_wr_opcode_IB_WR_RDMA_READ
                | bindings::ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV,
                Extra::Remote { addr, key },
            ) => {
                let read = self.read(wr, addr, key)?;
                if wr.opcode == bindings::ib_wr_opcode_IB_WR_RDMA_READ_WITH_INV {
                    self.invalidate(wr.ex);
                }
                Ok(read)
            }
            (_, Extra::Remote { addr, key }) => {
                self.write(wr, addr, key)?;
                if wr.has_imm() {
                    let bytes = u32::try_from(length(wr.sges)).unwrap_or(u32::MAX);
                    self.receive(index, peer, wr, Some(bytes))?;
                }
                Ok(0)
            }
            (
                _,
                Extra::Atomic {
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

    /// Finds whom a request is for, if it is for anybody on this device.
    #[inline]
    fn peer(&self, index: usize, wr: &SendWr<'_>) -> Result<Option<usize>, Status> {
        let Some(qp) = self.qps.get(index) else {
            return Ok(None);
        };
        let num = match wr.extra {
            Extra::Datagram { num, .. } => num,
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
                && match wr.extra {
                    Extra::Datagram { qkey, .. } => peer.attr.qkey == qkey,
                    _ => peer.attr.dest_qp_num == qp.num,
                }
        });
        match ready {
            true => Ok(Some(peer)),
            false if qp.is_rc() => Err(bindings::ib_wc_status_IB_WC_RETRY_EXC_ERR),
            false => Ok(None),
        }
    }

    /// Completes a receive of `peer`. `written` is the length of an RDMA WRITE, which itself has no
    /// bytes for the receive.
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
            return match is_rc {
                true => Err(bindings::ib_wc_status_IB_WC_RNR_RETRY_EXC_ERR),
                false => Ok(()),
            };
        };
        let Some(to) = self.qps.get(peer) else {
            return Ok(());
        };
        let skip = if to.is_ud() { GRH_BYTES } else { 0 };
        let bytes = written.unwrap_or(u32::try_from(length(wr.sges)).unwrap_or(u32::MAX));
        let sges = match retires {
            Retires::SrqRecv(srq) => match self.srqs.get(srq) {
                Some(srq) => srq.queue.entries(&recv),
                None => &[],
            },
            _ => to.recvs.entries(&recv),
        };
        let moved = if written.is_some() {
            Ok(())
        } else if u64::from(bytes) + u64::from(skip) > length(sges) && bytes + skip != 0 {
            Err((
                bindings::ib_wc_status_IB_WC_LOC_LEN_ERR,
                bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR,
            ))
        } else {
            transfer(
                &self.mrs,
                (wr.sges, Use::LocalRead),
                (sges, Use::LocalWrite),
                skip,
            )
            .map_err(|denied| match denied {
                Denied::Source => (
                    bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR,
                    bindings::ib_wc_status_IB_WC_LOC_PROT_ERR,
                ),
                Denied::Target => (
                    bindings::ib_wc_status_IB_WC_LOC_PROT_ERR,
                    bindings::ib_wc_status_IB_WC_REM_OP_ERR,
                ),
            })
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
            byte_len: bytes + skip,
            src_qp,
            solicited: wr.flags & bindings::ib_send_flags_IB_SEND_SOLICITED != 0,
            ..Entry::default()
        };
        // But on iWARP, what a completion says was invalidated was valid: ULPs take it for proof.
        let moved = moved.and_then(|()| match wr.invalidates_remotely() {
            true if !self.invalidate(wr.ex) => Err((
                bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR,
                bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR,
            )),
            _ => Ok(()),
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
            Some(srq) => Some((self.srqs.get_mut(srq)?.queue.take()?, Retires::SrqRecv(srq))),
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
        let old = atomic(&self.mrs, remote, |old| match adds {
            true => old.wrapping_add(compare_add),
            false if old == compare_add => swap,
            false => old,
        })
        .ok_or(bindings::ib_wc_status_IB_WC_REM_ACCESS_ERR)?;
        let old = [Sge {
            addr: (&raw const old) as u64,
            length: 8,
            key: crate::memory::LOCAL_KEY,
        }];
        self.rdma((&old, Use::LocalRead), (wr.sges, Use::LocalWrite), false)?;
        Ok(8)
    }
}
