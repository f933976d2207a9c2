// SPDX-License-Identifier: GPL-2.0

//! NVMe over RDMA, the target.
//!
//! The module registers the RDMA transport with nvmet, in the place of nvmet-rdma: nvmet has one
//! transport of each type.
//!
//! - [`nvmet`]: what the driver needs of nvmet, with all unsafe code.
//! - [`users`]: a count of users, by which a port waits for its submission queues.
//! - [`rdma`]: the driver, whose functions have the names of those in nvmet-rdma.
//!
//! See Documentation/nvme-target.rst.

#[path = "../bindings.rs"]
mod bindings;
// In both, a panic by a number of a host would end the machine.
#[warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]
mod nvmet;
#[path = "rdma.rs"]
#[warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]
mod target;
#[warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]
mod users;

use target::NvmetRdma;

::rdma::module_rdma_client! {
    type: NvmetRdma,
    name: "nvmet_rdma_rs",
    authors: ["rdma-rs authors"],
    description: "NVMe over RDMA in Rust, the target",
    license: "GPL",
    // NVMF_TRTYPE_RDMA
    alias: ["nvmet-transport-1"],
}
