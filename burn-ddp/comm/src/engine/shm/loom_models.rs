//! Models of the protocol under loom: every interleaving of few preemptions, every order of memory that the language
//! allows. README.md lists the faults that the models find.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use loom::sync::Arc;
use loom::thread;

use super::doorbell::{Doorbell, publication};
use super::loom_machine::{Machine, value};
use super::rank_cell::{Mailbox, Progress};

fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Each rank on a thread of its own. `rank` returns `None` if it gave up waiting; fails if that happens in every order
/// of steps.
fn ranks<R>(ranks: usize, preemptions: usize, rank: R)
where
    R: Fn(&Machine, usize) -> Option<()> + Send + Sync + Copy + 'static,
{
    let completed = std::sync::Arc::new(AtomicUsize::new(0));
    let count = completed.clone();
    explore(preemptions, move || {
        let machine = Arc::new(Machine::of(ranks));
        let start = |me| {
            let machine = machine.clone();
            thread::spawn(move || rank(&machine, me))
        };
        let peers: Vec<_> = (1..ranks).map(start).collect();
        let mine = rank(&machine, 0);
        let theirs: Vec<_> = peers.into_iter().map(|peer| peer.join().unwrap()).collect();
        if mine.is_some() && theirs.iter().all(Option::is_some) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert_ne!(completed.load(Ordering::Relaxed), 0, "no order in which all ranks complete");
}

#[test]
fn loom_no_wake_is_lost() {
    ranks(2, 3, |machine, me| machine.say(me, 1, true));
}

#[test]
fn loom_no_wake_of_three_is_lost() {
    ranks(3, 1, |machine, me| machine.say(me, 1, me == 0));
}

#[test]
fn loom_two_lines_in_turn_are_enough() {
    ranks(2, 3, |machine, me| (1..=3).try_for_each(|round| machine.say(me, round, true)));
}

#[test]
fn loom_two_lines_in_turn_are_enough_for_three() {
    ranks(3, 1, |machine, me| (1..=3).try_for_each(|round| machine.say(me, round, false)));
}

/// One slot used twice: the second writing waits until the first reading is over.
#[test]
fn loom_a_slot_is_not_written_while_it_is_read() {
    ranks(2, 3, |machine, me| {
        let mine = &machine.ranks[me];
        for chunk in 1..=2 {
            if chunk > 1 {
                machine.wait(me, |peer| machine.ranks[peer].done.has_reached(chunk - 1));
            }
            mine.slots[0].write(value(me, 1, chunk));
            mine.ready.publish(chunk);
            machine.wait(me, |peer| machine.ranks[peer].ready.has_reached(chunk));
            machine.peers(me).for_each(|peer| assert_eq!(machine.ranks[peer].slots[0].read(), value(peer, 1, chunk)));
            mine.done.publish(chunk);
        }
        machine.wake_sleepers(me);
        Some(())
    });
}

#[test]
fn loom_two_slots_in_turn_are_enough() {
    ranks(2, 2, |machine, me| machine.reduce(me, 1, 3));
}

#[test]
fn loom_two_slots_in_turn_are_enough_for_three() {
    ranks(3, 0, |machine, me| machine.reduce(me, 1, 3));
}

/// A rank that put a chunk returns before the chunk has been taken; its next call waits for that.
#[test]
fn loom_a_call_begins_when_the_one_before_is_over() {
    ranks(2, 2, |machine, me| {
        machine.broadcast(me, 1, 3)?;
        machine.broadcast(me, 2, 1)?;
        machine.reduce(me, 3, 1)
    });
}

/// One reader is a call ahead of the other.
#[test]
fn loom_a_call_begins_when_the_one_before_is_over_for_three() {
    ranks(3, 1, |machine, me| {
        machine.broadcast(me, 1, 3)?;
        machine.broadcast(me, 2, 1)
    });
}

/// Messages both ways at once, then one way.
#[test]
fn loom_pairs_take_turns_with_two_parcels() {
    ranks(2, 1, |machine, me| {
        let peer = 1 - me;
        machine.transfer(me, Some((peer, 1)), Some((peer, 1)), 3)?;
        (2..=3).try_for_each(|round| {
            let (to, from) = if me == 0 { (Some((1, round)), None) } else { (None, Some((0, round))) };
            machine.transfer(me, to, from, 1)
        })
    });
}

/// Parcels of one rank serve all receivers: a message returns when the last parcel has been taken.
#[test]
fn loom_parcels_for_one_are_taken_before_those_for_another() {
    ranks(3, 2, |machine, me| match me {
        0 => (1..=2).try_for_each(|peer| machine.transfer(0, Some((peer, 1)), None, 2)),
        _ => machine.transfer(me, None, Some((0, 1)), 2),
    });
}

/// Each rank receives from one peer while it sends to the other.
#[test]
fn loom_messages_go_in_a_ring() {
    ranks(3, 0, |machine, me| machine.transfer(me, Some(((me + 1) % 3, 1)), Some(((me + 2) % 3, 1)), 3));
}

/// Rank 0 looks at a result while the next reduction goes on; the one after that overwrites it.
#[test]
fn loom_a_result_is_not_written_while_it_is_viewed() {
    ranks(2, 2, view_one_result_for_longer);
}

#[test]
fn loom_a_result_is_not_written_while_one_of_three_views_it() {
    ranks(3, 0, view_one_result_for_longer);
}

fn view_one_result_for_longer(machine: &Machine, me: usize) -> Option<()> {
    assert!(machine.reduce_shared(me, 1, false)?);
    assert!(!machine.reduce_shared(me, 2, me == 0)?);
    if me == 0 {
        machine.view(1);
    }
    assert!(machine.reduce_shared(me, 3, false)?);
    Some(())
}

/// A ring without a look at what the owner sleeps for, as the membership rings: the woken rank sees the change that
/// came before the ring.
#[test]
fn loom_a_ring_tells_what_it_is_for() {
    ranks(2, 3, |machine, me| {
        let closed = &machine.ranks[1].closed;
        let bell = &machine.ranks[0].bell;
        if me == 1 {
            closed.publish(1);
            bell.ring();
            return Some(());
        }
        while !closed.has_reached(1) {
            let may_sleep = || Ok::<_, ()>(!closed.has_reached(1));
            assert_eq!(bell.sleep(1, Duration::MAX, may_sleep), Ok(()));
        }
        Some(())
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
        while !mailbox.is_there() {
            thread::yield_now();
        }
        assert_eq!(mailbox.read(), HEADER);
        peer.join().unwrap();
    });
}
