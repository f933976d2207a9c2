// SPDX-License-Identifier: GPL-2.0

//! Multicast groups.

use crate::fixture::{
    wait,
    Env,
    UdEnd,
    PORT,
    QKEY, //
};
use core::net::{
    IpAddr,
    Ipv4Addr,
    Ipv6Addr, //
};
use kernel::prelude::*;
use rdma::{
    ah::{
        Ah,
        Attr,
        Grh, //
    },
    device::Gid,
    prelude::*,
    ud::MULTICAST_QPN, //
};

/// A group of the address family of the test's device.
fn group(env: &Env, n: u8) -> Gid {
    let ip = match env.ip {
        IpAddr::V4(_) => Ipv4Addr::new(239, 1, 2, n).to_ipv6_mapped(),
        IpAddr::V6(_) => Ipv6Addr::new(0xff05, 0, 0, 0, 0, 0, 1, n.into()),
    };
    Gid(ip.octets())
}

/// Returns the address of a group. rxe hands what goes to its own Ethernet address back without the
/// network.
fn address(env: &Env, group: Gid) -> Result<Arc<Ah>> {
    let port = env.dev.port(PORT).ok_or(ENODEV)?;
    let from = port
        .gids()
        .find(|gid| gid.gid().ip() == env.ip)
        .ok_or(EADDRNOTAVAIL)?;
    let grh = Grh::new(group, from.index().try_into()?);
    let attr = Attr::new(PORT).grh(grh).dmac(from.l2()?.mac);
    Ok(Arc::new(Ah::create(&env.pd, &attr, &env.cx)?, GFP_KERNEL)?)
}

#[kunit_tests(rdma_ud_group)]
mod tests {
    use super::*;

    #[test]
    fn reaches_all_members() -> Result {
        let env = Env::new()?;
        let a = UdEnd::<Softirq>::new(&env, 0)?;
        let (b, c, stranger) = (
            UdEnd::<Softirq>::new(&env, 2)?,
            UdEnd::<Workqueue>::new(&env, 2)?,
            UdEnd::<Softirq>::new(&env, 2)?,
        );
        let all = group(&env, 1);
        b.qp.attach(all, 0, &env.cx)?;
        c.qp.attach(all, 0, &env.cx)?;
        let to = address(&env, all)?;
        a.send(&env, &to, MULTICAST_QPN, QKEY, b"to all")?;
        wait(|| b.received.len() == 1 && c.received.len() == 1)?;
        for received in [&b.received, &c.received] {
            let mut message = received.pop()?;
            check_eq!(&message.payload()?[..], b"to all");
            let source = message.source()?;
            check_eq!(source.qpn(), a.qp.num());
            check!(source.gids().is_some_and(|(_, to)| to == all));
        }
        check_eq!(stranger.received.len(), 0);
        Ok(())
    }

    #[test]
    fn member_that_left_gets_nothing() -> Result {
        let env = Env::new()?;
        let a = UdEnd::<Softirq>::new(&env, 0)?;
        let (b, c) = (
            UdEnd::<Softirq>::new(&env, 2)?,
            UdEnd::<Softirq>::new(&env, 2)?,
        );
        let (all, to) = (group(&env, 2), address(&env, group(&env, 2))?);
        b.qp.attach(all, 0, &env.cx)?;
        c.qp.attach(all, 0, &env.cx)?;
        a.send(&env, &to, MULTICAST_QPN, QKEY, b"1")?;
        wait(|| b.received.len() == 1 && c.received.len() == 1)?;
        b.qp.detach(all, &env.cx)?;
        a.send(&env, &to, MULTICAST_QPN, QKEY, b"2")?;
        wait(|| c.received.len() == 2)?;
        check_eq!(b.received.len(), 1);
        // And may come again.
        b.qp.attach(all, 0, &env.cx)?;
        Ok(())
    }

    #[test]
    fn groups_are_checked() -> Result {
        let env = Env::new()?;
        let a = UdEnd::<Softirq>::new(&env, 0)?;
        let (one, two) = (group(&env, 3), group(&env, 4));
        check_err!(a.qp.attach(Gid([1; 16]), 0, &env.cx), EINVAL);
        check_err!(a.qp.detach(one, &env.cx), ENOENT);
        a.qp.attach(one, 0, &env.cx)?;
        check_err!(a.qp.attach(one, 0, &env.cx), EEXIST);
        a.qp.attach(two, 0, &env.cx)?;
        a.qp.detach(one, &env.cx)?;
        check_err!(a.qp.detach(one, &env.cx), ENOENT);
        a.qp.detach(two, &env.cx)
    }

    #[test]
    fn qp_leaves_its_groups_at_its_end() -> Result {
        let env = Env::new()?;
        for destroy in [false, true] {
            let UdEnd { qp, cq, .. } = UdEnd::<Softirq>::new(&env, 2)?;
            for n in 5..8 {
                qp.attach(group(&env, n), 0, &env.cx)?;
            }
            if destroy {
                qp.destroy(&env.cx)?;
            } else {
                drop(qp);
            }
            wait(|| cq.free_entries() == cq.entries())?;
        }
        Ok(())
    }

    #[test]
    fn qp_ends_while_its_group_is_sent_to() -> Result {
        let env = Env::new()?;
        let (a, all) = (UdEnd::<Softirq>::new(&env, 0)?, group(&env, 8));
        let to = address(&env, all)?;
        for n in 1..8 {
            let (b, c) = (
                UdEnd::<Softirq>::new(&env, 4)?,
                UdEnd::<Softirq>::new(&env, 4)?,
            );
            b.qp.attach(all, 0, &env.cx)?;
            c.qp.attach(all, 0, &env.cx)?;
            for i in 0..n {
                a.send(&env, &to, MULTICAST_QPN, QKEY, &[i; 32])?;
            }
            b.qp.destroy(&env.cx)?;
            drop(c);
            wait(|| a.sent.len() == usize::from(n))?;
            a.sent.take();
        }
        Ok(())
    }
}
