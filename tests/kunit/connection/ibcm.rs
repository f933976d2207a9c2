// SPDX-License-Identifier: GPL-2.0

//! Connections of the InfiniBand connection manager.

use crate::fixture::{
    connect_to_service,
    connect_with,
    gid,
    listen_to_service,
    recv,
    send,
    service_id,
    to_init,
    wait,
    with_device,
    CmEnd,
    CmEvents,
    CmLink,
    Counter,
    Env,
    Inbox,
    Place, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Mutex,
        SetOnce, //
    },
    time::{
        delay::fsleep,
        Delta, //
    },
    types::ScopeGuard, //
};
use rdma::{
    ibcm::{
        Connection,
        Listener,
        Param,
        Path,
        Request, //
    },
    prelude::*, //
};
use rdma_bindings as bindings;

/// Keeps the reason of a rejection, and what was sent along.
#[pin_data]
struct Told {
    #[pin]
    rejection: Mutex<Option<(Option<cm::RejectReason>, KVec<u8>)>>,
}

impl cm::Handler for Told {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if let cm::Event::Rejected(rejected) = event {
            let mut data = KVec::new();
            let _ = data.extend_from_slice(rejected.private_data().unwrap_or(&[]), GFP_KERNEL);
            *self.rejection.lock() = Some((rejected.reason(), data));
        }
    }
}

/// Asks a service that rejects, and returns what the handler is told.
fn rejected(
    env: &Env,
    service: u64,
    param: &Param<'_>,
) -> Result<(Option<cm::RejectReason>, KVec<u8>)> {
    let told = pin_init!(Told { rejection <- new_mutex!(None) });
    let told = Arc::pin_init(told, GFP_KERNEL)?;
    check_err!(
        connect_with(env, service, told.clone(), param),
        ECONNREFUSED
    );
    wait(|| told.rejection.lock().is_some())?;
    let rejection = told.rejection.lock().take();
    rejection.ok_or(ENODATA)
}

/// Returns what makes the connection manager give up after about a second.
fn hasty() -> Param<'static> {
    Param {
        response_timeout: 8,
        max_cm_retries: 1,
        ..Default::default()
    }
}

type ModifyQp = unsafe extern "C" fn(
    *mut bindings::ib_qp,
    *mut bindings::ib_qp_attr,
    c_int,
    *mut bindings::ib_udata,
) -> c_int;

/// The driver's function.
static DRIVER: SetOnce<ModifyQp> = SetOnce::new();
static WATCHED: Atomic<u32> = Atomic::new(0);
static RUNNING: Atomic<i32> = Atomic::new(0);
static SEEN: Atomic<i32> = Atomic::new(0);
static OVERLAPS: Atomic<i32> = Atomic::new(0);

/// Watches the driver of the test link be asked to change a QP, each of which takes longer
/// meanwhile.
struct Watch;

/// # Safety
///
/// As the driver's own function.
unsafe extern "C" fn watched(
    qp: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    mask: c_int,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The QP is valid; its number does not change.
    let is_watched = unsafe { (*qp).qp_num } == WATCHED.load(Relaxed);
    if is_watched {
        SEEN.add(1, Relaxed);
        if RUNNING.fetch_add(1, Full) != 0 {
            OVERLAPS.add(1, Relaxed);
        }
        fsleep(Delta::from_millis(2));
    }
    let ret = match DRIVER.copy() {
        // SAFETY: This is called as the driver's function, whose contract the caller keeps.
        Some(modify) => unsafe { modify(qp, attr, mask, udata) },
        None => EIO.to_errno(),
    };
    if is_watched {
        RUNNING.fetch_sub(1, Full);
    }
    ret
}

impl Watch {
    fn new() -> Result<Self> {
        SEEN.store(0, Relaxed);
        OVERLAPS.store(0, Relaxed);
        with_device(c"rdma0", |device| {
            // SAFETY: `with_device` holds the device. One pointer is written, and a caller that
            // reads it meanwhile may call either function.
            unsafe {
                if let Some(driver) = (*device).ops.modify_qp {
                    DRIVER.populate(driver);
                }
                (*device).ops.modify_qp = Some(watched);
            }
        })?;
        Ok(Self)
    }

    fn on(num: u32) {
        WATCHED.store(num, Relaxed);
    }

    fn seen(&self) -> i32 {
        SEEN.load(Relaxed)
    }

    fn overlaps(&self) -> i32 {
        OVERLAPS.load(Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let unwatched = with_device(c"rdma0", |device| {
            // SAFETY: `with_device` holds the device. One pointer is written, and a caller that
            // reads it meanwhile may call either function.
            unsafe { (*device).ops.modify_qp = DRIVER.copy() };
        });
        if unwatched.is_err() {
            pr_err!("FAILED: the device has gone\n");
        }
    }
}

#[kunit_tests(rdma_ibcm)]
mod tests {
    use super::*;

    #[test]
    fn data_go_both_ways() -> Result {
        let link = CmLink::new()?;
        for (from, to) in [(&link.a, &link.b), (&link.b, &link.a)] {
            let (sent, received) = (Inbox::new()?, Inbox::new()?);
            recv(&to.qp, link.env.message(&received, &[0; 4])?)?;
            send(&from.qp, link.env.message(&sent, b"data")?)?;
            wait(|| sent.len() == 1 && received.len() == 1)?;
            sent.pop()?.ok()?;
            check_eq!(&received.pop()?.bytes()?[..], b"data");
        }
        Ok(())
    }

    /// The owner of the QP changes it, too.
    #[test]
    fn qp_is_changed_by_one_at_a_time_while_it_connects() -> Result {
        let watch = Watch::new()?;
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        let passive = env.raw_qp(&cq, &Caps::new(4, 4))?;
        let (_listener, service) = listen_to_service(&env, move |request, cx| {
            let events = CmEvents::new()?;
            events.keep(request.accept(&passive, events.clone(), &cm::ConnParam::default(), cx)?);
            Ok(())
        })?;
        let qp = env.raw_qp(&cq, &Caps::new(4, 4))?;
        let (stop, ended, changing) = (Counter::new()?, Counter::new()?, qp.clone());
        let counters = (stop.clone(), ended.clone());
        Watch::on(qp.num());
        env.client.spawn(GFP_KERNEL, move |cx| {
            while counters.0.get() == 0 {
                // It does not matter whether there is such a transition now.
                let _ = changing.modify(to_init(), cx);
            }
            drop(changing);
            counters.1.up();
        })?;
        // Also where the rest fails.
        let stop = ScopeGuard::new(|| {
            stop.up();
        });
        let gid = gid(&env, env.ip)?;
        let path = Path::new(&gid, gid.gid(), &env.cx)?;
        let made = Connection::connect(&qp, &path, service, CmEvents::new()?, &hasty(), &env.cx);
        drop(stop);
        wait(|| ended.get() == 1)?;
        drop(made);
        // The three of the connection manager.
        check!(watch.seen() >= 3);
        check_eq!(watch.overlaps(), 0);
        Ok(())
    }

    #[test]
    fn private_data_arrive() -> Result {
        let env = Env::new()?;
        let asked = Counter::new()?;
        let counts = asked.clone();
        let (_listener, service) = listen_to_service(&env, move |request, cx| {
            if request.private_data().starts_with(b"request\0") && request.port_num() == 1 {
                counts.up();
            }
            request.reject(cm::RejectReason::CONSUMER_DEFINED, b"because", cx)
        })?;
        let conn = cm::ConnParam {
            private_data: b"request",
            ..Default::default()
        };
        let param = Param {
            conn,
            ..Default::default()
        };
        let (_, because) = rejected(&env, service, &param)?;
        check!(because.starts_with(b"because\0"));
        check_eq!(because.len(), 148);
        check_eq!(asked.get(), 1);
        Ok(())
    }

    #[test]
    fn answer_arrives() -> Result {
        let link = CmLink::new()?;
        check!(link.answer.starts_with(b"answer\0"));
        check_eq!(link.answer.len(), 196);
        Ok(())
    }

    #[test]
    fn resources_are_told() -> Result {
        let env = Env::new()?;
        let asked = Counter::new()?;
        let counts = asked.clone();
        let (_listener, service) = listen_to_service(&env, move |request, _| {
            // The recipient's view of what the peer has called the other way round.
            if (request.responder_resources(), request.initiator_depth()) == (6, 5) {
                counts.up();
            }
            Ok(())
        })?;
        let conn = cm::ConnParam {
            responder_resources: 5,
            initiator_depth: 6,
            ..Default::default()
        };
        let param = Param {
            conn,
            ..Default::default()
        };
        rejected(&env, service, &param)?;
        check_eq!(asked.get(), 1);
        Ok(())
    }

    #[test]
    fn active_side_disconnects() -> Result {
        let link = CmLink::new()?;
        let cx = &link.env.cx;
        link.a.connection.disconnect(cx)?;
        wait(|| link.a.events.disconnected() == 1 && link.b.events.disconnected() == 1)?;
        check_err!(link.a.connection.disconnect(cx), EINVAL);
        check_err!(link.b.connection.disconnect(cx), EINVAL);
        Ok(())
    }

    #[test]
    fn passive_side_disconnects() -> Result {
        let link = CmLink::new()?;
        link.b.connection.disconnect(&link.env.cx)?;
        wait(|| link.a.events.disconnected() == 1 && link.b.events.disconnected() == 1)
    }

    #[test]
    fn disconnected_before_the_peer_has_confirmed() -> Result {
        let (env, accepted) = (Env::new()?, Place::new()?);
        let (pd, tell) = (env.pd.clone(), accepted.clone());
        let (_listener, service) = listen_to_service(&env, move |request, cx| {
            let cq = Cq::<Softirq>::alloc_any(pd.device(), 64, cx)?;
            let qp = Qp::create_raw(&pd, &cq, &cq, &Caps::new(4, 4), cx)?;
            let events = CmEvents::new()?;
            let param = cm::ConnParam::default();
            let connection = request.accept(&qp, events.clone(), &param, cx)?;
            // An error, unless the peer has confirmed it already.
            let _ = connection.disconnect(cx);
            tell.put((connection, qp, events));
            Ok(())
        })?;
        let (cq, events) = (env.cq::<Softirq>(64)?, CmEvents::new()?);
        let qp = env.raw_qp(&cq, &Caps::new(4, 4))?;
        let gid = gid(&env, env.ip)?;
        let path = Path::new(&gid, gid.gid(), &env.cx)?;
        let handler = events.clone();
        let _made = Connection::connect(&qp, &path, service, handler, &hasty(), &env.cx)?;
        let (_connection, _qp, peer) = accepted.wait()?;
        wait(|| events.disconnected() == 1 && peer.disconnected() == 1)
    }

    #[test]
    fn dropped_connection_is_disconnected() -> Result {
        let link = CmLink::new()?;
        let CmEnd {
            connection, events, ..
        } = link.a;
        drop(connection);
        wait(|| link.b.events.disconnected() == 1)?;
        check_eq!(events.disconnected(), 0);
        let gone = events.gone();
        drop(events);
        wait(|| gone.get() == 1)
    }

    #[test]
    fn requests_come_back_after_the_end() -> Result {
        let link = CmLink::new()?;
        let inbox = Inbox::new()?;
        recv(&link.b.qp, link.env.message(&inbox, &[0; 4])?)?;
        link.a.connection.disconnect(&link.env.cx)?;
        wait(|| link.b.events.disconnected() == 1)?;
        link.b.qp.drain(&link.env.cx)?;
        check!(inbox.pop()?.was_flushed());
        Ok(())
    }

    #[test]
    fn reason_of_a_rejection() -> Result {
        let env = Env::new()?;
        for reason in [cm::RejectReason::NO_RESOURCES, cm::RejectReason(77)] {
            let (_listener, service) =
                listen_to_service(&env, move |request, cx| request.reject(reason, &[], cx))?;
            let (told, data) = rejected(&env, service, &Param::default())?;
            check_eq!(told, Some(reason));
            check!(data.is_empty());
        }
        Ok(())
    }

    #[test]
    fn dropped_request_is_rejected() -> Result {
        let env = Env::new()?;
        let (_listener, service) = listen_to_service(&env, |_, _| Ok(()))?;
        let (reason, _) = rejected(&env, service, &Param::default())?;
        check_eq!(reason, Some(cm::RejectReason::CONSUMER_DEFINED));
        Ok(())
    }

    #[test]
    fn rejection_with_too_much_data() -> Result {
        let env = Env::new()?;
        let refused = Counter::new()?;
        let counts = refused.clone();
        let (_listener, service) = listen_to_service(&env, move |request, cx| {
            if request.reject(cm::RejectReason::NO_QP, &[1; 149], cx) == Err(EINVAL) {
                counts.up();
            }
            Ok(())
        })?;
        let (reason, _) = rejected(&env, service, &Param::default())?;
        check_eq!(reason, Some(cm::RejectReason::CONSUMER_DEFINED));
        wait(|| refused.get() == 1)
    }

    #[test]
    fn nobody_listens() -> Result {
        let env = Env::new()?;
        let (reason, _) = rejected(&env, service_id(), &Param::default())?;
        check_eq!(reason, Some(cm::RejectReason::INVALID_SERVICE_ID));
        Ok(())
    }

    #[test]
    fn listener_that_was_dropped_hears_nothing() -> Result {
        let env = Env::new()?;
        let (listener, service) = listen_to_service(&env, |_, _| Ok(()))?;
        check_err!(
            Listener::new(
                &env.dev,
                service,
                1,
                Arc::new(|_: Request<'_>, _: &Sleepable| Ok(()), GFP_KERNEL)?,
                &env.cx
            ),
            EBUSY
        );
        listener.destroy(&env.cx)?;
        let (reason, _) = rejected(&env, service, &Param::default())?;
        check_eq!(reason, Some(cm::RejectReason::INVALID_SERVICE_ID));
        Ok(())
    }

    #[test]
    fn connection_outlives_its_listener() -> Result {
        // The fixture's listener is gone.
        let link = CmLink::new()?;
        check_eq!(link.b.events.established(), 1);
        Ok(())
    }

    #[test]
    fn qp_must_be_fresh() -> Result {
        let env = Env::new()?;
        let refused = Counter::new()?;
        let counts = refused.clone();
        let (_listener, service) = listen_to_service(&env, move |request, cx| {
            let env = Env::new()?;
            let cq = env.cq::<Softirq>(64)?;
            let qp = env.raw_qp(&cq, &Caps::new(4, 4))?;
            // It is in the error state then.
            qp.drain(cx)?;
            if let Err(EINVAL) = request
                .accept(&qp, CmEvents::new()?, &cm::ConnParam::default(), cx)
                .map(drop)
            {
                counts.up();
            }
            Ok(())
        })?;
        let (reason, _) = rejected(&env, service, &Param::default())?;
        check_eq!(reason, Some(cm::RejectReason::CONSUMER_DEFINED));
        wait(|| refused.get() == 1)
    }

    #[test]
    fn too_much_private_data() -> Result {
        let env = Env::new()?;
        for len in [93, 256] {
            let data = KVec::from_elem(1, len, GFP_KERNEL)?;
            let conn = cm::ConnParam {
                private_data: &data,
                ..Default::default()
            };
            let param = Param {
                conn,
                ..Default::default()
            };
            check_err!(connect_to_service(&env, service_id(), &param), EINVAL);
        }
        Ok(())
    }

    #[test]
    fn connecting_in_a_callback_would_wait_for_itself() -> Result {
        let env = Env::new()?;
        let refused = Counter::new()?;
        let counts = refused.clone();
        let (_listener, service) = listen_to_service(&env, move |_, _| {
            let asked = connect_to_service(&Env::new()?, service_id(), &Param::default());
            if asked == Err(EDEADLK) {
                counts.up();
            }
            Ok(())
        })?;
        rejected(&env, service, &Param::default())?;
        check_eq!(refused.get(), 1);
        Ok(())
    }

    #[test]
    fn handler_owns_its_connection() -> Result {
        let link = CmLink::new()?;
        let (gone_a, gone_b) = (link.a.events.gone(), link.b.events.gone());
        let CmLink { a, b, env, .. } = link;
        a.events.keep(a.connection);
        b.events.keep(b.connection);
        let events = a.events;
        drop(b.events);
        events.disconnect(&env.cx)?;
        drop(events);
        wait(|| gone_a.get() == 1 && gone_b.get() == 1)
    }

    #[test]
    fn many_at_once() -> Result {
        const LINKS: i32 = 4;

        let (env, done) = (Env::new()?, Counter::new()?);
        for _ in 0..LINKS {
            let done = done.clone();
            env.client.spawn(GFP_KERNEL, move |cx| {
                match CmLink::new().and_then(|link| link.a.connection.disconnect(cx)) {
                    Ok(()) => done.up(),
                    Err(e) => {
                        pr_err!("FAILED: {e:?}\n");
                        0
                    }
                };
            })?;
        }
        wait(|| done.get() == LINKS)
    }
}
