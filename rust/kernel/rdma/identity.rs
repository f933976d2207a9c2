// SPDX-License-Identifier: GPL-2.0

//! Types that are told apart at run time, by the address of a function.
//!
//! A `TypeId` cannot be used for that: modules whose files have one name may share it. A function
//! that is generic over a type is compiled into the module that names the type, so its address is
//! that module's own. But the compiler merges functions whose machine code is the same. So the code
//! of [`identity`] has the type's id in it, and code that refers to `identity` differs with it.
//!
//! Equal addresses prove that the types are the same. Different addresses prove nothing: a function
//! may be compiled into several modules.

use core::{
    any::TypeId,
    arch::asm, //
};

/// Returns a value that differs for each type, so that no two of these functions are merged.
fn identity<T: 'static>() -> TypeId {
    TypeId::of::<T>()
}

/// Returns an address that stands for the type. It is not null.
#[inline(always)]
pub(crate) fn address_of<T: 'static>() -> usize {
    identity::<T> as fn() -> TypeId as usize
}

/// Keeps the function that this is inlined into from being merged with those for other types `T`,
/// by a comment in its assembly. It costs no instruction.
#[inline(always)]
pub(crate) fn keep_distinct<T: 'static>() {
    // SAFETY: The assembly is a comment: it has no instruction.
    unsafe {
        asm!(
            "/* {} */",
            sym identity::<T>,
            options(nomem, nostack, preserves_flags)
        )
    };
}
