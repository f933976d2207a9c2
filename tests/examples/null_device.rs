// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/null-device.rst.

use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

fn hold(qp: &Qp<Softirq>) -> Result {
    let null = rdma_null::NullDevice::new(c"null0")?; // Clients have been told when this returns.
    null.inject_qp(qp.num(), Injection::Hold { count: 4 })?;
    null.remove(); // So does dropping it.
    Ok(())
}
