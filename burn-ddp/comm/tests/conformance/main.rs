//! The conformance suite of engines, run over each engine of this crate.
//!
//! A new engine gets all of it with one more module: `conformance!` with a function that makes the ranks of a world.

#![allow(missing_docs, unreachable_pub)]

include!("topics.rs");

mod threads {
    crate::conformance!(burn_ddp_comm::World::threads);
}

mod tcp {
    crate::conformance!(crate::harness::over_tcp);
}

mod shm {
    crate::conformance!(crate::harness::over_shm);
}

#[cfg(target_os = "linux")]
mod two_machines {
    crate::conformance!(crate::harness::on_two_machines);
}

#[cfg(target_os = "linux")]
mod machines_in_turn {
    crate::conformance!(crate::harness::on_machines_in_turn);
}

#[cfg(target_os = "linux")]
mod one_and_many {
    crate::conformance!(crate::harness::on_machines_of_one_and_many);
}

#[cfg(target_os = "linux")]
mod machines_of_three {
    crate::conformance!(crate::harness::on_machines_of_three);
}
