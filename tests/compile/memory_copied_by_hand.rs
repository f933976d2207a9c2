// SPDX-License-Identifier: GPL-2.0

//! Copying, by a trait's method that takes any reference, what a device may be reading.

use kernel::prelude::*;
use rdma::{
    dma::Direction,
    mr::OwnMemory,
    prelude::*, //
};

fn len<D: Direction, M: OwnMemory<D>>(memory: &M) -> Result<usize> {
    #[cfg(mistake)]
    memory.copy_in(0, &[0; 8])?; //~ E0061 this method takes 3 arguments but 2
    Ok(memory.len())
}

fn len_of(buf: &Buf<ToDevice>) -> Result<usize> {
    len(buf)
}
