// SPDX-License-Identifier: GPL-2.0

//! Why a connection ended.

use kernel::{
    alloc::AllocError,
    fmt,
    prelude::*, //
};
use rdma::prelude::*;

/// Why a connection ended, for people ([`fmt::Display`]) and as an error number.
#[derive(Clone, Copy)]
pub(crate) enum Reason {
    /// The client has done all its pings.
    Done,
    /// Asked for.
    Stopped,
    /// A signal has ended the client.
    Interrupted,
    /// The peer has ended it, between two pings.
    PeerDisconnected,
    /// The peer has ended it, within a ping.
    PeerGone,
    /// The device goes.
    DeviceRemoved,
    /// A message had this length.
    MessageLen(usize),
    /// An advertisement said this size.
    Size(u32),
    /// The buffer to write to is smaller than that which was read.
    SinkSize(u32),
    /// The data are not those of this ping.
    Mismatch(u32),
    /// The peer does not go on.
    NoProgress,
    /// The peer allows no RDMA READ.
    NoRead,
    /// There are too many connections.
    TooMany,
    /// A request failed.
    Request(Status),
    /// A step of the set-up failed, or a request could not be posted.
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
        if e == ERESTARTSYS {
            Self::Interrupted
        } else {
            Self::Failed(e)
        }
    }
}

impl From<AllocError> for Reason {
    fn from(e: AllocError) -> Self {
        Self::Failed(e.into())
    }
}

impl From<Reason> for Result {
    fn from(reason: Reason) -> Self {
        Err(match reason {
            Reason::Done => return Ok(()),
            Reason::Stopped => ECANCELED,
            Reason::Interrupted => EINTR,
            Reason::PeerDisconnected | Reason::PeerGone => ECONNRESET,
            Reason::DeviceRemoved => ENODEV,
            Reason::MessageLen(_) | Reason::Size(_) | Reason::SinkSize(_) | Reason::NoRead => {
                EPROTO
            }
            Reason::Mismatch(_) => EBADMSG,
            Reason::NoProgress => ETIMEDOUT,
            Reason::TooMany => EMFILE,
            Reason::Request(_) => EIO,
            Reason::Failed(e) => e,
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Done => f.write_str("done"),
            Self::Stopped => f.write_str("stopped"),
            Self::Interrupted => f.write_str("interrupted"),
            Self::PeerDisconnected => f.write_str("peer disconnected"),
            Self::PeerGone => f.write_str("peer disconnected within a ping"),
            Self::DeviceRemoved => f.write_str("device removed"),
            Self::MessageLen(len) => f.write_fmt(fmt!("bad message length {len}")),
            Self::Size(size) => f.write_fmt(fmt!("bad size {size} in an advertisement")),
            Self::SinkSize(size) => f.write_fmt(fmt!("size {size} of the sink is too small")),
            Self::Mismatch(ping) => f.write_fmt(fmt!("data mismatch in ping {ping}")),
            Self::NoProgress => f.write_str("no progress"),
            Self::NoRead => f.write_str("peer allows no RDMA READ"),
            Self::TooMany => f.write_str("too many connections"),
            Self::Request(status) => f.write_fmt(fmt!("request failed: {status}")),
            Self::Failed(e) if e == ECONNREFUSED => f.write_str("connection refused"),
            Self::Failed(e) => f.write_fmt(fmt!("failed: {e:?}")),
        }
    }
}

/// Why the last of several connections ended, or nothing if none has.
pub(crate) struct Last(pub(crate) Option<Reason>);

impl fmt::Display for Last {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |reason| reason.fmt(f))
    }
}
