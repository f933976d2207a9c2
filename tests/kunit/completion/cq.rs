// SPDX-License-Identifier: GPL-2.0

//! Completion queues: sizes, vectors, polling by budget.

use crate::fixture::{
    received,
    recv,
    send,
    wait,
    Env,
    Inbox,
    Link,
    Polls, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// A CQ in context `C` is of the device, is large enough, and nothing of it is leased.
fn allocates<C: FixedContext>() -> Result {
    let env = Env::new()?;
    for entries in [1, 2, 100, 128] {
        let cq = Cq::<C>::alloc(&env.dev, entries, 0, &env.cx)?;
        check!(cq.entries() >= entries);
        check_eq!(cq.free_entries(), cq.entries());
        check!(cq.device() == &env.dev);
    }
    Ok(())
}

/// Makes `n` completions wait in the receive CQ.
fn pending(link: &Link<Direct>, inbox: &Arc<Inbox>, n: usize) -> Result {
    let sent = Inbox::new()?;
    for _ in 0..n {
        recv(&link.b.qp, link.env.message(inbox, &[0; 8])?)?;
    }
    for _ in 0..n {
        send(&link.a.qp, link.env.message(&sent, &[7; 8])?)?;
    }
    wait(|| {
        Direct::poll(&link.send_cq);
        sent.len() == n
    })?;
    for completed in sent.take() {
        completed.ok()?;
    }
    received(&link.env, &link.a.qp, &link.b.qp, || {
        Direct::poll(&link.send_cq)
    })
}

#[kunit_tests(rdma_cq)]
mod tests {
    use super::*;

    #[test]
    fn allocates_direct() -> Result {
        allocates::<Direct>()
    }

    #[test]
    fn allocates_softirq() -> Result {
        allocates::<Softirq>()
    }

    #[test]
    fn allocates_workqueue() -> Result {
        allocates::<Workqueue>()
    }

    #[test]
    fn allocates_unbound_workqueue() -> Result {
        allocates::<UnboundWorkqueue>()
    }

    #[test]
    fn allocates_on_any_vector() -> Result {
        let env = Env::new()?;
        let cq = Cq::<Softirq>::alloc_any(&env.dev, 33, &env.cx)?;
        check!(cq.entries() >= 33);
        Ok(())
    }

    #[test]
    fn no_entries_are_refused() -> Result {
        let env = Env::new()?;
        check_err!(Cq::<Direct>::alloc(&env.dev, 0, 0, &env.cx), EINVAL);
        check_err!(Cq::<Softirq>::alloc_any(&env.dev, 0, &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn largest_size_is_given() -> Result {
        let env = Env::new()?;
        let cq = Cq::<Workqueue>::alloc(&env.dev, env.dev.attrs().max_cqe, 0, &env.cx)?;
        check!(cq.entries() >= env.dev.attrs().max_cqe);
        Ok(())
    }

    #[test]
    fn larger_sizes_are_refused() -> Result {
        let env = Env::new()?;
        for entries in [env.dev.attrs().max_cqe + 1, 1 << 31, u32::MAX] {
            check_err!(Cq::<Softirq>::alloc(&env.dev, entries, 0, &env.cx), EINVAL);
            check_err!(Cq::<Softirq>::alloc_any(&env.dev, entries, &env.cx), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn all_vectors_can_be_used() -> Result {
        let env = Env::new()?;
        for vector in 0..env.dev.num_comp_vectors() {
            Cq::<Softirq>::alloc(&env.dev, 16, vector, &env.cx)?;
        }
        Ok(())
    }

    #[test]
    fn other_vectors_are_refused() -> Result {
        let env = Env::new()?;
        for vector in [env.dev.num_comp_vectors(), 1 << 31, u32::MAX] {
            check_err!(Cq::<Softirq>::alloc(&env.dev, 16, vector, &env.cx), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn empty_cq_has_nothing_to_process() -> Result {
        let env = Env::new()?;
        let cq = env.cq::<Direct>(16)?;
        check_eq!(cq.process(0), 0);
        check_eq!(cq.process(1), 0);
        check_eq!(cq.process(u32::MAX), 0);
        Ok(())
    }

    #[test]
    fn budget_of_zero_processes_nothing() -> Result {
        let (link, inbox) = (Link::<Direct>::new()?, Inbox::new()?);
        pending(&link, &inbox, 2)?;
        check_eq!(link.recv_cq.process(0), 0);
        check_eq!(inbox.len(), 0);
        check_eq!(link.recv_cq.process(2), 2);
        Ok(())
    }

    #[test]
    fn budget_bounds_what_is_processed() -> Result {
        let (link, inbox) = (Link::<Direct>::new()?, Inbox::new()?);
        pending(&link, &inbox, 5)?;
        check_eq!(link.recv_cq.process(2), 2);
        check_eq!(inbox.len(), 2);
        check_eq!(link.recv_cq.process(1), 1);
        check_eq!(inbox.len(), 3);
        check_eq!(link.recv_cq.process(100), 2);
        check_eq!(inbox.len(), 5);
        check_eq!(link.recv_cq.process(1), 0);
        Ok(())
    }

    #[test]
    fn huge_budget_is_bounded_too() -> Result {
        let (link, inbox) = (Link::<Direct>::new()?, Inbox::new()?);
        pending(&link, &inbox, 3)?;
        check_eq!(link.recv_cq.process(u32::MAX), 3);
        for completed in inbox.take() {
            check_eq!(completed.ok()?.byte_len, 8);
        }
        Ok(())
    }

    #[test]
    fn each_completion_is_processed_once() -> Result {
        let (link, inbox) = (Link::<Direct>::new()?, Inbox::new()?);
        pending(&link, &inbox, 8)?;
        let clone = link.recv_cq.clone();
        let mut n = 0;
        for _ in 0..8 {
            n += clone.process(1) + link.recv_cq.process(1);
        }
        check_eq!(n, 8);
        check_eq!(inbox.len(), 8);
        Ok(())
    }
}
