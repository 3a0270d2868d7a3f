//! Starting ranks without a launcher: as threads, or as processes that run the same program.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn_ddp_comm::{LaunchEnv, World, WorldOptions};
use burn_ddp_launch::{Launcher, Stdio};

use super::Ddp;
use crate::{Error, Result};

impl Ddp {
    /// Runs `f` on `n` ranks that are threads of this process, and returns the ranks' results, in rank order.
    ///
    /// For tests, examples and backends with a device per thread. The threads share one thread pool and one random
    /// generator of Burn's CPU backend; use [`Ddp::launch`] where that matters.
    ///
    /// # Errors
    ///
    /// [`Error::Rank`]: the first rank that failed, with its error or panic message. Waits of the other ranks end at
    /// once.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp::prelude::*;
    /// let sums = Ddp::spawn(3, |ddp| Ok(ddp.sum(ddp.rank() as f64)?))?;
    /// assert_eq!(sums, [3.0, 3.0, 3.0]);
    ///
    /// let error = Ddp::spawn(2, |ddp| {
    ///     anyhow::ensure!(ddp.rank() == 0, "no data");
    ///     Ok(ddp.barrier()?) // does not hang
    /// });
    /// assert_eq!(error.unwrap_err().to_string(), "rank 1 failed: no data");
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn spawn<T: Send>(n: usize, f: impl Fn(Ddp) -> anyhow::Result<T> + Sync) -> Result<Vec<T>> {
        Self::spawn_with(n, WorldOptions::default(), f)
    }

    /// [`Ddp::spawn`] with [`WorldOptions`] of your own.
    ///
    /// # Errors
    ///
    /// As [`Ddp::spawn`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// use burn_ddp::WorldOptions;
    /// use std::time::Duration;
    /// let options = WorldOptions { timeout: Duration::from_secs(60), ..WorldOptions::default() };
    /// let sums = Ddp::spawn_with(2, options, |ddp| Ok(ddp.sum(1)?))?; // a rank waits for a minute at most
    /// assert_eq!(sums, [2, 2]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn spawn_with<T: Send>(
        n: usize,
        options: WorldOptions,
        f: impl Fn(Ddp) -> anyhow::Result<T> + Sync,
    ) -> Result<Vec<T>> {
        if n == 0 {
            return Err(Error::invalid("a job has at least one rank"));
        }
        let first_failure = Mutex::new(None);
        let run = |world: World| {
            let rank = world.rank();
            let note = |reason: String| {
                first_failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((rank, reason));
            };
            match Ddp::from_world(world) {
                Ok(ddp) => run_rank(ddp, &f, |failure| note(failure.reason())).ok(),
                Err(error) => {
                    note(error.to_string());
                    None
                }
            }
        };
        let results: Vec<Option<T>> = std::thread::scope(|scope| {
            let threads: Vec<_> = World::threads(n, options)
                .into_iter()
                .map(|world| {
                    let run = &run;
                    std::thread::Builder::new()
                        .name(format!("rank {}", world.rank()))
                        .spawn_scoped(scope, move || run(world))
                })
                .collect();
            threads.into_iter().map(|t| t.ok().and_then(|t| t.join().ok()).flatten()).collect()
        });
        match first_failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((rank, reason)) => Err(Error::Rank { rank, reason }),
            None => match results.iter().position(Option::is_none) {
                Some(rank) => Err(Error::Rank { rank, reason: "its thread could not be started".into() }),
                None => Ok(results.into_iter().flatten().collect()),
            },
        }
    }

    /// Runs `f` on `n` ranks that are processes on this machine: executes the running program again, with the same
    /// arguments, once per rank. Call it at the beginning of `main`, and return its result from `main`.
    ///
    /// In the process that the user starts, `launch` starts the ranks, watches them and returns when all have ended. In
    /// a rank, and under `burnrun` or torchrun, it joins the job, runs `f` and returns. With `n = 1` it runs `f` in
    /// this process.
    ///
    /// Rank 0 keeps the terminal; the output lines of another rank are prefixed with its number, as in `[rank 1] `.
    ///
    /// # Errors
    ///
    /// In a rank: the error of joining or of `f`. In the launching process: [`Error::Launch`], or [`Error::Job`] with
    /// the exit code and the report.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp::prelude::*;
    ///
    /// fn main() -> anyhow::Result<()> {
    ///     Ddp::launch(2, |ddp| {
    ///         assert_eq!(ddp.sum(1)?, 2); // from two processes
    ///         Ok(ddp.finish()?)
    ///     })
    /// }
    /// ```
    pub fn launch(n: usize, f: impl FnOnce(Ddp) -> anyhow::Result<()>) -> anyhow::Result<()> {
        anyhow::ensure!(n > 0, "a job has at least one rank");
        if n == 1 || LaunchEnv::detect()?.is_some() {
            return match run_rank(Ddp::init()?, f, |_| ()) {
                Ok(()) => Ok(()),
                Err(Failure::Error(error)) => Err(error),
                Err(Failure::Panic(panic)) => resume_unwind(panic),
            };
        }
        let program = std::env::current_exe()?;
        let outcome = Launcher::new(program, std::env::args_os().skip(1))
            .nproc(n)
            .stdio(Stdio::FirstRankInherits)
            .run()
            .map_err(|e| Error::Launch(Arc::new(e)))?;
        match outcome.exit_code {
            0 => Ok(()),
            exit_code => {
                let rank = outcome.failure.as_ref().map(|failure| failure.rank);
                Err(Error::Job { exit_code, rank, report: outcome.to_string() }.into())
            }
        }
    }
}

enum Failure {
    Error(anyhow::Error),
    Panic(Box<dyn Any + Send>),
}

impl Failure {
    fn reason(&self) -> String {
        match self {
            Failure::Error(error) => format!("{error:#}"),
            Failure::Panic(panic) => {
                let text = panic.downcast_ref::<&str>().map(ToString::to_string);
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                format!("panicked: {}", text.unwrap_or_else(|| "a non-string payload".into()))
            }
        }
    }
}

/// Runs `f`; if it fails, passes the failure to `note` and then to the other ranks.
fn run_rank<T>(ddp: Ddp, f: impl FnOnce(Ddp) -> anyhow::Result<T>, note: impl FnOnce(&Failure)) -> Result<T, Failure> {
    // A second handle keeps the rank in the job until its failure has been sent to the other ranks.
    let held = ddp.clone();
    let failure = match catch_unwind(AssertUnwindSafe(|| f(ddp))) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => Failure::Error(error),
        Err(panic) => Failure::Panic(panic),
    };
    note(&failure);
    match &failure {
        Failure::Error(_) => held.world().fail(failure.reason()),
        // Adds the line of the panic.
        Failure::Panic(_) => held.world().fail_with_panic(),
    }
    Err(failure)
}
