// SPDX-License-Identifier: GPL-2.0

//! The folder of a device below `/sys/kernel/debug/rdma_null`, and those of its QPs.

use crate::{
    device::{
        self,
        Shared, //
    },
    qp, //
};
use kernel::{
    debugfs::{
        Dir,
        File,
        Reader,
        Writer, //
    },
    fmt,
    prelude::*,
    str::CString,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    },
    uaccess::UserSliceReader,
    workqueue, //
};

/// What a file is about.
struct Subject {
    shared: Arc<Shared>,
    qp: Option<u32>,
}

/// The file `inject`.
struct Inject(Subject);

/// The file `state`.
struct State(Subject);

/// The file `remove`.
struct Remove {
    shared: Arc<Shared>,
    begun: Atomic<bool>,
}

impl Reader for Inject {
    fn read_from_slice(&self, reader: &mut UserSliceReader) -> Result {
        let mut buf = [0; 64];
        let line = buf.get_mut(..reader.len()).ok_or(EINVAL)?;
        reader.read_slice(line)?;
        let line = core::str::from_utf8(line).map_err(|_| EINVAL)?;
        self.0.shared.inject(self.0.qp, line.parse()?)
    }
}

impl Reader for Remove {
    /// Removes the device from a work item: the removal waits for the end of this call.
    fn read_from_slice(&self, reader: &mut UserSliceReader) -> Result {
        reader.skip(reader.len())?;
        if self.begun.xchg(true, kernel::sync::atomic::ordering::Full) {
            return Err(EALREADY);
        }
        let shared = self.shared.clone();
        let removal = workqueue::system_long().try_spawn(GFP_KERNEL, move || {
            device::unregister(&shared);
        });
        removal.inspect_err(|_| self.begun.store(false, Relaxed))?;
        Ok(())
    }
}

impl Writer for State {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = self.0.shared.machine.lock();
        let Some(num) = self.0.qp else {
            let numbers = [
                ("cqs", machine.cqs.iter().count()),
                ("qps", machine.qps.iter().count()),
                ("srqs", machine.srqs.iter().count()),
                ("mrs", machine.mrs.iter().count()),
                (
                    "completions",
                    machine.cqs.iter().map(|cq| cq.len()).sum::<usize>(),
                ),
                ("eager", machine.eager.into()),
            ];
            return numbers
                .iter()
                .try_for_each(|(name, number)| writeln!(f, "{name} {number}"));
        };
        let Some(qp) = machine
            .find_qp(num)
            .and_then(|index| machine.qps.get(index))
        else {
            return Ok(());
        };
        writeln!(f, "state {}", qp.state)?;
        writeln!(f, "peer {}", qp.attr.dest_qp_num)?;
        writeln!(f, "sends {}", qp.sends)?;
        writeln!(f, "receives {}", qp.recvs.used())?;
        writeln!(f, "held {}", qp.held.len())
    }
}

/// The folder of a QP.
struct QpFiles {
    num: u32,
    _inject: Pin<KBox<File<Inject>>>,
    _state: Pin<KBox<File<State>>>,
}

/// The folder of a device.
pub(crate) struct Files {
    dir: Dir,
    /// By the index of the QP.
    qps: KVVec<Option<QpFiles>>,
    _inject: Option<Pin<KBox<File<Inject>>>>,
    _state: Option<Pin<KBox<File<State>>>>,
    _remove: Option<Pin<KBox<File<Remove>>>>,
}

/// The folder of all devices, which is made with the first and never goes before the module.
pub(crate) fn root() -> Dir {
    Dir::new(c"rdma_null")
}

fn inject(dir: &Dir, shared: &Arc<Shared>, qp: Option<u32>) -> Result<Pin<KBox<File<Inject>>>> {
    let shared = shared.clone();
    let file = dir.write_only_file(c"inject", Inject(Subject { shared, qp }));
    KBox::pin_init(file, GFP_KERNEL)
}

fn state(dir: &Dir, shared: &Arc<Shared>, qp: Option<u32>) -> Result<Pin<KBox<File<State>>>> {
    let shared = shared.clone();
    let file = dir.read_only_file(c"state", State(Subject { shared, qp }));
    KBox::pin_init(file, GFP_KERNEL)
}

impl Files {
    /// Makes the folder of a device. What cannot be made is missing, as always with debugfs.
    pub(crate) fn new(root: &Dir, shared: &Arc<Shared>) -> Self {
        let dir = root.subdir(&shared.name);
        let remove = Remove {
            shared: shared.clone(),
            begun: Atomic::new(false),
        };
        Self {
            _inject: inject(&dir, shared, None).ok(),
            _state: state(&dir, shared, None).ok(),
            _remove: KBox::pin_init(dir.write_only_file(c"remove", remove), GFP_KERNEL).ok(),
            qps: KVVec::new(),
            dir,
        }
    }

    /// Makes the folder of a QP.
    pub(crate) fn add_qp(&mut self, shared: &Arc<Shared>, num: u32) -> Result {
        let name = CString::try_from_fmt(fmt!("{num}"))?;
        let dir = self.dir.subdir(&name);
        let files = QpFiles {
            num,
            _inject: inject(&dir, shared, Some(num))?,
            _state: state(&dir, shared, Some(num))?,
        };
        let index = qp::index_of(num);
        while self.qps.len() <= index {
            self.qps.push(None, GFP_KERNEL)?;
        }
        if let Some(place) = self.qps.get_mut(index) {
            *place = Some(files);
        }
        Ok(())
    }

    /// Takes the folder of a QP out, to be dropped.
    pub(crate) fn remove_qp(&mut self, num: u32) -> Option<impl Sized> {
        let place = self.qps.get_mut(qp::index_of(num))?;
        place.take_if(|files| files.num == num)
    }
}
