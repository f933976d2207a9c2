// SPDX-License-Identifier: GPL-2.0

//! Devices by name: how tests make them, and how they end with the module.

use crate::{
    cm::Cm,
    cq::VECTORS,
    device::Shared,
    inject::{
        Injection,
        Stall, //
    },
    machine::Machine,
    memory::LOCAL_KEY,
    qp::Qp,
    verbs, //
};
use core::ptr::null_mut;
use kernel::{
    debugfs::Dir,
    device,
    error::to_result,
    faux,
    prelude::*,
    str::CStr,
    sync::Arc, //
};
use rdma_bindings as bindings;

/// A null device. It is removed when this is dropped, which waits for that unless it was begun.
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
        Self::of_kind(name, Kind::Plain)
    }

    /// Makes a device with a connection manager ([`Kind::IwarpCm`]): `rdma_cm` connects its QPs, by
    /// addresses of the loopback interface other than 127.0.0.1 and `::1`, which mean any device to
    /// it.
    ///
    /// # Errors
    ///
    /// As [`NullDevice::new`].
    pub fn with_cm(name: &CStr) -> Result<Self> {
        Self::of_kind(name, Kind::IwarpCm)
    }

    /// Makes a device that imitates a driver of this kind.
    ///
    /// # Errors
    ///
    /// As [`NullDevice::new`].
    pub fn of_kind(name: &CStr, kind: Kind) -> Result<Self> {
        Ok(Self {
            shared: register(name, kind)?,
        })
    }

    /// Returns the name that the device was made with.
    pub fn name(&self) -> &CStr {
        &self.shared.name
    }

    /// Unregisters the device, as if it were unplugged, and waits until its clients have released
    /// it (`ib_unregister_device`).
    pub fn remove(&self) {
        self.shared.unregister();
    }

    /// Begins to remove the device, as [`NullDevice::remove`] does, without waiting for it.
    ///
    /// # Errors
    ///
    /// `EALREADY` if that was begun before.
    pub fn begin_removal(&self) -> Result {
        self.shared.begin_removal()
    }

    /// Returns whether the device was removed: its clients have released it.
    pub fn is_removed(&self) -> bool {
        self.shared.is_gone()
    }

    /// Forgets the injections for requests and for the end of MRs, and has what is held complete.
    pub fn calm(&self) {
        self.shared.calm();
    }

    /// Injects a fault for any QP of the device, or for the device itself.
    ///
    /// # Errors
    ///
    /// `EPERM` for [`Injection::Duplicate`] and [`Injection::Peek`]; `ENODEV` for an event after
    /// the removal.
    pub fn inject(&self, injection: Injection) -> Result {
        injection.check()?;
        self.shared.inject(None, injection)
    }

    /// Injects a fault for the QP with this number.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP; `EINVAL` for a fault of devices only; `EPERM` for
    /// [`Injection::Duplicate`].
    pub fn inject_qp(&self, num: u32, injection: Injection) -> Result {
        injection.check()?;
        self.shared.inject(Some(num), injection)
    }

    /// Has the next `count` completions of the QP with this number come twice
    /// ([`Injection::Duplicate`]).
    ///
    /// # Safety
    ///
    /// The consumer of a completion that comes twice does not take the owner of its request twice.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP.
    pub unsafe fn duplicate(&self, num: u32, count: u32) -> Result {
        self.shared
            .inject(Some(num), Injection::Duplicate { count })
    }

    /// Has the device look at the first entry of requests without entries ([`Injection::Peek`]), or
    /// no longer.
    ///
    /// # Safety
    ///
    /// The `sg_list` of such a request, of any consumer of the device, is null or has an entry.
    pub unsafe fn peek(&self, on: bool) -> Result {
        self.shared.inject(None, Injection::Peek { on })
    }

    /// Returns the number of completions of a QP that are held back.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP.
    pub fn held(&self, num: u32) -> Result<usize> {
        self.with_qp(num, |qp| qp.held.len())
    }

    /// Returns whether the next call that posts to a QP will wait for another one.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP.
    pub fn stalls(&self, num: u32) -> Result<bool> {
        self.with_qp(num, |qp| matches!(qp.stall, Stall::Next { .. }))
    }

    /// Returns the number of changes of a QP that are under way, and of those that have begun while
    /// another was.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such QP.
    pub fn changes(&self, num: u32) -> Result<(u32, u32)> {
        self.with_qp(num, |qp| (qp.changes.running, qp.changes.overlaps))
    }

    fn with_qp<R>(&self, num: u32, f: impl FnOnce(&Qp) -> R) -> Result<R> {
        let machine = self.shared.machine.lock();
        let index = machine.find_qp(num).ok_or(ENOENT)?;
        machine.qps.get(index).map(f).ok_or(ENOENT)
    }

    /// Returns the number of MRs that still cannot be deregistered.
    pub fn deregs(&self) -> u32 {
        self.shared.machine.lock().deregs.count
    }

    /// Returns the number of requests with a fence that were posted to QPs with a peer, or with an
    /// injection.
    pub fn fences(&self) -> usize {
        self.shared.machine.lock().fences
    }

    /// Returns the numbers of objects: CQs, QPs, SRQs and MRs.
    pub fn objects(&self) -> [usize; 4] {
        let machine = self.shared.machine.lock();
        [
            machine.cqs.iter().count(),
            machine.qps.iter().count(),
            machine.srqs.iter().count(),
            machine.mrs.iter().count(),
        ]
    }

    /// Returns the numbers of connections that the connection manager has, requests included, and
    /// of listeners.
    pub fn connections(&self) -> [usize; 2] {
        let machine = self.shared.machine.lock();
        machine.cm.as_ref().map_or([0; 2], |cm| cm.counts())
    }

    /// Returns whether the next end of a listener will take longer.
    pub fn unlistens(&self) -> bool {
        let machine = self.shared.machine.lock();
        machine.cm.as_ref().is_some_and(|cm| cm.unlistens())
    }

    /// Returns the number of requests for a connection that the connection manager has had.
    pub fn requests(&self) -> usize {
        let machine = self.shared.machine.lock();
        machine.cm.as_ref().map_or(0, |cm| cm.requests())
    }
}

impl Drop for NullDevice {
    fn drop(&mut self) {
        // The removal waits for requests for connections that are not answered. It fails on a
        // device without a connection manager, which has none.
        let _ = self.inject(Injection::End);
        // One that was begun goes on.
        if !self.shared.is_being_removed() {
            self.remove();
        }
    }
}

/// The devices of the module.
struct Devices {
    all: KVec<Arc<Shared>>,
    /// The folder in debugfs that has one for each device.
    root: Option<Dir>,
    /// The parent of each device, which has the NUMA node that it is near to.
    parent: Option<faux::Registration>,
}

impl Devices {
    const NONE: Self = Self {
        all: KVec::new(),
        root: None,
        parent: None,
    };
}

kernel::sync::global_lock! {
    // SAFETY: The module's init initialises it, before anything else of the module runs.
    unsafe(uninit) static DEVICES: Mutex<Devices> = Devices::NONE;
}

/// Returns the `struct device` of a parent.
fn device_of(parent: &faux::Registration) -> *mut bindings::device {
    let dev: &device::Device<device::Bound> = parent.as_ref().as_ref();
    core::ptr::from_ref(dev).cast_mut().cast()
}

/// # Safety
///
/// Called once, before any other function of this file.
pub(crate) unsafe fn init(root: Dir) -> Result {
    let parent = faux::Registration::new(c"rdma_null", None)?;
    // SAFETY: The parent is a valid device, of which the node is set before it has children.
    #[cfg(CONFIG_NUMA)]
    unsafe {
        (*device_of(&parent)).numa_node = 0;
    }
    // SAFETY: The caller calls this once, before anything else uses it.
    unsafe { DEVICES.init() };
    let mut devices = DEVICES.lock();
    (devices.root, devices.parent) = (Some(root), Some(parent));
    Ok(())
}

/// Removes all devices and waits for removals that other threads have begun. The caller makes no
/// more devices.
pub(crate) fn exit() {
    let devices = core::mem::replace(&mut *DEVICES.lock(), Devices::NONE);
    for shared in &devices.all {
        shared.unregister();
        shared.flush_work();
    }
}

/// # Safety
///
/// Called by the RDMA core, or a consumer, with a QP.
unsafe extern "C" fn no_drain(_qp: *mut bindings::ib_qp) {}

/// The driver that a device imitates.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One without a protocol, MADs or a connection manager.
    Plain,
    /// One with drain operations of its own (`drain_sq`, `drain_rq`), which do nothing: those of
    /// hardware have no result, and only warn if their marker cannot be posted.
    OwnDrain,
    /// One of iWARP, for `rdma_protocol_iwarp()`. It invalidates as siw does: the key's low byte is
    /// not compared, and an MR that is not valid may be invalidated.
    Iwarp,
    /// One of iWARP, with a connection manager.
    IwarpCm,
    /// One that does not report the limits of an RDMA READ and of a registration (`max_sge_rd`,
    /// `max_fast_reg_page_list_len`).
    Vague,
    /// One that names the first request of a list when the queue is full, whichever it has refused,
    /// as `erdma_post_send()` does. It claims to be erdma's.
    Erdma,
}

impl Kind {
    /// Returns whether it is one of iWARP, whose port is that of the loopback interface.
    pub(crate) fn is_iwarp(self) -> bool {
        matches!(self, Self::Iwarp | Self::IwarpCm)
    }
}

/// Makes a device and registers it. Clients have been told of it when this returns.
pub(crate) fn register(name: &CStr, kind: Kind) -> Result<Arc<Shared>> {
    // Machines are large, so they are not built on the stack.
    let mut machine = Machine::new()?;
    machine.iwarp = kind.is_iwarp();
    machine.vague = kind == Kind::Vague;
    if kind == Kind::IwarpCm {
        machine.cm = Some(Cm::new()?);
    }
    let (root, parent) = {
        let devices = DEVICES.lock();
        let parent = devices.parent.as_ref().map_or(null_mut(), device_of);
        (devices.root.clone(), parent)
    };
    let shared = Shared::new(name, machine, root)?;
    let ib = shared.ib();
    // SAFETY: The device was just allocated, and the RDMA core does not know it yet. The parent
    // goes after all devices, in `exit`.
    unsafe {
        (*shared.dev()).parent = parent;
        (*ib).node_type = bindings::RDMA_NODE_IB_CA as u8;
        (*ib).phys_port_cnt = 1;
        (*ib).num_comp_vectors = VECTORS;
        (*ib).local_dma_lkey = LOCAL_KEY;
        (*ib).node_guid = shared.guid.to_be();
        bindings::ib_set_device_ops(ib, &raw const verbs::OPS.0);
        if kind == Kind::OwnDrain {
            (*ib).ops.drain_sq = Some(no_drain);
            (*ib).ops.drain_rq = Some(no_drain);
        }
        if kind == Kind::Erdma {
            (*ib).ops.driver_id = bindings::rdma_driver_id_RDMA_DRIVER_ERDMA;
            (*ib).ops.post_send = Some(verbs::post::post_send_as_erdma);
        }
        if kind.is_iwarp() {
            (*ib).node_type = bindings::RDMA_NODE_RNIC as u8;
        }
        if kind == Kind::IwarpCm {
            (*ib).iw_driver_flags = bindings::iw_flags_IW_F_NO_PORT_MAP;
        }
    }
    forget_gone();
    let kept = DEVICES.lock().all.push(shared.clone(), GFP_KERNEL);
    let netdev = |()| {
        if !kind.is_iwarp() {
            return Ok(());
        }
        // The core reads the state of such ports from their interfaces.
        //
        // SAFETY: The device is not registered yet, and has the port. The loopback interface lives
        // as long as the kernel does, and the core takes a reference.
        to_result(unsafe { bindings::ib_device_set_netdev(ib, bindings::init_net.loopback_dev, 1) })
    };
    let kept = kept.map_err(Error::from).and_then(netdev);
    let registered = kept.and_then(|()| {
        // SAFETY: The device is complete. There is no DMA device, so addresses are the kernel's.
        to_result(unsafe {
            bindings::ib_register_device(ib, shared.name.as_char_ptr(), null_mut())
        })
    });
    if let Err(e) = registered {
        // SAFETY: Not registered. This calls `dealloc_driver`.
        unsafe { bindings::ib_dealloc_device(ib) };
        forget_gone();
        return Err(e);
    }
    Ok(shared)
}

/// Removes devices that are gone from the list, once their last operation has returned.
fn forget_gone() {
    loop {
        let gone = {
            let mut devices = DEVICES.lock();
            let index = devices.all.iter().position(|it| it.is_gone());
            index.and_then(|index| devices.all.remove(index).ok())
        };
        match gone {
            Some(shared) => {
                shared.unregister();
                shared.flush_work();
            }
            None => return,
        }
    }
}
