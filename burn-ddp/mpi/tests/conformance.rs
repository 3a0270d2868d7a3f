//! What every engine must do, done by MPI: all ranks are threads of this process, which talks to itself.

#![allow(dead_code, missing_docs, unreachable_pub)]

#[path = "../../comm/tests/conformance/agreement.rs"]
mod agreement;
#[path = "../../comm/tests/conformance/failure.rs"]
mod failure;
#[path = "../../comm/tests/conformance/harness.rs"]
mod harness;
#[path = "../../comm/tests/conformance/numerics.rs"]
mod numerics;
#[path = "../../comm/tests/conformance/objects.rs"]
mod objects;
#[path = "../../comm/tests/conformance/pending.rs"]
mod pending;
#[path = "../../comm/tests/conformance/rooted.rs"]
mod rooted;
#[path = "../../comm/tests/conformance/sequence.rs"]
mod sequence;
#[path = "../../comm/tests/conformance/splits.rs"]
mod splits;
#[path = "../../comm/tests/conformance/suite.rs"]
mod suite;
#[path = "../../comm/tests/conformance/tracks.rs"]
mod tracks;
#[path = "../../comm/tests/conformance/transfers.rs"]
mod transfers;
#[path = "../../comm/tests/conformance/values.rs"]
mod values;
#[path = "../../comm/tests/conformance/weights.rs"]
mod weights;

use suite::conformance;

mod mpi {
    use burn_ddp_comm::{WorldOptions, World};

    crate::conformance!(crate::mpi::over_mpi);

    /// Ranks that meet over TCP, each with control connections of its own, and talk over MPI.
    fn over_mpi(n: usize, options: WorldOptions) -> Vec<World> {
        let worlds = crate::harness::over_tcp(n, options);
        burn_ddp_mpi::attach_threads(&worlds).expect("MPI");
        worlds
    }

    #[test]
    fn is_what_runs() {
        let worlds = over_mpi(2, crate::harness::patient());
        assert!(worlds.iter().all(|world| world.engine() == "mpi"));
    }
}
