// SPDX-License-Identifier: GPL-2.0

//! The connection manager, as the passive side sees it: requests.

use crate::fixture::{
    accept,
    dial,
    listen,
    refuses,
    wait,
    Env,
    Events, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Mutex,
        SetOnce, //
    }, //
};
use rdma::prelude::*;

/// Where a listener leaves the id of a request.
#[pin_data]
struct Taken {
    #[pin]
    id: Mutex<Option<cm::Id>>,
}

impl Taken {
    fn new() -> Result<Arc<Self>> {
        Arc::pin_init(pin_init!(Self { id <- new_mutex!(None) }), GFP_KERNEL)
    }
}

#[kunit_tests(rdma_cm_request)]
mod tests {
    use super::*;

    #[test]
    fn private_data_go_both_ways() -> Result {
        let (env, heard) = (Env::new()?, Arc::new(SetOnce::new(), GFP_KERNEL)?);
        let (pd, tell) = (env.pd.clone(), heard.clone());
        let addr = env.addr();
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, cx: &Sleepable| {
                tell.populate(request.private_data().starts_with(b"question"));
                accept(&request.into_id(cx)?, &pd, b"answer", cx)
            },
        )?;
        let (_end, answer) = dial(&env, addr, b"question")?;
        check_eq!(heard.copy(), Some(true));
        check!(answer.starts_with(b"answer"));
        Ok(())
    }

    #[test]
    fn largest_private_data() -> Result {
        let (env, heard) = (Env::new()?, Arc::new(SetOnce::new(), GFP_KERNEL)?);
        let (pd, tell) = (env.pd.clone(), heard.clone());
        let addr = env.addr();
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, cx: &Sleepable| {
                tell.populate(request.private_data() == [7; 56]);
                accept(&request.into_id(cx)?, &pd, &[9; 196], cx)
            },
        )?;
        let (_end, answer) = dial(&env, addr, &[7; 56])?;
        check_eq!(heard.copy(), Some(true));
        check_eq!(&answer[..], &[9; 196][..]);
        Ok(())
    }

    #[test]
    fn request_says_what_the_peer_wants() -> Result {
        let (env, heard) = (Env::new()?, Arc::new(SetOnce::new(), GFP_KERNEL)?);
        let tell = heard.clone();
        let addr = env.addr();
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, _: &Sleepable| {
                tell.populate((request.initiator_depth(), request.responder_resources()));
                Err(ECONNREFUSED)
            },
        )?;
        check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        check_eq!(heard.copy(), Some((3, 5)));
        Ok(())
    }

    #[test]
    fn dropped_request_is_refused() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let _listener = listen(&env, addr, refuses)?;
        for _ in 0..3 {
            check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        }
        Ok(())
    }

    #[test]
    fn dropped_id_is_refused() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let _listener = listen(&env, addr, |request: cm::Request<'_>, cx: &Sleepable| {
            drop(request.into_id(cx)?);
            Ok(())
        })?;
        check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        Ok(())
    }

    #[test]
    fn rejected_request() -> Result {
        let env = Env::new()?;
        let addr = env.addr();
        let _listener = listen(&env, addr, |request: cm::Request<'_>, cx: &Sleepable| {
            request.into_id(cx)?.reject(b"go away", cx)
        })?;
        check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        Ok(())
    }

    #[test]
    fn rejected_with_too_much_private_data() -> Result {
        let (env, said) = (Env::new()?, Arc::new(SetOnce::new(), GFP_KERNEL)?);
        let tell = said.clone();
        let addr = env.addr();
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, cx: &Sleepable| {
                let id = request.into_id(cx)?;
                tell.populate((
                    id.reject(&[1; 149], cx).err(),
                    id.reject(&[1; 300], cx).err(),
                ));
                id.reject(&[1; 148], cx)
            },
        )?;
        check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        check_eq!(said.copy(), Some((Some(EINVAL), Some(EINVAL))));
        Ok(())
    }

    #[test]
    fn accept_needs_a_qp() -> Result {
        let (env, said) = (Env::new()?, Arc::new(SetOnce::new(), GFP_KERNEL)?);
        let tell = said.clone();
        let addr = env.addr();
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, cx: &Sleepable| {
                let id = request.into_id(cx)?;
                let accepted = id.accept(Events::new()?, &cm::ConnParam::default(), cx);
                tell.populate(accepted.err());
                accepted
            },
        )?;
        check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        check_eq!(said.copy(), Some(Some(EINVAL)));
        Ok(())
    }

    #[test]
    fn request_may_be_accepted_later() -> Result {
        let (env, taken) = (Env::new()?, Taken::new()?);
        let (addr, leave) = (env.addr(), taken.clone());
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, cx: &Sleepable| {
                *leave.id.lock() = Some(request.into_id(cx)?);
                Ok(())
            },
        )?;
        let (said, pd) = (Arc::new(SetOnce::new(), GFP_KERNEL)?, env.pd.clone());
        let tell = said.clone();
        env.client.spawn(GFP_KERNEL, move |cx| {
            let accepted = wait(|| taken.id.lock().is_some()).and_then(|()| {
                let id = taken.id.lock().take().ok_or(EIO)?;
                accept(&id, &pd, &[], cx)
            });
            tell.populate(accepted.err());
        })?;
        let connected = dial(&env, addr, &[]);
        wait(|| said.copy().is_some())?;
        check_eq!(said.copy(), Some(None));
        connected?;
        Ok(())
    }

    #[test]
    fn request_may_be_rejected_later() -> Result {
        let (env, taken) = (Env::new()?, Taken::new()?);
        let (addr, leave) = (env.addr(), taken.clone());
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, cx: &Sleepable| {
                *leave.id.lock() = Some(request.into_id(cx)?);
                Ok(())
            },
        )?;
        env.client.spawn(GFP_KERNEL, move |cx| {
            let _ = wait(|| taken.id.lock().is_some()).and_then(|()| {
                let id = taken.id.lock().take().ok_or(EIO)?;
                id.reject(&[], cx)
            });
        })?;
        check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        Ok(())
    }

    #[test]
    fn id_of_a_request_is_of_the_device() -> Result {
        let (env, said) = (Env::new()?, Arc::new(SetOnce::new(), GFP_KERNEL)?);
        let (tell, dev) = (said.clone(), env.dev.clone());
        let addr = env.addr();
        let _listener = listen(
            &env,
            addr,
            move |request: cm::Request<'_>, cx: &Sleepable| {
                tell.populate(request.into_id(cx)?.device()? == &dev);
                Ok(())
            },
        )?;
        check_err!(dial(&env, addr, &[]).map(|_| ()), ECONNREFUSED);
        check_eq!(said.copy(), Some(true));
        Ok(())
    }
}
