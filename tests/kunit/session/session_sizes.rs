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
use rdma_null::{
    Injection,
    NullDevice, //
};

const TARGET: Load = Load {
    requests: 8,
    at_once: 0,
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

/// An I/O queue of NVMe: 128 commands of 1 MiB.
const DEPTH: u32 = 128;
const PAGES: u32 = 256;

/// The sizes of a queue, the places of drains included.
#[derive(Debug)]
struct Queue {
    sends: u32,
    recvs: u32,
    entries: u32,
    contexts: u32,
}

impl Queue {
    /// Returns what `nvmet_rdma_create_queue_ib()` asks for, and what that has `rdma_rw_init_qp()`
    /// add.
    fn of_nvmet(env: &Env) -> Result<Self> {
        let port = env.dev.port(1).ok_or(ENODEV)?;
        let contexts = DEPTH * port.rw_contexts(PAGES)?;
        let sends = DEPTH + 1 + port.rw_requests(contexts);
        Ok(Self {
            sends: sends.min(env.dev.attrs().max_qp_wr),
            recvs: DEPTH + 1,
            entries: DEPTH + 2 * DEPTH + 1,
            contexts,
        })
    }

    /// Returns the sizes of a queue of which `at_once` commands of 1 MiB are posted at a time.
    fn with_room(env: &Env, at_once: u32) -> Result<(Self, Sizes)> {
        let port = env.dev.port(1).ok_or(ENODEV)?;
        let load = Load {
            requests: DEPTH,
            at_once,
            sends: 1,
            transfers: 1,
            pages: PAGES,
            send_sge: env.dev.attrs().max_send_sge,
            recvs: DEPTH,
            ..Load::NONE
        };
        let sizes = Sizes::new(&env.dev, 1, &load)?;
        let this = Self {
            sends: sizes.caps.send_wr + port.rw_requests(sizes.rw_contexts) + 1,
            recvs: sizes.caps.recv_wr + 1,
            entries: sizes.entries,
            contexts: sizes.rw_contexts,
        };
        Ok((this, sizes))
    }

    /// Makes the queues and the CQ, and returns the sizes that the device has given.
    fn given(&self, env: &Env) -> Result<Self> {
        let port = env.dev.port(1).ok_or(ENODEV)?;
        let caps = Caps {
            send_sge: env.dev.attrs().max_send_sge,
            ..Caps::new(
                self.sends - port.rw_requests(self.contexts) - 1,
                self.recvs - 1,
            )
        };
        let entries = env.cq::<Softirq>(self.entries)?.entries();
        // C does not reserve.
        let cq = env.cq::<Softirq>(Caps::new(self.sends, self.recvs).entries())?;
        let qp = InitAttr::new(&env.pd, &cq, &cq, &caps)
            .rw_contexts(self.contexts, 1)
            .create(&env.cx)?;
        let caps = qp.query(&env.cx)?.caps;
        Ok(Self {
            sends: caps.send_wr,
            recvs: caps.recv_wr,
            entries,
            contexts: self.contexts,
        })
    }

    fn all(&self) -> u32 {
        self.sends + self.recvs + self.entries
    }

    /// Fails if this is more than 1.25 of another.
    #[track_caller]
    fn is_little_more_than(&self, other: &Self) -> Result {
        pr_info!(
            "{} entries, in C {}: {self:?}, {other:?}\n",
            self.all(),
            other.all()
        );
        check!(4 * self.all() <= 5 * other.all());
        check!(self.contexts <= other.contexts);
        Ok(())
    }
}

/// With a room an I/O queue is not much longer than that of C, whose CQ is too short for what it
/// may have to flush. Without it, it is.
fn is_io_queue_short(env: &Env) -> Result {
    let nvmet = Queue::of_nvmet(env)?;
    let (quarter, sizes) = Queue::with_room(env, DEPTH / 4)?;
    // As `nvmet_rdma_rs` has it: two work requests for each command.
    let (twice, _) = Queue::with_room(env, 2 * DEPTH / (sizes.transfer(PAGES) + 1))?;
    for queue in [quarter, twice] {
        queue.is_little_more_than(&nvmet)?;
        queue.given(env)?.is_little_more_than(&nvmet.given(env)?)?;
    }
    let (all, _) = Queue::with_room(env, 0)?;
    check!(4 * all.all() > 5 * nvmet.all());
    Ok(())
}

/// Whatever has its places finds room, in the queue and in the pool of MRs, for transfers of any
/// size.
fn places_are_there(env: &Env, dev: &NullDevice, pages: u32, at_once: u32) -> Result {
    let load = Load {
        requests: 64,
        at_once,
        sends: 1,
        transfers: 1,
        pages,
        recvs: 1,
        ..Load::NONE
    };
    let sizes = Sizes::new(&env.dev, 1, &load)?;
    check_eq!(
        sizes.places,
        sizes.caps.send_wr + (env.dev.port(1).ok_or(ENODEV)?).rw_requests(sizes.rw_contexts)
    );
    check!(at_once * (sizes.transfer(pages) + 1) <= sizes.places);
    for pages in [1, pages / 3 + 1, pages] {
        let done = Counter::new()?;
        let cq = env.cq::<Direct>(sizes.entries)?;
        let qp = InitAttr::new(&env.pd, &cq, &cq, &sizes.caps)
            .rw_contexts(sizes.rw_contexts, 1)
            .create(&env.cx)?;
        dev.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        let count = (sizes.places / (sizes.transfer(pages) + 1)).min(load.requests);
        check!(count >= at_once);
        for _ in 0..count {
            let transfer = Transfer {
                cqe: Cqe::new(),
                data: Ctx::alloc(pages as usize * PAGE_SIZE, &env.cx)?,
                done: done.clone(),
            };
            qp.post_rw(KBox::pin(transfer, GFP_KERNEL)?, |x| {
                let remote = Remote { addr: 0, rkey: 0 };
                Ok(Rw::read(&x.data, .., remote, &env.cx))
            })?;
            let sent = done.clone();
            let send = OnDone::<context::Atomic, _>::new(move |_, _| {
                sent.up();
            })?;
            qp.post_send(send, |_| Ok(SendWr::send([])))?;
        }
        while cq.process(64) > 0 {}
        check_eq!(done.get() as u32, 2 * count);
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
        at_once: 0,
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
    fn io_queue_is_short() -> Result {
        is_io_queue_short(&Env::new()?)
    }

    #[test]
    fn io_queue_is_short_on_null() -> Result {
        is_io_queue_short(&NullEnv::new()?.env)
    }

    #[test]
    fn io_queue_is_short_on_iwarp() -> Result {
        is_io_queue_short(&NullEnv::iwarp()?.env)
    }

    #[test]
    fn places_are_there_on_null() -> Result {
        let null = NullEnv::new()?;
        places_are_there(&null.env, &null.dev, 8, 4)
    }

    /// A transfer of so many pages takes two MRs.
    #[test]
    fn places_are_there_on_iwarp() -> Result {
        let null = NullEnv::iwarp()?;
        places_are_there(&null.env, &null.dev, 300, 2)
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
