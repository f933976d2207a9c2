// SPDX-License-Identifier: GPL-2.0

//! The follower: memory that the leader writes. Its CPU has nothing to do with an append.

use crate::record::{
    recover,
    Advertisement,
    Recovered,
    ADVERTISEMENT, //
};
use kernel::prelude::*;
use rdma::{
    op::Op,
    prelude::*, //
};

/// A registration, and a message.
const CAPS: Caps = Caps::new(2, 1);

/// The memory of a log.
#[derive(HasCqe)]
pub(crate) struct Log {
    reg: Cqe<Self>,
    region: SharedRegion<Bidirectional>,
}

impl CqeHandler for Log {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    /// The log is registered. If not, the leader will hear of it.
    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

impl Log {
    pub(crate) fn new(pd: &Pd, len: usize, cx: &Sleepable) -> Result<Arc<Self>> {
        let log = Self {
            reg: Cqe::new(),
            region: Region::new(Buf::alloc(pd, len, cx)?, cx)?.into_shared(),
        };
        Ok(Arc::new(log, GFP_KERNEL)?)
    }

    /// Accepts a leader and tells it where the log is.
    pub(crate) fn accept(
        self: &Arc<Self>,
        request: cm::Request<'_>,
        pd: &Pd,
        cx: &Sleepable,
    ) -> Result {
        let id = request.into_id(cx)?;
        let cq = Cq::<Softirq>::alloc_any(pd.device(), CAPS.entries(), cx)?;
        let qp = Qp::create(&id, pd, &cq, &cq, &CAPS, cx)?;
        let mut buf = Buf::<ToDevice>::alloc(pd, ADVERTISEMENT, cx)?;
        let handler = Arc::new(qp.clone(), GFP_KERNEL)?;
        id.accept(handler, &cm::ConnParam::default(), cx)?;
        // Reading is for the leader's flushes.
        let at = qp.post_send(self.clone(), |log| {
            Ok(RegWr::remote_read_write(&log.region))
        })?;
        let advertisement = Advertisement {
            addr: at.addr.into(),
            rkey: at.rkey.into(),
            len: (self.region.len() as u32).into(),
        };
        buf.cpu().copy_from_slice(advertisement.as_bytes());
        Ok(Op::<(), _>::new(buf, (), cx)?.send(&qp, 0..ADVERTISEMENT)?)
    }

    /// Recovers the log, as after a crash.
    pub(crate) fn recover(&self) -> Result<Recovered> {
        let mut bytes = KVec::from_elem(0, self.region.len(), GFP_KERNEL)?;
        self.region.read(0, &mut bytes)?;
        Ok(recover(&bytes))
    }
}
