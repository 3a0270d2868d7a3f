//! Messages between a store's client and server, after the handshake.

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
    /// No value: a get whose time is over, or a `set_new` that set.
    Absent,
    Number(i64),
    Keys(Vec<String>),
    /// A sentence for the caller.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What clients send is refused or understood, and nothing else.
        #[test]
        fn any_bytes_are_refused_or_are_a_message(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(request) = postcard::from_bytes::<Request>(&bytes) {
                prop_assert!(postcard::to_stdvec(&request).unwrap().len() <= bytes.len());
            }
            let _ = postcard::from_bytes::<Response>(&bytes);
        }
    }
}
