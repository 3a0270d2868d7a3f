//! The conformance suite of engines over MPI: all ranks are threads of this process, which sends messages to itself.

#![allow(missing_docs, unreachable_pub)]

include!("../../comm/tests/conformance/topics.rs");

mod mpi {
    use burn_ddp_comm::{World, WorldOptions};

    crate::conformance!(crate::mpi::over_mpi);

    /// Ranks that meet over TCP, each with control connections of its own, and exchange frames over MPI.
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
