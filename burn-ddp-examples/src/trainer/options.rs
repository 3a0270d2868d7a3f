//! The command line of the MNIST trainer.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, ensure};
use clap::Parser;

use crate::cli::check_writable;

/// Trains a small convolutional network on handwritten digits, data-parallel.
///
/// Run plainly it starts its ranks itself; under burnrun or torchrun it joins their job.
#[derive(Parser, Debug, Clone)]
#[command(version, allow_negative_numbers = true)]
pub struct Args {
    /// Ranks to start on this machine; under a launcher the launcher decides [default: 2]
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,

    /// Passes over the training data
    #[arg(long, default_value_t = 6, value_name = "N")]
    pub epochs: usize,

    /// Items per step of each rank
    #[arg(long, default_value_t = 16, value_name = "ITEMS")]
    pub batch_size: usize,

    /// Highest learning rate; it rises during the first tenth of all steps, then falls to zero
    #[arg(long, default_value_t = 1e-3, value_name = "RATE")]
    pub lr: f64,

    /// Seed of the weights, of the order of the data and of dropout; the same seed gives the same run
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Threads per rank that prepare batches
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub num_workers: usize,

    /// Do not drop activations: then ranks × batch size is all that matters, and 1 × 32 learns like 2 × 16
    #[arg(long)]
    pub no_dropout: bool,

    /// `sample`: 5,000 digits that come with the program. `full`: MNIST, downloaded by Burn once (needs
    /// `--features download`). Or a folder with MNIST's
    /// own four files, plain or .gz
    #[arg(long, default_value = "sample", value_name = "sample|full|DIR")]
    pub data: Data,

    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub summary: Option<PathBuf>,

    /// Save the trained model; plain Burn reads the file
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

/// Where the digits come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// Those that this crate carries.
    Sample,
    /// Burn's download of the whole database.
    Full,
    /// The database's files in a folder.
    Dir(PathBuf),
}

impl FromStr for Data {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "sample" => Data::Sample,
            "full" => Data::Full,
            dir => Data::Dir(dir.into()),
        })
    }
}

impl Args {
    /// Refuses what cannot work, before any rank is started.
    ///
    /// # Errors
    ///
    /// The first value that makes no sense, by the name of its option.
    pub fn check(&self) -> Result<()> {
        ensure!(self.nproc != Some(0), "--nproc 0: a job has at least one rank");
        ensure!(self.epochs > 0, "--epochs 0: there is nothing to train");
        ensure!(self.batch_size > 0, "--batch-size 0: a step needs at least one item");
        ensure!(self.lr.is_finite() && self.lr > 0.0, "--lr {}: a learning rate is a positive number", self.lr);
        ensure!(
            self.data != Data::Full || cfg!(feature = "download"),
            "--data full: this program was built without the download; build it with `--features download`"
        );
        if let Data::Dir(dir) = &self.data {
            ensure!(
                dir.is_dir(),
                "--data {}: there is no such folder (to use what the program carries, say `sample`; to download, `full`)",
                dir.display()
            );
        }
        for (option, file) in [("--summary", &self.summary), ("--save", &self.save)] {
            if let Some(file) = file {
                check_writable(option, file)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn check(line: &str) -> Result<()> {
        Args::try_parse_from(std::iter::once("mnist").chain(line.split_whitespace()))?.check()
    }

    #[test]
    fn clap_accepts_the_definition() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_defaults_are_valid() {
        check("").unwrap();
        check("--data sample --nproc 3 --summary s.json").unwrap();
        assert_eq!(check("--data full").is_ok(), cfg!(feature = "download"));
    }

    #[test]
    fn nonsense_is_refused_by_the_name_of_its_option() {
        for line in [
            "--nproc 0",
            "--epochs 0",
            "--batch-size 0",
            "--lr 0",
            "--lr -1",
            "--lr nan",
            "--lr inf",
            "--data /no/such/folder",
            "--summary /no/such/folder/s.json",
            "--save /",
            "--seed -1",
            "--num-workers x",
        ] {
            let error = check(line).unwrap_err().to_string();
            let option = line.split_whitespace().next().unwrap();
            assert!(error.contains(option), "{line}: {error}");
        }
    }
}
