// SPDX-License-Identifier: GPL-2.0

//! Queues and tables of a fixed size. Nothing is allocated after they are made.

use kernel::prelude::*;

/// A queue of at most as many values as it was made for.
pub(crate) struct Ring<T> {
    slots: KVVec<T>,
    head: usize,
    len: usize,
}

impl<T: Copy + Default> Ring<T> {
    pub(crate) fn new(capacity: usize) -> Result<Self> {
        Ok(Self {
            slots: KVVec::from_elem(T::default(), capacity, GFP_KERNEL)?,
            head: 0,
            len: 0,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    fn at(&self, nth: usize) -> usize {
        // Neither is larger than the number of slots.
        let at = self.head.wrapping_add(nth);
        if at < self.slots.len() {
            at
        } else {
            at - self.slots.len()
        }
    }

    /// Adds a value at the end and returns its index, or the value if the ring is full.
    #[inline]
    pub(crate) fn push(&mut self, value: T) -> Result<usize, T> {
        match self.add() {
            Some((at, slot)) => {
                *slot = value;
                Ok(at)
            }
            None => Err(value),
        }
    }

    /// Adds a slot at the end, with an old value. Returns `None` if the ring is full.
    #[inline(always)]
    pub(crate) fn add(&mut self) -> Option<(usize, &mut T)> {
        if self.len >= self.slots.len() {
            return None;
        }
        let at = self.at(self.len);
        let slot = self.slots.get_mut(at)?;
        self.len += 1;
        Some((at, slot))
    }

    /// Takes the first value and returns it with its index.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<(usize, T)> {
        let at = self.head;
        let value = *self.first(1).first()?;
        self.drop_first(1);
        Some((at, value))
    }

    /// Returns the first values, at most `most`, as far as they are next to each other.
    #[inline]
    pub(crate) fn first(&self, most: usize) -> &[T] {
        let values = self.slots.get(self.head..).unwrap_or(&[]);
        let n = most.min(self.len).min(values.len());
        values.get(..n).unwrap_or(&[])
    }

    /// Drops the first values, which [`Ring::first`] has returned.
    #[inline]
    pub(crate) fn drop_first(&mut self, n: usize) {
        let n = n.min(self.len);
        self.head = self.at(n);
        self.len -= n;
    }

    /// Takes the last value.
    pub(crate) fn pop_back(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        self.slots.get(self.at(self.len)).copied()
    }

    /// Keeps only some values, in order.
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for _ in 0..self.len {
            if let Some((_, value)) = self.pop() {
                if keep(&value) {
                    // There is room: one was taken.
                    let _ = self.push(value);
                }
            }
        }
    }
}

/// A table of objects, found by index.
pub(crate) struct Slots<T> {
    slots: KVVec<Option<KBox<T>>>,
    next: usize,
}

impl<T> Slots<T> {
    pub(crate) fn new(capacity: usize) -> Result<Self> {
        let mut slots = KVVec::with_capacity(capacity, GFP_KERNEL)?;
        for _ in 0..capacity {
            slots.push(None, GFP_KERNEL)?;
        }
        Ok(Self { slots, next: 0 })
    }

    /// Finds a free slot, the one that was free for longest if they come and go evenly.
    pub(crate) fn vacant(&mut self) -> Result<usize> {
        let n = self.slots.len();
        let index = (0..n)
            .map(|nth| (self.next + nth) % n)
            .find(|index| self.get(*index).is_none())
            .ok_or(ENOSPC)?;
        self.next = (index + 1) % n;
        Ok(index)
    }

    pub(crate) fn put(&mut self, index: usize, value: KBox<T>) {
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some(value);
        }
    }

    /// Takes an object out.
    pub(crate) fn take(&mut self, index: usize) -> Option<KBox<T>> {
        self.slots.get_mut(index)?.take()
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.slots.get(index)?.as_deref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.slots.get_mut(index)?.as_deref_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten().map(|value| &**value)
    }
}
