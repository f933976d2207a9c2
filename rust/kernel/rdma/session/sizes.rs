// SPDX-License-Identifier: GPL-2.0

//! The sizes of queues, from what a connection has to do.

use crate::{
    device::{
        Device,
        Protocol, //
    },
    prelude::internal::*,
    qp::Caps, //
};

/// The load of one connection at a time.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, qp::InitAttr, session::{Load, Sizes}};
///
/// /// Makes the QP of a target that serves 32 requests at a time. Each transfers up to 16 pages
/// /// and is answered by a SEND; and there is one SEND that belongs to no request.
/// fn target(id: &cm::Id, pd: &Pd, cx: &Sleepable) -> Result<Qp<Workqueue>> {
///     let load = Load {
///         requests: 32,
///         sends: 1,
///         transfers: 1,
///         pages: 16,
///         other_sends: 1,
///         recvs: 33,
///         ..Load::NONE
///     };
///     let sizes = Sizes::new(pd.device(), 1, &load).inspect_err(|e| pr_err!("{e}\n"))?;
///     let cq = Cq::alloc_any(pd.device(), sizes.entries, cx)?;
///     InitAttr::new(pd, &cq, &cq, &sizes.caps)
///         .rw_contexts(sizes.rw_contexts, 1)
///         .create_for(id, cx)
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The number of requests.
    pub requests: u32,
    /// The number of requests that may have all their work requests posted at a time, at their
    /// largest, while others wait in a [`Room`](super::Room); more of smaller ones may. 0 if all
    /// requests may.
    pub at_once: u32,
    /// The number of work requests that each of them posts to the send queue besides its transfers:
    /// the answer, or the SEND, a registration and its invalidation.
    pub sends: u32,
    /// The number of transfers by `rdma_rw` of each request.
    pub transfers: u32,
    /// The number of pages of a transfer. Without an MR, which `rdma_rw` takes for few of them,
    /// that takes a work request for each [`Load::send_sge`] pages.
    pub pages: u32,
    /// The number of work requests on the send queue that belong to no request.
    pub other_sends: u32,
    /// The number of receives, 0 if they are those of an SRQ.
    pub recvs: u32,
    /// The number of entries of a send.
    pub send_sge: u32,
    /// The number of entries of a receive.
    pub recv_sge: u32,
    /// The number of connections that share a CQ.
    pub connections: u32,
}

impl Load {
    /// No requests, of one entry each, on one connection.
    pub const NONE: Self = Self {
        requests: 0,
        at_once: 0,
        sends: 0,
        transfers: 0,
        pages: 0,
        other_sends: 0,
        recvs: 0,
        send_sge: 1,
        recv_sge: 1,
        connections: 1,
    };
}

/// A limit of a device, as a field of `struct ib_device_attr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// `max_qp_wr`, on the send queue.
    SendWr,
    /// `max_qp_wr`, on the receive queue.
    RecvWr,
    /// `max_send_sge`.
    SendSge,
    /// `max_recv_sge`.
    RecvSge,
    /// `max_cqe`.
    Cqe,
    /// `max_mr`, where the transfers of `rdma_rw` need MRs.
    Mr,
    /// `phys_port_cnt`.
    Port,
    /// `max_fast_reg_page_list_len` or `max_sge_rd`, of which the driver has not set one; or more
    /// pages than can be counted.
    Pages,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SendWr => "max_qp_wr of the send queue",
            Self::RecvWr => "max_qp_wr of the receive queue",
            Self::SendSge => "max_send_sge",
            Self::RecvSge => "max_recv_sge",
            Self::Cqe => "max_cqe",
            Self::Mr => "max_mr",
            Self::Port => "phys_port_cnt",
            Self::Pages => "max_fast_reg_page_list_len or max_sge_rd",
        })
    }
}

/// The reason that a device cannot have such queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The limit.
    pub limit: Limit,
    /// The number that was asked for.
    pub asked: u64,
    /// The number that the device has.
    pub has: u64,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, asked, has } = self;
        f.write_fmt(fmt!("{asked} asked for, of {has} by {limit}"))
    }
}

impl From<Misfit> for Error {
    fn from(_: Misfit) -> Self {
        EINVAL
    }
}

/// The sizes of a connection's queues.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Those of the QP, without what the core adds for transfers.
    pub caps: Caps,
    /// For [`InitAttr::rw_contexts`](crate::qp::InitAttr::rw_contexts).
    pub rw_contexts: u32,
    /// The number of entries of a CQ that serves both queues of all connections. An SRQ takes one
    /// more for each of its slots.
    pub entries: u32,
    /// The number of work requests that the requests may have posted at a time, for
    /// [`Room::new`](super::Room::new). The places of [`Load::other_sends`] are not among them.
    pub places: u32,
    transfer: TransferSizes,
}

/// The work requests of a transfer.
#[derive(Clone, Copy, Debug)]
struct TransferSizes {
    /// The number of pages of the largest one, and of its contexts.
    pages: u32,
    contexts: u32,
    /// The number of work requests of a context, at the most.
    requests: u32,
    /// The number of pages of a work request without an MR.
    sges: u32,
    /// The number of pages that a context, and a work request without an MR, has in any case.
    few: u32,
}

impl TransferSizes {
    /// Returns the number of work requests of a transfer of so many pages, at the most.
    fn places(&self, pages: u32) -> u32 {
        // As many contexts for a page as the largest transfer has, which is not less than it takes.
        let contexts = times(pages, self.contexts).div_ceil(self.pages.max(1).into());
        let counted = contexts.saturating_mul(self.requests.into());
        let requests = counted.max(pages.div_ceil(self.sges).into());
        requests.try_into().unwrap_or(u32::MAX)
    }
}

/// Returns the number that was asked for, if the device has as many.
fn check_limit(limit: Limit, asked: u64, has: u32) -> Result<u32, Misfit> {
    let has = u64::from(has);
    match u32::try_from(asked) {
        Ok(fits) if asked <= has => Ok(fits),
        _ => Err(Misfit { limit, asked, has }),
    }
}

fn times(a: u32, b: u32) -> u64 {
    u64::from(a).saturating_mul(b.into())
}

impl Sizes {
    /// Computes the sizes for a connection on a port. Fails with the device's limit if that is too
    /// low.
    pub fn new(dev: &Device, port: u32, load: &Load) -> Result<Self, Misfit> {
        let attrs = dev.attrs();
        let max_wr = attrs.max_qp_wr;
        let port = dev.port(port).ok_or_else(|| Misfit {
            limit: Limit::Port,
            asked: port.into(),
            has: dev.ports().count() as u64,
        })?;
        let each = match load.transfers {
            0 => 0,
            _ => port.rw_contexts(load.pages).map_err(|_| Misfit {
                limit: Limit::Pages,
                asked: load.pages.into(),
                has: 0,
            })?,
        };
        let at_once = match load.at_once {
            0 => load.requests,
            at_once => at_once.min(load.requests),
        };
        // Without an MR a request has no more pages than entries. The core counts as many for each
        // context as one by an MR takes, or one.
        let sges = load.send_sge.min(attrs.max_sge_rd).max(1);
        let requests = port.rw_requests(1).max(1);
        let transfer = TransferSizes {
            pages: load.pages,
            contexts: each,
            requests,
            sges,
            few: load.pages.checked_div(each).unwrap_or(0).min(sges),
        };
        let transfers = check_limit(Limit::SendWr, times(at_once, load.transfers), max_wr)?;
        let transferred = match transfers {
            0 => 0,
            _ => times(transfers, transfer.places(load.pages)),
        };
        // Each has places for its work requests, so small transfers do not need more contexts.
        let rw_contexts = times(load.requests, load.transfers)
            .saturating_mul(each.into())
            .min(transferred.div_ceil(requests.into()));
        let rw_contexts = check_limit(Limit::SendWr, rw_contexts, max_wr)?;
        if port.has(Protocol::Iwarp) || attrs.max_sgl_rd != 0 {
            check_limit(Limit::Mr, rw_contexts.into(), attrs.max_mr)?;
        }
        let counted = port.rw_requests(rw_contexts).into();
        let sends = times(at_once, load.sends)
            .saturating_add(load.other_sends.into())
            .saturating_add(transferred.saturating_sub(counted));
        // The drain of each queue needs one more.
        let drain = 1;
        let posted = sends.saturating_add(counted);
        let all = posted.saturating_add(drain);
        let all = check_limit(Limit::SendWr, all, max_wr)?;
        check_limit(
            Limit::RecvWr,
            u64::from(load.recvs).saturating_add(drain),
            max_wr,
        )?;
        check_limit(Limit::SendSge, load.send_sge.into(), attrs.max_send_sge)?;
        check_limit(Limit::RecvSge, load.recv_sge.into(), attrs.max_recv_sge)?;

        let entries = Caps::new(all.saturating_sub(drain as u32), load.recvs).entries();
        Ok(Self {
            caps: Caps {
                // At most `all`, which fits.
                send_wr: sends as u32,
                recv_wr: load.recvs,
                send_sge: load.send_sge,
                recv_sge: load.recv_sge,
            },
            rw_contexts,
            entries: check_limit(Limit::Cqe, times(entries, load.connections), attrs.max_cqe)?,
            // At most `all`, which fits.
            places: posted.saturating_sub(load.other_sends.into()) as u32,
            transfer,
        })
    }

    /// Returns the number of places that a transfer of `pages` pages takes in a
    /// [`Room`](super::Room), at the most. A request takes as many for each of its transfers, and
    /// one for each of its other work requests.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::session::Sizes;
    /// /// The places of a request that transfers so many pages and is answered by a SEND.
    /// fn places(sizes: &Sizes, pages: u32) -> u32 {
    ///     sizes.transfer(pages).saturating_add(1)
    /// }
    /// ```
    #[inline]
    pub fn transfer(&self, pages: u32) -> u32 {
        match pages {
            // One context.
            1.. if pages <= self.transfer.few => self.transfer.requests.max(1),
            _ => self.transfer.places(pages),
        }
    }
}
