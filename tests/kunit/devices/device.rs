// SPDX-License-Identifier: GPL-2.0

//! Attributes of devices, their ports and their addresses. The device is an rxe link.

use crate::fixture::{
    wait,
    Counter,
    Env,
    OwnLink,
    IPV6, //
};
use core::net::IpAddr;
use kernel::prelude::*;
use rdma::{
    device::{
        Gid,
        GidType,
        PortState,
        Protocol, //
    },
    prelude::*, //
};

/// Returns the number of GIDs that the port's table has room for.
fn table_len(env: &Env) -> Result<u16> {
    let port = env.dev.port(1).ok_or(ENODEV)?;
    Ok(port.query(&env.cx)?.gid_table_len.try_into()?)
}

#[kunit_tests(rdma_device)]
mod tests {
    use super::*;

    #[test]
    fn has_one_port() -> Result {
        let env = Env::new()?;
        let mut nums = env.dev.ports().map(|port| port.num());
        check_eq!((nums.next(), nums.next()), (Some(1), None));
        for num in [0, 2, 255, u32::MAX] {
            check!(env.dev.port(num).is_none());
        }
        Ok(())
    }

    #[test]
    fn port_is_active() -> Result {
        let env = Env::new()?;
        let attr = env.dev.port(1).ok_or(ENODEV)?.query(&env.cx)?;
        check_eq!(attr.state, PortState::Active);
        check_eq!((attr.active_mtu, attr.lid), (1024, 0));
        check!(attr.gid_table_len >= 4);
        Ok(())
    }

    #[test]
    fn port_is_one_of_roce_v2() -> Result {
        let env = Env::new()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        check!(port.has(Protocol::Ib) || port.has(Protocol::Roce));
        check!(port.has(Protocol::Roce) && port.has(Protocol::RoceV2));
        for other in [
            Protocol::Ib,
            Protocol::RoceV1,
            Protocol::Iwarp,
            Protocol::OpaAh,
        ] {
            check!(!port.has(other));
        }
        Ok(())
    }

    #[test]
    fn port_has_the_default_pkey() -> Result {
        let env = Env::new()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        check_eq!(port.find_pkey(0xffff)?, 0);
        // The highest bit is membership, which does not have to match.
        check_eq!(port.find_pkey(0x7fff)?, 0);
        check_err!(port.find_pkey(0x1234), ENOENT);
        Ok(())
    }

    #[test]
    fn port_has_the_interface() -> Result {
        let env = Env::new()?;
        let netdev = env
            .dev
            .port(1)
            .and_then(|port| port.netdev(&env.cx))
            .ok_or(ENODEV)?;
        check_eq!(netdev.name().to_bytes(), b"rdma0");
        check!(netdev.index() > 0);
        Ok(())
    }

    #[test]
    fn device_is_found_by_its_interface() -> Result {
        let env = Env::new()?;
        check!(
            env.client
                .device_of_netdev(c"rdma0", &env.cx)
                .ok_or(ENODEV)?
                == env.dev
        );
        check!(env.client.device_of_netdev(c"lo", &env.cx).is_none());
        check!(env.client.device_of_netdev(c"none", &env.cx).is_none());
        Ok(())
    }

    #[test]
    fn gids_are_the_addresses_of_the_interface() -> Result {
        let env = Env::new()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        for ip in [env.ip, IpAddr::V6(IPV6)] {
            let attr = port
                .gids()
                .find(|attr| attr.gid().ip() == ip)
                .ok_or(ENOENT)?;
            check_eq!(attr.gid_type(), GidType::RoceV2);
            check_eq!(attr.port_num(), 1);
            check!(attr.device() == &env.dev);
            check_eq!(port.gid(attr.index())?, Some(attr.gid()));
            let l2 = attr.l2()?;
            check!(l2.vlan.is_none());
            check!(l2.mac != [0; 6]);
        }
        Ok(())
    }

    #[test]
    fn gids_end_with_the_table() -> Result {
        let env = Env::new()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        let len = table_len(&env)?;
        check!(port.gids().count() < len.into());
        check_eq!(port.gid(len - 1)?, None);
        check_err!(port.gid(len), EINVAL);
        Ok(())
    }

    #[test]
    fn gid_is_shown_as_an_address() -> Result {
        let gid = Gid(IPV6.octets());
        let shown = kernel::str::CString::try_from_fmt(fmt!("{gid}"))?;
        check_eq!(shown.to_bytes(), b"2001:db8::1");
        let mapped = Gid(core::net::Ipv4Addr::new(192, 0, 2, 1)
            .to_ipv6_mapped()
            .octets());
        check_eq!(mapped.ip(), IpAddr::from([192, 0, 2, 1]));
        Ok(())
    }

    #[test]
    fn gid_is_held_beyond_its_port() -> Result {
        let env = Env::new()?;
        let attr = {
            let dev = env.dev.clone();
            let port = dev.port(1).ok_or(ENODEV)?;
            let first = port.gids().next().ok_or(ENOENT)?;
            first
        };
        drop(env);
        check!(attr.gid() != Gid([0; 16]));
        Ok(())
    }

    #[test]
    fn device_has_attributes() -> Result {
        let attrs = Env::new()?.dev.attrs();
        check!(attrs.max_send_sge >= 16 && attrs.max_recv_sge >= 16 && attrs.max_sge_rd >= 16);
        check!(attrs.max_qp_rd_atom >= 16 && attrs.max_qp_init_rd_atom >= 16);
        check!(attrs.max_mr >= 1024);
        check!(attrs.max_srq >= 64 && attrs.max_srq_wr >= 64 && attrs.max_srq_sge >= 16);
        check!(attrs.max_sgl_rd == 0 && attrs.max_pkeys == 64);
        check!(attrs.mem_mgt_extensions && !attrs.sg_gaps_reg);
        Ok(())
    }

    #[test]
    fn device_is_accessible() -> Result {
        let env = Env::new()?;
        check!(env.dev.is_accessible(&env.cx));
        Ok(())
    }

    /// The entry stays as it is while it is held, but for the interface, which goes under readers.
    #[test]
    fn gid_loses_its_interface() -> Result {
        let link = OwnLink::new();
        let env = link.env()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        // The link-local one stays.
        let held = port
            .gids()
            .find(|held| matches!(held.gid().ip(), IpAddr::V6(ip) if ip.segments()[0] == 0x2001))
            .ok_or(EADDRNOTAVAIL)?;
        let held = Arc::new(held, GFP_KERNEL)?;
        let was = (held.gid(), held.gid_type(), held.index());
        check!(held.l2()?.vlan.is_none());
        let (begun, refused) = (Counter::new()?, Counter::new()?);
        for _ in 0..2 {
            let (held, begins, refuses) = (held.clone(), begun.clone(), refused.clone());
            env.client.spawn(GFP_KERNEL, move |_| {
                begins.up();
                let mut same = true;
                while held.l2().is_ok() {
                    same &= (held.gid(), held.gid_type(), held.index()) == was;
                }
                if same {
                    refuses.up();
                }
            })?;
        }
        wait(|| begun.get() == 2)?;
        link.down()?;
        wait(|| refused.get() == 2)?;
        check_err!(held.l2(), ENODEV);
        check!((held.gid(), held.gid_type(), held.index()) == was);
        check!(held.device() == &env.dev);
        // It is in the table no more, and its place is nobody else's.
        check!(port
            .gids()
            .all(|gid| gid.gid() != was.0 && gid.index() != was.2));
        Ok(())
    }
}
