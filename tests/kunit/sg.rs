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
use rdma::prelude::*;

type Paged = SgBuf<Bidirectional>;

/// A message from pages to pages.
#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    memory: Paged,
    back: Arc<crate::fixture::Counter>,
    bytes: Arc<kernel::sync::SpinLockIrq<[u8; 16]>>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        // The link may end before the sender knows that its message was received.
        if wc.result().is_err() {
            return;
        }
        let mut around = [0; 16];
        if this.memory.cpu().read(PAGE_SIZE - 8, &mut around).is_ok() {
            *this.bytes.lock() = around;
        }
        this.back.up();
    }
}

impl Message {
    fn new(env: &Env, bytes: &[u8]) -> Result<Pin<KBox<Self>>> {
        let mut memory = Paged::alloc(&env.pd, bytes.len(), &env.cx)?;
        memory.cpu().write(0, bytes)?;
        let this = Self {
            cqe: Cqe::new(),
            memory,
            back: crate::fixture::Counter::new()?,
            bytes: Arc::pin_init(kernel::new_spinlock_irq!([0; 16]), GFP_KERNEL)?,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }
}

#[kunit_tests(rdma_sg)]
mod tests {
    use super::*;

    #[test]
    fn lengths() -> Result {
        let env = Env::new()?;
        for len in [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 100_000] {
            let mut pages = Pages::alloc(len, &env.cx)?;
            check_eq!(pages.len(), len);
            let mut lens = 0;
            for page in pages.cpu().pages() {
                check!(page.iter().all(|byte| *byte == 0));
                lens += page.len();
            }
            check_eq!(lens, len);
        }
        check_err!(Pages::alloc(0, &env.cx), EINVAL);
        check_err!(Pages::alloc(1 << 32, &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn bytes_are_read_where_they_were_written() -> Result {
        let env = Env::new()?;
        let (len, all) = (3 * PAGE_SIZE - 100, pattern(3 * PAGE_SIZE - 100)?);
        let mut pages = Pages::alloc(len, &env.cx)?;
        pages.cpu().write(0, &all)?;
        for (i, page) in pages.cpu().pages().enumerate() {
            check!(*page == all[i * PAGE_SIZE..len.min((i + 1) * PAGE_SIZE)]);
            page[0] = 77;
        }
        let mut across = [0; 10];
        pages.cpu().read(2 * PAGE_SIZE - 5, &mut across)?;
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
    fn mapping_keeps_the_bytes() -> Result {
        let env = Env::new()?;
        let all = pattern(2 * PAGE_SIZE)?;
        let mut pages = Pages::alloc(all.len(), &env.cx)?;
        pages.cpu().write(0, &all)?;
        for _ in 0..3 {
            let mut mapped = Paged::map(pages, &env.pd).map_err(|(_, e)| e)?;
            let mut first = [0; 3];
            mapped.cpu().read(0, &mut first)?;
            check!(first == all[..3]);
            pages = mapped.unmap();
        }
        Ok(())
    }

    #[test]
    fn one_entry_a_page() -> Result {
        let env = Env::new()?;
        let memory = Paged::alloc(&env.pd, 3 * PAGE_SIZE, &env.cx)?;
        check_eq!(memory.entries(0..3 * PAGE_SIZE)?, 3);
        check_eq!(memory.entries(1..PAGE_SIZE + 1)?, 2);
        check_eq!(memory.entries(PAGE_SIZE..PAGE_SIZE + 1)?, 1);
        for (start, end) in [(0, 0), (5, 4), (0, 3 * PAGE_SIZE + 1)] {
            check_err!(memory.entries(start..end), EINVAL);
        }
        check!(memory.sges::<3>(0..3 * PAGE_SIZE).is_ok());
        check!(memory.sges_mut::<2>(5..PAGE_SIZE + 1).is_ok());
        // Neither fewer than needed, nor more.
        check!(memory.sges::<2>(0..3 * PAGE_SIZE).is_err());
        check!(memory.sges::<3>(0..2 * PAGE_SIZE).is_err());
        check!(memory.sges::<0>(0..1).is_err());
        Ok(())
    }

    #[test]
    fn message_of_two_pages() -> Result {
        let link = Link::<Softirq>::new()?;
        let all = pattern(2 * PAGE_SIZE)?;
        let from = Message::new(&link.env, &all)?;
        let to = Message::new(&link.env, &KVec::from_elem(0, all.len(), GFP_KERNEL)?)?;
        let (received, around) = (to.back.clone(), to.bytes.clone());
        link.b.qp.post_recv(to, |m| {
            Ok(RecvWr::new(m.memory.sges_mut::<2>(0..2 * PAGE_SIZE)?))
        })?;
        link.a.qp.post_send(from, |m| {
            Ok(SendWr::send(m.memory.sges::<2>(0..2 * PAGE_SIZE)?))
        })?;
        link.wait(|| received.get() == 1)?;
        check!(around.lock()[..] == all[PAGE_SIZE - 8..PAGE_SIZE + 8]);
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
        let (_, memory) = region.into_parts().map_err(|_| EBUSY)?;
        let mut pages = memory.unmap();
        for (i, page) in pages.cpu().pages().enumerate() {
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
