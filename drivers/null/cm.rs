// SPDX-License-Identifier: GPL-2.0

//! The connection manager of an iWARP device: the driver's side of `iw_cm`.
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
//! An event that is being given has one as well. So `event_handler` is called with a valid id. What
//! the id's owner has done meanwhile does not matter: `iw_cm` drops events of ids that are
//! destroyed. An operation that fails leaves no reference and gives no event of its id.
//!
//! # References to QPs
//!
//! `iw_cm` takes a reference to the QP (`iw_add_ref`) in `iw_cm_connect()` and `iw_cm_accept()`. It
//! puts it (`iw_rem_ref`) if the operation fails, when it handles CONNECT_REPLY with an error or
//! CLOSE, or when the id is destroyed. [`end`] has a QP lose its connection, so that these events
//! come, and waits for the last reference.
//!
//! # Locks
//!
//! `iw_cm` calls `iw_get_qp` and `iw_add_ref` with the lock of an id held, which `event_handler`
//! takes. So events are given by a work item, without a lock of the device. It gives one at a time,
//! those of a connection in the order of [`Event`]. The lock of the connections nests in that of
//! the [`Machine`](crate::machine::Machine).

use crate::{
    device::Shared,
    inject::{
        take,
        Injection,
        Object, //
    },
    ring::{
        Ring,
        Slots, //
    },
    verbs::{
        errno,
        qp_parts, //
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
struct Address(bindings::__kernel_sockaddr_storage);

// SAFETY: An address is bytes. The pointer that C has in the union aligns them, and is none.
unsafe impl Send for Address {}

/// A reference to an id.
///
/// # Invariants
///
/// The id is valid, and this has one of its references.
struct IwId(NonNull<bindings::iw_cm_id>);

// SAFETY: References to an id may be taken and put, and events given, in any thread.
unsafe impl Send for IwId {}

impl IwId {
    /// Takes a reference (`add_ref`).
    ///
    /// # Safety
    ///
    /// The id is valid.
    unsafe fn get(id: NonNull<bindings::iw_cm_id>) -> Self {
        // SAFETY: The caller says that the id is valid. `iw_create_cm_id` sets the function.
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
        // SAFETY: The id is valid by the type invariant, and its reference is not used any more.
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
struct Param {
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
    /// They are valid, with as many private data as they say.
    unsafe fn copy(param: *const bindings::iw_cm_conn_param) -> Result<Self> {
        // SAFETY: The caller says that the parameters are valid.
        let param = unsafe { &*param };
        let len = u8::try_from(param.private_data_len)?;
        Ok(Self {
            // SAFETY: The caller says that there are so many private data.
            data: unsafe { copy(param.private_data, len) }?,
            ird: u8::try_from(param.ird).unwrap_or(u8::MAX),
            ord: u8::try_from(param.ord).unwrap_or(u8::MAX),
        })
    }
}

/// Copies private data.
///
/// # Safety
///
/// There are so many.
unsafe fn copy(data: *const c_void, len: u8) -> Result<KVec<u8>> {
    let mut copy = KVec::new();
    if len != 0 {
        // SAFETY: The caller says that there are so many.
        let data = unsafe { core::slice::from_raw_parts(data.cast::<u8>(), len.into()) };
        copy.extend_from_slice(data, GFP_KERNEL)?;
    }
    Ok(copy)
}

/// One end of a connection.
#[derive(Default)]
struct End {
    id: Option<IwId>,
    qp: Option<usize>,
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
struct Conn {
    /// Its number, which is not used again: `provider_data` of the passive end's id.
    num: usize,
    state: State,
    /// The listener that was asked.
    listener: Option<IwId>,
    active: End,
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
        // `Param::copy` has found that an event can have so many.
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

struct Listener {
    id: IwId,
    addr: SocketAddr,
    /// Listens on any address of IPv4, too.
    dual_stack: bool,
}

impl Listener {
    fn hears(&self, to: SocketAddr) -> bool {
        let is_any = self.addr.ip().is_unspecified();
        let same_family = self.addr.is_ipv4() == to.is_ipv4() || self.dual_stack;
        self.addr.port() == to.port() && (self.addr.ip() == to.ip() || (is_any && same_family))
    }
}

/// What the lock of a connection manager protects.
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
    gone: CondVar,
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

    /// Has the work item give what is due. It is not queued for nothing: once the device is gone,
    /// nobody waits for it.
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
    fn connect(self: &Arc<Self>, mut conn: KBox<Conn>, to: SocketAddr) -> Result {
        let mut conns = self.conns.lock();
        if conn
            .active
            .qp
            .is_none_or(|qp| conns.table.iter().any(|it| it.has(qp)))
        {
            return Err(EINVAL);
        }
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
    /// is there: it may be lost at once. Fails with `ECONNRESET` if the request is not there any
    /// more.
    fn accept(self: &Arc<Self>, num: usize, passive: End, answer: Param) -> Result<(usize, bool)> {
        let mut conns = self.conns.lock();
        if passive
            .qp
            .is_none_or(|qp| conns.table.iter().any(|it| it.has(qp)))
        {
            return Err(EINVAL);
        }
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

    /// Rejects a request. Fails with `ECONNRESET` if it is not there any more.
    fn reject(self: &Arc<Self>, num: usize, status: Error, answer: Param) -> Result {
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
}

/// Ends the connection of a QP that is about to be destroyed, and waits until its last event was
/// given and `iw_cm` has put its references to the QP.
pub(crate) fn end(shared: &Shared, qp: usize) {
    let mut machine = shared.machine.lock();
    let Some(cm) = machine.cm.clone() else {
        return;
    };
    machine.disconnect(qp);
    if let Some(qp) = machine.qps.get_mut(qp) {
        // No call that has found it connects it any more.
        qp.state = bindings::ib_qp_state_IB_QPS_ERR;
    }
    drop(machine);
    let mut conns = cm.conns.lock();
    while conns.table.iter().any(|conn| conn.has(qp)) {
        cm.gone.wait(&mut conns);
    }
    drop(conns);
    let mut machine = shared.machine.lock();
    while machine.qps.get(qp).is_some_and(|qp| qp.iw_refs != 0) {
        cm.gone.wait(&mut machine);
    }
}

/// Returns an address of IPv4 or IPv6.
fn socket_addr(addr: &Address) -> Option<SocketAddr> {
    let raw = ptr::from_ref(&addr.0);
    // SAFETY: Each address begins with its family, which says what it is. The memory is as large
    // and as aligned as any needs, and all of it is initialised.
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

/// Returns the device of an id, its connection manager, and the number of the id's connection.
///
/// # Safety
///
/// `iw_cm` is calling an operation of the device with `id`, and the reference is not used after
/// that.
unsafe fn id_parts<'a>(id: *mut bindings::iw_cm_id) -> Result<(&'a Shared, Arc<Cm>, usize)> {
    // SAFETY: The id is valid, as `iw_cm` calls this with it, and has set the device, whose
    // operation this is.
    let (shared, data) = unsafe { (Shared::of((*id).device), (*id).provider_data) };
    let cm = shared.machine.lock().cm.clone().ok_or(EOPNOTSUPP)?;
    Ok((shared, cm, data.addr()))
}

/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn add_ref(qp: *mut bindings::ib_qp) {
    // SAFETY: This is an operation of a QP that was created: `get_qp` has returned it.
    let (shared, index) = unsafe { qp_parts(qp) };
    if let Some(qp) = shared.machine.lock().qps.get_mut(index) {
        qp.iw_refs += 1;
    }
}

/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn rem_ref(qp: *mut bindings::ib_qp) {
    // SAFETY: This is an operation of a QP that was created, and is not destroyed before this has
    // put the reference: `end` waits for that.
    let (shared, index) = unsafe { qp_parts(qp) };
    let mut machine = shared.machine.lock();
    if let Some(qp) = machine.qps.get_mut(index) {
        qp.iw_refs -= 1;
    }
    if let Some(cm) = &machine.cm {
        cm.gone.notify_all();
    }
}

/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn get_qp(
    dev: *mut bindings::ib_device,
    num: c_int,
) -> *mut bindings::ib_qp {
    // SAFETY: `iw_cm` is calling an operation of `dev`.
    let shared = unsafe { Shared::of(dev) };
    let machine = shared.machine.lock();
    let qp = machine
        .find_qp(num as u32)
        .and_then(|index| machine.qps.get(index));
    qp.map_or(ptr::null_mut(), |qp| qp.config.raw.0.as_ptr())
}

/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn connect(
    id: *mut bindings::iw_cm_id,
    param: *mut bindings::iw_cm_conn_param,
) -> c_int {
    let connect = || -> Result {
        // SAFETY: This is an operation of the id's device.
        let (shared, cm, _) = unsafe { id_parts(id) }?;
        // SAFETY: `iw_cm` gives valid parameters and a valid id, whose addresses are set.
        let (request, num, from, to) = unsafe {
            let request = Param::copy(param)?;
            let (from, to) = ((*id).local_addr, (*id).remote_addr);
            (request, (*param).qpn, Address(from), Address(to))
        };
        let addr = socket_addr(&to).ok_or(EAFNOSUPPORT)?;
        let id = NonNull::new(id).ok_or(EINVAL)?;
        // SAFETY: The id is valid, as `iw_cm` calls this with it.
        let id = unsafe { IwId::get(id) };
        let new = Conn {
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
        let mut conn = KBox::new(new, GFP_KERNEL)?;
        let mut machine = shared.machine.lock();
        machine.creations.check(Object::Connect)?;
        conn.active = End {
            id: Some(id),
            qp: Some(machine.connectable(num)?),
        };
        cm.connect(conn, addr)
    };
    errno(connect())
}

/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn accept(
    id: *mut bindings::iw_cm_id,
    param: *mut bindings::iw_cm_conn_param,
) -> c_int {
    // SAFETY: This is an operation of the id's device.
    let (shared, cm, num) = match unsafe { id_parts(id) } {
        Ok(parts) => parts,
        Err(e) => return e.to_errno(),
    };
    let accept = || -> Result {
        // SAFETY: `iw_cm` gives valid parameters.
        let (answer, qpn) = unsafe { (Param::copy(param)?, (*param).qpn) };
        // SAFETY: The id is valid, as `iw_cm` calls this with it.
        let id = unsafe { IwId::get(NonNull::new(id).ok_or(EINVAL)?) };
        let mut machine = shared.machine.lock();
        machine.creations.check(Object::Accept)?;
        let qp = machine.connectable(qpn)?;
        let passive = End {
            id: Some(id),
            qp: Some(qp),
        };
        // What the events lead to waits for the lock of the machine.
        let (peer, is_there) = cm.accept(num, passive, answer)?;
        let peer_num = machine.qps.get(peer).map_or(0, |qp| qp.num);
        machine.connect_qp(qp, peer_num);
        machine.connect_qp(peer, qpn);
        if !is_there {
            machine.fail_qp(qp);
            machine.fail_qp(peer);
        }
        Ok(())
    };
    let accepted = accept();
    if accepted.is_err() {
        // Nothing else is called for the request any more.
        let _ = cm.reject(num, ECONNRESET, Param::default());
    }
    errno(accepted)
}

/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn reject(
    id: *mut bindings::iw_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    // SAFETY: This is an operation of the id's device.
    let (shared, cm, num) = match unsafe { id_parts(id) } {
        Ok(parts) => parts,
        Err(e) => return e.to_errno(),
    };
    let answer = || -> Result<Param> {
        shared.machine.lock().creations.check(Object::Reject)?;
        Ok(Param {
            // SAFETY: `iw_cm` gives so many private data.
            data: unsafe { copy(data, len) }?,
            ..Default::default()
        })
    };
    errno(match answer() {
        Ok(answer) => cm.reject(num, ECONNREFUSED, answer),
        Err(e) => cm.reject(num, ECONNRESET, Param::default()).and(Err(e)),
    })
}

/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn create_listen(
    id: *mut bindings::iw_cm_id,
    _backlog: c_int,
) -> c_int {
    let listen = || -> Result {
        // SAFETY: This is an operation of the id's device.
        let (shared, cm, _) = unsafe { id_parts(id) }?;
        shared.machine.lock().creations.check(Object::Listen)?;
        // SAFETY: The id is valid, as `iw_cm` calls this with it, and its address is set.
        let (addr, afonly) = unsafe { (Address((*id).local_addr), (*id).afonly()) };
        let addr = socket_addr(&addr).ok_or(EAFNOSUPPORT)?;
        let listener = Listener {
            // SAFETY: The id is valid, as `iw_cm` calls this with it.
            id: unsafe { IwId::get(NonNull::new(id).ok_or(EINVAL)?) },
            addr,
            dual_stack: !afonly && addr.is_ipv6(),
        };
        cm.conns.lock().listeners.push(listener, GFP_ATOMIC)?;
        Ok(())
    };
    errno(listen())
}

/// Stops to listen. Requests that were not answered are refused: `iw_cm` may have dropped them.
///
/// # Safety
///
/// Called by `iw_cm`, with what `struct ib_device_ops` says.
pub(crate) unsafe extern "C" fn destroy_listen(id: *mut bindings::iw_cm_id) -> c_int {
    // SAFETY: This is an operation of the id's device.
    let cm = match unsafe { id_parts(id) } {
        Ok((_, cm, _)) => cm,
        Err(e) => return e.to_errno(),
    };
    let mut conns = cm.conns.lock();
    conns.listeners.retain(|listener| !listener.id.is(id));
    conns.fail(ECONNREFUSED.to_errno(), |conn| conn.asks(id));
    cm.wake(&conns);
    0
}
