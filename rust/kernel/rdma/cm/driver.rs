// SPDX-License-Identifier: GPL-2.0

//! Connections that are made by their events, with nobody waiting.

use super::{
    addr::SockAddr,
    callback::Shared,
    ConnParam,
    Event,
    Handler,
    Id,
    Options, //
};
use crate::{
    bindings,
    client::ClientRef,
    context::{
        Context as _,
        Sleepable, //
    }, //
};
use core::net::SocketAddr;
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// What is told of a connection that [`Id::connect_to`] makes.
pub trait Connect: Handler {
    /// The way to the peer is known: make the QP of `id`, post receives, and say how to connect.
    /// The crate then asks the peer (`rdma_connect_locked`).
    ///
    /// Called in process context, once, before any event. An error ends the connection: it becomes
    /// [`Event::Failed`].
    fn resolved(&self, id: &Id, cx: &Sleepable) -> Result<ConnParam<'_>>;
}

/// How the connection of an id is made. Holds the id until the peer was asked.
pub(super) struct Driver {
    id: Id,
    connect: Arc<dyn Connect>,
    timeout_ms: u32,
}

impl Id {
    /// Begins to connect to an address and does not wait, as ULPs do that must not block.
    ///
    /// `handler` is asked for a QP when the way to the peer is known, and is then told of all that
    /// happens: that the connection is there, is gone, or could not be made. Each of finding the
    /// address and finding the route may take `timeout_ms`. What was begun goes on until then also
    /// if the id that is returned is dropped; [`Id::disconnect`] gives it up.
    ///
    /// # Errors
    ///
    /// As [`Id::create_with`], or what is wrong with the address. The handler is then released, and
    /// gets no event.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core::net::SocketAddr;
    /// # use rdma::{cm::{self, Id}, prelude::*};
    /// struct Connection {
    ///     qp: kernel::sync::SetOnce<Qp<Softirq>>,
    ///     pd: Pd,
    ///     cq: Cq<Softirq>,
    /// }
    ///
    /// impl cm::Handler for Connection {
    ///     fn event(&self, event: cm::Event<'_>, _cx: &Sleepable) {
    ///         pr_info!("{event}\n");
    ///     }
    /// }
    ///
    /// impl cm::Connect for Connection {
    ///     fn resolved(&self, id: &Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
    ///         let qp = Qp::create(id, &self.pd, &self.cq, &self.cq, &Caps::new(8, 8), cx)?;
    ///         self.qp.populate(qp);
    ///         Ok(cm::ConnParam::default())
    ///     }
    /// }
    ///
    /// fn begin(
    ///     client: &ClientRef,
    ///     peer: SocketAddr,
    ///     connection: Arc<Connection>,
    ///     cx: &Sleepable,
    /// ) -> Result<Id> {
    ///     Id::connect_to(client, peer, 2_000, &cm::Options::default(), connection, cx)
    /// }
    /// ```
    pub fn connect_to<H: Connect>(
        client: &ClientRef,
        dst: SocketAddr,
        timeout_ms: u32,
        options: &Options<'_>,
        handler: Arc<H>,
        cx: &Sleepable,
    ) -> Result<Self> {
        let id = Self::create_with(client, options, cx)?;
        id.begin(dst, timeout_ms, handler.clone(), handler)?;
        Ok(id)
    }

    fn begin(
        &self,
        dst: SocketAddr,
        timeout_ms: u32,
        handler: Arc<dyn Handler>,
        connect: Arc<dyn Connect>,
    ) -> Result {
        let mut dst = SockAddr::from(dst);
        let timeout = timeout_ms.try_into()?;
        let driver = Driver {
            id: self.clone(),
            connect,
            timeout_ms,
        };
        let driver = Arc::new(driver, GFP_KERNEL)?;
        let shared = &self.state().shared;
        shared.set_driver(handler, driver)?;
        let (id, src) = (self.inner.as_raw(), core::ptr::null_mut());
        // SAFETY: The id is alive by the invariant of `State`, and the address is copied by the
        // call.
        let ret = unsafe { bindings::rdma_resolve_addr(id, src, dst.as_mut_ptr(), timeout) };
        to_result(ret).inspect_err(|_| {
            shared.cancel();
        })
    }
}

impl Driver {
    /// Takes the next step after an event of the id, whose callback this is.
    pub(super) fn step(&self, event: bindings::rdma_cm_event_type, shared: &Shared) -> Result {
        match event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED => self.resolve_route(),
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED => self.connect(shared),
            _ => Ok(()),
        }
    }

    fn resolve_route(&self) -> Result {
        self.id.inner.bind()?;
        let timeout = self.timeout_ms.try_into()?;
        // SAFETY: The id is alive by the invariant of `State`, and its callback, which this is, has
        // found the address.
        to_result(unsafe { bindings::rdma_resolve_route(self.id.inner.as_raw(), timeout) })
    }

    fn connect(&self, shared: &Shared) -> Result {
        // SAFETY: This is in the id's callback, and the connection manager calls back in process
        // context.
        let cx = unsafe { Sleepable::assume() };
        let param = self.connect.resolved(&self.id, &cx)?;
        let mut param = self.id.qp_param(&param)?;
        shared.ask(|| {
            // SAFETY: The id is alive by the invariant of `State`, and locked as this is its
            // callback. The parameters are copied by the call.
            to_result(unsafe {
                bindings::rdma_connect_locked(self.id.inner.as_raw(), &raw mut param)
            })
        })
    }
}

impl Shared {
    /// Lets go of what makes the connection.
    pub(super) fn release_driver(&self) {
        if !self.is_driven() {
            return;
        }
        let driver = self.driver.lock().take();
        drop(driver);
    }

    /// Gives up a connection for which the peer was not asked yet, if nobody waits for it, and says
    /// whether there was one.
    pub(super) fn cancel(&self) -> bool {
        let driver = self.driver.lock().take();
        if driver.is_none() {
            return false;
        }
        self.release_handler();
        true
    }

    /// Asks the peer by calling `connect`, unless that was given up.
    pub(super) fn ask(&self, connect: impl FnOnce() -> Result) -> Result {
        let mut driver = self.driver.lock();
        if driver.is_none() {
            return Err(ECANCELED);
        }
        connect()?;
        self.attach();
        let done = driver.take();
        drop(driver);
        drop(done);
        Ok(())
    }

    /// Takes the next step of a connection that is made by its events; says `false` of others.
    pub(super) fn drive(&self, event: bindings::rdma_cm_event_type) -> bool {
        if !self.is_driven() {
            return false;
        }
        let Some(driver) = self.driver.lock().clone() else {
            return false;
        };
        let stepped = {
            let _telling = self.telling.lock();
            driver.step(event, self)
        };
        if let Err(e) = stepped {
            // Unless it was given up, or the handler knows that the device goes.
            let given_up = self.driver.lock().take().is_none();
            if !given_up {
                self.tell(Event::Failed(e), true, || {});
            }
        }
        true
    }
}
