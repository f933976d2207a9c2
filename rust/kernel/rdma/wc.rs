// SPDX-License-Identifier: GPL-2.0

//! Work completions.
//!
//! A handler gets a [`Wc`]. [`Wc::result`] gives access to the fields that are valid: those of a
//! [`Success`], or those of a [`WcError`], which has no length.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_wc`)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::prelude::internal::*;

/// Defines a type of C values with names, and a text for each, which `$text` returns.
macro_rules! named_values {
    (
        $(#[$doc:meta])* $type:ident($c:ident), $text:ident;
        $($(#[$value_doc:meta])* $name:ident = $raw:ident,)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub struct $type(bindings::$c);

        impl $type {
            $($(#[$value_doc])* pub const $name: Self = Self(bindings::$raw);)*

            /// Returns the C value. Drivers may report values that have no name here.
            pub fn as_raw(self) -> u32 {
                self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                // SAFETY: The function takes any value and returns a string that lives for ever.
                let text = unsafe { CStr::from_char_ptr(bindings::$text(self.0)) };
                fmt::Display::fmt(text, f)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}
pub(crate) use named_values;

named_values! {
    /// The status of a request that failed, as `enum ib_wc_status` without `IB_WC_SUCCESS`. Those
    /// of reliable datagrams, which no driver has, are without a name. It prints the text that C
    /// has for it (`ib_wc_status_msg`).
    Status(ib_wc_status), ib_wc_status_msg;

    /// A receive buffer was too short, or a local length was wrong.
    LOC_LEN_ERR = ib_wc_status_IB_WC_LOC_LEN_ERR,
    /// Local QP operation error.
    LOC_QP_OP_ERR = ib_wc_status_IB_WC_LOC_QP_OP_ERR,
    /// A local key does not give access to the memory.
    LOC_PROT_ERR = ib_wc_status_IB_WC_LOC_PROT_ERR,
    /// The QP was in the error state: the request was flushed.
    WR_FLUSH_ERR = ib_wc_status_IB_WC_WR_FLUSH_ERR,
    /// Memory window bind error.
    MW_BIND_ERR = ib_wc_status_IB_WC_MW_BIND_ERR,
    /// The peer's response was unexpected.
    BAD_RESP_ERR = ib_wc_status_IB_WC_BAD_RESP_ERR,
    /// A local key does not give access to memory that the peer wrote.
    LOC_ACCESS_ERR = ib_wc_status_IB_WC_LOC_ACCESS_ERR,
    /// The peer found the request invalid.
    REM_INV_REQ_ERR = ib_wc_status_IB_WC_REM_INV_REQ_ERR,
    /// The remote key does not give access to the memory.
    REM_ACCESS_ERR = ib_wc_status_IB_WC_REM_ACCESS_ERR,
    /// The peer could not complete the operation.
    REM_OP_ERR = ib_wc_status_IB_WC_REM_OP_ERR,
    /// The peer does not answer.
    RETRY_EXC_ERR = ib_wc_status_IB_WC_RETRY_EXC_ERR,
    /// The peer had no receive posted for too long.
    RNR_RETRY_EXC_ERR = ib_wc_status_IB_WC_RNR_RETRY_EXC_ERR,
    /// The peer aborted the operation.
    REM_ABORT_ERR = ib_wc_status_IB_WC_REM_ABORT_ERR,
    /// Fatal error.
    FATAL_ERR = ib_wc_status_IB_WC_FATAL_ERR,
    /// Response timeout.
    RESP_TIMEOUT_ERR = ib_wc_status_IB_WC_RESP_TIMEOUT_ERR,
    /// Other error.
    GENERAL_ERR = ib_wc_status_IB_WC_GENERAL_ERR,
}

/// The operation that was completed, as `enum ib_wc_opcode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// A SEND of any kind.
    Send,
    /// An RDMA WRITE.
    RdmaWrite,
    /// An RDMA READ.
    RdmaRead,
    /// A compare and swap.
    CompSwap,
    /// A fetch and add.
    FetchAdd,
    /// A local invalidation.
    LocalInv,
    /// A fast registration.
    RegMr,
    /// A receive.
    Recv,
    /// A receive consumed by an RDMA WRITE with immediate data.
    RecvRdmaWithImm,
    /// Anything else, by its C value.
    Other(u32),
}

impl From<bindings::ib_wc_opcode> for Opcode {
    #[inline]
    fn from(raw: bindings::ib_wc_opcode) -> Self {
        match raw {
            bindings::ib_wc_opcode_IB_WC_SEND => Self::Send,
            bindings::ib_wc_opcode_IB_WC_RDMA_WRITE => Self::RdmaWrite,
            bindings::ib_wc_opcode_IB_WC_RDMA_READ => Self::RdmaRead,
            bindings::ib_wc_opcode_IB_WC_COMP_SWAP => Self::CompSwap,
            bindings::ib_wc_opcode_IB_WC_FETCH_ADD => Self::FetchAdd,
            bindings::ib_wc_opcode_IB_WC_LOCAL_INV => Self::LocalInv,
            bindings::ib_wc_opcode_IB_WC_REG_MR => Self::RegMr,
            bindings::ib_wc_opcode_IB_WC_RECV => Self::Recv,
            bindings::ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM => Self::RecvRdmaWithImm,
            other => Self::Other(other),
        }
    }
}

/// A failed completion: all of it that is valid besides its owner.
#[derive(Clone, Copy)]
pub struct WcError {
    /// The reason.
    pub status: Status,
    /// The vendor's syndrome.
    pub vendor_err: u32,
}

/// The length of the array that the poller of a CQ takes completions to: the RDMA core's
/// (`IB_POLL_BATCH`), and that of callers.
pub(crate) const POLL_BATCH: usize = 16;

/// Returns the array, of [`POLL_BATCH`] entries, that the RDMA core polls a CQ into
/// (`drivers/infiniband/core/cq.c`). One softirq or work item at a time polls completions into it,
/// and handles all of them, in their order, before it polls again. Other pollers of the CQ (callers
/// of `ib_process_cq_direct`, such as C's drain of an SRQ) have an array on their stack.
///
/// # Safety
///
/// `cq` is valid.
#[inline]
pub(crate) unsafe fn core_array(cq: *const bindings::ib_cq) -> *const Wc {
    // SAFETY: `cq` is valid, as the caller promises, and this field does not change.
    unsafe { (*cq).wc }.cast_const().cast()
}

/// Returns the completion of a request that was flushed, for one that the device has lost. The rest
/// is zero, as a driver leaves it.
pub(crate) fn flushed(qp: *mut bindings::ib_qp, cqe: *mut bindings::ib_cqe) -> bindings::ib_wc {
    let mut wc = bindings::ib_wc {
        status: bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR,
        qp,
        ..Default::default()
    };
    wc.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
    wc
}

/// A successful completion. It stands for the [`Wc`] where that is asked for, as by
/// [`HandlerCell::with`](crate::cq::HandlerCell::with).
#[derive(Clone, Copy)]
pub struct Success<'a> {
    pub(crate) wc: &'a Wc,
}

impl core::ops::Deref for Success<'_> {
    type Target = Wc;

    #[inline]
    fn deref(&self) -> &Wc {
        self.wc
    }
}

impl<'a> Success<'a> {
    #[inline]
    pub(crate) fn raw(&self) -> &'a bindings::ib_wc {
        &self.wc.0
    }

    #[inline]
    fn flag(&self, flag: bindings::ib_wc_flags) -> bool {
        self.raw().wc_flags & flag as c_int != 0
    }

    /// Returns whether this is the completion of a receive.
    #[inline]
    fn is_recv(&self) -> bool {
        self.raw().opcode & bindings::ib_wc_opcode_IB_WC_RECV != 0
    }

    /// Returns the operation that was completed.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        self.raw().opcode.into()
    }

    /// Returns the number of bytes transferred by a receive or an RDMA READ. For
    /// [`Opcode::RecvRdmaWithImm`] it is the number of bytes that the peer wrote elsewhere. It is
    /// meaningless for other requests. The peer has chosen it: neither index nor subtract by it, as
    /// a panic ends the machine. [`Buf::received`] returns the bytes of a message.
    ///
    /// [`Buf::received`]: crate::dma::Buf::received
    #[inline]
    pub fn byte_len(&self) -> usize {
        // RDMA needs pointers of 32 bits at least.
        self.raw().byte_len as usize
    }

    /// Returns the number of bytes that a receive has put into its buffer.
    #[inline]
    pub(crate) fn recv_len(&self) -> usize {
        match self.opcode() {
            // The number of bytes that were written elsewhere.
            Opcode::RecvRdmaWithImm => 0,
            _ => self.byte_len(),
        }
    }

    /// Returns the immediate data of a receive, in host byte order. The flag alone is no proof: rxe
    /// sets it in the sender's completion too.
    #[inline]
    pub fn imm_data(&self) -> Option<u32> {
        (self.is_recv() && self.flag(bindings::ib_wc_flags_IB_WC_WITH_IMM)).then(|| {
            // SAFETY: The flag selects which member of the union is set; both are integers.
            u32::from_be(unsafe { *self.raw().ex.imm_data })
        })
    }

    /// Returns the remote key that the peer invalidated with this receive. The flag alone is no
    /// proof: bnxt_re and cxgb4 set it in completions of sends that invalidate, too, and leave
    /// there whatever key was in that memory before.
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        // The flag first, as most completions do not have it.
        (self.flag(bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE) && self.is_recv()).then(|| {
            // SAFETY: The flag selects which member of the union is set; both are integers.
            unsafe { *self.raw().ex.invalidate_rkey }
        })
    }
}

/// Marks the branch that calls it as unlikely.
#[cold]
#[inline]
pub(crate) fn unlikely() {}

/// A work completion (`struct ib_wc`), which a handler borrows during the call.
///
/// # Examples
///
/// ```
/// # use rdma::wc::Wc;
/// fn log(wc: &Wc) {
///     match wc.result() {
///         Ok(wc) => {
///             let imm = wc.imm_data();
///             let rkey = wc.invalidated_rkey();
///             pr_info!("{} bytes, {imm:?}, invalidated {rkey:?}\n", wc.byte_len());
///         }
///         Err(e) => pr_err!("{} ({}), {:#x}\n", e.status, e.status.as_raw(), e.vendor_err),
///     }
/// }
/// ```
#[repr(transparent)]
pub struct Wc(pub(crate) bindings::ib_wc);

impl Wc {
    /// Returns the result of the request.
    #[inline]
    pub fn result(&self) -> core::result::Result<Success<'_>, WcError> {
        if self.0.status == bindings::ib_wc_status_IB_WC_SUCCESS {
            Ok(Success { wc: self })
        } else {
            unlikely();
            Err(WcError {
                status: Status(self.0.status),
                vendor_err: self.0.vendor_err,
            })
        }
    }

    /// Returns whether this is in `array`, of [`POLL_BATCH`] completions.
    #[inline]
    pub(crate) fn is_in(&self, array: *const Self) -> bool {
        let at = ptr::from_ref(self).addr();
        at.wrapping_sub(array.addr()) < const { POLL_BATCH * size_of::<Self>() }
    }

    #[inline]
    pub(crate) fn cqe(&self) -> *mut bindings::ib_cqe {
        // SAFETY: The core calls handlers with `wr_cqe` set; both members of the union are as wide.
        unsafe { *self.0.__bindgen_anon_1.wr_cqe }
    }
}

impl From<WcError> for Error {
    fn from(_: WcError) -> Self {
        EIO
    }
}
