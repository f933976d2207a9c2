// SPDX-License-Identifier: GPL-2.0

//! KUnit suites of what waits in vain, for minutes: for kernels whose time jumps to what is next.
//! Other suites are in `rdma_kunit`.

#[macro_use]
mod check;
#[macro_use]
mod suites;

mod client;
mod fixture;
mod timeouts;

/// The name of the module.
const NAME: &[u8] = b"rdma_timeouts";

rdma::module_rdma_client! {
    type: client::Kunit,
    name: "rdma_timeouts",
    authors: ["rdma-rs authors"],
    description: "KUnit suites of the crate rdma that wait in vain",
    license: "GPL",
}
