// SPDX-License-Identifier: GPL-2.0

//! The format of the log: records one after the other, from the beginning of the memory on.
//!
//! A record is a [`Header`] and its payload, together a multiple of eight bytes. What follows the
//! last whole record does not look like the next one: its number, its length or its checksum is
//! wrong. So no pointer to the end is needed, and a record that was written in part is none.

use kernel::prelude::*;
use rdma::message::header;
use zerocopy::byteorder::{
    big_endian,
    little_endian, //
};
use zerocopy_derive::Immutable;

/// The header of a record.
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

/// FNV-1a, of which number and length change the beginning.
fn checksum(seq: u64, payload: &[u8]) -> u32 {
    let begin = 0x811c_9dc5 ^ (seq as u32) ^ (payload.len() as u32).rotate_left(16);
    payload.iter().fold(begin, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

/// The payload of record `seq`; lengths and bytes differ.
fn payload(seq: u64) -> impl Iterator<Item = u8> {
    let len = (seq % 6).wrapping_mul(40).wrapping_add(8);
    (0..len).map(move |at| seq.wrapping_mul(31).wrapping_add(at) as u8)
}

/// Makes record `seq` at the beginning of `to`, and returns its length.
pub(crate) fn make(seq: u64, to: &mut [u8]) -> Result<usize> {
    let (head, rest) = to.split_at_mut_checked(HEADER).ok_or(EINVAL)?;
    let bytes = rest.get_mut(..payload(seq).count()).ok_or(EINVAL)?;
    bytes
        .iter_mut()
        .zip(payload(seq))
        .for_each(|(to, byte)| *to = byte);
    let header = Header {
        seq: seq.into(),
        len: (bytes.len() as u32).into(),
        check: checksum(seq, bytes).into(),
    };
    head.copy_from_slice(header.as_bytes());
    Ok(HEADER.saturating_add(bytes.len()))
}

/// Returns the payload of the record at the beginning of `log`, if it is record `seq` and whole,
/// and what follows it.
fn whole(seq: u64, log: &[u8]) -> Option<(&[u8], &[u8])> {
    let (header, rest) = header::<Header>(log).ok()?;
    let (payload, rest) = rest.split_at_checked(header.len.get() as usize)?;
    let whole = header.seq.get() == seq && header.check.get() == checksum(seq, payload);
    whole.then_some((payload, rest))
}

/// The records of a log.
#[derive(Debug)]
pub(crate) struct Recovered {
    /// The number of whole records.
    pub(crate) records: u64,
    /// Their length, in bytes.
    pub(crate) bytes: usize,
    /// `true` if each is as the leader has appended it.
    pub(crate) right: bool,
}

/// Finds the records of a log.
pub(crate) fn recover(mut log: &[u8]) -> Recovered {
    let mut records = 0u64;
    let mut right = true;
    let len = log.len();
    loop {
        let seq = records.wrapping_add(1);
        let Some((found, rest)) = whole(seq, log) else {
            break;
        };
        right &= found.iter().copied().eq(payload(seq));
        (records, log) = (seq, rest);
    }
    let bytes = len.saturating_sub(log.len());
    Recovered {
        records,
        bytes,
        right,
    }
}

/// The message of the follower to the leader: the address of its log.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Advertisement {
    pub(crate) addr: big_endian::U64,
    pub(crate) rkey: big_endian::U32,
    pub(crate) len: big_endian::U32,
}

/// The length of an advertisement, in bytes.
pub(crate) const ADVERTISEMENT: usize = size_of::<Advertisement>();
