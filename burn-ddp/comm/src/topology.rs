//! Machines of a world, and the ranks on each.

/// Ranks of each machine of a world, the same on all ranks. Machines are in the order of their lowest ranks, ranks of a
/// machine ascend.
///
/// Ranks are on one machine if they can share memory: one host may count as several, such as containers, or by
/// `BURN_DDP_MACHINE`.
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
    /// Machines of ranks on machines of these identities, by rank.
    pub(crate) fn new<T: PartialEq>(identities: &[T]) -> Machines {
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

    /// Number of ranks.
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
}
