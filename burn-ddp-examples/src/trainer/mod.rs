//! The parts that the trainers (`mnist`, `mnist_learner`, `resnet`, `alexnet`, `gpt`) share.
//!
//! | | |
//! |---|---|
//! | `options` | their command lines |
//! | `launch` | starts the ranks; turns errors into exit codes |
//! | `training_loop` | trains, evaluates and reports; a trainer adds a `Task` |
//! | `checkpoints` | saves a training, and resumes from the newest checkpoint |
//! | `loss_and_accuracy` | losses and accuracies over all ranks |
//! | `schedule` | learning rates over a training |
//! | [`summary`], `display` | results: as JSON for programs, as a table for people |

mod checkpoints;
mod display;
mod launch;
pub(crate) mod loss_and_accuracy;
pub(crate) mod options;
mod schedule;
pub mod summary;
pub(crate) mod training_loop;

pub use launch::{exit_code, launch};
pub use options::{LoopOptions, Options};
pub use schedule::Schedule;
