//! The header in front of every payload that ranks exchange.
//!
//! ```text
//! offset  bytes  field (little endian)
//!      0      4  magic "bddp"
//!      4      2  protocol version
//!      6      1  collective
//!      7      1  reduce op, 255 = none
//!      8      1  dtype, 255 = none
//!      9      1  stage
//!     10      2  bytes of the call site
//!     12      4  sender's rank
//!     16      4  root, u32::MAX = none
//!     20      4  digest
//!     24      8  group
//!     32      8  sequence
//!     40      8  elements
//!     48      8  bytes of the payload
//!     56      8  weight (f64)
//!     64      8  tag
//!     72      8  the sender's step, u64::MAX = none
//!     80      8  shape, 0 = none
//!     88      …  the call site, UTF-8, at most 256 bytes
//!      …      …  the payload
//! ```

use std::io::Write;

use crate::call::{CallInfo, CallSite, Collective};
use crate::tensor_type::Shape;
use crate::{DType, ReduceOp};

/// Version of all protocols between ranks. Ranks of different versions refuse each other.
pub const PROTOCOL_VERSION: u16 = 7;

/// Bytes of the fixed part of a header, in front of the call site.
pub const PREFIX_BYTES: usize = 88;

/// Bytes of the longest call site on the wire. Longer call sites lose their beginning.
pub const MAX_SITE_BYTES: usize = 256;

/// Bytes of the longest header.
pub const MAX_HEADER_BYTES: usize = PREFIX_BYTES + MAX_SITE_BYTES;

const MAGIC: [u8; 4] = *b"bddp";
const NONE: u8 = u8::MAX;
const NO_ROOT: u32 = u32::MAX;
const NO_STEP: u64 = u64::MAX;

/// Header of a frame: the call it belongs to, and the frame's place in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The sender's call.
    pub info: CallInfo,
    /// Rank of the sender.
    pub from: usize,
    /// Number of the exchange within its call.
    pub stage: u8,
    /// The sender's weight.
    pub weight: f64,
    /// Bytes of the payload that follows.
    pub payload_bytes: u64,
}

impl Header {
    /// Appends the bytes of this header.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        out.push(self.info.collective.code());
        out.push(self.info.reduce.map_or(NONE, ReduceOp::code));
        out.push(self.info.dtype.map_or(NONE, DType::code));
        out.push(self.stage);
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&(self.from as u32).to_le_bytes());
        out.extend_from_slice(&self.info.root.map_or(NO_ROOT, |root| root as u32).to_le_bytes());
        out.extend_from_slice(&self.info.digest.to_le_bytes());
        for number in [
            self.info.group,
            self.info.sequence,
            self.info.len_elems,
            self.payload_bytes,
            self.weight.to_bits(),
            self.info.tag,
            self.info.step.unwrap_or(NO_STEP),
            self.info.shape.map_or(0, Shape::code),
        ] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        let site_bytes = append_site(&self.info.site, out) as u16;
        out[start + 10..start + 12].copy_from_slice(&site_bytes.to_le_bytes());
    }
}

/// The first [`PREFIX_BYTES`] of a header: all but the call site.
#[derive(Clone, Debug)]
pub struct Prefix {
    header: Header,
    site_bytes: usize,
}

impl Prefix {
    /// Reads and validates a prefix.
    ///
    /// # Errors
    /// A description of the first field that is not of this protocol.
    pub fn decode(bytes: &[u8; PREFIX_BYTES]) -> Result<Prefix, String> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;

        if bytes[..4] != MAGIC {
            return Err(format!("a header that starts with {:02x?}, not with {MAGIC:02x?}", &bytes[..4]));
        }
        if u16_at(4) != PROTOCOL_VERSION {
            return Err(format!("protocol version {}, this rank has {PROTOCOL_VERSION}", u16_at(4)));
        }
        let site_bytes = usize::from(u16_at(10));
        if site_bytes > MAX_SITE_BYTES {
            return Err(format!("a call site of {site_bytes} bytes"));
        }
        let info = CallInfo {
            collective: Collective::from_code(bytes[6]).ok_or_else(|| format!("collective {}", bytes[6]))?,
            reduce: optional(bytes[7], ReduceOp::from_code).ok_or_else(|| format!("reduce op {}", bytes[7]))?,
            dtype: optional(bytes[8], DType::from_code).ok_or_else(|| format!("dtype {}", bytes[8]))?,
            len_elems: u64_at(40),
            root: Some(u32_at(16)).filter(|root| *root != NO_ROOT).map(|root| root as usize),
            tag: u64_at(64),
            digest: u32_at(20),
            shape: Shape::from_code(u64_at(80)),
            group: u64_at(24),
            sequence: u64_at(32),
            site: CallSite::Unknown,
            step: Some(u64_at(72)).filter(|step| *step != NO_STEP),
        };
        let header = Header {
            info,
            from: u32_at(12) as usize,
            stage: bytes[9],
            weight: f64::from_bits(u64_at(56)),
            payload_bytes: u64_at(48),
        };
        Ok(Prefix { header, site_bytes })
    }

    /// The header, without the call site.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes of the call site, which follows the prefix.
    pub fn site_bytes(&self) -> usize {
        self.site_bytes
    }

    /// The header, given the bytes of the call site.
    pub fn finish(mut self, site: &[u8]) -> Header {
        self.header.info.site = CallSite::There(String::from_utf8_lossy(site).into());
        self.header
    }
}

/// Decodes `code`: `Some(None)` for 255, which means none, and `None` for an unknown code.
fn optional<T>(code: u8, from_code: impl Fn(u8) -> Option<T>) -> Option<Option<T>> {
    if code == NONE { Some(None) } else { from_code(code).map(Some) }
}

/// Appends `site`, cut to its end if it is too long, since the end has the file and line. Returns the number of bytes.
fn append_site(site: &CallSite, out: &mut Vec<u8>) -> usize {
    let start = out.len();
    // Writing to memory does not fail.
    let _ = write!(out, "{site}");
    let mut surplus = (out.len() - start).saturating_sub(MAX_SITE_BYTES);
    if surplus > 0 {
        while out.get(start + surplus).is_some_and(|byte| byte & 0xc0 == 0x80) {
            surplus += 1;
        }
        out.drain(start..start + surplus);
    }
    out.len() - start
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(site: &str) -> Header {
        Header {
            info: CallInfo {
                collective: Collective::AllReduceWeighted,
                reduce: Some(ReduceOp::Mean),
                dtype: Some(DType::BF16),
                len_elems: u64::MAX - 3,
                root: Some(2),
                tag: 0x100_0000_0007,
                digest: 0xfeed_beef,
                shape: Some(Shape::of(&[2, 300])),
                group: 5,
                sequence: 1 << 40,
                site: site.into(),
                step: Some(28),
            },
            from: 6,
            stage: 1,
            weight: 0.1,
            payload_bytes: 77,
        }
    }

    fn decode(bytes: &[u8]) -> Result<Header, String> {
        let (prefix, rest) = bytes.split_first_chunk().expect("a whole prefix");
        let prefix = Prefix::decode(prefix)?;
        assert_eq!(rest.len(), prefix.site_bytes());
        Ok(prefix.finish(rest))
    }

    #[test]
    fn a_header_round_trips() {
        let mut bare = header("");
        bare.info.reduce = None;
        bare.info.dtype = None;
        bare.info.root = None;
        bare.info.shape = None;
        bare.info.step = None;
        for header in [header("src/main.rs:10:5"), bare] {
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            assert_eq!(decode(&bytes), Ok(header));
        }
    }

    #[test]
    fn a_long_site_keeps_its_end() {
        let mut bytes = Vec::new();
        header(&format!("{}/main.rs:10:5", "ü".repeat(300))).encode(&mut bytes);
        let site = decode(&bytes).unwrap().info.site.to_string();
        assert!(site.len() <= MAX_SITE_BYTES && site.ends_with("ü/main.rs:10:5"), "{site}");
    }

    #[test]
    fn what_is_not_ours_is_refused() {
        let mut good = Vec::new();
        header("x").encode(&mut good);
        for (at, what) in
            [(0, "starts with"), (4, "version"), (6, "collective"), (7, "reduce op"), (8, "dtype"), (11, "call site")]
        {
            let mut bad = good.clone();
            bad[at] = 99;
            let error = decode(&bad).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_capped(
            bytes in proptest::collection::vec(any::<u8>(), PREFIX_BYTES),
            magic in any::<bool>(),
        ) {
            let mut prefix: [u8; PREFIX_BYTES] = bytes.try_into().unwrap();
            if magic {
                prefix[..4].copy_from_slice(&MAGIC);
                prefix[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
            }
            if let Ok(prefix) = Prefix::decode(&prefix) {
                prop_assert!(prefix.site_bytes() <= MAX_SITE_BYTES);
            }
        }
    }
}
