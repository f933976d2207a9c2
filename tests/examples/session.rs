// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/session.rst.

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
        Received,
        RecvCredits,
        RecvHandler,
        RecvRing,
        Room,
        SendCredits, //
    },
    wc::Success, //
};

#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

#[pin_data]
struct Conn {
    id: cm::Id,
    qp: Qp<Softirq>,
    #[pin]
    credits: SendCredits,
}

impl Conn {
    fn take(&self, _message: &[u8]) {}

    fn send(&self, message: Pin<KBox<Message>>) -> Result {
        (self.qp).post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?;
        Ok(())
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
        let (conn, bytes) = message.open();
        conn.take(&bytes);
        // Dropping the message posts its receive again.
    }

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {
        self.credits.close(ENOTCONN);
    }

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
        self.id.disconnect_later();
    }
}

/// A side that may send when its peer has given it credits, at most 32, and gives as many at first.
fn credits(id: cm::Id, qp: Qp<Softirq>) -> Result<(Arc<Conn>, RecvCredits)> {
    let conn = pin_init!(Conn {
        id,
        qp,
        credits <- SendCredits::new(0, 32),
    });
    Ok((Arc::pin_init(conn, GFP_KERNEL)?, RecvCredits::new(32, 32)))
}

fn send(conn: &Conn, message: Pin<KBox<Message>>, cx: &Sleepable) -> Result {
    if conn.credits.available() == 0 {
        pr_info!("this waits for the peer\n");
    }
    let credit = conn.credits.wait(5_000, cx)?;
    credit.spend(|| conn.send(message))?;
    Ok(())
}

/// Answers where nothing may wait, if the peer has a receive for it.
fn answer(message: &Received<'_, Conn>, answer: Pin<KBox<Message>>) -> Result {
    if message.wc().imm_data().is_some() {
        return Err(EPROTO);
    }
    let conn = message.conn();
    conn.credits.take()?.spend(|| conn.send(answer))
}

/// Connects. If that fails, the receives come back.
fn connect(
    conn: &Arc<Conn>,
    id: &cm::Id,
    ring: RecvRing<'_>,
    handler: Arc<impl cm::Handler>,
    cx: &Sleepable,
) -> Result {
    let connecting = Connecting::new(id, conn.qp(), cx);
    ring.post(conn, cx)?;
    id.connect(handler, &cm::ConnParam::default(), cx)?;
    connecting.connected();
    Ok(())
}

struct Read;

/// Where the peer writes what was asked for, and the message that reports it.
struct Request {
    region: Region<FromDevice>,
    buf: Buf<ToDevice>,
}

impl Request {
    fn write(&self, id: u32, to: Remote) -> Result {
        self.buf.write(0, &id.to_le_bytes())?;
        self.buf.write(4, &to.rkey.to_le_bytes())?;
        self.buf.write(8, &to.addr.to_le_bytes())
    }

    /// Returns whether there was a reply.
    fn finish(&self, status: Option<u32>) -> bool {
        match status {
            Some(status) => pr_info!("read, status {status}\n"),
            None => pr_info!("there was no reply\n"),
        }
        status.is_some()
    }
}

/// The object that the connections of a device belong to.
struct Controller;

impl Controller {
    fn recover(&self) {}
}

impl Exchange for Read {
    /// What is posted.
    type Request = Request;
    /// What waits for the reply.
    type Reply = Option<u32>;
    /// What the exchanges share.
    type Connection = Arc<Controller>;
    type Needs = context::Atomic;

    fn ended(mut tag: Tag<Self>) {
        let (request, status) = tag.parts();
        let is_answered = request.finish(status.take());
        if !is_answered {
            tag.connection().recover();
        }
    }
}

/// Makes the exchanges of a QP.
fn tags(
    qp: &Qp<Softirq>,
    controller: &Arc<Controller>,
    pd: &Pd,
    cx: &Sleepable,
) -> Result<Tags<Read>> {
    let make = |_| {
        let request = Request {
            region: Region::new(Buf::alloc(pd, 4096, cx)?, cx)?,
            buf: Buf::alloc(pd, 16, cx)?,
        };
        Ok((request, None))
    };
    Tags::new(qp, controller.clone(), 32, 16, make, cx)
}

/// Reads for a request of blk-mq, which has chosen the tag.
fn queue_rq(tags: &Tags<Read>, qp: &Qp<Softirq>, tag: u16) -> Result {
    // `EBUSY` if an exchange of this tag has not ended.
    let tag = tags.take_at(tag)?;
    tag.post(qp, |request, chain: &mut Chain<'_, 1>| {
        chain.push(SendWr::send([request.buf.whole()]))
    })?;
    Ok(())
}

/// Reads where nothing may wait, if a tag is free.
fn read_ahead(tags: &Tags<Read>, qp: &Qp<Softirq>) -> Result {
    tags.take()?.post(qp, |request, chain: &mut Chain<'_, 1>| {
        chain.push(SendWr::send([request.buf.whole()]))
    })?;
    Ok(())
}

fn read(tags: &Tags<Read>, qp: &Qp<Softirq>, cx: &Sleepable) -> Result {
    let tag = tags.wait(5_000, cx)?;
    let id = tag.id().to_u32();
    tag.post(qp, |request, chain: &mut Chain<'_, 2>| {
        let remote = chain.push(RegWr::remote_write(&request.region))?;
        request.write(id, remote)?;
        chain.push(SendWr::send([request.buf.whole()]))
    })?;
    Ok(())
}

fn replied(tags: &Tags<Read>, qp: &Qp<Softirq>, wc: &Success<'_>, id: u32, status: u32) -> Result {
    let mut reply = tags.reply(wc, TagId::from_u32(id))?;
    if reply.request().region.remote_invalidated(wc, qp) {
        *reply = Some(status);
    } else {
        // The reply is being handled until `Exchange::invalidated()`.
        reply.post(qp, |request| Ok(InvWr::new(&request.region)))?;
    }
    Ok(())
}

/// The answer to a request, whose data and message are posted together.
#[derive(HasCqe)]
struct Answer {
    cqe: Cqe<Self>,
    data: Buf<ToDevice>,
    to: Remote,
    message: Buf<ToDevice>,
    /// The number of work requests.
    places: u32,
    target: Arc<Target>,
}

struct Target {
    qp: Qp<Softirq>,
    room: Room<Pin<KBox<Answer>>>,
}

impl CqeHandler for Answer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.target.gone(this.places);
    }
}

impl Target {
    /// The peer may have so many requests outstanding.
    fn new(qp: Qp<Softirq>, places: u32, requests: u32, cx: &Sleepable) -> Result<Self> {
        let room = Room::new(&qp, places, requests, cx)?;
        Ok(Self { qp, room })
    }

    /// Answers now, or in the handler of another answer.
    fn answer(&self, answer: Pin<KBox<Answer>>) -> Result {
        if let Some(answer) = self.room.take(answer.places, answer)? {
            self.post(answer);
        }
        Ok(())
    }

    fn post(&self, answer: Pin<KBox<Answer>>) {
        let places = answer.places;
        let posted = (self.qp).post_chain(answer, |answer, chain: &mut Chain<'_, 2>| {
            chain.push(SendWr::rdma_write([answer.data.whole()], answer.to))?;
            chain.push(SendWr::send([answer.message.whole()]))
        });
        if let Err(e) = posted {
            // A driver that has not said which request it refused may have posted all.
            if e.owner.is_some() || e.posted() > 0 {
                self.gone(places.saturating_sub(e.posted()));
            }
        }
    }

    /// Work requests have completed, or were not posted.
    fn gone(&self, places: u32) {
        self.room.give(places, |next| self.post(next));
    }

    fn end(&self, cx: &Sleepable) -> Result {
        self.room.close(ENOTCONN, drop);
        self.qp.drain(cx)
    }
}
