// SPDX-License-Identifier: GPL-2.0

//! All objects, by name, for those who look for a leak.
//!
//! An object is listed from its creation to its destruction; requests never are. A removal, or an
//! unload, that waits names the objects that it waits for, and the file `rdma_rs/objects` of debugfs
//! has those of all devices and modules.

use crate::{
    bindings,
    client::Core,
    device::{
        self,
        Name, //
    },
    gate::{
        Gate,
        Hold,
        Kind, //
    },
    ledger, //
};
use core::{
    net::{
        IpAddr,
        SocketAddr, //
    },
    ptr::NonNull, //
};
use kernel::{
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

/// The other end of what an object is for.
#[derive(Clone, Copy)]
pub(crate) enum Peer {
    Unknown,
    /// It listens on this address.
    On(SocketAddr),
    /// It is to be connected to this address.
    To(SocketAddr),
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

struct About {
    num: Option<u32>,
    /// Null unless it is a QP.
    qp: *const bindings::ib_qp,
    peer: Peer,
    kept: Option<Kept>,
}

/// What is known of an object.
///
/// # Invariants
///
/// While this is in the list, there is a hold on `gate`, which is that of `owner`.
#[pin_data]
struct Entry {
    #[pin]
    links: ListLinks,
    kind: Kind,
    gate: NonNull<Gate>,
    owner: Owner,
    since: Instant<Monotonic>,
    #[pin]
    about: SpinLockIrq<About>,
}

// SAFETY: The pointer to a QP is only compared. The others are followed only while there is a hold on
// what they point to, which may be used from any thread; the rest is `Send`.
unsafe impl Send for Entry {}
// SAFETY: A device, a client and a gate may be used from any thread; `about` is locked, and the rest
// does not change.
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

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (num, qp, peer, kept) = {
            let about = self.about.lock();
            (about.num, about.qp, about.peer, about.kept)
        };
        f.write_str(self.kind.name())?;
        if let Some(num) = num {
            write!(f, " {num}")?;
        }
        match peer {
            Peer::Unknown => {}
            Peer::On(addr) => write!(f, " on {addr}")?,
            Peer::To(addr) if addr.port() == 0 => write!(f, " to {}", addr.ip())?,
            Peer::To(addr) => write!(f, " to {addr}")?,
            Peer::ToQp(num, None) => write!(f, " to QP {num}")?,
            Peer::ToQp(num, Some(ip)) => write!(f, " to QP {num} at {ip}")?,
        }
        write!(f, ", made {} s ago", ago(self.since))?;
        let posted = (!qp.is_null()).then(|| ledger::of_qp(qp)).flatten();
        if let Some(posted) = posted {
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

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // SAFETY: Shown for an entry of the list only, whose hold keeps the device and its client.
            Self::Device(inner) => unsafe {
                let inner = inner.as_ref();
                let name = Name::of(inner.raw.as_ptr());
                f.write_fmt(fmt!("{}: {name}", inner.client.as_ref().name))
            },
            // SAFETY: Shown for an entry of the list only, whose hold keeps the client.
            Self::Client(core) => fmt::Display::fmt(unsafe { core.as_ref() }.name, f),
        }
    }
}

/// A hold of an object, by which the object is listed.
///
/// # Invariants
///
/// `entry` is in the list, and `_hold` is on its gate.
pub(crate) struct Listed {
    entry: Arc<Entry>,
    // Dropped last: what the entry points to may be gone after that.
    _hold: Hold,
}

impl Listed {
    /// Lists an object that has a hold of `owner`. Not generic and never inlined: see `Core`.
    #[inline(never)]
    pub(crate) fn new(hold: Hold, owner: Owner) -> Result<Self> {
        let (kind, gate) = (hold.kind(), hold.gate());
        let entry = ListArc::pin_init(
            try_pin_init!(Entry {
                links <- ListLinks::new(),
                kind,
                gate,
                owner,
                since: Instant::now(),
                about <- new_spinlock_irq!(About {
                    num: None,
                    qp: core::ptr::null(),
                    peer: Peer::Unknown,
                    kept: None,
                }),
            }),
            GFP_KERNEL,
        )?;
        // INVARIANT: The hold is there until the entry is taken out.
        let this = Self {
            entry: entry.clone_arc(),
            _hold: hold,
        };
        OBJECTS.lock().push_back(entry);
        Ok(this)
    }

    /// Says which object of its kind it is.
    pub(crate) fn set_num(&self, num: u32) {
        self.entry.about.lock().num = Some(num);
    }

    /// Says which QP it is.
    pub(crate) fn set_qp(&self, qp: &bindings::ib_qp) {
        let mut about = self.entry.about.lock();
        about.num = Some(qp.qp_num);
        about.qp = qp;
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
        let mut about = self.entry.about.lock();
        match &mut about.kept {
            Some(kept) => kept.count += 1,
            none => {
                *none = Some(Kept {
                    count: 1,
                    first,
                    since: Instant::now(),
                });
            }
        }
    }

    /// Says that the object keeps nothing, and returns what it has kept.
    pub(crate) fn take_kept(&self) -> Option<Kept> {
        self.entry.about.lock().kept.take()
    }

    /// Says that the object still keeps what was taken.
    pub(crate) fn put_kept(&self, old: Option<Kept>) {
        let mut about = self.entry.about.lock();
        about.kept = match (old, about.kept) {
            (Some(old), new) => Some(Kept {
                count: old.count + new.map_or(0, |new| new.count),
                ..old
            }),
            (None, new) => new,
        };
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the entry is in this list and in no other.
        let entry = unsafe { OBJECTS.lock().remove(&self.entry) };
        drop(entry);
    }
}

/// Names the objects that hold a gate, in the kernel log.
pub(crate) fn report(gate: &Gate, who: &dyn fmt::Display) {
    let objects = OBJECTS.lock();
    let held = objects
        .iter()
        .filter(|entry| core::ptr::eq(entry.gate.as_ptr(), gate));
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
            f.write_fmt(fmt!("{}: {}\n", entry.owner, &*entry))?;
        }
        Ok(())
    }
}

/// Owns what this file keeps; part of the core module. No object is there any more when it is dropped.
pub(crate) struct Table {
    // As always with debugfs, what cannot be made is missing.
    _file: Option<Pin<KBox<File<All>>>>,
}

impl Table {
    /// # Safety
    ///
    /// To be called once, when the module is loaded.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: By the caller's promise.
        unsafe { OBJECTS.init() };
        let dir = Dir::new(c"rdma_rs");
        let file = KBox::pin_init(dir.read_only_file(c"objects", All), GFP_KERNEL).ok();
        Self { _file: file }
    }
}
