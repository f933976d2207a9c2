// SPDX-License-Identifier: GPL-2.0

//! The types that may go to other threads or be used by several at once: as concurrency.rst has it.

use rdma::{
    client::ClientRef,
    cq::Cq,
    device::Device,
    mad::Agent,
    mr::Mr,
    pd::Pd,
    prelude::*,
    qp::{Requests, Taken},
    rw::{Ctx, Rw},
    session::{
        tags::{Exchange, Reply, Tag, Tags},
        Kept, Received, RecvCredits, RecvHandler, SendCredits,
    },
    sg::SgBuf,
    srq::{Receive, Slot, Srq},
    wc::Success,
    wr::{Sge, SgeMut}, //
};

/// Implemented for every type in one way, and in a second one if it has the property: then a call
/// is ambiguous.
trait Ambiguous<Which> {
    fn check() {}
}

impl<T: ?Sized> Ambiguous<()> for T {}
struct IsSend;
impl<T: ?Sized + core::marker::Send> Ambiguous<IsSend> for T {}
struct IsSync;
impl<T: ?Sized + Sync> Ambiguous<IsSync> for T {}

fn send_and_sync<T: Send + Sync>() {}
fn send_only<T: Send>() {}

struct Question(Buf<FromDevice>);

impl Receive for Question {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.0.whole_mut()])
    }

    fn done(_slot: Slot<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

fn objects() {
    send_and_sync::<ClientRef>();
    send_and_sync::<Device>();
    send_and_sync::<Pd>();
    send_and_sync::<Cq<Direct>>();
    send_and_sync::<Cq<Softirq>>();
    send_and_sync::<Qp<Softirq, Workqueue>>();
    send_and_sync::<Srq<Question>>();
    send_and_sync::<Slot<Question>>();
    send_and_sync::<Mr>();
    send_and_sync::<cm::Id>();
    send_and_sync::<cm::Listener>();
    send_and_sync::<Agent>();
}

fn requests() {
    send_and_sync::<Requests<u32>>();
    send_and_sync::<Taken<u32>>();
    // The content of a shared one cannot be reached.
    send_and_sync::<Requests<core::cell::Cell<u32>>>();
    send_only::<Taken<core::cell::Cell<u32>>>();
    <Requests<*mut u32> as Ambiguous<_>>::check();
    <Taken<*mut u32> as Ambiguous<_>>::check();
}

fn memory() {
    send_and_sync::<Buf<FromDevice>>();
    send_and_sync::<Ctx>();
    send_and_sync::<Sge<'_>>();
    send_and_sync::<SgeMut<'_>>();
    send_and_sync::<SendWr<'_>>();
    send_and_sync::<RecvWr<'_>>();
    send_and_sync::<SgBuf<ToDevice>>();
    send_and_sync::<SharedRegion<Bidirectional>>();
    send_only::<Region<Bidirectional>>();
    <&Region<Bidirectional> as Ambiguous<_>>::check();
}

fn protocols<X: Exchange, T: RecvHandler>() {
    send_and_sync::<Tags<X>>();
    send_and_sync::<Tag<X>>();
    send_and_sync::<Kept<T>>();
    send_and_sync::<SendCredits>();
    send_and_sync::<RecvCredits>();
    <Reply<'_, X> as Ambiguous<_>>::check();
    <Received<'_, T> as Ambiguous<_>>::check();
}

fn what_stays_in_its_thread() {
    <context::Atomic as Ambiguous<_>>::check();
    <Sleepable as Ambiguous<_>>::check();
    <Wc as Ambiguous<_>>::check();
    <Success<'_> as Ambiguous<_>>::check();
    <RegWr<'_> as Ambiguous<_>>::check();
    <InvWr<'_> as Ambiguous<_>>::check();
    <Rw<'_> as Ambiguous<_>>::check();
    <cm::Request<'_> as Ambiguous<_>>::check();
}

fn what_can_be_sent() {
    send_only::<Remote>();
    #[cfg(mistake)]
    send_only::<Sleepable>(); //~ E0277 `*mut ()` cannot be sent between threads safely
}

#[cfg(mistake)]
fn what_cannot_be_kept_in_a_thread() {
    <Device as Ambiguous<_>>::check(); //~ E0283 type annotations needed
}
