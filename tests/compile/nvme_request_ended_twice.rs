// SPDX-License-Identifier: GPL-2.0

//! Ending a request of blk-mq a second time.

use crate::nvme::Rq;

fn reply(rq: Rq, status: u16, result: u64) {
    if status != 0 {
        rq.end(status, 0);
        #[cfg(not(mistake))]
        return;
    }
    rq.end(status, result); //~ E0382 use of moved value: `rq`
}
