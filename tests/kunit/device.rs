// SPDX-License-Identifier: GPL-2.0

//! Attributes of devices, their ports and their addresses. The device is an rxe link.

use crate::fixture::{
    Env,
    IPV6, //
};
use core::net::IpAddr;
use kernel::prelude::*;
use rdma::device::{
    Capability,
    Gid,
    GidType,
    LinkLayer,
    NodeType,
    PortState, //
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
        check!(env.dev.port(1).ok_or(ENODEV)?.device() == &env.dev);
        Ok(())
    }

    #[test]
    fn port_is_active() -> Result {
        let env = Env::new()?;
        let attr = env.dev.port(1).ok_or(ENODEV)?.query(&env.cx)?;
        check_eq!(attr.state, PortState::Active);
        check_eq!((attr.max_mtu, attr.active_mtu), (4096, 1024));
        check_eq!((attr.pkey_table_len, attr.lid, attr.lmc), (1, 0, 0));
        check!(attr.gid_table_len >= 4);
        check!(attr.max_msg >= 1 << 20);
        // The dummy interface has no speed, for which the RDMA core takes 1 Gbit/s: the slowest.
        check_eq!((attr.lanes, attr.lane_mbps), (Some(1), Some(2_500)));
        check_eq!(attr.mbps(), Some(2_500));
        Ok(())
    }

    #[test]
    fn port_is_one_of_roce_v2() -> Result {
        let env = Env::new()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        let protocols = port.protocols();
        check!(protocols.roce() && protocols.roce_v2() && protocols.ib_or_roce());
        check!(!protocols.roce_v1() && !protocols.ib() && !protocols.iwarp());
        check!(!protocols.opa_addresses());
        check_eq!(port.link_layer(), LinkLayer::Ethernet);
        check_eq!(env.dev.node_type(), NodeType::Ca);
        Ok(())
    }

    #[test]
    fn port_has_the_default_pkey() -> Result {
        let env = Env::new()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        check_eq!(port.pkey(0, &env.cx)?, 0xffff);
        check!(port.pkey(1, &env.cx).is_err());
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
        let shown = kernel::str::CString::try_from_fmt(fmt!("{netdev}"))?;
        check_eq!(shown.to_bytes(), b"rdma0");
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
            check!(Some(attr.netdev()?) == port.netdev(&env.cx));
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
        check_err!(port.gid_attr(len - 1), ENODATA);
        check_err!(port.gid(len), EINVAL);
        check_err!(port.gid_attr(len), EINVAL);
        check_err!(port.gid_attr(u16::MAX), EINVAL);
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
        let dev = Env::new()?.dev;
        check!(dev.max_send_sge() >= 16 && dev.max_recv_sge() >= 16 && dev.max_sge_rd() >= 16);
        check!(dev.max_responder_resources() >= 16 && dev.max_initiator_depth() >= 16);
        check!(dev.max_mr() >= 1024 && dev.max_mr_size() == u64::MAX);
        check!(dev.max_srq() >= 64 && dev.max_srq_wr() >= 64 && dev.max_srq_sge() >= 16);
        check!(dev.page_sizes() & 4096 != 0);
        check_eq!(dev.max_sgl_rd(), 0);
        check_eq!(
            (dev.vendor_id(), dev.vendor_part_id(), dev.hw_version()),
            (0xff_ffff, 0, 0)
        );
        Ok(())
    }

    #[test]
    fn device_has_capabilities() -> Result {
        let dev = Env::new()?.dev;
        check!(dev.has(Capability::MemMgtExtensions));
        check!(dev.has(Capability::SrqResize));
        check!(!dev.has(Capability::Xrc) && !dev.has(Capability::Integrity));
        check!(!dev.has(Capability::SgGaps) && !dev.has(Capability::LocalDmaLkey));
        Ok(())
    }

    #[test]
    fn device_has_no_firmware() -> Result {
        let env = Env::new()?;
        check_eq!(env.dev.firmware(&env.cx).to_bytes(), b"");
        Ok(())
    }

    #[test]
    fn device_is_accessible() -> Result {
        let env = Env::new()?;
        check!(env.dev.is_accessible(&env.cx));
        Ok(())
    }
}
