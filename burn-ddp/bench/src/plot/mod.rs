//! Plots in SVG, in builds with the crate feature `plot`.

#[cfg(feature = "plot")]
mod draw;
#[cfg(not(feature = "plot"))]
mod not_built;

use std::path::Path;

use anyhow::{Result, ensure};

#[cfg(feature = "plot")]
pub(crate) use draw::Plot;
#[cfg(not(feature = "plot"))]
pub(crate) use not_built::Plot;

/// A line of a plot: the points of one contender.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Refuses a plot that could not be drawn, before anything is measured.
pub(crate) fn check(path: Option<&Path>) -> Result<()> {
    ensure!(cfg!(feature = "plot") || path.is_none(), "--plot needs a build with `--features plot`");
    Ok(())
}
