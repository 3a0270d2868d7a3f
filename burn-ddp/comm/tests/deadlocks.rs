//! Deadlocks: if ranks wait for each other in different calls, all ranks get an error within some heartbeats. Ranks
//! that only arrive late cause no error.

mod common;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{
    CallingThread, EngineChoice, Error, LaunchEnv, ProcessGroup, ReduceOp, Result, World, WorldOptions,
};
use common::{PATIENCE, Process, await_go, join_all, launcher_store, options, rank_at, role, say};
use rustix::process::Signal;

const BEAT: Duration = Duration::from_millis(50);
/// Longer than a deadlock must last to be reported.
const LONG: Duration = Duration::from_millis(400);
/// A deadlock is reported within this time, on a slow machine too. The deadline of a call is twice as long.
const SOON: Duration = Duration::from_secs(30);

/// Makers of worlds of a given number of ranks.
const WORLDS: [fn(usize) -> Vec<World>; 4] = [
    |n| World::threads(n, lively(Some(EngineChoice::Tcp))),
    |n| joined(n, Some(EngineChoice::Tcp), |_| 0),
    |n| joined(n, Some(EngineChoice::Shm), |_| 0),
    |n| joined(n, None, |rank| rank * 2 / n),
];

fn lively(engine: Option<EngineChoice>) -> WorldOptions {
    WorldOptions { heartbeat: BEAT, engine, ..options() }
}

/// Ranks that join, rank `r` on machine `machine(r)`.
fn joined(n: usize, engine: Option<EngineChoice>, machine: impl Fn(usize) -> usize) -> Vec<World> {
    let store = launcher_store();
    let at = |rank| LaunchEnv { machine: Some(machine(rank).to_string()), ..rank_at(&store, rank, n) };
    let envs = (0..n).map(at).collect();
    join_all(envs, &lively(engine)).into_iter().map(|world| world.unwrap()).collect()
}

/// One rank's groups: those of scalars, of two models, and of metrics.
struct Groups {
    scalars: ProcessGroup,
    model: ProcessGroup,
    other_model: ProcessGroup,
    metrics: ProcessGroup,
}

/// Runs a rank on `n` threads of each kind of world; yields the results of each world.
fn run<R: Send>(n: usize, rank_main: impl Fn(usize, Groups) -> R + Sync) -> Vec<Vec<R>> {
    let rank_main = &rank_main;
    let in_world = |make: fn(usize) -> Vec<World>| {
        // No rank may begin while another one still makes its groups.
        let (begin, end) = (&Barrier::new(n), &Barrier::new(n));
        thread::scope(|scope| {
            let rank = |world: World| {
                scope.spawn(move || {
                    let group = || world.group().unwrap();
                    let groups = Groups { scalars: group(), model: group(), other_model: group(), metrics: group() };
                    begin.wait();
                    let result = rank_main(world.rank(), groups);
                    end.wait();
                    result
                })
            };
            let ranks: Vec<_> = make(n).into_iter().map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    WORLDS.map(in_world).into()
}

fn sum(group: &ProcessGroup) -> Result<f32> {
    let mut x = [1.0];
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    Ok(x[0])
}

/// Runs collectives on a worker thread, as wrapped models do, with the marks by which deadlock detection sees that
/// worker and submitting thread wait for each other.
fn on_worker<R: Send>(submit: impl FnOnce(&dyn Fn() -> Result<f32>) -> R, group: &ProcessGroup) -> R {
    let (jobs, todo) = std::sync::mpsc::channel::<()>();
    let (finished, done) = std::sync::mpsc::channel();
    let (worker, submitter) = (CallingThread::new(), CallingThread::current());
    thread::scope(|scope| {
        let this = worker.clone();
        scope.spawn(move || {
            this.begin();
            while submitter.awaited(|| todo.recv()).is_ok() {
                finished.send(sum(group)).unwrap();
            }
        });
        let result = submit(&|| {
            jobs.send(()).unwrap();
            worker.awaited(|| done.recv().unwrap())
        });
        drop(jobs);
        result
    })
}

#[test]
fn a_scalar_of_one_rank_meets_gradients_of_the_others() {
    let worlds = run(3, |rank, groups| {
        groups.scalars.explain_tags(|tag| Some(format!("sums scalar {tag}")));
        groups.scalars.explain_tags(|_| Some("does not count, since it comes second".to_owned()));
        groups.model.explain_tags(|_| Some("averages a gradient".to_owned()));
        let begin = Instant::now();
        let result = on_worker(
            |reduce| {
                reduce()?;
                // `if ddp.is_main() { ddp.sum(x)? }`
                if rank == 0 {
                    sum(&groups.scalars)?;
                }
                reduce()
            },
            &groups.model,
        );
        (result.unwrap_err(), begin.elapsed())
    });
    for (error, after) in worlds.into_iter().flatten() {
        let text = error.to_string();
        let Error::Deadlock { calls } = &error else { panic!("{text}") };
        // Between machines a rank waits for its own machine's ranks first, so rank 2 may not count as missing yet.
        assert!(calls[0].ranks == [0] && [&[1][..], &[1, 2]].contains(&&calls[0].missing[..]), "{text}");
        assert_eq!((&calls[1].ranks, &calls[1].missing), (&vec![1, 2], &vec![0]), "{text}");
        assert_eq!((error.rank(), text.matches(file!()).count()), (Some(0), 2), "{text}");
        let said = "rank 0 sums scalar 0 and is in all_reduce #0 of group 1";
        let others = "each of ranks 1 and 2 averages a gradient and is in all_reduce #1 of group 2";
        assert!(text.contains(said) && text.contains(others), "{text}");
        assert!(after < SOON, "{after:?}");
    }
}

/// Runs ranks that wait for long, and must not be accused.
fn no_alarm(n: usize, rank_main: impl Fn(usize, &Groups) -> Result<()> + Sync) {
    for result in run(n, |rank, groups| rank_main(rank, &groups)).into_iter().flatten() {
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn slow_metrics_on_a_thread_of_their_own_are_no_circle() {
    no_alarm(2, |rank, groups| {
        thread::scope(|scope| {
            let metrics = scope.spawn(|| {
                if rank == 1 {
                    thread::sleep(LONG);
                }
                sum(&groups.metrics)
            });
            for _ in 0..5 {
                sum(&groups.model)?;
            }
            metrics.join().unwrap()?;
            sum(&groups.scalars).map(drop)
        })
    });
}

#[test]
fn slow_data_and_validation_on_one_rank_are_no_circle() {
    no_alarm(3, |rank, groups| {
        on_worker(
            |reduce| {
                reduce()?;
                thread::sleep(if rank == 2 { LONG } else { Duration::ZERO });
                reduce()?;
                thread::sleep(if rank == 0 { LONG } else { Duration::ZERO });
                sum(&groups.scalars)?;
                reduce()
            },
            &groups.model,
        )
        .map(drop)
    });
}

#[test]
fn a_checkpoint_on_its_thread_is_no_circle() {
    no_alarm(2, |rank, groups| {
        thread::scope(|scope| {
            let writes = (rank == 0).then(|| scope.spawn(|| thread::sleep(2 * LONG)));
            sum(&groups.model)?;
            writes.into_iter().for_each(|writes| writes.join().unwrap());
            sum(&groups.scalars).map(drop)
        })
    });
}

/// Rank 0 works for a long time, while one of its threads sends signs of life to the other ranks.
#[test]
fn work_of_rank_0_while_the_others_wait_is_no_circle() {
    no_alarm(3, |rank, groups| {
        sum(&groups.model)?;
        let group = &groups.scalars;
        if rank > 0 {
            while group.broadcast_object(None::<bool>, 0)? {}
            return sum(&groups.model).map(drop);
        }
        let (working, ended) = std::sync::mpsc::channel::<()>();
        thread::scope(|scope| {
            let signs = scope.spawn(move || {
                while ended.recv_timeout(LONG / 3) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                    group.broadcast_object(Some(true), 0)?;
                }
                Ok(())
            });
            thread::sleep(2 * LONG);
            drop(working);
            signs.join().unwrap()
        })?;
        group.broadcast_object(Some(false), 0)?;
        sum(&groups.model).map(drop)
    });
}

#[test]
fn two_models_in_opposite_order_are_no_circle() {
    no_alarm(2, |rank, groups| {
        let (one, other) =
            if rank == 0 { (&groups.model, &groups.other_model) } else { (&groups.other_model, &groups.model) };
        for _ in 0..2 {
            let first = one.all_reduce_async(vec![1.0_f32; 1000], ReduceOp::Sum);
            // Stands for a long backward of the other model.
            thread::sleep(LONG);
            let second = other.all_reduce_async(vec![1.0_f32; 1000], ReduceOp::Sum);
            assert_eq!((first.wait()?[0], second.wait()?[0]), (2.0, 2.0));
        }
        Ok(())
    });
}

/// A rank without data takes part in the reductions of the others, and waits for each of them.
#[test]
fn ranks_that_have_no_data_left_are_no_circle() {
    no_alarm(3, |rank, groups| {
        on_worker(
            |reduce| {
                for _ in 0..3 {
                    thread::sleep(if rank == 1 { LONG / 2 } else { Duration::ZERO });
                    reduce()?;
                }
                sum(&groups.scalars).map(drop)
            },
            &groups.model,
        )
    });
}

#[test]
fn ranks_that_are_stopped_and_continued_are_no_circle() {
    const TEST: &str = "ranks_that_are_stopped_and_continued_are_no_circle";
    if let Some((rank, env)) = role() {
        let world = World::join(&env, lively(Some(EngineChoice::Tcp))).unwrap();
        let (one, other) = (world.group().unwrap(), world.group().unwrap());
        say("ready");
        // Rank 0 is in a call of one group while rank 1 waits for it in a call of the other group.
        if rank == "late" {
            await_go();
        }
        let result = one.barrier().and_then(|()| {
            if rank == "late" {
                await_go();
            }
            other.barrier()
        });
        return say(&format!("{result:?}"));
    }
    let store = launcher_store();
    let roles = ["late", "early", "early"];
    let mut ranks: Vec<_> =
        roles.iter().enumerate().map(|(rank, role)| Process::start(TEST, role, &rank_at(&store, rank, 3))).collect();
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    for nth in [1, 0, 2] {
        thread::sleep(LONG / 2);
        ranks[nth].signal(Signal::STOP);
        thread::sleep(LONG / 2);
        if nth == 1 {
            ranks[0].go();
        }
        thread::sleep(LONG / 2);
        ranks[nth].signal(Signal::CONT);
    }
    ranks[0].go();
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "Ok(())");
    }
    assert!(LONG < PATIENCE);
}
