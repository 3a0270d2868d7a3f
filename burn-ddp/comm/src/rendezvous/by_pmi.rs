//! Meeting point and secret of ranks that MPICH's mpirun started, exchanged through its process manager.

use std::sync::Mutex;
use std::time::Instant;

use super::store_location::{Agreed, job_key};
use crate::env::{LaunchEnv, Meeting};
use crate::net::address;
use crate::pmi::Pmi;
use crate::poison_free_locks::lock;
use crate::store::Serving;
use crate::{Error, JobKey, Result, Secret};

/// Key under which rank 0 puts `host:port`, or `secret@host:port` if no file has the secret.
const KEY: &str = "burn-ddp";

/// Agreement of the ranks of this process's job. Process-wide as the session with the process manager: a second world
/// of this process meets at the same place.
static SESSION: Mutex<Option<Session>> = Mutex::new(None);

#[derive(Clone)]
struct Session {
    job_id: String,
    /// `None` on one machine, where the name of the job is enough.
    place: Option<(Secret, String, u16)>,
}

pub(super) fn agree(env: &LaunchEnv, fd: i32, host: &str, deadline: Instant) -> Result<Agreed> {
    let mut known = lock(&SESSION);
    let mut server = None;
    let session = match &*known {
        Some(session) => session.clone(),
        None => {
            let mut pmi = Pmi::begin(fd, deadline)?;
            let job_id = format!("{}, {}", env.job_id, pmi.job());
            let on_one_machine = env.local_world_size == env.world_size;
            let place = if on_one_machine { None } else { Some(exchange(&mut pmi, env, &job_id, host, &mut server)?) };
            pmi.end()?;
            known.insert(Session { job_id, place }).clone()
        }
    };
    let Session { job_id, place } = session;
    let Some((secret, host, port)) = place else {
        let env = LaunchEnv { job_id, ..env.clone() };
        let meeting = Meeting::Local { name: env.job_id.clone() };
        return Ok(Agreed { job: job_key(&env, &meeting)?, meeting, server });
    };
    let job = JobKey::new(&secret, &job_id, env.restart_count);
    // The first time rank 0 hosts the store already.
    let meeting = match server {
        Some(_) => Meeting::Launcher { host, port },
        None => Meeting::Rank0 { host, port },
    };
    Ok(Agreed { meeting, job, server })
}

/// Rank 0 hosts the store on a free port of `host` and publishes the address.
fn exchange(
    pmi: &mut Pmi,
    env: &LaunchEnv,
    job_id: &str,
    host: &str,
    server: &mut Option<Serving>,
) -> Result<(Secret, String, u16)> {
    let in_file = env.secret_file.as_deref().map(Secret::read).transpose()?;
    if env.rank == 0 {
        let (secret, said) = match &in_file {
            Some(secret) => (secret.clone(), String::new()),
            None => {
                let new = Secret::generate()?;
                let said = format!("{}@", new.digits());
                (new, said)
            }
        };
        let (serving, port) = host_store(host, &JobKey::new(&secret, job_id, env.restart_count))?;
        *server = Some(serving);
        pmi.put(KEY, &format!("{said}{}", address::join(host, port)))?;
    }
    pmi.barrier()?;
    let said = pmi.get(KEY)?;
    let (secret, place) = match said.split_once('@') {
        Some((digits, place)) => (Secret::parse(digits), place),
        None => (in_file, said.as_str()),
    };
    match (secret, address::split(place)) {
        (Some(secret), Some((host, port))) => Ok((secret, host.to_owned(), port)),
        // Not shown, since it may hold the secret.
        _ => Err(Error::environment(
            "rank 0 has published no address and secret; is BURN_DDP_SECRET_FILE set for all ranks or for none?",
        )),
    }
}

fn host_store(host: &str, job: &JobKey) -> Result<(Serving, u16)> {
    let hosted = address::bind(host, 0).and_then(|listener| {
        let at = listener.local_addr()?;
        if at.ip().is_loopback() {
            return Err(std::io::Error::other("that means loopback here, where ranks on other machines cannot come"));
        }
        Ok((Serving::start(listener, job)?, at.port()))
    });
    hosted.map_err(|e| {
        Error::environment(format!(
            "rank 0 cannot host the store on {host}, as mpirun calls its machine: {e}; name another address of it by \
             BURN_DDP_MASTER=host:port"
        ))
    })
}
