// SPDX-License-Identifier: GPL-2.0

//! The items that nearly every ULP uses.
//!
//! No name here is one that ULPs take from the kernel crate, so that both can be used side by side:
//! `Atomic<u32>` is the kernel's. Items with such names are used with their module, which is here:
//! `context::Atomic`, `cq::Completion`, `cq::Wait`, `wc::Status`. A
//! [`Device`](crate::device::Device) is imported by the file that uses it. `kernel::io` has a
//! `Region` as well, one of I/O memory, for which ULPs have no use.

pub use crate::client::Client;
pub use crate::client::ClientRef;
pub use crate::client::DeviceData;
pub use crate::cm;
pub use crate::context;
pub use crate::context::AnyContext;
pub use crate::context::CallerPolled;
pub use crate::context::Context;
pub use crate::context::CorePolled;
pub use crate::context::Direct;
pub use crate::context::FixedContext;
pub use crate::context::PollContext;
pub use crate::context::Provides;
pub use crate::context::Sleepable;
pub use crate::context::Softirq;
pub use crate::context::UnboundWorkqueue;
pub use crate::context::Waited;
pub use crate::context::Workqueue;
pub use crate::cq;
pub use crate::cq::Cq;
pub use crate::cq::Notify;
pub use crate::cq::WcArray;
pub use crate::cqe::Cqe;
pub use crate::cqe::CqeHandler;
pub use crate::cqe::HasCqe;
pub use crate::dma::Bidirectional;
pub use crate::dma::Buf;
pub use crate::dma::Bufs;
pub use crate::dma::FromDevice;
pub use crate::dma::ToDevice;
pub use crate::mr::InvWr;
pub use crate::mr::Mr;
pub use crate::mr::RegWr;
pub use crate::mr::Region;
pub use crate::mr::SharedRegion;
pub use crate::pd::Pd;
pub use crate::qp::Caps;
pub use crate::qp::Qp;
pub use crate::qp::Requests;
pub use crate::qp::Taken;
pub use crate::sg::SgBuf;
pub use crate::wc;
pub use crate::wc::Opcode;
pub use crate::wc::Wc;
pub use crate::wc::WcError;
pub use crate::wr::PostError;
pub use crate::wr::RecvWr;
pub use crate::wr::Remote;
pub use crate::wr::SendWr;
pub use core::net::SocketAddr;
pub use kernel::sync::Arc;
pub use kernel::sync::ArcBorrow;

/// What nearly every file of the crate uses: the contexts, and no object. A file imports each
/// object that it depends on.
pub(crate) mod internal {
    pub(crate) use crate::bindings;
    pub(crate) use crate::context::AnyContext;
    pub(crate) use crate::context::CallerPolled;
    pub(crate) use crate::context::Context;
    pub(crate) use crate::context::CorePolled;
    pub(crate) use crate::context::Direct;
    pub(crate) use crate::context::FixedContext;
    pub(crate) use crate::context::PollContext;
    pub(crate) use crate::context::Provides;
    pub(crate) use crate::context::Sleepable;
    pub(crate) use crate::context::Softirq;
    pub(crate) use crate::context::UnboundWorkqueue;
    pub(crate) use crate::context::Waited;
    pub(crate) use crate::context::Workqueue;
    pub(crate) use core::marker::PhantomData;
    pub(crate) use core::mem::ManuallyDrop;
    pub(crate) use core::mem::MaybeUninit;
    pub(crate) use core::ptr;
    pub(crate) use core::ptr::NonNull;
    pub(crate) use kernel::alloc::flags::__GFP_NOWARN;
    pub(crate) use kernel::error::from_err_ptr;
    pub(crate) use kernel::error::to_result;
    pub(crate) use kernel::fmt;
    pub(crate) use kernel::prelude::*;
    pub(crate) use kernel::sync::Arc;
    pub(crate) use kernel::sync::ArcBorrow;
}
