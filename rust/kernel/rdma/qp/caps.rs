// SPDX-License-Identifier: GPL-2.0

//! The sizes of queues.

/// The sizes of a QP's queues.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Requests that can be outstanding on the send queue.
    pub send_wr: u32,
    /// Requests that can be outstanding on the receive queue.
    pub recv_wr: u32,
    /// Entries of a send request.
    pub send_sge: u32,
    /// Entries of a receive request.
    pub recv_sge: u32,
}

impl Caps {
    /// Returns the sizes of queues whose requests have one entry each.
    pub const fn new(send_wr: u32, recv_wr: u32) -> Self {
        Self {
            send_wr,
            recv_wr,
            send_sge: 1,
            recv_sge: 1,
        }
    }

    /// Returns how many CQ entries a QP of this size leases, at the most, from a CQ that serves
    /// both its queues.
    ///
    /// That is one for each request and one for the drain of each queue, rounded up as drivers do.
    pub const fn entries(&self) -> u32 {
        const fn round_up(wr: u32) -> u32 {
            match wr.saturating_add(2).checked_next_power_of_two() {
                Some(entries) => entries,
                None => u32::MAX,
            }
        }
        round_up(self.send_wr).saturating_add(round_up(self.recv_wr))
    }
}
