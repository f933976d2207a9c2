// SPDX-License-Identifier: GPL-2.0

//! The values of a target.

use crate::proto::*;
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::RBTree,
    sync::Mutex, //
};
use rdma::prelude::*;

/// A value. Requests share it, and it does not change: a PUT replaces it.
pub(crate) type Value = Arc<KVVec<u8>>;

#[pin_data]
pub(crate) struct Store {
    #[pin]
    values: Mutex<Values>,
    /// The most memory of all values, in bytes.
    limit: usize,
}

struct Values {
    tree: RBTree<u64, Value>,
    bytes: usize,
}

/// The memory that a value takes besides its bytes: its node in the tree, its count of references,
/// and its vector. Without it peers might store any number of small values.
const OVERHEAD: usize = 128;

fn charge(len: usize) -> usize {
    len.saturating_add(OVERHEAD)
}

impl Store {
    pub(crate) fn new(limit: usize) -> Result<Arc<Self>> {
        let values = Values {
            tree: RBTree::new(),
            bytes: 0,
        };
        let init = pin_init!(Self {
            values <- new_mutex!(values),
            limit,
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    pub(crate) fn get(&self, key: u64) -> Option<Value> {
        self.values.lock().tree.get(&key).cloned()
    }

    pub(crate) fn put(&self, key: u64, value: KVVec<u8>) -> u16 {
        self.replace(key, value).unwrap_or(FULL)
    }

    fn replace(&self, key: u64, value: KVVec<u8>) -> Result<u16> {
        let value = Arc::new(value, GFP_KERNEL)?;
        let values = &mut *self.values.lock();
        let before = values.tree.get(&key).map_or(0, |old| charge(old.len()));
        let bytes = values
            .bytes
            .saturating_sub(before)
            .saturating_add(charge(value.len()));
        if bytes > self.limit {
            return Ok(FULL);
        }
        let _old = values.tree.try_create_and_insert(key, value, GFP_KERNEL)?;
        values.bytes = bytes;
        Ok(DONE)
    }
}
