// SPDX-License-Identifier: GPL-2.0

//! Messages, with and without immediate data.

use crate::fixture::{
    recv,
    send,
    Env,
    Inbox,
    Link,
    OnDone,
    Polled, //
};
use kernel::prelude::*;
use rdma::{
    cm::ConnParam,
    prelude::*,
    wr::SgeList, //
};

/// A message from `a` arrives at `b` whole, and both owners come back once.
fn arrives<C: Polled>() -> Result {
    let (link, sent, received) = (Link::<C>::new()?, Inbox::new()?, Inbox::new()?);
    for (i, len) in [1, 16, 100, 1024, 5000].into_iter().enumerate() {
        let mut bytes = KVec::<u8>::from_elem(0, len, GFP_KERNEL)?;
        for (k, byte) in bytes.iter_mut().enumerate() {
            *byte = (k * 7 + i) as u8;
        }
        recv(&link.b.qp, link.env.message(&received, &[0xee; 5000])?)?;
        send(&link.a.qp, link.env.message(&sent, &bytes)?)?;
        link.wait(|| sent.len() == 1 && received.len() == 1)?;

        check_eq!(sent.pop()?.ok()?.opcode, Opcode::Send);
        let mut completed = received.pop()?;
        let done = completed.ok()?;
        check_eq!(done.opcode, Opcode::Recv);
        check_eq!(done.byte_len, len);
        check_eq!(done.imm_data, None);
        check_eq!(done.invalidated, None);
        let got = completed.bytes()?;
        check!(got[..len] == bytes[..]);
        check!(got[len..].iter().all(|byte| *byte == 0xee));
    }
    check_eq!(sent.dropped(), 5);
    check_eq!(received.dropped(), 5);
    Ok(())
}

#[kunit_tests(rdma_send)]
mod tests {
    use super::*;

    /// The lists have room for more entries than the QP: how many there are counts.
    #[test]
    fn number_of_entries_is_known_at_run_time() -> Result {
        let caps = Caps {
            send_sge: 3,
            recv_sge: 3,
            ..Caps::new(8, 8)
        };
        let link = Link::<Softirq>::with(&caps, &ConnParam::default())?;
        for n in 1..=3 {
            let (received, sent) = (Inbox::new()?, Inbox::new()?);
            let message = link.env.message(&received, &[0; 9])?;
            link.b.qp.post_recv(message, |m| {
                // The last bytes first.
                let mut list = SgeList::<_, 16>::new(m.buf.sge_mut(6..9)?);
                for i in 1..n {
                    list.push(m.buf.sge_mut(6 - 3 * i..9 - 3 * i)?)?;
                }
                Ok(RecvWr::new(list))
            })?;
            let message = link.env.message(&sent, b"abcdefghi")?;
            link.a.qp.post_send(message, |m| {
                let mut list = SgeList::<_, 16>::new(m.buf.sge(0..3)?);
                for i in 1..n {
                    list.push(m.buf.sge(3 * i..3 * i + 3)?)?;
                }
                Ok(SendWr::send(list))
            })?;
            link.wait(|| received.len() == 1 && sent.len() == 1)?;
            sent.pop()?.ok()?;
            let mut completed = received.pop()?;
            check_eq!(completed.ok()?.byte_len, 3 * n);
            let expected = [b"\0\0\0\0\0\0abc", b"\0\0\0defabc", b"ghidefabc"];
            check_eq!(&completed.bytes()?[..], expected[n - 1]);
        }
        Ok(())
    }

    #[test]
    fn list_of_entries_is_full() -> Result {
        let env = Env::new()?;
        let buf = Buf::<ToDevice>::alloc(&env.pd, 4, &env.cx)?;
        let mut list = SgeList::<_, 2>::new(buf.whole());
        list.push(buf.whole())?;
        check_err!(list.push(buf.whole()), ENOSPC);
        Ok(())
    }

    #[test]
    fn message_arrives_direct() -> Result {
        arrives::<Direct>()
    }

    #[test]
    fn message_arrives_softirq() -> Result {
        arrives::<Softirq>()
    }

    #[test]
    fn message_arrives_workqueue() -> Result {
        arrives::<Workqueue>()
    }

    #[test]
    fn message_arrives_unbound_workqueue() -> Result {
        arrives::<UnboundWorkqueue>()
    }

    #[test]
    fn queues_may_complete_in_different_contexts() -> Result {
        let link = Link::<Direct, Workqueue>::new()?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
        send(&link.a.qp, link.env.message(&sent, b"data")?)?;
        // The core polls the workqueue's CQ, but not the direct one.
        crate::fixture::wait(|| received.len() == 1)?;
        check_eq!(sent.len(), 0);
        crate::fixture::wait(|| link.send_cq.process(1) == 1)?;
        check_eq!(&received.pop()?.bytes()?[..], b"data");
        sent.pop()?.ok()?;
        Ok(())
    }

    #[test]
    fn both_sides_send_at_once() -> Result {
        let (link, received) = (Link::<Softirq>::new()?, Inbox::new()?);
        let sent = Inbox::new()?;
        for end in [&link.a, &link.b] {
            recv(&end.qp, link.env.message(&received, &[0; 4])?)?;
        }
        send(&link.a.qp, link.env.message(&sent, b"ping")?)?;
        send(&link.b.qp, link.env.message(&sent, b"pong")?)?;
        link.wait(|| received.len() == 2 && sent.len() == 2)?;
        let mut seen = (0, 0);
        for mut completed in received.take() {
            match &completed.bytes()?[..] {
                b"ping" => seen.0 += 1,
                b"pong" => seen.1 += 1,
                _ => {}
            }
        }
        check_eq!(seen, (1, 1));
        Ok(())
    }

    #[test]
    fn messages_arrive_in_order() -> Result {
        let (link, sent, received) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        for _ in 0..8 {
            recv(&link.b.qp, link.env.message(&received, &[0])?)?;
        }
        for i in 0..8 {
            send(&link.a.qp, link.env.message(&sent, &[i])?)?;
        }
        link.wait(|| received.len() == 8 && sent.len() == 8)?;
        for (i, mut completed) in received.take().into_iter().enumerate() {
            check_eq!(completed.bytes()?[0], i as u8);
        }
        Ok(())
    }

    #[test]
    fn immediate_data_arrive_in_host_order() -> Result {
        not_on_iwarp!(c"there are no immediate data");
        let (link, sent, received) = (Link::<Workqueue>::new()?, Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
        let message = link.env.message(&sent, b"data")?;
        link.a.qp.post_send(message, |m| {
            Ok(SendWr::send([m.buf.sge(0..4)?]).with_imm(0x0102_0304))
        })?;
        link.wait(|| received.len() == 1 && sent.len() == 1)?;
        let done = received.pop()?.ok()?;
        check_eq!(done.imm_data, Some(0x0102_0304));
        check_eq!(done.opcode, Opcode::Recv);
        sent.pop()?.ok()?;
        Ok(())
    }

    #[test]
    fn message_without_memory() -> Result {
        not_on_iwarp!(c"there are no immediate data");
        let (link, received) = (Link::<Softirq>::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[9; 4])?)?;
        let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        link.a
            .qp
            .post_send(nothing, |_| Ok(SendWr::send([]).with_imm(5)))?;
        link.wait(|| received.len() == 1)?;
        let mut completed = received.pop()?;
        let done = completed.ok()?;
        check_eq!(done.byte_len, 0);
        check_eq!(done.imm_data, Some(5));
        check_eq!(&completed.bytes()?[..], &[9; 4][..]);
        Ok(())
    }

    #[test]
    fn entries_are_gathered_and_scattered() -> Result {
        let (link, sent, received) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        let into = link.env.message(&received, &[b'.'; 8])?;
        // The first five bytes go to the end, the others to the beginning.
        link.b.qp.post_recv(into, |m| {
            Ok(RecvWr::new([m.buf.sge_mut(3..8)?, m.buf.sge_mut(0..3)?]))
        })?;
        let message = link.env.message(&sent, b"worldabchello")?;
        link.a.qp.post_send(message, |m| {
            Ok(SendWr::send([m.buf.sge(8..13)?, m.buf.sge(5..8)?]))
        })?;
        link.wait(|| received.len() == 1 && sent.len() == 1)?;
        let mut completed = received.pop()?;
        check_eq!(completed.ok()?.byte_len, 8);
        check_eq!(&completed.bytes()?[..], b"abchello");
        Ok(())
    }

    #[test]
    fn part_of_a_buffer_is_sent() -> Result {
        let (link, sent, received) = (Link::<Direct>::new()?, Inbox::new()?, Inbox::new()?);
        let into = link.env.message(&received, &[b'.'; 6])?;
        link.b
            .qp
            .post_recv(into, |m| Ok(RecvWr::new([m.buf.sge_mut(1..5)?])))?;
        let message = link.env.message(&sent, b"..hi..")?;
        link.a
            .qp
            .post_send(message, |m| Ok(SendWr::send([m.buf.sge(2..4)?])))?;
        link.wait(|| received.len() == 1 && sent.len() == 1)?;
        let mut completed = received.pop()?;
        check_eq!(completed.ok()?.byte_len, 2);
        check_eq!(&completed.bytes()?[..], b".hi...");
        Ok(())
    }

    #[test]
    fn solicited_and_fenced_messages_arrive() -> Result {
        let (link, sent, received) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[0; 1])?)?;
        let message = link.env.message(&sent, &[3])?;
        link.a.qp.post_send(message, |m| {
            Ok(SendWr::send([m.buf.sge(0..1)?]).solicited().fenced())
        })?;
        link.wait(|| received.len() == 1 && sent.len() == 1)?;
        check_eq!(received.pop()?.bytes()?[0], 3);
        Ok(())
    }

    #[test]
    fn owner_goes_round() -> Result {
        let (link, sent, received) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[0; 1])?)?;
        send(&link.a.qp, link.env.message(&sent, &[0])?)?;
        for i in 0..10 {
            link.wait(|| received.len() == 1 && sent.len() == 1)?;
            let (mut into, mut from) = (received.pop()?.message, sent.pop()?.message);
            check_eq!(into.buf.cpu()[0], i);
            into.again(&received);
            from.again(&sent);
            from.buf.cpu()[0] = i + 1;
            recv(&link.b.qp, into)?;
            send(&link.a.qp, from)?;
        }
        check_eq!(sent.dropped() + received.dropped(), 0);
        Ok(())
    }
}
