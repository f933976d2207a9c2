// SPDX-License-Identifier: GPL-2.0

//! MADs that were sent, until the MAD layer is done with them.

use super::{
    agent::Live,
    Class,
    Peer,
    Received,
    MAD_LEN, //
};
use crate::bindings;
use core::ptr::NonNull;
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    new_spinlock,
    prelude::*,
    sync::{
        Arc,
        SpinLock, //
    },
    types::Opaque, //
};

/// A MAD to be sent, as its `struct ib_mad_send_buf`.
///
/// # Invariants
///
/// A buffer of an agent that is registered, and which this owns.
pub(super) struct Buf(NonNull<bindings::ib_mad_send_buf>);

// SAFETY: A buffer may be used and freed from any thread.
unsafe impl Send for Buf {}

impl Buf {
    pub(super) fn new(agent: &Live<'_>, peer: &Peer, class: Class) -> Result<Self> {
        // SAFETY: The agent is registered while `agent` lives; and until its buffers are freed.
        let raw = from_err_ptr(unsafe {
            bindings::ib_create_send_mad(
                agent.as_raw(),
                peer.qpn(),
                peer.pkey_index(),
                0,
                class.payload_at().try_into()?,
                class.payload_len().try_into()?,
                bindings::GFP_KERNEL,
                bindings::IB_MGMT_BASE_VERSION as u8,
            )
        })?;
        // INVARIANT: Just created.
        Ok(Self(NonNull::new(raw).ok_or(ENOMEM)?))
    }

    /// Returns the MAD, to be written. Its memory is zero.
    pub(super) fn mad(&mut self) -> &mut [u8; MAD_LEN] {
        // SAFETY: By the type invariant this is a buffer, whose MAD has this length: header and
        // data, as `new` has asked. Nobody else uses it before the buffer is posted, and that takes
        // `self`.
        unsafe { &mut *self.0.as_ref().mad.cast() }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        // SAFETY: The buffer is this value's by the type invariant, and is not used again. Freeing
        // it lets go of the agent.
        unsafe { bindings::ib_free_send_mad(self.0.as_ptr()) };
    }
}

/// How far a request is.
///
/// `buf` is what was posted, until the MAD layer is done with it.
struct Progress {
    buf: Option<Buf>,
    reply: Option<Received>,
    status: Option<bindings::ib_wc_status>,
}

/// A MAD on its way, with what it needs there. The MAD layer has a reference to it as the send
/// buffer's context, until its send handler takes that back.
#[pin_data]
pub(super) struct Request {
    #[pin]
    progress: SpinLock<Progress>,
    #[pin]
    done: Opaque<bindings::completion>,
    /// The buffer points to its address handle.
    peer: Peer,
}

// SAFETY: A completion may be used from any thread, and the rest is `Send`.
unsafe impl Send for Request {}
// SAFETY: A completion has its own lock, and the rest is `Sync`.
unsafe impl Sync for Request {}

impl Request {
    pub(super) fn new(peer: &Peer) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                progress <- new_spinlock!(Progress {
                    buf: None,
                    reply: None,
                    status: None,
                }),
                done <- Opaque::ffi_init(|slot| {
                    // SAFETY: `slot` is valid for writes; a completion is initialised in place and
                    // stays pinned.
                    unsafe { bindings::init_completion(slot) }
                }),
                peer: peer.clone(),
            }),
            GFP_KERNEL,
        )
    }

    /// Gives a MAD to the MAD layer (`ib_post_send_mad`).
    pub(super) fn post(self: &Arc<Self>, buf: Buf, timeout_ms: c_int, retries: c_int) -> Result {
        let raw = buf.0.as_ptr();
        // SAFETY: `raw` is a buffer by the invariant of `Buf`, and is not posted yet.
        unsafe {
            (*raw).ah = self.peer.as_raw();
            (*raw).timeout_ms = timeout_ms;
            (*raw).retries = retries;
            (*raw).context[0] = Arc::into_raw(self.clone()).cast_mut().cast();
        }
        self.progress.lock().buf = Some(buf);
        // SAFETY: `raw` is a buffer by the invariant of `Buf`, ready to be posted. It may be freed
        // before this returns.
        let posted = to_result(unsafe { bindings::ib_post_send_mad(raw, core::ptr::null_mut()) });
        if posted.is_err() {
            // SAFETY: There will be no call of the send handler, so the context is ours again.
            unsafe { Self::take(raw) }.complete(bindings::ib_wc_status_IB_WC_GENERAL_ERR);
        }
        posted
    }

    /// Takes a posted buffer's reference back.
    ///
    /// # Safety
    ///
    /// The buffer was posted by [`Request::post`]; to be called once.
    pub(super) unsafe fn take(raw: *mut bindings::ib_mad_send_buf) -> Arc<Self> {
        // SAFETY: `post` has set the context to what `into_raw` made, and the caller says that this
        // is the only call for it.
        unsafe { Arc::from_raw((*raw).context[0].cast()) }
    }

    /// The reply has come.
    pub(super) fn replied(&self, reply: Received) {
        self.progress.lock().reply = Some(reply);
    }

    /// The MAD layer is done.
    pub(super) fn complete(&self, status: bindings::ib_wc_status) {
        let mut progress = self.progress.lock();
        progress.status = Some(status);
        let buf = progress.buf.take();
        drop(progress);
        drop(buf);
        // SAFETY: `done` is initialised and pinned.
        unsafe { bindings::complete(self.done.get()) };
    }

    /// Waits for the reply, or until the MAD layer has sent the request often enough. On a signal
    /// the MAD layer is told to give it up.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`, `ERESTARTSYS`, or `EIO` if the MAD layer has given the request up.
    pub(super) fn wait(&self) -> Result<Received> {
        // SAFETY: `done` is initialised and pinned. The result says no more than `status`.
        let _ = unsafe { bindings::wait_for_completion_interruptible(self.done.get()) };
        let mut progress = self.progress.lock();
        match (progress.reply.take(), progress.status) {
            // A reply that is there before the request is known to be sent is as good.
            (Some(reply), _) => Ok(reply),
            (None, None) => {
                if let Some(buf) = &progress.buf {
                    // SAFETY: By the invariant of `Buf` this is a buffer that is not freed: it is
                    // in `progress`, which is locked. This is `ib_cancel_mad()`, which only marks
                    // the request.
                    unsafe { bindings::ib_modify_mad(buf.0.as_ptr(), 0) };
                }
                Err(ERESTARTSYS)
            }
            (None, Some(bindings::ib_wc_status_IB_WC_RESP_TIMEOUT_ERR)) => Err(ETIMEDOUT),
            (None, Some(_)) => Err(EIO),
        }
    }
}
