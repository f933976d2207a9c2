// SPDX-License-Identifier: GPL-2.0

//! The steps of a ULP, from the first one to the last.

#[path = "../../examples/course.rs"]
mod steps;

#[cfg(has_faults)]
use crate::fixture::{
    listen,
    recv,
    with_fault,
    Events,
    Inbox,
    Message,
    Place, //
};
use crate::fixture::{
    wait,
    Env,
    NullEnv, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;
use steps::{
    connection,
    credits,
    devices,
    ends,
    messages,
    queue_pair,
    region,
    requests,
    sizes, //
};

const CAPS: Caps = Caps::new(16, 16);

/// Makes two QPs that are connected to each other.
fn pair(null: &NullEnv) -> Result<[Qp<Workqueue>; 2]> {
    let cq = null.env.cq::<Workqueue>(2 * CAPS.entries())?;
    let (a, b) = (null.env.raw_qp(&cq, &CAPS)?, null.env.raw_qp(&cq, &CAPS)?);
    null.connect(&a, &b)?;
    Ok([a, b])
}

/// Waits until a device has no QP.
fn no_qps(null: &NullEnv) -> Result {
    wait(|| null.dev.objects()[1] == 0)
}

/// One end of a connection.
trait End {
    fn end(&self, cx: &Sleepable) -> Result;
}

impl End for credits::End {
    fn end(&self, cx: &Sleepable) -> Result {
        self.end(cx)
    }
}

impl End for connection::Conn {
    fn end(&self, cx: &Sleepable) -> Result {
        self.id.disconnect(cx)
    }
}

impl End for messages::Conn {
    fn end(&self, cx: &Sleepable) -> Result {
        self.id.disconnect(cx)
    }
}

impl End for requests::Initiator {
    fn end(&self, cx: &Sleepable) -> Result {
        self.id.disconnect(cx)
    }
}

/// An end, which is ended also where a test fails: its receives or its id keep it.
struct Ended<T: End> {
    end: Arc<T>,
    forgotten: bool,
}

impl<T: End> Ended<T> {
    fn new(end: Arc<T>) -> Self {
        Self {
            end,
            forgotten: false,
        }
    }

    /// Ends it, and drops it.
    fn end(self, cx: &Sleepable) -> Result {
        self.end.end(cx)?;
        self.forget();
        Ok(())
    }

    /// Leaves its end to the caller.
    fn forget(mut self) {
        self.forgotten = true;
    }
}

impl<T: End> core::ops::Deref for Ended<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.end
    }
}

impl<T: End> Drop for Ended<T> {
    fn drop(&mut self) {
        match Sleepable::current() {
            Ok(cx) if !self.forgotten => {
                if let Err(e) = self.end.end(&cx) {
                    pr_err!("FAILED: {e:?}\n");
                }
            }
            _ => {}
        }
    }
}

/// A target, and an initiator that is connected to it.
struct Blocks {
    initiator: Ended<requests::Initiator>,
    target: cm::Listener,
    null: NullEnv,
}

impl Blocks {
    fn new() -> Result<Self> {
        let null = NullEnv::with_cm()?;
        let Env { client, pd, cx, .. } = &null.env;
        let addr = null.env.addr();
        let target = requests::Target::listen(client, addr, pd, cx)?;
        let initiator = requests::Initiator::connect(client, addr, pd, cx)?;
        Ok(Self {
            initiator: Ended::new(initiator),
            target,
            null,
        })
    }

    /// Ends the connection and waits until its QPs are destroyed.
    fn end(self) -> Result {
        self.initiator.end(&self.null.env.cx)?;
        drop(self.target);
        no_qps(&self.null)
    }
}

/// Ends a connection with a request that is not answered, and has the connection manager find no
/// memory for its message. Returns whether it did: what is flushed has the connection ended by a
/// work item, too, whose message may be the first.
#[cfg(has_faults)]
fn disconnect_without_memory() -> Result<bool> {
    let (env, inbox, place) = (Env::new()?, Inbox::new()?, Place::new()?);
    let (addr, cx) = (env.addr(), &env.cx);
    let (pd, got, keep) = (env.pd.clone(), inbox.clone(), place.clone());
    // The target does not answer.
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let qp = sizes::qp(&id, &pd, &sizes::TARGET, cx)?;
        recv(&qp, Message::new(&pd, &got, &[0; 64], cx)?)?;
        id.accept(Events::new()?, &cm::ConnParam::default(), cx)?;
        keep.put((qp, id));
        Ok(())
    };
    let listener = listen(&env, addr, accept)?;
    let initiator = requests::Initiator::connect(&env.client, addr, &env.pd, cx)?;
    let initiator = Ended::new(initiator);
    let outcome = initiator.begin(1, cx)?;
    wait(|| inbox.len() == 1)?;
    let (_, failed) = with_fault(1, || initiator.id.disconnect(cx));
    check_err!(outcome.wait(cx)?.map(drop), ECONNRESET);
    check_err!(initiator.begin(1, cx).map(drop), ENOTCONN);
    initiator.forget();
    drop((listener, place.take()));
    Ok(failed)
}

#[kunit_tests(rdma_course)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_seen() -> Result {
        let null = NullEnv::new()?;
        let course = KBox::pin_init(devices::Course::init(&null.env.client), GFP_KERNEL)?;
        let data = devices::PerDevice::add(course.as_ref(), &null.env.dev, &null.env.cx);
        let data = KBox::pin_init(data, GFP_KERNEL)?;
        check!(data.pd.device() == &null.env.dev);
        data.as_ref()
            .remove(course.as_ref(), &null.env.dev, &null.env.cx);
        Ok(())
    }

    #[test]
    fn request_completes() -> Result {
        let null = NullEnv::new()?;
        queue_pair::send_one(&null.dev, &null.env.pd, &null.env.cx)?;
        // The next request fails, not the drain of that QP.
        no_qps(&null)?;
        null.dev.inject(Injection::Status {
            status: wc::Status::RETRY_EXC_ERR.as_raw(),
            vendor_err: 0,
            count: 1,
            fatal: true,
        })?;
        check_err!(
            queue_pair::send_one(&null.dev, &null.env.pd, &null.env.cx),
            EIO
        );
        no_qps(&null)
    }

    #[test]
    fn connection_is_made_and_ends() -> Result {
        let null = NullEnv::with_cm()?;
        let Env { client, pd, cx, .. } = &null.env;
        let addr = null.env.addr();
        check_err!(
            connection::Conn::connect(client, addr, pd, cx),
            ECONNREFUSED
        );
        no_qps(&null)?; // That of the connection that was refused is gone.
        let target = connection::Conn::listen(client, addr, pd, cx)?;
        let initiator = Ended::new(connection::Conn::connect(client, addr, pd, cx)?);
        check_eq!(null.dev.objects()[1], 2);
        initiator.end(cx)?;
        drop(target);
        no_qps(&null)
    }

    #[test]
    fn receives_go_round() -> Result {
        let null = NullEnv::with_cm()?;
        let Env { client, pd, cx, .. } = &null.env;
        let addr = null.env.addr();
        let target = messages::Conn::listen(client, addr, pd, cx)?;
        let initiator = Ended::new(messages::Conn::connect(client, addr, pd, cx)?);
        for number in 0..100 {
            check_eq!(initiator.ask(number, cx)?, number + 1);
        }
        initiator.end(cx)?;
        drop(target);
        no_qps(&null)
    }

    #[test]
    fn refused_connection_gives_its_receives_back() -> Result {
        let null = NullEnv::with_cm()?;
        let Env { client, pd, cx, .. } = &null.env;
        let addr = null.env.addr();
        check_err!(messages::Conn::connect(client, addr, pd, cx), ECONNREFUSED);
        check_err!(
            requests::Initiator::connect(client, addr, pd, cx),
            ECONNREFUSED
        );
        no_qps(&null)
    }

    #[test]
    fn region_is_written_while_it_is_open() -> Result {
        let null = NullEnv::new()?;
        let Env { pd, cx, .. } = &null.env;
        let [qp, peer] = pair(&null)?;
        let window = region::Window::new(pd, 8, cx)?;
        let remote = window.open(&qp)?;
        region::write(b"12345678", remote, &peer, pd, cx)?;
        window.close(&qp, cx)?;
        let mut bytes = [0; 8];
        window.read(&mut bytes)?;
        check_eq!(&bytes, b"12345678");
        // The key was that of the registration.
        let again = window.open(&qp)?;
        check!(again.rkey != remote.rkey);
        check_err!(region::write(b"abcdefgh", remote, &peer, pd, cx), EIO);
        window.read(&mut bytes)?;
        check_eq!(&bytes, b"12345678");
        Ok(())
    }

    #[test]
    fn requests_are_answered() -> Result {
        let blocks = Blocks::new()?;
        let cx = &blocks.null.env.cx;
        for block in (0..requests::BLOCKS).cycle().take(100) {
            check_eq!(u32::from(blocks.initiator.get(block, cx)?), block);
        }
        blocks.end()
    }

    #[test]
    fn as_many_requests_at_once_as_there_are_tags() -> Result {
        let blocks = Blocks::new()?;
        let cx = &blocks.null.env.cx;
        for _ in 0..20 {
            let mut begun = KVec::new();
            for block in 0..sizes::DEPTH {
                begun.push(blocks.initiator.begin(block, cx)?, GFP_KERNEL)?;
            }
            for (block, outcome) in begun.iter().enumerate() {
                check_eq!(usize::from(outcome.wait(cx)??), block);
            }
        }
        blocks.end()
    }

    #[test]
    fn requests_end_with_their_connection() -> Result {
        let blocks = Blocks::new()?;
        let cx = &blocks.null.env.cx;
        check_eq!(blocks.initiator.get(1, cx)?, 1);
        // The target disconnects.
        check_err!(blocks.initiator.get(requests::BLOCKS, cx), ECONNRESET);
        check_err!(blocks.initiator.get(1, cx), ENOTCONN);
        blocks.end()
    }

    /// The connection manager has no memory for its message, and gives no event.
    #[cfg(has_faults)]
    #[test]
    fn requests_end_without_a_last_event() -> Result {
        for _ in 0..1_000 {
            if disconnect_without_memory()? {
                return Ok(());
            }
        }
        Err(EAGAIN)
    }

    #[test]
    fn sender_waits_for_credits() -> Result {
        let null = NullEnv::new()?;
        let Env { pd, cx, .. } = &null.env;
        let [a, b] = pair(&null)?;
        let a = Ended::new(credits::End::new(a, pd, cx)?);
        let b = Ended::new(credits::End::new(b, pd, cx)?);
        for _ in 0..200 {
            a.send(cx)?;
        }
        wait(|| b.received() == 200)?;
        a.end(cx)?;
        b.end(cx)?;
        no_qps(&null)
    }

    /// Each end sends all that it may before a message of the other one is handled.
    #[test]
    fn both_ends_may_send_at_once() -> Result {
        const MESSAGES: u32 = 100;
        let null = NullEnv::new()?;
        let Env { client, pd, cx, .. } = &null.env;
        let [a, b] = pair(&null)?;
        let a = Ended::new(credits::End::new(a, pd, cx)?);
        let b = Ended::new(credits::End::new(b, pd, cx)?);
        null.dev.inject(Injection::Hold { count: u32::MAX })?;
        for end in [&a, &b] {
            let mut sent = 0;
            while end.may_send() {
                end.send(cx)?;
                sent += 1;
            }
            let end = Arc::clone(end);
            client.spawn(GFP_KERNEL, move |cx| {
                for _ in sent..MESSAGES {
                    if end.send(cx).is_err() {
                        break;
                    }
                }
            })?;
        }
        null.dev.inject(Injection::Release {
            count: u32::MAX,
            reversed: false,
        })?;
        // Besides the messages some that only grant credits have come.
        wait(|| a.received() >= MESSAGES && b.received() >= MESSAGES)?;
        a.end(cx)?;
        b.end(cx)?;
        no_qps(&null)
    }

    #[test]
    fn removal_ends_what_is_connected() -> Result {
        // Dropped in the order that the end of a device needs where this fails.
        let Blocks {
            null: NullEnv { dev, env },
            target,
            initiator,
        } = Blocks::new()?;
        check_eq!(initiator.get(1, &env.cx)?, 1);
        let course = ends::Course;
        let data = ends::PerDevice::add(Pin::new(&course), &env.dev, &env.cx);
        let data = KBox::pin_init(data, GFP_KERNEL)?;
        data.keep(initiator.clone())?;
        initiator.forget();
        data.as_ref().remove(Pin::new(&course), &env.dev, &env.cx);
        drop((data, target, env));
        check_eq!(dev.objects()[1], 2);
        // This waits until nothing on the device is left.
        dev.remove();
        check_eq!(dev.objects()[1], 0);
        Ok(())
    }
}
