// SPDX-License-Identifier: GPL-2.0

//! The initiator: a connection with many requests in flight, and a load that checks each byte.
//!
//! A request takes a tag. A long value is in memory of the load's, which is mapped and registered
//! for the request alone, for as many bytes as it has, and comes back when the key is invalid.

use crate::{
    proto::*,
    Count,
    Stats, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::Chain,
    session::{
        tags::{
            Exchange,
            Tag,
            TagId,
            Tags, //
        },
        Connecting,
        Load,
        Received,
        RecvHandler,
        RecvRing,
        SendCredits,
        Sizes, //
    },
    sg::{
        SgList,
        SgMap, //
    },
    wc::Success, //
};

/// The longest time to resolve an address and a route, each, and to wait for the target's answer, a
/// reply or a credit, in milliseconds. A signal ends each of these.
const PATIENCE_MS: u32 = 30_000;

/// A receive for each reply, and one for the reply that is being handled: its tag is free before
/// its receive is posted again.
const RECVS: u32 = DEPTH as u32 + 1;

/// Four seconds. rxe repeats an RDMA READ that it takes for lost, and ends the connection if the
/// key is invalid by then.
const ACK_TIMEOUT: u8 = 20;

/// The keys that each tag uses, one after the other.
const KEYS: u32 = 4;

/// The memory of a value, while it is lent.
type Lent = Region<Bidirectional, SgMap<SgList<KVVec<u8>>, Bidirectional>>;

/// The memory of a request, which is posted.
struct Posted {
    capsule: Buf<ToDevice>,
    lent: Option<Lent>,
}

/// The state of a request that waits for the reply; it stays with the tag between two requests.
struct Waiting {
    reply: Option<Reply>,
    /// A value that has come with the reply.
    inline: KVec<u8>,
    plan: Option<Plan>,
    /// The number of requests that were planned.
    turn: u32,
    mr: Option<Mr>,
    memory: KVVec<u8>,
}

struct Io;

impl Exchange for Io {
    type Request = Posted;
    type Reply = Waiting;
    type Connection = ();
    type Needs = context::Atomic;

    fn sent(_posted: &Posted, wc: &Wc, _cx: &context::Atomic) {
        match wc.result() {
            Err(e) if e.status != wc::Status::WR_FLUSH_ERR => {
                rdma::pr_info_ratelimited!("a request: {}\n", e.status)
            }
            _ => {}
        }
    }
}

/// A request of the load: a value is written, and then read.
#[derive(Clone, Copy)]
struct Plan {
    op: u16,
    key: u64,
    /// Tells the bytes of this value from those of all others.
    seed: u32,
    len: usize,
}

impl Plan {
    /// Returns request number `turn` of a tag. Half of the values are short.
    fn new(number: u32, index: u16, turn: u32) -> Self {
        let value = turn / 2;
        let op = if turn % 2 == 0 { PUT } else { GET };
        let key = u64::from(number) << 32 | u64::from(index) << 16 | u64::from(value % KEYS);
        let seed = (number ^ u32::from(index) << 8 ^ value << 16).wrapping_mul(0x9e37_79b1);
        let most = if seed >> 31 == 0 { INLINE } else { MAX_VALUE };
        let len = ((seed >> 8) as usize).checked_rem(most).unwrap_or(0);
        let len = len.saturating_add(1);
        Self { op, key, seed, len }
    }

    fn bytes(&self) -> impl Iterator<Item = u8> {
        let seed = self.seed;
        (0..self.len as u32).map(move |at| (seed ^ at ^ (at >> 8)) as u8)
    }
}

/// A connection.
#[pin_data]
pub(crate) struct Conn {
    id: cm::Id,
    qp: Qp<Softirq>,
    tags: Tags<Io>,
    #[pin]
    credits: SendCredits,
    pd: Pd,
    stats: Arc<Stats>,
    /// The number of this connection.
    number: u32,
}

/// No end waits for the last event, which may be late, or never come: whatever finds that the
/// connection is over closes it, and the load, which has a work item of its own, ends it.
impl cm::Handler for Conn {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        if event.is_last() {
            self.close();
        }
    }
}

impl RecvHandler for Conn {
    type Send = Softirq;
    type Recv = Softirq;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<Softirq> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, _cx: &context::Atomic) {
        let wc = *message.wc();
        let (conn, bytes) = message.open();
        // After the end of the connection nothing is waited for.
        if let Some(e) = conn.replied(&wc, &bytes).err().filter(|e| *e != ENOTCONN) {
            rdma::pr_info_ratelimited!("the target does not keep to the protocol: {e:?}\n");
            conn.stats.add(Count::Violations, 1);
            conn.close();
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {
        self.close();
    }

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
        self.close();
    }
}

impl Conn {
    pub(crate) fn connect(
        client: &ClientRef,
        addr: SocketAddr,
        number: u32,
        stats: &Arc<Stats>,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let options = cm::Options {
            ack_timeout: Some(ACK_TIMEOUT),
            ..Default::default()
        };
        let id = cm::Id::create_with(client, &options, cx)?;
        id.resolve_addr(addr, PATIENCE_MS, cx)?;
        id.resolve_route(PATIENCE_MS, cx)?;
        // The device that leads to the target.
        let dev = id.device()?;
        let pd = &Pd::alloc(dev, cx)?;
        let load = Load {
            requests: DEPTH.into(),
            // The registration, the message, and an invalidation.
            sends: 3,
            recvs: RECVS,
            ..Load::NONE
        };
        let sizes = Sizes::new(dev, 1, &load).inspect_err(|misfit| pr_err!("{dev}: {misfit}\n"))?;
        let vector = number.checked_rem(dev.num_comp_vectors()).unwrap_or(0);
        let cq = Cq::alloc(dev, sizes.entries, vector, cx)?;
        let qp = Qp::create(&id, pd, &cq, &cq, &sizes.caps, cx)?;
        let mut capsules = Bufs::new(pd, DEPTH.into(), REQUEST + INLINE, cx)?;
        let tag = |_| Self::tag(pd, capsules.take(cx)?, cx);
        let init = try_pin_init!(Self {
            tags: Tags::new(&qp, (), DEPTH.into(), GENERATION_BITS, tag, cx)?,
            credits <- SendCredits::new(0, DEPTH.into()),
            pd: pd.clone(),
            stats: stats.clone(),
            id,
            qp,
            number,
        });
        let conn = Arc::pin_init(init, GFP_KERNEL)?;
        let connecting = Connecting::new(&conn.id, &conn.qp, cx);
        let ring = RecvRing {
            pd,
            count: RECVS,
            len: REPLY + INLINE,
        };
        ring.post(&conn, cx)?;
        let param = cm::ConnParam {
            private_data: &hello(DEPTH),
            timeout_ms: PATIENCE_MS,
            ..Default::default()
        };
        let answer = conn.id.connect(conn.clone(), &param, cx)?;
        conn.credits.give(depth(&answer)?.into())?;
        connecting.connected();
        Ok(conn)
    }

    fn tag(pd: &Pd, capsule: Buf<ToDevice>, cx: &Sleepable) -> Result<(Posted, Waiting)> {
        let posted = Posted {
            capsule,
            lent: None,
        };
        let waiting = Waiting {
            reply: None,
            inline: KVec::with_capacity(INLINE, GFP_KERNEL)?,
            plan: None,
            turn: 0,
            mr: Some(Mr::alloc(pd, MAX_PAGES, cx)?),
            memory: KVVec::new(),
        };
        Ok((posted, waiting))
    }

    /// Ends the waits for tags and credits, and with them the load. Any context.
    fn close(&self) {
        self.tags.close(ENOTCONN);
        self.credits.close(ENOTCONN);
    }

    /// A reply has come.
    fn replied(&self, wc: &Success<'_>, message: &[u8]) -> Result {
        let (reply, inline) = Reply::parse(message)?;
        let mut waiting = self.tags.reply(wc, TagId::from_u32(reply.id.get()))?;
        waiting.reply = Some(reply);
        waiting.inline.clear();
        waiting.inline.extend_from_slice(inline, GFP_ATOMIC)?;
        self.credits.give(reply.credits.get().into())?;
        self.stats.add(Count::Answered, 1);
        match &waiting.request().lent {
            Some(lent) if !lent.remote_invalidated(wc, &self.qp) => {
                self.stats.add(Count::LocalInvalidations, 1);
                waiting.post(&self.qp, |p| p.lent.as_ref().map(InvWr::new).ok_or(EINVAL))?;
            }
            Some(_) => self.stats.add(Count::RemoteInvalidations, 1),
            None => {}
        }
        Ok(())
    }

    /// Makes `count` requests, as many as possible at a time, without an end if that is 0. Returns
    /// when all were answered, and the connection has ended.
    pub(crate) fn run(&self, count: u32, cx: &Sleepable) -> Result {
        let done = self.requests(count, cx);
        self.close();
        self.id.release_handler(cx);
        let _ = self.id.disconnect(cx);
        let drained = self.tags.reclaim(&self.qp, cx);
        // The receives of a device that completes nothing keep the connection.
        let ended = drained.or_else(|e| self.qp.release_recvs(cx).and(Err(e)));
        done.and(ended)
    }

    fn requests(&self, count: u32, cx: &Sleepable) -> Result {
        for _ in (0..u64::MAX).take_while(|n| count == 0 || *n < count.into()) {
            self.submit(self.next(cx)?, cx)?;
        }
        // Each tag has the answer to its last request.
        let mut tags = KVec::with_capacity(DEPTH.into(), GFP_KERNEL)?;
        for _ in 0..DEPTH {
            tags.push(self.next(cx)?, GFP_KERNEL)?;
        }
        Ok(())
    }

    /// Waits for a tag, and looks at what its last request has brought.
    fn next(&self, cx: &Sleepable) -> Result<Tag<Io>> {
        let mut tag = self.tags.wait(PATIENCE_MS, cx)?;
        let (posted, waiting) = tag.parts();
        let Some(plan) = waiting.plan.take() else {
            return Ok(tag);
        };
        if let Some(lent) = posted.lent.take() {
            // It is idle, or there was no reply.
            let (mr, map) = lent.into_parts().map_err(|_| ENOTCONN)?;
            waiting.mr = Some(mr);
            waiting.memory = map.into_owner().into_inner();
        }
        let reply = waiting.reply.take().ok_or(ENOTCONN)?;
        reply.to_result()?;
        if plan.op == GET {
            let value: &[u8] = match plan.len {
                ..=INLINE => &waiting.inline,
                _ => &waiting.memory,
            };
            if reply.len.get() != plan.len as u32 || !value.iter().copied().eq(plan.bytes()) {
                return Err(EBADMSG);
            }
            self.stats.add(Count::Verified, plan.len);
        }
        Ok(tag)
    }

    /// Posts the next request of a tag.
    fn submit(&self, mut tag: Tag<Io>, cx: &Sleepable) -> Result {
        let id = tag.id();
        let (posted, waiting) = tag.parts();
        let plan = Plan::new(self.number, id.index, waiting.turn);
        waiting.turn = waiting.turn.wrapping_add(1);
        waiting.plan = Some(plan);
        let mut len = REQUEST;
        if plan.len > INLINE {
            let mut memory = core::mem::take(&mut waiting.memory);
            // Memory that is to be read into is overwritten.
            memory.resize(plan.len, 0, GFP_KERNEL)?;
            let begin = if plan.op == PUT { 0 } else { !0 };
            fill(&mut memory, plan.bytes().map(|byte| byte ^ begin));
            let map = SgMap::new(&self.pd, SgList::new(memory, cx)?)?;
            let mr = waiting.mr.take().ok_or(EIO)?;
            posted.lent = Some(Region::map(mr, map)?);
        } else if plan.op == PUT {
            let mut capsule = posted.capsule.cpu();
            let (_, value) = capsule.split_at_mut_checked(REQUEST).ok_or(EINVAL)?;
            fill(value, plan.bytes());
            len = len.saturating_add(plan.len);
        }
        let posted = self.credits.wait(PATIENCE_MS, cx)?.spend(|| {
            tag.post(&self.qp, |posted, chain: &mut Chain<'_, 2>| {
                let lent = match (&posted.lent, plan.op) {
                    (None, _) => None,
                    (Some(lent), PUT) => Some(chain.push(RegWr::remote_read(lent))?),
                    (Some(lent), _) => Some(chain.push(RegWr::remote_write(lent))?),
                };
                let request = Request::new(id.to_u32(), plan.op, plan.key, plan.len, lent);
                let request: [u8; REQUEST] = zerocopy::transmute!(request);
                posted.capsule.write(0, &request)?;
                chain.push(SendWr::send([posted.capsule.sge(0..len)?]))
            })
        });
        Ok(posted?)
    }
}

fn fill(to: &mut [u8], from: impl Iterator<Item = u8>) {
    to.iter_mut().zip(from).for_each(|(to, byte)| *to = byte);
}
