// SPDX-License-Identifier: GPL-2.0

//! Access to memory of the peer: RDMA READ and WRITE, and what is refused.

use crate::fixture::{
    both,
    denied,
    pattern,
    read,
    readable,
    recv,
    register,
    writable,
    write,
    write_flushed,
    Env,
    Inbox,
    Link,
    Polled,
    Registered, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    mr::OwnMemory,
    prelude::*, //
};

/// The length of some memory: pages, not all of the last.
const LEN: usize = 3 * PAGE_SIZE - 7;

/// Moves `remote` on by some bytes.
fn at(remote: Remote, offset: u64) -> Remote {
    Remote {
        addr: remote.addr.wrapping_add(offset),
        ..remote
    }
}

/// A write and a read of the peer's memory, in one context.
fn write_and_read<C: Polled>() -> Result {
    let link = Link::<C>::new()?;
    let registered = Registered::new(&link, 6000, both::<Bidirectional, _, _>)?;
    let mut bytes = KVec::from_elem(0, 6000, GFP_KERNEL)?;
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i % 251) as u8;
    }
    check_eq!(
        write(&link, registered.remote, &bytes)?.ok()?.opcode,
        Opcode::RdmaWrite
    );
    link.wait(|| registered.bytes().is_ok_and(|is| is[..] == bytes[..]))?;

    registered.region.write(0, b"changed")?;
    let mut completed = read(&link, registered.remote, 6000)?;
    check_eq!(completed.ok()?.opcode, Opcode::RdmaRead);
    let got = completed.bytes()?;
    check_eq!(&got[..7], b"changed");
    check!(got[7..] == bytes[7..]);
    Ok(())
}

/// Peers reach the bytes of memory of each of these lengths, and none beside them.
fn bounds<M: OwnMemory<Bidirectional>>(alloc: impl Fn(&Env, usize) -> Result<M>) -> Result {
    for len in [1, PAGE_SIZE, PAGE_SIZE + 50, LEN] {
        for before in [false, true] {
            let link = Link::<Softirq>::new()?;
            let region = Region::new(alloc(&link.env, len)?, &link.env.cx)?;
            let (region, remote) = register(&link, region, both)?;
            let bytes = pattern(len)?;
            write_flushed(&link, remote, &bytes)?;
            let offset = if before { 0 } else { len as u64 }.wrapping_sub(1);
            denied(&link, &write(&link, at(remote, offset), b"ab")?)?;
            let mut is = KVec::from_elem(1, len, GFP_KERNEL)?;
            region.read(0, &mut is)?;
            check!(is[..] == bytes[..]);
        }
    }
    Ok(())
}

#[kunit_tests(rdma_mr_access)]
mod tests {
    use super::*;

    #[test]
    fn bounds_of_a_buffer() -> Result {
        bounds(|env, len| Buf::alloc(&env.pd, len, &env.cx))
    }

    #[test]
    fn bounds_of_a_scatter_list() -> Result {
        bounds(|env, len| SgBuf::alloc(&env.pd, len, &env.cx))
    }

    #[test]
    fn write_and_read_direct() -> Result {
        write_and_read::<Direct>()
    }

    #[test]
    fn write_and_read_softirq() -> Result {
        write_and_read::<Softirq>()
    }

    #[test]
    fn write_and_read_workqueue() -> Result {
        write_and_read::<Workqueue>()
    }

    #[test]
    fn write_and_read_unbound_workqueue() -> Result {
        write_and_read::<UnboundWorkqueue>()
    }

    #[test]
    fn write_into_the_middle() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, writable::<FromDevice, _, _>)?;
        write(&link, at(registered.remote, 3), b"ab")?.ok()?;
        link.wait(|| {
            registered
                .bytes()
                .is_ok_and(|is| is[..] == *b"\0\0\0ab\0\0\0")
        })
    }

    #[test]
    fn read_from_the_middle() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, readable::<ToDevice, _, _>)?;
        registered.region.write(0, b"01234567")?;
        check_eq!(
            &read(&link, at(registered.remote, 6), 2)?.bytes()?[..],
            b"67"
        );
        Ok(())
    }

    #[test]
    fn write_with_immediate_consumes_a_receive() -> Result {
        not_on_iwarp!(c"there are no immediate data");
        let (link, received, sent) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        let registered = Registered::new(&link, 8, writable::<Bidirectional, _, _>)?;
        recv(&link.b.qp, link.env.message(&received, &[b'.'; 4])?)?;
        let message = link.env.message(&sent, b"8 bytes.")?;
        let remote = registered.remote;
        link.a.qp.post_send(message, |m| {
            Ok(SendWr::rdma_write([m.buf.sge(0..8)?], remote).with_imm(0xcafe_f00d))
        })?;
        link.wait(|| sent.len() == 1 && received.len() == 1)?;
        let mut completed = received.pop()?;
        let done = completed.ok()?;
        check_eq!(done.opcode, Opcode::RecvRdmaWithImm);
        check_eq!(done.imm_data, Some(0xcafe_f00d));
        check_eq!(done.byte_len, 8);
        check_eq!(&completed.bytes()?[..], b"....");
        check_eq!(&registered.bytes()?[..], b"8 bytes.");
        Ok(())
    }

    #[test]
    fn write_without_immediate_consumes_none() -> Result {
        let (link, received) = (Link::<Softirq>::new()?, Inbox::new()?);
        let registered = Registered::new(&link, 8, writable::<Bidirectional, _, _>)?;
        recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
        write(&link, registered.remote, b"12345678")?.ok()?;
        check_eq!(received.len(), 0);
        Ok(())
    }

    #[test]
    fn unknown_key_is_refused() -> Result {
        let link = Link::<Softirq>::new()?;
        let remote = Remote {
            addr: 0x1000,
            rkey: 0x1234_5678,
        };
        denied(&link, &write(&link, remote, b"abc")?)?;
        let link = Link::<Softirq>::new()?;
        denied(&link, &read(&link, remote, 3)?)
    }

    #[test]
    fn key_of_an_earlier_registration_is_refused() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, writable::<Bidirectional, _, _>)?;
        let Remote { addr, rkey } = registered.remote;
        let before = Remote {
            addr,
            rkey: (rkey & !0xff) | (rkey.wrapping_sub(1) & 0xff),
        };
        denied(&link, &write(&link, before, b"abc")?)?;
        check!(registered.bytes()?.iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn write_beyond_the_end_is_refused() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, writable::<Bidirectional, _, _>)?;
        denied(&link, &write(&link, at(registered.remote, 6), b"abc")?)?;
        check!(registered.bytes()?.iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn access_before_the_beginning_is_refused() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, both::<Bidirectional, _, _>)?;
        denied(&link, &read(&link, at(registered.remote, u64::MAX), 4)?)
    }

    #[test]
    fn read_beyond_the_end_is_refused() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, both::<Bidirectional, _, _>)?;
        let mut completed = read(&link, registered.remote, 9)?;
        denied(&link, &completed)?;
        check!(completed.bytes()?.iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn write_needs_write_access() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, readable::<Bidirectional, _, _>)?;
        denied(&link, &write(&link, registered.remote, b"abc")?)?;
        check!(registered.bytes()?.iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn read_needs_read_access() -> Result {
        let link = Link::<Softirq>::new()?;
        let registered = Registered::new(&link, 8, writable::<Bidirectional, _, _>)?;
        denied(&link, &read(&link, registered.remote, 4)?)
    }

    #[test]
    fn access_ends_with_the_region() -> Result {
        let link = Link::<Softirq>::new()?;
        let Registered { region, remote } = Registered::new(&link, 8, both::<Bidirectional, _, _>)?;
        read(&link, remote, 8)?.ok()?;
        drop(region);
        // A work item ends it, so it may be a while; then it stays so.
        let mut last = None;
        crate::fixture::wait(|| {
            last = read(&link, remote, 8).ok();
            last.as_ref().is_some_and(|last| last.status().is_some())
        })?;
        denied(&link, &last.ok_or(EINVAL)?)
    }
}
