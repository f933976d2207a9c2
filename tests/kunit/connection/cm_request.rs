// SPDX-License-Identifier: GPL-2.0

//! The connection manager, as the passive side sees it: requests.

use crate::fixture::{
    accept,
    connect_to,
    listen,
    refused,
    refuses,
    Env,
    Events,
    Place, //
};
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::prelude::*;

/// The results of a listener's callback.
fn told<T>() -> Result<Arc<SetOnce<T>>> {
    Ok(Arc::new(SetOnce::new(), GFP_KERNEL)?)
}

#[kunit_tests(rdma_cm_request)]
mod tests {
    use super::*;

    #[test]
    fn private_data_go_both_ways() -> Result {
        let (env, heard) = (Env::new()?, told()?);
        let (addr, pd, tell) = (env.addr(), env.pd.clone(), heard.clone());
        let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
            tell.populate(request.private_data().starts_with(b"question"));
            accept(&request.into_id(cx)?, &pd, b"answer", cx)
        };
        let _listener = listen(&env, addr, accepts)?;
        let (_end, answer) = connect_to(&env, addr, b"question")?;
        check_eq!(heard.copy(), Some(true));
        check!(answer.starts_with(b"answer"));
        Ok(())
    }

    #[test]
    fn largest_private_data() -> Result {
        let (env, heard) = (Env::new()?, told()?);
        let (addr, pd, tell) = (env.addr(), env.pd.clone(), heard.clone());
        let accepts = move |request: cm::Request<'_>, cx: &Sleepable| {
            tell.populate(request.private_data() == [7; 56]);
            accept(&request.into_id(cx)?, &pd, &[9; 196], cx)
        };
        let _listener = listen(&env, addr, accepts)?;
        let (_end, answer) = connect_to(&env, addr, &[7; 56])?;
        check_eq!(heard.copy(), Some(true));
        check_eq!(&answer[..], &[9; 196][..]);
        Ok(())
    }

    #[test]
    fn request_says_what_the_peer_wants() -> Result {
        let (env, heard) = (Env::new()?, told()?);
        let tell = heard.clone();
        refused(&env, move |request: cm::Request<'_>, _: &Sleepable| {
            tell.populate((request.initiator_depth(), request.responder_resources()));
            Err(ECONNREFUSED)
        })?;
        check_eq!(heard.copy(), Some((3, 5)));
        Ok(())
    }

    #[test]
    fn dropped_request_is_refused() -> Result {
        let env = Env::new()?;
        for _ in 0..3 {
            refused(&env, refuses)?;
        }
        Ok(())
    }

    #[test]
    fn dropped_id_is_refused() -> Result {
        refused(&Env::new()?, |request: cm::Request<'_>, cx: &Sleepable| {
            request.into_id(cx).map(drop)
        })
    }

    #[test]
    fn rejected_request() -> Result {
        refused(&Env::new()?, |request: cm::Request<'_>, cx: &Sleepable| {
            request.into_id(cx)?.reject(b"go away", cx)
        })
    }

    #[test]
    fn rejected_with_too_much_private_data() -> Result {
        let (env, said) = (Env::new()?, told()?);
        let tell = said.clone();
        refused(&env, move |request: cm::Request<'_>, cx: &Sleepable| {
            let id = request.into_id(cx)?;
            let reject = |data: &[u8]| id.reject(data, cx);
            tell.populate((reject(&[1; 149]).err(), reject(&[1; 300]).err()));
            reject(&[1; 148])
        })?;
        check_eq!(said.copy(), Some((Some(EINVAL), Some(EINVAL))));
        Ok(())
    }

    #[test]
    fn accept_needs_a_qp() -> Result {
        let (env, said) = (Env::new()?, told()?);
        let tell = said.clone();
        refused(&env, move |request: cm::Request<'_>, cx: &Sleepable| {
            let id = request.into_id(cx)?;
            let accepted = id.accept(Events::new()?, &cm::ConnParam::default(), cx);
            tell.populate(accepted.err());
            accepted
        })?;
        check_eq!(said.copy(), Some(Some(EINVAL)));
        Ok(())
    }

    #[test]
    fn request_may_be_accepted_later() -> Result {
        let (env, ids, said) = (Env::new()?, Place::new()?, Place::new()?);
        let (addr, leave, pd, tell) = (env.addr(), ids.clone(), env.pd.clone(), said.clone());
        let leaves = move |request: cm::Request<'_>, cx: &Sleepable| {
            leave.put(request.into_id(cx)?);
            Ok(())
        };
        let _listener = listen(&env, addr, leaves)?;
        env.client.spawn(GFP_KERNEL, move |cx| {
            tell.put(ids.wait().and_then(|id| accept(&id, &pd, &[], cx)));
        })?;
        let connected = connect_to(&env, addr, &[]);
        said.wait()??;
        connected?;
        Ok(())
    }

    #[test]
    fn request_may_be_rejected_later() -> Result {
        let (env, ids, said) = (Env::new()?, Place::<cm::Id>::new()?, Place::new()?);
        let (leave, tell) = (ids.clone(), said.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            tell.put(ids.wait().and_then(|id| id.reject(&[], cx)));
        })?;
        refused(&env, move |request: cm::Request<'_>, cx: &Sleepable| {
            leave.put(request.into_id(cx)?);
            Ok(())
        })?;
        said.wait()?
    }

    #[test]
    fn id_of_a_request_is_of_the_device() -> Result {
        let (env, said) = (Env::new()?, told()?);
        let (tell, dev) = (said.clone(), env.dev.clone());
        refused(&env, move |request: cm::Request<'_>, cx: &Sleepable| {
            tell.populate(request.into_id(cx)?.device()? == &dev);
            Ok(())
        })?;
        check_eq!(said.copy(), Some(true));
        Ok(())
    }
}
