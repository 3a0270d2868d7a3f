//! The protocol under loom: every interleaving, every order of memory that the language allows. README.md lists the
//! faults that they find.
#![allow(unsafe_code)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::time::Duration;

use super::doorbell::{Doorbell, publication};
use super::rank_cell::{Announcement, LINE_WORDS, Line, Mailbox, Progress};

/// The memory that two ranks share here.
#[derive(Default)]
struct Two {
    lines: [[Line; 2]; 2],
    ready: [Progress; 2],
    done: [Progress; 2],
    closed: [Progress; 2],
    bells: [Doorbell; 2],
    eager: [[Memory; 2]; 2],
    slots: [[Memory; 2]; 2],
    results: [[Memory; 2]; 2],
}

/// Memory that is not atomic: loom reports if it is read while it may be written.
#[derive(Default)]
struct Memory(UnsafeCell<u64>);

// SAFETY: loom itself reports accesses to the cell that are not ordered.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    fn write(&self, value: u64) {
        // SAFETY: this is what the models check.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|cell| unsafe { *cell })
    }
}

impl Two {
    /// Sleeps until `there`, as `Board::wait` does when spinning is over.
    fn wait(&self, me: usize, there: impl Fn() -> bool) {
        publication();
        self.bells[1 - me].wake_for(me);
        while !there() {
            let may_sleep = || Ok::<_, ()>(!there());
            assert_eq!(self.bells[me].sleep(1 - me, Duration::MAX, may_sleep), Ok(()));
        }
    }

    /// Announces `word` in the line and in the eager buffer of `round`; what the other one did.
    fn say(&self, me: usize, round: u64, word: u64) -> u64 {
        let nth = (round % 2) as usize;
        self.eager[me][nth].write(word);
        let what = Announcement { fingerprint: round, weight: 1.0, note: 0, payload: [word; LINE_WORDS] };
        self.lines[me][nth].publish(round, &what, 1);
        let theirs = &self.lines[1 - me][nth];
        self.wait(me, || theirs.is_there(round));
        let said = theirs.read(1);
        assert_eq!(said.fingerprint, round, "a line of another round");
        assert_eq!(self.eager[1 - me][nth].read(), said.payload[0]);
        said.payload[0]
    }

    /// Announces a call and waits for the other one's. Here and below waits look and yield: how ranks sleep is modelled
    /// by itself.
    fn announce(&self, me: usize, round: u64) {
        let nth = (round % 2) as usize;
        self.lines[me][nth].publish(round, &Announcement::default(), 0);
        look(|| self.lines[1 - me][nth].is_there(round));
    }

    fn put(&self, me: usize, round: u64, chunk: u64) {
        self.slots[me][(chunk % 2) as usize].write(value(me, round, chunk));
        self.ready[me].publish(ticket(round, chunk));
    }

    /// The word that the other one put.
    fn slot(&self, me: usize, round: u64, chunk: u64) -> u64 {
        look(|| self.ready[1 - me].has_reached(ticket(round, chunk)));
        self.slots[1 - me][(chunk % 2) as usize].read()
    }

    fn fold(&self, me: usize, round: u64, chunk: u64) {
        let sum = value(me, round, chunk) + self.slot(me, round, chunk);
        self.results[me][(chunk % 2) as usize].write(sum);
        self.done[me].publish(ticket(round, chunk));
    }

    fn take(&self, me: usize, round: u64, chunk: u64) {
        look(|| self.done[1 - me].has_reached(ticket(round, chunk)));
        let sum = self.results[1 - me][(chunk % 2) as usize].read();
        assert_eq!(sum, value(0, round, chunk) + value(1, round, chunk));
    }

    /// As `reduce_chunks` of `pipeline`.
    fn reduce(&self, me: usize, round: u64, chunks: u64) {
        self.announce(me, round);
        self.put(me, round, 0);
        for chunk in 0..chunks {
            if chunk > 0 {
                self.take(me, round, chunk - 1);
            }
            if chunk + 1 < chunks {
                self.put(me, round, chunk + 1);
            }
            self.fold(me, round, chunk);
        }
        self.take(me, round, chunks - 1);
    }

    /// As `broadcast_chunks` of `pass`, from rank 0.
    fn broadcast(&self, me: usize, round: u64, chunks: u64) {
        self.announce(me, round);
        for chunk in 0..chunks {
            if me == 0 {
                if chunk >= 2 {
                    look(|| self.done[1].has_reached(ticket(round, chunk - 2)));
                }
                self.put(0, round, chunk);
            } else {
                assert_eq!(self.slot(1, round, chunk), value(0, round, chunk));
                self.done[1].publish(ticket(round, chunk));
            }
        }
    }
}

fn ticket(round: u64, chunk: u64) -> u64 {
    round * 10 + chunk + 1
}

fn value(rank: usize, round: u64, chunk: u64) -> u64 {
    ticket(round, chunk) * 10 + rank as u64
}

fn look(there: impl Fn() -> bool) {
    while !there() {
        thread::yield_now();
    }
}

fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn both(preemptions: usize, rank: impl Fn(Arc<Two>, usize) + Send + Sync + Copy + 'static) {
    explore(preemptions, move || {
        let two = Arc::new(Two::default());
        let other = two.clone();
        let peer = thread::spawn(move || rank(other, 1));
        rank(two, 0);
        peer.join().unwrap();
    });
}

#[test]
fn loom_no_wake_is_lost() {
    both(3, |two, me| {
        assert_eq!(two.say(me, 1, me as u64), 1 - me as u64);
    });
}

#[test]
fn loom_two_lines_in_turn_are_enough() {
    both(3, |two, me| {
        for round in 1..=3 {
            let mine = round * 10 + me as u64;
            assert_eq!(two.say(me, round, mine), round * 10 + 1 - me as u64);
        }
    });
}

/// One slot used twice: the second writing waits until the first reading is over.
#[test]
fn loom_a_slot_is_not_written_while_it_is_read() {
    both(3, |two, me| {
        for chunk in 1..=2 {
            if chunk > 1 {
                two.wait(me, || two.done[1 - me].has_reached(chunk - 1));
            }
            two.slots[me][0].write(chunk * 10 + me as u64);
            two.ready[me].publish(chunk);
            two.wait(me, || two.ready[1 - me].has_reached(chunk));
            assert_eq!(two.slots[1 - me][0].read(), chunk * 10 + 1 - me as u64);
            two.done[me].publish(chunk);
        }
        publication();
        two.bells[1 - me].wake_for(me);
    });
}

#[test]
fn loom_two_slots_in_turn_are_enough() {
    both(2, |two, me| two.reduce(me, 1, 3));
}

/// A rank that put something returns before it has been taken; its next call waits.
#[test]
fn loom_a_call_begins_when_the_one_before_is_over() {
    both(2, |two, me| {
        two.broadcast(me, 1, 3);
        two.broadcast(me, 2, 1);
        two.reduce(me, 3, 1);
    });
}

/// A ring without a look at the sleeper, as the membership does: the woken rank sees the change behind the ring.
#[test]
fn loom_a_ring_tells_what_it_is_for() {
    both(3, |two, me| {
        if me == 1 {
            two.closed[1].publish(1);
            two.bells[0].ring();
            return;
        }
        while !two.closed[1].has_reached(1) {
            let may_sleep = || Ok::<_, ()>(!two.closed[1].has_reached(1));
            assert_eq!(two.bells[0].sleep(1, Duration::MAX, may_sleep), Ok(()));
        }
    });
}

/// Rank 0 sleeps for one of two at a time; the other one does not wake it, and is seen all the same.
#[test]
fn loom_who_comes_while_another_is_awaited_is_seen() {
    explore(2, || {
        let shared = Arc::new((Doorbell::default(), <[Progress; 2]>::default()));
        let publish = |rank: usize| {
            let shared = shared.clone();
            thread::spawn(move || {
                let (bell, came) = &*shared;
                came[rank - 1].publish(1);
                publication();
                bell.wake_for(rank);
            })
        };
        let peers = [publish(1), publish(2)];
        let (bell, came) = &*shared;
        let mut missing = vec![1, 2];
        while let Some(&last) = missing.last() {
            let is_there = |rank: &usize| came[rank - 1].has_reached(1);
            let may_sleep = || Ok::<_, ()>(!missing.iter().any(is_there));
            assert_eq!(bell.sleep(last, Duration::MAX, may_sleep), Ok(()));
            missing.retain(|rank| !is_there(rank));
        }
        peers.into_iter().for_each(|peer| peer.join().unwrap());
    });
}

#[test]
fn loom_a_header_is_read_whole() {
    const HEADER: [u8; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
    explore(2, || {
        let mailbox = Arc::new(Mailbox::default());
        let poster = mailbox.clone();
        let peer = thread::spawn(move || poster.post(&HEADER));
        look(|| mailbox.is_there());
        assert_eq!(mailbox.read(), HEADER);
        peer.join().unwrap();
    });
}
