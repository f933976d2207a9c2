// SPDX-License-Identifier: GPL-2.0

//! What nearly every ULP uses.
//!
//! # Examples
//!
//! ```
//! use rdma::prelude::*;
//! ```

pub use core::net::SocketAddr;
pub use kernel::sync::Arc;

pub use crate::{
    client::{
        Client,
        ClientRef,
        DeviceData, //
    },
    cm,
    context::{
        Atomic,
        CallerPolled,
        CorePolled,
        Direct,
        PollContext,
        Provides,
        Sleepable,
        Softirq,
        UnboundWorkqueue,
        Waited,
        Workqueue, //
    },
    cq::{
        Batch,
        Completion,
        Cq,
        CqSet,
        Wait, //
    },
    cqe::{
        Cqe,
        CqeHandler,
        HasCqe, //
    },
    device::Device,
    dma::{
        Bidirectional,
        Buf,
        FromDevice,
        ToDevice, //
    },
    lend::{
        Kept,
        Lent, //
    },
    mr::{
        InvWr,
        Mr,
        RegWr,
        Region, //
    },
    pd::Pd,
    qp::{
        Caps,
        Qp, //
    },
    sg::{
        Pages,
        SgBuf, //
    },
    wc::{
        Opcode,
        Status,
        Wc,
        WcError, //
    },
    wr::{
        PostError,
        RecvWr,
        Remote,
        SendWr, //
    }, //
};
