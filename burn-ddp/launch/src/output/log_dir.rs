//! The directory of a job's logs and reports.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::error::LaunchError;
use crate::output::relay::Output;

/// The directory of one job: `{log dir}/{name}`, to which `{log dir}/latest` links. Logs of earlier jobs stay.
#[derive(Clone, Debug)]
pub(crate) struct JobDir(PathBuf);

impl JobDir {
    pub(crate) fn create(log_dir: &Path, name: &str) -> Result<Self, LaunchError> {
        let failed = |source| LaunchError::LogDir { path: log_dir.to_owned(), source };
        // Absolute: ranks may run in another directory, and printed paths must be valid from every directory.
        let log_dir = std::path::absolute(log_dir).map_err(failed)?;
        let dir = log_dir.join(name);
        fs::create_dir_all(&dir).map_err(failed)?;
        // The link is replaced in one step, since every machine that shares the directory replaces it and readers must
        // always find one.
        let link = log_dir.join(format!(".latest-{}-{}", name, std::process::id()));
        let linked = symlink(name, &link).and_then(|()| fs::rename(&link, log_dir.join("latest")));
        if let Err(error) = linked {
            tracing::warn!(%error, dir = %log_dir.display(), "the link `latest` cannot be made");
            let _ = fs::remove_file(&link);
        }
        Ok(Self(dir))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Directory of a generation's files, created if needed.
    pub(crate) fn generation(&self, generation: u32) -> io::Result<PathBuf> {
        let dir = self.0.join(format!("generation-{generation}"));
        fs::create_dir_all(&dir)?;
        Ok(dir)
    }
}

/// Path of the log of one output of one rank.
pub(crate) fn log_path(dir: &Path, rank: usize, output: Output) -> PathBuf {
    let name = if output == Output::Stdout { "stdout" } else { "stderr" };
    dir.join(format!("rank-{rank}.{name}.log"))
}

pub(crate) fn create_log(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).open(path)
}

/// `20261121-181814-1f3a09c2`: sorts by time, and differs for jobs that start in the same second.
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

    #[test]
    fn jobs_are_named_by_time() {
        assert_eq!(job_name(0, "0123456789"), "19700101-000000-01234567");
        assert_eq!(job_name(1_709_210_096, "0123"), "20240229-123456-0123");
    }
}
