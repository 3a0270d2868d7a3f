//! Work of rank 0, or of the first rank of each machine, for which the other ranks wait without a time limit.

use std::panic::Location;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use burn_ddp_comm::ProcessGroup;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::file_failure::FileFailure;
use crate::{Ddp, Error, Result};

/// Longest time between two signs of life of a rank at work.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Time after which a rank logs that it is still at work; again after twice the time, and so on.
const SLOW: Duration = Duration::from_secs(30);

/// Message of each rank in a round. Rounds follow each other until no rank is at work.
#[derive(Serialize, Deserialize)]
enum Sign<S> {
    AtWork,
    Done(S),
}

impl Ddp {
    /// Runs `f` on rank 0 first and then, if it returned `Ok`, on the other ranks: for downloads into a cache that all
    /// ranks share. *Collective*. `f` may take longer than the deadline of a collective: the other ranks wait as long
    /// as rank 0 is alive.
    ///
    /// Costs two steps, in which a rank sends a few bytes to each other rank, and two more at least every 5 seconds
    /// while rank 0 runs `f`.
    ///
    /// # Errors
    ///
    /// Rank 0 gets the error of `f`; the others get [`Error::Rank`] with its text, and do not run `f`.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    /// let calls = AtomicUsize::new(0);
    /// let order = Ddp::spawn(2, |ddp| ddp.main_first(|| Ok(calls.fetch_add(1, SeqCst))))?;
    /// assert_eq!(order, [0, 1]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn main_first<T>(&self, f: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        some_first(self.group(), self.is_main(), f)
    }

    /// Runs `f` on the first rank of each machine ([`local_rank`](Self::local_rank) 0) at the same time, and then, if
    /// all of them returned `Ok`, on the other ranks: for downloads into a cache of each machine. *Collective*, at the
    /// cost of [`main_first`](Self::main_first). `f` may take longer than the deadline of a collective, and longer on
    /// one machine than on another.
    ///
    /// # Errors
    ///
    /// A rank on which `f` failed gets the error of `f`; the others get [`Error::Rank`] with the text of the first rank
    /// that failed.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    /// let calls = AtomicUsize::new(0);
    /// let order = Ddp::spawn(2, |ddp| ddp.local_main_first(|| Ok(calls.fetch_add(1, SeqCst))))?;
    /// assert_eq!(order, [0, 1]); // both ranks are on one machine
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn local_main_first<T>(&self, f: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let (peers, own) = (self.world().peers(), self.world().rank());
        let of_machine = |rank: &&usize| peers[**rank].node_rank == peers[own].node_rank;
        // In a part of the job, which may lack local rank 0, its first rank on the machine takes that role.
        some_first(self.group(), self.group().ranks().iter().find(of_machine) == Some(&own), f)
    }
}

/// Runs `f` on rank 0 alone, and returns its value on every rank. `f` may take any time, see [`at_work`]. *Collective*.
///
/// # Errors
///
/// [`Error::File`] on every rank with the failure of rank 0.
#[track_caller]
pub(crate) fn on_main<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    f: impl FnOnce() -> Result<T, FileFailure>,
) -> Result<T> {
    let mine = (group.rank() == 0).then(|| at_work::<Option<Result<T, FileFailure>>, _>(group, f));
    let outcome = outcomes(group, mine)?.into_iter().next().flatten();
    let outcome = outcome.unwrap_or_else(|| Err("returned no outcome".into()));
    outcome.map_err(|failure| failure.into_error(Some(group.ranks()[0])))
}

/// Runs `f` on rank 0, for any time, see [`at_work`]; then on the other ranks. *Collective*.
///
/// # Errors
///
/// [`Error::Comm`] if a peer failed.
#[track_caller]
pub(crate) fn main_first<T>(group: &ProcessGroup, f: impl FnOnce() -> T) -> Result<T> {
    if group.rank() == 0 {
        let value = at_work::<(), _>(group, f);
        outcomes(group, ())?;
        Ok(value)
    } else {
        outcomes(group, ())?;
        Ok(f())
    }
}

/// Runs `f` on the ranks that are `first`, for any time, see [`at_work`]; then, if none of them failed, on the others.
/// *Collective*.
#[track_caller]
fn some_first<T>(group: &ProcessGroup, first: bool, f: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let failed = |reasons: Vec<Option<String>>| {
        let first = group.ranks().iter().zip(reasons).find_map(|(rank, reason)| Some((*rank, reason?)));
        first.map_or(Ok(()), |(rank, reason)| Err(Error::Rank { rank, reason }))
    };
    if !first {
        failed(outcomes(group, None)?)?;
        return f();
    }
    let result = at_work::<Option<String>, _>(group, f);
    let reasons = outcomes(group, result.as_ref().err().map(|e| format!("{e:#}")));
    // The other ranks may have ended the job by now: this rank's own error is the cause, so it is returned first.
    let value = result?;
    failed(reasons?)?;
    Ok(value)
}

/// Runs `f` on this rank, while each other rank is at work, too, or waits in [`outcomes`]. This rank must call
/// `outcomes` next, with a value of type `S`.
///
/// Every few seconds all ranks exchange signs of life. So `f` may take longer than the deadline of a collective, and
/// the failure of any rank is noticed meanwhile.
#[track_caller]
fn at_work<S: Serialize + DeserializeOwned, T>(group: &ProcessGroup, f: impl FnOnce() -> T) -> T {
    if group.world_size() == 1 {
        return f();
    }
    let site = Location::caller();
    // Dropped when `f` has returned or panicked.
    let (working, ended) = channel::<()>();
    std::thread::scope(move |scope| {
        let signs = move || give_signs_of_life::<S>(group, site, &ended);
        if let Err(e) = std::thread::Builder::new().name("signs of life".into()).spawn_scoped(scope, signs) {
            tracing::warn!("no thread for signs of life, so other ranks wait {:?} at most: {e}", group.timeout());
        }
        let value = f();
        drop(working);
        value
    })
}

/// Takes part in rounds of signs until the sender of `ended` is dropped.
fn give_signs_of_life<S: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    site: &Location<'_>,
    ended: &Receiver<()>,
) {
    let (began, mut slow) = (Instant::now(), SLOW);
    let pause = SIGN_OF_LIFE.min(group.timeout() / 4);
    while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        if began.elapsed() >= slow {
            let (rank, seconds) = (group.ranks()[group.rank()], began.elapsed().as_secs());
            tracing::warn!(
                "rank {rank} has been at work for {seconds} s at {site}, and other ranks wait: slow storage?"
            );
            slow *= 2;
        }
        // After an error the world has ended, and the next call of this rank returns the cause.
        if group.all_gather_object(&Sign::<S>::AtWork).is_err() {
            return;
        }
    }
}

/// The values that ranks pass, by rank, once no rank is [`at_work`]. *Collective*.
#[track_caller]
fn outcomes<S: Serialize + DeserializeOwned>(group: &ProcessGroup, mine: S) -> Result<Vec<S>> {
    let mine = Sign::Done(mine);
    loop {
        let signs = group.all_gather_object(&mine)?;
        let done = signs.into_iter().map(|sign| match sign {
            Sign::Done(outcome) => Some(outcome),
            Sign::AtWork => None,
        });
        if let Some(outcomes) = done.collect() {
            return Ok(outcomes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_others_wait_for_rank_0_beyond_the_deadline() {
        let timeout = Duration::from_millis(500);
        let options = burn_ddp_comm::WorldOptions { timeout, ..Default::default() };
        let ranks = Ddp::spawn_with(3, options, |ddp| {
            let slow = || std::thread::sleep(3 * timeout / 2);
            let value = on_main(ddp.group(), || {
                slow();
                Ok(7)
            })?;
            let error = on_main::<()>(ddp.group(), || Err("has no disk".into()));
            let first = ddp.main_first(|| {
                if ddp.is_main() {
                    slow();
                }
                Ok(ddp.rank())
            })?;
            Ok((value, error.unwrap_err().to_string(), first, ddp.sum(1.0)?))
        })
        .unwrap();
        let error = "rank 0 has no disk".to_string();
        assert_eq!(ranks, [0, 1, 2].map(|rank| (7, error.clone(), rank, 3.0)));
    }

    #[test]
    fn the_first_ranks_of_all_machines_work_at_once_and_as_long_as_they_need() {
        let timeout = Duration::from_millis(800);
        let options = burn_ddp_comm::WorldOptions { timeout, ..Default::default() };
        let order = std::sync::atomic::AtomicUsize::new(0);
        let at_once = std::sync::Barrier::new(2);
        // Two machines of two ranks.
        let ranks = Ddp::spawn_with(4, options, |ddp| {
            let nth = some_first(ddp.group(), ddp.rank() % 2 == 0, || {
                if ddp.rank() % 2 == 0 {
                    at_once.wait();
                }
                if ddp.rank() == 2 {
                    std::thread::sleep(3 * timeout / 2); // a slow download
                }
                Ok(order.fetch_add(1, std::sync::atomic::Ordering::SeqCst))
            })?;
            Ok((nth, ddp.sum(1)?))
        })
        .unwrap();
        assert_eq!((ranks[0], ranks[2]), ((0, 4), (1, 4)));
        assert_eq!(ranks[1].0 + ranks[3].0, 5, "{ranks:?}");
    }

    #[test]
    fn a_machine_that_fails_is_an_error_on_all_ranks() {
        let errors = Ddp::spawn(4, |ddp| {
            let failed = some_first(ddp.group(), ddp.rank() % 2 == 0, || match ddp.rank() {
                0 => Ok(()),
                2 => anyhow::bail!("no network"),
                rank => panic!("rank {rank} runs what failed"),
            });
            ddp.barrier()?;
            Ok(failed.unwrap_err().to_string())
        })
        .unwrap();
        assert_eq!(
            errors,
            ["rank 2 failed: no network", "rank 2 failed: no network", "no network", "rank 2 failed: no network"]
        );
    }

    #[test]
    fn in_one_machine_the_first_of_the_machine_is_rank_0() {
        let first = std::sync::atomic::AtomicUsize::new(usize::MAX);
        let ranks = Ddp::spawn(3, |ddp| {
            ddp.local_main_first(|| {
                use std::sync::atomic::Ordering::SeqCst;
                Ok(first.compare_exchange(usize::MAX, ddp.rank(), SeqCst, SeqCst).is_ok())
            })
        });
        assert_eq!(ranks.unwrap(), [true, false, false]);
    }

    #[test]
    fn a_rank_that_fails_while_rank_0_is_at_work_is_noticed_by_the_others_at_once() {
        let noticed = std::sync::Barrier::new(2);
        let error = Ddp::spawn(3, |ddp| match ddp.rank() {
            0 => Ok(on_main(ddp.group(), || {
                noticed.wait();
                Ok(())
            })?),
            1 => {
                let outcome = on_main(ddp.group(), || Ok(()));
                noticed.wait();
                Ok(outcome?)
            }
            _ => anyhow::bail!("no data"),
        });
        assert_eq!(error.unwrap_err().to_string(), "rank 2 failed: no data");
    }

    #[test]
    fn a_panic_of_rank_0_at_work_ends_the_waits() {
        let error = Ddp::spawn(2, |ddp| Ok(on_main::<()>(ddp.group(), || panic!("no disk"))?));
        assert!(error.unwrap_err().to_string().contains("no disk"));
    }
}
