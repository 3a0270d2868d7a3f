//! The tensors that the header of a burnpack describes, and the place of their data.

use std::ops::Range;

use burn::tensor::DType;
use serde_json::Value;

use super::burnpack_header::{ALIGNMENT, Item};

/// Simple values of CBOR.
const FALSE: u8 = 0xf4;
const TRUE: u8 = 0xf5;
const NULL: u8 = 0xf6;

/// A tensor of a file, without its values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<usize>,
    pub(crate) len_bytes: usize,
    /// Burn's id of the parameter.
    pub(crate) id: Option<u64>,
}

/// Offset at which a tensor begins if the data before it end at `end`.
pub(crate) fn aligned(end: usize) -> usize {
    end.next_multiple_of(ALIGNMENT)
}

/// Header of a file that holds the data of `tensors` in this order. `others` are its other maps.
pub(crate) fn header(tensors: &[StoredTensor], others: &[(Item, Item)]) -> Result<Item, String> {
    let text = |text: &str| Item::Text(text.to_owned());
    let mut end = 0;
    let mut entries = Vec::new();
    for tensor in tensors {
        let start = aligned(end);
        end = start + tensor.len_bytes;
        let dtype = serde_json::to_value(tensor.dtype).map_err(|e| e.to_string()).and_then(|dtype| item(&dtype))?;
        let uints = |numbers: &[usize]| Item::Array(numbers.iter().map(|n| Item::Uint(*n as u64)).collect());
        let mut fields = vec![
            (text("dtype"), dtype),
            (text("shape"), uints(&tensor.dims)),
            (text("data_offsets"), uints(&[start, end])),
        ];
        fields.extend(tensor.id.map(|id| (text("param_id"), Item::Uint(id))));
        entries.push((tensor.name.as_str(), Item::Map(fields)));
    }
    entries.sort_by_key(|(name, _)| *name);
    if let Some(twice) = entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("it has two tensors of the name {}", twice[0].0));
    }
    let entries = entries.into_iter().map(|(name, fields)| (text(name), fields)).collect();
    let tensors = (text("tensors"), Item::Map(entries));
    Ok(Item::Map(std::iter::once(tensors).chain(others.iter().cloned()).collect()))
}

/// The maps of a header that describe no tensors.
pub(crate) fn others(header: &Item) -> Vec<(Item, Item)> {
    let Item::Map(maps) = header else { return Vec::new() };
    maps.iter().filter(|(name, _)| name.text() != Some("tensors")).cloned().collect()
}

/// The tensors of a header in the order of their data, with the place of each in the data.
pub(crate) fn tensors(header: &Item) -> Result<Vec<(StoredTensor, Range<usize>)>, String> {
    let mut tensors = Vec::new();
    for (name, fields) in header.entries("tensors") {
        let name = name.text().ok_or("a tensor has no name")?.to_owned();
        let wrong = |field: &str| format!("{field} of {name} cannot be read");
        let dims = fields.get("shape").and_then(numbers).ok_or_else(|| wrong("the shape"))?;
        let place = fields.get("data_offsets").and_then(numbers).ok_or_else(|| wrong("the place"))?;
        let dtype = fields.get("dtype").and_then(json).and_then(|dtype| serde_json::from_value::<DType>(dtype).ok());
        let dtype = dtype.ok_or_else(|| wrong("the dtype"))?;
        let [start, end] = place[..] else { return Err(wrong("the place")) };
        let len_bytes = end.checked_sub(start).ok_or_else(|| wrong("the place"))?;
        let expected = dims.iter().try_fold(dtype.size(), |len, dim| len.checked_mul(*dim));
        if !matches!(dtype, DType::QFloat(_)) && expected != Some(len_bytes) {
            return Err(format!("{name} has {len_bytes} bytes, which do not fit its shape {dims:?}"));
        }
        let id = match fields.get("param_id") {
            Some(Item::Uint(id)) => Some(*id),
            _ => None,
        };
        tensors.push((StoredTensor { name, dtype, dims, len_bytes, id }, start..end));
    }
    tensors.sort_by_key(|(_, place)| (place.start, place.end));
    Ok(tensors)
}

fn numbers(item: &Item) -> Option<Vec<usize>> {
    let Item::Array(items) = item else { return None };
    let number = |item: &Item| match item {
        Item::Uint(number) => usize::try_from(*number).ok(),
        _ => None,
    };
    items.iter().map(number).collect()
}

/// A dtype as Burn writes it: the name of a variant, or a map of it.
fn item(value: &Value) -> Result<Item, String> {
    Ok(match value {
        Value::Null => Item::Other(vec![NULL]),
        Value::String(text) => Item::Text(text.clone()),
        Value::Number(number) => Item::Uint(number.as_u64().ok_or("a dtype has a negative number")?),
        Value::Array(values) => Item::Array(values.iter().map(item).collect::<Result<_, _>>()?),
        Value::Object(fields) => {
            let entry = |(name, value): (&String, &Value)| Ok::<_, String>((Item::Text(name.clone()), item(value)?));
            Item::Map(fields.iter().map(entry).collect::<Result<_, _>>()?)
        }
        Value::Bool(flag) => Item::Other(vec![if *flag { TRUE } else { FALSE }]),
    })
}

/// The inverse of [`item`].
fn json(item: &Item) -> Option<Value> {
    Some(match item {
        Item::Uint(number) => Value::from(*number),
        Item::Text(text) => Value::from(text.as_str()),
        Item::Array(items) => Value::Array(items.iter().map(json).collect::<Option<_>>()?),
        Item::Map(entries) => {
            let entry = |(name, value): &(Item, Item)| Some((name.text()?.to_owned(), json(value)?));
            Value::Object(entries.iter().map(entry).collect::<Option<_>>()?)
        }
        Item::Other(bytes) => match bytes[..] {
            [NULL] => Value::Null,
            [flag @ (TRUE | FALSE)] => Value::Bool(flag == TRUE),
            _ => return None,
        },
    })
}
