// SPDX-License-Identifier: GPL-2.0

//! The example of an owner of another subsystem's memory, from one end to the other.

#[path = "../../examples/sg_owner.rs"]
mod example;

use crate::fixture::{
    pattern,
    recv,
    Inbox,
    Null,
    CAPS, //
};
use example::{
    finish,
    invalidate,
    send_inline,
    start,
    Back,
    Io,
    Payload,
    INLINE,
    SEGMENTS, //
};
use kernel::{
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    dma::OneWay,
    prelude::*,
    qp::Chain,
    sg::SgMap,
    wr::SgeList, //
};

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
            null: Null::with(&Caps {
                send_sge: 1 + INLINE as u32,
                ..CAPS
            })?,
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

    /// Has the peer write, and returns whether it could.
    fn write(&self, remote: Remote, bytes: &[u8]) -> Result<bool> {
        let sent = Inbox::new()?;
        let message = self.null.env.message(&sent, bytes)?;
        (self.null.a).post_send(message, |m| Ok(SendWr::rdma_write([m.buf.whole()], remote)))?;
        Ok(self.null.one(&sent)?.ok().is_ok())
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

/// A command whose data are written into the request in place.
#[derive(HasCqe)]
struct InPlace {
    cqe: Cqe<Self>,
    capsule: Buf<ToDevice>,
    data: SgMap<Payload, OneWay>,
}

impl CqeHandler for InPlace {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_: Self::Pointer, _: &Wc, _: &context::Atomic) {}
}

impl InPlace {
    /// Sends `capsule` with `data`, in a chain whose requests have so many entries.
    fn send<const SGES: usize>(
        qp: &Qp<Softirq>,
        capsule: Buf<ToDevice>,
        data: SgMap<Payload, OneWay>,
    ) -> Result {
        let cqe = Cqe::new();
        let owner = KBox::pin(Self { cqe, capsule, data }, GFP_KERNEL)?;
        Ok(qp.post_chain(owner, |o, chain: &mut Chain<'_, 1, SGES>| {
            chain.push_with_data(o.capsule.whole(), &o.data)
        })?)
    }
}

#[kunit_tests(rdma_sg_owner)]
mod tests {
    use super::*;

    /// The list has more entries than are filled.
    #[test]
    fn peer_reads_what_is_filled() -> Result {
        let (sides, bytes) = (Sides::new()?, pattern(LEN)?);
        let (io, remote) = sides.start(sides.mr()?, Payload::new(true, &bytes)?)?;
        check_eq!(io.lent.len(), LEN);
        check!(sides.read(remote, LEN)?[..] == bytes[..]);
        let (_request, mr) = sides.end(io)?;
        // With the next one's memory the MR has another length.
        let (io, remote) = sides.start(mr, Payload::new(true, &bytes[..5])?)?;
        check_eq!(io.lent.len(), 5);
        check!(sides.read(remote, 5)?[..] == bytes[..5]);
        sides.end(io)?;
        Ok(())
    }

    #[test]
    fn peer_writes_what_is_read() -> Result {
        let (sides, bytes) = (Sides::new()?, pattern(LEN)?);
        let zeroes = KVec::from_elem(0, LEN, GFP_KERNEL)?;
        let (io, remote) = sides.start(sides.mr()?, Payload::new(false, &zeroes)?)?;
        check!(sides.write(remote, &bytes)?);
        let (request, _mr) = sides.end(io)?;
        check!(request.complete()?[..] == bytes[..]);
        Ok(())
    }

    /// The access goes with the request, though the type of the region is one.
    #[test]
    fn peer_has_access_in_one_direction() -> Result {
        for is_write in [false, true] {
            let sides = Sides::new()?;
            let (io, remote) = sides.start(sides.mr()?, Payload::new(is_write, &[7; 4])?)?;
            match is_write {
                true => check!(!sides.write(remote, &[8; 4])?),
                false => check!(sides.read(remote, 4).is_err()),
            }
            drop(io);
        }
        Ok(())
    }

    /// A message of a command and two segments.
    #[test]
    fn data_go_with_the_command() -> Result {
        let (sides, received) = (Sides::new()?, Inbox::new()?);
        let (env, bytes) = (&sides.null.env, pattern(PAGE_SIZE + 9)?);
        let back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        let zeroes = KVec::from_elem(0, bytes.len() + 3, GFP_KERNEL)?;
        recv(&sides.null.a, env.message(&received, &zeroes)?)?;
        let mut capsule = Buf::alloc(&env.pd, 3, &env.cx)?;
        capsule.cpu().copy_from_slice(b"cmd");
        let data = SgMap::new(&env.pd, Payload::new(true, &bytes)?)?;
        send_inline(&sides.null.b, capsule, data, &back)?;
        let mut message = sides.null.one(&received)?;
        check_eq!(message.ok()?.byte_len, 3 + bytes.len());
        check!(message.bytes()?[..3] == *b"cmd");
        check!(message.bytes()?[3..] == bytes[..]);
        let mut request = None;
        sides.null.wait(|| {
            request = back.lock().take();
            request.is_some()
        })?;
        check!(request.ok_or(EINVAL)?.complete()?[..] == bytes[..]);
        Ok(())
    }

    #[test]
    fn data_of_too_many_segments_are_refused() -> Result {
        let (sides, bytes) = (Sides::new()?, pattern(LEN)?);
        let env = &sides.null.env;
        let data = SgMap::new(&env.pd, Payload::new(true, &bytes)?)?;
        let capsule = Buf::<ToDevice>::alloc(&env.pd, 64, &env.cx)?;
        let mut list = SgeList::<_, { 1 + INLINE }>::new(capsule.whole());
        check_err!(data.append_to(&mut list), ENOSPC);
        let mut list = SgeList::<_, 4>::new(capsule.whole());
        data.append_to(&mut list)?;
        check_err!(list.push(capsule.whole()), ENOSPC);
        // Nor does memory go that the device writes.
        let data = SgMap::new(&env.pd, Payload::new(false, &bytes)?)?;
        let mut list = SgeList::<_, 4>::new(capsule.whole());
        check_err!(data.append_to(&mut list), EACCES);
        Ok(())
    }

    #[test]
    fn data_go_with_the_command_in_place() -> Result {
        let (sides, received) = (Sides::new()?, Inbox::new()?);
        let (env, bytes) = (&sides.null.env, pattern(PAGE_SIZE + 9)?);
        let zeroes = KVec::from_elem(0, bytes.len() + 3, GFP_KERNEL)?;
        recv(&sides.null.a, env.message(&received, &zeroes)?)?;
        let capsule = || {
            let mut capsule = Buf::alloc(&env.pd, 3, &env.cx)?;
            capsule.cpu().copy_from_slice(b"cmd");
            Ok::<_, Error>(capsule)
        };
        let data = |is_write| Ok::<_, Error>(SgMap::new(&env.pd, Payload::new(is_write, &bytes)?)?);
        // One entry is for the command.
        check_err!(
            InPlace::send::<2>(&sides.null.b, capsule()?, data(true)?),
            ENOSPC
        );
        check_err!(
            InPlace::send::<3>(&sides.null.b, capsule()?, data(false)?),
            EACCES
        );
        let other = Pd::alloc(env.pd.device(), &env.cx)?;
        let foreign = SgMap::new(&other, Payload::new(true, &bytes)?)?;
        check_err!(
            InPlace::send::<3>(&sides.null.b, capsule()?, foreign),
            EINVAL
        );
        let foreign = Buf::alloc(&other, 3, &env.cx)?;
        check_err!(
            InPlace::send::<3>(&sides.null.b, foreign, data(true)?),
            EINVAL
        );
        InPlace::send::<3>(&sides.null.b, capsule()?, data(true)?)?;
        let mut message = sides.null.one(&received)?;
        check_eq!(message.ok()?.byte_len, 3 + bytes.len());
        check!(message.bytes()?[..3] == *b"cmd");
        check!(message.bytes()?[3..] == bytes[..]);
        Ok(())
    }

    /// The peer may have the key still.
    #[test]
    fn request_that_was_not_invalidated_does_not_come_back() -> Result {
        let sides = Sides::new()?;
        let (io, _) = sides.start(sides.mr()?, Payload::new(true, &[1])?)?;
        check!(finish(io).is_err());
        Ok(())
    }
}
