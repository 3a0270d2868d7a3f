//! Stand-in for plots in builds without the feature `plot`.

use std::path::Path;

use anyhow::Result;

use super::Line;

/// A plot that is never drawn: [`check`](super::check) refuses it.
pub(crate) struct Plot;

impl Plot {
    pub(crate) fn new(_title: &str) -> Plot {
        Plot
    }

    pub(crate) fn panel(self, _x: &str, _y: &str, _lines: Vec<Line>) -> Plot {
        self
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        super::check(Some(path))
    }
}
