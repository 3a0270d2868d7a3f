//! Turns events of the ranks into notices for the user, each printed once although every rank reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use burn_ddp_comm::post_mortem::Event;

use crate::node_outcome::Blame;
use crate::nodes::GenerationPlan;
use crate::report::outcome_text::{ranks, seconds};

/// Destination of notices while the job runs: `tracing`, and the caller's function if there is one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NoticeSink(pub(crate) Option<fn(&str)>);

impl NoticeSink {
    pub(crate) fn show(&self, text: &str) {
        tracing::info!("{text}");
        if let Some(show) = self.0 {
            show(text);
        }
    }
}

/// Largest number of reported causes that are stored; the first one decides.
const BLAMES: usize = 16;

#[derive(Default)]
pub(crate) struct Notices {
    pub(crate) blames: Vec<Blame>,
    suspects: BTreeSet<usize>,
    /// By the ranks that are waited for: length of the wait in ms at its last notice.
    stalls: BTreeMap<Vec<usize>, u64>,
}

impl Notices {
    /// Notice for an event; `None` if the user already had it from another rank.
    pub(crate) fn notice(&mut self, event: Event, plan: &GenerationPlan) -> Option<String> {
        match event {
            Event::Failed { rank, culprit, cause, at } => {
                if self.blames.len() < BLAMES {
                    self.blames.push(Blame { by: rank, culprit, cause, at });
                }
                None
            }
            Event::Suspect { rank, peer, silent_ms, .. } => {
                let silent = seconds(Duration::from_millis(silent_ms));
                let host = plan.node_of(peer).map(|node| node.host.as_str()).unwrap_or("?");
                let text = || format!("rank {peer} (host {host}) is silent for {silent}, as rank {rank} reports");
                self.suspects.insert(peer).then(text)
            }
            Event::Recovered { peer, .. } => self.suspects.remove(&peer).then(|| format!("rank {peer} is heard again")),
            Event::Stall { rank, waiting_for, call, since_ms, .. } => {
                let last = self.stalls.entry(waiting_for.clone()).or_default();
                // Every rank waits about as long; the notice is repeated after twice the time.
                if since_ms < 2 * *last {
                    return None;
                }
                *last = since_ms;
                let waited = seconds(Duration::from_millis(since_ms));
                Some(format!("rank {rank} has waited {waited} for {} in {call}", ranks(&waiting_for)))
            }
            Event::CanStop { .. } | Event::Stopping { .. } | Event::Saved { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> GenerationPlan {
        GenerationPlan { job_id: "j".into(), job_name: "n".into(), host: "h".into(), port: 1, nodes: Vec::new() }
    }

    #[test]
    fn a_suspicion_of_many_is_shown_once_until_it_is_over() {
        let mut notices = Notices::default();
        let mut say = |event| notices.notice(event, &plan());
        let suspect = |rank| Event::Suspect { rank, peer: 2, silent_ms: 2100, at: 0 };
        assert_eq!(say(suspect(0)).unwrap(), "rank 2 (host ?) is silent for 2.1 s, as rank 0 reports");
        assert_eq!(say(suspect(1)), None);
        assert_eq!(say(Event::Recovered { rank: 1, peer: 2, at: 0 }).unwrap(), "rank 2 is heard again");
        assert_eq!(say(Event::Recovered { rank: 0, peer: 2, at: 0 }), None);
        assert!(say(suspect(1)).is_some());
    }

    #[test]
    fn a_stall_is_shown_again_when_it_took_twice_as_long() {
        let mut notices = Notices::default();
        let mut say = |rank, since_ms| {
            let event = Event::Stall { rank, waiting_for: vec![1, 3], call: "barrier #7".into(), since_ms, at: 0 };
            notices.notice(event, &plan())
        };
        assert_eq!(say(0, 30_000).unwrap(), "rank 0 has waited 30.0 s for ranks 1, 3 in barrier #7");
        assert_eq!(say(2, 30_500), None);
        assert!(say(2, 60_000).is_some());
    }
}
