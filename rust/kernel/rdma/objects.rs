// SPDX-License-Identifier: GPL-2.0

//! The list of all objects, for messages and debugfs.
//!
//! An object is in the list from its creation to its destruction; requests never are. A removal or
//! unload names those that it waits for, and `rdma_rs/objects` in debugfs shows all. The links are
//! in the objects, so listing costs no allocation.

use crate::{
    debug,
    links::{
        Linked,
        Links,
        List, //
    },
    prelude::internal::*,
    refs, //
};
use core::{
    marker::PhantomPinned,
    net::{
        IpAddr,
        SocketAddr, //
    }, //
};
use kernel::{
    debugfs,
    sync::{
        atomic,
        GlobalLockedBy, //
    },
    time::msecs_to_jiffies,
    workqueue, //
};

/// The number of objects that a message names.
const REPORTED: usize = 16;

kernel::sync::global_lock! {
    // SAFETY: `init` initialises it when the module is loaded, before there is any object.
    unsafe(uninit) static OBJECTS: Mutex<List<Object>> = List::new();
}
kernel::sync::global_lock! {
    // SAFETY: `init` initialises it when the module is loaded, before there is any object.
    unsafe(uninit) static DETAILS: SpinLockIrq<()> = ();
}

/// The other end of an object. A port is 0 if it is not known.
#[derive(Clone, Copy)]
pub(crate) enum PeerAddr {
    Unknown,
    /// The object listens on this address.
    On(IpAddr, u16),
    /// The object connects to this address.
    To(IpAddr, u16),
    /// The object connects to the QP of this number, at this address if it is known.
    ToQp(u32, Option<IpAddr>),
}

impl fmt::Display for PeerAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Unknown => Ok(()),
            Self::On(ip, port) => write!(f, " on {}", SocketAddr::new(ip, port)),
            Self::To(ip, 0) => write!(f, " to {ip}"),
            Self::To(ip, port) => write!(f, " to {}", SocketAddr::new(ip, port)),
            Self::ToQp(num, None) => write!(f, " to QP {num}"),
            Self::ToQp(num, Some(ip)) => write!(f, " to QP {num} at {ip}"),
        }
    }
}

/// What messages show of an object: its sizes, or its state.
pub(crate) enum Summary {
    None,
    /// It prints the state of the connection.
    Connection(Arc<dyn fmt::Display + Send + Sync>),
    /// Counts the requests that were refused.
    Listener,
    /// Counts those of the entries that are reserved.
    Cq {
        context: &'static str,
        entries: u32,
    },
    /// The requests that can be outstanding, and the number of the CQ that they complete to.
    Qp {
        sends: (u32, u32),
        /// `None` if the QP takes its receives from an SRQ.
        receives: Option<(u32, u32)>,
    },
    Srq {
        slots: u32,
    },
    Mr {
        pages: u32,
    },
}

impl Summary {
    fn write(&self, count: i32, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => Ok(()),
            Self::Connection(conn) => f.write_fmt(fmt!(", {}", &**conn)),
            Self::Listener => write!(f, ", {count} requests refused"),
            Self::Cq { context, entries } => {
                write!(f, ", {context}, {count} of {entries} entries reserved")
            }
            Self::Qp {
                sends: (n, cq),
                receives,
            } => {
                write!(f, ", {n} sends to CQ {cq}")?;
                match receives {
                    Some((n, cq)) => write!(f, ", {n} receives to CQ {cq}"),
                    None => f.write_str(", receives of an SRQ"),
                }
            }
            Self::Srq { slots } => write!(f, ", {slots} slots"),
            Self::Mr { pages } => write!(f, ", {pages} pages"),
        }
    }
}

/// The time since the system was started, in seconds.
pub(crate) fn now() -> u32 {
    // SAFETY: The function reads a number that is set since boot.
    unsafe { bindings::ktime_get_seconds() as u32 }
}

/// The owners that a QP keeps until it is drained.
#[derive(Clone, Copy)]
pub(crate) struct Undrained {
    count: u32,
    /// The type of the first one.
    first: &'static str,
    /// As [`now`].
    since: u32,
}

struct Details {
    peer: PeerAddr,
    undrained: Option<KBox<Undrained>>,
}

/// One where [`debug`] can be asked about a QP.
const DEBUG: usize = cfg!(debug_assertions) as usize;

/// The part of an object by which it is listed, with the reference to its device or client.
pub(crate) struct Object {
    links: Links<Self>,
    /// The number that messages show.
    pub(crate) num: Option<u32>,
    /// Only for an address to be compared with; null unless the object is a QP.
    qp: [*const bindings::ib_qp; DEBUG],
    pub(crate) summary: Summary,
    /// The count of the summary.
    count: atomic::Atomic<i32>,
    /// When it was made, as [`now`].
    since: u32,
    details: GlobalLockedBy<Details, DETAILS>,
    // The last that is dropped: its owner may be gone then.
    reference: refs::Ref<dyn refs::Owner>,
    _pin: PhantomPinned,
}

// SAFETY: The pointer to a QP is only compared, and the rest is `Send`.
unsafe impl Send for Object {}
// SAFETY: The pointer to a QP is only compared, and the rest is `Sync`.
unsafe impl Sync for Object {}

// SAFETY: The links are one field.
unsafe impl Linked for Object {
    fn links(&self) -> &Links<Self> {
        &self.links
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peer, undrained) = {
            let lock = DETAILS.lock();
            let details = self.details.as_ref(&lock);
            (details.peer, details.undrained.as_deref().copied())
        };
        f.write_str(refs::NAMES[self.reference.kind as usize])?;
        if let Some(num) = self.num {
            write!(f, " {num}")?;
        }
        f.write_fmt(fmt!("{peer}, made {} s ago", now() - self.since))?;
        self.summary.write(self.count.load(atomic::Relaxed), f)?;
        let qp = self.qp.iter().find(|qp| !qp.is_null());
        if let Some(posted) = qp.and_then(|qp| debug::of_qp(*qp)) {
            let count = posted.count;
            let owner = posted.owner;
            let ago = posted.since.elapsed().as_millis() / 1_000;
            f.write_fmt(fmt!(", {count} posted, the first a {owner}, {ago} s ago"))?;
        }
        if let Some(undrained) = undrained {
            let count = undrained.count;
            let first = undrained.first;
            let ago = now() - undrained.since;
            f.write_fmt(fmt!(
                ", {count} kept until it is drained, the first a {first}, {ago} s ago"
            ))?;
        }
        Ok(())
    }
}

impl Object {
    /// Returns an object that has this reference, and is yet to be listed.
    pub(crate) fn new(reference: impl Into<refs::Ref<dyn refs::Owner>>) -> Self {
        Self {
            links: Links::new(),
            reference: reference.into(),
            num: None,
            qp: [ptr::null(); DEBUG],
            summary: Summary::None,
            count: atomic::Atomic::new(0),
            since: now(),
            details: GlobalLockedBy::new(Details {
                peer: PeerAddr::Unknown,
                undrained: None,
            }),
            _pin: PhantomPinned,
        }
    }

    /// Returns the workqueue that tears the object down: that of its device or client.
    pub(crate) fn queue(&self) -> &workqueue::Queue {
        self.reference.queue()
    }

    /// Lists the object, until it is dropped.
    pub(crate) fn list(self: Pin<&Self>) {
        // SAFETY: The object is pinned, and leaves the list, the only one of objects, when it is
        // dropped.
        unsafe { OBJECTS.lock().push(self.get_ref()) };
    }

    /// Sets the QP, of which messages show the number and what is posted.
    pub(crate) fn set_qp(&mut self, num: u32, qp: *const bindings::ib_qp) {
        self.num = Some(num);
        self.qp.fill(qp);
    }

    pub(crate) fn set_peer(&self, peer: PeerAddr) {
        self.details.as_mut(&mut DETAILS.lock()).peer = peer;
    }

    pub(crate) fn peer(&self) -> PeerAddr {
        self.details.as_ref(&DETAILS.lock()).peer
    }

    /// Adds to the count of the summary. Any context.
    pub(crate) fn add_count(&self, n: i32) {
        self.count.add(n, atomic::Relaxed);
    }

    /// Counts an owner of type `first` that the object keeps until it is drained. Any context.
    pub(crate) fn add_undrained(&self, first: &'static str) {
        let undrained = Undrained {
            count: 1,
            first,
            since: now(),
        };
        // Without memory for it, it is not shown.
        let flags = GFP_ATOMIC | __GFP_NOWARN;
        self.put_undrained(KBox::new(undrained, flags).ok());
    }

    /// Takes the count of what the object keeps until it is drained.
    pub(crate) fn take_undrained(&self) -> Option<KBox<Undrained>> {
        self.details.as_mut(&mut DETAILS.lock()).undrained.take()
    }

    /// Adds what [`Object::take_undrained`] returned. Any context.
    pub(crate) fn put_undrained(&self, undrained: Option<KBox<Undrained>>) {
        let Some(mut undrained) = undrained else {
            return;
        };
        let mut lock = DETAILS.lock();
        let details = self.details.as_mut(&mut lock);
        if let Some(other) = details.undrained.take() {
            let count = undrained.count + other.count;
            if other.since < undrained.since {
                undrained = other;
            }
            undrained.count = count;
        }
        details.undrained = Some(undrained);
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: There is no other list of objects.
        unsafe { OBJECTS.lock().remove(self) };
    }
}

/// Kills the refs of `owner` and waits until nothing references it (`percpu_ref_kill`). Every ten
/// seconds messages of `who` count the references that are left, and name the objects that have
/// them. A signal does not end the wait, of which a message tells when the task is killed.
pub(crate) fn kill_and_wait(owner: &dyn refs::Owner, who: &dyn fmt::Display, cx: &Sleepable) {
    let refs = owner.refs();
    if !refs.count.kill() {
        return;
    }
    let warn = || {
        pr_warn!("{who}: waits for {refs}\n");
        report(refs, who);
    };
    let interval = msecs_to_jiffies(refs::REPORT_MS);
    while let Ok(left) = refs.empty.wait_killable(interval, cx) {
        if left != 0 {
            return;
        }
        warn();
    }
    warn();
    pr_warn!("{who}: no signal ends this wait: what is held would be used when it is gone\n");
    while !refs.empty.wait_timeout(refs::REPORT_MS, cx) {
        warn();
    }
}

/// Names the objects that have references of `refs`, in messages of `who`.
fn report(refs: &refs::Refs, who: &dyn fmt::Display) {
    let objects = OBJECTS.lock();
    let is_of = |object: &&Object| ptr::eq(object.reference.refs(), refs);
    for (n, object) in objects.iter().filter(is_of).enumerate() {
        if n == REPORTED {
            pr_warn!("{who}: waits for more: see rdma_rs/objects in debugfs\n");
            break;
        }
        pr_warn!("{who}: waits for {object}\n");
    }
}

/// The content of the file `objects`.
pub(crate) struct AllObjects;

impl debugfs::Writer for AllObjects {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for object in OBJECTS.lock().iter() {
            f.write_fmt(fmt!("{}: {object}\n", &*object.reference))?;
        }
        Ok(())
    }
}

/// A file of debugfs. As always there, one that cannot be made is missing.
pub(crate) type File<T> = Option<Pin<KBox<debugfs::File<T>>>>;

/// Initialises the list, and makes its file in a folder of debugfs.
///
/// # Safety
///
/// Called once, when the module is loaded.
pub(crate) unsafe fn init(dir: &debugfs::Dir) -> File<AllObjects> {
    // SAFETY: The caller calls this once, when the module is loaded.
    unsafe {
        OBJECTS.init();
        DETAILS.init();
    }
    KBox::pin_init(dir.read_only_file(c"objects", AllObjects), GFP_KERNEL).ok()
}
