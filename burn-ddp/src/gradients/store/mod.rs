//! Gradients that stay in the memory of their device. What they are is for others to know: here are slots, and when.

pub(crate) mod device_store;

use std::any::Any;
use std::fmt::Debug;
use std::time::Duration;

/// What becomes of a gradient that is put.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Contribution {
    /// It stands for no items, and counts as absent, NaN or not.
    Ignored,
    /// It is the slot's only one in this step.
    Whole,
    /// It is added, times this, to the sum over micro-batches.
    Added(f64),
}

/// Elements of one bucket on the way to the group's engine and back.
///
/// Whoever drops one that was not taken back must leave the memory alone: the device may still work on it.
pub trait DeviceLoan: Any + Send + Debug {
    /// How many elements.
    fn len_elems(&self) -> usize;

    /// Where they are, for the engine; waits no longer than `patience` until that is known.
    ///
    /// # Errors
    ///
    /// What the device says, or that it did not answer.
    fn place(&mut self, patience: Duration) -> Result<&mut dyn Any, String>;
}

/// Keeps gradients and averages of all slots of a wrapped model on their device.
pub(crate) trait Keeper: Any + Send + Debug {
    /// Whether the step has a gradient for `slot`.
    fn holds(&self, slot: usize) -> bool;

    /// Gives away the gradients of `slots`, zeros for those without, in this order; sums are divided by `divisor` first. Nothing waits
    /// for the device.
    fn lend(&mut self, slots: &[usize], divisor: f64) -> Result<Box<dyn DeviceLoan>, String>;

    /// The averages of `slots` from what was lent of them. Nothing waits for the device.
    fn take_back(&mut self, slots: &[usize], lent: Box<dyn DeviceLoan>) -> Result<(), String>;

    /// Forgets gradients and averages.
    fn forget(&mut self);
}
