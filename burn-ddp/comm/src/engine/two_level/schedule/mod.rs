//! Schedules of the traffic between machines: pure functions of the machines, the weights and the length, so the
//! schedules of all ranks fit together. Of the work inside a machine they only say when it is done.
//!
//! | file | schedules |
//! |---|---|
//! | `broadcast_steps.rs` | a buffer that one machine has, to all |
//! | `gathered_rows.rs` | a row of each rank, or of each machine, to all |
//! | `reduction_plan.rs` | reductions: who reduces and sends what, and when |
//! | `machine_shares.rs` | how many elements each machine puts together |
//!
//! `simulation_tests.rs` runs reductions and broadcasts between random machines.

use std::ops::Range;

mod broadcast_steps;
mod gathered_rows;
mod machine_shares;
mod reduction_plan;
#[cfg(test)]
mod reduction_plan_tests;
#[cfg(test)]
mod simulation_tests;

pub(super) use self::broadcast_steps::broadcast;
pub(super) use self::gathered_rows::{announcements, counterpart, rows_by_local_rank};
pub(super) use self::machine_shares::{Shares, Subtree, partial_bytes, segments, subtrees};
pub(super) use self::reduction_plan::{Plan, ReductionSchedule, Turn, chunks, steps_of, turns};

/// What two ranks of different machines exchange: elements in a [`Plan`], bytes in a [`Step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchanged {
    /// The other rank, in the group.
    pub(super) peer: usize,
    pub(super) range: Range<usize>,
}

/// Frames that a rank exchanges with ranks of other machines at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Step {
    /// Number of the step, the same at both ends of a frame.
    pub(super) number: usize,
    /// Bytes of the memory that this rank sends.
    pub(super) sends: Vec<Exchanged>,
    /// Bytes of the memory that this rank fills.
    pub(super) receives: Vec<Exchanged>,
}
