// SPDX-License-Identifier: GPL-2.0

//! Messages of peers: bytes of any length and any content.
//!
//! A Rust panic ends the machine where a completion is handled in a softirq, and the CQ and the
//! unload of the module where a work item does; so functions that parse a message return an error
//! for one that is too short. See "What the peer controls" in
//! Documentation/safety.rst.

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    dma::CpuView,
    prelude::internal::*, //
};
use core::ops::Deref;

/// Returns a copy of the header at the beginning of a message, and the bytes that follow it. Fails
/// with `EPROTO` if the message is shorter than the header: the peer does not keep to the protocol.
/// The fields are those of the peer, in the byte order of their types.
///
/// # Examples
///
/// ```
/// use rdma::message;
/// use zerocopy::byteorder::big_endian::{U16, U32};
///
/// #[derive(FromBytes)]
/// #[repr(C)]
/// struct Hello {
///     magic: U32,
///     depth: U16,
/// }
///
/// /// Returns the depth that the peer has asked for in its private data.
/// fn depth(private_data: &[u8]) -> Result<u16> {
///     let (hello, _padding) = message::header::<Hello>(private_data)?;
///     match hello.magic.get() {
///         0x6b76_0001 => Ok(hello.depth.get().clamp(1, 128)),
///         _ => Err(EPROTO),
///     }
/// }
/// ```
#[inline]
pub fn header<H: FromBytes>(message: &[u8]) -> Result<(H, &[u8])> {
    H::read_from_prefix(message).map_err(|_| EPROTO)
}

/// The bytes of a message that was received, for the CPU.
pub struct RecvBytes<'a> {
    view: CpuView<'a>,
    len: usize,
}

impl<'a> RecvBytes<'a> {
    /// Returns the first `len` bytes of a buffer, none if it is shorter.
    #[inline]
    pub(crate) fn new(view: CpuView<'a>, len: usize) -> Self {
        Self { view, len }
    }

    /// Returns a copy of the header, and the bytes that follow it, as [`header`].
    #[inline]
    pub fn header<H: FromBytes>(&self) -> Result<(H, &[u8])> {
        header(self)
    }
}

impl Deref for RecvBytes<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // A message is no longer than its buffer.
        self.view.get(..self.len).unwrap_or(&[])
    }
}
