// SPDX-License-Identifier: GPL-2.0

//! What a transport needs of the 9P client in C.
//!
//! All unsafe code of the driver is in this file. Its types say what C has as rules:
//!
//! - A request is given to the transport in two halves, a [`Message`] and a [`Reply`], each with a
//!   reference to it (`p9_req_get`), so that its tag names no other request meanwhile.
//! - The message (`req->tc`) is memory that the device may read until the half is dropped.
//! - The buffer of the reply (`req->rc`) is lent to the [`Reply`], which gives it back, with the
//!   request, once (`p9_client_cb`); one that is dropped fails the request.
//! - [`Transport::close`] is the last call. The client is freed when all halves are back.
//!
//! C headers: [`include/net/9p/client.h`](srctree/include/net/9p/client.h),
//! [`include/net/9p/transport.h`](srctree/include/net/9p/transport.h)

use crate::bindings;
use core::{
    marker::PhantomData,
    mem::ManuallyDrop,
    net::SocketAddr,
    ptr::{
        self,
        NonNull, //
    },
    slice, //
};
use kernel::{
    error::from_result,
    module::this_module,
    new_mutex,
    prelude::*,
    seq_file::SeqFile,
    str::{
        as_char_ptr_in_const_context,
        CStr, //
    },
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed,
            Release, //
        },
        Arc,
        Completion,
        Mutex, //
    },
    types::Opaque, //
};
use rdma::{
    dma::{
        Buf,
        ToDevice, //
    },
    prelude::{
        ClientRef,
        Sleepable, //
    },
    sg::{
        SgOwner,
        Sgl, //
    }, //
};
use zerocopy::byteorder::little_endian::{
    U16,
    U32, //
};

/// The length of a [`Header`].
const HEADER: usize = bindings::P9_HDRSZ as usize;

/// A message's header: `size[4] type[1] tag[2]`.
#[derive(Clone, Copy, FromBytes, zerocopy_derive::Immutable)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) size: U32,
    pub(crate) kind: u8,
    pub(crate) tag: U16,
}

/// A transport of 9P.
pub(crate) trait Transport: Send + Sync + Sized + 'static {
    /// The name that `trans=` takes.
    const NAME: &'static CStr;
    /// The length of the longest message.
    const MAX_SIZE: u32;

    /// Connects (`p9_trans_module.create`).
    fn create(session: Arc<Session>, options: &Options<'_>, cx: &Sleepable) -> Result<Arc<Self>>;

    /// Ends the connection (`p9_trans_module.close`). After this all halves come back.
    fn close(&self, cx: &Sleepable);

    /// Sends a request (`p9_trans_module.request`). If this fails, the client goes on at once; with
    /// another error than `ERESTARTSYS` it has no connection from then on.
    fn request(&self, message: Message, reply: Reply, cx: &Sleepable) -> Result;

    /// Shows the options of a mount (`p9_trans_module.show_options`).
    fn show_options(&self, m: &SeqFile);
}

/// The options of a mount.
pub(crate) struct Options<'a> {
    source: Option<&'a CStr>,
    raw: &'a bindings::p9_rdma_opts,
    /// The length of the longest message, which the server may lower.
    pub(crate) msize: u32,
}

impl Options<'_> {
    /// Returns the server's address. Fails with `EINVAL` if what is mounted is none.
    pub(crate) fn addr(&self) -> Result<SocketAddr> {
        let source = self.source.unwrap_or(c"");
        let Some(ip) = source.to_str().ok().and_then(|text| text.parse().ok()) else {
            pr_err!("{source:?} is no IPv4 or IPv6 address\n");
            return Err(EINVAL);
        };
        Ok(SocketAddr::new(ip, self.raw.port as u16))
    }

    pub(crate) fn privport(&self) -> bool {
        self.raw.privport
    }

    /// Returns the depth of the send queue.
    pub(crate) fn sq_depth(&self) -> Result<u32> {
        number("sq", self.raw.sq_depth.into(), i32::MAX.into())
    }

    /// Returns the depth of the receive queue. Fails with `EINVAL` unless it is 1 to `most`.
    pub(crate) fn rq_depth(&self, most: u16) -> Result<u32> {
        number("rq", self.raw.rq_depth.into(), most.into())
    }

    /// Returns the time for each step of connecting, in milliseconds.
    pub(crate) fn timeout(&self) -> Result<u32> {
        number("timeout", self.raw.timeout as i64, i32::MAX.into())
    }
}

/// Returns the value of an option. Fails with `EINVAL`, and logs that, unless it is 1 to `most`.
fn number(name: &str, value: i64, most: i64) -> Result<u32> {
    if !(1..=most).contains(&value) {
        pr_err!("{name}={value}: 1 to {most}\n");
        return Err(EINVAL);
    }
    Ok(value as u32)
}

/// A mount's client, as far as its transport uses it (`struct p9_client`).
///
/// # Invariants
///
/// The client is valid until `users` is zero. It counts one until [`Session::close`], and one for
/// each half of a request. `status` has the client until the former.
#[pin_data]
pub(crate) struct Session {
    client: NonNull<bindings::p9_client>,
    users: Atomic<usize>,
    #[pin]
    unused: Completion,
    #[pin]
    status: Mutex<Option<NonNull<bindings::p9_client>>>,
}

// SAFETY: The functions that are called with the client may be called in any thread.
unsafe impl Send for Session {}
// SAFETY: Those functions lock what they change of the client, and `status` is locked by the mutex.
unsafe impl Sync for Session {}

impl Session {
    /// # Safety
    ///
    /// The client is valid until [`Session::close`] has returned, and not connected.
    unsafe fn new(client: NonNull<bindings::p9_client>) -> Result<Arc<Self>> {
        // INVARIANT: As the caller promises. The count is that until `close`.
        let connected = Some(client);
        let init = pin_init!(Self {
            client,
            users: Atomic::new(1),
            unused <- Completion::new(),
            status <- new_mutex!(connected, "9p::Session::status"),
        });
        let this = Arc::pin_init(init, GFP_KERNEL)?;
        this.set_status(bindings::p9_trans_status_Connected);
        Ok(this)
    }

    fn set_status(&self, status: bindings::p9_trans_status) {
        if let Some(client) = *self.status.lock() {
            // SAFETY: By the type invariant the client is valid while it is here. C reads and
            // writes the field without a lock.
            unsafe { (&raw mut (*client.as_ptr()).status).write_volatile(status) };
        }
    }

    /// Has requests fail from now on that are yet to be made.
    pub(crate) fn disconnected(&self, _cx: &Sleepable) {
        self.set_status(bindings::p9_trans_status_Disconnected);
    }

    /// Waits until all halves are back. Called once.
    fn close(&self, cx: &Sleepable) {
        self.disconnected(cx);
        *self.status.lock() = None;
        // SAFETY: The count of `new` is given up once. The caller has the session.
        unsafe { Self::put(self.into()) };
        self.unused.wait_for_completion();
    }

    /// Counts one user less. With the last one [`Session::close`] may return, and the session be
    /// freed, once `complete_all()` has let its lock go.
    ///
    /// # Safety
    ///
    /// The session is valid, and counts a user that the caller gives up.
    unsafe fn put(this: NonNull<Self>) {
        // SAFETY: The session is valid, as the caller promises.
        unsafe {
            if this.as_ref().users.fetch_sub(1, Full) == 1 {
                this.as_ref().unused.complete_all();
            }
        }
    }
}

/// A half of a request, or another reference to it.
///
/// # Invariants
///
/// It has a reference to the request, which is one of the session's client, and is counted there.
/// So the session is valid: [`Session::close`] waits for this.
struct Half {
    req: NonNull<bindings::p9_req_t>,
    session: NonNull<Session>,
}

// SAFETY: References to requests may be dropped in any thread, and so may the count of a session.
unsafe impl Send for Half {}
// SAFETY: A shared one only reads fields that nothing writes meanwhile, or that C writes without a
// lock as well, by volatile loads.
unsafe impl Sync for Half {}

impl Half {
    /// # Safety
    ///
    /// The request is one of the session's client, and the caller gives up a reference to it. The
    /// session is not closed.
    unsafe fn new(req: NonNull<bindings::p9_req_t>, session: &Session) -> Self {
        session.users.fetch_add(1, Relaxed);
        // INVARIANT: The reference is the caller's, and it was just counted.
        Self {
            req,
            session: session.into(),
        }
    }

    fn client(&self) -> *mut bindings::p9_client {
        // SAFETY: By the type invariant the session is valid.
        unsafe { self.session.as_ref() }.client.as_ptr()
    }

    fn tc(&self) -> *mut bindings::p9_fcall {
        // SAFETY: By the type invariant the request is valid.
        unsafe { &raw mut (*self.req.as_ptr()).tc }
    }

    fn rc(&self) -> *mut bindings::p9_fcall {
        // SAFETY: By the type invariant the request is valid.
        unsafe { &raw mut (*self.req.as_ptr()).rc }
    }

    /// Returns the request's type.
    fn kind(&self) -> u8 {
        // SAFETY: By the type invariant the request is valid. C writes the field again, with the
        // value that it has.
        unsafe { (&raw const (*self.tc()).id).read_volatile() }
    }

    /// Gives the reference to `p9_client_cb()`, by which the request ends.
    ///
    /// # Safety
    ///
    /// Nothing else has ended the request.
    unsafe fn end(self, status: bindings::p9_req_status_t) {
        let this = ManuallyDrop::new(self);
        // SAFETY: By the type invariants both are valid, and the reference is given up. The session
        // is used for the last time.
        unsafe {
            bindings::p9_client_cb(this.client(), this.req.as_ptr(), status as c_int);
            Session::put(this.session);
        }
    }
}

impl Drop for Half {
    // Not inlined, so that it is once in the text, and not at each step that may fail.
    #[inline(never)]
    fn drop(&mut self) {
        // SAFETY: By the type invariants both are valid, and the reference is given up. The session
        // is used for the last time.
        unsafe {
            bindings::p9_req_put(self.client(), self.req.as_ptr());
            Session::put(self.session);
        }
    }
}

/// Room for the list of a message's memory.
pub(crate) struct List(KBox<bindings::scatterlist>);

// SAFETY: The entry is an allocation that only this refers to, and any thread may free it.
unsafe impl Send for List {}
// SAFETY: No method takes a shared reference to the list.
unsafe impl Sync for List {}

impl List {
    pub(crate) fn new() -> Result<Self> {
        let list = KBox::new(bindings::scatterlist::default(), GFP_KERNEL)?;
        Ok(Self(list))
    }
}

/// The message of a request (`req->tc`), which is not written again.
///
/// # Invariants
///
/// The message has `len` bytes, at least those of a header.
pub(crate) struct Message {
    half: Half,
    len: usize,
}

impl Message {
    /// Returns the message's type.
    pub(crate) fn kind(&self) -> u8 {
        self.half.kind()
    }

    /// Returns whether this flushes a request (`Tflush`).
    pub(crate) fn is_flush(&self) -> bool {
        u32::from(self.kind()) == bindings::p9_msg_t_P9_TFLUSH
    }

    /// Copies the first bytes, `most` at most, as many as there are. The copy has another tag, and
    /// where it flushes a request, the name of that.
    pub(crate) fn copy(
        &self,
        to: &mut Buf<ToDevice>,
        most: usize,
        tag: u16,
        flushes: Option<&Flushed>,
    ) -> Result {
        let old = flushes.map(|flushed| flushed.name().to_le_bytes());
        // size[4] type[1] tag[2], and oldtag[2], which is all the rest, if it is a flush.
        let head = self.head(most);
        let front = head.get(..HEADER - 2).ok_or(EINVAL)?;
        let rest = match &old {
            Some(old) => old,
            None => head.get(HEADER..).ok_or(EINVAL)?,
        };
        to.fill(&[front, &tag.to_le_bytes(), rest])
    }

    /// Returns the first bytes, `most` at most, as many as there are.
    fn head(&self, most: usize) -> &[u8] {
        // SAFETY: By the type invariant there are so many bytes, which are only read.
        unsafe { slice::from_raw_parts((*self.half.tc()).sdata, self.len.min(most)) }
    }

    /// Returns the request that this flushes (`Tflush`). Not for handlers: `p9_tag_lookup()` spins
    /// while the thread that they have interrupted allocates or frees the request.
    pub(crate) fn flushes(&self, _cx: &Sleepable) -> Option<Flushed> {
        let [_, _, _, _, _, _, _, low, high] = *self.head(self.len) else {
            return None;
        };
        if !self.is_flush() {
            return None;
        }
        // SAFETY: By the invariant of `Half` the session is valid, and it is not closed.
        let session = unsafe { self.half.session.as_ref() };
        // SAFETY: The client is valid by the invariants of `Half` and `Session`. The request that
        // is found is one of it, and has a reference, which `half` takes. Its name was written
        // before it was sent, and C parses its reply when it was flushed.
        unsafe {
            let req =
                bindings::p9_tag_lookup(session.client.as_ptr(), u16::from_le_bytes([low, high]));
            let half = Half::new(NonNull::new(req)?, session);
            let name = (&raw const (*half.rc()).tag).read_volatile();
            Some(Flushed { half, name })
        }
    }

    /// Returns the memory behind the first `from` bytes, if there is any.
    pub(crate) fn rest(self, from: usize, list: List) -> Result<Rest, List> {
        match self.len.checked_sub(from) {
            // INVARIANT: These are the bytes that are left.
            Some(len @ 1..) => Ok(Rest {
                message: self,
                from,
                len: len as u32,
                list,
            }),
            _ => Err(list),
        }
    }
}

/// A request that is flushed.
pub(crate) struct Flushed {
    half: Half,
    name: u16,
}

impl Flushed {
    /// Returns the name that [`Reply::set_name`] has given the request; `P9_NOTAG` if it has none,
    /// or has ended, as another one may have that name then.
    pub(crate) fn name(&self) -> u16 {
        // SAFETY: By the invariant of `Half` the request is valid. C writes the field so, too.
        let status = unsafe { (&raw const (*self.half.req.as_ptr()).status).read_volatile() };
        match u32::try_from(status) {
            Ok(bindings::p9_req_status_t_REQ_STATUS_SENT) => self.name,
            _ => u16::MAX,
        }
    }
}

/// The memory of a message behind its first bytes.
///
/// # Invariants
///
/// The message has `len` bytes behind the first `from`, one at least.
pub(crate) struct Rest {
    message: Message,
    from: usize,
    len: u32,
    list: List,
}

impl Rest {
    pub(crate) fn into_list(self) -> List {
        self.list
    }
}

// SAFETY: The list is in a box, has one entry, which is marked as the last one and is not empty by
// the type invariant. It is of memory of kmalloc or a slab, as `supports_vmalloc` is not set, which
// C frees with the last reference to the request, of which this has one, and only reads meanwhile.
unsafe impl SgOwner<ToDevice> for Rest {
    fn sgl(&mut self) -> Sgl<ToDevice> {
        let list = &raw mut *self.list.0;
        // SAFETY: The list is valid for writes, and the bytes are part of the message.
        unsafe {
            let bytes = (*self.message.half.tc()).sdata.add(self.from);
            bindings::sg_init_one(list, bytes.cast(), self.len);
        }
        Sgl::new(list, 1)
    }
}

/// How a request has ended.
pub(crate) enum Outcome {
    /// The reply is in the buffer.
    Received,
    /// The server has flushed the request, and does not reply.
    Flushed,
}

/// The right to end a request, and the buffer for its reply (`req->rc`). If it is dropped, the
/// request fails with `EIO`.
///
/// # Invariants
///
/// Nothing else uses the buffer, or ends the request.
pub(crate) struct Reply(ManuallyDrop<Half>);

impl Reply {
    /// Gives the request a name, for [`Flushed::name`] (`req->rc.tag`, which is `P9_NOTAG`, and has
    /// no meaning until C reads the reply).
    pub(crate) fn set_name(&mut self, name: u16) {
        // SAFETY: By the type invariant the buffer is this one's.
        unsafe { (&raw mut (*self.0.rc()).tag).write_volatile(name) };
    }

    /// Returns whether a reply of this type answers the request.
    fn is_answered_by(&self, kind: u8) -> bool {
        let errors = [
            bindings::p9_msg_t_P9_RERROR,
            bindings::p9_msg_t_P9_RLERROR, //
        ];
        kind == self.0.kind().wrapping_add(1) || errors.contains(&kind.into())
    }

    /// Copies a reply of a type to the buffer. It gets the tag that the client knows the request
    /// by. Fails with `EMSGSIZE` if there is no room for it, and with `EPROTO` if it has no header
    /// or does not answer the request.
    pub(crate) fn fill(&mut self, kind: u8, bytes: &[u8]) -> Result {
        if !self.is_answered_by(kind) {
            return Err(EPROTO);
        }
        let rc = self.0.rc();
        // SAFETY: By the type invariant the buffer is this one's, which has `capacity` bytes. The
        // header's end is in it.
        unsafe {
            if bytes.len() > (*rc).capacity {
                return Err(EMSGSIZE);
            }
            if bytes.len() < HEADER {
                return Err(EPROTO);
            }
            ptr::copy_nonoverlapping(bytes.as_ptr(), (*rc).sdata, bytes.len());
            let tag = (&raw const (*self.0.tc()).tag).read_volatile();
            ptr::copy_nonoverlapping(tag.to_le_bytes().as_ptr(), (*rc).sdata.add(HEADER - 2), 2);
            (*rc).size = bytes.len() as u32;
        }
        Ok(())
    }

    /// Ends the request (`p9_client_cb`).
    pub(crate) fn end(self, outcome: Outcome) {
        let status = match outcome {
            Outcome::Received => bindings::p9_req_status_t_REQ_STATUS_RCVD,
            Outcome::Flushed => bindings::p9_req_status_t_REQ_STATUS_FLSHD,
        };
        // SAFETY: The half is not used again, as this is forgotten. By the type invariant nothing
        // else has ended the request.
        unsafe { ManuallyDrop::take(&mut ManuallyDrop::new(self).0).end(status) };
    }
}

impl Drop for Reply {
    // Not inlined, as that of a half.
    #[inline(never)]
    fn drop(&mut self) {
        // SAFETY: By the type invariant nothing else ends the request, and who waits for it reads
        // the error after that. The half is not used again.
        unsafe {
            (*self.0.req.as_ptr()).t_err = EIO.to_errno();
            ManuallyDrop::take(&mut self.0).end(bindings::p9_req_status_t_REQ_STATUS_ERROR);
        }
    }
}

/// What a client has of its transport (`p9_client.trans`).
struct Mount<T> {
    session: Arc<Session>,
    transport: Arc<T>,
}

/// The operations of a transport (`struct p9_trans_module`). They are in a static variable, as each
/// mount uses them, with a reference to the module, also when they are no longer registered.
pub(crate) struct Operations<T: Transport> {
    raw: Opaque<bindings::p9_trans_module>,
    is_registered: Atomic<bool>,
    _transport: PhantomData<fn() -> T>,
}

// SAFETY: C locks what it writes, and a shared reference gives no access to it.
unsafe impl<T: Transport> Sync for Operations<T> {}

impl<T: Transport> Operations<T> {
    pub(crate) const fn new() -> Self {
        let raw = bindings::p9_trans_module {
            name: as_char_ptr_in_const_context(T::NAME).cast_mut(),
            maxsize: T::MAX_SIZE as c_int,
            owner: this_module::<crate::RdmaClientModule>().as_ptr(),
            create: Some(Registration::<T>::create),
            close: Some(Registration::<T>::close),
            request: Some(Registration::<T>::request),
            cancel: Some(Registration::<T>::cancel),
            show_options: Some(Registration::<T>::show_options),
            ..pin_init::zeroed()
        };
        Self {
            raw: Opaque::new(raw),
            is_registered: Atomic::new(false),
            _transport: PhantomData,
        }
    }
}

/// A transport that users mount by (`v9fs_register_trans`). It keeps the client: drop it in
/// [`Client::unload`](rdma::client::Client::unload). If it is forgotten, the module cannot be
/// unloaded.
///
/// # Invariants
///
/// The operations are in the list of transports. The client, which is that of the module that they
/// name, keeps its text until they are not.
pub(crate) struct Registration<T: Transport> {
    operations: &'static Operations<T>,
    _client: ClientRef,
}

impl<T: Transport> Registration<T> {
    /// Registers the transport. The last step of loading a module: there are mounts from here on.
    /// Fails with `EBUSY` if it is registered.
    pub(crate) fn new(operations: &'static Operations<T>, cx: &Sleepable) -> Result<Self> {
        let client = ClientRef::of::<crate::NineP>(cx)?;
        if operations.is_registered.xchg(true, Full) {
            return Err(EBUSY);
        }
        // SAFETY: The structure is static, and in the list once, until `drop` takes it out. So long
        // the client is kept, without which the module is not unloaded. A mount has a reference to
        // the module while C uses it outside the lock of the list.
        unsafe { bindings::v9fs_register_trans(operations.raw.get()) };
        // INVARIANT: They are in the list from here on, with the module of this client.
        Ok(Self {
            operations,
            _client: client,
        })
    }

    /// Returns what [`Self::create`] has made.
    ///
    /// # Safety
    ///
    /// C calls an operation of a client that is connected, and not yet closed.
    unsafe fn mount<'a>(client: *mut bindings::p9_client) -> &'a Mount<T> {
        // SAFETY: `create` has set the field, and `close` takes it back.
        unsafe { &*(*client).trans.cast::<Mount<T>>() }
    }

    /// `p9_trans_module.create`.
    ///
    /// # Safety
    ///
    /// Called by C, which has a reference to the module, for a client that is made.
    unsafe extern "C" fn create(
        client: *mut bindings::p9_client,
        fc: *mut bindings::fs_context,
    ) -> c_int {
        from_result(|| {
            let cx = Sleepable::current()?;
            let client = NonNull::new(client).ok_or(EINVAL)?;
            // SAFETY: C has parsed the options, which stay during the call; the client is valid.
            let options = unsafe {
                let source = bindings::p9_helper_source(fc);
                Options {
                    source: (!source.is_null()).then(|| CStr::from_char_ptr(source)),
                    raw: &*bindings::p9_helper_rdma_opts(fc),
                    msize: (*client.as_ptr()).msize.min(T::MAX_SIZE),
                }
            };
            let room = KBox::<Mount<T>>::new_uninit(GFP_KERNEL)?;
            // SAFETY: The client is freed after this has failed, or after `close`.
            let session = unsafe { Session::new(client) }?;
            let made = T::create(session.clone(), &options, &cx);
            let made = made.inspect_err(|_| session.close(&cx));
            // If `fsconfig()` is begun again, the context has failed already.
            let transport = made.map_err(|e| if e == ERESTARTSYS { EINTR } else { e })?;
            let mount = room.write(Mount { session, transport });
            // SAFETY: The client is valid, and the field its transport's.
            unsafe { (*client.as_ptr()).trans = KBox::into_raw(mount).cast() };
            Ok(0)
        })
    }

    /// `p9_trans_module.close`.
    ///
    /// # Safety
    ///
    /// Called by C, once for a client that is connected, in process context. No other operation is
    /// called for it after that.
    unsafe extern "C" fn close(client: *mut bindings::p9_client) {
        // SAFETY: `create` has set the field from a box of this type, which is taken back once.
        let mount = unsafe {
            let trans = ptr::replace(&raw mut (*client).trans, ptr::null_mut());
            KBox::<Mount<T>>::from_raw(trans.cast())
        };
        // SAFETY: The caller may sleep.
        let cx = unsafe { <Sleepable as rdma::context::Context>::assume() };
        mount.transport.close(&cx);
        mount.session.close(&cx);
    }

    /// `p9_trans_module.request`.
    ///
    /// # Safety
    ///
    /// Called by C, in process context, for a client that is connected, with a request that is
    /// made. C gives up a reference to it unless this fails.
    unsafe extern "C" fn request(
        client: *mut bindings::p9_client,
        req: *mut bindings::p9_req_t,
    ) -> c_int {
        // SAFETY: This is an operation of a connected client. The request is valid, and has the
        // reference that is C's own besides. A fast reply is not to be overtaken by the status.
        unsafe {
            let mount = Self::mount(client);
            let at = NonNull::new_unchecked(req);
            bindings::p9_helper_req_get(req);
            let sent = bindings::p9_req_status_t_REQ_STATUS_SENT as c_int;
            (&raw mut (*req).status).write_volatile(sent);
            let len = (*req).tc.size as usize;
            // INVARIANT: C has finished the message, and lends the buffer.
            let message = Message {
                half: Half::new(at, &mount.session),
                len,
            };
            let reply = Reply(ManuallyDrop::new(Half::new(at, &mount.session)));
            let cx = <Sleepable as rdma::context::Context>::assume();
            match mount.transport.request(message, reply, &cx) {
                Ok(()) => 0,
                Err(e) => {
                    bindings::p9_helper_req_get(req);
                    e.to_errno()
                }
            }
        }
    }

    /// `p9_trans_module.cancel`: the request was sent, so it is to be flushed. The reply to that
    /// ends it, before C would call `cancelled`.
    extern "C" fn cancel(_: *mut bindings::p9_client, _: *mut bindings::p9_req_t) -> c_int {
        1
    }

    /// `p9_trans_module.show_options`.
    ///
    /// # Safety
    ///
    /// Called by C, for a client that is connected.
    unsafe extern "C" fn show_options(
        m: *mut bindings::seq_file,
        client: *mut bindings::p9_client,
    ) -> c_int {
        // SAFETY: This is an operation of a connected client, and the file is the caller's.
        let (mount, m) = unsafe { (Self::mount(client), SeqFile::from_raw(m)) };
        mount.transport.show_options(m);
        0
    }
}

impl<T: Transport> Drop for Registration<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant they are in the list.
        unsafe { bindings::v9fs_unregister_trans(self.operations.raw.get()) };
        self.operations.is_registered.store(false, Release);
    }
}
