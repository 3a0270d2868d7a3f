//! Joining a job: `init` reads a launcher's environment, `from_world` takes a `World` that the program has made.

use burn_ddp_comm::{LaunchEnv, World, WorldOptions};

use super::Ddp;
use crate::Result;

impl Ddp {
    /// Joins the job that a launcher describes in the environment (`burnrun`, torchrun, plain `RANK`/`WORLD_SIZE`/…),
    /// or makes a world of 1 when nothing is set. *Collective*: returns when all ranks have joined.
    ///
    /// Its deadlines are those of [`WorldOptions::from_env`]. Costs a rendezvous at the launcher's store, connections
    /// to other ranks, and one [barrier](Ddp::barrier); a world of 1 communicates nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm): half-set or contradictory variables, an unreachable master, a port in use,
    /// ranks that do not join in time (the error names them).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let ddp = Ddp::init()?; // alone, unless `burnrun` started the program
    /// println!("rank {} of {}", ddp.rank(), ddp.world_size());
    /// # assert_eq!((ddp.rank(), ddp.world_size()), (0, 1));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn init() -> Result<Self> {
        Self::init_with(WorldOptions::from_env()?)
    }

    /// [`Ddp::init`] with [`WorldOptions`] of your own. *Collective*, at the cost of `init`.
    ///
    /// # Errors
    ///
    /// As [`Ddp::init`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// use burn_ddp::WorldOptions;
    /// use std::time::Duration;
    /// let options = WorldOptions { timeout: Duration::from_secs(30 * 60), ..WorldOptions::from_env()? };
    /// let ddp = Ddp::init_with(options)?; // each collective may take half an hour
    /// # assert_eq!(ddp.world_size(), 1);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn init_with(options: WorldOptions) -> Result<Self> {
        #[cfg(feature = "mpi")]
        if options.engine == Some(burn_ddp_comm::EngineChoice::External("mpi")) {
            return Self::from_world(over_mpi(options)?);
        }
        let world = match LaunchEnv::detect()? {
            Some(env) => World::join(&env, options)?,
            None => World::solo(options),
        };
        Self::from_world(world)
    }

    /// The handle of a rank, for a [`World`] that the program has made. *Collective*. Costs what [`World::group`]
    /// costs: connections to the other ranks and one [barrier](Ddp::barrier).
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if the ranks cannot form a group.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// use burn_ddp::WorldOptions;
    /// use burn_ddp::comm::World;
    /// let ddp = Ddp::from_world(World::solo(WorldOptions::default()))?; // ignores the environment
    /// assert_eq!(ddp.world_size(), 1);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn from_world(world: World) -> Result<Self> {
        let group = world.group()?;
        tracing::info!(rank = world.rank(), world_size = world.world_size(), engine = world.engine(), "joined");
        let ddp = Ddp::new(world, group);
        ddp.read_logical_ranks()?;
        Ok(ddp)
    }
}

/// A world whose groups use MPI.
#[cfg(feature = "mpi")]
#[track_caller]
fn over_mpi(options: WorldOptions) -> Result<World> {
    // Some MPIs must be initialised before the ranks meet.
    let world = match burn_ddp_mpi::detect()? {
        Some(env) => World::join(&env, options)?,
        None => World::solo(options),
    };
    burn_ddp_mpi::attach(&world)?;
    Ok(world)
}
