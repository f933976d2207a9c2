// SPDX-License-Identifier: GPL-2.0

//! The format of the log: records one after the other, from the beginning of the memory on.
//!
//! A record is a [`Header`] and its payload, together a multiple of eight bytes. What follows the
//! last whole record does not look like the next one: its number, its length or its checksum is
//! wrong. So no pointer to the end is needed, and a record that was written in part is none.

use kernel::prelude::*;
use rdma::prelude::Remote;
use zerocopy::byteorder::{
    big_endian,
    little_endian, //
};
use zerocopy_derive::Immutable;

/// What is before the payload.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Header {
    /// The number of the record, from 1 on.
    seq: little_endian::U64,
    /// The length of the payload, in bytes.
    len: little_endian::U32,
    /// The checksum of number, length and payload.
    check: little_endian::U32,
}

const HEADER: usize = size_of::<Header>();

/// The most bytes that a record has.
pub(crate) const MAX_RECORD: usize = HEADER + 256;

/// FNV-1a.
fn checksum(seq: u64, payload: &[u8]) -> u32 {
    let head = seq.to_le_bytes().into_iter();
    let len = (payload.len() as u64).to_le_bytes().into_iter();
    head.chain_bytes(len)
        .chain_bytes(payload.iter().copied())
        .fold(0x811c_9dc5, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
}

/// `Iterator::chain`, which the kernel's prelude has another of.
trait ChainBytes: Iterator<Item = u8> + Sized {
    fn chain_bytes(self, other: impl Iterator<Item = u8>) -> impl Iterator<Item = u8> {
        Iterator::chain(self, other)
    }
}
impl<I: Iterator<Item = u8>> ChainBytes for I {}

/// The length of record `seq`'s payload; they differ.
fn payload_len(seq: u64) -> usize {
    8 + (seq * 40 % 240) as usize
}

/// A byte of record `seq`'s payload.
fn payload_byte(seq: u64, at: usize) -> u8 {
    (seq as u8).wrapping_mul(31).wrapping_add(at as u8)
}

/// Makes record `seq` at the beginning of `to`, and returns its length.
pub(crate) fn make(seq: u64, to: &mut [u8]) -> Result<usize> {
    let len = payload_len(seq);
    let (head, rest) = to.split_at_mut_checked(HEADER).ok_or(EINVAL)?;
    let payload = rest.get_mut(..len).ok_or(EINVAL)?;
    for (at, byte) in payload.iter_mut().enumerate() {
        *byte = payload_byte(seq, at);
    }
    let header = Header {
        seq: seq.into(),
        len: (len as u32).into(),
        check: checksum(seq, payload).into(),
    };
    head.copy_from_slice(header.as_bytes());
    Ok(HEADER + len)
}

/// Returns the length of the record at the beginning of `log`, if it is record `seq` and whole.
fn whole(seq: u64, log: &[u8]) -> Option<usize> {
    let (header, rest) = Header::read_from_prefix(log).ok()?;
    let payload = rest.get(..header.len.get() as usize)?;
    let whole = header.seq.get() == seq && header.check.get() == checksum(seq, payload);
    whole.then_some(HEADER + payload.len())
}

/// What is found in a log.
#[derive(Default)]
pub(crate) struct Recovered {
    /// The number of whole records.
    pub(crate) records: u64,
    /// Their length, in bytes.
    pub(crate) bytes: usize,
}

/// Finds the records of a log, and says whether each is what the leader has appended.
pub(crate) fn recover(log: &[u8]) -> (Recovered, bool) {
    let (mut found, mut right) = (Recovered::default(), true);
    while let Some(len) = log
        .get(found.bytes..)
        .and_then(|rest| whole(found.records + 1, rest))
    {
        let payload = &log[found.bytes + HEADER..found.bytes + len];
        found.records += 1;
        found.bytes += len;
        right &= payload.len() == payload_len(found.records)
            && (payload.iter().enumerate())
                .all(|(at, byte)| *byte == payload_byte(found.records, at));
    }
    (found, right)
}

/// What the follower tells the leader: where its log is.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Advertisement {
    addr: big_endian::U64,
    rkey: big_endian::U32,
    len: big_endian::U32,
}

/// The length of an advertisement, in bytes.
pub(crate) const ADVERTISEMENT: usize = size_of::<Advertisement>();

pub(crate) fn advertise(log: Remote, len: usize) -> [u8; ADVERTISEMENT] {
    zerocopy::transmute!(Advertisement {
        addr: log.addr.into(),
        rkey: log.rkey.into(),
        len: (len as u32).into(),
    })
}

/// Takes an advertisement apart, of which nothing but its length was checked.
pub(crate) fn parse(message: &[u8]) -> Option<(Remote, usize)> {
    let it = Advertisement::read_from_bytes(message).ok()?;
    let log = Remote {
        addr: it.addr.get(),
        rkey: it.rkey.get(),
    };
    Some((log, it.len.get() as usize))
}
