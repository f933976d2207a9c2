// SPDX-License-Identifier: GPL-2.0

//! The InfiniBand connection manager: connections to a service id over a path, without IP
//! addresses.
//!
//! What ULPs use that have an addressing of their own (SRP, IPoIB); all others are better off with
//! [`cm`](crate::cm), whose C side is built upon it. Works on RoCE too, where a [`Path`] is made of
//! two GIDs.
//!
//! The QP is one of [`Qp::create_raw`], in the reset state, or in the INIT state so that receives
//! can be posted before: [`Connection::connect`] and [`Request::accept`] take it to where it can
//! send, and let the peer access what is registered for it. A connection does not keep its QP, nor
//! the other way round: either may go first.
//!
//! An id is destroyed by a work item when its connection or listener is dropped, which may be in
//! its own handler.
//!
//! C header: [`include/rdma/ib_cm.h`](srctree/include/rdma/ib_cm.h)
//!
//! [`Qp::create_raw`]: crate::qp::Qp::create_raw

mod callback;
mod connection;
mod event;
mod listener;
mod param;
mod path;
mod request;

pub use connection::Connection;
pub use event::{
    Answer,
    ConnectError,
    Event,
    Handler, //
};
pub use listener::{
    Accept,
    Listener, //
};
pub use param::Param;
pub use path::Path;
pub use request::Request;
