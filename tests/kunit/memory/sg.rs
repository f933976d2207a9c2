// SPDX-License-Identifier: GPL-2.0

//! Memory in pages: its entries, its registration, and the CPU's view of it.

use crate::fixture::{
    both,
    invalidate,
    pattern,
    read,
    register,
    write,
    Env,
    Link, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    prelude::*,
    rw::Ctx, //
};

type Paged = SgBuf<Bidirectional>;

#[kunit_tests(rdma_sg)]
mod tests {
    use super::*;

    #[test]
    fn lengths() -> Result {
        let env = Env::new()?;
        for len in [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 100_000] {
            let mut memory = Paged::alloc(&env.pd, len, &env.cx)?;
            let mut lens = 0;
            for page in memory.cpu().pages() {
                check!(page.iter().all(|byte| *byte == 0));
                lens += page.len();
            }
            check_eq!(lens, len);
        }
        for len in [0, 1 << 32] {
            check_err!(Paged::alloc(&env.pd, len, &env.cx), EINVAL);
            check_err!(Ctx::alloc(len, &env.cx), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn bytes_are_read_where_they_were_written() -> Result {
        let env = Env::new()?;
        let (len, all) = (3 * PAGE_SIZE - 100, pattern(3 * PAGE_SIZE - 100)?);
        let mut memory = Paged::alloc(&env.pd, len, &env.cx)?;
        memory.cpu().write(0, &all)?;
        for (i, page) in memory.cpu().pages().enumerate() {
            check!(*page == all[i * PAGE_SIZE..len.min((i + 1) * PAGE_SIZE)]);
            page[0] = 77;
        }
        let mut across = [0; 10];
        memory.cpu().read(2 * PAGE_SIZE - 5, &mut across)?;
        check!(across[..5] == all[2 * PAGE_SIZE - 5..2 * PAGE_SIZE]);
        check_eq!(across[5], 77);
        Ok(())
    }

    #[test]
    fn bytes_outside_are_refused() -> Result {
        let env = Env::new()?;
        let mut memory = Paged::alloc(&env.pd, 5000, &env.cx)?;
        let mut bytes = [0; 4];
        for offset in [4997, 5000, 5001, usize::MAX - 1] {
            check_err!(memory.cpu().read(offset, &mut bytes), EINVAL);
            check_err!(memory.cpu().write(offset, &bytes), EINVAL);
        }
        memory.cpu().write(4996, &bytes)?;
        Ok(())
    }

    #[test]
    fn region_of_many_pages() -> Result {
        let link = Link::<Softirq>::new()?;
        let all = pattern(40 * PAGE_SIZE - 5)?;
        let memory = Paged::alloc(&link.env.pd, all.len(), &link.env.cx)?;
        let (region, remote) = register(&link, Region::new(memory, &link.env.cx)?, both)?;
        write(&link, remote, &all)?.ok()?;
        check!(read(&link, remote, all.len())?.bytes()?[..] == all[..]);
        let middle = Remote {
            addr: remote.addr + 7 * PAGE_SIZE as u64 - 2,
            ..remote
        };
        check!(read(&link, middle, 4)?.bytes()?[..] == all[7 * PAGE_SIZE - 2..7 * PAGE_SIZE + 2]);
        let (region, _) = invalidate(&link, region)?;
        let (_, mut memory) = region.into_parts().map_err(|_| EBUSY)?;
        for (i, page) in memory.cpu().pages().enumerate() {
            check!(*page == all[i * PAGE_SIZE..all.len().min((i + 1) * PAGE_SIZE)]);
        }
        Ok(())
    }

    #[test]
    fn largest_region() -> Result {
        let env = Env::new()?;
        let most = env.dev.attrs().max_fast_reg_page_list_len as usize * PAGE_SIZE;
        Region::new(Paged::alloc(&env.pd, most, &env.cx)?, &env.cx)?;
        let more = Paged::alloc(&env.pd, most + 1, &env.cx)?;
        check_err!(Region::new(more, &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn bytes_of_a_region() -> Result {
        let env = Env::new()?;
        let memory = Paged::alloc(&env.pd, 2 * PAGE_SIZE, &env.cx)?;
        let region = Region::new(memory, &env.cx)?;
        region.write(PAGE_SIZE - 2, b"abcd")?;
        let mut bytes = [0; 6];
        region.read(PAGE_SIZE - 3, &mut bytes)?;
        check_eq!(&bytes, b"\0abcd\0");
        check_err!(region.read(2 * PAGE_SIZE - 5, &mut bytes), EINVAL);
        check_err!(region.write(2 * PAGE_SIZE - 5, &bytes), EINVAL);
        Ok(())
    }
}
