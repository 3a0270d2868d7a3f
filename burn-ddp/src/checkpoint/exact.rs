//! Values as JSON, without losing a bit of a number.
//!
//! `serde_json` reads some numbers one unit in the last place beside what was written. Those are written as
//! `{"$f64": "0.1…"}`, which the standard library reads exactly.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};

const KEY: &str = "$f64";

/// `value` as JSON.
///
/// # Errors
///
/// If it cannot be read again as what it was: numbers that are not finite, keys that are no texts.
pub(super) fn encode<V: Serialize + DeserializeOwned>(value: &V) -> Result<Value, String> {
    let tree = serde_json::to_value(value).map_err(|e| e.to_string())?;
    let encoded = map(tree.clone(), &|value| match &value {
        Value::Number(number) if !survives(number) => {
            Value::Object(Map::from_iter([(KEY.into(), number.to_string().into())]))
        }
        _ => value,
    });
    let text = encoded.to_string();
    let again: V = decode(&serde_json::from_str(&text).map_err(|e| e.to_string())?)?;
    match serde_json::to_value(&again) {
        Ok(read) if read == tree => Ok(encoded),
        _ => Err("it is not the same when it is read again".into()),
    }
}

/// The inverse of [`encode`].
pub(super) fn decode<V: DeserializeOwned>(value: &Value) -> Result<V, String> {
    let tree = map(value.clone(), &|value| exact(&value).unwrap_or(value));
    serde_json::from_value(tree).map_err(|e| e.to_string())
}

fn exact(value: &Value) -> Option<Value> {
    let object = value.as_object().filter(|object| object.len() == 1)?;
    let number = object.get(KEY)?.as_str()?.parse().ok()?;
    Some(Value::Number(Number::from_f64(number)?))
}

fn survives(number: &Number) -> bool {
    serde_json::from_str::<Number>(&number.to_string()).is_ok_and(|read| read == *number)
}

/// Applies `f` to every value in a tree, the innermost first.
fn map(value: Value, f: &impl Fn(Value) -> Value) -> Value {
    f(match value {
        Value::Array(items) => items.into_iter().map(|item| map(item, f)).collect(),
        Value::Object(entries) => entries.into_iter().map(|(key, value)| (key, map(value, f))).collect(),
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_keep_their_bits(numbers in prop::collection::vec(any::<u64>(), 0..50), seconds in any::<f32>()) {
            let numbers: Vec<f64> = numbers.into_iter().map(f64::from_bits).filter(|x| x.is_finite()).collect();
            let value = (numbers, seconds, u64::MAX, i64::MIN, "text".to_string(), None::<u8>);
            let text = encode(&value).unwrap().to_string();
            let read: (Vec<f64>, f32, u64, i64, String, Option<u8>) = decode(&serde_json::from_str(&text).unwrap()).unwrap();
            let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&read.0), bits(&value.0));
            prop_assert_eq!(read.1.to_bits(), value.1.to_bits());
            prop_assert_eq!((read.2, read.3, read.4, read.5), (value.2, value.3, value.4, value.5));
        }
    }

    #[test]
    fn what_json_cannot_hold_is_refused() {
        assert!(encode(&f64::NAN).is_err());
        assert!(encode(&vec![1.0, f64::INFINITY]).is_err());
        assert_eq!(encode(&Some(1.5)).unwrap(), serde_json::json!(1.5));
        let own = serde_json::json!({ "$f64": "1.5" });
        assert!(encode(&own).is_err(), "a value that looks like ours");
    }
}
