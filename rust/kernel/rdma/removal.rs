// SPDX-License-Identifier: GPL-2.0

//! What has to know that a device goes, so that threads that wait for it let go; and what the
//! removal itself waits for.

use crate::{
    bindings,
    context::Sleepable,
    device::Name,
    gate::REPORT_MS, //
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
