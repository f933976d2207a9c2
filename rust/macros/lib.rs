// SPDX-License-Identifier: GPL-2.0

//! Procedural macros of the crate `rdma`.

mod has_cqe;

use proc_macro::TokenStream;

/// Implements `rdma::cqe::HasCqe` for each field of type `Cqe<Self>` or `Cqe<Self, ID>`.
///
/// # Examples
///
/// ```ignore
/// #[derive(HasCqe)]
/// struct Request {
///     send: Cqe<Self>,
///     reg: Cqe<Self, 1>,
/// }
/// ```
#[proc_macro_derive(HasCqe)]
pub fn derive_has_cqe(input: TokenStream) -> TokenStream {
    has_cqe::derive(input)
}
