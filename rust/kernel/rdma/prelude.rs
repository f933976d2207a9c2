// SPDX-License-Identifier: GPL-2.0

//! The items that nearly every ULP uses.

pub use crate::client::Client;
pub use crate::client::ClientRef;
pub use crate::client::DeviceData;
pub use crate::cm;
pub use crate::context::*;
pub use crate::cq::Completion;
pub use crate::cq::Cq;
pub use crate::cq::Notify;
pub use crate::cq::Wait;
pub use crate::cq::WcArray;
pub use crate::cqe::Cqe;
pub use crate::cqe::CqeHandler;
pub use crate::cqe::HasCqe;
pub use crate::device::Device;
pub use crate::dma::Bidirectional;
pub use crate::dma::Buf;
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
pub use crate::reuse::InFlight;
pub use crate::reuse::Reusable;
pub use crate::sg::SgBuf;
pub use crate::wc::Opcode;
pub use crate::wc::Status;
pub use crate::wc::Wc;
pub use crate::wc::WcError;
pub use crate::wr::PostError;
pub use crate::wr::RecvWr;
pub use crate::wr::Remote;
pub use crate::wr::SendWr;
pub use core::net::SocketAddr;
pub use kernel::sync::Arc;
pub use kernel::sync::ArcBorrow;

// And what nearly every file of the crate uses besides.
pub(crate) use crate::bindings;
pub(crate) use crate::cqe::CqePointer;
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
