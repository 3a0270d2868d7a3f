//! Parsers of the values of single variables.

use crate::{Error, Result};

pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads a number; `None` if the variable is not set.
pub(super) fn number<N: std::str::FromStr>(name: &str, lookup: Lookup<'_>) -> Result<Option<N>> {
    let Some(text) = lookup(name) else { return Ok(None) };
    let number = text
        .trim()
        .parse()
        .map_err(|_| Error::environment(format!("{name}={text:?} is not a number (0, 1, 2, ...)")))?;
    Ok(Some(number))
}

pub(super) fn flag(name: &str, lookup: Lookup<'_>) -> Result<bool> {
    match lookup(name).as_deref().map(str::trim) {
        None | Some("" | "0" | "false" | "False") => Ok(false),
        Some("1" | "true" | "True") => Ok(true),
        Some(other) => Err(Error::environment(format!("{name}={other:?} is neither 1 nor 0"))),
    }
}

/// Reads a text without white space around it; `None` if nothing is left.
pub(super) fn text(name: &str, lookup: Lookup<'_>) -> Option<String> {
    lookup(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

pub(super) fn needed<T>(value: Option<T>, name: &str) -> Result<T> {
    value.ok_or_else(|| Error::environment(format!("{name} is not set")))
}

/// `A is`, or `A, B and C are`.
pub(super) fn listed(names: &[&str]) -> String {
    match names {
        [name] => format!("{name} is"),
        [head @ .., last] => format!("{} and {last} are", head.join(", ")),
        [] => "none is".to_owned(),
    }
}
