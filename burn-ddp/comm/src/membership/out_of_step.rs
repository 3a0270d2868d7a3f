//! Ranks out of step: a rank goes past the step at which a peer stopped, for example a batch of a data loader.

use std::collections::BTreeMap;

use super::peer_info::PeerInfo;
use super::step_position::{Progress, Track};
use crate::Error;

/// Most epochs of one track that are remembered. Ranks are never this far apart, since collectives keep them together.
const MAX_EPOCHS: usize = 1024;

/// Most runs of one loader that are remembered.
const MAX_RUNS: usize = 64;

/// Positions and stops of the ranks, per track and epoch.
#[derive(Debug, Default)]
pub(crate) struct Tracks {
    epochs: BTreeMap<(Track, u32), Epoch>,
}

#[derive(Debug, Default)]
struct Epoch {
    /// Last step that each rank of this process has reached.
    reached: BTreeMap<usize, u32>,
    /// Step at which each rank stopped, with its name for the track.
    stops: BTreeMap<usize, (u32, String)>,
}

impl Tracks {
    /// Notes that `rank` has reached step `at` of `track`. Returns the error if a peer has stopped before that step.
    pub(crate) fn advance(&mut self, rank: usize, track: Track, at: Progress, peers: &[PeerInfo]) -> Option<Error> {
        let epoch = self.epoch(track, at.epoch);
        let furthest = epoch.reached.entry(rank).or_insert(at.step);
        *furthest = at.step.max(*furthest);
        epoch.conflict(track, at.epoch, peers)
    }

    /// Notes that `rank` has stopped `track`, which errors call `what`, at step `at`. Returns the error if a peer has
    /// already gone past that step.
    pub(crate) fn stop(
        &mut self,
        rank: usize,
        track: Track,
        at: Progress,
        what: &str,
        peers: &[PeerInfo],
    ) -> Option<Error> {
        let epoch = self.epoch(track, at.epoch);
        epoch.stops.entry(rank).or_insert_with(|| (at.step, what.to_string()));
        epoch.conflict(track, at.epoch, peers)
    }

    /// Last stop of `rank` on each track, with its name of the track.
    pub(crate) fn stops_of(&self, rank: usize) -> Vec<(Track, Progress, String)> {
        let mut last: BTreeMap<Track, (Progress, &String)> = BTreeMap::new();
        for ((track, number), epoch) in &self.epochs {
            if let Some((step, what)) = epoch.stops.get(&rank) {
                last.insert(*track, (Progress { epoch: *number, step: *step }, what));
            }
        }
        last.into_iter().map(|(track, (at, what))| (track, at, what.clone())).collect()
    }

    /// The entry of the epoch `number`. A new entry may replace that of the track's oldest epoch.
    fn epoch(&mut self, track: Track, number: u32) -> &mut Epoch {
        let key = (track, number);
        if !self.epochs.contains_key(&key) && self.epochs.range((track, 0)..=(track, u32::MAX)).count() >= MAX_EPOCHS {
            let oldest = self.epochs.range((track, 0)..).next().map(|(key, _)| *key);
            oldest.map(|oldest| self.epochs.remove(&oldest));
        }
        self.forget_old_runs(track);
        self.epochs.entry(key).or_default()
    }
}

impl Tracks {
    /// Makes room for a new run of a loader by forgetting its oldest run.
    fn forget_old_runs(&mut self, track: Track) {
        let (first, last) = (track.with_run(0), track.with_run(u32::MAX));
        let mut runs: Vec<Track> =
            self.epochs.range((first, 0)..=(last, u32::MAX)).map(|((track, _), _)| *track).collect();
        runs.dedup();
        if runs.contains(&track) || runs.len() < MAX_RUNS {
            return;
        }
        self.epochs.retain(|(track, _), _| *track != runs[0]);
    }
}

impl Epoch {
    fn conflict(&self, track: Track, epoch: u32, peers: &[PeerInfo]) -> Option<Error> {
        for (stopped, (stopped_at, what)) in &self.stops {
            for (ahead, reached) in &self.reached {
                if ahead != stopped && reached > stopped_at {
                    return Some(Error::OutOfStep {
                        track,
                        what: what.clone(),
                        stopped: Box::new(peers[*stopped].clone()),
                        stopped_at: Progress { epoch, step: *stopped_at },
                        ahead: *ahead,
                        reached: Progress { epoch, step: *reached },
                        during: None,
                    });
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers() -> Vec<PeerInfo> {
        (0..3).map(|rank| PeerInfo::here(rank, rank, 0)).collect()
    }

    const TRACK: Track = Track::Batches { group: 1, loader: 7, run: 0 };

    fn at(epoch: u32, step: u32) -> Progress {
        Progress { epoch, step }
    }

    #[test]
    fn going_on_is_found_in_both_orders() {
        let peers = peers();
        let mut stop_first = Tracks::default();
        assert_eq!(stop_first.stop(1, TRACK, at(0, 3), "loader", &peers), None);
        assert_eq!(stop_first.advance(0, TRACK, at(0, 3), &peers), None);
        let a = stop_first.advance(0, TRACK, at(0, 4), &peers);

        let mut advance_first = Tracks::default();
        assert_eq!(advance_first.advance(0, TRACK, at(0, 4), &peers), None);
        let b = advance_first.stop(1, TRACK, at(0, 3), "loader", &peers);

        assert_eq!(a, b);
        let text = a.unwrap().to_string();
        assert!(text.contains("rank 1") && text.contains("stopped loader at epoch 0, step 3"), "{text}");
        assert!(text.contains("rank 0 went on to epoch 0, step 4"), "{text}");
    }

    #[test]
    fn all_stopping_at_one_step_is_fine() {
        let peers = peers();
        let mut tracks = Tracks::default();
        for rank in 0..3 {
            assert_eq!(tracks.advance(rank, TRACK, at(0, 3), &peers), None);
            assert_eq!(tracks.stop(rank, TRACK, at(0, 3), "loader", &peers), None);
        }
        assert_eq!(tracks.advance(0, TRACK, at(1, 9), &peers), None);
        assert_eq!(tracks.advance(1, TRACK.backwards(), at(0, 9), &peers), None);
    }

    #[test]
    fn loaders_of_other_groups_are_other_tracks() {
        let (peers, mut tracks) = (peers(), Tracks::default());
        let other = Track::Batches { group: 2 << 32 | 1, loader: 7, run: 0 };
        assert_eq!(tracks.stop(1, TRACK, at(0, 3), "loader", &peers), None);
        assert_eq!(tracks.advance(0, other, at(0, 4), &peers), None);
        assert!(tracks.advance(0, TRACK, at(0, 4), &peers).is_some());
    }

    #[test]
    fn a_late_stop_of_an_earlier_epoch_is_still_found() {
        let peers = peers();
        let mut tracks = Tracks::default();
        tracks.advance(0, TRACK, at(0, 5), &peers);
        tracks.advance(0, TRACK, at(1, 0), &peers);
        assert!(tracks.stop(1, TRACK, at(0, 3), "loader", &peers).is_some());
    }

    #[test]
    fn the_last_stops_of_a_rank_are_known() {
        let (peers, mut tracks) = (peers(), Tracks::default());
        let other = TRACK.backwards();
        for (rank, track, at) in
            [(1, TRACK, at(0, 3)), (1, TRACK, at(2, 5)), (1, other, at(1, 4)), (2, TRACK, at(3, 3))]
        {
            assert_eq!(tracks.stop(rank, track, at, "loader", &peers), None);
        }
        let name = || "loader".to_string();
        assert_eq!(tracks.stops_of(1), [(TRACK, at(2, 5), name()), (other, at(1, 4), name())]);
        assert_eq!(tracks.stops_of(0), []);
    }

    #[test]
    fn memory_is_bounded() {
        let mut tracks = Tracks::default();
        for epoch in 0..3000 {
            tracks.advance(0, TRACK, at(epoch, 1), &peers());
        }
        assert_eq!(tracks.epochs.len(), MAX_EPOCHS);
    }

    #[test]
    fn old_runs_of_a_loader_are_forgotten() {
        let (mut tracks, peers) = (Tracks::default(), peers());
        let other = Track::Batches { group: 1, loader: 8, run: 0 };
        assert!(tracks.stop(1, other, Progress { epoch: 1, step: 1 }, "other", &peers).is_none());
        for run in 0..1000 {
            let at = Progress { epoch: 1, step: 3 };
            assert!(tracks.stop(1, TRACK.with_run(run), at, "loader", &peers).is_none());
        }
        assert_eq!(tracks.stops_of(1).len(), MAX_RUNS + 1);
        let conflict = tracks.advance(0, TRACK.with_run(999), Progress { epoch: 1, step: 4 }, &peers);
        assert!(conflict.is_some(), "the latest runs are compared");
    }
}
