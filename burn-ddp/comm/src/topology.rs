//! Machines of a world, and the ranks on each.

use std::ops::Range;

use crate::reduce::halves;

/// Ranks of each machine of a world, the same on all ranks. Machines are in the order of their lowest ranks, ranks of a
/// machine ascend.
///
/// Ranks are on one machine if they can share memory: one host may count as several machines, if its containers cannot
/// share memory or by `BURN_DDP_MACHINE`.
///
/// ```
/// use burn_ddp_comm::World;
///
/// World::spawn(3, |world| {
///     let machines = world.machines();
///     assert_eq!((machines.count(), machines.ranks_of(0)), (1, &[0, 1, 2][..]));
///     assert_eq!(machines.machine_of(world.rank()), 0);
/// });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines {
    ranks: Vec<Vec<usize>>,
    machine_of: Vec<usize>,
}

impl Machines {
    /// The machines of a world whose rank `r` is on machine `identities[r]`.
    ///
    /// ```
    /// use burn_ddp_comm::Machines;
    ///
    /// let in_blocks = Machines::new(&["a", "a", "b", "b"]);
    /// assert_eq!(in_blocks.partial_results(&[0, 1, 2, 3]), [1, 1]);
    /// let in_turn = Machines::new(&["a", "b", "a", "b"]);
    /// assert_eq!(in_turn.partial_results(&[0, 1, 2, 3]), [2, 2]); // twice the bytes between them
    /// ```
    pub fn new<T: PartialEq>(identities: &[T]) -> Machines {
        let mut seen: Vec<&T> = Vec::new();
        let (mut ranks, mut machine_of) = (Vec::<Vec<usize>>::new(), Vec::with_capacity(identities.len()));
        for (rank, identity) in identities.iter().enumerate() {
            let machine = seen.iter().position(|known| *known == identity).unwrap_or_else(|| {
                seen.push(identity);
                ranks.push(Vec::new());
                seen.len() - 1
            });
            ranks[machine].push(rank);
            machine_of.push(machine);
        }
        Machines { ranks, machine_of }
    }

    /// Number of machines.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// World ranks on a machine, ascending.
    ///
    /// # Panics
    /// If there is no such machine.
    pub fn ranks_of(&self, machine: usize) -> &[usize] {
        &self.ranks[machine]
    }

    /// Number of partial results per element that each machine sends to the others in a reduction over these world
    /// ranks, in their order: one for each subtree of the tree over the ranks that lies on the machine as a whole, and
    /// in no larger one. Machines with equally many consecutive ranks, a power of two, send one each.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn partial_results(&self, ranks: &[usize]) -> Vec<usize> {
        let mut counts = vec![0; self.count()];
        self.subtrees(ranks).iter().for_each(|(_, machine)| counts[*machine] += 1);
        counts
    }

    /// The reduction tree halves `ranks` again and again. These are its largest subtrees whose ranks are all on one
    /// machine, from left to right: each as its range of indices in `ranks`, with its machine.
    pub(crate) fn subtrees(&self, ranks: &[usize]) -> Vec<(Range<usize>, usize)> {
        let mut found = Vec::new();
        let mut left_to_cut = Vec::from_iter(Some(0..ranks.len()));
        while let Some(places) = left_to_cut.pop() {
            let Some(machine) = ranks[places.clone()].first().map(|rank| self.machine_of(*rank)) else { continue };
            if ranks[places.clone()].iter().all(|rank| self.machine_of(*rank) == machine) {
                found.push((places, machine));
            } else {
                let (left, right) = halves(places);
                left_to_cut.extend([right, left]);
            }
        }
        found
    }

    pub(crate) fn rank_count(&self) -> usize {
        self.machine_of.len()
    }

    /// Position of a rank among those of its machine.
    pub(crate) fn local_rank_of(&self, rank: usize) -> usize {
        let ranks = &self.ranks[self.machine_of[rank]];
        ranks.partition_point(|other| *other < rank)
    }

    /// Machine of a world rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn machine_of(&self, rank: usize) -> usize {
        self.machine_of[rank]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_in_the_order_of_their_lowest_ranks() {
        let machines = Machines::new(&["b", "a", "b", "c", "a"]);
        assert_eq!(machines.count(), 3);
        assert_eq!([0, 1, 2].map(|machine| machines.ranks_of(machine).to_vec()), [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!([0, 1, 2, 3, 4].map(|rank| machines.machine_of(rank)), [0, 1, 0, 2, 1]);
    }

    #[test]
    fn partial_results_follow_the_tree() {
        let of = |identities: &[usize]| {
            let all: Vec<usize> = (0..identities.len()).collect();
            Machines::new(identities).partial_results(&all)
        };
        assert_eq!(of(&[0, 0, 0, 0, 1, 1, 1, 1]), [1, 1]);
        assert_eq!(of(&[0, 0, 0, 1, 1, 1, 2, 2, 2]), [2, 2, 2]);
        assert_eq!(of(&[0, 1, 0, 1, 0, 1, 0, 1]), [4, 4]);
        assert_eq!(of(&[0, 0, 0]), [1]);
        let machines = Machines::new(&[0, 1, 0, 1]);
        assert_eq!(machines.partial_results(&[0, 2, 1, 3]), [1, 1], "the order of the group counts");
        assert_eq!(machines.partial_results(&[1]), [0, 1]);
        assert_eq!(machines.partial_results(&[]), [0, 0]);
    }
}
