// SPDX-License-Identifier: GPL-2.0

//! A client whose loading fails while somebody has its file open, with code of the module.

use kernel::{
    fs::File,
    miscdevice::{
        MiscDevice,
        MiscDeviceOptions,
        MiscDeviceRegistration, //
    },
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic,
        Release, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;

/// Set once the file is open.
static IS_OPEN: Atomic<bool> = Atomic::new(false);

struct Opened;

#[vtable]
impl MiscDevice for Opened {
    type Ptr = KBox<Self>;

    fn open(_file: &File, _misc: &MiscDeviceRegistration<Self>) -> Result<KBox<Self>> {
        IS_OPEN.store(true, Release);
        Ok(KBox::new(Self, GFP_KERNEL)?)
    }
}

#[pin_data]
struct Unready {
    #[pin]
    _file: MiscDeviceRegistration<Opened>,
}

impl Client for Unready {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        let options = MiscDeviceOptions {
            name: c"rdma_unready",
        };
        try_pin_init!(Self {
            _file <- MiscDeviceRegistration::register(options),
        })
    }

    fn ready(self: Pin<&Self>, _client: &ClientRef, _cx: &Sleepable) -> Result {
        for _ in 0..3_000 {
            if IS_OPEN.load(Acquire) {
                return Err(ECANCELED);
            }
            fsleep(Delta::from_millis(20));
        }
        Err(ETIMEDOUT)
    }
}

rdma::module_rdma_client! {
    type: Unready,
    name: "rdma_unready",
    authors: ["rdma-rs authors"],
    description: "A client whose loading fails while its file is open",
    license: "GPL",
}
