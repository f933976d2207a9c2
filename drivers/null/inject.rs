// SPDX-License-Identifier: GPL-2.0

//! What is to go wrong.

use crate::{
    cq::{
        Entry,
        Retires, //
    },
    machine::Machine, //
};
use kernel::prelude::*;

/// A kind of object whose creation can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// A protection domain.
    Pd,
    /// A completion queue.
    Cq,
    /// A queue pair.
    Qp,
    /// A shared receive queue.
    Srq,
    /// An address handle.
    Ah,
    /// A memory region.
    Mr,
}

/// Something to go wrong, on a QP or on whichever QP of the device comes first.
///
/// Statuses, opcodes and events are C's values, known or not. Errors are positive error numbers.
#[derive(Clone, Copy, Debug)]
pub enum Injection {
    /// The next `count` requests complete with this status.
    Status {
        /// `enum ib_wc_status`.
        status: u32,
        /// The vendor's syndrome.
        vendor_err: u32,
        /// How many.
        count: u32,
        /// Whether the QP goes to the error state with the first, as it does on hardware.
        fatal: bool,
    },
    /// The next `count` successful completions have this opcode (`enum ib_wc_opcode`).
    Opcode {
        /// `enum ib_wc_opcode`.
        opcode: u32,
        /// How many.
        count: u32,
    },
    /// The next `count` completions are held back until they are released, while later ones
    /// pass. What is never released is lost.
    Hold {
        /// How many; `u32::MAX` is all.
        count: u32,
    },
    /// The first `count` completions that are held are let go, and none is held any more.
    Release {
        /// How many; `u32::MAX` is all.
        count: u32,
        /// Whether the last one comes first.
        reversed: bool,
    },
    /// The next `count` completions come twice.
    Duplicate {
        /// How many.
        count: u32,
    },
    /// After `after` more requests one is refused: posting it fails.
    Refuse {
        /// How many requests are posted before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// As `Refuse`, but the device does not say which request it was, though it has to.
    Mute {
        /// How many requests are posted before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// After `after` more requests one is posted, and posting it fails all the same, without a word
    /// about which it was: siw does that.
    Lapse {
        /// How many requests are posted before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// The next call that posts to the send queue waits, without sleeping, until another one posts
    /// to it. Of a QP only.
    Stall {
        /// For how long at the most, in microseconds.
        us: u32,
        /// Whether it waits with its requests in the queue, before it returns, and not with nothing
        /// done yet.
        late: bool,
    },
    /// The next `count` changes of the QP's state fail.
    Modify {
        /// The error.
        errno: u32,
        /// How many.
        count: u32,
    },
    /// The next change of the QP's state or attributes takes longer, until another one is begun. Of
    /// a QP only.
    Dwell {
        /// How much longer at the most, in microseconds.
        us: u32,
    },
    /// The next `count` MRs cannot be deregistered. Of the device only.
    Dereg {
        /// The error.
        errno: u32,
        /// How many.
        count: u32,
    },
    /// The QP is connected to the one with this number, from whatever state it is in, as a
    /// connection manager would; to nobody by a number that no QP has. Of a QP only.
    Connect {
        /// The number of the peer.
        peer: u32,
    },
    /// The QP fails: it goes to the error state by itself. Of a QP only.
    Fail,
    /// An event (`enum ib_event_type`): of the QP, or of the device, of its port, or of all its CQs
    /// or SRQs.
    Event {
        /// `enum ib_event_type`.
        event: u32,
    },
    /// After `after` more objects of a kind, the creation of one fails. Of the device only.
    Create {
        /// The kind.
        object: Object,
        /// How many are created before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// The next `count` times that a CQ is armed by one who asks for completions that are there
    /// (`IB_CQ_REPORT_MISSED_EVENTS`) take longer, and find some. Of the device only.
    Arm {
        /// How much longer, in microseconds.
        us: u32,
        /// How many; `u32::MAX` is all.
        count: u32,
    },
    /// Whether posting looks at the first entry of requests that have none, unless they have no
    /// list, as irdma and cxgb4 do: if it is not zero it would be used, so the request is refused
    /// (`EFAULT`). As with those, such a list has memory for an entry. Of the device only.
    Peek {
        /// Whether it does.
        on: bool,
    },
    /// Whether a request's place in its queue is free once it completes, as on rxe, not once its
    /// completion was polled. Of the device only.
    Eager {
        /// Whether it is.
        on: bool,
    },
}

/// Whether a call that posts is to wait for another one.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Stall {
    #[default]
    No,
    /// The next one is to wait for so many microseconds at the most.
    Next { us: u32, late: bool },
    /// One waits.
    Waiting,
}

/// What is to go wrong with the requests of a QP.
#[derive(Clone, Copy, Default)]
pub(crate) struct Plan {
    /// Whether there may be something to do on the post path.
    busy: bool,
    status: Option<(u32, u32, bool)>,
    statuses: u32,
    opcode: u32,
    opcodes: u32,
    holds: u32,
    duplicates: u32,
    refuse: Option<(u32, u32)>,
    mute: bool,
    lapse: Option<(u32, u32)>,
    pub(crate) peek: bool,
    modify: u32,
    modifies: u32,
}

fn take(count: &mut u32) -> bool {
    match *count {
        0 => false,
        u32::MAX => true,
        n => {
            *count = n - 1;
            true
        }
    }
}

/// What becomes of a completion.
#[derive(Default)]
pub(crate) struct Verdict {
    pub(crate) hold: bool,
    pub(crate) twice: bool,
    pub(crate) fatal: bool,
}

impl Plan {
    /// Says whether there is nothing to do on the post path.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        !self.busy
    }

    /// Finds out whether there is something to do, when that may have changed.
    fn update(&mut self) {
        let counts = self.statuses | self.opcodes | self.holds | self.duplicates;
        self.busy = counts != 0 || self.refuse.is_some() || self.lapse.is_some() || self.peek;
    }

    pub(crate) fn set(&mut self, injection: Injection) {
        match injection {
            Injection::Status {
                status,
                vendor_err,
                count,
                fatal,
            } => {
                self.status = Some((status, vendor_err, fatal));
                self.statuses = count;
            }
            Injection::Opcode { opcode, count } => (self.opcode, self.opcodes) = (opcode, count),
            Injection::Hold { count } => self.holds = count,
            Injection::Release { .. } => self.holds = 0,
            Injection::Duplicate { count } => self.duplicates = count,
            Injection::Refuse { after, errno } => {
                (self.refuse, self.mute) = (Some((after, errno)), false);
            }
            Injection::Mute { after, errno } => {
                (self.refuse, self.mute) = (Some((after, errno)), true);
            }
            Injection::Lapse { after, errno } => self.lapse = Some((after, errno)),
            Injection::Modify { errno, count } => (self.modify, self.modifies) = (errno, count),
            Injection::Connect { .. }
            | Injection::Fail
            | Injection::Event { .. }
            | Injection::Create { .. }
            | Injection::Dereg { .. }
            | Injection::Stall { .. }
            | Injection::Dwell { .. }
            | Injection::Arm { .. }
            | Injection::Eager { .. } => {}
            Injection::Peek { on } => self.peek = on,
        }
        self.update();
    }

    /// Fails if a request is to be refused.
    pub(crate) fn refuses(&mut self) -> Result {
        match &mut self.refuse {
            None => Ok(()),
            Some((0, errno)) => {
                let errno = *errno;
                self.refuse = None;
                self.update();
                Err(error(errno))
            }
            Some((after, _)) => {
                *after -= 1;
                Ok(())
            }
        }
    }

    /// Fails if the call that has just posted a request is to fail.
    pub(crate) fn lapses(&mut self) -> Result {
        match &mut self.lapse {
            None => Ok(()),
            Some((0, errno)) => {
                let errno = *errno;
                self.lapse = None;
                self.update();
                Err(error(errno))
            }
            Some((after, _)) => {
                *after -= 1;
                Ok(())
            }
        }
    }

    /// Says, once, whether a request was refused without a word about which.
    fn was_mute(&mut self) -> bool {
        let mute = self.mute && self.refuse.is_none();
        self.mute &= !mute;
        mute
    }

    /// Fails if a change of state is to fail.
    pub(crate) fn fails_modify(&mut self) -> Result {
        if take(&mut self.modifies) {
            return Err(error(self.modify));
        }
        Ok(())
    }

    /// Changes the result of a request.
    fn spoil(&mut self, entry: &mut Entry, verdict: &mut Verdict) {
        if let Some((status, vendor_err, fatal)) = self.status {
            if take(&mut self.statuses) {
                (entry.status, entry.vendor_err) = (status, vendor_err);
                verdict.fatal |= fatal;
            }
        }
        if entry.status == 0 && take(&mut self.opcodes) {
            entry.opcode = self.opcode;
        }
        self.update();
    }

    /// Decides about a completion.
    fn judge(&mut self, verdict: &mut Verdict) {
        verdict.hold |= take(&mut self.holds);
        verdict.twice |= take(&mut self.duplicates);
        self.update();
    }
}

fn error(errno: u32) -> Error {
    i32::try_from(errno).map_or(EINVAL, |errno| Error::from_errno(-errno))
}

/// Which creations are to fail, and after how many.
#[derive(Default)]
pub(crate) struct Creations([Option<(u32, u32)>; 6]);

impl Creations {
    pub(crate) fn set(&mut self, object: Object, after: u32, errno: u32) {
        if let Some(creation) = self.0.get_mut(object as usize) {
            *creation = Some((after, errno));
        }
    }

    /// Fails if an object is not to be created.
    pub(crate) fn check(&mut self, object: Object) -> Result {
        let Some(creation) = self.0.get_mut(object as usize) else {
            return Ok(());
        };
        match creation {
            None => Ok(()),
            Some((0, errno)) => {
                let errno = *errno;
                *creation = None;
                Err(error(errno))
            }
            Some((after, _)) => {
                *after -= 1;
                Ok(())
            }
        }
    }
}

/// Which MRs cannot be deregistered: the next `count`.
#[derive(Default)]
pub(crate) struct Deregs {
    pub(crate) errno: u32,
    pub(crate) count: u32,
}

impl Deregs {
    /// Fails if an MR is not to be deregistered.
    pub(crate) fn check(&mut self) -> Result {
        match take(&mut self.count) {
            true => Err(error(self.errno)),
            false => Ok(()),
        }
    }
}

/// How much longer arming a CQ takes: the next `count` times.
#[derive(Default)]
pub(crate) struct Arms {
    pub(crate) us: u32,
    pub(crate) count: u32,
}

impl Arms {
    /// Returns how much longer it takes now.
    pub(crate) fn next(&mut self) -> Option<u32> {
        take(&mut self.count).then_some(self.us)
    }
}

impl Machine {
    /// Somebody posts to a QP: says whether he is to wait, for how long, and whether late. Who
    /// waits already waits no longer.
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

    /// Says, once, whether the last request of a QP was refused without a word about which.
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

    /// Delivers a completion as the plans want it.
    pub(crate) fn deliver_planned(&mut self, cq: usize, entry: Entry, mut verdict: Verdict) {
        let Some(qp) = self.qps.get_mut(entry.index) else {
            return;
        };
        qp.plan.judge(&mut verdict);
        self.plan.judge(&mut verdict);
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

    /// Lets held completions go.
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
