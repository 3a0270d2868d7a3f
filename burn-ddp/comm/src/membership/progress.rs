//! How far ranks are on tracks they must walk together, such as the steps of a data loader.

use std::collections::BTreeMap;

use super::peer::PeerInfo;
use crate::Error;

/// Epochs of one track that are remembered. Ranks are never this far apart without a collective in between.
const MAX_EPOCHS: usize = 1024;

/// Who is where and who stopped where, per track and epoch. An epoch is the high half of a position.
#[derive(Debug, Default)]
pub(crate) struct Tracks {
    epochs: BTreeMap<(u64, u32), Epoch>,
}

#[derive(Debug, Default)]
struct Epoch {
    /// The furthest position of each rank that this process knows of (over TCP: its own).
    positions: BTreeMap<usize, u64>,
    /// Where ranks stopped, and what they call it.
    stops: BTreeMap<usize, (u64, String)>,
}

impl Tracks {
    /// `rank` is at `position`. The error if that is beyond a peer's stop.
    pub(crate) fn advance(&mut self, rank: usize, track: u64, position: u64, peers: &[PeerInfo]) -> Option<Error> {
        let epoch = self.epoch(track, position);
        let furthest = epoch.positions.entry(rank).or_insert(position);
        *furthest = position.max(*furthest);
        epoch.conflict(track, peers)
    }

    /// `rank` stopped at `position`. The error if a peer is already beyond it.
    pub(crate) fn stop(
        &mut self,
        rank: usize,
        track: u64,
        position: u64,
        what: &str,
        peers: &[PeerInfo],
    ) -> Option<Error> {
        let epoch = self.epoch(track, position);
        epoch.stops.entry(rank).or_insert_with(|| (position, what.to_string()));
        epoch.conflict(track, peers)
    }

    fn epoch(&mut self, track: u64, position: u64) -> &mut Epoch {
        let key = (track, (position >> 32) as u32);
        if !self.epochs.contains_key(&key) && self.epochs.range((track, 0)..=(track, u32::MAX)).count() >= MAX_EPOCHS {
            let oldest = self.epochs.range((track, 0)..).next().map(|(key, _)| *key);
            oldest.map(|oldest| self.epochs.remove(&oldest));
        }
        self.epochs.entry(key).or_default()
    }
}

impl Epoch {
    fn conflict(&self, track: u64, peers: &[PeerInfo]) -> Option<Error> {
        for (stopped, (stopped_at, what)) in &self.stops {
            for (ahead, position) in &self.positions {
                if ahead != stopped && position > stopped_at {
                    return Some(Error::OutOfStep {
                        track,
                        what: what.clone(),
                        stopped: peers[*stopped].clone(),
                        stopped_at: *stopped_at,
                        ahead: *ahead,
                        position: *position,
                        during: None,
                    });
                }
            }
        }
        None
    }
}

/// `epoch 1, step 20`.
pub(crate) fn show_position(position: u64) -> String {
    format!("epoch {}, step {}", position >> 32, position as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers() -> Vec<PeerInfo> {
        (0..3).map(|rank| PeerInfo::here(rank, rank, 0)).collect()
    }

    fn at(epoch: u64, step: u64) -> u64 {
        epoch << 32 | step
    }

    #[test]
    fn going_on_is_found_in_both_orders() {
        let peers = peers();
        let mut stop_first = Tracks::default();
        assert_eq!(stop_first.stop(1, 7, at(0, 3), "loader", &peers), None);
        assert_eq!(stop_first.advance(0, 7, at(0, 3), &peers), None);
        let a = stop_first.advance(0, 7, at(0, 4), &peers);

        let mut advance_first = Tracks::default();
        assert_eq!(advance_first.advance(0, 7, at(0, 4), &peers), None);
        let b = advance_first.stop(1, 7, at(0, 3), "loader", &peers);

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
            assert_eq!(tracks.advance(rank, 7, at(0, 3), &peers), None);
            assert_eq!(tracks.stop(rank, 7, at(0, 3), "loader", &peers), None);
        }
        assert_eq!(tracks.advance(0, 7, at(1, 9), &peers), None);
        assert_eq!(tracks.advance(1, 8, at(0, 9), &peers), None);
    }

    #[test]
    fn a_late_stop_of_an_earlier_epoch_is_still_found() {
        let peers = peers();
        let mut tracks = Tracks::default();
        tracks.advance(0, 7, at(0, 5), &peers);
        tracks.advance(0, 7, at(1, 0), &peers);
        assert!(tracks.stop(1, 7, at(0, 3), "loader", &peers).is_some());
    }

    #[test]
    fn memory_is_bounded() {
        let mut tracks = Tracks::default();
        for epoch in 0..3000 {
            tracks.advance(0, 7, at(epoch, 1), &peers());
        }
        assert_eq!(tracks.epochs.len(), MAX_EPOCHS);
    }
}
