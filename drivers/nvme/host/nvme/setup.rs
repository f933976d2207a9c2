// SPDX-License-Identifier: GPL-2.0

//! Setting up and tearing down the tag sets and queues of a controller, and what blk-mq calls.

use super::{
    controller::{
        Controller,
        Sets,
        Slot,
        State,
        TYPES, //
    },
    request::{
        pdu,
        wait_ended,
        Pdu,
        Rq,
        OK, //
    },
    Failure,
    Transport, //
};
use crate::bindings;
use core::{
    ops::{
        Deref,
        DerefMut,
        Range, //
    },
    ptr::{
        self,
        NonNull, //
    }, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::{
        atomic::{
            Relaxed,
            Release, //
        },
        rcu,
        Arc,
        MutexGuard, //
    }, //
};
use rdma::context::{
    Context as _,
    Sleepable, //
};

/// Exclusive access to what is set up of a controller: tag sets, queues, and the transport's state.
/// Tasks that share it make and connect I/O queues, each its own; nothing else changes meanwhile.
///
/// Each method calls the function of nvme-core or nvme-fabrics of its name; see there.
pub(crate) struct Setup<'a, T: Transport> {
    ctrl: &'a Controller<T>,
    sets: MutexGuard<'a, Sets<T>>,
}

impl<T: Transport> Deref for Setup<'_, T> {
    type Target = T::State;

    fn deref(&self) -> &T::State {
        &self.sets.state
    }
}

impl<T: Transport> DerefMut for Setup<'_, T> {
    fn deref_mut(&mut self) -> &mut T::State {
        &mut self.sets.state
    }
}

/// Fields of a `struct nvme_ctrl` that nvme-core has set while the admin queue was set up.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) cntlid: u16,
    pub(crate) sqsize: u16,
    pub(crate) maxcmd: u16,
    pub(crate) icdoff: u16,
    /// The length of a capsule of an I/O queue, in units of 16 bytes.
    pub(crate) ioccsz: u32,
    pub(crate) sgls: u32,
    /// The number of queues, with the admin queue.
    pub(crate) queue_count: u32,
}

const BEGUN: c_int = OK as c_int;
const NOT_READY: c_int = bindings::NVME_HELPER_NOT_READY as c_int;

impl<'a, T: Transport> Setup<'a, T> {
    pub(super) fn new(ctrl: &'a Controller<T>, sets: MutexGuard<'a, Sets<T>>) -> Self {
        Self { ctrl, sets }
    }

    fn raw(&self) -> *mut bindings::nvme_ctrl {
        self.ctrl.raw()
    }

    /// Calls a function of C that needs the admin queue, and may sleep.
    fn with_admin(&self, f: impl FnOnce(*mut bindings::nvme_ctrl) -> c_int) -> Result<(), Failure> {
        if !self.sets.admin {
            return Err(EINVAL.into());
        }
        Failure::check(f(self.raw()))
    }

    /// Fails if there is a tag set, or if the controller is dead.
    fn may_alloc(&self, has: bool) -> Result {
        match (has, self.sets.dead) {
            (true, _) => Err(EEXIST),
            (_, true) => Err(ENODEV),
            _ => Ok(()),
        }
    }

    /// Returns the controller.
    pub(crate) fn ctrl(&self) -> &Controller<T> {
        self.ctrl
    }

    /// Returns what is known of the controller.
    pub(crate) fn identity(&self) -> Identity {
        // SAFETY: The controller is valid. These fields are written by functions that only this
        // calls, and by the transport, through this: where access is exclusive, and not shared.
        unsafe {
            let ctrl = self.raw();
            Identity {
                cntlid: (*ctrl).cntlid,
                sqsize: (*ctrl).sqsize,
                maxcmd: (*ctrl).maxcmd,
                icdoff: (*ctrl).icdoff,
                ioccsz: (*ctrl).ioccsz,
                sgls: (*ctrl).sgls,
                queue_count: (*ctrl).queue_count,
            }
        }
    }

    /// Sets the size of I/O queues, of which one entry is left free.
    pub(crate) fn set_sqsize(&mut self, sqsize: u16) {
        // SAFETY: The controller is valid, and the field the transport's.
        unsafe { (*self.raw()).sqsize = sqsize };
    }

    /// Sets the number of I/O queues, each of which has its place.
    pub(crate) fn set_io_queues(&mut self, count: u32) -> Result {
        if count as usize >= self.ctrl.slots.len() {
            return Err(EINVAL);
        }
        let mut types = [0; TYPES];
        // SAFETY: The controller is valid and has options, and the fields are the transport's. The
        // array has room for all types.
        unsafe {
            (*self.raw()).queue_count = count.wrapping_add(1);
            bindings::nvmf_set_io_queues((*self.raw()).opts, count, types.as_mut_ptr());
        }
        for (to, count) in self.ctrl.io_queues.iter().zip(types) {
            to.store(count, Relaxed);
        }
        Ok(())
    }

    /// Returns the numbers of the I/O queues that there is a place for.
    pub(crate) fn io_queues(&self) -> Range<u16> {
        1..self.ctrl.slots.len().min(u16::MAX.into()) as u16
    }

    /// Returns whether replies of an I/O queue are polled for (`nvme_rdma_poll_queue`).
    pub(crate) fn is_polled(&self, qid: u16) -> bool {
        let [default, read, _] = &self.ctrl.io_queues;
        u32::from(qid) > default.load(Relaxed).saturating_add(read.load(Relaxed))
    }

    /// Sets the limits of a request, and the node of the memory for it.
    pub(crate) fn set_limits(&mut self, segments: u32, node: Option<u32>) {
        // SAFETY: The controller is valid, and the fields are the transport's.
        unsafe {
            let ctrl = self.raw();
            (*ctrl).max_segments = segments;
            // In sectors of 512 bytes, of segments of 4 KiB.
            (*ctrl).max_hw_sectors = segments << 3;
            (*ctrl).numa_node = node.map_or(bindings::NUMA_NO_NODE, |node| node as c_int);
        }
    }

    /// Allocates the tag set of the admin queue. Fails with `EEXIST` if there is one, and with
    /// `ENODEV` if the controller is being deleted.
    pub(crate) fn alloc_admin_tag_set(&mut self, _cx: &Sleepable) -> Result {
        self.may_alloc(self.sets.admin)?;
        let ops = &Self::ADMIN_OPS;
        let size = size_of::<Pdu>() as u32;
        // SAFETY: The controller and the place of the set are valid, and the set is not allocated.
        // The operations are static, and those of this type.
        to_result(unsafe {
            let set = self.ctrl.admin_set.get();
            bindings::nvme_alloc_admin_tag_set(self.raw(), set, ops, size)
        })?;
        // INVARIANT: It was just allocated.
        self.sets.admin = true;
        Ok(())
    }

    /// Allocates the tag set of the I/O queues. Fails with `EEXIST` if there is one, and with
    /// `ENODEV` if the controller is being deleted.
    pub(crate) fn alloc_io_tag_set(&mut self, polls: bool, _cx: &Sleepable) -> Result {
        self.may_alloc(self.sets.io)?;
        let ops = &Self::IO_OPS;
        let size = size_of::<Pdu>() as u32;
        let maps = if polls { TYPES as u32 } else { 2 };
        // SAFETY: The controller is initialised and has no such set, as just checked; the
        // operations are those of `T`, and static.
        to_result(unsafe {
            let set = self.ctrl.io_set.get();
            bindings::nvme_alloc_io_tag_set(self.raw(), set, ops, maps, size)
        })?;
        // INVARIANT: It was just allocated.
        self.sets.io = true;
        Ok(())
    }

    /// Returns whether the tag set of the I/O queues is allocated.
    pub(crate) fn has_io_tag_set(&self) -> bool {
        self.sets.io
    }

    /// Returns the number of I/O queues that blk-mq knows.
    pub(crate) fn nr_hw_queues(&self) -> u32 {
        if self.sets.io {
            // SAFETY: By the invariant of `Sets` the set is allocated. Only this changes the
            // number.
            unsafe { (*self.ctrl.io_set.get()).nr_hw_queues }
        } else {
            0
        }
    }

    /// Returns whether requests of a CPU that is online go by an I/O queue. If not, blk-mq has none
    /// for its Connect command (`EXDEV`).
    pub(crate) fn has_online_cpu(&self, qid: u16) -> bool {
        let hctx = u32::from(qid).checked_sub(1);
        // SAFETY: By the invariant of `Sets` the set is allocated if `io` is set. Only this changes
        // its maps.
        hctx.is_some_and(|hctx| unsafe {
            self.sets.io && bindings::nvme_helper_has_online_cpu(self.ctrl.io_set.get(), hctx)
        })
    }

    /// Removes the tag set of the admin queue, unless namespaces may exist.
    pub(crate) fn remove_admin_tag_set(&mut self, cx: &Sleepable) {
        if !self.sets.admin || !self.sets.removable {
            return;
        }
        self.unquiesce_admin_queue();
        self.cancel_admin_tagset(cx);
        // INVARIANT: It is removed below.
        self.sets.admin = false;
        // SAFETY: The set was allocated, and no request of it is in flight: none begins either, as
        // this destroys the queues first, and there are no namespaces.
        unsafe { bindings::nvme_remove_admin_tag_set(self.raw()) };
    }

    /// Removes the tag set of the I/O queues, unless namespaces may exist.
    pub(crate) fn remove_io_tag_set(&mut self, cx: &Sleepable) {
        if !self.sets.io || !self.sets.removable {
            return;
        }
        self.unquiesce_io_queues();
        self.cancel_tagset(cx);
        // INVARIANT: It is removed below.
        self.sets.io = false;
        // SAFETY: The set was allocated, and no request of it is in flight: none begins either.
        // Without namespaces only Connect uses it, which this would send, and authentication: that
        // of a setup has ended with it, and another one only begins while the controller is live,
        // and was ended by `nvme_stop_ctrl`.
        unsafe {
            bindings::nvme_remove_io_tag_set(self.raw());
            (*self.raw()).tagset = ptr::null_mut();
        }
    }

    /// Has a queue take requests. Fails with `EEXIST` if there is one of that number, and with
    /// `EINVAL` if there can be none.
    pub(crate) fn publish(&self, qid: u16, queue: Arc<T::Queue>) -> Result {
        let slot = self.ctrl.slots.get(usize::from(qid)).ok_or(EINVAL)?;
        slot.put(queue).map_err(|_| EEXIST)
    }

    /// Returns a queue, unless [`Link::forget`](super::Link::forget) has taken it.
    pub(crate) fn queue(&self, qid: u16) -> Option<Arc<T::Queue>> {
        self.ctrl.slots.get(usize::from(qid))?.clone_queue()
    }

    /// Drops queues, which take no requests from then on. A request that comes is refused.
    pub(crate) fn clear(&mut self, queues: Range<u16>, _cx: &Sleepable) {
        let range = usize::from(queues.start)..usize::from(queues.end);
        let places = self.ctrl.slots.iter().zip(self.sets.taken.iter_mut());
        let places = places.enumerate().filter(|(n, _)| range.contains(n));
        let mut any = false;
        for (_, (slot, taken)) in places {
            // SAFETY: What is taken is dropped after the grace period below.
            *taken = unsafe { slot.take() };
            any |= taken.is_some();
        }
        if any {
            // SAFETY: The caller may sleep.
            unsafe { bindings::synchronize_rcu() };
            self.sets.taken.iter_mut().for_each(|taken| *taken = None);
        }
    }

    /// Sends Connect on the admin queue, and authenticates.
    pub(crate) fn connect_admin_queue(&mut self, _cx: &Sleepable) -> Result<(), Failure> {
        // SAFETY: The controller has its admin queue; the caller may sleep.
        self.with_admin(|ctrl| unsafe { bindings::nvmf_connect_admin_queue(ctrl) })
    }

    /// Sends Connect on an I/O queue, and authenticates.
    pub(crate) fn connect_io_queue(&self, qid: u16, _cx: &Sleepable) -> Result<(), Failure> {
        if qid == 0 || u32::from(qid) > self.nr_hw_queues() {
            return Err(EINVAL.into());
        }
        // SAFETY: The controller has its I/O queues, of which this is one, and several may be
        // connected at the same time; the caller may sleep.
        Failure::check(unsafe { bindings::nvmf_connect_io_queue(self.raw(), qid) })
    }

    pub(crate) fn enable_ctrl(&mut self, _cx: &Sleepable) -> Result<(), Failure> {
        // SAFETY: The controller has its admin queue; the caller may sleep.
        self.with_admin(|ctrl| unsafe { bindings::nvme_enable_ctrl(ctrl) })
    }

    pub(crate) fn disable_ctrl(&mut self, shutdown: bool, _cx: &Sleepable) {
        // nvme-core reports an error, and nothing depends on the result.
        //
        // SAFETY: The controller has its admin queue; the caller may sleep.
        let _ = self.with_admin(|ctrl| unsafe { bindings::nvme_disable_ctrl(ctrl, shutdown) });
    }

    pub(crate) fn init_ctrl_finish(&mut self, _cx: &Sleepable) -> Result<(), Failure> {
        // SAFETY: The controller has its admin queue; the caller may sleep.
        self.with_admin(|ctrl| unsafe { bindings::nvme_init_ctrl_finish(ctrl, false) })
    }

    /// Asks the controller for as many I/O queues as the user wants; returns how many there are.
    pub(crate) fn set_queue_count(&mut self, _cx: &Sleepable) -> Result<u32, Failure> {
        let mut count = 0;
        // SAFETY: The controller has its options and its admin queue; the caller may sleep.
        self.with_admin(|ctrl| unsafe {
            count = bindings::nvme_helper_nr_io_queues((*ctrl).opts) as c_int;
            bindings::nvme_set_queue_count(ctrl, &raw mut count)
        })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Begins to use the controller, which is live (`nvme_start_ctrl`). Namespaces may exist from
    /// here on, until it is deleted. What is set up may change meanwhile: this waits for commands,
    /// which error recovery ends if a queue fails.
    pub(crate) fn start_ctrl(mut self, _cx: &Sleepable) {
        if !self.sets.admin || self.sets.dead {
            return;
        }
        let ctrl = self.ctrl;
        self.sets.removable = false;
        // A deletion waits for this from here on.
        self.sets.starting = self.sets.starting.saturating_add(1);
        ctrl.started.store(true, Release);
        drop(self);
        // SAFETY: The controller is valid and has its admin queue, which is not removed while this
        // is counted.
        unsafe { bindings::nvme_start_ctrl(ctrl.raw()) };
        ctrl.start_ended();
    }

    pub(crate) fn stop_keep_alive(&mut self, _cx: &Sleepable) {
        // SAFETY: The controller is valid; the caller may sleep.
        unsafe { bindings::nvme_stop_keep_alive(self.raw()) };
    }

    pub(crate) fn auth_stop(&mut self, _cx: &Sleepable) {
        // SAFETY: The controller is valid; the caller may sleep.
        unsafe { bindings::nvme_helper_auth_stop(self.raw()) };
    }

    /// Waits until no request for an asynchronous event is being sent. `nvme_start_ctrl` asks for
    /// one again. The work is not flushed: that may wait for an attempt to connect, which waits for
    /// this.
    pub(crate) fn cancel_async_event_work(&mut self, _cx: &Sleepable) {
        // SAFETY: The controller is valid; the caller may sleep.
        unsafe { bindings::cancel_work_sync(&raw mut (*self.raw()).async_event_work) };
    }

    /// Has the admin queue send nothing, and waits for what is being sent.
    pub(crate) fn quiesce_admin_queue(&mut self, _cx: &Sleepable) {
        if self.sets.admin {
            // SAFETY: The controller has its admin queue; the caller may sleep.
            unsafe {
                bindings::nvme_quiesce_admin_queue(self.raw());
                bindings::blk_sync_queue((*self.raw()).admin_q);
            }
        }
    }

    pub(crate) fn unquiesce_admin_queue(&mut self) {
        if self.sets.admin {
            // SAFETY: The controller has its admin queue.
            unsafe { bindings::nvme_unquiesce_admin_queue(self.raw()) };
        }
    }

    /// Has the I/O queues send nothing, and waits for what is being sent.
    pub(crate) fn quiesce_io_queues(&mut self, _cx: &Sleepable) {
        if self.sets.io {
            // SAFETY: The controller has its I/O queues; the caller may sleep.
            unsafe {
                bindings::nvme_quiesce_io_queues(self.raw());
                bindings::nvme_sync_io_queues(self.raw());
            }
        }
    }

    pub(crate) fn unquiesce_io_queues(&mut self) {
        if self.sets.io {
            // SAFETY: The controller has its I/O queues.
            unsafe { bindings::nvme_unquiesce_io_queues(self.raw()) };
        }
    }

    /// Waits until all requests of the admin queue have ended.
    pub(crate) fn cancel_admin_tagset(&mut self, _cx: &Sleepable) {
        if self.sets.admin {
            // SAFETY: By the invariant of `Sets` the set is allocated; the caller may sleep.
            unsafe { wait_ended(self.ctrl.admin_set.get()) };
        }
    }

    /// Waits until all requests of the I/O queues have ended. nvme-core's function of this name
    /// ends them itself; here the holder of its [`Rq`] ends each, at the latest when the memory
    /// region that lends its pages is gone.
    pub(crate) fn cancel_tagset(&mut self, _cx: &Sleepable) {
        if self.sets.io {
            // SAFETY: By the invariant of `Sets` the set is allocated; the caller may sleep.
            unsafe { wait_ended(self.ctrl.io_set.get()) };
        }
    }

    /// Gives blk-mq as many I/O queues as the controller has now, once the requests that are queued
    /// have gone out by those that there are. Fails with `ENODEV` if they do not in time: the
    /// queues are as they were.
    pub(crate) fn update_nr_hw_queues(&mut self, _cx: &Sleepable) -> Result {
        if !self.sets.io {
            return Err(EINVAL);
        }
        let queues = self.identity().queue_count.saturating_sub(1);
        // SAFETY: The controller has its I/O queues, and they are not changed otherwise, as this
        // has exclusive access. Each queue that there may be has its slot. The caller may sleep.
        unsafe {
            bindings::nvme_start_freeze(self.raw());
            bindings::nvme_unquiesce_io_queues(self.raw());
            let frozen = bindings::nvme_wait_freeze_timeout(self.raw()) != 0;
            if frozen {
                bindings::blk_mq_update_nr_hw_queues(self.ctrl.io_set.get(), queues as c_int);
            }
            bindings::nvme_unfreeze(self.raw());
            frozen.then_some(()).ok_or(ENODEV)
        }
    }

    /// Drops all queues and removes the tag sets, as far as that was not done. None are allocated
    /// from then on.
    pub(super) fn end(&mut self, cx: &Sleepable) {
        self.sets.dead = true;
        self.clear(0..u16::MAX, cx);
        self.remove_io_tag_set(cx);
        self.remove_admin_tag_set(cx);
    }

    const ADMIN_OPS: bindings::blk_mq_ops = bindings::blk_mq_ops {
        map_queues: None,
        poll: None,
        ..Self::IO_OPS
    };

    const IO_OPS: bindings::blk_mq_ops = {
        // SAFETY: All zeroes is a table without operations.
        let none: bindings::blk_mq_ops = unsafe { core::mem::zeroed() };
        bindings::blk_mq_ops {
            queue_rq: Some(Self::queue_rq),
            complete: Some(bindings::nvme_complete_rq),
            timeout: Some(Self::timeout),
            poll: Some(Self::poll),
            init_hctx: Some(Self::init_hctx),
            init_request: Some(Self::init_request),
            map_queues: Some(Self::map_queues),
            ..none
        }
    };

    /// Returns the slot of a hardware context.
    ///
    /// # Safety
    ///
    /// `hctx` is of a tag set of a `Controller<T>`, and in use.
    #[inline]
    unsafe fn slot<'s>(hctx: *mut bindings::blk_mq_hw_ctx) -> &'s Slot<T::Queue> {
        // SAFETY: `init_hctx` has set it to a slot of the controller, which stays as long as that.
        unsafe { &*(*hctx).driver_data.cast() }
    }

    /// `blk_mq_ops.init_hctx`.
    ///
    /// # Safety
    ///
    /// blk-mq calls this for a tag set of a `Controller<T>`, with the `struct nvme_ctrl`.
    unsafe extern "C" fn init_hctx(
        hctx: *mut bindings::blk_mq_hw_ctx,
        data: *mut c_void,
        index: c_uint,
    ) -> c_int {
        // SAFETY: The controller is valid. blk-mq has set the queue of the hardware context, and
        // the set of that.
        let (ctrl, set) = unsafe {
            let ctrl = Controller::<T>::from_raw(data.cast());
            (ctrl, (*(*hctx).queue).tag_set)
        };
        let qid = if ptr::eq(set, ctrl.admin_set.get()) {
            0
        } else {
            (index as usize).saturating_add(1)
        };
        let Some(slot) = ctrl.slots.get(qid) else {
            return EINVAL.to_errno();
        };
        // SAFETY: blk-mq is initialising the queue, and nothing else uses it before this returns.
        unsafe { (*hctx).driver_data = ptr::from_ref(slot).cast_mut().cast() };
        0
    }

    /// `blk_mq_ops.init_request`.
    ///
    /// # Safety
    ///
    /// blk-mq calls this for a request of the tag set.
    unsafe extern "C" fn init_request(
        set: *mut bindings::blk_mq_tag_set,
        rq: *mut bindings::request,
        _index: c_uint,
        _node: c_int,
    ) -> c_int {
        // SAFETY: The set's data are the `struct nvme_ctrl`, and the request's data are zeroed.
        unsafe {
            let pdu = pdu(rq);
            (*pdu).req.ctrl = (*set).driver_data.cast();
            (*pdu).req.cmd = &raw mut (*pdu).cmd;
        }
        0
    }

    /// `blk_mq_ops.map_queues`.
    ///
    /// # Safety
    ///
    /// blk-mq calls this for the tag set.
    unsafe extern "C" fn map_queues(set: *mut bindings::blk_mq_tag_set) {
        // SAFETY: The set's data are the `struct nvme_ctrl`, which has options.
        unsafe {
            let raw: *mut bindings::nvme_ctrl = (*set).driver_data.cast();
            let counts = &Controller::<T>::from_raw(raw).io_queues;
            let mut counts = counts.each_ref().map(|count| count.load(Relaxed));
            bindings::nvmf_map_queues(set, raw, counts.as_mut_ptr());
        }
    }

    /// `blk_mq_ops.queue_rq`.
    ///
    /// # Safety
    ///
    /// blk-mq calls this for a request of the tag set.
    unsafe extern "C" fn queue_rq(
        hctx: *mut bindings::blk_mq_hw_ctx,
        bd: *const bindings::blk_mq_queue_data,
    ) -> bindings::blk_status_t {
        // SAFETY: Both are valid, as the caller promises. The tag sets are not blocking ones, so
        // blk-mq calls this in an RCU read-side section. The request is that of the call and was
        // not started, and the controller its own.
        let (rq, queue) = unsafe {
            let rq = (*bd).rq;
            let Some(queue) = Self::slot(hctx).get() else {
                return Self::no_queue(hctx, rq);
            };
            let ctrl = (*pdu(rq)).req.ctrl;
            let ns = (*(*hctx).queue).queuedata;
            match bindings::nvme_helper_begin_request(ctrl, ns.cast(), rq, T::is_live(&queue)) {
                BEGUN => (rq, queue),
                NOT_READY => return bindings::nvme_helper_fail_nonready_command(rq),
                status => return status as bindings::blk_status_t,
            }
        };
        // INVARIANT: The request was just started, so it is in flight, and only this ends it.
        //
        // SAFETY: blk-mq has passed the request, which it has started: it is not null.
        let rq = unsafe { NonNull::new_unchecked(rq) };
        match T::queue_rq(queue, Rq(rq)) {
            Ok(()) => OK,
            // SAFETY: What this returns is what is returned for the request.
            Err(refused) => unsafe { refused.give_back(rq) },
        }
    }

    /// Fails a request for which there is no queue, or has it sent later; returns what `queue_rq`
    /// returns for it.
    ///
    /// # Safety
    ///
    /// blk-mq is calling `queue_rq` with these, and the request was not started.
    #[cold]
    unsafe fn no_queue(
        hctx: *mut bindings::blk_mq_hw_ctx,
        rq: *mut bindings::request,
    ) -> bindings::blk_status_t {
        // SAFETY: Both are valid, as the caller promises, and `queue_rq` is called in an RCU
        // read-side section. The controller stays as long as the request.
        unsafe {
            let ctrl = Controller::<T>::from_raw((*pdu(rq)).req.ctrl);
            // A controller is made live without the queues of CPUs that are offline, one of which
            // may be back. And nvme-core may have made it live since this queue was given up, as
            // `nvme_fw_act_work` does.
            let slot = Self::slot(hctx);
            if ctrl.state() == Some(State::Live) && slot.get().is_none() {
                ctrl.reset_without(ctrl.qid(slot));
            }
            bindings::nvme_helper_fail_nonready_command(rq)
        }
    }

    /// `blk_mq_ops.poll`.
    ///
    /// # Safety
    ///
    /// blk-mq calls this for a hardware context of the tag set.
    unsafe extern "C" fn poll(
        hctx: *mut bindings::blk_mq_hw_ctx,
        _batch: *mut bindings::io_comp_batch,
    ) -> c_int {
        let _guard = rcu::read_lock();
        // SAFETY: The hardware context is in use, and the section ends after this.
        let queue = unsafe { Self::slot(hctx).get() };
        queue.map_or(0, |queue| T::poll(&queue) as c_int)
    }

    /// `blk_mq_ops.timeout`.
    ///
    /// # Safety
    ///
    /// blk-mq calls this for a request of the tag set, to which it has a reference.
    unsafe extern "C" fn timeout(rq: *mut bindings::request) -> bindings::blk_eh_timer_return {
        // SAFETY: The request is not freed during the call, so that its controller stays, and its
        // hardware context. Timeouts are handled in a work item.
        let (ctrl, slot, cx) = unsafe {
            let ctrl = Controller::<T>::from_raw((*pdu(rq)).req.ctrl);
            (ctrl, Self::slot((*rq).mq_hctx), Sleepable::assume())
        };
        // SAFETY: The request is valid. Its command was made when it was started, and the first
        // byte of that is its opcode.
        let (tag, opcode) = unsafe { ((*rq).tag, (*pdu(rq)).req.cmd.cast::<u8>().read()) };
        let qid = ctrl.qid(slot);
        dev_warn!(
            ctrl.device(),
            "I/O tag {tag} opcode {opcode:#x} QID {qid} timeout\n"
        );
        if ctrl.state() == Some(State::Live) {
            // That ends it.
            ctrl.link.error_recovery();
            return bindings::blk_eh_timer_return_BLK_EH_RESET_TIMER;
        }
        // It may keep what sets up or tears down from going on.
        if let Some(queue) = slot.clone_queue() {
            T::timed_out(&queue, &cx);
        }
        // SAFETY: The request is valid. The state is read at once.
        match unsafe { (&raw const (*rq).state).read_volatile() } {
            // Its memory region is yet to go.
            bindings::mq_rq_state_MQ_RQ_IN_FLIGHT => {
                bindings::blk_eh_timer_return_BLK_EH_RESET_TIMER
            }
            _ => bindings::blk_eh_timer_return_BLK_EH_DONE,
        }
    }
}
