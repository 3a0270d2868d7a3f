//! Which output of which rank goes to the console, and which to a file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::LaunchError;
use crate::relay::Output;

/// A choice of output streams, for all ranks or per local rank: torchrun's `--redirects` and `--tee`.
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

/// Where output goes, as the user wishes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) dir: Option<PathBuf>,
    /// To files, and not to the console.
    pub(crate) redirects: Option<Streams>,
    /// To files and the console.
    pub(crate) tee: Option<Streams>,
    /// Local ranks that the console shows; all if `None`.
    pub(crate) filter: Option<Vec<usize>>,
}

impl Wishes {
    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        if self.dir.is_none() && (self.redirects.is_some() || self.tee.is_some()) {
            let message = "--redirects and --tee write files: say where with --log-dir DIR";
            return Err(LaunchError::Usage(message.into()));
        }
        Ok(())
    }

    pub(crate) fn to_console(&self, local_rank: usize, output: Output) -> bool {
        let redirected = self.redirects.as_ref().is_some_and(|streams| streams.contains(local_rank, output));
        let tee = self.tee.as_ref().is_some_and(|streams| streams.contains(local_rank, output));
        let shown = self.filter.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        shown && (tee || !redirected)
    }

    /// A log directory without further words gets everything.
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

/// The directory of one job: `{log dir}/{name}`, where `{log dir}/latest` leads to. Logs of earlier jobs stay.
#[derive(Clone, Debug)]
pub(crate) struct JobDir(PathBuf);

impl JobDir {
    pub(crate) fn create(log_dir: &Path, name: &str) -> Result<Self, LaunchError> {
        let failed = |source| LaunchError::LogDir { path: log_dir.to_owned(), source };
        // Ranks may run in another directory; what is printed should be found from any.
        let log_dir = std::path::absolute(log_dir).map_err(failed)?;
        let dir = log_dir.join(name);
        fs::create_dir_all(&dir).map_err(failed)?;
        // Replaced in one step, and by every machine that shares the directory: there is always one.
        let link = log_dir.join(format!(".latest-{}-{}", name, std::process::id()));
        let linked = symlink(name, &link).and_then(|()| fs::rename(&link, log_dir.join("latest")));
        if let Err(error) = linked {
            tracing::warn!(%error, dir = %log_dir.display(), "no link `latest`");
            let _ = fs::remove_file(&link);
        }
        Ok(Self(dir))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Where the files of a generation lie.
    pub(crate) fn generation(&self, generation: u32) -> io::Result<PathBuf> {
        let dir = self.0.join(format!("generation-{generation}"));
        fs::create_dir_all(&dir)?;
        Ok(dir)
    }
}

/// The file of one output of one rank.
pub(crate) fn log_path(dir: &Path, rank: usize, output: Output) -> PathBuf {
    let name = if output == Output::Stdout { "stdout" } else { "stderr" };
    dir.join(format!("rank-{rank}.{name}.log"))
}

pub(crate) fn create_log(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).open(path)
}

/// `20261121-181814-1f3a09c2`: sorts by time, tells jobs of one second apart.
pub(crate) fn job_name(unix_seconds: u64, job_id: &str) -> String {
    let (days, rest) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day) = civil_from_days(days as i64);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    let short = job_id.get(..8).unwrap_or(job_id);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}-{short}")
}

/// Days since 1970 as year, month, day in UTC (Howard Hinnant's algorithm).
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day_of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Output::{Stderr, Stdout};

    fn wishes(redirects: Option<&str>, tee: Option<&str>) -> Wishes {
        let streams = |text: Option<&str>| text.map(|text| text.parse().unwrap());
        Wishes { dir: Some("logs".into()), redirects: streams(redirects), tee: streams(tee), filter: None }
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
            let wishes = wishes(redirects, tee);
            let found = (wishes.to_console(rank, output), wishes.to_file(rank, output));
            assert_eq!(found, expected, "redirects {redirects:?}, tee {tee:?}, rank {rank}, {output:?}");
        }
    }

    #[test]
    fn a_filter_hides_from_the_console_alone() {
        let wishes = Wishes { filter: Some(vec![1]), ..wishes(None, None) };
        assert!(!wishes.to_console(0, Stdout) && wishes.to_file(0, Stdout) && wishes.to_console(1, Stdout));
    }

    #[test]
    fn wrong_streams_are_refused() {
        for text in ["", "4", "-1", "both", "0:4", "x:1", "0:1,2", ","] {
            assert!(text.parse::<Streams>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn jobs_are_named_by_time() {
        assert_eq!(job_name(0, "0123456789"), "19700101-000000-01234567");
        assert_eq!(job_name(1_709_210_096, "0123"), "20240229-123456-0123");
    }
}
