//! The protocol under loom: every interleaving, every order of memory that the language allows.
#![allow(unsafe_code)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::time::Duration;

use super::cell::{Announcement, LINE_WORDS, Line, Progress};
use super::doorbell::{Doorbell, publication};

/// What two ranks share here.
#[derive(Default)]
struct Two {
    lines: [[Line; 2]; 2],
    ready: [Progress; 2],
    done: [Progress; 2],
    bells: [Doorbell; 2],
    /// Memory that is not atomic: loom reports if it is read while it may be written.
    slots: [UnsafeCell<u64>; 2],
}

// SAFETY: loom itself reports accesses to the cells that are not ordered.
unsafe impl Sync for Two {}
// SAFETY: as above.
unsafe impl Send for Two {}

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

    fn say(&self, me: usize, round: u64, word: u64) -> u64 {
        let what = Announcement { fingerprint: round, weight: 1.0, note: 0, payload: [word; LINE_WORDS] };
        self.lines[me][(round % 2) as usize].publish(round, &what, 1);
        let theirs = &self.lines[1 - me][(round % 2) as usize];
        self.wait(me, || theirs.is_there(round));
        let said = theirs.read(1);
        assert_eq!(said.fingerprint, round, "a line of another round");
        said.payload[0]
    }
}

fn both(rank: impl Fn(Arc<Two>, usize) + Send + Sync + Copy + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let two = Arc::new(Two::default());
        let other = two.clone();
        let peer = thread::spawn(move || rank(other, 1));
        rank(two, 0);
        peer.join().unwrap();
    });
}

#[test]
fn loom_no_wake_is_lost() {
    both(|two, me| {
        assert_eq!(two.say(me, 1, me as u64), 1 - me as u64);
    });
}

#[test]
fn loom_two_lines_in_turn_are_enough() {
    both(|two, me| {
        for round in 1..=3 {
            let mine = round * 10 + me as u64;
            assert_eq!(two.say(me, round, mine), round * 10 + 1 - me as u64);
        }
    });
}

/// One slot used twice: the second writing waits until the first reading is over.
#[test]
fn loom_a_slot_is_not_written_while_it_is_read() {
    both(|two, me| {
        for chunk in 1..=2 {
            if chunk > 1 {
                two.wait(me, || two.done[1 - me].has_reached(chunk - 1));
            }
            // SAFETY: this is what the model checks.
            two.slots[me].with_mut(|slot| unsafe { *slot = chunk * 10 + me as u64 });
            two.ready[me].publish(chunk);
            two.wait(me, || two.ready[1 - me].has_reached(chunk));
            // SAFETY: as above.
            let read = two.slots[1 - me].with(|slot| unsafe { *slot });
            assert_eq!(read, chunk * 10 + 1 - me as u64);
            two.done[me].publish(chunk);
        }
        publication();
        two.bells[1 - me].wake_for(me);
    });
}
