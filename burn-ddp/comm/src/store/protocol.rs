//! What a store's client and server say to each other, after the hello.

use serde::{Deserialize, Serialize};

use super::{KEY_CAP, VALUE_CAP};

/// Longest request or response, in bytes: a key, a value, and what postcard adds.
pub(crate) const MESSAGE_CAP: usize = KEY_CAP + VALUE_CAP + 64;

/// One request at a time per connection.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Set { key: String, value: Vec<u8> },
    Get { key: String, wait_ms: u64 },
    SetNew { key: String, value: Vec<u8> },
    Add { key: String, delta: i64 },
    Keys { prefix: String },
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Done,
    Value(Vec<u8>),
    /// To a get whose time is over, or a `set_new` that set.
    Absent,
    Number(i64),
    Keys(Vec<String>),
    /// A sentence for the caller.
    Refused(String),
}
