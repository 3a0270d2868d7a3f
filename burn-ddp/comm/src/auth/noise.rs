//! The two variants of Noise `NNpsk0` that connections begin with.
//!
//! Connections to the store exchange keys by X25519, for forward secrecy: the job's key may be as old as its file, and
//! an attacker who steals that file must not be able to read traffic that was recorded before. Connections between
//! ranks use a key that was drawn for this world alone, came through the store, and is forgotten with the world. A key
//! exchange would add nothing there except its cost, once per pair of ranks. So between ranks the "public keys" are
//! random numbers, fresh for each connection, and the "exchanged" secret is a constant. TLS 1.3 has the same mode,
//! `psk_ke`.

use std::io;

use snow::params::{CipherChoice, DHChoice, HashChoice, NoiseParams};
use snow::resolvers::{CryptoResolver, DefaultResolver, FallbackResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, Error, HandshakeState};

use super::cipher::ChaChaPoly;
use super::hmac_key::Key;

/// Bytes of a public key.
pub(super) const PUBLIC_KEY_BYTES: usize = 32;

const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const WITHOUT_EXCHANGE: &str = "burn-ddp_NNpsk0_none_ChaChaPoly_BLAKE2s";

/// Handshake of one end that knows `key` and saw `prologue`: with X25519 if `exchange`, as the client if `initiator`.
pub(super) fn handshake(key: &Key, prologue: &[u8], exchange: bool, initiator: bool) -> Result<HandshakeState, Error> {
    let mut params: NoiseParams = NOISE.parse()?;
    if !exchange {
        params.name = WITHOUT_EXCHANGE.to_owned();
    }
    let ours = Algorithms { exchange };
    let builder =
        Builder::with_resolver(params, Box::new(FallbackResolver::new(Box::new(ours), Box::new(DefaultResolver))));
    let builder = builder.psk(0, key.bytes())?.prologue(prologue)?;
    if initiator { builder.build_initiator() } else { builder.build_responder() }
}

/// Error of bytes that were changed on their way, or of a system without random numbers.
pub(super) fn to_io(e: Error) -> io::Error {
    match e {
        Error::Decrypt => io::Error::new(io::ErrorKind::InvalidData, "its bytes were changed on their way"),
        other => io::Error::new(io::ErrorKind::InvalidData, format!("encryption failed: {other}")),
    }
}

/// Resolves the cipher and, if `exchange` is false, the key exchange as [`RandomNumber`]; all else is `snow`'s.
struct Algorithms {
    exchange: bool,
}

impl CryptoResolver for Algorithms {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        None
    }

    fn resolve_dh(&self, _: &DHChoice) -> Option<Box<dyn Dh>> {
        if self.exchange { None } else { Some(Box::new(RandomNumber::default())) }
    }

    fn resolve_hash(&self, _: &HashChoice) -> Option<Box<dyn Hash>> {
        None
    }

    fn resolve_cipher(&self, _: &CipherChoice) -> Option<Box<dyn Cipher>> {
        Some(Box::new(ChaChaPoly::default()))
    }
}

/// A "key pair" whose public key is a random number.
#[derive(Default)]
struct RandomNumber([u8; PUBLIC_KEY_BYTES]);

impl Dh for RandomNumber {
    fn name(&self) -> &'static str {
        "none"
    }

    fn pub_len(&self) -> usize {
        PUBLIC_KEY_BYTES
    }

    fn priv_len(&self) -> usize {
        0
    }

    fn set(&mut self, _: &[u8]) {}

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), Error> {
        rng.try_fill_bytes(&mut self.0)
    }

    fn pubkey(&self) -> &[u8] {
        &self.0
    }

    fn privkey(&self) -> &[u8] {
        &[]
    }

    fn dh(&self, _: &[u8], out: &mut [u8]) -> Result<(), Error> {
        out.fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The listener's public key, which an eavesdropper recorded and uses as its own random number.
    struct Overheard([u8; PUBLIC_KEY_BYTES]);

    impl CryptoResolver for Overheard {
        fn resolve_rng(&self) -> Option<Box<dyn Random>> {
            Some(Box::new(Overheard(self.0)))
        }

        fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
            Algorithms { exchange: false }.resolve_dh(choice)
        }

        fn resolve_hash(&self, _: &HashChoice) -> Option<Box<dyn Hash>> {
            None
        }

        fn resolve_cipher(&self, _: &CipherChoice) -> Option<Box<dyn Cipher>> {
            None
        }
    }

    impl Random for Overheard {
        fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Error> {
            out.copy_from_slice(&self.0);
            Ok(())
        }
    }

    /// True if an eavesdropper who recorded a connection and gets its key later can decrypt a record of the client.
    fn opened_later(exchange: bool) -> bool {
        let key = Key::new([3; 32]);
        let mut client = handshake(&key, b"prologue", exchange, true).unwrap();
        let mut listener = handshake(&key, b"prologue", exchange, false).unwrap();
        let (mut opening, mut answer, mut nothing) = ([0; 48], [0; 48], [0; 0]);
        client.write_message(&[], &mut opening).unwrap();
        listener.read_message(&opening, &mut nothing).unwrap();
        listener.write_message(&[], &mut answer).unwrap();
        client.read_message(&answer, &mut nothing).unwrap();
        let mut sealed = [0; 20];
        client.into_stateless_transport_mode().unwrap().write_message(0, b"text", &mut sealed).unwrap();

        let mut overheard = [0; PUBLIC_KEY_BYTES];
        overheard.copy_from_slice(&answer[..PUBLIC_KEY_BYTES]);
        let resolver = FallbackResolver::new(Box::new(Overheard(overheard)), Box::new(DefaultResolver));
        let mut params: NoiseParams = NOISE.parse().unwrap();
        if !exchange {
            params.name = WITHOUT_EXCHANGE.to_owned();
        }
        let builder = Builder::with_resolver(params, Box::new(resolver));
        let mut thief = builder.psk(0, key.bytes()).unwrap().prologue(b"prologue").unwrap().build_responder().unwrap();
        thief.read_message(&opening, &mut nothing).unwrap();
        thief.write_message(&[], &mut [0; 48]).unwrap();
        let mut text = [0; 20];
        thief.into_stateless_transport_mode().unwrap().read_message(0, &sealed, &mut text).is_ok()
    }

    #[test]
    fn a_secret_that_leaks_later_opens_nothing() {
        assert!(!opened_later(true), "the store's connections, whose key is as old as its file");
        assert!(opened_later(false), "ranks' connections, whose key is of one world: this thief knows what to do");
    }
}
