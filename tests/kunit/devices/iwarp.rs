// SPDX-License-Identifier: GPL-2.0

//! iWARP, on siw: what it does not have is refused before the driver sees it, and what it completes
//! in another order than InfiniBand.

use crate::{
    fixture::{
        both,
        connect_to,
        listen,
        recv,
        send,
        service_id,
        wait,
        with_device,
        write,
        Counter,
        End,
        Env,
        Inbox,
        Link,
        Message,
        OnDone,
        Registered, //
    }, //
};
use core::net::IpAddr;
use kernel::{
    new_mutex,
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        SetOnce,
        SpinLockIrq, //
    }, //
};
use rdma::{
    ibcm,
    mad,
    prelude::*,
    qp::Chain,
    rw::{
        Ctx,
        Rw, //
    },
    ud::UdQp,
    wr::AtomicWr, //
};
use rdma_bindings as bindings;

/// Skips the running case if its device is not one of iWARP.
macro_rules! only_on_iwarp {
    () => {
        if !$crate::fixture::on_iwarp()? {
            return $crate::check::skip(c"the device is not one of iWARP");
        }
    };
}

/// The length of what is read: many packets.
const LEN: usize = 64 << 10;

const CAPS: Caps = Caps {
    send_sge: 2,
    ..Caps::new(8, 8)
};

fn link_with(param: &cm::ConnParam<'static>) -> Result<Link<Softirq>> {
    let env = Env::new()?;
    let cq = env.cq(4 * CAPS.entries())?;
    Link::on(env, &cq, &cq, &CAPS, param)
}

fn link() -> Result<Link<Softirq>> {
    link_with(&cm::ConnParam::default())
}

/// Memory of side `b` that is full of sevens.
fn sevens(link: &Link<Softirq>) -> Result<Registered<Bidirectional>> {
    let there = Registered::new(link, LEN, both)?;
    there
        .region
        .write(0, &KVec::from_elem(7, LEN, GFP_KERNEL)?)?;
    Ok(there)
}

/// Has a request refused.
fn refused<const N: usize>(
    link: &Link<Softirq>,
    wr: impl for<'a> FnOnce(&'a Message) -> Result<SendWr<'a, N>>,
) -> Result {
    let inbox = Inbox::new()?;
    let message = link.env.message(&inbox, &[0; 8])?;
    check_err!(link.a.qp.post_send(message, wr), EOPNOTSUPP);
    check_eq!(inbox.dropped(), 1);
    Ok(())
}

/// A message arrives.
fn arrives(link: &Link<Softirq>) -> Result {
    let (sent, received) = (Inbox::new()?, Inbox::new()?);
    recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
    send(&link.a.qp, link.env.message(&sent, &[7; 4])?)?;
    link.wait(|| sent.len() == 1 && received.len() == 1)?;
    sent.pop()?.ok()?;
    check_eq!(received.pop()?.bytes()?[..], [7; 4][..]);
    Ok(())
}

/// `true` if what was read was there when the request completed, and which completion that was.
type Said = Arc<SetOnce<(bool, i32)>>;

/// Fetches sevens.
#[derive(HasCqe)]
struct Fetch {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
    note: Buf<ToDevice>,
    completions: Arc<Counter>,
    said: Said,
}

impl Fetch {
    fn new(env: &Env, completions: &Arc<Counter>) -> Result<(Pin<KBox<Self>>, Said)> {
        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let this = Self {
            cqe: Cqe::new(),
            buf: Buf::alloc(&env.pd, LEN, &env.cx)?,
            note: Buf::alloc(&env.pd, 4, &env.cx)?,
            completions: completions.clone(),
            said: said.clone(),
        };
        Ok((KBox::pin(this, GFP_KERNEL)?, said))
    }
}

impl CqeHandler for Fetch {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let whole = wc.result().is_ok() && this.buf.cpu().iter().all(|byte| *byte == 7);
        let number = this.completions.up();
        this.said.populate((whole, number));
    }
}

type PostSend = unsafe extern "C" fn(
    *mut bindings::ib_qp,
    *const bindings::ib_send_wr,
    *mut *const bindings::ib_send_wr,
) -> c_int;

/// The driver's function.
static DRIVER: SetOnce<PostSend> = SetOnce::new();

/// The address and the key that were registered last while posts are watched. No key is zero.
static ADDR: Atomic<u64> = Atomic::new(0);
static RKEY: Atomic<u32> = Atomic::new(0);

/// Watches registrations: what a READ names to its peer as its sink, a peer of another connection
/// may know.
struct Watch;

/// # Safety
///
/// As the driver's own function.
unsafe extern "C" fn watched(
    qp: *mut bindings::ib_qp,
    list: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    let mut wr = list;
    while !wr.is_null() {
        // SAFETY: The list is valid. Its requests of this opcode are of this type, with a valid MR.
        unsafe {
            if (*wr).opcode == bindings::ib_wr_opcode_IB_WR_REG_MR {
                let reg = wr.cast::<bindings::ib_reg_wr>();
                ADDR.store((*(*reg).mr).iova, Relaxed);
                RKEY.store((*reg).key, Relaxed);
            }
            wr = (*wr).next;
        }
    }
    match DRIVER.copy() {
        // SAFETY: This is called as the driver's function, whose contract the caller keeps.
        Some(post) => unsafe { post(qp, list, bad) },
        None => EIO.to_errno(),
    }
}

impl Watch {
    fn new() -> Result<Self> {
        RKEY.store(0, Relaxed);
        with_device(c"rdma0", |device| {
            // SAFETY: `with_device` holds the device. One pointer is written, and a caller that
            // reads it meanwhile may call either function.
            unsafe {
                if let Some(driver) = (*device).ops.post_send {
                    DRIVER.populate(driver);
                }
                (*device).ops.post_send = Some(watched);
            }
        })?;
        Ok(Self)
    }

    fn registered(&self) -> Option<Remote> {
        let rkey = RKEY.load(Relaxed);
        (rkey != 0).then(|| Remote {
            addr: ADDR.load(Relaxed),
            rkey,
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let unwatched = with_device(c"rdma0", |device| {
            // SAFETY: `with_device` holds the device. One pointer is written, and a caller that
            // reads it meanwhile may call either function.
            unsafe { (*device).ops.post_send = DRIVER.copy() };
        });
        if unwatched.is_err() {
            pr_err!("FAILED: the device has gone\n");
        }
    }
}

type Back = Arc<SpinLockIrq<Option<(Pin<KBox<Transfer>>, bool)>>>;

/// Pages on their way.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    back: Back,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let (back, failed) = (this.back.clone(), wc.result().is_err());
        *back.lock() = Some((this, failed));
    }
}

#[kunit_tests(rdma_iwarp)]
mod tests {
    use super::*;

    #[test]
    fn address_is_that_of_the_interface() -> Result {
        only_on_iwarp!();
        let env = Env::new()?;
        check_eq!(env.dev.ip_addr(), Some(IpAddr::from([192, 0, 2, 1])));
        Ok(())
    }

    #[test]
    fn immediate_data_are_refused() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let there = sevens(&link)?;
        refused(&link, |m| Ok(SendWr::send([m.buf.whole()]).with_imm(1)))?;
        refused(&link, |m| {
            Ok(SendWr::rdma_write([m.buf.whole()], there.remote).with_imm(1))
        })?;
        arrives(&link)
    }

    #[test]
    fn atomics_are_refused() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let there = sevens(&link)?;
        let inbox = Inbox::new()?;
        let message = link.env.message(&inbox, &[0; 8])?;
        let posted = link.a.qp.post_send(message, |m| {
            Ok(AtomicWr::fetch_add(m.buf.whole_mut(), there.remote, 1))
        });
        check_err!(posted, EOPNOTSUPP);
        check_eq!(inbox.dropped(), 1);
        arrives(&link)
    }

    #[test]
    fn reads_into_several_entries_are_refused() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let there = sevens(&link)?;
        refused(&link, |m| {
            let halves = [m.buf.sge_mut(0..4)?, m.buf.sge_mut(4..8)?];
            Ok(SendWr::rdma_read(halves, there.remote))
        })?;
        refused(&link, |_| Ok(SendWr::rdma_read([], there.remote)))?;
        arrives(&link)
    }

    #[test]
    fn nothing_of_a_chain_is_posted_if_a_link_is_refused() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let inbox = Inbox::new()?;
        let message = link.env.message(&inbox, &[0; 8])?;
        let posted = link
            .a
            .qp
            .post_chain(message, |m, chain: &mut Chain<'_, 2>| {
                chain.push(SendWr::send([m.buf.whole()]))?;
                chain.push(SendWr::send([m.buf.whole()]).with_imm(1))
            });
        check_err!(posted, EOPNOTSUPP);
        check_eq!(inbox.dropped(), 1);
        arrives(&link)
    }

    #[test]
    fn datagrams_and_mads_are_refused() -> Result {
        only_on_iwarp!();
        let env = Env::new()?;
        let cq = env.cq::<Softirq>(64)?;
        check_err!(
            UdQp::create(&env.pd, &cq, &cq, &Caps::new(4, 4), 1, 1, &env.cx),
            EOPNOTSUPP
        );
        let agent = mad::Agent::register(&env.dev, 1, mad::Class::new(0x30, 1), &[], 0, &env.cx);
        check_err!(agent, EPROTONOSUPPORT);
        Ok(())
    }

    #[test]
    fn infiniband_connection_manager_is_refused() -> Result {
        only_on_iwarp!();
        let env = Env::new()?;
        let accept = |_: ibcm::Request<'_>, _: &Sleepable| -> Result { Ok(()) };
        let accept = Arc::new(accept, GFP_KERNEL)?;
        let listener = ibcm::Listener::new(&env.dev, service_id(), 1, accept, &env.cx);
        check_err!(listener, EPROTONOSUPPORT);
        let port = env.dev.port(1).ok_or(ENODEV)?;
        let attr = port.gids().next().ok_or(EADDRNOTAVAIL)?;
        check_err!(ibcm::Path::new(&attr, attr.gid(), &env.cx), EPROTONOSUPPORT);
        Ok(())
    }

    #[test]
    fn completion_of_a_chain_comes_after_its_reads() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let there = sevens(&link)?;
        let received = Inbox::new()?;
        for n in 1..=4 {
            recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
            let (fetch, said) = Fetch::new(&link.env, &Counter::new()?)?;
            link.a.qp.post_chain(fetch, |f, chain: &mut Chain<'_, 2>| {
                chain.push(SendWr::rdma_read([f.buf.whole_mut()], there.remote))?;
                chain.push(SendWr::send([f.note.whole()]))
            })?;
            wait(|| said.copy().is_some() && received.len() == n)?;
            check_eq!(said.copy(), Some((true, 1)));
        }
        Ok(())
    }

    #[test]
    fn completion_of_a_batch_comes_after_its_reads() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let there = sevens(&link)?;
        let received = Inbox::new()?;
        for n in 1..=4 {
            recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
            let (fetch, said) = Fetch::new(&link.env, &Counter::new()?)?;
            let mut batch = link.a.qp.batch(fetch);
            batch.post(|f, chain: &mut Chain<'_, 1>| {
                chain.push(SendWr::rdma_read([f.buf.whole_mut()], there.remote))
            })?;
            batch
                .finish(|f, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([f.note.whole()])))?;
            wait(|| said.copy().is_some() && received.len() == n)?;
            check_eq!(said.copy(), Some((true, 1)));
        }
        Ok(())
    }

    #[test]
    fn read_at_the_end_of_a_chain_needs_no_fence() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let there = sevens(&link)?;
        let (fetch, said) = Fetch::new(&link.env, &Counter::new()?)?;
        link.a.qp.post_chain(fetch, |f, chain: &mut Chain<'_, 2>| {
            for range in [0..LEN / 2, LEN / 2..LEN] {
                chain.push(SendWr::rdma_read([f.buf.sge_mut(range)?], there.remote))?;
            }
            Ok(())
        })?;
        wait(|| said.copy().is_some())?;
        check_eq!(said.copy(), Some((true, 1)));
        Ok(())
    }

    #[test]
    fn fence_waits_for_a_read() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let there = sevens(&link)?;
        let received = Inbox::new()?;
        for _ in 0..4 {
            recv(&link.b.qp, link.env.message(&received, &[0; 4])?)?;
            let completions = Counter::new()?;
            let (fetch, said) = Fetch::new(&link.env, &completions)?;
            link.a.qp.post_send(fetch, |f| {
                Ok(SendWr::rdma_read([f.buf.whole_mut()], there.remote))
            })?;
            let second = Arc::new(SetOnce::new(), GFP_KERNEL)?;
            let (tell, counts) = (second.clone(), completions.clone());
            let fenced = OnDone::<context::Atomic, _>::new(move |wc: &Wc, _: &context::Atomic| {
                tell.populate((wc.result().is_ok(), counts.up()));
            })?;
            link.a
                .qp
                .post_send(fenced, |_| Ok(SendWr::send([]).fenced()))?;
            wait(|| said.copy().is_some() && second.copy().is_some())?;
            check_eq!(said.copy(), Some((true, 1)));
            check_eq!(second.copy(), Some((true, 2)));
        }
        Ok(())
    }

    #[test]
    fn read_without_depth_is_refused() -> Result {
        only_on_iwarp!();
        let link = link_with(&cm::ConnParam {
            initiator_depth: 0,
            responder_resources: 0,
            ..Default::default()
        })?;
        let there = sevens(&link)?;
        let completions = Counter::new()?;
        let (fetch, said) = Fetch::new(&link.env, &completions)?;
        let posted = link.a.qp.post_send(fetch, |f| {
            Ok(SendWr::rdma_read([f.buf.whole_mut()], there.remote))
        });
        let error = posted.err().ok_or(EINVAL)?;
        check!(error.owner.is_some());
        check_eq!(error.error(), EINVAL);
        link.a.qp.drain(&link.env.cx)?;
        check_eq!((said.copy(), completions.get()), (None, 0));
        Ok(())
    }

    /// `iw_cm_disconnect()` uses a QP to which it has no reference.
    #[test]
    fn qp_is_not_destroyed_while_its_id_is_disconnected() -> Result {
        only_on_iwarp!();
        for n in 0..100 {
            let Link { a, b, env, .. } = link()?;
            let End { qp, id, .. } = a;
            // A work item disconnects, and another one destroys the QP.
            if n % 2 == 0 {
                id.disconnect_later();
                drop(qp);
            } else {
                drop(qp);
                id.disconnect_later();
            }
            wait(|| b.events.disconnected() == 1)?;
            drop((b, env));
        }
        Ok(())
    }

    /// It would wait for a later event, which is handled by the same ordered workqueue.
    #[test]
    fn qp_is_not_destroyed_in_a_callback() -> Result {
        only_on_iwarp!();
        let env = Env::new()?;
        let qp = env.qp(&env.cq::<Softirq>(CAPS.entries())?, &CAPS)?;
        let kept = Arc::pin_init(new_mutex!(Some(qp)), GFP_KERNEL)?;
        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let (addr, tell) = (env.addr(), said.clone());
        let refuses = move |_: cm::Request<'_>, cx: &Sleepable| -> Result {
            let qp = kept.lock().take().ok_or(EIO)?;
            tell.populate(qp.destroy(cx).err());
            Err(ECONNREFUSED)
        };
        let listener = listen(&env, addr, refuses)?;
        check!(connect_to(&env, addr, &[]).is_err());
        check_eq!(said.copy(), Some(Some(EDEADLK)));
        listener.destroy(&env.cx)
    }

    /// The peer that was asked has the key, and any other of the PD may write with it.
    #[test]
    fn pages_of_a_failed_read_stay_until_the_qp_is_gone() -> Result {
        only_on_iwarp!();
        let env = Env::new()?;
        let requests = env.dev.port(1).ok_or(ENODEV)?.rw_requests(1);
        let with_requests = Caps {
            send_wr: CAPS.send_wr + requests,
            ..CAPS
        };
        let cq = env.cq::<Softirq>(4 * with_requests.entries())?;
        let other_env = Env {
            pd: env.pd.clone(),
            ..Env::new()?
        };
        let param = cm::ConnParam::default();
        let Link { a, b, env, .. } = Link::connect(env, &cq, &cq, &CAPS, 1, &param)?;
        let other_cq = other_env.cq::<Softirq>(4 * CAPS.entries())?;
        let other = Link::on(other_env, &other_cq, &other_cq, &CAPS, &param)?;

        let watch = Watch::new()?;
        let back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        let transfer = Transfer {
            cqe: Cqe::new(),
            data: Ctx::alloc(2 * PAGE_SIZE, &env.cx)?,
            back: back.clone(),
        };
        let nowhere = Remote { addr: 0, rkey: 0 };
        a.qp.post_rw(KBox::pin(transfer, GFP_KERNEL)?, |x| {
            Ok(Rw::read(&x.data, .., nowhere, &env.cx))
        })?;
        wait(|| back.lock().is_some())?;
        let sink = watch.registered().ok_or(ENODATA)?;
        drop(watch);
        let (mut transfer, failed) = back.lock().take().ok_or(ENODATA)?;
        check!(failed);
        check_err!(transfer.data.cpu().read(0, &mut [0; 4]), EINVAL);
        drop(transfer);
        // It is no use of freed memory: KASAN looks on.
        write(&other, sink, &[9; 8])?.ok()?;
        arrives(&other)?;

        // The QP is destroyed by a work item, and the MR with it.
        drop((a, b));
        wait(|| {
            let written = write(&other, sink, &[9; 8]);
            written.is_err() || other.a.events.disconnected() == 1
        })
    }

    #[test]
    fn disconnection_of_another_id_in_a_callback_is_refused() -> Result {
        only_on_iwarp!();
        let link = link()?;
        let other = link.a.id.clone();
        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let tell = said.clone();
        let addr = link.env.addr();
        let refuses = move |_: cm::Request<'_>, cx: &Sleepable| -> Result {
            tell.populate(other.disconnect(cx).err());
            other.disconnect_later();
            Err(ECONNREFUSED)
        };
        let listener = listen(&link.env, addr, refuses)?;
        check!(connect_to(&link.env, addr, &[]).is_err());
        check_eq!(said.copy(), Some(Some(EDEADLK)));
        wait(|| link.a.events.disconnected() == 1 && link.b.events.disconnected() == 1)?;
        listener.destroy(&link.env.cx)
    }
}
