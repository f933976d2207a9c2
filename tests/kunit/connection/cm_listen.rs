// SPDX-License-Identifier: GPL-2.0

//! The connection manager, as the passive side sees it: listeners.

use crate::fixture::{
    accepts,
    connect_to,
    listen,
    refuses,
    wait,
    Counter,
    Env,
    Place,
    IPV6, //
};
use core::net::{
    IpAddr,
    Ipv4Addr,
    Ipv6Addr, //
};
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::prelude::*;

#[kunit_tests(rdma_cm_listen)]
mod tests {
    use super::*;

    #[test]
    fn destroyed_listener_frees_the_port() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        for _ in 0..5 {
            listen(&env, addr, refuses)?.destroy(&env.cx)?;
        }
        check_err!(connect_to(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        Ok(())
    }

    #[test]
    fn dropped_listener_frees_the_port() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        drop(listen(&env, addr, refuses)?);
        wait(|| listen(&env, addr, refuses).is_ok())
    }

    #[test]
    fn address_is_listened_on_once() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let _listener = listen(&env, addr, refuses)?;
        check_err!(listen(&env, addr, refuses), EADDRINUSE);
        Ok(())
    }

    #[test]
    fn foreign_address_is_refused() -> Result {
        let env = Env::new()?;
        let foreign = SocketAddr::new(Ipv4Addr::new(203, 0, 113, 9).into(), 1234);
        check_err!(listen(&env, foreign, refuses), EADDRNOTAVAIL);
        Ok(())
    }

    #[test]
    fn any_address() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), addr.port());
        let _listener = listen(&env, any, accepts(&env, b"any"))?;
        let (_end, answer) = connect_to(&env, addr, &[])?;
        check!(answer.starts_with(b"any"));
        Ok(())
    }

    #[test]
    fn ipv6() -> Result {
        let env = Env::new()?;
        let addr = SocketAddr::new(IPV6.into(), env.addr().port());
        let _listener = listen(&env, addr, accepts(&env, b"six"))?;
        let (_end, answer) = connect_to(&env, addr, &[])?;
        check!(answer.starts_with(b"six"));
        Ok(())
    }

    #[test]
    fn any_ipv6_address_leaves_ipv4_alone() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let at = |ip: IpAddr| SocketAddr::new(ip, addr.port());
        let _six = listen(
            &env,
            at(Ipv6Addr::UNSPECIFIED.into()),
            accepts(&env, b"six"),
        )?;
        check_err!(connect_to(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        let _four = listen(
            &env,
            at(Ipv4Addr::UNSPECIFIED.into()),
            accepts(&env, b"four"),
        )?;
        let (_end, answer) = connect_to(&env, addr, &[])?;
        check!(answer.starts_with(b"four"));
        let (_end, answer) = connect_to(&env, at(IPV6.into()), &[])?;
        check!(answer.starts_with(b"six"));
        Ok(())
    }

    #[test]
    fn listener_serves_many() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let _listener = listen(&env, addr, accepts(&env, &[]))?;
        let mut ends = KVec::new();
        for _ in 0..8 {
            ends.push(connect_to(&env, addr, &[])?.0, GFP_KERNEL)?;
        }
        for end in &ends {
            wait(|| end.events.established() == 1)?;
        }
        Ok(())
    }

    #[test]
    fn connections_outlive_the_listener() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let listener = listen(&env, addr, accepts(&env, &[]))?;
        let (end, _) = connect_to(&env, addr, &[])?;
        listener.destroy(&env.cx)?;
        check_eq!(end.events.disconnected(), 0);
        end.id.disconnect(&env.cx)?;
        wait(|| end.events.disconnected() == 1)
    }

    #[test]
    fn destroy_in_the_own_callback_is_deferred() -> Result {
        let (env, own) = (Env::new()?, Place::<cm::Listener>::new()?);
        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let (addr, tell, listener) = (env.addr(), said.clone(), own.clone());
        let made = listen(&env, addr, move |_: cm::Request<'_>, cx: &Sleepable| {
            let listener = listener.take().ok_or(EIO)?;
            tell.populate(listener.destroy(cx).err());
            Ok(())
        })?;
        own.put(made);
        let dialled = connect_to(&env, addr, &[]).map(|_| ());
        // Without a request it is still there, and would own itself.
        drop(own.take());
        check_err!(dialled, ECONNREFUSED);
        check_eq!(said.copy(), Some(Some(EDEADLK)));
        wait(|| listen(&env, addr, refuses).is_ok())
    }

    #[test]
    fn drop_in_the_own_callback() -> Result {
        let (env, own, calls) = (Env::new()?, Place::<cm::Listener>::new()?, Counter::new()?);
        let (addr, counts, listener) = (env.addr(), calls.clone(), own.clone());
        let made = listen(&env, addr, move |_: cm::Request<'_>, _: &Sleepable| {
            drop(listener.take());
            counts.up();
            Ok(())
        })?;
        own.put(made);
        let dialled = connect_to(&env, addr, &[]).map(|_| ());
        // Without a request it is still there, and would own itself.
        drop(own.take());
        check_err!(dialled, ECONNREFUSED);
        check_eq!(calls.get(), 1);
        wait(|| listen(&env, addr, refuses).is_ok())
    }
}
