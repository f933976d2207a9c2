// SPDX-License-Identifier: GPL-2.0

//! The names of the kernel crate beside the prelude of ULPs: none needs an alias.

use kernel::{
    device::Device,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{
            Atomic,
            Relaxed, //
        },
        *, //
    }, //
};
use rdma::prelude::*;

#[derive(HasCqe)]
struct Counted {
    cqe: Cqe<Self>,
    parent: ARef<Device>,
    posts: Atomic<u32>,
    done: Arc<Completion>,
}

impl CqeHandler for Counted {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, wc: &Wc, _cx: &context::Atomic) {
        if matches!(wc.result(), Err(e) if e.status != wc::Status::WR_FLUSH_ERR) {
            dev_err!(
                this.parent,
                "lost after {} posts\n",
                this.posts.load(Relaxed)
            );
        }
        this.done.complete_all();
    }
}

fn wait(cq: &Cq<Waited>, cx: &Sleepable) -> Result {
    let mut batch = WcArray::<1>::new();
    while cq.wait(Notify::NextComp, 100, cx)? == cq::Wait::Ready {
        cq.poll(&mut batch)?;
        batch.completions().for_each(cq::Completion::dispatch);
    }
    Ok(())
}
