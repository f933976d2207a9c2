// SPDX-License-Identifier: GPL-2.0

//! The state table, compared with C's.

use kernel::prelude::*;
use rdma::qp::{
    AttrMask,
    ModifyError,
    Service,
    State,
    Transition, //
};

extern "C" {
    fn ib_modify_qp_is_ok(from: u32, to: u32, qp_type: u32, mask: u32) -> bool;
}

/// The result of C for a change.
fn is_ok(service: Service, from: State, to: State, attrs: AttrMask) -> bool {
    // `IB_QP_STATE`.
    let mask = attrs.as_raw() | 1;
    // SAFETY: The function looks these values up in a table, and they are in its range.
    unsafe { ib_modify_qp_is_ok(from as u32, to as u32, service as u32, mask) }
}

/// Calls `f` with every service and every two states.
fn for_all(mut f: impl FnMut(Service, State, State) -> Result) -> Result {
    for service in [Service::Rc, Service::Uc, Service::Ud] {
        for from in State::ALL {
            for to in State::ALL {
                f(service, from, to)
                    .inspect_err(|_| pr_err!("{service:?}: {from:?} to {to:?}\n"))?;
            }
        }
    }
    Ok(())
}

/// All attributes.
fn all() -> AttrMask {
    AttrMask::each().fold(AttrMask::NONE, AttrMask::or)
}

#[kunit_tests(rdma_qp_state)]
mod tests {
    use super::*;

    #[test]
    fn transitions_are_those_of_c() -> Result {
        let mut legal = 0;
        for_all(|service, from, to| {
            let ours = Transition::find(service, from, to);
            legal += i32::from(ours.is_some());
            let attrs = ours.map_or(AttrMask::NONE, |ours| ours.required);
            check_eq!(is_ok(service, from, to, attrs), ours.is_some());
            Ok(())
        })?;
        check_eq!(legal, 3 * 22);
        Ok(())
    }

    /// With the next test this proves that the tables are the same: a change is legal in C if it
    /// has what is required and nothing that is neither required nor optional.
    #[test]
    fn required_attributes_are_those_of_c() -> Result {
        for_all(|service, from, to| {
            let Some(ours) = Transition::find(service, from, to) else {
                return Ok(());
            };
            check!(is_ok(service, from, to, ours.required));
            for attr in AttrMask::each().filter(|attr| ours.required.contains(*attr)) {
                check!(!is_ok(service, from, to, ours.required.without(attr)));
            }
            Ok(())
        })
    }

    #[test]
    fn optional_attributes_are_those_of_c() -> Result {
        for_all(|service, from, to| {
            let Some(ours) = Transition::find(service, from, to) else {
                return Ok(());
            };
            let most = ours.required.or(ours.optional);
            check!(is_ok(service, from, to, most));
            for attr in AttrMask::each().filter(|attr| !most.contains(*attr)) {
                check!(!is_ok(service, from, to, most.or(attr)));
            }
            Ok(())
        })
    }

    #[test]
    fn check_agrees_with_c_on_one_and_two_attributes() -> Result {
        for_all(|service, from, to| {
            for a in AttrMask::each() {
                for b in AttrMask::each() {
                    for attrs in [a.or(b), all().without(a.or(b))] {
                        let ours = Transition::check(service, from, to, attrs).is_ok();
                        check_eq!(ours, is_ok(service, from, to, attrs));
                    }
                }
            }
            Ok(())
        })
    }

    #[test]
    fn check_names_what_is_missing() -> Result {
        let (from, to) = (State::Rtr, State::Rts);
        let attrs = AttrMask::SQ_PSN.or(AttrMask::TIMEOUT);
        let error = Transition::check(Service::Rc, from, to, attrs);
        let missing = AttrMask::RETRY_COUNT
            .or(AttrMask::RNR_RETRY)
            .or(AttrMask::MAX_RD_ATOMIC);
        let attrs = missing;
        check_eq!(error, Err(ModifyError::Missing { from, to, attrs }));
        Ok(())
    }

    #[test]
    fn check_names_what_is_too_much() -> Result {
        let (from, to) = (State::Init, State::Err);
        let attrs = AttrMask::QKEY;
        let error = Transition::check(Service::Ud, from, to, attrs);
        check_eq!(error, Err(ModifyError::Superfluous { from, to, attrs }));
        Ok(())
    }

    #[test]
    fn errors_say_it_in_words() -> Result {
        let (from, to) = (State::Reset, State::Init);
        let attrs = AttrMask::PORT.or(AttrMask::PKEY_INDEX);
        let text = kernel::str::CString::try_from_fmt(fmt!(
            "{}; {}",
            ModifyError::Missing { from, to, attrs },
            ModifyError::Illegal { from: to, to: from }
        ))?;
        check_eq!(
            text.to_bytes(),
            b"Reset to Init: needs P_Key index, port; Init to Reset: no such transition"
        );
        Ok(())
    }
}
