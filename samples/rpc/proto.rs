// SPDX-License-Identifier: GPL-2.0

//! What goes over the wire: calls and answers, and the data that they are about.

use kernel::prelude::*;
use rdma::prelude::Remote;
use zerocopy::byteorder::big_endian;
use zerocopy_derive::Immutable;

/// The most bytes of data that a call may have.
pub(crate) const MAX_LEN: usize = 64 * 1024;

/// What the server is to do with the caller's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// Read it and answer with its checksum.
    Put,
    /// Write the pattern of the call's number to it.
    Get,
}

const PUT: u32 = 1;
const GET: u32 = 2;

/// A call, and the memory that it lends the server.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) op: Op,
    pub(crate) number: u32,
    pub(crate) len: usize,
    pub(crate) data: Remote,
}

#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct RawCall {
    addr: big_endian::U64,
    rkey: big_endian::U32,
    len: big_endian::U32,
    op: big_endian::U32,
    number: big_endian::U32,
}

/// The length of a call, in bytes.
pub(crate) const CALL: usize = size_of::<RawCall>();

impl Call {
    pub(crate) fn to_bytes(self) -> [u8; CALL] {
        let op = match self.op {
            Op::Put => PUT,
            Op::Get => GET,
        };
        zerocopy::transmute!(RawCall {
            addr: self.data.addr.into(),
            rkey: self.data.rkey.into(),
            len: (self.len as u32).into(),
            op: op.into(),
            number: self.number.into(),
        })
    }

    /// Takes a message from a stranger apart. Where the memory is cannot be checked here: the
    /// caller's device does that.
    pub(crate) fn parse(message: &[u8]) -> Option<Self> {
        let raw = RawCall::read_from_bytes(message).ok()?;
        let op = match raw.op.get() {
            PUT => Op::Put,
            GET => Op::Get,
            _ => return None,
        };
        let len = raw.len.get() as usize;
        (1..=MAX_LEN).contains(&len).then_some(Self {
            op,
            number: raw.number.get(),
            len,
            data: Remote {
                addr: raw.addr.get(),
                rkey: raw.rkey.get(),
            },
        })
    }
}

/// The answer to a call.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct RawAnswer {
    number: big_endian::U32,
    sum: big_endian::U32,
}

/// The length of an answer, in bytes.
pub(crate) const ANSWER: usize = size_of::<RawAnswer>();

/// Makes the answer to a call, with the checksum of its data.
pub(crate) fn answer(number: u32, sum: u32) -> [u8; ANSWER] {
    zerocopy::transmute!(RawAnswer {
        number: number.into(),
        sum: sum.into(),
    })
}

/// Takes an answer apart: the number of the call, and the checksum.
pub(crate) fn parse_answer(message: &[u8]) -> Option<(u32, u32)> {
    let raw = RawAnswer::read_from_bytes(message).ok()?;
    Some((raw.number.get(), raw.sum.get()))
}

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
