// SPDX-License-Identifier: GPL-2.0

//! Agents.

use super::{
    handler::{
        on_recv,
        on_sent, //
    },
    queue::Queue,
    Class,
    Methods,
    Received, //
};
use crate::{
    bindings,
    cm::running::Running,
    context::{
        Context as _,
        Sleepable, //
    },
    deferred::{
        self,
        Deferred,
        Fate,
        Teardown, //
    },
    device::Device,
    gate::{
        Gate,
        Hold,
        Kind, //
    },
    objects::Listed,
    removal::OnRemoval, //
};
use core::{
    convert::Infallible,
    ptr::NonNull, //
};
use kernel::{
    error::from_err_ptr,
    impl_has_work,
    new_mutex,
    new_work,
    prelude::*,
    sync::{
        atomic::Atomic,
        Arc,
        Mutex,
        UniqueArc, //
    },
    workqueue::{
        Work,
        WorkItem, //
    }, //
};

/// A registration with the MAD layer.
///
/// # Invariants
///
/// `raw` is registered, with `queue` as its context, until [`Self::end`] unregisters it, once,
/// after it has closed `gate`.
#[pin_data]
pub(super) struct Registered {
    raw: NonNull<bindings::ib_mad_agent>,
    queue: Arc<Queue>,
    #[pin]
    gate: Gate,
    #[pin]
    ended: Mutex<bool>,
    #[pin]
    end: Work<Self>,
}

impl_has_work! {
    impl HasWork<Self> for Registered { self.end }
}

impl WorkItem for Registered {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // SAFETY: Work items run in process context.
        let cx = unsafe { Sleepable::assume() };
        this.end(ENODEV, &cx);
    }
}

// SAFETY: An agent may be used and unregistered from any thread, and the rest is `Send`.
unsafe impl Send for Registered {}
// SAFETY: An agent may be used by several threads at once: the MAD layer locks it. The rest is
// `Sync`.
unsafe impl Sync for Registered {}

impl Registered {
    /// Unregisters the agent, unless that was done, and waits for it: all that waits for the agent
    /// fails, and its handlers have returned.
    fn end(&self, reason: Error, cx: &Sleepable) {
        let mut ended = self.ended.lock();
        if core::mem::replace(&mut *ended, true) {
            return;
        }
        self.queue.close(reason);
        self.gate.close(&"MAD agent", cx);
        // SAFETY: The agent is still registered by the type invariant; with the gate closed, nobody
        // uses it.
        unsafe { bindings::ib_unregister_mad_agent(self.raw.as_ptr()) };
    }
}

impl OnRemoval for Registered {
    fn gone(self: Arc<Self>) {
        self.queue.close(ENODEV);
        // Who waits for a reply is told by the MAD layer, when the agent is unregistered.
        let _ = deferred::Queue::get().enqueue(self);
    }

    fn removed(&self, cx: &Sleepable) {
        self.end(ENODEV, cx);
    }
}

/// An agent that does not end while this lives.
///
/// # Invariants
///
/// The agent is registered.
pub(super) struct Live<'a> {
    registered: &'a Registered,
    _hold: Hold,
}

impl Live<'_> {
    pub(super) fn as_raw(&self) -> *mut bindings::ib_mad_agent {
        self.registered.raw.as_ptr()
    }
}

struct State {
    registered: Arc<Registered>,
    device: Device,
    _hold: Listed,
}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        self.device.inner().removal.remove(&self.registered);
        self.registered.end(ECANCELED, cx);
        Fate::Gone
    }
}

/// The classes of subnet management (`IB_MGMT_CLASS_SUBN_LID_ROUTED`,
/// `IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE`).
const SUBN_LID_ROUTED: u8 = 0x01;
const SUBN_DIRECTED_ROUTE: u8 = 0x81;

/// Sends and receives MADs of one class through one port (`struct ib_mad_agent`).
///
/// Dropping it ends it, from a work item.
pub struct Agent {
    state: Deferred<State>,
    class: Class,
    port: u32,
    pub(super) next_tid: Atomic<u32>,
}

impl Agent {
    /// Registers an agent of QP 1 of a port (`ib_register_mad_agent`).
    ///
    /// It receives the requests of others for `methods`, of which at most `backlog` wait for
    /// [`Agent::recv`]; more are dropped and counted. An agent that serves no methods receives
    /// replies only, and there may be any number of those in a class.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such class or port, or if another agent serves one of the methods;
    /// `EPROTONOSUPPORT` if the port has no MADs; `ENODEV` if the device goes; `ENOMEM`.
    #[inline(never)]
    pub fn register(
        dev: &Device,
        port: u32,
        class: Class,
        methods: Methods,
        backlog: usize,
        _cx: &Sleepable,
    ) -> Result<Self> {
        // The C function looks at the port before it checks it.
        dev.port(port).ok_or(EINVAL)?;
        // These are QP 0's. The C function refuses them only to who serves methods; one that is
        // sent by QP 1 all the same would come back with a source that is no more there.
        if matches!(class.id, SUBN_LID_ROUTED | SUBN_DIRECTED_ROUTE) {
            return Err(EINVAL);
        }
        let mut request = bindings::ib_mad_reg_req {
            mgmt_class: class.id,
            mgmt_class_version: class.version,
            oui: class.oui,
            ..Default::default()
        };
        methods.write_mask(&mut request.method_mask);
        let request = if methods.is_empty() {
            core::ptr::null_mut()
        } else {
            &raw mut request
        };
        let reserved = Deferred::reserve()?;
        let hold = dev.list(Kind::Mad)?;
        let queue = Arc::pin_init(Queue::new(backlog)?, GFP_KERNEL)?;
        let place = UniqueArc::new_uninit(GFP_KERNEL)?;
        // SAFETY: The device is registered by the invariant of `device::Inner`. The request is
        // copied, and the context lives until the agent is unregistered.
        let raw = from_err_ptr(unsafe {
            bindings::ib_register_mad_agent(
                dev.as_raw(),
                port,
                bindings::ib_qp_type_IB_QPT_GSI,
                request,
                0,
                Some(on_sent),
                Some(on_recv),
                Arc::as_ptr(&queue).cast_mut().cast(),
                0,
            )
        })?;
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;
        // INVARIANT: Just registered.
        let registered: Arc<_> = match place.pin_init_with::<Infallible>(pin_init!(Registered {
            raw,
            queue,
            gate <- Gate::new(),
            ended <- new_mutex!(false),
            end <- new_work!("rdma::mad::Agent::end"),
        })) {
            Ok(registered) => registered.into(),
            Err(never) => match never {},
        };
        let state = reserved.fill(State {
            registered: registered.clone(),
            device: dev.clone(),
            _hold: hold,
        });
        dev.inner().removal.add(registered)?;
        Ok(Self {
            state,
            class,
            port,
            next_tid: Atomic::new(0),
        })
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.state.device
    }

    /// Returns the number of the port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Returns the class.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Returns how many MADs were dropped because the backlog was full.
    pub fn dropped(&self) -> u64 {
        self.queue().dropped()
    }

    fn queue(&self) -> &Queue {
        &self.state.registered.queue
    }

    /// Keeps the agent from ending.
    pub(super) fn enter(&self) -> Result<Live<'_>> {
        let registered = &*self.state.registered;
        // SAFETY: `State` closes the gate, by `end`, before it lets go of the registration.
        let hold = unsafe { registered.gate.hold(Kind::Mad) }.map_err(|e| self.reason(e))?;
        // INVARIANT: `end` waits for the hold before it unregisters the agent.
        Ok(Live {
            registered,
            _hold: hold,
        })
    }

    /// Returns why the agent has ended, or the given error if it has not.
    pub(super) fn reason(&self, error: Error) -> Error {
        self.queue().closed().unwrap_or(error)
    }

    /// Takes the MAD that came first, or waits for one: for `timeout_ms`, or for ever. Does not
    /// wait at all for 0.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`; `ERESTARTSYS` on a signal; `ENODEV` if the device goes, `ECANCELED` after
    /// [`Agent::stop`].
    pub fn recv(&self, timeout_ms: Option<u32>, _cx: &Sleepable) -> Result<Received> {
        self.queue().pop(timeout_ms)
    }

    /// Ends the agent and waits for that (`ib_unregister_mad_agent`): all waits, and all that is
    /// still tried, fail with `ECANCELED`.
    ///
    /// # Errors
    ///
    /// `EDEADLK` in a callback of a connection manager, which may be that of a message that nobody
    /// has answered: it is one of those that this waits for. The agent goes on; dropping it ends it
    /// from a work item.
    pub fn stop(&self, cx: &Sleepable) -> Result {
        if Running::is_current() {
            return Err(EDEADLK);
        }
        self.state.registered.end(ECANCELED, cx);
        Ok(())
    }
}
