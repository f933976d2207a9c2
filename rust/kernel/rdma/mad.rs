// SPDX-License-Identifier: GPL-2.0

//! Management datagrams (MADs): 256 bytes to and from queue pair 1 of a port.
//!
//! An [`Agent`] sends requests of its [`Class`] and waits for the replies, and receives the
//! requests of others for the [`Method`]s that it serves. Any number of threads may wait at one
//! agent. MADs have one segment: RMPP is not supported. See Documentation/mad.rst.
//!
//! # Examples
//!
//! ```
//! use rdma::{device::{Gid, GidAttr}, mad::*, prelude::*};
//!
//! /// Returns the first byte of the answer to a request.
//! fn ask(from: &GidAttr, to: Gid, cx: &Sleepable) -> Result<u8> {
//!     let class = Class::new(0x09, 1); // One of those for vendors.
//!     let (dev, port) = (from.device(), from.port_num());
//!     let agent = Agent::register(dev, port, class, &[], 0, cx)?;
//!     let peer = Peer::new(&agent, from, to, cx)?;
//!     let message = Message {
//!         method: Method::GET,
//!         attr_id: 1,
//!         attr_mod: 0,
//!         payload: b"hello",
//!     };
//!     agent.send(&peer, &message, cx)?; // Does not wait for the answer, which is dropped.
//!     let reply = agent.request(&peer, &message, 100, 3, cx)?;
//!     pr_info!("attribute {}\n", reply.header().attr_id.get());
//!     reply.payload().first().copied().ok_or(EIO)
//! }
//! ```
//!
//! C header: [`include/rdma/ib_mad.h`](srctree/include/rdma/ib_mad.h)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    ah,
    cm::InCallback,
    completion::wait_event,
    deferred,
    device::{
        self,
        Device, //
    },
    objects,
    prelude::internal::*,
    refs,
    removal, //
};
use kernel::{
    sync,
    workqueue, //
};
use zerocopy::byteorder::big_endian;
use zerocopy_derive::{
    Immutable,
    KnownLayout, //
};

const MAD_LEN: usize = 256;

/// The header that all MADs begin with (`struct ib_mad_hdr`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// The version of the format of MADs, 1.
    pub base_version: u8,
    /// The management class.
    pub mgmt_class: u8,
    /// The version of the class.
    pub class_version: u8,
    /// The operation on the attribute.
    pub method: Method,
    /// In a reply, 0 for success.
    pub status: big_endian::U16,
    /// Defined by the class.
    pub class_specific: big_endian::U16,
    /// The transaction id, by which a reply is matched to its request.
    pub tid: big_endian::U64,
    /// The attribute.
    pub attr_id: big_endian::U16,
    /// Zero.
    pub resv: big_endian::U16,
    /// The attribute modifier.
    pub attr_mod: big_endian::U32,
}

/// A method: the operation on an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Method(pub u8);

impl Method {
    const RESP: u8 = 0x80;

    /// Reads an attribute (`IB_MGMT_METHOD_GET`). The MAD layer answers where no agent serves it.
    pub const GET: Self = Self(0x01);
    /// Writes an attribute (`IB_MGMT_METHOD_SET`). Answered as [`Method::GET`].
    pub const SET: Self = Self(0x02);
    /// Sends a datagram (`IB_MGMT_METHOD_SEND`).
    pub const SEND: Self = Self(0x03);
    /// Reports an event to a manager (`IB_MGMT_METHOD_TRAP`).
    pub const TRAP: Self = Self(0x05);
    /// Forwards a trap (`IB_MGMT_METHOD_REPORT`).
    pub const REPORT: Self = Self(0x06);
    /// Answers a trap (`IB_MGMT_METHOD_TRAP_REPRESS`).
    pub const TRAP_REPRESS: Self = Self(0x07);

    const fn is_response(self) -> bool {
        self.0 & Self::RESP != 0 || self.0 == Self::TRAP_REPRESS.0
    }

    const fn response(self) -> Self {
        match self {
            Self::TRAP => Self::TRAP_REPRESS,
            Self(method) => Self(method | Self::RESP),
        }
    }
}

/// A management class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    id: u8,
    version: u8,
    oui: [u8; 3],
}

impl Class {
    /// The offset of the vendor's OUI in the MADs that have one, in bytes.
    const OUI_AT: usize = 37;

    /// Returns a class, such as 0x06 (`IB_MGMT_CLASS_DEVICE_MGMT`) or one of vendors, 0x09 to 0x0f.
    pub const fn new(id: u8, version: u8) -> Self {
        Self {
            id,
            version,
            oui: [0; 3],
        }
    }

    /// Returns a class that several vendors share, 0x30 to 0x4f, with the OUI of one; of version 1.
    pub const fn with_oui(id: u8, oui: [u8; 3]) -> Self {
        Self {
            id,
            version: 1,
            oui,
        }
    }

    /// Returns the offset of the payload in bytes (`ib_get_mad_data_offset`).
    fn payload_at(self) -> usize {
        // SAFETY: The function has no preconditions: it returns an offset for any class.
        let offset = unsafe { bindings::ib_get_mad_data_offset(self.id) };
        usize::try_from(offset).map_or(MAD_LEN, |offset| offset.min(MAD_LEN))
    }
}

/// A message to be sent. The agent adds its class and the transaction id.
#[derive(Clone, Copy)]
pub struct Message<'a> {
    /// The method.
    pub method: Method,
    /// The attribute.
    pub attr_id: u16,
    /// The attribute modifier.
    pub attr_mod: u32,
    /// The payload. The rest of the MAD is zero.
    pub payload: &'a [u8],
}

impl Message<'_> {
    /// Writes the MAD into memory that is zero. Fails with `EMSGSIZE` if the payload is too long.
    fn write(&self, mad: &mut [u8; MAD_LEN], class: Class, status: u16, tid: u64) -> Result {
        let header = Header {
            base_version: bindings::IB_MGMT_BASE_VERSION as u8,
            mgmt_class: class.id,
            class_version: class.version,
            method: self.method,
            status: status.into(),
            class_specific: 0.into(),
            tid: tid.into(),
            attr_id: self.attr_id.into(),
            resv: 0.into(),
            attr_mod: self.attr_mod.into(),
        };
        let mut put = |at: usize, bytes: &[u8]| {
            let (_, rest) = mad.split_at_mut_checked(at).ok_or(EMSGSIZE)?;
            let to = rest.get_mut(..bytes.len()).ok_or(EMSGSIZE)?;
            to.copy_from_slice(bytes);
            Ok(())
        };
        put(class.payload_at(), self.payload)?;
        put(0, header.as_bytes())?;
        match class.id.into() {
            bindings::IB_MGMT_CLASS_VENDOR_RANGE2_START
                ..=bindings::IB_MGMT_CLASS_VENDOR_RANGE2_END => put(Class::OUI_AT, &class.oui),
            _ => Ok(()),
        }
    }
}

/// A destination of MADs: QP 1 of a port, or the sender of a MAD, as seen from a port of this host.
/// A counted handle.
#[derive(Clone)]
pub struct Peer {
    ah: deferred::Deferred<ah::OwnedAh<refs::Ref<device::Inner>>>,
    port: u32,
    qpn: u32,
    pkey_index: u16,
    /// The MAD layer can match replies to requests: it cannot over IPv4.
    matches: bool,
}

impl Peer {
    /// Creates the destination QP 1 at the GID `to`, as seen from the GID `from` of the agent's
    /// port (`rdma_create_ah`), which may take a second. Fails with `EINVAL` if `from` is not of
    /// that port; `ENODEV` or `ECANCELED` if the agent has ended; or as [`ah::Ah::resolve`].
    pub fn new(
        agent: &Agent,
        from: &device::GidAttr,
        to: device::Gid,
        cx: &Sleepable,
    ) -> Result<Self> {
        if from.device().as_raw() != agent.device().as_raw() || from.port_num() != agent.port {
            return Err(EINVAL);
        }
        let source = ah::Source::synthetic(from, to)?;
        let matches = !ah::is_ipv4(from);
        // SAFETY: `Source` has both, and has made the header for this completion.
        unsafe { Self::create(agent, &source.wc, source.header(), matches, cx) }
    }

    /// Creates an address handle (`ib_create_ah_from_wc`). Never inlined: see `Reserved::fill`.
    ///
    /// # Safety
    ///
    /// `header` is the valid header of the datagram of `wc`.
    #[inline(never)]
    unsafe fn create(
        agent: &Agent,
        wc: &bindings::ib_wc,
        header: *const bindings::ib_grh,
        matches: bool,
        _cx: &Sleepable,
    ) -> Result<Self> {
        let reserved = deferred::Deferred::reserve()?;
        let reference = agent.device().get(refs::ObjectKind::Ah);
        let _registered = agent.get()?;
        // SAFETY: The agent is registered while there is the reference, so it has a QP with a PD,
        // which stay until the device is removed. The caller promises that the header is that of
        // `wc`.
        let raw = unsafe {
            let pd = (*(*agent.as_raw()).qp).pd;
            bindings::ib_create_ah_from_wc(pd, wc, header, agent.port)
        };
        let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
        Ok(Self {
            // SAFETY: The address handle was just created, and the reference keeps the device.
            ah: reserved.fill(unsafe { ah::OwnedAh::new(raw, reference) }),
            port: agent.port,
            qpn: wc.src_qp,
            pkey_index: wc.pkey_index,
            matches,
        })
    }
}

/// A MAD that was received: a reply, or the request of a peer. It keeps neither agent nor device.
///
/// # Invariants
///
/// `raw` is a complete MAD, owned by this, that port `port` has received, of the device whose
/// address was `dev`.
pub struct Received {
    raw: NonNull<bindings::ib_mad_recv_wc>,
    dev: *const bindings::ib_device,
    port: u32,
}

// SAFETY: The MAD is plain memory that this owns; the device is only compared.
unsafe impl Send for Received {}
// SAFETY: The MAD does not change by the type invariant; the device is only compared.
unsafe impl Sync for Received {}

impl Received {
    fn raw(&self) -> &bindings::ib_mad_recv_wc {
        // SAFETY: `raw` is a MAD that this owns by the type invariant, and does not change.
        unsafe { self.raw.as_ref() }
    }

    fn bytes(&self) -> &[u8; MAD_LEN] {
        // SAFETY: The MAD is complete by the type invariant, so its buffer has this length.
        unsafe { &*self.raw().recv_buf.__bindgen_anon_1.mad.cast() }
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        // SAFETY: The header's alignment is 1, it may have any bytes, and is shorter than a MAD.
        unsafe { &*self.bytes().as_ptr().cast() }
    }

    /// Returns the header's status: 0 for success.
    pub fn status(&self) -> u16 {
        self.header().status.get()
    }

    /// Returns what follows the header of the MAD's class. Nothing of it can be trusted.
    pub fn payload(&self) -> &[u8] {
        let at = Class::new(self.header().mgmt_class, 0).payload_at();
        self.bytes().get(at..).unwrap_or(&[])
    }

    fn wc(&self) -> &bindings::ib_wc {
        // SAFETY: The completion is beside the MAD, but for QP 0, which `Agent::register` refuses.
        unsafe { &*self.raw().wc }
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // SAFETY: The MAD is this value's by the type invariant, and is not used again.
        unsafe { bindings::ib_free_recv_mad(self.raw.as_ptr()) };
    }
}

/// A registration with the MAD layer.
///
/// # Invariants
///
/// `raw` is registered, with `queue` as its context, until [`Self::end`] unregisters it, once,
/// after it has killed `refs` and waited for them.
#[pin_data]
struct Registered {
    raw: NonNull<bindings::ib_mad_agent>,
    #[pin]
    queue: MadQueue,
    #[pin]
    refs: refs::Refs,
    #[pin]
    ended: sync::Mutex<bool>,
    #[pin]
    end: workqueue::Work<Self>,
    index: removal::Index,
    device: Device,
    // Dropped last: the client may be gone after that.
    object: objects::Object,
}

kernel::impl_has_work! {
    impl HasWork<Self> for Registered { self.end }
}

impl workqueue::WorkItem for Registered {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        // SAFETY: Work items run in process context.
        let cx = unsafe { Sleepable::assume() };
        this.end(ENODEV, &cx);
    }
}

// SAFETY: An agent may be used and unregistered from any thread, and the rest is `Send`.
unsafe impl Send for Registered {}
// SAFETY: An agent may be used by several threads at once: the MAD layer locks it.
unsafe impl Sync for Registered {}

impl Registered {
    /// Unregisters the agent, once: all waits fail with `reason`, and its handlers have returned.
    fn end(&self, reason: Error, cx: &Sleepable) {
        let mut ended = self.ended.lock();
        if core::mem::replace(&mut *ended, true) {
            return;
        }
        self.queue.close(reason);
        self.queue.clear();
        objects::kill_and_wait(self, self, cx);
        // SAFETY: The agent is registered by the type invariant, as `ended` was false, and there is
        // no reference that keeps it so.
        unsafe { bindings::ib_unregister_mad_agent(self.raw.as_ptr()) };
    }
}

impl refs::Owner for Registered {
    fn refs(&self) -> &refs::Refs {
        &self.refs
    }
}

impl fmt::Display for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MAD agent")
    }
}

impl removal::OnRemoval for Registered {
    fn index(&self) -> &removal::Index {
        &self.index
    }

    fn gone(self: Arc<Self>) {
        self.queue.close(ENODEV);
        self.queue.clear();
        // The MAD layer ends the waits for replies when the agent is unregistered.
        let _ = deferred::CoreWorkqueue::get().enqueue(self);
    }

    fn removed(&self, cx: &Sleepable) {
        self.end(ENODEV, cx);
    }
}

impl deferred::Teardown for Arc<Registered> {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn teardown(&self, cx: &Sleepable) -> Result {
        self.device.inner().removal.remove(&**self);
        self.end(ECANCELED, cx);
        Ok(())
    }
}

/// Sends and receives MADs of one class through one port (`struct ib_mad_agent`). A work item
/// unregisters it.
pub struct Agent {
    state: deferred::Deferred<Arc<Registered>>,
    class: Class,
    port: u32,
    hi_tid: u32,
    next_tid: sync::atomic::Atomic<u32>,
}

impl Agent {
    /// Registers an agent of QP 1 of a port (`ib_register_mad_agent`). It receives the requests of
    /// others for `methods`, of which at most `backlog` are queued for [`Agent::recv`]; more are
    /// dropped. An agent that serves none receives replies only.
    ///
    /// # Errors
    ///
    /// - `EINVAL` if there is no such class or port, or if one of the methods is a reply's or
    ///   served by another agent.
    /// - `EPROTONOSUPPORT` if the port has no MADs, and `ENODEV` if the device is being removed.
    /// - `ENOMEM`.
    pub fn register(
        dev: &Device,
        port: u32,
        class: Class,
        methods: &[Method],
        backlog: usize,
        _cx: &Sleepable,
    ) -> Result<Self> {
        const BITS: usize = c_ulong::BITS as usize;

        // The C function uses the port before it checks it.
        dev.port(port).ok_or(EINVAL)?;
        // These are QP 0's, refused by C only if methods are served. They have no completion.
        if matches!(
            u32::from(class.id),
            bindings::IB_MGMT_CLASS_SUBN_LID_ROUTED | bindings::IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE
        ) {
            return Err(EINVAL);
        }
        let mut request = bindings::ib_mad_reg_req {
            mgmt_class: class.id,
            mgmt_class_version: class.version,
            oui: class.oui,
            ..Default::default()
        };
        for method in methods {
            let word = method.0 as usize / BITS;
            let bit = method.0 as usize % BITS;
            // The method of a reply is in no word.
            *request.method_mask.get_mut(word).ok_or(EINVAL)? |= 1 << bit;
        }
        let request = match methods {
            [] => ptr::null_mut(),
            _ => &raw mut request,
        };
        let reserved = deferred::Deferred::reserve()?;
        let object = dev.object(refs::ObjectKind::Mad);
        let init = try_pin_init!(&this in Registered {
            queue <- MadQueue::new(backlog)?,
            refs <- refs::Refs::new(),
            ended <- kernel::new_mutex!(false),
            end <- kernel::new_work!("rdma::mad::Agent::end"),
            index: removal::Index::new(),
            device: dev.clone(),
            object,
            // Last, as the handlers may be called from here on.
            // SAFETY: The device is registered by the invariant of `device::Inner`, and has the
            // port. The request is copied. The queue was initialised above, and outlives the agent:
            // nothing of this initialiser can fail after this, and the teardown
            // unregisters the agent.
            // INVARIANT: The agent is registered with the queue as its context.
            raw: NonNull::new(from_err_ptr(unsafe {
                bindings::ib_register_mad_agent(
                    dev.as_raw(),
                    port,
                    bindings::ib_qp_type_IB_QPT_GSI,
                    request,
                    0,
                    Some(on_sent),
                    Some(on_recv),
                    (&raw mut (*this.as_ptr()).queue).cast(),
                    0,
                )
            })?)
            .ok_or(ENOMEM)?,
        });
        let registered = Arc::pin_init(init, GFP_KERNEL)?;
        // SAFETY: The agent is registered by the type invariant. The field is constant.
        let hi_tid = unsafe { (*registered.raw.as_ptr()).hi_tid };
        let state = reserved.fill(registered.clone());
        dev.inner().removal.add(registered)?;
        Ok(Self {
            state,
            class,
            port,
            hi_tid,
            next_tid: sync::atomic::Atomic::new(0),
        })
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.state.device
    }

    fn as_raw(&self) -> *mut bindings::ib_mad_agent {
        self.state.raw.as_ptr()
    }

    /// Takes a reference that keeps the agent registered: [`Registered::end`] waits for it.
    fn get(&self) -> Result<refs::Ref<Registered>> {
        let registered = NonNull::from(&**self.state);
        // SAFETY: The registration is ended before it is dropped, by the teardown of the agent, and
        // that waits for references.
        unsafe { refs::Ref::try_get(registered, refs::ObjectKind::Mad) }.map_err(|e| self.reason(e))
    }

    /// Returns the reason for which the agent was ended, or `error` if it was not.
    fn reason(&self, error: Error) -> Error {
        let closed = self.state.queue.mads.lock().closed;
        closed.unwrap_or(error)
    }

    /// Takes the MAD that came first, or waits for one: for `timeout_ms` milliseconds, or without a
    /// limit if that is `None`. Does not wait if it is 0. Fails with `ETIMEDOUT`, `ERESTARTSYS` on
    /// a signal, `ENODEV` if the device goes, or `ECANCELED` after [`Agent::stop`].
    pub fn recv(&self, timeout_ms: Option<u32>, cx: &Sleepable) -> Result<Received> {
        self.state.queue.pop(timeout_ms, cx)
    }

    /// Unregisters the agent (`ib_unregister_mad_agent`): waits and later calls fail with
    /// `ECANCELED`. Fails with `EDEADLK` in a callback of a connection manager, which a timeout
    /// that this waits for may have called; the agent then stays registered.
    pub fn stop(&self, cx: &Sleepable) -> Result {
        InCallback::refuse()?;
        self.state.end(ECANCELED, cx);
        Ok(())
    }

    /// Sends a request and waits for the reply, at most `timeout_ms` milliseconds each time that it
    /// is sent: once, and up to `retries` times again. See [`Received::status`].
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT` if no reply comes, and `EIO` if the request cannot be sent.
    /// - `ERESTARTSYS` on a signal, `ECANCELED` after [`Agent::stop`], and `ENODEV` if the device
    ///   is being removed.
    /// - `EINVAL` without a timeout, for a method that is a reply's, or if the peer is not seen
    ///   from the agent's port.
    /// - `EMSGSIZE` if the payload is too long, and `ENOMEM`.
    /// - `EPROTONOSUPPORT` if the peer has an IPv4 address.
    /// - `EDEADLK` in a callback of a connection manager.
    pub fn request(
        &self,
        peer: &Peer,
        message: &Message<'_>,
        timeout_ms: u32,
        retries: u32,
        cx: &Sleepable,
    ) -> Result<Received> {
        InCallback::refuse()?;
        if timeout_ms == 0 || message.method.is_response() {
            return Err(EINVAL);
        }
        if !peer.matches {
            return Err(EPROTONOSUPPORT);
        }
        let request = self.post(peer, self.tid(), 0, message, timeout_ms, retries)?;
        request.wait(cx).map_err(|error| match error {
            ERESTARTSYS => error,
            _ => self.reason(error),
        })
    }

    /// Sends a MAD without waiting for a reply. It may be lost. Fails with `ENODEV`, `ECANCELED`,
    /// `EINVAL`, `EMSGSIZE` and `ENOMEM` as [`Agent::request`], or with the driver's error.
    pub fn send(&self, peer: &Peer, message: &Message<'_>, _cx: &Sleepable) -> Result {
        self.post(peer, self.tid(), 0, message, 0, 0).map(drop)
    }

    /// Answers a request, with a status that is 0 for success. The answer may be lost. Fails as
    /// [`Agent::send`] and [`Peer::new`]; and with `EINVAL` if the MAD is a reply, of another
    /// class, or was not received by this port.
    pub fn reply(&self, to: &Received, status: u16, payload: &[u8], cx: &Sleepable) -> Result {
        let header = to.header();
        // SAFETY: The header is that of a MAD, which the function only reads.
        if unsafe { bindings::ib_response_mad(ptr::from_ref(header).cast()) } != 0
            || header.mgmt_class != self.class.id
            || (to.dev, to.port) != (self.device().as_raw().cast_const(), self.port)
        {
            return Err(EINVAL);
        }
        let message = Message {
            method: header.method.response(),
            attr_id: header.attr_id.get(),
            attr_mod: header.attr_mod.get(),
            payload,
        };
        // SAFETY: The header is in the MAD, in front of it.
        let peer = unsafe { Peer::create(self, to.wc(), to.raw().recv_buf.grh, false, cx) }?;
        self.post(&peer, header.tid.get(), status, &message, 0, 0)
            .map(drop)
    }

    /// Returns a transaction id, by which the MAD layer finds the agent when the reply comes.
    fn tid(&self) -> u64 {
        let low = self.next_tid.fetch_add(1, sync::atomic::Relaxed);
        u64::from(self.hi_tid) << 32 | u64::from(low)
    }

    fn post(
        &self,
        peer: &Peer,
        tid: u64,
        status: u16,
        message: &Message<'_>,
        timeout_ms: u32,
        retries: u32,
    ) -> Result<Arc<Request>> {
        // SAFETY: The address handle is valid while the peer is. Its device does not change.
        let device = unsafe { (*peer.ah.as_raw()).device };
        if device != self.device().as_raw() || peer.port != self.port {
            return Err(EINVAL);
        }
        let request = Arc::pin_init(
            try_pin_init!(Request {
                buf <- kernel::new_spinlock!(None),
                reply <- MadQueue::new(1)?,
                peer: peer.clone(),
            }),
            GFP_KERNEL,
        )?;
        let _registered = self.get()?;
        // SAFETY: The agent is registered while there is the reference.
        let mut buf = unsafe { SendBuf::new(self, peer) }?;
        message.write(buf.mad(), self.class, status, tid)?;
        request.post(buf, timeout_ms.try_into()?, retries.try_into()?)?;
        Ok(request)
    }
}

/// A MAD to be sent, as its `struct ib_mad_send_buf`.
///
/// # Invariants
///
/// A buffer that this owns, of an agent that is registered.
struct SendBuf(NonNull<bindings::ib_mad_send_buf>);

// SAFETY: A buffer may be used and freed from any thread.
unsafe impl Send for SendBuf {}

impl SendBuf {
    /// # Safety
    ///
    /// The agent is registered.
    unsafe fn new(agent: &Agent, peer: &Peer) -> Result<Self> {
        let header = agent.class.payload_at();
        // SAFETY: The caller promises that the agent is registered. It stays so while it has
        // buffers.
        let raw = from_err_ptr(unsafe {
            bindings::ib_create_send_mad(
                agent.as_raw(),
                peer.qpn,
                peer.pkey_index,
                0,
                header.try_into()?,
                MAD_LEN.saturating_sub(header).try_into()?,
                bindings::GFP_KERNEL,
                bindings::IB_MGMT_BASE_VERSION as u8,
            )
        })?;
        // INVARIANT: The buffer was just created.
        Ok(Self(NonNull::new(raw).ok_or(ENOMEM)?))
    }

    /// Returns the MAD, whose memory is zero at first.
    fn mad(&mut self) -> &mut [u8; MAD_LEN] {
        // SAFETY: By the type invariant this is a buffer, whose MAD has this length, as `new` has
        // asked for. It is exclusive before it is posted, and posting consumes it.
        unsafe { &mut *self.0.as_ref().mad.cast() }
    }
}

impl Drop for SendBuf {
    fn drop(&mut self) {
        // SAFETY: The buffer is this value's by the type invariant, and is not used again.
        unsafe { bindings::ib_free_send_mad(self.0.as_ptr()) };
    }
}

/// A posted MAD. The send buffer's context is a reference to this, which the send handler takes.
#[pin_data]
struct Request {
    /// The posted buffer, until the send handler is called for it.
    #[pin]
    buf: sync::SpinLock<Option<SendBuf>>,
    /// Closed by the send handler, which the MAD layer calls after it has received the reply.
    #[pin]
    reply: MadQueue,
    /// Keeps the address handle that the buffer points to.
    peer: Peer,
}

impl Request {
    /// Posts a MAD (`ib_post_send_mad`).
    fn post(self: &Arc<Self>, buf: SendBuf, timeout_ms: c_int, retries: c_int) -> Result {
        let raw = buf.0.as_ptr();
        // SAFETY: `raw` is a buffer by the invariant of `SendBuf`, and is not posted yet.
        unsafe {
            (*raw).ah = self.peer.ah.as_raw();
            (*raw).timeout_ms = timeout_ms;
            (*raw).retries = retries;
            (*raw).context[0] = Arc::into_raw(self.clone()).cast_mut().cast();
        }
        *self.buf.lock() = Some(buf);
        // SAFETY: `raw` is a buffer by the invariant of `SendBuf`, which this may free.
        let posted = to_result(unsafe { bindings::ib_post_send_mad(raw, ptr::null_mut()) });
        posted.inspect_err(|_| {
            // SAFETY: The context was set above; no send handler is called for a refused buffer.
            unsafe { Self::take(raw) }.complete(bindings::ib_wc_status_IB_WC_GENERAL_ERR);
        })
    }

    /// Takes back the reference that a posted buffer has.
    ///
    /// # Safety
    ///
    /// The buffer was posted by [`Request::post`]. Called once for it.
    unsafe fn take(raw: *mut bindings::ib_mad_send_buf) -> Arc<Self> {
        // SAFETY: `post` has set the context to a pointer from `into_raw`; this is the only call.
        unsafe { Arc::from_raw((*raw).context[0].cast()) }
    }

    /// Ends the request, of which the MAD layer has called the send handler.
    fn complete(&self, status: bindings::ib_wc_status) {
        let buf = self.buf.lock().take();
        drop(buf);
        self.reply.close(match status {
            bindings::ib_wc_status_IB_WC_RESP_TIMEOUT_ERR => ETIMEDOUT,
            _ => EIO,
        });
    }

    /// Waits for the reply, or until the request was sent often enough. On a signal it is canceled.
    fn wait(&self, cx: &Sleepable) -> Result<Received> {
        let reply = self.reply.pop(None, cx);
        if let (Err(ERESTARTSYS), Some(buf)) = (&reply, &*self.buf.lock()) {
            // SAFETY: By the invariant of `SendBuf` this is a buffer, and is not freed while it is
            // locked. This is `ib_cancel_mad()`, which marks the request.
            unsafe { bindings::ib_modify_mad(buf.0.as_ptr(), 0) };
        }
        reply
    }
}

/// The MADs in a [`MadQueue`], at most as many as the vector was made for: a peer cannot make it
/// grow.
struct Mads {
    queued: KVec<Received>,
    closed: Option<Error>,
}

/// The reply to a request, or the unsolicited MADs of an agent, which many threads may wait for.
#[pin_data]
struct MadQueue {
    #[pin]
    mads: sync::SpinLock<Mads>,
    #[pin]
    changed: sync::CondVar,
}

impl MadQueue {
    fn new(capacity: usize) -> Result<impl PinInit<Self>> {
        let queued = KVec::with_capacity(capacity, GFP_KERNEL | __GFP_NOWARN)?;
        Ok(pin_init!(Self {
            mads <- kernel::new_spinlock!(Mads { queued, closed: None }),
            changed <- kernel::new_condvar!(),
        }))
    }

    /// Adds a MAD and wakes one thread, or drops the MAD if the queue is full or closed.
    fn push(&self, mad: Received) {
        let pushed = {
            let mut mads = self.mads.lock();
            match mads.closed {
                None => mads.queued.push_within_capacity(mad).map_err(|e| e.0),
                Some(_) => Err(mad),
            }
        };
        if pushed.is_ok() {
            self.changed.notify_one();
        }
    }

    fn pop(&self, timeout_ms: Option<u32>, cx: &Sleepable) -> Result<Received> {
        // A MAD before anything else, as a thread that was woken for one has to take it.
        let take = |mads: &mut Mads| {
            let mad = mads.queued.remove(0);
            mad.map_or_else(|_| mads.closed.map(Err), |mad| Some(Ok(mad)))
        };
        wait_event(&self.changed, &mut self.mads.lock(), timeout_ms, take, cx)?
    }

    /// Drops the MADs that are still to come, and ends all waits for them with `reason`.
    fn close(&self, reason: Error) {
        self.mads.lock().closed = Some(reason);
        self.changed.notify_all();
    }

    fn clear(&self) {
        let queued = core::mem::take(&mut self.mads.lock().queued);
        drop(queued);
    }
}

/// `ib_mad_agent.recv_handler`: receives the reply to `buf`, or an unsolicited MAD.
///
/// # Safety
///
/// Called by the MAD layer for an agent of [`Agent::register`].
unsafe extern "C" fn on_recv(
    agent: *mut bindings::ib_mad_agent,
    buf: *mut bindings::ib_mad_send_buf,
    mad: *mut bindings::ib_mad_recv_wc,
) {
    let Some(mad) = NonNull::new(mad) else {
        return;
    };
    // SAFETY: The agent is alive while its handler runs.
    let agent = unsafe { &*agent };
    // INVARIANT: The MAD is the handler's, and the MAD layer has ended its DMA mapping.
    let mad = Received {
        raw: mad,
        dev: agent.device,
        port: agent.port_num.into(),
    };
    if buf.is_null() {
        // SAFETY: By the invariant of `Registered` the agent's context is a queue that outlives it.
        unsafe { &*agent.context.cast::<MadQueue>() }.push(mad);
        return;
    }
    // SAFETY: `Request::post` has set the context. The send handler takes it back later.
    let request = unsafe { &*(*buf).context[0].cast::<Request>() };
    request.reply.push(mad);
}

/// `ib_mad_agent.send_handler`: ends a request.
///
/// # Safety
///
/// Called by the MAD layer for an agent of this crate, once for each buffer that was posted.
unsafe extern "C" fn on_sent(
    _agent: *mut bindings::ib_mad_agent,
    wc: *mut bindings::ib_mad_send_wc,
) {
    // SAFETY: Both are valid during this call, which is the only one for the buffer.
    unsafe { Request::take((*wc).send_buf).complete((*wc).status) };
}
