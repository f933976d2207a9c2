// SPDX-License-Identifier: GPL-2.0

//! Flushes of RDMA WRITEs to the peer's memory.
//!
//! When an RDMA WRITE completes, the peer's device has the data, but they may not be in memory yet.
//! A flush is a request behind it that completes when they are.
//!
//! The kernel's API for ULPs has no request for that. So a flush is an RDMA READ of the last byte
//! of the range, whose response waits for all writes of the same QP before it:
//!
//! - The peer's device executes the requests of a QP in order, so it reads after it has written.
//! - On the peer's bus a read pushes the writes before it, unless they may be reordered: the memory
//!   must not be registered with `IB_ACCESS_RELAXED_ORDERING`, which this crate never sets.
//!
//! The byte that is read goes to a [`Pad`] and is ignored.
//!
//! After a flush the data are visible to the peer's CPUs and to all other QPs
//! (`RPMA_FLUSH_TYPE_VISIBILITY` in librpma). They survive a loss of power only if the peer's
//! platform has its caches in the persistence domain, or its device bypasses them
//! (`RPMA_FLUSH_TYPE_PERSISTENT`).

use crate::prelude::*;

/// The memory that flushes read into. Any number of them can use one at once.
pub struct Pad(Buf<FromDevice>);

impl Pad {
    /// Allocates a pad for flushes by QPs of `pd`. Fails as [`Buf::alloc`].
    pub fn alloc(pd: &Pd, cx: &Sleepable) -> Result<Arc<Self>> {
        Ok(Arc::new(Self(Buf::alloc(pd, 1, cx)?), GFP_KERNEL)?)
    }
}

impl<'a> SendWr<'a> {
    /// Makes a request that completes when all RDMA WRITEs to the `len` bytes from `remote` on that
    /// were posted to the same QP before it are in the peer's memory: see [`crate::flush`].
    ///
    /// The peer must have allowed reading, and the connection at least one outstanding RDMA READ
    /// ([`ConnParam::initiator_depth`](crate::cm::ConnParam::initiator_depth)). Fails with `EINVAL`
    /// if the range is empty or wraps around.
    #[inline]
    pub(crate) fn flush(pad: &'a Pad, remote: Remote, len: usize) -> Result<Self> {
        let last = (len as u64).checked_sub(1).ok_or(EINVAL)?;
        let addr = remote.addr.checked_add(last).ok_or(EINVAL)?;
        let last = Remote { addr, ..remote };
        Ok(Self::rdma_read([pad.0.whole_mut()], last))
    }
}
