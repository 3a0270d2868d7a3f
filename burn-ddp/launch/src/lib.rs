//! Starts the ranks of a data-parallel job on one machine or on several, watches them and reports which one failed
//! first.
//!
//! `burnrun` uses this library, and so does `Ddp::launch` of burn-ddp, by which a program starts its own ranks. The
//! library knows nothing of training.
//!
//! | | |
//! |---|---|
//! | [`Launcher`] | builder of a job: program, ranks, machines, output |
//! | [`Outcome`], [`Failure`], [`RankExit`] | result of a job that ran; `Display` gives the report for a person |
//! | [`LaunchError`] | reason why a job did not start |
//!
//! A job can rely on this:
//!
//! - The launcher of a job on one machine hosts the rendezvous store on a free port of the loopback interface: users
//!   choose no port, and jobs on the same machine cannot be mixed up.
//! - Each rank leads a process group (and session) of its own. When the job ends, every process that a rank started
//!   ends too, in whatever group or session it is (outside of Linux: only in the ranks' groups). If the launcher is
//!   killed, the ranks and the processes that they started are killed too, except daemons that have emptied their
//!   environment.
//! - The first rank that fails decides the exit code. After its failure the other ranks have up to three seconds to
//!   end with errors of their own, then they get SIGTERM and, after the grace time, SIGKILL.
//! - Lines of different ranks are never mixed.
//!
//! # Example
//!
//! ```
//! use burn_ddp_launch::{RankExit, Launcher};
//!
//! let script = r#"if [ "$BURN_DDP_RANK" = 1 ]; then echo "no data" >&2; exit 7; fi; sleep 60"#;
//! let outcome = Launcher::new("sh", ["-c", script]).nproc(3).grace(std::time::Duration::from_millis(100)).run()?;
//!
//! let failure = outcome.failure.as_ref().expect("rank 1 fails");
//! assert_eq!((failure.rank, failure.exit), (1, RankExit::Code(7)));
//! assert_eq!(failure.last_lines, ["no data"]);
//! assert_eq!(outcome.stopped, [0, 2]);
//! println!("{outcome}"); // rank 1 (pid 4711) exited with code 7 after 0.0 s; stopped the other 2 ranks …
//! # Ok::<(), burn_ddp_launch::LaunchError>(())
//! ```
#![deny(unsafe_code)] // only unix_child_spawn.rs (between fork and exec) and signals.rs (handlers)

mod binding;
mod cgroup;
mod error;
mod event;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod generation_context;
mod generations;
mod guardian;
mod handed_over_files;
#[cfg(any(feature = "cli", feature = "fuzzing"))]
#[doc(hidden)]
pub mod hosts;
mod job_authentication;
mod job_spec;
mod launcher;
mod leftover_processes;
mod malloc_variables;
mod node_outcome;
mod nodes;
mod output;
mod preemption;
mod process_table;
mod rank_command;
mod rank_exit;
mod rank_processes;
mod rank_report_dir;
mod rank_start;
mod rank_store;
mod report;
mod signals;
mod start_watch;
mod supervisor;
mod unix_child_spawn;

pub use binding::BindTo;
pub use error::LaunchError;
pub use job_spec::Stdio;
pub use launcher::Launcher;
pub use output::settings::Streams;
pub use rank_command::available_cores;
pub use rank_exit::RankExit;
pub use report::outcome::{Failure, Outcome};
pub use report::report_files::rebuild_report;
