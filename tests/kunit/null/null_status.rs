// SPDX-License-Identifier: GPL-2.0

//! Every status that a completion can have, and what else can be read of a failed one: nothing.

use crate::fixture::{
    Inbox,
    Null, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

/// A send and a receive fail with this status, and the next ones do not.
fn fails_with(null: &Null<Softirq>, status: u32) -> Result {
    let (sent, received) = (Inbox::new()?, Inbox::new()?);
    for _ in 0..2 {
        null.recv(&received, 4)?;
    }
    null.inject_status(status, 1)?;
    null.dev.inject_qp(
        null.b.num(),
        Injection::Status {
            status,
            vendor_err: 77,
            count: 1,
            fatal: false,
        },
    )?;
    null.send(&sent, b"1")?;
    null.send(&sent, b"2")?;
    let (sent, received) = (null.take(&sent, 2)?, null.take(&received, 2)?);
    for (all, vendor_err) in [(&sent, 0x1234), (&received, 77)] {
        match all[0].result {
            Ok(_) => return Err(crate::check::fail("it succeeded")),
            Err(e) => {
                check_eq!(e.status.as_raw(), status);
                check_eq!(e.vendor_err, vendor_err);
            }
        }
        all[1].ok()?;
    }
    Ok(())
}

#[kunit_tests(rdma_null_status)]
mod tests {
    use super::*;

    /// Those of C, the first one beyond, and values far from them.
    #[test]
    fn every_status() -> Result {
        let null = Null::new()?;
        for status in 1..=22 {
            fails_with(&null, status)?;
        }
        fails_with(&null, 0xdead)?;
        fails_with(&null, u32::MAX)
    }

    #[test]
    fn names_are_those_of_c() -> Result {
        check_eq!(wc::Status::LOC_LEN_ERR.as_raw(), 1);
        check_eq!(wc::Status::WR_FLUSH_ERR.as_raw(), 5);
        check_eq!(wc::Status::GENERAL_ERR.as_raw(), 21);
        Ok(())
    }

    #[test]
    fn error_moves_the_qp_as_hardware_does() -> Result {
        let (null, sent) = (Null::<Workqueue>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.inject(Injection::Status {
            status: wc::Status::LOC_PROT_ERR.as_raw(),
            vendor_err: 0,
            count: 1,
            fatal: true,
        })?;
        for _ in 0..4 {
            null.send(&sent, b"x")?;
        }
        let all = null.take(&sent, 4)?;
        check!(all[0].status() == Some(wc::Status::LOC_PROT_ERR));
        check!(all[1..].iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn error_of_a_receive_flushes_the_others() -> Result {
        let (null, sent, received) = (Null::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        for _ in 0..3 {
            null.recv(&received, 4)?;
        }
        null.dev.inject_qp(
            null.b.num(),
            Injection::Status {
                status: wc::Status::LOC_QP_OP_ERR.as_raw(),
                vendor_err: 0,
                count: 1,
                fatal: true,
            },
        )?;
        null.send(&sent, b"x")?;
        let all = null.take(&received, 3)?;
        check!(all[0].status() == Some(wc::Status::LOC_QP_OP_ERR));
        check!(all[1..].iter().all(|completed| completed.was_flushed()));
        Ok(())
    }

    #[test]
    fn status_can_be_the_device_s() -> Result {
        let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.dev.inject(Injection::Status {
            status: wc::Status::FATAL_ERR.as_raw(),
            vendor_err: 1,
            count: 2,
            fatal: false,
        })?;
        for _ in 0..3 {
            null.send(&sent, b"x")?;
        }
        let all = null.take(&sent, 3)?;
        check!(all[0].status() == Some(wc::Status::FATAL_ERR));
        check!(all[1].status() == Some(wc::Status::FATAL_ERR));
        all[2].ok()?;
        Ok(())
    }
}
