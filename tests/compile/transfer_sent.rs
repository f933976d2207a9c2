// SPDX-License-Identifier: GPL-2.0

//! Handing a transfer that is yet to be mapped, which may sleep, to another thread.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    rw::{Ctx, Rw}, //
};

fn write_later(client: &ClientRef, qp: Qp<Softirq>, data: &'static Ctx, to: Remote) -> Result {
    let cx = Sleepable::current()?;
    #[cfg(mistake)]
    let rw = Rw::write(data, .., to, &cx);
    #[cfg(mistake)]
    client.spawn(GFP_KERNEL, move |_| {
        //~^ E0277 `*mut ()` cannot be sent between threads safely
        let _ = qp.prepare_rw(rw);
    })?;
    #[cfg(not(mistake))]
    client.spawn(GFP_KERNEL, move |cx| {
        let _ = qp.prepare_rw(Rw::write(data, .., to, cx));
    })?;
    let _ = &cx;
    Ok(())
}
