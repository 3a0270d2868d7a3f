//! Size of the buckets of a model whose ranks are on several machines, by what rank 0 measures on the link.

use std::time::{Duration, Instant};

use burn_ddp_comm::{ProcessGroup, ReduceOp};

use crate::Result;
use crate::ddp::Ddp;
use crate::gradients::Slot;

/// Least and greatest size of a bucket.
const LEAST: usize = 1 << 20;
const MOST: usize = 25 << 20;

/// Elements (f32) of the small and the large all-reduce that are timed, and how often.
const SMALL: usize = 1;
const LARGE: usize = 64 << 10;
const ROUNDS: usize = 3;

/// Bytes of a bucket of these gradients between the machines of `group`; `None` if all ranks are on one machine, or one
/// bucket of the least size holds all. *Collective* over `group`; costs seven all-reduces of at most 256 KiB and a
/// broadcast.
///
/// # Errors
///
/// Those of a collective.
pub(super) fn measure(ddp: &Ddp, group: &ProcessGroup, slots: &[Slot]) -> Result<Option<usize>> {
    let machines = ddp.world().machines();
    let first = machines.machine_of(group.ranks()[0]);
    let is_one_machine = group.ranks().iter().all(|rank| machines.machine_of(*rank) == first);
    let gradients = slots.iter().filter(|slot| slot.trainable && !slot.sharded).map(Slot::len_bytes).sum();
    if is_one_machine || gradients <= LEAST {
        return Ok(None);
    }
    let time = |elements: usize| -> Result<Duration> {
        let mut values = vec![0.0_f32; elements];
        let start = Instant::now();
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        Ok(start.elapsed())
    };
    // The first one opens connections.
    time(LARGE)?;
    let (mut small, mut large) = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        small = small.min(time(SMALL)?);
        large = large.min(time(LARGE)?);
    }
    let mut waiting = [bytes_while_waiting(small, large)];
    group.broadcast(&mut waiting, 0)?;
    let bytes = bucket_bytes(gradients, waiting[0]);
    if ddp.is_main() {
        tracing::debug!(target: "burn_ddp::wrap", ?small, ?large, bytes, "size of buckets, by the link");
    }
    Ok(Some(bytes))
}

/// Bytes that the link carries in the time that a call takes beside its bytes, from the times of the two calls.
fn bytes_while_waiting(small: Duration, large: Duration) -> f64 {
    let of_bytes = large.saturating_sub(small).as_secs_f64().max(1e-9);
    let bytes = ((LARGE - SMALL) * size_of::<f32>()) as f64;
    small.as_secs_f64() * bytes / of_bytes
}

/// Bytes of a bucket for `gradients` bytes in all.
///
/// With `n` buckets a step waits for `n` calls and, after backward, for the bytes of the last bucket, which nothing
/// hides: together least where both take as long, at a size of √(`gradients` × `waiting`).
fn bucket_bytes(gradients: usize, waiting: f64) -> usize {
    let best = (gradients as f64 * waiting).sqrt();
    (best as usize).clamp(LEAST, MOST)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn_ddp_comm::{DType, JobKey, LaunchEnv, Meeting, StoreServer, World, WorldOptions};

    use super::*;

    /// What two ranks on these machines measure for a parameter of so many bytes.
    fn measured(machines: [&str; 2], bytes: usize) -> [Option<usize>; 2] {
        let store = StoreServer::bind("127.0.0.1:0", &JobKey::trusting_network("sizes", 0)).unwrap();
        let port = store.local_addr().port();
        let rank = |rank: usize| {
            let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port };
            let machine = Some(machines[rank].to_owned());
            let env = LaunchEnv { trust_network: true, machine, ..LaunchEnv::new(rank, 2, meeting, "sizes") };
            let ddp = Ddp::from_world(World::join(&env, WorldOptions::default()).unwrap()).unwrap();
            let slot = |trainable| Slot {
                path: "weight".into(),
                dims: vec![bytes / 4],
                dtype: DType::F32,
                trainable,
                first_clone: 0,
                sharded: false,
            };
            measure(&ddp, &ddp.state().new_group().unwrap(), &[slot(true), slot(false)]).unwrap()
        };
        thread::scope(|scope| [0, 1].map(|nth| scope.spawn(move || rank(nth))).map(|rank| rank.join().unwrap()))
    }

    #[test]
    fn ranks_on_several_machines_agree_on_a_size() {
        let [first, second] = measured(["a", "b"], 64 << 20);
        assert_eq!(first, second);
        assert!(first.is_some_and(|bytes| (LEAST..=MOST).contains(&bytes)), "{first:?}");
        assert_eq!(measured(["a", "b"], LEAST), [None, None], "one bucket holds all");
        assert_eq!(measured(["a", "a"], 64 << 20), [None, None], "one machine");
    }

    /// The size for `mebibytes` of gradients on a link of so many gigabits per second, whose calls take `micros`.
    fn on_link(mebibytes: usize, gbit: f64, micros: u64) -> usize {
        let small = Duration::from_micros(micros);
        let bytes = ((LARGE - SMALL) * size_of::<f32>()) as f64;
        let large = small + Duration::from_secs_f64(bytes * 8.0 / (gbit * 1e9));
        bucket_bytes(mebibytes << 20, bytes_while_waiting(small, large))
    }

    #[test]
    fn buckets_grow_with_what_a_call_costs() {
        assert_eq!(on_link(16, 1.0, 200), LEAST, "a cable");
        let (near, far) = (on_link(100, 10.0, 300), on_link(100, 1.0, 5000));
        assert!((5 << 20..7 << 20).contains(&near), "{near}");
        assert!((7 << 20..9 << 20).contains(&far), "{far}");
        assert_eq!(on_link(10_000, 10.0, 5000), MOST);
        // A large call that was no slower than a small one, by noise.
        assert_eq!(bucket_bytes(100 << 20, bytes_while_waiting(Duration::from_millis(1), Duration::ZERO)), MOST);
        assert_eq!(bucket_bytes(0, f64::MAX), LEAST);
    }
}
