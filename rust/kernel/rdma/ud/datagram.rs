// SPDX-License-Identifier: GPL-2.0

//! Received datagrams.

use super::HEADER;
use crate::{
    ah::Source,
    wc::{
        Opcode,
        Success, //
    }, //
};
use kernel::prelude::*;

/// A datagram that was received into a buffer.
///
/// # Examples
///
/// ```
/// # use rdma::{ah::Source, dma::*, ud::Datagram, wc::Wc};
/// fn received(wc: &Wc, buf: &mut Buf<FromDevice>, port: u32) -> Result<Source> {
///     let bytes = buf.cpu();
///     let datagram = Datagram::new(wc.result()?, &bytes)?;
///     pr_info!("{} bytes\n", datagram.payload().len());
///     Ok(datagram.source(port))
/// }
/// ```
pub struct Datagram<'a> {
    wc: Success<'a>,
    header: &'a [u8; HEADER],
    payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Takes a datagram apart that was received into `buf`, from its start.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not a receive that has completed; `EMSGSIZE` if `buf` is not where it was
    /// received.
    pub fn new(wc: Success<'a>, buf: &'a [u8]) -> Result<Self> {
        if wc.opcode() != Opcode::Recv {
            return Err(EINVAL);
        }
        let received = buf.get(..wc.byte_len()).ok_or(EMSGSIZE)?;
        let (header, payload) = received.split_first_chunk().ok_or(EMSGSIZE)?;
        Ok(Self {
            wc,
            header,
            payload,
        })
    }

    /// Returns what was sent.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Returns the number of the QP that sent (`wc->src_qp`).
    pub fn src_qp(&self) -> u32 {
        self.wc.raw().src_qp
    }

    /// Returns the immediate data, in host byte order, if there are any.
    pub fn imm_data(&self) -> Option<u32> {
        self.wc.imm_data()
    }

    /// Copies who sent, for an answer by [`Ah::reply`](crate::ah::Ah::reply). `port` is that of the
    /// QP that received.
    pub fn source(&self, port: u32) -> Source {
        Source::new(self.wc.raw(), self.header, port)
    }
}
