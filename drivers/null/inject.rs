// SPDX-License-Identifier: GPL-2.0

//! Injections: faults that tests ask for.

use crate::cq::Entry;
use core::str::FromStr;
use kernel::{
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// A kind of object whose creation can be made to fail, or a call of the connection manager that
/// can.
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
    /// `iw_create_listen`.
    Listen,
    /// `iw_connect`.
    Connect,
    /// `iw_accept`. The request is gone then, and its sender gets `ECONNRESET`.
    Accept,
    /// `iw_reject`. The request is gone then, and its sender gets `ECONNRESET`.
    Reject,
}

/// A fault, of a QP or of any QP of the device.
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
        /// Number of times.
        count: u32,
        /// `true` if the first one moves the QP to the error state, as on hardware.
        fatal: bool,
    },
    /// The next `count` successful completions have this opcode (`enum ib_wc_opcode`).
    Opcode {
        /// `enum ib_wc_opcode`.
        opcode: u32,
        /// Number of times.
        count: u32,
    },
    /// The next `count` completions are held back until they are released, while later ones
    /// pass. A completion that is never released is lost.
    Hold {
        /// Number of completions; `u32::MAX` is all of them.
        count: u32,
    },
    /// The first `count` completions that are held are let go, and no more are held.
    Release {
        /// Number of completions; `u32::MAX` is all of them.
        count: u32,
        /// `true` for the last one first.
        reversed: bool,
    },
    /// The next `count` completions never come, and their requests keep their places in the queue.
    Vanish {
        /// Number of completions; `u32::MAX` is all of them.
        count: u32,
    },
    /// The next `count` completions come twice: by [`NullDevice::duplicate`](crate::NullDevice) or
    /// debugfs only.
    Duplicate {
        /// Number of times.
        count: u32,
    },
    /// After `after` more requests one is refused: posting it fails.
    Refuse {
        /// Number of requests that are posted before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// As `Refuse`, but the device does not set `bad_wr`, as it has to.
    Mute {
        /// Number of requests that are posted before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// After `after` more requests one is posted, but the call returns an error and does not set
    /// `bad_wr`, as siw does.
    Lapse {
        /// Number of requests that are posted before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// The next call that posts to the send queue waits, without sleeping, until another thread
    /// posts to it. Of a QP only.
    Stall {
        /// The longest time, in microseconds.
        us: u32,
        /// `true` if it waits after it has posted its requests, `false` if before.
        late: bool,
    },
    /// The next `count` changes of the QP's state fail.
    Modify {
        /// The error.
        errno: u32,
        /// Number of times.
        count: u32,
    },
    /// The next change of the QP's state or attributes takes longer, until another one is begun or
    /// another time is injected. Of a QP only.
    Dwell {
        /// The longest additional time, in microseconds.
        us: u32,
    },
    /// The next `count` MRs cannot be deregistered. Of the device only.
    Dereg {
        /// The error.
        errno: u32,
        /// Number of times.
        count: u32,
    },
    /// The QP is connected to the one with this number, from any state, as by a connection manager;
    /// to no QP if none has the number. Of a QP only.
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
    /// The next `count` requests for a connection are rejected, with [`REJECTED`](crate::REJECTED)
    /// as private data. Of a device with a connection manager only.
    Reject {
        /// Number of requests; `u32::MAX` is all of them.
        count: u32,
    },
    /// The next `count` requests for a connection go nowhere: they are not answered until `Expire`.
    /// Of a device with a connection manager only.
    Silence {
        /// Number of requests; `u32::MAX` is all of them.
        count: u32,
    },
    /// The time for an answer is over for all requests for a connection that were not answered.
    /// Accepting or rejecting one fails then. Of a device with a connection manager only.
    Expire,
    /// As [`Injection::Expire`], and from here on each request is answered, whatever
    /// [`Injection::Silence`] is: nothing keeps the device from being removed. Dropping a
    /// [`NullDevice`](crate::NullDevice) begins with this. Of a device with a connection manager
    /// only.
    End,
    /// The next `count` connections are lost as they are accepted, before the answer has arrived.
    /// Of a device with a connection manager only.
    Lose {
        /// Number of connections; `u32::MAX` is all of them.
        count: u32,
    },
    /// The next time that `iw_cm` looks for the QP by its number (`iw_get_qp`), it gets it later,
    /// without sleeping. It has no reference to it in the meantime. Of a QP only.
    Find {
        /// The additional time, in microseconds.
        us: u32,
    },
    /// The next listener that is destroyed takes longer (`iw_destroy_listen`). Of a device with a
    /// connection manager only.
    Unlisten {
        /// The additional time, in microseconds.
        us: u32,
    },
    /// After `after` more objects or calls of a kind, one fails. Of the device only.
    Create {
        /// The kind.
        object: Object,
        /// Number of objects that are created before it.
        after: u32,
        /// The error.
        errno: u32,
    },
    /// The next `count` times that a CQ is armed with `IB_CQ_REPORT_MISSED_EVENTS` take longer. Of
    /// the device only.
    Arm {
        /// The additional time, in microseconds.
        us: u32,
        /// Number of times; `u32::MAX` is always.
        count: u32,
        /// `false` if they report missed completions in any case, `true` if only where there are.
        honest: bool,
    },
    /// Posting reads the first entry of requests with `num_sge` 0, unless their `sg_list` is null,
    /// as irdma and cxgb4 do: a request is refused with `EFAULT` if that entry is not zero. Of the
    /// device only, by [`NullDevice::peek`](crate::NullDevice) or debugfs only.
    Peek {
        /// `false` ends this.
        on: bool,
    },
    /// A request's entry in its queue is free once it completes, as on rxe, not once its completion
    /// was polled. Of the device only.
    Eager {
        /// `false` ends this.
        on: bool,
    },
}

impl Injection {
    /// Fails with `EPERM` for a fault that consumers may answer with undefined behaviour.
    pub(crate) fn check(&self) -> Result {
        match self {
            Self::Duplicate { .. } | Self::Peek { .. } => Err(EPERM),
            _ => Ok(()),
        }
    }
}

/// The state of [`Injection::Stall`].
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Stall {
    #[default]
    No,
    /// The next call waits for at most this number of microseconds.
    Next { us: u32, late: bool },
    /// A call waits.
    Waiting,
}

/// The objects that an injection is for.
pub(crate) enum Scope {
    /// A QP.
    Qp,
    /// A QP, or all QPs of the device.
    Qps,
    /// The device.
    Device,
    /// The connection manager of the device.
    Cm,
}

impl Injection {
    /// Returns the objects that this is for.
    pub(crate) fn scope(&self) -> Scope {
        match self {
            Self::Stall { .. }
            | Self::Dwell { .. }
            | Self::Connect { .. }
            | Self::Fail
            | Self::Find { .. } => Scope::Qp,
            Self::Status { .. }
            | Self::Opcode { .. }
            | Self::Hold { .. }
            | Self::Release { .. }
            | Self::Vanish { .. }
            | Self::Duplicate { .. }
            | Self::Refuse { .. }
            | Self::Mute { .. }
            | Self::Lapse { .. }
            | Self::Modify { .. }
            | Self::Event { .. } => Scope::Qps,
            Self::Dereg { .. }
            | Self::Create { .. }
            | Self::Arm { .. }
            | Self::Peek { .. }
            | Self::Eager { .. } => Scope::Device,
            Self::Reject { .. }
            | Self::Silence { .. }
            | Self::Expire
            | Self::End
            | Self::Lose { .. }
            | Self::Unlisten { .. } => Scope::Cm,
        }
    }
}

/// The injections that are left for the requests of a QP.
#[derive(Clone, Copy, Default)]
pub(crate) struct Plan {
    /// `true` if there may be injections for the post path.
    busy: bool,
    status: Option<(u32, u32, bool)>,
    statuses: u32,
    opcode: u32,
    opcodes: u32,
    holds: u32,
    vanishes: u32,
    duplicates: u32,
    refuse: Countdown,
    mute: bool,
    lapse: Countdown,
    pub(crate) peek: bool,
    /// The changes of state that are to fail.
    pub(crate) modify: Failures,
}

/// Counts down, unless this is all of them, and returns whether there was one left.
pub(crate) fn take(count: &mut u32) -> bool {
    match *count {
        0 => false,
        u32::MAX => true,
        n => {
            *count = n - 1;
            true
        }
    }
}

/// Waits for this number of microseconds without sleeping, for longer than `udelay()` may.
pub(crate) fn spin(us: u32) {
    let start = Instant::<Monotonic>::now();
    while start.elapsed().as_micros_ceil() < i64::from(us) {
        core::hint::spin_loop();
    }
}

/// The result of the plans for a completion.
#[derive(Default)]
pub(crate) struct Verdict {
    pub(crate) hold: bool,
    pub(crate) vanish: bool,
    pub(crate) twice: bool,
    pub(crate) fatal: bool,
}

impl Plan {
    /// Returns whether there is no injection for the post path.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        !self.busy
    }

    /// Updates `busy` after a change.
    fn update(&mut self) {
        let counts = self.statuses | self.opcodes | self.holds | self.vanishes;
        self.busy = counts | self.duplicates != 0
            || self.refuse.0.is_some()
            || self.lapse.0.is_some()
            || self.peek;
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
            Injection::Vanish { count } => self.vanishes = count,
            Injection::Duplicate { count } => self.duplicates = count,
            Injection::Refuse { after, errno } => {
                (self.refuse, self.mute) = (Countdown::new(after, errno), false);
            }
            Injection::Mute { after, errno } => {
                (self.refuse, self.mute) = (Countdown::new(after, errno), true);
            }
            Injection::Lapse { after, errno } => self.lapse = Countdown::new(after, errno),
            Injection::Modify { errno, count } => self.modify = Failures { errno, count },
            Injection::Peek { on } => self.peek = on,
            _ => {}
        }
        self.update();
    }

    /// Fails if a request is to be refused.
    pub(crate) fn refuses(&mut self) -> Result {
        let refused = self.refuse.check();
        self.update();
        refused
    }

    /// Fails if the call that has just posted a request is to fail.
    pub(crate) fn lapses(&mut self) -> Result {
        let lapsed = self.lapse.check();
        self.update();
        lapsed
    }

    /// Returns, once, whether a request was refused by [`Injection::Mute`].
    pub(crate) fn was_mute(&mut self) -> bool {
        let mute = self.mute && self.refuse.0.is_none();
        self.mute &= !mute;
        mute
    }

    /// Changes the result of a request.
    pub(crate) fn spoil(&mut self, entry: &mut Entry, verdict: &mut Verdict) {
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
    pub(crate) fn judge(&mut self, verdict: &mut Verdict) {
        verdict.hold |= take(&mut self.holds);
        verdict.vanish |= take(&mut self.vanishes);
        verdict.twice |= take(&mut self.duplicates);
        self.update();
    }
}

fn error(errno: u32) -> Error {
    i32::try_from(errno).map_or(EINVAL, |errno| Error::from_errno(-errno))
}

/// A failure that is to come after a number of successes.
#[derive(Clone, Copy, Default)]
struct Countdown(Option<(u32, u32)>);

impl Countdown {
    fn new(after: u32, errno: u32) -> Self {
        Self(Some((after, errno)))
    }

    /// Counts down. Fails once, when the failure is due.
    fn check(&mut self) -> Result {
        match &mut self.0 {
            None => Ok(()),
            Some((0, errno)) => {
                let e = error(*errno);
                self.0 = None;
                Err(e)
            }
            Some((after, _)) => {
                *after -= 1;
                Ok(())
            }
        }
    }
}

/// The creations that are to fail.
#[derive(Default)]
pub(crate) struct Creations([Countdown; 10]);

impl Creations {
    pub(crate) fn set(&mut self, object: Object, after: u32, errno: u32) {
        if let Some(creation) = self.0.get_mut(object as usize) {
            *creation = Countdown::new(after, errno);
        }
    }

    /// Fails if an object is not to be created.
    pub(crate) fn check(&mut self, object: Object) -> Result {
        (self.0.get_mut(object as usize)).map_or(Ok(()), Countdown::check)
    }
}

/// The next `count` calls of a kind fail.
#[derive(Clone, Copy, Default)]
pub(crate) struct Failures {
    pub(crate) errno: u32,
    pub(crate) count: u32,
}

impl Failures {
    /// Fails if this call is one of them.
    pub(crate) fn check(&mut self) -> Result {
        if take(&mut self.count) {
            return Err(error(self.errno));
        }
        Ok(())
    }
}

/// The next `count` times that a CQ is armed take longer.
#[derive(Default)]
pub(crate) struct Arms {
    pub(crate) us: u32,
    pub(crate) count: u32,
    /// `true` if what is reported is true.
    pub(crate) honest: bool,
}

impl Arms {
    /// Returns the additional time for this one, in microseconds, and whether its report is true.
    pub(crate) fn next(&mut self) -> Option<(u32, bool)> {
        take(&mut self.count).then_some((self.us, self.honest))
    }
}

impl FromStr for Object {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        Ok(match word {
            "pd" => Object::Pd,
            "cq" => Object::Cq,
            "qp" => Object::Qp,
            "srq" => Object::Srq,
            "ah" => Object::Ah,
            "mr" => Object::Mr,
            "listen" => Object::Listen,
            "connect" => Object::Connect,
            "accept" => Object::Accept,
            "reject" => Object::Reject,
            _ => return Err(EINVAL),
        })
    }
}

/// Matches a command, and reads the numbers of its injection, in this order. One without a default
/// has to be there. The fields behind the numbers are set by the command.
macro_rules! parse {
    (@default) => { None };
    (@default $default:expr) => { Some($default) };
    ($command:expr, $number:ident;
        $($name:literal => $variant:ident {
            $($field:ident $(= $default:expr)?),* $(; $set:ident: $value:expr)?
        },)*
    ) => {
        match $command {
            $($name => Injection::$variant {
                $($field: $number(parse!(@default $($default)?))?,)*
                $($set: $value,)?
            },)*
            _ => return Err(EINVAL),
        }
    };
}

impl FromStr for Injection {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let mut words = line.split_ascii_whitespace();
        let command = words.next().ok_or(EINVAL)?;
        let object = match command {
            "create" => words.next().ok_or(EINVAL)?.parse::<Object>()?,
            _ => Object::Pd,
        };
        let mut number = |default: Option<u32>| match words.next() {
            None => default.ok_or(EINVAL),
            Some("all") => Ok(u32::MAX),
            Some(word) => word.parse().map_err(|_| EINVAL),
        };
        const ALL: u32 = u32::MAX;
        let [eio, enomem] = [EIO, ENOMEM].map(|e| e.to_errno().unsigned_abs());
        let injection = parse! { command, number;
            "status" => Status { status, count = 1, vendor_err = 0; fatal: false },
            "fatal" => Status { status, count = 1, vendor_err = 0; fatal: true },
            "opcode" => Opcode { opcode, count = 1 },
            "hold" => Hold { count = ALL },
            "release" => Release { count = ALL; reversed: false },
            "reverse" => Release { count = ALL; reversed: true },
            "vanish" => Vanish { count = 1 },
            "duplicate" => Duplicate { count = 1 },
            "refuse" => Refuse { after = 0, errno = enomem },
            "mute" => Mute { after = 0, errno = enomem },
            "lapse" => Lapse { after = 0, errno = enomem },
            "stall" => Stall { us = 1000; late: false },
            "linger" => Stall { us = 1000; late: true },
            "modify" => Modify { count = 1, errno = eio },
            "dwell" => Dwell { us = 1000 },
            "find" => Find { us = 1000 },
            "unlisten" => Unlisten { us = 1000 },
            "dereg" => Dereg { count = 1, errno = eio },
            "event" => Event { event },
            "connect" => Connect { peer },
            "fail" => Fail {},
            "arm" => Arm { us = 1000, count = 1; honest: false },
            "rearm" => Arm { us = 1000, count = 1; honest: true },
            "peek" => Peek { ; on: number(Some(1))? != 0 },
            "eager" => Eager { ; on: number(Some(1))? != 0 },
            "reject" => Reject { count = 1 },
            "silence" => Silence { count = 1 },
            "expire" => Expire {},
            "end" => End {},
            "lose" => Lose { count = 1 },
            "create" => Create { after = 0, errno = enomem; object: object },
        };
        match words.next() {
            None => Ok(injection),
            Some(_) => Err(EINVAL),
        }
    }
}
