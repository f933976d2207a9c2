// SPDX-License-Identifier: GPL-2.0

//! Atomics, and messages that invalidate.

use crate::fixture::{
    both,
    recv,
    write,
    Completed,
    Inbox,
    Link,
    Registered, //
};
use kernel::prelude::*;
use rdma::{
    mr::Shared,
    prelude::*,
    qp::Chain,
    wr::{
        AtomicWr,
        PostError,
        SgeMut, //
    }, //
};

fn atomic(region: &SharedRegion<Bidirectional>) -> RegWr<'_, Shared> {
    RegWr::remote_atomic(region)
}

/// A link whose side `b` has two words that side `a` may change.
fn words(first: u64, second: u64) -> Result<(Link<Softirq>, Registered<Bidirectional>)> {
    let link = Link::<Softirq>::new()?;
    let registered = Registered::new(&link, 16, atomic)?;
    registered.region.write(0, &first.to_ne_bytes())?;
    registered.region.write(8, &second.to_ne_bytes())?;
    Ok((link, registered))
}

fn word(bytes: &[u8]) -> Result<u64> {
    Ok(u64::from_ne_bytes(bytes.try_into().map_err(|_| EINVAL)?))
}

/// Posts an atomic operation whose result has `len` bytes.
fn post(
    link: &Link<Softirq>,
    inbox: &Arc<Inbox>,
    len: usize,
    wr: impl for<'a> FnOnce(SgeMut<'a>) -> AtomicWr<'a> + Send,
) -> Result<core::result::Result<(), PostError<Pin<KBox<crate::fixture::Message>>>>> {
    let message = link.env.message(inbox, &[0xff; 16])?;
    Ok(link
        .a
        .qp
        .post_send(message, |m| Ok(wr(m.buf.sge_mut(0..len)?))))
}

/// Does an atomic operation and returns how it ended.
fn run(
    link: &Link<Softirq>,
    wr: impl for<'a> FnOnce(SgeMut<'a>) -> AtomicWr<'a> + Send,
) -> Result<Completed> {
    let inbox = Inbox::new()?;
    post(link, &inbox, 8, wr)??;
    link.wait(|| inbox.len() == 1)?;
    inbox.pop()
}

#[kunit_tests(rdma_operations)]
mod tests {
    use super::*;

    #[test]
    fn fetch_and_add() -> Result {
        let (link, there) = words(1 << 40, 7)?;
        for n in 0..3 {
            let mut done = run(&link, |old| AtomicWr::fetch_add(old, there.remote, 5))?;
            check_eq!(done.ok()?.opcode, Opcode::FetchAdd);
            check_eq!(word(&done.bytes()?[..8])?, (1 << 40) + 5 * n);
        }
        check_eq!(word(&there.bytes()?[..8])?, (1 << 40) + 15);
        check_eq!(word(&there.bytes()?[8..])?, 7);
        Ok(())
    }

    #[test]
    fn compare_and_swap() -> Result {
        let (link, there) = words(3, 7)?;
        let second = Remote {
            addr: there.remote.addr + 8,
            ..there.remote
        };
        // Not what is there, then what is there.
        for (compare, is) in [(6, 7), (7, 99)] {
            let mut done = run(&link, |old| AtomicWr::cmp_swap(old, second, compare, 99))?;
            check_eq!(done.ok()?.opcode, Opcode::CompSwap);
            check_eq!(word(&done.bytes()?[..8])?, 7);
            check_eq!(word(&there.bytes()?[8..])?, is);
        }
        check_eq!(word(&there.bytes()?[..8])?, 3);
        Ok(())
    }

    #[test]
    fn atomic_in_a_chain_after_a_write() -> Result {
        let (link, there) = words(40, 0)?;
        let inbox = Inbox::new()?;
        let message = link.env.message(&inbox, &[0; 16])?;
        link.a
            .qp
            .post_chain(message, |m, chain: &mut Chain<'_, 2>| {
                for add in [1, 1] {
                    let old = m.buf.sge_mut(8..16)?;
                    chain.push(AtomicWr::fetch_add(old, there.remote, add).fenced())?;
                }
                Ok(())
            })?;
        link.wait(|| inbox.len() == 1)?;
        let mut done = inbox.pop()?;
        check_eq!(done.ok()?.opcode, Opcode::FetchAdd);
        check_eq!(word(&done.bytes()?[8..])?, 41);
        check_eq!(word(&there.bytes()?[..8])?, 42);
        Ok(())
    }

    #[test]
    fn atomic_needs_eight_aligned_bytes() -> Result {
        let (link, there) = words(3, 7)?;
        let inbox = Inbox::new()?;
        for offset in 1..8 {
            let odd = Remote {
                addr: there.remote.addr + offset,
                ..there.remote
            };
            let posted = post(&link, &inbox, 8, |old| AtomicWr::fetch_add(old, odd, 1))?;
            check_err!(posted, EINVAL);
        }
        for len in [4, 7, 9, 16] {
            let posted = post(&link, &inbox, len, |old| {
                AtomicWr::cmp_swap(old, there.remote, 3, 4)
            })?;
            check_err!(posted, EINVAL);
        }
        check_eq!(inbox.dropped(), 11);
        check_eq!(word(&there.bytes()?[..8])?, 3);
        Ok(())
    }

    #[test]
    fn atomic_is_an_access_of_its_own() -> Result {
        let link = Link::<Softirq>::new()?;
        let there = Registered::<Bidirectional>::new(&link, 16, both)?;
        let done = run(&link, |old| AtomicWr::fetch_add(old, there.remote, 1))?;
        check_eq!(done.status(), Some(wc::Status::REM_ACCESS_ERR));
        check_eq!(word(&there.bytes()?[..8])?, 0);
        Ok(())
    }

    #[test]
    fn message_invalidates_a_key_of_the_peer() -> Result {
        let link = Link::<Softirq>::new()?;
        let there = Registered::<Bidirectional>::new(&link, 64, both)?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        write(&link, there.remote, &[1; 8])?.ok()?;

        recv(&link.b.qp, link.env.message(&received, &[0; 8])?)?;
        let message = link.env.message(&sent, &[2; 8])?;
        link.a.qp.post_send(message, |m| {
            Ok(SendWr::send([m.buf.whole()]).invalidating(there.remote.rkey))
        })?;
        link.wait(|| sent.len() == 1 && received.len() == 1)?;
        check_eq!(sent.pop()?.ok()?.opcode, Opcode::Send);
        let done = received.pop()?.ok()?;
        check_eq!(done.invalidated, Some(there.remote.rkey));
        check_eq!(done.imm_data, None);
        check_eq!(done.byte_len, 8);

        let late = write(&link, there.remote, &[3; 8])?;
        check_eq!(late.status(), Some(wc::Status::REM_ACCESS_ERR));
        check_eq!(there.bytes()?[..8], [1; 8][..]);
        Ok(())
    }

    #[test]
    fn message_with_immediate_data_invalidates_nothing() -> Result {
        let link = Link::<Softirq>::new()?;
        let there = Registered::<Bidirectional>::new(&link, 64, both)?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[0; 8])?)?;
        let message = link.env.message(&sent, &[2; 8])?;
        link.a.qp.post_send(message, |m| {
            let wr = SendWr::send([m.buf.whole()]).with_imm(0x1234_5678);
            Ok(wr.invalidating(there.remote.rkey))
        })?;
        link.wait(|| sent.len() == 1 && received.len() == 1)?;
        let done = received.pop()?.ok()?;
        check_eq!((done.invalidated, done.imm_data), (None, Some(0x1234_5678)));
        write(&link, there.remote, &[1; 8])?.ok()?;
        Ok(())
    }
}
