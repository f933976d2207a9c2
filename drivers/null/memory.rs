// SPDX-License-Identifier: GPL-2.0

//! Memory regions, and transfers between them.
//!
//! The device has no DMA device, so addresses are those of the kernel, and a transfer is a copy.

use crate::ring::Slots;
use kernel::prelude::*;
use rdma_bindings as bindings;

/// The key of all local memory.
pub(crate) const LOCAL_KEY: u32 = 1;

/// The most pages of an MR.
pub(crate) const MAX_PAGES: u32 = 256;

/// A scatter/gather entry, as `struct ib_sge`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) key: u32,
}

const _: () = assert!(size_of::<Sge>() == size_of::<bindings::ib_sge>());

/// The use of an entry, and with it the access that an MR must grant.
#[derive(Clone, Copy)]
pub(crate) enum Use {
    LocalRead,
    LocalWrite,
    RemoteRead,
    RemoteWrite,
    RemoteAtomic,
}

impl Use {
    fn access(self) -> u32 {
        match self {
            Use::LocalRead => 0,
            Use::LocalWrite => bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE,
            Use::RemoteRead => bindings::ib_access_flags_IB_ACCESS_REMOTE_READ,
            Use::RemoteWrite => bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE,
            Use::RemoteAtomic => bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC,
        }
    }

    fn is_remote(self) -> bool {
        !matches!(self, Use::LocalRead | Use::LocalWrite)
    }
}

/// A registration: what makes the pages of an MR accessible.
#[derive(Clone, Copy)]
pub(crate) struct Registration {
    pub(crate) key: u32,
    pub(crate) access: u32,
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) page_size: u32,
}

/// A memory region.
pub(crate) struct Mr {
    pages: KVVec<u64>,
    registration: Option<Registration>,
}

impl Mr {
    pub(crate) fn new(pages: u32) -> Result<Self> {
        Ok(Self {
            pages: KVVec::with_capacity(pages as usize, GFP_KERNEL)?,
            registration: None,
        })
    }

    /// Clears the pages, for others to be set.
    pub(crate) fn unmap(&mut self) {
        self.pages.clear();
    }

    /// Adds a page. Memory for it is allocated with the MR.
    pub(crate) fn set_page(&mut self, addr: u64) -> Result {
        self.pages.push_within_capacity(addr).map_err(|_| ENOMEM)
    }

    pub(crate) fn register(&mut self, registration: Registration) {
        self.registration = Some(registration);
    }

    /// Ends the registration and returns whether there was one with this key. On iWARP the key is
    /// not compared, and an MR without a registration may be invalidated.
    pub(crate) fn invalidate(&mut self, key: u32, iwarp: bool) -> bool {
        let valid = iwarp || self.registration.is_some_and(|reg| reg.key == key);
        if valid {
            self.registration = None;
        }
        valid
    }

    /// Finds the start of a range, and how much of it is in one piece there.
    fn piece(&self, sge: Sge, what: Use) -> Option<(u64, u32)> {
        let reg = self.registration.filter(|reg| reg.key == sge.key)?;
        let offset = sge.addr.checked_sub(reg.iova)?;
        let end = offset.checked_add(sge.length.into())?;
        if reg.access & what.access() != what.access() || end > reg.length {
            return None;
        }
        let size = u64::from(reg.page_size);
        let from_page = (reg.iova & (size - 1)) + offset;
        let page = self.pages.get(usize::try_from(from_page / size).ok()?)?;
        let within = from_page % size;
        let left = u32::try_from(size - within).ok()?;
        Some((page + within, sge.length.min(left)))
    }
}

/// Returns the key of the MR at an index; the low byte is the consumer's.
pub(crate) fn key_of(index: usize) -> Result<u32> {
    // The first one is that of all local memory.
    Ok((u32::try_from(index)? + 1) << 8)
}

/// Returns the index of the MR that a key belongs to.
pub(crate) fn mr_of(key: u32) -> usize {
    (key >> 8).wrapping_sub(1) as usize
}

fn piece(mrs: &Slots<Mr>, sge: Sge, what: Use) -> Option<(u64, u32)> {
    if sge.key == LOCAL_KEY && !what.is_remote() {
        return Some((sge.addr, sge.length));
    }
    mrs.get(mr_of(sge.key))?.piece(sge, what)
}

/// The end of a transfer that does not allow it.
pub(crate) enum Denied {
    Source,
    Target,
}

/// A position in a list of entries.
struct Cursor<'a> {
    entries: &'a [Sge],
    offset: u32,
    what: Use,
}

impl Cursor<'_> {
    /// Returns the next bytes that are in one piece, if any are left.
    fn next(&mut self, mrs: &Slots<Mr>) -> Result<Option<(u64, u32)>, ()> {
        while let Some((first, rest)) = self.entries.split_first() {
            if self.offset < first.length {
                let left = Sge {
                    addr: first.addr.wrapping_add(self.offset.into()),
                    length: first.length - self.offset,
                    key: first.key,
                };
                return piece(mrs, left, self.what).map(Some).ok_or(());
            }
            (self.entries, self.offset) = (rest, 0);
        }
        Ok(None)
    }
}

/// Returns the length of all entries.
pub(crate) fn length(entries: &[Sge]) -> u64 {
    entries.iter().map(|sge| u64::from(sge.length)).sum()
}

/// Copies the bytes of `source` to `target`, from its byte `skip` on. The caller has checked the
/// lengths.
pub(crate) fn transfer(
    mrs: &Slots<Mr>,
    source: (&[Sge], Use),
    target: (&[Sge], Use),
    skip: u32,
) -> Result<(), Denied> {
    let mut from = Cursor {
        entries: source.0,
        offset: 0,
        what: source.1,
    };
    let mut to = Cursor {
        entries: target.0,
        offset: skip,
        what: target.1,
    };
    while let Some((source, left)) = from.next(mrs).map_err(|()| Denied::Source)? {
        let Some((target, room)) = to.next(mrs).map_err(|()| Denied::Target)? else {
            return Err(Denied::Target);
        };
        let len = left.min(room);
        // SAFETY: `piece` has found both ranges in memory that the consumer has posted or
        // registered, which it keeps valid until the request has completed or the registration has
        // ended.
        unsafe { core::ptr::copy(source as *const u8, target as *mut u8, len as usize) };
        from.offset += len;
        to.offset += len;
    }
    Ok(())
}

/// Changes eight bytes and returns their old value.
pub(crate) fn atomic(mrs: &Slots<Mr>, sge: Sge, change: impl Fn(u64) -> u64) -> Option<u64> {
    let (addr, 8) = piece(mrs, sge, Use::RemoteAtomic)? else {
        return None;
    };
    let word = addr as *mut u64;
    // SAFETY: `piece` has found the eight bytes in an MR, and the consumer promises that memory
    // that it registers is valid until the registration ends. Requests of one device exclude each
    // other.
    unsafe {
        let old = word.read_unaligned();
        word.write_unaligned(change(old));
        Some(old)
    }
}
