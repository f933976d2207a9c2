// SPDX-License-Identifier: GPL-2.0

//! Connection requests, as a listener gets them.

use super::{
    callback::{
        on_event,
        Shared, //
    },
    confirm::Incoming,
    event,
    inner::{
        Inner,
        State, //
    },
    Id, //
};
use crate::{
    bindings,
    client::ClientRef,
    context::Sleepable,
    deferred::Deferred,
    gate::Kind, //
};
use core::{
    cell::Cell,
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// A connection request that waits for an answer.
pub struct Request<'a> {
    pub(super) id: NonNull<bindings::rdma_cm_id>,
    pub(super) event: &'a bindings::rdma_cm_event,
    pub(super) client: &'a ClientRef,
    pub(super) taken: &'a Cell<Option<Arc<Incoming>>>,
}

impl Request<'_> {
    /// Returns what the peer sent along.
    pub fn private_data(&self) -> &[u8] {
        // SAFETY: Connection requests are events of a connected service, valid while the request
        // is.
        unsafe { event::private_data(self.event) }
    }

    /// Returns how many RDMA READs the peer lets this side have outstanding.
    pub fn initiator_depth(&self) -> u8 {
        // SAFETY: As above. The connection manager has made this the view of the recipient: it is
        // what the peer called its `responder_resources`.
        unsafe { self.event.param.conn.initiator_depth }
    }

    /// Returns how many RDMA READs the peer wants to have outstanding here.
    pub fn responder_resources(&self) -> u8 {
        // SAFETY: As above; what the peer called its `initiator_depth`.
        unsafe { self.event.param.conn.responder_resources }
    }

    /// Takes the connection's id, to be accepted or rejected now or later; dropping the id refuses
    /// the connection.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the device is not the client's (any more), or `ENOMEM`; the connection is then
    /// refused.
    #[inline(never)]
    pub fn into_id(self, _cx: &Sleepable) -> Result<Id> {
        let (shared, listed) = (Shared::new()?, self.client.list(Kind::Id)?);
        let reserved = Deferred::reserve()?;
        // SAFETY: The id closes it before it is destroyed.
        let incoming = unsafe { Incoming::new(self.id, shared.clone()) }?;
        let raw = self.id.as_ptr();
        // SAFETY: The id is locked during this callback, so its own cannot run before it returns.
        unsafe {
            (*raw).context = Arc::as_ptr(&shared).cast_mut().cast();
            (*raw).event_handler = Some(on_event);
        }
        // The id is ours: a work item will destroy it, never this callback's return. The callback
        // has the id's handler lock until then.
        shared.set_locked(true);
        shared.set_resolved();
        shared.set_unanswered();
        shared.attach();
        self.taken.set(Some(incoming.clone()));
        let state = State::new(self.id, shared, Some(incoming), listed);
        let inner = Inner::new(reserved.fill(state))?;
        inner.bind()?;
        Ok(Id { inner })
    }
}
