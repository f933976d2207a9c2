// SPDX-License-Identifier: GPL-2.0

//! The target: listens on the ports of nvmet, and receives, executes and answers the commands of
//! hosts.
//!
//! Functions have the names of those of drivers/nvme/target/rdma.c that do the same, without the
//! prefix. A command takes this way: [`recv_done`], [`Queue::handle_command`], [`Queue::map_sgl`],
//! [`Queue::execute_command`], nvmet, [`Target::queue_response`], [`Queue::send`], and the handler
//! of [`Response`].

use crate::{
    bindings,
    nvmet::{
        self,
        Nport,
        PortConfig,
        Request,
        Sq, //
    }, //
};
use core::net::IpAddr;
use kernel::{
    impl_has_delayed_work,
    impl_has_work,
    new_delayed_work,
    new_mutex,
    new_spinlock,
    new_spinlock_irq,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Mutex,
        SetOnce,
        SpinLock,
        SpinLockIrq,
        UniqueArc, //
    },
    time::{
        delay::fsleep,
        msecs_to_jiffies,
        Delta, //
    },
    workqueue::{
        DelayedWork,
        Work,
        WorkItem, //
    }, //
};
use rdma::{
    device::Device,
    message,
    prelude::*,
    qp::{
        self,
        Chain,
        InitAttr,
        QpContext,
        Requests,
        SendRing,
        Taken, //
    },
    session::{
        Load,
        Room,
        Sizes, //
    },
    srq::{
        Receive,
        Slot,
        Srq, //
    },
    wc::Status,
    wr::SgeList, //
};
use zerocopy::byteorder::little_endian::{
    U16,
    U64, //
};

/// The size of the pages that `sgl_alloc` allocates.
const PAGE: usize = kernel::page::PAGE_SIZE;
const DEFAULT_INLINE_DATA_SIZE: u16 = 4096;
const MAX_INLINE_DATA_SIZE: u16 = 16384;
/// The number of connections to a port that may wait to be confirmed, and that may be without a
/// controller: more than hosts that connect again in step have. C's 128 limit nothing on InfiniBand
/// and RoCE.
const BACKLOG: u32 = 1024;
const DEFAULT_QUEUE_SIZE: u16 = bindings::NVME_RDMA_DEFAULT_QUEUE_SIZE as u16;
/// The number of commands of an admin queue.
const AQ_DEPTH: u16 = bindings::NVME_AQ_DEPTH as u16;
/// The time before a port that cannot be listened on is tried again, in milliseconds.
const REPAIR_MS: u32 = 5_000;
/// The time before a connection that a handler keeps is ended again.
const PAUSE: Delta = Delta::from_secs(1);

/// The offsets of fields of a command (`struct nvme_common_command`).
const LOC_OPCODE: u16 = 0;
const LOC_DPTR: u16 = 24;

/// A status of NVMe for a command that is refused, and the offset of the field that is wrong.
type Refused = (u16, Option<u16>);

// Module and devices.

/// The module.
#[pin_data]
pub(crate) struct NvmetRdma {
    target: Arc<Target>,
    #[pin]
    transport: nvmet::Transport,
}

impl Client for NvmetRdma {
    type Data = Ndev;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        let target = Target::new();
        try_pin_init!(Self {
            target: target?,
            transport <- nvmet::Transport::new(target.clone()),
        })
    }

    /// Registers the transport, as the last step: what fails after it would unload the module while
    /// it is called.
    fn ready(self: Pin<&Self>, _client: &ClientRef, cx: &Sleepable) -> Result {
        pr_info!("T10-PI and peer-to-peer DMA are not supported\n");
        let registered = self.transport.register(cx);
        registered.inspect_err(|e| {
            if *e == EBUSY {
                pr_err!("nvmet has a transport for RDMA: unload nvmet-rdma first\n");
            }
        })
    }

    fn unload(self: Pin<&Self>, cx: &Sleepable) {
        self.transport.unregister(cx);
    }
}

/// An RDMA device (`struct nvmet_rdma_device`).
#[pin_data]
pub(crate) struct Ndev {
    target: Arc<Target>,
    #[pin]
    shared: Mutex<Shared>,
}

/// What the connections of a device share, while there are some.
struct Shared {
    /// The number of connections.
    queues: usize,
    pd: Option<Pd>,
    /// The shared receive queues, for each size of inline data.
    srqs: KVec<Srqs>,
}

/// Shared receive queues, one for each completion vector.
struct Srqs {
    inline_data_size: usize,
    /// The number of receives of each.
    size: u32,
    srqs: KVec<Srq<Command, 2>>,
}

impl DeviceData<NvmetRdma> for Ndev {
    fn add(ulp: Pin<&NvmetRdma>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        let shared = Shared {
            queues: 0,
            pd: None,
            srqs: KVec::new(),
        };
        try_pin_init!(Self {
            target: ulp.target.clone(),
            shared <- new_mutex!(shared, "nvmet_rdma::Ndev::shared"),
        })
    }

    /// Ends the connections of a device that goes (`nvmet_rdma_remove_one`). The removal waits
    /// until these have let go of it.
    fn remove(self: Pin<&Self>, _ulp: Pin<&NvmetRdma>, dev: &Device, _cx: &Sleepable) {
        (self.target).disconnect_queues(|queue| queue.id.device().is_ok_and(|it| it == dev));
    }
}

impl Ndev {
    /// Counts a connection, and returns the PD, which the first one allocates
    /// (`nvmet_rdma_find_get_device`).
    fn get(&self, dev: &Device, cx: &Sleepable) -> Result<Pd> {
        let mut shared = self.shared.lock();
        let pd = match &shared.pd {
            Some(pd) => pd.clone(),
            None => shared.pd.insert(Pd::alloc(dev, cx)?).clone(),
        };
        shared.queues = shared.queues.saturating_add(1);
        Ok(pd)
    }

    /// A connection has ended (`nvmet_rdma_free_dev`).
    fn put(&self) {
        let mut shared = self.shared.lock();
        shared.queues = shared.queues.saturating_sub(1);
        if shared.queues == 0 {
            shared.srqs = KVec::new();
            shared.pd = None;
        }
    }

    /// Returns the shared receive queue for a completion vector, and the number of its receives, if
    /// such queues are to be used, and makes them if need be (`nvmet_rdma_init_srqs`).
    fn srq(
        &self,
        pd: &Pd,
        vector: u32,
        inline_data_size: usize,
        cx: &Sleepable,
    ) -> Result<Option<(Srq<Command, 2>, u32)>> {
        let size = nvmet::srq_size();
        let attrs = pd.device().attrs();
        if size == 0 {
            return Ok(None);
        }
        if attrs.max_srq_wr == 0 || attrs.max_srq == 0 {
            rdma::pr_info_ratelimited!("SRQ requested but not supported.\n");
            return Ok(None);
        }
        let mut shared = self.shared.lock();
        let is_it = |it: &Srqs| it.inline_data_size == inline_data_size;
        if !shared.srqs.iter().any(is_it) {
            let count = pd.device().num_comp_vectors().min(attrs.max_srq);
            // The CQ of each connection has as many entries, and those of its own.
            let size = size.min(attrs.max_srq_wr).min(attrs.max_cqe / 2);
            let mut srqs = KVec::with_capacity(count as usize, GFP_KERNEL)?;
            for _ in 0..count {
                let mut bufs = CommandBufs::new(pd, size as usize, inline_data_size, cx)?;
                srqs.push(Srq::create(pd, size, |_| bufs.alloc(cx), cx)?, GFP_KERNEL)?;
            }
            let srqs = Srqs {
                inline_data_size,
                size,
                srqs,
            };
            shared.srqs.push(srqs, GFP_KERNEL)?;
        }
        let all = shared.srqs.iter().find(|it| is_it(it)).ok_or(EINVAL)?;
        let nth = (vector as usize)
            .checked_rem(all.srqs.len())
            .ok_or(EINVAL)?;
        Ok(all.srqs.get(nth).map(|srq| (srq.clone(), all.size)))
    }
}

/// The transport.
#[pin_data]
pub(crate) struct Target {
    /// The connections, until they have ended.
    #[pin]
    queues: Mutex<KVec<Arc<Queue>>>,
    /// The number of the next connection.
    next: Atomic<u32>,
}

impl Target {
    fn new() -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            queues <- new_mutex!(KVec::new(), "nvmet_rdma::queues"),
            next: Atomic::new(0),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Ends the connections that `of` selects, without waiting.
    fn disconnect_queues(&self, of: impl Fn(&Queue) -> bool) {
        for queue in self.queues.lock().iter().filter(|queue| of(queue)) {
            queue.as_arc_borrow().disconnect();
        }
    }
}

/// The operations of the transport (`struct nvmet_fabrics_ops`).
impl Target {
    /// The largest transfer, as a power of two of 4 KiB (`nvmet_rdma_get_mdts`).
    pub(crate) const MAX_MDTS: u8 = 8;
    /// The same in bytes.
    const MAX_TRANSFER: u32 = 4096 << Self::MAX_MDTS;
    /// The largest number of commands in a queue (`nvmet_rdma_get_max_queue_size`).
    pub(crate) const MAX_QUEUE_SIZE: u16 = bindings::NVME_RDMA_MAX_QUEUE_SIZE as u16;
    const MIN_QUEUE_SIZE: u16 = bindings::NVMET_MIN_QUEUE_SIZE as u16;

    /// A port is enabled (`nvmet_rdma_add_port`). nvmet holds its lock.
    pub(crate) fn add_port(
        self: &Arc<Self>,
        config: &mut PortConfig,
        cx: &Sleepable,
    ) -> Result<Arc<Port>> {
        let at_most = |what, size: Option<u16>, default, max| match size {
            None => default,
            Some(size) if size > max => {
                pr_warn!("{what} {size} is too large, reducing to {max}\n");
                max
            }
            Some(size) => size,
        };
        let inline_data_size = at_most(
            "inline_data_size",
            config.inline_data_size,
            DEFAULT_INLINE_DATA_SIZE,
            MAX_INLINE_DATA_SIZE,
        );
        let max_queue_size = at_most(
            "max_queue_size",
            config.max_queue_size,
            DEFAULT_QUEUE_SIZE,
            Self::MAX_QUEUE_SIZE,
        );
        config.inline_data_size = Some(inline_data_size);
        config.max_queue_size = Some(max_queue_size);
        let nport = config.nport.clone();
        let addr = config.addr;
        let listening = Listening {
            listener: None,
            is_removed: false,
        };
        let init = try_pin_init!(Port {
            nport,
            addr,
            inline_data_size: inline_data_size.into(),
            // As nvmet does, before it tells hosts.
            max_queue_size: max_queue_size.max(Self::MIN_QUEUE_SIZE),
            target: self.clone(),
            client: ClientRef::of::<NvmetRdma>(cx)?,
            listening <- new_mutex!(listening, "nvmet_rdma::Port::listening"),
            repair <- new_delayed_work!("nvmet_rdma::Port::repair"),
        }? Error);
        let port = Arc::pin_init(init, GFP_KERNEL)?;
        let enabled = port.enable(cx);
        enabled.inspect_err(|e| pr_err!("listening to {addr:?} failed ({e:?})\n"))?;
        pr_info!("enabling port {} ({addr:?})\n", config.id);
        Ok(port)
    }

    /// The completion of a command is written (`nvmet_rdma_queue_response`). Any context.
    #[inline]
    pub(crate) fn queue_response(mut response: Taken<Response>) {
        let Some(queue) = response.queue.take() else {
            return Response::lost(response);
        };
        // Its receive is posted before the host knows that the command was executed.
        if let Some(command) = response.request.take_command() {
            queue.post_recv(command);
        }
        let response = if response.has_places {
            Some(response)
        } else {
            queue.take_places(response, 0)
        };
        if let Some(response) = response {
            queue.send(response);
        }
    }

    /// A controller is deleted (`nvmet_rdma_delete_ctrl`). nvmet holds its locks, which connecting
    /// needs: nothing here waits.
    pub(crate) fn delete_ctrl(&self, ctrl: &nvmet::Ctrl) {
        self.disconnect_queues(|queue| queue.sq.is_of(ctrl));
    }

    /// Returns the address that a host has connected to, where that is not the one of the port
    /// (`nvmet_rdma_disc_port_addr`).
    pub(crate) fn disc_traddr(response: &Response) -> Option<IpAddr> {
        let queue = response.queue.as_ref()?;
        let (src, _) = queue.id.addrs().ok()?;
        queue.port.addr.ip().is_unspecified().then_some(src.ip())
    }

    /// Returns the address of a controller's host (`nvmet_rdma_host_port_addr`).
    pub(crate) fn host_traddr(&self, ctrl: &nvmet::Ctrl) -> Result<IpAddr> {
        let queues = self.queues.lock();
        let is_admin = |queue: &&Arc<Queue>| queue.sq.is_admin_of(ctrl);
        let (_, dst) = queues.iter().find(is_admin).ok_or(ENOTCONN)?.id.addrs()?;
        Ok(dst.ip())
    }
}

// Ports.

/// What a port listens with.
struct Listening {
    listener: Option<cm::Listener>,
    is_removed: bool,
}

/// A port (`struct nvmet_rdma_port`).
#[pin_data]
pub(crate) struct Port {
    nport: Arc<Nport>,
    addr: SocketAddr,
    inline_data_size: usize,
    max_queue_size: u16,
    target: Arc<Target>,
    pub(crate) client: ClientRef,
    #[pin]
    listening: Mutex<Listening>,
    #[pin]
    repair: DelayedWork<Self>,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self> for Port { self.repair }
}

impl WorkItem for Port {
    type Pointer = Arc<Self>;

    /// Listens again (`nvmet_rdma_repair_port_work`).
    fn run(this: Arc<Self>) {
        let Ok(cx) = Sleepable::current() else { return };
        this.disable(&cx);
        if this.enable(&cx).is_err() {
            nvmet::enqueue_delayed(this, msecs_to_jiffies(REPAIR_MS));
        }
    }
}

impl Port {
    /// Listens, unless the port was removed (`nvmet_rdma_enable_port`).
    fn enable(self: &Arc<Self>, cx: &Sleepable) -> Result {
        let mut listening = self.listening.lock();
        if !listening.is_removed {
            let listener = cm::Listener::new(&self.client, self.addr, BACKLOG, self.clone(), cx)?;
            listening.listener = Some(listener);
        }
        Ok(())
    }

    /// No longer listens, and ends the connections (`nvmet_rdma_disable_port`).
    fn disable(self: &Arc<Self>, cx: &Sleepable) {
        let mut listening = self.listening.lock();
        // Waits for the callbacks of the listener, which take neither this lock nor one of nvmet.
        // Locked meanwhile, so that a removal waits for a repair that is here.
        if let Some(Err(e)) = listening.listener.take().map(|it| it.destroy(cx)) {
            pr_err!("{:?} is still listened on ({e:?})\n", self.addr);
        }
        drop(listening);
        // No more connections come.
        (self.target).disconnect_queues(|queue| Arc::ptr_eq(&queue.port, self));
    }

    /// The port is disabled (`nvmet_rdma_remove_port`). nvmet holds its lock, which connecting
    /// needs: this does not wait for connections.
    pub(crate) fn remove(self: &Arc<Self>, cx: &Sleepable) {
        self.listening.lock().is_removed = true;
        self.disable(cx);
    }
}

impl cm::Accept for Port {
    /// A host wants to connect (`nvmet_rdma_queue_connect`).
    fn request(self: ArcBorrow<'_, Self>, request: cm::Request<'_>, cx: &Sleepable) {
        let connect = CmReq::parse(request.private_data(), self.max_queue_size);
        let initiator_depth = request.initiator_depth();
        let Ok(id) = request.into_id(cx) else { return };
        let queue = connect.and_then(|connect| {
            Queue::connect(&self.into(), &id, &connect, cx).map_err(|e| {
                rdma::pr_err_ratelimited!("creating RDMA queue failed ({e:?}).\n");
                bindings::nvme_rdma_cm_status_NVME_RDMA_CM_NO_RSC
            })
        });
        let accepted = match queue {
            Ok(queue) => queue.cm_accept(initiator_depth, cx),
            Err(status) => cm_reject(&id, status, cx),
        };
        if let Err(e) = accepted {
            rdma::pr_err_ratelimited!("a host was not answered ({e:?})\n");
        }
    }

    /// The address is at another place (`RDMA_CM_EVENT_ADDR_CHANGE`).
    fn addr_changed(self: ArcBorrow<'_, Self>) {
        nvmet::enqueue_delayed(Arc::from(self), 0);
    }

    /// The device of a listener goes, which has ended: of this one, unless it is another since.
    fn stopped(self: ArcBorrow<'_, Self>) {
        let is_over = |it: &mut cm::Listener| it.has_stopped();
        let listener = self.listening.lock().listener.take_if(is_over);
        drop(listener);
    }
}

/// The request of a host, in the private data (`struct nvme_rdma_cm_req`).
#[derive(Clone, Copy, FromBytes)]
#[repr(C)]
struct CmReq {
    recfmt: U16,
    qid: U16,
    hrqsize: U16,
    hsqsize: U16,
    cntlid: U16,
    _reserved: [u8; 22],
}

impl CmReq {
    /// Takes a request apart, and refuses one for queues that cannot be served, as those that are
    /// larger than hosts are told (`nvmet_rdma_parse_cm_connect_req`).
    fn parse(private_data: &[u8], max_queue_size: u16) -> Result<Self, u32> {
        let Ok((this, _)) = message::header::<Self>(private_data) else {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_LEN);
        };
        if u32::from(this.recfmt.get()) != bindings::nvme_rdma_cm_fmt_NVME_RDMA_CM_FMT_1_0 {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_RECFMT);
        }
        let max = match this.qid.get() {
            0 => AQ_DEPTH,
            _ => max_queue_size,
        };
        if this.hsqsize.get() >= max {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_HSQSIZE);
        }
        if this.hrqsize.get() == 0 {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_HRQSIZE);
        }
        let hrqsize = this.hrqsize.get().min(max).into();
        Ok(Self { hrqsize, ..this })
    }

    /// Returns the number of commands that the host sends at a time.
    fn recv_queue_size(&self) -> u16 {
        self.hsqsize.get().saturating_add(1)
    }

    /// Returns the number of responses that the host receives at a time, as far as it is of use.
    fn send_queue_size(&self) -> u16 {
        self.hrqsize.get()
    }
}

/// Rejects a host (`nvmet_rdma_cm_reject`).
fn cm_reject(id: &cm::Id, status: u32, cx: &Sleepable) -> Result {
    // struct nvme_rdma_cm_rej
    let mut rej = [0; 4];
    let (_recfmt, sts) = rej.split_at_mut(2);
    sts.copy_from_slice(&(status as u16).to_le_bytes());
    id.reject(&rej, cx)
}

// Queues.

/// A connection: the context of its QP, which all handlers of its completions borrow (`struct
/// nvmet_rdma_queue`).
#[pin_data]
pub(crate) struct Queue {
    id: cm::Id,
    qp: Qp<Workqueue>,
    port: Arc<Port>,
    ndev: Arc<Ndev>,
    sq: Sq,
    recv_queue_size: u16,
    sizes: Sizes,
    /// One response in so many is signaled.
    sig_limit: u32,
    /// The responses of which not all are signaled, until the connection ends.
    #[pin]
    unsignaled: SpinLockIrq<Option<SendRing<Taken<Response>>>>,
    /// The size of the largest read whose memory is kept, and the memory of those that are over.
    kept_data_size: usize,
    #[pin]
    kept: SpinLock<KVec<Buf<ToDevice>>>,
    pd: Pd,
    /// The responses. Handlers of one CQ take them, and [`Queue::reclaim`] looks through them.
    #[pin]
    responses: SpinLock<Requests<Response>>,
    /// The receives, once they are posted, unless they are those of an SRQ.
    commands: SetOnce<Requests<Command>>,
    /// The places of the send queue (`sq_wr_avail`, `rsp_wr_wait_list`).
    room: Room<Taken<Response>>,
    /// Set once the connection is to end.
    is_ending: Atomic<bool>,
    client: ClientRef,
    #[pin]
    release: Work<Self>,
}

/// The context that handlers run in.
type InQueue = QpContext<Queue, Sleepable>;

impl_has_work! {
    impl HasWork<Self> for Queue { self.release }
}

impl WorkItem for Queue {
    type Pointer = Arc<Self>;

    /// Ends a connection (`nvmet_rdma_release_queue_work`).
    fn run(this: Arc<Self>) {
        let Ok(cx) = Sleepable::current() else { return };
        while let Err(e) = this.free(&cx) {
            rdma::pr_err_ratelimited!("a handler of a connection has not returned: {e:?}\n");
            // The QP still has its context, which only this takes.
            fsleep(PAUSE);
        }
        let mut was_listed = false;
        this.port.target.queues.lock().retain(|queue| {
            let is_this = Arc::ptr_eq(queue, &this);
            was_listed |= is_this;
            !is_this
        });
        if was_listed {
            this.ndev.put();
        }
        // This waits for commands whose data do not come before the QP ends.
        let destroy_sq = this.sq.destroyer();
        drop(this);
        destroy_sq(&cx);
    }
}

/// The handler of the events of a QP (`nvmet_rdma_qp_event`).
struct QpEvents(cm::Id);

impl qp::Events for QpEvents {
    fn event(self: ArcBorrow<'_, Self>, event: qp::Event, _num: u32, _cx: &context::Atomic) {
        match event {
            qp::Event::COMM_EST => self.0.notify_established(),
            // A response that is not signaled may have failed, and an SRQ flushes no receive.
            qp::Event::LAST_WQE_REACHED => self.0.disconnect_later(),
            _ => rdma::pr_err_ratelimited!("received IB QP event: {event}\n"),
        }
    }
}

impl cm::Handler for Queue {
    /// An event of the connection (`nvmet_rdma_cm_handler`). Commands are handled from the first
    /// on, which may come before the event that the connection is established.
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if event.is_last() || matches!(event, cm::Event::AddrChange) {
            self.disconnect();
        }
    }
}

impl Queue {
    /// Makes the queue of a connection, which is listed, and posts its receives.
    fn connect(port: &Arc<Port>, id: &cm::Id, req: &CmReq, cx: &Sleepable) -> Result<Arc<Self>> {
        let dev = id.device()?;
        let ndev = dev.data::<NvmetRdma>(cx).ok_or(ENODEV)?;
        let pd = ndev.get(dev, cx)?;
        let listed = Self::alloc(port, id, req, &ndev, &pd, cx).and_then(|(queue, commands)| {
            // Who finds it in the list may end it at once, and so take the context.
            let mut queues = port.target.queues.lock();
            queues.reserve(1, GFP_KERNEL)?;
            queue.qp.set_context(queue.clone(), cx)?;
            queues.push_within_capacity(queue.clone())?;
            Self::end_idle(&queues, port);
            Ok((queue, commands))
        });
        let (queue, commands) = listed.inspect_err(|_| ndev.put())?;
        // The host may send commands before the connection is accepted.
        if let Some(mut commands) = commands {
            for command in commands.idle() {
                queue.post_recv(Recv::Own(command));
            }
            queue.commands.populate(commands);
        }
        Ok(queue)
    }

    /// Ends the connection to a port that is without a controller for longest, if there are too
    /// many: a host that sends no Connect command keeps the memory of its queue.
    fn end_idle(queues: &[Arc<Self>], port: &Arc<Port>) {
        let mut idle = queues.iter().filter(|queue| {
            Arc::ptr_eq(&queue.port, port)
                && !queue.sq.is_connected()
                && !queue.is_ending.load(Relaxed)
        });
        if idle.clone().count() > BACKLOG as usize {
            if let Some(oldest) = idle.next() {
                rdma::pr_err_ratelimited!("a host has sent no Connect command\n");
                oldest.as_arc_borrow().disconnect();
            }
        }
    }

    /// Makes the CQ and the QP of a connection (`nvmet_rdma_create_queue_ib`), on an SRQ, of which
    /// there is the number of receives, if one is given.
    fn create_queue_ib(
        id: &cm::Id,
        pd: &Pd,
        vector: u32,
        srq: Option<&(Srq<Command, 2>, u32)>,
        sizes: &Sizes,
        cx: &Sleepable,
    ) -> Result<Qp<Workqueue>> {
        let of_srq = srq.map_or(0, |(_, size)| *size);
        let entries = sizes.entries.saturating_add(of_srq);
        let cq = Cq::<Workqueue>::alloc(pd.device(), entries, vector, cx)?;
        let init = match srq {
            Some((srq, _)) => InitAttr::on_srq(pd, &cq, srq, &sizes.caps),
            None => InitAttr::new(pd, &cq, &cq, &sizes.caps),
        };
        init.rw_contexts(sizes.rw_contexts, 1)
            .events(Arc::new(QpEvents(id.clone()), GFP_KERNEL)?)
            .create_for(id, cx)
    }

    /// Allocates the queue of a connection, and its receives (`nvmet_rdma_alloc_queue`).
    fn alloc(
        port: &Arc<Port>,
        id: &cm::Id,
        req: &CmReq,
        ndev: &Arc<Ndev>,
        pd: &Pd,
        cx: &Sleepable,
    ) -> Result<(Arc<Self>, Option<Requests<Command>>)> {
        // First, so that there is little to drop where a step fails.
        let queue = UniqueArc::new_uninit(GFP_KERNEL)?;
        let sq = Sq::new(&port.nport, cx)?;
        let dev = pd.device();
        let host_qid = req.qid.get();
        // I/O queues are spread across completion vectors, admin queues are on vector 0.
        let vector = match host_qid {
            0 => 0,
            _ => {
                let idx = port.target.next.fetch_add(1, Relaxed);
                idx.checked_rem(dev.num_comp_vectors()).unwrap_or(0)
            }
        };
        let inline_data_size = match host_qid {
            0 => 0,
            _ => port.inline_data_size,
        };
        let srq = ndev.srq(pd, vector, port.inline_data_size, cx)?;
        let sizes = Self::sizes(dev, req, srq.is_some())?;
        let qp = Self::create_queue_ib(id, pd, vector, srq.as_ref(), &sizes, cx)?;
        // The responses that the host may have got before their SENDs have completed here.
        let sent = req.send_queue_size().max(AQ_DEPTH);
        let kept_data_size = match host_qid {
            0 => 0,
            _ => nvmet::kept_data_size() as usize,
        };
        let sig_limit = match host_qid {
            0 => 1,
            // As `SendRing` demands, at most half of the responses.
            _ => Self::sig_limit(&sizes, kept_data_size).min(sent),
        };
        // With them it has got those that the next signaled one completes.
        let unacknowledged = sent.saturating_add(sig_limit.saturating_sub(1));
        let count = req.recv_queue_size().saturating_add(unacknowledged);
        let mut cqes = Bufs::new(pd, count.into(), nvmet::COMPLETION, cx)?;
        let alloc_rsp = |_| Response::alloc(cqes.take(cx));
        let responses = Requests::new(&qp, count.into(), alloc_rsp, cx)?;
        let recvs = req.recv_queue_size().into();
        let commands = match &srq {
            Some(_) => None,
            None => {
                let mut bufs = CommandBufs::new(pd, recvs, inline_data_size, cx)?;
                Some(Requests::new(&qp, recvs, |_| bufs.alloc(cx), cx)?)
            }
        };
        let unsignaled = match sig_limit {
            1 => None,
            _ => Some(SendRing::new(&qp, count.into(), sig_limit.into(), cx)?),
        };
        let keeps = if kept_data_size == 0 { 0 } else { count };
        let kept = KVec::with_capacity(keeps.into(), GFP_KERNEL)?;
        let room = Room::new(&qp, sizes.places, count.into(), cx)?;
        let Ok(queue) = queue.pin_init_with(pin_init!(Self {
            id: id.clone(),
            qp,
            port: port.clone(),
            ndev: ndev.clone(),
            sq,
            recv_queue_size: req.recv_queue_size(),
            sizes,
            sig_limit: sig_limit.into(),
            unsignaled <- new_spinlock_irq!(unsignaled, "nvmet_rdma::Queue::unsignaled"),
            kept_data_size,
            kept <- new_spinlock!(kept, "nvmet_rdma::Queue::kept"),
            pd: pd.clone(),
            responses <- new_spinlock!(responses, "nvmet_rdma::Queue::responses"),
            commands: SetOnce::new(),
            room,
            is_ending: Atomic::new(false),
            client: port.client.clone(),
            release <- new_work!("nvmet_rdma::Queue::release"),
        }));
        Ok((queue.into(), commands))
    }

    /// Returns the sizes of the queues, and of what a command takes of them.
    fn sizes(dev: &Device, req: &CmReq, on_srq: bool) -> Result<Sizes> {
        let load = Load {
            requests: req.recv_queue_size().into(),
            at_once: 1,
            sends: 1,
            transfers: 1,
            pages: 1 << Target::MAX_MDTS,
            send_sge: dev.attrs().max_send_sge,
            recvs: if on_srq {
                0
            } else {
                req.recv_queue_size().into()
            },
            recv_sge: 2,
            ..Load::NONE
        };
        let sizes = |load| {
            let sizes = Sizes::new(dev, 1, load);
            sizes.inspect_err(|misfit| rdma::pr_err_ratelimited!("{dev}: {misfit}\n"))
        };
        // Twice as many work requests as responses, as C: commands wait for room.
        let each = sizes(&load)?.transfer(load.pages).saturating_add(1);
        let all = u32::from(req.send_queue_size()).saturating_mul(2);
        // A command of the admin queue that waits for an event keeps its place.
        let least = if req.qid.get() == 0 { 2 } else { 1 };
        let at_once = all.checked_div(each).unwrap_or(least).max(least);
        Ok(sizes(&Load { at_once, ..load })?)
    }

    /// Returns the number of responses of which one is signaled. The others keep their places until
    /// then: as many are left as the largest transfer takes, or a command would wait for ever.
    fn sig_limit(sizes: &Sizes, kept_data_size: usize) -> u16 {
        let places = |len: usize| {
            let pages = len.div_ceil(PAGE) as u32;
            sizes.transfer(pages).saturating_add(1)
        };
        let left = (sizes.places).saturating_sub(places(Target::MAX_TRANSFER as usize));
        let most = left.checked_div(places(kept_data_size)).unwrap_or(0);
        // The parameter is 128 at most.
        nvmet::sig_limit().min(most.saturating_add(1)) as u16
    }

    /// Accepts the connection (`nvmet_rdma_cm_accept`). If that fails, it ends.
    fn cm_accept(self: Arc<Self>, initiator_depth: u8, cx: &Sleepable) -> Result {
        // struct nvme_rdma_cm_rep
        let mut rep = [0; 32];
        for (to, from) in rep
            .iter_mut()
            .skip(2)
            .zip(self.recv_queue_size.to_le_bytes())
        {
            *to = from;
        }
        let most = self.pd.device().attrs().max_qp_init_rd_atom;
        let most = u8::try_from(most).unwrap_or(u8::MAX);
        let param = cm::ConnParam {
            private_data: &rep,
            // A host reads no memory of the target.
            responder_resources: 0,
            initiator_depth: initiator_depth.min(most),
            ..Default::default()
        };
        let accepted = self.id.accept(self.clone(), &param, cx);
        // Not here: the drain waits for handlers, in the way of all callbacks.
        accepted.inspect_err(|_| self.as_arc_borrow().disconnect())
    }

    /// Ends the connection, from a work item (`nvmet_rdma_queue_disconnect`). Any context.
    fn disconnect(self: ArcBorrow<'_, Self>) {
        if !self.is_ending.xchg(true, Relaxed) {
            let _ = self.client.enqueue(Arc::from(self));
        }
    }

    /// Ends the connection (`nvmet_rdma_free_queue`, `nvmet_rdma_destroy_queue_ib`): commands are
    /// parsed until the QP is drained, and executed until the submission queue is destroyed. Their
    /// responses are flushed until the QP, drained again, loses its context, which owns it. A QP
    /// that is not drained loses it too, and gives back what it has when it is destroyed; what is
    /// in the ring of responses is dropped then.
    fn free(&self, cx: &Sleepable) -> Result {
        self.id.release_handler(cx);
        // The drain flushes the QP where there is no connection.
        let _ = self.id.disconnect(cx);
        self.room.close(ENOTCONN, |mut response| response.put());
        let drained = self.drain(cx);
        // One that was being accepted has got it meanwhile.
        self.id.release_handler(cx);
        self.reclaim();
        let cleared = drained.and_then(|()| {
            self.sq.destroy(cx);
            self.qp.clear_context(cx)
        });
        cleared.or_else(|e| {
            rdma::pr_err_ratelimited!("a connection was not drained: {e:?}\n");
            self.qp.release_context(cx)
        })?;
        self.reclaim();
        Ok(())
    }

    /// Drains the QP, and ends the responses that have no completion. From here on each is
    /// signaled.
    fn drain(&self, cx: &Sleepable) -> Result {
        let unsignaled = self.unsignaled.lock().take();
        let Some(mut unsignaled) = unsignaled else {
            return self.qp.drain(cx);
        };
        let drained = unsignaled.reclaim(&self.qp, cx, |mut response| response.put());
        if drained.is_err() {
            // This may be called again. If not, the QP drops them at its end.
            *self.unsignaled.lock() = Some(unsignaled);
        }
        drained
    }

    /// Ends what is left of responses that the QP has dropped (`nvmet_rdma_reclaim_rsp`).
    fn reclaim(&self) {
        for mut response in self.responses.lock().idle() {
            response.put();
        }
    }

    /// A peer or a device has failed (`nvmet_rdma_error_comp`).
    #[cold]
    fn error_comp(self: ArcBorrow<'_, Self>, cx: &Sleepable) {
        if !self.sq.fatal_error(cx) {
            // There is no controller yet.
            self.disconnect();
        }
    }

    /// A request has failed. One that was flushed is no error of its own, but the connection is
    /// over: an RDMA WRITE that has failed is not signaled, and flushes the response behind it.
    #[cold]
    fn failed(self: ArcBorrow<'_, Self>, what: &str, e: &WcError, cx: &Sleepable) {
        if e.status == Status::WR_FLUSH_ERR {
            return self.disconnect();
        }
        rdma::pr_err_ratelimited!("{what} failed with status {}\n", e.status);
        self.error_comp(cx);
    }
}

// Commands.

/// The memory of a command, and of the data that come with it (`struct nvmet_rdma_cmd`), for a
/// receive of a queue or of an SRQ.
#[derive(HasCqe)]
pub(crate) struct Command {
    cqe: Cqe<Self>,
    pub(crate) capsule: Buf<FromDevice>,
    pub(crate) inline: Option<Buf<FromDevice>>,
}

/// The memory of commands that are made together.
struct CommandBufs {
    capsules: Bufs<FromDevice>,
    inline: Option<Bufs<FromDevice>>,
}

impl CommandBufs {
    fn new(pd: &Pd, count: usize, inline_data_size: usize, cx: &Sleepable) -> Result<Self> {
        Ok(Self {
            capsules: Bufs::new(pd, count, nvmet::COMMAND, cx)?,
            inline: match inline_data_size {
                0 => None,
                // Disks may want blocks to be aligned to their size, up to a page.
                size => {
                    let align = size.min(PAGE).next_power_of_two();
                    Some(Bufs::aligned(pd, count, size, align, cx)?)
                }
            },
        })
    }

    /// Makes the next command (`nvmet_rdma_alloc_cmd`).
    fn alloc(&mut self, cx: &Sleepable) -> Result<Command> {
        Ok(Command {
            cqe: Cqe::new(),
            capsule: self.capsules.take(cx)?,
            inline: match &mut self.inline {
                None => None,
                Some(inline) => Some(inline.take(cx)?),
            },
        })
    }
}

impl Command {
    /// Describes the receive.
    #[inline]
    fn wr(&self) -> RecvWr<'_, 2> {
        let mut sges = SgeList::new(self.capsule.whole_mut());
        if let Some(inline) = &self.inline {
            // There is room for two.
            let _ = sges.push(inline.whole_mut());
        }
        RecvWr::new(sges)
    }
}

/// A command that was received.
pub(crate) enum Recv {
    /// By a receive of the queue, which is posted again.
    Own(Taken<Command>),
    /// By one of an SRQ, which is posted again when this is dropped.
    Shared(Slot<Command, 2>),
}

impl Recv {
    /// Returns the memory of the command.
    #[inline]
    pub(crate) fn command(&mut self) -> &mut Command {
        match self {
            Self::Own(command) => command,
            Self::Shared(command) => command,
        }
    }
}

impl CqeHandler for Command {
    type Pointer = Taken<Self>;
    type Needs = InQueue;

    fn done(this: Self::Pointer, wc: &Wc, cx: &InQueue) {
        recv_done(Recv::Own(this), wc, cx);
    }
}

impl Receive<2> for Command {
    type Needs = InQueue;

    fn recv(&self) -> RecvWr<'_, 2> {
        self.wr()
    }

    fn done(slot: Slot<Self, 2>, wc: &Wc, cx: &InQueue) {
        recv_done(Recv::Shared(slot), wc, cx);
    }
}

/// A command was received (`nvmet_rdma_recv_done`).
#[inline]
fn recv_done(command: Recv, wc: &Wc, cx: &InQueue) {
    let Some(queue) = cx.get_arc() else { return };
    let len = match wc.result() {
        // Nothing was put into the buffer of one that has come with an RDMA WRITE.
        Ok(wc) if wc.opcode() == Opcode::Recv => wc.byte_len(),
        Ok(_) => 0,
        Err(e) => return queue.failed("RECV", &e, cx),
    };
    if len < nvmet::COMMAND {
        rdma::pr_err_ratelimited!("Ctrl Fatal Error: capsule size less than 64 bytes\n");
        return queue.error_comp(cx);
    }
    let response = queue.responses.lock().take();
    let Some(mut response) = response else {
        rdma::pr_err_ratelimited!("a host has sent more commands than its queue has\n");
        return queue.error_comp(cx);
    };
    response.start(queue.into());
    queue.handle_command(response, command, len, cx);
}

/// The first fields of a command (`struct nvme_common_command`, `struct nvmf_common_command`).
#[derive(Clone, Copy, FromBytes)]
#[repr(C)]
struct CommandHeader {
    opcode: u8,
    _flags: u8,
    _command_id: U16,
    fctype: u8,
    _reserved: [u8; 19],
    /// The descriptor of the data (`struct nvme_sgl_desc`, `struct nvme_keyed_sgl_desc`).
    dptr: [U64; 2],
}

impl CommandHeader {
    /// Returns whether the host sends the data (`nvme_is_write`).
    #[inline]
    fn is_write(&self) -> bool {
        const FABRICS: u8 = bindings::nvmf_fabrics_opcode_nvme_fabrics_command as u8;
        let kind = match self.opcode {
            FABRICS => self.fctype,
            opcode => opcode,
        };
        kind & 1 != 0
    }
}

const DNR: u32 = bindings::NVME_STATUS_DNR;
const INTERNAL: u16 = bindings::NVME_SC_INTERNAL as u16;
const INVALID_FIELD: u16 = (bindings::NVME_SC_INVALID_FIELD | DNR) as u16;
const SGL_INVALID_OFFSET: u16 = (bindings::NVME_SC_SGL_INVALID_OFFSET | DNR) as u16;
const SGL_INVALID_TYPE: u16 = (bindings::NVME_SC_SGL_INVALID_TYPE | DNR) as u16;

impl Queue {
    /// Posts a receive again (`nvmet_rdma_post_recv`). Any context.
    #[inline(always)]
    fn post_recv(self: &Arc<Self>, command: Recv) {
        // One of an SRQ is posted when it is dropped.
        if let Recv::Own(command) = command {
            if let Err(e) = self.qp.post_recv(command, |c: &Command| Ok(c.wr())) {
                rdma::pr_err_ratelimited!("post_recv cmd failed ({:?})\n", e.error());
                self.as_arc_borrow().disconnect();
            }
        }
    }

    /// Handles a command, of which `len` bytes have come (`nvmet_rdma_handle_command`).
    #[inline]
    fn handle_command(
        self: ArcBorrow<'_, Self>,
        response: Taken<Response>,
        command: Recv,
        len: usize,
        cx: &Sleepable,
    ) {
        let mut response = match Request::init(response, command, len, &self.sq, cx) {
            Ok(Some(response)) => response,
            Ok(None) => return,
            Err(mut response) => {
                response.put();
                return self.disconnect();
            }
        };
        match self.map_sgl(&mut response) {
            Ok(()) => {
                let n_rdma = response.n_rdma;
                if let Some(response) = self.take_places(response, n_rdma) {
                    self.execute_command(response, cx);
                }
            }
            Err((status, error_loc)) => Request::complete(response, status, error_loc),
        }
    }

    /// Takes the data of a command apart (`nvmet_rdma_map_sgl`).
    #[inline]
    fn map_sgl(&self, response: &mut Response) -> Result<(), Refused> {
        const DATA: u8 = bindings::NVME_SGL_FMT_DATA_DESC as u8;
        const KEYED: u8 = bindings::NVME_KEY_SGL_FMT_DATA_DESC as u8;
        const OFFSET: u8 = bindings::NVME_SGL_FMT_OFFSET as u8;
        const ADDRESS: u8 = bindings::NVME_SGL_FMT_ADDRESS as u8;
        const INVALIDATE: u8 = ADDRESS | bindings::NVME_SGL_FMT_INVALIDATE as u8;

        let command = response.request.command().ok_or((INTERNAL, None))?;
        let header = message::header::<CommandHeader>(command);
        let (header, _) = header.map_err(|_| (INTERNAL, None))?;
        let (is_write, [addr, rest]) = (header.is_write(), header.dptr.map(U64::get));
        let kind = (rest >> 56) as u8;
        match (kind >> 4, kind & 0xf) {
            (DATA, OFFSET) => {
                let len = rest as u32;
                self.map_sgl_inline(response, is_write, addr, len)
            }
            (KEYED, subtype @ (ADDRESS | INVALIDATE)) => {
                let len = rest as u32 & 0xff_ffff;
                let rkey = (rest >> 24) as u32;
                let remote = Remote { addr, rkey };
                self.map_sgl_keyed(response, is_write, remote, len)?;
                // Zero is the key of nothing.
                if subtype == INVALIDATE && len != 0 && rkey != 0 {
                    response.invalidate_rkey = Some(rkey);
                }
                Ok(())
            }
            (DATA | KEYED, _) => {
                rdma::pr_err_ratelimited!("invalid SGL subtype: {kind:#x}\n");
                Err((INVALID_FIELD, Some(LOC_DPTR)))
            }
            _ => {
                rdma::pr_err_ratelimited!("invalid SGL type: {kind:#x}\n");
                Err((SGL_INVALID_TYPE, Some(LOC_DPTR)))
            }
        }
    }

    /// Data that have come with the command (`nvmet_rdma_map_sgl_inline`).
    fn map_sgl_inline(
        &self,
        response: &mut Response,
        is_write: bool,
        offset: u64,
        len: u32,
    ) -> Result<(), Refused> {
        if !is_write {
            return Err((INVALID_FIELD, Some(LOC_OPCODE)));
        }
        let offset = usize::try_from(offset).map_err(Error::from);
        let used = offset.and_then(|offset| match len {
            0 if offset <= self.port.inline_data_size => Ok(()),
            // Only bytes that were received.
            _ => response.request.use_inline_sg(offset, len),
        });
        used.map_err(|_| {
            rdma::pr_err_ratelimited!("invalid inline data offset!\n");
            (SGL_INVALID_OFFSET, None)
        })
    }

    /// Data in the memory of the host (`nvmet_rdma_map_sgl_keyed`). Their pages are allocated when
    /// the send queue has room for the transfer.
    #[inline]
    fn map_sgl_keyed(
        &self,
        response: &mut Response,
        is_write: bool,
        remote: Remote,
        len: u32,
    ) -> Result<(), Refused> {
        if len == 0 {
            return Ok(());
        }
        if len > Target::MAX_TRANSFER {
            rdma::pr_err_ratelimited!("a transfer of {len} bytes is larger than MDTS\n");
            return Err((INVALID_FIELD, Some(LOC_DPTR)));
        }
        response.data = if is_write { Data::In } else { Data::Out };
        (response.remote, response.len) = (remote, len);
        response.n_rdma = self.sizes.transfer((len as usize).div_ceil(PAGE) as u32);
        Ok(())
    }

    /// Takes the places of a response, and of its transfer, in the send queue. `None` if it waits
    /// for them, or if the connection has ended. Any context.
    #[inline]
    fn take_places(&self, mut response: Taken<Response>, n_rdma: u32) -> Option<Taken<Response>> {
        response.n_rdma = n_rdma;
        response.has_places = true;
        match self.room.take(n_rdma.saturating_add(1), response) {
            Ok(response) => response,
            Err(e) => {
                // Unless the room is closed, this driver errs, and the host would wait for long.
                if e.error() != ENOTCONN {
                    self.id.disconnect_later();
                }
                if let Some(mut response) = e.owner {
                    response.put();
                }
                None
            }
        }
    }

    /// Gives places back, and resumes the responses that have waited for them
    /// (`nvmet_rdma_process_wr_wait_list`).
    #[inline]
    fn give_places(self: ArcBorrow<'_, Self>, count: u32, cx: &Sleepable) {
        self.room.give(count, |response| {
            if response.request.status().is_some() {
                self.send(response);
            } else {
                self.execute_command(response, cx);
            }
        });
    }

    /// Executes a command that has its places, after its data were read
    /// (`nvmet_rdma_execute_command`).
    #[inline]
    fn execute_command(&self, response: Taken<Response>, cx: &Sleepable) {
        match response.data {
            Data::None => Request::execute(response, cx),
            Data::In | Data::Out => self.execute_keyed(response, cx),
        }
    }

    /// As [`Queue::execute_command`], with data in the memory of the host.
    #[inline(never)]
    fn execute_keyed(&self, mut response: Taken<Response>, cx: &Sleepable) {
        let remote = response.remote;
        let len = response.len;
        if response.data == Data::Out && len as usize <= self.kept_data_size {
            let used = (self.take_kept(cx)).and_then(|buf| response.request.use_kept(buf, len));
            return match used {
                Ok(()) => Request::execute(response, cx),
                Err(_) => Request::complete(response, INTERNAL, None),
            };
        }
        if response.request.alloc_sgls(len).is_err() {
            return Request::complete(response, INTERNAL, None);
        }
        if response.data == Data::Out {
            // It is posted where one cannot sleep.
            return match self.qp.prepare_rw(response.request.write(remote, cx)) {
                Ok(()) => Request::execute(response, cx),
                Err(_) => Request::complete(response, INTERNAL, None),
            };
        }
        // What is posted does not keep the queue, which keeps the QP.
        let queue = response.queue.take();
        let posted = self.qp.post_rw(response, |response: &Response| {
            Ok(response.request.read(remote, cx).done_by::<1>())
        });
        match posted.map_err(|e| e.owner) {
            Ok(()) => {}
            Err(Some(mut response)) => {
                response.queue = queue;
                let status = bindings::NVME_SC_DATA_XFER_ERROR as u16;
                Request::complete(response, status, None);
            }
            // The QP has the response until it is drained.
            Err(None) => self.id.disconnect_later(),
        }
    }

    /// Sends a response that has its places, behind its data (`nvmet_rdma_queue_response`). Any
    /// context.
    #[inline]
    fn send(&self, response: Taken<Response>) {
        let posted = match response.data {
            Data::Out if response.request.status() == Some(0) => {
                let remote = response.remote;
                match response.request.kept() {
                    Some(_) => self.post(response, Some(remote)),
                    None => self.qp.post_rw(response, |response: &Response| {
                        Ok(response.request.prepared().then(response.send_wr()))
                    }),
                }
            }
            // The others have pages, which are to be freed.
            Data::None if self.sig_limit > 1 => self.post(response, None),
            _ => self
                .qp
                .post_send(response, |response: &Response| Ok(response.send_wr())),
        };
        if let Err(e) = posted {
            rdma::pr_err_ratelimited!("sending cmd response failed ({:?})\n", e.error());
            if let Some(mut response) = e.owner {
                response.put();
            }
            self.id.disconnect_later();
        }
    }
}

impl Queue {
    /// Posts a response that has no pages of nvmet, behind its data if there are some, and has it
    /// signaled if it is its turn.
    #[inline]
    fn post(
        &self,
        response: Taken<Response>,
        data: Option<Remote>,
    ) -> Result<(), PostError<Taken<Response>>> {
        if self.sig_limit > 1 {
            // The order of the ring is that of the send queue.
            if let Some(unsignaled) = &mut *self.unsignaled.lock() {
                return unsignaled.post(
                    &self.qp,
                    response,
                    |response, chain: &mut Chain<'_, 2>| response.chain(data, chain),
                );
            }
        }
        (self.qp).post_chain(response, |response: &Response, chain: &mut Chain<'_, 2>| {
            response.chain(data, chain)
        })
    }

    /// Returns memory for a read that is not larger than those that are kept.
    #[inline]
    fn take_kept(&self, cx: &Sleepable) -> Result<Buf<ToDevice>> {
        let kept = self.kept.lock().pop();
        match kept {
            Some(buf) => Ok(buf),
            None => Buf::alloc(&self.pd, self.kept_data_size, cx),
        }
    }

    /// Keeps the memory of a read that is over.
    #[inline]
    fn keep(&self, buf: Buf<ToDevice>) {
        // There is room for those of all responses.
        let _ = self.kept.lock().push_within_capacity(buf);
    }
}

// Responses.

/// The data of a command that are not in the receive.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    None,
    /// The host's, which are read from there.
    In,
    /// Data for the host, which are written there.
    Out,
}

/// A response (`struct nvmet_rdma_rsp`), with the request of nvmet.
#[derive(HasCqe)]
pub(crate) struct Response {
    send_cqe: Cqe<Self>,
    read_cqe: Cqe<Self, 1>,
    pub(crate) request: Request,
    /// The queue, while the response is not posted and until nvmet has completed the command.
    queue: Option<Arc<Queue>>,
    data: Data,
    /// The place of the data in the host's memory, and their length, if there are some.
    remote: Remote,
    len: u32,
    /// The number of work requests of the transfer, at the most.
    n_rdma: u32,
    has_places: bool,
    invalidate_rkey: Option<u32>,
}

impl Response {
    fn alloc(cqe: Result<Buf<ToDevice>>) -> impl Init<Self, Error> {
        try_init!(Self {
            send_cqe: Cqe::new(),
            read_cqe: Cqe::new(),
            request <- Request::new(cqe),
            queue: None,
            data: Data::None,
            remote: Remote { addr: 0, rkey: 0 },
            len: 0,
            n_rdma: 0,
            has_places: false,
            invalidate_rkey: None,
        }? Error)
    }

    #[inline]
    fn start(&mut self, queue: Arc<Queue>) {
        self.queue = Some(queue);
        self.data = Data::None;
        self.n_rdma = 0;
        self.has_places = false;
        self.invalidate_rkey = None;
    }

    /// Describes the response.
    #[inline]
    fn send_wr(&self) -> SendWr<'_> {
        let send = SendWr::send([self.request.cqe()]);
        match self.invalidate_rkey {
            Some(rkey) => send.invalidating(rkey),
            None => send,
        }
    }

    /// Adds the response to a chain, behind its data if these are kept.
    #[inline]
    fn chain<'a>(&'a self, data: Option<Remote>, chain: &mut Chain<'a, 2>) -> Result {
        if let Some(remote) = data {
            let kept = self.request.kept().ok_or(EINVAL)?;
            chain.push(SendWr::rdma_write([kept], remote))?;
        }
        chain.push(self.send_wr())
    }

    /// Ends all use of the response (`nvmet_rdma_release_rsp`).
    #[inline]
    fn release(&mut self) {
        self.request.release();
        self.queue = None;
    }

    /// Keeps the memory of a read that is over, if it had some of those that are kept.
    #[inline(never)]
    fn keep_data(&mut self, queue: &Queue) {
        if let Some(kept) = self.request.take_kept() {
            queue.keep(kept);
        }
    }

    /// Ends a response that was used in another order than is right, and so its connection.
    #[cold]
    pub(crate) fn lost(mut response: Taken<Self>) {
        rdma::pr_err_ratelimited!("a response is lost by an error of this driver\n");
        if let Some(queue) = &response.queue {
            queue.id.disconnect_later();
        }
        response.put();
    }

    /// As [`Response::release`], of one that is not sent: one copy for all of these.
    #[cold]
    fn put(&mut self) {
        self.release();
    }
}

impl CqeHandler for Response {
    type Pointer = Taken<Self>;
    type Needs = InQueue;

    /// The response was sent (`nvmet_rdma_send_done`).
    fn done(mut this: Self::Pointer, wc: &Wc, cx: &InQueue) {
        let places = this.n_rdma.saturating_add(1);
        this.release();
        let Some(queue) = cx.get_arc() else { return };
        if queue.kept_data_size != 0 {
            this.keep_data(&queue);
        }
        drop(this);
        queue.give_places(places, cx);
        if let Err(e) = wc.result() {
            queue.failed("SEND", &e, cx);
        }
    }
}

impl CqeHandler<1> for Response {
    type Pointer = Taken<Self>;
    type Needs = InQueue;

    /// The data of the host have come (`nvmet_rdma_read_data_done`).
    fn done(mut this: Self::Pointer, wc: &Wc, cx: &InQueue) {
        let Some(queue) = cx.get_arc() else {
            return this.put();
        };
        let n_rdma = core::mem::replace(&mut this.n_rdma, 0);
        match wc.result() {
            Ok(_) => {
                this.queue = Some(queue.into());
                Request::execute(this, cx);
                queue.give_places(n_rdma, cx);
            }
            Err(e) => {
                this.put();
                drop(this);
                queue.give_places(n_rdma.saturating_add(1), cx);
                queue.failed("RDMA READ", &e, cx);
            }
        }
    }
}
