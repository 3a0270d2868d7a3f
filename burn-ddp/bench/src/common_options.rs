//! Options of all comparisons with peers.

use clap::Args;

use crate::contender::Programs;

/// Options that sub-commands share.
#[derive(Args, Debug)]
pub(crate) struct CommonOptions {
    /// Prints one JSON object a line instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) programs: Programs,
}
