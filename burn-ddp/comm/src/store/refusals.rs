//! Connections that a store refused since they lacked the job's key: counted, and logged from time to time.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Time between two lines in the log.
const PAUSE: Duration = Duration::from_secs(10);

/// Refused connections of one store.
#[derive(Clone, Debug, Default)]
pub(super) struct Refusals {
    /// Connections that claimed to be of this job but did not know its secret.
    other_secret: u64,
    /// Connections of another job, or of another restart of this one.
    other_job: u64,
    /// Source of the latest refused connection.
    last: Option<IpAddr>,
    logged: Option<Instant>,
}

impl Refusals {
    /// Counts a connection from `source`, which claimed to be of this job or not.
    pub(super) fn note(&mut self, same_job: bool, source: Option<IpAddr>) {
        let count = if same_job { &mut self.other_secret } else { &mut self.other_job };
        *count += 1;
        self.last = source;
        let now = Instant::now();
        if self.logged.is_none_or(|at| now >= at + PAUSE) {
            self.logged = Some(now);
            tracing::warn!("the store has refused {self}");
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.other_secret + self.other_job == 0
    }
}

/// `3 connections with another secret and 1 of another job or restart, the last from 10.0.0.2`
impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kinds = Vec::new();
        for (count, what) in [(self.other_secret, "with another secret"), (self.other_job, "of another job or restart")]
        {
            let s = if count == 1 { "" } else { "s" };
            kinds.extend((count > 0).then(|| format!("{count} connection{s} {what}")));
        }
        f.write_str(&kinds.join(" and "))?;
        match self.last {
            Some(last) => write!(f, ", the last from {last}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_and_rarely_logged() {
        let mut refusals = Refusals::default();
        assert!(refusals.is_empty());
        refusals.note(true, Some([10, 0, 0, 2].into()));
        assert_eq!(refusals.to_string(), "1 connection with another secret, the last from 10.0.0.2");
        let logged = refusals.logged;
        for _ in 0..1000 {
            refusals.note(false, None);
        }
        assert_eq!(
            refusals.to_string(),
            "1 connection with another secret and 1000 connections of another job or restart"
        );
        assert!(refusals.logged == logged || refusals.logged.is_some_and(|at| at >= logged.unwrap() + PAUSE));
    }
}
