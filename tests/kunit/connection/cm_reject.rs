// SPDX-License-Identifier: GPL-2.0

//! Rejections, and the names of events.

use crate::fixture::{
    listen,
    Env,
    STEP_MS, //
};
use kernel::{
    new_mutex,
    prelude::*,
    str::CString,
    sync::Mutex, //
};
use rdma::prelude::*;

/// The rejection of a connection.
#[derive(Default)]
struct Told {
    reason: Option<cm::RejectReason>,
    data: Option<KVec<u8>>,
    text: Option<CString>,
}

/// Keeps what it is told.
#[pin_data]
struct Listens {
    #[pin]
    told: Mutex<Told>,
}

impl cm::Handler for Listens {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        let mut told = self.told.lock();
        told.text = CString::try_from_fmt(fmt!("{event}")).ok();
        if let cm::Event::Rejected(rejected) = event {
            told.reason = rejected.reason();
            told.data = rejected.private_data().and_then(|data| {
                let mut copy = KVec::new();
                copy.extend_from_slice(data, GFP_KERNEL).ok()?;
                Some(copy)
            });
        }
    }
}

/// Asks for a connection that `answer` rejects, and returns what the handler was told.
fn rejected(
    answer: impl Fn(&cm::Id, &Sleepable) -> Result + Send + Sync + 'static,
) -> Result<Told> {
    let env = Env::new()?;
    let addr = env.addr();
    let rejects = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
        answer(&request.into_id(cx)?, cx)
    };
    let listener = listen(&env, addr, rejects)?;
    let handler = Arc::pin_init(
        pin_init!(Listens { told <- new_mutex!(Told::default()) }),
        GFP_KERNEL,
    )?;
    let id = cm::Id::resolve(&env.client, addr, STEP_MS, &env.cx)?;
    let cq = env.cq::<Softirq>(64)?;
    let qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
    let connected = id.connect(handler.clone(), &cm::ConnParam::default(), &env.cx);
    check_err!(connected.map(|_| ()), ECONNREFUSED);
    // The id waits for its callback, so that all has been told.
    drop((qp, id, listener));
    crate::fixture::wait(|| handler.told.lock().text.is_some())?;
    let told = core::mem::take(&mut *handler.told.lock());
    Ok(told)
}

fn shown(event: cm::Event<'_>, text: &[u8]) -> Result {
    let shown = CString::try_from_fmt(fmt!("{event}"))?;
    check_eq!(shown.to_bytes(), text);
    Ok(())
}

#[kunit_tests(rdma_cm_reject)]
mod tests {
    use super::*;

    #[test]
    fn peer_gets_the_data() -> Result {
        let told = rejected(|id, cx| id.reject(b"no beer", cx))?;
        check_eq!(told.reason, Some(cm::RejectReason::CONSUMER_DEFINED));
        let data = told.data.ok_or(ENODATA)?;
        check_eq!(data.len(), 148);
        check!(data.starts_with(b"no beer\0"));
        check_eq!(
            told.text.ok_or(EINVAL)?.to_bytes(),
            b"rejected: consumer defined"
        );
        Ok(())
    }

    #[test]
    fn dropped_requests_are_rejected() -> Result {
        let told = rejected(|_, _| Ok(()))?;
        check_eq!(told.reason, Some(cm::RejectReason::CONSUMER_DEFINED));
        check!(told.data.ok_or(ENODATA)?.iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn too_much_data_is_not_sent() -> Result {
        let told = rejected(|id, cx| {
            let bytes = KVec::from_elem(7, 149, GFP_KERNEL)?;
            check_err!(id.reject(&bytes, cx), EINVAL);
            id.reject(bytes.get(..148).ok_or(EINVAL)?, cx)
        })?;
        let data = told.data.ok_or(ENODATA)?;
        check_eq!(data.len(), 148);
        check!(data.iter().all(|byte| *byte == 7));
        Ok(())
    }

    #[test]
    fn events_have_names() -> Result {
        shown(cm::Event::Established { private_data: &[] }, b"established")?;
        shown(cm::Event::Disconnected, b"disconnected")?;
        shown(cm::Event::DeviceRemoval, b"device removal")?;
        let failed = CString::try_from_fmt(fmt!("connect error: {EINVAL:?}"))?;
        shown(cm::Event::Failed(EINVAL), failed.to_bytes())?;
        shown(cm::Event::Other(1000), b"unrecognized event")
    }
}
