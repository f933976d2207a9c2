// SPDX-License-Identifier: GPL-2.0

//! What the handles of an id share.

use super::{
    addr,
    callback::Shared,
    confirm::Incoming,
    running::Running, //
};
use crate::{
    bindings,
    context::Sleepable,
    deferred::{
        Deferred,
        Fate,
        Queue,
        Teardown, //
    },
    device::{
        Device,
        NodeType, //
    },
    mad::timeouts::flush_timeouts,
    objects::{
        Listed,
        Peer, //
    }, //
};
use core::{
    mem::ManuallyDrop,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    impl_has_work,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Release, //
            },
            Atomic, //
        },
        Arc,
        SetOnce, //
    },
    workqueue::{
        Work,
        WorkItem, //
    }, //
};

/// # Invariants
///
/// - `raw` is an id whose callback is [`on_event`] with `shared` as its context, and which is alive
///   until `teardown` destroys it.
/// - The id is in the list of `device`.
pub(super) struct State {
    raw: NonNull<bindings::rdma_cm_id>,
    pub(super) shared: Arc<Shared>,
    pub(super) device: SetOnce<Device>,
    /// If the id came with a request.
    pub(super) incoming: Option<Arc<Incoming>>,
    pub(super) listed: Listed,
}

// SAFETY: An id may be destroyed from any thread.
unsafe impl Send for State {}
// SAFETY: An id may be used from any thread; the connection manager locks it.
unsafe impl Sync for State {}

impl State {
    /// # Safety
    ///
    /// The caller owns the id, whose callback is [`on_event`] with `shared` as its context.
    ///
    /// [`on_event`]: super::callback::on_event
    pub(super) unsafe fn new(
        raw: NonNull<bindings::rdma_cm_id>,
        shared: Arc<Shared>,
        incoming: Option<Arc<Incoming>>,
        listed: Listed,
    ) -> Self {
        // INVARIANT: The caller says so of callback and context, and gives the id away.
        Self {
            raw,
            shared,
            device: SetOnce::new(),
            incoming,
            listed,
        }
    }

    /// Keeps the id's device from going away unnoticed. Does nothing if it is kept already.
    fn bind(&self) -> Result {
        if self.device.as_ref().is_some() {
            return Ok(());
        }
        // SAFETY: The id is alive by the type invariant. It came with a request, was bound to an
        // address, or its address was resolved: C sets the device and the addresses before.
        let (raw, to) = unsafe {
            let id = self.raw.as_ptr();
            ((*id).device, addr::read(&(*id).route.addr.dst_addr))
        };
        let device = self.listed.client().device(raw)?;
        if let Some(addr) = to {
            self.listed.set_peer(Peer::To(addr.ip(), addr.port()));
        }
        // SAFETY: `teardown` removes the id from the list before it destroys it, as the device is
        // kept.
        unsafe { device.inner().bound.add(self.raw, self.shared.clone()) }?;
        self.device.populate(device);
        Ok(())
    }

    /// Waits for the callback of a message that nobody has answered.
    ///
    /// `rdma_destroy_id()` does not: `cm_process_send_error()` in core/cm.c gives the message's
    /// reference back, and only then calls `cma_ib_handler()`, which takes the id's handler lock.
    /// Whoever has that lock may have it for long, so the lock is taken first: afterwards such a
    /// callback waits for nobody, and is waited for.
    fn end_callback(&self, cx: &Sleepable) {
        // SAFETY: The id is alive by the type invariant, and not locked by this task, which is in
        // no callback.
        unsafe {
            bindings::rdma_lock_handler(self.raw.as_ptr());
            bindings::rdma_unlock_handler(self.raw.as_ptr());
        }
        if let Some(device) = self.device.as_ref() {
            // SAFETY: The device is registered by the invariant of `device::Inner`, and the id is
            // alive by the type invariant. The port of an id does not change once it has a device.
            unsafe {
                flush_timeouts(device.as_raw(), (*self.raw.as_ptr()).port_num, cx);
            }
        }
    }
}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        if let Some(device) = self.device.as_ref() {
            device.inner().bound.remove(self.raw, &self.shared);
        }
        if let Some(incoming) = &self.incoming {
            incoming.close();
        }
        self.shared.wait_found();
        self.end_callback(cx);
        // SAFETY: The id is alive by the type invariant, and its QP, which has held `Inner`, is
        // gone. This waits for callbacks that have begun, by the id's handler lock and by the
        // references that they have. That of a message which nobody has answered has none; it has
        // returned. Should one begin only now, C's own memory is at stake: see the limits in
        // Documentation/safety.rst.
        unsafe { bindings::rdma_destroy_id(self.raw.as_ptr()) };
        if let Some(incoming) = &self.incoming {
            incoming.set_destroyed();
        }
        Fate::Gone
    }
}

/// What the handles of one id share.
///
/// # Invariants
///
/// `state` is there unless `destroyed`, which is set by the last handle.
#[pin_data(PinnedDrop)]
pub(crate) struct Inner {
    pub(super) state: ManuallyDrop<Deferred<State>>,
    destroyed: bool,
    has_qp: Atomic<bool>,
    #[pin]
    disconnect: Work<Self, DISCONNECT>,
    #[pin]
    established: Work<Self, ESTABLISHED>,
}

/// The work items of an id.
const DISCONNECT: u64 = 0;
const ESTABLISHED: u64 = 1;

impl_has_work! {
    impl HasWork<Self, DISCONNECT> for Inner { self.disconnect }
    impl HasWork<Self, ESTABLISHED> for Inner { self.established }
}

impl WorkItem<DISCONNECT> for Inner {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let _ = this.disconnect();
    }
}

impl WorkItem<ESTABLISHED> for Inner {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let _ = this.notify_established();
    }
}

#[pinned_drop]
impl PinnedDrop for Inner {
    fn drop(self: Pin<&mut Self>) {
        let this = self.project();
        if !*this.destroyed {
            // SAFETY: `state` is there by the type invariant, and is not used again.
            unsafe { ManuallyDrop::drop(this.state) };
        }
    }
}

/// The right to have an id's only QP.
pub(crate) struct QpClaim(Arc<Inner>);

impl QpClaim {
    /// Returns whom the id is to be connected to.
    pub(crate) fn peer(&self) -> Peer {
        self.0.state.listed.peer()
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::rdma_cm_id {
        self.0.as_raw()
    }
}

impl Drop for QpClaim {
    fn drop(&mut self) {
        self.0.has_qp.store(false, Release);
    }
}

impl Inner {
    pub(super) fn new(state: Deferred<State>) -> Result<Arc<Self>> {
        Arc::pin_init(
            // INVARIANT: The state is there.
            pin_init!(Self {
                state: ManuallyDrop::new(state),
                destroyed: false,
                has_qp: Atomic::new(false),
                disconnect <- new_work!("rdma::cm::Id::disconnect"),
                established <- new_work!("rdma::cm::Id::notify_established"),
            }),
            GFP_KERNEL,
        )
    }

    /// Destroys the id and waits for that, for the last handle.
    pub(super) fn destroy(self: Pin<&mut Self>, cx: &Sleepable) {
        let this = self.project();
        // INVARIANT: Nobody has another handle, and this one is given up.
        *this.destroyed = true;
        // SAFETY: `state` was there by the type invariant, as nobody has called this before, and is
        // not used again.
        unsafe { ManuallyDrop::take(this.state) }.destroy(cx);
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::rdma_cm_id {
        self.state.raw.as_ptr()
    }

    pub(super) fn bind(&self) -> Result {
        self.state.bind()
    }

    /// Fails unless the id has a connection of the device's own manager, which the calls that work
    /// on it do not look after.
    pub(super) fn attached(&self) -> Result {
        if self.state.shared.is_attached() {
            Ok(())
        } else {
            Err(EINVAL)
        }
    }

    /// Says whether a disconnection may wait for a callback that waits for the one of this task.
    ///
    /// iWARP's waits until the connection is made or refused (`iw_cm_disconnect()`), which its
    /// ordered workqueue of callbacks finds.
    fn may_wait_for_callbacks(&self) -> bool {
        let device = self.state.device.as_ref();
        device.is_some_and(Device::is_iwarp) && Running::is_current()
    }

    pub(super) fn disconnect(&self) -> Result {
        let may_wait = self.may_wait_for_callbacks();
        if may_wait && !self.state.shared.is_locked_by_current() {
            return Err(EDEADLK);
        }
        self.state.shared.fail_step(ECANCELED);
        if self.state.shared.cancel() {
            return Ok(());
        }
        self.attached()?;
        if !self.state.shared.end() {
            return Ok(());
        }
        if may_wait && !self.state.shared.is_established() {
            // In its own callback. The event that the connection is there comes after that, and
            // ends it.
            return Ok(());
        }
        // SAFETY: The id is alive by the invariant of `State`, and what `attached()` has found
        // stays until it is destroyed. An id that is not connected is left alone.
        let disconnected = to_result(unsafe { bindings::rdma_disconnect(self.as_raw()) });
        if self.state.shared.is_being_driven() {
            // The connection manager goes on asking the peer for long.
            self.state.shared.release_handler();
        }
        disconnected
    }

    /// Disconnects from a work item.
    pub(super) fn disconnect_later(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = Queue::get().enqueue::<_, DISCONNECT>(self.clone());
    }

    pub(super) fn notify_established(self: &Arc<Self>) -> Result {
        self.attached()?;
        let event = bindings::ib_event_type_IB_EVENT_COMM_EST;
        let notify = || {
            // SAFETY: The id is alive by the invariant of `State`, and what `attached()` has found
            // stays until it is destroyed.
            to_result(unsafe { bindings::rdma_notify(self.as_raw(), event) })
        };
        let device = self.state.device.as_ref().ok_or(ENOTCONN)?;
        if device.node_type() != NodeType::Ca {
            // C does nothing, and no event comes of it.
            return notify();
        }
        self.state.shared.note(notify, || self.disconnect_later())
    }

    /// Says from a work item that the connection is there.
    pub(super) fn notify_established_later(self: &Arc<Self>) {
        // Already queued is as good.
        let _ = Queue::get().enqueue::<_, ESTABLISHED>(self.clone());
    }

    /// Returns the device that the id is bound to, or null.
    pub(crate) fn device_raw(&self) -> *mut bindings::ib_device {
        self.state
            .device
            .as_ref()
            .map_or(core::ptr::null_mut(), Device::as_raw)
    }

    pub(crate) fn claim_qp(self: &Arc<Self>) -> Result<QpClaim> {
        if self.has_qp.xchg(true, Full) {
            return Err(EBUSY);
        }
        Ok(QpClaim(self.clone()))
    }
}
