// SPDX-License-Identifier: GPL-2.0

//! Where requests of arrays are, so that the end of a QP finds those that the device has lost.

mod state;

use crate::{
    cqe,
    prelude::internal::*,
    qp_id::QpId, //
};
pub(crate) use state::Callback;

/// The state of a request.
pub(crate) type State = state::State<bindings::ib_cqe>;

const _: () = assert!(QpId::FREE_BITS == state::FREE_BITS);

/// Returns where the callback of an owner's request is, which is posted with this one.
#[inline]
pub(crate) fn place<T: cqe::HasCqe<ID>, const ID: u64>(
    owner: *mut T,
    callback: *mut bindings::ib_cqe,
) -> Callback<bindings::ib_cqe> {
    let offset = const {
        let offset = cqe::offset::<T, ID>();
        assert!(
            offset >> QpId::FREE_BITS == 0,
            "the callback of a request of an array is in its first 64 KiB"
        );
        offset
    };
    // Known to the compiler, unless the operation has a callback of its own.
    if owner.wrapping_byte_add(offset).cast() == callback {
        Callback::At(offset)
    } else {
        Callback::Elsewhere(callback)
    }
}

/// The requests of an array, whatever they are.
pub(crate) trait RequestArray: Send + Sync {
    /// Returns the address of a request, and its state; `None` if there are not so many.
    fn entry(&self, index: usize) -> Option<(*mut c_void, &State)>;
}
