//! The secret encrypted for one rank, for a channel that others may read: a process manager's connections and log.
//!
//! Noise `NN` (a key of zeros in `NNpsk0`): the rank that lacks the secret publishes a request, the rank that has it
//! answers. That keeps the secret from readers of the channel. An attacker who can change messages on the channel can
//! still impersonate either rank.

use snow::HandshakeState;

use super::Secret;
use super::hmac_key::{KEY_BYTES, Key};
use super::noise::{PUBLIC_KEY_BYTES, handshake};
use super::secret::{hex, unhex};
use super::secure_stream::SEAL_BYTES;
use crate::{Error, Result};

const REQUEST_BYTES: usize = PUBLIC_KEY_BYTES + SEAL_BYTES;
const ANSWER_BYTES: usize = PUBLIC_KEY_BYTES + KEY_BYTES + SEAL_BYTES;

/// A rank that awaits the secret of `job`.
pub(crate) struct Awaiting(HandshakeState);

impl Awaiting {
    /// The rank's part of the handshake, and the request that it publishes, in hexadecimal digits.
    pub(crate) fn new(job: &str) -> Result<(Awaiting, String)> {
        let mut noise = begin(job, true)?;
        let mut request = [0; REQUEST_BYTES];
        noise.write_message(&[], &mut request).map_err(|e| failure(&e))?;
        Ok((Awaiting(noise), hex(&request)))
    }

    /// The secret in the answer; `None` if it is no answer to this rank.
    pub(crate) fn open(mut self, answer: &str) -> Option<Secret> {
        let mut secret = [0; KEY_BYTES];
        self.0.read_message(&unhex::<ANSWER_BYTES>(answer)?, &mut secret).ok()?;
        Some(Secret::from_bytes(secret))
    }
}

/// Seals `secret` for the rank that published `request`; `None` if that is no request of `job`.
pub(crate) fn answer(job: &str, request: &str, secret: &Secret) -> Result<Option<String>> {
    let (mut noise, mut answer) = (begin(job, false)?, [0; ANSWER_BYTES]);
    let Some(request) = unhex::<REQUEST_BYTES>(request) else { return Ok(None) };
    if noise.read_message(&request, &mut []).is_err() {
        return Ok(None);
    }
    noise.write_message(secret.key().bytes(), &mut answer).map_err(|e| failure(&e))?;
    Ok(Some(hex(&answer)))
}

fn begin(job: &str, initiator: bool) -> Result<HandshakeState> {
    let prologue = [b"burn-ddp secret of ", job.as_bytes()].concat();
    handshake(&Key::new([0; KEY_BYTES]), &prologue, true, initiator).map_err(|e| failure(&e))
}

fn failure(e: &snow::Error) -> Error {
    Error::environment(format!("the job's secret cannot be sealed: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_rank_that_asked_opens_the_answer() {
        let secret = Secret::generate().unwrap();
        let (mine, request) = Awaiting::new("job").unwrap();
        let (other, _) = Awaiting::new("job").unwrap();
        let sealed = answer("job", &request, &secret).unwrap().unwrap();
        assert!(sealed.len() <= crate::pmi::VALUE_CAP && !sealed.contains(&secret.digits()));
        assert!(other.open(&sealed).is_none());
        assert_eq!(mine.open(&sealed).unwrap().key().bytes(), secret.key().bytes());
        assert!(answer("another job", &request, &secret).unwrap().is_none());
        for junk in ["", "00", &request[2..], &"g".repeat(request.len())] {
            assert!(answer("job", junk, &secret).unwrap().is_none(), "{junk}");
        }
    }
}
