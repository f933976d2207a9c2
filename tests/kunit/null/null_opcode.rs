// SPDX-License-Identifier: GPL-2.0

//! Every opcode that a completion can have; fields that are not valid are poison and stay unseen.

use crate::fixture::{
    both,
    Inbox,
    Null,
    RegOwner, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

/// The value of fields that are not valid.
const POISON: u32 = 0xdead_beef;

/// A send completes with this opcode.
fn completes_as(raw: u32, opcode: Opcode) -> Result {
    let (null, sent) = (Null::<Softirq>::new()?, Inbox::new()?);
    null.disconnect()?;
    null.inject(Injection::Opcode {
        opcode: raw,
        count: 1,
    })?;
    null.send(&sent, b"1")?;
    null.send(&sent, b"2")?;
    let all = null.take(&sent, 2)?;
    check_eq!(all[0].ok()?.opcode, opcode);
    check_eq!(all[1].ok()?.opcode, Opcode::Send);
    Ok(())
}

#[kunit_tests(rdma_null_opcode)]
mod tests {
    use super::*;

    #[test]
    fn send() -> Result {
        completes_as(0, Opcode::Send)
    }

    #[test]
    fn rdma_write() -> Result {
        completes_as(1, Opcode::RdmaWrite)
    }

    #[test]
    fn rdma_read() -> Result {
        completes_as(2, Opcode::RdmaRead)
    }

    #[test]
    fn comp_swap() -> Result {
        completes_as(3, Opcode::CompSwap)
    }

    #[test]
    fn fetch_add() -> Result {
        completes_as(4, Opcode::FetchAdd)
    }

    #[test]
    fn local_inv() -> Result {
        completes_as(6, Opcode::LocalInv)
    }

    #[test]
    fn reg_mr() -> Result {
        completes_as(10, Opcode::RegMr)
    }

    #[test]
    fn recv() -> Result {
        completes_as(1 << 7, Opcode::Recv)
    }

    #[test]
    fn recv_rdma_with_imm() -> Result {
        completes_as((1 << 7) + 1, Opcode::RecvRdmaWithImm)
    }

    #[test]
    fn unknown() -> Result {
        completes_as(99, Opcode::Other(99))
    }

    #[test]
    fn largest() -> Result {
        completes_as(u32::MAX, Opcode::Other(u32::MAX))
    }

    #[test]
    fn send_has_no_immediate_data() -> Result {
        let (null, sent) = (Null::<Softirq>::new()?, Inbox::new()?);
        null.disconnect()?;
        null.send(&sent, b"1")?;
        let done = null.one(&sent)?.ok()?;
        check_eq!(done.imm_data, None);
        check_eq!(done.invalidated, None);
        // This field has no meaning for a send: with assertions the null device puts poison there.
        if cfg!(debug_assertions) {
            check_eq!(done.byte_len, POISON as usize);
        }
        Ok(())
    }

    #[test]
    fn receive_has_what_the_peer_sent() -> Result {
        let (null, sent, received) = (Null::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        null.recv(&received, 8)?;
        null.recv(&received, 8)?;
        null.send(&sent, b"123")?;
        let message = null.env.message(&sent, b"12")?;
        null.a.post_send(message, |m| {
            Ok(SendWr::send([m.buf.sge(0..2)?]).with_imm(0x0102_0304))
        })?;
        let all = null.take(&received, 2)?;
        let (plain, with_imm) = (all[0].ok()?, all[1].ok()?);
        check_eq!(plain.byte_len, 3);
        check_eq!(plain.imm_data, None);
        check_eq!(plain.invalidated, None);
        check_eq!(with_imm.byte_len, 2);
        check_eq!(with_imm.imm_data, Some(0x0102_0304));
        check_eq!(with_imm.invalidated, None);
        Ok(())
    }

    #[test]
    fn failed_receive_has_nothing() -> Result {
        let (null, sent, received) = (Null::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        null.recv(&received, 8)?;
        null.dev.inject_qp(
            null.b.num(),
            Injection::Status {
                status: 1,
                vendor_err: POISON,
                count: 1,
                fatal: false,
            },
        )?;
        null.send(&sent, b"123")?;
        // There is nothing else to read: see the compile-fail tests.
        check!(null.one(&received)?.status() == Some(wc::Status::LOC_LEN_ERR));
        Ok(())
    }

    #[test]
    fn registered_memory_is_written_and_read() -> Result {
        let (null, inbox) = (Null::<Softirq>::new()?, Inbox::new()?);
        let region = null.env.region(9000)?;
        let owner = RegOwner::new(&region)?;
        let registered = owner.registered.clone();
        let remote = null.b.post_send(owner, |o| Ok(both(&o.region)))?;
        null.wait(|| registered.get() == 1)?;

        // Across the pages of the region.
        let at = |offset: u64| Remote {
            addr: remote.addr + offset,
            ..remote
        };
        let message = null.env.message(&inbox, &[7; 8192])?;
        null.a.post_send(message, |m| {
            Ok(SendWr::rdma_write([m.buf.whole()], at(100)))
        })?;
        null.one(&inbox)?.ok()?;
        let mut bytes = KVec::from_elem(0, 9000, GFP_KERNEL)?;
        region.read(0, &mut bytes)?;
        check!(bytes[..100].iter().all(|byte| *byte == 0));
        check!(bytes[100..8292].iter().all(|byte| *byte == 7));
        check!(bytes[8292..].iter().all(|byte| *byte == 0));

        let message = null.env.message(&inbox, &[0; 50])?;
        null.a.post_send(message, |m| {
            Ok(SendWr::rdma_read([m.buf.whole_mut()], at(75)))
        })?;
        let mut read = null.one(&inbox)?;
        check_eq!(read.ok()?.byte_len, 50);
        let bytes = read.bytes()?;
        check!(bytes[..25].iter().all(|byte| *byte == 0));
        check!(bytes[25..].iter().all(|byte| *byte == 7));

        let message = null.env.message(&inbox, &[0; 50])?;
        null.a.post_send(message, |m| {
            Ok(SendWr::rdma_write([m.buf.whole()], at(8951)))
        })?;
        check!(null.one(&inbox)?.status() == Some(wc::Status::REM_ACCESS_ERR));
        Ok(())
    }
}
