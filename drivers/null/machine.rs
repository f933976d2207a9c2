// SPDX-License-Identifier: GPL-2.0

//! The device's own state: everything that its one lock protects.
//!
//! C objects hold indices into these tables, so that what the device does is safe code.

use crate::{
    cm::Cm,
    cq::{
        Cq,
        Entry,
        Retires, //
    },
    inject::{
        Arms,
        Creations,
        Failures,
        Plan,
        Stall,
        Verdict, //
    },
    memory::{
        mr_of,
        Mr, //
    },
    qp::{
        index_of,
        next_num,
        Attributes,
        Config,
        Qp,
        MAX_QP, //
    },
    recv::Srq,
    ring::Slots, //
};
use core::mem::MaybeUninit;
use kernel::{
    prelude::*,
    sync::Arc, //
};
use rdma_bindings as bindings;

pub(crate) const MAX_CQ: usize = 4096;
pub(crate) const MAX_SRQ: usize = 256;
pub(crate) const MAX_MR: usize = 4096;

pub(crate) struct Machine {
    pub(crate) cqs: Slots<Cq>,
    pub(crate) qps: Slots<Qp>,
    pub(crate) srqs: Slots<Srq>,
    pub(crate) mrs: Slots<Mr>,
    /// The generation of the last QP number.
    pub(crate) generation: u32,
    /// The injections for any QP.
    pub(crate) plan: Plan,
    pub(crate) creations: Creations,
    pub(crate) deregs: Failures,
    pub(crate) arms: Arms,
    /// `true` for an iWARP device, such as siw.
    pub(crate) iwarp: bool,
    /// The connection manager, if the device has one.
    pub(crate) cm: Option<Arc<Cm>>,
    /// `true` if the device does not report the limits of a request.
    pub(crate) vague: bool,
    /// `true` if the entry of a request is free once it completes, as on rxe, `false` if once its
    /// completion was polled.
    pub(crate) eager: bool,
    /// The number of requests with a fence. Those of a QP without a peer do not count, nor are they
    /// looked at, unless something is injected.
    pub(crate) fences: usize,
}

impl Machine {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            cqs: Slots::new(MAX_CQ)?,
            qps: Slots::new(MAX_QP)?,
            srqs: Slots::new(MAX_SRQ)?,
            mrs: Slots::new(MAX_MR)?,
            generation: 0,
            plan: Plan::default(),
            creations: Creations::default(),
            deregs: Failures::default(),
            arms: Arms::default(),
            iwarp: false,
            cm: None,
            vague: false,
            eager: false,
            fences: 0,
        })
    }

    /// Takes the first completions of a CQ, at most as many as `wcs` has, and returns their number.
    /// The entries of their requests in the queues are free again then.
    #[inline]
    pub(crate) fn poll(&mut self, cq: usize, wcs: &mut [MaybeUninit<bindings::ib_wc>]) -> usize {
        match self.cqs.get_mut(cq) {
            Some(cq) => cq.poll(wcs, |entry| retire(entry, &mut self.qps, &mut self.srqs)),
            None => 0,
        }
    }

    /// Adds a completion to a CQ.
    #[inline]
    pub(crate) fn push(&mut self, cq: usize, entry: Entry) {
        if let Some(cq) = self.cqs.get_mut(cq) {
            cq.push(entry);
        }
    }

    /// Puts a QP at a vacant index, and returns its number.
    pub(crate) fn add_qp(&mut self, index: usize, mut qp: KBox<Qp>) -> u32 {
        let num = next_num(&mut self.generation, index);
        qp.num = num;
        self.qps.put(index, qp);
        num
    }

    /// Finds a QP by its number.
    pub(crate) fn find_qp(&self, num: u32) -> Option<usize> {
        let index = index_of(num);
        (self.qps.get(index)?.num == num).then_some(index)
    }

    /// Removes a QP and its completions.
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
        self.plan.modify.check()?;
        let qp = self.qps.get_mut(index).ok_or(EINVAL)?;
        qp.plan.modify.check()?;
        let next = if mask & bindings::ib_qp_attr_mask_IB_QP_STATE != 0 {
            attr.qp_state
        } else {
            qp.state
        };
        let ok = match self.cm {
            // `iw_cm` names the state and the access only, as drivers of iWARP know the rest.
            Some(_) => next >= qp.state || next == bindings::ib_qp_state_IB_QPS_RESET,
            // SAFETY: The function has no preconditions: it looks the values up in a table, and
            // checks them.
            None => unsafe { bindings::ib_modify_qp_is_ok(qp.state, next, qp.config.kind, mask) },
        };
        if !ok {
            return Err(EINVAL);
        }
        qp.attr.modify(attr, mask);
        match next {
            bindings::ib_qp_state_IB_QPS_ERR => self.fail_qp(index),
            // This is how `iw_cm_disconnect()` asks for the end of a connection.
            bindings::ib_qp_state_IB_QPS_SQD if self.cm.is_some() => self.fail_qp(index),
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

    /// Returns the QP with this number. Fails with `EINVAL` if there is none, or if it can no
    /// longer be connected.
    pub(crate) fn connectable(&self, num: u32) -> Result<usize> {
        let index = self.find_qp(num).ok_or(EINVAL)?;
        let state = self.qps.get(index).ok_or(EINVAL)?.state;
        if state >= bindings::ib_qp_state_IB_QPS_RTS {
            return Err(EINVAL);
        }
        Ok(index)
    }

    /// Ends the connection that the connection manager has made, if there is one: the QP at the
    /// other end fails.
    pub(crate) fn disconnect(&mut self, index: usize) {
        if let Some(peer) = self.cm.as_ref().and_then(|cm| cm.lose(index)) {
            self.fail_qp(peer);
        }
    }

    /// Drops all requests of a QP, as hardware does.
    fn reset_qp(&mut self, index: usize) {
        self.disconnect(index);
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

    /// Moves a QP to the error state and flushes its receives. Its send queue is always empty.
    pub(crate) fn fail_qp(&mut self, index: usize) {
        if let Some(qp) = self.qps.get_mut(index) {
            qp.state = bindings::ib_qp_state_IB_QPS_ERR;
        }
        while let Some(recv) = self.qps.get_mut(index).and_then(|qp| qp.recvs.take()) {
            self.flush_recv(index, recv.wr_id);
        }
        self.disconnect(index);
    }

    /// Completes a receive with a flush error.
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
                    if let Some(srq) = self.srqs.get_mut(srq as usize) {
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

    /// Ends the registration that a key belongs to. Returns whether the key was valid.
    pub(crate) fn invalidate(&mut self, key: u32) -> bool {
        let iwarp = self.iwarp;
        let mr = self.mrs.get_mut(mr_of(key));
        mr.is_some_and(|mr| mr.invalidate(key, iwarp))
    }

    /// Called when a request is posted to a QP. Returns for how long the call is to wait, and
    /// whether after it has posted. A call that waits already is released.
    #[inline]
    pub(crate) fn stall(&mut self, index: usize) -> Option<(u32, bool)> {
        let stall = &mut self.qps.get_mut(index)?.stall;
        match *stall {
            Stall::No => None,
            Stall::Next { us, late } => {
                *stall = Stall::Waiting;
                Some((us, late))
            }
            Stall::Waiting => {
                *stall = Stall::No;
                None
            }
        }
    }

    /// Fails if the next request of a QP is to be refused.
    pub(crate) fn refuses(&mut self, index: usize) -> Result {
        self.qps.get_mut(index).ok_or(EINVAL)?.plan.refuses()?;
        self.plan.refuses()
    }

    /// Fails if the call that has just posted a request of a QP is to fail.
    pub(crate) fn lapses(&mut self, index: usize) -> Result {
        if let Some(qp) = self.qps.get_mut(index) {
            qp.plan.lapses()?;
        }
        self.plan.lapses()
    }

    /// Returns, once, whether the last request of a QP was refused by [`Injection::Mute`].
    pub(crate) fn was_mute(&mut self, index: usize) -> bool {
        let qp = self.qps.get_mut(index).map(|qp| qp.plan.was_mute());
        self.plan.was_mute() | qp.unwrap_or(false)
    }

    /// Applies the plans to the result of a request.
    pub(crate) fn spoil(&mut self, entry: &mut Entry) -> Verdict {
        let mut verdict = Verdict::default();
        if let Some(qp) = self.qps.get_mut(entry.index) {
            qp.plan.spoil(entry, &mut verdict);
        }
        self.plan.spoil(entry, &mut verdict);
        verdict
    }

    /// Delivers a completion according to the plans.
    pub(crate) fn deliver_planned(&mut self, cq: usize, entry: Entry, mut verdict: Verdict) {
        let Some(qp) = self.qps.get_mut(entry.index) else {
            return;
        };
        qp.plan.judge(&mut verdict);
        self.plan.judge(&mut verdict);
        if verdict.vanish {
            return;
        }
        if !verdict.hold || qp.held.push((cq, entry)).is_err() {
            self.push(cq, entry);
        }
        if verdict.twice {
            let again = Entry {
                retires: Retires::Nothing,
                ..entry
            };
            self.push(cq, again);
        }
    }

    /// Releases completions that are held.
    pub(crate) fn release(&mut self, index: usize, count: u32, reversed: bool) {
        for _ in 0..count {
            let Some(qp) = self.qps.get_mut(index) else {
                return;
            };
            let next = if reversed {
                qp.held.pop_back()
            } else {
                qp.held.pop().map(|(_, held)| held)
            };
            let Some((cq, entry)) = next else { return };
            self.push(cq, entry);
        }
    }
}

/// Frees the entries that a completion gives back.
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
            if let Some(srq) = srqs.get_mut(srq as usize) {
                srq.queue.retire();
            }
        }
        Retires::Nothing => {}
    }
}
