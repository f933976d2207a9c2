// SPDX-License-Identifier: GPL-2.0

//! Example of Documentation/mr.rst: a peer reads or writes the memory of a request
//! that another subsystem has made. The suite `rdma_sg_owner` runs it.

use kernel::{
    bindings,
    page::{
        Page,
        PAGE_SIZE, //
    },
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    dma::OneWay,
    prelude::*,
    sg::{
        SgMap,
        SgOwner,
        Sgl, //
    },
    wr::SgeList, //
};

/// The most segments that a request has.
pub(crate) const SEGMENTS: usize = 8;

/// A request of another subsystem, as of the block layer. Its list has room for all segments that a
/// request may have, of which `blk_rq_map_sg()` would fill as many as this one has.
pub(crate) struct Request {
    list: [bindings::scatterlist; SEGMENTS],
    segments: u32,
    is_write: bool,
    pages: KVec<Page>,
}

/// The memory of a request, from when that is submitted until it is completed.
///
/// # Invariants
///
/// The first `segments` entries of the list are filled, each with initialised bytes of a page of
/// the request. Nothing else uses the list, or the pages of a read, and nothing else writes those
/// of a write.
pub(crate) struct Payload(KBox<Request>);

impl Payload {
    /// Makes the request that writes these bytes, or that reads as many in their place.
    pub(crate) fn new(is_write: bool, bytes: &[u8]) -> Result<Self> {
        let mut request = KBox::new(
            Request {
                list: [bindings::scatterlist::default(); SEGMENTS],
                segments: 0,
                is_write,
                pages: KVec::new(),
            },
            GFP_KERNEL,
        )?;
        // SAFETY: The list has so many entries.
        unsafe { bindings::sg_init_table(request.list.as_mut_ptr(), SEGMENTS as u32) };
        for part in bytes.chunks(PAGE_SIZE) {
            let page = Page::alloc_page(GFP_KERNEL)?;
            // SAFETY: The part is valid for reads, and nothing else uses the page.
            unsafe { page.write_raw(part.as_ptr(), 0, part.len()) }?;
            let segment = request.pages.len();
            let entry = request.list.get_mut(segment).ok_or(EMSGSIZE)?;
            // As `sg_set_page()`, which is inline.
            entry.page_link |= page.as_ptr() as usize;
            entry.length = part.len() as u32;
            request.pages.push(page, GFP_KERNEL)?;
            request.segments += 1;
        }
        // INVARIANT: So many entries were just filled.
        Ok(Self(request))
    }

    /// Completes the request, and returns its bytes.
    pub(crate) fn complete(self) -> Result<KVec<u8>> {
        let mut bytes = KVec::new();
        for (page, entry) in self.0.pages.iter().zip(&self.0.list) {
            let (from, len) = (bytes.len(), entry.length as usize);
            bytes.resize(from + len, 0, GFP_KERNEL)?;
            let to = bytes.get_mut(from..).ok_or(EINVAL)?;
            // SAFETY: There is room for `len` bytes, and nothing writes the page.
            unsafe { page.read_raw(to.as_mut_ptr(), 0, len) }?;
        }
        Ok(bytes)
    }
}

// SAFETY: The list is in the box of the request, so it stays where it is, and by the type invariant
// nothing else uses it. Its first `segments` entries are filled, with pages that are the request's,
// and `sg_init_table()` has made it a list, whose end `sg_next` finds. By the type invariant nobody
// uses the pages of a read, or writes those of a write.
unsafe impl SgOwner<OneWay> for Payload {
    fn sgl(&mut self) -> Sgl<OneWay> {
        let (first, segments) = (self.0.list.as_mut_ptr(), self.0.segments);
        if self.0.is_write {
            Sgl::to_device(first, segments)
        } else {
            Sgl::from_device(first, segments)
        }
    }
}

/// The memory of a request, mapped for the device.
type Memory = SgMap<Payload, OneWay>;

/// What has come back.
pub(crate) type Back = Arc<SpinLockIrq<Option<Pin<KBox<Io>>>>>;

/// An I/O.
#[derive(HasCqe)]
pub(crate) struct Io {
    cqe: Cqe<Self>,
    pub(crate) lent: Region<OneWay, Memory>,
    back: Back,
}

impl CqeHandler for Io {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        let back = this.back.clone();
        *back.lock() = Some(this);
    }
}

/// Lets the peer read the memory of a write, or write that of a read, and returns where it is.
pub(crate) fn start(
    qp: &Qp<Softirq>,
    pd: &Pd,
    mr: Mr,
    payload: Payload,
    back: &Back,
) -> Result<Remote> {
    let memory = SgMap::new(pd, payload)?;
    let io = Io {
        cqe: Cqe::new(),
        lent: Region::map(mr, memory)?,
        back: back.clone(),
    };
    let io = KBox::pin(io, GFP_KERNEL)?;
    Ok(qp.post_send(io, |io| Ok(RegWr::remote_one_way(&io.lent)))?)
}

/// Ends the access of the peer.
pub(crate) fn invalidate(qp: &Qp<Softirq>, io: Pin<KBox<Io>>) -> Result {
    Ok(qp.post_send(io, |io| Ok(InvWr::new(&io.lent)))?)
}

/// Returns the request, for its completion, and the MR for the next one. Fails if the peer may
/// still have access.
pub(crate) fn finish(io: Pin<KBox<Io>>) -> Result<(Payload, Mr)> {
    let io = KBox::into_inner(Pin::into_inner(io));
    let (mr, memory) = io.lent.into_parts().map_err(|_| EBUSY)?;
    Ok((memory.into_owner(), mr))
}

/// A command, and the data of a write that go with it.
#[derive(HasCqe)]
pub(crate) struct Command {
    cqe: Cqe<Self>,
    capsule: Buf<ToDevice>,
    data: Memory,
    back: Arc<SpinLockIrq<Option<Payload>>>,
}

impl CqeHandler for Command {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        let Self { data, back, .. } = KBox::into_inner(Pin::into_inner(this));
        *back.lock() = Some(data.into_owner());
    }
}

/// The number of segments that go with a command.
pub(crate) const INLINE: usize = 2;

/// Sends a write with its data, if those have up to [`INLINE`] segments.
pub(crate) fn send_inline(
    qp: &Qp<Softirq>,
    capsule: Buf<ToDevice>,
    data: Memory,
    back: &Arc<SpinLockIrq<Option<Payload>>>,
) -> Result {
    let command = Command {
        cqe: Cqe::new(),
        capsule,
        data,
        back: back.clone(),
    };
    let command = KBox::pin(command, GFP_KERNEL)?;
    Ok(qp.post_send(command, |c| {
        let mut sges = SgeList::<_, { 1 + INLINE }>::new(c.capsule.whole());
        c.data.append_to(&mut sges)?;
        Ok(SendWr::send(sges))
    })?)
}
