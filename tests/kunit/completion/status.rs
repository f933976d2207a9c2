// SPDX-License-Identifier: GPL-2.0

//! Failed completions.

use crate::fixture::{
    recv,
    send,
    wait,
    Inbox,
    Link, //
};
use kernel::{
    prelude::*,
    str::CString, //
};
use rdma::prelude::*;

const CAPS: Caps = Caps::new(8, 8);

/// A connection that does not wait for a receive.
fn impatient() -> cm::ConnParam<'static> {
    cm::ConnParam {
        rnr_retry_count: 0,
        ..Default::default()
    }
}

#[kunit_tests(rdma_status)]
mod tests {
    use super::*;

    #[test]
    fn peer_without_a_receive() -> Result {
        not_on_iwarp!(c"a send completes before the peer has refused it");
        let (link, sent) = (Link::<Softirq>::with(&CAPS, &impatient())?, Inbox::new()?);
        send(&link.a.qp, link.env.message(&sent, b"abc")?)?;
        link.wait(|| sent.len() == 1)?;
        check!(sent.pop()?.status() == Some(wc::Status::RNR_RETRY_EXC_ERR));
        Ok(())
    }

    #[test]
    fn receive_arrives_before_the_sender_gives_up() -> Result {
        not_on_iwarp!(c"no send waits for a receive");
        let param = cm::ConnParam {
            rnr_retry_count: 7,
            ..Default::default()
        };
        let (link, sent, received) = (
            Link::<Softirq>::with(&CAPS, &param)?,
            Inbox::new()?,
            Inbox::new()?,
        );
        send(&link.a.qp, link.env.message(&sent, b"abc")?)?;
        recv(&link.b.qp, link.env.message(&received, &[0; 3])?)?;
        link.wait(|| sent.len() == 1 && received.len() == 1)?;
        sent.pop()?.ok()?;
        check_eq!(&received.pop()?.bytes()?[..], b"abc");
        Ok(())
    }

    #[test]
    fn peer_that_is_gone() -> Result {
        not_on_iwarp!(c"TCP ends with the peer's QP");
        let param = cm::ConnParam {
            retry_count: 0,
            ..Default::default()
        };
        let (link, sent) = (Link::<Softirq>::with(&CAPS, &param)?, Inbox::new()?);
        let free = link.send_cq.free_entries();
        let Link {
            a, b, send_cq, env, ..
        } = link;
        // Its id stays, which would tell this side.
        let crate::fixture::End { qp, id, .. } = b;
        drop(qp);
        wait(|| send_cq.free_entries() > free)?;
        send(&a.qp, env.message(&sent, b"abc")?)?;
        wait(|| sent.len() == 1)?;
        check!(sent.pop()?.status() == Some(wc::Status::RETRY_EXC_ERR));
        drop(id);
        Ok(())
    }

    #[test]
    fn receive_buffer_too_short() -> Result {
        not_on_iwarp!(c"a send completes before the peer has refused it");
        let (link, sent, received) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
        send(&link.a.qp, link.env.message(&sent, b"12345")?)?;
        link.wait(|| sent.len() == 1 && received.len() == 1)?;
        let status = sent.pop()?.status();
        check!([
            Some(wc::Status::REM_INV_REQ_ERR),
            Some(wc::Status::REM_OP_ERR)
        ]
        .contains(&status));
        let mut completed = received.pop()?;
        check!(completed.result.is_err());
        // Nothing was written beyond the buffer, nor reported as received.
        check_eq!(completed.bytes()?.len(), 4);
        Ok(())
    }

    #[test]
    fn error_flushes_what_comes_after() -> Result {
        not_on_iwarp!(c"a send completes before the peer has refused it");
        let (link, sent) = (Link::<Softirq>::with(&CAPS, &impatient())?, Inbox::new()?);
        for _ in 0..4 {
            send(&link.a.qp, link.env.message(&sent, b"abc")?)?;
        }
        link.wait(|| sent.len() == 4)?;
        let all = sent.take();
        check!(all[0].status() == Some(wc::Status::RNR_RETRY_EXC_ERR));
        check!(all[1..].iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn error_flushes_receives() -> Result {
        let (link, received) = (Link::<Softirq>::with(&CAPS, &impatient())?, Inbox::new()?);
        for _ in 0..3 {
            recv(&link.a.qp, link.env.message(&received, &[0; 4])?)?;
        }
        let sent = Inbox::new()?;
        send(&link.a.qp, link.env.message(&sent, b"abc")?)?;
        link.wait(|| sent.len() == 1 && received.len() == 3)?;
        check!(received
            .take()
            .iter()
            .all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn statuses_have_texts_and_values() -> Result {
        check_eq!(wc::Status::WR_FLUSH_ERR.as_raw(), 5);
        let shown = CString::try_from_fmt(fmt!("{}", wc::Status::WR_FLUSH_ERR))?;
        check_eq!(shown.to_bytes(), b"WR flushed");
        let shown = CString::try_from_fmt(fmt!("{:?}", wc::Status::REM_ACCESS_ERR))?;
        check_eq!(shown.to_bytes(), b"remote access error");
        check!(wc::Status::LOC_LEN_ERR != wc::Status::GENERAL_ERR);
        Ok(())
    }

    #[test]
    fn failed_completion_converts_to_an_error() -> Result {
        let error = WcError {
            status: wc::Status::FATAL_ERR,
            vendor_err: 7,
        };
        check_eq!(Error::from(error), EIO);
        Ok(())
    }

    #[test]
    fn unknown_opcodes_are_values() -> Result {
        check_eq!(Opcode::from(0), Opcode::Send);
        check_eq!(Opcode::from(0xdead), Opcode::Other(0xdead));
        Ok(())
    }
}
