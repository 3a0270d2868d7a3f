//! Joining a job: `init` from a launcher's environment, `from_world` from a world made by hand.

use burn_ddp_comm::{LaunchEnv, WorldOptions, World};

use super::Ddp;
use crate::Result;

impl Ddp {
    /// Joins the job that a launcher describes in the environment (`burnrun`, torchrun, plain `RANK`/`WORLD_SIZE`/…),
    /// or makes a world of 1 when nothing is set. *Collective*: returns when all ranks have come.
    ///
    /// Waits are bounded by [`WorldOptions::from_env`].
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm): half-set or contradictory variables, an unreachable master, a port in use,
    /// ranks that do not come in time (named).
    #[track_caller]
    pub fn init() -> Result<Self> {
        Self::init_with(WorldOptions::from_env()?)
    }

    /// [`Ddp::init`] with [`WorldOptions`] of your own. *Collective*.
    ///
    /// # Errors
    ///
    /// As [`Ddp::init`].
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

    /// The handle of a rank whose world was made by hand. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if the ranks cannot form a group.
    #[track_caller]
    pub fn from_world(world: World) -> Result<Self> {
        let group = world.group()?;
        tracing::info!(rank = world.rank(), world_size = world.world_size(), engine = world.engine(), "joined");
        Ok(Ddp::new(world, group))
    }
}

/// A world whose groups use MPI.
#[cfg(feature = "mpi")]
#[track_caller]
fn over_mpi(options: WorldOptions) -> Result<World> {
    // Some MPIs must begin before the ranks meet.
    let world = match burn_ddp_mpi::detect()? {
        Some(env) => World::join(&env, options)?,
        None => World::solo(options),
    };
    burn_ddp_mpi::attach(&world)?;
    Ok(world)
}
