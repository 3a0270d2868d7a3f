//! Limits of the hardware, measured without any library: copies, the exchange of a cache line, copies and sums.

use anyhow::{Result, ensure};

use super::{BufferKind, Workload};
use crate::spin_barrier::Meeting;

/// The limit `memcpy`: all ranks copy their bytes at the same time.
pub(super) struct Memcpy {
    meeting: Meeting,
    buffers: Vec<[Vec<u8>; 2]>,
}

impl Memcpy {
    pub(super) fn new(meeting: Meeting) -> Memcpy {
        Memcpy { meeting, buffers: Vec::new() }
    }
}

impl Workload for Memcpy {
    fn prepare(&mut self, bytes: usize, count: usize) -> Result<()> {
        self.buffers = Vec::new();
        self.buffers = (0..count).map(|_| [vec![1; bytes], vec![2; bytes]]).collect();
        Ok(())
    }

    fn fill(&mut self, nth: usize, seed: u64) {
        self.buffers[nth][0].fill(seed as u8);
    }

    fn step(&mut self, nth: usize) -> Result<()> {
        let [from, to] = &mut self.buffers[nth];
        to.copy_from_slice(from);
        self.meeting.meet();
        Ok(())
    }

    fn check(&mut self, nth: usize, seed: u64, _: usize) -> Result<()> {
        ensure!(self.buffers[nth][1].iter().all(|byte| *byte == seed as u8), "a wrong copy");
        Ok(())
    }
}

/// The limit `cacheline`: each rank writes a cache line of its own and reads the others', the least that any collective
/// does.
pub(super) struct Cacheline {
    meeting: Meeting,
}

impl Cacheline {
    pub(super) fn new(meeting: Meeting) -> Cacheline {
        Cacheline { meeting }
    }
}

impl Workload for Cacheline {
    fn prepare(&mut self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn fill(&mut self, _: usize, _: u64) {}

    fn step(&mut self, _: usize) -> Result<()> {
        self.meeting.meet();
        Ok(())
    }

    /// Nothing to check: a rank that does not see the new lines does not return from the step.
    fn check(&mut self, _: usize, _: u64, _: usize) -> Result<()> {
        Ok(())
    }
}

/// The limit `floor`, a lower bound of an all-reduce through shared memory: one process per core does the sums and
/// copies of all ranks, without waits in between. For each rank, it sums the rank's slice over all inputs; for buffers
/// outside the arena, it also copies the input in and the result out.
pub(super) struct Floor {
    meeting: Meeting,
    world: usize,
    /// Number of ranks whose work this process does.
    shares: usize,
    kind: BufferKind,
    bytes: usize,
    sets: Vec<Set>,
}

/// The buffers of one all-reduce.
struct Set {
    /// For each rank whose work this process does: its buffer outside the arena; empty for buffers in the arena.
    own: Vec<Vec<f32>>,
    /// For each rank of the world: its input in the arena.
    arena: Vec<Vec<f32>>,
    result: Vec<f32>,
}

impl Floor {
    pub(super) fn new(meeting: Meeting, world: usize, shares: usize, kind: BufferKind) -> Floor {
        Floor { meeting, world, shares, kind, bytes: 0, sets: Vec::new() }
    }
}

impl Workload for Floor {
    fn prepare(&mut self, bytes: usize, count: usize) -> Result<()> {
        self.sets = Vec::new();
        self.bytes = bytes;
        let (len, own) = (bytes / 4, if self.kind == BufferKind::Slice { self.shares } else { 0 });
        let set =
            || Set { own: vec![vec![1.0; len]; own], arena: vec![vec![1.0; len]; self.world], result: vec![0.0; len] };
        self.sets = (0..count).map(|_| set()).collect();
        Ok(())
    }

    fn fill(&mut self, nth: usize, _: u64) {
        let set = &mut self.sets[nth];
        set.own.iter_mut().chain(&mut set.arena).for_each(|buffer| buffer.fill(1.0));
        set.result.fill(0.0);
    }

    fn step(&mut self, nth: usize) -> Result<()> {
        let Set { own, arena, result } = &mut self.sets[nth];
        for (from, to) in own.iter().zip(arena.iter_mut()) {
            to.copy_from_slice(from);
        }
        let slice = result.len() / self.world;
        for share in 0..self.shares {
            let range = share * slice..(share + 1) * slice;
            let sources: Vec<&[f32]> = arena.iter().map(|input| &input[range.clone()]).collect();
            add(&sources, &mut result[range]);
        }
        for to in own.iter_mut() {
            to.copy_from_slice(result);
        }
        self.meeting.meet();
        Ok(())
    }

    fn check(&mut self, nth: usize, _: u64, uses: usize) -> Result<()> {
        let sum = self.sets[nth].result.first().copied();
        let right = uses != 1 || sum.is_none_or(|sum| sum == self.world as f32) || self.bytes / 4 < self.world;
        ensure!(right, "a wrong sum: {sum:?}");
        Ok(())
    }
}

/// Number of elements summed at a time, few enough for the first cache level.
const BLOCK: usize = 1024;

fn add(sources: &[&[f32]], out: &mut [f32]) {
    for (nth, out) in out.chunks_mut(BLOCK).enumerate() {
        let part = |source: usize| &sources[source][nth * BLOCK..][..out.len()];
        let mut sum = [0.0; BLOCK];
        let sum = &mut sum[..out.len()];
        sum.copy_from_slice(part(0));
        for source in 1..sources.len() {
            sum.iter_mut().zip(part(source)).for_each(|(sum, x)| *sum += x);
        }
        out.copy_from_slice(sum);
    }
}
