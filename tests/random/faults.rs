// SPDX-License-Identifier: GPL-2.0

//! The steps that inject faults.
//!
//! The device does only what real devices do: no request completes twice, and no CQ is overrun.
//! Owners are leaked then, as they have to be; `tests/kunit/null` is for that. What never
//! completes is in `lost.rs`.

use crate::{
    rng::Rng,
    steps::Turn,
    way::Way, //
};
use kernel::prelude::*;
use rdma_null::{
    Injection,
    NullDevice,
    Object, //
};

/// Has something go wrong with an end of a pair, of a session, or of the pair on the SRQ.
fn inject<C: Way>(t: &mut Turn<'_, C>, injection: Injection) -> Result {
    if t.rng.once_in(6) {
        let srq_pair = t.world.srq_pair(&mut t.rng, t.cx)?;
        let num = match t.rng.once_in(2) {
            true => srq_pair.from.num(),
            false => srq_pair.to.num(),
        };
        return t.world.null()?.inject_qp(num, injection);
    }
    if t.rng.once_in(3) {
        let session = t.world.session(&mut t.rng, t.cx)?;
        if session.in_order && matches!(injection, Injection::Hold { .. }) {
            return Err(EOPNOTSUPP);
        }
        let [a, b] = &session.ends;
        let end = if t.rng.once_in(2) { a } else { b };
        return t.world.null()?.inject_qp(end.qp.num(), injection);
    }
    // Kept until then, as what is to go wrong ends with the pair.
    let pair = t.pair()?;
    let [a, b] = &pair.ends;
    let end = if t.rng.once_in(2) { a } else { b };
    t.world.null()?.inject_qp(end.num(), injection)
}

pub(crate) fn status<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let injection = Injection::Status {
        status: t.rng.below(24),
        vendor_err: t.rng.next() as u32,
        count: 1 + t.rng.below(3),
        fatal: t.rng.once_in(3),
    };
    inject(t, injection)
}

pub(crate) fn refuse<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let errno = t.rng.one_of(&[5, 12, 22]).ok_or(EINVAL)?;
    let after = t.rng.below(8);
    inject(t, Injection::Refuse { after, errno })
}

/// Connects a QP to no peer. Posting one of its first requests may fail although it is done.
pub(crate) fn lone(null: &NullDevice, num: u32, rng: &mut Rng) -> Result {
    null.inject_qp(num, Injection::Connect { peer: 0 })?;
    let after = rng.below(8);
    if after < 2 {
        null.inject_qp(num, Injection::Lapse { after, errno: 107 })?;
    }
    Ok(())
}

/// The next completions come later: the round releases them.
pub(crate) fn late<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let count = 1 + t.rng.below(4);
    inject(t, Injection::Hold { count })
}

pub(crate) fn stall<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (us, late) = (10 + t.rng.below(40), t.rng.once_in(2));
    inject(t, Injection::Stall { us, late })
}

pub(crate) fn arm<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let (us, count) = (t.rng.below(40), 1 + t.rng.below(3));
    let honest = false;
    t.world.null()?.inject(Injection::Arm { us, count, honest })
}

pub(crate) fn peek<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let on = t.rng.once_in(2);
    // SAFETY: All requests to the device are the crate's, whose list has an entry in any case.
    unsafe { t.world.null()?.peek(on) }
}

/// An event of a QP, of the port, or of the SRQ, of those that do not say that something is over.
pub(crate) fn event<C: Way>(t: &mut Turn<'_, C>) -> Result {
    const QP: [u32; 4] = [3, 4, 5, 7];
    const DEVICE: [u32; 5] = [9, 10, 11, 12, 15];
    if t.rng.once_in(2) {
        let event = t.rng.one_of(&QP).ok_or(EINVAL)?;
        inject(t, Injection::Event { event })
    } else {
        let event = t.rng.one_of(&DEVICE).ok_or(EINVAL)?;
        t.world.null()?.inject(Injection::Event { event })
    }
}

/// One of the next creations fails.
pub(crate) fn creation<C: Way>(t: &mut Turn<'_, C>) -> Result {
    const ALL: [Object; 6] = [
        Object::Pd,
        Object::Cq,
        Object::Qp,
        Object::Srq,
        Object::Ah,
        Object::Mr,
    ];
    let object = t.rng.one_of(&ALL).ok_or(EINVAL)?;
    let after = t.rng.below(3);
    t.world.null()?.inject(Injection::Create {
        object,
        after,
        errno: 12,
    })
}

/// A QP fails by itself.
pub(crate) fn failure<C: Way>(t: &mut Turn<'_, C>) -> Result {
    inject(t, Injection::Fail)
}

/// The next change of a QP fails or takes longer.
pub(crate) fn modify<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let injection = match t.rng.once_in(2) {
        true => Injection::Modify { errno: 5, count: 1 },
        false => Injection::Dwell { us: 50 },
    };
    inject(t, injection)
}
