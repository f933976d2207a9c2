// SPDX-License-Identifier: GPL-2.0

//! Example of Documentation/mr.rst: a peer reads the memory of a request that another subsystem
//! has made. tests/kunit/sg_owner.rs runs it.

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
    prelude::*,
    sg::{
        SgMap,
        SgOwner,
        Sgl, //
    }, //
};

/// The most segments that a request has.
pub(crate) const SEGMENTS: usize = 8;

/// A request of another subsystem, as of the block layer. Its list has room for all segments that a
/// request may have, of which `blk_rq_map_sg()` would fill as many as this one has.
pub(crate) struct Request {
    list: [bindings::scatterlist; SEGMENTS],
    segments: u32,
    pages: KVec<Page>,
}

/// The memory of a request, from when that is submitted until it is completed.
///
/// # Invariants
///
/// The first `segments` entries of the list are filled, each with a page of the request. Nothing
/// else uses the list or the pages.
pub(crate) struct Payload(KBox<Request>);

impl Payload {
    /// Makes the request that writes these bytes.
    pub(crate) fn write(bytes: &[u8]) -> Result<Self> {
        let mut request = KBox::new(
            Request {
                list: [bindings::scatterlist::default(); SEGMENTS],
                segments: 0,
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
}

// SAFETY: The list is in the box of the request, so it stays where it is, and by the type invariant
// nothing else uses it. Its first `segments` entries are filled, with pages that are the request's,
// and `sg_init_table()` has made it a list, whose end `sg_next` finds. Nobody writes the pages.
unsafe impl SgOwner<ToDevice> for Payload {
    fn sgl(&mut self) -> Sgl<ToDevice> {
        Sgl::new(self.0.list.as_mut_ptr(), self.0.segments)
    }
}

/// The memory of a request, which a peer reads.
type Lent = Region<ToDevice, SgMap<Payload, ToDevice>>;

/// What has come back.
pub(crate) type Back = Arc<SpinLockIrq<Option<Pin<KBox<Io>>>>>;

/// An I/O.
#[derive(HasCqe)]
pub(crate) struct Io {
    cqe: Cqe<Self>,
    pub(crate) lent: Lent,
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

/// Lets the peer read a request's memory, and returns where that is.
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
    Ok(qp.post_send(io, |io| Ok(RegWr::remote_read(&io.lent)))?)
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
