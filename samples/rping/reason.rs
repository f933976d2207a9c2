// SPDX-License-Identifier: GPL-2.0

//! Why a connection ended.

use kernel::{
    fmt,
    prelude::*, //
};
use rdma::prelude::*;

/// Why a connection ended, for people ([`fmt::Display`]) and as an error number.
#[derive(Clone, Copy)]
pub(crate) enum Reason {
    /// None has ended yet.
    None,
    /// The client has done all its pings.
    Done,
    /// Asked for.
    Stopped,
    /// The peer has ended it, between two pings.
    PeerDisconnected,
    /// The peer has ended it, within a ping.
    PeerGone,
    /// The peer does not keep to the protocol.
    Protocol(&'static str),
    /// A request has failed.
    Request(Status),
    /// Anything else.
    Failed(Error),
}

impl Reason {
    /// Returns whether the connection ended before its time.
    pub(crate) fn is_error(self) -> bool {
        !matches!(self, Self::Done | Self::Stopped | Self::PeerDisconnected)
    }
}

impl From<Error> for Reason {
    fn from(e: Error) -> Self {
        // A client that was interrupted does not begin again.
        Self::Failed(if e == ERESTARTSYS { EINTR } else { e })
    }
}

impl From<Reason> for Result {
    fn from(reason: Reason) -> Self {
        Err(match reason {
            Reason::None | Reason::Done => return Ok(()),
            Reason::Stopped => ECANCELED,
            Reason::PeerDisconnected | Reason::PeerGone => ECONNRESET,
            Reason::Protocol(_) => EPROTO,
            Reason::Request(_) => EIO,
            Reason::Failed(e) => e,
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::None => Ok(()),
            Self::Done => f.write_str("done"),
            Self::Stopped => f.write_str("stopped"),
            Self::PeerDisconnected => f.write_str("peer disconnected"),
            Self::PeerGone => f.write_str("peer disconnected within a ping"),
            Self::Protocol(fault) => f.write_str(fault),
            Self::Request(status) => f.write_fmt(fmt!("request failed: {status}")),
            Self::Failed(e) => f.write_fmt(fmt!("failed: {e:?}")),
        }
    }
}
