//! Members of a group, and the members for which its call under way waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The ranks of a group, in the group's order, and those for which this rank's call under way still waits. A rank has
/// one `Members` per group. The engine's exchange calls `expect` and `arrived`; heartbeats and reports read `awaited`.
///
/// A *group rank* is a position in this list, a *world rank* the value at that position.
#[derive(Debug)]
pub struct Members {
    ranks: Box<[usize]>,
    /// By group rank: true if that rank's part of the exchange has not arrived.
    awaited: Box<[AtomicBool]>,
    /// If these are some members of a group: all its members, and the group rank of each of these among them.
    whole: Option<(Arc<Members>, Box<[usize]>)>,
}

impl Members {
    /// Members of a group of these world ranks.
    pub fn new(ranks: impl Into<Box<[usize]>>) -> Members {
        let ranks = ranks.into();
        Members { awaited: ranks.iter().map(|_| AtomicBool::new(false)).collect(), ranks, whole: None }
    }

    /// The members of `whole` at these group ranks. Waits for them are noted in `whole` as well.
    pub(crate) fn part(whole: &Arc<Members>, group_ranks: &[usize]) -> Members {
        let ranks: Vec<usize> = group_ranks.iter().map(|rank| whole.world_rank(*rank)).collect();
        Members { whole: Some((whole.clone(), group_ranks.into())), ..Members::new(ranks) }
    }

    /// All ranks of a world of `world_size`.
    pub fn all(world_size: usize) -> Members {
        Members::new((0..world_size).collect::<Vec<_>>())
    }

    /// The world ranks, in the order of the group.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Number of members.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// World rank of `group_rank`; `group_rank` itself if it is not a rank of the group.
    pub fn world_rank(&self, group_rank: usize) -> usize {
        self.ranks.get(group_rank).copied().unwrap_or(group_rank)
    }

    /// Notes that the exchange waits for this group rank.
    pub fn expect(&self, group_rank: usize) {
        self.set(group_rank, true);
    }

    /// Notes that the part of this group rank has arrived.
    pub fn arrived(&self, group_rank: usize) {
        self.set(group_rank, false);
    }

    /// World ranks that the exchange waits for, ascending.
    pub fn awaited(&self) -> Vec<usize> {
        let awaited = self.awaited.iter().zip(&self.ranks).filter(|(awaited, _)| awaited.load(Ordering::Relaxed));
        let mut ranks: Vec<usize> = awaited.map(|(_, rank)| *rank).collect();
        ranks.sort_unstable();
        ranks
    }

    fn set(&self, group_rank: usize, awaited: bool) {
        if let Some(flag) = self.awaited.get(group_rank) {
            flag.store(awaited, Ordering::Relaxed);
        }
        if let Some((whole, group_ranks)) = &self.whole
            && let Some(rank) = group_ranks.get(group_rank)
        {
            whole.set(*rank, awaited);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_awaited_is_told_by_world_rank() {
        let members = Members::new([4, 1, 3]);
        (0..3).for_each(|peer| members.expect(peer));
        members.arrived(2);
        assert_eq!(members.awaited(), [1, 4]);
        assert_eq!((members.world_rank(0), members.world_rank(2), members.world_rank(7)), (4, 3, 7));
    }

    #[test]
    fn waits_for_a_part_of_the_members_are_seen_in_the_whole() {
        let whole = Arc::new(Members::new([4, 1, 3]));
        let part = Members::part(&whole, &[0, 2]);
        part.expect(0);
        part.expect(1);
        part.arrived(0);
        assert_eq!((part.ranks(), part.awaited(), whole.awaited()), (&[4, 3][..], vec![3], vec![3]));
    }
}
