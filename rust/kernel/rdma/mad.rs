// SPDX-License-Identifier: GPL-2.0

//! Management datagrams (MADs): 256 bytes to and from queue pair 1 of a port.
//!
//! An [`Agent`] sends requests of its [`Class`] and waits for the replies, and receives the
//! requests of others for the [`Methods`] that it serves. Any number of threads may wait at one
//! agent at once: each for the reply to its own request, which the MAD layer finds by its
//! transaction id, or in [`Agent::recv`] for whatever comes, which goes to one of them.
//!
//! A wait ends with the MAD, with `ETIMEDOUT`, with `ERESTARTSYS` on a signal, or with `ENODEV` or
//! `ECANCELED` when the device is removed or the agent is stopped. No code of the ULP runs in the
//! MAD layer's own context.
//!
//! MADs have one segment: RMPP is not supported.
//!
//! # Examples
//!
//! ```
//! use rdma::{device::{Gid, GidAttr}, mad::*, prelude::*};
//!
//! /// Returns the first byte of the answer to a request.
//! fn ask(from: &GidAttr, to: Gid, cx: &Sleepable) -> Result<u8> {
//!     let class = Class::with_oui(0x30, [0x00, 0x00, 0x5e]);
//!     let (dev, port) = (from.device(), from.port_num());
//!     let agent = Agent::register(dev, port, class, Methods::NONE, 0, cx)?;
//!     let peer = Peer::new(&agent, from, to, cx)?;
//!     let message = Message {
//!         method: Method::GET,
//!         attr_id: 1,
//!         attr_mod: 0,
//!         payload: b"hello",
//!     };
//!     let reply = agent.request(&peer, &message, 100, 3, cx)?;
//!     reply.payload().first().copied().ok_or(EIO)
//! }
//! # let _ = ask;
//! # Ok::<(), Error>(())
//! ```
//!
//! C header: [`include/rdma/ib_mad.h`](srctree/include/rdma/ib_mad.h)

pub(crate) mod agent;

pub use agent::Agent;

use crate::{
    ah,
    bindings,
    context::Sleepable,
    deferred::Deferred,
    device::{
        Device,
        Gid,
        GidAttr, //
    },
    refs::{
        Kind, //
        Ref,
    }, //
};
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*,
    sync::Arc, //
};
use zerocopy::byteorder::big_endian;
use zerocopy_derive::{
    Immutable,
    KnownLayout, //
};

/// The length of a MAD, in bytes.
pub const MAD_LEN: usize = 256;

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
    /// The [`Method`].
    pub method: u8,
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

impl Header {
    /// The length of the header, in bytes.
    pub const LEN: usize = size_of::<Self>();

    /// Returns `true` if this is a reply (`ib_response_mad`).
    pub fn is_response(&self) -> bool {
        // C's header is aligned as its widest field is, which this is not.
        let aligned: [u64; Self::LEN / size_of::<u64>()] = zerocopy::transmute!(*self);
        // SAFETY: The C header has the same layout, and `u64` is its widest field.
        unsafe { bindings::ib_response_mad(aligned.as_ptr().cast()) != 0 }
    }
}

/// A method: the operation on an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method(pub u8);

impl Method {
    const RESP: u8 = 0x80;

    /// Reads an attribute (`IB_MGMT_METHOD_GET`). If no agent serves it, the peer's MAD layer
    /// answers with an error.
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

    /// Returns the method of a reply to this one.
    pub const fn response(self) -> Self {
        match self {
            Self::TRAP => Self::TRAP_REPRESS,
            Self(method) => Self(method | Self::RESP),
        }
    }
}

/// A set of methods.
#[derive(Clone, Copy)]
pub struct Methods(u128);

impl Methods {
    /// No method: the agent receives only replies.
    pub const NONE: Self = Self(0);

    /// Adds a method. Those of replies cannot be served, and are left out.
    pub const fn with(self, method: Method) -> Self {
        match method.0 {
            method @ 0..0x80 => Self(self.0 | 1 << method),
            _ => self,
        }
    }

    const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Writes the set as C's bitmap.
    fn write_mask(self, mask: &mut [c_ulong]) {
        let mut left = self.0;
        for word in mask {
            *word = left as c_ulong;
            left >>= c_ulong::BITS;
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
    /// The first class whose MADs name a vendor.
    const FIRST_WITH_OUI: u8 = 0x30;
    /// The last one.
    const LAST_WITH_OUI: u8 = 0x4f;
    /// The offset of the vendor's OUI in those, in bytes.
    const OUI_AT: usize = 37;

    /// Returns a class by its number, such as 0x06 (`IB_MGMT_CLASS_DEVICE_MGMT`) or one of those for
    /// vendors, 0x09 to 0x0f.
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

    /// Returns the offset of the payload in the MADs of this class, in bytes
    /// (`ib_get_mad_data_offset`).
    pub fn payload_at(self) -> usize {
        // SAFETY: The function takes any class.
        let offset = unsafe { bindings::ib_get_mad_data_offset(self.id) };
        usize::try_from(offset).map_or(MAD_LEN, |offset| offset.min(MAD_LEN))
    }

    /// Returns the maximum length of a payload, in bytes.
    pub fn payload_len(self) -> usize {
        MAD_LEN - self.payload_at()
    }

    fn has_oui(self) -> bool {
        (Self::FIRST_WITH_OUI..=Self::LAST_WITH_OUI).contains(&self.id)
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

/// A message, and the fields that the agent adds.
struct Outgoing<'a> {
    class: Class,
    message: Message<'a>,
    status: u16,
    tid: u64,
}

impl Outgoing<'_> {
    /// Writes the MAD into memory that is zero.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the payload is too long.
    fn write(&self, mad: &mut [u8; MAD_LEN]) -> Result {
        let header = Header {
            base_version: bindings::IB_MGMT_BASE_VERSION as u8,
            mgmt_class: self.class.id,
            class_version: self.class.version,
            method: self.message.method.0,
            status: self.status.into(),
            class_specific: 0.into(),
            tid: self.tid.into(),
            attr_id: self.message.attr_id.into(),
            resv: 0.into(),
            attr_mod: self.message.attr_mod.into(),
        };
        let payload = self.message.payload;
        put(mad, self.class.payload_at(), payload)?;
        put(mad, 0, header.as_bytes())?;
        if self.class.has_oui() {
            put(mad, Class::OUI_AT, &self.class.oui)?;
        }
        Ok(())
    }
}

fn put(mad: &mut [u8; MAD_LEN], at: usize, bytes: &[u8]) -> Result {
    let to = mad.get_mut(at..at + bytes.len()).ok_or(EMSGSIZE)?;
    to.copy_from_slice(bytes);
    Ok(())
}

/// # Invariants
///
/// `raw` is the address handle that `_state` has.
struct Inner {
    raw: NonNull<bindings::ib_ah>,
    _state: Deferred<ah::State<Ref>>,
    device: Device,
    port: u32,
    qpn: u32,
    pkey_index: u16,
    matches: bool,
}

// SAFETY: An address handle may be used from any thread, and the rest is `Send`.
unsafe impl Send for Inner {}
// SAFETY: An address handle does not change, and the rest is `Sync`.
unsafe impl Sync for Inner {}

/// A destination of MADs: QP 1 of a port, or the sender of a MAD, as seen from a port of this host.
///
/// A counted handle, which requests keep until they complete.
#[derive(Clone)]
pub struct Peer {
    inner: Arc<Inner>,
}

impl Peer {
    /// Creates the destination QP 1 at the GID `to`, as seen from the GID `from` of the agent's port
    /// (`rdma_create_ah`). This resolves the route, which may take a second.
    ///
    /// # Errors
    ///
    /// `EINVAL` if `from` is not of the agent's port; `EPROTONOSUPPORT` if it is not of RoCE, as
    /// elsewhere a GID is not enough of an address; `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT`
    /// without a route; `ENODEV` or `ECANCELED` if the agent has ended; or the driver's error.
    pub fn new(agent: &Agent, from: &GidAttr, to: Gid, cx: &Sleepable) -> Result<Self> {
        if from.device().as_raw() != agent.device().as_raw() || from.port_num() != agent.port() {
            return Err(EINVAL);
        }
        let source = ah::Source::synthetic(from, to)?;
        let matches = !ah::is_ipv4(from);
        create(agent, source.wc(), source.header(), matches, cx)
    }

    /// Creates the destination that is the sender of a MAD (`ib_create_ah_from_wc`).
    ///
    /// # Errors
    ///
    /// As [`Peer::new`].
    fn sender(agent: &Agent, mad: &Received, cx: &Sleepable) -> Result<Self> {
        create(agent, mad.wc(), mad.grh(), false, cx)
    }

    fn as_raw(&self) -> *mut bindings::ib_ah {
        self.inner.raw.as_ptr()
    }

    fn qpn(&self) -> u32 {
        self.inner.qpn
    }

    fn pkey_index(&self) -> u16 {
        self.inner.pkey_index
    }

    /// Returns `true` if the MAD layer can match replies of this peer to requests. It compares GIDs,
    /// but a reply over IPv4 has an IPv4 header where the GIDs should be.
    fn matches_replies(&self) -> bool {
        self.inner.matches
    }

    fn is_seen_from(&self, device: &Device, port: u32) -> bool {
        self.inner.device.as_raw() == device.as_raw() && self.inner.port == port
    }
}

/// Creates an address handle. Neither generic nor inlined: see `Reserved::fill`.
#[inline(never)]
fn create(
    agent: &Agent,
    wc: &bindings::ib_wc,
    header: *const bindings::ib_grh,
    matches: bool,
    _cx: &Sleepable,
) -> Result<Peer> {
    let (device, port) = (agent.device(), agent.port());
    let reserved = Deferred::reserve()?;
    let reference = device.get(Kind::Ah);
    let live = agent.get()?;
    // SAFETY: The agent is registered, so it has a QP with a PD, which stay until the device is
    // removed. The header is the one that the completion is for.
    let raw = from_err_ptr(unsafe {
        let pd = (*(*live.as_raw()).qp).pd;
        bindings::ib_create_ah_from_wc(pd, wc, header, port)
    })?;
    let raw = NonNull::new(raw).ok_or(ENOMEM)?;
    // SAFETY: The address handle was just created, and the reference keeps the device.
    let state = reserved.fill(unsafe { ah::State::new(raw, reference) });
    // INVARIANT: The address handle is the state's.
    let inner = Inner {
        raw,
        _state: state,
        device: device.clone(),
        port,
        qpn: wc.src_qp,
        pkey_index: wc.pkey_index,
        matches,
    };
    Ok(Peer {
        inner: Arc::new(inner, GFP_KERNEL)?,
    })
}

/// A MAD that was received: a reply, or the request of a peer.
///
/// It keeps neither the agent nor the device.
///
/// # Invariants
///
/// `raw` is a MAD that this owns, received by port `port` of a device whose address was `dev`. It is
/// complete, so it does not change.
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
    /// # Safety
    ///
    /// `raw` was given to `agent`'s receive handler and now belongs to the caller.
    unsafe fn new(agent: &bindings::ib_mad_agent, raw: NonNull<bindings::ib_mad_recv_wc>) -> Self {
        // INVARIANT: The caller says that it owns the MAD, of which the MAD layer has ended the DMA
        // mapping.
        Self {
            raw,
            dev: agent.device,
            port: agent.port_num.into(),
        }
    }

    fn raw(&self) -> &bindings::ib_mad_recv_wc {
        // SAFETY: `raw` is a MAD that this owns by the type invariant, and does not change.
        unsafe { self.raw.as_ref() }
    }

    /// Returns all of the MAD.
    pub fn bytes(&self) -> &[u8; MAD_LEN] {
        // SAFETY: The buffer of a MAD has at least this length, was initialised by its allocation,
        // and does not change by the type invariant.
        unsafe { &*self.raw().recv_buf.__bindgen_anon_1.mad.cast() }
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        // SAFETY: The header's alignment is 1, it may have any bytes, and is shorter than a MAD.
        unsafe { &*self.bytes().as_ptr().cast() }
    }

    /// Returns the header's method.
    pub fn method(&self) -> Method {
        Method(self.header().method)
    }

    /// Returns the header's status: 0 for success.
    pub fn status(&self) -> u16 {
        self.header().status.get()
    }

    /// Returns what follows the header of the MAD's class, up to the end of the MAD, which does not
    /// have the length of the payload. It is the peer's, so nothing of it can be trusted.
    pub fn payload(&self) -> &[u8] {
        let at = Class::new(self.header().mgmt_class, 0).payload_at();
        self.bytes().get(at..).unwrap_or(&[])
    }

    /// Returns the number of the QP that sent this.
    pub fn src_qp(&self) -> u32 {
        self.wc().src_qp
    }

    fn is_from(&self, dev: *const bindings::ib_device, port: u32) -> bool {
        self.dev == dev && self.port == port
    }

    fn wc(&self) -> &bindings::ib_wc {
        // SAFETY: The completion is stored beside the MAD, except for one of QP 0, whose classes
        // `Agent::register` refuses.
        unsafe { &*self.raw().wc }
    }

    fn grh(&self) -> *const bindings::ib_grh {
        self.raw().recv_buf.grh
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // SAFETY: The MAD is this value's by the type invariant, and is not used again.
        unsafe { bindings::ib_free_recv_mad(self.raw.as_ptr()) };
    }
}
