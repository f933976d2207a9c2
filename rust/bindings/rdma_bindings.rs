// SPDX-License-Identifier: GPL-2.0

//! Bindings to the RDMA subsystem.
//!
//! bindgen generates what `rdma_bindings.h` declares. All other types are those of
//! [`kernel::bindings`], which is re-exported, so a `struct device` is one type in both. Safe code
//! has no use for this crate.

#![cfg_attr(not(CONFIG_RUSTC_HAS_UNNECESSARY_TRANSMUTES), allow(unknown_lints))]
#![allow(
    clippy::all,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    improper_ctypes,
    unnecessary_transmutes
)]

#[allow(clippy::as_underscore)]
#[allow(clippy::cast_lossless)]
#[allow(clippy::ptr_as_ptr)]
#[allow(clippy::ref_as_ptr)]
#[allow(clippy::undocumented_unsafe_blocks)]
mod generated {
    pub use ::kernel::bindings::*;
    use ::kernel::ffi;
    use ::pin_init::MaybeZeroable;

    include!(concat!(
        env!("RDMA_BINDINGS_DIR"),
        "/rdma_bindings_generated.rs"
    ));
}

pub use generated::*;

#[cfg(CONFIG_JUMP_LABEL)]
include!(concat!(
    env!("RDMA_BINDINGS_DIR"),
    "/static_branch_generated.rs"
));
