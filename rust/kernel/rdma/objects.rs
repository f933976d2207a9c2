// SPDX-License-Identifier: GPL-2.0

//! All objects, by name, for those who look for a leak.
//!
//! An object is listed from its creation to its destruction; requests never are. A removal, or an
//! unload, that waits names the objects that it waits for, and the file `rdma_rs/objects` of
//! debugfs has those of all devices and modules.

use crate::{
    bindings,
    client::Core,
    debug::{
        self,
        Outstanding, //
    }, //
    device::{
        self,
        Name, //
    },
    refs::{
        Kind, //
        Ref,
        Refs,
    },
};
use core::{
    net::{
        IpAddr,
        SocketAddr, //
    },
    ptr::NonNull, //
};
use kernel::{
    alloc::flags::__GFP_NOWARN,
    debugfs::{
        Dir,
        File,
        Writer, //
    },
    fmt,
    list::{
        impl_list_arc_safe,
        impl_list_item,
        List,
        ListArc,
        ListLinks, //
    },
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        SpinLockIrq, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// How many objects a message names.
const NAMED: usize = 16;

kernel::sync::global_lock! {
    // SAFETY: Initialised by the module's init, before anything can use it.
    unsafe(uninit) static OBJECTS: Mutex<List<Entry>> = List::new();
}

/// Whose object it is.
#[derive(Clone, Copy)]
pub(crate) enum Owner {
    Device(NonNull<device::Inner>),
    Client(NonNull<Core>),
}

/// The other end of what an object is for. Ports are 0 where they are not known.
#[derive(Clone, Copy)]
pub(crate) enum Peer {
    Unknown,
    /// It listens on this address.
    On(IpAddr, u16),
    /// It is to be connected to this address.
    To(IpAddr, u16),
    /// It is to be connected to the QP of this number, at this address if it is known.
    ToQp(u32, Option<IpAddr>),
}

/// The owners that a QP keeps until it is drained.
#[derive(Clone, Copy)]
pub(crate) struct Kept {
    count: u32,
    /// The type of the first one, and when that was.
    first: &'static str,
    since: Instant<Monotonic>,
}

/// How many ledgers there are.
const LEDGERS: usize = cfg!(debug_assertions) as usize;

struct About {
    /// Null unless it is a QP; nothing where there is no ledger to ask.
    qp: [*const bindings::ib_qp; LEDGERS],
    peer: Peer,
    kept: Option<KBox<Kept>>,
}

/// What is known of an object. Of 96 bytes at most: C has none of this.
///
/// # Invariants
///
/// While this is in the list, there is a hold on the gate of `owner`.
#[pin_data]
struct Entry {
    #[pin]
    links: ListLinks,
    kind: Kind,
    /// Which of its kind it is, or `NO_NUM`.
    num: Atomic<u32>,
    owner: Owner,
    since: Instant<Monotonic>,
    #[pin]
    about: SpinLockIrq<About>,
}

const NO_NUM: u32 = u32::MAX;

// SAFETY: The pointer to a QP is only compared. The others are followed only while there is a hold
// on what they point to, which may be used from any thread; the rest is `Send`.
unsafe impl Send for Entry {}
// SAFETY: A device, a client and a gate may be used from any thread; `about` is locked, and the
// rest does not change.
unsafe impl Sync for Entry {}

impl_list_arc_safe! {
    impl ListArcSafe<0> for Entry { untracked; }
}
impl_list_item! {
    impl ListItem<0> for Entry { using ListLinks { self.links }; }
}

/// How long ago something was, in seconds.
fn ago(since: Instant<Monotonic>) -> i64 {
    since.elapsed().as_millis() / 1_000
}

impl Entry {
    /// Returns what is posted to it, as far as is known.
    fn posted(&self) -> Option<Outstanding> {
        let qp = self.about.lock().qp.first().copied()?;
        (!qp.is_null()).then(|| debug::of_qp(qp)).flatten()
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peer, kept) = {
            let about = self.about.lock();
            (about.peer, about.kept.as_deref().copied())
        };
        f.write_str(self.kind.name())?;
        let num = self.num.load(Relaxed);
        if num != NO_NUM {
            write!(f, " {num}")?;
        }
        match peer {
            Peer::Unknown => {}
            Peer::On(ip, port) => write!(f, " on {}", SocketAddr::new(ip, port))?,
            Peer::To(ip, 0) => write!(f, " to {ip}")?,
            Peer::To(ip, port) => write!(f, " to {}", SocketAddr::new(ip, port))?,
            Peer::ToQp(num, None) => write!(f, " to QP {num}")?,
            Peer::ToQp(num, Some(ip)) => write!(f, " to QP {num} at {ip}")?,
        }
        write!(f, ", made {} s ago", ago(self.since))?;
        if let Some(posted) = self.posted() {
            let (count, owner, ago) = (posted.count, posted.owner, ago(posted.since));
            f.write_fmt(fmt!(", {count} posted, the first a {owner}, {ago} s ago"))?;
        }
        if let Some(Kept {
            count,
            first,
            since,
        }) = kept
        {
            let ago = ago(since);
            write!(
                f,
                ", {count} kept until it is drained, the first a {first}, {ago} s ago"
            )?;
        }
        Ok(())
    }
}

impl Owner {
    /// # Safety
    ///
    /// The device or the client is there while the reference is used.
    unsafe fn refs(&self) -> &Refs {
        // SAFETY: The caller says that the device or the client is there.
        unsafe {
            match self {
                Self::Device(inner) => &inner.as_ref().refs,
                Self::Client(core) => &core.as_ref().refs,
            }
        }
    }

    /// Writes the client's name, and the device's.
    ///
    /// # Safety
    ///
    /// The device or the client is there.
    unsafe fn write_name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: The caller says that the device or the client is there. A device is registered
        // and has its client while it is.
        unsafe {
            match self {
                Self::Device(inner) => {
                    let inner = inner.as_ref();
                    let name = Name::of(inner.raw.as_ptr());
                    f.write_fmt(fmt!("{}: {name}", inner.client.as_ref().name))
                }
                Self::Client(core) => fmt::Display::fmt(core.as_ref().name, f),
            }
        }
    }
}

/// A hold of an object, by which the object is listed.
///
/// # Invariants
///
/// `entry` is in the list, and `_ref` is on its refs.
pub(crate) struct Listed {
    entry: Arc<Entry>,
    // Dropped last: what the entry points to may be gone after that.
    _ref: Ref,
}

impl Listed {
    /// Lists an object of `owner`. Not generic and never inlined: see `Core`.
    ///
    /// # Safety
    ///
    /// `held` is on the gate of `owner`.
    #[inline(never)]
    pub(crate) unsafe fn new(held: Ref, owner: Owner) -> Result<Self> {
        let kind = held.kind();
        let entry = ListArc::pin_init(
            try_pin_init!(Entry {
                links <- ListLinks::new(),
                kind,
                num: Atomic::new(NO_NUM),
                owner,
                since: Instant::now(),
                about <- new_spinlock_irq!(About {
                    qp: [core::ptr::null(); LEDGERS],
                    peer: Peer::Unknown,
                    kept: None,
                }),
            }),
            GFP_KERNEL,
        )?;
        // INVARIANT: The caller says that the hold is the owner's; it is there until the entry is
        // taken out.
        let this = Self {
            entry: entry.clone_arc(),
            _ref: held,
        };
        OBJECTS.lock().push_back(entry);
        Ok(this)
    }

    /// Returns the client that the object belongs to.
    pub(crate) fn client(&self) -> &Core {
        // SAFETY: By the invariants of this and of the entry, the device or the client is there,
        // and a device's client outlives it.
        unsafe {
            match self.entry.owner {
                Owner::Device(inner) => inner.as_ref().client.as_ref(),
                Owner::Client(core) => core.as_ref(),
            }
        }
    }

    /// Says which object of its kind it is.
    pub(crate) fn set_num(&self, num: u32) {
        self.entry.num.store(num, Relaxed);
    }

    /// Says which QP it is.
    pub(crate) fn set_qp(&self, qp: &bindings::ib_qp) {
        self.set_num(qp.qp_num);
        self.entry.about.lock().qp.fill(qp);
    }

    pub(crate) fn set_peer(&self, peer: Peer) {
        self.entry.about.lock().peer = peer;
    }

    /// Returns the other end, as far as it is known.
    pub(crate) fn peer(&self) -> Peer {
        self.entry.about.lock().peer
    }

    /// Says that the object keeps an owner of this type. Any context.
    pub(crate) fn keeps(&self, first: &'static str) {
        let kept = Kept {
            count: 1,
            first,
            since: Instant::now(),
        };
        // Without memory for it, it is not shown.
        self.put_kept(KBox::new(kept, GFP_ATOMIC | __GFP_NOWARN).ok());
    }

    /// Says that the object keeps nothing, and returns what it has kept.
    pub(crate) fn take_kept(&self) -> Option<KBox<Kept>> {
        self.entry.about.lock().kept.take()
    }

    /// Says that the object keeps this as well. Any context.
    pub(crate) fn put_kept(&self, kept: Option<KBox<Kept>>) {
        let Some(mut kept) = kept else {
            return;
        };
        let mut about = self.entry.about.lock();
        if let Some(other) = about.kept.take() {
            let count = kept.count + other.count;
            if other.since.elapsed() > kept.since.elapsed() {
                kept = other;
            }
            kept.count = count;
        }
        about.kept = Some(kept);
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // SAFETY: The entry is in this list by the type invariant, and entries are in no other.
        let entry = unsafe { OBJECTS.lock().remove(&self.entry) };
        drop(entry);
    }
}

/// Names the objects that hold a refs, in the kernel log.
pub(crate) fn report(refs: &Refs, who: &dyn fmt::Display) {
    let objects = OBJECTS.lock();
    let held = objects
        .iter()
        // SAFETY: The entry is in the list, which is locked, so by its invariant there is a hold,
        // which keeps the device or the client.
        .filter(|entry| core::ptr::eq(unsafe { entry.owner.refs() }, refs));
    for (n, entry) in held.enumerate() {
        if n == NAMED {
            pr_warn!("{who}: waits for more: see rdma_rs/objects in debugfs\n");
            break;
        }
        pr_warn!("{who}: waits for {}\n", &*entry);
    }
}

/// What the file shows.
struct All;

impl Writer for All {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in OBJECTS.lock().iter() {
            // SAFETY: The entry is in the list, which is locked, so by its invariant there is a
            // hold, which keeps the device or the client.
            unsafe { entry.owner.write_name(f) }?;
            f.write_fmt(fmt!(": {}\n", &*entry))?;
        }
        Ok(())
    }
}

/// Owns what this file keeps; part of the core module. No object is there any more when it is
/// dropped.
pub(crate) struct Table {
    // As always with debugfs, what cannot be made is missing.
    _file: Option<Pin<KBox<File<All>>>>,
}

impl Table {
    /// # Safety
    ///
    /// To be called once, when the module is loaded.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: The caller calls this once, when the module is loaded.
        unsafe { OBJECTS.init() };
        let dir = Dir::new(c"rdma_rs");
        let file = KBox::pin_init(dir.read_only_file(c"objects", All), GFP_KERNEL).ok();
        Self { _file: file }
    }
}
