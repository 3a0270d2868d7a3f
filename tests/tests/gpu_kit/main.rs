//! The program that `gpu/build.sh` packs: all that `gpu/run.sh` runs on a machine with GPUs, in one, since Burn for
//! CUDA is large.
//!
//! Under the name of a program it is that program; under its own name it is the suites below, with
//! libtest's options.
#![deny(unsafe_code)]

mod programs;

#[path = "../awkward.rs"]
mod awkward;
#[path = "../gradients.rs"]
mod gradients;
#[path = "../mixed_devices.rs"]
mod mixed;
#[path = "../models.rs"]
mod models;
#[path = "../parity/main.rs"]
mod parity;
#[path = "../processes.rs"]
mod processes;
