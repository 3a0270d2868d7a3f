//! Common mistakes of programs, each on threads and over TCP: every rank gets an error that shows the calls of two
//! ranks and their lines; never a hang, never a wrong number.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, Error, ProcessGroup, ReduceOp, Result, World, WorldOptions};
use common::options;

/// The calls of one of two ranks, on two groups.
type Part = fn(&World, &ProcessGroup, &ProcessGroup) -> Result<()>;

/// A mistake: its name, the calls of rank 0, the calls of rank 1, and the expected error.
type Mistake = (&'static str, Part, Part, Sort);

enum Sort {
    /// The calls differ in this field; the error shows both with their lines.
    Differ(&'static str),
    /// One rank never makes the call: the error names it, what it does instead, and the line of its last call.
    Missing(&'static str),
    /// The ranks wait for each other in different groups: the error shows both calls and both groups.
    Circle([&'static str; 2]),
    /// One rank has left: the error names it, and the line of the call that needed it.
    Left,
    /// One rank failed with this cause.
    Failed(&'static str),
    /// The received bytes are a value of another type.
    Object,
}
use Sort::{Circle, Differ, Failed, Left, Missing, Object};

fn sum(group: &ProcessGroup, len: usize) -> Result<()> {
    group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
}

const TABLE: &[Mistake] = &[
    ("another operation", |_, g, _| sum(g, 8), |_, g, _| g.broadcast(&mut [0.0_f32; 8], 0), Differ("collectives")),
    (
        "another reduce op",
        |_, g, _| g.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
        |_, g, _| g.all_reduce(&mut [1.0_f32; 8], ReduceOp::Mean),
        Differ("reduce ops"),
    ),
    (
        "another dtype",
        |_, g, _| g.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
        |_, g, _| g.all_reduce(&mut [1_i32; 8], ReduceOp::Sum),
        Differ("dtypes"),
    ),
    (
        "another length",
        |_, g, _| g.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
        |_, g, _| g.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum),
        Differ("lengths"),
    ),
    (
        "another length, large",
        |_, g, _| g.all_reduce(&mut vec![1.0_f32; 300_000], ReduceOp::Sum),
        |_, g, _| g.all_reduce(&mut vec![1.0_f32; 300_001], ReduceOp::Sum),
        Differ("lengths"),
    ),
    (
        "another root",
        |_, g, _| g.broadcast(&mut [1.0_f32; 8], 0),
        |_, g, _| g.broadcast(&mut [1.0_f32; 8], 1),
        Differ("roots"),
    ),
    (
        "all_gather of other lengths",
        |_, g, _| g.all_gather(&[1_u8; 3]).map(drop),
        |_, g, _| g.all_gather(&[1_u8; 4]).map(drop),
        Differ("lengths"),
    ),
    (
        "reduce_scatter of other rows",
        |_, g, _| g.reduce_scatter(&[1.0_f32; 4], &mut [0.0; 2], ReduceOp::Sum),
        |_, g, _| g.reduce_scatter(&[1.0_f32; 6], &mut [0.0; 3], ReduceOp::Sum),
        Differ("lengths"),
    ),
    (
        "another order",
        |_, g, _| {
            g.barrier()?;
            g.broadcast(&mut [0_u8; 3], 0)
        },
        |_, g, _| {
            g.broadcast(&mut [0_u8; 3], 0)?;
            g.barrier()
        },
        Differ("collectives"),
    ),
    (
        "a missing call",
        |_, g, _| {
            g.broadcast(&mut [0_u8; 3], 0)?;
            g.all_gather(&[1_u8]).map(drop)
        },
        |_, g, _| g.all_gather(&[1_u8]).map(drop),
        Differ("collectives"),
    ),
    (
        "an extra call",
        |_, g, _| {
            g.barrier()?;
            g.all_gather(&[1_u8]).map(drop)
        },
        |_, g, _| {
            g.barrier()?;
            g.barrier()?;
            g.all_gather(&[1_u8]).map(drop)
        },
        Differ("collectives"),
    ),
    (
        "a barrier for a reduction",
        |_, g, _| g.barrier(),
        |_, g, _| g.all_reduce_weighted(&mut [1.0_f64; 2], 1.0),
        Differ("collectives"),
    ),
    (
        "another bucket plan",
        |_, g, _| g.all_reduce_bytes(DType::F32, &mut [0; 64], ReduceOp::Mean, 0x1_0001),
        |_, g, _| g.all_reduce_bytes(DType::F32, &mut [0; 64], ReduceOp::Mean, 0x1_0002),
        Differ("tags"),
    ),
    (
        "an object for a tensor",
        |_, g, _| g.broadcast_object(Some(7_u32), 0).map(drop),
        |_, g, _| g.broadcast(&mut [7_f32], 0),
        Differ("collectives"),
    ),
    (
        "a call that only one rank refuses",
        |_, g, _| {
            let refused = g.all_reduce(&mut [1_i32], ReduceOp::Mean).unwrap_err();
            assert!(refused.group_usable());
            g.barrier()
        },
        |_, g, _| g.barrier(),
        Differ("sequence numbers"),
    ),
    (
        "a group for a collective",
        |world, _, _| world.group().map(drop),
        |_, g, _| g.barrier(),
        Circle(["World::group (group 3)", "barrier #0 of group 1"]),
    ),
    (
        "another group",
        |_, g, _| g.barrier(),
        |_, _, other| other.barrier(),
        Circle(["barrier #0 of group 1", "barrier #0 of group 2"]),
    ),
    (
        "another group, for a collective that is not waited for",
        |_, g, _| sum(g, 8),
        |_, _, other| other.all_reduce_async(vec![1.0_f32; 8], ReduceOp::Sum).wait().map(drop),
        Circle(["of group 1", "of group 2"]),
    ),
    (
        "another group, after a collective that is not waited for",
        |_, g, _| sum(g, 8),
        |_, g, other| {
            let pending = other.all_reduce_async(vec![1.0_f32; 1 << 20], ReduceOp::Sum);
            other.barrier()?;
            sum(g, 8)?;
            pending.wait().map(drop)
        },
        Circle(["of group 1", "of group 2"]),
    ),
    (
        "a large broadcast of one rank",
        |_, g, _| g.broadcast(&mut vec![1.0_f32; 8 << 20], 0),
        |_, _, other| other.barrier(),
        Circle(["broadcast #0 of group 1", "barrier #0 of group 2"]),
    ),
    (
        "a rank that stops calling",
        |_, g, _| {
            g.barrier()?;
            g.barrier()
        },
        |world, g, _| {
            g.barrier()?;
            until_ended(world)
        },
        Missing("is in no collective; the last it finished"),
    ),
    (
        "a rank that leaves early",
        |_, g, _| {
            g.barrier()?;
            g.barrier()
        },
        |world, g, _| {
            g.barrier()?;
            world.leave();
            Ok(())
        },
        Left,
    ),
    (
        "a rank that gives up",
        |_, g, _| g.barrier(),
        |world, _, _| {
            world.fail("the disk is full");
            world.check()
        },
        Failed("the disk is full"),
    ),
    ("both send first", |_, g, _| g.send(&[1.0_f32; 8], 1), |_, g, _| g.send(&[1.0_f32; 8], 0), Differ("collectives")),
    (
        "a send of another length",
        |_, g, _| g.send(&[1.0_f32; 8], 1),
        |_, g, _| g.recv(&mut [1.0_f32; 4], 0),
        Differ("lengths"),
    ),
    (
        "a send that meets a collective",
        |_, g, _| g.send(&[1.0_f32; 8], 1),
        |_, g, _| g.broadcast(&mut [1.0_f32; 8], 0),
        Differ("collectives"),
    ),
    (
        "a collective before the send instead of after it",
        |_, g, _| {
            g.send(&[1_u8], 1)?;
            g.barrier()
        },
        |_, g, _| {
            g.barrier()?;
            g.recv(&mut [1_u8], 0)
        },
        Differ("collectives"),
    ),
    (
        "a send that nobody receives",
        |_, g, _| {
            g.barrier()?;
            g.send(&[1.0_f32; 8], 1)
        },
        |world, g, _| {
            g.barrier()?;
            until_ended(world)
        },
        Missing("send #0 to rank 1 of group 1"),
    ),
    (
        "another root of a reduction",
        |_, g, _| g.reduce(&mut [1.0_f32; 8], ReduceOp::Sum, 0),
        |_, g, _| g.reduce(&mut [1.0_f32; 8], ReduceOp::Sum, 1),
        Differ("roots"),
    ),
    (
        "a reduction for all and for one",
        |_, g, _| g.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
        |_, g, _| g.reduce(&mut [1.0_f32; 8], ReduceOp::Sum, 0),
        Differ("collectives"),
    ),
    (
        "a gather of other lengths",
        |_, g, _| g.gather(&[1_i64; 3], 0).map(drop),
        |_, g, _| g.gather(&[1_i64; 4], 0).map(drop),
        Differ("lengths"),
    ),
    (
        "a scatter that only the root takes for one",
        |_, g, _| g.scatter(Some(&[1_i64; 6]), &mut [0; 3], 0),
        |_, g, _| g.broadcast(&mut [0_i64; 3], 0),
        Differ("collectives"),
    ),
    (
        "all_to_all of other rows",
        |_, g, _| g.all_to_all(&[1_u8; 4], &mut [0; 4]),
        |_, g, _| g.all_to_all(&[1_u8; 6], &mut [0; 6]),
        Differ("lengths"),
    ),
    (
        "a split that one rank leaves out",
        |_, g, _| g.split(Some(0), 0).map(drop),
        |_, g, _| g.barrier(),
        Differ("collectives"),
    ),
    (
        "another call in a sub-group",
        |_, g, _| whole(g)?.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
        |_, g, _| whole(g)?.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum),
        Differ("lengths"),
    ),
    (
        "the group for its sub-group",
        |_, g, _| whole(g)?.barrier(),
        |_, g, _| {
            let _part = whole(g)?;
            g.barrier()
        },
        Circle(["of group 1", "of group 0."]),
    ),
    (
        "another color, and then a call for both",
        |world, g, _| {
            let part = g.split(Some(1), 0)?.expect("a group");
            part.barrier()?;
            g.barrier()?;
            until_ended(world)
        },
        |_, g, _| {
            let part = g.split(Some(2), 0)?.expect("a group");
            part.barrier()?;
            g.all_gather(&[1_u8]).map(drop)
        },
        Differ("collectives"),
    ),
    (
        "a pending call that does not fit",
        |_, g, _| g.all_reduce_async(vec![1.0_f32; 8], ReduceOp::Sum).wait().map(drop),
        |_, g, _| g.all_reduce_async(vec![1.0_f32; 8], ReduceOp::Max).wait().map(drop),
        Differ("reduce ops"),
    ),
    (
        "a pending call that one rank forgot",
        |_, g, _| {
            let pending = g.all_gather_async(vec![1_u8]);
            g.barrier()?;
            pending.wait().map(drop)
        },
        |_, g, _| g.barrier(),
        Differ("collectives"),
    ),
    (
        "objects of other types",
        |_, g, _| g.broadcast_object(Some("text, which is no number".to_string()), 0).map(drop),
        |_, g, _| g.broadcast_object(None::<u64>, 0).map(drop),
        Object,
    ),
];

/// A sub-group of all ranks.
fn whole(group: &ProcessGroup) -> Result<ProcessGroup> {
    Ok(group.split(Some(0), 0)?.expect("a group"))
}

/// Waits, in no collective, until the world has ended.
fn until_ended(world: &World) -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < common::PATIENCE {
        world.check()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the world goes on")
}

/// True if this rank has left, and so learns nothing more of its world.
fn has_left(world: &World, group: &ProcessGroup) -> bool {
    matches!(group.barrier(), Err(Error::PeerLeft { peer, .. }) if peer.rank == world.rank())
}

/// The errors of both ranks; `None` only for a rank that left.
fn run(make: fn(usize, &WorldOptions) -> Vec<World>, options: &WorldOptions, parts: [Part; 2]) -> Vec<Option<Error>> {
    let ready = AtomicUsize::new(0);
    let ready = &ready;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = make(2, options)
            .into_iter()
            .zip(parts)
            .map(|(world, part)| {
                scope.spawn(move || {
                    let (group, other) = (world.group().unwrap(), world.group().unwrap());
                    world.set_step(28);
                    // No rank may begin while the other still makes its groups.
                    ready.fetch_add(1, Ordering::SeqCst);
                    let begin = Instant::now();
                    while ready.load(Ordering::SeqCst) < 2 && begin.elapsed() < common::PATIENCE {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let result = part(&world, &group, &other);
                    if has_left(&world, &group) {
                        return None;
                    }
                    // Leaves only once the world has ended. A rank whose calls succeeded takes the world's error.
                    let heard = until_ended(&world).expect_err("the world has ended");
                    Some(result.err().unwrap_or(heard))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The lines of this file that `text` shows.
fn lines(text: &str) -> Vec<&str> {
    let mut rest = text;
    let mut lines = Vec::new();
    while let Some((_, behind)) = rest.split_once(file!()) {
        lines.push(behind.split([' ', ',', ';', ')']).next().unwrap().trim_end_matches(':'));
        rest = behind;
    }
    lines
}

fn check_table(make: fn(usize, &WorldOptions) -> Vec<World>) {
    for (name, rank_0, rank_1, sort) in TABLE {
        // A missing rank is noticed only at the deadline; all other mistakes are noticed at once.
        let timeout = if matches!(sort, Missing(_)) { Duration::from_millis(800) } else { common::PATIENCE };
        let options = WorldOptions { timeout, heartbeat: Duration::from_millis(50), ..options() };
        let begin = Instant::now();
        let errors = run(make, &options, [*rank_0, *rank_1]);
        assert!(begin.elapsed() < Duration::from_secs(20), "{name}: {:?}", begin.elapsed());
        assert!(errors.iter().all(|error| error.is_some() || matches!(sort, Left)), "{name}: {errors:?}");
        for (rank, error) in errors.iter().enumerate() {
            let Some(error) = error else { continue };
            let text = error.to_string();
            let context = format!("{name}, rank {rank}: {text}");
            assert!(!error.group_usable(), "{context}");
            match sort {
                Differ(what) => {
                    let Error::Mismatch { first, second } = error else { panic!("{context}") };
                    assert_eq!((first.rank, second.rank), (0, 1), "{context}");
                    assert!(
                        text.contains(&format!("({what}")) || text.contains(&format!("{what} differ")),
                        "{context}"
                    );
                    assert!(text.contains("rank 0 called ") && text.contains("rank 1 called "), "{context}");
                    let lines = lines(&text);
                    assert!(lines.len() == 2 && lines[0] != lines[1], "{context}");
                    assert_eq!(text.matches("in step 28 called at").count(), 2, "{context}");
                }
                Missing(what) => {
                    assert!(matches!(error, Error::Timeout { .. }), "{context}");
                    assert!(text.contains(what) && lines(&text).len() >= 2, "{context}");
                }
                Circle(groups) => {
                    let Error::Deadlock { calls } = error else { panic!("{context}") };
                    let ranks: Vec<_> = calls.iter().map(|call| (call.ranks.clone(), call.missing.clone())).collect();
                    assert!(ranks.contains(&(vec![0], vec![1])) && ranks.contains(&(vec![1], vec![0])), "{context}");
                    assert!(groups.iter().all(|group| text.contains(group)), "{context}");
                    assert!(lines(&text).len() == 2 && text.matches("in step 28 called at").count() == 2, "{context}");
                }
                Left => {
                    assert!(matches!(error, Error::PeerLeft { .. }) && error.rank() == Some(1), "{context}");
                    assert_eq!((rank, lines(&text).len()), (0, 1), "{context}");
                }
                Failed(why) => {
                    assert!(matches!(error, Error::PeerFailed { .. }) && error.rank() == Some(1), "{context}");
                    assert!(text.contains(why) && (rank == 1 || lines(&text).len() == 1), "{context}");
                }
                Object => {
                    let Error::Object { rank: 1, from: 0, .. } = error else { panic!("{context}") };
                    assert!(text.contains("invalid u64") && (rank == 0 || lines(&text).len() == 1), "{context}");
                }
            }
        }
    }
}

#[test]
fn every_mistake_is_explained_on_threads() {
    check_table(|n, options| World::threads(n, options.clone()));
}

#[test]
fn every_mistake_is_explained_over_tcp() {
    check_table(common::world);
}

#[test]
#[expect(clippy::if_same_then_else, reason = "the lines differ, and that is the point")]
fn calls_from_different_lines_are_no_mistake() {
    for make in [|n, options: &WorldOptions| World::threads(n, options.clone()), common::world] {
        std::thread::scope(|scope| {
            for world in make(2, &options()) {
                scope.spawn(move || {
                    let group = world.group().unwrap();
                    let mut x = [world.rank() as f32; 4];
                    // Steps are shown, not compared.
                    world.set_step(world.rank() as u64);
                    if world.rank() == 0 {
                        group.broadcast(&mut x, 0).unwrap();
                        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        group.barrier().unwrap();
                    } else {
                        group.broadcast(&mut x, 0).unwrap();
                        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        group.barrier().unwrap();
                    }
                    assert_eq!(x, [0.0; 4]);
                });
            }
        });
    }
}

#[test]
fn all_of_this_on_two_machines() {
    common::again_on_two_machines();
}
