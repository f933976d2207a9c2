// SPDX-License-Identifier: GPL-2.0

//! Calls that are made at the same time, in an async domain.
//!
//! C header: [`include/linux/async.h`](srctree/include/linux/async.h)

use crate::bindings;
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        SetOnce, //
    }, //
};
use rdma::context::{
    Context as _,
    Sleepable, //
};

/// What the calls of [`try_for_each`] share.
struct Calls<'a, T, F, E> {
    items: &'a [T],
    /// The first item that no call has taken.
    next: Atomic<usize>,
    f: F,
    failure: SetOnce<E>,
}

/// Calls `f` for each of the items at the same time, in work items (`async_schedule_domain`), and
/// returns when all calls have returned: so they may borrow from the caller. Without memory for
/// that the caller makes them, one after another.
///
/// Fails with the error that comes first; calls that have not begun by then are left out.
pub(crate) fn try_for_each<T, F, E>(items: &[T], f: F, _cx: &Sleepable) -> Result<(), E>
where
    T: Sync,
    F: Fn(&T, &Sleepable) -> Result<(), E> + Sync,
    E: Copy + Send + Sync,
{
    let calls = Calls {
        items,
        next: Atomic::new(0),
        f,
        failure: SetOnce::new(),
    };
    let data = (&raw const calls).cast_mut().cast();
    // SAFETY: `call` may be called with `calls`, which is only shared until the helper returns, in
    // other tasks as well: by the bounds above it is `Sync`, and its errors are `Send`. All calls
    // have returned when the helper does. The caller may sleep.
    unsafe { bindings::nvme_helper_call_async(Some(Calls::<T, F, E>::call), data, items.len()) };
    calls.failure.copy().map_or(Ok(()), Err)
}

impl<T, F, E> Calls<'_, T, F, E>
where
    F: Fn(&T, &Sleepable) -> Result<(), E>,
{
    /// Calls the function for the next item.
    ///
    /// # Safety
    ///
    /// `data` is the address of a `Self`, which is valid and only shared during the call. The
    /// caller may sleep.
    unsafe extern "C" fn call(data: *mut c_void, _cookie: bindings::async_cookie_t) {
        // SAFETY: As the caller promises.
        let (calls, cx) = unsafe { (&*data.cast::<Self>(), Sleepable::assume()) };
        let item = calls.items.get(calls.next.fetch_add(1, Relaxed));
        let Some(item) = item.filter(|_| calls.failure.as_ref().is_none()) else {
            return;
        };
        if let Err(e) = (calls.f)(item, &cx) {
            // Another one may have been first.
            calls.failure.populate(e);
        }
    }
}
