// SPDX-License-Identifier: GPL-2.0

//! Buffers and their ranges.

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::fixture::{
    bounce,
    recv,
    synced_for_cpu,
    synced_for_device,
    Env,
    Inbox,
    Null,
    NullEnv, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    dma::Direction,
    prelude::*, //
};

fn buf<D: Direction>(env: &Env, len: usize) -> Result<Buf<D>> {
    Buf::alloc(&env.pd, len, &env.cx)
}

fn address<D: Direction>(buf: &mut Buf<D>) -> usize {
    buf.cpu().as_ptr().addr()
}

/// Returns the distance of two buffers of a piece, which begin at multiples of `align`.
fn distance(env: &Env, len: usize, align: usize) -> Result<usize> {
    let mut bufs = Bufs::<FromDevice>::aligned(&env.pd, 2, len, align, &env.cx)?;
    let one = address(&mut bufs.take(&env.cx)?);
    let two = address(&mut bufs.take(&env.cx)?);
    check_eq!((one % align, two % align), (0, 0));
    Ok(two.wrapping_sub(one))
}

/// Returns how many bytes were synchronised for the CPU, and for the device.
fn synced() -> (u32, u32) {
    (synced_for_cpu(), synced_for_device())
}

#[kunit_tests(rdma_dma)]
mod tests {
    use super::*;

    #[test]
    fn new_buffer_is_zeroed() -> Result {
        let env = Env::new()?;
        for len in [1, 4096, 10_000] {
            let mut buf = buf::<FromDevice>(&env, len)?;
            check_eq!(buf.cpu().len(), len);
            check!(buf.cpu().iter().all(|byte| *byte == 0));
        }
        Ok(())
    }

    /// Those that are aligned are written as words, others byte by byte.
    #[test]
    fn words_are_written_at_each_offset() -> Result {
        let env = Env::new()?;
        let mut buf = buf::<Bidirectional>(&env, 32)?;
        let word = 0x0102_0304_0506_0708_u64.to_le_bytes();
        for offset in 0..=24 {
            buf.cpu().fill(0);
            buf.write(offset, &word)?;
            let bytes = buf.cpu();
            check!(bytes[offset..offset + 8] == word);
            check_eq!(bytes.iter().filter(|byte| **byte != 0).count(), word.len());
        }
        check_err!(buf.write(25, &word), EINVAL);
        Ok(())
    }

    #[test]
    fn buffers_of_a_piece_are_apart() -> Result {
        let env = Env::new()?;
        // In one piece; in several; each in its own, also longer than a piece.
        for (count, len) in [
            (5, 100),
            (300, 1000),
            (20, 64 + 4096),
            (5, 64 + (16 << 10)),
            (3, 200_000),
        ] {
            let mut bufs = Bufs::<Bidirectional>::new(&env.pd, count, len, &env.cx)?;
            let mut all = KVec::new();
            for n in 0..count {
                let mut buf = bufs.take(&env.cx)?;
                check!(buf.cpu().iter().all(|byte| *byte == 0));
                check_eq!(buf.cpu().len(), len);
                check_err!(buf.sge(0..len + 1), EINVAL);
                buf.cpu().fill(n as u8 | 1);
                all.push(buf, GFP_KERNEL)?;
            }
            check_err!(bufs.take(&env.cx), ENOSPC);
            drop(bufs);
            // A piece stays while one of its buffers does.
            for (n, mut buf) in all.into_iter().enumerate() {
                check!(buf.cpu().iter().all(|byte| *byte == n as u8 | 1));
            }
        }
        check_err!(Bufs::<ToDevice>::new(&env.pd, 4, 0, &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn buffers_of_a_piece_are_side_by_side() -> Result {
        let env = Env::new()?;
        let line = distance(&env, 1, 1)?;
        check!(line >= 64 && line.is_power_of_two());
        // With the command of a capsule of NVMe, and the longest of which two are in a piece.
        for len in [16, 64, 600, 4096, 64 + 4096, 5000, 12 << 10, 16 << 10] {
            check_eq!(distance(&env, len, 1)?, len.next_multiple_of(line));
        }
        Ok(())
    }

    /// As blocks of a disk may have to be, which are in buffers of any length.
    #[test]
    fn buffers_of_a_piece_are_aligned() -> Result {
        let env = Env::new()?;
        for (len, align) in [
            (64, 128),
            (600, 512),
            (5000, 4096),
            (64, PAGE_SIZE),
            (PAGE_SIZE, PAGE_SIZE),
        ] {
            check_eq!(distance(&env, len, align)?, len.next_multiple_of(align));
        }
        // Without being asked for, those that a power of two divides, as by `kmalloc()`.
        for (len, align) in [(512, 512), (1536, 512), (PAGE_SIZE, PAGE_SIZE)] {
            for count in 1..=3 {
                let mut bufs = Bufs::<FromDevice>::new(&env.pd, count, len, &env.cx)?;
                check_eq!(address(&mut bufs.take(&env.cx)?) % align, 0);
            }
        }
        for align in [0, 3, PAGE_SIZE + 1, 2 * PAGE_SIZE, usize::MAX] {
            let bufs = Bufs::<FromDevice>::aligned(&env.pd, 3, 64, align, &env.cx);
            check_err!(bufs, EINVAL);
        }
        Ok(())
    }

    /// A piece has as many as are in eight pages.
    #[test]
    fn pieces_are_full() -> Result {
        let env = Env::new()?;
        for len in [64, 600, 64 + 4096, 12 << 10] {
            let stride = distance(&env, len, 1)?;
            let most = (8 * PAGE_SIZE) / stride;
            // The last one has a single buffer.
            let count = 2 * most + 1;
            let (mut bufs, mut all) = (Bufs::new(&env.pd, count, len, &env.cx)?, KVec::new());
            for _ in 0..count {
                let buf: Buf<ToDevice> = bufs.take(&env.cx)?;
                all.push(buf, GFP_KERNEL)?;
            }
            for piece in all.chunks_mut(most) {
                let start = address(&mut piece[0]);
                // So that no page is of two pieces, if it is of several pages.
                check!(piece.len() == 1 || start % PAGE_SIZE == 0);
                for (n, buf) in piece.iter_mut().enumerate() {
                    check_eq!(address(buf), start + n * stride);
                }
            }
        }
        Ok(())
    }

    /// The buffers are as they were, and the next one that is taken allocates the piece.
    #[cfg(has_faults)]
    #[test]
    fn piece_without_memory() -> Result {
        const LEN: usize = 64 + 4096;
        let env = Env::new()?;
        let most = (8 * PAGE_SIZE) / distance(&env, LEN, 1)?;
        let new = || Bufs::<ToDevice>::new(&env.pd, most + 1, LEN, &env.cx);
        let (mut refused_first, mut refused) = (0, 0);
        for nth in 1.. {
            let (mut bufs, first_failed) = match with_fault(nth, new) {
                (Ok(bufs), failed) => (bufs, failed),
                (Err(e), failed) => {
                    check_eq!((e, failed), (ENOMEM, true));
                    refused_first += 1;
                    (new()?, true)
                }
            };
            let mut all = KVec::with_capacity(most + 1, GFP_KERNEL)?;
            for _ in 0..most {
                let (taken, failed) = with_fault(1, || bufs.take(&env.cx));
                check!(!failed);
                all.push_within_capacity(taken?)?;
            }
            // That an allocation has failed may be without consequences, as one of a checker.
            let (taken, failed) = with_fault(nth, || bufs.take(&env.cx));
            let last = match taken {
                Ok(buf) => buf,
                Err(e) => {
                    check_eq!((e, failed), (ENOMEM, true));
                    refused += 1;
                    bufs.take(&env.cx)?
                }
            };
            all.push_within_capacity(last)?;
            check_err!(bufs.take(&env.cx), ENOSPC);
            if !first_failed && !failed {
                break;
            }
        }
        check!(refused_first > 0 && refused > 0);
        Ok(())
    }

    #[test]
    fn empty_buffer_is_refused() -> Result {
        let env = Env::new()?;
        check_err!(buf::<ToDevice>(&env, 0), EINVAL);
        Ok(())
    }

    #[test]
    fn buffer_beyond_an_entry_is_refused() -> Result {
        let env = Env::new()?;
        check_err!(buf::<ToDevice>(&env, 1 << 32), EINVAL);
        check_err!(buf::<ToDevice>(&env, usize::MAX), EINVAL);
        Ok(())
    }

    #[test]
    fn cpu_sees_what_it_wrote() -> Result {
        let env = Env::new()?;
        let mut buf = buf::<Bidirectional>(&env, 3)?;
        buf.cpu().copy_from_slice(b"abc");
        buf.cpu()[1] = b'x';
        check_eq!(&*buf.cpu(), b"axc");
        Ok(())
    }

    #[test]
    fn ranges() -> Result {
        let env = Env::new()?;
        let buf = buf::<Bidirectional>(&env, 16)?;
        for range in [0..1, 15..16, 3..9] {
            buf.sge(range.clone())?;
            buf.sge_mut(range)?;
        }
        Ok(())
    }

    #[test]
    fn whole_buffer_is_a_range() -> Result {
        let env = Env::new()?;
        buf::<ToDevice>(&env, 16)?.sge(0..16)?;
        buf::<FromDevice>(&env, 16)?.sge_mut(0..16)?;
        Ok(())
    }

    #[test]
    fn empty_ranges_are_refused() -> Result {
        let env = Env::new()?;
        let buf = buf::<Bidirectional>(&env, 16)?;
        for at in [0, 7, 16] {
            check_err!(buf.sge(at..at), EINVAL);
            check_err!(buf.sge_mut(at..at), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn ranges_beyond_the_end_are_refused() -> Result {
        let env = Env::new()?;
        let buf = buf::<Bidirectional>(&env, 16)?;
        for range in [
            0..17,
            16..17,
            17..17,
            15..usize::MAX,
            usize::MAX..usize::MAX,
        ] {
            check_err!(buf.sge(range.clone()), EINVAL);
            check_err!(buf.sge_mut(range), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn reversed_ranges_are_refused() -> Result {
        let env = Env::new()?;
        let buf = buf::<Bidirectional>(&env, 16)?;
        for (start, end) in [(1, 0), (16, 15), (usize::MAX, 0)] {
            check_err!(buf.sge(start..end), EINVAL);
            check_err!(buf.sge_mut(start..end), EINVAL);
        }
        Ok(())
    }

    /// What is left of a longer message stays here.
    #[test]
    fn filled_message_is_sent_alone() -> Result {
        let (null, sent, received) = (Null::<Direct>::new()?, Inbox::new()?, Inbox::new()?);
        let mut message = null.env.message(&sent, b"a secret")?;
        for (parts, all) in [
            (&[&b"long"[..], b"", b"est"][..], &b"longest"[..]),
            (&[b"no", b"w"], b"now"),
        ] {
            recv(&null.b, null.env.message(&received, &[0; 8])?)?;
            message.buf.fill(parts)?;
            null.a
                .post_send(message, |m| Ok(SendWr::send([m.buf.filled()?])))?;
            let mut arrived = null.one(&received)?;
            check_eq!(arrived.ok()?.byte_len, all.len());
            check!(arrived.bytes()?.starts_with(all));
            check!(arrived.bytes()?[all.len()..].iter().all(|byte| *byte == 0));
            message = null.one(&sent)?.message;
            message.again(&sent);
        }
        Ok(())
    }

    #[test]
    fn message_without_room_is_refused() -> Result {
        let env = Env::new()?;
        let mut buf = buf::<ToDevice>(&env, 4)?;
        check!(buf.filled().is_err());
        check_err!(buf.fill(&[b"ab", b"cde"]), EMSGSIZE);
        check!(buf.filled().is_err());
        check_eq!(&*buf.cpu(), &[0; 4]);
        buf.fill(&[b"ab", b"cd"])?;
        buf.filled()?;
        check_eq!(&*buf.cpu(), b"abcd");
        buf.fill(&[])?;
        check!(buf.filled().is_err());
        Ok(())
    }

    #[test]
    fn buffer_is_synchronised_for_a_view() -> Result {
        let null = NullEnv::new()?;
        let mut seen = buf::<ToDevice>(&null.env, 64)?;
        bounce();
        // A software device's.
        drop(seen.cpu());
        check_eq!(synced(), (0, 0));
        let mut buf = buf::<ToDevice>(&null.env, 64)?;
        let view = buf.cpu();
        check_eq!(synced(), (64, 0));
        drop(view);
        check_eq!(synced(), (64, 64));
        // What is written, and no more.
        buf.write(8, b"eight")?;
        check_eq!(synced(), (64, 69));
        buf.fill(&[b"to", b"be"])?;
        check_eq!(synced(), (128, 133));
        Ok(())
    }

    #[test]
    fn buffer_outlives_its_pd_handle() -> Result {
        let env = Env::new()?;
        let pd = Pd::alloc(&env.dev, &env.cx)?;
        let mut buf = Buf::<Bidirectional>::alloc(&pd, 8, &env.cx)?;
        drop(pd);
        buf.cpu().fill(1);
        buf.sge(0..8)?;
        Ok(())
    }

    /// Of a power of two of pages, and of others.
    #[test]
    fn large_buffers() -> Result {
        let env = Env::new()?;
        for pages in [1, 2, 3, 4, 5, 8, 9, 33, 256] {
            let len = pages * PAGE_SIZE - 8;
            let mut buf = buf::<Bidirectional>(&env, len)?;
            assert!(buf.cpu().iter().all(|byte| *byte == 0));
            buf.cpu().fill(1);
            buf.sge(len - 1..len)?;
        }
        Ok(())
    }
}
