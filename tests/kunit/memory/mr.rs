// SPDX-License-Identifier: GPL-2.0

//! Regions: their making, their registration, and the CPU's view of them.

use crate::fixture::{
    both,
    readable,
    Env,
    Link,
    RegOwner,
    Registered, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::prelude::*;

fn region(env: &Env, len: usize) -> Result<Region<Bidirectional>> {
    Region::new(Buf::alloc(&env.pd, len, &env.cx)?, &env.cx)
}

#[kunit_tests(rdma_mr)]
mod tests {
    use super::*;

    #[test]
    fn region_is_as_long_as_its_buffer() -> Result {
        let env = Env::new()?;
        for len in [1, 100, PAGE_SIZE, PAGE_SIZE + 1, 100_000] {
            check_eq!(region(&env, len)?.len(), len);
        }
        Ok(())
    }

    #[test]
    fn largest_region() -> Result {
        let env = Env::new()?;
        let pages = env.dev.attrs().max_fast_reg_page_list_len as usize;
        region(&env, (pages - 1) * PAGE_SIZE)?;
        Ok(())
    }

    #[test]
    fn larger_region_is_refused() -> Result {
        let env = Env::new()?;
        let pages = env.dev.attrs().max_fast_reg_page_list_len as usize;
        check_err!(region(&env, pages * PAGE_SIZE), EINVAL);
        check_err!(region(&env, (pages - 1) * PAGE_SIZE + 1), EINVAL);
        Ok(())
    }

    #[test]
    fn region_has_the_bytes_of_its_buffer() -> Result {
        let env = Env::new()?;
        let mut buf = Buf::<ToDevice>::alloc(&env.pd, 4, &env.cx)?;
        buf.cpu().copy_from_slice(b"data");
        let region = Region::new(buf, &env.cx)?;
        let mut bytes = [0; 4];
        region.read(0, &mut bytes)?;
        check_eq!(&bytes, b"data");
        Ok(())
    }

    #[test]
    fn bytes_are_read_where_they_were_written() -> Result {
        let env = Env::new()?;
        let region = region(&env, 8)?;
        region.write(2, b"abc")?;
        region.write(8, b"")?;
        let mut bytes = [1; 8];
        region.read(0, &mut bytes)?;
        check_eq!(&bytes, b"\0\0abc\0\0\0");
        let mut one = [0];
        region.read(3, &mut one)?;
        check_eq!(&one, b"b");
        Ok(())
    }

    #[test]
    fn copies_outside_of_the_region_are_refused() -> Result {
        let env = Env::new()?;
        let region = region(&env, 8)?;
        let mut bytes = [0; 4];
        for offset in [5, 8, 9, usize::MAX - 1, usize::MAX] {
            check_err!(region.read(offset, &mut bytes), EINVAL);
            check_err!(region.write(offset, &bytes), EINVAL);
        }
        region.read(4, &mut bytes)?;
        check_err!(region.read(9, &mut []), EINVAL);
        Ok(())
    }

    #[test]
    fn registration_completes() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::<Bidirectional>::new(&link, 64, both)?;
        check!(registered.remote.rkey != 0);
        Ok(())
    }

    #[test]
    fn registered_region_cannot_be_registered_again() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::<Bidirectional>::new(&link, 64, readable)?;
        let owner = RegOwner::new(&registered.region)?;
        match link
            .a
            .qp
            .post_send(owner, |o| Ok(RegWr::remote_write(&o.region)))
        {
            Ok(_) => Err(crate::check::fail("it was registered twice")),
            Err(e) => {
                check_eq!(e.error(), EBUSY);
                check!(Arc::ptr_eq(&e.owner.ok_or(EIO)?.region, &registered.region));
                Ok(())
            }
        }
    }

    #[test]
    fn region_of_a_foreign_pd_is_not_registered() -> Result {
        let (link, foreign) = (Link::<Softirq>::new()?, Env::new()?);
        let region = foreign.region(16)?;
        for _ in 0..2 {
            // The second time too: the region was not marked.
            let posted = link.a.qp.post_send(RegOwner::new(&region)?, |o| {
                Ok(RegWr::remote_read(&o.region))
            });
            check_err!(posted, EINVAL);
        }
        Ok(())
    }

    #[test]
    fn refused_registration_can_be_tried_again() -> Result {
        not_on_iwarp!(c"siw refuses it with another error");
        let link = Link::<Softirq>::new()?;
        let unconnected = Qp::create(
            &link.env.id()?,
            &link.env.pd,
            &link.env.cq::<Softirq>(64)?,
            &link.env.cq::<Softirq>(64)?,
            &Caps::new(4, 4),
            &link.env.cx,
        )?;
        let region = link.env.region(16)?;
        for _ in 0..2 {
            let posted = unconnected.post_send(RegOwner::new(&region)?, |o| {
                Ok(RegWr::remote_read(&o.region))
            });
            check_err!(posted, EINVAL);
        }
        Registered::of(&link, region, readable)?;
        Ok(())
    }

    #[test]
    fn each_registration_has_its_own_key() -> Result {
        let link = Link::<Softirq>::new()?;
        let one = Registered::<Bidirectional>::new(&link, 64, readable)?;
        let two = Registered::<Bidirectional>::new(&link, 64, readable)?;
        check!(one.remote.rkey != two.remote.rkey);
        Ok(())
    }

    #[test]
    fn region_outlives_its_connection() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::<Bidirectional>::new(&link, 64, both)?;
        drop(link);
        registered.region.write(0, b"still here")?;
        let mut bytes = [0; 10];
        registered.region.read(0, &mut bytes)?;
        check_eq!(&bytes, b"still here");
        Ok(())
    }

    #[test]
    fn many_regions() -> Result {
        let env = Env::new()?;
        let mut regions = KVec::new();
        for i in 0..20 {
            regions.push(region(&env, 100 + i)?, GFP_KERNEL)?;
        }
        for (i, region) in regions.iter().enumerate() {
            region.write(99 + i, &[i as u8])?;
        }
        Ok(())
    }
}
