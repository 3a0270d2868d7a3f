//! Line from which a call was made.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Line of a call. Shown, never compared.
#[derive(Clone, Debug, Default)]
pub enum CallSite {
    /// An unknown line.
    #[default]
    Unknown,
    /// A line of this program.
    Here(&'static Location<'static>),
    /// A line of another rank's program, as `file:line:column`.
    There(Arc<str>),
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallSite::Unknown => f.write_str("an unknown line"),
            CallSite::Here(location) => location.fmt(f),
            CallSite::There(text) => f.write_str(text),
        }
    }
}

impl From<&str> for CallSite {
    fn from(text: &str) -> CallSite {
        CallSite::There(text.into())
    }
}

impl From<&'static Location<'static>> for CallSite {
    fn from(location: &'static Location<'static>) -> CallSite {
        CallSite::Here(location)
    }
}

impl PartialEq for CallSite {
    fn eq(&self, other: &CallSite) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for CallSite {}

impl Serialize for CallSite {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CallSite {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<CallSite, D::Error> {
        String::deserialize(deserializer).map(|text| CallSite::There(text.into()))
    }
}
