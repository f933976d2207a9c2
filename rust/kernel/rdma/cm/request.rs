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
///
/// # Invariants
///
/// `event` is the connection request of `id`, of a connected service, and this is the callback that
/// tells it.
pub struct Request<'a> {
    pub(super) id: NonNull<bindings::rdma_cm_id>,
    pub(super) event: &'a bindings::rdma_cm_event,
    pub(super) client: &'a ClientRef,
    pub(super) taken: &'a Cell<Option<Arc<Incoming>>>,
}

impl Request<'_> {
    /// Returns what the peer sent along.
    pub fn private_data(&self) -> &[u8] {
        // SAFETY: By the type invariant this is an event of a connected service; it is valid, with
        // its private data, during the callback.
        unsafe { event::private_data(self.event) }
    }

    /// Returns what the peer asks for. The connection manager has made it the view of the
    /// recipient: what the peer called its `responder_resources` is the `initiator_depth` here.
    fn param(&self) -> &bindings::rdma_conn_param {
        // SAFETY: By the type invariant this is an event of a connected service, which has this
        // member set.
        unsafe { &self.event.param.conn }
    }

    /// Returns how many RDMA READs the peer lets this side have outstanding.
    pub fn initiator_depth(&self) -> u8 {
        self.param().initiator_depth
    }

    /// Returns how many RDMA READs the peer wants to have outstanding here.
    pub fn responder_resources(&self) -> u8 {
        self.param().responder_resources
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
        // SAFETY: The id's `teardown` closes it before it destroys the id, and `shared` is made its
        // context below.
        let incoming = unsafe { Incoming::new(self.id, shared.clone()) }?;
        let raw = self.id.as_ptr();
        // SAFETY: By the type invariant this is the id's callback, during which it is locked: no
        // other one of it runs before this has returned.
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
        // SAFETY: What is taken is not destroyed by the callback's return; callback and context
        // were set above.
        let state = unsafe { State::new(self.id, shared, Some(incoming), listed) };
        let inner = Inner::new(reserved.fill(state))?;
        inner.bind()?;
        Ok(Id { inner })
    }
}
