//! The header of Burn's file format (burnpack): ten bytes, a map in CBOR (RFC 8949), padding to 256. Data follow.
//!
//! Burn writes and reads whole records only, and gives no access to the contents of an optimizer's record. The names in
//! it hold parameter ids, which differ between processes. So headers are read, changed and written here.

use std::io::Read;

const HEADER: usize = 10;
const MAGIC: &[u8; 6] = b"NRUB\x01\x00";
/// Alignment of the data, and of each tensor in it.
pub(crate) const ALIGNMENT: usize = 256;
/// Greatest length of a map, as in Burn's reader.
const MAX_MAP: usize = 100 << 20;
/// Greatest depth of nested items; Burn writes five.
const MAX_DEPTH: usize = 16;

/// One item of CBOR.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    Uint(u64),
    Text(String),
    Array(Vec<Item>),
    Map(Vec<(Item, Item)>),
    /// Encoded bytes of any other item.
    Other(Vec<u8>),
}

/// Header and data of a file.
#[derive(Debug)]
pub(crate) struct Pack<'a> {
    pub(crate) header: Item,
    data: &'a [u8],
}

impl<'a> Pack<'a> {
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Self, String> {
        let (header, start) = read_header(&mut &*bytes)?;
        Ok(Pack { header, data: bytes.get(start..).unwrap_or_default() })
    }

    #[cfg(test)]
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let mut bytes = header_bytes(&self.header)?;
        bytes.extend_from_slice(self.data);
        Ok(bytes)
    }

    pub(crate) fn data(&self) -> &'a [u8] {
        self.data
    }
}

/// Reads a header. Returns the offset of the data, too.
pub(crate) fn read_header(file: &mut impl Read) -> Result<(Item, usize), String> {
    let mut head = [0; HEADER];
    file.read_exact(&mut head).map_err(|_| "it is too short")?;
    let (magic, len) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err("it is no burnpack of version 1".into());
    }
    let len = len.try_into().map_or(0, u32::from_le_bytes) as usize;
    let mut map = Vec::new();
    let read = file.take(len.min(MAX_MAP) as u64).read_to_end(&mut map);
    if read.map_err(|e| e.to_string())? != len {
        return Err("its header is cut off".into());
    }
    Ok((decode(&mut map.as_slice(), 0)?, data_start(len)))
}

/// The bytes of a file before its data.
pub(crate) fn header_bytes(header: &Item) -> Result<Vec<u8>, String> {
    let mut map = Vec::new();
    encode(header, &mut map);
    let len = u32::try_from(map.len()).map_err(|_| "its header is too long")?;
    let mut bytes = [MAGIC.as_slice(), &len.to_le_bytes(), &map].concat();
    bytes.resize(data_start(map.len()), 0);
    Ok(bytes)
}

impl Item {
    /// The value under a name, if this is a map.
    pub(crate) fn get(&self, name: &str) -> Option<&Item> {
        let Item::Map(entries) = self else { return None };
        entries.iter().find(|(key, _)| key.text() == Some(name)).map(|(_, value)| value)
    }

    /// The entries of one of a header's maps: `tensors`, `scalars` or `metadata`.
    pub(crate) fn entries(&self, of: &str) -> &[(Item, Item)] {
        match self.get(of) {
            Some(Item::Map(entries)) => entries,
            _ => &[],
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Item::Text(text) => Some(text),
            _ => None,
        }
    }
}

fn data_start(header: usize) -> usize {
    (HEADER + header).next_multiple_of(ALIGNMENT)
}

fn decode<'a>(bytes: &mut &'a [u8], depth: usize) -> Result<Item, String> {
    let cut_off = || "its header is cut off".to_string();
    if depth > MAX_DEPTH {
        return Err("its header is nested too deeply".into());
    }
    let whole: &'a [u8] = bytes;
    let (&first, rest) = whole.split_first().ok_or_else(cut_off)?;
    let (major, info) = (first >> 5, first & 31);
    let width = match info {
        0..24 => 0,
        24..28 => 1 << (info - 24),
        _ => return Err("its header holds items without a length".into()),
    };
    let (argument, rest) = rest.split_at_checked(width).ok_or_else(cut_off)?;
    let argument = match width {
        0 => u64::from(info),
        _ => argument.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)),
    };
    *bytes = rest;
    Ok(match major {
        0 => Item::Uint(argument),
        3 => {
            let len = usize::try_from(argument).map_err(|_| cut_off())?;
            let (text, rest) = rest.split_at_checked(len).ok_or_else(cut_off)?;
            *bytes = rest;
            Item::Text(String::from_utf8(text.to_vec()).map_err(|_| "a name in it is no text")?)
        }
        4 => Item::Array((0..argument).map(|_| decode(bytes, depth + 1)).collect::<Result<_, _>>()?),
        5 => {
            let entry = |_| Ok::<_, String>((decode(bytes, depth + 1)?, decode(bytes, depth + 1)?));
            Item::Map((0..argument).map(entry).collect::<Result<_, _>>()?)
        }
        // Negative integers; floats, true, false and null.
        1 | 7 => Item::Other(whole[..1 + width].to_vec()),
        _ => return Err("its header holds bytes or tags".into()),
    })
}

fn encode(item: &Item, out: &mut Vec<u8>) {
    match item {
        Item::Uint(value) => head(0, *value, out),
        Item::Text(text) => {
            head(3, text.len() as u64, out);
            out.extend_from_slice(text.as_bytes());
        }
        Item::Array(items) => {
            head(4, items.len() as u64, out);
            items.iter().for_each(|item| encode(item, out));
        }
        Item::Map(entries) => {
            head(5, entries.len() as u64, out);
            for (key, value) in entries {
                encode(key, out);
                encode(value, out);
            }
        }
        Item::Other(bytes) => out.extend_from_slice(bytes),
    }
}

fn head(major: u8, argument: u64, out: &mut Vec<u8>) {
    let major = major << 5;
    let bytes = argument.to_be_bytes();
    match argument {
        0..24 => out.push(major | bytes[7]),
        24..0x100 => out.extend([major | 24, bytes[7]]),
        0x100..0x1_0000 => {
            out.push(major | 25);
            out.extend(&bytes[6..]);
        }
        0x1_0000..0x1_0000_0000 => {
            out.push(major | 26);
            out.extend(&bytes[4..]);
        }
        _ => {
            out.push(major | 27);
            out.extend(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn item() -> impl Strategy<Value = Item> {
        let leaf = prop_oneof![
            any::<u64>().prop_map(Item::Uint),
            (0u32..64).prop_map(|bits| Item::Uint(1u64 << bits)),
            ".{0,40}".prop_map(Item::Text),
            any::<f64>().prop_map(|x| Item::Other([&[0xfb], &x.to_be_bytes()[..]].concat())),
            (0u8..24).prop_map(|x| Item::Other(vec![0x20 | x])),
            Just(Item::Other(vec![0xf6])),
        ];
        leaf.prop_recursive(3, 64, 30, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..30).prop_map(Item::Array),
                prop::collection::vec((inner.clone(), inner), 0..30).prop_map(Item::Map),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(header in item(), data in prop::collection::vec(any::<u8>(), 0..600)) {
            let bytes = Pack { header: header.clone(), data: &data }.to_bytes().unwrap();
            let pack = Pack::read(&bytes).unwrap();
            prop_assert_eq!(&pack.header, &header);
            prop_assert_eq!(pack.data, &data[..]);
            prop_assert_eq!((bytes.len() - data.len()) % ALIGNMENT, 0);
        }

        #[test]
        fn garbage_is_an_error_and_no_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(head) = bytes.first_chunk_mut::<10>() {
                *head = *b"NRUB\x01\x00\xff\0\0\0";
            }
            let _ = Pack::read(&bytes);
        }
    }

    #[test]
    fn what_burn_writes_is_understood_to_the_last_byte() {
        use burn::module::Module;
        let record = burn::nn::LinearConfig::new(3, 2).init(&burn::tensor::Device::flex()).into_record();
        let bytes = record.into_bytes().unwrap();
        let pack = Pack::read(&bytes).unwrap();
        let names: Vec<_> = pack.header.entries("tensors").iter().filter_map(|(name, _)| name.text()).collect();
        assert_eq!(names, ["bias", "weight"]);
        assert_eq!(pack.header.entries("tensors")[1].1.get("dtype").and_then(Item::text), Some("F32"));
        assert_eq!(pack.to_bytes().unwrap(), bytes.to_vec());
    }
}
