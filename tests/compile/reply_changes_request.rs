// SPDX-License-Identifier: GPL-2.0

//! Changing what is posted when the reply has come: the device may not have sent it yet.

use rdma::{
    prelude::*,
    session::tags::{
        Exchange,
        Reply,
        Tag, //
    }, //
};

struct Io;

impl Exchange for Io {
    type Request = Buf<ToDevice>;
    type Reply = u32;
    type Connection = ();
    type Needs = context::Atomic;

    fn ended(mut tag: Tag<Self>) {
        #[cfg(not(mistake))]
        tag.parts().0.cpu().fill(0);
        let _ = &mut tag;
    }
}

fn answered(mut reply: Reply<'_, Io>) {
    #[cfg(mistake)]
    reply.request().cpu().fill(0); //~ E0596 cannot borrow data in a `&` reference as mutable
    *reply += 1;
}
