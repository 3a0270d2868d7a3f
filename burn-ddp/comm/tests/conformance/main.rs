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
