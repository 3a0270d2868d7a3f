//! A connection after its handshake: the socket, and the keys that both ends agreed for it.

use std::fmt;
use std::io;
use std::sync::Arc;

use snow::{HandshakeState, StatelessTransportState};
use socket2::Socket;

use super::noise::to_io;

/// Most bytes of a record, a limit of Noise.
pub(crate) const RECORD_CAP: usize = 65535;
/// Bytes of a record that authenticate it.
pub(crate) const SEAL_BYTES: usize = 16;

/// A connection whose ends have proved to each other that they know the key.
#[derive(Debug)]
pub(crate) struct SecureStream {
    pub(super) socket: Socket,
    pub(super) keys: SessionKeys,
}

impl SecureStream {
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The socket, and the keys of its two directions.
    pub(crate) fn into_parts(self) -> (Socket, SessionKeys) {
        (self.socket, self.keys)
    }

    /// Two ends of a local connection with these keys.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn pair(keys: [SessionKeys; 2]) -> io::Result<[SecureStream; 2]> {
        let (a, b) = std::os::unix::net::UnixStream::pair()?;
        let [a_keys, b_keys] = keys;
        let stream = |end, keys| SecureStream { socket: std::os::fd::OwnedFd::from(end).into(), keys };
        Ok([stream(a, a_keys), stream(b, b_keys)])
    }
}

/// Keys of one connection, one for each direction.
///
/// A record is sealed under its number. Both ends count the records and send no numbers: a record that was changed,
/// left out, repeated or moved cannot be opened. No number of a direction may be used twice, so one writer counts them.
#[derive(Clone)]
pub(crate) struct SessionKeys(Arc<StatelessTransportState>);

impl SessionKeys {
    /// Keys that a finished handshake agreed.
    pub(super) fn of(handshake: HandshakeState) -> io::Result<SessionKeys> {
        Ok(SessionKeys(Arc::new(handshake.into_stateless_transport_mode().map_err(to_io)?)))
    }

    /// Seals `plain`, at most [`RECORD_CAP`] less [`SEAL_BYTES`] bytes, as this end's record `number`, and appends it
    /// to `out`.
    pub(crate) fn seal(&self, number: u64, plain: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let begin = out.len();
        out.resize(begin + plain.len() + SEAL_BYTES, 0);
        let sealed = self.0.write_message(number, plain, &mut out[begin..]).map_err(to_io);
        out.truncate(begin + *sealed.as_ref().unwrap_or(&0));
        sealed.map(drop)
    }

    /// Opens the other end's record `number`. Its content replaces that of `out`.
    ///
    /// # Errors
    /// `InvalidData` if the bytes are not that record.
    pub(crate) fn open(&self, number: u64, sealed: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        out.resize(sealed.len(), 0);
        let opened = self.open_into(number, sealed, out);
        out.truncate(*opened.as_ref().unwrap_or(&0));
        opened.map(drop)
    }

    /// Opens the other end's record `number` into the beginning of `out`. Returns the number of bytes of its content,
    /// [`SEAL_BYTES`] fewer than the record has.
    ///
    /// # Errors
    /// `InvalidData` if the bytes are not that record, or `out` is too short; then `out` may hold anything.
    pub(crate) fn open_into(&self, number: u64, sealed: &[u8], out: &mut [u8]) -> io::Result<usize> {
        self.0.read_message(number, sealed, out).map_err(to_io)
    }
}

impl fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKeys(..)")
    }
}
