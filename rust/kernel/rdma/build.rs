// SPDX-License-Identifier: GPL-2.0

//! Which build of the crate a module belongs to.
//!
//! The symbols of the crate carry a hash of its sources and of the kernel's configuration, so that
//! the module loader refuses a module that was built against another build. `modinfo` says which
//! one a module wants: `rdma_build`, that of `rdma_rs` itself and that of each ULP.

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

/// Says in the module's information which build of the crate it belongs to (`MODULE_INFO`).
#[doc(hidden)]
#[macro_export]
macro_rules! build_info {
    () => {
        const _: () = {
            #[cfg(MODULE)]
            #[link_section = ".modinfo"]
            #[used(compiler)]
            static INFO: [u8; $crate::build::INFO.len()] = $crate::build::INFO;
        };
    };
}
