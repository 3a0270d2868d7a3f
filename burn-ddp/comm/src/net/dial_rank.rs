//! Connecting to another rank.

use std::io::ErrorKind;
use std::time::Instant;

use super::address;
use super::interface::Interface;
use crate::auth::handshake::{HANDSHAKE_DEADLINE, Introduction, Purpose, Refusal, Role, introduce};
use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;

/// Connects to the listener of rank `peer` for `purpose`, and proves to know `key`; tries again until `deadline`.
pub(crate) fn dial(
    to: (&str, u16),
    via: &Interface,
    key: &LinkKey,
    peer: usize,
    purpose: Purpose,
    deadline: Instant,
) -> Result<SecureStream, String> {
    // Among many connections at a time the listener may drop one unheard; it hears the next.
    let insist_until = deadline.min(Instant::now() + HANDSHAKE_DEADLINE);
    let me = Introduction { key: &key.key, tag: key.tag, to: Role::Rank(peer as u32), purpose };
    loop {
        let socket = address::connect_once(to.0, to.1, via, deadline).map_err(|e| e.to_string())?;
        match introduce(socket, &me, deadline) {
            Ok(stream) => return Ok(stream),
            Err(Refusal::NotOurs(e)) if e.kind() != ErrorKind::TimedOut && Instant::now() < insist_until => {
                std::thread::sleep(address::RETRY);
            }
            Err(refusal) => return Err(refusal.to_string()),
        }
    }
}
