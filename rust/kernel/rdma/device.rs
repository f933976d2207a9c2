// SPDX-License-Identifier: GPL-2.0

//! RDMA devices, as a ULP sees them.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_device`)

use crate::{
    bindings,
    client::Core,
    cm::bound::Bound,
    context::Sleepable,
    gate::{
        Gate,
        Hold,
        Kind, //
    },
    removal::Removal, //
};
use core::{
    net::{
        IpAddr,
        Ipv6Addr, //
    },
    ptr::NonNull, //
};
use kernel::{
    fmt,
    prelude::*,
    str::CStr, //
};

/// What the crate keeps for one device of one client, from `add` to the end of `remove`.
///
/// # Invariants
///
/// `raw` is a registered device until `gate` is closed and empty.
#[pin_data]
pub(crate) struct Inner {
    #[pin]
    pub(crate) gate: Gate,
    pub(crate) raw: NonNull<bindings::ib_device>,
    pub(crate) client: NonNull<Core>,
    #[pin]
    pub(crate) bound: Bound,
    #[pin]
    pub(crate) removal: Removal,
}

impl Inner {
    /// Never inlined: see [`Core`].
    #[inline(never)]
    pub(crate) fn new(raw: NonNull<bindings::ib_device>, client: &Core) -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Self {
            gate <- Gate::new(),
            raw,
            client: NonNull::from(client),
            bound <- Bound::new(),
            removal <- Removal::new(),
        });
        KBox::pin_init(init, GFP_KERNEL)
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
/// `inner` is valid while `hold` lives, and `hold` is a hold on its gate.
pub struct Device {
    inner: NonNull<Inner>,
    hold: Hold,
}

// SAFETY: `struct ib_device` may be used from any thread, and the rest is read-only or atomic.
unsafe impl Send for Device {}
// SAFETY: As above.
unsafe impl Sync for Device {}

impl Device {
    /// Makes a handle, unless the device is being removed from the client.
    ///
    /// # Safety
    ///
    /// `inner` must stay valid until its gate is closed.
    pub(crate) unsafe fn new(inner: NonNull<Inner>) -> Result<Self> {
        // SAFETY: `inner` is valid by the caller's promise.
        let hold = unsafe { inner.as_ref().gate.hold(Kind::Device) }?;
        // INVARIANT: Just taken.
        Ok(Self { inner, hold })
    }

    pub(crate) fn inner(&self) -> &Inner {
        // SAFETY: By the type invariant.
        unsafe { self.inner.as_ref() }
    }

    pub(crate) fn hold(&self, kind: Kind) -> Hold {
        self.hold.another(kind)
    }

    pub(crate) fn client(&self) -> &Core {
        // SAFETY: A client outlives its devices, and the hold keeps this device.
        unsafe { self.inner().client.as_ref() }
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.inner().raw.as_ptr()
    }

    pub(crate) fn attrs(&self) -> &bindings::ib_device_attr {
        // SAFETY: The device is registered by the invariant of `Inner`; its attributes do not
        // change after that.
        unsafe { &(*self.as_raw()).attrs }
    }

    /// Returns the device's name, such as `rxe0`, as it is now: an administrator may change it.
    pub fn name(&self) -> Name {
        // SAFETY: The device is registered by the invariant of `Inner`.
        unsafe { Name::of(self.as_raw()) }
    }

    /// Returns the largest number of entries that a completion queue can have.
    pub fn max_cqe(&self) -> u32 {
        self.attrs().max_cqe
    }

    /// Returns the largest number of outstanding work requests of a queue.
    pub fn max_qp_wr(&self) -> u32 {
        self.attrs().max_qp_wr
    }

    /// Returns the number of pages that a fast-registration MR can map.
    pub fn max_fast_reg_pages(&self) -> u32 {
        self.attrs().max_fast_reg_page_list_len
    }

    /// Says whether the device has a port of this number; the first is 1.
    pub fn has_port(&self, port: u32) -> bool {
        // SAFETY: The device is registered by the invariant of `Inner`; the field does not change
        // after that.
        let ports = unsafe { (*self.as_raw()).phys_port_cnt };
        (1..=ports).contains(&port)
    }

    /// Returns the first IP address that the device's first port has, where its GIDs are IP
    /// addresses: on RoCE.
    ///
    /// Link-local addresses are passed over: they need a scope to be of use.
    pub fn ip_addr(&self) -> Option<IpAddr> {
        (0..=u8::MAX)
            .map_while(|index| self.gid(index))
            .find_map(|gid| {
                let gid = Ipv6Addr::from(gid);
                match gid.to_ipv4_mapped() {
                    Some(ip) => Some(IpAddr::V4(ip)),
                    None if gid.is_unspecified() || gid.is_unicast_link_local() => None,
                    None => Some(IpAddr::V6(gid)),
                }
            })
    }

    /// Returns the GID at `index` of the first port's table, zero if the entry is empty, or nothing
    /// beyond the table (`rdma_query_gid`).
    fn gid(&self, index: u8) -> Option<[u8; 16]> {
        let mut gid = bindings::ib_gid::default();
        // SAFETY: The device is registered by the invariant of `Inner`, and an RDMA device has a
        // port 1.
        match unsafe { bindings::rdma_query_gid(self.as_raw(), 1, index.into(), &raw mut gid) } {
            // SAFETY: All members of the union are 16 bytes.
            0 => Some(unsafe { *gid.raw }),
            ret if Error::from_errno(ret) == ENOENT => Some([0; 16]),
            _ => None,
        }
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
        // INVARIANT: The new hold is on the same gate.
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

/// Waits until nothing of the device is used any more.
pub(crate) fn wait_released(inner: &Inner, cx: &Sleepable) {
    struct Who<'a>(&'a Inner);

    impl fmt::Display for Who<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            // SAFETY: The device is registered until `remove` returns, and its client outlives
            // that.
            let (name, client) = unsafe { (Name::of(self.0.raw.as_ptr()), self.0.client.as_ref()) };
            f.write_fmt(fmt!("{}: removal of {name}", client.name))
        }
    }

    inner.gate.close(&Who(inner), cx);
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
