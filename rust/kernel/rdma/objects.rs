// SPDX-License-Identifier: GPL-2.0

//! The list of all objects, for messages and debugfs.
//!
//! An object is in the list from its creation to its destruction; requests never are. A removal or
//! unload names those that it waits for, and `rdma_rs/objects` in debugfs shows all.

use crate::{
    debug,
    prelude::*,
    refs, //
};
use core::net::IpAddr;
use kernel::{
    debugfs,
    fmt,
    list,
    sync::{
        atomic,
        SpinLockIrq, //
    },
    time, //
};

/// The number of objects that a message names.
const REPORTED: usize = 16;

kernel::sync::global_lock! {
    // SAFETY: `Table::new` initialises it when the module is loaded, before there is any object.
    unsafe(uninit) static OBJECTS: Mutex<list::List<Record>> = list::List::new();
}

/// A device or a client, which objects keep. It is printed as the client's name, and the device's.
pub(crate) trait Owner: fmt::Display + Sync {
    fn refs(&self) -> &refs::Refs;
}

/// The other end of an object. A port is 0 if it is not known.
#[derive(Clone, Copy)]
pub(crate) enum Peer {
    Unknown,
    /// The object listens on this address.
    On(IpAddr, u16),
    /// The object connects to this address.
    To(IpAddr, u16),
    /// The object connects to the QP of this number, at this address if it is known.
    ToQp(u32, Option<IpAddr>),
}

impl fmt::Display for Peer {
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

/// The sizes of an object.
#[derive(Clone, Copy)]
pub(crate) enum Sizes {
    Unknown,
    Cq {
        context: &'static str,
        entries: u32,
        /// The number of entries that QPs and SRQs have reserved.
        reserved: u32,
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

impl Sizes {
    fn write(self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => Ok(()),
            Self::Cq {
                context,
                entries,
                reserved,
            } => write!(f, ", {context}, {reserved} of {entries} entries reserved"),
            Self::Qp {
                sends: (sends, send_cq),
                receives,
            } => {
                write!(f, ", {sends} sends to CQ {send_cq}")?;
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

/// The owners that a QP keeps until it is drained.
#[derive(Clone, Copy)]
pub(crate) struct Undrained {
    count: u32,
    /// The type of the first one.
    first: &'static str,
    since: time::Instant<time::Monotonic>,
}

/// One where [`debug`] can be asked about a QP.
const DEBUG: usize = cfg!(debug_assertions) as usize;

struct Details {
    /// Null unless the object is a QP.
    qp: [*const bindings::ib_qp; DEBUG],
    peer: Peer,
    sizes: Sizes,
    undrained: Option<KBox<Undrained>>,
}

/// An object in the list: at most 128 bytes, as C keeps none of this.
///
/// # Invariants
///
/// While this is in the list, `owner` is valid and there is a reference to its refs.
#[pin_data]
struct Record {
    #[pin]
    links: list::ListLinks,
    kind: refs::Kind,
    /// The object's number, or `NO_NUM`.
    num: atomic::Atomic<u32>,
    owner: NonNull<dyn Owner>,
    since: time::Instant<time::Monotonic>,
    #[pin]
    details: SpinLockIrq<Details>,
}

const NO_NUM: u32 = u32::MAX;

// SAFETY: The pointer to a QP is only compared, `owner` is `Sync`, and the rest is `Send`.
unsafe impl Send for Record {}
// SAFETY: `owner` is `Sync`, `details` is locked, and the rest is atomic or does not change.
unsafe impl Sync for Record {}

list::impl_list_arc_safe! {
    impl ListArcSafe<0> for Record { untracked; }
}
list::impl_list_item! {
    impl ListItem<0> for Record { using ListLinks { self.links }; }
}

fn seconds(since: time::Instant<time::Monotonic>) -> i64 {
    since.elapsed().as_millis() / 1_000
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peer, sizes, undrained, qp) = {
            let details = self.details.lock();
            let undrained = details.undrained.as_deref().copied();
            let qp = details.qp.first().copied();
            (details.peer, details.sizes, undrained, qp)
        };
        f.write_str(self.kind.name())?;
        let num = self.num.load(atomic::Relaxed);
        if num != NO_NUM {
            write!(f, " {num}")?;
        }
        f.write_fmt(fmt!("{peer}, made {} s ago", seconds(self.since)))?;
        sizes.write(f)?;
        if let Some(posted) = qp.filter(|qp| !qp.is_null()).and_then(debug::of_qp) {
            let (count, owner, ago) = (posted.count, posted.owner, seconds(posted.since));
            f.write_fmt(fmt!(", {count} posted, the first a {owner}, {ago} s ago"))?;
        }
        if let Some(undrained) = undrained {
            let (count, first, ago) = (undrained.count, undrained.first, seconds(undrained.since));
            write!(
                f,
                ", {count} kept until it is drained, the first a {first}, {ago} s ago"
            )?;
        }
        Ok(())
    }
}

/// The reference of an object to its device or client, by which the object is in the list.
///
/// # Invariants
///
/// `record` is in the list, and `_ref` is a reference to the refs of its owner.
pub(crate) struct Object {
    record: Arc<Record>,
    // Dropped last: the owner may be gone after that.
    _ref: refs::Ref,
}

impl Object {
    /// Adds an object of `owner` to the list. Neither generic nor inlined, so that all modules give
    /// the lock one name, as lockdep wants it.
    ///
    /// # Safety
    ///
    /// `owner` is valid while there is a reference to its refs, and `reference` is one.
    #[inline(never)]
    pub(crate) unsafe fn new(reference: refs::Ref, owner: NonNull<dyn Owner>) -> Result<Self> {
        let kind = reference.kind();
        let record = list::ListArc::pin_init(
            try_pin_init!(Record {
                links <- list::ListLinks::new(),
                kind,
                num: atomic::Atomic::new(NO_NUM),
                owner,
                since: time::Instant::now(),
                details <- kernel::new_spinlock_irq!(Details {
                    qp: [core::ptr::null(); DEBUG],
                    peer: Peer::Unknown,
                    sizes: Sizes::Unknown,
                    undrained: None,
                }),
            }),
            GFP_KERNEL,
        )?;
        // INVARIANT: The caller says so of the reference, which is dropped after the record.
        let this = Self {
            record: record.clone_arc(),
            _ref: reference,
        };
        OBJECTS.lock().push_back(record);
        Ok(this)
    }

    /// Sets the number that messages show.
    pub(crate) fn set_num(&self, num: u32) {
        self.record.num.store(num, atomic::Relaxed);
    }

    /// Sets the QP, of which messages show the number and what is posted.
    pub(crate) fn set_qp(&self, qp: &bindings::ib_qp) {
        self.set_num(qp.qp_num);
        self.record.details.lock().qp.fill(qp);
    }

    pub(crate) fn set_peer(&self, peer: Peer) {
        self.record.details.lock().peer = peer;
    }

    pub(crate) fn peer(&self) -> Peer {
        self.record.details.lock().peer
    }

    pub(crate) fn set_sizes(&self, sizes: Sizes) {
        self.record.details.lock().sizes = sizes;
    }

    /// Changes the number of entries of the CQ that are reserved. Any context.
    pub(crate) fn add_reserved(&self, entries: i32) {
        if let Sizes::Cq { reserved, .. } = &mut self.record.details.lock().sizes {
            *reserved = reserved.saturating_add_signed(entries);
        }
    }

    /// Counts an owner of type `first` that the object keeps until it is drained. Any context.
    pub(crate) fn add_undrained(&self, first: &'static str) {
        let undrained = Undrained {
            count: 1,
            first,
            since: time::Instant::now(),
        };
        // Without memory for it, it is not shown.
        self.put_undrained(
            KBox::new(undrained, GFP_ATOMIC | kernel::alloc::flags::__GFP_NOWARN).ok(),
        );
    }

    /// Takes the count of what the object keeps until it is drained.
    pub(crate) fn take_undrained(&self) -> Option<KBox<Undrained>> {
        self.record.details.lock().undrained.take()
    }

    /// Adds what [`Object::take_undrained`] returned. Any context.
    pub(crate) fn put_undrained(&self, undrained: Option<KBox<Undrained>>) {
        let Some(mut undrained) = undrained else {
            return;
        };
        let mut details = self.record.details.lock();
        if let Some(other) = details.undrained.take() {
            let count = undrained.count + other.count;
            if other.since.elapsed() > undrained.since.elapsed() {
                undrained = other;
            }
            undrained.count = count;
        }
        details.undrained = Some(undrained);
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: The record is in this list by the type invariant, and records are in no other.
        let record = unsafe { OBJECTS.lock().remove(&self.record) };
        drop(record);
    }
}

/// Kills the refs of `owner` and waits until nothing references it; messages of `who` name them.
pub(crate) fn kill_and_wait(owner: &dyn Owner, who: &dyn fmt::Display, cx: &Sleepable) {
    let refs = owner.refs();
    refs.kill_and_wait(who, &|| report(refs, who), cx);
}

/// Names the objects that have references to `refs` in the kernel log.
fn report(refs: &refs::Refs, who: &dyn fmt::Display) {
    let objects = OBJECTS.lock();
    let of_refs = objects.iter().filter(|record| {
        // SAFETY: The owner is valid by the invariant of `Record`, which is in the locked list.
        core::ptr::eq(unsafe { record.owner.as_ref() }.refs(), refs)
    });
    for (n, record) in of_refs.enumerate() {
        if n == REPORTED {
            pr_warn!("{who}: waits for more: see rdma_rs/objects in debugfs\n");
            break;
        }
        pr_warn!("{who}: waits for {}\n", &*record);
    }
}

struct AllObjects;

impl debugfs::Writer for AllObjects {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for record in OBJECTS.lock().iter() {
            // SAFETY: The owner is valid by the invariant of `Record`, which is in the locked list.
            let owner = unsafe { record.owner.as_ref() };
            f.write_fmt(fmt!("{owner}: {}\n", &*record))?;
        }
        Ok(())
    }
}

/// The list, initialised, and its file; part of the core module.
pub(crate) struct Table {
    // As always with debugfs, a file that cannot be made is missing.
    _file: Option<Pin<KBox<debugfs::File<AllObjects>>>>,
}

impl Table {
    /// # Safety
    ///
    /// Called once, when the module is loaded.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: The caller calls this once, when the module is loaded.
        unsafe { OBJECTS.init() };
        let dir = debugfs::Dir::new(c"rdma_rs");
        let file = KBox::pin_init(dir.read_only_file(c"objects", AllObjects), GFP_KERNEL).ok();
        Self { _file: file }
    }
}
