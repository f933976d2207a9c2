// SPDX-License-Identifier: GPL-2.0

//! Waiting for completions.

use crate::fixture::{
    received as has_received,
    wait,
    Counter,
    Env,
    Link,
    OnDone,
    Place,
    Polls, //
};
use kernel::{
    prelude::*,
    sync::aref::ARef,
    task::Task,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;

/// Longer than anything takes.
const LONG_MS: u32 = 100_000;

/// Posts a receive that counts.
fn expect(link: &Link<Waited>, received: &Arc<Counter>) -> Result {
    let counts = received.clone();
    let receive = OnDone::<context::Atomic, _>::new(move |_, _| {
        counts.up();
    })?;
    Ok(link.b.qp.post_recv(receive, |_| Ok(RecvWr::new([])))?)
}

fn message(link: &Link<Waited>, solicited: bool) -> Result {
    let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    Ok(link.a.qp.post_send(nothing, |_| {
        let wr = SendWr::send([]);
        Ok(if solicited { wr.solicited() } else { wr })
    })?)
}

/// Calls `f` after a while, from another thread.
fn later(link: &Link<Waited>, f: impl FnOnce() + Send + 'static) -> Result {
    link.env.client.spawn(GFP_KERNEL, move |_| {
        fsleep(Delta::from_millis(50));
        f();
    })
}

/// Waits until the task sleeps.
fn sleeps(task: &Task) -> Result {
    wait(|| {
        // SAFETY: The reference keeps the task. Its state may change at any time.
        let state = unsafe { (&raw const (*task.as_ptr()).__state).read_volatile() };
        state == kernel::bindings::TASK_INTERRUPTIBLE
    })
}

#[kunit_tests(rdma_cq_wait)]
mod tests {
    use super::*;

    #[test]
    fn zero_only_looks() -> Result {
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, 0, &link.env.cx)?,
            cq::Wait::TimedOut
        );
        expect(&link, &received)?;
        message(&link, false)?;
        wait(|| link.recv_cq.wait(Notify::NextComp, 0, &link.env.cx) == Ok(cq::Wait::Ready))?;
        // Nobody has polled, so it still is.
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, 0, &link.env.cx)?,
            cq::Wait::Ready
        );
        check_eq!(link.recv_cq.process(8), 1);
        check_eq!(received.get(), 1);
        Ok(())
    }

    #[test]
    fn completion_wakes() -> Result {
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        expect(&link, &received)?;
        let qp = link.a.qp.clone();
        let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        later(&link, move || {
            let _ = qp.post_send(nothing, |_| Ok(SendWr::send([])));
        })?;
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx)?,
            cq::Wait::Ready
        );
        check_eq!(link.recv_cq.process(8), 1);
        check_eq!(received.get(), 1);
        Ok(())
    }

    #[test]
    fn completion_before_the_wait_ends_it() -> Result {
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        expect(&link, &received)?;
        message(&link, false)?;
        // Nobody has armed the receiver's CQ when it arrives. On InfiniBand it has when the sender
        // knows.
        check_eq!(
            link.send_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx)?,
            cq::Wait::Ready
        );
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx)?,
            cq::Wait::Ready
        );
        check_eq!(
            link.recv_cq
                .wait(Notify::Solicited, LONG_MS, &link.env.cx)?,
            cq::Wait::Ready
        );
        check_eq!(link.recv_cq.process(8), 1);
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, 1, &link.env.cx)?,
            cq::Wait::TimedOut
        );
        Ok(())
    }

    #[test]
    fn next_comes_within_a_time() -> Result {
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        let mut batch = WcArray::<4>::new();
        let (cq, cx) = (&link.recv_cq, &link.env.cx);
        check!(cq.next(&mut batch, 0, cx)?.is_none());
        for _ in 0..3 {
            expect(&link, &received)?;
        }
        // Two are there, and taken one at a time.
        message(&link, false)?;
        message(&link, false)?;
        let mut sent = 0;
        wait(|| {
            sent += link.send_cq.process(8);
            sent == 2
        })?;
        has_received(&link.env, &link.a.qp, &link.b.qp, || {
            Waited::poll(&link.send_cq)
        })?;
        check_eq!(cq.poll(&mut batch)?, 2);
        for taken in [1, 2] {
            check!(cq.next(&mut batch, 0, cx)?.is_some());
            check_eq!(received.get(), taken);
        }
        // One is still to come.
        let qp = link.a.qp.clone();
        let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        later(&link, move || {
            let _ = qp.post_send(nothing, |_| Ok(SendWr::send([])));
        })?;
        check!(cq.next(&mut batch, LONG_MS, cx)?.is_some());
        check_eq!(received.get(), 3);
        check!(cq.next(&mut batch, 30, cx)?.is_none());
        Ok(())
    }

    #[test]
    fn nothing_is_lost_between_poll_and_wait() -> Result {
        const N: i32 = 100;
        let param = cm::ConnParam {
            rnr_retry_count: 7,
            ..Default::default()
        };
        let link = Link::<Waited>::with(&Caps::new(8, 8), &param)?;
        let (received, answered) = (Counter::new()?, Counter::new()?);
        expect(&link, &received)?;
        // The peer sends the next message as soon as it sees that this one was received, which is
        // while this side is on its way to the next wait.
        let (qp, cq, seen) = (link.a.qp.clone(), link.send_cq.clone(), received.clone());
        let over = answered.clone();
        link.env.client.spawn(GFP_KERNEL, move |cx| {
            for n in 0..N {
                let Ok(nothing) = OnDone::<context::Atomic, _>::new(|_, _| {}) else {
                    break;
                };
                let posted = qp.post_send(nothing, |_| Ok(SendWr::send([])));
                let sent = cq.wait(Notify::NextComp, LONG_MS, cx) == Ok(cq::Wait::Ready);
                cq.process(8);
                if posted.is_err() || !sent || wait(|| seen.get() > n).is_err() {
                    break;
                }
            }
            over.up();
        })?;
        let mut fine = true;
        for n in 0..N {
            if n + 1 < N {
                expect(&link, &received)?;
            }
            while fine && received.get() == n {
                fine = link.recv_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx)
                    == Ok(cq::Wait::Ready);
                link.recv_cq.process(8);
            }
        }
        wait(|| answered.get() == 1)?;
        check!(fine);
        check_eq!(received.get(), N);
        Ok(())
    }

    #[test]
    fn all_who_wait_are_woken() -> Result {
        const N: i32 = 4;
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        let (waiting, ready) = (Counter::new()?, Counter::new()?);
        expect(&link, &received)?;
        for _ in 0..N {
            let (cq, waiting, ready) = (link.recv_cq.clone(), waiting.clone(), ready.clone());
            link.env.client.spawn(GFP_KERNEL, move |cx| {
                waiting.up();
                if cq.wait(Notify::NextComp, LONG_MS, cx) == Ok(cq::Wait::Ready) {
                    ready.up();
                }
            })?;
        }
        wait(|| waiting.get() == N)?;
        fsleep(Delta::from_millis(20));
        check_eq!(ready.get(), 0);
        message(&link, false)?;
        wait(|| ready.get() == N)?;
        check_eq!(link.recv_cq.process(8), 1);
        Ok(())
    }

    #[test]
    fn only_solicited_messages_wake() -> Result {
        not_on_iwarp!(c"siw wakes nobody who waits for these");
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        let woken = Counter::new()?;
        expect(&link, &received)?;
        expect(&link, &received)?;
        let (cq, counts) = (link.recv_cq.clone(), woken.clone());
        let waiting = Place::new()?;
        let begun = waiting.clone();
        link.env.client.spawn(GFP_KERNEL, move |cx| {
            let task: ARef<Task> = (&**kernel::current!()).into();
            begun.put(task);
            if cq.wait(Notify::Solicited, LONG_MS, cx) == Ok(cq::Wait::Ready) {
                counts.up();
            }
        })?;
        // It has armed the CQ before it sleeps.
        let task = waiting.wait()?;
        sleeps(&task)?;
        message(&link, false)?;
        check_eq!(
            link.send_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx)?,
            cq::Wait::Ready
        );
        fsleep(Delta::from_millis(20));
        check_eq!(woken.get(), 0);
        message(&link, true)?;
        wait(|| woken.get() == 1)?;
        check_eq!(link.recv_cq.process(8), 2);
        Ok(())
    }

    #[test]
    fn signal_interrupts() -> Result {
        let link = Link::<Waited>::new()?;
        let task: ARef<Task> = (&**kernel::current!()).into();
        let signal = kernel::bindings::SIGUSR1 as c_int;
        // SAFETY: 2 is `SIG_KTHREAD`, no function; this is `allow_signal`, of this thread, which
        // ends with the test.
        unsafe {
            let handler = core::mem::transmute::<usize, kernel::bindings::__sighandler_t>(2);
            kernel::bindings::kernel_sigaction(signal, handler);
        }
        later(&link, move || {
            // SAFETY: The reference keeps the task.
            unsafe { kernel::bindings::send_sig(signal, task.as_ptr(), 0) };
        })?;
        check_err!(
            link.recv_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx),
            ERESTARTSYS
        );
        // It is still pending, so the next wait does not begin; completions come first.
        check_err!(
            link.recv_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx),
            ERESTARTSYS
        );
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, 0, &link.env.cx)?,
            cq::Wait::TimedOut
        );
        Ok(())
    }

    #[test]
    fn flush_wakes() -> Result {
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        expect(&link, &received)?;
        let id = link.a.id.clone();
        later(&link, move || id.disconnect_later())?;
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, LONG_MS, &link.env.cx)?,
            cq::Wait::Ready
        );
        wait(|| {
            link.recv_cq.process(8);
            received.get() == 1
        })
    }

    #[test]
    fn drain_needs_no_other_poller() -> Result {
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        for _ in 0..8 {
            expect(&link, &received)?;
        }
        link.b.qp.drain(&link.env.cx)?;
        check_eq!(received.get(), 8);
        check_eq!(
            link.recv_cq.wait(Notify::NextComp, 0, &link.env.cx)?,
            cq::Wait::TimedOut
        );
        Ok(())
    }

    #[test]
    fn drain_and_a_waiting_thread() -> Result {
        let (link, received) = (Link::<Waited>::new()?, Counter::new()?);
        let (cq, ended) = (link.recv_cq.clone(), Counter::new()?);
        let (seen, over) = (received.clone(), ended.clone());
        for _ in 0..8 {
            expect(&link, &received)?;
        }
        link.env.client.spawn(GFP_KERNEL, move |cx| {
            // The drain may have the last one, not handled yet: then nothing else comes.
            while seen.get() < 8 && cq.wait(Notify::NextComp, 100, cx).is_ok() {
                cq.process(1);
            }
            over.up();
        })?;
        link.b.qp.drain(&link.env.cx)?;
        check_eq!(received.get(), 8);
        wait(|| ended.get() == 1)
    }

    #[test]
    fn sizes_and_vectors_are_checked() -> Result {
        let env = Env::new()?;
        check_err!(Cq::<Waited>::alloc(&env.dev, 0, 0, &env.cx), EINVAL);
        check_err!(
            Cq::<Waited>::alloc_any(&env.dev, env.dev.attrs().max_cqe + 1, &env.cx),
            EINVAL
        );
        let vectors = env.dev.num_comp_vectors();
        check_err!(Cq::<Waited>::alloc(&env.dev, 8, vectors, &env.cx), EINVAL);
        for vector in 0..vectors {
            let cq = Cq::<Waited>::alloc(&env.dev, 8, vector, &env.cx)?;
            check!(cq.entries() >= 8);
            check_eq!(cq.free_entries(), cq.entries());
        }
        Ok(())
    }
}
