// SPDX-License-Identifier: GPL-2.0

//! The events of a connection that its handler gets, and its release.

use crate::fixture::{
    recv,
    wait,
    CountDrop,
    Counter,
    End,
    Env,
    Events,
    Inbox,
    Link,
    OnDone,
    STEP_MS, //
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

const CAPS: Caps = Caps::new(4, 4);

/// Both sides are told once that the connection is over, and their handlers go.
fn over(link: Link<Softirq>) -> Result {
    let (gone_a, gone_b) = (link.a.events.gone(), link.b.events.gone());
    wait(|| link.a.events.disconnected() == 1 && link.b.events.disconnected() == 1)?;
    let Link { a, b, .. } = link;
    check_eq!((a.events.failed(), b.events.failed()), (0, 0));
    check_eq!((a.events.established(), b.events.established()), (1, 1));
    // The ids exist, but the handlers have been let go.
    let (kept_a, kept_b) = (a.id.clone(), b.id.clone());
    drop((a, b));
    wait(|| gone_a.get() == 1 && gone_b.get() == 1)?;
    drop((kept_a, kept_b));
    Ok(())
}

/// A handler that owns its connection and lets go of it when it is over.
#[pin_data]
struct Owner {
    #[pin]
    connection: Mutex<Option<(cm::Id, Qp<Softirq>)>>,
    _gone: CountDrop,
}

impl cm::Handler for Owner {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if matches!(event, cm::Event::Disconnected) {
            let connection = self.connection.lock().take();
            drop(connection);
        }
    }
}

/// A handler that ends the connection as soon as it is made.
#[pin_data]
struct Leaver {
    #[pin]
    id: Mutex<Option<cm::Id>>,
    left: Arc<Counter>,
    _qp: Qp<Softirq>,
}

impl cm::Handler for Leaver {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, cx: &Sleepable) {
        match event {
            cm::Event::Established { .. } => {
                if let Some(id) = self.id.lock().clone() {
                    let _ = id.disconnect(cx);
                }
            }
            cm::Event::Disconnected => {
                let id = self.id.lock().take();
                drop(id);
                self.left.up();
            }
            _ => {}
        }
    }
}

/// Connects to a peer whose handler `handler` makes from its connection, and returns this side.
fn connect<H: cm::Handler>(
    env: &Env,
    handler: impl Fn(cm::Id, Qp<Softirq>) -> Result<Arc<H>> + Send + Sync + 'static,
) -> Result<End<Softirq, Softirq>> {
    connect_to(env, move |id, qp, cx| {
        id.accept(handler(id.clone(), qp)?, &cm::ConnParam::default(), cx)
    })
}

/// Connects to a peer that answers by `answer`, and returns this side.
fn connect_to(
    env: &Env,
    answer: impl Fn(cm::Id, Qp<Softirq>, &Sleepable) -> Result + Send + Sync + 'static,
) -> Result<End<Softirq, Softirq>> {
    let (addr, pd) = (env.addr(), env.pd.clone());
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
        let qp = Qp::create(&id, &pd, &cq, &cq, &CAPS, cx)?;
        answer(id, qp, cx)
    };
    let listener = cm::Listener::new(&env.client, addr, 8, Arc::new(accept, GFP_KERNEL)?, &env.cx)?;
    let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
    let cq = env.cq::<Softirq>(64)?;
    let end = End::new(env, id, &cq, &cq, &CAPS)?;
    end.id
        .connect(end.events.clone(), &cm::ConnParam::default(), &env.cx)?;
    drop(listener);
    Ok(end)
}

#[kunit_tests(rdma_cm_events)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_established() -> Result {
        let link = Link::<Softirq>::new()?;
        wait(|| link.a.events.established() == 1 && link.b.events.established() == 1)?;
        check_eq!(
            link.a.events.disconnected() + link.b.events.disconnected(),
            0
        );
        Ok(())
    }

    #[test]
    fn active_side_disconnects() -> Result {
        let link = Link::<Softirq>::new()?;
        link.a.id.disconnect(&link.env.cx)?;
        over(link)
    }

    #[test]
    fn passive_side_disconnects() -> Result {
        let link = Link::<Softirq>::new()?;
        link.b.id.disconnect(&link.env.cx)?;
        over(link)
    }

    #[test]
    fn both_sides_disconnect() -> Result {
        let link = Link::<Softirq>::new()?;
        link.a.id.disconnect(&link.env.cx)?;
        link.b.id.disconnect(&link.env.cx)?;
        link.a.id.disconnect(&link.env.cx)?;
        over(link)
    }

    #[test]
    fn disconnect_later_from_a_handler() -> Result {
        let link = Link::<Softirq>::new()?;
        let id = link.b.id.clone();
        let leaves = OnDone::<context::Atomic, _>::new(move |_, _| {
            id.disconnect_later();
            id.disconnect_later();
        })?;
        link.b.qp.post_recv(leaves, |_| Ok(RecvWr::new([])))?;
        let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        link.a.qp.post_send(nothing, |_| Ok(SendWr::send([])))?;
        over(link)
    }

    #[test]
    fn dropped_id_ends_the_connection() -> Result {
        let link = Link::<Softirq>::new()?;
        let Link { a, b, .. } = link;
        drop(a);
        wait(|| b.events.disconnected() == 1)?;
        check_eq!(b.events.failed(), 0);
        Ok(())
    }

    #[test]
    fn disconnect_flushes_receives() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        for _ in 0..4 {
            recv(&link.b.qp, link.env.message(&inbox, &[0; 4])?)?;
        }
        link.b.id.disconnect(&link.env.cx)?;
        wait(|| inbox.len() == 4)?;
        check!(inbox.take().iter().all(|completed| completed.was_flushed()));
        over(link)
    }

    #[test]
    fn handler_owns_its_connection() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let owned = gone.clone();
        let end = connect(&env, move |id, qp| {
            let (connection, _gone) = (Some((id, qp)), CountDrop(owned.clone()));
            let owner = pin_init!(Owner { connection <- new_mutex!(connection), _gone });
            Ok(Arc::<Owner>::pin_init(owner, GFP_KERNEL)?)
        })?;
        check_eq!(gone.get(), 0);
        end.id.disconnect(&env.cx)?;
        wait(|| end.events.disconnected() == 1)?;
        wait(|| gone.get() == 1)
    }

    #[test]
    fn handler_disconnects_when_it_is_established() -> Result {
        let (env, left) = (Env::new()?, Counter::new()?);
        let counts = left.clone();
        let end = connect(&env, move |id, qp| {
            let (id, left) = (Some(id), counts.clone());
            let leaver = pin_init!(Leaver { id <- new_mutex!(id), left, _qp: qp });
            Ok(Arc::<Leaver>::pin_init(leaver, GFP_KERNEL)?)
        })?;
        wait(|| end.events.disconnected() == 1)?;
        wait(|| left.get() == 1)
    }

    #[test]
    fn disconnect_before_the_peer_has_confirmed() -> Result {
        let (env, gone) = (Env::new()?, Counter::new()?);
        let counts = gone.clone();
        let end = connect_to(&env, move |id, qp, cx| {
            let (connection, _gone) = (Some((id.clone(), qp)), CountDrop(counts.clone()));
            let owner = pin_init!(Owner { connection <- new_mutex!(connection), _gone });
            let owner = Arc::pin_init(owner, GFP_KERNEL)?;
            id.accept(owner, &cm::ConnParam::default(), cx)?;
            id.disconnect(cx)
        })?;
        wait(|| end.events.disconnected() == 1 && gone.get() == 1)
    }

    #[test]
    fn id_has_one_handler() -> Result {
        let link = Link::<Softirq>::new()?;
        let events = Events::new()?;
        let gone = events.gone();
        let param = cm::ConnParam::default();
        check_err!(link.b.id.accept(events, &param, &link.env.cx), EINVAL);
        check_eq!(gone.get(), 1);
        // The one that it has is still told.
        link.a.id.disconnect(&link.env.cx)?;
        over(link)
    }

    #[test]
    fn waiting_in_a_handler_is_refused() -> Result {
        let env = Env::new()?;
        let (said, client, addr) = (
            Arc::new(SetOnce::new(), GFP_KERNEL)?,
            env.client.clone(),
            env.addr(),
        );
        let tell = said.clone();
        let end = connect(&env, move |id, qp| {
            let cx = &Sleepable::current()?;
            // This is called by the callback of the listener.
            let other = cm::Id::resolve(&client, addr, STEP_MS, cx).err();
            tell.populate((other, id.resolve_route(STEP_MS, cx).err()));
            Ok(Arc::new(qp, GFP_KERNEL)?)
        })?;
        check_eq!(said.copy(), Some((Some(EDEADLK), Some(EDEADLK))));
        drop(end);
        Ok(())
    }

    #[test]
    fn handler_can_be_released_early() -> Result {
        let link = Link::<Softirq>::new()?;
        let gone = link.a.events.gone();
        let Link { a, b, env, .. } = link;
        let End { qp, id, events } = a;
        drop(events);
        check_eq!(gone.get(), 0);
        id.release_handler(&env.cx);
        wait(|| gone.get() == 1)?;
        id.release_handler(&env.cx);
        b.id.disconnect(&env.cx)?;
        wait(|| b.events.disconnected() == 1)?;
        drop(qp);
        Ok(())
    }
}
