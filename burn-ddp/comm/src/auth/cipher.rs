//! ChaCha20-Poly1305 by two libraries: the one that is fast for large messages takes five times as long as the other
//! for the 50 bytes of a small all-reduce.
//!
//! The cause is the AVX2 code of `poly1305` 0.8 and 0.9, which calls each of its instructions as a function unless the
//! whole program is compiled for AVX2.

use orion::hazardous::aead::chacha20poly1305::{ChaCha20Poly1305, Nonce, SecretKey};
use snow::Error;
use snow::params::CipherChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::Cipher;

use super::secure_stream::SEAL_BYTES;

/// Most bytes, without the seal, of a message that goes to `orion`. On x86-64 both take as long for 600.
const SMALL: usize = 512;

/// Noise's `ChaChaPoly`.
pub(super) struct ChaChaPoly {
    key: SecretKey,
    for_large: Box<dyn Cipher>,
}

impl Default for ChaChaPoly {
    fn default() -> Self {
        let for_large = DefaultResolver.resolve_cipher(&CipherChoice::ChaChaPoly).expect("snow is built with it");
        ChaChaPoly { key: SecretKey::from([0; 32]), for_large }
    }
}

impl Cipher for ChaChaPoly {
    fn name(&self) -> &'static str {
        self.for_large.name()
    }

    fn set(&mut self, bytes: &[u8; 32]) {
        self.key = SecretKey::from(*bytes);
        self.for_large.set(bytes);
    }

    fn encrypt(&self, number: u64, also: &[u8], plain: &[u8], out: &mut [u8]) -> usize {
        if plain.len() > SMALL {
            return self.for_large.encrypt(number, also, plain, out);
        }
        ChaCha20Poly1305::seal(&self.key, &nonce(number), plain, Some(also), out).expect("out has room for the seal");
        plain.len() + SEAL_BYTES
    }

    fn decrypt(&self, number: u64, also: &[u8], sealed: &[u8], out: &mut [u8]) -> Result<usize, Error> {
        let bytes = sealed.len().checked_sub(SEAL_BYTES).ok_or(Error::Decrypt)?;
        if bytes > SMALL {
            return self.for_large.decrypt(number, also, sealed, out);
        }
        ChaCha20Poly1305::open(&self.key, &nonce(number), sealed, Some(also), out).map_err(|_| Error::Decrypt)?;
        Ok(bytes)
    }
}

/// The nonce of a message, by Noise's specification, section 12.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&number.to_le_bytes());
    Nonce::from(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_libraries_seal_and_open_alike() {
        let mut ours = ChaChaPoly::default();
        ours.set(&[7; 32]);
        let (number, also) = (u64::MAX - 3, [5; 40]);
        for bytes in (0..SMALL + 40).step_by(13).chain([1, SMALL - 1, SMALL, SMALL + 1]) {
            let plain: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
            let (mut sealed, mut expected) = (vec![0; bytes + SEAL_BYTES], vec![0; bytes + SEAL_BYTES]);
            assert_eq!(ours.encrypt(number, &also, &plain, &mut sealed), bytes + SEAL_BYTES);
            ours.for_large.encrypt(number, &also, &plain, &mut expected);
            assert_eq!(sealed, expected, "{bytes} bytes");

            let mut opened = vec![0; bytes];
            assert_eq!(ours.decrypt(number, &also, &sealed, &mut opened).unwrap(), bytes);
            assert_eq!(opened, plain);
            assert!(ours.decrypt(number - 1, &also, &sealed, &mut opened).is_err(), "another number");
            assert!(ours.decrypt(number, &also[1..], &sealed, &mut opened).is_err(), "other data beside it");
            for changed in 0..sealed.len() {
                let mut sealed = sealed.clone();
                sealed[changed] ^= 0x10;
                assert!(ours.decrypt(number, &also, &sealed, &mut opened).is_err(), "byte {changed} of {bytes}");
            }
        }
        assert!(ours.decrypt(number, &also, &[0; SEAL_BYTES - 1], &mut []).is_err(), "too short for a seal");
    }
}
