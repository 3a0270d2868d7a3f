//! Stopping all ranks after the same step: a wish of any rank, from a signal or from its program, on which the ranks
//! agree by a flag behind the gradients of a step.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn_ddp_comm::post_mortem::{Event, now_ms};
use burn_ddp_comm::{ReduceOp, StopSignal, World};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::{Ddp, Result};

/// A signal that comes again within this time is the same wish: a scheduler may send it to burnrun and to the ranks,
/// and burnrun passes it on.
const SAME_WISH: Duration = Duration::from_secs(1);

/// True once this process was sent the signal to stop.
static SIGNALLED: AtomicBool = AtomicBool::new(false);
/// True if the signal to stop is caught; it is from the first look of a program on.
static CAUGHT: OnceLock<bool> = OnceLock::new();

/// The wish of a rank to stop, and what the ranks of a handle have agreed on.
#[derive(Debug, Default)]
pub(crate) struct StopWish {
    /// State of the handle of which this one's handle is a part.
    whole: Option<Arc<StopWish>>,
    wished: AtomicBool,
    agreed: AtomicBool,
    /// True once the program has looked whether it should stop, and the launcher knows.
    has_looked: AtomicBool,
    /// True once the program has been told to stop, and the launcher knows.
    was_told: AtomicBool,
}

impl StopWish {
    /// State of a handle for a part of the ranks.
    pub(crate) fn part(whole: &Arc<StopWish>) -> StopWish {
        StopWish { whole: Some(whole.clone()), ..StopWish::default() }
    }

    /// True if this rank wishes to stop.
    pub(crate) fn is_wished(&self) -> bool {
        let whole = || self.whole.as_ref().is_some_and(|whole| whole.is_wished());
        SIGNALLED.load(Ordering::Relaxed) || self.wished.load(Ordering::Relaxed) || whole()
    }

    /// Wishes, on this rank, that all ranks of the job stop.
    fn request(&self) {
        match &self.whole {
            Some(whole) => whole.request(),
            None => self.wished.store(true, Ordering::Relaxed),
        }
    }

    /// Notes whether any rank of the handle wishes to stop. All ranks do so in the same call.
    pub(crate) fn agree(&self, any: bool) {
        if any {
            self.agreed.store(true, Ordering::Relaxed);
        }
    }

    fn is_agreed(&self) -> bool {
        self.agreed.load(Ordering::Relaxed) || self.whole.as_ref().is_some_and(|whole| whole.is_agreed())
    }
}

impl Ddp {
    /// True once all ranks have agreed to stop: one of them was sent the signal to stop, or has called
    /// [`request_stop`](Self::request_stop). The program then saves a checkpoint and ends.
    ///
    /// The answer is the same on every rank between the same two steps. It changes only inside calls of all ranks: the
    /// ones that average gradients (a flag travels with them, so that it costs nothing), [`sum`](Self::sum),
    /// [`mean`](Self::mean) and [`agree_to_stop`](Self::agree_to_stop). So all ranks take the same branch, without a
    /// collective. On the handle of a [part](Self::split) it is the agreement of its ranks, or of all.
    ///
    /// A rank whose batch weighs 0 takes no part in averages: its wish comes with its next batch that weighs more. The
    /// same holds for a rank that waits in [`join`](Self::join). Such a rank takes no branch, either: leave the loop,
    /// `join`, and then save.
    ///
    /// From the first call on, in any process of the job, the signal no longer ends this one: SIGTERM, or the signal
    /// that BURN_DDP_PREEMPT_SIGNAL names (`burnrun --preempt-signal`). A second one, at least a second later, does.
    /// So call it in each step from the first one on, and not only at the end of an epoch. Under burnrun the ranks then
    /// have 60 s (`--preempt-grace`) to save, and the job ends with 75 (`--preempt-exit-code`).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::SgdConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// let steps = Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     let mut model = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
    ///     let mut optim = SgdConfig::new().init();
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     for step in 1..=1000 {
    ///         # let x = Tensor::<2>::ones([4, 2], &device);
    ///         if let Some(grads) = ddp.backward(&model.forward(x).mean(), &model)? {
    ///             model = optim.step(0.1, model, grads);
    ///         }
    ///         # if step == 3 && ddp.rank() == 1 { ddp.request_stop(); } // as a signal to rank 1
    ///         if ddp.stop_requested() {
    ///             checkpoints.save(step, |c| c.model(&model))?;
    ///             return Ok(step);
    ///         }
    ///     }
    ///     Ok(1000)
    /// })?;
    /// assert_eq!(steps, [4, 4]); // rank 1 was asked to stop after its third step
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        let stop = self.state().stop.is_agreed();
        self.tell_that_it_looks(stop);
        stop
    }

    /// True if this rank wishes to stop: its process was sent the signal, or it has called
    /// [`request_stop`](Self::request_stop). Ranks may differ, so this alone must not decide which calls a rank makes
    /// together with others. It is for long work of each rank by itself, such as an evaluation or a warm-up: leave it,
    /// then let all ranks [agree](Self::agree_to_stop).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let evaluate = |_batch: usize| 0.5;
    /// let stopped = Ddp::spawn(2, |ddp| {
    ///     let mut loss = 0.0;
    ///     for batch in 0..100 {
    ///         if ddp.stop_wished() {
    ///             break;
    ///         }
    ///         loss += evaluate(batch);
    ///         # if batch == 7 && ddp.rank() == 1 { ddp.request_stop(); }
    ///     }
    ///     let loss = ddp.mean(loss)?; // all ranks agree here
    ///     # assert!(loss > 0.0);
    ///     Ok(ddp.stop_requested()) // if true, `loss` is that of some batches only
    /// })?;
    /// assert_eq!(stopped, [true, true]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn stop_wished(&self) -> bool {
        self.tell_that_it_looks(false);
        self.state().stop.is_wished()
    }

    /// Wishes that all ranks stop, as the signal does; they agree in the next step. For a limit of your own, such as a
    /// time that is up. One rank is enough.
    ///
    /// # Example
    ///
    /// The example of [`stop_requested`](Self::stop_requested) has a call of it.
    pub fn request_stop(&self) {
        self.state().stop.request();
    }

    /// Lets all ranks agree whether to stop, where no step does: true on every rank if one of them
    /// [wishes](Self::stop_wished) it. *Collective*. Costs one step, in which a rank sends a byte to each other rank.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let stopped = Ddp::spawn(2, |ddp| {
    ///     if ddp.rank() == 1 {
    ///         ddp.request_stop();
    ///     }
    ///     Ok((ddp.stop_requested(), ddp.agree_to_stop()?, ddp.stop_requested()))
    /// })?;
    /// assert_eq!(stopped, [(false, true, true); 2]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn agree_to_stop(&self) -> Result<bool> {
        self.tell_that_it_looks(false);
        let mut wished = [u8::from(self.state().stop.is_wished())];
        self.group().all_reduce(&mut wished, ReduceOp::Max)?;
        self.state().stop.agree(wished[0] != 0);
        Ok(self.stop_requested())
    }

    /// Exit code for `main` to return: 75 if [`stop_requested`](Self::stop_requested) has returned true; else 0, also
    /// if a wish came after the program's last look. Launchers other than burnrun, and their scripts, tell by it that
    /// the job is to be started again.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp::prelude::*;
    /// use std::process::ExitCode;
    ///
    /// fn main() -> anyhow::Result<ExitCode> {
    ///     let ddp = Ddp::init()?;
    ///     // … train, and save if `ddp.stop_requested()`
    ///     let code = ddp.exit_code();
    ///     ddp.finish()?;
    ///     Ok(code)
    /// }
    /// ```
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self.state().stop.was_told.load(Ordering::Relaxed) {
            true => ExitCode::from(StopSignal::EXIT_CODE),
            false => ExitCode::SUCCESS,
        }
    }

    /// Catches the signal from now on, and tells the launcher, once, that it is caught, and that the program `stops`.
    fn tell_that_it_looks(&self, stops: bool) {
        let (world, stop) = (self.world(), &self.state().stop);
        let rank = world.rank();
        let first = |flag: &AtomicBool| !flag.load(Ordering::Relaxed) && !flag.swap(true, Ordering::Relaxed);
        if first(&stop.has_looked) && *CAUGHT.get_or_init(catch) {
            world.tell_launcher(&Event::CanStop { rank, at: now_ms() });
        }
        if stops && first(&stop.was_told) {
            tracing::info!(rank = self.rank(), "the ranks stop here");
            world.tell_launcher(&Event::Stopping { rank, at: now_ms() });
        }
    }
}

/// Tells the launcher that a checkpoint is complete: its report names the last one.
pub(crate) fn tell_saved(world: &World, checkpoint: &str) {
    let checkpoint = checkpoint.to_owned();
    world.tell_launcher(&Event::Saved { rank: world.rank(), checkpoint, at: now_ms() });
}

/// Catches the signal to stop. Returns false, after a warning, if that is not possible.
fn catch() -> bool {
    let caught = signal().and_then(|signal| {
        let signals = Signals::new([signal.number()]).map_err(|e| format!("{signal} cannot be caught: {e}"))?;
        let watch = std::thread::Builder::new().name("burn-ddp-stop".into());
        watch.spawn(move || follow(signals)).map_err(|e| format!("cannot start a thread: {e}"))
    });
    caught.inspect_err(|reason| tracing::warn!("signals will not stop this rank after a step: {reason}")).is_ok()
}

fn signal() -> std::result::Result<StopSignal, String> {
    Ok(StopSignal::from_env()?.unwrap_or_default())
}

/// Notes the first signal. A later one, that is not [the same wish](SAME_WISH), ends the process as if it had not been
/// caught.
fn follow(mut signals: Signals) {
    let mut first: Option<Instant> = None;
    for signal in signals.forever() {
        match first {
            None => {
                SIGNALLED.store(true, Ordering::Relaxed);
                tracing::info!(signal, "asked to stop");
            }
            Some(first) if first.elapsed() < SAME_WISH => {}
            Some(_) => {
                let _ = emulate_default_handler(signal);
            }
        }
        first.get_or_insert_with(Instant::now);
    }
}
