// SPDX-License-Identifier: GPL-2.0

//! What has to know that a device goes, so that threads that wait for it let go; and what the
//! removal itself waits for.

use crate::{
    bindings,
    cm::connection::Shared,
    context::Sleepable,
    device::name::Name,
    refs::REPORT_MS, //
};
use core::ptr::NonNull;
use kernel::{
    impl_has_hr_timer,
    new_mutex,
    prelude::*,
    str::CStr,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        Mutex, //
    },
    time::{
        hrtimer::{
            HrTimer,
            HrTimerCallback,
            HrTimerCallbackContext,
            HrTimerRestart,
            RelativeMode,
            ScopedHrTimerPointer, //
        },
        Delta,
        Monotonic, //
    }, //
};

/// Something made from a device that threads may wait for.
pub(crate) trait OnRemoval: Send + Sync {
    /// The device is about to go: every thread that waits for this gets `ENODEV`, and no other one
    /// waits from here on. Called before [`OnRemoval::removed`] of any object, with the list
    /// locked: takes locks for a moment only, and waits for nothing.
    fn gone(self: Arc<Self>) {}

    /// The device goes: ends this. May wait, for handlers of the ULP too.
    fn removed(&self, _cx: &Sleepable) {}
}

struct Entry {
    object: Arc<dyn OnRemoval>,
    told: bool,
}

struct List {
    entries: KVec<Entry>,
    closed: bool,
}

/// The objects of one device of one client that are to be told of its removal.
#[pin_data]
pub(crate) struct Removal {
    #[pin]
    list: Mutex<List>,
}

impl Removal {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(List {
                entries: KVec::new(),
                closed: false,
            }),
        })
    }

    /// Lists an object.
    ///
    /// # Errors
    ///
    /// `ENODEV` once the device goes, or `ENOMEM`.
    pub(crate) fn add(&self, object: Arc<dyn OnRemoval>) -> Result {
        let mut list = self.list.lock();
        if list.closed {
            return Err(ENODEV);
        }
        let entry = Entry {
            object,
            told: false,
        };
        Ok(list.entries.push(entry, GFP_KERNEL)?)
    }

    /// Takes an object out, if it is listed.
    pub(crate) fn remove<T>(&self, object: &Arc<T>) {
        let object: *const T = Arc::as_ptr(object);
        let mut list = self.list.lock();
        let is_it = |entry: &Entry| core::ptr::addr_eq(Arc::as_ptr(&entry.object), object);
        if let Some(index) = list.entries.iter().position(is_it) {
            let _ = list.entries.remove(index);
        }
    }

    /// Closes the list, and has everybody who waits for an object know that the device goes.
    pub(crate) fn close(&self) {
        let mut list = self.list.lock();
        list.closed = true;
        for entry in &list.entries {
            entry.object.clone().gone();
        }
    }

    /// Returns an object that was not ended yet.
    fn next_untold(&self) -> Option<Arc<dyn OnRemoval>> {
        let mut list = self.list.lock();
        let entry = list.entries.iter_mut().find(|entry| !entry.told)?;
        entry.told = true;
        Some(entry.object.clone())
    }

    /// Ends all objects, after [`Removal::close`].
    pub(crate) fn end_all(&self, cx: &Sleepable) {
        while let Some(object) = self.next_untold() {
            object.removed(cx);
        }
    }
}

/// What a removal does that may wait.
#[derive(Clone, Copy)]
pub(crate) enum Step {
    Event,
    Remove,
    Objects,
    Ids,
    Data,
}

const STEPS: [&str; 5] = [
    "event()",
    "remove()",
    "MAD agents, and listeners and handlers of the InfiniBand connection manager",
    "handlers of connections",
    "the drop of the ULP's data",
];

/// Says every ten seconds which step of a removal has not ended.
///
/// # Invariants
///
/// `device` is valid while the timer is started.
#[pin_data]
pub(crate) struct Progress {
    #[pin]
    timer: HrTimer<Self>,
    device: NonNull<bindings::ib_device>,
    client: &'static CStr,
    step: Atomic<u32>,
    secs: Atomic<u32>,
}

// SAFETY: The name of a device may be read from any thread, and the rest is `Send`.
unsafe impl Send for Progress {}
// SAFETY: The name of a device may be read from any thread, and the rest is `Sync`.
unsafe impl Sync for Progress {}

impl_has_hr_timer! {
    impl HasHrTimer<Self> for Progress {
        mode: RelativeMode<Monotonic>, field: self.timer
    }
}

impl HrTimerCallback for Progress {
    type Pointer<'a> = Pin<&'a Self>;

    fn run(this: Pin<&Self>, mut cx: HrTimerCallbackContext<'_, Self>) -> HrTimerRestart {
        // SAFETY: `device` is valid by the type invariant, as the timer is started: it runs.
        let name = unsafe { Name::of(this.device.as_ptr()) };
        let secs = this.secs.fetch_add(REPORT_MS / 1_000, Relaxed) + REPORT_MS / 1_000;
        let step = STEPS.get(this.step.load(Relaxed) as usize).unwrap_or(&"");
        pr_warn!(
            "{}: removal of {name}: waits for the end of {step} since {secs} s\n",
            this.client
        );
        cx.forward_now(Delta::from_millis(REPORT_MS.into()));
        HrTimerRestart::Restart
    }
}

impl Progress {
    /// # Safety
    ///
    /// The device is valid whenever [`Progress::during`] is called.
    pub(crate) unsafe fn new(
        device: NonNull<bindings::ib_device>,
        client: &'static CStr,
    ) -> impl PinInit<Self> {
        // INVARIANT: `during` starts the timer, and ends it before it returns.
        pin_init!(Self {
            timer <- HrTimer::new(),
            device,
            client,
            step: Atomic::new(0),
            secs: Atomic::new(0),
        })
    }

    /// Calls `f`, which takes a step that may wait. Not generic, so that the timer's code is this
    /// module's.
    #[inline(never)]
    pub(crate) fn during(self: Pin<&Self>, step: Step, f: &mut dyn FnMut()) {
        self.step.store(step as u32, Relaxed);
        self.secs.store(0, Relaxed);
        self.start_scoped(Delta::from_millis(REPORT_MS.into()), f);
    }
}

// The connection manager tells ids of a device's removal only after the clients that were
// registered later, which are all ULPs, have let go of the device. So the crate tells them itself.

struct BoundId {
    /// `None` once it was destroyed, while its handler is still to be told that the device goes.
    id: Option<NonNull<bindings::rdma_cm_id>>,
    shared: Arc<Shared>,
    told: bool,
}

// SAFETY: An id may be used from any thread.
unsafe impl Send for BoundId {}

struct IdList {
    ids: KVec<BoundId>,
    closed: bool,
}

/// The bound ids of one device of one client, until the device goes.
///
/// # Invariants
///
/// An id that is listed is not destroyed while the list is locked. Its `place` is its index then.
#[pin_data]
pub(crate) struct BoundIds {
    #[pin]
    list: Mutex<IdList>,
}

impl BoundIds {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(IdList {
                ids: KVec::new(),
                closed: false,
            }),
        })
    }

    /// Lists an id.
    ///
    /// # Safety
    ///
    /// The id is removed from the list before it is destroyed.
    pub(crate) unsafe fn add(
        &self,
        id: NonNull<bindings::rdma_cm_id>,
        shared: Arc<Shared>,
    ) -> Result {
        let mut list = self.list.lock();
        if list.closed {
            return Err(ENODEV);
        }
        list.ids.reserve(1, GFP_KERNEL)?;
        // INVARIANT: The caller removes the id before it is destroyed, and its index is the length.
        shared.place.store(list.ids.len().try_into()?, Relaxed);
        let entry = BoundId {
            id: Some(id),
            shared,
            told: false,
        };
        Ok(list.ids.push(entry, GFP_KERNEL)?)
    }

    /// Removes an id that is about to be destroyed: the last one takes its place, so that this
    /// costs the same whatever their number is.
    pub(crate) fn remove(&self, id: NonNull<bindings::rdma_cm_id>, shared: &Shared) {
        let mut list = self.list.lock();
        let (place, closed) = (shared.place.load(Relaxed), list.closed);
        match list.ids.get_mut(place as usize) {
            Some(entry) if entry.id == Some(id) && closed && !entry.told => {
                // Who waited for the connection got `ENODEV` and has let go of the id.
                entry.id = None;
                return;
            }
            Some(entry) if entry.id == Some(id) => {}
            _ => return,
        }
        let last = list.ids.pop();
        let entry = match (list.ids.get_mut(place as usize), last) {
            (Some(entry), Some(last)) => {
                // INVARIANT: It is there now.
                last.shared.place.store(place, Relaxed);
                Some(core::mem::replace(entry, last))
            }
            (_, last) => last,
        };
        drop(list);
        drop(entry);
    }

    /// Closes the list, and has everybody who waits for an id know that the device goes. Waits for
    /// nothing.
    pub(crate) fn close(&self) {
        let mut list = self.list.lock();
        list.closed = true;
        for entry in &list.ids {
            entry.shared.gone();
        }
    }

    /// Returns an id whose handler does not know yet that the device goes.
    fn next_untold(&self) -> Option<Arc<Shared>> {
        let mut list = self.list.lock();
        let entry = list.ids.iter_mut().find(|entry| !entry.told)?;
        entry.told = true;
        Some(entry.shared.clone())
    }

    /// Gives the handler of every id that was there the last event and disconnects the id, after
    /// [`BoundIds::close`].
    pub(crate) fn end_all(&self, _cx: &Sleepable) {
        // First the handlers, so that they know why their requests are flushed.
        while let Some(shared) = self.next_untold() {
            shared.tell_removal();
        }
        for entry in &self.list.lock().ids {
            match entry.id {
                Some(id) if entry.shared.is_attached() && entry.shared.end() => {
                    // SAFETY: By the invariant of `BoundIds` the id is alive: the list is locked. Ids
                    // that are not connected any more are left alone.
                    unsafe { bindings::rdma_disconnect(id.as_ptr()) };
                }
                _ => {}
            }
        }
    }
}
