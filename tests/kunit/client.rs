// SPDX-License-Identifier: GPL-2.0

//! The client itself, and its devices.

use crate::fixture::{
    wait,
    Env, //
};
use kernel::{
    new_mutex,
    prelude::*,
    str::CStr,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Mutex, //
    }, //
};
use rdma::{
    client::{
        is_going,
        ModuleClient,
        Registration,
        Singleton, //
    },
    device::{
        Device,
        Event, //
    },
    prelude::{
        Arc,
        Client,
        ClientRef,
        DeviceData,
        Pd,
        Sleepable, //
    }, //
};

/// The number of devices that have come, and whether that was before the client was told that all
/// are there.
static ADDED: Atomic<i32> = Atomic::new(0);
static ADDED_BEFORE_READY: Atomic<i32> = Atomic::new(-1);
/// Set if the module was being unloaded before it was loaded.
static GOING_BEFORE_READY: Atomic<bool> = Atomic::new(false);

/// The module.
pub(crate) struct Kunit;

impl Client for Kunit {
    type Data = PerDevice;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Kunit)
    }

    fn ready(self: Pin<&Self>, _client: &ClientRef, _cx: &Sleepable) -> Result {
        ADDED_BEFORE_READY.store(ADDED.load(Relaxed), Relaxed);
        GOING_BEFORE_READY.store(is_going::<Self>(), Relaxed);
        Ok(())
    }
}

/// The action of a test, done once in a call of the device's.
type Hook = Option<Arc<dyn Fn(&Sleepable) + Send + Sync>>;

/// Keeps a PD, as ULPs do, to be let go when the device goes, and the events of the device.
#[pin_data(PinnedDrop)]
pub(crate) struct PerDevice {
    _pd: Pd,
    #[pin]
    events: Mutex<KVec<Event>>,
    /// By the next event, or the next that is this one.
    #[pin]
    in_event: Mutex<(Option<Event>, Hook)>,
    #[pin]
    in_remove: Mutex<Hook>,
    #[pin]
    in_drop: Mutex<Hook>,
}

/// Calls what a test wants to be called, once.
fn call(hook: &Mutex<Hook>, cx: &Sleepable) {
    let hook = hook.lock().take();
    if let Some(hook) = hook {
        hook(cx);
    }
}

impl PerDevice {
    /// Returns the events that have come since the last call.
    pub(crate) fn take_events(&self) -> KVec<Event> {
        core::mem::take(&mut *self.events.lock())
    }

    /// Has this called by the next event.
    pub(crate) fn in_event(&self, hook: impl Fn(&Sleepable) + Send + Sync + 'static) -> Result {
        *self.in_event.lock() = (None, Some(Arc::new(hook, GFP_KERNEL)?));
        Ok(())
    }

    /// Has this called by the next event that is this one.
    pub(crate) fn in_event_of(
        &self,
        event: Event,
        hook: impl Fn(&Sleepable) + Send + Sync + 'static,
    ) -> Result {
        *self.in_event.lock() = (Some(event), Some(Arc::new(hook, GFP_KERNEL)?));
        Ok(())
    }

    /// Has this called when the device goes.
    // A user of it waits in vain, where time is skipped.
    #[cfg(CONFIG_UML_TIME_TRAVEL_SUPPORT)]
    #[allow(dead_code)]
    pub(crate) fn in_remove(&self, hook: impl Fn(&Sleepable) + Send + Sync + 'static) -> Result {
        *self.in_remove.lock() = Some(Arc::new(hook, GFP_KERNEL)?);
        Ok(())
    }

    /// Has this called when the data are dropped.
    #[cfg(CONFIG_UML_TIME_TRAVEL_SUPPORT)]
    #[allow(dead_code)]
    pub(crate) fn in_drop(&self, hook: impl Fn(&Sleepable) + Send + Sync + 'static) -> Result {
        *self.in_drop.lock() = Some(Arc::new(hook, GFP_KERNEL)?);
        Ok(())
    }
}

#[pinned_drop]
impl PinnedDrop for PerDevice {
    fn drop(self: Pin<&mut Self>) {
        if let Ok(cx) = Sleepable::current() {
            call(&self.in_drop, &cx);
        }
    }
}

impl DeviceData<Kunit> for PerDevice {
    fn add(_client: Pin<&Kunit>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error> {
        // Later ones are those of tests.
        if ADDED_BEFORE_READY.load(Relaxed) < 0 {
            ADDED.fetch_add(1, Full);
        }
        let pd = Pd::alloc(dev, cx);
        try_pin_init!(Self {
            _pd: pd?,
            events <- new_mutex!(KVec::new()),
            in_event <- new_mutex!((None, None)),
            in_remove <- new_mutex!(None),
            in_drop <- new_mutex!(None),
        })
    }

    fn remove(self: Pin<&Self>, _client: Pin<&Kunit>, _dev: &Device, cx: &Sleepable) {
        call(&self.in_remove, cx);
    }

    fn event(self: Pin<&Self>, _client: Pin<&Kunit>, _dev: &Device, event: Event, cx: &Sleepable) {
        // A test that misses one will say so.
        let _ = self.events.lock().push(event, GFP_KERNEL);
        let hook = {
            let mut in_event = self.in_event.lock();
            match in_event.0 {
                Some(awaited) if awaited != event => None,
                _ => in_event.1.take(),
            }
        };
        if let Some(hook) = hook {
            hook(cx);
        }
    }
}

/// A client that is still kept when it ends: at the unload, or as `ready()` fails.
struct Stays<const FAILS: bool>;

/// The numbers of calls of `unload()` of either, and of its drop.
static UNLOADED: [Atomic<i32>; 2] = [const { Atomic::new(0) }; 2];
static DROPPED: [Atomic<i32>; 2] = [const { Atomic::new(0) }; 2];

/// How often the client was dropped when the last that has kept it let go.
static DROPPED_WHILE_KEPT: [Atomic<i32>; 2] = [const { Atomic::new(-1) }; 2];

impl<const FAILS: bool> Client for Stays<FAILS> {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Self)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, _cx: &Sleepable) -> Result {
        client.spawn(GFP_KERNEL, |cx| {
            let it = usize::from(FAILS);
            // The end has begun, and waits for this.
            let ends = || UNLOADED[it].load(Relaxed) == 1 && ClientRef::of::<Self>(cx).is_err();
            if wait(ends).is_ok() {
                DROPPED_WHILE_KEPT[it].store(DROPPED[it].load(Relaxed), Relaxed);
            }
        })?;
        match FAILS {
            true => Err(ENOTTY),
            false => Ok(()),
        }
    }

    fn unload(self: Pin<&Self>, _cx: &Sleepable) {
        UNLOADED[usize::from(FAILS)].fetch_add(1, Relaxed);
    }
}

impl<const FAILS: bool> Drop for Stays<FAILS> {
    fn drop(&mut self) {
        DROPPED[usize::from(FAILS)].fetch_add(1, Relaxed);
    }
}

// SAFETY: Each type has its variable, and the module is that of the suites. The one test that makes
// a registration drops it.
unsafe impl<const FAILS: bool> ModuleClient for Stays<FAILS> {
    fn singleton() -> &'static Singleton {
        static SINGLETONS: [Singleton; 2] = [const { Singleton::new() }; 2];
        &SINGLETONS[usize::from(FAILS)]
    }

    fn module() -> &'static ThisModule {
        Kunit::module()
    }
}

// Built into the kernel, the suites run before there is a device.
#[cfg(MODULE)]
#[kunit_tests(rdma_client)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_added_before_ready() -> Result {
        check!(ADDED_BEFORE_READY.load(Relaxed) > 0);
        check_eq!(ADDED_BEFORE_READY.load(Relaxed), ADDED.load(Relaxed));
        Ok(())
    }

    #[test]
    fn is_not_going_before_its_unload() -> Result {
        check!(!GOING_BEFORE_READY.load(Relaxed));
        check!(!is_going::<Kunit>());
        Ok(())
    }

    #[test]
    fn has_the_name_of_its_module() -> Result {
        check_eq!(Env::new()?.client.name().to_bytes(), crate::NAME);
        Ok(())
    }

    #[test]
    fn cannot_be_registered_twice() -> Result {
        const NAME: &CStr = c"again";
        check_err!(
            KBox::pin_init(Registration::<Kunit>::new(NAME), GFP_KERNEL),
            EBUSY
        );
        Env::new()?;
        Ok(())
    }

    /// The client is there as long as anything keeps it, and has let go before that.
    #[test]
    fn stays_until_the_last_reference_is_gone() -> Result {
        let made = KBox::pin_init(Registration::<Stays<false>>::new(c"stays"), GFP_KERNEL);
        drop(made?);
        check_eq!(DROPPED_WHILE_KEPT[0].load(Relaxed), 0);
        check_eq!(
            (UNLOADED[0].load(Relaxed), DROPPED[0].load(Relaxed)),
            (1, 1)
        );
        Ok(())
    }

    #[test]
    fn stays_where_loading_fails() -> Result {
        let made = KBox::pin_init(Registration::<Stays<true>>::new(c"fails"), GFP_KERNEL);
        check_err!(made, ENOTTY);
        check_eq!(DROPPED_WHILE_KEPT[1].load(Relaxed), 0);
        check_eq!(
            (UNLOADED[1].load(Relaxed), DROPPED[1].load(Relaxed)),
            (1, 1)
        );
        Ok(())
    }

    #[test]
    fn clones_find_the_same_device() -> Result {
        let env = Env::new()?;
        let clone = env.client.clone();
        let (dev, _) = clone.first_device_with_addr(&env.cx)?;
        check!(dev == env.dev);
        check!(dev.clone() == dev);
        Ok(())
    }

    #[test]
    fn device_has_a_name() -> Result {
        let env = Env::new()?;
        check!(env.dev.name().to_bytes().starts_with(b"rxe"));
        let shown = kernel::str::CString::try_from_fmt(fmt!("{}", env.dev))?;
        check_eq!(shown.to_bytes(), env.dev.name().to_bytes());
        Ok(())
    }

    #[test]
    fn device_has_limits() -> Result {
        let dev = Env::new()?.dev;
        check!(dev.attrs().max_cqe >= 1024);
        check!(dev.attrs().max_qp_wr >= 1024);
        check!(dev.attrs().max_fast_reg_page_list_len >= 16);
        check!(dev.num_comp_vectors() >= 1);
        Ok(())
    }

    #[test]
    fn device_address_is_that_of_its_interface() -> Result {
        check_eq!(Env::new()?.ip, core::net::IpAddr::from([192, 0, 2, 1]));
        Ok(())
    }

    #[test]
    fn pd_is_equal_to_its_clones_only() -> Result {
        let env = Env::new()?;
        let other = Pd::alloc(&env.dev, &env.cx)?;
        check!(env.pd.clone() == env.pd);
        check!(env.pd != other);
        check!(other.device() == &env.dev);
        Ok(())
    }
}
