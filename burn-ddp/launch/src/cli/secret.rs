//! `burnrun secret`: makes the secret that the machines of one job share.

use std::ffi::OsString;
use std::path::PathBuf;

use burn_ddp_comm::Secret;
use clap::Parser;

/// Makes a new secret for jobs on several machines
///
/// Anyone who can read the file can join the job and change its training. Copy it over a channel that you trust, such
/// as scp, and keep it readable only by yourself.
#[derive(Debug, Parser)]
#[command(name = "burnrun secret", bin_name = "burnrun secret")]
struct Args {
    /// The file to write; it must not exist yet
    file: PathBuf,
}

pub(super) fn main(words: &[OsString]) -> i32 {
    let args: Args = super::parse(words);
    match Secret::generate().and_then(|secret| secret.write_new(&args.file)) {
        Ok(()) => {
            let file = std::path::absolute(&args.file).unwrap_or(args.file);
            let file = file.display();
            super::say(&format!(
                "wrote {file}; copy it to every machine (scp -p {file} HOST:{file}) \
                 and start burnrun with --secret-file {file}"
            ));
            0
        }
        Err(error) => {
            super::say(&error.to_string());
            1
        }
    }
}
