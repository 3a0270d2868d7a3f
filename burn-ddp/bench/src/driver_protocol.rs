//! Conversation between the driver and the ranks of a contender: lines over a local socket, the same for ranks in Rust,
//! Python and C. A rank blocks in a read between rounds, so that it uses no CPU while others are measured.
//!
//! | driver | rank | |
//! |---|---|---|
//! | | `hello RANK` | once, when it is ready |
//! | `prepare BYTES COUNT` | `ok` | allocates COUNT buffers of BYTES each; with 0 bytes, steps are barriers |
//! | `round SEED SAMPLES PER_SAMPLE WARMUP LATE_RANK LATE_US` | `ok CPU_NS TIME_NS…` | fills the buffers, does WARMUP steps, then SAMPLES times PER_SAMPLE steps, then checks the results |
//! | `usage` | `ok RSS_BYTES PSS_BYTES FAULTS` | memory and page faults so far; sent only to ranks that train |
//! | `digest RUN PAUSE_US` | `ok DIGEST` | digest of random sums; sent only to ranks of this project's engines |
//! | `quit` | | the rank ends |
//!
//! Buffer `b` is filled with `1 + (5 (i mod 1021) + 3 rank + seed + b) mod 8` at element `i`, and used by steps `b`,
//! `b + COUNT`, … Before each sample LATE_RANK (-1: none) sleeps LATE_US. A rank that fails answers `error MESSAGE`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// An end of the conversation.
pub(crate) struct Lines {
    stream: BufReader<UnixStream>,
}

/// Times of a round on one rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankTimes {
    /// CPU time of the timed steps.
    pub(crate) cpu_ns: f64,
    /// Per sample, the mean time of its steps.
    pub(crate) ns: Vec<f64>,
}

/// Plan of a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundPlan {
    /// Seed of the inputs.
    pub(crate) seed: u64,
    /// Number of samples.
    pub(crate) samples: usize,
    /// Steps between two readings of the clock.
    pub(crate) per_sample: usize,
    /// Steps before the first sample.
    pub(crate) warmup: usize,
    /// Rank that comes late to each sample, and its delay.
    pub(crate) late: Option<(usize, Duration)>,
}

impl Lines {
    pub(crate) fn new(stream: UnixStream) -> Lines {
        Lines { stream: BufReader::new(stream) }
    }

    /// Connects to the driver.
    pub(crate) fn connect(path: &Path) -> Result<Lines> {
        let stream =
            UnixStream::connect(path).with_context(|| format!("cannot reach the driver at {}", path.display()))?;
        Ok(Lines::new(stream))
    }

    /// Sets the time that [`hear`](Self::hear) waits.
    pub(crate) fn set_patience(&self, patience: Duration) -> Result<()> {
        Ok(self.stream.get_ref().set_read_timeout(Some(patience))?)
    }

    pub(crate) fn say(&mut self, line: &str) -> Result<()> {
        self.stream
            .get_mut()
            .write_all(format!("{line}\n").as_bytes())
            .context("the other process closed the benchmark's socket")
    }

    /// The next line; `None` at the end.
    pub(crate) fn hear(&mut self) -> Result<Option<String>> {
        let mut line = String::new();
        let n = self.stream.read_line(&mut line).context("no answer on the benchmark's socket")?;
        Ok((n > 0).then(|| line.trim_end().to_owned()))
    }
}

impl RoundPlan {
    /// Number of all steps: the warm-up, the samples, and the checked step at the end.
    pub(crate) fn steps(&self) -> usize {
        self.warmup + self.samples * self.per_sample + 1
    }

    pub(crate) fn line(&self) -> String {
        let (late_rank, late_us) = self.late.map_or((-1, 0), |(rank, by)| (rank as i64, by.as_micros() as u64));
        format!("round {} {} {} {} {late_rank} {late_us}", self.seed, self.samples, self.per_sample, self.warmup)
    }

    /// Parses the words behind `round`.
    pub(crate) fn parse(words: &[&str]) -> Result<RoundPlan> {
        let numbers: Vec<i64> = words.iter().map(|word| word.parse()).collect::<Result<_, _>>()?;
        let [seed, samples, per_sample, warmup, late_rank, late_us] = numbers[..] else {
            bail!("a round has 6 numbers, not {}", numbers.len());
        };
        ensure!(samples >= 0 && per_sample > 0 && warmup >= 0 && late_us >= 0, "negative numbers in a round");
        Ok(RoundPlan {
            seed: seed as u64,
            samples: samples as usize,
            per_sample: per_sample as usize,
            warmup: warmup as usize,
            late: (late_rank >= 0).then_some((late_rank as usize, Duration::from_micros(late_us as u64))),
        })
    }
}

impl RankTimes {
    pub(crate) fn line(&self) -> String {
        let times: Vec<String> = self.ns.iter().map(|ns| format!("{ns:.1}")).collect();
        format!("ok {} {}", self.cpu_ns, times.join(" "))
    }

    pub(crate) fn parse(answer: &str) -> Result<RankTimes> {
        let mut numbers = answer.split_whitespace().skip(1).map(str::parse::<f64>);
        let cpu_ns = numbers.next().context("no CPU time")??;
        Ok(RankTimes { cpu_ns, ns: numbers.collect::<Result<_, _>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let late = Some((1, Duration::from_millis(200)));
        let plan = RoundPlan { seed: 7, samples: 3, per_sample: 100, warmup: 2, late };
        assert_eq!(plan.line(), "round 7 3 100 2 1 200000");
        let words: Vec<String> = plan.line().split(' ').skip(1).map(str::to_owned).collect();
        let back = RoundPlan::parse(&words.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        assert_eq!(back.line(), plan.line());
        let times = RankTimes { cpu_ns: 5.0, ns: vec![1.5, 2.0] };
        assert_eq!(RankTimes::parse(&times.line()).unwrap().ns, times.ns);
        assert!(RoundPlan::parse(&["1"]).is_err());
    }
}
