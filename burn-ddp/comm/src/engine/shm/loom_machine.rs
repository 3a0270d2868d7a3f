//! The ranks of a machine and the memory that they share, for loom's models: the protocol with the real cells and the
//! real doorbell, on memory whose accesses loom watches.
#![allow(unsafe_code)]

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::thread;

use super::doorbell::{Doorbell, publication};
use super::rank_cell::{Announcement, LINE_WORDS, Line, Pair, Progress};

/// The memory that the ranks of a machine share here.
pub(super) struct Machine {
    pub(super) ranks: Vec<Rank>,
    /// By writer, then by the other rank of the pair.
    pairs: Vec<Vec<Pair>>,
    /// Slices of the result of a shared buffer, by the rank that writes them.
    result: Vec<Memory>,
}

/// Words that one rank writes.
#[derive(Default)]
pub(super) struct Rank {
    lines: [Line; 2],
    pub(super) ready: Progress,
    pub(super) done: Progress,
    pub(super) closed: Progress,
    pub(super) bell: Doorbell,
    eager: [Memory; 2],
    pub(super) slots: [Memory; 2],
    results: [Memory; 2],
    parcels: [Memory; 2],
    /// Slices of the input of a shared buffer, by the rank that reduces them.
    input: [Memory; MOST_RANKS],
}

const MOST_RANKS: usize = 3;

/// Memory that is not atomic: loom reports if it is read while it may be written.
#[derive(Default)]
pub(super) struct Memory(UnsafeCell<u64>);

// SAFETY: loom itself reports accesses to the cell that are not ordered.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    pub(super) fn write(&self, value: u64) {
        // SAFETY: this is what the models check.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    pub(super) fn read(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|cell| unsafe { *cell })
    }
}

impl Machine {
    pub(super) fn of(ranks: usize) -> Machine {
        let pairs = |_| (0..ranks).map(|_| Pair::default()).collect();
        Machine {
            ranks: (0..ranks).map(|_| Rank::default()).collect(),
            pairs: (0..ranks).map(pairs).collect(),
            result: (0..ranks).map(|_| Memory::default()).collect(),
        }
    }

    pub(super) fn peers(&self, me: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.ranks.len()).filter(move |rank| *rank != me)
    }

    /// Sleeps until `there` holds for all peers, as `Board::wait` does when spinning is over.
    pub(super) fn wait(&self, me: usize, there: impl Fn(usize) -> bool) {
        self.wake_sleepers(me);
        let mut missing: Vec<usize> = self.peers(me).filter(|peer| !there(*peer)).collect();
        while let Some(&last) = missing.last() {
            let may_sleep = || Ok::<_, ()>(!missing.iter().any(|peer| there(*peer)));
            assert_eq!(self.ranks[me].bell.sleep(last, Duration::MAX, may_sleep), Ok(()));
            missing.retain(|peer| !there(*peer));
        }
    }

    /// Waits without sleep. Loom could let two ranks that wait for a third one take turns for ever, so with three ranks
    /// one look has to do: a rank that finds nothing gives up. That leaves out no order of what the ranks do, since
    /// looking changes nothing.
    fn look(&self, there: impl Fn() -> bool) -> Option<()> {
        if self.ranks.len() > 2 {
            thread::yield_now();
            return there().then_some(());
        }
        while !there() {
            thread::yield_now();
        }
        Some(())
    }

    pub(super) fn wake_sleepers(&self, me: usize) {
        publication();
        for peer in self.peers(me) {
            self.ranks[peer].bell.wake_for(me);
        }
    }

    /// Announces a word in the line and in the eager buffer of `round`, and checks what each peer announced. Without
    /// `sleeps` the rank only looks.
    pub(super) fn say(&self, me: usize, round: u64, sleeps: bool) -> Option<()> {
        let (nth, word) = (parity(round), |rank| value(rank, round, 0));
        self.ranks[me].eager[nth].write(word(me));
        let what = Announcement { fingerprint: round, payload: [word(me); LINE_WORDS], ..Announcement::default() };
        self.ranks[me].lines[nth].publish(round, &what, 1);
        let there = |peer: usize| self.ranks[peer].lines[nth].is_there(round);
        if sleeps {
            self.wait(me, there);
        } else {
            self.wake_sleepers(me);
            self.look(|| self.peers(me).all(there))?;
        }
        for peer in self.peers(me) {
            let said = self.ranks[peer].lines[nth].read(1);
            assert_eq!(said.fingerprint, round, "a line of another round");
            assert_eq!((said.payload[0], self.ranks[peer].eager[nth].read()), (word(peer), word(peer)));
        }
        Some(())
    }

    /// Announces a call with `note` and waits for the peers' announcements; returns their notes. Here and below, waits
    /// look and yield: sleep has models of its own.
    fn announce(&self, me: usize, round: u64, note: u64) -> Option<Vec<u64>> {
        let nth = parity(round);
        self.ranks[me].lines[nth].publish(round, &Announcement { note, ..Announcement::default() }, 0);
        self.look(|| self.peers(me).all(|peer| self.ranks[peer].lines[nth].is_there(round)))?;
        Some(self.peers(me).map(|peer| self.ranks[peer].lines[nth].read(0).note).collect())
    }

    fn put(&self, me: usize, round: u64, chunk: u64) {
        self.ranks[me].slots[parity(chunk)].write(value(me, round, chunk));
        self.ranks[me].ready.publish(ticket(round, chunk));
    }

    fn slot(&self, peer: usize, round: u64, chunk: u64) -> Option<u64> {
        self.look(|| self.ranks[peer].ready.has_reached(ticket(round, chunk)))?;
        Some(self.ranks[peer].slots[parity(chunk)].read())
    }

    fn fold(&self, me: usize, round: u64, chunk: u64) -> Option<()> {
        self.look(|| self.peers(me).all(|peer| self.ranks[peer].ready.has_reached(ticket(round, chunk))))?;
        let others: u64 = self.peers(me).map(|peer| self.ranks[peer].slots[parity(chunk)].read()).sum();
        self.ranks[me].results[parity(chunk)].write(value(me, round, chunk) + others);
        self.done(me, round, chunk);
        Some(())
    }

    fn done(&self, me: usize, round: u64, chunk: u64) {
        self.ranks[me].done.publish(ticket(round, chunk));
    }

    fn await_done(&self, me: usize, round: u64, chunk: u64) -> Option<()> {
        self.look(|| self.peers(me).all(|peer| self.ranks[peer].done.has_reached(ticket(round, chunk))))
    }

    fn take(&self, me: usize, round: u64, chunk: u64) -> Option<()> {
        self.await_done(me, round, chunk)?;
        for peer in self.peers(me) {
            assert_eq!(self.ranks[peer].results[parity(chunk)].read(), self.sum(round, chunk));
        }
        Some(())
    }

    /// Sum of what the ranks put.
    fn sum(&self, round: u64, chunk: u64) -> u64 {
        (0..self.ranks.len()).map(|rank| value(rank, round, chunk)).sum()
    }

    /// Model of `reduce_chunks` of `slot_reductions`.
    pub(super) fn reduce(&self, me: usize, round: u64, chunks: u64) -> Option<()> {
        self.announce(me, round, 0)?;
        self.put(me, round, 0);
        for chunk in 0..chunks {
            if chunk > 0 {
                self.take(me, round, chunk - 1)?;
            }
            if chunk + 1 < chunks {
                self.put(me, round, chunk + 1);
            }
            self.fold(me, round, chunk)?;
        }
        self.take(me, round, chunks - 1)
    }

    /// Model of `broadcast_chunks` of `chunked_data_movement`, from rank 0.
    pub(super) fn broadcast(&self, me: usize, round: u64, chunks: u64) -> Option<()> {
        self.announce(me, round, 0)?;
        for chunk in 0..chunks {
            if me == 0 {
                if chunk >= 2 {
                    self.await_done(0, round, chunk - 2)?;
                }
                self.put(0, round, chunk);
            } else {
                assert_eq!(self.slot(0, round, chunk)?, value(0, round, chunk));
                self.done(me, round, chunk);
            }
        }
        Some(())
    }

    /// Model of `transfer` of `point_to_point_messages`: sends `to` a peer and receives `from` one, each with the
    /// number of that pair's call.
    pub(super) fn transfer(
        &self,
        me: usize,
        to: Option<(usize, u64)>,
        from: Option<(usize, u64)>,
        parcels: u64,
    ) -> Option<()> {
        let peers: Vec<_> = to.into_iter().chain(from.filter(|from| Some(*from) != to)).collect();
        for &(peer, round) in &peers {
            let sent = if to == Some((peer, round)) { value(me, round, 0) } else { 0 };
            let line = Announcement { fingerprint: round, payload: [sent; LINE_WORDS], ..Announcement::default() };
            self.pairs[me][peer].line(round).publish(round, &line, 1);
        }
        for &(peer, round) in &peers {
            self.look(|| self.pairs[peer][me].is_there(round))?;
            assert_eq!(self.pairs[peer][me].line(round).read(0).fingerprint, round, "a line of another round");
        }
        for step in 0..=parcels {
            if let Some((peer, round)) = to.filter(|_| step < parcels) {
                if step >= 2 {
                    self.await_taken(me, peer, round, step - 2)?;
                }
                self.ranks[me].parcels[parity(step)].write(value(me, round, step));
                self.pairs[me][peer].sent.publish(ticket(round, step));
            }
            if let Some((peer, round)) = from.filter(|_| step > 0) {
                self.look(|| self.pairs[peer][me].sent.has_reached(ticket(round, step - 1)))?;
                let parcel = self.ranks[peer].parcels[parity(step - 1)].read();
                assert_eq!(parcel, value(peer, round, step - 1));
                assert_eq!(self.pairs[peer][me].line(round).read(1).payload[0], value(peer, round, 0));
                self.pairs[me][peer].taken.publish(ticket(round, step - 1));
            }
        }
        match to {
            Some((peer, round)) => self.await_taken(me, peer, round, parcels - 1),
            None => Some(()),
        }
    }

    fn await_taken(&self, me: usize, peer: usize, round: u64, step: u64) -> Option<()> {
        self.look(|| self.pairs[peer][me].taken.has_reached(ticket(round, step)))
    }

    /// Model of `reduce_shared` of `in_place_reductions`, of one buffer; `viewed` if this rank still views the last
    /// result. Returns true if the new result is in the buffer.
    pub(super) fn reduce_shared(&self, me: usize, round: u64, viewed: bool) -> Option<bool> {
        let slices = 0..self.ranks.len();
        slices.clone().for_each(|slice| self.ranks[me].input[slice].write(value(me, round, slice as u64)));
        let notes = self.announce(me, round, u64::from(viewed))?;
        let free = !viewed && notes.iter().all(|note| *note == 0);
        let sum = slices.map(|rank| self.ranks[rank].input[me].read()).sum();
        let made = if free { &self.result[me] } else { &self.ranks[me].input[me] };
        made.write(sum);
        self.done(me, round, 0);
        self.await_done(me, round, 0)?;
        if free {
            self.view(round);
            return Some(true);
        }
        for peer in self.peers(me) {
            assert_eq!(self.ranks[peer].input[peer].read(), self.sum(round, peer as u64));
        }
        self.done(me, round, 1);
        self.await_done(me, round, 1)?;
        Some(false)
    }

    /// Reads the result of `round` where it lies.
    pub(super) fn view(&self, round: u64) {
        for (slice, result) in self.result.iter().enumerate() {
            assert_eq!(result.read(), self.sum(round, slice as u64));
        }
    }
}

fn parity(number: u64) -> usize {
    (number % 2) as usize
}

fn ticket(round: u64, chunk: u64) -> u64 {
    round * 10 + chunk + 1
}

pub(super) fn value(rank: usize, round: u64, chunk: u64) -> u64 {
    ticket(round, chunk) * 10 + rank as u64
}
