// SPDX-License-Identifier: GPL-2.0

//! The transport for RDMA. Functions have the names of those of drivers/nvme/host/rdma.c.
//!
//! A queue is a connection with its own CQ, a receive for each completion of NVMe, and an exchange
//! for each tag of blk-mq: see Documentation/nvme-host.rst for what becomes of a request.

use crate::{
    bindings,
    nvme::{
        self,
        Controller,
        Failure,
        Link,
        Options,
        Payload,
        Reason,
        Refused,
        Registered,
        Rq,
        Setup,
        State,
        Transport, //
    },
    Host, //
};
use bindings::nvme_common_command as Command;
use core::{
    mem::offset_of,
    net::SocketAddr,
    ops::Range, //
};
use kernel::{
    impl_has_work,
    new_mutex,
    new_work,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        Arc,
        ArcBorrow,
        Mutex,
        UniqueArc, //
    },
    workqueue, //
};
use rdma::{
    cm,
    context,
    context::{
        AnyContext,
        Direct,
        Sleepable,
        Softirq, //
    },
    cq::Cq,
    device::Device,
    dma::{
        Buf,
        Bufs,
        OneWay,
        ToDevice, //
    },
    mr::{
        InvWr,
        LentRegion,
        Mr,
        RegWr, //
    },
    pd::Pd,
    prelude::{
        ClientRef,
        Wc,
        WcError, //
    },
    qp::{
        Chain,
        Qp, //
    },
    session::{
        tags::{
            Exchange,
            Reply,
            Tag,
            TagId,
            Tags, //
        },
        Connecting,
        Load,
        Received,
        RecvHandler,
        RecvRing,
        Sizes, //
    },
    sg::SgMap,
    wc::{
        Status,
        Success, //
    },
    wr::{
        PostError,
        Remote,
        SendWr, //
    }, //
};
use zerocopy::byteorder::little_endian::U16;
use zerocopy_derive::Immutable;

/// The longest time to resolve an address and a route, each, in milliseconds.
const CM_TIMEOUT_MS: u32 = 3000;
/// The most segments of a request.
const MAX_SEGMENTS: u32 = 256;
/// The most entries of a command's own data.
const MAX_INLINE_SEGMENTS: u32 = 4;
/// The entries of a SEND: the command, and its data.
const SGES: usize = 1 + MAX_INLINE_SEGMENTS as usize;
/// The length of a command.
const COMMAND: usize = 64;
/// The length of a completion of NVMe.
const COMPLETION: usize = 16;
/// The bits of the generation in a command's id; those below are the tag.
const GENERATION_BITS: u32 = 4;
const TAG_BITS: u32 = 12;
/// The tag of the request for an asynchronous event, behind those of blk-mq.
const ASYNC_EVENT: u16 = bindings::NVME_AQ_BLK_MQ_DEPTH as u16;
/// The entries of the admin queue, that one included.
const AQ_DEPTH: u16 = bindings::NVME_AQ_DEPTH as u16;
const MAX_QUEUE_SIZE: u16 = bindings::NVME_RDMA_MAX_QUEUE_SIZE as u16;

/// A data descriptor (`struct nvme_keyed_sgl_desc`, `struct nvme_sgl_desc`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Descriptor {
    addr: u64,
    /// From the lowest byte on: the length, of four bytes or of three, with a key behind it that
    /// has four, and the type.
    rest: u64,
}

impl Descriptor {
    fn new(addr: u64, rest: u64, kind: u32) -> Self {
        Self {
            addr: addr.to_le(),
            rest: (rest | u64::from(kind) << 56).to_le(),
        }
    }

    /// Of a command without data.
    fn null() -> Self {
        Self::new(0, 0, bindings::NVME_KEY_SGL_FMT_DATA_DESC << 4)
    }

    /// Of memory that the target reads or writes; it invalidates the key with its reply.
    fn fr(remote: Remote, len: u32) -> Self {
        let kind = bindings::NVME_KEY_SGL_FMT_DATA_DESC << 4 | bindings::NVME_SGL_FMT_INVALIDATE;
        let rest = u64::from(len & 0xff_ffff) | u64::from(remote.rkey) << 24;
        Self::new(remote.addr, rest, kind)
    }

    /// Of data that follow the command.
    fn inline(len: u32) -> Self {
        let kind = bindings::NVME_SGL_FMT_DATA_DESC << 4 | bindings::NVME_SGL_FMT_OFFSET;
        Self::new(0, len.into(), kind)
    }
}

/// A completion of NVMe (`struct nvme_completion`). Result and status stay as they are sent.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Completion {
    result: u64,
    _sq_head: U16,
    _sq_id: U16,
    command_id: U16,
    status: u16,
}

/// The private data of a request for a connection (`struct nvme_rdma_cm_req`).
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct CmReq {
    recfmt: U16,
    qid: U16,
    hrqsize: U16,
    hsqsize: U16,
    cntlid: U16,
    _rsvd: [u8; 22],
}

/// Returns what the status in a target's rejection means (`nvme_rdma_cm_msg`).
fn cm_msg(status: u16) -> &'static str {
    match status {
        1 => "invalid length",
        2 => "invalid record format",
        3 => "invalid queue ID",
        4 => "invalid host SQ size",
        5 => "invalid host RQ size",
        6 => "resource not found",
        7 => "invalid IRD",
        8 => "Invalid ORD",
        9 => "invalid controller ID",
        _ => "unrecognized reason",
    }
}

type Memory = SgMap<Payload, OneWay>;

/// The data of a command, with its request.
enum Data {
    None,
    /// A copy of them is behind the command.
    Copied,
    /// They are sent with the command.
    Inline(Memory),
    /// The target reads or writes them.
    Keyed(LentRegion<OneWay, Memory>),
}

/// The part of a command that is posted.
struct Posted {
    capsule: Buf<ToDevice>,
    data: Data,
}

impl Waiting {
    /// Unmaps the data of a request.
    #[inline]
    fn unmap(&mut self, memory: Memory) -> Rq {
        let (payload, pd) = memory.into_parts();
        self.pd = Some(pd);
        payload.into_rq()
    }

    /// Takes the request of a command back with its data. If it is not proved that their key is
    /// invalid there is none: it is aborted when the MR is gone.
    #[inline(always)]
    fn take_rq(&mut self, data: Data) -> Option<Rq> {
        match data {
            Data::None | Data::Copied => self.rq.take(),
            Data::Inline(memory) => Some(self.unmap(memory)),
            Data::Keyed(region) => {
                let (mr, memory) = region.into_mr().ok()?;
                self.mr = Some(mr);
                memory.map(|memory| self.unmap(memory))
            }
        }
    }
}

impl Posted {
    /// Adds the requests of a command, which has `len` bytes of data (`nvme_rdma_post_send`).
    /// Always inlined: the chain is in registers then, with its length known.
    #[inline(always)]
    fn send<'a>(&'a self, len: u32, chain: &mut Chain<'a, 2, SGES>) -> Result {
        let mut end = COMMAND;
        match &self.data {
            Data::None => self.describe(Descriptor::null())?,
            Data::Copied => {
                self.describe(Descriptor::inline(len))?;
                end = COMMAND.saturating_add(len as usize);
            }
            Data::Inline(memory) => {
                self.describe(Descriptor::inline(len))?;
                return chain.push_with_data(self.capsule.sge(0..COMMAND)?, memory);
            }
            Data::Keyed(region) => {
                let remote = chain.push(RegWr::remote_one_way(region))?;
                self.describe(Descriptor::fr(remote, len))?;
            }
        }
        chain.push(SendWr::send([self.capsule.sge(0..end)?]))
    }

    /// Sets the data of a command that has none yet, with nothing to drop.
    #[inline]
    fn set_data(&mut self, data: Data) {
        if !matches!(self.data, Data::None) {
            self.drop_data();
        }
        core::mem::forget(core::mem::replace(&mut self.data, data));
    }

    #[cold]
    fn drop_data(&mut self) {
        self.data = Data::None;
    }

    /// Writes a command of nvme-core, all but the descriptor of its data.
    #[inline(always)]
    fn write(&self, command: &[u8; COMMAND], id: TagId) -> Result {
        const FLAGS: usize = 8 * offset_of!(Command, flags);
        const COMMAND_ID: usize = 8 * offset_of!(Command, command_id);
        // The first word has both the flags and the id, so that two writes are enough.
        let (first, rest) = command.split_first_chunk().ok_or(EINVAL)?;
        let id = u64::from(id.generation << TAG_BITS | id.index);
        let first = u64::from_le_bytes(*first) & !(u64::from(u16::MAX) << COMMAND_ID)
            | u64::from(bindings::NVME_CMD_SGL_METABUF) << FLAGS
            | id << COMMAND_ID;
        self.capsule.write(0, &first.to_le_bytes())?;
        let rest: &[u8; COMMAND - 8] = rest.first_chunk().ok_or(EINVAL)?;
        self.capsule.write(8, rest)
    }

    /// Writes the descriptor of the command's data.
    fn describe(&self, dptr: Descriptor) -> Result {
        let bytes: [u8; size_of::<Descriptor>()] = zerocopy::transmute!(dptr);
        self.capsule.write(offset_of!(Command, dptr), &bytes)
    }
}

/// The part of a command that waits for the reply; the MR, and the handle of the PD for what is
/// mapped, stay with the tag between two of them.
struct Waiting {
    /// The request of a command of which no data are mapped.
    rq: Option<Rq>,
    mr: Option<Mr>,
    pd: Option<Pd>,
    completion: Option<Completion>,
    /// The command is the request for an asynchronous event.
    is_event: bool,
}

/// A command.
struct Io;

impl Exchange for Io {
    type Request = Posted;
    type Reply = Waiting;
    type Connection = Arc<Link<Rdma>>;
    type Needs = context::Atomic;

    const IN_TURN: bool = true;

    /// Where it has failed, all receives do, by which the queue hears of it.
    #[inline]
    fn sent(_posted: &Posted, wc: &Wc, _cx: &context::Atomic) {
        if let Err(e) = wc.result() {
            send_failed(&e);
        }
    }

    /// The key is invalid, by the completion of the local invalidation.
    fn invalidated(reply: Reply<'_, Self>, _wc: &Wc, _cx: &context::Atomic) {
        Self::end_request(reply);
    }

    /// Ends the request (`nvme_rdma_end_request`), unless its reply has done so. No peer can
    /// reach its pages.
    fn ended(mut tag: Tag<Self>) {
        let (posted, waiting) = tag.parts();
        let rq = waiting.take_rq(core::mem::replace(&mut posted.data, Data::None));
        let completion = waiting.completion.take();
        let is_event = waiting.is_event;
        let link = is_event.then(|| tag.connection().clone());
        // blk-mq may give the tag to the next request as soon as this one is ended.
        drop(tag);
        let Some(Completion { status, result, .. }) = completion else {
            return drop(rq);
        };
        match (rq, link) {
            (Some(rq), _) => rq.end(status, result),
            (None, Some(link)) => link.complete_async_event(status, result),
            (None, None) => {}
        }
    }
}

impl Io {
    /// Ends the request of a command whose reply has come and whose key, if it has one, is invalid.
    /// Its SEND may not have completed, and has the capsule only. A request whose pages are sent
    /// waits for that.
    #[inline]
    fn end_request(mut reply: Reply<'_, Self>) {
        let rq = match &reply.request().data {
            Data::None | Data::Copied => reply.rq.take(),
            Data::Inline(_) => None,
            Data::Keyed(region) => {
                let memory = region.take_memory();
                memory.map(|memory| reply.unmap(memory))
            }
        };
        // What is left ends with the tag.
        let Some(rq) = rq else {
            return;
        };
        let completion = reply.completion.take();
        drop(reply);
        if let Some(Completion { status, result, .. }) = completion {
            rq.end(status, result);
        }
    }
}

#[cold]
fn send_failed(error: &WcError) {
    if error.status != Status::WR_FLUSH_ERR {
        rdma::pr_info_ratelimited!("a SEND has failed: {}\n", error.status);
    }
}

/// A queue (`struct nvme_rdma_queue`).
#[pin_data]
pub(crate) struct Queue {
    qid: u16,
    link: Arc<Link<Rdma>>,
    client: ClientRef,
    id: cm::Id,
    cq: Cq<AnyContext>,
    qp: Qp<AnyContext>,
    tags: Tags<Io>,
    pd: Pd,
    /// Connect was successful, and the queue was not stopped.
    live: Atomic<bool>,
    /// The connection has failed, or is being ended.
    lost: Atomic<bool>,
    /// Of the SENDs one in so many is signaled, and each that has the request's pages.
    sig_limit: u32,
    /// The size of the largest data that are copied behind a command.
    copied_size: u32,
    /// The most bytes, and entries, of data that are sent with a command.
    inline_size: u32,
    inline_segments: u32,
    /// Locked while the queue is stopped, and set if its QP is not drained again.
    #[pin]
    given_up: Mutex<bool>,
    #[pin]
    stop_work: workqueue::Work<Self>,
}

impl_has_work! {
    impl HasWork<Self> for Queue { self.stop_work }
}

impl workqueue::WorkItem for Queue {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        if let Ok(cx) = Sleepable::current() {
            this.abandon(&cx);
        }
    }
}

/// The events of the connection (`nvme_rdma_cm_handler`).
impl cm::Handler for Queue {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if let cm::Event::Rejected(rejected) = &event {
            self.conn_rejected(rejected);
        }
        // After a change of the address the connection still uses the old one.
        if event.is_last() || matches!(event, cm::Event::AddrChange) {
            self.error_recovery();
        }
    }
}

/// The completions of NVMe (`nvme_rdma_recv_done`).
impl RecvHandler for Queue {
    type Send = AnyContext;
    type Recv = AnyContext;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<AnyContext> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, _cx: &context::Atomic) {
        let wc = *message.wc();
        let (queue, bytes) = message.open();
        let completion = bytes
            .header::<Completion>()
            .map(|(completion, _)| completion);
        if let Err(e) = completion.and_then(|c| queue.process_nvme_rsp(&wc, c)) {
            queue.as_arc_borrow().bad_completion(e);
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, error: WcError) {
        if error.status != Status::WR_FLUSH_ERR {
            let qid = self.qid;
            let status = error.status;
            self.link.with_device(|dev| {
                rdma::dev_info_ratelimited!(dev, "QID {qid}: RECV failed: {status}\n");
            });
        }
        self.error_recovery();
    }

    fn refused(self: ArcBorrow<'_, Self>, error: Error) {
        let qid = self.qid;
        self.link.with_device(|dev| {
            rdma::dev_err_ratelimited!(dev, "QID {qid}: a receive was refused: {error:?}\n");
        });
        self.error_recovery();
    }
}

impl Queue {
    /// Makes a queue and its connection (`nvme_rdma_alloc_queue`).
    fn alloc(
        setup: &Setup<'_, Rdma>,
        qid: u16,
        queue_size: u16,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let ctrl = setup.ctrl();
        let client = ClientRef::of::<Host>(cx)?;
        let options = cm::Options {
            src: ctrl.src_addr,
            service_type: ctrl.opts().tos(),
            ..Default::default()
        };
        let id = cm::Id::create_with(&client, &options, cx)?;
        id.resolve_addr(ctrl.addr, CM_TIMEOUT_MS, cx)?;
        id.resolve_route(CM_TIMEOUT_MS, cx)?;
        let dev = id.device()?;
        let pd = match (&setup.pd, qid) {
            (Some(pd), 1..) => pd.clone(),
            _ => alloc_pd(dev, cx)?,
        };
        // Those of the I/O queues that have another way to the target.
        if pd.device() != dev {
            return Err(EHOSTUNREACH);
        }
        let queue = Self::create_queue_ib(setup, client, id, pd, qid, queue_size, cx)?;
        queue.connect(setup, queue_size, cx)?;
        Ok(queue)
    }

    /// Makes the CQ, the QP and the commands of a queue.
    fn create_queue_ib(
        setup: &Setup<'_, Rdma>,
        client: ClientRef,
        id: cm::Id,
        pd: Pd,
        qid: u16,
        queue_size: u16,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        // First, so that there is little to drop where a step fails.
        let queue = UniqueArc::new_uninit(GFP_KERNEL)?;
        let dev = pd.device().clone();
        let inline_segments = dev.attrs().max_send_sge.saturating_sub(1);
        let inline_segments = inline_segments.min(MAX_INLINE_SEGMENTS);
        let capsule_len = if setup.use_inline_data && qid > 0 {
            setup.identity().ioccsz.saturating_mul(16)
        } else {
            0
        };
        let inline_size = capsule_len.saturating_sub(COMMAND as u32);
        let copied_size = nvme::copied_data_size().min(inline_size);
        let sig_limit = match qid {
            0 => 1,
            _ => nvme::sig_limit().clamp(1, queue_size.into()),
        };
        // A command that has ended has its exchange until a SEND behind its own has completed.
        let commands = match sig_limit {
            1 => queue_size.into(),
            _ => sig_limit.saturating_add(queue_size.into()),
        };
        let load = Load {
            requests: commands,
            // MR, SEND, INV
            sends: 3,
            recvs: recvs(queue_size),
            send_sge: inline_segments.saturating_add(1),
            ..Load::NONE
        };
        let sizes =
            Sizes::new(&dev, 1, &load).inspect_err(|misfit| pr_err!("{dev}: {misfit}\n"))?;
        // Spread by queue; the admin queue is on the first vector.
        let vector = u32::from(qid.saturating_sub(1));
        let vector = vector.checked_rem(dev.num_comp_vectors()).unwrap_or(0);
        let cq = if qid > 0 && setup.is_polled(qid) {
            Cq::<Direct>::alloc(&dev, sizes.entries, vector, cx)?.into_any()
        } else {
            Cq::<Softirq>::alloc(&dev, sizes.entries, vector, cx)?.into_any()
        };
        let qp = Qp::create(&id, &pd, &cq, &cq, &sizes.caps, cx)?;
        let link = setup.ctrl().link();
        let capsule = COMMAND.saturating_add(copied_size as usize);
        let mut capsules = Bufs::new(&pd, commands as usize, capsule, cx)?;
        let tag = |id| Self::tag(&pd, qid, id, capsules.take(cx)?, cx);
        let tags = Tags::new(&qp, link.clone(), commands, GENERATION_BITS, tag, cx)?;
        let Ok(queue) = queue.pin_init_with(pin_init!(Self {
            qid,
            link: link.clone(),
            tags,
            client,
            id,
            cq,
            qp,
            pd,
            live: Atomic::new(false),
            lost: Atomic::new(false),
            sig_limit,
            copied_size,
            inline_size,
            inline_segments,
            given_up <- new_mutex!(false),
            stop_work <- new_work!("nvme_rdma::Queue::stop"),
        }));
        Ok(queue.into())
    }

    /// Makes the parts of a command, with the memory of what is sent.
    fn tag(
        pd: &Pd,
        qid: u16,
        id: TagId,
        capsule: Buf<ToDevice>,
        cx: &Sleepable,
    ) -> Result<(Posted, Waiting)> {
        let posted = Posted {
            capsule,
            data: Data::None,
        };
        let pages = max_fr_pages(pd.device()).saturating_add(1);
        let is_event = qid == 0 && id.index == ASYNC_EVENT;
        let waiting = Waiting {
            rq: None,
            mr: (!is_event).then(|| Mr::alloc(pd, pages, cx)).transpose()?,
            pd: None,
            completion: None,
            is_event,
        };
        Ok((posted, waiting))
    }

    /// Posts the receives and connects (`nvme_rdma_route_resolved`).
    fn connect(
        self: &Arc<Self>,
        setup: &Setup<'_, Rdma>,
        queue_size: u16,
        cx: &Sleepable,
    ) -> Result {
        let connecting = Connecting::new(&self.id, &self.qp, cx);
        let ring = RecvRing {
            pd: &self.pd,
            count: recvs(queue_size),
            len: COMPLETION,
        };
        ring.post(self, cx)?;
        let identity = setup.identity();
        let attrs = self.pd.device().attrs();
        let (hrqsize, hsqsize, cntlid) = match self.qid {
            0 => (AQ_DEPTH, AQ_DEPTH - 1, 0),
            _ => (queue_size, identity.sqsize, identity.cntlid),
        };
        let private = CmReq {
            recfmt: U16::new(0),
            qid: U16::new(self.qid),
            hrqsize: U16::new(hrqsize),
            hsqsize: U16::new(hsqsize),
            cntlid: U16::new(cntlid),
            _rsvd: [0; 22],
        };
        let private: [u8; size_of::<CmReq>()] = zerocopy::transmute!(private);
        let param = cm::ConnParam {
            private_data: &private,
            responder_resources: attrs.max_qp_rd_atom.min(u8::MAX.into()) as u8,
            initiator_depth: 0,
            retry_count: 7,
            rnr_retry_count: 7,
            ..Default::default()
        };
        // C has this error for a rejection.
        let reset = |e| if e == ECONNREFUSED { ECONNRESET } else { e };
        self.id.connect(self.clone(), &param, cx).map_err(reset)?;
        connecting.connected();
        Ok(())
    }

    /// The target has refused the connection (`nvme_rdma_conn_rejected`).
    fn conn_rejected(&self, rejected: &cm::Rejected<'_>) {
        let qid = self.qid;
        let status = match rejected.private_data() {
            Some([_, _, low, high, ..]) => Some(u16::from_le_bytes([*low, *high])),
            _ => None,
        };
        self.link.with_device(|dev| match status {
            Some(status) => {
                let said = cm_msg(status);
                dev_err!(
                    dev,
                    "QID {qid}: connect rejected: {rejected}, nvme status {status} ({said})\n"
                );
            }
            None => dev_err!(dev, "QID {qid}: connect rejected: {rejected}\n"),
        });
    }

    /// The connection has failed, or the target does not keep to the protocol
    /// (`nvme_rdma_error_recovery`). Any context.
    ///
    /// Where the controller is live its recovery ends the requests of all queues. But somebody may
    /// wait for a command of this queue who keeps that from running, or sets up or shuts down the
    /// controller: the queue ends at once.
    fn error_recovery(self: ArcBorrow<'_, Self>) {
        if self.lost.xchg(true, Full) {
            return;
        }
        self.link.error_recovery();
        self.tags.close(ENOTCONN);
        // It is queued once.
        let _ = self.client.enqueue(Arc::from(self));
    }

    /// The target breaks the protocol, or the queue is being stopped.
    #[cold]
    fn bad_completion(self: ArcBorrow<'_, Self>, error: Error) {
        if error != ENOTCONN {
            let qid = self.qid;
            self.link.with_device(|dev| {
                rdma::dev_err_ratelimited!(dev, "QID {qid}: a bad completion: {error:?}\n");
            });
            self.error_recovery();
        }
    }

    /// Ends the connection and all requests (`nvme_rdma_stop_queue`), or has the receives let go of
    /// a queue whose device completes nothing: its requests end when the QP is destroyed, which
    /// takes a minute then. Fails if receives keep the queue, as where a handler has not returned.
    /// This may be called again.
    fn stop(&self, cx: &Sleepable) -> Result {
        let mut given_up = self.given_up.lock();
        if *given_up {
            return Ok(());
        }
        self.live.store(false, Relaxed);
        self.lost.store(true, Relaxed);
        self.id.release_handler(cx);
        // If there is no connection, the drain flushes the requests.
        let _ = self.id.disconnect(cx);
        if let Err(e) = self.tags.reclaim(&self.qp, cx) {
            let qid = self.qid;
            let qp = self.qp.num();
            self.link
                .with_device(|dev| dev_err!(dev, "QID {qid}: QP {qp} was not drained: {e:?}\n"));
            self.qp.release_recvs(cx)?;
            *given_up = true;
        }
        Ok(())
    }

    /// Ends the connection and all requests, also those that the device has lost: they end with the
    /// QP, which nothing keeps then. Who waits for one of them could not destroy it. A queue that
    /// receives keep stays in its place, where the next timeout finds it.
    ///
    /// The controller may have become live since the queue has failed, so it is told again.
    fn abandon(self: &Arc<Self>, cx: &Sleepable) {
        let is_stopped = self.stop(cx).is_ok();
        // The controller does without one that is in no place.
        if !is_stopped || self.link.forget(self.qid, self, cx) {
            self.link.error_recovery();
        }
    }

    /// Handles a completion of NVMe. Fails with `ENOTCONN` if the queue is being stopped, and as
    /// [`Tags::reply`] if there is no such command.
    fn process_nvme_rsp(&self, wc: &Success<'_>, completion: Completion) -> Result {
        let id = completion.command_id.get();
        let id = TagId {
            index: id & ((1 << TAG_BITS) - 1),
            generation: id >> TAG_BITS,
        };
        let mut waiting = self.tags.reply(wc, id)?;
        waiting.completion = Some(completion);
        match &waiting.request().data {
            // The target has not proved that it has invalidated the key.
            Data::Keyed(region) if !region.remote_invalidated(wc, &self.qp) => {
                Ok(waiting.post(&self.qp, |posted| match &posted.data {
                    Data::Keyed(region) => Ok(InvWr::new(region)),
                    _ => Err(EINVAL),
                })?)
            }
            // There is no key.
            Data::None | Data::Copied | Data::Inline(_) if wc.invalidated_rkey().is_some() => {
                Err(EPROTO)
            }
            _ if self.sig_limit > 1 => {
                Io::end_request(waiting);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Takes a tag for the request that has this one of blk-mq's: the same where the exchange ends
    /// with the request.
    #[inline]
    fn take_tag(&self, tag: u16) -> Result<Tag<Io>> {
        match self.sig_limit {
            1 => self.tags.take_at(tag).or_else(|e| self.other_tag(e)),
            _ => self.tags.take(),
        }
    }

    /// Copies, or lists and maps, the `len` bytes of a request's data (`nvme_rdma_map_data`).
    #[inline(always)]
    fn map_data(&self, rq: Rq, len: u32, tag: &mut Tag<Io>) -> Result<(), (Rq, Error)> {
        let (posted, waiting) = tag.parts();
        if len == 0 {
            waiting.rq = Some(rq);
            return Ok(());
        }
        let is_inline = rq.is_write() && len <= self.inline_size;
        if is_inline && len <= self.copied_size {
            let end = COMMAND.saturating_add(len as usize);
            if let Some(to) = posted.capsule.cpu().get_mut(COMMAND..end) {
                rq.copy_to(to);
                (posted.data, waiting.rq) = (Data::Copied, Some(rq));
                return Ok(());
            }
        }
        let payload = rq.map()?;
        let is_inline = is_inline && payload.entries() <= self.inline_segments;
        let pd = waiting.pd.take().unwrap_or_else(|| self.pd.clone());
        // Mapped in each arm: that of inline data is made in the tag, and not moved there.
        if is_inline {
            posted.set_data(Data::Inline(Self::map(pd, payload)?));
            return Ok(());
        }
        let memory = Self::map(pd, payload)?;
        let Some(mr) = waiting.mr.take() else {
            return Err((waiting.unmap(memory), EIO));
        };
        match LentRegion::lend(mr, memory) {
            Ok(region) => posted.set_data(Data::Keyed(region)),
            Err(e) => {
                waiting.mr = Some(e.mr);
                return Err((waiting.unmap(e.memory), e.error));
            }
        }
        Ok(())
    }

    /// Maps the data of a request, or gives it back.
    #[inline(always)]
    fn map(pd: Pd, payload: Payload) -> Result<Memory, (Rq, Error)> {
        SgMap::with_pd(pd, payload).map_err(|e| (e.owner.into_rq(), e.error))
    }

    /// A command was not posted.
    #[cold]
    #[inline(never)]
    fn send_refused(self: ArcBorrow<'_, Self>, refused: PostError<Tag<Io>>) -> Result<(), Refused> {
        let error = refused.error();
        if let Some(rq) = refused.owner.and_then(Queue::unmap_data) {
            return Err(rq.refuse(self.reason(error)));
        }
        // The request ends with the queue.
        let qid = self.qid;
        self.link.with_device(|dev| {
            rdma::dev_err_ratelimited!(dev, "QID {qid}: a SEND was refused: {error:?}\n");
        });
        self.error_recovery();
        Ok(())
    }

    /// Takes a request back that was not sent.
    fn unmap_data(mut tag: Tag<Io>) -> Option<Rq> {
        let (posted, waiting) = tag.parts();
        waiting.take_rq(core::mem::replace(&mut posted.data, Data::None))
    }

    /// Takes another tag than that of the request, where this is in use or the queue has none of
    /// that number: blk-mq keeps the tags of the first connection, and the target may have smaller
    /// queues since. Fails with `error`, or with `EAGAIN` if all are in use.
    #[cold]
    fn other_tag(&self, error: Error) -> Result<Tag<Io>> {
        match error {
            EINVAL | EBUSY if self.qid > 0 => self.tags.take(),
            e => Err(e),
        }
    }

    /// Returns what becomes of a request that could not be sent.
    #[cold]
    fn reason(&self, error: Error) -> Reason {
        match error {
            ENOMEM | EAGAIN | EBUSY => Reason::Resource,
            ENOTCONN => {
                // nvme-core may have made the controller live since the queue has failed.
                self.link.error_recovery();
                Reason::Closed
            }
            EIO => Reason::Path,
            _ => Reason::Io,
        }
    }

    /// Posts a command, which has `len` bytes of data. Where these are sent with it, its request
    /// ends when the SEND has completed.
    #[inline(always)]
    fn post_send(&self, tag: Tag<Io>, len: u32) -> Result<(), PostError<Tag<Io>>> {
        match self.sig_limit {
            1 => tag.post(&self.qp, |posted, chain| posted.send(len, chain)),
            _ => self.post_in_turn(tag, len),
        }
    }

    /// As [`Queue::post_send`], under the lock that is needed where not all SENDs are signaled.
    #[inline(never)]
    fn post_in_turn(&self, mut tag: Tag<Io>, len: u32) -> Result<(), PostError<Tag<Io>>> {
        let interval = match tag.parts().0.data {
            Data::Inline(_) => 1,
            _ => self.sig_limit,
        };
        tag.post_in_turn(&self.qp, interval, |posted, chain| posted.send(len, chain))
    }
}

/// Returns the number of receives of a queue: a tag may be free before its receive is posted again.
fn recvs(queue_size: u16) -> u32 {
    u32::from(queue_size).saturating_add(1)
}

/// Allocates the PD of a controller, on a device that can serve it.
fn alloc_pd(dev: &Device, cx: &Sleepable) -> Result<Pd> {
    if !dev.attrs().mem_mgt_extensions {
        pr_err!("{dev}: memory registrations are not supported\n");
        return Err(EOPNOTSUPP);
    }
    Pd::alloc(dev, cx)
}

/// Returns the most segments of a request, without the page that one with an offset takes more.
fn max_fr_pages(dev: &Device) -> u32 {
    let pages = dev.attrs().max_fast_reg_page_list_len;
    pages.saturating_sub(1).clamp(1, MAX_SEGMENTS)
}

/// A controller (`struct nvme_rdma_ctrl`).
#[pin_data]
pub(crate) struct Rdma {
    addr: SocketAddr,
    src_addr: Option<SocketAddr>,
    /// The number of the device that the last admin queue was on.
    device: Atomic<u64>,
}

/// What is set up of it.
#[derive(Default)]
pub(crate) struct Shared {
    /// The PD of all queues, while there is an admin queue.
    pd: Option<Pd>,
    use_inline_data: bool,
}

static REGISTERED: Registered = Registered::new();

impl Rdma {
    /// Returns whether the controller's queues are, or were, on the device of this number.
    pub(crate) fn is_on(&self, device: u64) -> bool {
        self.device.load(Relaxed) == device
    }

    /// Makes a queue and its connection, and puts it in its place. Who waits for its commands must
    /// not keep it: it goes if it fails, and ends them.
    fn alloc_queue(
        setup: &Setup<'_, Self>,
        qid: u16,
        queue_size: u16,
        cx: &Sleepable,
    ) -> Result<Arc<Queue>> {
        let queue = Queue::alloc(setup, qid, queue_size, cx).inspect_err(|e| {
            dev_info!(setup.ctrl().device(), "queue {qid}: no connection: {e:?}\n");
        })?;
        setup.publish(qid, queue.clone()).inspect_err(|_| {
            let _ = queue.stop(cx);
        })?;
        Ok(queue)
    }

    /// Has a queue take commands, if it was connected (`nvme_rdma_start_queue`).
    fn start_queue(
        setup: &Setup<'_, Self>,
        qid: u16,
        connected: Result<(), Failure>,
    ) -> Result<(), Failure> {
        if let Err(e) = connected {
            let code = e.code();
            dev_info!(
                setup.ctrl().device(),
                "failed to connect queue: {qid} ret={code}\n"
            );
            return Err(e);
        }
        let queue = setup.queue(qid).ok_or(ENOTCONN)?;
        queue.live.store(true, Relaxed);
        Ok(())
    }

    /// Stops queues and drops them, whose requests have ended then but for those whose memory is
    /// yet to go (`nvme_rdma_stop_io_queues`, `nvme_rdma_free_io_queues`).
    fn stop_queues(setup: &mut Setup<'_, Self>, queues: Range<u16>, cx: &Sleepable) {
        for qid in queues.clone() {
            if let Some(queue) = setup.queue(qid) {
                // Requests that have not ended are waited for when the tag set is removed.
                let _ = queue.stop(cx);
            }
        }
        setup.clear(queues, cx);
    }

    fn configure_admin_queue(setup: &mut Setup<'_, Self>, cx: &Sleepable) -> Result<(), Failure> {
        let pd = Self::alloc_queue(setup, 0, AQ_DEPTH, cx)?.pd.clone();
        let dev = pd.device().clone();
        setup.pd = Some(pd);
        let number = dev.data::<Host>(cx).ok_or(ENODEV)?.number;
        setup.ctrl().device.store(number, Relaxed);
        // Of these the tag set uses the node.
        setup.set_limits(max_fr_pages(&dev), dev.numa_node());
        if let Err(e) = setup.alloc_admin_tag_set(cx) {
            // There is one since the first time.
            if e != EEXIST {
                return Err(e.into());
            }
        }
        let connected = setup.connect_admin_queue(cx);
        Self::start_queue(setup, 0, connected)?;
        setup.enable_ctrl(cx)?;
        setup.unquiesce_admin_queue();
        setup.init_ctrl_finish(cx)
    }

    fn configure_io_queues(setup: &mut Setup<'_, Self>, cx: &Sleepable) -> Result<(), Failure> {
        let count = setup.set_queue_count(cx)?;
        if count == 0 {
            dev_err!(setup.ctrl().device(), "unable to set any I/O queues\n");
            return Err(ENOMEM.into());
        }
        setup.set_io_queues(count)?;
        dev_info!(setup.ctrl().device(), "creating {count} I/O queues.\n");
        let is_new = !setup.has_io_tag_set();
        if is_new {
            let polls = setup.ctrl().opts().polls();
            setup.alloc_io_tag_set(polls, cx)?;
        }
        // Requests may be queued for those that blk-mq knows. There may be others since.
        Self::setup_io_queues(setup, count.min(setup.nr_hw_queues()), cx)?;
        if !is_new {
            setup.update_nr_hw_queues(cx)?;
        }
        Self::setup_io_queues(setup, setup.nr_hw_queues(), cx)
    }

    /// Makes and connects those of the first `count` I/O queues that are not there, at the same
    /// time (`nvme_rdma_setup_io_queues`), but for those of CPUs that are offline: the controller
    /// is reset when such a CPU is back and has a request.
    fn setup_io_queues(setup: &Setup<'_, Self>, count: u32, cx: &Sleepable) -> Result<(), Failure> {
        let mut missing = KVec::new();
        for qid in 1..=count as u16 {
            if setup.queue(qid).is_none() && setup.has_online_cpu(qid) {
                missing.push(qid, GFP_KERNEL).map_err(Error::from)?;
            }
        }
        nvme::try_for_each(&missing, |qid, cx| Self::setup_queue(setup, *qid, cx), cx)
    }

    /// Makes and connects an I/O queue (`nvme_rdma_setup_queue_async`).
    fn setup_queue(setup: &Setup<'_, Self>, qid: u16, cx: &Sleepable) -> Result<(), Failure> {
        let queue_size = setup.identity().sqsize.saturating_add(1);
        drop(Self::alloc_queue(setup, qid, queue_size, cx)?);
        Self::start_queue(setup, qid, setup.connect_io_queue(qid, cx))
    }

    fn teardown_admin_queue(setup: &mut Setup<'_, Self>, remove: bool, cx: &Sleepable) {
        setup.quiesce_admin_queue(cx);
        Self::stop_queues(setup, 0..1, cx);
        // No event comes from here on, and the work has not kept the queue.
        setup.cancel_async_event_work(cx);
        setup.cancel_admin_tagset(cx);
        setup.pd = None;
        if remove {
            setup.remove_admin_tag_set(cx);
        }
    }

    fn teardown_io_queues(setup: &mut Setup<'_, Self>, remove: bool, cx: &Sleepable) {
        setup.quiesce_io_queues(cx);
        Self::stop_queues(setup, setup.io_queues(), cx);
        setup.cancel_tagset(cx);
        if remove {
            setup.remove_io_tag_set(cx);
        }
    }

    fn setup_ctrl(ctrl: &Controller<Self>, new: bool, cx: &Sleepable) -> Result<(), Failure> {
        let mut setup = ctrl.setup(cx);
        let done = Self::try_setup_ctrl(&mut setup, cx);
        if done.is_ok() {
            setup.start_ctrl(cx);
        } else {
            Self::teardown_io_queues(&mut setup, new, cx);
            setup.stop_keep_alive(cx);
            Self::teardown_admin_queue(&mut setup, new, cx);
            // Requests that come now are refused: some of them fail at once.
            setup.unquiesce_io_queues();
            setup.unquiesce_admin_queue();
        }
        done
    }

    fn try_setup_ctrl(setup: &mut Setup<'_, Self>, cx: &Sleepable) -> Result<(), Failure> {
        Self::configure_admin_queue(setup, cx)?;
        let identity = setup.identity();
        if identity.icdoff != 0 {
            dev_err!(setup.ctrl().device(), "icdoff is not supported!\n");
            return Err(EOPNOTSUPP.into());
        }
        if identity.sgls & bindings::NVME_CTRL_SGLS_KSDBDS == 0 {
            dev_err!(
                setup.ctrl().device(),
                "Mandatory keyed sgls are not supported!\n"
            );
            return Err(EOPNOTSUPP.into());
        }
        Self::clamp_sqsize(setup)?;
        setup.use_inline_data = identity.sgls & bindings::NVME_CTRL_SGLS_SAOS != 0;
        if identity.queue_count > 1 {
            Self::configure_io_queues(setup, cx)?;
        }
        // One may have failed while it had no commands.
        if Self::is_any_lost(setup) {
            return Err(ENOTCONN.into());
        }
        if !setup.ctrl().change_state(State::Live, cx) {
            // It is being deleted.
            return Err(EINVAL.into());
        }
        // One that has failed since did not find the controller live.
        if Self::is_any_lost(setup) {
            setup.ctrl().link().error_recovery();
        }
        Ok(())
    }

    /// Has I/O queues be no larger than target and driver can have them.
    fn clamp_sqsize(setup: &mut Setup<'_, Self>) -> Result {
        let identity = setup.identity();
        let wanted = setup.ctrl().opts().queue_size();
        let size = usize::from(identity.sqsize).saturating_add(1);
        let most = usize::from(identity.maxcmd);
        if wanted > size {
            dev_warn!(
                setup.ctrl().device(),
                "queue_size {wanted} > ctrl sqsize {size}, clamping down\n"
            );
        }
        let clamped = size.min(MAX_QUEUE_SIZE.into()).min(most);
        if clamped < 2 && identity.queue_count > 1 {
            dev_err!(
                setup.ctrl().device(),
                "queues of {clamped} entries are not supported!\n"
            );
            return Err(EOPNOTSUPP);
        }
        if clamped < size {
            dev_warn!(
                setup.ctrl().device(),
                "ctrl sqsize {size}, maxcmd {most}, max queue size {MAX_QUEUE_SIZE}, clamping\n"
            );
        }
        setup.set_sqsize(clamped.saturating_sub(1) as u16);
        Ok(())
    }

    /// Returns whether a queue has failed, or was given up, or its CPU is back.
    fn is_any_lost(setup: &Setup<'_, Self>) -> bool {
        let io_queues = setup.identity().queue_count.saturating_sub(1);
        let mut queues = 0..=io_queues.min(setup.nr_hw_queues()) as u16;
        queues.any(|qid| match setup.queue(qid) {
            Some(queue) => queue.lost.load(Relaxed),
            None => qid == 0 || setup.has_online_cpu(qid),
        })
    }

    fn reconnect_or_remove(ctrl: &Controller<Self>, failure: Option<Failure>) {
        // If it is being reset or deleted, do nothing.
        if ctrl.state() != Some(State::Connecting) {
            return;
        }
        if ctrl.should_reconnect(failure) {
            let delay = ctrl.opts().reconnect_delay();
            dev_info!(ctrl.device(), "Reconnecting in {delay} seconds...\n");
            ctrl.reconnect_later(delay);
        } else {
            ctrl.delete();
        }
    }

    fn shutdown_ctrl(ctrl: &Controller<Self>, shutdown: bool, cx: &Sleepable) {
        let mut setup = ctrl.setup(cx);
        Self::teardown_io_queues(&mut setup, shutdown, cx);
        setup.quiesce_admin_queue(cx);
        setup.disable_ctrl(shutdown, cx);
        Self::teardown_admin_queue(&mut setup, shutdown, cx);
    }
}

impl Transport for Rdma {
    type Client = Host;
    type Queue = Queue;
    type State = Shared;

    const ALLOWED_OPTS: u32 = bindings::NVMF_OPT_TRSVCID
        | bindings::NVMF_OPT_RECONNECT_DELAY
        | bindings::NVMF_OPT_HOST_TRADDR
        | bindings::NVMF_OPT_CTRL_LOSS_TMO
        | bindings::NVMF_OPT_NR_WRITE_QUEUES
        | bindings::NVMF_OPT_NR_POLL_QUEUES
        | bindings::NVMF_OPT_TOS;

    fn registered() -> &'static Registered {
        &REGISTERED
    }

    fn name() -> &'static CStr {
        if nvme::replace() {
            c"rdma"
        } else {
            c"rdma_rs"
        }
    }

    fn new(opts: &Options<'_>) -> impl PinInit<Self, Error> {
        let addr = opts.traddr();
        let src_addr = opts.host_traddr();
        try_pin_init!(Self {
            addr: addr?,
            src_addr: src_addr?,
            device: Atomic::new(0),
        })
    }

    fn create(ctrl: &Controller<Self>, cx: &Sleepable) -> Result<(), Failure> {
        Self::setup_ctrl(ctrl, true, cx)?;
        let nqn = ctrl.opts().subsysnqn();
        let host = ctrl.opts().hostnqn();
        let addr = ctrl.addr;
        dev_info!(
            ctrl.device(),
            "new ctrl: NQN \"{nqn}\", addr {addr:?}, hostnqn: {host}\n"
        );
        Ok(())
    }

    fn error_recovery(ctrl: &Controller<Self>, cx: &Sleepable) {
        // Before the setup is locked: see `cancel_async_event_work`.
        ctrl.flush_async_event_work(cx);
        {
            let mut setup = ctrl.setup(cx);
            setup.stop_keep_alive(cx);
            Self::teardown_io_queues(&mut setup, false, cx);
            setup.unquiesce_io_queues();
            Self::teardown_admin_queue(&mut setup, false, cx);
            setup.unquiesce_admin_queue();
            setup.auth_stop(cx);
        }
        // Unless it is being deleted.
        if ctrl.change_state(State::Connecting, cx) {
            Self::reconnect_or_remove(ctrl, None);
        }
    }

    fn reconnect(ctrl: &Controller<Self>, cx: &Sleepable) {
        let attempt = ctrl.count_reconnect();
        match Self::setup_ctrl(ctrl, false, cx) {
            Ok(()) => {
                dev_info!(
                    ctrl.device(),
                    "Successfully reconnected ({attempt} attempts)\n"
                );
                ctrl.reconnected();
            }
            Err(e) => {
                let most = ctrl.opts().max_reconnects();
                dev_info!(ctrl.device(), "Failed reconnect attempt {attempt}/{most}\n");
                Self::reconnect_or_remove(ctrl, Some(e));
            }
        }
    }

    fn reset(ctrl: &Controller<Self>, cx: &Sleepable) {
        ctrl.stop(cx);
        Self::shutdown_ctrl(ctrl, false, cx);
        if !ctrl.change_state(State::Connecting, cx) {
            // A deletion has begun, which waits for the commands of a scan: they fail now.
            let mut setup = ctrl.setup(cx);
            setup.unquiesce_io_queues();
            setup.unquiesce_admin_queue();
            return;
        }
        if let Err(e) = Self::setup_ctrl(ctrl, false, cx) {
            ctrl.count_reconnect();
            Self::reconnect_or_remove(ctrl, Some(e));
        }
    }

    fn delete(ctrl: &Controller<Self>, cx: &Sleepable) {
        Self::shutdown_ctrl(ctrl, true, cx);
    }

    #[inline]
    fn is_live(queue: &Queue) -> bool {
        queue.live.load(Relaxed)
    }

    #[inline]
    fn queue_rq(queue: ArcBorrow<'_, Queue>, rq: Rq) -> Result<(), Refused> {
        let mut tag = match queue.take_tag(rq.tag()) {
            Ok(tag) => tag,
            Err(e) => return Err(rq.refuse(queue.reason(e))),
        };
        let id = tag.id();
        let len = rq.payload_bytes();
        if let Err(e) = tag.parts().0.write(rq.command(), id) {
            return Err(rq.refuse(queue.reason(e)));
        }
        if let Err((rq, e)) = queue.map_data(rq, len, &mut tag) {
            return Err(rq.refuse(queue.reason(e)));
        }
        match queue.post_send(tag, len) {
            Ok(()) => Ok(()),
            Err(refused) => queue.send_refused(refused),
        }
    }

    fn poll(queue: &Queue) -> u32 {
        queue.cq.process(u32::MAX)
    }

    fn timed_out(queue: &Arc<Queue>, cx: &Sleepable) {
        queue.abandon(cx);
    }

    fn submit_async_event(admin: &Queue) {
        // One that is out is enough, and a queue that has failed is made again.
        let Ok(mut tag) = admin.tags.take_at(ASYNC_EVENT) else {
            return;
        };
        let id = tag.id();
        let mut command = [0; COMMAND];
        let [opcode, ..] = &mut command;
        *opcode = bindings::nvme_admin_opcode_nvme_admin_async_event as u8;
        let written = tag.parts().0.write(&command, id);
        // Seldom: `post_send` stays inlined where requests are sent.
        let posted = written.and_then(|()| Ok(admin.post_in_turn(tag, 0)?));
        if let Err(e) = posted {
            admin.link.with_device(|dev| {
                rdma::dev_err_ratelimited!(dev, "an asynchronous event was not asked for: {e:?}\n");
            });
        }
    }
}
