// SPDX-License-Identifier: GPL-2.0

//! Who creates a QP and destroys it: the connection manager, or the verb.

use crate::{
    bindings,
    cm,
    pd::Pd, //
};
use core::ptr::NonNull;
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    prelude::*,
    sync::Arc, //
};

/// Who creates a QP.
pub(crate) enum Origin<'a> {
    /// The connection manager, for an id.
    Id(&'a Arc<cm::Inner>),
    /// The verb.
    Raw,
}

/// Who destroys a QP: who has created it.
pub(super) enum Owner {
    Id(cm::QpClaim),
    Raw,
}

impl Owner {
    pub(super) fn of(origin: &Origin<'_>, pd: &Pd) -> Result<Self> {
        match origin {
            Origin::Id(id) if id.device_raw() != pd.device().as_raw() => Err(EINVAL),
            Origin::Id(id) => Ok(Self::Id(id.claim_qp()?)),
            Origin::Raw => Ok(Self::Raw),
        }
    }

    /// # Safety
    ///
    /// The CQs of `attr` are alive and of the device of `pd`, and its context lives until the QP is
    /// destroyed.
    pub(super) unsafe fn create(
        &self,
        pd: &Pd,
        attr: &mut bindings::ib_qp_init_attr,
    ) -> Result<NonNull<bindings::ib_qp>> {
        let raw = match self {
            Self::Id(claim) => {
                let id = claim.as_raw();
                // SAFETY: The id is bound to this device and has no QP, and PD and CQs are alive.
                to_result(unsafe { bindings::rdma_create_qp(id, pd.as_raw(), attr) })?;
                // SAFETY: Creation has set the id's QP.
                unsafe { (*id).qp }
            }
            // SAFETY: PD and CQs are alive, and the client's name outlives the QP.
            Self::Raw => from_err_ptr(unsafe {
                let caller = pd.device().client().name.as_char_ptr();
                bindings::ib_create_qp_kernel(pd.as_raw(), attr, caller)
            })?,
        };
        NonNull::new(raw).ok_or(EIO)
    }

    /// # Safety
    ///
    /// `qp` is from [`Self::create`], has no request outstanding and is not used any more, unless
    /// this fails.
    pub(super) unsafe fn destroy(&self, qp: NonNull<bindings::ib_qp>) -> Result {
        match self {
            Self::Id(claim) => {
                // SAFETY: `qp` is from `create`, as the caller promises, so it is the id's. It has
                // no request outstanding, and is not used any more.
                unsafe { bindings::rdma_destroy_qp(claim.as_raw()) };
                Ok(())
            }
            // SAFETY: `qp` is from `create`, has no request outstanding and is not used any more,
            // as the caller promises.
            Self::Raw => to_result(unsafe {
                bindings::ib_destroy_qp_user(qp.as_ptr(), core::ptr::null_mut())
            }),
        }
    }
}
