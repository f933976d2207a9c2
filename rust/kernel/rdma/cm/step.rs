// SPDX-License-Identifier: GPL-2.0

//! Steps of a connection that somebody waits for.

use super::{
    callback::Shared,
    running::Running,
    PrivateData, //
};
use crate::bindings;
use core::mem::replace;
use kernel::prelude::*;

/// A step that somebody waits for.
pub(super) enum Step {
    /// Nobody waits.
    Idle,
    /// Started; the event with this C value is its success, and what comes along goes into the box.
    Waiting(bindings::rdma_cm_event_type, KBox<PrivateData>),
    /// Ended as it should.
    Done(KBox<PrivateData>),
    /// Ended otherwise.
    Failed(Error),
}

impl Shared {
    /// Starts a step and waits for the event that is its success, or for a failure.
    pub(super) fn step(
        &self,
        success: bindings::rdma_cm_event_type,
        start: impl FnOnce() -> Result,
    ) -> Result<PrivateData> {
        if Running::is_current() {
            return Err(EDEADLK);
        }
        let private_data = KBox::new(PrivateData::new(&[]), GFP_KERNEL)?;
        {
            let mut step = self.step.lock();
            if !matches!(*step, Step::Idle) {
                return Err(EBUSY);
            }
            if self.is_gone() {
                return Err(ENODEV);
            }
            *step = Step::Waiting(success, private_data);
        }
        let started = start();
        let mut step = self.step.lock();
        if let Err(e) = started {
            *step = Step::Idle;
            return Err(e);
        }
        loop {
            match replace(&mut *step, Step::Idle) {
                Step::Done(private_data) => return Ok(*private_data),
                Step::Failed(e) => return Err(e),
                waiting => *step = waiting,
            }
            if self.changed.wait_interruptible(&mut step) {
                *step = Step::Idle;
                return Err(ERESTARTSYS);
            }
        }
    }

    /// Ends the step that is waited for, if a result of this event does that: what the peer sent
    /// along, or an error.
    pub(super) fn end_step(&self, event: bindings::rdma_cm_event_type, result: Result<&[u8]>) {
        let mut step = self.step.lock();
        let mut ends = false;
        *step = match replace(&mut *step, Step::Idle) {
            Step::Waiting(success, mut to) if result.is_err() || success == event => {
                ends = true;
                match result {
                    Ok(sent) => {
                        *to = PrivateData::new(sent);
                        Step::Done(to)
                    }
                    Err(e) => Step::Failed(e),
                }
            }
            other => other,
        };
        drop(step);
        // Who waits is not to be woken up only to wait for the lock.
        if ends {
            self.changed.notify_all();
        }
    }

    /// Fails the step that is waited for, if there is one.
    pub(super) fn fail_step(&self, error: Error) {
        self.end_step(
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE,
            Err(error),
        );
    }
}
