// SPDX-License-Identifier: GPL-2.0

//! How an id is to be, said before it is used.

use super::addr::SockAddr;
use crate::{
    bindings,
    device::{
        Device,
        NodeType, //
    }, //
};
use core::{
    net::SocketAddr,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*, //
};

/// How an id is to be. The default is what the connection manager does by itself.
///
/// # Examples
///
/// ```
/// # use rdma::{client::ClientRef, cm::{Id, Options}, context::Sleepable};
/// # use core::net::SocketAddr;
/// /// Asks for low latency, from an address of the caller's choice.
/// fn create(client: &ClientRef, src: SocketAddr, cx: &Sleepable) -> Result<Id> {
///     let options = Options {
///         src: Some(src),
///         service_type: Some(0x10),
///         ..Default::default()
///     };
///     Id::create_with(client, &options, cx)
/// }
/// ```
#[derive(Clone, Copy, Default)]
pub struct Options<'a> {
    /// The network namespace is that of this device (`rdma_dev_net`), instead of the initial one.
    ///
    /// `ENODEV` if it is being dismantled: a device that is still there then is removed from its
    /// clients.
    pub net_of: Option<&'a Device>,
    /// The address to connect from (`rdma_bind_addr`). Port 0 is any free one. Not for listeners.
    pub src: Option<SocketAddr>,
    /// Other ids may have the same address (`rdma_set_reuseaddr`), all of which must say so.
    pub reuse_addr: bool,
    /// A listener on `::` listens for IPv4 too (`rdma_set_afonly`).
    pub dual_stack: bool,
    /// Only devices of this type (`rdma_restrict_node_type`).
    pub node_type: Option<NodeType>,
    /// The traffic class of the packets (`rdma_set_service_type`): the type of service of IPv4.
    pub service_type: Option<u8>,
    /// How long the device waits for an acknowledgement, 4.096 us times two to this power, up to 31
    /// (`rdma_set_ack_timeout`).
    pub ack_timeout: Option<u8>,
    /// How long the peer is to wait when there is no receive for its message, as the encoding of
    /// the InfiniBand specification, up to 31 (`rdma_set_min_rnr_timer`).
    pub min_rnr_timer: Option<u8>,
}

impl Options<'_> {
    /// Returns the network namespace, or `ENODEV` if it is being dismantled.
    pub(super) fn net(&self) -> Result<Net> {
        let dev = self.net_of.map_or(core::ptr::null_mut(), Device::as_raw);
        // SAFETY: The device is registered by the invariant of its `Inner`. It leaves its namespace
        // only when clients have let go of it, and a namespace is freed only when its devices have
        // left it, so the namespace is there.
        let net = unsafe { bindings::rdma_helper_get_net(dev) };
        // INVARIANT: The reference was just taken.
        Ok(Net(NonNull::new(net).ok_or(ENODEV)?))
    }

    /// Makes an id so, and says whether that has bound it to a device.
    ///
    /// # Safety
    ///
    /// The id is alive, and was just created.
    pub(super) unsafe fn apply(&self, id: NonNull<bindings::rdma_cm_id>) -> Result<bool> {
        // SAFETY: The caller says that the id is alive, and was just created.
        unsafe { self.set(id) }?;
        let Some(src) = self.src else {
            return Ok(false);
        };
        // SAFETY: The caller says that the id is alive.
        unsafe { bind(id, src) }
    }

    /// Makes an id so, but for its address.
    ///
    /// # Safety
    ///
    /// The id is alive, and was just created.
    pub(super) unsafe fn set(&self, id: NonNull<bindings::rdma_cm_id>) -> Result {
        let id = id.as_ptr();
        if self.ack_timeout.is_some_and(|timeout| timeout > 31) {
            return Err(EINVAL);
        }
        // SAFETY: The caller says that the id is alive; the calls lock what they change. All ids
        // here are of a reliable connected service, of which `rdma_set_min_rnr_timer` has to be.
        unsafe {
            if let Some(node_type) = self.node_type {
                to_result(bindings::rdma_restrict_node_type(id, node_type.to_raw()))?;
            }
            if self.reuse_addr {
                to_result(bindings::rdma_set_reuseaddr(id, 1))?;
            }
            if let Some(service_type) = self.service_type {
                bindings::rdma_set_service_type(id, service_type.into());
            }
            if let Some(timeout) = self.ack_timeout {
                to_result(bindings::rdma_set_ack_timeout(id, timeout))?;
            }
            if let Some(timer) = self.min_rnr_timer {
                to_result(bindings::rdma_set_min_rnr_timer(id, timer))?;
            }
        }
        Ok(())
    }
}

/// A counted reference to a network namespace (`struct net`).
///
/// # Invariants
///
/// The pointer is valid, and has a reference that is given back when this is dropped.
pub(super) struct Net(NonNull<bindings::net>);

impl Net {
    pub(super) fn as_raw(&self) -> *mut bindings::net {
        self.0.as_ptr()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // SAFETY: The reference is `self`'s by the type invariant, and is not used again.
        unsafe { bindings::rdma_helper_put_net(self.0.as_ptr()) };
    }
}

/// Gives an id its own address (`rdma_bind_addr`), and says whether it now has a device.
///
/// # Safety
///
/// The id is alive.
pub(super) unsafe fn bind(id: NonNull<bindings::rdma_cm_id>, addr: SocketAddr) -> Result<bool> {
    let mut addr = SockAddr::from(addr);
    // SAFETY: The caller says that the id is alive, and the address is copied by the call.
    to_result(unsafe { bindings::rdma_bind_addr(id.as_ptr(), addr.as_mut_ptr()) })?;
    // SAFETY: The caller says that the id is alive. Nothing but the call above has set its device.
    Ok(!unsafe { (*id.as_ptr()).device }.is_null())
}
