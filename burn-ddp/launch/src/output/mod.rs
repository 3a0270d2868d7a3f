//! Output of the ranks: which of it goes to the console and which to files, and the thread that passes it on.

pub(crate) mod lines;
pub(crate) mod log_dir;
pub(crate) mod relay;
pub(crate) mod settings;
