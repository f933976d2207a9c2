// SPDX-License-Identifier: GPL-2.0

//! Bindings of the private headers of NVMe, a module of each driver.
//!
//! bindgen generates what the driver's `bindings.h` declares. All other types are those of
//! [`kernel::bindings`]. The headers come from a source that should be the one that the kernel was
//! built from. So layouts are compared with the BTF of the kernel: drivers/nvme/layouts.py writes a
//! line for each type, member and constant, and a line that is not true does not compile.

#[allow(
    clippy::all,
    clippy::as_underscore,
    clippy::cast_lossless,
    clippy::ptr_as_ptr,
    clippy::ref_as_ptr,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    improper_ctypes,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unknown_lints,
    unnecessary_transmutes,
    unreachable_pub,
    unsafe_op_in_unsafe_fn
)]
mod generated {
    pub(crate) use ::kernel::bindings::*;
    use ::kernel::ffi;
    use ::pin_init::MaybeZeroable;

    include!(concat!(env!("NVME_BINDINGS_DIR"), "/bindings_generated.rs"));
}

pub(crate) use generated::*;

/// The layouts in the kernel's BTF, or nothing if it has none.
#[allow(unused_imports, unused_macros)]
mod layouts {
    use super::generated::*;
    use core::mem::offset_of;

    /// Returns the size of the member to which a function gets from its structure.
    #[allow(dead_code)]
    const fn size_of_member<T, M>(_: fn(*const T) -> *const M) -> usize {
        size_of::<M>()
    }

    macro_rules! same {
        ($a:expr, $b:expr, $said:literal) => {
            const _: () = assert!($a == $b, $said);
        };
    }

    macro_rules! member {
        ($type:ty, $name:ident, $offset:literal, $size:literal, $said:literal) => {
            same!(offset_of!($type, $name), $offset, $said);
            same!(
                // SAFETY: The closure is only named, for its type, and never called.
                size_of_member(|at: *const $type| unsafe { &raw const (*at).$name }),
                $size,
                $said
            );
        };
    }

    include!(concat!(env!("NVME_BINDINGS_DIR"), "/layouts_generated.rs"));
}
