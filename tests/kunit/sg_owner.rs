// SPDX-License-Identifier: GPL-2.0

//! The example of an owner of another subsystem's memory, from one end to the other.

#[path = "../examples/sg_owner.rs"]
mod example;

use crate::fixture::{
    pattern,
    Inbox,
    Null, //
};
use example::{
    finish,
    invalidate,
    start,
    Back,
    Io,
    Payload,
    SEGMENTS, //
};
use kernel::{
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::prelude::*;

/// Pages, not all of the last, and fewer than a request may have.
const LEN: usize = 3 * PAGE_SIZE - 7;

/// The side that has the requests is `b`, and its peer `a`.
struct Sides {
    null: Null<Softirq>,
    back: Back,
}

impl Sides {
    fn new() -> Result<Self> {
        Ok(Self {
            null: Null::new()?,
            back: Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?,
        })
    }

    fn mr(&self) -> Result<Mr> {
        Mr::alloc(&self.null.env.pd, SEGMENTS as u32, &self.null.env.cx)
    }

    /// Starts a request, and returns it when the peer may access its memory.
    fn start(&self, mr: Mr, payload: Payload) -> Result<(Pin<KBox<Io>>, Remote)> {
        let remote = start(&self.null.b, &self.null.env.pd, mr, payload, &self.back)?;
        Ok((self.back()?, remote))
    }

    /// Ends a request.
    fn end(&self, io: Pin<KBox<Io>>) -> Result<(Payload, Mr)> {
        invalidate(&self.null.b, io)?;
        finish(self.back()?)
    }

    fn back(&self) -> Result<Pin<KBox<Io>>> {
        let mut io = None;
        self.null.wait(|| {
            io = self.back.lock().take();
            io.is_some()
        })?;
        io.ok_or(EINVAL)
    }

    /// Has the peer read.
    fn read(&self, remote: Remote, len: usize) -> Result<KVec<u8>> {
        let sent = Inbox::new()?;
        let zeroes = KVec::from_elem(0, len, GFP_KERNEL)?;
        let message = self.null.env.message(&sent, &zeroes)?;
        let (a, null) = (&self.null.a, &self.null);
        a.post_send(message, |m| {
            Ok(SendWr::rdma_read([m.buf.whole_mut()], remote))
        })?;
        let mut read = null.one(&sent)?;
        read.ok()?;
        read.bytes()
    }
}

#[kunit_tests(rdma_sg_owner)]
mod tests {
    use super::*;

    /// The list has more entries than are filled.
    #[test]
    fn peer_reads_what_is_filled() -> Result {
        let (sides, bytes) = (Sides::new()?, pattern(LEN)?);
        let (io, remote) = sides.start(sides.mr()?, Payload::write(&bytes)?)?;
        check_eq!(io.lent.len(), LEN);
        check!(sides.read(remote, LEN)?[..] == bytes[..]);
        let (_request, mr) = sides.end(io)?;
        // With the next one's memory the MR has another length.
        let (io, remote) = sides.start(mr, Payload::write(&bytes[..5])?)?;
        check_eq!(io.lent.len(), 5);
        check!(sides.read(remote, 5)?[..] == bytes[..5]);
        sides.end(io)?;
        Ok(())
    }

    /// The peer may have the key still.
    #[test]
    fn request_that_was_not_invalidated_does_not_come_back() -> Result {
        let sides = Sides::new()?;
        let (io, _) = sides.start(sides.mr()?, Payload::write(&[1])?)?;
        check!(finish(io).is_err());
        Ok(())
    }
}
