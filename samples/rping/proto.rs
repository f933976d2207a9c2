// SPDX-License-Identifier: GPL-2.0

//! The wire format: messages, and the data of a ping.

use kernel::{
    fmt::Write,
    prelude::*,
    str::Formatter, //
};
use rdma::prelude::*;
use zerocopy::byteorder::big_endian;
use zerocopy_derive::Immutable;

/// The length of every message, in bytes: an advertisement, or a go-ahead, whose content means
/// nothing.
pub(crate) const MESSAGE_LEN: usize = size_of::<RdmaInfo>();

/// The most bytes that a ping may have.
pub(crate) const MAX_SIZE: u32 = 64 * 1024;

/// The characters of a ping, from `A` to `z`.
const FIRST: u8 = b'A';
const CHARACTERS: usize = (b'z' - FIRST + 1) as usize;

/// `struct rping_rdma_info`.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct RdmaInfo {
    buf: big_endian::U64,
    rkey: big_endian::U32,
    size: big_endian::U32,
}

/// A buffer that the sender lets the receiver access.
#[derive(Clone, Copy)]
pub(crate) struct Advertisement {
    pub(crate) remote: Remote,
    pub(crate) size: u32,
}

impl Advertisement {
    /// Returns the message.
    pub(crate) fn to_bytes(self) -> [u8; MESSAGE_LEN] {
        zerocopy::transmute!(RdmaInfo {
            buf: self.remote.addr.into(),
            rkey: self.remote.rkey.into(),
            size: self.size.into(),
        })
    }

    /// Takes a message apart. It must have the right length; nothing else of it can be trusted.
    pub(crate) fn parse(message: &[u8]) -> Option<Self> {
        let info = RdmaInfo::read_from_bytes(message).ok()?;
        Some(Self {
            remote: Remote {
                addr: info.buf.get(),
                rkey: info.rkey.get(),
            },
            size: info.size.get(),
        })
    }
}

/// Returns the `len` bytes of a ping: a head with its number, then the characters over and
/// over, beginning one later than in the ping before, and a zero at the end.
pub(crate) fn pattern(ping: u32, len: usize) -> impl Iterator<Item = u8> {
    let mut head = [0; 32];
    let mut text = Formatter::new(&mut head);
    // It fits: a number has ten digits at the most.
    let _ = text.write_fmt(fmt!("rdma-ping-{ping}: "));
    let head_len = text.bytes_written();

    (0..len).map(move |at| match head.get(at) {
        _ if at + 1 == len => 0,
        Some(&byte) if at < head_len => byte,
        _ => FIRST + ((ping as usize + at - head_len) % CHARACTERS) as u8,
    })
}
