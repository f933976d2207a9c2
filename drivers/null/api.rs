// SPDX-License-Identifier: GPL-2.0

//! What tests in the kernel use.

use crate::{
    device::{
        self,
        Kind,
        Shared, //
    },
    inject::{
        Arms,
        Deregs,
        Injection,
        Stall, //
    },
    machine::MAX_QP, //
};
use kernel::{
    prelude::*,
    str::CStr,
    sync::Arc, //
};

/// A null device. It is removed when this is dropped.
///
/// All functions may sleep.
pub struct NullDevice {
    shared: Arc<Shared>,
}

impl NullDevice {
    /// Makes a device and registers it: clients have been told of it when this returns.
    ///
    /// # Errors
    ///
    /// `ENFILE` if there is a device of this name; `ENOMEM`, or another error of the RDMA core.
    pub fn new(name: &CStr) -> Result<Self> {
        Ok(Self {
            shared: device::register(name, Kind::Plain)?,
        })
    }

    /// As [`NullDevice::new`], of a driver that brings a drain of its own (`drain_sq`, `drain_rq`),
    /// one that does nothing: those of hardware return nothing, and only warn when their marker
    /// finds no room.
    ///
    /// # Errors
    ///
    /// As [`NullDevice::new`].
    pub fn with_drain(name: &CStr) -> Result<Self> {
        Ok(Self {
            shared: device::register(name, Kind::OwnDrain)?,
        })
    }

    /// As [`NullDevice::new`], but a device of iWARP, for `rdma_protocol_iwarp()`. It invalidates
    /// as siw does: the key's low byte is not compared, and what is invalid may be invalidated.
    ///
    /// # Errors
    ///
    /// As [`NullDevice::new`].
    pub fn iwarp(name: &CStr) -> Result<Self> {
        Ok(Self {
            shared: device::register(name, Kind::Iwarp)?,
        })
    }

    /// As [`NullDevice::new`], but of a driver that does not say how much one request can have: the
    /// sizes of an RDMA READ and of a registration (`max_sge_rd`, `max_fast_reg_page_list_len`).
    ///
    /// # Errors
    ///
    /// As [`NullDevice::new`].
    pub fn vague(name: &CStr) -> Result<Self> {
        Ok(Self {
            shared: device::register(name, Kind::Vague)?,
        })
    }

    /// Returns the name that the device was made with.
    pub fn name(&self) -> &CStr {
        &self.shared.name
    }

    /// Takes the device from its clients, as if it were unplugged, and waits until they have let go
    /// of it (`ib_unregister_device`).
    pub fn remove(&self) {
        device::unregister(&self.shared);
    }

    /// Has something go wrong on any QP of the device, or on the device itself.
    ///
    /// # Errors
    ///
    /// `ENODEV` for an event after the removal.
    pub fn inject(&self, injection: Injection) -> Result {
        self.shared.inject(None, injection)
    }

    /// Has something go wrong on the QP with this number.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP; `EINVAL` for what is of devices only.
    pub fn inject_qp(&self, num: u32, injection: Injection) -> Result {
        self.shared.inject(Some(num), injection)
    }

    /// Returns how many completions of a QP are held back.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP.
    pub fn held(&self, num: u32) -> Result<usize> {
        let machine = self.shared.machine.lock();
        let index = machine.find_qp(num).ok_or(ENOENT)?;
        Ok(machine.qps.get(index).map_or(0, |qp| qp.held.len()))
    }

    /// Says whether the next one who posts to a QP will wait for another one.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP.
    pub fn stalls(&self, num: u32) -> Result<bool> {
        let machine = self.shared.machine.lock();
        let index = machine.find_qp(num).ok_or(ENOENT)?;
        let stall = machine.qps.get(index).map(|qp| qp.stall);
        Ok(matches!(stall, Some(Stall::Next { .. })))
    }

    /// Returns how many changes of a QP are under way, and how many have begun while another was.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP.
    pub fn changes(&self, num: u32) -> Result<(u32, u32)> {
        let machine = self.shared.machine.lock();
        let index = machine.find_qp(num).ok_or(ENOENT)?;
        let qp = machine.qps.get(index).ok_or(ENOENT)?;
        Ok((qp.changes.running, qp.changes.overlaps))
    }

    /// Returns how many MRs still cannot be deregistered.
    pub fn deregs(&self) -> u32 {
        self.shared.machine.lock().deregs.count
    }

    /// Returns how many objects there are: CQs, QPs, SRQs and MRs.
    pub fn objects(&self) -> [usize; 4] {
        let machine = self.shared.machine.lock();
        [
            machine.cqs.iter().count(),
            machine.qps.iter().count(),
            machine.srqs.iter().count(),
            machine.mrs.iter().count(),
        ]
    }
}

impl Drop for NullDevice {
    fn drop(&mut self) {
        self.remove();
    }
}

impl Shared {
    pub(crate) fn inject(&self, qp: Option<u32>, injection: Injection) -> Result {
        let Some(num) = qp else {
            return self.inject_any(injection);
        };
        if let Injection::Event { event } = injection {
            return self.raise_of_qp(num, event);
        }
        let mut machine = self.machine.lock();
        let index = machine.find_qp(num).ok_or(ENOENT)?;
        match injection {
            Injection::Create { .. }
            | Injection::Dereg { .. }
            | Injection::Arm { .. }
            | Injection::Peek { .. }
            | Injection::Eager { .. } => return Err(EINVAL),
            Injection::Connect { peer } => machine.connect_qp(index, peer),
            Injection::Fail => machine.fail_qp(index),
            Injection::Release { count, reversed } => machine.release(index, count, reversed),
            _ => {}
        }
        if let Some(qp) = machine.qps.get_mut(index) {
            match injection {
                Injection::Stall { us, late } => qp.stall = Stall::Next { us, late },
                Injection::Dwell { us } => qp.changes.dwell = us,
                _ => qp.plan.set(injection),
            }
        }
        Ok(())
    }

    fn inject_any(&self, injection: Injection) -> Result {
        if let Injection::Event { event } = injection {
            return self.raise(event);
        }
        let mut machine = self.machine.lock();
        match injection {
            Injection::Create {
                object,
                after,
                errno,
            } => machine.creations.set(object, after, errno),
            Injection::Dereg { errno, count } => machine.deregs = Deregs { errno, count },
            Injection::Eager { on } => machine.eager = on,
            Injection::Arm { us, count } => machine.arms = Arms { us, count },
            Injection::Connect { .. }
            | Injection::Fail
            | Injection::Stall { .. }
            | Injection::Dwell { .. } => return Err(EINVAL),
            Injection::Release { count, reversed } => {
                (0..MAX_QP).for_each(|index| machine.release(index, count, reversed));
                machine.plan.set(injection);
            }
            _ => machine.plan.set(injection),
        }
        Ok(())
    }
}
