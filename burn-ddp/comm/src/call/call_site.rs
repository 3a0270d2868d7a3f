//! Source line from which a call was made.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Source line of a call. Errors show it; ranks do not compare it.
#[derive(Clone, Debug, Default)]
pub enum CallSite {
    /// An unknown line.
    #[default]
    Unknown,
    /// A line of this program.
    Here(&'static Location<'static>),
    /// A line of this program at which a model was wrapped; the call is for that model. See
    /// [`ProcessGroup::attribute_to`](crate::ProcessGroup::attribute_to).
    Wrapped(&'static Location<'static>),
    /// Text of a line of another rank's program, as this type shows it.
    There(Arc<str>),
}

/// Mark behind a line at which a model was wrapped. At the end, since long texts are cut at their beginning.
const WRAPPED: &str = " (wrap)";

impl CallSite {
    /// True for a line at which a model was wrapped.
    pub(super) fn is_wrapped(&self) -> bool {
        self.to_string().ends_with(WRAPPED)
    }

    /// The end of a sentence about the call: `called at src/main.rs:10:5`.
    pub(super) fn clause(&self) -> String {
        let text = self.to_string();
        match text.strip_suffix(WRAPPED) {
            Some(line) => format!("of the model wrapped at {line}"),
            None => format!("called at {text}"),
        }
    }
}

/// The line as `file:line:column`, with ` (wrap)` behind it where a model was wrapped.
impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallSite::Unknown => f.write_str("an unknown line"),
            CallSite::Here(location) => location.fmt(f),
            CallSite::Wrapped(location) => write!(f, "{location}{WRAPPED}"),
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
