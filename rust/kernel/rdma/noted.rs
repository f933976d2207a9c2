// SPDX-License-Identifier: GPL-2.0

//! Posts that are noted, so that the end of a QP finds single owners that the device has lost.
//!
//! Nothing but the device knows of a request that a `Pin<KBox<T>>` or an `Arc<T>` was moved into.
//! To note it takes memory and a lock, for which a post in C does not pay. So posts are noted only
//! where `rdma_rs` is loaded with `note_posts=1`: behind the static branches of the trace events,
//! which posts and polls have anyway.
//!
//! Such a request is posted with a callback of its own, that of its note, which calls the owner's.
//! So a completion finds its note without a search.

use crate::{
    debug,
    prelude::internal::*,
    published::Published,
    qp_id::{
        QpId,
        Queue, //
    }, //
};
use kernel::{
    rbtree::{
        RBTree,
        RBTreeNode,
        RBTreeNodeReservation, //
    },
    sync::{
        atomic::{
            Atomic,
            Relaxed,
            Release, //
        },
        SpinLockIrq, //
    },
};

static TABLE: Published<Table> = Published::new();

/// Set where posts are noted. Then the branches of posts and polls are on.
static NOTING: Atomic<bool> = Atomic::new(false);

const BUCKETS: usize = 64;

/// What a note is found by: the number of its QP, and its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    qp: u64,
    note: u64,
}

/// The note of a request that is posted, or is about to be.
///
/// # Invariants
///
/// It stays where it is until it is taken out of the table. It is taken out once: by the
/// completion, by the end of the QP if there is none, or by a post that the driver refuses. `owner`
/// is the callback of the request's owner, which exists until then.
#[repr(C)]
struct Note {
    /// The callback that the request is posted with. The first field, to get back from it.
    cqe: bindings::ib_cqe,
    owner: *mut bindings::ib_cqe,
    key: Key,
    queue: Queue,
}

/// A part of the table.
struct Bucket {
    notes: RBTree<Key, Note>,
    /// The number of the last note.
    last: u64,
    /// The note that was taken out last. The poller still reads the callback of a request that
    /// completes twice, one time behind the other, before debugging reports it.
    taken: Option<RBTreeNode<Key, Note>>,
}

// SAFETY: The callbacks of owners are used by the thread that completes the request alone.
unsafe impl Send for Bucket {}

/// All notes, by the number of their QP; part of the core module.
#[pin_data(PinnedDrop)]
pub(crate) struct Table {
    #[pin]
    buckets: [SpinLockIrq<Bucket>; BUCKETS],
}

impl Table {
    pub(crate) fn new(note_posts: bool) -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Self {
            buckets <- pin_init::pin_init_array_from_fn(|_| {
                let bucket = Bucket {
                    notes: RBTree::new(),
                    last: 0,
                    taken: None,
                };
                kernel::new_spinlock_irq!(bucket, "rdma::noted::Table")
            }),
        });
        let table = KBox::pin_init(init, GFP_KERNEL)?;
        // SAFETY: The table is the core module's, which its users keep.
        unsafe { TABLE.set(&table) };
        // SAFETY: The module is being loaded: no ULP has posted or polled anything.
        unsafe { set(note_posts) }?;
        Ok(table)
    }

    fn bucket(qp: u64) -> Option<&'static SpinLockIrq<Bucket>> {
        // The numbers of QPs are those behind each other.
        let bucket = (qp >> QpId::FREE_BITS) as usize % BUCKETS;
        TABLE.get()?.buckets.get(bucket)
    }
}

#[pinned_drop]
impl PinnedDrop for Table {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: The module has no users any longer. Turning notes off does not fail.
        let _ = unsafe { set(false) };
    }
}

/// Set where posts can be noted. Without static branches each post and poll would have to look, as
/// those of kernels with debug assertions do.
const POSSIBLE: bool = cfg!(any(
    all(CONFIG_TRACEPOINTS, CONFIG_JUMP_LABEL),
    debug_assertions
));

/// Has posts of single owners noted from here on, or no longer. Fails with `EOPNOTSUPP` where the
/// kernel has no static branches, nor debug assertions; `ENOMEM`.
///
/// # Safety
///
/// No request is noted, and no task posts or polls a CQ meanwhile: a completion that is polled into
/// an array without the branches may be that of a post that was noted.
#[doc(hidden)]
pub unsafe fn set(on: bool) -> Result {
    match (NOTING.load(Relaxed), on) {
        (false, true) if !POSSIBLE => {
            pr_err!("posts cannot be noted: this kernel has no static branches\n");
            return Err(EOPNOTSUPP);
        }
        // SAFETY: By `NOTING` they are off, and no task posts or polls meanwhile, as the
        // caller promises.
        (false, true) => to_result(unsafe { bindings::rdma_helper_branches_on() })?,
        // SAFETY: By `NOTING` they are on, and no task posts or polls meanwhile, as the
        // caller promises.
        (true, false) => unsafe { bindings::rdma_helper_branches_off() },
        _ => {}
    }
    NOTING.store(on, Release);
    Ok(())
}

/// Returns whether posts are noted. In posts and polls for kernels without static branches alone.
pub(crate) fn is_on() -> bool {
    NOTING.load(Relaxed)
}

/// Notes a request that is about to be posted to a QP, and returns its note, if there is memory.
///
/// # Safety
///
/// The QP is valid, and one of this crate. The owner of the request, which has this callback, is
/// there until it has completed.
unsafe fn note(
    qp: *mut bindings::ib_qp,
    owner: *mut bindings::ib_cqe,
    queue: Queue,
) -> Option<NonNull<Note>> {
    if !NOTING.load(Relaxed) {
        return None;
    }
    let Ok(reserved) = RBTreeNodeReservation::new(GFP_ATOMIC | __GFP_NOWARN) else {
        crate::pr_err_ratelimited!("no memory to note a post: it does not end if it is lost\n");
        return None;
    };
    // SAFETY: The QP is as the caller promises.
    let qp = unsafe { QpId::of(qp) }.get();
    let mut bucket = Table::bucket(qp)?.lock();
    bucket.last = bucket.last.wrapping_add(1);
    let key = Key {
        qp,
        note: bucket.last,
    };
    // INVARIANT: The owner exists, as the caller promises; a node of the tree does not move.
    let note = Note {
        cqe: bindings::ib_cqe { done: Some(done) },
        owner,
        key,
        queue,
    };
    drop(bucket.notes.insert(reserved.into_node(key, note)));
    let note = bucket.notes.get_mut(&key).map(NonNull::from)?;
    drop(bucket);
    debug::activate(note.as_ptr().cast(), NAME);
    Some(note)
}

/// The name of a note in reports of debugging.
const NAME: &str = "a note";

/// Takes a note out of the table, and returns the callback of the owner. `None`, with debug
/// assertions, if the note is gone: the device has completed the request twice, or behind the end
/// of the QP.
///
/// # Safety
///
/// The note is in the table, and the caller alone takes it out: it completes the request, or knows
/// that this was not posted.
unsafe fn take(note: NonNull<Note>) -> Option<*mut bindings::ib_cqe> {
    if !debug::deactivate(note.as_ptr().cast()) {
        debug::report(NAME);
        return None;
    }
    // SAFETY: By the invariant of `Note` it is valid, and its fields do not change.
    let (owner, key) = unsafe { ((*note.as_ptr()).owner, (*note.as_ptr()).key) };
    if let Some(bucket) = Table::bucket(key.qp) {
        let mut bucket = bucket.lock();
        bucket.taken = bucket.notes.remove_node(&key);
    }
    Some(owner)
}

macro_rules! post {
    ($post:ident, $wr:ident, $queue:ident, $traced:ident) => {
        /// Posts a list of requests, and notes the last one.
        ///
        /// # Safety
        ///
        /// As [`trace::PostVerb::post`](crate::trace::PostVerb::post).
        pub(crate) unsafe fn $post(
            qp: *mut bindings::ib_qp,
            first: *const bindings::$wr,
            bad: *mut *const bindings::$wr,
        ) -> c_int {
            let mut last = first.cast_mut();
            // SAFETY: The QP and the list, which the caller has made, are valid, and `bad` is, as
            // the caller promises. Both members of the union are as wide. The note is in the table
            // until the request completes: if that is refused by name, it was not posted.
            unsafe {
                while !(*last).next.is_null() {
                    last = (*last).next;
                }
                let owner = *(*last).__bindgen_anon_1.wr_cqe;
                let note = note(qp, owner, Queue::$queue);
                if let Some(note) = note {
                    (*last).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(note.as_ptr().cast());
                }
                let ret = bindings::$traced(qp, first, bad, owner);
                if ret != 0 {
                    (*last).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(owner);
                    if let Some(note) = note.filter(|_| !(*bad).is_null()) {
                        take(note);
                    }
                }
                ret
            }
        }
    };
}

post!(post_send, ib_send_wr, Send, rdma_helper_trace_post_send_of);
post!(post_recv, ib_recv_wr, Recv, rdma_helper_trace_post_recv_of);

/// The `done` callback of notes: calls that of the owner.
///
/// # Safety
///
/// Called as [`trace::completion`](crate::trace::completion) requires, by C, for a request that was
/// posted with a note.
unsafe extern "C" fn done(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: C has passed `wc`, which may be written. The request completes once, by the driver's
    // contract, so this takes its note. The owner exists, as it has not completed before.
    unsafe {
        let Some(owner) = take(note_of(wc)) else {
            return;
        };
        (*wc).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(owner);
        (*owner).done.unwrap_unchecked()(cq, wc);
    }
}

/// The callback of a completion that is ignored.
static IGNORED: bindings::ib_cqe = bindings::ib_cqe {
    done: Some(ignored),
};

/// The `done` callback of requests whose completions are ignored: those that have a note, and those
/// that the device has lost, in case that it completes them.
///
/// Not inlined, so that no ULP has one of its own: `cqe::is_ignored()` compares its address.
#[inline(never)]
pub(crate) extern "C" fn ignored(_cq: *mut bindings::ib_cq, _wc: *mut bindings::ib_wc) {}

/// Returns the note of a request.
///
/// # Safety
///
/// `wc` is the completion of a request that was posted with a note.
unsafe fn note_of(wc: *const bindings::ib_wc) -> NonNull<Note> {
    // SAFETY: `wc` is valid, and has the address of a note's first field, as the caller promises.
    unsafe { NonNull::new_unchecked((*(*wc).__bindgen_anon_1.wr_cqe).cast()) }
}

/// Polls completions, as [`trace::poll_cq`](crate::trace::poll_cq). They have the callbacks of the
/// owners.
///
/// # Safety
///
/// As of that.
pub(crate) unsafe fn poll_cq(
    cq: *mut bindings::ib_cq,
    len: c_int,
    wcs: *mut bindings::ib_wc,
) -> c_int {
    let ours: unsafe extern "C" fn(_, _) = done;
    // SAFETY: The CQ is valid, and there are `len` entries, as the caller promises; so many have
    // been written by the device. The owner of each is not back, so its callback is valid. One of
    // a note is of a request that was posted with it, and completes here.
    unsafe {
        let n = bindings::rdma_helper_poll_cq(cq, len, wcs);
        for at in 0..n.clamp(0, len) as usize {
            let wc = wcs.add(at);
            let cqe = *(*wc).__bindgen_anon_1.wr_cqe;
            let theirs = cqe.as_ref().and_then(|cqe| cqe.done);
            if theirs.is_some_and(|theirs| ptr::fn_addr_eq(theirs, ours)) {
                let owner = take(note_of(wc)).unwrap_or((&raw const IGNORED).cast_mut());
                (*wc).__bindgen_anon_1.wr_cqe = ManuallyDrop::new(owner);
            }
            bindings::rdma_helper_trace_completion(cq, wc);
        }
        n
    }
}

/// Returns the first note of this QP that `of` selects, and its queue.
fn find(bucket: &Bucket, qp: QpId, of: impl Fn(Queue) -> bool) -> Option<(Key, Queue)> {
    let qp = qp.get();
    let mut from = Key { qp, note: 0 };
    while let Some(cursor) = bucket.notes.cursor_lower_bound(&from) {
        let (key, note) = cursor.current();
        if key.qp != qp {
            return None;
        }
        if of(note.queue) {
            return Some((*key, note.queue));
        }
        from.note = key.note.wrapping_add(1);
    }
    None
}

/// Returns whether a request is noted that is posted to a queue of this QP that `of` selects.
pub(crate) fn is_any(qp: QpId, of: impl Fn(Queue) -> bool) -> bool {
    let bucket = Table::bucket(qp.get()).filter(|_| is_on());
    bucket.is_some_and(|bucket| find(&bucket.lock(), qp, of).is_some())
}

/// Takes out a request that is noted, of a queue of this QP that `of` selects, and returns the
/// callback of its owner.
///
/// # Safety
///
/// These queues get no further completions.
pub(crate) unsafe fn take_lost(
    qp: QpId,
    of: impl Fn(Queue) -> bool,
) -> Option<(*mut bindings::ib_cqe, Queue)> {
    let mut bucket = Table::bucket(qp.get())?.lock();
    let (key, queue) = find(&bucket, qp, of)?;
    let note = bucket.notes.get_mut(&key)?;
    let owner = note.owner;
    debug::deactivate(ptr::from_mut(note).cast());
    bucket.taken = bucket.notes.remove_node(&key);
    Some((owner, queue))
}
