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
    memory.copy_in(0, &[0; 8])?; //~ E0599 no method named `copy_in` found
    Ok(memory.len())
}

fn len_of(buf: &Buf<ToDevice>) -> Result<usize> {
    len(buf)
}
