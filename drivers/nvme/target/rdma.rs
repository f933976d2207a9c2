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
    new_work,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Mutex,
        SpinLock, //
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
        InitAttr,
        QpContext,
        Requests,
        Taken, //
    },
    rw::Rw,
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
use zerocopy::byteorder::little_endian::U16;

/// The page size of NVMe, and of `nvmet_req_alloc_sgls`.
const PAGE: usize = kernel::page::PAGE_SIZE;
const DEFAULT_INLINE_DATA_SIZE: u16 = 4096;
const MAX_INLINE_DATA_SIZE: u16 = 16384;
const BACKLOG: u32 = 128;
const DEFAULT_QUEUE_SIZE: u16 = bindings::NVME_RDMA_DEFAULT_QUEUE_SIZE as u16;
/// The number of commands of an admin queue.
const AQ_DEPTH: u16 = bindings::NVME_AQ_DEPTH as u16;
/// The time before a port that cannot be listened on is tried again, in milliseconds.
const REPAIR_MS: u32 = 5_000;
/// The time before a connection that was not drained is ended again.
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
    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        pr_info!("T10-PI and peer-to-peer DMA are not supported\n");
        let registered = self.transport.register(client, cx);
        registered
            .inspect_err(|_| pr_err!("nvmet has a transport for RDMA: unload nvmet-rdma first\n"))
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
        let (size, attrs) = (nvmet::srq_size(), pd.device().attrs());
        if size == 0 {
            return Ok(None);
        }
        if attrs.max_srq_wr == 0 || attrs.max_srq == 0 {
            pr_info!("SRQ requested but not supported.\n");
            return Ok(None);
        }
        let mut shared = self.shared.lock();
        let is_it = |it: &Srqs| it.inline_data_size == inline_data_size;
        if !shared.srqs.iter().any(is_it) {
            let count = pd.device().num_comp_vectors().min(attrs.max_srq);
            let size = size.min(attrs.max_srq_wr);
            let mut srqs = KVec::with_capacity(count as usize, GFP_KERNEL)?;
            for _ in 0..count {
                let alloc_cmd = |_| Command::alloc(pd, inline_data_size, cx);
                srqs.push(Srq::create(pd, size, alloc_cmd, cx)?, GFP_KERNEL)?;
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
    /// The largest number of commands in a queue (`nvmet_rdma_get_max_queue_size`).
    pub(crate) const MAX_QUEUE_SIZE: u16 = bindings::NVME_RDMA_MAX_QUEUE_SIZE as u16;

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
        let mdts = config
            .mdts
            .map_or(Self::MAX_MDTS, |mdts| mdts.min(Self::MAX_MDTS));
        let (nport, addr) = (config.nport.clone(), config.addr);
        let listening = Listening {
            listener: None,
            is_removed: false,
        };
        let init = try_pin_init!(Port {
            nport,
            addr,
            inline_data_size: inline_data_size.into(),
            max_transfer: 4096_usize.checked_shl(mdts.into()).ok_or(EINVAL)?,
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
            return;
        };
        // Its receive is posted before the host knows that the command was executed.
        if let Some(command) = response.request.take_command() {
            queue.post_recv(command);
        }
        let response = match response.has_places {
            true => Some(response),
            false => queue.take_places(response, 0),
        };
        if let Some(response) = response {
            queue.send(response);
        }
    }

    /// A controller is deleted (`nvmet_rdma_delete_ctrl`). nvmet holds its locks, which connecting
    /// needs: nothing here waits.
    pub(crate) fn delete_ctrl(&self, ctrl: &nvmet::Ctrl<'_>) {
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
    pub(crate) fn host_traddr(&self, ctrl: &nvmet::Ctrl<'_>) -> Result<IpAddr> {
        let queues = self.queues.lock();
        let is_admin = |queue: &&Arc<Queue>| queue.host_qid == 0 && queue.sq.is_of(ctrl);
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
    /// The largest number of bytes of a command's data.
    max_transfer: usize,
    target: Arc<Target>,
    client: ClientRef,
    #[pin]
    listening: Mutex<Listening>,
    #[pin]
    repair: DelayedWork<Self>,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Self> for Port { self.repair }
}

impl nvmet::Item for Port {
    fn client(&self) -> &ClientRef {
        &self.client
    }
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
        let listener = self.listening.lock().listener.take();
        // Waits for the callbacks of the listener, which take no lock of nvmet.
        if let Some(Err(e)) = listener.map(|listener| listener.destroy(cx)) {
            pr_err!("{:?} is still listened on ({e:?})\n", self.addr);
        }
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
        let connect = CmReq::parse(request.private_data());
        let initiator_depth = request.initiator_depth();
        let Ok(id) = request.into_id(cx) else { return };
        let queue = connect.and_then(|connect| {
            Queue::connect(&self.into(), &id, &connect, cx).map_err(|e| {
                pr_err!("creating RDMA queue failed ({e:?}).\n");
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

    /// The device of the listener goes, which has ended.
    fn stopped(self: ArcBorrow<'_, Self>) {
        let listener = self.listening.lock().listener.take();
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
    /// Takes a request apart, and refuses one for queues that no host needs
    /// (`nvmet_rdma_parse_cm_connect_req`).
    fn parse(private_data: &[u8]) -> Result<Self, u32> {
        let Ok((this, _)) = message::header::<Self>(private_data) else {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_LEN);
        };
        if u32::from(this.recfmt.get()) != bindings::nvme_rdma_cm_fmt_NVME_RDMA_CM_FMT_1_0 {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_RECFMT);
        }
        let max = match this.qid.get() {
            0 => AQ_DEPTH,
            _ => Target::MAX_QUEUE_SIZE,
        };
        if !(1..max).contains(&this.hsqsize.get()) {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_HSQSIZE);
        }
        if !(1..=Target::MAX_QUEUE_SIZE).contains(&this.hrqsize.get()) {
            return Err(bindings::nvme_rdma_cm_status_NVME_RDMA_CM_INVALID_HRQSIZE);
        }
        Ok(this)
    }

    /// Returns the number of commands that the host sends at a time.
    fn recv_queue_size(&self) -> u16 {
        self.hsqsize.get().saturating_add(1)
    }

    /// Returns the number of responses that the host receives at a time.
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
