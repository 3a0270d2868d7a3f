//! What every engine must do, done by MPI: all ranks are threads of this process, which talks to itself.

#![allow(dead_code, missing_docs, unreachable_pub)]

include!("../../comm/tests/conformance/suite.rs");

mod mpi {
    use burn_ddp_comm::{Options, World};

    crate::conformance!(crate::mpi::over_mpi);

    /// Ranks that meet over TCP, each with control connections of its own, and talk over MPI.
    fn over_mpi(n: usize, options: Options) -> Vec<World> {
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
