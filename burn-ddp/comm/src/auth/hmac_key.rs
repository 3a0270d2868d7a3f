//! Secret keys, which sign bytes and derive further keys by HMAC-SHA256.

use std::fmt;
use std::io;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Bytes of a key, a signature and a nonce.
pub(crate) const KEY_BYTES: usize = 32;

/// A secret key of 32 bytes.
#[derive(Clone)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl Key {
    pub(crate) fn new(bytes: [u8; KEY_BYTES]) -> Key {
        Key(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// Key for the use that `parts` name. It reveals nothing about this key or about the keys for other uses.
    pub(crate) fn derive(&self, parts: &[&[u8]]) -> Key {
        Key(self.sign(parts))
    }

    /// Signature of `parts` and of their lengths.
    pub(crate) fn sign(&self, parts: &[&[u8]]) -> [u8; KEY_BYTES] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// True if `signature` is the signature of `parts`. Compares in constant time.
    pub(crate) fn verify(&self, parts: &[&[u8]], signature: &[u8; KEY_BYTES]) -> bool {
        self.mac(parts).verify_slice(signature).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC pads short keys with zeros to a block; a key that has a whole block is taken by a call that cannot fail.
        let mut block = [0; 64];
        block[..KEY_BYTES].copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new(&block.into());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Random bytes of the operating system.
pub(crate) fn random() -> io::Result<[u8; KEY_BYTES]> {
    let mut bytes = [0; KEY_BYTES];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_hmac_sha256() {
        // `printf '\3\0\0\0\0\0\0\0abc' | openssl dgst -sha256 -mac HMAC -macopt hexkey:0b0b…`, 32 times 0b.
        let hex: String = Key::new([0x0b; 32]).sign(&[b"abc"]).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "2b9a2e44ba5a9752e3470f7544c15687abe034e57d8cd7778b99d75bbd85b140");
    }

    #[test]
    fn a_signature_holds_for_its_key_and_parts_only() {
        let key = Key::new([1; 32]);
        let mut signature = key.sign(&[b"ab", b"c"]);
        assert!(key.verify(&[b"ab", b"c"], &signature));
        assert!(!key.verify(&[b"a", b"bc"], &signature));
        assert!(!key.verify(&[b"abc"], &signature));
        assert!(!Key::new([2; 32]).verify(&[b"ab", b"c"], &signature));
        signature[31] ^= 1;
        assert!(!key.verify(&[b"ab", b"c"], &signature));
    }
}
