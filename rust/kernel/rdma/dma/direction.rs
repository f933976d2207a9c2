// SPDX-License-Identifier: GPL-2.0

//! Which way data go.

use crate::bindings;

mod private {
    pub trait Sealed {}
}
use private::Sealed;

/// Which way data go, as `enum dma_data_direction`.
pub trait Direction: Sealed + Send + Sync + Unpin + 'static {
    /// The C value.
    #[doc(hidden)]
    const RAW: bindings::dma_data_direction;
}

/// A [`Direction`] in which the device reads memory: for SEND and RDMA WRITE, and for peers to
/// read.
#[diagnostic::on_unimplemented(
    message = "the device does not read `{Self}` memory",
    note = "map it `ToDevice` or `Bidirectional`"
)]
pub trait DeviceReads: Direction {}

/// A [`Direction`] in which the device writes memory: for receives and RDMA READ, and for peers to
/// write.
#[diagnostic::on_unimplemented(
    message = "the device does not write `{Self}` memory",
    note = "map it `FromDevice` or `Bidirectional`"
)]
pub trait DeviceWrites: Direction {}

macro_rules! direction {
    ($(#[$doc:meta])* $name:ident, $raw:ident, [$($can:ident),*]) => {
        $(#[$doc])*
        pub enum $name {}
        impl Sealed for $name {}
        impl Direction for $name {
            const RAW: bindings::dma_data_direction = bindings::dma_data_direction::$raw;
        }
        $(impl $can for $name {})*
    };
}

direction!(
    /// Memory that the device only reads.
    ToDevice, DMA_TO_DEVICE, [DeviceReads]
);
direction!(
    /// Memory that the device only writes.
    FromDevice, DMA_FROM_DEVICE, [DeviceWrites]
);
direction!(
    /// Memory that the device reads and writes.
    Bidirectional, DMA_BIDIRECTIONAL, [DeviceReads, DeviceWrites]
);
