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
        // SAFETY: The slot is this type's own, and the first registration is the module's:
        // `module!` makes it before any other code of the module runs, and drops it when the module
        // is unloaded.
        unsafe impl $crate::client::Owned for $type {
            fn slot() -> &'static $crate::client::Slot {
                static SLOT: $crate::client::Slot = $crate::client::Slot::new();
                &SLOT
            }
        }

        #[::kernel::prelude::pin_data]
        struct RdmaClientModule {
            #[pin]
            _registration: $crate::client::Registration<$type>,
        }

        impl ::kernel::InPlaceModule for RdmaClientModule {
            fn init(
                _module: &'static ::kernel::ThisModule,
            ) -> impl ::pin_init::PinInit<Self, ::kernel::error::Error> {
                ::kernel::try_pin_init!(Self {
                    _registration <- $crate::client::Registration::new(
                        <Self as ::kernel::ModuleMetadata>::NAME,
                    ),
                }? ::kernel::error::Error)
            }
        }

        $crate::build_info!();

        ::kernel::prelude::module! {
            type: RdmaClientModule,
            $($f)*
        }
    };
}
