// SPDX-License-Identifier: GPL-2.0

//! The connections of an iWARP device, and their events: the driver's side of `iw_cm`.
//!
//! C header: [`include/rdma/iw_cm.h`](srctree/include/rdma/iw_cm.h)
//!
//! Connections are made in memory, between two QPs of one device. A request goes to the listener of
//! the device that has the address and the port. Accepting it makes both QPs ready to send to each
//! other. The connection ends when one of them fails, which `iw_cm` has them do to disconnect; then
//! the other one fails, too.
//!
//! # References to ids
//!
//! `iw_cm` counts the references to a `struct iw_cm_id`. One is its own, from `iw_create_cm_id()`
//! to `iw_destroy_cm_id()`, and each event that was given to `event_handler` has one until it was
//! handled. So an id is valid in an operation that is called with it. Beyond that the driver needs
//! a reference of its own, an [`IwId`], which takes it by `add_ref` in such an operation and puts
//! it by `rem_ref`:
//!
//! - of a listener, from `iw_create_listen` to `iw_destroy_listen`; besides, each [`Conn`] has one
//!   until the request is answered,
//! - of the active end, from `iw_connect` until its last event was given: CONNECT_REPLY with an
//!   error, or CLOSE,
//! - of the passive end, from `iw_accept` until CLOSE was given.
//!
//! An event that is being given has one as well. So `event_handler` is called with a valid id. Its
//! owner may have destroyed it meanwhile: `iw_cm` drops events of such ids. An
//! operation that fails leaves no reference and gives no event of its id.
//!
//! # References to QPs
//!
//! `iw_cm` takes a reference to the QP (`iw_add_ref`) in `iw_cm_connect()` and `iw_cm_accept()`. It
//! puts it (`iw_rem_ref`) if the operation fails, when it handles CONNECT_REPLY with an error or
//! CLOSE, or when the id is destroyed. [`end`](crate::iw_cm::end) has a QP lose its connection, so
//! that these events come, and waits for the last reference.
//!
//! # Locks
//!
//! `iw_cm` calls `iw_get_qp` and `iw_add_ref` with the lock of an id held, which `event_handler`
//! takes. So events are given by a work item, without a lock of the device. It gives one at a time,
//! those of a connection in the order of [`Event`]. The lock of the connections nests in that of
//! the [`Machine`](crate::machine::Machine).

use crate::{
    inject::{
        take,
        Injection, //
    },
    ring::{
        Ring,
        Slots, //
    }, //
};
use core::{
    net::{
        IpAddr,
        Ipv4Addr,
        Ipv6Addr,
        SocketAddr, //
    },
    ptr::{
        self,
        NonNull, //
    }, //
};
use kernel::{
    impl_has_work,
    new_condvar,
    new_spinlock_irq,
    new_work,
    prelude::*,
    sync::{
        Arc,
        CondVar,
        SpinLockIrq, //
    },
    time::{
        delay::fsleep,
        Delta, //
    },
    workqueue::{
        self,
        Work,
        WorkItem, //
    }, //
};
use rdma_bindings as bindings;

/// The most connections of a device.
const MAX_CONN: usize = 1024;

/// The private data of a rejection by [`Injection::Reject`].
pub const REJECTED: &[u8] = b"rdma_null";

/// An address, as C has it.
#[derive(Clone, Copy)]
pub(crate) struct Address(pub(crate) bindings::__kernel_sockaddr_storage);

// SAFETY: An address is bytes. The pointer that C has in the union aligns them, and is none.
unsafe impl Send for Address {}

impl Address {
    /// Returns an address of IPv4 or IPv6.
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        let raw = ptr::from_ref(&self.0);
        // SAFETY: Each address begins with its family, by which its type is known. The memory is as
        // large and as aligned as any needs, and all of it is initialised.
        unsafe {
            let family = (*raw).__bindgen_anon_1.__bindgen_anon_1.ss_family;
            match u32::from(family) {
                bindings::AF_INET => {
                    let addr = &*raw.cast::<bindings::sockaddr_in>();
                    let ip = Ipv4Addr::from(u32::from_be(addr.sin_addr.s_addr));
                    Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(addr.sin_port)))
                }
                bindings::AF_INET6 => {
                    let addr = &*raw.cast::<bindings::sockaddr_in6>();
                    let ip = Ipv6Addr::from(addr.sin6_addr.in6_u.u6_addr8);
                    Some(SocketAddr::new(
                        IpAddr::V6(ip),
                        u16::from_be(addr.sin6_port),
                    ))
                }
                _ => None,
            }
        }
    }
}

/// A reference to an id.
///
/// # Invariants
///
/// The id is valid, and this has one of its references.
pub(crate) struct IwId(NonNull<bindings::iw_cm_id>);

// SAFETY: References to an id may be taken and put, and events given, in any thread.
unsafe impl Send for IwId {}

impl IwId {
    /// Takes a reference (`add_ref`).
    ///
    /// # Safety
    ///
    /// The id is valid.
    pub(crate) unsafe fn get(id: NonNull<bindings::iw_cm_id>) -> Self {
        // SAFETY: The caller promises that the id is valid. `iw_create_cm_id` sets the function.
        unsafe {
            if let Some(add_ref) = (*id.as_ptr()).add_ref {
                add_ref(id.as_ptr());
            }
        }
        // INVARIANT: The id is valid, and the reference was just taken.
        Self(id)
    }

    fn is(&self, id: *mut bindings::iw_cm_id) -> bool {
        self.0.as_ptr() == id
    }

    /// Gives an event to `iw_cm`, which copies it.
    fn give(&self, event: &mut bindings::iw_cm_event) -> Result {
        // SAFETY: The id is valid by the type invariant, the function is set by `iw_create_cm_id`,
        // and no lock is held that it takes: this is called by the work item only.
        let ret = unsafe {
            match (*self.0.as_ptr()).event_handler {
                Some(handler) => handler(self.0.as_ptr(), event),
                None => return Err(EINVAL),
            }
        };
        kernel::error::to_result(ret)
    }
}

impl Clone for IwId {
    fn clone(&self) -> Self {
        // SAFETY: The id is valid by the type invariant.
        unsafe { Self::get(self.0) }
    }
}

impl Drop for IwId {
    fn drop(&mut self) {
        // SAFETY: The id is valid by the type invariant, and its reference is no longer used.
        // `iw_create_cm_id` sets the function.
        unsafe {
            if let Some(rem_ref) = (*self.0.as_ptr()).rem_ref {
                rem_ref(self.0.as_ptr());
            }
        }
    }
}

/// An event of a connection, in the order in which they are given.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    /// CONNECT_REQUEST, to the listener.
    Request,
    /// ESTABLISHED, to the passive end.
    Established,
    /// CONNECT_REPLY, to the active end.
    Reply,
    /// CLOSE, to the passive end.
    ClosePassive,
    /// CLOSE, to the active end.
    CloseActive,
}

impl Event {
    const ALL: [Self; 5] = [
        Self::Request,
        Self::Established,
        Self::Reply,
        Self::ClosePassive,
        Self::CloseActive,
    ];

    fn bit(self) -> u8 {
        1 << self as u8
    }

    fn raw(self) -> bindings::iw_cm_event_type {
        match self {
            Self::Request => bindings::iw_cm_event_type_IW_CM_EVENT_CONNECT_REQUEST,
            Self::Established => bindings::iw_cm_event_type_IW_CM_EVENT_ESTABLISHED,
            Self::Reply => bindings::iw_cm_event_type_IW_CM_EVENT_CONNECT_REPLY,
            Self::ClosePassive | Self::CloseActive => bindings::iw_cm_event_type_IW_CM_EVENT_CLOSE,
        }
    }
}

/// The parameters of a request or of the answer: private data, and numbers of RDMA READs.
#[derive(Default)]
pub(crate) struct Param {
    data: KVec<u8>,
    ird: u8,
    ord: u8,
}

impl Param {
    /// Copies the parameters. Fails with `EINVAL` if there are more private data than an event can
    /// have.
    ///
    /// # Safety
    ///
    /// `param` is valid, and its private data have the length that it names.
    pub(crate) unsafe fn copy(param: *const bindings::iw_cm_conn_param) -> Result<Self> {
        // SAFETY: The caller promises that the parameters are valid.
        let param = unsafe { &*param };
        let len = u8::try_from(param.private_data_len)?;
        Ok(Self {
            ird: u8::try_from(param.ird).unwrap_or(u8::MAX),
            ord: u8::try_from(param.ord).unwrap_or(u8::MAX),
            // SAFETY: The caller promises that `private_data` has this length.
            ..unsafe { Self::copy_data(param.private_data, len) }?
        })
    }

    /// Copies private data.
    ///
    /// # Safety
    ///
    /// `data` has `len` bytes, unless that is 0.
    pub(crate) unsafe fn copy_data(data: *const c_void, len: u8) -> Result<Self> {
        let mut param = Self::default();
        if len != 0 {
            // SAFETY: The caller promises that `data` has `len` bytes.
            let data = unsafe { core::slice::from_raw_parts(data.cast::<u8>(), len.into()) };
            param.data.extend_from_slice(data, GFP_KERNEL)?;
        }
        Ok(param)
    }
}

/// One end of a connection.
#[derive(Default)]
pub(crate) struct End {
    pub(crate) id: Option<IwId>,
    pub(crate) qp: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The peer was asked, and has not answered.
    Asked,
    Established,
    /// The last events are to be given.
    Over,
}

/// A connection, from the request until its last event was given.
pub(crate) struct Conn {
    /// Its number, which is not used again: `provider_data` of the passive end's id.
    num: usize,
    state: State,
    /// The listener that was asked.
    listener: Option<IwId>,
    pub(crate) active: End,
    passive: End,
    /// The addresses of the active end and of the listener that it has asked.
    from: Address,
    to: Address,
    request: Param,
    answer: Param,
    /// The status of the reply.
    status: c_int,
    /// The events that are to be given, and whether the ring has this connection.
    due: u8,
    queued: bool,
}

impl Conn {
    /// Returns a request, without its active end.
    pub(crate) fn new(from: Address, to: Address, request: Param) -> Result<KBox<Self>> {
        let new = Self {
            num: 0,
            state: State::Asked,
            listener: None,
            active: End::default(),
            passive: End::default(),
            from,
            to,
            request,
            answer: Param::default(),
            status: 0,
            due: 0,
            queued: false,
        };
        Ok(KBox::new(new, GFP_KERNEL)?)
    }

    fn has(&self, qp: usize) -> bool {
        [self.active.qp, self.passive.qp].contains(&Some(qp))
    }

    fn asks(&self, listener: *mut bindings::iw_cm_id) -> bool {
        self.listener.as_ref().is_some_and(|it| it.is(listener))
    }

    /// Answers the active end. What the passive end does with the request fails from here on,
    /// unless it was accepted.
    fn reply(&mut self, status: c_int, answer: Param) {
        self.listener = None;
        self.due &= !Event::Request.bit();
        self.due |= Event::Reply.bit();
        (self.status, self.answer) = (status, answer);
        if status != 0 {
            self.state = State::Over;
        }
    }

    /// Takes the first event that is to be given.
    fn take(&mut self) -> Option<Due> {
        let event = Event::ALL.into_iter().find(|it| self.due & it.bit() != 0)?;
        self.due &= !event.bit();
        let id = match event {
            Event::Request => &self.listener,
            Event::Established | Event::ClosePassive => &self.passive.id,
            Event::Reply | Event::CloseActive => &self.active.id,
        };
        let (status, param, local, remote) = match event {
            Event::Request => (0, &mut self.request, self.to, self.from),
            Event::Reply => (self.status, &mut self.answer, self.from, self.to),
            Event::Established => (0, &mut self.request, self.to, self.from),
            Event::ClosePassive => (0, &mut Param::default(), self.to, self.from),
            Event::CloseActive => (0, &mut Param::default(), self.from, self.to),
        };
        Some(Due {
            id: id.clone()?,
            event,
            data: core::mem::take(&mut param.data),
            raw: bindings::iw_cm_event {
                event: event.raw(),
                status,
                local_addr: local.0,
                remote_addr: remote.0,
                provider_data: ptr::without_provenance_mut(self.num),
                ird: param.ird,
                ord: param.ord,
                ..Default::default()
            },
        })
    }
}

/// An event that is being given.
struct Due {
    id: IwId,
    event: Event,
    data: KVec<u8>,
    raw: bindings::iw_cm_event,
}

impl Due {
    fn give(&mut self) -> Result {
        self.raw.private_data = self.data.as_mut_ptr().cast();
        // `Param::copy` has found that the length fits.
        self.raw.private_data_len = self.data.len() as u8;
        let given = self.id.give(&mut self.raw);
        if given.is_ok() || self.event == Event::Request {
            return given;
        }
        // There was no memory for a copy of the private data: `iw_cm` has some for the event
        // itself, which has to come.
        self.raw.private_data_len = 0;
        self.id.give(&mut self.raw)
    }
}

pub(crate) struct Listener {
    pub(crate) id: IwId,
    pub(crate) addr: SocketAddr,
    /// Listens on any address of IPv4, too.
    pub(crate) dual_stack: bool,
}

impl Listener {
    fn hears(&self, to: SocketAddr) -> bool {
        let is_any = self.addr.ip().is_unspecified();
        let same_family = self.addr.is_ipv4() == to.is_ipv4() || self.dual_stack;
        self.addr.port() == to.port() && (self.addr.ip() == to.ip() || (is_any && same_family))
    }
}

/// The state that the lock of a connection manager protects.
struct Conns {
    table: Slots<Conn>,
    /// The connections that have events to be given.
    due: Ring<usize>,
    listeners: KVec<Listener>,
    /// The number of connections that there were.
    made: usize,
    rejects: u32,
    silences: u32,
    losses: u32,
    /// The time that the next end of a listener takes longer, in microseconds.
    unlisten: u32,
    /// `true` if each request is answered, whatever `silences` is.
    ended: bool,
}

impl Conns {
    /// Returns the connection of a request that was not answered.
    fn asked(&mut self, num: usize) -> Option<(usize, &mut Conn)> {
        let index = num % MAX_CONN;
        let conn = self.table.get_mut(index)?;
        (conn.num == num && conn.state == State::Asked).then_some((index, conn))
    }

    /// Fails with `EINVAL` if there is no QP, or if it has a connection.
    fn check_unconnected(&self, qp: Option<usize>) -> Result {
        let qp = qp.ok_or(EINVAL)?;
        if self.table.iter().any(|conn| conn.has(qp)) {
            return Err(EINVAL);
        }
        Ok(())
    }

    /// Has the work item look at a connection.
    fn queue(&mut self, index: usize) {
        if let Some(conn) = self.table.get_mut(index) {
            if !core::mem::replace(&mut conn.queued, true) {
                // There is room for all connections.
                let _ = self.due.push(index);
            }
        }
    }

    /// Fails the unanswered requests that `which` chooses.
    fn fail(&mut self, status: c_int, which: impl Fn(&Conn) -> bool) {
        for index in 0..MAX_CONN {
            match self.table.get_mut(index) {
                Some(conn) if conn.state == State::Asked && which(conn) => {
                    conn.reply(status, Param::default());
                }
                _ => continue,
            }
            self.queue(index);
        }
    }

    /// Takes the next event that is to be given, and the index of its connection.
    fn next(&mut self) -> Option<(usize, Option<Due>)> {
        let (_, index) = self.due.pop()?;
        let conn = self.table.get_mut(index)?;
        conn.queued = false;
        Some((index, conn.take()))
    }

    /// Notes that an event of a connection was given, or could not be. Returns whether the
    /// connection is gone: it was the last.
    fn given(&mut self, index: usize, result: Result) -> bool {
        let Some(conn) = self.table.get_mut(index) else {
            return false;
        };
        if result.is_err() && conn.state == State::Asked {
            // The listener has as many requests as it can have.
            conn.reply(ECONNREFUSED.to_errno(), Param::default());
        }
        if conn.due != 0 {
            self.queue(index);
            return false;
        }
        conn.state == State::Over && self.table.take(index).is_some()
    }
}

/// The connection manager of a device.
#[pin_data]
pub(crate) struct Cm {
    #[pin]
    conns: SpinLockIrq<Conns>,
    /// Notified when a connection is gone, and when a reference to a QP was put.
    #[pin]
    pub(crate) gone: CondVar,
    #[pin]
    work: Work<Cm>,
}

impl_has_work! {
    impl HasWork<Self> for Cm { self.work }
}

impl WorkItem for Cm {
    type Pointer = Arc<Self>;

    /// Gives all events.
    fn run(this: Arc<Self>) {
        loop {
            let Some((index, due)) = this.conns.lock().next() else {
                return;
            };
            let result = due.map_or(Ok(()), |mut due| due.give());
            if this.conns.lock().given(index, result) {
                this.gone.notify_all();
            }
        }
    }
}

impl Cm {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let conns = Conns {
            table: Slots::new(MAX_CONN)?,
            due: Ring::new(MAX_CONN)?,
            listeners: KVec::new(),
            made: 0,
            rejects: 0,
            silences: 0,
            losses: 0,
            unlisten: 0,
            ended: false,
        };
        Arc::pin_init(
            pin_init!(Self {
                conns <- new_spinlock_irq!(conns),
                gone <- new_condvar!(),
                work <- new_work!("rdma_null::Cm::work"),
            }),
            GFP_KERNEL,
        )
    }

    /// Queues the work item if there are events to give. If not, it must not be queued: no task
    /// waits for it once the device is gone.
    fn wake(self: &Arc<Self>, conns: &Conns) {
        if conns.table.iter().any(|conn| conn.queued) {
            // Already queued is as good.
            let _ = workqueue::system().enqueue(self.clone());
        }
    }

    /// Waits until the work item has returned, so that the module may go. The device is
    /// unregistered, and all its QPs are destroyed.
    pub(crate) fn flush(&self) {
        // SAFETY: The work item is initialised, and there is a reference to it. This is not called
        // by itself.
        unsafe { bindings::flush_work(Work::raw_get(&raw const self.work)) };
    }

    /// Returns the numbers of connections and of listeners.
    pub(crate) fn counts(&self) -> [usize; 2] {
        let conns = self.conns.lock();
        [conns.table.iter().count(), conns.listeners.len()]
    }

    /// Returns whether the next end of a listener takes longer.
    pub(crate) fn unlistens(&self) -> bool {
        self.conns.lock().unlisten != 0
    }

    /// Returns the number of requests that there were.
    pub(crate) fn requests(&self) -> usize {
        self.conns.lock().made
    }

    pub(crate) fn inject(self: &Arc<Self>, injection: Injection) {
        let mut conns = self.conns.lock();
        match injection {
            Injection::Reject { count } => conns.rejects = count,
            Injection::Silence { count } => conns.silences = count,
            Injection::Lose { count } => conns.losses = count,
            Injection::Unlisten { us } => conns.unlisten = us,
            Injection::Expire => conns.fail(ETIMEDOUT.to_errno(), |_| true),
            Injection::End => {
                conns.ended = true;
                conns.fail(ETIMEDOUT.to_errno(), |_| true);
            }
            _ => {}
        }
        self.wake(&conns);
    }

    /// Asks the listener of an address.
    pub(crate) fn connect(self: &Arc<Self>, mut conn: KBox<Conn>, to: SocketAddr) -> Result {
        let mut conns = self.conns.lock();
        conns.check_unconnected(conn.active.qp)?;
        let index = conns.table.vacant()?;
        conns.made += 1;
        conn.num = conns.made * MAX_CONN + index;
        if take(&mut conns.rejects) {
            let mut answer = Param::default();
            answer.data.extend_from_slice(REJECTED, GFP_ATOMIC)?;
            conn.reply(ECONNREFUSED.to_errno(), answer);
        } else if conns.ended || !take(&mut conns.silences) {
            conn.listener = conns
                .listeners
                .iter()
                .find(|it| it.hears(to))
                .map(|it| it.id.clone());
            match conn.listener {
                Some(_) => conn.due |= Event::Request.bit(),
                None => conn.reply(ECONNREFUSED.to_errno(), Param::default()),
            }
        }
        let is_due = conn.due != 0;
        conns.table.put(index, conn);
        if is_due {
            conns.queue(index);
        }
        self.wake(&conns);
        Ok(())
    }

    /// Accepts a request with `passive`. Returns the QP that has asked, and whether the connection
    /// is established: it may be lost at once. Fails with `ECONNRESET` if the request is
    /// gone.
    pub(crate) fn accept(
        self: &Arc<Self>,
        num: usize,
        passive: End,
        answer: Param,
    ) -> Result<(usize, bool)> {
        let mut conns = self.conns.lock();
        conns.check_unconnected(passive.qp)?;
        let lost = conns.losses;
        let (index, conn) = conns.asked(num).ok_or(ECONNRESET)?;
        let peer = conn.active.qp.ok_or(EINVAL)?;
        conn.passive = passive;
        if lost == 0 {
            conn.state = State::Established;
            conn.reply(0, answer);
            conn.due |= Event::Established.bit();
        } else {
            conn.reply(ECONNRESET.to_errno(), Param::default());
            conn.due |= Event::Established.bit() | Event::ClosePassive.bit();
            take(&mut conns.losses);
        }
        conns.queue(index);
        self.wake(&conns);
        Ok((peer, lost == 0))
    }

    /// Rejects a request. Fails with `ECONNRESET` if it is gone.
    pub(crate) fn reject(self: &Arc<Self>, num: usize, status: Error, answer: Param) -> Result {
        let mut conns = self.conns.lock();
        let (index, conn) = conns.asked(num).ok_or(ECONNRESET)?;
        conn.reply(status.to_errno(), answer);
        conns.queue(index);
        self.wake(&conns);
        Ok(())
    }

    /// Ends the connection of a QP that fails. Returns the QP at its other end, which fails, too.
    pub(crate) fn lose(self: &Arc<Self>, qp: usize) -> Option<usize> {
        let mut conns = self.conns.lock();
        let has = |conn: &Conn| conn.has(qp) && conn.state != State::Over;
        let index = (0..MAX_CONN).find(|index| conns.table.get(*index).is_some_and(has))?;
        let conn = conns.table.get_mut(index)?;
        let mut peer = None;
        if conn.state == State::Established {
            conn.state = State::Over;
            conn.due |= Event::ClosePassive.bit() | Event::CloseActive.bit();
            peer = [conn.active.qp, conn.passive.qp]
                .into_iter()
                .flatten()
                .find(|it| *it != qp);
        } else {
            conn.reply(ECONNRESET.to_errno(), Param::default());
        }
        conns.queue(index);
        self.wake(&conns);
        peer
    }

    /// Waits until no connection has the QP.
    pub(crate) fn wait_for_qp(&self, qp: usize) {
        let mut conns = self.conns.lock();
        while conns.table.iter().any(|conn| conn.has(qp)) {
            self.gone.wait(&mut conns);
        }
    }

    pub(crate) fn listen(&self, listener: Listener) -> Result {
        Ok(self.conns.lock().listeners.push(listener, GFP_ATOMIC)?)
    }

    /// Stops to listen. Requests that were not answered are refused: `iw_cm` may have dropped them.
    /// May sleep.
    pub(crate) fn stop(self: &Arc<Self>, id: *mut bindings::iw_cm_id) {
        let us = core::mem::take(&mut self.conns.lock().unlisten);
        fsleep(Delta::from_micros(us.into()));
        let mut conns = self.conns.lock();
        conns.listeners.retain(|listener| !listener.id.is(id));
        conns.fail(ECONNREFUSED.to_errno(), |conn| conn.asks(id));
        self.wake(&conns);
    }
}
