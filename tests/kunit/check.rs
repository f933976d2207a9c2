// SPDX-License-Identifier: GPL-2.0

//! Assertions that return from the test.

use core::fmt::Debug;
use kernel::{
    bindings,
    prelude::*,
    str::CStr, //
};

/// Prints the condition that failed, and its place.
#[cold]
#[inline(never)]
#[track_caller]
pub(crate) fn fail(condition: &str) -> Error {
    let at = core::panic::Location::caller();
    pr_err!("FAILED at {}:{}: {condition}\n", at.file(), at.line());
    EINVAL
}

/// Prints the values that are not equal, and their place.
#[cold]
#[inline(never)]
#[track_caller]
pub(crate) fn differ(what: &str, is: &dyn Debug, should: &dyn Debug) -> Error {
    let at = core::panic::Location::caller();
    pr_err!(
        "FAILED at {}:{}: {what} is {is:?}, not {should:?}\n",
        at.file(),
        at.line()
    );
    EINVAL
}

/// Announces a line that would be a sign of trouble if it were not expected: it has to come this
/// often.
pub(crate) fn expect(times: usize, text: &str) {
    for _ in 0..times {
        pr_info!("rdma-rs expects: {text}\n");
    }
}

/// Skips the running case, and prints why.
pub(crate) fn skip(why: &CStr) -> Result {
    // SAFETY: Cases run in their own thread, as tests, so there is one. It is written by that
    // thread only while the case runs, and the text is cut to its room, with a zero at its end.
    unsafe {
        let test = bindings::kunit_get_current_test();
        if test.is_null() {
            return Err(EINVAL);
        }
        (*test).status = bindings::kunit_status_KUNIT_SKIPPED;
        let comment = &mut (*test).status_comment;
        for (to, from) in comment.iter_mut().zip(why.to_bytes_with_nul()) {
            *to = *from;
        }
        comment[comment.len() - 1] = 0;
    }
    Ok(())
}

/// Skips the running case if its device is one of iWARP.
macro_rules! not_on_iwarp {
    ($why:literal) => {
        if $crate::fixture::on_iwarp()? {
            return $crate::check::skip($why);
        }
    };
}

/// The message about a request that completes twice.
#[cfg(debug_assertions)]
pub(crate) const TWICE: &str = "has completed twice: the device is broken; ignored";

/// The message about a CQ that has failed.
pub(crate) const OVERRUN: &str = "a CQ was overrun or failed: completions are lost";

/// Returns an error unless the condition holds.
macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            return Err($crate::check::fail(::core::stringify!($condition)));
        }
    };
}

/// Returns an error unless both values are equal.
macro_rules! check_eq {
    ($is:expr, $should:expr) => {
        match (&$is, &$should) {
            (is, should) => {
                if *is != *should {
                    let what = ::core::stringify!($is);
                    return Err($crate::check::differ(what, &is, &should));
                }
            }
        }
    };
}

/// Returns an error unless the result is this error.
macro_rules! check_err {
    ($result:expr, $error:expr) => {
        match $result {
            Ok(_) => {
                let what = ::core::concat!(::core::stringify!($result), " succeeded");
                return Err($crate::check::fail(what));
            }
            Err(error) => check_eq!(Error::from(error), $error),
        }
    };
}
