// SPDX-License-Identifier: GPL-2.0

//! Memory that peers may access.
//!
//! A [`Region`] is a buffer with a fast-registration MR. Peers reach it from the completion of
//! [`Qp::post_reg`](crate::qp::Qp::post_reg) until the MR is deregistered, which happens before the
//! buffer is unmapped and freed. As a peer may write the bytes at any time, the CPU gets at them by
//! copies only, never as a slice.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_mr`, `struct
//! ib_reg_wr`)

mod post;

use crate::{
    bindings,
    context::Sleepable,
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    dma::{
        Buf,
        DeviceReads,
        DeviceWrites,
        Direction,
        RawBuf, //
    },
    gate::{
        Hold,
        Kind, //
    },
    pd::Pd,
    wr::Remote, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::from_err_ptr,
    page::PAGE_SIZE,
    prelude::*,
    sync::atomic::{
        ordering::{
            Full,
            Release, //
        },
        Atomic, //
    },
};

/// What a region needs at its end.
///
/// # Invariants
///
/// `mr` is an MR that maps `buf`.
struct State {
    mr: NonNull<bindings::ib_mr>,
    buf: RawBuf,
    pd: Pd,
    _hold: Hold,
}

// SAFETY: An MR may be deregistered from any thread.
unsafe impl Send for State {}
// SAFETY: A shared reference gives the buffer's raw copies only.
unsafe impl Sync for State {}

impl Teardown for State {
    fn teardown(&mut self, _cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant. Whoever drops a region owns it, so no request uses it.
        // After this no peer can reach the buffer, so it may be unmapped.
        let ret = unsafe { bindings::ib_dereg_mr_user(self.mr.as_ptr(), core::ptr::null_mut()) };
        if ret != 0 {
            pr_err!("an MR could not be deregistered ({ret}); it is leaked with its memory\n");
            return Fate::Leak;
        }
        Fate::Gone
    }
}

/// Allocates an MR that maps `buf`. Not generic, so that what it needs at its end is code of this
/// module.
#[inline(never)]
fn map(buf: RawBuf, _cx: &Sleepable) -> Result<Deferred<State>> {
    let pd = buf.pd().clone();
    let dev = pd.device();
    // A buffer that does not start on a page covers one more.
    let pages = u32::try_from(buf.len().div_ceil(PAGE_SIZE) + 1)?;
    if pages > dev.max_fast_reg_pages() {
        return Err(EINVAL);
    }
    let reserved = Deferred::reserve()?;
    let hold = dev.hold(Kind::Mr);
    // SAFETY: The PD is alive, and the number of pages is in range.
    let mr = from_err_ptr(unsafe {
        bindings::ib_alloc_mr(pd.as_raw(), bindings::ib_mr_type_IB_MR_TYPE_MEM_REG, pages)
    })?;
    let mr = NonNull::new(mr).ok_or(ENOMEM)?;
    let (addr, len) = (buf.addr(), u32::try_from(buf.len())?);
    // INVARIANT: The MR is new; it maps the buffer or nothing.
    let state = reserved.fill(State {
        mr,
        buf,
        pd,
        _hold: hold,
    });
    // SAFETY: The MR is new, and the buffer is mapped for its device and lives as long.
    let mapped = unsafe { bindings::rdma_helper_map_mr(mr.as_ptr(), addr, len) };
    match mapped {
        1 => Ok(state),
        n if n < 0 => Err(Error::from_errno(n)),
        _ => Err(EINVAL),
    }
}

const IDLE: u32 = 0;
const REGISTERED: u32 = 1;

/// A buffer that peers can be given access to.
///
/// # Invariants
///
/// `mr` is the MR of `state`; `registered` is `REGISTERED` from before a registration is posted.
pub struct Region<D: Direction> {
    mr: NonNull<bindings::ib_mr>,
    registered: Atomic<u32>,
    state: Deferred<State>,
    _direction: PhantomData<D>,
}

// SAFETY: An MR may be used from any thread; its key is changed by the only one that gets
// `registered`.
unsafe impl<D: Direction> Send for Region<D> {}
// SAFETY: As above.
unsafe impl<D: Direction> Sync for Region<D> {}

impl<D: Direction> Region<D> {
    /// Maps a buffer for access by peers (`ib_alloc_mr`, `ib_map_mr_sg`). It is not accessible yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the buffer is too large for the device's MRs; `ENOMEM`, or the driver's error.
    pub fn new(buf: Buf<D>, cx: &Sleepable) -> Result<Self> {
        let state = map(buf.into_raw(), cx)?;
        // INVARIANT: As mapped; nothing is registered.
        Ok(Self {
            mr: state.mr,
            registered: Atomic::new(IDLE),
            state,
            _direction: PhantomData,
        })
    }

    /// Returns the length, in bytes.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.state.buf.len()
    }

    /// Copies bytes from `offset` on out of the region. Bytes that a peer is writing meanwhile may
    /// be old or new.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not inside of the region.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result {
        self.state.buf.copy_out(offset, to)
    }

    /// Copies bytes into the region from `offset` on. A peer that reads them meanwhile may get old
    /// or new ones.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not inside of the region.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result {
        self.state.buf.copy_in(offset, from)
    }
}

/// A request to register a [`Region`], with the access that peers get.
pub struct RegWr<'a> {
    mr: NonNull<bindings::ib_mr>,
    pd: *const bindings::ib_pd,
    registered: &'a Atomic<u32>,
    access: u32,
}

impl<'a> RegWr<'a> {
    fn new<D: Direction>(region: &'a Region<D>, access: u32) -> Self {
        Self {
            mr: region.mr,
            pd: region.state.pd.as_raw(),
            registered: &region.registered,
            access,
        }
    }

    /// Lets peers read the region (`IB_ACCESS_REMOTE_READ`).
    #[inline]
    pub fn remote_read<D: DeviceReads>(region: &'a Region<D>) -> Self {
        Self::new(region, bindings::ib_access_flags_IB_ACCESS_REMOTE_READ)
    }

    /// Lets peers write the region (`IB_ACCESS_REMOTE_WRITE`, which needs `IB_ACCESS_LOCAL_WRITE`).
    #[inline]
    pub fn remote_write<D: DeviceWrites>(region: &'a Region<D>) -> Self {
        Self::new(
            region,
            bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE
                | bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE,
        )
    }

    /// Lets peers read and write the region.
    #[inline]
    pub fn remote_read_write<D: DeviceReads + DeviceWrites>(region: &'a Region<D>) -> Self {
        Self::new(
            region,
            bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE
                | bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE
                | bindings::ib_access_flags_IB_ACCESS_REMOTE_READ,
        )
    }
}

/// Takes back the mark of a registration that was not posted.
pub(crate) struct Registering(NonNull<Atomic<u32>>);

impl Registering {
    /// # Safety
    ///
    /// The region is alive, and its registration was not posted.
    pub(crate) unsafe fn undo(self) {
        // SAFETY: By the caller's promise.
        unsafe { self.0.as_ref() }.store(IDLE, Release);
    }
}

impl RegWr<'_> {
    /// Marks the region registered under a new key and makes the C request.
    pub(crate) fn prepare(
        self,
        pd: *const bindings::ib_pd,
    ) -> Result<(bindings::ib_reg_wr, Remote, Registering)> {
        if self.pd != pd {
            return Err(EINVAL);
        }
        // INVARIANT: Marked before it is posted.
        if self.registered.xchg(REGISTERED, Full) != IDLE {
            return Err(EBUSY);
        }
        // SAFETY: The MR is alive, and only the one who marked the region changes its keys. The low
        // byte of a key is the consumer's (`ib_inc_rkey`, `ib_update_fast_reg_key`).
        let (iova, rkey) = unsafe {
            let mr = self.mr.as_ptr();
            let next = |key: u32| (key & 0xffff_ff00) | (key.wrapping_add(1) & 0xff);
            (*mr).lkey = next((*mr).lkey);
            (*mr).rkey = next((*mr).rkey);
            ((*mr).iova, (*mr).rkey)
        };
        let wr = bindings::ib_reg_wr {
            wr: bindings::ib_send_wr {
                opcode: bindings::ib_wr_opcode_IB_WR_REG_MR,
                send_flags: bindings::ib_send_flags_IB_SEND_SIGNALED as c_int,
                ..Default::default()
            },
            mr: self.mr.as_ptr(),
            key: rkey,
            access: self.access as c_int,
        };
        let registering = Registering(NonNull::from(self.registered));
        Ok((wr, Remote { addr: iova, rkey }, registering))
    }
}
