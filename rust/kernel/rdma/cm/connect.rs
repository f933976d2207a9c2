// SPDX-License-Identifier: GPL-2.0

//! Making and ending connections.

use super::{
    running::Running,
    ConnParam,
    Handler,
    Id,
    PrivateData,
    RejectReason, //
};
use crate::{
    bindings,
    context::Sleepable,
    device::Device, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// What fits into a rejection, in bytes.
const REJECT_LEN: usize = bindings::ib_cm_data_size_IB_CM_REJ_PRIVATE_DATA_SIZE as usize;

impl Id {
    /// Connects the id's QP to the peer (`rdma_connect`), waits until that has worked or failed,
    /// and returns what the peer sent along.
    ///
    /// `handler` is told of everything that happens to the connection, the first event included.
    ///
    /// After an error, what was posted to the QP stays there: [`Qp::drain`](crate::qp::Qp::drain)
    /// or the QP's end gives it back.
    ///
    /// # Errors
    ///
    /// `ECONNREFUSED` if the peer rejects; `EINVAL` without a QP or with too much private data;
    /// `EBUSY` if the id has a handler already; `ENODEV` if its device goes; the errors of waiting
    /// as for [`Id::resolve_addr`]; or the connection manager's error.
    pub fn connect(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result<PrivateData> {
        let mut param = self.qp_param(param)?;
        let shared = &self.state().shared;
        let id = self.inner.as_raw();
        let established = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED;
        let mut installed = false;
        shared
            .step(established, || {
                shared.set_handler(handler)?;
                installed = true;
                // SAFETY: The id is alive by the invariant of `State`, and not locked by this task,
                // which is in no callback: `step` has looked. The parameters are copied by the
                // call.
                to_result(unsafe {
                    bindings::rdma_lock_handler(id);
                    let ret = bindings::rdma_connect_locked(id, &raw mut param);
                    if ret == 0 {
                        shared.attach();
                    }
                    bindings::rdma_unlock_handler(id);
                    ret
                })
            })
            .inspect_err(|_| {
                // If the device goes, the handler is still to be told that.
                if installed && !shared.is_gone() {
                    shared.release_handler();
                }
            })
    }

    /// Accepts a connection request (`rdma_accept`), once. The peer may send from here on. If the
    /// connection manager fails, it has rejected the request.
    ///
    /// `handler` is told of everything that happens to the connection. A peer that does not confirm
    /// within 90 seconds, however often it wants to be asked, is given up with
    /// [`Event::Failed`](super::Event::Failed); not so on iWARP.
    ///
    /// # Errors
    ///
    /// `EINVAL` without a QP, without a request that is still to be answered, or with too much
    /// private data; `ENODEV` if its device goes; `EDEADLK` in a callback of the connection manager
    /// that is not that of this request; or the connection manager's error. The handler is
    /// released.
    pub fn accept(
        &self,
        handler: Arc<dyn Handler>,
        param: &ConnParam<'_>,
        _cx: &Sleepable,
    ) -> Result {
        let mut param = self.qp_param(param)?;
        let shared = &self.state().shared;
        let locked = shared.is_locked_by_current();
        if !locked && Running::is_current() {
            // Who has the lock of this id may wait for that of the current callback's.
            return Err(EDEADLK);
        }
        shared.take_answer()?;
        // Should the device go, it can still be rejected.
        shared
            .set_handler(handler)
            .inspect_err(|_| shared.set_unanswered())?;
        let id = self.inner.as_raw();
        // SAFETY: The id is alive by the invariant of `State`, and the parameters are copied by the
        // call. It needs the id's handler lock, which a callback of the id has already.
        let ret = unsafe {
            if !locked {
                bindings::rdma_lock_handler(id);
            }
            let ret = bindings::rdma_accept(id, &raw mut param);
            if !locked {
                bindings::rdma_unlock_handler(id);
            }
            ret
        };
        to_result(ret).inspect_err(|_| shared.release_handler())?;
        let state = self.state();
        // To disconnect waits on iWARP for the event that the connection is there.
        let is_iwarp = state.device.as_ref().is_some_and(Device::is_iwarp);
        if let Some(incoming) = state.incoming.as_ref().filter(|_| !is_iwarp) {
            incoming.await_confirmation();
        }
        Ok(())
    }

    pub(super) fn qp_param(&self, param: &ConnParam<'_>) -> Result<bindings::rdma_conn_param> {
        // SAFETY: The id is alive by the invariant of `State`; whether it has a QP is all that is
        // read.
        if unsafe { (*self.inner.as_raw()).qp }.is_null() {
            return Err(EINVAL);
        }
        param.to_raw()
    }

    /// Rejects a connection request with data of the ULP's own (`rdma_reject`).
    ///
    /// # Errors
    ///
    /// `EINVAL` with more than 148 bytes of private data or if there is no request that is still to
    /// be answered, or the connection manager's error.
    pub fn reject(&self, private_data: &[u8], cx: &Sleepable) -> Result {
        self.reject_for(RejectReason::CONSUMER_DEFINED, private_data, cx)
    }

    /// Rejects a connection request for a reason (`rdma_reject`). iWARP has no reasons: peers get
    /// the data only.
    ///
    /// # Errors
    ///
    /// As [`Id::reject`], and `EINVAL` for a reason above 255.
    pub fn reject_for(&self, reason: RejectReason, private_data: &[u8], _cx: &Sleepable) -> Result {
        if private_data.len() > REJECT_LEN {
            return Err(EINVAL);
        }
        let (len, reason) = (private_data.len().try_into()?, reason.0.try_into()?);
        self.state().shared.take_answer()?;
        // SAFETY: The id is alive by the invariant of `State`, and the data are copied by the call.
        to_result(unsafe {
            bindings::rdma_reject(
                self.inner.as_raw(),
                private_data.as_ptr().cast(),
                len,
                reason,
            )
        })
    }

    /// Tells the connection manager that data have come on a QP whose connection is still being
    /// made, which proves that it is (`rdma_notify` with `IB_EVENT_COMM_EST`). Called on that event
    /// of the QP: the peer's last message may be lost.
    ///
    /// # Errors
    ///
    /// `EISCONN` if the connection is known to be made, or that was said before; `EINVAL` if it is
    /// not being made, or is to end; `ENOMEM`.
    pub fn notify_established(&self, _cx: &Sleepable) -> Result {
        self.inner.notify_established()
    }

    /// As [`Id::notify_established`], from a work item: for the handler of a QP's events, which may
    /// not sleep. An error has no effect.
    pub fn notify_established_later(&self) {
        self.inner.notify_established_later();
    }

    /// Ends the connection (`rdma_disconnect`): the QP goes to the error state, its requests are
    /// flushed, and the handler gets [`Event::Disconnected`](super::Event::Disconnected). If the
    /// peer has not confirmed yet that the connection is there, it ends as soon as it has, or when
    /// its time is over ([`Id::accept`]); if
    /// [`Id::notify_established`] was just called, as soon as the handler is told. If
    /// another thread is still making the connection, the step that it waits for fails with
    /// `ECANCELED`. What [`Id::connect_to`] has begun is given up: unless the connection is there,
    /// the handler is released without another event.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the id was never connected; on iWARP `EDEADLK` in a callback of the connection
    /// manager that is not this id's, where [`Id::disconnect_later`] is for; or the driver's error.
    pub fn disconnect(&self, _cx: &Sleepable) -> Result {
        self.inner.disconnect()
    }

    /// As [`Id::disconnect`], from a work item: for completion handlers that may not sleep.
    pub fn disconnect_later(&self) {
        self.inner.disconnect_later();
    }

    /// Lets go of the handler before the last event, for an owner of the connection that gives it
    /// up. A call of the handler that has begun goes on.
    pub fn release_handler(&self, _cx: &Sleepable) {
        self.state().shared.release_handler();
    }
}
