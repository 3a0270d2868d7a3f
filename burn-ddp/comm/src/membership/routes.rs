//! Control connections of a world, and the ways of messages between ranks that have no connection.
//!
//! The ranks of a machine are connected with each other, and each rank with its counterparts: the ranks at its position
//! on the other machines. A message goes from its origin to the other ranks of its machine and to its counterparts, and
//! from each counterpart to the rest of that machine. Where no counterpart of the origin takes part any more, the next
//! rank of the origin's machine that has one sends the message there. All ranks compute these ways by the same rules
//! from the ranks that have left. Two machines of which no pair of counterparts is left are cut off from each other,
//! until each rank of one connects with each rank of the other.

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

    /// True if `other` is on this rank's machine.
    pub(crate) fn is_on_this_machine(&self, other: usize) -> bool {
        self.machines.machine_of(other) == self.machines.machine_of(self.rank)
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
        // A rank of this machine passes on messages of ranks that have no connection to this one. A counterpart passes
        // on messages of its machine, also those of a neighbour of this rank that has left.
        origin < self.machines.rank_count()
            && machine_of(origin) != machine_of(self.rank)
            && (machine_of(from) == machine_of(origin)
                || machine_of(from) == machine_of(self.rank) && !self.is_near(origin))
    }

    /// True if the neighbour `from` may pass on heartbeats of `origin` to this rank. Neighbours send theirs directly.
    pub(crate) fn may_pass_on_beat(&self, from: usize, origin: usize) -> bool {
        self.may_pass_on(from, origin) && from != origin && !self.is_near(origin)
    }

    /// Neighbours to which this rank passes on a message of `origin` that the neighbour `from` has sent. If `origin`
    /// has several counterparts on this machine, each of them passes the message on, since the others may be about to
    /// leave; but only one does if `comes_again`, as for a heartbeat, which the next one replaces.
    pub(crate) fn onward(
        &self,
        from: usize,
        origin: usize,
        comes_again: bool,
        left: impl Fn(usize) -> bool,
    ) -> Vec<usize> {
        let (here, of_origin) = (self.machines.machine_of(self.rank), self.machines.machine_of(origin));
        if self.machines.machine_of(from) != here {
            let is_chosen = || from != origin || self.way(origin, here, &left) == Some((origin, self.rank));
            // After a cut-off, a fallback connection brings each rank its messages directly.
            if !self.connected(from, self.rank) || comes_again && !is_chosen() {
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

    /// Origins on this machine whose messages this rank has to send since `gone` has left, each with the neighbour to
    /// which they go. Earlier messages of these origins may have been lost with `gone`.
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

    /// Ranks that pass on the messages of `origin` to this rank, from this rank's side on; `None` if there is no way.
    pub(crate) fn through(&self, origin: usize, left: impl Fn(usize) -> bool) -> Option<Vec<usize>> {
        if origin == self.rank || self.is_near(origin) {
            return Some(Vec::new());
        }
        let (sender, receiver) = self.way(origin, self.machines.machine_of(self.rank), &left)?;
        Some([receiver, sender].into_iter().filter(|rank| ![origin, self.rank].contains(rank)).collect())
    }

    /// Ranks that take part on machines from which this rank's machine is cut off: no pair of counterparts is left.
    pub(crate) fn cut_off(&self, left: impl Fn(usize) -> bool) -> Vec<usize> {
        let here = self.machines.machine_of(self.rank);
        let present = |machine: usize| self.machines.ranks_of(machine).iter().copied().filter(|rank| !left(*rank));
        let is_cut_off = |machine: &usize| !present(here).any(|a| present(*machine).any(|b| self.connected(a, b)));
        (0..self.machines.count()).filter(is_cut_off).flat_map(present).collect()
    }

    /// Ranks of this rank's machine.
    pub(crate) fn of_machine(&self) -> &[usize] {
        self.machine_of(self.rank)
    }

    /// Ranks of the machine of `rank`.
    pub(crate) fn machine_of(&self, rank: usize) -> &[usize] {
        self.machines.ranks_of(self.machines.machine_of(rank))
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

    /// The rank that sends the messages of `origin` to `machine`, another one, and the rank there that receives them.
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

/// Judges a message of any `origin` as a rank does that receives it.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(origin: usize) {
    let machines = Machines::new(&[0, 0, 1, 1, 1, 2]);
    for (rank, from) in [(0, 1), (0, 2), (3, 4), (3, 1)] {
        let routes = Routes::new(rank, machines.clone());
        if routes.may_pass_on(from, origin) {
            assert!(routes.onward(from, origin, false, |_| false).iter().all(|to| routes.is_near(*to) && *to != from));
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

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Said {
        Stop,
        Goodbye,
    }

    /// A world in which ranks stop and leave. Only messages on one connection arrive in the order in which they were
    /// sent.
    struct World {
        routes: Vec<Routes>,
        /// Messages that each rank has heard and said, by origin.
        known: Vec<BTreeSet<(usize, Said)>>,
        /// Ranks that have left.
        gone: BTreeSet<usize>,
        /// Messages on their way, by sender and receiver.
        links: BTreeMap<(usize, usize), VecDeque<(usize, Said)>>,
        /// Pairs of ranks that have made a fallback connection.
        direct: BTreeSet<(usize, usize)>,
    }

    impl World {
        fn new(shape: &[usize]) -> World {
            let routes: Vec<Routes> = (0..shape.len()).map(|rank| Routes::new(rank, Machines::new(shape))).collect();
            let known = vec![BTreeSet::new(); shape.len()];
            let (gone, links, direct) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
            World { known, routes, gone, links, direct }
        }

        fn ranks(&self) -> std::ops::Range<usize> {
            0..self.routes.len()
        }

        fn present(&self) -> Vec<usize> {
            self.ranks().filter(|rank| !self.gone.contains(rank)).collect()
        }

        fn knows_gone(&self, rank: usize) -> impl Fn(usize) -> bool {
            move |other| self.known[rank].contains(&(other, Said::Goodbye))
        }

        fn are_connected(&self, a: usize, b: usize) -> bool {
            self.routes[a].is_near(b) || self.direct.contains(&(a, b))
        }

        fn send(&mut self, from: usize, to: usize, origin: usize, said: Said) {
            assert!(self.are_connected(from, to), "{from} sends to {to}");
            self.links.entry((from, to)).or_default().push_back((origin, said));
        }

        fn say(&mut self, rank: usize, said: Said) {
            self.known[rank].insert((rank, said));
            let neighbours: Vec<usize> = self.ranks().filter(|to| self.are_connected(rank, *to)).collect();
            neighbours.into_iter().for_each(|to| self.send(rank, to, rank, said));
            if said == Said::Goodbye {
                self.gone.insert(rank);
            }
        }

        /// Sends what `from` knows of `origin`.
        fn repeat(&mut self, from: usize, to: usize, origin: usize) {
            let known: Vec<_> = self.known[from].iter().copied().filter(|(of, _)| *of == origin).collect();
            known.into_iter().for_each(|(origin, said)| self.send(from, to, origin, said));
        }

        /// Delivers the next message of the `nth` connection; false if there is none at all.
        fn deliver(&mut self, nth: usize) -> bool {
            self.links.retain(|_, messages| !messages.is_empty());
            let nth = nth % self.links.len().max(1);
            let Some((&(from, to), messages)) = self.links.iter_mut().nth(nth) else { return false };
            let (origin, said) = messages.pop_front().unwrap();
            if self.gone.contains(&to) {
                return true;
            }
            let routes = self.routes[to].clone();
            assert!(routes.may_pass_on(from, origin));
            for onward in routes.onward(from, origin, false, self.knows_gone(to)) {
                self.send(to, onward, origin, said);
            }
            if self.known[to].insert((origin, said)) && said == Said::Goodbye {
                for (origin, onward) in routes.inherited(origin, self.knows_gone(to)) {
                    self.repeat(to, onward, origin);
                }
            }
            true
        }

        /// Delivers all messages.
        fn settle(&mut self, state: &mut u64) {
            while self.deliver(random(state)) {}
        }

        /// Ranks connect with those from which they are cut off, or find that they have left.
        fn connect_cut_off(&mut self) {
            for rank in self.present() {
                for peer in self.routes[rank].cut_off(self.knows_gone(rank)) {
                    if self.gone.contains(&peer) {
                        self.known[rank].insert((peer, Said::Goodbye));
                    } else if self.direct.insert((rank, peer)) {
                        self.direct.insert((peer, rank));
                        for (from, to) in [(rank, peer), (peer, rank)] {
                            let origins = self.routes[from].of_machine().to_vec();
                            origins.into_iter().for_each(|origin| self.repeat(from, to, origin));
                        }
                    }
                }
            }
        }

        /// How many times a heartbeat of `origin` reaches each other rank that takes part.
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
                assert!(from == origin || self.routes[to].may_pass_on_beat(from, origin), "{from}, {origin}, {to}");
                let onward = self.routes[to].onward(from, origin, true, self.knows_gone(to));
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
                    world.known.fill(world.gone.iter().map(|gone| (*gone, Said::Goodbye)).collect());
                }
            }
        }
    }

    /// Runs worlds of all shapes in which ranks do `deeds` at random, with some messages delivered in between, and all
    /// at last.
    fn after(deeds: impl Fn(&mut World, usize, &mut u64), check: impl Fn(&mut World, &str)) {
        let named = SHAPES.into_iter().map(<[usize]>::to_vec);
        for (shape, seeds) in named.zip([150; SHAPES.len()]).chain((0..500).map(|seed| (random_shape(seed), 1))) {
            for seed in 0..seeds {
                let (mut world, mut state) = (World::new(&shape), seed);
                for _ in 0..random(&mut state) % (2 * shape.len()) {
                    let present = world.present();
                    deeds(&mut world, present[random(&mut state) % present.len()], &mut state);
                    for _ in 0..random(&mut state) % 8 {
                        let nth = random(&mut state);
                        world.deliver(nth);
                    }
                }
                world.settle(&mut state);
                check(&mut world, &format!("{shape:?}, seed {seed}"));
            }
        }
    }

    fn random_shape(seed: u64) -> Vec<usize> {
        let mut state = seed;
        let (ranks, machines) = (2 + random(&mut state) % 9, 1 + random(&mut state) % 4);
        (0..ranks).map(|_| random(&mut state) % machines).collect()
    }

    fn stop_or_leave(world: &mut World, rank: usize, state: &mut u64) {
        if random(state).is_multiple_of(2) {
            world.say(rank, Said::Stop);
        } else if world.present().len() > 1 {
            world.say(rank, Said::Goodbye);
        }
    }

    #[test]
    fn stops_and_goodbyes_are_heard_in_whatever_order_ranks_leave() {
        after(stop_or_leave, |world, seed| {
            for rank in world.present() {
                let audible =
                    |origin: usize| world.routes[rank].through(origin, |other| world.gone.contains(&other)).is_some();
                for origin in world.ranks().filter(|origin| *origin != rank && audible(*origin)) {
                    for said in world.known[origin].iter().filter(|(of, _)| *of == origin) {
                        assert!(world.known[rank].contains(said), "{seed}: {rank} has missed {said:?}");
                    }
                }
            }
        });
    }

    #[test]
    fn ranks_that_are_cut_off_find_each_other_and_hear_all_that_goes_on() {
        after(stop_or_leave, |world, seed| {
            // Ranks stop and leave while others connect.
            let mut state = 7;
            for _ in 0..2 * world.ranks().len() {
                world.connect_cut_off();
                let present = world.present();
                stop_or_leave(world, present[random(&mut state) % present.len()], &mut state);
                world.settle(&mut state);
            }
            world.connect_cut_off();
            world.settle(&mut state);
            for rank in world.present() {
                for other in world.ranks().filter(|other| *other != rank) {
                    let is_gone = world.gone.contains(&other);
                    assert_eq!(world.knows_gone(rank)(other), is_gone, "{seed}: {rank} of {other}");
                    let through = world.routes[rank].through(other, world.knows_gone(rank));
                    assert!(
                        is_gone || through.is_some() || world.are_connected(rank, other),
                        "{seed}: {rank}, {other}"
                    );
                    let stopped = world.known[other].contains(&(other, Said::Stop));
                    assert!(is_gone || !stopped || world.known[rank].contains(&(other, Said::Stop)), "{seed}");
                }
            }
        });
    }

    #[test]
    fn a_rank_passes_on_only_what_its_connections_are_for() {
        // Ranks 0 and 1 on one machine, 2 and 3 on the other.
        let routes = Routes::new(0, Machines::new(&[0, 0, 1, 1]));
        let passes = |from| (0..5).filter(|origin| routes.may_pass_on(from, *origin)).collect::<Vec<_>>();
        assert_eq!(passes(1), [1, 3], "rank 2 is a neighbour itself");
        assert_eq!(passes(2), [2, 3]);
        let beats = |from| (0..5).filter(|origin| routes.may_pass_on_beat(from, *origin)).collect::<Vec<_>>();
        assert_eq!((beats(1), beats(2)), (vec![3], vec![3]));
    }
}
