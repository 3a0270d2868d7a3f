//! Control connections of a world, and the ways of messages between ranks that have none in common.
//!
//! Connected are the ranks of a machine with each other, and each rank with its counterparts: the ranks at its position
//! on the other machines. A message goes from its origin to its machine and to its counterparts, and from each
//! counterpart to the rest of that machine. Where no counterpart takes part any more, the next rank of the origin's
//! machine that has one sends it there. All ranks find the way by the same rules from the ranks that have left.

use crate::topology::Machines;

/// Ways of control messages, as one rank sees them.
#[derive(Clone, Debug)]
pub(crate) struct Routes {
    rank: usize,
    machines: Machines,
}

impl Routes {
    pub(crate) fn new(rank: usize, machines: Machines) -> Routes {
        Routes { rank, machines }
    }

    /// The rank whose view this is.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// True if this rank has a control connection to `other`.
    pub(crate) fn is_near(&self, other: usize) -> bool {
        other != self.rank && self.connected(self.rank, other)
    }

    /// True if the neighbour `from` may pass on messages of `origin` to this rank.
    pub(crate) fn may_pass_on(&self, from: usize, origin: usize) -> bool {
        let machine_of = |rank| self.machines.machine_of(rank);
        if from == origin {
            return true;
        }
        // A rank of this machine passes on what comes from others, a counterpart what its machine sends.
        origin < self.machines.rank_count()
            && machine_of(origin) != machine_of(self.rank)
            && (machine_of(from) == machine_of(self.rank) || machine_of(from) == machine_of(origin))
    }

    /// Neighbours to which this rank passes on a message of `origin` that the neighbour `from` has sent.
    pub(crate) fn onward(&self, from: usize, origin: usize, left: impl Fn(usize) -> bool) -> Vec<usize> {
        let (here, of_origin) = (self.machines.machine_of(self.rank), self.machines.machine_of(origin));
        if self.machines.machine_of(from) != here {
            // Of several counterparts of the origin one passes it on; another sender has chosen this rank.
            if from == origin && self.way(origin, here, &left) != Some((origin, self.rank)) {
                return Vec::new();
            }
            let ranks = self.machines.ranks_of(here).iter().copied();
            return ranks.filter(|to| *to != self.rank && !left(*to) && !self.connected(origin, *to)).collect();
        }
        if of_origin != here {
            return Vec::new();
        }
        self.ways_through_here(origin, &left).collect()
    }

    /// Origins on this machine, each with the neighbour to which this rank sends their messages since `gone` has left.
    /// What they sent before may have been lost with `gone`.
    pub(crate) fn inherited(&self, gone: usize, left: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
        let before = |rank: usize| rank != gone && left(rank);
        let here = self.machines.machine_of(self.rank);
        let origins = self.machines.ranks_of(here).iter().copied();
        let inherited = origins.flat_map(|origin| {
            let before: Vec<usize> = self.ways_through_here(origin, &before).collect();
            let after = self.ways_through_here(origin, &left).filter(move |to| !before.contains(to));
            after.map(move |to| (origin, to)).collect::<Vec<_>>()
        });
        inherited.collect()
    }

    /// Ranks that pass on the messages of `origin` to this rank, the last first; `None` if there is no way.
    pub(crate) fn through(&self, origin: usize, left: impl Fn(usize) -> bool) -> Option<Vec<usize>> {
        if origin == self.rank || self.is_near(origin) {
            return Some(Vec::new());
        }
        let (sender, receiver) = self.way(origin, self.machines.machine_of(self.rank), &left)?;
        Some([receiver, sender].into_iter().filter(|rank| ![origin, self.rank].contains(rank)).collect())
    }

    /// Neighbours on other machines to which this rank sends the messages of `origin`, a rank of its machine.
    fn ways_through_here(&self, origin: usize, left: &impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
        let here = self.machines.machine_of(self.rank);
        let others = (0..self.machines.count()).filter(move |machine| *machine != here);
        others.filter_map(move |machine| {
            let (sender, receiver) = self.way(origin, machine, left)?;
            (sender == self.rank).then_some(receiver)
        })
    }

    /// The ranks that send and receive the messages of `origin` for `machine`, another one.
    fn way(&self, origin: usize, machine: usize, left: &impl Fn(usize) -> bool) -> Option<(usize, usize)> {
        let senders = self.machines.ranks_of(self.machines.machine_of(origin));
        let first = self.machines.local_rank_of(origin);
        let (before, behind) = senders.split_at(first);
        let mut ways = behind.iter().chain(before).filter(|sender| !left(**sender)).filter_map(|sender| {
            let mut receivers = self.machines.ranks_of(machine).iter();
            Some((*sender, *receivers.find(|receiver| self.connected(*sender, **receiver) && !left(**receiver))?))
        });
        ways.next()
    }

    /// True if the two ranks have a control connection.
    fn connected(&self, a: usize, b: usize) -> bool {
        let machines = [a, b].map(|rank| self.machines.machine_of(rank));
        let [i, j] = [a, b].map(|rank| self.machines.local_rank_of(rank));
        let [n, m] = machines.map(|machine| self.machines.ranks_of(machine).len());
        machines[0] == machines[1] || i % m == j % n
    }
}

/// Judges a message of any `origin` as ranks do that receive one.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(origin: usize) {
    let machines = Machines::new(&[0, 0, 1, 1, 1, 2]);
    for (rank, from) in [(0, 1), (0, 2), (3, 4), (3, 1)] {
        let routes = Routes::new(rank, machines.clone());
        if routes.may_pass_on(from, origin) {
            assert!(routes.onward(from, origin, |_| false).iter().all(|to| routes.is_near(*to) && *to != from));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, VecDeque};

    use super::*;

    const SHAPES: [&[usize]; 7] = [
        &[0],
        &[0, 0, 0],
        &[0, 1, 2],
        &[0, 0, 1, 1, 2, 2],
        &[0, 0, 0, 1, 1, 2],
        &[0, 1, 1, 1, 1],
        &[1, 0, 1, 2, 0, 2, 1],
    ];

    /// A world in which ranks leave, and messages arrive in any order but that of their connection.
    struct World {
        routes: Vec<Routes>,
        /// Ranks that have left, by what each rank knows.
        known: Vec<BTreeSet<usize>>,
        /// Ranks that have left.
        gone: BTreeSet<usize>,
        /// Goodbyes on their way, by sender and receiver.
        links: BTreeMap<(usize, usize), VecDeque<usize>>,
    }

    impl World {
        fn new(shape: &[usize]) -> World {
            let routes: Vec<Routes> = (0..shape.len()).map(|rank| Routes::new(rank, Machines::new(shape))).collect();
            World { known: vec![BTreeSet::new(); shape.len()], routes, gone: BTreeSet::new(), links: BTreeMap::new() }
        }

        fn ranks(&self) -> std::ops::Range<usize> {
            0..self.routes.len()
        }

        fn present(&self) -> Vec<usize> {
            self.ranks().filter(|rank| !self.gone.contains(rank)).collect()
        }

        fn send(&mut self, from: usize, to: usize, origin: usize) {
            assert!(self.routes[from].is_near(to), "{from} sends to {to}");
            self.links.entry((from, to)).or_default().push_back(origin);
        }

        fn leave(&mut self, rank: usize) {
            self.gone.insert(rank);
            let neighbours: Vec<usize> = self.ranks().filter(|to| self.routes[rank].is_near(*to)).collect();
            neighbours.into_iter().for_each(|to| self.send(rank, to, rank));
        }

        /// Delivers the next message of the `nth` connection; false if there is none at all.
        fn deliver(&mut self, nth: usize) -> bool {
            self.links.retain(|_, messages| !messages.is_empty());
            let nth = nth % self.links.len().max(1);
            let Some((&(from, to), messages)) = self.links.iter_mut().nth(nth) else { return false };
            let origin = messages.pop_front().unwrap();
            if self.gone.contains(&to) {
                return true;
            }
            let routes = self.routes[to].clone();
            assert!(routes.may_pass_on(from, origin));
            for onward in routes.onward(from, origin, |rank| self.known[to].contains(&rank)) {
                self.send(to, onward, origin);
            }
            if !self.known[to].insert(origin) {
                return true;
            }
            for (origin, onward) in routes.inherited(origin, |rank| self.known[to].contains(&rank)) {
                if self.known[to].contains(&origin) {
                    self.send(to, onward, origin);
                }
            }
            true
        }

        /// Times that a message of `origin` reaches each other rank that takes part.
        fn arrivals(&self, origin: usize) -> BTreeMap<usize, usize> {
            let mut arrivals = BTreeMap::new();
            let mut queue: VecDeque<(usize, usize)> = self
                .present()
                .into_iter()
                .filter(|to| self.routes[origin].is_near(*to))
                .map(|to| (origin, to))
                .collect();
            while let Some((from, to)) = queue.pop_front() {
                *arrivals.entry(to).or_default() += 1;
                assert!(self.routes[to].may_pass_on(from, origin));
                let onward = self.routes[to].onward(from, origin, |rank| self.known[to].contains(&rank));
                queue.extend(onward.into_iter().map(|onward| (to, onward)));
            }
            arrivals
        }
    }

    fn random(state: &mut u64) -> usize {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) as usize
    }

    #[test]
    fn connections_grow_with_the_ranks_of_a_machine_and_with_the_machines() {
        let shape: Vec<usize> = (0..1024).map(|rank| rank / 8).collect();
        for rank in [0, 9, 1023] {
            let routes = Routes::new(rank, Machines::new(&shape));
            assert_eq!((0..1024).filter(|other| routes.is_near(*other)).count(), 7 + 127);
        }
        for shape in SHAPES {
            let World { routes, .. } = World::new(shape);
            for (a, b) in (0..shape.len()).flat_map(|a| (0..shape.len()).map(move |b| (a, b))) {
                assert_eq!(routes[a].is_near(b), routes[b].is_near(a));
                assert_eq!(routes[a].is_near(b), routes[a].through(b, |_| false) == Some(Vec::new()) && a != b);
            }
        }
    }

    #[test]
    fn messages_reach_each_rank_once_while_any_counterparts_take_part() {
        for shape in SHAPES {
            for seed in 0..200 {
                let (mut world, mut state) = (World::new(shape), seed);
                loop {
                    for origin in world.present() {
                        let arrivals = world.arrivals(origin);
                        for to in world.present().into_iter().filter(|to| *to != origin) {
                            let through = world.routes[to].through(origin, |rank| world.gone.contains(&rank));
                            let expected = through.is_some().then_some(1);
                            assert_eq!(arrivals.get(&to).copied(), expected, "{shape:?}, {:?}", world.gone);
                            assert!(through.is_none_or(|ranks| ranks.iter().all(|rank| !world.gone.contains(rank))));
                        }
                    }
                    let present = world.present();
                    if present.len() < 2 {
                        break;
                    }
                    world.gone.insert(present[random(&mut state) % present.len()]);
                    world.known.fill(world.gone.clone());
                }
            }
        }
    }

    #[test]
    fn every_goodbye_is_heard_in_whatever_order_ranks_leave() {
        for shape in SHAPES {
            for seed in 0..500 {
                let (mut world, mut state) = (World::new(shape), seed);
                for _ in 0..random(&mut state) % shape.len() {
                    let present = world.present();
                    world.leave(present[random(&mut state) % present.len()]);
                    for _ in 0..random(&mut state) % 8 {
                        let nth = random(&mut state);
                        world.deliver(nth);
                    }
                }
                loop {
                    let nth = random(&mut state);
                    if !world.deliver(nth) {
                        break;
                    }
                }
                for rank in world.present() {
                    let routes = &world.routes[rank];
                    let audible = |gone: &&usize| routes.through(**gone, |rank| world.gone.contains(&rank)).is_some();
                    let missed: Vec<_> = world.gone.iter().filter(audible).collect();
                    assert!(missed.iter().all(|gone| world.known[rank].contains(gone)), "{shape:?}, seed {seed}");
                }
            }
        }
    }

    #[test]
    fn a_rank_passes_on_only_what_its_connections_are_for() {
        // Ranks 0 and 1 on one machine, 2 and 3 on the other.
        let routes = Routes::new(0, Machines::new(&[0, 0, 1, 1]));
        let passes = |from| (0..5).filter(|origin| routes.may_pass_on(from, *origin)).collect::<Vec<_>>();
        assert_eq!(passes(1), [1, 2, 3]);
        assert_eq!(passes(2), [2, 3]);
    }
}
