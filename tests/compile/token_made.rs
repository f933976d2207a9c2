// SPDX-License-Identifier: GPL-2.0

//! Making the proof that one may sleep, instead of having it.

use kernel::{prelude::*, types::NotThreadSafe};
use rdma::prelude::*;

fn drain(qp: &Qp<Softirq>) -> Result {
    let _: NotThreadSafe = NotThreadSafe;
    #[cfg(mistake)]
    let cx = Sleepable(NotThreadSafe);
    //~^ E0423 cannot initialize a tuple struct which contains private fields
    #[cfg(not(mistake))]
    let cx = Sleepable::current()?;
    qp.drain(&cx)
}
