//! Gradients and parameters that the group's engine works on in the memory of their device.

use std::any::Any;
use std::fmt::Debug;
use std::time::Duration;

/// Elements of one collective, such as a bucket's, on loan to the group's engine.
///
/// A loan that is dropped without having been taken back must not free its memory: the device may still use it.
pub trait DeviceLoan: Any + Send + Debug {
    /// Number of elements.
    fn len_elems(&self) -> usize;

    /// Location of the elements, for the engine. Waits at most `patience` until it is known.
    ///
    /// # Errors
    ///
    /// The device's error, or that it did not answer.
    fn place(&mut self, patience: Duration) -> Result<&mut dyn Any, String>;
}
