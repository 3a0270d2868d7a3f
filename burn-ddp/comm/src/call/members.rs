//! Who is in a group, and whom its call under way waits for.

use std::sync::atomic::{AtomicBool, Ordering};

/// The ranks of a group, in its order. One per group and rank: `expect` and `arrived` are written by the exchange, read by
/// whoever reports.
///
/// A *group rank* is a place in this list, a *world rank* is what stands there.
#[derive(Debug)]
pub struct Members {
    ranks: Box<[usize]>,
    /// By group rank: whose part of the exchange has not come.
    awaited: Box<[AtomicBool]>,
}

impl Members {
    /// Of a group of these world ranks.
    pub fn new(ranks: impl Into<Box<[usize]>>) -> Members {
        let ranks = ranks.into();
        Members { awaited: ranks.iter().map(|_| AtomicBool::new(false)).collect(), ranks }
    }

    /// All ranks of a world of `world_size`.
    pub fn all(world_size: usize) -> Members {
        Members::new((0..world_size).collect::<Vec<_>>())
    }

    /// The world ranks, in the order of the group.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// The rank in the world of `group_rank`. What is no rank of the group stays what it is.
    pub fn world_rank(&self, group_rank: usize) -> usize {
        self.ranks.get(group_rank).copied().unwrap_or(group_rank)
    }

    /// The exchange waits for this group rank.
    pub fn expect(&self, group_rank: usize) {
        self.set(group_rank, true);
    }

    /// The part of this group rank has come.
    pub fn arrived(&self, group_rank: usize) {
        self.set(group_rank, false);
    }

    /// The world ranks that are waited for, ascending.
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
}
