// SPDX-License-Identifier: GPL-2.0

//! The files: one run at a time, and the result of the last.

use crate::{
    args::Args,
    run::{
        run as run_args,
        Report, //
    },
    Perf, //
};
use kernel::{
    debugfs::ScopedDir,
    fmt,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed,
            Release, //
        },
        Mutex, //
    },
    uaccess::UserSliceReader, //
};
use rdma::prelude::*;

/// The longest line that can be written.
const LINE: usize = 512;

#[pin_data]
pub(crate) struct Control {
    /// Locked while there is a run.
    #[pin]
    running: Mutex<()>,
    #[pin]
    report: Mutex<Option<Report>>,
    /// Not 0 while the run keeps its objects.
    held: Atomic<u32>,
}

impl Control {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            running <- new_mutex!(()),
            report <- new_mutex!(None),
            held: Atomic::new(0),
        })
    }

    /// Adds the files to a folder.
    #[inline(never)]
    pub(crate) fn add_files<'a>(&'a self, dir: &ScopedDir<'a, '_>) {
        dir.read_write_callback_file(c"held", self, &held, &release);
        dir.read_callback_file(c"result", self, &result);
        dir.read_callback_file(c"samples", self, &samples);
        // The last file is removed first. That waits for a run, which may have to be let go.
        dir.write_only_callback_file(c"run", self, &run);
    }
}

/// Runs what is written.
fn run(control: &Control, reader: &mut UserSliceReader) -> Result {
    let mut line = [0; LINE];
    let Some(line) = line.get_mut(..reader.len()) else {
        pr_err!("a run is asked for by a line of at most {LINE} bytes\n");
        return Err(EINVAL);
    };
    reader.read_slice(line)?;
    let line = core::str::from_utf8(line)
        .inspect_err(|_| pr_err!("a run is asked for by text in UTF-8\n"))
        .map_err(|_| EINVAL)?;
    let line = line.strip_suffix('\n').unwrap_or(line);
    let Some(_running) = control.running.try_lock() else {
        pr_err!("there is a run already\n");
        return Err(EBUSY);
    };
    let args = Args::parse(line, &control.held)?;
    let cx = Sleepable::current()?;
    // An old result must not be taken for that of this run, even if it fails.
    *control.report.lock() = None;
    let mut report = Report::default();
    ClientRef::of::<Perf>(&cx)
        .and_then(|client| run_args(&client, &args, &mut report, &cx))
        .inspect_err(|e| pr_err!("{line}: {e:?}\n"))?;
    *control.report.lock() = Some(report);
    Ok(())
}

fn result(control: &Control, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match &*control.report.lock() {
        None => Ok(()),
        Some(report) => report.figures.write(f),
    }
}

/// One latency a line, in nanoseconds.
fn samples(control: &Control, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let report = control.report.lock();
    if let Some((times, began)) = report.as_ref().and_then(|report| report.laps.as_ref()) {
        for ns in times.laps(*began) {
            f.write_fmt(fmt!("{ns}\n"))?;
        }
    }
    Ok(())
}

/// The file that ends the time for which a run keeps its objects.
#[inline]
fn held(control: &Control, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_fmt(fmt!("{}\n", control.held.load(Relaxed)))
}

/// Has the run go on.
#[inline]
fn release(control: &Control, reader: &mut UserSliceReader) -> Result {
    reader.skip(reader.len())?;
    control.held.store(0, Release);
    Ok(())
}
