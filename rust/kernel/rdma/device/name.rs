// SPDX-License-Identifier: GPL-2.0

//! Copies of the names of devices, their firmware and network interfaces, which may change.

use crate::bindings;
use core::ops::Deref;
use kernel::{
    fmt,
    prelude::*, //
};

/// A copy of a device's name.
#[derive(Clone, Copy)]
pub struct Name([u8; bindings::IB_DEVICE_NAME_MAX as usize]);

impl Name {
    /// # Safety
    ///
    /// `dev` is a valid device.
    pub(crate) unsafe fn of(dev: *mut bindings::ib_device) -> Self {
        let mut name = [0; bindings::IB_DEVICE_NAME_MAX as usize];
        // SAFETY: The caller says that `dev` is valid; the helper copies a string that fits.
        unsafe { bindings::rdma_helper_device_name(dev, name.as_mut_ptr().cast(), name.len()) };
        Self(name)
    }
}

impl Deref for Name {
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

/// A copy of the version of a device's firmware.
#[derive(Clone, Copy)]
pub struct Firmware([u8; Self::LEN]);

impl Firmware {
    const LEN: usize = bindings::IB_FW_VERSION_NAME_MAX as usize;

    /// # Safety
    ///
    /// `dev` is a registered device. The caller may sleep.
    pub(super) unsafe fn of(dev: *mut bindings::ib_device) -> Self {
        let mut version = [0; Self::LEN];
        // SAFETY: The caller says that `dev` is registered, and drivers write at most
        // `IB_FW_VERSION_NAME_MAX` bytes.
        unsafe { bindings::ib_get_device_fw_str(dev, version.as_mut_ptr().cast()) };
        Self(version)
    }
}

impl Deref for Firmware {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

/// A copy of the name and the index of a network interface.
#[derive(Clone, Copy)]
pub struct Netdev(pub(super) bindings::rdma_helper_netdev);

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
