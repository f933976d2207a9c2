// SPDX-License-Identifier: GPL-2.0

//! Ids of connections: their creation, and finding the way to the peer.

use super::{
    addr::SockAddr,
    callback::{
        on_event,
        Shared, //
    },
    inner::{
        Inner,
        State, //
    },
    running::Running,
    Options, //
};
use crate::{
    bindings,
    client::ClientRef,
    context::Sleepable,
    deferred::Deferred,
    device::{
        Device,
        Gid, //
    },
    gate::Kind, //
};
use core::{
    net::SocketAddr,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*,
    sync::Arc, //
};

/// A connection's id, as `struct rdma_cm_id` of a reliable connected service.
///
/// A counted handle.
#[derive(Clone)]
pub struct Id {
    pub(super) inner: Arc<Inner>,
}

impl Id {
    /// Creates an id for an active connection, in the initial network namespace (`rdma_create_id`).
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or the connection manager's error.
    pub fn create(client: &ClientRef, cx: &Sleepable) -> Result<Self> {
        Self::create_with(client, &Options::default(), cx)
    }

    /// Creates an id for an active connection that is to be as `options` say (`rdma_create_id`).
    ///
    /// # Errors
    ///
    /// As [`Id::create`]; `ENODEV` if the network namespace is being dismantled; and for a source
    /// address `EADDRINUSE`, `EADDRNOTAVAIL`, or `ENODEV` if no device has it.
    #[inline(never)]
    pub fn create_with(client: &ClientRef, options: &Options<'_>, _cx: &Sleepable) -> Result<Self> {
        let reserved = Deferred::reserve()?;
        let (shared, listed) = (Shared::new()?, client.list(Kind::Id)?);
        let net = options.net()?;
        // SAFETY: The callback's context lives until the id is destroyed; so does the client's
        // name. `net` is a reference to the network namespace, of which the id takes its own.
        let raw = from_err_ptr(unsafe {
            bindings::__rdma_create_kernel_id(
                net.as_raw(),
                Some(on_event),
                Arc::as_ptr(&shared).cast_mut().cast(),
                bindings::rdma_ucm_port_space_RDMA_PS_TCP,
                bindings::ib_qp_type_IB_QPT_RC,
                client.name().as_char_ptr(),
            )
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        // SAFETY: The id was just created, with this callback and context.
        let state = unsafe { State::new(raw, shared, None, listed) };
        let state = reserved.fill(state);
        let this = Self {
            inner: Inner::new(state)?,
        };
        // SAFETY: The id was just created, and nobody else uses it yet.
        if unsafe { options.apply(raw) }? {
            this.inner.bind()?;
        }
        Ok(this)
    }

    /// Creates an id and finds the device, the path and the route to an address: what an active
    /// connection begins with. Waits at most `timeout_ms` for each step.
    ///
    /// # Errors
    ///
    /// As [`Id::create`], [`Id::resolve_addr`] and [`Id::resolve_route`].
    pub fn resolve(
        client: &ClientRef,
        dst: SocketAddr,
        timeout_ms: u32,
        cx: &Sleepable,
    ) -> Result<Self> {
        let id = Self::create(client, cx)?;
        id.resolve_addr(dst, timeout_ms, cx)?;
        id.resolve_route(timeout_ms, cx)?;
        Ok(id)
    }

    /// Destroys the id and waits for that (`rdma_destroy_id`), where dropping the last handle
    /// leaves it to a work item.
    ///
    /// # Errors
    ///
    /// The handle is gone in any case. `EBUSY` if there is another one, as the work item of
    /// [`Id::disconnect_later`] or [`Id::notify_established_later`] has until it has run, or the
    /// id's QP: the id ends with the last of them. `EDEADLK` in a callback of the connection
    /// manager: the id is then destroyed by a work item.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        if Running::is_current() {
            return Err(EDEADLK);
        }
        let mut inner = Arc::into_unique_or_drop(self.inner).ok_or(EBUSY)?;
        inner.as_mut().destroy(cx);
        Ok(())
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    pub(super) fn state(&self) -> &State {
        &self.inner.state
    }

    /// Finds the device and the path to an address (`rdma_resolve_addr`) and waits for that.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` or `EHOSTUNREACH` if nobody has the address, `ENODEV` if the device is not the
    /// client's (any more), `ERESTARTSYS` on a signal, `ECANCELED` after [`Id::disconnect`],
    /// `EBUSY` if another step is waited for or the id is one of [`Id::connect_to`], `EDEADLK` in a
    /// callback of the connection manager. After an error drop the id: it may keep the device from
    /// going.
    pub fn resolve_addr(&self, dst: SocketAddr, timeout_ms: u32, _cx: &Sleepable) -> Result {
        let mut dst = SockAddr::from(dst);
        let timeout = timeout_ms.try_into()?;
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED;
        let (id, src) = (self.inner.as_raw(), core::ptr::null_mut());
        self.state().shared.step(resolved, || {
            self.not_driven()?;
            // SAFETY: The id is alive by the invariant of `State`, and the address is copied by the
            // call.
            to_result(unsafe { bindings::rdma_resolve_addr(id, src, dst.as_mut_ptr(), timeout) })
        })?;
        self.inner.bind()
    }

    /// Finds the route (`rdma_resolve_route`) and waits for that.
    ///
    /// # Errors
    ///
    /// As [`Id::resolve_addr`]; `ENOTCONN` before the address was found.
    pub fn resolve_route(&self, timeout_ms: u32, _cx: &Sleepable) -> Result {
        let timeout = timeout_ms.try_into()?;
        let resolved = bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED;
        self.state().shared.step(resolved, || {
            self.not_driven()?;
            self.resolved()?;
            // SAFETY: The id is alive by the invariant of `State`. The call reads the device and
            // the addresses without a lock: C sets them before it tells the event that `resolved()`
            // has found, and does not change them afterwards.
            to_result(unsafe { bindings::rdma_resolve_route(self.inner.as_raw(), timeout) })
        })?;
        Ok(())
    }

    /// Fails if the id connects by itself.
    fn not_driven(&self) -> Result {
        if self.state().shared.is_driven() {
            Err(EBUSY)
        } else {
            Ok(())
        }
    }

    /// Fails unless the device and both addresses are known, which C says before it has them
    /// (`addr_handler()` in core/cma.c changes the state, then looks for the device).
    fn resolved(&self) -> Result {
        if self.state().shared.is_resolved() {
            Ok(())
        } else {
            Err(ENOTCONN)
        }
    }

    /// Returns the client's handle of the device that the id was resolved to, or came on.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` before that.
    pub fn device(&self) -> Result<&Device> {
        self.state().device.as_ref().ok_or(ENOTCONN)
    }

    /// Returns the GIDs of both ends, this one first (`rdma_read_gids`).
    ///
    /// # Errors
    ///
    /// `ENOTCONN` before the address was resolved.
    pub fn gids(&self) -> Result<(Gid, Gid)> {
        self.device()?;
        self.resolved()?;
        let (mut src, mut dst) = (bindings::ib_gid::default(), bindings::ib_gid::default());
        // SAFETY: The id is alive by the invariant of `State`. `device()` and `resolved()` have
        // found that it has its device and its addresses, which do not change any more.
        unsafe {
            bindings::rdma_read_gids(self.inner.as_raw(), &raw mut src, &raw mut dst);
        }
        Ok((Gid::from_raw(&src), Gid::from_raw(&dst)))
    }
}
