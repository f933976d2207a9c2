// SPDX-License-Identifier: GPL-2.0

//! Options of ids and listeners, set before they are used.

use crate::fixture::{
    accepts,
    connect_to,
    listen,
    port,
    refuses,
    Env,
    Link,
    Place,
    IPV6,
    STEP_MS, //
};
use core::net::{
    IpAddr,
    Ipv4Addr,
    Ipv6Addr,
    SocketAddrV6, //
};
use kernel::prelude::*;
use rdma::{
    device::NodeType,
    prelude::*, //
};

fn create(env: &Env, options: &cm::Options<'_>) -> Result<cm::Id> {
    cm::Id::create_with(&env.client, options, &env.cx)
}

/// Returns options with the test link's address and this port.
fn from(env: &Env, port: u16) -> cm::Options<'static> {
    cm::Options {
        src: Some(SocketAddr::new(env.ip, port)),
        ..Default::default()
    }
}

fn with_type(env: &Env, node_type: NodeType) -> Result<cm::Id> {
    let options = cm::Options {
        node_type: Some(node_type),
        ..Default::default()
    };
    create(env, &options)
}

/// Listens on `::`.
fn listen_on_any(env: &Env, port: u16, dual_stack: bool) -> Result<cm::Listener> {
    let options = cm::Options {
        dual_stack,
        ..Default::default()
    };
    cm::Listener::new_with(
        &env.client,
        SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
        8,
        &options,
        Arc::new(accepts(env, b""), GFP_KERNEL)?,
        &env.cx,
    )
}

#[kunit_tests(rdma_cm_options)]
mod tests {
    use super::*;

    #[test]
    fn source_address_finds_the_device() -> Result {
        let env = Env::new()?;
        let id = create(&env, &from(&env, 0))?;
        check!(id.device()? == &env.dev);
        id.resolve_addr(env.addr(), STEP_MS, &env.cx)?;
        id.resolve_route(STEP_MS, &env.cx)?;
        check!(id.device()? == &env.dev);
        Ok(())
    }

    #[test]
    fn source_address_must_be_one_of_a_device() -> Result {
        let env = Env::new()?;
        let options = cm::Options {
            src: Some(SocketAddr::new(Ipv4Addr::new(198, 51, 100, 1).into(), 0)),
            ..Default::default()
        };
        check_err!(create(&env, &options), EADDRNOTAVAIL);
        Ok(())
    }

    #[test]
    fn addresses_are_shared_only_by_those_who_want_it() -> Result {
        let env = Env::new()?;
        let (alone, shared) = (from(&env, port()), from(&env, port()));
        let _first = create(&env, &alone)?;
        check_err!(create(&env, &alone).map(|_| ()), EADDRINUSE);
        let shared = cm::Options {
            reuse_addr: true,
            ..shared
        };
        let _first = create(&env, &shared)?;
        let _second = create(&env, &shared)?;
        Ok(())
    }

    #[test]
    fn node_type_excludes_devices() -> Result {
        not_on_iwarp!(c"the device is of the other type");
        let env = Env::new()?;
        with_type(&env, NodeType::Ca)?.resolve_addr(env.addr(), STEP_MS, &env.cx)?;
        let other = with_type(&env, NodeType::Rnic)?;
        check_err!(other.resolve_addr(env.addr(), STEP_MS, &env.cx), ENODEV);
        check_err!(with_type(&env, NodeType::Switch).map(|_| ()), EINVAL);
        Ok(())
    }

    #[test]
    fn timeout_has_a_range() -> Result {
        let env = Env::new()?;
        let set = |timeout| {
            let options = cm::Options {
                ack_timeout: Some(timeout),
                ..Default::default()
            };
            create(&env, &options)
        };
        set(31)?.resolve_addr(env.addr(), STEP_MS, &env.cx)?;
        check_err!(set(32).map(|_| ()), EINVAL);
        check_err!(set(255).map(|_| ()), EINVAL);
        Ok(())
    }

    #[test]
    fn network_namespace_is_that_of_the_device() -> Result {
        let env = Env::new()?;
        let options = cm::Options {
            net_of: Some(&env.dev),
            ..Default::default()
        };
        let id = create(&env, &options)?;
        id.resolve_addr(env.addr(), STEP_MS, &env.cx)?;
        check!(id.device()? == &env.dev);
        Ok(())
    }

    #[test]
    fn listener_hears_both_families_if_asked_to() -> Result {
        not_on_iwarp!(c"siw hears one family");
        let env = Env::new()?;
        let port = port();
        let listener = listen_on_any(&env, port, true)?;
        for ip in [env.ip, IPV6.into()] {
            connect_to(&env, SocketAddr::new(ip, port), b"")?;
        }
        listener.destroy(&env.cx)?;
        let _listener = listen_on_any(&env, port, false)?;
        check_err!(
            connect_to(&env, SocketAddr::new(env.ip, port), b"").map(|_| ()),
            ECONNREFUSED
        );
        connect_to(&env, SocketAddr::new(IpAddr::V6(IPV6), port), b"")?;
        Ok(())
    }

    #[test]
    fn listener_has_no_source_address() -> Result {
        let env = Env::new()?;
        let accept = Arc::new(refuses, GFP_KERNEL)?;
        let (addr, options) = (env.addr(), from(&env, 0));
        check_err!(
            cm::Listener::new_with(&env.client, addr, 8, &options, accept, &env.cx).map(|_| ()),
            EINVAL
        );
        let _listener = listen(&env, addr, refuses)?;
        Ok(())
    }

    #[test]
    fn ends_know_both_addresses() -> Result {
        not_on_iwarp!(c"GIDs are no addresses");
        let link = Link::<Softirq>::new()?;
        for id in [&link.a.id, &link.b.id] {
            let (src, dst) = id.gids()?;
            check_eq!((src.ip(), dst.ip()), (link.env.ip, link.env.ip));
        }
        let unresolved = cm::Id::create(&link.env.client, &link.env.cx)?;
        check_err!(unresolved.gids(), ENOTCONN);
        Ok(())
    }

    #[test]
    fn ends_know_both_ports() -> Result {
        let link = Link::<Softirq>::new()?;
        let (a, b) = (link.a.id.addrs()?, link.b.id.addrs()?);
        check_eq!((a.0, a.1), (b.1, b.0));
        check_eq!((a.0.ip(), a.1.ip()), (link.env.ip, link.env.ip));
        check!(a.0.port() != 0 && a.0.port() != a.1.port());
        // Without a device, and bound to one.
        for options in [cm::Options::default(), from(&link.env, 0)] {
            let id = cm::Id::create_with(&link.env.client, &options, &link.env.cx)?;
            check_err!(id.addrs(), ENOTCONN);
        }
        Ok(())
    }

    /// An address is one of a network interface: that of a request too, which comes without it.
    #[test]
    fn link_local_addresses_have_their_scope() -> Result {
        not_on_iwarp!(c"GIDs are no addresses");
        let (env, heard) = (Env::new()?, Place::new()?);
        let (port, tell) = (env.dev.port(1).ok_or(ENODEV)?, heard.clone());
        let is_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let own = port.gids().map(|attr| attr.gid().ip()).find(is_local);
        let Some(IpAddr::V6(own)) = own else {
            return Err(EADDRNOTAVAIL);
        };
        let (number, scope) = (
            env.addr().port(),
            port.netdev(&env.cx).ok_or(ENODEV)?.index(),
        );
        let addr = SocketAddr::from(SocketAddrV6::new(own, number, 0, scope));
        let refuse = move |request: cm::Request<'_>, cx: &Sleepable| {
            tell.put(request.into_id(cx)?.addrs()?);
            Err(ECONNREFUSED)
        };
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), number);
        let _listener = listen(&env, any, refuse)?;
        check_err!(connect_to(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        let (src, dst) = heard.wait()?;
        check_eq!(src, addr);
        let number = dst.port();
        check_eq!(dst, SocketAddrV6::new(own, number, 0, scope).into());
        let id = cm::Id::create(&env.client, &env.cx)?;
        id.resolve_addr(addr, STEP_MS, &env.cx)?;
        let (src, dst) = id.addrs()?;
        let number = src.port();
        check_eq!(src, SocketAddrV6::new(own, number, 0, scope).into());
        check_eq!(dst, addr);
        Ok(())
    }
}
