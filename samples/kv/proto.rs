// SPDX-License-Identifier: GPL-2.0

//! The wire format, of which nothing is trusted that comes from the peer.
//!
//! A connection begins with a [`hello`] each, in the private data of the connection manager. Then
//! the initiator sends requests, each a [`Request`] and the value of a PUT if that is short; the
//! target answers each with a [`Reply`], and the value of a GET if that is short. A longer value
//! goes by RDMA to or from memory that the request lends, whose key the reply invalidates.

use kernel::prelude::*;
use rdma::{
    message::header,
    prelude::Remote, //
};
use zerocopy::byteorder::big_endian::{
    U16,
    U32,
    U64, //
};
use zerocopy_derive::Immutable;

/// The most bytes of a value that travels with a message.
pub(crate) const INLINE: usize = 512;
/// The most bytes of a value.
pub(crate) const MAX_VALUE: usize = 128 * 1024;
/// The most pages of a value, which may begin anywhere in a page.
pub(crate) const MAX_PAGES: u32 = MAX_VALUE.div_ceil(rdma::mr::PAGE_SIZE) as u32 + 1;
/// The number of requests of a connection at a time.
pub(crate) const DEPTH: u16 = 32;
/// The bits of a generation that the target returns: all that there are.
pub(crate) const GENERATION_BITS: u32 = 16;

const MAGIC: u64 = 0x6b76_0001;

/// Returns the private data: of the initiator, how many requests at a time it asks for; of the
/// target, how many it gives.
pub(crate) fn hello(depth: u16) -> [u8; 8] {
    (MAGIC << 32 | u64::from(depth)).to_be_bytes()
}

/// Returns the number of requests at a time. Private data may be longer than what was sent.
pub(crate) fn depth(private_data: &[u8]) -> Result<u16> {
    let (hello, _) = header::<U64>(private_data)?;
    let depth = hello.get() ^ (MAGIC << 32);
    let sound = (1..=u64::from(u32::MAX)).contains(&depth);
    let depth = sound.then_some(depth).ok_or(EPROTO)?;
    Ok(depth.min(DEPTH.into()) as u16)
}

pub(crate) const GET: u16 = 1;
pub(crate) const PUT: u16 = 2;

/// A request.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Request {
    /// The name of the exchange, which the reply returns.
    pub(crate) id: U32,
    pub(crate) op: U16,
    is_lent: U16,
    pub(crate) key: U64,
    len: U32,
    rkey: U32,
    addr: U64,
}

pub(crate) const REQUEST: usize = size_of::<Request>();

impl Request {
    /// `len` is the length of the value of a PUT, and the room that a GET has for it.
    pub(crate) fn new(id: u32, op: u16, key: u64, len: usize, lent: Option<Remote>) -> Self {
        let Remote { addr, rkey } = lent.unwrap_or(Remote { addr: 0, rkey: 0 });
        Self {
            id: id.into(),
            op: op.into(),
            is_lent: u16::from(lent.is_some()).into(),
            key: key.into(),
            len: (len as u32).into(),
            rkey: rkey.into(),
            addr: addr.into(),
        }
    }

    /// Takes a message apart. Returns the request, and the value if it has come with it.
    pub(crate) fn parse(message: &[u8]) -> Result<(Self, &[u8])> {
        let (request, value) = header::<Self>(message)?;
        // Values that no region is lent for travel with the messages.
        let (most, with_it) = match (request.lent(), request.op.get()) {
            (Some(_), GET | PUT) => (MAX_VALUE, 0),
            (None, GET) => (INLINE, 0),
            (None, PUT) => (INLINE, request.len()),
            _ => return Err(EPROTO),
        };
        let sound = (1..=most).contains(&request.len()) && value.len() == with_it;
        sound.then_some((request, value)).ok_or(EPROTO)
    }

    pub(crate) fn len(&self) -> usize {
        self.len.get() as usize
    }

    /// Returns the memory that is lent, if any. The peer's device checks where it is.
    pub(crate) fn lent(&self) -> Option<Remote> {
        (self.is_lent.get() != 0).then_some(Remote {
            addr: self.addr.get(),
            rkey: self.rkey.get(),
        })
    }
}

/// The ends of a request.
pub(crate) const DONE: u16 = 0;
/// There is no such key.
pub(crate) const MISSING: u16 = 1;
/// The value is longer than the room for it.
pub(crate) const TOO_LONG: u16 = 2;
/// The store is full.
pub(crate) const FULL: u16 = 3;

/// A reply.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Reply {
    pub(crate) id: U32,
    pub(crate) status: U16,
    /// The number of requests that may be sent from now on, besides those that were said before.
    pub(crate) credits: U16,
    /// The length of the value.
    pub(crate) len: U32,
}

pub(crate) const REPLY: usize = size_of::<Reply>();

impl Reply {
    /// Takes a message apart. Returns the reply, and the value if it has come with it.
    pub(crate) fn parse(message: &[u8]) -> Result<(Self, &[u8])> {
        let (reply, value) = header::<Self>(message)?;
        let sound = value.is_empty() || value.len() == reply.len.get() as usize;
        sound.then_some((reply, value)).ok_or(EPROTO)
    }

    pub(crate) fn to_result(self) -> Result {
        match self.status.get() {
            DONE => Ok(()),
            MISSING => Err(ENOENT),
            TOO_LONG => Err(EMSGSIZE),
            FULL => Err(ENOSPC),
            _ => Err(EPROTO),
        }
    }
}
