// SPDX-License-Identifier: GPL-2.0

//! The wire format: calls and answers, and the data that they are about.

use kernel::prelude::*;
use rdma::{
    message::header,
    prelude::Remote, //
};
use zerocopy::byteorder::big_endian::{
    U32,
    U64, //
};
use zerocopy_derive::Immutable;

/// The most bytes of data that a call may have.
pub(crate) const MAX_LEN: usize = 64 * 1024;

/// The server reads the caller's memory and answers with its checksum.
pub(crate) const PUT: u32 = 1;
/// The server writes the pattern of the call's number to the caller's memory.
pub(crate) const GET: u32 = 2;

/// A call, and the memory that it lends the server.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Call {
    addr: U64,
    rkey: U32,
    len: U32,
    pub(crate) op: U32,
    pub(crate) number: U32,
}

/// The length of a call, in bytes.
pub(crate) const CALL: usize = size_of::<Call>();

impl Call {
    pub(crate) fn new(op: u32, number: u32, len: usize, data: Remote) -> Self {
        Self {
            addr: data.addr.into(),
            rkey: data.rkey.into(),
            len: (len as u32).into(),
            op: op.into(),
            number: number.into(),
        }
    }

    /// Takes a message from a stranger apart. Where the memory is cannot be checked here: the
    /// caller's device does that.
    pub(crate) fn parse(message: &[u8]) -> Result<Self> {
        let (call, rest) = header::<Self>(message)?;
        let sound = matches!(call.op.get(), PUT | GET) && (1..=MAX_LEN).contains(&call.len());
        (sound && rest.is_empty()).then_some(call).ok_or(EPROTO)
    }

    pub(crate) fn len(&self) -> usize {
        self.len.get() as usize
    }

    pub(crate) fn data(&self) -> Remote {
        Remote {
            addr: self.addr.get(),
            rkey: self.rkey.get(),
        }
    }
}

/// The answer to a call, with the checksum of its data.
#[derive(Clone, Copy, PartialEq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Answer {
    number: U32,
    sum: U32,
}

impl Answer {
    pub(crate) fn new(number: u32, sum: u32) -> Self {
        let number = number.into();
        let sum = sum.into();
        Self { number, sum }
    }
}

/// The length of an answer, in bytes.
pub(crate) const ANSWER: usize = size_of::<Answer>();

/// The data of a call. They differ from call to call, and from page to page.
pub(crate) fn pattern(number: u32) -> impl Iterator<Item = u8> {
    (0..u32::MAX).map(move |at| (number.wrapping_mul(31) ^ at ^ (at >> 8)) as u8)
}

/// FNV-1a.
pub(crate) fn checksum(bytes: impl Iterator<Item = u8>) -> u32 {
    bytes.fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}
