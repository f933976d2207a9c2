// SPDX-License-Identifier: GPL-2.0

//! Memory of others that peers access, and its owner.

use crate::fixture::{
    both,
    denied,
    invalidate,
    pattern,
    read,
    readable,
    register,
    write,
    write_flushed,
    CountDrop,
    Counter,
    Env,
    Gap,
    Link, //
};
use core::ops::Deref;
use kernel::{
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    dma::Direction,
    prelude::*,
    rw::Ctx,
    sg::{
        SgList,
        SgMap,
        SgOwner, //
    }, //
};

/// Pages, not all of the last.
const LEN: usize = 3 * PAGE_SIZE - 7;

/// Bytes of the module's image.
static IMAGE: [u8; 5000] = [0x5a; 5000];

/// Bytes that tell when they are dropped.
struct Watched {
    bytes: KVec<u8>,
    _gone: CountDrop,
}

impl Deref for Watched {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Four bytes of some, the first of which is the last of a page.
struct Across(KVec<u8>);

impl Deref for Across {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let first = PAGE_SIZE - 1 - self.0.as_ptr().addr() % PAGE_SIZE;
        &self.0[first..first + 4]
    }
}

/// Maps an owner.
fn map<O: SgOwner<D>, D: Direction>(env: &Env, owner: O) -> Result<SgMap<O, D>> {
    Ok(SgMap::new(&env.pd, owner)?)
}

/// A peer writes a vector.
fn written<V, O>(list: O, into_vector: fn(O) -> V) -> Result
where
    V: Deref<Target = [u8]>,
    O: SgOwner<Bidirectional>,
{
    let (link, bytes) = (Link::<Softirq>::new()?, pattern(LEN)?);
    let cx = &link.env.cx;
    let memory = map::<_, Bidirectional>(&link.env, list)?;
    let (region, remote) = register(&link, Region::new(memory, cx)?, both)?;
    write_flushed(&link, remote, &bytes)?;
    let (region, _) = invalidate(&link, region)?;
    let (_mr, memory) = region.into_parts().map_err(|_| EBUSY)?;
    check!(into_vector(memory.into_owner())[..] == bytes[..]);
    Ok(())
}

#[kunit_tests(rdma_sg_map)]
mod tests {
    use super::*;

    #[test]
    fn shared_bytes_are_read() -> Result {
        let (link, bytes) = (Link::<Softirq>::new()?, pattern(LEN)?);
        let cx = &link.env.cx;
        let shared = Arc::new(pattern(LEN)?, GFP_KERNEL)?;
        let memory = map::<_, ToDevice>(&link.env, SgList::new(shared.clone(), cx)?)?;
        let (region, remote) = register(&link, Region::new(memory, cx)?, readable)?;
        check!(read(&link, remote, LEN)?.bytes()?[..] == bytes[..]);
        check!(shared[..] == bytes[..]);
        let (region, _) = invalidate(&link, region)?;
        let (_mr, memory) = region.into_parts().map_err(|_| EBUSY)?;
        check!(Arc::ptr_eq(&memory.into_owner().into_inner(), &shared));
        check!(Arc::into_unique_or_drop(shared).is_some());
        Ok(())
    }

    #[test]
    fn bytes_of_the_image_are_read() -> Result {
        let link = Link::<Softirq>::new()?;
        let cx = &link.env.cx;
        let image = Arc::new(&IMAGE[100..4900], GFP_KERNEL)?;
        let memory = map::<_, ToDevice>(&link.env, SgList::new(image, cx)?)?;
        let (_region, remote) = register(&link, Region::new(memory, cx)?, readable)?;
        check!(read(&link, remote, 4800)?.bytes()?[..] == IMAGE[100..4900]);
        Ok(())
    }

    #[test]
    fn kmalloc_is_written() -> Result {
        let vector = KVec::from_elem(0, LEN, GFP_KERNEL)?;
        written(
            SgList::new(vector, &Sleepable::current()?)?,
            SgList::into_inner,
        )
    }

    #[test]
    fn vmalloc_is_written() -> Result {
        let vector = VVec::from_elem(0, LEN, GFP_KERNEL)?;
        written(
            SgList::new(vector, &Sleepable::current()?)?,
            SgList::into_inner,
        )
    }

    /// Mapped or not, with a spinlock held.
    #[test]
    fn vectors_are_freed_in_atomic_context() -> Result {
        let (env, lock) = (Env::new()?, Counter::new()?);
        let lock = Arc::pin_init(new_spinlock_irq!(lock), GFP_KERNEL)?;
        let cx = &env.cx;
        let virt = || SgList::new(VVec::from_elem(1, LEN, GFP_KERNEL)?, cx);
        let either = |len| SgList::new(KVVec::from_elem(1, len, GFP_KERNEL)?, cx);
        let mapped = map::<_, ToDevice>(&env, virt()?)?;
        let context: Ctx<ToDevice, _> = Ctx::new(virt()?, GFP_KERNEL)?;
        let lists = (virt()?, either(LEN)?, either(5 << 20)?);
        let kept = SgList::new(KVec::from_elem(1, LEN, GFP_KERNEL)?, cx)?;
        let guard = lock.lock();
        drop((mapped, context, lists, kept));
        drop(guard);
        Ok(())
    }

    #[test]
    fn part_is_registered() -> Result {
        let (link, shared) = (Link::<Softirq>::new()?, Across(pattern(LEN)?));
        let (bytes, cx) = ([shared[0], shared[1], shared[2], shared[3]], &link.env.cx);
        let shared = Arc::new(shared, GFP_KERNEL)?;
        let memory = map::<_, ToDevice>(&link.env, SgList::new(shared, cx)?)?;
        let (_region, remote) = register(&link, Region::new(memory, cx)?, readable)?;
        check!(read(&link, remote, 4)?.bytes()?[..] == bytes);
        denied(&link, &read(&link, remote, 5)?)
    }

    #[test]
    fn owner_comes_back_when_the_key_is_dead() -> Result {
        let (link, gone) = (Link::<Softirq>::new()?, Counter::new()?);
        let cx = &link.env.cx;
        let watched = Watched {
            bytes: pattern(LEN)?,
            _gone: CountDrop(gone.clone()),
        };
        let list = SgList::new(Arc::new(watched, GFP_KERNEL)?, cx)?;
        let memory = map::<_, ToDevice>(&link.env, list)?;
        let (region, remote) = register(&link, Region::new(memory, cx)?, readable)?;
        read(&link, remote, 4)?.ok()?;
        check_eq!(gone.get(), 0);
        drop(region);
        link.wait(|| gone.get() == 1)?;
        denied(&link, &read(&link, remote, 4)?)
    }

    #[test]
    fn owner_of_an_idle_region_is_dropped_at_once() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let watched = Watched {
            bytes: pattern(LEN)?,
            _gone: CountDrop(gone.clone()),
        };
        let list = SgList::new(Arc::new(watched, GFP_KERNEL)?, &env.cx)?;
        drop(Region::new(map::<_, ToDevice>(&env, list)?, &env.cx)?);
        check_eq!(gone.get(), 1);
        Ok(())
    }

    #[test]
    fn write_of_a_peer_that_may_read_is_denied() -> Result {
        let (link, bytes) = (Link::<Softirq>::new()?, pattern(LEN)?);
        let cx = &link.env.cx;
        let shared = Arc::new(pattern(LEN)?, GFP_KERNEL)?;
        let memory = map::<_, ToDevice>(&link.env, SgList::new(shared.clone(), cx)?)?;
        let (_region, remote) = register(&link, Region::new(memory, cx)?, readable)?;
        denied(&link, &write(&link, remote, b"other")?)?;
        check!(shared[..] == bytes[..]);
        Ok(())
    }

    #[test]
    fn no_bytes_are_refused() -> Result {
        let env = Env::new()?;
        check_err!(SgList::new(KVec::<u8>::new(), &env.cx).map(drop), EINVAL);
        Ok(())
    }

    #[test]
    fn gap_is_refused() -> Result {
        let env = Env::new()?;
        let whole = map::<_, Bidirectional>(&env, Gap::new(PAGE_SIZE as u32)?)?;
        drop(Region::new(whole, &env.cx)?);
        let memory = map::<_, Bidirectional>(&env, Gap::new(100)?)?;
        let mr = Mr::alloc(&env.pd, 8, &env.cx)?;
        let Err(e) = Region::map(mr, memory) else {
            return Err(crate::check::fail("it was mapped"));
        };
        check_eq!(e.error, EINVAL);
        // Both can be tried again.
        let whole = map::<_, Bidirectional>(&env, Gap::new(PAGE_SIZE as u32)?)?;
        drop(Region::map(e.mr, whole)?);
        Ok(())
    }
}
