//! Reader of IDX, the file format of the MNIST database: a header of big-endian sizes, then unsigned bytes.
//!
//! Files may be plain or gzipped; their first bytes say which. Nothing in a file is believed before it is checked, and
//! every error names the file and what is wrong with it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use flate2::bufread::GzDecoder;

/// Most bytes that a file may hold, compressed or not. The largest file of MNIST has 47 million.
const MAX_BYTES: u64 = 256 << 20;

/// Code of "unsigned byte" in an IDX header.
const UNSIGNED_BYTE: u8 = 0x08;

/// An array of unsigned bytes, the last dimension contiguous.
#[derive(Debug, PartialEq, Eq)]
pub struct Idx {
    /// Size of each dimension; the first counts the items.
    pub dims: Vec<usize>,
    /// Elements; their number is the product of `dims`.
    pub data: Vec<u8>,
}

/// Reads the file at `path`, which must have `rank` dimensions.
///
/// # Errors
///
/// If the file cannot be read, or [`parse`] refuses its content.
pub fn read(path: &Path, rank: usize) -> Result<Idx> {
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file of just that size from a larger one.
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read {name}"))?;
    ensure!(bytes.len() as u64 <= MAX_BYTES, "{name} is larger than {MAX_BYTES} bytes, the most this reader takes");
    parse(&name, &bytes, rank)
}

/// Parses the content of a file, plain or gzipped, which must have `rank` dimensions. `name` is for the errors.
///
/// # Errors
///
/// Anything but one complete IDX array of unsigned bytes with `rank` dimensions: another magic number, element type or
/// number of dimensions, a size past the limit, missing bytes, bytes left over, a broken gzip stream.
pub fn parse(name: &str, file: &[u8], rank: usize) -> Result<Idx> {
    if file.starts_with(&[0x1f, 0x8b]) {
        let mut gzip = GzDecoder::new(file);
        let idx = parse_stream(name, &mut gzip, rank)?;
        let rest = gzip.into_inner();
        ensure!(rest.is_empty(), "{name}: {} bytes follow the end of the gzip stream", rest.len());
        Ok(idx)
    } else {
        let mut rest = file;
        parse_stream(name, &mut rest, rank)
    }
}

fn parse_stream(name: &str, stream: &mut impl Read, rank: usize) -> Result<Idx> {
    let mut magic = [0; 4];
    read_exactly(name, stream, &mut magic, "the magic number")?;
    let [zero_0, zero_1, element, dims] = magic;
    if zero_0 != 0 || zero_1 != 0 {
        bail!("{name} is not an IDX file: it starts with {magic:02x?}, not with two zero bytes");
    }
    ensure!(
        element == UNSIGNED_BYTE,
        "{name} holds elements of type {element:#04x}; only unsigned bytes ({UNSIGNED_BYTE:#04x}) are read"
    );
    ensure!(
        usize::from(dims) == rank,
        "{name} has {dims} dimensions where {rank} are expected; are images and labels swapped?"
    );

    let mut sizes = Vec::with_capacity(rank);
    for dim in 0..rank {
        let mut size = [0; 4];
        read_exactly(name, stream, &mut size, &format!("the size of dimension {dim}"))?;
        sizes.push(u32::from_be_bytes(size));
    }
    let total = sizes
        .iter()
        .try_fold(1u64, |total, &size| total.checked_mul(size.into()))
        .filter(|&total| total <= MAX_BYTES)
        .with_context(|| format!("{name} declares sizes {sizes:?}, more than {MAX_BYTES} bytes"))?;

    // Grows with what really comes, so a header cannot make us allocate what the file does not hold.
    let mut data = Vec::new();
    stream.by_ref().take(total).read_to_end(&mut data).with_context(|| format!("{name} is corrupt"))?;
    ensure!(
        data.len() as u64 == total,
        "{name} is truncated: sizes {sizes:?} need {total} bytes, {} are there",
        data.len()
    );
    // Reading past the last byte is also what makes the gzip decoder compare its checksum.
    let mut extra = [0; 1];
    let extra = stream.read(&mut extra).with_context(|| format!("{name} is corrupt"))?;
    ensure!(extra == 0, "{name} goes on after the {total} bytes that its sizes {sizes:?} declare");
    Ok(Idx { dims: sizes.iter().map(|&size| size as usize).collect(), data })
}

fn read_exactly(name: &str, stream: &mut impl Read, buffer: &mut [u8], what: &str) -> Result<()> {
    match stream.read_exact(buffer) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            bail!("{name} is truncated: it ends within {what}")
        }
        Err(error) => Err(error).with_context(|| format!("{name} is corrupt")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    /// A file with the sizes `dims` and `len` bytes 0, 1, 2…
    fn file(dims: &[u32], len: usize) -> Vec<u8> {
        let mut bytes = vec![0, 0, UNSIGNED_BYTE, dims.len() as u8];
        for dim in dims {
            bytes.extend(dim.to_be_bytes());
        }
        bytes.extend((0..len).map(|i| i as u8));
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[track_caller]
    fn refused(bytes: &[u8], rank: usize, expected: &str) {
        let error = format!("{:#}", parse("some-file", bytes, rank).unwrap_err());
        assert!(error.contains("some-file"), "{error}");
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn reads_plain_and_gzipped_files_alike() {
        let bytes = file(&[2, 3, 4], 24);
        let idx = parse("f", &bytes, 3).unwrap();
        assert_eq!(idx.dims, [2, 3, 4]);
        assert_eq!(idx.data, (0..24).collect::<Vec<u8>>());
        assert_eq!(parse("f", &gzip(&bytes), 3).unwrap(), idx);
        assert!(parse("f", &file(&[0], 0), 1).unwrap().data.is_empty());
    }

    #[test]
    fn every_prefix_of_a_file_is_truncated() {
        let bytes = file(&[2, 3, 4], 24);
        for len in 0..bytes.len() {
            refused(&bytes[..len], 3, "truncated");
        }
        let bytes = gzip(&bytes);
        for len in 2..bytes.len() {
            parse("f", &bytes[..len], 3).unwrap_err();
        }
    }

    #[test]
    fn a_flipped_bit_of_a_gzipped_file_never_yields_other_data() {
        let plain = file(&[2, 3, 4], 24);
        let bytes = gzip(&plain);
        let good = parse("f", &plain, 3).unwrap();
        for at in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[at / 8] ^= 1 << (at % 8);
            // The gzip header holds bits that mean nothing for the content (time, operating system).
            if let Ok(idx) = parse("f", &bad, 3) {
                assert_eq!(idx, good, "bit {at}");
            }
        }
    }

    #[test]
    fn says_what_is_wrong() {
        refused(&file(&[2], 3), 1, "goes on after the 2 bytes");
        refused(&gzip(&file(&[2], 3)), 1, "goes on after the 2 bytes");
        refused(&file(&[2, 2], 4), 1, "has 2 dimensions where 1 are expected");
        refused(b"<html>not found</html>", 1, "is not an IDX file");
        refused(&[0, 0, 0x0d, 1, 0, 0, 0, 0], 1, "type 0x0d");
        refused(&file(&[u32::MAX, u32::MAX, u32::MAX], 9), 3, "more than");
        refused(&file(&[1 << 20, 1 << 20], 9), 2, "more than");
        let mut twice = gzip(&file(&[2], 2));
        twice.extend(gzip(&file(&[2], 2)));
        refused(&twice, 1, "follow the end of the gzip stream");
        let mut crc = gzip(&file(&[2], 2));
        let at = crc.len() - 8;
        crc[at] ^= 1;
        refused(&crc, 1, "corrupt");
    }

    #[test]
    fn a_small_file_cannot_inflate_past_its_sizes() {
        let bomb = gzip(&file(&[4], 50_000_000));
        assert!(bomb.len() < 1_000_000);
        refused(&bomb, 1, "goes on after the 4 bytes");
    }

    #[test]
    fn names_a_file_that_is_not_there() {
        let error = format!("{:#}", read(Path::new("/nowhere/labels"), 1).unwrap_err());
        assert!(error.contains("cannot open /nowhere/labels"), "{error}");
    }
}
