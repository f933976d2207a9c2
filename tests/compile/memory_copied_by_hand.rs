// SPDX-License-Identifier: GPL-2.0

//! Copying, by a trait's method that takes any reference, what a device may be reading.

use kernel::prelude::*;
use rdma::{
    dma::Direction,
    mr::OwnMemory,
    prelude::*, //
};

fn look<D: Direction, M: OwnMemory<D>>(memory: &M) -> Result {
    #[cfg(mistake)]
    memory.copy_in(0, &[0; 8])?; //~ E0061 this method takes 3 arguments but 2 arguments
    let _ = memory.get();
    Ok(())
}

fn look_at(buf: &Buf<ToDevice>) -> Result {
    look(buf)
}
