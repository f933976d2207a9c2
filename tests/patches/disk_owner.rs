// SPDX-License-Identifier: GPL-2.0

//! Has a disk: while that is open, the module must not be unloaded.

use kernel::{
    block::mq::{
        gen_disk::{
            GenDisk,
            GenDiskBuilder, //
        },
        Operations,
        Request,
        TagSet, //
    },
    configfs::{
        self,
        configfs_attrs, //
    },
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        aref::ARef,
        Arc, //
    },
};

module! {
    type: Owner,
    name: "disk_owner",
    authors: ["rdma-rs authors"],
    description: "Reproducer: a module whose disk is open is unloaded",
    license: "GPL",
}

struct Disk;

#[vtable]
impl Operations for Disk {
    type QueueData = ();

    fn queue_rq(_data: (), rq: ARef<Request<Self>>, _is_last: bool) -> Result {
        Request::end_ok(rq).map_err(|_| EIO)
    }

    fn commit_rqs(_data: ()) {}

    fn complete(_rq: ARef<Request<Self>>) {}
}

/// A [`GenDisk`] is not `Send`, so it is the data of a subsystem, as in rnull.
#[pin_data]
struct Owner {
    #[pin]
    config: configfs::Subsystem<Data>,
}

struct Data(#[expect(dead_code)] GenDisk<Disk>);

#[vtable]
impl configfs::AttributeOperations<0> for Data {
    type Data = Data;

    fn show(_data: &Data, _page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
        Ok(0)
    }
}

impl kernel::InPlaceModule for Owner {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        let item_type = configfs_attrs! {
            container: configfs::Subsystem<Data>,
            data: Data,
            attributes: [
                nothing: 0,
            ],
        };

        pin_init::pin_init_scope(move || {
            let tags = Arc::pin_init(TagSet::new(1, 16, 1), GFP_KERNEL)?;
            let builder = GenDiskBuilder::new().capacity_sectors(64);
            let disk = builder.build(fmt!("disk_owner"), tags, ())?;
            Ok(try_pin_init!(Self {
                config <- configfs::Subsystem::new(c"disk_owner", item_type, Ok(Data(disk))),
            }))
        })
    }
}
