// SPDX-License-Identifier: GPL-2.0

//! Using an owner that may wait for room in the send queue, and is posted by another thread then.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    session::Room, //
};

#[derive(HasCqe)]
struct Answer {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Answer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

type Owner = Pin<KBox<Answer>>;

fn answer(room: &Room<Owner>, mut answer: Owner) -> Result<Option<Owner>> {
    #[cfg(not(mistake))]
    answer.buf.cpu().fill(0);
    let now = room.take(1, answer)?;
    #[cfg(mistake)]
    answer.buf.cpu().fill(0); //~ E0382 borrow of moved value
    Ok(now)
}
