// SPDX-License-Identifier: GPL-2.0

//! Sending, and waiting for replies.

use super::{
    header::Outgoing,
    request::{
        Buf,
        Request, //
    },
    Agent,
    Message,
    Peer,
    Received, //
};
use crate::{
    cm::running::Running,
    context::Sleepable, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc, //
    }, //
};

impl Agent {
    /// Sends a request and waits for the reply, at most `timeout_ms` each time that it is sent:
    /// once, and up to `retries` times again.
    ///
    /// A reply may say that the request has failed: see [`Received::status`].
    ///
    /// # Errors
    ///
    /// - `ETIMEDOUT` if no reply comes.
    /// - `ERESTARTSYS` on a signal. The request is given up.
    /// - `EIO` if the request cannot be sent.
    /// - `ENODEV` if the device goes, `ECANCELED` after [`Agent::stop`].
    /// - `EINVAL` without a timeout, for a method that is a reply's, or if the peer is not seen
    ///   from the agent's port; `EMSGSIZE` if the payload is too long.
    /// - `EPROTONOSUPPORT` if the peer has an IPv4 address: the MAD layer cannot match replies over
    ///   RoCE v2 with IPv4. It can with IPv6.
    /// - `EDEADLK` in a callback of a connection manager, which may keep the timeouts of the port.
    /// - `ENOMEM`.
    pub fn request(
        &self,
        peer: &Peer,
        message: &Message<'_>,
        timeout_ms: u32,
        retries: u32,
        _cx: &Sleepable,
    ) -> Result<Received> {
        if Running::is_current() {
            return Err(EDEADLK);
        }
        if timeout_ms == 0 || message.method.is_response() {
            return Err(EINVAL);
        }
        if !peer.matches_replies() {
            return Err(EPROTONOSUPPORT);
        }
        let request = self.post(peer, self.tid()?, 0, *message, timeout_ms, retries)?;
        request.wait().map_err(|error| {
            if error == ERESTARTSYS {
                error
            } else {
                self.reason(error)
            }
        })
    }

    /// Sends a MAD that nobody answers. It may be lost.
    ///
    /// # Errors
    ///
    /// `ENODEV`, `ECANCELED`, `EINVAL` and `EMSGSIZE` as for [`Agent::request`], `ENOMEM`, or the
    /// driver's error.
    pub fn send(&self, peer: &Peer, message: &Message<'_>, _cx: &Sleepable) -> Result {
        self.post(peer, self.tid()?, 0, *message, 0, 0)?;
        Ok(())
    }

    /// Answers a request, with a status that is 0 for success. The answer may be lost.
    ///
    /// # Errors
    ///
    /// As [`Agent::send`]; `EINVAL` too if the MAD is a reply, of another class, or did not come
    /// through this port; or an error of finding the way back.
    pub fn reply(&self, to: &Received, status: u16, payload: &[u8], cx: &Sleepable) -> Result {
        let header = to.header();
        if header.is_response()
            || header.mgmt_class != self.class().id
            || !to.is_from(self.device().as_raw(), self.port())
        {
            return Err(EINVAL);
        }
        let message = Message {
            method: to.method().response(),
            attr_id: header.attr_id.get(),
            attr_mod: header.attr_mod.get(),
            payload,
        };
        let peer = Peer::sender(self, to, cx)?;
        self.post(&peer, header.tid.get(), status, message, 0, 0)?;
        Ok(())
    }

    /// Returns a transaction id, by which the MAD layer finds the agent when the reply comes.
    fn tid(&self) -> Result<u64> {
        let live = self.enter()?;
        // SAFETY: The agent is registered by the invariant of `Live`, and this does not change.
        let high = unsafe { (*live.as_raw()).hi_tid };
        Ok(u64::from(high) << 32 | u64::from(self.next_tid.fetch_add(1, Relaxed)))
    }

    fn post(
        &self,
        peer: &Peer,
        tid: u64,
        status: u16,
        message: Message<'_>,
        timeout_ms: u32,
        retries: u32,
    ) -> Result<Arc<Request>> {
        if !peer.is_seen_from(self.device(), self.port()) {
            return Err(EINVAL);
        }
        let outgoing = Outgoing {
            class: self.class(),
            message,
            status,
            tid,
        };
        let request = Request::new(peer)?;
        let live = self.enter()?;
        let mut buf = Buf::new(&live, peer, self.class())?;
        outgoing.write(buf.mad())?;
        request.post(buf, timeout_ms.try_into()?, retries.try_into()?)?;
        Ok(request)
    }
}
