// SPDX-License-Identifier: GPL-2.0

//! KUnit suites of the crate `rdma`.
//!
//! The module is an RDMA client; KUnit runs its suites once it is loaded, on the first RDMA device.
//! Without one every test that needs it fails.
//!
//! A test never leaves by an assertion of KUnit, which ends the thread and runs no destructors, so
//! that its QPs would stall the unload: the macros of [`check`] return an error.

#[macro_use]
mod check;

mod chain;
mod client;
mod cm_active;
mod cm_driven;
mod cm_end;
mod cm_events;
mod cm_listen;
mod cm_options;
mod cm_reject;
mod cm_request;
mod context;
mod cq;
mod cq_poll;
mod cq_pool;
mod cq_seat;
mod cq_wait;
mod cqe;
mod device;
mod device_event;
mod dma;
mod drain;
mod fixture;
mod ibcm;
mod lease;
mod lend;
mod mad;
mod mad_end;
mod mad_wait;
mod mr;
mod mr_access;
mod mr_ended;
mod mr_inv;
mod mr_pool;
mod mr_remote;
mod mr_repost;
mod mr_turn;
mod null_chain;
mod null_create;
mod null_device;
mod null_events;
mod null_lost;
mod null_mr;
mod null_opcode;
mod null_operations;
mod null_order;
mod null_overrun;
mod null_removal;
mod null_srq;
mod null_status;
mod null_ud;
mod null_wait;
mod op;
mod operations;
mod own_handler;
mod parts;
mod post;
mod qp;
mod qp_events;
mod qp_modify;
mod qp_raw;
mod qp_state;
mod removal;
mod repost;
mod rw;
mod send;
mod sg;
mod srq;
mod srq_ends;
mod status;
mod stress;
mod teardown;
mod threads;
mod times;
mod ud;
mod ud_group;

rdma::module_rdma_client! {
    type: client::Kunit,
    name: "rdma_kunit",
    authors: ["rdma-rs authors"],
    description: "KUnit suites of the crate rdma",
    license: "GPL",
}
