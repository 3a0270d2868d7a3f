//! TensorBoard's event files as bytes: TFRecord frames around messages of the protocol buffer `tensorflow.Event`.
//!
//! The code writes two kinds of message with five fields in all, so it needs no code generator for protocol buffers.

/// First event of a file: the version of the format.
pub(super) fn version(wall_time: f64) -> Vec<u8> {
    frame(&event(wall_time, 0, |out| bytes(out, 3, b"brain.Event:2")))
}

/// A value of `tag` at `step`; `wall_time` in seconds since 1970.
pub(super) fn scalar(tag: &str, value: f32, step: u64, wall_time: f64) -> Vec<u8> {
    let mut scalar = Vec::new();
    bytes(&mut scalar, 1, tag.as_bytes());
    key(&mut scalar, 2, FIXED32);
    scalar.extend(value.to_le_bytes());
    let mut summary = Vec::new();
    bytes(&mut summary, 1, &scalar);
    frame(&event(wall_time, step, |out| bytes(out, 5, &summary)))
}

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

fn event(wall_time: f64, step: u64, content: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    key(&mut out, 1, FIXED64);
    out.extend(wall_time.to_le_bytes());
    if step > 0 {
        key(&mut out, 2, VARINT);
        varint(&mut out, step);
    }
    content(&mut out);
    out
}

fn key(out: &mut Vec<u8>, field: u64, kind: u64) {
    varint(out, field << 3 | kind);
}

fn bytes(out: &mut Vec<u8>, field: u64, content: &[u8]) {
    key(out, field, BYTES);
    varint(out, content.len() as u64);
    out.extend(content);
}

/// A varint: seven bits per byte, the lowest first; the highest bit of a byte says that another byte follows.
fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Length and content, each with its checksum.
fn frame(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), content, &masked_crc(content)].concat()
}

/// CRC-32C, rotated and with an added constant, so that it stays a good checksum for data that contain checksums.
fn masked_crc(data: &[u8]) -> [u8; 4] {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// Computed bit by bit, which is fast enough since an event has less than a hundred bytes.
fn crc32c(data: &[u8]) -> u32 {
    /// Castagnoli's polynomial, its lowest power first.
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let bit = |crc: u32| (crc >> 1) ^ (POLYNOMIAL * (crc & 1));
    !data.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| bit(crc)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    /// The bytes are those of tensorboard 2.21's `RecordWriter`.
    #[test]
    fn events_have_the_bytes_of_tensorboard() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex(&version(1.5)), VERSION);
        assert_eq!(hex(&scalar("loss", 0.25, 300, 2.0)), SCALAR);
    }

    const VERSION: &str = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c";
    const SCALAR: &str = "1b000000000000001a0d9e1309000000000000004010ac022a0d0a0b0a046c6f7373150000803e2fb3dff0";
}
