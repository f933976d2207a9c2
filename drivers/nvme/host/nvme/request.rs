// SPDX-License-Identifier: GPL-2.0

//! Requests of blk-mq, and the right to end them.

use crate::bindings::{
    self,
    blk_status_t, //
};
use core::{
    mem::{
        forget,
        ManuallyDrop, //
    },
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    dma::OneWay,
    sg::{
        SgOwner,
        Sgl, //
    }, //
};

/// The data of the driver behind each request. nvme-core expects its own first.
#[repr(C)]
pub(super) struct Pdu {
    pub(super) req: bindings::nvme_request,
    pub(super) cmd: bindings::nvme_command,
    table: bindings::sg_table,
    /// The number of entries of the table that are filled.
    entries: u32,
    first: [bindings::scatterlist; bindings::NVME_INLINE_SG_CNT as usize],
}

/// Returns the data of a request.
///
/// # Safety
///
/// `rq` is a request of a tag set of a [`Controller`].
#[inline]
pub(super) unsafe fn pdu(rq: *mut bindings::request) -> *mut Pdu {
    // SAFETY: blk-mq has allocated `cmd_size` bytes behind the request, which is the caller's.
    unsafe { rq.add(1).cast() }
}

/// The right to end a request. One that is dropped is ended as aborted by the host, for nvme-core
/// to try again or to give to another path.
///
/// # Invariants
///
/// The request is of a tag set of a [`Controller`], and in flight. There is no other `Rq` of it,
/// and nothing else ends it: the tag set stays until that has happened.
pub(crate) struct Rq(pub(super) NonNull<bindings::request>);

// SAFETY: A request may be ended in any thread.
unsafe impl Send for Rq {}
// SAFETY: A shared reference reads only what does not change before the request is ended.
unsafe impl Sync for Rq {}

impl Rq {
    #[inline]
    fn raw(&self) -> *mut bindings::request {
        self.0.as_ptr()
    }

    #[inline]
    fn pdu(&self) -> *mut Pdu {
        // SAFETY: By the type invariant the request is of a tag set of a controller.
        unsafe { pdu(self.raw()) }
    }

    /// Returns the command, as nvme-core has made it.
    #[inline]
    pub(crate) fn command(&self) -> &[u8; 64] {
        // SAFETY: By the type invariant the request is in flight, so nvme-core has made the
        // command, whose 64 bytes are initialised, and nothing writes them.
        unsafe { &*(&raw const (*self.pdu()).cmd).cast() }
    }

    /// Returns the tag that blk-mq has chosen, which no other request of the queue has.
    #[inline]
    pub(crate) fn tag(&self) -> u16 {
        // SAFETY: By the type invariant the request is valid. The depth of a tag set is at most
        // that of a queue, which has 16 bits (`sqsize`), so its tag fits.
        unsafe { (*self.raw()).tag as u16 }
    }

    /// Returns the number of bytes of memory that go with the command.
    #[inline]
    pub(crate) fn payload_bytes(&self) -> u32 {
        // SAFETY: By the type invariant the request is valid.
        unsafe { bindings::nvme_helper_rq_payload_bytes(self.raw()) }
    }

    /// Returns whether these go to the target (`op_is_write`).
    #[inline]
    pub(crate) fn is_write(&self) -> bool {
        // SAFETY: By the type invariant the request is valid. Operations of which data go to the
        // device have the lowest bit.
        unsafe { (*self.raw()).cmd_flags & 1 != 0 }
    }

    /// Copies the first bytes of the request's data, as many as there is room for. A byte that
    /// somebody writes meanwhile is the old one or the new one.
    #[inline]
    pub(crate) fn copy_to(&self, to: &mut [u8]) {
        let len = u32::try_from(to.len()).unwrap_or(u32::MAX);
        // SAFETY: By the type invariant the request is in flight, so its pages are valid. No more
        // bytes are written than `to` has. The copy is C's, so that others may write the pages.
        unsafe { bindings::nvme_helper_copy_data(self.raw(), to.as_mut_ptr().cast(), len) };
    }

    /// Lists the pages of the request's data. Fails with `ENOMEM`, or with `EINVAL` if there are
    /// none.
    #[inline]
    pub(crate) fn map(self) -> Result<Payload, (Self, Error)> {
        let pdu = self.pdu();
        // SAFETY: By the type invariant the request and its data are valid, and only this uses the
        // table, which was freed when the last `Payload` was dropped.
        let mapped = unsafe {
            let table = &raw mut (*pdu).table;
            let first = (&raw mut (*pdu).first).cast();
            bindings::nvme_helper_map_data(self.raw(), table, first)
        };
        let Ok(entries) = u32::try_from(mapped) else {
            return Err((self, Error::from_errno(mapped)));
        };
        // SAFETY: By the type invariant the data are valid, and only this uses them until the
        // request is given away.
        unsafe { (*pdu).entries = entries };
        // INVARIANT: The table was just allocated and filled.
        Ok(Payload(ManuallyDrop::new(self)))
    }

    /// Ends the request with the status and the result of the target's completion, in the order of
    /// bytes in which they were sent. Any context.
    #[inline]
    pub(crate) fn end(self, status: u16, result: u64) {
        let rq = ManuallyDrop::new(self);
        // SAFETY: By the type invariant the request is in flight and only this ends it.
        unsafe { bindings::nvme_helper_end_request(rq.raw(), status, result) };
    }

    /// Refuses the request, which was not sent.
    #[inline]
    pub(crate) fn refuse(self, reason: Reason) -> Refused {
        Refused { rq: self, reason }
    }
}

impl Drop for Rq {
    /// As `nvme_cancel_request`. While the controller is being set up, a command that is not
    /// cancelled by anybody gets a status, as from `nvmf_complete_timed_out_request`: its sender
    /// would take an interruption for its own.
    #[cold]
    #[inline(never)]
    fn drop(&mut self) {
        // SAFETY: By the type invariant the request is in flight, and only this ends it. Its
        // controller is there as long as that.
        unsafe {
            let req = &raw mut (*self.pdu()).req;
            let state = bindings::nvme_helper_ctrl_state((*req).ctrl);
            (*req).status = bindings::NVME_SC_HOST_ABORTED_CMD as u16;
            if state != bindings::nvme_ctrl_state_NVME_CTRL_CONNECTING {
                (*req).flags |= bindings::NVME_REQ_CANCELLED as u8;
            }
            bindings::blk_mq_complete_request(self.raw());
        }
    }
}

/// Why a request was not sent.
#[derive(Clone, Copy)]
pub(crate) enum Reason {
    /// It may be sent later (`BLK_STS_RESOURCE`).
    Resource,
    /// It cannot be sent (`BLK_STS_IOERR`).
    Io,
    /// It cannot be sent on this path (`nvme_host_path_error`).
    Path,
    /// The queue is closed (`nvme_fail_nonready_command`): commands of users, of nvme-core and of
    /// fabrics fail on this path, and other I/O waits for the queue to be made again, or goes to
    /// another path.
    Closed,
}

/// A request that was not sent.
pub(crate) struct Refused {
    rq: Rq,
    reason: Reason,
}

/// The data of a request, listed. The request goes with it: where this is dropped, it is aborted.
///
/// # Invariants
///
/// The request's table was allocated, and its first `entries` entries, at least one, describe the
/// pages of the request's bios.
pub(crate) struct Payload(ManuallyDrop<Rq>);

impl Payload {
    /// Frees the list and returns the request.
    #[inline]
    pub(crate) fn into_rq(self) -> Rq {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: The list is freed once, and the request taken once, as `this` is not dropped.
        unsafe {
            this.free();
            ManuallyDrop::take(&mut this.0)
        }
    }

    /// Returns the number of entries of the list.
    #[inline]
    pub(crate) fn entries(&self) -> u32 {
        // SAFETY: By the type invariant it is set, and does not change.
        unsafe { (*self.0.pdu()).entries }
    }

    /// # Safety
    ///
    /// Called once, and the list is not used after it.
    #[inline]
    unsafe fn free(&mut self) {
        // SAFETY: By the type invariant the table was allocated with as many entries in the data
        // of the request, and the caller frees it once.
        unsafe {
            let table = &raw mut (*self.0.pdu()).table;
            bindings::sg_free_table_chained(table, bindings::NVME_INLINE_SG_CNT);
        }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: The list is freed once, and the request dropped once, as this is dropped.
        unsafe {
            self.free();
            ManuallyDrop::drop(&mut self.0);
        }
    }
}

// SAFETY: The list is behind the request, which does not move, or in chunks of its own, and only
// this uses it. By the type invariant it describes pages of bios, one at least and none empty,
// which stay until the request is ended, by this alone. Of a request whose data go to the target
// they are read, of others written, and who has submitted the bios leaves them alone. `sg_next` may
// be called for the last entry, which is marked as such.
unsafe impl SgOwner<OneWay> for Payload {
    #[inline]
    fn sgl(&mut self) -> Sgl<OneWay> {
        let pdu = self.0.pdu();
        let entries = self.entries();
        // SAFETY: By the type invariant the table was allocated.
        let first = unsafe { (*pdu).table.sgl };
        if self.0.is_write() {
            Sgl::to_device(first, entries)
        } else {
            Sgl::from_device(first, entries)
        }
    }
}

pub(super) const OK: blk_status_t = bindings::NVME_HELPER_STS_OK as blk_status_t;
const RESOURCE: blk_status_t = bindings::NVME_HELPER_STS_RESOURCE as blk_status_t;
const IOERR: blk_status_t = bindings::NVME_HELPER_STS_IOERR as blk_status_t;

impl Refused {
    /// Gives the request back to blk-mq if it is `of_call`. If not, it is one that the transport
    /// has kept, and is aborted; `of_call` is the transport's then, or has ended.
    ///
    /// # Safety
    ///
    /// What this returns is what `queue_rq` returns for the request `of_call`.
    #[cold]
    pub(super) unsafe fn give_back(self, of_call: NonNull<bindings::request>) -> blk_status_t {
        let Self { rq, reason } = self;
        if rq.0 != of_call {
            return OK;
        }
        let raw = rq.raw();
        // The right to end it is given back.
        forget(rq);
        // SAFETY: The request is in flight, as it was an `Rq`, and was not sent. Its controller
        // stays as long as the request. One that is to be sent later is still the call's.
        unsafe {
            let status = match reason {
                Reason::Path => return bindings::nvme_host_path_error(raw),
                Reason::Closed => bindings::nvme_helper_fail_nonready_command(raw),
                Reason::Resource => RESOURCE,
                Reason::Io => IOERR,
            };
            if status != OK {
                bindings::nvme_cleanup_cmd(raw);
            }
            status
        }
    }
}

/// Counts a request that is in flight.
///
/// # Safety
///
/// blk-mq calls this for a request, with the address of a `u32`.
unsafe extern "C" fn count_in_flight(rq: *mut bindings::request, count: *mut c_void) -> bool {
    // SAFETY: As the caller promises. The state is read at once.
    unsafe {
        let state = (&raw const (*rq).state).read_volatile();
        if state == bindings::mq_rq_state_MQ_RQ_IN_FLIGHT {
            let count = count.cast::<u32>();
            *count = (*count).saturating_add(1);
        }
    }
    true
}

/// Waits until no request of a tag set is in flight, and all have completed. As
/// `blk_mq_tagset_wait_completed_request` does, this looks every few milliseconds.
///
/// # Safety
///
/// The set is allocated, and the caller may sleep.
pub(super) unsafe fn wait_ended(set: *mut bindings::blk_mq_tag_set) {
    loop {
        let mut count = 0_u32;
        // SAFETY: The set is allocated, as the caller promises, and `count` is what the function
        // expects.
        unsafe {
            let data = (&raw mut count).cast();
            bindings::blk_mq_tagset_busy_iter(set, Some(count_in_flight), data);
        }
        if count == 0 {
            break;
        }
        fsleep(Delta::from_millis(5));
    }
    // SAFETY: The set is allocated, as the caller promises.
    unsafe { bindings::blk_mq_tagset_wait_completed_request(set) };
}
