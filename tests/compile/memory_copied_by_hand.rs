// SPDX-License-Identifier: GPL-2.0

//! Copying, by a trait's method that takes any reference, what a device may be reading.

use kernel::prelude::*;
use rdma::{
    dma::Direction,
    mr::Memory,
    prelude::*, //
};

fn look<D: Direction, M: Memory<D>>(memory: &M) -> Result {
    #[cfg(mistake)]
    memory.get().copy_in(0, &[0; 8])?; //~ E0624 method `copy_in` is private
    let _ = memory.get();
    Ok(())
}

fn look_at(buf: &Buf<ToDevice>) -> Result {
    look(buf)
}
