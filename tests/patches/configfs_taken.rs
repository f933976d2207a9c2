// SPDX-License-Identifier: GPL-2.0

//! Registers a configfs subsystem with a name that is taken: that must fail, and do no more.

use kernel::{
    configfs::{
        self,
        configfs_attrs, //
    },
    page::PAGE_SIZE,
    prelude::*, //
};

module! {
    type: Taken,
    name: "configfs_taken",
    authors: ["rdma-rs authors"],
    description: "Reproducer: a configfs subsystem that was not registered is unregistered",
    license: "GPL",
}

#[pin_data]
struct Taken {
    #[pin]
    config: configfs::Subsystem<Data>,
}

struct Data;

#[vtable]
impl configfs::AttributeOperations<0> for Data {
    type Data = Data;

    fn show(_data: &Data, _page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
        Ok(0)
    }
}

fn subsystem(name: &'static CStr) -> impl PinInit<configfs::Subsystem<Data>, Error> {
    let item_type = configfs_attrs! {
        container: configfs::Subsystem<Data>,
        data: Data,
        attributes: [
            nothing: 0,
        ],
    };

    configfs::Subsystem::new(name, item_type, Ok(Data))
}

impl kernel::InPlaceModule for Taken {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        pin_init::pin_init_scope(|| {
            let first = KBox::pin_init(subsystem(c"rdma_rs_taken"), GFP_KERNEL)?;
            let second = KBox::pin_init(subsystem(c"rdma_rs_taken"), GFP_KERNEL);
            let error = second.err();
            pr_info!("the second: {error:?}\n");
            drop(first);
            if error != Some(EEXIST) {
                return Err(EIO);
            }
            Ok(try_pin_init!(Self {
                config <- subsystem(c"rdma_rs_taken"),
            }))
        })
    }
}
