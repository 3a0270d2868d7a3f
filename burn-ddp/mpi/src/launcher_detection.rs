//! Detection of the launcher for programs that use MPI.
//!
//! MPICH's `mpirun` lets each process have one session with its process manager. If the ranks of a world met through
//! that session, MPI could not be initialised any more, and would end the process. So MPI is initialised first, and the
//! ranks agree by messages of MPI where to meet.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use burn_ddp_comm::{LaunchEnv, Meeting, Result, WorldOptions};

use crate::error::{call_failed, environment};
use crate::ffi::{Comm, Completed, Requests};
use crate::lifecycle;
use crate::wait::poll_pause_alone;

/// Variable of MPICH's launchers: the number of the socket to the process manager.
const PMI_FD: &str = "PMI_FD";

pub(crate) const TOO_LATE: &str = "MPICH's mpirun allows each process one session, and the world has met through it, \
    so MPI cannot be initialised: call burn_ddp_mpi::detect() in place of LaunchEnv::detect(), before World::join";

/// Bytes of the name under which the ranks meet.
const NAME_BYTES: usize = 128;

/// True if this process was started by MPICH's launcher, whose one session MPI needs.
pub(crate) fn is_taken() -> bool {
    std::env::var_os(PMI_FD).is_some()
}

/// [`LaunchEnv::detect`] for programs that call [`attach`](crate::attach()): the launcher of this process, if there is
/// one.
///
/// Under MPICH's `mpirun` it initialises MPI, and the ranks of one machine agree where to meet. On several machines the
/// variables `BURN_DDP_MASTER=host:port` and `BURN_DDP_SECRET_FILE` are needed.
///
/// # Errors
/// Those of [`LaunchEnv::detect`] and [`WorldOptions::from_env`];
/// [`Error::Environment`](burn_ddp_comm::Error::Environment) if MPI cannot be used, or the ranks do not agree in time.
pub fn detect() -> Result<Option<LaunchEnv>> {
    let Some(env) = LaunchEnv::detect()? else { return Ok(None) };
    if !is_taken() {
        return Ok(Some(env));
    }
    let timeout = WorldOptions::from_env()?.join_timeout;
    lifecycle::begin(timeout, &|| Ok(()))?;
    if !matches!(env.meeting, Meeting::Pmi { .. }) {
        return Ok(Some(env));
    }
    if env.local_world_size != env.world_size {
        let message = "under MPICH's mpirun on several machines ranks that use MPI cannot agree where to meet: set \
                       BURN_DDP_MASTER=host:port, where host is rank 0's, and BURN_DDP_SECRET_FILE (burnrun secret)";
        return Err(environment(message.to_owned()));
    }
    let name = agree(timeout)?;
    Ok(Some(LaunchEnv { job_id: name.clone(), meeting: Meeting::Local { name }, ..env }))
}

/// Agrees on a name under which the ranks meet: rank 0 makes it and sends it to the others.
fn agree(timeout: Duration) -> Result<String> {
    let all = Arc::new(Comm::world().map_err(call_failed)?);
    let deadline = Instant::now().checked_add(timeout);
    // The last tag is for the meeting in `attach`.
    let tag = all.tag_max() - 1;
    let mut name = [b' '; NAME_BYTES];
    let mut requests: Requests<()> = Requests::new(all.clone());
    if all.rank() == 0 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let made = format!("MPI job of process {} at {}", std::process::id(), since.as_nanos());
        name[..made.len()].copy_from_slice(made.as_bytes());
        for peer in 1..all.size() {
            requests.send(peer, tag, name.to_vec(), NAME_BYTES, ()).map_err(call_failed)?;
        }
    } else {
        requests.receive(0, tag, vec![0; NAME_BYTES], NAME_BYTES, ()).map_err(call_failed)?;
    }
    let messages = if all.rank() == 0 { all.size() - 1 } else { 1 };
    let mut pause = poll_pause_alone();
    let (mut completed, mut done): (Vec<Completed<()>>, c_int) = (Vec::new(), 0);
    while done < messages {
        requests.poll(&mut completed).map_err(call_failed)?;
        for Completed { buffer, len, .. } in completed.drain(..) {
            len.map_err(call_failed)?;
            name.copy_from_slice(&buffer[..NAME_BYTES]);
            done += 1;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let waited = timeout.as_secs_f64();
            let message =
                format!("the ranks have not agreed where to meet within {waited} s: do all of them get there?");
            return Err(environment(message));
        }
        pause.wait();
    }
    Ok(String::from_utf8_lossy(&name).trim().to_owned())
}
