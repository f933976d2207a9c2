// SPDX-License-Identifier: GPL-2.0

//! Giving a context of transfers other memory while it is posted.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    rw::{Ctx, Rw},
    sg::SgList, //
};

#[derive(HasCqe)]
struct Write {
    cqe: Cqe<Self>,
    data: Ctx<ToDevice, SgList<KVec<u8>>>,
}

impl CqeHandler for Write {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn write(
    qp: &Qp<Softirq>,
    mut write: Pin<KBox<Write>>,
    next: SgList<KVec<u8>>,
    to: Remote,
    cx: &Sleepable,
) -> Result {
    #[cfg(not(mistake))]
    write.data.fill(next)?;
    qp.post_rw(write, |w| Ok(Rw::write(&w.data, .., to, cx)))?;
    #[cfg(mistake)]
    write.data.fill(next)?; //~ E0382 borrow of moved value: `write`
    Ok(())
}
