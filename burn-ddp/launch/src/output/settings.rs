//! Settings of the ranks' output: which streams go to the console, and which to a file.

use std::path::PathBuf;
use std::str::FromStr;

use crate::error::LaunchError;
use crate::output::relay::Output;

/// A choice of output streams, for all ranks or per local rank, in the format of torchrun's `--redirects` and `--tee`.
///
/// ```
/// use burn_ddp_launch::Streams;
///
/// assert!("3".parse::<Streams>().is_ok());         // stdout and stderr of all ranks
/// assert!("0:1,2:3".parse::<Streams>().is_ok());   // rank 0's stdout; rank 2's stdout and stderr
/// assert!("4".parse::<Streams>().is_err());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    all: u8,
    by_local_rank: Vec<(usize, u8)>,
}

impl Streams {
    const BOTH: Streams = Streams { all: 3, by_local_rank: Vec::new() };

    fn contains(&self, local_rank: usize, output: Output) -> bool {
        let own = self.by_local_rank.iter().rev().find(|(rank, _)| *rank == local_rank);
        let streams = own.map_or(self.all, |(_, streams)| *streams);
        streams & if output == Output::Stdout { 1 } else { 2 } != 0
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let stream = |text: &str| match text.trim() {
            "0" => Ok(0),
            "1" => Ok(1),
            "2" => Ok(2),
            "3" => Ok(3),
            _ => Err("expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or a list by local rank such as 0:3,1:2"),
        };
        if !text.contains(':') {
            return Ok(Streams { all: stream(text)?, by_local_rank: Vec::new() });
        }
        let pair = |part: &str| {
            let (rank, streams) = part.split_once(':').ok_or("in a list by local rank every part is RANK:STREAMS")?;
            let rank = rank.trim().parse().map_err(|_| "a local rank is a number: 0, 1, 2, …")?;
            Ok::<_, &str>((rank, stream(streams)?))
        };
        let by_local_rank = text.split(',').map(pair).collect::<Result<_, _>>()?;
        Ok(Streams { all: 0, by_local_rank })
    }
}

/// Destinations of the ranks' output.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputSettings {
    pub(crate) dir: Option<PathBuf>,
    /// Streams that go to files, and not to the console.
    pub(crate) redirects: Option<Streams>,
    /// Streams that go to files and the console.
    pub(crate) tee: Option<Streams>,
    /// Local ranks that the console shows; all if `None`.
    pub(crate) filter: Option<Vec<usize>>,
}

impl OutputSettings {
    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        if self.dir.is_none() && (self.redirects.is_some() || self.tee.is_some()) {
            let message = "--redirects and --tee write files: say where with --log-dir DIR";
            return Err(LaunchError::Usage(message.into()));
        }
        Ok(())
    }

    /// A local rank that the settings name although there are only `nproc`.
    pub(crate) fn missing_rank(&self, nproc: usize) -> Option<usize> {
        let streams = self.redirects.iter().chain(&self.tee).flat_map(|streams| &streams.by_local_rank);
        let named = streams.map(|(rank, _)| rank).chain(self.filter.iter().flatten());
        named.copied().find(|rank| *rank >= nproc)
    }

    pub(crate) fn to_console(&self, local_rank: usize, output: Output) -> bool {
        let redirected = self.redirects.as_ref().is_some_and(|streams| streams.contains(local_rank, output));
        let tee = self.tee.as_ref().is_some_and(|streams| streams.contains(local_rank, output));
        let shown = self.filter.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        shown && (tee || !redirected)
    }

    /// True if a stream goes to a file. With a log directory, and neither `redirects` nor `tee`, every stream does.
    pub(crate) fn to_file(&self, local_rank: usize, output: Output) -> bool {
        if self.dir.is_none() {
            return false;
        }
        let (redirects, tee) = match (&self.redirects, &self.tee) {
            (None, None) => (&Streams::BOTH, &Streams::BOTH),
            (redirects, tee) => (redirects.as_ref().unwrap_or(&NONE), tee.as_ref().unwrap_or(&NONE)),
        };
        redirects.contains(local_rank, output) || tee.contains(local_rank, output)
    }
}

static NONE: Streams = Streams { all: 0, by_local_rank: Vec::new() };

#[cfg(test)]
mod tests {
    use super::*;
    use Output::{Stderr, Stdout};

    fn settings(redirects: Option<&str>, tee: Option<&str>) -> OutputSettings {
        let streams = |text: Option<&str>| text.map(|text| text.parse().unwrap());
        OutputSettings { dir: Some("logs".into()), redirects: streams(redirects), tee: streams(tee), filter: None }
    }

    #[test]
    fn redirects_and_tee_mean_what_they_mean_to_torchrun() {
        // (redirects, tee) → local rank, output → (console, file)
        for (redirects, tee, rank, output, expected) in [
            (None, None, 0, Stdout, (true, true)),
            (Some("3"), None, 0, Stderr, (false, true)),
            (Some("1"), None, 0, Stderr, (true, false)),
            (Some("0"), None, 0, Stdout, (true, false)),
            (None, Some("2"), 5, Stderr, (true, true)),
            (None, Some("2"), 5, Stdout, (true, false)),
            (Some("3"), Some("0:3"), 0, Stdout, (true, true)),
            (Some("3"), Some("0:3"), 1, Stdout, (false, true)),
            (Some("0:1,1:2"), None, 1, Stderr, (false, true)),
            (Some("0:1,1:2"), None, 2, Stderr, (true, false)),
        ] {
            let settings = settings(redirects, tee);
            let found = (settings.to_console(rank, output), settings.to_file(rank, output));
            assert_eq!(found, expected, "redirects {redirects:?}, tee {tee:?}, rank {rank}, {output:?}");
        }
    }

    #[test]
    fn a_filter_hides_from_the_console_alone() {
        let settings = OutputSettings { filter: Some(vec![1]), ..settings(None, None) };
        assert!(!settings.to_console(0, Stdout) && settings.to_file(0, Stdout) && settings.to_console(1, Stdout));
    }

    #[test]
    fn wrong_streams_are_refused() {
        for text in ["", "4", "-1", "both", "0:4", "x:1", "0:1,2", ","] {
            assert!(text.parse::<Streams>().is_err(), "{text:?}");
        }
    }
}
