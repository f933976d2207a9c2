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

/// The data of one ping: a head with its number, then the characters from `A` to `z` over and over,
/// beginning one later than in the ping before, and a zero at the end.
pub(crate) struct Pattern {
    head: [u8; 32],
    head_len: usize,
    first: u8,
}

impl Pattern {
    const FIRST: u8 = b'A';
    const LAST: u8 = b'z';

    pub(crate) fn new(ping: u32) -> Self {
        let mut head = [0; 32];
        let mut text = Formatter::new(&mut head);
        // It fits: a number has ten digits at the most.
        let _ = text.write_fmt(fmt!("rdma-ping-{ping}: "));
        let head_len = text.bytes_written();
        let turn = ping % u32::from(Self::LAST - Self::FIRST + 1);
        Self {
            head,
            head_len,
            first: u8::try_from(turn).map_or(Self::FIRST, |turn| Self::FIRST + turn),
        }
    }

    fn after(character: u8) -> u8 {
        if character == Self::LAST {
            Self::FIRST
        } else {
            character + 1
        }
    }

    /// Returns the part of the head that fits into `len` bytes with the zero at the end.
    fn head(&self, len: usize) -> &[u8] {
        let len = self.head_len.min(len.saturating_sub(1));
        self.head.get(..len).unwrap_or(&[])
    }

    /// Writes the ping to `data`.
    pub(crate) fn fill(&self, data: &mut [u8]) {
        let head = self.head(data.len());
        let (to, rest) = data.split_at_mut(head.len());
        to.copy_from_slice(head);
        let mut character = self.first;
        for byte in rest.iter_mut() {
            *byte = character;
            character = Self::after(character);
        }
        if let Some(end) = rest.last_mut() {
            *end = 0;
        }
    }

    /// Returns whether `data` is the ping.
    pub(crate) fn matches(&self, data: &[u8]) -> bool {
        let head = self.head(data.len());
        let (begin, rest) = data.split_at(head.len());
        let Some((end, rest)) = rest.split_last() else {
            return false;
        };
        let mut character = self.first;
        let same = rest.iter().all(|byte| {
            let expected = character;
            character = Self::after(expected);
            *byte == expected
        });
        same && begin == head && *end == 0
    }
}
