// SPDX-License-Identifier: GPL-2.0

//! RDMA devices, as a ULP sees them.
//!
//! A [`Device`] is a counted handle, which the removal of the device waits for. It has the
//! [attributes](DeviceAttr) that the driver reports, and [ports](Port) with their GIDs.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_device`)

use crate::{
    atomic::AtomicUsize,
    client,
    deferred,
    objects,
    prelude::internal::*,
    refs,
    removal,
    sync::Ends,
    timeouts::TimeoutFlush, //
};
use core::net::{
    IpAddr,
    Ipv4Addr,
    Ipv6Addr, //
};
use kernel::{
    sync::{
        self,
        atomic, //
    },
    time::{
        self,
        hrtimer::{
            self,
            ScopedHrTimerPointer as _, //
        }, //
    },
    types::Opaque,
    workqueue, //
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
    pub(crate) events: Opaque<bindings::ib_event_handler>,
    /// Reports every ten seconds that `step` of the removal has not ended, since `secs` seconds.
    #[pin]
    timer: hrtimer::HrTimer<Self>,
    step: atomic::Atomic<u32>,
    secs: atomic::Atomic<u32>,
    /// The flushes of the ports' timeouts, by the numbers of the ports.
    pub(crate) flushes: KVec<Pin<KBox<TimeoutFlush>>>,
    /// Tears down what is made on the device. Dropped after the refs were killed, and waits for the
    /// end of its work items.
    queue: deferred::Workqueue,
    /// The dropped objects of those types of which there may be hundreds.
    pub(crate) dropped: deferred::Dropped,
    /// The MRs that are gone. Those of other clients are of other PDs: a message invalidates the
    /// keys of its QP's PD only.
    pub(crate) mrs: Ends<KVec<AtomicUsize>>,
}

/// `ib_event_handler.handler`.
pub(crate) type EventHandler =
    unsafe extern "C" fn(*mut bindings::ib_event_handler, *mut bindings::ib_event);

/// A ULP's data, whatever type they have.
type Data = Arc<dyn Send + Sync>;

// SAFETY: `struct ib_device` and a client may be used from any thread, and the rest is `Send`.
unsafe impl Send for Inner {}
// SAFETY: `struct ib_device` and a client may be used by several threads at once, `events` is used
// by the thread that adds or removes the device only, and the rest is `Sync`.
unsafe impl Sync for Inner {}

impl Inner {
    /// The places by which numbers of MRs are told apart: a page of them.
    const MR_PLACES: usize = 4096 / size_of::<AtomicUsize>();

    /// # Safety
    ///
    /// The device is registered, and the client outlives that and this.
    pub(crate) unsafe fn new(
        raw: NonNull<bindings::ib_device>,
        client: &client::Core,
    ) -> Result<Pin<KBox<Self>>> {
        let handler = Some(client.event);
        // SAFETY: The caller promises that the device is registered.
        let ports = unsafe { (*raw.as_ptr()).phys_port_cnt };
        let mut flushes = KVec::new();
        for _ in 0..=ports {
            flushes.push(KBox::pin_init(TimeoutFlush::new(), GFP_KERNEL)?, GFP_KERNEL)?;
        }
        let mut last = KVec::with_capacity(Self::MR_PLACES, GFP_KERNEL)?;
        for _ in 0..Self::MR_PLACES {
            last.push_within_capacity(AtomicUsize::new(0))?;
        }
        // INVARIANT: The device stays registered until its `remove` has returned, which kills the
        // refs and waits. The caller promises that the client outlives it.
        let init = try_pin_init!(Self {
            refs <- refs::Refs::new(),
            raw,
            client: NonNull::from(client),
            removal <- removal::Removal::new(),
            // INVARIANT: There are no data yet.
            data <- kernel::new_mutex!(None),
            events: Opaque::new(bindings::ib_event_handler {
                device: raw.as_ptr(),
                handler,
                ..Default::default()
            }),
            timer <- hrtimer::HrTimer::new(),
            step: atomic::Atomic::new(0),
            secs: atomic::Atomic::new(0),
            flushes,
            queue: deferred::Workqueue::new(c"rdma_rs")?,
            dropped: deferred::Dropped::new(),
            mrs: Ends::new(last),
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
    pub(crate) fn get_data<C: client::ModuleClient>(
        &self,
        get: fn(&mut Option<Data>) -> Option<Data>,
    ) -> Option<Arc<C::Data>> {
        let data = get(&mut *self.lock_data::<C>()?)?;
        // SAFETY: The address is from `Arc::into_raw`, and that of data of the client's type by the
        // type invariant, which is `C`, as `lock_data` has found.
        Some(unsafe { Arc::from_raw(Arc::into_raw(data).cast()) })
    }

    /// Calls `f`, a step of the removal. Not generic, so that the timer's code is this module's.
    pub(crate) fn during(self: Pin<&Self>, step: removal::Step, f: &mut dyn FnMut()) {
        self.step.store(step as u32, atomic::Relaxed);
        self.secs.store(0, atomic::Relaxed);
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
        let client = this.client().name;
        let name = this.name();
        const SECS: u32 = refs::REPORT_MS / 1_000;
        let secs = this.secs.fetch_add(SECS, atomic::Relaxed) + SECS;
        let step = this.step.load(atomic::Relaxed) as usize;
        let step = removal::STEPS.get(step).unwrap_or(&"");
        pr_warn!("{client}: removal of {name}: waits for the end of {step} since {secs} s\n");
        cx.forward_now(time::Delta::from_millis(refs::REPORT_MS.into()));
        hrtimer::HrTimerRestart::Restart
    }
}

impl refs::Owner for Inner {
    fn refs(&self) -> &refs::Refs {
        &self.refs
    }

    fn queue(&self) -> &workqueue::Queue {
        self.queue.get()
    }
}

impl fmt::Display for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!("{}: {}", self.client().name, self.name()))
    }
}

/// A handle of a device for one ULP: what `add` gets and what everything else is created from.
///
/// A counted reference: `remove`, and so module unload, waits until every handle and every object
/// made from it is gone. Posting and polling need no handle.
pub struct Device(refs::Ref<Inner>);

impl Device {
    /// Makes a handle, unless the device is being removed from the client.
    ///
    /// # Safety
    ///
    /// `inner` stays valid until its refs are killed and empty.
    pub(crate) unsafe fn new(inner: NonNull<Inner>) -> Result<Self> {
        // SAFETY: The caller promises that `inner` stays valid until its refs are killed and empty.
        unsafe { refs::Ref::try_get(inner, refs::ObjectKind::Device) }.map(Self)
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }

    /// Takes a reference for an object that is not listed.
    pub(crate) fn get(&self, kind: refs::ObjectKind) -> refs::Ref<Inner> {
        self.0.get(kind)
    }

    /// Returns an object of the device, with a reference, which is yet to be listed.
    pub(crate) fn object(&self, kind: refs::ObjectKind) -> objects::Object {
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

    /// Returns what the ULP `C` keeps for the device (`ib_get_client_data`): between `add` and
    /// `remove`, and if the handle is one of this ULP's. The removal does not wait for the
    /// reference, but for the handles that the data have.
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
            max_fast_reg_page_list_len: raw.max_fast_reg_page_list_len,
            max_srq: raw.max_srq,
            max_srq_wr: raw.max_srq_wr,
            max_srq_sge: raw.max_srq_sge,
            max_pkeys: raw.max_pkeys,
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

    /// Returns the number of completion vectors, at least 1, also where the driver has set none.
    pub fn num_comp_vectors(&self) -> u32 {
        // SAFETY: The device is registered by the invariant of `Inner`; the field is constant.
        let vectors = unsafe { (*self.as_raw()).num_comp_vectors };
        u32::try_from(vectors).map_or(1, |vectors| vectors.max(1))
    }

    /// Returns the NUMA node that the device is near to, if it is near to one (`ibdev_to_node`).
    /// Memory and threads that work with it are best there.
    ///
    /// # Examples
    ///
    /// ```
    /// use kernel::alloc::NumaNode;
    /// use rdma::prelude::*;
    ///
    /// /// Returns where to allocate the queues of a connection.
    /// fn node_of_queues(id: &cm::Id) -> Result<NumaNode> {
    ///     let node = id.device()?.numa_node();
    ///     node.map_or(Ok(NumaNode::NO_NODE), |node| NumaNode::new(node.try_into()?))
    /// }
    /// ```
    pub fn numa_node(&self) -> Option<u32> {
        // SAFETY: The device is registered by the invariant of `Inner`, so its parent, if it has
        // one, is valid, and does not change.
        let node = unsafe { bindings::rdma_helper_device_numa_node(self.as_raw()) };
        node.try_into().ok() // A node, or `NUMA_NO_NODE`, which is negative.
    }

    /// Returns the port with this number, if the device has it (`rdma_is_port_valid`). The first
    /// is 1, except on a switch, whose only port is 0.
    pub fn port(&self, num: u32) -> Option<Port<'_>> {
        // SAFETY: The device is registered by the invariant of `Inner`.
        let exists = unsafe { bindings::rdma_helper_is_port_valid(self.as_raw(), num) };
        // INVARIANT: The device has the port.
        exists.then_some(Port { dev: self, num })
    }

    /// Returns the first IP address of the device's ports that is not link-local: on RoCE of the
    /// GIDs, on iWARP of the interface (IPv4). Any context.
    pub fn ip_addr(&self) -> Option<IpAddr> {
        for port in self.ports() {
            for attr in port.gids() {
                let ip = match attr.gid().ip() {
                    ip if port.has(Protocol::Roce) => Some(ip),
                    _ if port.has(Protocol::Iwarp) => attr.ipv4().map(IpAddr::V4),
                    _ => None,
                };
                match ip {
                    None => {}
                    Some(IpAddr::V6(ip)) if ip.is_unspecified() || ip.is_unicast_link_local() => {}
                    Some(_) => return ip,
                }
            }
        }
        None
    }

    /// Returns whether the device is one of iWARP: those are all and the only ones of this type.
    pub(crate) fn is_iwarp(&self) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`; its type does not change.
        unsafe { (*self.as_raw()).node_type == NodeType::Rnic as u8 }
    }

    /// Returns the device's ports (`rdma_for_each_port`).
    pub fn ports(&self) -> impl Iterator<Item = Port<'_>> {
        // A switch has its port 0 only.
        let first = if self.port(0).is_some() { 0 } else { 1 };
        (first..).map_while(|num| self.port(num))
    }
}

impl Clone for Device {
    fn clone(&self) -> Self {
        Self(self.get(refs::ObjectKind::Device))
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

/// A copy of a device's name, which an administrator may change.
#[derive(Clone, Copy)]
pub struct Name([u8; bindings::IB_DEVICE_NAME_MAX as usize]);

impl Name {
    /// # Safety
    ///
    /// `dev` is a valid device.
    pub(crate) unsafe fn of(dev: *mut bindings::ib_device) -> Self {
        let mut name = [0; bindings::IB_DEVICE_NAME_MAX as usize];
        // SAFETY: The caller promises that `dev` is valid; the helper copies a string that fits.
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
    /// The number of pages that a fast-registration MR can map.
    pub max_fast_reg_page_list_len: u32,
    /// The largest number of SRQs, zero if there are none.
    pub max_srq: u32,
    /// The largest number of requests on an SRQ.
    pub max_srq_wr: u32,
    /// The largest number of entries of a request on an SRQ.
    pub max_srq_sge: u32,
    /// The number of P_Keys.
    pub max_pkeys: u16,
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

/// A port of a device.
///
/// # Examples
///
/// ```
/// # use rdma::{context::Sleepable, device::{Device, PortState, Protocol}};
/// fn show_active_ports(dev: &Device, cx: &Sleepable) -> Result {
///     for port in dev.ports() {
///         let active = port.query(cx)?.state == PortState::Active;
///         let roce = port.has(Protocol::Roce);
///         if let (true, true, Some(netdev)) = (active, roce, port.netdev(cx)) {
///             let num = port.num();
///             let gid = port.gid(0)?.ok_or(ENOENT)?;
///             pr_info!("{num}: {gid} of {} ({})\n", netdev.name(), netdev.index());
///             pr_info!("{num}: P_Key 0xffff at {}\n", port.find_pkey(0xffff)?);
///         }
///     }
///     Ok(())
/// }
/// ```
///
/// # Invariants
///
/// The device has a port `num`.
#[derive(Clone, Copy)]
pub struct Port<'a> {
    dev: &'a Device,
    num: u32,
}

/// The state of a port's link, as `enum ib_port_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// There is no link.
    Down,
    /// The link is up and not configured yet.
    Init,
    /// The link is configured and carries no data yet.
    Armed,
    /// The link carries data.
    Active,
    /// Anything else, by its C value.
    Other(u32),
}

/// The attributes of a port, as `struct ib_port_attr`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PortAttr {
    /// The state of the link.
    pub state: PortState,
    /// The MTU of the link, in bytes.
    pub active_mtu: u32,
    /// The number of entries of the GID table.
    pub gid_table_len: u32,
    /// The port's LID, on InfiniBand.
    pub lid: u32,
}

/// Returns an `enum ib_mtu` in bytes, or zero if it is not known (`ib_mtu_enum_to_int`).
fn mtu_bytes(mtu: bindings::ib_mtu) -> u32 {
    match mtu {
        bindings::ib_mtu_IB_MTU_256..=bindings::ib_mtu_IB_MTU_4096 => 128 << mtu,
        _ => 0,
    }
}

/// A protocol of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Protocol {
    /// InfiniBand (`rdma_protocol_ib`).
    Ib = bindings::rdma_helper_protocol_RDMA_HELPER_IB,
    /// RoCE of any version (`rdma_protocol_roce`).
    Roce = bindings::rdma_helper_protocol_RDMA_HELPER_ROCE,
    /// RoCE version 1, on Ethernet (`rdma_protocol_roce_eth_encap`).
    RoceV1 = bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V1,
    /// RoCE version 2, on UDP (`rdma_protocol_roce_udp_encap`).
    RoceV2 = bindings::rdma_helper_protocol_RDMA_HELPER_ROCE_V2,
    /// iWARP (`rdma_protocol_iwarp`), on which an RDMA READ needs a remotely writable MR.
    Iwarp = bindings::rdma_helper_protocol_RDMA_HELPER_IWARP,
    /// The addresses of Omni-Path (`rdma_cap_opa_ah`).
    OpaAh = bindings::rdma_helper_protocol_RDMA_HELPER_OPA_AH,
}

/// A copy of the name and the index of a network interface.
pub struct Netdev(bindings::rdma_helper_netdev);

impl Netdev {
    /// Returns the name, which an administrator may have changed since.
    pub fn name(&self) -> &CStr {
        // SAFETY: The helper has filled in a string that ends in the array.
        unsafe { CStr::from_char_ptr(self.0.name.as_ptr()) }
    }

    /// Returns the index, which identifies the interface in its network namespace.
    pub fn index(&self) -> u32 {
        self.0.index.try_into().unwrap_or(0)
    }
}

impl<'a> Port<'a> {
    /// Returns the number of the port.
    pub fn num(&self) -> u32 {
        self.num
    }

    pub(crate) fn device(&self) -> &'a Device {
        self.dev
    }

    /// Queries the attributes of the port (`ib_query_port`). Fails with the driver's error.
    pub fn query(&self, _cx: &Sleepable) -> Result<PortAttr> {
        let mut attr = bindings::ib_port_attr::default();
        // SAFETY: The device is registered by the invariant of `Inner`, and the caller may sleep.
        let ret = unsafe { bindings::ib_query_port(self.dev.as_raw(), self.num, &raw mut attr) };
        to_result(ret)?;
        Ok(PortAttr {
            state: match attr.state {
                bindings::ib_port_state_IB_PORT_DOWN => PortState::Down,
                bindings::ib_port_state_IB_PORT_INIT => PortState::Init,
                bindings::ib_port_state_IB_PORT_ARMED => PortState::Armed,
                bindings::ib_port_state_IB_PORT_ACTIVE => PortState::Active,
                other => PortState::Other(other),
            },
            active_mtu: mtu_bytes(attr.active_mtu),
            gid_table_len: attr.gid_tbl_len.try_into().unwrap_or(0),
            lid: attr.lid,
        })
    }

    /// Returns `true` if the port has a protocol. Any context.
    pub fn has(&self, protocol: Protocol) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`, and has this port.
        let all = unsafe { bindings::rdma_helper_port_protocols(self.dev.as_raw(), self.num) };
        all & protocol as u32 != 0
    }

    /// Returns the network interface of the port, if it has one (`ib_device_get_netdev`).
    pub fn netdev(&self, _cx: &Sleepable) -> Option<Netdev> {
        let mut netdev = bindings::rdma_helper_netdev::default();
        // SAFETY: The device is registered by the invariant of `Inner`.
        let ret = unsafe {
            bindings::rdma_helper_port_netdev(self.dev.as_raw(), self.num, &raw mut netdev)
        };
        (ret == 0).then_some(Netdev(netdev))
    }

    /// Returns the index of a P_Key in the port's table, preferably that of a full member
    /// (`ib_find_cached_pkey`). Any context. Fails with `ENOENT` if the table does not have it.
    pub fn find_pkey(&self, pkey: u16) -> Result<u16> {
        let mut index = 0;
        // SAFETY: The device is registered by the invariant of `Inner`.
        to_result(unsafe {
            bindings::ib_find_cached_pkey(self.dev.as_raw(), self.num, pkey, &raw mut index)
        })?;
        Ok(index)
    }

    /// Returns the GID at an index of the port's table, if it is in use (`rdma_query_gid`). Any
    /// context. Fails with `EINVAL` beyond the table.
    pub fn gid(&self, index: u16) -> Result<Option<Gid>> {
        let mut gid = bindings::ib_gid::default();
        // SAFETY: The device is registered by the invariant of `Inner`.
        let ret = unsafe {
            bindings::rdma_query_gid(self.dev.as_raw(), self.num, index.into(), &raw mut gid)
        };
        match to_result(ret) {
            Ok(()) => Ok(Some(Gid::from_raw(&gid))),
            Err(ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns the entries of the port's table that are in use (`rdma_get_gid_attr`). Any context.
    pub fn gids(&self) -> impl Iterator<Item = GidAttr> + 'a {
        let port = *self;
        let mut indices = 0..=u16::MAX;
        core::iter::from_fn(move || port.next_gid(&mut indices))
    }

    /// Returns the next entry that is in use. Not generic, so that it is not in each ULP.
    fn next_gid(&self, indices: &mut core::ops::RangeInclusive<u16>) -> Option<GidAttr> {
        for index in indices {
            match self.gid_attr(index) {
                Err(EINVAL) => break,
                Ok(attr) => return Some(attr),
                Err(_) => {}
            }
        }
        None
    }

    /// Fails with `ENODATA` if the entry is not in use, `EINVAL` beyond the table.
    fn gid_attr(&self, index: u16) -> Result<GidAttr> {
        // SAFETY: The device is registered by the invariant of `Inner`.
        let raw = unsafe { bindings::rdma_get_gid_attr(self.dev.as_raw(), self.num, index.into()) };
        let raw = NonNull::new(from_err_ptr(raw.cast_mut())?).ok_or(ENODATA)?;
        let dev = self.dev.clone();
        // INVARIANT: The call has taken a reference.
        Ok(GidAttr { raw, dev })
    }
}

/// A GID, which on RoCE is an IPv6 address or a mapped IPv4 address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    pub(crate) fn from_raw(raw: &bindings::ib_gid) -> Self {
        // SAFETY: All members of the union are 16 bytes.
        Self(unsafe { *raw.raw })
    }

    pub(crate) fn to_raw(self) -> bindings::ib_gid {
        bindings::ib_gid {
            raw: ManuallyDrop::new(self.0),
        }
    }

    /// Returns the IP address that the GID is on RoCE.
    pub fn ip(&self) -> IpAddr {
        let ip = Ipv6Addr::from(self.0);
        ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::fmt::Display::fmt(&Ipv6Addr::from(self.0), f)
    }
}

/// The protocol that a GID is for, as `enum ib_gid_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidType {
    /// InfiniBand.
    Ib,
    /// RoCE version 1.
    RoceV1,
    /// RoCE version 2.
    RoceV2,
    /// Anything else, by its C value.
    Other(u32),
}

/// The Ethernet address of a GID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct L2 {
    /// The MAC address.
    pub mac: [u8; 6],
    /// The VLAN, if any.
    pub vlan: Option<u16>,
}

/// A reference to an entry of a GID table (`struct ib_gid_attr`): the entry is not reused
/// meanwhile, but may lose its network interface.
///
/// # Invariants
///
/// `raw` is an entry of a table of `dev`, with a reference that this owns.
pub struct GidAttr {
    raw: NonNull<bindings::ib_gid_attr>,
    dev: Device,
}

// SAFETY: A reference to an entry may be released in any thread.
unsafe impl Send for GidAttr {}
// SAFETY: Only the network interface of the entry changes, which only C reads, under RCU.
unsafe impl Sync for GidAttr {}

impl GidAttr {
    pub(crate) fn as_raw(&self) -> *const bindings::ib_gid_attr {
        self.raw.as_ptr()
    }

    /// Returns the GID.
    pub fn gid(&self) -> Gid {
        // SAFETY: `raw` is an entry by the type invariant, and its GID does not change.
        Gid::from_raw(unsafe { &(*self.as_raw()).gid })
    }

    /// Returns the protocol of the GID.
    pub fn gid_type(&self) -> GidType {
        // SAFETY: `raw` is an entry by the type invariant, and its type does not change.
        match unsafe { (*self.as_raw()).gid_type } {
            bindings::ib_gid_type_IB_GID_TYPE_IB => GidType::Ib,
            bindings::ib_gid_type_IB_GID_TYPE_ROCE => GidType::RoceV1,
            bindings::ib_gid_type_IB_GID_TYPE_ROCE_UDP_ENCAP => GidType::RoceV2,
            other => GidType::Other(other),
        }
    }

    /// Returns the index of the entry in its port's table.
    pub fn index(&self) -> u16 {
        // SAFETY: `raw` is an entry by the type invariant, and its index does not change.
        unsafe { (*self.as_raw()).index }
    }

    /// Returns the number of the port.
    pub fn port_num(&self) -> u32 {
        // SAFETY: `raw` is an entry by the type invariant, and its port does not change.
        unsafe { (*self.as_raw()).port_num }
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.dev
    }

    /// Returns the first global IPv4 address of the GID's interface, if there is one.
    fn ipv4(&self) -> Option<Ipv4Addr> {
        // SAFETY: `raw` is an entry by the type invariant; the helper takes the RCU read lock.
        let ip = unsafe { bindings::rdma_helper_gid_ipv4(self.raw.as_ptr()) };
        (ip != 0).then(|| Ipv4Addr::from(ip))
    }

    /// Returns the MAC address and the VLAN of the GID (`rdma_read_gid_l2_fields`). Any context.
    /// Fails with `ENODEV` if the GID has no network interface.
    pub fn l2(&self) -> Result<L2> {
        // C's for no VLAN.
        const NO_VLAN: u16 = 0xffff;

        let mut vlan = NO_VLAN;
        let mut mac = [0; 6];
        // SAFETY: `raw` is an entry by the type invariant; a MAC address has six bytes.
        to_result(unsafe {
            bindings::rdma_helper_gid_l2(self.raw.as_ptr(), &raw mut vlan, mac.as_mut_ptr())
        })?;
        Ok(L2 {
            mac,
            vlan: (vlan != NO_VLAN).then_some(vlan),
        })
    }
}

impl Drop for GidAttr {
    fn drop(&mut self) {
        // SAFETY: The reference is this value's by the type invariant, and is not used again.
        unsafe { bindings::rdma_put_gid_attr(self.raw.as_ptr()) };
    }
}
