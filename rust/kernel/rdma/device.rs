// SPDX-License-Identifier: GPL-2.0

//! RDMA devices, as a ULP sees them.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_device`)

mod port;

pub use port::{
    Gid,
    GidAttr,
    GidType,
    Netdev,
    Port,
    PortAttr,
    PortState,
    Protocol,
    L2, //
};

pub use crate::objects::Name;

use crate::{
    client,
    objects,
    prelude::*,
    refs,
    removal, //
};
use kernel::{
    sync::{
        self,
        atomic::{
            Atomic,
            Relaxed, //
        }, //
    },
    time::{
        self,
        hrtimer::{
            self,
            ScopedHrTimerPointer as _, //
        }, //
    },
    types::Opaque, //
};

/// One device of one client, from `add` to the end of `remove`.
///
/// # Invariants
///
/// - `raw` is a registered device until `refs` is killed and empty, and `client` outlives that.
/// - `data` are the data of the client's type.
#[pin_data]
pub(crate) struct Inner {
    #[pin]
    refs: refs::Refs,
    pub(crate) raw: NonNull<bindings::ib_device>,
    client: NonNull<client::Core>,
    #[pin]
    pub(crate) removal: removal::Removal,
    #[pin]
    data: sync::Mutex<Option<Data>>,
    #[pin]
    events: Opaque<bindings::ib_event_handler>,
    /// Reports every ten seconds that `step` of the removal has not ended, since `secs` seconds.
    #[pin]
    timer: hrtimer::HrTimer<Self>,
    step: Atomic<u32>,
    secs: Atomic<u32>,
}

/// A ULP's data, whatever type they have.
type Data = Arc<dyn Send + Sync>;

// SAFETY: `struct ib_device` and a client may be used from any thread, and the rest is `Send`.
unsafe impl Send for Inner {}
// SAFETY: `struct ib_device` and a client may be used by several threads at once, `events` is used
// by the thread that adds or removes the device only, and the rest is `Sync`.
unsafe impl Sync for Inner {}

impl Inner {
    /// Never inlined, so that all modules give the locks one name, as lockdep wants it.
    #[inline(never)]
    pub(crate) fn new(
        raw: NonNull<bindings::ib_device>,
        client: &client::Core,
    ) -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Self {
            refs <- refs::Refs::new(),
            raw,
            client: NonNull::from(client),
            removal <- removal::Removal::new(),
            // INVARIANT: There are no data yet.
            data <- kernel::new_mutex!(None),
            events: Opaque::new(bindings::ib_event_handler {
                device: raw.as_ptr(),
                ..Default::default()
            }),
            timer <- hrtimer::HrTimer::new(),
            step: Atomic::new(0),
            secs: Atomic::new(0),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    fn client(&self) -> &client::Core {
        // SAFETY: By the type invariant the client outlives the device.
        unsafe { self.client.as_ref() }
    }

    pub(crate) fn name(&self) -> Name {
        // SAFETY: By the type invariant the device is registered.
        unsafe { Name::of(self.raw.as_ptr()) }
    }

    /// Locks the data, if the client is a `C`.
    fn lock_data<C: client::ModuleClient>(&self) -> Option<sync::MutexGuard<'_, Option<Data>>> {
        // Each singleton is a static variable of one client type, so no other has its address while
        // the client's module is loaded. Modules may share names, and so `TypeId`s.
        let is_of = core::ptr::eq(self.client().singleton, C::singleton());
        is_of.then(|| self.data.lock())
    }

    pub(crate) fn set_data<C: client::ModuleClient>(&self, new: Arc<C::Data>) {
        if let Some(mut data) = self.lock_data::<C>() {
            // INVARIANT: The client is a `C`.
            *data = Some(new);
        }
    }

    /// Returns the data of the ULP `C`, if it has the device, as `get` takes or clones them.
    fn get_data<C: client::ModuleClient>(
        &self,
        get: fn(&mut Option<Data>) -> Option<Data>,
    ) -> Option<Arc<C::Data>> {
        let data = get(&mut *self.lock_data::<C>()?)?;
        // SAFETY: The address is from `Arc::into_raw`, and that of data of the client's type by the
        // type invariant, which is `C`, as `lock_data` has found.
        Some(unsafe { Arc::from_raw(Arc::into_raw(data).cast()) })
    }

    pub(crate) fn take_data<C: client::ModuleClient>(&self) -> Option<Arc<C::Data>> {
        self.get_data::<C>(Option::take)
    }

    /// Calls `f`, a step of the removal. Not generic, so that the timer's code is this module's.
    #[inline(never)]
    pub(crate) fn during(self: Pin<&Self>, step: removal::Step, f: &mut dyn FnMut()) {
        self.step.store(step as u32, Relaxed);
        self.secs.store(0, Relaxed);
        self.start_scoped(time::Delta::from_millis(refs::REPORT_MS.into()), f);
    }
}

kernel::impl_has_hr_timer! {
    impl HasHrTimer<Self> for Inner {
        mode: hrtimer::RelativeMode<time::Monotonic>, field: self.timer
    }
}

impl hrtimer::HrTimerCallback for Inner {
    type Pointer<'a> = Pin<&'a Self>;

    fn run(
        this: Pin<&Self>,
        mut cx: hrtimer::HrTimerCallbackContext<'_, Self>,
    ) -> hrtimer::HrTimerRestart {
        let (client, name) = (this.client().name, this.name());
        let secs = this.secs.fetch_add(refs::REPORT_MS / 1_000, Relaxed) + refs::REPORT_MS / 1_000;
        let step = removal::STEPS
            .get(this.step.load(Relaxed) as usize)
            .unwrap_or(&"");
        pr_warn!("{client}: removal of {name}: waits for the end of {step} since {secs} s\n");
        cx.forward_now(time::Delta::from_millis(refs::REPORT_MS.into()));
        hrtimer::HrTimerRestart::Restart
    }
}

impl refs::Owner for Inner {
    fn refs(&self) -> &refs::Refs {
        &self.refs
    }
}

impl fmt::Display for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!("{}: {}", self.client().name, self.name()))
    }
}

/// A handle of a device for one ULP: what `add` gets and what everything else is created from.
///
/// It is a counted reference. `remove`, and so module unload, waits until every handle and every
/// object made from it is gone; a leaked one stalls that with a message. Cloning is one atomic
/// operation; posting and polling need no handle.
pub struct Device(refs::Ref<Inner>);

impl Device {
    /// Makes a handle, unless the device is being removed from the client.
    ///
    /// # Safety
    ///
    /// `inner` stays valid until its refs are killed and empty.
    pub(crate) unsafe fn new(inner: NonNull<Inner>) -> Result<Self> {
        // SAFETY: The caller says that `inner` stays valid until its refs are killed and empty.
        unsafe { refs::Ref::try_get(inner, refs::Kind::Device) }.map(Self)
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }

    /// Takes a reference for an object that is not listed.
    pub(crate) fn get(&self, kind: refs::Kind) -> refs::Ref<Inner> {
        self.0.get(kind)
    }

    /// Returns an object of the device, with a reference, which is yet to be listed.
    pub(crate) fn object(&self, kind: refs::Kind) -> objects::Object {
        objects::Object::new(self.get(kind))
    }

    pub(crate) fn client(&self) -> &client::Core {
        self.inner().client()
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.inner().raw.as_ptr()
    }

    /// Returns the device's name, such as `rxe0`, as it is now: an administrator may change it.
    pub fn name(&self) -> Name {
        self.inner().name()
    }

    /// Returns what the ULP `C`, the type given to
    /// [`module_rdma_client!`](crate::module_rdma_client), keeps for the device
    /// (`ib_get_client_data`): between `add` and `remove`, and if the handle is one of this ULP's.
    /// The removal waits for the reference.
    pub fn data<C: client::ModuleClient>(&self, _cx: &Sleepable) -> Option<Arc<C::Data>> {
        self.inner().get_data::<C>(|data| data.clone())
    }

    /// Returns the attributes, which do not change once the device is registered.
    pub fn attrs(&self) -> DeviceAttr {
        use bindings::{
            ib_device_cap_flags_IB_DEVICE_MEM_MGT_EXTENSIONS as MEM_MGT_EXTENSIONS,
            ib_kernel_cap_flags_IBK_SG_GAPS_REG as SG_GAPS_REG, //
        };

        // SAFETY: The device is registered by the invariant of `Inner`; `attrs` does not change.
        let raw = unsafe { &(*self.as_raw()).attrs };
        DeviceAttr {
            max_cqe: raw.max_cqe,
            max_qp_wr: raw.max_qp_wr,
            max_send_sge: raw.max_send_sge,
            max_recv_sge: raw.max_recv_sge,
            max_sge_rd: raw.max_sge_rd,
            max_sgl_rd: raw.max_sgl_rd,
            max_qp_rd_atom: raw.max_qp_rd_atom,
            max_qp_init_rd_atom: raw.max_qp_init_rd_atom,
            max_mr: raw.max_mr,
            max_mr_size: raw.max_mr_size,
            max_fast_reg_page_list_len: raw.max_fast_reg_page_list_len,
            page_size_cap: raw.page_size_cap,
            max_srq: raw.max_srq,
            max_srq_wr: raw.max_srq_wr,
            max_srq_sge: raw.max_srq_sge,
            max_pkeys: raw.max_pkeys,
            vendor_id: raw.vendor_id,
            vendor_part_id: raw.vendor_part_id,
            hw_ver: raw.hw_ver,
            mem_mgt_extensions: raw.device_cap_flags & MEM_MGT_EXTENSIONS as u64 != 0,
            sg_gaps_reg: raw.kernel_cap_flags & u64::from(SG_GAPS_REG) != 0,
        }
    }

    pub(crate) fn ops(&self) -> &bindings::ib_device_ops {
        // SAFETY: The device is registered by the invariant of `Inner`; `ops` does not change.
        unsafe { &(*self.as_raw()).ops }
    }

    /// Returns `true` if the task's network namespace may use the device (`rdma_dev_access_netns`).
    pub fn is_accessible(&self, _cx: &Sleepable) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`; the helper only compares.
        unsafe { bindings::rdma_helper_device_is_accessible(self.as_raw()) }
    }

    /// Returns the number of completion vectors, at least 1.
    pub fn num_comp_vectors(&self) -> u32 {
        // SAFETY: The device is registered by the invariant of `Inner`; the field is constant.
        let vectors = unsafe { (*self.as_raw()).num_comp_vectors };
        vectors.try_into().unwrap_or(1)
    }
}

impl Clone for Device {
    fn clone(&self) -> Self {
        Self(self.get(refs::Kind::Device))
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self.inner(), other.inner())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.name(), f)
    }
}

/// The type of a device, as `enum rdma_node_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum NodeType {
    /// A channel adapter of InfiniBand or RoCE.
    Ca = bindings::RDMA_NODE_IB_CA as u8,
    /// An InfiniBand switch.
    Switch = bindings::RDMA_NODE_IB_SWITCH as u8,
    /// An iWARP adapter.
    Rnic = bindings::RDMA_NODE_RNIC as u8,
}

/// The attributes of a device, as `struct ib_device_attr`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceAttr {
    /// The largest number of entries of a CQ.
    pub max_cqe: u32,
    /// The largest number of requests of a queue of a QP.
    pub max_qp_wr: u32,
    /// The largest number of entries of a send request.
    pub max_send_sge: u32,
    /// The largest number of entries of a receive request.
    pub max_recv_sge: u32,
    /// The largest number of entries of an RDMA READ.
    pub max_sge_rd: u32,
    /// The number of entries above which an RDMA READ is better done by an MR, or zero.
    pub max_sgl_rd: u32,
    /// The number of RDMA READs and atomics of a peer that a QP can answer at a time, for
    /// [`ConnParam::responder_resources`](crate::cm::ConnParam::responder_resources).
    pub max_qp_rd_atom: u32,
    /// The number of RDMA READs and atomics that a QP can have outstanding, for
    /// [`ConnParam::initiator_depth`](crate::cm::ConnParam::initiator_depth).
    pub max_qp_init_rd_atom: u32,
    /// The largest number of MRs.
    pub max_mr: u32,
    /// The size of the largest MR, in bytes.
    pub max_mr_size: u64,
    /// The number of pages that a fast-registration MR can map.
    pub max_fast_reg_page_list_len: u32,
    /// The sizes of the pages that MRs can have, a bit for each power of two.
    pub page_size_cap: u64,
    /// The largest number of SRQs, zero if there are none.
    pub max_srq: u32,
    /// The largest number of requests on an SRQ.
    pub max_srq_wr: u32,
    /// The largest number of entries of a request on an SRQ.
    pub max_srq_sge: u32,
    /// The number of P_Keys.
    pub max_pkeys: u16,
    /// The vendor's number.
    pub vendor_id: u32,
    /// The vendor's number of the device's model.
    pub vendor_part_id: u32,
    /// The version of the hardware.
    pub hw_ver: u32,
    /// The device has fast registration, local invalidation and SEND with invalidate
    /// (`IB_DEVICE_MEM_MGT_EXTENSIONS`).
    pub mem_mgt_extensions: bool,
    /// MRs may have gaps between their pages (`IBK_SG_GAPS_REG`).
    pub sg_gaps_reg: bool,
}

/// An event of a device or one of its ports, as `struct ib_event`. Can be printed. Events of QPs,
/// CQs and SRQs go to their own handlers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The device has failed, and will not work again (`IB_EVENT_DEVICE_FATAL`).
    DeviceFatal,
    /// The link of this port is up (`IB_EVENT_PORT_ACTIVE`).
    PortActive(u32),
    /// The link of this port is down (`IB_EVENT_PORT_ERR`).
    PortError(u32),
    /// This port has another LID (`IB_EVENT_LID_CHANGE`).
    LidChange(u32),
    /// The P_Key table of this port has changed (`IB_EVENT_PKEY_CHANGE`).
    PkeyChange(u32),
    /// The GID table of this port has changed (`IB_EVENT_GID_CHANGE`).
    GidChange(u32),
    /// The subnet of this port has another manager (`IB_EVENT_SM_CHANGE`).
    SmChange(u32),
    /// The subnet manager asks this port to register again (`IB_EVENT_CLIENT_REREGISTER`).
    ClientReregister(u32),
    /// Anything else, by its C value.
    Other(u32),
}

impl Event {
    pub(crate) fn from_raw(raw: &bindings::ib_event) -> Self {
        // SAFETY: No member of the union is smaller than this one, which may have any value.
        let port = || unsafe { *raw.element.port_num };
        match raw.event {
            bindings::ib_event_type_IB_EVENT_DEVICE_FATAL => Self::DeviceFatal,
            bindings::ib_event_type_IB_EVENT_PORT_ACTIVE => Self::PortActive(port()),
            bindings::ib_event_type_IB_EVENT_PORT_ERR => Self::PortError(port()),
            bindings::ib_event_type_IB_EVENT_LID_CHANGE => Self::LidChange(port()),
            bindings::ib_event_type_IB_EVENT_PKEY_CHANGE => Self::PkeyChange(port()),
            bindings::ib_event_type_IB_EVENT_GID_CHANGE => Self::GidChange(port()),
            bindings::ib_event_type_IB_EVENT_SM_CHANGE => Self::SmChange(port()),
            bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER => Self::ClientReregister(port()),
            other => Self::Other(other),
        }
    }

    /// Returns the C value, and the port if it is an event of one.
    fn to_raw(self) -> (bindings::ib_event_type, Option<u32>) {
        match self {
            Self::DeviceFatal => (bindings::ib_event_type_IB_EVENT_DEVICE_FATAL, None),
            Self::PortActive(port) => (bindings::ib_event_type_IB_EVENT_PORT_ACTIVE, Some(port)),
            Self::PortError(port) => (bindings::ib_event_type_IB_EVENT_PORT_ERR, Some(port)),
            Self::LidChange(port) => (bindings::ib_event_type_IB_EVENT_LID_CHANGE, Some(port)),
            Self::PkeyChange(port) => (bindings::ib_event_type_IB_EVENT_PKEY_CHANGE, Some(port)),
            Self::GidChange(port) => (bindings::ib_event_type_IB_EVENT_GID_CHANGE, Some(port)),
            Self::SmChange(port) => (bindings::ib_event_type_IB_EVENT_SM_CHANGE, Some(port)),
            Self::ClientReregister(port) => (
                bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER,
                Some(port),
            ),
            Self::Other(raw) => (raw, None),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (raw, port) = self.to_raw();
        // SAFETY: The function returns a string that is never freed, for any value.
        let text = unsafe { CStr::from_char_ptr(bindings::ib_event_msg(raw)) };
        fmt::Display::fmt(text, f)?;
        port.map_or(Ok(()), |port| write!(f, ", port {port}"))
    }
}

/// `ib_event_handler.handler`.
pub(crate) type EventHandler =
    unsafe extern "C" fn(*mut bindings::ib_event_handler, *mut bindings::ib_event);

impl Inner {
    /// Registers `handler` for the device's events (`ib_register_event_handler`).
    ///
    /// # Safety
    ///
    /// Called once; [`Inner::unregister_handler`] is called before `self` is dropped or moved.
    pub(crate) unsafe fn register_handler(&self, handler: EventHandler) {
        let events = self.events.get();
        // SAFETY: The caller calls this once, so nothing else uses `events` yet; it has its device
        // since `Inner::new`, and stays in place until `unregister_handler` was called.
        unsafe {
            (*events).handler = Some(handler);
            bindings::ib_register_event_handler(events);
        }
    }

    /// Unregisters the handler and waits for a call that has begun (`ib_unregister_event_handler`).
    ///
    /// # Safety
    ///
    /// Called once, after [`Inner::register_handler`], in process context and not by the handler.
    pub(crate) unsafe fn unregister_handler(self: Pin<&Self>) {
        self.during(removal::Step::Event, &mut || {
            // SAFETY: The caller says that the handler is registered, that this is the only call
            // that unregisters it, and that it may sleep.
            unsafe { bindings::ib_unregister_event_handler(self.events.get()) };
        });
    }

    /// Returns the [`Inner`] of a handler.
    ///
    /// # Safety
    ///
    /// The handler was registered by [`Inner::register_handler`].
    pub(crate) unsafe fn of_handler(handler: *mut bindings::ib_event_handler) -> NonNull<Self> {
        let events: *mut Opaque<bindings::ib_event_handler> = handler.cast();
        // SAFETY: The caller says that this is an `Inner`'s, from `register_handler`.
        unsafe { NonNull::new_unchecked(kernel::container_of!(events, Self, events)) }
    }
}
