// SPDX-License-Identifier: GPL-2.0

//! RDMA devices, as a ULP sees them.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_device`)

mod port;

pub use port::{
    Gid,
    GidAttr,
    GidType,
    Gids,
    LinkLayer,
    Port,
    PortAttr,
    PortState,
    Ports,
    Protocols,
    L2, //
};

use crate::{
    bindings,
    client::{
        Core,
        Owned,
        Slot, //
    },
    context::Sleepable,
    objects::{
        Listed,
        Owner, //
    },
    refs::{
        Kind, //
        Ref,
        Refs,
    },
    removal::{
        Progress,
        Removal,
        Step, //
    }, //
};
use core::ptr::NonNull;
use kernel::{
    container_of,
    fmt,
    new_mutex,
    prelude::*,
    str::CStr,
    sync::{
        Arc,
        ArcBorrow,
        Mutex, //
    },
    types::Opaque, //
};

/// What the crate keeps for one device of one client, from `add` to the end of `remove`.
///
/// # Invariants
///
/// - `raw` is a registered device until `gate` is closed and empty.
/// - `data` is a reference to the data of the client type that `owner` is the slot of.
#[pin_data]
pub(crate) struct Inner {
    #[pin]
    pub(crate) refs: Refs,
    pub(crate) raw: NonNull<bindings::ib_device>,
    pub(crate) client: NonNull<Core>,
    #[pin]
    pub(crate) removal: Removal,
    #[pin]
    progress: Progress,
    /// The slot of the client's type. Its address tells types apart, also those of several modules,
    /// where a `TypeId` is a hash of names that they may share.
    owner: &'static Slot,
    #[pin]
    data: Mutex<Option<RawData>>,
    #[pin]
    events: Opaque<bindings::ib_event_handler>,
}

/// The client's reference to a ULP's data, as [`Arc::into_raw`] gives it.
struct RawData(NonNull<c_void>);

// SAFETY: This is an `Arc` of what a ULP keeps for a device, which `DeviceData` says is `Send` and
// `Sync`.
unsafe impl Send for RawData {}

impl Inner {
    /// Never inlined: see [`Core`].
    #[inline(never)]
    pub(crate) fn new(
        raw: NonNull<bindings::ib_device>,
        client: &Core,
        owner: &'static Slot,
    ) -> Result<Pin<KBox<Self>>> {
        let name = client.name;
        let init = pin_init!(Self {
            refs <- Refs::new(),
            raw,
            client: NonNull::from(client),
            removal <- Removal::new(),
            // SAFETY: The device is registered until the removal, whose progress this is, has
            // ended.
            progress <- unsafe { Progress::new(*raw, name) },
            owner,
            // INVARIANT: There are no data yet.
            data <- new_mutex!(None),
            events: Opaque::new(bindings::ib_event_handler {
                device: raw.as_ptr(),
                ..Default::default()
            }),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Has everybody who waits for something of the device know that it goes; nobody else waits
    /// from here on. Waits for nothing.
    #[inline(never)]
    pub(crate) fn close(&self) {
        self.removal.close();
    }

    /// Ends what is there of the device that others than the ULP know, after [`Inner::close`].
    #[inline(never)]
    pub(crate) fn end_all(self: Pin<&Self>, cx: &Sleepable) {
        self.removal.end_all(self.progress(), cx);
    }

    pub(crate) fn progress(self: Pin<&Self>) -> Pin<&Progress> {
        // SAFETY: The field is pinned structurally.
        unsafe { self.map_unchecked(|inner| &inner.progress) }
    }

    /// Says whether the client is a `C`. Each slot belongs to one type, see [`Owned`], and is a
    /// static variable, so no other has its address while the client's module is loaded.
    fn is_of<C: Owned>(&self) -> bool {
        core::ptr::eq(self.owner, C::slot())
    }

    /// Keeps what the ULP has made for the device.
    pub(crate) fn set_data<C: Owned>(&self, data: Arc<C::Data>) {
        if self.is_of::<C>() {
            // INVARIANT: The type was just checked.
            *self.data.lock() = NonNull::new(Arc::into_raw(data).cast_mut().cast()).map(RawData);
        }
    }

    /// Returns what the ULP `C` has made for the device, if it has the device.
    pub(crate) fn data<C: Owned>(&self) -> Option<Arc<C::Data>> {
        if !self.is_of::<C>() {
            return None;
        }
        let slot = self.data.lock();
        // SAFETY: By the type invariant the type is right, and the reference is there while the
        // lock is held.
        let data = unsafe { ArcBorrow::<C::Data>::from_raw(slot.as_ref()?.0.as_ptr().cast()) };
        Some(data.into())
    }

    /// Takes what the ULP `C` has made for the device.
    pub(crate) fn take_data<C: Owned>(&self) -> Option<Arc<C::Data>> {
        if !self.is_of::<C>() {
            return None;
        }
        let data = self.data.lock().take()?;
        // SAFETY: By the type invariant the type is right, and nobody else takes the reference.
        Some(unsafe { Arc::from_raw(data.0.as_ptr().cast()) })
    }
}

/// A handle of a device for one ULP: what `add` gets and what everything else is created from.
///
/// It is a counted reference. `remove` (so module unload too) waits until every handle and every
/// object made from it is gone; a leaked one stalls removal with a message, and is never used after
/// the device. Cloning is one atomic operation; posting and polling need no handle.
///
/// # Invariants
///
/// `inner` is valid while `hold` lives, and `hold` is a hold on its refs.
pub struct Device {
    inner: NonNull<Inner>,
    hold: Ref,
}

// SAFETY: `Inner` may be used from any thread, and a hold may be given back in any.
unsafe impl Send for Device {}
// SAFETY: `struct ib_device` may be used by several threads at once, and the rest of `Inner` is
// read-only, atomic or locked.
unsafe impl Sync for Device {}

impl Device {
    /// Makes a handle, unless the device is being removed from the client.
    ///
    /// # Safety
    ///
    /// `inner` must stay valid until its gate is closed.
    pub(crate) unsafe fn new(inner: NonNull<Inner>) -> Result<Self> {
        // SAFETY: The caller says that `inner`, and so its refs, stays valid until the gate is
        // closed.
        let hold = unsafe { inner.as_ref().refs.try_get(Kind::Device) }?;
        // INVARIANT: Just taken.
        Ok(Self { inner, hold })
    }

    pub(crate) fn inner(&self) -> &Inner {
        // SAFETY: `inner` is valid by the type invariant, as `self` has the hold.
        unsafe { self.inner.as_ref() }
    }

    pub(crate) fn hold(&self, kind: Kind) -> Ref {
        self.hold.another(kind)
    }

    /// Takes a hold for an object that is to be listed.
    pub(crate) fn list(&self, kind: Kind) -> Result<Listed> {
        // SAFETY: `hold` is on the gate of `inner` by the type invariant, and so is another one.
        unsafe { Listed::new(self.hold(kind), Owner::Device(self.inner)) }
    }

    pub(crate) fn client(&self) -> &Core {
        // SAFETY: A client outlives its devices, and the hold keeps this device.
        unsafe { self.inner().client.as_ref() }
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.inner().raw.as_ptr()
    }

    /// Returns the device's name, such as `rxe0`, as it is now: an administrator may change it.
    pub fn name(&self) -> Name {
        // SAFETY: The device is registered by the invariant of `Inner`.
        unsafe { Name::of(self.as_raw()) }
    }

    /// Returns what the ULP `C` keeps for the device (`ib_get_client_data`): between `add` and
    /// `remove`, and if the handle is one of this ULP's. `C` is what
    /// [`module_rdma_client!`](crate::module_rdma_client) has made a module of.
    ///
    /// Whoever keeps the reference keeps what is in the data, and so the device from going.
    pub fn data<C: Owned>(&self, _cx: &Sleepable) -> Option<Arc<C::Data>> {
        self.inner().data::<C>()
    }

    /// Returns the number of completion vectors, at least 1.
    pub fn num_comp_vectors(&self) -> u32 {
        // SAFETY: The device is registered by the invariant of `Inner`; the field does not change
        // after that.
        let vectors = unsafe { (*self.as_raw()).num_comp_vectors };
        vectors.try_into().unwrap_or(1)
    }
}

impl Clone for Device {
    fn clone(&self) -> Self {
        // INVARIANT: The new hold is on the same refs.
        Self {
            inner: self.inner,
            hold: self.hold.another(Kind::Device),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.inner == other.inner
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.name(), f)
    }
}

/// Waits until nothing of the device is used any more, and frees what was kept for it. Never
/// inlined, so that the drop is this module's.
#[inline(never)]
pub(crate) fn wait_released(inner: Pin<KBox<Inner>>, cx: &Sleepable) {
    struct Who<'a>(&'a Inner);

    impl fmt::Display for Who<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            // SAFETY: The device is registered until `remove` returns, and its client outlives
            // that.
            let (name, client) = unsafe { (Name::of(self.0.raw.as_ptr()), self.0.client.as_ref()) };
            f.write_fmt(fmt!("{}: removal of {name}", client.name))
        }
    }

    inner.refs.kill_and_wait(&Who(&inner), cx);
}

/// A copy of a device's name.
#[derive(Clone, Copy)]
pub struct Name([u8; bindings::IB_DEVICE_NAME_MAX as usize]);

impl Name {
    /// # Safety
    ///
    /// `dev` is a valid device.
    pub(crate) unsafe fn of(dev: *mut bindings::ib_device) -> Self {
        let mut name = [0; bindings::IB_DEVICE_NAME_MAX as usize];
        // SAFETY: `dev` is valid by the caller's promise; the helper copies a string that fits.
        unsafe { bindings::rdma_helper_device_name(dev, name.as_mut_ptr().cast(), name.len()) };
        Self(name)
    }
}

impl core::ops::Deref for Name {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&**self, f)
    }
}

// All of it is fixed once a device is registered, and can be read in any context, but for what
// asks for a token.

/// What a device can do beyond the obligatory (`enum ib_device_cap_flags`, `enum
/// ib_kernel_cap_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Fast registration, local invalidation and SEND with invalidate
    /// (`IB_DEVICE_MEM_MGT_EXTENSIONS`).
    MemMgtExtensions,
    /// Shared receive queues can be resized (`IB_DEVICE_SRQ_RESIZE`).
    SrqResize,
    /// Extended reliable connected service (`IB_DEVICE_XRC`).
    Xrc,
    /// The device says when a port becomes active (`IB_DEVICE_PORT_ACTIVE_EVENT`).
    PortActiveEvent,
    /// The device has a key for all local memory (`IBK_LOCAL_DMA_LKEY`).
    LocalDmaLkey,
    /// MRs may have gaps between their pages (`IBK_SG_GAPS_REG`).
    SgGaps,
    /// T10-PI by the device (`IBK_INTEGRITY_HANDOVER`).
    Integrity,
}

/// What a device is, as `enum rdma_node_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeType {
    /// A channel adapter of InfiniBand or RoCE (`RDMA_NODE_IB_CA`).
    Ca,
    /// An InfiniBand switch (`RDMA_NODE_IB_SWITCH`).
    Switch,
    /// An iWARP adapter (`RDMA_NODE_RNIC`).
    Rnic,
    /// Anything else, by its C value.
    Other(u8),
}

impl NodeType {
    fn from_raw(raw: u8) -> Self {
        match raw.into() {
            bindings::RDMA_NODE_IB_CA => Self::Ca,
            bindings::RDMA_NODE_IB_SWITCH => Self::Switch,
            bindings::RDMA_NODE_RNIC => Self::Rnic,
            _ => Self::Other(raw),
        }
    }

    pub(crate) fn to_raw(self) -> u8 {
        match self {
            Self::Ca => bindings::RDMA_NODE_IB_CA as u8,
            Self::Switch => bindings::RDMA_NODE_IB_SWITCH as u8,
            Self::Rnic => bindings::RDMA_NODE_RNIC as u8,
            Self::Other(raw) => raw,
        }
    }
}

impl Device {
    pub(crate) fn attrs(&self) -> &bindings::ib_device_attr {
        // SAFETY: The device is registered by the invariant of `Inner`; its attributes do not
        // change after that.
        unsafe { &(*self.as_raw()).attrs }
    }

    /// Returns the largest number of entries that a completion queue can have.
    pub fn max_cqe(&self) -> u32 {
        self.attrs().max_cqe
    }

    /// Returns the largest number of outstanding work requests of a queue.
    pub fn max_qp_wr(&self) -> u32 {
        self.attrs().max_qp_wr
    }

    /// Returns the largest number of entries of a send request (`max_send_sge`).
    pub fn max_send_sge(&self) -> u32 {
        self.attrs().max_send_sge
    }

    /// Returns the largest number of entries of a receive request (`max_recv_sge`).
    pub fn max_recv_sge(&self) -> u32 {
        self.attrs().max_recv_sge
    }

    /// Returns the largest number of entries of an RDMA READ (`max_sge_rd`).
    pub fn max_sge_rd(&self) -> u32 {
        self.attrs().max_sge_rd
    }

    /// Returns the number of entries above which an RDMA READ is better done by an MR, or zero
    /// (`max_sgl_rd`).
    pub fn max_sgl_rd(&self) -> u32 {
        self.attrs().max_sgl_rd
    }

    /// Returns how many RDMA READs and atomics of a peer a QP can answer at a time
    /// (`max_qp_rd_atom`), for
    /// [`ConnParam::responder_resources`](crate::cm::ConnParam::responder_resources).
    pub fn max_responder_resources(&self) -> u32 {
        self.attrs().max_qp_rd_atom
    }

    /// Returns how many RDMA READs and atomics a QP can have outstanding (`max_qp_init_rd_atom`),
    /// for [`ConnParam::initiator_depth`](crate::cm::ConnParam::initiator_depth).
    pub fn max_initiator_depth(&self) -> u32 {
        self.attrs().max_qp_init_rd_atom
    }

    /// Returns the largest number of MRs (`max_mr`).
    pub fn max_mr(&self) -> u32 {
        self.attrs().max_mr
    }

    /// Returns the size of the largest MR, in bytes (`max_mr_size`).
    pub fn max_mr_size(&self) -> u64 {
        self.attrs().max_mr_size
    }

    /// Returns the number of pages that a fast-registration MR can map.
    pub fn max_fast_reg_pages(&self) -> u32 {
        self.attrs().max_fast_reg_page_list_len
    }

    /// Returns the sizes of the pages that MRs can have, a bit for each power of two
    /// (`page_size_cap`).
    pub fn page_sizes(&self) -> u64 {
        self.attrs().page_size_cap
    }

    /// Returns the largest number of shared receive queues, zero if there are none (`max_srq`).
    pub fn max_srq(&self) -> u32 {
        self.attrs().max_srq
    }

    /// Returns the largest number of requests on a shared receive queue (`max_srq_wr`).
    pub fn max_srq_wr(&self) -> u32 {
        self.attrs().max_srq_wr
    }

    /// Returns the largest number of entries of a request on a shared receive queue
    /// (`max_srq_sge`).
    pub fn max_srq_sge(&self) -> u32 {
        self.attrs().max_srq_sge
    }

    /// Returns the vendor's number (`vendor_id`).
    pub fn vendor_id(&self) -> u32 {
        self.attrs().vendor_id
    }

    /// Returns the vendor's number of the device's model (`vendor_part_id`).
    pub fn vendor_part_id(&self) -> u32 {
        self.attrs().vendor_part_id
    }

    /// Returns the version of the hardware (`hw_ver`).
    pub fn hw_version(&self) -> u32 {
        self.attrs().hw_ver
    }

    /// Says whether the device can do something.
    pub fn has(&self, capability: Capability) -> bool {
        use bindings::{
            ib_device_cap_flags_IB_DEVICE_MEM_MGT_EXTENSIONS as MEM_MGT_EXTENSIONS,
            ib_device_cap_flags_IB_DEVICE_PORT_ACTIVE_EVENT as PORT_ACTIVE_EVENT,
            ib_device_cap_flags_IB_DEVICE_SRQ_RESIZE as SRQ_RESIZE,
            ib_device_cap_flags_IB_DEVICE_XRC as XRC,
            ib_kernel_cap_flags_IBK_INTEGRITY_HANDOVER as INTEGRITY,
            ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY as LOCAL_DMA_LKEY,
            ib_kernel_cap_flags_IBK_SG_GAPS_REG as SG_GAPS, //
        };

        let attrs = self.attrs();
        let device = |flag| attrs.device_cap_flags & flag as u64 != 0;
        let kernel = |flag: u32| attrs.kernel_cap_flags & u64::from(flag) != 0;
        match capability {
            Capability::MemMgtExtensions => device(MEM_MGT_EXTENSIONS),
            Capability::SrqResize => device(SRQ_RESIZE),
            Capability::Xrc => device(XRC),
            Capability::PortActiveEvent => device(PORT_ACTIVE_EVENT),
            Capability::LocalDmaLkey => kernel(LOCAL_DMA_LKEY),
            Capability::SgGaps => kernel(SG_GAPS),
            Capability::Integrity => kernel(INTEGRITY),
        }
    }

    /// Returns what the device is (`ib_device.node_type`).
    pub fn node_type(&self) -> NodeType {
        // SAFETY: The device is registered by the invariant of `Inner`; the field does not change
        // after that.
        NodeType::from_raw(unsafe { (*self.as_raw()).node_type })
    }

    /// Returns the version of the firmware, empty if there is none (`ib_get_device_fw_str`).
    /// Drivers may sleep to find it: usnic locks a mutex.
    pub fn firmware(&self, _cx: &Sleepable) -> Firmware {
        let mut version = Firmware([0; Firmware::LEN]);
        // SAFETY: The device is registered by the invariant of `Inner`; drivers write at most so
        // many bytes.
        unsafe { bindings::ib_get_device_fw_str(self.as_raw(), version.0.as_mut_ptr().cast()) };
        version
    }

    /// Says whether the current task's network namespace may use the device
    /// (`rdma_dev_access_netns`).
    pub fn is_accessible(&self, _cx: &Sleepable) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`; the helper only compares.
        unsafe { bindings::rdma_helper_device_is_accessible(self.as_raw()) }
    }
}

/// A copy of the version of a device's firmware.
#[derive(Clone, Copy)]
pub struct Firmware([u8; Self::LEN]);

impl Firmware {
    const LEN: usize = bindings::IB_FW_VERSION_NAME_MAX as usize;
}

impl core::ops::Deref for Firmware {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

/// The name and the index that a network interface had.
#[derive(Clone, Copy)]
pub struct Netdev(bindings::rdma_helper_netdev);

impl Netdev {
    /// Returns the name, which an administrator may have changed since.
    pub fn name(&self) -> &CStr {
        // SAFETY: The helper has filled in a string that ends in the array, or the array is zero.
        unsafe { CStr::from_char_ptr(self.0.name.as_ptr()) }
    }

    /// Returns the index, which identifies the interface in its network namespace.
    pub fn index(&self) -> u32 {
        self.0.index.try_into().unwrap_or(0)
    }
}

impl PartialEq for Netdev {
    fn eq(&self, other: &Self) -> bool {
        self.0.index == other.0.index
    }
}

impl fmt::Display for Netdev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.name(), f)
    }
}

/// What happened to a device or one of its ports, as `struct ib_event`.
///
/// What happens to a queue is told to its owner. Can be printed (`ib_event_msg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The device has failed, and will not work again (`IB_EVENT_DEVICE_FATAL`).
    DeviceFatal,
    /// The link of this port is there (`IB_EVENT_PORT_ACTIVE`).
    PortActive(u32),
    /// The link of this port is gone (`IB_EVENT_PORT_ERR`).
    PortError(u32),
    /// This port has another LID (`IB_EVENT_LID_CHANGE`).
    LidChange(u32),
    /// The P_Key table of this port has changed (`IB_EVENT_PKEY_CHANGE`).
    PkeyChange(u32),
    /// The GID table of this port has changed (`IB_EVENT_GID_CHANGE`).
    GidChange(u32),
    /// The subnet of this port has another manager (`IB_EVENT_SM_CHANGE`).
    SmChange(u32),
    /// The subnet manager of this port asks clients to register again
    /// (`IB_EVENT_CLIENT_REREGISTER`).
    ClientReregister(u32),
    /// Anything else, by its C value.
    Other(u32),
}

impl Event {
    pub(crate) fn from_raw(raw: &bindings::ib_event) -> Self {
        // SAFETY: Any value is one of this member, and it is the one that events of ports have set.
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

    fn raw(&self) -> bindings::ib_event_type {
        match *self {
            Self::DeviceFatal => bindings::ib_event_type_IB_EVENT_DEVICE_FATAL,
            Self::PortActive(_) => bindings::ib_event_type_IB_EVENT_PORT_ACTIVE,
            Self::PortError(_) => bindings::ib_event_type_IB_EVENT_PORT_ERR,
            Self::LidChange(_) => bindings::ib_event_type_IB_EVENT_LID_CHANGE,
            Self::PkeyChange(_) => bindings::ib_event_type_IB_EVENT_PKEY_CHANGE,
            Self::GidChange(_) => bindings::ib_event_type_IB_EVENT_GID_CHANGE,
            Self::SmChange(_) => bindings::ib_event_type_IB_EVENT_SM_CHANGE,
            Self::ClientReregister(_) => bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER,
            Self::Other(raw) => raw,
        }
    }

    /// Returns the number of the port, if the event is one of a port.
    pub fn port(&self) -> Option<u32> {
        match *self {
            Self::DeviceFatal | Self::Other(_) => None,
            Self::PortActive(port)
            | Self::PortError(port)
            | Self::LidChange(port)
            | Self::PkeyChange(port)
            | Self::GidChange(port)
            | Self::SmChange(port)
            | Self::ClientReregister(port) => Some(port),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: The function returns a string that is never freed, for any value.
        let text = unsafe { CStr::from_char_ptr(bindings::ib_event_msg(self.raw())) };
        fmt::Display::fmt(text, f)?;
        match self.port() {
            Some(port) => f.write_fmt(fmt!(", port {port}")),
            None => Ok(()),
        }
    }
}

/// A C function that is told of events.
type Handler = unsafe extern "C" fn(*mut bindings::ib_event_handler, *mut bindings::ib_event);

impl Inner {
    /// Has `handler` told of the device's events (`ib_register_event_handler`).
    ///
    /// # Safety
    ///
    /// To be called once, and [`Inner::unwatch`] before `self` goes or moves.
    pub(crate) unsafe fn watch(&self, handler: Handler) {
        let events = self.events.get();
        // SAFETY: The caller calls this once, so nobody else uses `events` yet; it has its device
        // since `Inner::new`, and stays in place until the caller has called `unwatch`.
        unsafe {
            (*events).handler = Some(handler);
            bindings::ib_register_event_handler(events);
        }
    }

    /// Ends [`Inner::watch`], and waits for a call that has begun (`ib_unregister_event_handler`).
    ///
    /// # Safety
    ///
    /// To be called once, after [`Inner::watch`], in process context and not by the handler.
    #[inline(never)]
    pub(crate) unsafe fn unwatch(self: Pin<&Self>) {
        self.progress().during(Step::Event, &mut || {
            // SAFETY: The caller says that `watch` has registered it, that this is the only end of
            // that, and that it may sleep.
            unsafe { bindings::ib_unregister_event_handler(self.events.get()) };
        });
    }

    /// Returns what a handler belongs to.
    ///
    /// # Safety
    ///
    /// The handler is one that [`Inner::watch`] has registered.
    pub(crate) unsafe fn of_handler(handler: *mut bindings::ib_event_handler) -> NonNull<Self> {
        let events: *mut Opaque<bindings::ib_event_handler> = handler.cast();
        // SAFETY: `watch` registers the field `events` of an `Inner`, and the caller says that this
        // is one that it has registered.
        unsafe { NonNull::new_unchecked(container_of!(events, Self, events)) }
    }
}
