// SPDX-License-Identifier: GPL-2.0

//! What a MAD says.

use super::MAD_LEN;
use crate::bindings;
use kernel::prelude::*;
use zerocopy::byteorder::big_endian;
use zerocopy_derive::{
    Immutable,
    KnownLayout, //
};

/// The header that all MADs begin with (`struct ib_mad_hdr`).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// The version of the format of MADs, 1.
    pub base_version: u8,
    /// The management class.
    pub mgmt_class: u8,
    /// The version of the class.
    pub class_version: u8,
    /// The [`Method`].
    pub method: u8,
    /// In a reply, 0 for success.
    pub status: big_endian::U16,
    /// What the class makes of it.
    pub class_specific: big_endian::U16,
    /// The transaction id, by which a reply is matched to its request.
    pub tid: big_endian::U64,
    /// The attribute that the method is for.
    pub attr_id: big_endian::U16,
    /// Zero.
    pub resv: big_endian::U16,
    /// More about the attribute.
    pub attr_mod: big_endian::U32,
}

impl Header {
    /// The length of the header, in bytes.
    pub const LEN: usize = size_of::<Self>();

    /// Says whether this is a reply (`ib_response_mad`).
    pub fn is_response(&self) -> bool {
        // C's header is aligned as its widest field is, which this is not.
        let aligned: [u64; Self::LEN / size_of::<u64>()] = zerocopy::transmute!(*self);
        // SAFETY: The C header has the same layout, and `u64` is its widest field.
        unsafe { bindings::ib_response_mad(aligned.as_ptr().cast()) != 0 }
    }
}

/// What is to be done with an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method(pub u8);

impl Method {
    const RESP: u8 = 0x80;

    /// Reads an attribute (`IB_MGMT_METHOD_GET`). Where nobody serves it, the peer's MAD layer
    /// answers with an error.
    pub const GET: Self = Self(0x01);
    /// Writes an attribute (`IB_MGMT_METHOD_SET`). Answered as [`Method::GET`].
    pub const SET: Self = Self(0x02);
    /// Sends a datagram (`IB_MGMT_METHOD_SEND`).
    pub const SEND: Self = Self(0x03);
    /// Tells of something (`IB_MGMT_METHOD_TRAP`).
    pub const TRAP: Self = Self(0x05);
    /// Passes a trap on (`IB_MGMT_METHOD_REPORT`).
    pub const REPORT: Self = Self(0x06);
    /// Answers a trap (`IB_MGMT_METHOD_TRAP_REPRESS`).
    pub const TRAP_REPRESS: Self = Self(0x07);

    pub(super) const fn is_response(self) -> bool {
        self.0 & Self::RESP != 0 || self.0 == Self::TRAP_REPRESS.0
    }

    /// Returns the method of a reply to this one.
    pub const fn response(self) -> Self {
        match self {
            Self::TRAP => Self::TRAP_REPRESS,
            Self(method) => Self(method | Self::RESP),
        }
    }
}

/// A set of methods.
#[derive(Clone, Copy)]
pub struct Methods(u128);

impl Methods {
    /// No method: the agent receives only replies.
    pub const NONE: Self = Self(0);

    /// Adds a method. Those of replies cannot be served, and are left out.
    pub const fn with(self, method: Method) -> Self {
        match method.0 {
            method @ 0..0x80 => Self(self.0 | 1 << method),
            _ => self,
        }
    }

    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Writes the set as C's bitmap.
    pub(super) fn write_mask(self, mask: &mut [c_ulong]) {
        let mut left = self.0;
        for word in mask {
            *word = left as c_ulong;
            left >>= c_ulong::BITS;
        }
    }
}

/// A management class: what kind of MADs an agent sends and receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    pub(super) id: u8,
    pub(super) version: u8,
    pub(super) oui: [u8; 3],
}

impl Class {
    /// The first class whose MADs name a vendor.
    const FIRST_WITH_OUI: u8 = 0x30;
    /// The last one.
    const LAST_WITH_OUI: u8 = 0x4f;
    /// Where the vendor's OUI is in those.
    pub(super) const OUI_AT: usize = 37;

    /// A class by its number, such as 0x06 (`IB_MGMT_CLASS_DEVICE_MGMT`) or one that is left to
    /// vendors, 0x09 to 0x0f.
    pub const fn new(id: u8, version: u8) -> Self {
        Self {
            id,
            version,
            oui: [0; 3],
        }
    }

    /// A class that several vendors share, 0x30 to 0x4f, told apart by their OUI; of version 1.
    pub const fn with_oui(id: u8, oui: [u8; 3]) -> Self {
        Self {
            id,
            version: 1,
            oui,
        }
    }

    /// Returns how many bytes come before the payload in the MADs of this class
    /// (`ib_get_mad_data_offset`).
    pub fn payload_at(self) -> usize {
        // SAFETY: Any class will do.
        let offset = unsafe { bindings::ib_get_mad_data_offset(self.id) };
        usize::try_from(offset).map_or(MAD_LEN, |offset| offset.min(MAD_LEN))
    }

    /// Returns how many bytes a payload can have.
    pub fn payload_len(self) -> usize {
        MAD_LEN - self.payload_at()
    }

    pub(super) fn has_oui(self) -> bool {
        (Self::FIRST_WITH_OUI..=Self::LAST_WITH_OUI).contains(&self.id)
    }
}

/// What is to be sent. The agent adds its class and the transaction id.
#[derive(Clone, Copy)]
pub struct Message<'a> {
    /// What is to be done.
    pub method: Method,
    /// With which attribute.
    pub attr_id: u16,
    /// More about it.
    pub attr_mod: u32,
    /// The class's own part. The rest of the MAD is zero.
    pub payload: &'a [u8],
}

/// A message with what the agent adds.
pub(super) struct Outgoing<'a> {
    pub(super) class: Class,
    pub(super) message: Message<'a>,
    pub(super) status: u16,
    pub(super) tid: u64,
}

impl Outgoing<'_> {
    /// Writes the MAD into memory that is zero.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the payload has no room.
    pub(super) fn write(&self, mad: &mut [u8; MAD_LEN]) -> Result {
        let header = Header {
            base_version: bindings::IB_MGMT_BASE_VERSION as u8,
            mgmt_class: self.class.id,
            class_version: self.class.version,
            method: self.message.method.0,
            status: self.status.into(),
            class_specific: 0.into(),
            tid: self.tid.into(),
            attr_id: self.message.attr_id.into(),
            resv: 0.into(),
            attr_mod: self.message.attr_mod.into(),
        };
        let payload = self.message.payload;
        put(mad, self.class.payload_at(), payload)?;
        put(mad, 0, header.as_bytes())?;
        if self.class.has_oui() {
            put(mad, Class::OUI_AT, &self.class.oui)?;
        }
        Ok(())
    }
}

fn put(mad: &mut [u8; MAD_LEN], at: usize, bytes: &[u8]) -> Result {
    let to = mad.get_mut(at..at + bytes.len()).ok_or(EMSGSIZE)?;
    to.copy_from_slice(bytes);
    Ok(())
}
