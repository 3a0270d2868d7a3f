//! Work that rank 0 does while the other ranks wait, for any time.

use std::panic::Location;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use burn_ddp_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Longest time between two signs of life of rank 0 while the others wait for it.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Time after which rank 0 logs that it is still at work; again after twice the time, and so on.
const SLOW: Duration = Duration::from_secs(30);

/// Value that `f` returns on rank 0, which alone runs it. `f` may take any time, see [`at_work`]. *Collective*.
///
/// # Errors
///
/// [`Error::File`] on every rank with the reason of rank 0.
#[track_caller]
pub(crate) fn on_main<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    f: impl FnOnce() -> Result<T, String>,
) -> Result<T> {
    let mine = if group.rank() == 0 { Some(at_work(group, f)) } else { None };
    let outcome: Result<T, String> = outcome_of_main(group, mine)?;
    outcome.map_err(|reason| Error::File { rank: Some(0), reason })
}

/// Runs `f` on rank 0, for any time, see [`at_work`]; then on the other ranks. *Collective*.
///
/// # Errors
///
/// [`Error::Comm`] if a peer failed.
#[track_caller]
pub(crate) fn main_first<T>(group: &ProcessGroup, f: impl FnOnce() -> T) -> Result<T> {
    if group.rank() == 0 {
        let value = at_work(group, f);
        outcome_of_main(group, Some(()))?;
        Ok(value)
    } else {
        outcome_of_main(group, None::<()>)?;
        Ok(f())
    }
}

/// Runs `f` on rank 0 while the other ranks are in [`outcome_of_main`], which this rank calls next.
///
/// A broadcast every few seconds says that rank 0 is alive. So `f` may take longer than the deadline of a collective,
/// and a rank that fails meanwhile is noticed.
#[track_caller]
pub(crate) fn at_work<T>(group: &ProcessGroup, f: impl FnOnce() -> T) -> T {
    if group.world_size() == 1 {
        return f();
    }
    let site = Location::caller();
    // Dropped when `f` has returned or panicked.
    let (working, ended) = channel::<()>();
    std::thread::scope(move |scope| {
        let signs = move || give_signs_of_life(group, site, &ended);
        if let Err(e) = std::thread::Builder::new().name("signs of life".into()).spawn_scoped(scope, signs) {
            tracing::warn!("no thread to give signs of life: the other ranks wait {:?} at most: {e}", group.timeout());
        }
        let value = f();
        drop(working);
        value
    })
}

/// Broadcasts signs of life until the sender of `ended` is dropped.
fn give_signs_of_life(group: &ProcessGroup, site: &Location<'_>, ended: &Receiver<()>) {
    let (began, mut slow) = (Instant::now(), SLOW);
    let pause = SIGN_OF_LIFE.min(group.timeout() / 4);
    while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        if began.elapsed() >= slow {
            let seconds = began.elapsed().as_secs();
            tracing::warn!(
                "rank 0 has been at work for {seconds} s at {site}, and the other ranks wait: slow storage?"
            );
            slow *= 2;
        }
        // After an error the world has ended, and the next call of this rank returns the cause.
        if group.broadcast_object(Some(None::<()>), 0).is_err() {
            return;
        }
    }
}

/// The outcome of [`at_work`], which rank 0 passes, on every rank. *Collective*.
#[track_caller]
pub(crate) fn outcome_of_main<T: Serialize + DeserializeOwned>(group: &ProcessGroup, mine: Option<T>) -> Result<T> {
    let mut mine = mine.map(Some);
    loop {
        // `None` is a sign of life.
        if let Some(outcome) = group.broadcast_object(mine.take(), 0)? {
            return Ok(outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ddp;

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
