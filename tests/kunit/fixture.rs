// SPDX-License-Identifier: GPL-2.0

//! Common parts of the tests.

mod access;
mod bounce;
mod cm_link;
mod connect;
mod counter;
mod datagram;
mod event_log;
#[cfg(has_faults)]
mod fault;
mod forged;
mod gap;
mod held;
mod link;
mod mads;
mod message;
mod null;
mod own_link;
mod place;
mod raw;
mod region;
mod removal;
mod shared;
mod signal;
mod slow_event;

pub(crate) use access::{
    denied,
    read,
    received,
    write,
    write_flushed, //
};
pub(crate) use bounce::{
    bounce,
    synced_for_cpu,
    synced_for_device, //
};
pub(crate) use cm_link::{
    connect_to_service,
    connect_with,
    listen_to_service,
    service_id,
    CmEnd,
    CmEvents,
    CmLink, //
};
pub(crate) use connect::{
    accept,
    accepts,
    connect_to,
    listen,
    refused,
    refuses, //
};
pub(crate) use counter::{
    CountDrop,
    Counter, //
};
pub(crate) use datagram::{
    UdEnd,
    UdMessage,
    PAYLOAD,
    PORT,
    QKEY, //
};
pub(crate) use event_log::EventLog;
#[cfg(has_faults)]
pub(crate) use fault::with_fault;
pub(crate) use forged::Forger;
pub(crate) use gap::Gap;
pub(crate) use held::HeldGuard;
pub(crate) use link::{
    End,
    Events,
    Link, //
};
pub(crate) use mads::{
    gid,
    message,
    own_class,
    serve,
    Mads,
    BACKLOG,
    CLASS,
    LONG_MS,
    THREADS, //
};
pub(crate) use message::{
    recv,
    send,
    Completed,
    Counted,
    Done,
    Inbox,
    Message,
    OnDone,
    Polled,
    Polls, //
};
#[cfg(debug_assertions)]
pub(crate) use null::duplicate;
pub(crate) use null::{
    flush_events,
    null_device,
    order,
    Null,
    NullEnv,
    CAPS, //
};
pub(crate) use place::Place;
pub(crate) use raw::{
    path,
    to_init,
    to_rtr,
    to_rts,
    to_rts_with,
    Pair, //
};
pub(crate) use region::{
    both,
    invalidate,
    readable,
    register,
    writable,
    Carried,
    Outcome,
    RegOwner,
    Registered, //
};
pub(crate) use removal::{
    begin_removal,
    nothing,
    removal_waits_for, //
};
pub(crate) use shared::{
    RecvBuf,
    RecvListGuard,
    SrqLink,
    SLOT, //
};
pub(crate) use signal::signal_current;
pub(crate) use slow_event::SlowEvent;

pub(crate) use own_link::{
    with_device,
    OwnLink, //
};

use crate::{
    check::fail,
    client::Kunit, //
};
use core::net::{
    IpAddr,
    Ipv6Addr, //
};
use kernel::{
    io::poll::read_poll_timeout,
    page::PAGE_SIZE,
    prelude::*,
    str::CStr,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    },
    time::Delta, //
};
use rdma::{
    device::Device,
    prelude::{
        cm,
        Arc,
        Caps,
        ClientRef,
        Cq,
        FixedContext,
        Pd,
        PollContext,
        Qp,
        Sleepable,
        SocketAddr, //
    }, //
};

/// The IPv6 address of the test link.
pub(crate) const IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// The longest time of a step of the connection manager.
pub(crate) const STEP_MS: u32 = 60_000;

/// The time to wait for anything, far beyond what it takes, and the interval between two looks.
/// If allocations fail, much is waited for in vain, and does not matter.
const PATIENCE: Delta = Delta::from_secs(if TIME_JUMPS { 600 } else { 100 });
const PATIENCE_WITH_FAULTS: Delta = Delta::from_secs(2);
const STEP: Delta = Delta::from_micros(if TIME_JUMPS { 10_000 } else { 300 });

/// `true` if a work item polls softirq CQs, in which handlers may sleep: see
/// [`rdma::context::Softirq`].
pub(crate) const SOFTIRQ_IS_WORK: bool =
    cfg!(all(CONFIG_PREEMPT_RT, not(CONFIG_PREEMPT_RT_NEEDS_BH_LOCK)));

/// `true` if the kernel's time jumps to what is next when nothing is to be done.
const TIME_JUMPS: bool = cfg!(time_jumps);

/// The start of a test: a client, a device and its objects.
pub(crate) struct Env {
    pub(crate) client: ClientRef,
    pub(crate) dev: Device,
    pub(crate) ip: IpAddr,
    pub(crate) pd: Pd,
    pub(crate) cx: Sleepable,
}

impl Env {
    pub(crate) fn new() -> Result<Self> {
        let cx = Sleepable::current()?;
        let client = ClientRef::of::<Kunit>(&cx)?;
        let (dev, ip) = client.first_device_with_addr(&cx)?;
        Self::on(client, dev, ip, cx)
    }

    /// Starts on the device of this name.
    pub(crate) fn of(name: &CStr) -> Result<Self> {
        let cx = Sleepable::current()?;
        let client = ClientRef::of::<Kunit>(&cx)?;
        let dev = client.device_by_name(name, &cx).ok_or(ENODEV)?;
        // Null devices without a connection manager have none.
        let ip = dev.ip_addr().unwrap_or(Ipv6Addr::UNSPECIFIED.into());
        Self::on(client, dev, ip, cx)
    }

    fn on(client: ClientRef, dev: Device, ip: IpAddr, cx: Sleepable) -> Result<Self> {
        let pd = Pd::alloc(&dev, &cx)?;
        Ok(Self {
            client,
            dev,
            ip,
            pd,
            cx,
        })
    }

    pub(crate) fn is_iwarp(&self) -> bool {
        self.dev
            .ports()
            .all(|port| port.has(rdma::device::Protocol::Iwarp))
    }

    /// Returns the device's own address with a port that no other test uses.
    pub(crate) fn addr(&self) -> SocketAddr {
        SocketAddr::new(self.ip, port())
    }

    /// Returns an id that is bound to the device but not connected.
    pub(crate) fn id(&self) -> Result<cm::Id> {
        let id = cm::Id::create(&self.client, &self.cx)?;
        id.resolve_addr(self.addr(), STEP_MS, &self.cx)?;
        Ok(id)
    }

    pub(crate) fn cq<C: FixedContext>(&self, entries: u32) -> Result<Cq<C>> {
        Cq::alloc_any(&self.dev, entries, &self.cx)
    }

    /// Returns a QP that is not connected, whose queues complete to one CQ.
    pub(crate) fn qp<C: PollContext>(&self, cq: &Cq<C>, caps: &Caps) -> Result<Qp<C>> {
        Qp::create(&self.id()?, &self.pd, cq, cq, caps, &self.cx)
    }

    /// Returns a QP without an id, in the reset state, whose queues complete to one CQ.
    pub(crate) fn raw_qp<C: PollContext>(&self, cq: &Cq<C>, caps: &Caps) -> Result<Qp<C>> {
        Qp::create_raw(&self.pd, cq, cq, caps, &self.cx)
    }

    pub(crate) fn message(&self, inbox: &Arc<Inbox>, bytes: &[u8]) -> Result<Pin<KBox<Message>>> {
        Message::new(&self.pd, inbox, bytes, &self.cx)
    }
}

/// Returns whether the tests run on a device of iWARP.
pub(crate) fn on_iwarp() -> Result<bool> {
    Ok(Env::new()?.is_iwarp())
}

/// Returns bytes that differ from page to page.
pub(crate) fn pattern(len: usize) -> Result<KVec<u8>> {
    let mut bytes = KVec::from_elem(0, len, GFP_KERNEL)?;
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i % 251 + i / PAGE_SIZE) as u8;
    }
    Ok(bytes)
}

/// Returns a port that was not used before.
pub(crate) fn port() -> u16 {
    static NEXT: Atomic<u32> = Atomic::new(20_000);
    NEXT.fetch_add(1, Relaxed) as u16
}

#[cfg(has_faults)]
extern "C" {
    /// The number of the allocation that fails in each case, zero being none. Defined in
    /// `faults.c`.
    #[link_name = "rdma_kunit_nth"]
    static NTH: c_uint;
}

/// Whether an allocation of the case fails.
pub(crate) fn with_faults() -> bool {
    #[cfg(has_faults)]
    // SAFETY: The variable is there as long as the module, and written while no case runs.
    let fails = unsafe { NTH } != 0;
    #[cfg(not(has_faults))]
    let fails = false;
    fails
}

fn patience() -> Delta {
    match with_faults() {
        true => PATIENCE_WITH_FAULTS,
        false => PATIENCE,
    }
}

/// Waits until the condition holds; fails, and prints where, when it never does.
#[track_caller]
#[inline]
pub(crate) fn wait(mut condition: impl FnMut() -> bool) -> Result {
    wait_for(&mut condition)
}

#[inline(never)]
#[track_caller]
fn wait_for(condition: &mut dyn FnMut() -> bool) -> Result {
    match read_poll_timeout(|| Ok(condition()), |held| *held, STEP, patience()) {
        Ok(_) => Ok(()),
        Err(_) => Err(fail("waited in vain")),
    }
}
