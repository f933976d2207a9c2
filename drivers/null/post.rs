// SPDX-License-Identifier: GPL-2.0

//! Posting: a request is done at once, and completes.

use crate::{
    cq::{
        Entry,
        Retires, //
    },
    machine::Machine,
    memory::{
        Registration,
        Sge, //
    }, //
};
use kernel::prelude::*;
use rdma_bindings as bindings;

/// What only some requests have.
#[derive(Clone, Copy)]
pub(crate) enum Extra {
    Nothing,
    /// Of RDMA READ and WRITE.
    Remote {
        addr: u64,
        key: u32,
    },
    /// Of atomics: compare and swap, or add.
    Atomic {
        addr: u64,
        key: u32,
        compare_add: u64,
        swap: u64,
    },
    /// Of UD.
    Datagram {
        num: u32,
        qkey: u32,
    },
    /// Of registrations.
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
    pub(crate) extra: Extra,
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
        qp.sends += 1;
        qp.unsignaled += 1;
        let (cq, is_rc) = (qp.config.send_cq, qp.is_rc());
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

    /// Has a completion give back its place and those of the unsignaled ones before it.
    fn retire_sends(&mut self, entry: &mut Entry) {
        let eager = self.eager;
        let Some(qp) = self.qps.get_mut(entry.index) else {
            return;
        };
        let places = core::mem::take(&mut qp.unsignaled);
        if eager {
            qp.sends -= places.min(qp.sends);
        } else {
            entry.retires = Retires::Sends(places);
        }
    }

    /// Adds a completion to a CQ.
    #[inline]
    pub(crate) fn push(&mut self, cq: usize, entry: Entry) {
        if let Some(cq) = self.cqs.get_mut(cq) {
            cq.push(entry);
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

    /// Completes a receive that will never be used.
    pub(crate) fn flush_recv(&mut self, index: usize, wr_id: u64) {
        let Some(qp) = self.qps.get(index) else {
            return;
        };
        self.complete_recv(Entry {
            wr_id,
            qp: Some(qp.config.raw),
            index,
            retires: Retires::Recv,
            status: bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR,
            opcode: bindings::ib_wc_opcode_IB_WC_RECV,
            ..Entry::default()
        });
    }

    pub(crate) fn complete_recv(&mut self, mut entry: Entry) {
        let plan_idle = self.plan.is_idle();
        let eager = self.eager;
        let Some(qp) = self.qps.get_mut(entry.index) else {
            return;
        };
        let idle = plan_idle && qp.plan.is_idle();
        let cq = qp.config.recv_cq;
        if eager {
            match core::mem::take(&mut entry.retires) {
                Retires::SrqRecv(srq) => {
                    if let Some(srq) = self.srqs.get_mut(srq) {
                        srq.queue.retire();
                    }
                }
                _ => qp.recvs.retire(),
            }
        }
        if idle {
            return self.push(cq, entry);
        }
        let index = entry.index;
        let verdict = self.spoil(&mut entry);
        let fatal = verdict.fatal;
        self.deliver_planned(cq, entry, verdict);
        if fatal && self.qps.get(index).is_some_and(|qp| !qp.has_failed()) {
            self.fail_qp(index);
        }
    }
}
