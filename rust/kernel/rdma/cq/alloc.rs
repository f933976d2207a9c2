// SPDX-License-Identifier: GPL-2.0

//! Allocating CQs.

use super::{
    inner::{
        Inner,
        Origin,
        State, //
    },
    watch::{
        self,
        Watch, //
    }, //
};
use crate::{
    bindings,
    context::{
        PollContext,
        Sleepable, //
    },
    deferred::Deferred,
    device::Device,
    gate::Kind, //
};
use core::ptr::NonNull;
use kernel::{
    cpu::nr_cpu_ids,
    error::from_err_ptr,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    }, //
};

/// Checks the size of a CQ.
pub(super) fn check(dev: &Device, entries: u32) -> Result {
    if entries == 0 || entries > dev.max_cqe() {
        pr_err!(
            "{dev}: a CQ of {entries} entries was asked for; 1 to {} are possible\n",
            dev.max_cqe()
        );
        return Err(EINVAL);
    }
    Ok(())
}

/// What a CQ is to be.
pub(super) struct Request {
    entries: u32,
    vector: Option<u32>,
    context: bindings::ib_poll_context,
    waited: bool,
}

impl Request {
    pub(super) fn new<C: PollContext>(entries: u32, vector: Option<u32>) -> Self {
        Self {
            entries,
            vector,
            context: C::RAW,
            waited: C::WAITED,
        }
    }
}

/// Allocates or creates a CQ. Not generic, so that what the CQ needs at its end is code of this
/// module.
#[inline(never)]
pub(super) fn alloc(dev: &Device, request: &Request, _cx: &Sleepable) -> Result<Arc<Inner>> {
    check(dev, request.entries)?;
    let entries = request.entries.try_into()?;
    if request.vector.is_some_and(|n| n >= dev.num_comp_vectors()) {
        return Err(EINVAL);
    }
    let reserved = Deferred::reserve()?;
    let watch = Watch::new()?;
    let hold = dev.list(Kind::Cq)?;
    let caller = dev.client().name.as_char_ptr();
    let private = Arc::as_ptr(&watch).cast_mut().cast();
    let attr = bindings::ib_cq_init_attr {
        cqe: request.entries,
        comp_vector: request.vector.unwrap_or_else(|| any_vector(dev)),
        flags: 0,
    };
    let raw = match request.vector {
        _ if request.waited => {
            dev.inner().removal.add(watch.clone())?;
            // SAFETY: The device is registered while `dev` lives, the arguments are in range, the
            // callbacks' context and the client's name outlive the CQ.
            unsafe {
                bindings::__ib_create_cq(
                    dev.as_raw(),
                    Some(watch::completed),
                    Some(watch::event),
                    private,
                    &attr,
                    caller,
                )
            }
        }
        // SAFETY: The device is registered while `dev` lives, the arguments are in range, the
        // callbacks' context and the client's name outlive the CQ.
        Some(vector) => unsafe {
            bindings::__ib_alloc_cq(
                dev.as_raw(),
                private,
                entries,
                vector.try_into()?,
                request.context,
                caller,
            )
        },
        // SAFETY: The device is registered while `dev` lives, the arguments are in range, the
        // callbacks' context and the client's name outlive the CQ.
        None => unsafe {
            bindings::__ib_alloc_cq_any(dev.as_raw(), private, entries, request.context, caller)
        },
    };
    let raw = from_err_ptr(raw).and_then(|raw| NonNull::new(raw).ok_or(ENOMEM));
    let raw = raw.inspect_err(|_| {
        if request.waited {
            dev.inner().removal.remove(&watch);
        }
    })?;
    // SAFETY: Just made; nothing completes to it yet, so nothing fails, and nobody looks at how it
    // is polled.
    let (given, num) = unsafe {
        (*raw.as_ptr()).event_handler = Some(watch::event);
        if request.waited {
            (*raw.as_ptr()).poll_ctx = request.context;
            (*raw.as_ptr()).comp_vector = attr.comp_vector;
        }
        // The driver may have given more entries than were asked for.
        ((*raw.as_ptr()).cqe, (*raw.as_ptr()).res.id)
    };
    hold.set_num(num);
    let origin = if request.waited {
        Origin::Created(watch)
    } else {
        Origin::Allocated(watch)
    };
    // INVARIANT: Just made.
    let state = reserved.fill(State {
        raw,
        origin,
        dev: dev.clone(),
        _hold: hold,
    });
    Inner::new(dev, given.try_into()?, state)
}

/// Chooses a completion vector as `ib_alloc_cq_any` does.
fn any_vector(dev: &Device) -> u32 {
    static NEXT: Atomic<u32> = Atomic::new(0);
    let vectors = dev.num_comp_vectors().min(nr_cpu_ids());
    NEXT.fetch_add(1, Relaxed).checked_rem(vectors).unwrap_or(0)
}
