// SPDX-License-Identifier: GPL-2.0

//! The steps of transfers that are prepared, and of memory that scatter lists describe.

use crate::{
    owners::{
        none_posted,
        refused,
        Memory, //
    },
    session::NOWHERE,
    steps::Turn,
    tally::Life,
    way::Way,
    world::{
        Pair,
        LEN, //
    },
};
use core::ops::Deref;
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    prelude::*,
    rw::{
        Ctx,
        Rw, //
    },
    sg::{
        Pages,
        SgList,
        SgMap,
        SgOwner, //
    }, //
};

/// The number of transfers that a thread has prepared, at the most.
const PREPARED: usize = 3;

/// A transfer, with an answer that may follow it.
#[derive(HasCqe)]
struct Transfer<O: SgOwner<Bidirectional>> {
    cqe: Cqe<Self>,
    data: Ctx<Bidirectional, O>,
    answer: Memory,
    life: Life,
}

impl<O: SgOwner<Bidirectional>> Transfer<O> {
    fn new(data: Ctx<Bidirectional, O>, answer: Memory, life: Life) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            data,
            answer,
            life,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }
}

impl<O: SgOwner<Bidirectional>> CqeHandler for Transfer<O> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}

/// An end of a pair.
type End<C> = (Arc<Pair<C>>, Qp<C>);

/// A transfer that this thread has prepared for an end of a pair, which it may keep.
pub(crate) struct Prepared<C: Way> {
    transfer: Pin<KBox<Transfer<Pages>>>,
    end: Option<End<C>>,
}

/// Prepares a transfer for later, or takes one that was prepared: it is posted, to the QP that it
/// was prepared for, if that is there, or to another, or it is given up.
pub(crate) fn prepared<C: Way>(t: &mut Turn<'_, C>) -> Result {
    if t.prepared.len() < PREPARED {
        let (pair, qp) = t.end_for_parts()?;
        let (len, remote) = match t.rng.once_in(4) {
            true => (1 + t.rng.below(2 * PAGE_SIZE as u32) as usize, NOWHERE),
            false => (LEN, pair.remote(1).ok_or(EINVAL)?),
        };
        let transfer = Transfer::new(Ctx::alloc(len, t.cx)?, t.memory()?, t.life())?;
        qp.prepare_rw(Rw::write(&transfer.data, .., remote, t.cx))?;
        let end = t.rng.once_in(2).then_some((pair, qp));
        t.prepared.push(Prepared { transfer, end }, GFP_KERNEL)?;
        return Ok(());
    }
    let index = t.rng.below(t.prepared.len() as u32) as usize;
    let prepared = t.prepared.remove(index).map_err(|_| EINVAL)?;
    let Prepared { mut transfer, end } = prepared;
    match t.rng.below(6) {
        0 => return Ok(()),
        1 => transfer.data.cancel(),
        _ => {}
    }
    let (_pair, qp) = match end {
        Some(end) => end,
        None => t.end_for_parts()?,
    };
    let then = t.rng.once_in(2);
    transfer.life.post_in_part();
    let error = match then {
        false => qp.post_rw(transfer, |o| Ok(Rw::prepared(&o.data))),
        true => qp.post_rw(transfer, |o| {
            Ok(Rw::prepared(&o.data).then(SendWr::send([o.answer.whole()])))
        }),
    };
    error.map_err(|e| {
        let error = e.error();
        none_posted(e.owner, |o| &o.life);
        error
    })
}

/// A request whose handler posts a transfer that was prepared: where it may not sleep. It has its
/// QP, so the transfer is of one request.
#[derive(HasCqe)]
struct Staged<C: Way> {
    first: Cqe<Self, 0>,
    second: Cqe<Self, 1>,
    qp: Qp<C>,
    data: Ctx,
    life: Life,
}

impl<C: Way> CqeHandler<0> for Staged<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
        if wc.result().is_err() {
            return;
        }
        let qp = this.qp.clone();
        this.life.post();
        let posted = qp.post_rw(this, |o| Ok(Rw::prepared(&o.data).done_by::<1>()));
        if let Err(e) = posted {
            refused(e, |o| &o.life);
        }
    }
}

impl<C: Way> CqeHandler<1> for Staged<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}

pub(crate) fn staged<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (pair, _) = t.held_end()?;
    let ([qp, _], remote) = (&pair.ends, pair.remote(1).ok_or(EINVAL)?);
    let staged = Staged {
        first: Cqe::new(),
        second: Cqe::new(),
        qp: qp.clone(),
        data: Ctx::alloc(LEN, t.cx)?,
        life: t.life(),
    };
    let staged = KBox::pin(staged, GFP_KERNEL)?;
    qp.prepare_rw(Rw::write(&staged.data, .., remote, t.cx))?;
    staged.life.post();
    qp.post_send(staged, |_| Ok(SendWr::rdma_write([], NOWHERE)))
        .map_err(|e| refused(e, |o| &o.life))
}

/// Bytes that many share, and that count as an owner.
pub(crate) struct Bytes {
    bytes: KVec<u8>,
    _life: Life,
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

type Listed = SgMap<SgList<Arc<Bytes>>, ToDevice>;

/// A box with a region of such bytes, which its handler invalidates, or drops as it is.
#[derive(HasCqe)]
struct Published<C: Way> {
    cqe: Cqe<Self>,
    qp: Qp<C>,
    region: Region<ToDevice, Listed>,
    drops: bool,
    life: Life,
}

impl<C: Way> CqeHandler for Published<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
        let registered = wc.result().is_ok_and(|wc| wc.opcode() == Opcode::RegMr);
        if this.drops || !registered {
            return;
        }
        this.life.post();
        let posted = Qp::repost_send(this, wc, |o| &o.qp, |o| Ok(InvWr::new(&o.region)));
        if let Err(e) = posted {
            refused(e, |o| &o.life);
        }
    }
}

/// Registers bytes of a scatter list, for the peer to read.
pub(crate) fn list<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (pair, qp) = t.held_end()?;
    let len = LEN + t.rng.below(2 * PAGE_SIZE as u32) as usize;
    let bytes = Bytes {
        bytes: KVec::from_elem(1, len, GFP_KERNEL)?,
        _life: t.life(),
    };
    let bytes = Arc::new(bytes, GFP_KERNEL)?;
    let list = SgList::new(bytes.clone(), t.cx)?;
    let memory = Listed::new(&t.world.parts.pd, list)?;
    let published = Published {
        cqe: Cqe::new(),
        qp: qp.clone(),
        region: Region::new(memory, t.cx)?,
        drops: t.rng.once_in(2),
        life: t.life(),
    };
    let published = KBox::pin(published, GFP_KERNEL)?;
    published.life.post();
    let remote = qp
        .post_send(published, |o| Ok(RegWr::remote_read(&o.region)))
        .map_err(|e| refused(e, |o| &o.life))?;
    if t.rng.once_in(2) {
        pair.set_remote(1, remote);
    }
    Ok(())
}

/// Transfers the bytes of a vector.
pub(crate) fn vector<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (pair, qp) = t.end_for_parts()?;
    let len = LEN + t.rng.below(PAGE_SIZE as u32) as usize;
    let list = SgList::new(KVec::from_elem(2, len, GFP_KERNEL)?, t.cx)?;
    let transfer = Transfer::new(Ctx::new(list, GFP_KERNEL)?, t.memory()?, t.life())?;
    let remote = pair.remote(1).ok_or(EINVAL)?;
    let reads = t.rng.once_in(2);
    transfer.life.post_in_part();
    let posted = qp.post_rw(transfer, |o| {
        Ok(match reads {
            true => Rw::read(&o.data, 0..LEN, remote, t.cx),
            false => Rw::write(&o.data, 0..LEN, remote, t.cx),
        })
    });
    posted.map_err(|e| {
        let error = e.error();
        none_posted(e.owner, |o| &o.life);
        error
    })
}
