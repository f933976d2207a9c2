// SPDX-License-Identifier: GPL-2.0

//! How connections are to be made.

/// How a connection is to be made, as `struct ib_cm_req_param` and `struct ib_cm_rep_param`.
#[derive(Clone, Copy, Debug)]
pub struct Param<'a> {
    /// What the peer gets along with the request or the answer; at most 92 bytes in a request, 196
    /// in an answer. The peer cannot tell how many they were: zeroes follow.
    pub private_data: &'a [u8],
    /// RDMA READs and atomics that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA READs and atomics that this side may have outstanding at the peer. With 0 they wait for
    /// ever.
    pub initiator_depth: u8,
    /// How often an unanswered packet is sent again, up to 7. rxe takes 7 for "always".
    pub retry_count: u8,
    /// How often a message is sent again when the peer has posted no receive, up to 7, which means
    /// "always".
    pub rnr_retry_count: u8,
    /// How long either side may take to answer the other one's request: 4.096 µs times two to the
    /// power of this, up to 31.
    pub response_timeout: u8,
    /// How often a request of the connection manager is sent again, 1 to 15.
    pub max_cm_retries: u8,
}

impl Default for Param<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: 6,
            rnr_retry_count: 6,
            response_timeout: 20,
            max_cm_retries: 15,
        }
    }
}

impl Param<'_> {
    /// Brings all values into the range of their fields.
    pub(super) fn clamp(self) -> Self {
        Self {
            retry_count: self.retry_count.min(7),
            rnr_retry_count: self.rnr_retry_count.min(7),
            response_timeout: self.response_timeout.min(31),
            // Without a retry C does not wait at all when it destroys the id.
            max_cm_retries: self.max_cm_retries.clamp(1, 15),
            ..self
        }
    }
}
