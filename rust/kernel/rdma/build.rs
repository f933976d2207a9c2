// SPDX-License-Identifier: GPL-2.0

//! The build of the crate that a module belongs to.
//!
//! The symbols of the crate have a hash of its sources and of the kernel's configuration in their
//! names, so the module loader refuses a module that was built against another build. `modinfo`
//! shows the hash as `rdma_build`, for `rdma_rs` itself and for each ULP, and the version of the
//! crate as `version`, for `rdma_rs`.

/// The version of the crate (`MODULE_VERSION`): that of the packages, too.
#[cfg(MODULE)]
#[link_section = ".modinfo"]
#[used(compiler)]
static MODINFO: [u8; 14] = *b"version=0.1.0\0";

const TAG: &[u8] = b"rdma_build=";

/// The hash. Only kbuild sets it; rustdoc has none.
const HASH: &[u8] = match option_env!("RDMA_BUILD") {
    Some(hash) => hash.as_bytes(),
    None => b"none",
};

/// The entry of `.modinfo`, with the zero at its end.
pub const INFO: [u8; TAG.len() + HASH.len() + 1] = {
    let mut info = [0; TAG.len() + HASH.len() + 1];
    let mut i = 0;
    while i < info.len() - 1 {
        info[i] = if i < TAG.len() {
            TAG[i]
        } else {
            HASH[i - TAG.len()]
        };
        i += 1;
    }
    info
};

/// Adds the build of the crate to the module's information (`MODULE_INFO`).
#[doc(hidden)]
#[macro_export]
macro_rules! build_info {
    () => {
        const _: () = {
            #[cfg(MODULE)]
            #[link_section = ".modinfo"]
            #[used(compiler)]
            static MODINFO: [u8; $crate::build::INFO.len()] = $crate::build::INFO;
        };
    };
}
