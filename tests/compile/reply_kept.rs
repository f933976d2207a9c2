// SPDX-License-Identifier: GPL-2.0

//! Keeping a reply beyond its handler, and having it in two threads.

use kernel::error::Error;
use rdma::{
    prelude::*,
    session::tags::{
        Exchange,
        Reply,
        TagId,
        Tags, //
    },
    wc::Success, //
};

struct Io;

impl Exchange for Io {
    type Request = Buf<ToDevice>;
    type Reply = u32;
    type Connection = ();
    type Needs = context::Atomic;

    fn invalidated(reply: Reply<'_, Self>, _wc: &Wc, _cx: &context::Atomic) {
        #[cfg(mistake)]
        elsewhere(reply);
        //~^ E0277 cannot be sent between threads safely
        //~^^ E0277 cannot be shared between threads safely
        #[cfg(not(mistake))]
        drop(reply);
    }
}

fn elsewhere<T: Send>(_value: T) {}

#[cfg(mistake)]
fn received<'a>(tags: &'a Tags<Io>, wc: &Success<'_>, id: TagId) -> Result<Reply<'a, Io>, Error> {
    tags.reply(wc, id) //~ E0621 explicit lifetime required
}

#[cfg(not(mistake))]
fn received<'a>(tags: &'a Tags<Io>, wc: &Success<'a>, id: TagId) -> Result<Reply<'a, Io>, Error> {
    tags.reply(wc, id)
}
