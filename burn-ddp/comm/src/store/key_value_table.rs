//! Keys and values of a store, and limits on them. Plain data: server and memory store add waits and locks.

use std::collections::BTreeMap;

use super::{KEY_CAP, VALUE_CAP};

/// Most bytes of keys and values a store holds.
const TOTAL_CAP: usize = 256 * 1024 * 1024;
/// Bytes that an entry counts for besides key and value, so that empty values are not free.
const ENTRY_BYTES: usize = 64;

/// Keys and values. The errors of its functions are sentences for the caller.
#[derive(Debug, Default)]
pub(crate) struct Table {
    values: BTreeMap<String, Vec<u8>>,
    bytes: usize,
}

impl Table {
    pub(crate) fn set(&mut self, key: &str, value: &[u8]) -> Result<(), String> {
        check(key, value)?;
        let old = self.values.get(key).map_or(0, |old| cost(key, old));
        let bytes = self.bytes - old + cost(key, value);
        if bytes > TOTAL_CAP {
            return Err(format!("the store is full: it holds {} of at most {TOTAL_CAP} bytes", self.bytes));
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    /// Removes the keys that begin with `prefix`.
    pub(crate) fn remove(&mut self, prefix: &str) {
        let mut behind = self.values.split_off(prefix);
        while let Some(first) = behind.first_entry().filter(|first| first.key().starts_with(prefix)) {
            let (key, value) = first.remove_entry();
            self.bytes -= cost(&key, &value);
        }
        self.values.append(&mut behind);
    }

    pub(crate) fn get(&self, key: &str) -> Result<Option<&[u8]>, String> {
        check(key, &[])?;
        Ok(self.values.get(key).map(Vec::as_slice))
    }

    pub(crate) fn set_new(&mut self, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>, String> {
        match self.get(key)? {
            Some(old) => Ok(Some(old.to_vec())),
            None => self.set(key, value).map(|()| None),
        }
    }

    pub(crate) fn add(&mut self, key: &str, delta: i64) -> Result<i64, String> {
        let old = match self.get(key)? {
            None => 0,
            Some(text) => str::from_utf8(text)
                .ok()
                .and_then(|text| text.parse::<i64>().ok())
                .ok_or_else(|| format!("{key:?} does not hold a number to add to"))?,
        };
        let sum = old.checked_add(delta).ok_or_else(|| format!("{key:?}: {old} + {delta} overflows"))?;
        self.set(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }

    pub(crate) fn keys(&self, prefix: &str) -> Result<Vec<String>, String> {
        check(prefix, &[])?;
        let mut bytes = 0;
        let mut keys = Vec::new();
        for key in self.values.range(prefix.to_owned()..).map(|(key, _)| key).take_while(|key| key.starts_with(prefix))
        {
            bytes += key.len() + 4;
            if bytes > VALUE_CAP {
                return Err(format!("the list of keys that begin with {prefix:?} is longer than {VALUE_CAP} bytes"));
            }
            keys.push(key.clone());
        }
        Ok(keys)
    }
}

/// Bytes that an entry counts for.
fn cost(key: &str, value: &[u8]) -> usize {
    ENTRY_BYTES + key.len() + value.len()
}

/// Checks that key and value are short enough.
pub(crate) fn check(key: &str, value: &[u8]) -> Result<(), String> {
    if key.len() > KEY_CAP {
        return Err(format!("a key of {} bytes; at most {KEY_CAP} are accepted", key.len()));
    }
    if value.len() > VALUE_CAP {
        return Err(format!("the value of {key:?} has {} bytes; at most {VALUE_CAP} are stored", value.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_fills_up_and_replacing_does_not_count_twice() {
        let mut table = Table::default();
        let value = vec![0; VALUE_CAP];
        let stored = (0..).take_while(|i| table.set(&format!("k{i}"), &value).is_ok()).count();
        assert_eq!(stored, 255, "256 MiB less the keys");
        for _ in 0..10 {
            table.set("k0", &value).unwrap();
        }
        assert!(table.set("another", &value).unwrap_err().contains("full"));
        table.set("k0", b"").unwrap();
        table.set("another", &value).unwrap();
    }

    #[test]
    fn what_is_removed_makes_room() {
        let mut table = Table::default();
        for key in ["/", "0/a", "0/b", "00", "1/a"] {
            table.set(key, b"value").unwrap();
        }
        table.remove("0/");
        assert_eq!(table.keys("").unwrap(), ["/", "00", "1/a"]);
        assert_eq!(table.bytes, cost("/", b"value") + cost("00", b"value") + cost("1/a", b"value"));
        table.remove("");
        assert_eq!((table.bytes, table.values.len()), (0, 0));
    }

    #[test]
    fn adding_needs_a_number_and_room() {
        let mut table = Table::default();
        assert_eq!(table.add("n", i64::MAX), Ok(i64::MAX));
        assert!(table.add("n", 1).unwrap_err().contains("overflows"));
        assert_eq!(table.get("n").unwrap(), Some(i64::MAX.to_string().as_bytes()));
        table.set("text", b"x").unwrap();
        assert!(table.add("text", 1).unwrap_err().contains("number"));
    }

    #[test]
    fn keys_are_those_with_the_prefix() {
        let mut table = Table::default();
        for key in ["a/2", "a/1", "a", "ab", "b"] {
            table.set(key, b"").unwrap();
        }
        assert_eq!(table.keys("a/").unwrap(), ["a/1", "a/2"]);
        assert_eq!(table.keys("").unwrap().len(), 5);
        assert_eq!(table.keys("zzz").unwrap(), [""; 0]);
    }
}
