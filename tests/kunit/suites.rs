// SPDX-License-Identifier: GPL-2.0

//! Which suites are compiled.

/// Declares the suites, by folders: `rdma_cq` is in the module `cq` of one, and so on. Where only
/// some are to be compiled, each of them is named by a flag of the compiler.
macro_rules! suites {
    ($($name:ident: $flag:ident,)*) => {
        $(
            #[cfg(any(not(some_suites), $flag))]
            mod $name;
        )*
    };
    ($($folder:ident { $($suites:tt)* })*) => {
        $(
            mod $folder {
                suites! { $($suites)* }
            }
        )*
    };
}
