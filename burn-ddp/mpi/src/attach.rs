//! Joining an MPI job: after [`attach()`] the groups of a world use MPI.

use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

use burn_ddp_comm::engine::{Engine, Fabric, HostEngine};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, CallInfo, CallSite, Collective, Error, Members, PeerInfo, Result, World};

use crate::channel::Route;
use crate::error::{call_failed, environment};
use crate::fabric::{MpiFabric, Ranks};
use crate::ffi::{self, Comm};
use crate::transport::MpiTransport;
use crate::wait::poll_pause;
use crate::{launcher_detection, lifecycle};

/// Makes all later groups of `world` use MPI. All ranks call it, before they make the next group; it returns when all
/// have called it.
///
/// Initialises MPI, if the program has not. A program that does so itself asks for `MPI_THREAD_MULTIPLE`, and finalizes
/// MPI after it has dropped its groups. Each rank is a process of its own, started by the `mpirun` of the MPI that this
/// program was built with.
///
/// # Errors
/// Any error of a rank ends the world, on all ranks. [`Error::Environment`] if MPI cannot be used, or was
/// not started with the ranks of this world; [`Error::Timeout`] naming the ranks that did not come within
/// [`WorldOptions::join_timeout`].
///
/// [`WorldOptions::join_timeout`]: burn_ddp_comm::WorldOptions::join_timeout
#[track_caller]
pub fn attach(world: &World) -> Result<()> {
    let site = CallSite::from(Location::caller());
    world.set_fabric(|_, membership| {
        let attached = attached(world, &membership, site);
        match &attached {
            // The other ranks learn which rank failed.
            Err(error @ Error::Environment { .. }) => world.fail(format!("it cannot use MPI: {error}")),
            Err(error) => membership.fail(error.clone()),
            Ok(_) => {}
        }
        attached
    })
}

/// Makes all ranks of one process talk to each other over MPI: tests the engine without a launcher.
///
/// # Errors
/// [`Error::Environment`] if MPI cannot be used.
#[doc(hidden)]
pub fn attach_threads(worlds: &[World]) -> Result<()> {
    let Some(first) = worlds.first() else { return Ok(()) };
    lifecycle::begin(first.options().join_timeout, &|| first.check())?;
    let comm = {
        let _one = lifecycle::one_at_a_time();
        Arc::new(Comm::of_this_process().map_err(call_failed)?)
    };
    for world in worlds {
        world.set_fabric(|_, membership| {
            lifecycle::register(&membership, world.options().timeout);
            Ok::<_, Error>(Arc::new(MpiFabric::new(comm.clone(), membership, Ranks::Threads)) as Arc<dyn Fabric>)
        })?;
    }
    Ok(())
}

fn attached(world: &World, membership: &Arc<Membership>, site: CallSite) -> Result<Arc<dyn Fabric>> {
    if launcher_detection::is_taken() && !lifecycle::has_begun() {
        return Err(environment(launcher_detection::TOO_LATE.to_owned()));
    }
    lifecycle::begin(world.options().join_timeout, &|| world.check())?;
    let _one = lifecycle::one_at_a_time();
    let all = Arc::new(Comm::world().map_err(call_failed)?);
    check_place(world, &all)?;
    let info = CallInfo::bare(Collective::NewGroup, 0, 0, site);
    let members = Arc::new(Members::all(world.world_size()));
    let call = Call::new(info, members, world.rank(), world.options().join_timeout);
    meet(world, membership, &all, &call)?;
    let comm = duplicate(&all, membership, &call)?;
    lifecycle::register(membership, world.options().timeout);
    Ok(Arc::new(MpiFabric::new(Arc::new(comm), membership.clone(), Ranks::Processes)))
}

/// Fails unless MPI and the world agree on this process's rank and on the number of ranks.
fn check_place(world: &World, all: &Comm) -> Result<()> {
    let (rank, size) = (world.rank(), world.world_size());
    let (mpi_rank, mpi_size) = (all.rank() as usize, all.size() as usize);
    if (rank, size) == (mpi_rank, mpi_size) {
        return Ok(());
    }
    let library = ffi::library();
    let message = if mpi_size == 1 && size > 1 {
        format!(
            "{library} was started with this process alone, but there are {size} ranks: start them by the mpirun that \
             belongs to it, or build this program with the MPI (MPICC=…) whose mpirun you use"
        )
    } else {
        format!(
            "to {library} this process is rank {mpi_rank} of {mpi_size}, but here it is rank {rank} of {size}: start \
             the ranks by its mpirun, and set no variables that say otherwise"
        )
    };
    Err(environment(message))
}

/// Bytes of a process's name: its process id, and the end of its host's name.
const NAME_BYTES: usize = 64;

/// Waits for all ranks, and checks that MPI's ranks are those of the world. An error names missing ranks, which MPI
/// could not do.
fn meet(world: &World, membership: &Arc<Membership>, all: &Arc<Comm>, call: &Call) -> Result<()> {
    let tag = all.tag_max();
    let route = |rank: usize| Route { process: rank as std::ffi::c_int, send: tag, receive: tag };
    let routes = (0..world.world_size()).map(route).collect();
    let transport = MpiTransport::new(world.rank(), routes, all.clone(), membership.clone(), false)?;
    let mut names = vec![[0; NAME_BYTES]; world.world_size()];
    let mut outputs: Vec<&mut [u8]> = names.iter_mut().map(|name| name.as_mut_slice()).collect();
    let peers = world.peers();
    HostEngine::new(transport).all_gather(call, &name(&peers[world.rank()]), &mut outputs)?;
    match peers.iter().zip(&names).find(|(peer, received)| name(peer) != **received) {
        None => Ok(()),
        Some((peer, _)) => {
            let rank = peer.rank;
            Err(environment(format!("{peer} is not rank {rank} to MPI: were the ranks started by two launchers?")))
        }
    }
}

fn name(peer: &PeerInfo) -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    let host = peer.host.as_bytes();
    let host = &host[host.len().saturating_sub(NAME_BYTES - 4)..];
    name[..4].copy_from_slice(&peer.pid.to_le_bytes());
    name[4..4 + host.len()].copy_from_slice(host);
    name
}

/// Makes a communicator of the world's own, which keeps its messages apart from the program's.
fn duplicate(all: &Comm, membership: &Arc<Membership>, call: &Call) -> Result<Comm> {
    let mut pause = poll_pause(membership);
    let mut duplication = all.duplicate().map_err(call_failed)?;
    loop {
        if let Some(comm) = duplication.test().map_err(call_failed)? {
            return Ok(comm);
        }
        membership.check()?;
        if Instant::now() >= call.deadline() {
            return Err(call.timed_out((0..call.members.count()).filter(|rank| *rank != call.rank).collect()));
        }
        pause.wait();
    }
}
