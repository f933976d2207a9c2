// SPDX-License-Identifier: GPL-2.0

//! The protocol: messages, the data of a ping, and both sides.

use crate::conn::{
    Conn,
    Message,
    Ping,
    Shared, //
};
use kernel::{
    fmt::Write,
    prelude::*,
    str::Formatter, //
};
use rdma::{
    dma::Direction,
    prelude::*, //
};
use zerocopy::byteorder::big_endian;
use zerocopy_derive::Immutable;

/// The length of every message, in bytes: an advertisement, or a go-ahead, whose content means
/// nothing.
pub(crate) const MESSAGE_LEN: usize = size_of::<Advertisement>();

/// The most bytes that a ping may have.
const MAX_SIZE: u16 = u16::MAX;

/// The characters of a ping, from `A` to `z`.
const FIRST: u8 = b'A';
const CHARACTERS: usize = (b'z' - FIRST + 1) as usize;

/// A buffer that the sender lets the receiver access: `struct rping_rdma_info`.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Advertisement {
    buf: big_endian::U64,
    rkey: big_endian::U32,
    size: big_endian::U32,
}

impl Advertisement {
    fn new(remote: Remote, size: u16) -> Self {
        Self {
            buf: remote.addr.into(),
            rkey: remote.rkey.into(),
            size: u32::from(size).into(),
        }
    }

    /// Returns where the buffer is, and its size. What a peer has sent cannot be trusted.
    pub(crate) fn get(&self) -> (Remote, u32) {
        let remote = Remote {
            addr: self.buf.get(),
            rkey: self.rkey.get(),
        };
        (remote, self.size.get())
    }
}

/// Returns the `len` bytes of a ping: a head with its number, then the characters over and
/// over, beginning one later than in the ping before, and a zero at the end.
pub(crate) fn pattern(ping: u32, len: usize) -> impl Iterator<Item = u8> {
    let mut head = [0; 32];
    let mut text = Formatter::new(&mut head);
    // It fits: a number has ten digits at the most.
    let _ = text.write_fmt(fmt!("rdma-ping-{ping}: "));
    let head_len = text.bytes_written();

    let last = len.saturating_sub(1);
    (0..len).map(move |at| match head.get(at) {
        _ if at == last => 0,
        Some(&byte) if at < head_len => byte,
        _ => {
            let character = (ping as usize).wrapping_add(at).wrapping_sub(head_len);
            FIRST.wrapping_add((character % CHARACTERS) as u8)
        }
    })
}

/// Accepts a connection, and serves pings until it ends.
pub(crate) fn serve(conn: &Arc<Conn>, cx: &Sleepable) -> Result {
    let go_ahead = Message::with(conn, &[0; MESSAGE_LEN], cx)?;
    // The client's first message may come before it is accepted.
    conn.post_recv(Ping::new(conn, MAX_SIZE.into(), cx)?)?;
    (conn.id).accept(conn.clone(), &Default::default(), cx)?;
    conn.connected()?;

    let mut number = 0u32;
    let mut ping = conn.wait()?;
    loop {
        conn.ping_begins();
        let (source, size) = ping.advertisement()?;
        let len = match u16::try_from(size) {
            Ok(size @ 1..=MAX_SIZE) => size.into(),
            _ => return conn.fault("bad size of the source"),
        };
        ping = conn.transfer(ping, |ping| {
            Ok(SendWr::rdma_read([ping.data.sge_mut(0..len)?], source))
        })?;
        ping.validate(number, len)?;

        ping = conn.exchange(ping, &go_ahead)?;
        let (sink, size) = ping.advertisement()?;
        if (size as usize) < len {
            return conn.fault("the sink is too small");
        }
        ping = conn.transfer(ping, |ping| {
            Ok(SendWr::rdma_write([ping.data.sge(0..len)?], sink))
        })?;
        conn.ping_ended();
        number = number.wrapping_add(1);
        ping = conn.exchange(ping, &go_ahead)?;
    }
}

/// Makes a buffer that the server may access until the end of the connection.
fn region<D: Direction>(conn: &Arc<Conn>, cx: &Sleepable) -> Result<Arc<Shared<SharedRegion<D>>>> {
    let buf = Buf::alloc(&conn.pd, conn.config.size.get().into(), cx)?;
    Shared::new(conn, Region::new(buf, cx)?.into_shared())
}

/// Connects, and does all pings.
pub(crate) fn ping(conn: &Arc<Conn>, cx: &Sleepable) -> Result {
    let size = conn.config.size.get();
    let count = conn.config.count;
    let mut ping = Ping::new(conn, size.into(), cx)?;
    let source = region::<ToDevice>(conn, cx)?;
    let sink = region::<FromDevice>(conn, cx)?;
    (conn.id).connect(conn.clone(), &Default::default(), cx)?;
    conn.connected()?;

    // Both buffers are registered once; so their advertisements are always the same.
    let source_at = (conn.qp).post_send(source.clone(), |m| Ok(RegWr::remote_read(&m.item)))?;
    let sink_at = (conn.qp).post_send(sink.clone(), |m| Ok(RegWr::remote_write(&m.item)))?;
    let source_at = Message::with(conn, Advertisement::new(source_at, size).as_bytes(), cx)?;
    let sink_at = Message::with(conn, Advertisement::new(sink_at, size).as_bytes(), cx)?;

    let mut number = 0;
    while count == 0 || number != count {
        ping.fill(number, size.into());
        source.item.write(0, &ping.data.cpu())?;
        conn.ping_begins();
        ping = conn.exchange(ping, &source_at)?;
        ping = conn.exchange(ping, &sink_at)?;
        sink.item.read(0, &mut ping.data.cpu())?;
        ping.validate(number, size.into())?;
        conn.ping_ended();
        number = number.wrapping_add(1);
    }
    Ok(())
}
