// SPDX-License-Identifier: GPL-2.0

//! The macro that makes a client a module.

/// Declares a kernel module that is an RDMA ULP.
///
/// Takes what `module!` takes; `type` implements [`Client`](crate::client::Client).
///
/// # Examples
///
/// ```
/// use rdma::prelude::*;
///
/// struct Ulp;
///
/// impl Client for Ulp {
///     type Data = ();
///
///     fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
///         Ok(Ulp)
///     }
/// }
///
/// rdma::module_rdma_client! {
///     type: Ulp,
///     name: "ulp",
///     authors: ["Author"],
///     description: "A ULP",
///     license: "GPL",
/// }
/// ```
#[macro_export]
macro_rules! module_rdma_client {
    (type: $type:ty, $($f:tt)*) => {
        mod rdma_client_paths {
            $crate::own_path!(core);
            $crate::own_path!(kernel);
            $crate::own_path!(pin_init);
        }

        // SAFETY: The slot is this type's own, and the first registration is the module's:
        // `module!` makes it before any other code of the module runs, and drops it when the module
        // is unloaded.
        unsafe impl $crate::client::Owned for $type {
            fn slot() -> &'static $crate::client::Slot {
                static SLOT: $crate::client::Slot = $crate::client::Slot::new();
                &SLOT
            }
        }

        #[$crate::client::crates::kernel::prelude::pin_data]
        struct RdmaClientModule {
            #[pin]
            _registration: $crate::client::Registration<$type>,
        }

        impl $crate::client::crates::kernel::InPlaceModule for RdmaClientModule {
            fn init(
                _module: &'static $crate::client::crates::kernel::ThisModule,
            ) -> impl $crate::client::crates::pin_init::PinInit<
                Self,
                $crate::client::crates::kernel::error::Error,
            > {
                $crate::client::crates::kernel::try_pin_init!(Self {
                    _registration <- $crate::client::Registration::new(
                        <Self as $crate::client::crates::kernel::ModuleMetadata>::NAME,
                    ),
                }? $crate::client::crates::kernel::error::Error)
            }
        }

        $crate::build_info!();

        $crate::client::crates::kernel::prelude::module! {
            type: RdmaClientModule,
            $($f)*
        }
    };
}

/// Refuses a path such as `::kernel` that a ULP has taken over (`extern crate self as kernel`):
/// `module!` and others expand to such paths, and what they mean decides who owns the registration.
///
/// A name that two glob imports bring is an error where it is used, unless both are one thing.
#[doc(hidden)]
#[macro_export]
macro_rules! own_path {
    ($name:ident) => {
        mod $name {
            mod theirs {
                pub(super) use ::$name;
            }
            mod ours {
                pub(super) use $crate::client::crates::$name;
            }
            #[allow(unused_imports)]
            use self::$name as _;
            #[allow(unused_imports)]
            use ours::*;
            #[allow(unused_imports)]
            use theirs::*;
        }
    };
}
