// SPDX-License-Identifier: GPL-2.0

//! Network interfaces of devices.

use crate::bindings;
use kernel::{
    fmt,
    prelude::*,
    str::CStr, //
};

/// The name and the index that a network interface had.
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
