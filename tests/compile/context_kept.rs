// SPDX-License-Identifier: GPL-2.0

//! Keeping the context of a QP beyond the handler that has borrowed it.

use kernel::{
    prelude::*,
    sync::Mutex, //
};
use rdma::{
    prelude::*,
    qp::QpContext, //
};

struct Conn;

#[cfg(mistake)]
type Found = Option<&'static Conn>;
#[cfg(not(mistake))]
type Found = bool;

#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    found: Arc<Mutex<Found>>,
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = QpContext<Conn, Sleepable>;

    fn done(this: Self::Pointer, _wc: &Wc, cx: &Self::Needs) {
        #[cfg(mistake)]
        let found = cx.get(); //~ E0521 borrowed data escapes outside of associated function
        #[cfg(not(mistake))]
        let found = cx.get().is_some();
        *this.found.lock() = found;
    }
}
