// SPDX-License-Identifier: GPL-2.0

//! Using what the exchanges of a QP share after the tag is free: it may have been the last to keep
//! them.

use rdma::{
    prelude::*,
    session::tags::{
        Exchange,
        Tag, //
    }, //
};

struct Controller;

impl Controller {
    fn recover(&self) {}
}

struct Io;

impl Exchange for Io {
    type Request = Buf<ToDevice>;
    type Reply = bool;
    type Connection = Controller;
    type Needs = context::Atomic;

    fn ended(tag: Tag<Self>) {
        let controller = tag.connection();
        #[cfg(mistake)]
        drop(tag); //~ E0505 cannot move out of `tag` because it is borrowed
        controller.recover();
    }
}
