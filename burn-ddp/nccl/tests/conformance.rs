//! The conformance suite of engines, with all collectives by NCCL, on a fake machine.
//!
//! The fake reduces as burn-ddp's host engines do, so bits can be compared; NCCL itself adds in another order. Means of
//! unequal weights differ all the same: NCCL applies factors before the sum, not after it. See `weights_make_shares` in
//! `tests/device`.

#![allow(missing_docs, unreachable_pub)]

include!("../../comm/tests/conformance/topics.rs");

use std::sync::Arc;

use burn_ddp_comm::{World, WorldOptions};
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{Device, HostMemory, NcclFabric};

/// Ranks in one process, each with a device of one machine.
fn through_device(n: usize, options: WorldOptions) -> Vec<World> {
    let machine = Machine::new(n);
    let worlds = World::threads(n, options);
    for (rank, world) in worlds.iter().enumerate() {
        world
            .set_fabric(|own, membership| {
                let device = Device::new(&machine.driver(), rank)?;
                let fabric = NcclFabric::new(own, membership, machine.nccl(), device, HostMemory::ThroughDevice)?;
                Ok::<_, burn_ddp_comm::Error>(Arc::new(fabric) as _)
            })
            .expect("a fabric");
    }
    worlds
}

mod nccl {
    crate::conformance!(crate::through_device; but the means of unequal weights);
}
