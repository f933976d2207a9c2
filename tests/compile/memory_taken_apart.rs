// SPDX-License-Identifier: GPL-2.0

//! Taking memory apart by a trait's method, to free its pages before they are unmapped.

use rdma::{
    mr::{
        AnyMemory,
        Memory, //
    },
    prelude::*, //
};

fn free(buf: SgBuf<FromDevice>) {
    #[cfg(mistake)]
    if let AnyMemory::Map(list, owner) = buf.keep() {
        //~^ E0061 this method takes 1 argument but 0 arguments were supplied
        drop(owner);
        drop(list);
    }
    let _ = |memory: AnyMemory| drop(memory);
    let _ = Memory::get(&buf);
}
