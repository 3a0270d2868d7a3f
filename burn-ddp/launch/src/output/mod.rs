//! Output of the ranks: which streams go to the console and which to files, and the thread that passes them on.

pub(crate) mod lines;
pub(crate) mod log_dir;
pub(crate) mod relay;
pub(crate) mod settings;
