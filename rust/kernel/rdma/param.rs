// SPDX-License-Identifier: GPL-2.0

//! Parameters of modules that are IP addresses.
//!
//! `module!` knows its types of parameters by their names: numbers and `bool`. So these have
//! operations of their own.
//!
//! C header: [`include/linux/moduleparam.h`](srctree/include/linux/moduleparam.h)

use crate::prelude::internal::*;
use core::net::IpAddr;
use kernel::{
    module_param::KernelParam,
    sync::SetOnce, //
};

/// A parameter of a module that is an IP address, without a scope (`struct kernel_param`).
///
/// [`ip_params!`](crate::ip_params) makes them.
pub struct IpParam(SetOnce<IpAddr>);

impl IpParam {
    /// Makes a parameter that was not given.
    #[doc(hidden)]
    #[inline]
    pub const fn new() -> Self {
        Self(SetOnce::new())
    }

    /// Returns the address, if one was given when the module was loaded. Does not sleep.
    #[inline]
    pub fn value(&self) -> Option<IpAddr> {
        self.0.copy()
    }
}

/// `kernel_param_ops.set`.
///
/// # Safety
///
/// `val` is null or a string, and `param` is one of [`kernel_param`].
unsafe extern "C" fn set(val: *const c_char, param: *const bindings::kernel_param) -> c_int {
    if val.is_null() {
        return EINVAL.to_errno();
    }
    // SAFETY: `val` is a string, as was just checked and as the caller promises, who calls with a
    // parameter of `kernel_param()`, whose argument is an `IpParam` that is static.
    let (text, param) = unsafe {
        let param = (*param).__bindgen_anon_1.arg.cast::<IpParam>();
        (CStr::from_char_ptr(val), &*param)
    };
    match text.to_str().map(str::parse) {
        Ok(Ok(addr)) if param.0.populate(addr) => 0,
        // It was given twice.
        Ok(Ok(_)) => EEXIST.to_errno(),
        _ => EINVAL.to_errno(),
    }
}

/// The operations of the parameters.
#[doc(hidden)]
pub static OPS: bindings::kernel_param_ops = bindings::kernel_param_ops {
    flags: 0,
    set: Some(set),
    get: None,
    free: None,
};

/// Makes the entry of a parameter. Its name has a zero at its end.
#[doc(hidden)]
#[inline]
pub const fn kernel_param(
    name: &'static str,
    param: &'static IpParam,
    module: *mut bindings::module,
) -> KernelParam {
    let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else {
        panic!("a parameter's name");
    };
    KernelParam::new(bindings::kernel_param {
        name: kernel::str::as_char_ptr_in_const_context(name),
        mod_: module,
        ops: &raw const OPS,
        // It is not in sysfs.
        perm: 0,
        level: -1,
        flags: 0,
        __bindgen_anon_1: bindings::kernel_param__bindgen_ty_1 {
            arg: ptr::from_ref(param).cast_mut().cast(),
        },
    })
}

/// Declares parameters of the module that are IP addresses, of version 4 or 6 (`module_param`): the
/// module is not loaded with anything else, and the kernel reports it. They are in a module
/// `ip_parameters`. A module that is built into the kernel has none.
///
/// # Examples
///
/// ```
/// rdma::ip_params! {
///     server: "address of the server",
/// }
///
/// fn server() -> Option<core::net::IpAddr> {
///     ip_parameters::server.value()
/// }
/// ```
#[macro_export]
macro_rules! ip_params {
    ($($name:ident: $description:literal,)+) => {
        mod ip_parameters {
            $(
                #[allow(non_upper_case_globals)]
                pub(crate) static $name: $crate::param::IpParam = $crate::param::IpParam::new();

                #[cfg(MODULE)]
                const _: () = {
                    const INFO: &str = ::core::concat!(
                        "parmtype=", ::core::stringify!($name), ":IP address\0",
                        "parm=", ::core::stringify!($name), ":", $description, "\0",
                    );

                    #[link_section = ".modinfo"]
                    #[used(compiler)]
                    static MODINFO: [u8; INFO.len()] = match INFO.as_bytes().first_chunk() {
                        Some(info) => *info,
                        None => [0; INFO.len()],
                    };

                    #[link_section = "__param"]
                    #[used(compiler)]
                    static PARAM: $crate::client::crates::kernel::module_param::KernelParam =
                        $crate::param::kernel_param(
                            ::core::concat!(::core::stringify!($name), "\0"),
                            &$name,
                            // SAFETY: Only the address is taken, of a symbol that each module has.
                            unsafe {
                                (&raw const $crate::client::crates::kernel::bindings::__this_module)
                                    .cast_mut()
                            },
                        );
                };
            )+
        }
    };
}
