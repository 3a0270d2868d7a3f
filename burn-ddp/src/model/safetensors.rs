//! Files in the safetensors format: the length of a header in 8 bytes, the header in JSON, the values one by one.
//!
//! Written by hand, since the format is simple, and the crate `safetensors` would change the features of Burn's
//! dependencies.

use std::cmp::Reverse;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use burn::tensor::{DType, TensorData};
use serde_json::{Map, Value, json};

use super::save::Temporary;
use super::schema::Snapshot;
use crate::file_failure::FileFailure;
use crate::tensor_conversion::with_type;

/// Values begin at a multiple of this, so that readers can map them.
const ALIGNMENT: usize = 8;

/// A tensor of a file.
struct Entry {
    name: String,
    dtype: &'static str,
    /// Bytes of an element.
    size: usize,
    data: TensorData,
}

/// Writes `snapshot` to a temporary file beside `path`, syncs it, renames it, and syncs the directory.
pub(super) fn save(snapshot: Snapshot, path: &Path) -> Result<(), FileFailure> {
    let entries = entries(snapshot)?;
    let written = || -> io::Result<()> {
        let (file, temporary) = Temporary::create(path)?;
        let mut file = BufWriter::new(file);
        write(&entries, &mut file)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        temporary.publish(path)
    };
    Ok(written()?)
}

/// Tensors with wide elements come first: then all are aligned without gaps, which the format forbids.
fn entries(Snapshot { schema, values }: Snapshot) -> Result<Vec<Entry>, String> {
    let named = schema.entries.into_iter().map(|entry| entry.path).zip(values);
    let mut entries = named.map(|(name, data)| entry(name, data)).collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|entry| Reverse(entry.size));
    Ok(entries)
}

fn entry(name: String, data: TensorData) -> Result<Entry, String> {
    // Bools are bytes in the format, whatever the backend stores them as.
    let data = if data.dtype().is_bool() { with_type(data).map_err(|e| e.to_string())?.1 } else { data };
    let (dtype, size) = match data.dtype() {
        DType::F64 => ("F64", 8),
        DType::F32 | DType::Flex32 => ("F32", 4),
        DType::F16 => ("F16", 2),
        DType::BF16 => ("BF16", 2),
        DType::I64 => ("I64", 8),
        DType::I32 => ("I32", 4),
        DType::I16 => ("I16", 2),
        DType::I8 => ("I8", 1),
        DType::U64 => ("U64", 8),
        DType::U32 => ("U32", 4),
        DType::U16 => ("U16", 2),
        DType::U8 => ("U8", 1),
        DType::Bool(_) => ("BOOL", 1),
        other => return Err(format!("safetensors has no {other:?}, which {name} is")),
    };
    Ok(Entry { name, dtype, size, data })
}

fn write(entries: &[Entry], out: &mut impl Write) -> io::Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "producer": "burn-ddp", "layout": "burn" }));
    let mut end = 0;
    for Entry { name, dtype, data, .. } in entries {
        let begin = end;
        end += data.as_bytes().len();
        let shape: Vec<usize> = data.shape().iter().copied().collect();
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] }));
    }
    let mut header = Value::Object(header).to_string();
    header.push_str(&" ".repeat(header.len().next_multiple_of(ALIGNMENT) - header.len()));
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    entries.iter().try_for_each(|entry| out.write_all(entry.data.as_bytes()))
}
