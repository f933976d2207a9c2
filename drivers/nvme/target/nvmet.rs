// SPDX-License-Identifier: GPL-2.0

//! What the driver needs of nvmet, the core of NVMe targets in C.
//!
//! All unsafe code of the driver is in this file. Its types say what C has as rules:
//!
//! - A [`Request`] is part of a response of an array. It is given to nvmet with the response
//!   ([`Request::execute`]), which comes back by [`Target::queue_response`], once. Meanwhile
//!   nothing else has access to it.
//! - The request owns what nvmet uses: the memory of the command, until [`Request::take_command`],
//!   and that of the data, until the request is used again.
//! - A command is parsed only while its submission queue, an [`Sq`], is alive: it has a reference.
//!   An [`Sq`] that is dropped ends in a work item, as nvmet waits for its commands.
//! - A port of nvmet lives as long as an [`Sq`] of it: see [`Nport`].
//!
//! C header: `drivers/nvme/target/nvmet.h`

use crate::{
    bindings,
    target::{
        NvmetRdma,
        Port,
        Recv,
        Response,
        Target, //
    },
    users::Users, //
};
use core::{
    mem,
    ptr::{
        self,
        NonNull, //
    }, //
};
use kernel::{
    error::{
        from_result,
        to_result, //
    },
    fmt::Write,
    impl_has_work,
    new_work,
    prelude::*,
    str::Formatter,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Relaxed,
            Release, //
        },
        Mutex, //
    },
    time::Jiffies,
    types::{
        Opaque,
        ScopeGuard, //
    },
    workqueue, //
};
use rdma::{
    client::is_going,
    context::Context,
    dma::Direction,
    prelude::*,
    qp::Taken,
    rw::{
        Ctx,
        Rw, //
    },
    sg,
    wr::Sge, //
};

/// The length of a command, in bytes.
pub(crate) const COMMAND: usize = size_of::<bindings::nvme_command>();
/// The length of a completion of NVMe, in bytes.
pub(crate) const COMPLETION: usize = size_of::<bindings::nvme_completion>();

/// Returns the number of receives of a shared receive queue, zero if there are to be none: the
/// parameters of the module.
pub(crate) fn srq_size() -> u32 {
    // SAFETY: The function has no preconditions: it reads a parameter of the module.
    unsafe { bindings::nvmet_helper_srq_size() }
}

/// Returns the number of responses of which one is signaled: the parameter of the module.
pub(crate) fn sig_limit() -> u32 {
    // SAFETY: The function has no preconditions: it reads a parameter of the module.
    unsafe { bindings::nvmet_helper_sig_limit() }
}

/// Returns the size of the largest reads whose memory is kept, zero for none: the parameter of the
/// module.
pub(crate) fn kept_data_size() -> u32 {
    // SAFETY: The function has no preconditions: it reads a parameter of the module.
    unsafe { bindings::nvmet_helper_kept_data_size() }
}

// The registration.

/// Zero, or the address of a [`Target`] in an [`Arc`], of which the [`Transport`] that has
/// registered it has a reference, and each [`Nport`].
static TARGET: Atomic<usize> = Atomic::new(0);

/// Returns the driver's state, in a call of nvmet.
///
/// # Safety
///
/// nvmet is calling an operation of the transport, and the reference is not used after that.
unsafe fn target<'a>() -> ArcBorrow<'a, Target> {
    // SAFETY: nvmet calls `add_port` while the transport is registered, and the other operations
    // for a port that was added, or a controller, which ends with the last of its submission
    // queues, or a command that is executed. The transport has a reference to the state until it
    // is not registered, and the port that a submission queue has until that has ended.
    unsafe { ArcBorrow::from_raw(TARGET.load(Relaxed) as *const Target) }
}

/// A transport that is registered while it has a [`ClientRef`] (`nvmet_register_transport`).
#[pin_data(PinnedDrop)]
pub(crate) struct Transport {
    target: Arc<Target>,
    #[pin]
    client: Mutex<Option<ClientRef>>,
}

impl Transport {
    pub(crate) fn new(target: Arc<Target>) -> impl PinInit<Self> {
        pin_init!(Self {
            target,
            client <- kernel::new_mutex!(None, "nvmet::Transport::client"),
        })
    }

    /// Registers the transport, once. It is the last step of loading the module, as ports are
    /// added from here on. Fails with `EBUSY` if there is another transport for RDMA.
    pub(crate) fn register(&self, cx: &Sleepable) -> Result {
        let client = ClientRef::of::<NvmetRdma>(cx)?;
        let mut registered = self.client.lock();
        let at = Arc::as_ptr(&self.target) as usize;
        TARGET.cmpxchg(0, at, Full).map_err(|_| EBUSY)?;
        // SAFETY: The reference lives as long as the module. The client, which is that of the
        // module that the structure names, is kept until `unregister`, and by each port and queue,
        // and with it the text of the module.
        to_result(unsafe { bindings::nvmet_register_transport(&raw const *OPS) })
            .map_err(|_| EBUSY)?;
        *registered = Some(client);
        Ok(())
    }

    /// Unregisters the transport (`nvmet_unregister_transport`) when the module is unloaded. Does
    /// nothing before, as nvmet looks for the transport of a port that it disables.
    pub(crate) fn unregister(&self, _cx: &Sleepable) {
        let client = self.client.lock().take_if(|_| is_going::<NvmetRdma>());
        if client.is_some() {
            // SAFETY: It is registered, as `register` has set the client. No port is enabled, as
            // each has a reference to the module.
            unsafe { bindings::nvmet_unregister_transport(&raw const *OPS) };
        }
    }
}

#[pinned_drop]
impl PinnedDrop for Transport {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: A client is dropped in process context. Work items of this module have given up
        // their references, and are about to return.
        unsafe {
            self.unregister(&Sleepable::assume());
            bindings::nvmet_helper_flush_wq();
        }
        // One that stays registered is used, so the module is not unloaded.
        if let Some(client) = self.client.lock().take() {
            mem::forget((client, self.target.clone()));
        }
    }
}

/// The operations of the transport.
const OPS: &bindings::nvmet_fabrics_ops = &bindings::nvmet_fabrics_ops {
    owner: kernel::module::this_module::<crate::RdmaClientModule>().as_ptr(),
    type_: bindings::NVMF_TRTYPE_RDMA,
    msdbd: 1,
    // Without NVMF_METADATA_SUPPORTED nvmet refuses ports that are to have T10-PI.
    flags: bindings::NVMF_KEYED_SGLS,
    add_port: Some(add_port),
    remove_port: Some(remove_port),
    queue_response: Some(queue_response),
    delete_ctrl: Some(delete_ctrl),
    disc_traddr: Some(disc_traddr),
    host_traddr: Some(host_traddr),
    get_mdts: Some(get_mdts),
    get_max_queue_size: Some(get_max_queue_size),
    ..pin_init::zeroed()
};

/// `nvmet_fabrics_ops.add_port`.
///
/// # Safety
///
/// Called by nvmet, with a port that is not enabled, and the lock under which it is written.
unsafe extern "C" fn add_port(raw: *mut bindings::nvmet_port) -> c_int {
    from_result(|| {
        let cx = Sleepable::current()?;
        // SAFETY: This is an operation, which returns before the reference is used again.
        let target: Arc<Target> = unsafe { target() }.into();
        let raw = NonNull::new(raw).ok_or(EINVAL)?;
        let client = ClientRef::of::<NvmetRdma>(&cx)?;
        // INVARIANT: nvmet calls `remove_port`, which closes this, before it frees the port, if
        // this succeeds. If not, this is closed below.
        let init = pin_init!(Nport {
            raw,
            target,
            client,
            users <- Users::new(),
            closing <- new_work!("nvmet::Nport::closing"),
        });
        let nport = Arc::pin_init(init, GFP_KERNEL)?;
        // The driver may keep a reference to the port, also if it fails.
        let close = ScopeGuard::new_with_data(nport, |nport| nport.close());
        // SAFETY: The port is valid, as the caller promises.
        let mut config = unsafe { PortConfig::read(&close) }?;
        let added = KBox::new_uninit(GFP_KERNEL)?;
        let port = close.target.add_port(&mut config, &cx)?;
        // SAFETY: The port is valid, and locked, as the caller promises. The transport alone uses
        // `priv`.
        unsafe {
            let raw = raw.as_ptr();
            (*raw).inline_data_size = config.inline_data_size.unwrap_or(0).into();
            (*raw).max_queue_size = config.max_queue_size.unwrap_or(0).into();
            (*raw).priv_ = KBox::into_raw(added.write((close.dismiss(), port))).cast();
        }
        Ok(0)
    })
}

/// `nvmet_fabrics_ops.remove_port`.
///
/// # Safety
///
/// Called by nvmet, once for a port that [`add_port`] has added.
unsafe extern "C" fn remove_port(raw: *mut bindings::nvmet_port) {
    // SAFETY: `add_port` has set the field, from a box of this type, which is taken back once.
    let (nport, port) = KBox::into_inner(unsafe {
        let added = mem::replace(&mut (*raw).priv_, ptr::null_mut());
        KBox::<(Arc<Nport>, Arc<Port>)>::from_raw(added.cast())
    });
    // SAFETY: nvmet removes ports with `nvmet_config_sem` held, which is a semaphore: in process
    // context.
    port.remove(&unsafe { Sleepable::assume() });
    nport.close();
}

/// Returns the [`Request`] that has this `struct nvmet_req`.
///
/// # Safety
///
/// The request was given to nvmet.
unsafe fn request_from_raw(req: *mut bindings::nvmet_req) -> *mut Request {
    // SAFETY: Only `give` gives requests to nvmet, each of which is that field.
    unsafe { kernel::container_of!(req.cast::<Opaque<bindings::nvmet_req>>(), Request, req) }
}

/// `nvmet_fabrics_ops.queue_response`.
///
/// # Safety
///
/// Called by nvmet, once for a request that was given to it.
unsafe extern "C" fn queue_response(req: *mut bindings::nvmet_req) {
    // SAFETY: The request was given, and nvmet, which gives it back once, does not use it after
    // this.
    Target::queue_response(unsafe {
        (*request_from_raw(req)).completed();
        take_back(req, State::Done)
    });
}

/// `nvmet_fabrics_ops.delete_ctrl`.
///
/// # Safety
///
/// Called by nvmet.
unsafe extern "C" fn delete_ctrl(ctrl: *mut bindings::nvmet_ctrl) {
    // SAFETY: This is an operation, which returns before the reference is used again.
    unsafe { target() }.delete_ctrl(&Ctrl(ctrl));
}

/// Writes an address to a buffer, and zeroes behind it. Returns the length of the text.
///
/// # Safety
///
/// The buffer has `len` bytes.
#[inline(never)]
unsafe fn write_addr(addr: core::net::IpAddr, to: *mut c_char, len: usize) -> usize {
    // SAFETY: The buffer has as many bytes, as the caller promises, which are initialised then.
    let mut text = Formatter::new(unsafe {
        ptr::write_bytes(to, 0, len);
        core::slice::from_raw_parts_mut(to, len)
    });
    // What does not fit is cut off.
    let _ = text.write_fmt(fmt!("{addr:?}"));
    text.bytes_written().min(len)
}

/// `nvmet_fabrics_ops.disc_traddr`.
///
/// # Safety
///
/// Called by nvmet, which executes the request, with its port, and a buffer of that length.
unsafe extern "C" fn disc_traddr(
    req: *mut bindings::nvmet_req,
    port: *mut bindings::nvmet_port,
    traddr: *mut c_char,
) {
    // SAFETY: The request is being executed, so its response is valid until this returns, and
    // nothing else uses it.
    let response = unsafe { (*request_from_raw(req)).owner.assume_init_ref() };
    let len = bindings::NVMF_TRADDR_SIZE as usize;
    // SAFETY: The port is valid. A user may change the address of one that is being disabled, so it
    // is read byte by byte. The buffer is as long, and nvmet sends all of it.
    unsafe {
        let configured = (&raw const (*port).disc_addr.traddr).cast::<c_char>();
        let copy = |at| traddr.add(at).write(configured.add(at).read_volatile());
        match Target::disc_traddr(response) {
            Some(addr) => _ = write_addr(addr, traddr, len),
            None => (0..len).for_each(copy),
        }
    }
}

/// `nvmet_fabrics_ops.host_traddr`.
///
/// # Safety
///
/// Called by nvmet, with a buffer of `len` bytes.
unsafe extern "C" fn host_traddr(
    ctrl: *mut bindings::nvmet_ctrl,
    traddr: *mut c_char,
    len: usize,
) -> isize {
    // SAFETY: This is an operation, which returns before the reference is used again.
    match unsafe { target() }.host_traddr(&Ctrl(ctrl)) {
        // SAFETY: The buffer has `len` bytes, as the caller promises.
        Ok(addr) => unsafe { write_addr(addr, traddr, len) as isize },
        Err(e) => e.to_errno() as isize,
    }
}

/// `nvmet_fabrics_ops.get_mdts`.
extern "C" fn get_mdts(_ctrl: *const bindings::nvmet_ctrl) -> u8 {
    Target::MAX_MDTS
}

/// `nvmet_fabrics_ops.get_max_queue_size`.
extern "C" fn get_max_queue_size(_ctrl: *const bindings::nvmet_ctrl) -> u16 {
    Target::MAX_QUEUE_SIZE
}

/// A controller in a call of nvmet, to be compared.
pub(crate) struct Ctrl(*mut bindings::nvmet_ctrl);

// Work items.

/// Returns nvmet's queue (`nvmet_wq`), which nvmet flushes before it frees a port. The client keeps
/// the text of the work item, which has a reference to it.
///
/// No connection ends there. An unbound queue has a list for each group of CPUs, and starts from
/// each in turn as many work items as its `max_active` allows: that could be [`Nport`], which waits
/// for those behind it.
fn wq(_client: &ClientRef) -> &'static workqueue::Queue {
    // SAFETY: nvmet, which this module needs, destroys the queue when it is unloaded.
    unsafe { workqueue::Queue::from_raw(bindings::nvmet_wq) }
}

/// Queues the work item of a port, in a while. Any context. Does nothing if it is queued.
pub(crate) fn enqueue_delayed(port: Arc<Port>, delay: Jiffies) {
    let _ = wq(&port.client).enqueue_delayed(port, delay);
}

// Ports.

/// A port of nvmet, as long as it has submission queues.
///
/// nvmet frees a port after it was removed and `nvmet_wq` was flushed. If there are submission
/// queues when it is removed, a work item waits there for their end.
///
/// # Invariants
///
/// `raw` is valid until `users` is closed, and there are none: they are the submission queues.
#[pin_data]
pub(crate) struct Nport {
    raw: NonNull<bindings::nvmet_port>,
    /// See [`TARGET`].
    target: Arc<Target>,
    client: ClientRef,
    #[pin]
    users: Users,
    #[pin]
    closing: workqueue::Work<Self>,
}

// SAFETY: The port is not accessed by this, which passes its address to nvmet.
unsafe impl Send for Nport {}
// SAFETY: The port is not accessed by this, which passes its address to nvmet.
unsafe impl Sync for Nport {}

impl_has_work! {
    impl HasWork<Self> for Nport { self.closing }
}

impl workqueue::WorkItem for Nport {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.users.wait();
    }
}

impl Nport {
    /// nvmet removes the port, or it was not added. The work item is queued before nvmet flushes
    /// its queue.
    fn close(self: &Arc<Self>) {
        self.users.close();
        let _ = wq(&self.client).enqueue(self.clone());
    }
}

/// A port that is being enabled, as the user has configured it: `None` is left to the transport,
/// which sets what hosts are told.
pub(crate) struct PortConfig {
    pub(crate) nport: Arc<Nport>,
    pub(crate) id: u16,
    pub(crate) addr: SocketAddr,
    pub(crate) inline_data_size: Option<u16>,
    pub(crate) max_queue_size: Option<u16>,
}

impl PortConfig {
    /// Reads what is configured. Fails with `EINVAL` if the address is none of IP, or malformed
    /// (`inet_pton_with_scope`), and logs that.
    ///
    /// # Safety
    ///
    /// The port is valid.
    unsafe fn read(nport: &Arc<Nport>) -> Result<Self> {
        let raw = nport.raw.as_ptr();
        let mut ip = [0; 16];
        let mut num = 0;
        let mut scope = 0;
        // SAFETY: The port is valid, as the caller promises, and there is room for what is
        // returned.
        let is_v6 = unsafe {
            bindings::nvmet_helper_port_addr(raw, ip.as_mut_ptr(), &raw mut num, &raw mut scope)
        };
        to_result(is_v6)?;
        let [a, b, c, d, ..] = ip;
        // SAFETY: The port is valid, as the caller promises. nvmet may write the fields meanwhile,
        // so the reads are volatile.
        Ok(unsafe {
            let from_user = |size: *const c_int| {
                u16::try_from(size.read_volatile().clamp(-1, u16::MAX.into())).ok()
            };
            Self {
                nport: nport.clone(),
                id: u16::from_le((&raw const (*raw).disc_addr.portid).read_volatile()),
                addr: match is_v6 {
                    0 => SocketAddr::new([a, b, c, d].into(), num),
                    _ => core::net::SocketAddrV6::new(ip.into(), num, 0, scope).into(),
                },
                inline_data_size: from_user(&raw const (*raw).inline_data_size),
                max_queue_size: from_user(&raw const (*raw).max_queue_size),
            }
        })
    }
}

// Submission queues.

/// A submission queue (`struct nvmet_sq`), with its completion queue.
///
/// When it is dropped, a work item ends it, unless [`Sq::destroy`] has.
pub(crate) struct Sq(Arc<SqInner>);

/// # Invariants
///
/// `sq` and `cq` are initialised, until a thread destroys them after it has set `destroyed`. Until
/// then the port counts this.
#[pin_data]
struct SqInner {
    #[pin]
    cq: Opaque<bindings::nvmet_cq>,
    #[pin]
    sq: Opaque<bindings::nvmet_sq>,
    nport: Arc<Nport>,
    destroyed: Atomic<bool>,
    /// Set while a command is handled that is to connect the queue.
    connecting: Atomic<bool>,
    /// Set when one has: from then on the queue has a reference to its controller.
    connected: Atomic<bool>,
    #[pin]
    release: workqueue::Work<Self>,
}

// SAFETY: A submission queue may be used by any thread: its count of commands is atomic, and the
// rest is nvmet's, which locks it.
unsafe impl Send for SqInner {}
// SAFETY: A submission queue may be used by several threads at once: its count of commands is
// atomic, and the rest is nvmet's, which locks it.
unsafe impl Sync for SqInner {}

impl_has_work! {
    impl HasWork<Self> for SqInner { self.release }
}

impl workqueue::WorkItem for SqInner {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.destroy();
    }
}

impl SqInner {
    /// Ends the queue (`nvmet_sq_destroy`, `nvmet_cq_put`), once. May sleep.
    fn destroy(&self) {
        if self.destroyed.xchg(true, Full) {
            return;
        }
        // SAFETY: By the type invariant both are initialised, and this thread alone has set
        // `destroyed`. nvmet waits until no command is parsed or executed, as each has a reference
        // to the queue, and none is parsed after that.
        unsafe {
            bindings::nvmet_sq_destroy(self.sq.get());
            bindings::nvmet_cq_put(self.cq.get());
        }
        self.nport.users.put();
    }

    /// Returns the controller, null if the queue is not connected.
    fn ctrl(&self) -> *mut bindings::nvmet_ctrl {
        // SAFETY: The field is there as long as this. nvmet writes it when the queue is connected
        // and destroyed, which this read may race with, so it is volatile.
        unsafe { (&raw const (*self.sq.get()).ctrl).read_volatile() }
    }
}

impl Sq {
    /// Makes a queue that is to be connected to a controller (`nvmet_sq_init`). Fails with `ENODEV`
    /// if the port was removed, or `ENOMEM`.
    pub(crate) fn new(nport: &Arc<Nport>, _cx: &Sleepable) -> Result<Self> {
        nport.users.get()?;
        let init = try_pin_init!(SqInner {
            cq: pin_init::zeroed(),
            sq: pin_init::zeroed(),
            _: {
                // SAFETY: The queues are in their place, and zeroed.
                to_result(unsafe {
                    bindings::nvmet_cq_init(cq.get());
                    bindings::nvmet_sq_init(sq.get(), cq.get())
                })?
            },
            nport: nport.clone(),
            destroyed: Atomic::new(false),
            connecting: Atomic::new(false),
            connected: Atomic::new(false),
            release <- new_work!("nvmet::Sq::release"),
        }? Error);
        // INVARIANT: Both are initialised, and the port counts this.
        let inner = Arc::pin_init(init, GFP_KERNEL).inspect_err(|_| nport.users.put())?;
        Ok(Self(inner))
    }

    /// Ends the queue, and waits until no command of it is executed (`nvmet_sq_destroy`). Those
    /// that wait for events are completed.
    pub(crate) fn destroy(&self, _cx: &Sleepable) {
        self.0.destroy();
    }

    /// Returns a function that does what [`Sq::destroy`] does, to be called after `self` was
    /// dropped.
    pub(crate) fn destroyer(&self) -> impl FnOnce(&Sleepable) {
        let inner = self.0.clone();
        move |_| inner.destroy()
    }

    /// Calls `f` with a reference to the queue; `None` if that is being destroyed.
    #[inline]
    fn with<R>(&self, f: impl FnOnce(*mut bindings::nvmet_sq) -> R) -> Option<R> {
        let sq = self.0.sq.get();
        // SAFETY: By the type invariant the queue was initialised. Its count refuses references
        // from the destruction on: `percpu_ref_exit()` leaves it dead, and only that is read then.
        if !unsafe { bindings::nvmet_helper_sq_tryget(sq) } {
            return None;
        }
        let result = f(sq);
        // SAFETY: `nvmet_helper_sq_tryget` has taken the reference.
        unsafe { bindings::nvmet_helper_sq_put(sq) };
        Some(result)
    }

    /// Returns whether the queue is connected to a controller, or was.
    #[inline]
    pub(crate) fn is_connected(&self) -> bool {
        self.0.connected.load(Acquire)
    }

    /// Returns whether the queue is one of this controller.
    pub(crate) fn is_of(&self, ctrl: &Ctrl) -> bool {
        ptr::eq(self.0.ctrl(), ctrl.0)
    }

    /// Returns whether the queue is the admin queue of this controller.
    pub(crate) fn is_admin_of(&self, ctrl: &Ctrl) -> bool {
        // SAFETY: The field is there as long as this. nvmet writes it when the queue is connected,
        // which this read may race with, so it is volatile.
        self.is_of(ctrl) && unsafe { (&raw const (*self.0.sq.get()).qid).read_volatile() } == 0
    }

    /// Reports a fatal error of the controller (`nvmet_ctrl_fatal_error`), which is then deleted.
    /// Returns `false` if there is none.
    pub(crate) fn fatal_error(&self, _cx: &Sleepable) -> bool {
        let report = |ctrl: NonNull<bindings::nvmet_ctrl>| {
            // SAFETY: The queue, which is not destroyed before the reference is given back, has a
            // reference to its controller, as it is connected.
            unsafe { bindings::nvmet_ctrl_fatal_error(ctrl.as_ptr()) }
        };
        let ctrl = || self.is_connected().then(|| self.0.ctrl());
        let reported = self.with(|_| ctrl().and_then(NonNull::new).map(report));
        reported.flatten().is_some()
    }
}

impl Drop for Sq {
    fn drop(&mut self) {
        if !self.0.destroyed.load(Relaxed) {
            let _ = self.0.nport.client.enqueue(self.0.clone());
        }
    }
}

// Memory.

/// Lends a buffer to nvmet, until [`give_back`]. Returns its address and its length.
#[inline]
fn lend<D: Direction>(buf: &mut Buf<D>) -> (*mut c_void, usize) {
    let mut view = buf.cpu();
    let lent = (view.as_mut_ptr().cast(), view.len());
    // It stays synchronised for the CPU.
    mem::forget(view);
    lent
}

/// Synchronises a buffer that was lent for the device.
#[inline]
fn give_back<D: Direction>(buf: &mut Buf<D>) {
    drop(buf.cpu());
}

/// The pages of a transfer, with their scatter list (`sgl_alloc`).
///
/// # Invariants
///
/// `list` is from `sgl_alloc`, with so many entries, and this owns it.
pub(crate) struct Pages {
    list: NonNull<bindings::scatterlist>,
    entries: u32,
}

// SAFETY: By the type invariant only this refers to the list and its pages, and `sgl_free` may be
// called by any thread.
unsafe impl Send for Pages {}

// SAFETY: The list and its pages are an allocation of their own, all of whose entries are filled.
// nvmet reads and writes them by their addresses, while it has the request that owns them, which is
// not posted then.
unsafe impl sg::SgOwner<Bidirectional> for Pages {
    fn sgl(&mut self) -> sg::Sgl<Bidirectional> {
        sg::Sgl::new(self.list.as_ptr(), self.entries)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the list is from `sgl_alloc`, and this owns it.
        unsafe { bindings::sgl_free(self.list.as_ptr()) };
    }
}

// Requests.

/// The state of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// nvmet has nothing to do with it.
    Idle,
    /// The command was parsed (`nvmet_req_init`), and has a reference to its submission queue.
    Parsed,
    /// nvmet has it.
    Given,
    /// The completion is written.
    Done,
}

/// A request of nvmet (`struct nvmet_req`), with the memory of the command, of the data and of the
/// completion.
///
/// # Invariants
///
/// - In the state [`State::Given`] nvmet has the request, and `owner` is the response that this is
///   part of, through which alone it could be reached and moved; in any other nothing has its
///   address.
/// - In the state [`State::Parsed`] the command was parsed, for a submission queue to which it has
///   a reference. Its memory is that of `command`, and what nvmet uses of that is lent, as it is in
///   [`State::Done`] until the command is taken. Then nvmet no longer uses it.
/// - In the state [`State::Idle`] it has no data, and no command but while [`Request::init`] runs.
/// - While the command is parsed, or nvmet has it, `req.sg` is null, or the list of `data`. While
///   nvmet executes it, it may be `bytes`, a list of the memory of `command` or `kept`.
#[repr(C)]
pub(crate) struct Request {
    req: Opaque<bindings::nvmet_req>,
    owner: mem::MaybeUninit<Taken<Response>>,
    state: State,
    /// The command's data are those of `data`.
    keyed: bool,
    /// The number of bytes that have come behind the command.
    came: usize,
    /// The list of data of the command or of `kept`.
    bytes: Opaque<bindings::scatterlist>,
    command: Option<Recv>,
    cqe: Buf<ToDevice>,
    data: Ctx<Bidirectional, Pages>,
    /// Memory for the data of a read, which stays mapped.
    kept: Option<Buf<ToDevice>>,
    /// The queue that the command is to connect.
    connects: Option<Arc<SqInner>>,
}

// SAFETY: nvmet begins and completes requests in any thread, so `req` is bound to none. The rest is
// `Send`, or memory that only this refers to.
unsafe impl Send for Request {}
// SAFETY: A shared one gives shared access to its buffers only.
unsafe impl Sync for Request {}

// Nothing has the address of a request but nvmet, while it has the request.
impl Unpin for Request {}

impl Request {
    /// Makes a request, with the memory of its completion; fails if there is none.
    pub(crate) fn new(cqe: Result<Buf<ToDevice>>) -> impl Init<Self, Error> {
        try_init!(Self {
            req <- pin_init::init_zeroed(),
            owner <- pin_init::uninit::<_, Error>(),
            state: State::Idle,
            keyed: false,
            came: 0,
            bytes <- pin_init::init_zeroed(),
            command: None,
            cqe: cqe?,
            data: Ctx::empty(GFP_KERNEL)?,
            kept: None,
            connects: None,
        }? Error)
    }

    /// Returns the request, unless the command was not parsed, or has data.
    #[inline]
    fn dataless(&mut self) -> Result<&mut Self> {
        // SAFETY: By the type invariant a request that nvmet has is reached through `owner` only,
        // so this exclusive borrow is the only access.
        let has_none = unsafe { (*self.req.get()).sg_cnt == 0 };
        (self.state == State::Parsed && has_none)
            .then_some(self)
            .ok_or(EINVAL)
    }

    /// Parses a command, of which `len` bytes have come (`nvmet_req_init`). Returns the response if
    /// the command is to be executed; one that is refused goes to [`Target::queue_response`]. Gives
    /// the response back as an error, without a command, if the queue is being destroyed, or
    /// connected by another command, or the response was not released.
    pub(crate) fn init(
        mut response: Taken<Response>,
        command: Recv,
        len: usize,
        sq: &Sq,
        _cx: &Sleepable,
    ) -> Result<Option<Taken<Response>>, Taken<Response>> {
        let received = response.request.state == State::Idle
            && response.request.receive(command, len, sq.0.nport.raw);
        let mut refused = Some(response);
        let parsed = sq.with(|raw| {
            let mut response = refused.take_if(|_| received)?;
            if !sq.is_connected() && !response.request.connect(&sq.0) {
                refused = Some(response);
                return None;
            }
            let req = give(response);
            // SAFETY: The command and the completion are in place, the queue is not destroyed, as
            // there is a reference, and the operations are static. The request was given, as nvmet
            // calls `queue_response` if it refuses the command.
            // INVARIANT: If it does not, the command was parsed.
            unsafe {
                bindings::nvmet_req_init(req, raw, &raw const *OPS)
                    .then(|| take_back(req, State::Parsed))
            }
        });
        match refused {
            Some(mut response) => {
                response.request.release();
                Err(response)
            }
            None => Ok(parsed.flatten()),
        }
    }

    /// Returns the command, if it was parsed.
    #[inline]
    pub(crate) fn command(&self) -> Option<&[u8; COMMAND]> {
        // SAFETY: By the type invariant the request has its command, whose memory is lent, so the
        // device writes nothing there, and nvmet does not either until it is given the request.
        (self.state == State::Parsed).then(|| unsafe { &*(*self.req.get()).cmd.cast() })
    }

    /// Makes bytes that have come with the command its data. Fails with `EINVAL` if there are none
    /// or not so many, or the command was not parsed, or has data.
    pub(crate) fn use_inline_sg(&mut self, offset: usize, len: u32) -> Result {
        let end = offset.checked_add(len as usize).ok_or(EINVAL)?;
        let this = self.dataless()?;
        let has_come = len != 0 && end <= this.came;
        let recv = this.command.as_mut().filter(|_| has_come);
        let inline = recv.and_then(|recv| recv.command().inline.as_mut());
        let (bytes, size) = lend(inline.ok_or(EINVAL)?);
        if end > size {
            return Err(EINVAL);
        }
        // SAFETY: The memory of the command, which the request has, is that of a buffer, which is
        // contiguous and not of vmalloc, with so many bytes at `bytes`.
        unsafe { this.use_bytes(bytes.byte_add(offset), len) };
        Ok(())
    }

    /// Makes the first bytes of a buffer, which the request has from here on, the data of a read.
    /// Fails with `EINVAL` if it has not so many, or the command was not parsed, or has data.
    pub(crate) fn use_kept(&mut self, buf: Buf<ToDevice>, len: u32) -> Result {
        let this = self.dataless()?;
        let (bytes, size) = lend(this.kept.insert(buf));
        if len == 0 || len as usize > size {
            return Err(EINVAL);
        }
        // SAFETY: The memory of the buffer, which the request has until it is released, is
        // contiguous and not of vmalloc, with so many bytes at `bytes`.
        unsafe { this.use_bytes(bytes, len) };
        Ok(())
    }

    /// Returns the data of a read that nvmet has completed, if they are in a buffer that is kept.
    #[inline]
    pub(crate) fn kept(&self) -> Option<Sge<'_>> {
        let is_kept = self.state == State::Done && !self.keyed;
        let kept = is_kept.then_some(self.kept.as_ref()?)?;
        // SAFETY: nvmet has completed the command, and does not use the request any longer.
        kept.sge(0..unsafe { (*self.req.get()).transfer_len }).ok()
    }

    /// Takes the buffer of a request that was released, for another one.
    #[inline]
    pub(crate) fn take_kept(&mut self) -> Option<Buf<ToDevice>> {
        (self.state == State::Idle).then(|| self.kept.take())?
    }

    /// Allocates the memory of a command's data (`sgl_alloc`). Fails with `ENOMEM`, or `EINVAL` if
    /// there are none, or the command was not parsed or has data.
    pub(crate) fn alloc_sgls(&mut self, len: u32) -> Result {
        let this = self.dataless()?;
        let mut entries = 0;
        // C would write in front of a list without entries.
        if len == 0 {
            return Err(EINVAL);
        }
        // SAFETY: The length is not zero, and `entries` is valid for writes during the call.
        let list =
            unsafe { bindings::sgl_alloc(len.into(), bindings::GFP_KERNEL, &raw mut entries) };
        let list = NonNull::new(list).ok_or(ENOMEM)?;
        // INVARIANT: The list was just allocated.
        this.data.fill(Pages { list, entries })?;
        this.keyed = true;
        // INVARIANT: The list is that of `data`.
        this.set_data(list.as_ptr(), entries, len);
        Ok(())
    }

    /// Reads all data from the host.
    #[inline]
    pub(crate) fn read(&self, remote: Remote, cx: &Sleepable) -> Rw<'_> {
        Rw::read(&self.data, .., remote, cx)
    }

    /// Writes all data to the host.
    #[inline]
    pub(crate) fn write(&self, remote: Remote, cx: &Sleepable) -> Rw<'_> {
        Rw::write(&self.data, .., remote, cx)
    }

    /// The transfer of the data that was prepared.
    #[inline]
    pub(crate) fn prepared(&self) -> Rw<'_> {
        Rw::prepared(&self.data)
    }

    /// Executes a command that was parsed, whose response goes to [`Target::queue_response`]
    /// (`req->execute`). Any other response is lost.
    #[inline]
    pub(crate) fn execute(mut response: Taken<Response>, _cx: &Sleepable) {
        let request = &mut response.request;
        if request.state != State::Parsed {
            return Response::lost(response);
        }
        if request.keyed && request.data.len() == 0 {
            // The memory was lost with a transfer that has failed.
            request.set_data(ptr::null_mut(), 0, 0);
            let status = bindings::NVME_SC_DATA_XFER_ERROR as u16;
            return Self::complete(response, status, None);
        }
        let req = give(response);
        // SAFETY: The command was parsed, so the function is set, and the data are in place: those
        // that are not in pages are in `bytes`, and the request is not moved any longer. nvmet
        // calls `queue_response` when it was executed.
        unsafe {
            let request = request_from_raw(req);
            if !(*request).keyed && (*req).sg_cnt != 0 {
                // INVARIANT: The list was initialised for the data.
                (*req).sg = (*request).bytes.get();
            }
            (*req).execute.inspect(|execute| execute(req));
        }
    }

    /// Completes a command that was parsed, and is not to be executed (`nvmet_req_complete`), with
    /// the offset of the field of the command that is wrong. Its response goes to
    /// [`Target::queue_response`]. Any other response is lost.
    #[cold]
    pub(crate) fn complete(response: Taken<Response>, status: u16, error_loc: Option<u16>) {
        if response.request.state != State::Parsed {
            return Response::lost(response);
        }
        let req = give(response);
        // SAFETY: The command was parsed, and nvmet calls `queue_response`.
        unsafe {
            (*req).error_loc = error_loc.unwrap_or((*req).error_loc);
            bindings::nvmet_req_complete(req, status);
        }
    }

    /// Returns the status in the completion, zero for success; `None` until that is written.
    #[inline]
    pub(crate) fn status(&self) -> Option<u16> {
        // SAFETY: nvmet has written the completion, which is in `cqe`, and no longer uses it.
        let status = || u16::from_le(unsafe { (*(*self.req.get()).cqe).status });
        (self.state == State::Done).then(status)
    }

    /// Takes the command of a request that nvmet has completed, to receive another one.
    #[inline]
    pub(crate) fn take_command(&mut self) -> Option<Recv> {
        (self.state == State::Done).then(|| self.take_recv())?
    }

    /// Returns the completion, to be sent.
    #[inline]
    pub(crate) fn cqe(&self) -> Sge<'_> {
        self.cqe.whole()
    }

    /// Ends all use of the request: frees the data, drops the command, and uninitialises the
    /// request if it was parsed and is not to be executed (`nvmet_req_uninit`).
    #[inline]
    pub(crate) fn release(&mut self) {
        if self.state == State::Parsed {
            self.connected();
            // SAFETY: By the type invariant the command was parsed, and nvmet does not have it.
            unsafe { bindings::nvmet_req_uninit(self.req.get()) };
        }
        self.state = State::Idle;
        if mem::replace(&mut self.keyed, false) {
            drop(self.data.take());
        }
        if self.command.is_some() {
            self.drop_recv();
        }
    }

    /// Puts the memory of a command, of which `len` bytes have come, in place. Returns `false` if
    /// it is too short.
    #[inline]
    fn receive(&mut self, mut recv: Recv, len: usize, port: NonNull<bindings::nvmet_port>) -> bool {
        let command = recv.command();
        let (cmd, size) = lend(&mut command.capsule);
        self.came = len.saturating_sub(COMMAND);
        self.command = Some(recv);
        let cqe = lend(&mut self.cqe).0;
        let req = self.req.get();
        // SAFETY: By the type invariant a request that nvmet has is reached through `owner` only,
        // so this exclusive borrow is the only access.
        unsafe { ((*req).cmd, (*req).cqe, (*req).port) = (cmd.cast(), cqe.cast(), port.as_ptr()) };
        size.min(len) >= COMMAND
    }

    /// Notes that the command is to connect a queue; `false` if another one is about to.
    #[cold]
    fn connect(&mut self, sq: &Arc<SqInner>) -> bool {
        let is_first = !sq.connecting.xchg(true, Full);
        self.connects = is_first.then(|| sq.clone());
        is_first
    }

    /// The queue was connected, or was not. If it was, no other command is to connect it.
    #[cold]
    fn connected(&mut self) {
        if let Some(sq) = self.connects.take() {
            sq.connecting.store(sq.connected.load(Relaxed), Release);
        }
    }

    /// nvmet has completed the command that was to connect a queue. A controller has the address of
    /// its port, which is freed when the submission queues of that have ended. So the queues of the
    /// controller must be those: that of another port is not connected. Nor is one to a controller
    /// that has failed, whose queues nvmet has ended.
    #[cold]
    fn connect_completed(&mut self) {
        // SAFETY: nvmet has completed the command, in process context. Its queue is not destroyed
        // before this returns. As it is not connected, and `connecting` is set, no other command of
        // it is parsed, and nothing uses its controller.
        if unsafe { bindings::nvmet_helper_undo_connect(self.req.get()) } {
            rdma::pr_err_ratelimited!("a host wants a queue that it may not have\n");
        } else if let Some(sq) = self.connects.as_ref().filter(|sq| !sq.ctrl().is_null()) {
            sq.connected.store(true, Release);
        }
        self.connected();
    }

    /// nvmet has written the completion.
    #[inline]
    fn completed(&mut self) {
        if self.connects.is_some() {
            self.connect_completed();
        }
        give_back(&mut self.cqe);
        self.kept.iter_mut().for_each(give_back);
    }

    #[cold]
    fn drop_recv(&mut self) {
        self.take_recv();
    }

    #[inline(always)]
    fn take_recv(&mut self) -> Option<Recv> {
        let mut recv = self.command.take()?;
        let command = recv.command();
        give_back(&mut command.capsule);
        if self.came != 0 {
            command.inline.iter_mut().for_each(give_back);
        }
        Some(recv)
    }

    /// Makes memory of the request the command's data.
    ///
    /// # Safety
    ///
    /// `bytes` is memory of a buffer of `command` or `kept`, of at least `len` bytes, which is
    /// contiguous and not of vmalloc.
    #[inline]
    unsafe fn use_bytes(&mut self, bytes: *mut c_void, len: u32) {
        // SAFETY: The list is valid for writes. The memory is as long, and contiguous in the
        // kernel's own mapping, as the caller promises.
        unsafe { bindings::sg_init_one(self.bytes.get(), bytes, len) };
        // The address of the list is that at which nvmet gets the request.
        self.set_data(ptr::null_mut(), 1, len);
    }

    /// Sets the list of the command's data.
    #[inline]
    fn set_data(&mut self, sg: *mut bindings::scatterlist, entries: u32, len: u32) {
        let req = self.req.get();
        // SAFETY: The request is valid, and is borrowed exclusively here.
        unsafe {
            ((*req).sg, (*req).sg_cnt, (*req).transfer_len) = (sg, entries as c_int, len as usize)
        };
    }
}

/// Gives a request to nvmet, with its response.
#[inline]
fn give(mut response: Taken<Response>) -> *mut bindings::nvmet_req {
    let request = &raw mut response.request;
    // SAFETY: The request is valid while its response is taken, and nothing else uses it.
    // INVARIANT: The response is in the request, so nothing reaches either but nvmet.
    unsafe {
        (*request).state = State::Given;
        (*request).owner.write(response);
        (&raw mut (*request).req).cast()
    }
}

/// Takes the response of a request back.
///
/// # Safety
///
/// The request was given to nvmet, which does not use it any longer.
#[inline]
unsafe fn take_back(req: *mut bindings::nvmet_req, state: State) -> Taken<Response> {
    // SAFETY: The request was given, as the caller promises, so it has the response, which is
    // taken once.
    unsafe {
        let request = request_from_raw(req);
        (*request).state = state;
        (*request).owner.assume_init_read()
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.release();
    }
}
