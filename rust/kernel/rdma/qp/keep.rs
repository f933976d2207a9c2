// SPDX-License-Identifier: GPL-2.0

//! The owners that a QP keeps, as no completion gives them back: until the QP was drained or, where
//! peers of iWARP have a key to their memory, destroyed.

use crate::{
    cqe::Queue,
    prelude::internal::*, //
};
use kernel::{
    new_spinlock_irq,
    sync::SpinLockIrq, //
};

/// An owner that a QP keeps, with callbacks for the end of the QP. Threads that drain the QP or
/// release its receives share it.
pub(crate) trait OnEnd: Send + Sync {
    /// The QP is about to be drained for the last time.
    fn closing(&self) {}

    /// The QP was drained. Notes, and returns, whether a receive is out, and none is about to be
    /// posted that was not before: it is lost if another drain finds it still out.
    fn suspect(&self) -> bool {
        false
    }

    /// Returns what [`OnEnd::suspect`] has returned.
    fn is_suspect(&self) -> bool {
        false
    }

    /// The QP cannot be drained, or was drained again: completions of receives that are out are
    /// ignored from here on.
    fn ignore(&self) {}

    /// The QP was drained again, and the receives that are out are ignored: they are lost, and drop
    /// their references to the QP. Called if they were suspected.
    fn drained(&self) {}

    /// The handlers that had begun before [`OnEnd::ignore`] have returned: the receives drop their
    /// references to the QP. Does nothing and returns `false` if one is kept or about to be posted.
    fn release(&self) -> bool {
        true
    }

    /// Returns whether a request of this queue is out that has no completion of its own, and is
    /// given back when the QP was drained: it needs a marker behind it.
    fn needs_marker(&self, _queue: Queue) -> bool {
        false
    }

    /// Returns whether a request is out, after the last drain.
    fn is_out(&self) -> bool {
        false
    }

    /// The QP is destroyed, and nothing of it completes: ends what is out. Not called where
    /// completions may be in arrays.
    fn ended(&self) {}
}

/// An owner without callbacks.
struct Left<T> {
    _owner: T,
}

// SAFETY: A shared one gives access to nothing.
unsafe impl<T: Send> Sync for Left<T> {}

impl<T: Send> OnEnd for Left<T> {}

/// An owner in a list.
pub(super) struct Node<K: ?Sized = dyn OnEnd> {
    next: Option<KBox<Node>>,
    kept: K,
}

impl Node {
    /// Makes the node of an owner, which is leaked if there is no memory. Any context.
    pub(super) fn new<P: Send + 'static>(owner: P) -> Option<KBox<Self>> {
        // `KeepList::add` reports the failure.
        let Ok(node) = KBox::<Node<Left<P>>>::new_uninit(GFP_ATOMIC | __GFP_NOWARN) else {
            core::mem::forget(owner);
            return None;
        };
        Some(node.write(Node {
            next: None,
            kept: Left { _owner: owner },
        }))
    }
}

/// Memory for the node of an owner whose callbacks are called at the end of the QP.
pub(crate) struct TablePlace<K>(KBox<MaybeUninit<Node<K>>>);

impl<K: OnEnd + 'static> TablePlace<K> {
    /// Fails with `ENOMEM`.
    pub(super) fn new() -> Result<Self> {
        Ok(Self(KBox::new_uninit(GFP_KERNEL)?))
    }

    /// Makes the node.
    pub(super) fn put(self, kept: K) -> KBox<Node> {
        self.0.write(Node { next: None, kept })
    }
}

impl<K: ?Sized> Drop for Node<K> {
    /// Drops a list without recursion.
    fn drop(&mut self) {
        let mut next = self.next.take();
        while let Some(mut node) = next {
            next = node.next.take();
        }
    }
}

/// The owners that a QP keeps, in no order. Those that are left are dropped with this, after the QP
/// is destroyed.
#[pin_data]
pub(super) struct KeepList {
    #[pin]
    head: SpinLockIrq<Option<KBox<Node>>>,
}

impl KeepList {
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            head <- new_spinlock_irq!(None, "rdma::Qp::keep_list"),
        })
    }

    /// Keeps an owner, if there was memory for its node. Any context.
    pub(super) fn add(&self, node: Option<KBox<Node>>) {
        match node {
            Some(node) => self.push(node),
            None => pr_err!("no memory to keep the owner of posted requests: it is leaked\n"),
        }
    }

    fn push(&self, mut node: KBox<Node>) {
        let mut head = self.head.lock();
        node.next = head.take();
        *head = Some(node);
    }

    /// Takes all owners out. They go back unless [`TakenOwners::release`] drops them.
    pub(super) fn take(&self) -> TakenOwners<'_> {
        TakenOwners {
            head: self.head.lock().take(),
            list: self,
        }
    }
}

/// The owners that a QP keeps until it is destroyed, the last one first.
///
/// # Invariants
///
/// Nothing is taken out of the list.
#[pin_data]
pub(super) struct Tables {
    #[pin]
    list: KeepList,
}

impl Tables {
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self { list <- KeepList::new() })
    }

    /// As [`KeepList::add`].
    pub(super) fn add(&self, node: Option<KBox<Node>>) {
        self.list.add(node);
    }

    /// Returns the owners in the list.
    pub(super) fn iter(&self) -> impl Iterator<Item = &dyn OnEnd> + Clone {
        let first = self.list.head.lock().as_deref().map(NonNull::from);
        // SAFETY: By the type invariant the node stays in the list, which is borrowed, and a node
        // does not change once it is listed.
        let mut next = first.map(|first| unsafe { first.as_ref() });
        core::iter::from_fn(move || {
            let node: &Node = next?;
            next = node.next.as_deref();
            Some(&node.kept)
        })
    }
}

/// Owners that were taken out of a [`KeepList`].
pub(super) struct TakenOwners<'a> {
    head: Option<KBox<Node>>,
    list: &'a KeepList,
}

impl TakenOwners<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_none()
    }

    /// Drops the owners.
    ///
    /// # Safety
    ///
    /// All requests that were posted before they were taken out are complete.
    pub(super) unsafe fn release(mut self) {
        drop(self.head.take());
    }
}

impl Drop for TakenOwners<'_> {
    fn drop(&mut self) {
        while let Some(mut node) = self.head.take() {
            self.head = node.next.take();
            self.list.push(node);
        }
    }
}
