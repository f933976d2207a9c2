// SPDX-License-Identifier: GPL-2.0

//! Address handles, the destinations of datagrams.
//!
//! An [`Ah`] is made from an address vector, [`Attr`]; a GID; or the [`Source`] of a datagram.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct rdma_ah_attr`)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    deferred,
    device::{
        self,
        Device,
        Gid,
        GidAttr,
        GidType, //
    },
    objects,
    pd::{
        Pd,
        PdId, //
    },
    prelude::internal::*, //
};

/// The route of packets between subnets, as `struct ib_global_route`; on RoCE, their IP addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grh {
    /// The destination's GID.
    pub dgid: Gid,
    /// The index of the source's GID in the port's table.
    pub sgid_index: u8,
    /// The maximum number of routers on the way.
    pub hop_limit: u8,
    /// The traffic class.
    pub traffic_class: u8,
    /// The flow label, 20 bits.
    pub flow_label: u32,
}

impl Grh {
    /// Returns the route to a GID, from the GID at an index of the port's table.
    pub const fn new(dgid: Gid, sgid_index: u8) -> Self {
        Self {
            dgid,
            sgid_index,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
        }
    }
}

/// An address vector, as `struct rdma_ah_attr`: of a connected QP, or of an address handle.
///
/// # Examples
///
/// ```
/// # use rdma::{ah::{Ah, Attr, Grh}, context::Sleepable, device::Gid, pd::Pd};
/// fn on_infiniband(pd: &Pd, dgid: Gid, dlid: u16, cx: &Sleepable) -> Result<Ah> {
///     let grh = Some(Grh::new(dgid, 0));
///     Ah::create(pd, &Attr { grh, dlid, ..Attr::new(1) }, cx)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// The port of the device; the first is 1.
    pub port: u32,
    /// The global route, which RoCE requires, and InfiniBand between subnets.
    pub grh: Option<Grh>,
    /// The destination's LID, which InfiniBand requires.
    pub dlid: u16,
    /// The Ethernet address of the destination or the next router, which RoCE requires.
    /// [`Ah::resolve`] finds it for datagrams, and [`GidAttr::l2`] returns one's own.
    pub dmac: [u8; 6],
    /// The service level, up to 15.
    pub service_level: u8,
}

impl Attr {
    /// Returns an address through a port, with all else zero.
    pub const fn new(port: u32) -> Self {
        Self {
            port,
            grh: None,
            dlid: 0,
            dmac: [0; 6],
            service_level: 0,
        }
    }

    /// Makes the C attributes, for the type of the port. Fails with `EINVAL` if the device has no
    /// such port, or if a value is too large for its field; with `EOPNOTSUPP` for Omni-Path.
    pub(crate) fn to_raw(self, dev: &Device) -> Result<bindings::rdma_ah_attr> {
        use bindings::rdma_ah_attr__bindgen_ty_1 as Link;

        let grh = self.grh.unwrap_or(Grh::new(Gid([0; 16]), 0));
        if dev.port(self.port).is_none() || self.service_level > 15 || grh.flow_label >= 1 << 20 {
            return Err(EINVAL);
        }
        // SAFETY: The device is registered while `dev` lives, and has the port.
        let type_ = unsafe { bindings::rdma_helper_ah_type(dev.as_raw(), self.port) };
        let link = match type_ {
            bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_OPA => return Err(EOPNOTSUPP),
            bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE => Link {
                roce: ManuallyDrop::new(bindings::roce_ah_attr { dmac: self.dmac }),
            },
            _ => Link {
                ib: ManuallyDrop::new(bindings::ib_ah_attr {
                    dlid: self.dlid,
                    ..Default::default()
                }),
            },
        };
        let has_grh = bindings::ib_ah_flags_IB_AH_GRH as u8;
        Ok(bindings::rdma_ah_attr {
            grh: bindings::ib_global_route {
                sgid_attr: ptr::null(),
                dgid: grh.dgid.to_raw(),
                flow_label: grh.flow_label,
                sgid_index: grh.sgid_index,
                hop_limit: grh.hop_limit,
                traffic_class: grh.traffic_class,
            },
            sl: self.service_level,
            static_rate: 0,
            port_num: self.port,
            ah_flags: self.grh.map_or(0, |_| has_grh),
            type_,
            __bindgen_anon_1: link,
        })
    }
}

/// The owner of an address handle, and of a reference that keeps its device.
///
/// # Invariants
///
/// `raw` is an address handle of a device that `_keep` keeps.
pub(crate) struct OwnedAh<K> {
    raw: NonNull<bindings::ib_ah>,
    _keep: K,
}

// SAFETY: An address handle may be destroyed from any thread, and the rest is `Send`.
unsafe impl<K: Send> Send for OwnedAh<K> {}
// SAFETY: An address handle does not change, and the rest is `Sync`.
unsafe impl<K: Sync> Sync for OwnedAh<K> {}

impl<K> OwnedAh<K> {
    /// # Safety
    ///
    /// `raw` is a new address handle of a device that `keep` keeps.
    pub(crate) unsafe fn new(raw: NonNull<bindings::ib_ah>, keep: K) -> Self {
        // INVARIANT: The caller promises so.
        Self { raw, _keep: keep }
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_ah {
        self.raw.as_ptr()
    }
}

impl<K: Send + Sync + 'static> deferred::Teardown for OwnedAh<K> {
    fn object(&self) -> Option<&objects::Object> {
        None
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        let flags = bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE;
        // SAFETY: By the type invariant `raw` is an address handle whose device is registered.
        // Requests borrow the handle from their owner, or keep it, so none uses it.
        let (device, ret) = unsafe {
            (
                device::Name::of((*self.raw.as_ptr()).device),
                bindings::rdma_destroy_ah_user(self.raw.as_ptr(), flags, ptr::null_mut()),
            )
        };
        deferred::destroyed(fmt!("{device}: an address handle"), ret)
    }
}

/// An address handle: the destination of datagrams. A request borrows it from its owner: keep it
/// there, or an `Arc` of it if several requests share it. It is destroyed by a work item, as
/// drivers (rxe) take a lock for that which no softirq may.
///
/// # Invariants
///
/// `raw` is the address handle of `_state`, and `pd` is its PD.
pub struct Ah {
    pub(crate) raw: NonNull<bindings::ib_ah>,
    pub(crate) pd: PdId,
    _state: deferred::Deferred<OwnedAh<Pd>>,
}

// SAFETY: An address handle may be used and destroyed from any thread.
unsafe impl Send for Ah {}
// SAFETY: The address of the handle does not change, and several threads may use it at once.
unsafe impl Sync for Ah {}

impl Ah {
    /// # Safety
    ///
    /// `raw` is a new address handle of the PD, or the error of its creation.
    unsafe fn new(
        pd: &Pd,
        raw: *mut bindings::ib_ah,
        reserved: deferred::Reserved<OwnedAh<Pd>>,
    ) -> Result<Self> {
        let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // SAFETY: The caller promises that the handle is one of this PD, which keeps the device.
        let state = reserved.fill(unsafe { OwnedAh::new(raw, pd.clone()) });
        // INVARIANT: `raw` is the handle of the state, and was created for this PD.
        Ok(Self {
            raw,
            pd: pd.id(),
            _state: state,
        })
    }

    /// Creates the handle of an address (`rdma_create_ah`). Fails with `EINVAL` if the attributes
    /// are invalid for the port; `ENODATA` if their index of the port's GID table is not in use;
    /// `ENOMEM`, or the driver's error.
    pub fn create(pd: &Pd, attr: &Attr, _cx: &Sleepable) -> Result<Self> {
        let mut attr = attr.to_raw(pd.device())?;
        let reserved = deferred::Deferred::reserve()?;
        let flags = bindings::rdma_create_ah_flags_RDMA_CREATE_AH_SLEEPABLE;
        // SAFETY: `pd` keeps the PD, and `to_raw` has made the attributes for its device. The call
        // returns a new handle, or an error.
        unsafe {
            let raw = bindings::rdma_create_ah(pd.as_raw(), &raw mut attr, flags);
            Self::new(pd, raw, reserved)
        }
    }

    /// Creates the handle of the GID `to` on RoCE, as seen from the GID `from`. To resolve the
    /// route may take a second. Fails with `EPROTONOSUPPORT` if `from` is not of RoCE, as elsewhere
    /// a GID is not enough of an address; with `EINVAL` if it is of another device; with
    /// `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT` without a route; or the driver's error.
    pub fn resolve(pd: &Pd, from: &GidAttr, to: Gid, cx: &Sleepable) -> Result<Self> {
        if from.device() != pd.device() {
            return Err(EINVAL);
        }
        Self::reply(pd, &Source::synthetic(from, to)?, cx)
    }

    /// Creates the handle of the sender of a datagram (`ib_init_ah_attr_from_wc`,
    /// `ib_create_ah_from_wc`). On RoCE this resolves the route, which may take a second. Fails
    /// with `ENOENT` if the GID that the datagram was sent to was removed; `EHOSTUNREACH`,
    /// `ENETUNREACH` or `ETIMEDOUT` without a route; or the driver's error.
    pub fn reply(pd: &Pd, source: &Source, _cx: &Sleepable) -> Result<Self> {
        if pd.device().port(source.port).is_none() {
            return Err(EINVAL);
        }
        let reserved = deferred::Deferred::reserve()?;
        let wc = &source.wc;
        let header = source.header();
        let port = source.port;
        // SAFETY: `pd` keeps the PD, whose device has the port, as was just checked, and the header
        // is that of `wc` in a `Source`. The call returns a new handle, or an error.
        unsafe {
            let raw = bindings::ib_create_ah_from_wc(pd.as_raw(), wc, header, port);
            Self::new(pd, raw, reserved)
        }
    }
}

/// The length of the header in front of each received datagram, in bytes.
pub(crate) const HEADER: usize = 40;

/// A received network header, as `union rdma_network_hdr`.
#[repr(C, align(8))]
struct Header([u8; HEADER]);

/// The sender of a datagram: a copy of what a reply needs of its completion and its header.
pub struct Source {
    /// Only the members of a datagram's sender are set, which are no pointers.
    pub(crate) wc: bindings::ib_wc,
    port: u32,
    header: Header,
}

// SAFETY: The completion has no pointer to anything.
unsafe impl Send for Source {}
// SAFETY: The completion has no pointer to anything.
unsafe impl Sync for Source {}

impl Source {
    /// Copies from the completion and the header of a datagram that a QP of `port` has received.
    pub(crate) fn new(wc: &bindings::ib_wc, header: &[u8; HEADER], port: u32) -> Self {
        let wc = bindings::ib_wc {
            src_qp: wc.src_qp,
            slid: wc.slid,
            wc_flags: wc.wc_flags,
            vlan_id: wc.vlan_id,
            sl: wc.sl,
            dlid_path_bits: wc.dlid_path_bits,
            network_hdr_type: wc.network_hdr_type,
            ..Default::default()
        };
        Self {
            wc,
            port,
            header: Header(*header),
        }
    }

    /// Returns the number of the sender's QP.
    pub fn qpn(&self) -> u32 {
        self.wc.src_qp
    }

    pub(crate) fn header(&self) -> *const bindings::ib_grh {
        self.header.0.as_ptr().cast()
    }

    /// Makes the source of a datagram that QP 1 at `to` might have sent to `from`: on RoCE the RDMA
    /// core resolves for kernel users no other route than that to a datagram's sender. Fails with
    /// `EPROTONOSUPPORT` if `from` is not of RoCE, and `ENODEV` if it has no network interface.
    pub(crate) fn synthetic(from: &GidAttr, to: Gid) -> Result<Self> {
        let network = match from.gid_type() {
            GidType::RoceV1 => bindings::rdma_network_type_RDMA_NETWORK_ROCE_V1,
            GidType::RoceV2 if is_ipv4(from) => bindings::rdma_network_type_RDMA_NETWORK_IPV4,
            GidType::RoceV2 => bindings::rdma_network_type_RDMA_NETWORK_IPV6,
            _ => return Err(EPROTONOSUPPORT),
        };
        // The offset of the addresses in the header, and that of an address in its GID.
        let (at, skip) = if is_ipv4(from) { (32, 12) } else { (8, 0) };
        let mut header = [0; HEADER];
        let gids = [to, from.gid()];
        let bytes = gids.iter().flat_map(|gid| gid.0.iter().skip(skip));
        for (header, byte) in header.iter_mut().skip(at).zip(bytes) {
            *header = *byte;
        }
        let vlan = from.l2()?.vlan;
        let mut flags =
            bindings::ib_wc_flags_IB_WC_GRH | bindings::ib_wc_flags_IB_WC_WITH_NETWORK_HDR_TYPE;
        if vlan.is_some() {
            flags |= bindings::ib_wc_flags_IB_WC_WITH_VLAN;
        }
        let wc = bindings::ib_wc {
            src_qp: 1,
            wc_flags: flags as c_int,
            vlan_id: vlan.unwrap_or(0),
            network_hdr_type: network as u8,
            ..Default::default()
        };
        Ok(Self::new(&wc, &header, from.port_num()))
    }
}

/// Returns `true` if datagrams of this GID have an IPv4 header.
pub(crate) fn is_ipv4(from: &GidAttr) -> bool {
    from.gid_type() == GidType::RoceV2 && from.gid().ip().is_ipv4()
}
