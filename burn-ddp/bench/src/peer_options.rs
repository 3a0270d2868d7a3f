//! Options that the comparisons with peers share.

use clap::Args;

use crate::contender::Programs;

/// Options that sub-commands share.
#[derive(Args, Debug)]
pub(crate) struct PeerOptions {
    /// Prints one JSON object per line instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) programs: Programs,
}
