// SPDX-License-Identifier: GPL-2.0

//! Sizes of queues that are computed from what a connection has to do.

use crate::fixture::{
    Counter,
    Env,
    NullEnv,
    OnDone, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    prelude::*,
    qp::InitAttr,
    rw::{
        Ctx,
        Rw, //
    },
    session::{
        Limit,
        Load,
        Sizes, //
    }, //
};
use rdma_null::Injection;

const TARGET: Load = Load {
    requests: 8,
    sends: 2,
    transfers: 2,
    pages: 16,
    other_sends: 1,
    recvs: 9,
    send_sge: 2,
    recv_sge: 1,
    connections: 2,
};

/// The length of a transfer.
const LEN: usize = TARGET.pages as usize * PAGE_SIZE;

#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    done: Arc<Counter>,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.done.up();
    }
}

/// Two QPs of these sizes have room on one CQ of theirs.
fn suffice(env: &Env, load: &Load) -> Result {
    let sizes = Sizes::new(&env.dev, 1, load)?;
    let cq = env.cq::<Softirq>(sizes.entries)?;
    let mut qps = KVec::new();
    for _ in 0..load.connections {
        let qp = InitAttr::new(&env.pd, &cq, &cq, &sizes.caps)
            .rw_contexts(sizes.rw_contexts, 1)
            .create(&env.cx)?;
        qps.push(qp, GFP_KERNEL)?;
    }
    Ok(())
}

/// Returns the limit that a load is beyond, what was asked for and what there is.
fn misfit(env: &Env, load: &Load) -> Option<(Limit, u64, u64)> {
    let misfit = Sizes::new(&env.dev, 1, load).err()?;
    pr_info!("{misfit}\n");
    Some((misfit.limit, misfit.asked, misfit.has))
}

fn are_limits_found(env: &Env) -> Result {
    let attrs = env.dev.attrs();
    let wr = u64::from(attrs.max_qp_wr);
    let one = Load {
        requests: 1,
        sends: 1,
        recvs: 1,
        ..Load::NONE
    };
    let all = Load {
        requests: attrs.max_qp_wr - 1,
        ..one
    };
    // On rxe queues may be longer than CQs.
    let found = misfit(env, &all).map(|(limit, ..)| limit);
    check!(matches!(found, None | Some(Limit::Cqe)));
    let more = Load {
        other_sends: 1,
        ..all
    };
    check_eq!(misfit(env, &more), Some((Limit::SendWr, wr + 1, wr)));
    let recvs = Load {
        recvs: attrs.max_qp_wr,
        ..one
    };
    check_eq!(misfit(env, &recvs), Some((Limit::RecvWr, wr + 1, wr)));
    let send_sge = Load {
        send_sge: attrs.max_send_sge + 1,
        ..one
    };
    let has = u64::from(attrs.max_send_sge);
    check_eq!(misfit(env, &send_sge), Some((Limit::SendSge, has + 1, has)));
    let recv_sge = Load {
        recv_sge: attrs.max_recv_sge + 1,
        ..one
    };
    let has = u64::from(attrs.max_recv_sge);
    check_eq!(misfit(env, &recv_sge), Some((Limit::RecvSge, has + 1, has)));
    let connections = Load {
        connections: u32::MAX,
        ..one
    };
    let found = misfit(env, &connections).map(|(limit, _, has)| (limit, has));
    check_eq!(found, Some((Limit::Cqe, attrs.max_cqe.into())));
    // Products that do not fit into 32 bits, nor into 64.
    let most = Load {
        requests: u32::MAX,
        sends: u32::MAX,
        transfers: u32::MAX,
        pages: u32::MAX / 2,
        other_sends: u32::MAX,
        recvs: u32::MAX,
        send_sge: u32::MAX,
        recv_sge: u32::MAX,
        connections: u32::MAX,
    };
    check_eq!(
        misfit(env, &most).map(|(limit, ..)| limit),
        Some(Limit::SendWr)
    );
    let pages = Load {
        transfers: 1,
        pages: u32::MAX,
        ..one
    };
    check_eq!(
        misfit(env, &pages).map(|(limit, ..)| limit),
        Some(Limit::Pages)
    );
    let port = Sizes::new(&env.dev, 200, &one).err();
    check_eq!(port.map(|misfit| misfit.limit), Some(Limit::Port));
    Ok(())
}

#[kunit_tests(rdma_session_sizes)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_these_sizes_are_made() -> Result {
        suffice(&Env::new()?, &TARGET)
    }

    #[test]
    fn queues_of_these_sizes_are_made_on_null() -> Result {
        suffice(&NullEnv::new()?.env, &TARGET)
    }

    /// On devices whose transfers need MRs.
    #[test]
    fn queues_of_these_sizes_are_made_on_iwarp() -> Result {
        suffice(&NullEnv::iwarp()?.env, &TARGET)
    }

    #[test]
    fn limits_are_found() -> Result {
        are_limits_found(&Env::new()?)
    }

    #[test]
    fn limits_are_found_on_null() -> Result {
        are_limits_found(&NullEnv::new()?.env)
    }

    /// All requests transfer their pages and send their messages before one completes.
    #[test]
    fn queue_of_this_size_has_room_for_all() -> Result {
        let (null, done) = (NullEnv::new()?, Counter::new()?);
        let env = &null.env;
        let sizes = Sizes::new(&env.dev, 1, &TARGET)?;
        let cq = env.cq::<Direct>(sizes.entries)?;
        let qp = InitAttr::new(&env.pd, &cq, &cq, &sizes.caps)
            .rw_contexts(sizes.rw_contexts, 1)
            .create(&env.cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        let transfers = TARGET.requests * TARGET.transfers;
        for _ in 0..transfers {
            let transfer = Transfer {
                cqe: Cqe::new(),
                data: Ctx::alloc(LEN, &env.cx)?,
                done: done.clone(),
            };
            let transfer = KBox::pin(transfer, GFP_KERNEL)?;
            qp.post_rw(transfer, |x| {
                let remote = Remote { addr: 0, rkey: 0 };
                Ok(Rw::write(&x.data, 0..LEN, remote, &env.cx))
            })?;
        }
        let sends = TARGET.requests * TARGET.sends + TARGET.other_sends;
        for _ in 0..sends {
            let done = done.clone();
            let send = OnDone::<context::Atomic, _>::new(move |_, _| {
                done.up();
            })?;
            qp.post_send(send, |_| Ok(SendWr::send([])))?;
        }
        while cq.process(64) > 0 {}
        check_eq!(done.get() as u32, transfers + sends);
        Ok(())
    }

    /// A driver that does not say how much one request can have.
    #[test]
    fn vague_device_has_no_transfers() -> Result {
        let null = NullEnv::vague()?;
        check_eq!(
            misfit(&null.env, &TARGET).map(|found| found.0),
            Some(Limit::Pages)
        );
        Ok(())
    }
}
