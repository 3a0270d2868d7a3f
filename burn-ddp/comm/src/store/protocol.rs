//! Messages between a store's client and server, after the handshake.

use serde::{Deserialize, Serialize};

use super::{KEY_CAP, VALUE_CAP};

/// Longest request or response, in bytes: a key, a value, and the bytes that postcard adds.
pub(crate) const MESSAGE_CAP: usize = KEY_CAP + VALUE_CAP + 64;

/// A request of a client. A connection carries one at a time.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    Get {
        key: String,
        wait_ms: u64,
    },
    SetNew {
        key: String,
        value: Vec<u8>,
    },
    Add {
        key: String,
        delta: i64,
    },
    Keys {
        prefix: String,
    },
    /// Keys to set to values when this connection ends, except those that are set by then. Replaces earlier entries.
    LastWill {
        entries: Vec<(String, Vec<u8>)>,
    },
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Done,
    Value(Vec<u8>),
    /// No value: the time of a `get` is over, or a `set_new` has set the key.
    Absent,
    Number(i64),
    Keys(Vec<String>),
    /// The request failed; the reason as a sentence for the caller.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::PROTOCOL_VERSION;

    /// A change of these bytes needs another version.
    #[test]
    fn messages_have_the_layout_of_this_version() {
        let (key, value) = (|| "k".to_owned(), || vec![7]);
        let requests = [
            Request::Set { key: key(), value: value() },
            Request::Get { key: key(), wait_ms: 300 },
            Request::SetNew { key: key(), value: value() },
            Request::Add { key: key(), delta: -1 },
            Request::Keys { prefix: key() },
            Request::LastWill { entries: vec![(key(), value())] },
            Request::LastWill { entries: Vec::new() },
        ];
        let responses = [
            Response::Done,
            Response::Value(value()),
            Response::Absent,
            Response::Number(-1),
            Response::Keys(vec![key()]),
            Response::Refused(key()),
        ];
        let requests = requests.map(|request| postcard::to_stdvec(&request).unwrap()).concat();
        let responses = responses.map(|response| postcard::to_stdvec(&response).unwrap()).concat();
        assert_eq!(
            (PROTOCOL_VERSION, requests, responses),
            (
                7,
                vec![
                    0, 1, 107, 1, 7, 1, 1, 107, 172, 2, 2, 1, 107, 1, 7, 3, 1, 107, 1, 4, 1, 107, 5, 1, 1, 107, 1, 7,
                    5, 0
                ],
                vec![0, 1, 1, 7, 2, 3, 1, 4, 1, 1, 107, 5, 1, 107]
            )
        );
    }

    proptest! {
        /// Any message of a client is understood or refused.
        #[test]
        fn any_bytes_are_refused_or_are_a_message(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(request) = postcard::from_bytes::<Request>(&bytes) {
                prop_assert!(postcard::to_stdvec(&request).unwrap().len() <= bytes.len());
            }
            let _ = postcard::from_bytes::<Response>(&bytes);
        }
    }
}
