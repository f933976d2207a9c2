// SPDX-License-Identifier: GPL-2.0

//! The list of all objects, for messages and debugfs.
//!
//! An object is in the list from its creation to its destruction; requests never are. A removal or
//! unload names those that it waits for, and `rdma_rs/objects` in debugfs shows all.
//!
//! Listing an object costs no allocation and reads no clock: the links are in the object, and its
//! age is in seconds. A mutex is taken when it is added and when it is removed.

use crate::{
    debug,
    prelude::*,
    refs, //
};
use core::{
    cell::UnsafeCell,
    marker::PhantomPinned,
    mem,
    net::IpAddr,
    ptr::{
        self,
        null, //
    }, //
};
use kernel::{
    debugfs,
    fmt,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        GlobalLockedBy, //
    }, //
};

/// The number of objects that a message names.
const REPORTED: usize = 16;

kernel::sync::global_lock! {
    // SAFETY: `Table::new` initialises it when the module is loaded, before there is any object.
    unsafe(uninit) static OBJECTS: Mutex<List> = List { first: null(), last: null() };
}
kernel::sync::global_lock! {
    // SAFETY: `Table::new` initialises it when the module is loaded, before there is any object.
    unsafe(uninit) static DETAILS: SpinLockIrq<()> = ();
}

/// The list. Its lock protects the links of all objects, too.
///
/// # Invariants
///
/// From `first` on, each object has the address of the next one, and from `last` on that of the
/// one before. All are valid, and were listed and not dropped.
struct List {
    first: *const Object,
    last: *const Object,
}

// SAFETY: Objects are `Sync`, and have their links changed under the lock of the list only.
unsafe impl Send for List {}

impl List {
    fn iter(&self) -> impl Iterator<Item = &Object> {
        // SAFETY: By the type invariant the address is null or that of an object which is listed,
        // and so valid: one that is dropped leaves the list, which is borrowed.
        let mut next = unsafe { self.first.as_ref() };
        core::iter::from_fn(move || {
            let object = next?;
            // SAFETY: As above. The links are not changed while the list is borrowed.
            next = unsafe { (*object.links.get()).next.as_ref() };
            Some(object)
        })
    }

    fn has(&self, object: &Object) -> bool {
        // SAFETY: The list is borrowed, so the links are not changed.
        let has_prev = unsafe { !(*object.links.get()).prev.is_null() };
        has_prev || ptr::eq(self.first, object)
    }

    /// Adds an object at the end, unless it is listed.
    fn push(&mut self, object: Pin<&Object>) {
        let object = object.get_ref();
        if self.has(object) {
            return;
        }
        let prev = mem::replace(&mut self.last, object);
        // SAFETY: The list is borrowed, and with it the links of `object` and of `prev`, which is
        // null or valid by the type invariant.
        // INVARIANT: The object is pinned, so it is valid until it is dropped. It is the last one.
        unsafe {
            *object.links.get() = Links { prev, next: null() };
            match prev.as_ref() {
                Some(prev) => (*prev.links.get()).next = object,
                None => self.first = object,
            }
        }
    }

    /// Takes an object out, if it is listed.
    fn remove(&mut self, object: &Object) {
        if !self.has(object) {
            return;
        }
        // SAFETY: The list is borrowed, and with it the links of `object` and of its neighbours,
        // which are null or valid by the type invariant.
        // INVARIANT: The neighbours have the addresses of each other.
        unsafe {
            let Links { prev, next } = mem::take(&mut *object.links.get());
            match prev.as_ref() {
                Some(prev) => (*prev.links.get()).next = next,
                None => self.first = next,
            }
            match next.as_ref() {
                Some(next) => (*next.links.get()).prev = prev,
                None => self.last = prev,
            }
        }
    }
}

/// The neighbours of an object in the list.
struct Links {
    prev: *const Object,
    next: *const Object,
}

impl Default for Links {
    fn default() -> Self {
        Self {
            prev: null(),
            next: null(),
        }
    }
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
    /// Of the entries, [`Object::add_reserved`] says how many are reserved.
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

impl Sizes {
    fn write(self, reserved: i32, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => Ok(()),
            Self::Cq { context, entries } => {
                write!(f, ", {context}, {reserved} of {entries} entries reserved")
            }
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

/// The time since the system was started, in seconds.
fn now() -> u32 {
    // SAFETY: The function reads a number that is there since the system was started.
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

/// One where [`debug`] can be asked about a QP.
const DEBUG: usize = cfg!(debug_assertions) as usize;

struct Details {
    /// Null unless the object is a QP.
    qp: [*const bindings::ib_qp; DEBUG],
    peer: Peer,
    sizes: Sizes,
    undrained: Option<KBox<Undrained>>,
}

const NO_NUM: u32 = u32::MAX;

/// The part of an object by which it is listed, with the reference to its device or client.
///
/// # Invariants
///
/// There is a reference of `kind` to the refs of `owner`, which is valid while there is.
pub(crate) struct Object {
    links: UnsafeCell<Links>,
    /// The object's number, or `NO_NUM`.
    num: Atomic<u32>,
    /// The number of entries of a CQ that QPs and SRQs have reserved.
    reserved: Atomic<i32>,
    /// When it was made, as [`now`].
    since: u32,
    kind: refs::Kind,
    owner: NonNull<dyn Owner>,
    details: GlobalLockedBy<Details, DETAILS>,
    _pin: PhantomPinned,
}

// SAFETY: The pointer to a QP is only compared, `owner` is `Sync`, and the rest is `Send`.
unsafe impl Send for Object {}
// SAFETY: `owner` is `Sync`, links and details are used with locks only, and the rest is atomic or
// does not change.
unsafe impl Sync for Object {}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peer, sizes, undrained, qp) = {
            let lock = DETAILS.lock();
            let details = self.details.as_ref(&lock);
            let undrained = details.undrained.as_deref().copied();
            let qp = details.qp.first().copied();
            (details.peer, details.sizes, undrained, qp)
        };
        f.write_str(self.kind.name())?;
        let num = self.num.load(Relaxed);
        if num != NO_NUM {
            write!(f, " {num}")?;
        }
        f.write_fmt(fmt!("{peer}, made {} s ago", now() - self.since))?;
        sizes.write(self.reserved.load(Relaxed), f)?;
        if let Some(posted) = qp.filter(|qp| !qp.is_null()).and_then(debug::of_qp) {
            let (count, owner) = (posted.count, posted.owner);
            let ago = posted.since.elapsed().as_millis() / 1_000;
            f.write_fmt(fmt!(", {count} posted, the first a {owner}, {ago} s ago"))?;
        }
        if let Some(undrained) = undrained {
            let (count, first, ago) = (undrained.count, undrained.first, now() - undrained.since);
            write!(
                f,
                ", {count} kept until it is drained, the first a {first}, {ago} s ago"
            )?;
        }
        Ok(())
    }
}

impl Object {
    /// An object of `owner`, which is yet to be listed.
    ///
    /// # Safety
    ///
    /// `owner` is valid while there is a reference to its refs, and `reference` is one.
    pub(crate) unsafe fn new(reference: refs::Ref, owner: NonNull<dyn Owner>) -> Self {
        // INVARIANT: The caller says so of the reference.
        Self {
            links: UnsafeCell::new(Links::default()),
            num: Atomic::new(NO_NUM),
            reserved: Atomic::new(0),
            since: now(),
            kind: reference.into_kind(),
            owner,
            details: GlobalLockedBy::new(Details {
                qp: [null(); DEBUG],
                peer: Peer::Unknown,
                sizes: Sizes::Unknown,
                undrained: None,
            }),
            _pin: PhantomPinned,
        }
    }

    /// Lists the object, until it is dropped.
    pub(crate) fn list(self: Pin<&Self>) {
        OBJECTS.lock().push(self);
    }

    /// Sets the number that messages show.
    pub(crate) fn set_num(&mut self, num: u32) {
        *self.num.get_mut() = num;
    }

    /// Sets the QP, of which messages show the number and what is posted.
    pub(crate) fn set_qp(&mut self, qp: &bindings::ib_qp) {
        self.set_num(qp.qp_num);
        self.details.get_mut().qp.fill(qp);
    }

    pub(crate) fn set_sizes(&mut self, sizes: Sizes) {
        self.details.get_mut().sizes = sizes;
    }

    pub(crate) fn set_peer(&self, peer: Peer) {
        self.details.as_mut(&mut DETAILS.lock()).peer = peer;
    }

    pub(crate) fn peer(&self) -> Peer {
        self.details.as_ref(&DETAILS.lock()).peer
    }

    /// Changes the number of entries of the CQ that are reserved. Any context.
    pub(crate) fn add_reserved(&self, entries: i32) {
        self.reserved.add(entries, Relaxed);
    }

    /// Counts an owner of type `first` that the object keeps until it is drained. Any context.
    pub(crate) fn add_undrained(&self, first: &'static str) {
        let undrained = Undrained {
            count: 1,
            first,
            since: now(),
        };
        // Without memory for it, it is not shown.
        self.put_undrained(
            KBox::new(undrained, GFP_ATOMIC | kernel::alloc::flags::__GFP_NOWARN).ok(),
        );
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
        OBJECTS.lock().remove(self);
        drop(self.take_undrained());
        // SAFETY: By the type invariant there is the reference, and the owner while there is. It
        // may be gone after that.
        unsafe { self.owner.as_ref().refs().put(self.kind) };
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
    let of_refs = objects.iter().filter(|object| {
        // SAFETY: The owner is valid by the invariant of `Object`.
        core::ptr::eq(unsafe { object.owner.as_ref() }.refs(), refs)
    });
    for (n, object) in of_refs.enumerate() {
        if n == REPORTED {
            pr_warn!("{who}: waits for more: see rdma_rs/objects in debugfs\n");
            break;
        }
        pr_warn!("{who}: waits for {object}\n");
    }
}

struct AllObjects;

impl debugfs::Writer for AllObjects {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for object in OBJECTS.lock().iter() {
            // SAFETY: The owner is valid by the invariant of `Object`.
            let owner = unsafe { object.owner.as_ref() };
            f.write_fmt(fmt!("{owner}: {object}\n"))?;
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
        unsafe {
            OBJECTS.init();
            DETAILS.init();
        }
        let dir = debugfs::Dir::new(c"rdma_rs");
        let file = KBox::pin_init(dir.read_only_file(c"objects", AllObjects), GFP_KERNEL).ok();
        Self { _file: file }
    }
}

/// A copy of a device's name, which an administrator may change.
#[derive(Clone, Copy)]
pub struct Name([u8; bindings::IB_DEVICE_NAME_MAX as usize]);

impl Name {
    /// # Safety
    ///
    /// `dev` is a valid device.
    pub(crate) unsafe fn of(dev: *mut bindings::ib_device) -> Self {
        let mut name = [0; bindings::IB_DEVICE_NAME_MAX as usize];
        // SAFETY: The caller says that `dev` is valid; the helper copies a string that fits.
        unsafe { bindings::rdma_helper_device_name(dev, name.as_mut_ptr().cast(), name.len()) };
        Self(name)
    }
}

impl core::ops::Deref for Name {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&**self, f)
    }
}
