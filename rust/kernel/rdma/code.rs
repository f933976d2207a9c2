// SPDX-License-Identifier: GPL-2.0

//! The module whose code an object calls.
//!
//! An object keeps the module of the ULP whose handle it was made from: the unload waits for it. So
//! its callbacks must be code of that module, or of one that this uses, as the crate's. By a module
//! that both use, a ULP may get a handle of another ULP. What it gives to an object of that would
//! be called after its own unload.

use crate::{
    identity,
    prelude::internal::*,
    refs, //
};
use kernel::time::{
    delay::fsleep,
    Delta, //
};

/// The time after which the references to a module are counted again, in ms.
const NAP_MS: u32 = 20;

/// Tells the module of a trait object. Implemented for all types, so that no ULP can implement it
/// otherwise.
#[doc(hidden)]
pub trait HasCode: 'static {
    /// Returns the address of a function that was compiled into that module, as the others that the
    /// trait object calls were.
    fn code(&self) -> usize;
}

impl<T: 'static> HasCode for T {
    fn code(&self) -> usize {
        identity::address_of::<T>()
    }
}

/// The module of a ULP.
///
/// # Invariants
///
/// It is loaded while there are objects of the ULP. Null if it is built into the kernel.
#[derive(Clone, Copy)]
pub(crate) struct Module(*mut kernel::bindings::module);

// SAFETY: The module is only looked at, which any thread may do.
unsafe impl Send for Module {}
// SAFETY: The module is only looked at, which several threads may do at once.
unsafe impl Sync for Module {}

impl Module {
    /// # Safety
    ///
    /// `module` is loaded while there are objects of the client.
    pub(crate) unsafe fn new(module: &ThisModule) -> Self {
        // INVARIANT: As the caller promises.
        Self(module.as_ptr())
    }

    /// Returns the module of the ULP that has a QP or an SRQ, by its `qp_context` or `srq_context`.
    ///
    /// # Safety
    ///
    /// `context` is that of a QP or an SRQ of this crate that is not destroyed. These point to the
    /// module.
    pub(crate) unsafe fn of(context: *const c_void) -> Self {
        // SAFETY: The context points to the module, which is loaded, as the caller promises.
        unsafe { *context.cast() }
    }

    /// Returns the module's state (`module.state`), `None` if it is built into the kernel.
    pub(crate) fn state(self) -> Option<bindings::module_state> {
        // SAFETY: By the type invariant the module is loaded. C writes the state meanwhile, so the
        // read is volatile.
        let state = || unsafe { (&raw const (*self.0).state).read_volatile() };
        (!self.0.is_null()).then(state)
    }

    /// Waits for all others that have a reference to the module, and for tasks that were preempted
    /// in it, if it is still being loaded: when that fails, C frees it in spite of references.
    /// Takes a tenth of a second at least.
    pub(crate) fn wait_for_users(self, name: &CStr, _cx: &Sleepable) {
        if self.state() != Some(bindings::module_state_MODULE_STATE_COMING) {
            return;
        }
        let mut naps = 0_u32;
        loop {
            // SAFETY: By the type invariant the module is loaded. Loading has one reference.
            let users = unsafe { bindings::rdma_helper_module_refcount(self.0) } - 1;
            if users <= 0 {
                break;
            }
            if naps % (refs::REPORT_MS / NAP_MS) == 0 {
                pr_warn!("{name}: loading has failed: waits for {users} user(s) of the module\n");
            }
            naps = naps.wrapping_add(1);
            fsleep(Delta::from_millis(NAP_MS.into()));
        }
        // A task that was the last to put the module may not have left its code yet.
        //
        // SAFETY: The token proves that this may sleep.
        unsafe { bindings::rdma_helper_synchronize_rcu_tasks() };
    }

    /// Fails with `EPERM`, and reports it, if the function at this address is code of another
    /// module than this one and those that it uses.
    pub(crate) fn check(self, code: usize) -> Result {
        // SAFETY: By the type invariant the module is loaded, or null, and so are those that it
        // uses. The helper only compares.
        if !unsafe { bindings::rdma_helper_is_code_of(code, self.0) } {
            return Err(EPERM);
        }
        Ok(())
    }

    /// Fails as [`Module::check`], for the module that this is compiled into, as is the code that
    /// handles and drops values of the type.
    #[inline]
    pub(crate) fn check_type<T: 'static>(self) -> Result {
        self.check(identity::address_of::<T>())
    }

    /// Fails as [`Module::check`], for the type of a handler. Takes the [`Arc`], as that has a type
    /// with code of its own.
    pub(crate) fn check_handler<T: HasCode + ?Sized>(self, handler: &Arc<T>) -> Result {
        self.check(T::code(handler))
    }
}
