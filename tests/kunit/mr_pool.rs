// SPDX-License-Identifier: GPL-2.0

//! Pools of MRs.

use crate::fixture::{
    both,
    invalidate,
    register,
    write,
    write_flushed,
    CountDrop,
    Counter,
    Env,
    Link,
    Polled, //
};
use kernel::prelude::*;
use rdma::{
    mr::Pool,
    prelude::*, //
};

fn region(
    env: &Env,
    pool: &Pool,
    len: usize,
) -> Result<Region<Bidirectional, SgBuf<Bidirectional>>> {
    let memory = SgBuf::alloc(&env.pd, len, &env.cx)?;
    Ok(Region::map(pool.get().ok_or(ENOMEM)?, memory)?)
}

/// Uses an MR of a pool in a handler of context `C`.
fn get_in_handler<C: Polled>() -> Result {
    let link = Link::<C>::new()?;
    let pool = Pool::new(&link.env.pd, 1, 1, &link.env.cx)?;
    let (inner, done) = (pool.clone(), Counter::new()?);
    let counted = CountDrop(done.clone());
    let function = move |_: &Wc, _: &Atomic| {
        if inner.get().is_none() || inner.get().is_none() {
            pr_err!("FAILED: an MR did not return\n");
        }
        drop(counted);
    };
    let request = crate::fixture::OnDone::new(function)?;
    link.a.qp.post_send(request, |_| {
        let nowhere = Remote { addr: 0, rkey: 0 };
        Ok(SendWr::rdma_write([], nowhere))
    })?;
    link.wait(|| done.get() == 1)?;
    check_eq!(pool.available(), 1);
    Ok(())
}

#[kunit_tests(rdma_mr_pool)]
mod tests {
    use super::*;

    #[test]
    fn is_exhausted_and_filled_again() -> Result {
        let env = Env::new()?;
        let pool = Pool::new(&env.pd, 4, 2, &env.cx)?;
        check_eq!(pool.available(), 4);
        let mut taken = KVec::new();
        while let Some(mr) = pool.get() {
            check_eq!(mr.pages(), 2);
            taken.push(mr, GFP_KERNEL)?;
        }
        check_eq!(taken.len(), 4);
        check_eq!(pool.available(), 0);
        taken.clear();
        check_eq!(pool.available(), 4);
        check_eq!(pool.lost(), 0);
        Ok(())
    }

    #[test]
    fn sizes_are_checked() -> Result {
        let env = Env::new()?;
        check_err!(Pool::new(&env.pd, 1, 0, &env.cx), EINVAL);
        let most = env.dev.attrs().max_fast_reg_page_list_len;
        check_err!(Pool::new(&env.pd, 1, most + 1, &env.cx), EINVAL);
        let none = Pool::new(&env.pd, 0, 1, &env.cx)?;
        check!(none.get().is_none());
        Ok(())
    }

    #[test]
    fn mr_returns_with_its_region() -> Result {
        let env = Env::new()?;
        let pool = Pool::new(&env.pd, 1, 4, &env.cx)?;
        let region = region(&env, &pool, 10_000)?;
        check_eq!(pool.available(), 0);
        drop(region);
        check_eq!((pool.available(), pool.lost()), (1, 0));
        Ok(())
    }

    #[test]
    fn invalidated_mr_returns() -> Result {
        let link = Link::<Softirq>::new()?;
        let pool = Pool::new(&link.env.pd, 1, 4, &link.env.cx)?;
        for i in 1..6u8 {
            let region = region(&link.env, &pool, 10_000)?;
            let (region, remote) = register(&link, region, both)?;
            write_flushed(&link, remote, &[i; 9])?;
            let (region, _) = invalidate(&link, region)?;
            let (mr, memory) = region.into_parts().map_err(|_| EBUSY)?;
            let (mut pages, mut got) = (memory.unmap(), [0; 9]);
            pages.cpu().read(0, &mut got)?;
            check_eq!(got, [i; 9]);
            check_eq!(pool.available(), 0);
            drop(mr);
            check_eq!(pool.available(), 1);
        }
        check_eq!(pool.lost(), 0);
        Ok(())
    }

    #[test]
    fn registered_mr_is_lost_and_replaced() -> Result {
        let link = Link::<Softirq>::new()?;
        let pool = Pool::new(&link.env.pd, 2, 4, &link.env.cx)?;
        for i in 1..3 {
            let (region, _) = register(&link, region(&link.env, &pool, 100)?, both)?;
            drop(region);
            check_eq!(pool.lost(), i);
        }
        check_eq!(pool.available(), 0);
        check!(pool.get().is_none());
        pool.refill(&link.env.cx)?;
        check_eq!((pool.available(), pool.lost()), (2, 0));
        pool.refill(&link.env.cx)?;
        check_eq!(pool.available(), 2);
        let (region, remote) = register(&link, region(&link.env, &pool, 100)?, both)?;
        write(&link, remote, b"new")?.ok()?;
        drop(region);
        Ok(())
    }

    #[test]
    fn mr_outlives_its_pool() -> Result {
        let env = Env::new()?;
        let pool = Pool::new(&env.pd, 2, 1, &env.cx)?;
        let mr = pool.get().ok_or(ENOMEM)?;
        drop(pool);
        let memory = SgBuf::<FromDevice>::alloc(&env.pd, 10, &env.cx)?;
        Region::map(mr, memory)?;
        Ok(())
    }

    #[test]
    fn in_softirq_handlers() -> Result {
        get_in_handler::<Softirq>()
    }

    #[test]
    fn in_workqueue_handlers() -> Result {
        get_in_handler::<Workqueue>()
    }
}
