// SPDX-License-Identifier: GPL-2.0

//! Owners that no completion gives back.
//!
//! An owner of requests that are not signaled, behind which no signaled one was posted, is out of
//! use only when the QP was drained. Until then the QP keeps it, in a list.

use crate::prelude::*;
use core::mem::forget;
use kernel::{
    alloc::flags::__GFP_NOWARN,
    new_spinlock_irq,
    sync::SpinLockIrq, //
};

/// An owner in a list.
pub(super) struct Node<P: ?Sized = dyn Send> {
    next: Option<KBox<Node>>,
    _owner: P,
}

impl Node {
    /// Makes the node of an owner, which is leaked if there is no memory. Any context.
    pub(super) fn new<P: Send + 'static>(owner: P) -> Option<KBox<Self>> {
        // `DrainList::add` reports the failure.
        let Ok(node) = KBox::<Node<P>>::new_uninit(GFP_ATOMIC | __GFP_NOWARN) else {
            forget(owner);
            return None;
        };
        Some(node.write(Node {
            next: None,
            _owner: owner,
        }))
    }
}

/// The owners that a QP keeps, the last one first. What is left when this is dropped is dropped:
/// the QP is gone by then.
#[pin_data]
pub(super) struct DrainList {
    #[pin]
    head: SpinLockIrq<Option<KBox<Node>>>,
}

impl DrainList {
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            head <- new_spinlock_irq!(None, "rdma::Qp::drain_list"),
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

    /// Takes all owners out, to be dropped once the requests that were posted before this are
    /// proved to be complete.
    pub(super) fn take(&self) -> Taken<'_> {
        Taken {
            head: self.head.lock().take(),
            drain_list: self,
        }
    }
}

impl<P: ?Sized> Drop for Node<P> {
    /// Drops a list without recursion.
    fn drop(&mut self) {
        let mut next = self.next.take();
        while let Some(mut node) = next {
            next = node.next.take();
        }
    }
}

/// Owners that were taken out of a [`DrainList`]; they go back unless they are dropped explicitly.
pub(super) struct Taken<'a> {
    head: Option<KBox<Node>>,
    drain_list: &'a DrainList,
}

impl Taken<'_> {
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

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        while let Some(mut node) = self.head.take() {
            self.head = node.next.take();
            self.drain_list.push(node);
        }
    }
}
