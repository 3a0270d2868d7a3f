//! Size of the buckets of a model whose ranks are on several machines, by what rank 0 measures on the link.

use std::time::{Duration, Instant};

use burn_ddp_comm::{ProcessGroup, ReduceOp};

use crate::Result;
use crate::ddp::Ddp;
use crate::gradients::Slot;

/// Bounds of the measured size.
const LEAST: usize = 1 << 20;
const MOST: usize = 25 << 20;

/// Least number of bytes of gradients for which the link is measured: fewer are in few buckets in any case.
const FEWEST: usize = 8 << 20;

/// Elements (f32) of the two all-reduces that are timed, and how often. Engines cut both into chunks.
const SHORT: usize = (1 << 20) / size_of::<f32>();
const LONG: usize = 4 * SHORT;
const ROUNDS: usize = 5;

/// Bytes of a bucket of these gradients between the machines of `group`; `None` if all ranks are on one machine, the
/// gradients are few, or the measurement failed by noise. *Collective* over `group`: eleven all-reduces of 1 and 4 MiB
/// and a broadcast.
///
/// # Errors
///
/// Those of a collective.
pub(super) fn measure(ddp: &Ddp, group: &ProcessGroup, slots: &[Slot]) -> Result<Option<usize>> {
    let machines = ddp.world().machines();
    let first = machines.machine_of(group.ranks()[0]);
    let is_one_machine = group.ranks().iter().all(|rank| machines.machine_of(*rank) == first);
    let gradients = slots.iter().filter(|slot| slot.trainable && !slot.sharded).map(Slot::len_bytes).sum();
    if is_one_machine || gradients < FEWEST {
        return Ok(None);
    }
    // Its pages are touched before the first call.
    let mut values = vec![1.0_f32; LONG];
    let mut time = |elements: usize| -> Result<Duration> {
        let start = Instant::now();
        group.all_reduce(&mut values[..elements], ReduceOp::Max)?;
        Ok(start.elapsed())
    };
    // The first one opens connections, and TCP sends faster after it.
    time(LONG)?;
    let (mut short, mut long) = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        long = long.min(time(LONG)?);
        short = short.min(time(SHORT)?);
    }
    let mut fixed = [bytes_of_fixed_time(short, long)];
    group.broadcast(&mut fixed, 0)?;
    let bytes = bucket_bytes(gradients, fixed[0]);
    if ddp.is_main() {
        tracing::debug!(target: "burn_ddp::wrap", ?short, ?long, ?bytes, "size of buckets, by the link");
    }
    Ok(bytes)
}

/// Bytes that the link carries in the fixed part of a call's time, from the times of a short and a long call. Not a
/// number if the long one took no longer.
fn bytes_of_fixed_time(short: Duration, long: Duration) -> f64 {
    let more = ((LONG - SHORT) * size_of::<f32>()) as f64;
    let per_byte = long.saturating_sub(short).as_secs_f64() / more;
    let fixed = short.as_secs_f64() - per_byte * (SHORT * size_of::<f32>()) as f64;
    if per_byte > 0.0 { fixed.max(0.0) / per_byte } else { f64::NAN }
}

/// Bytes of a bucket for `gradients` bytes in all; `None` if nothing is known of the link.
///
/// With `n` buckets a step takes the fixed time of `n` calls and, after backward, the time of the bytes of the last
/// bucket, which nothing hides: together least where both are equal, at a size of √(`gradients` × `fixed`).
fn bucket_bytes(gradients: usize, fixed: f64) -> Option<usize> {
    let best = (gradients as f64 * fixed).sqrt();
    (!best.is_nan()).then(|| (best as usize).clamp(LEAST, MOST))
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
        assert!(first.is_none_or(|bytes| (LEAST..=MOST).contains(&bytes)), "{first:?}");
        assert_eq!(measured(["a", "b"], FEWEST - 4), [None, None], "few gradients");
        assert_eq!(measured(["a", "a"], 64 << 20), [None, None], "one machine");
    }

    /// The size for `mebibytes` of gradients on a link of so many gigabits per second, whose calls take `micros` beside
    /// their bytes.
    fn on_link(mebibytes: usize, gbit: f64, micros: u64) -> Option<usize> {
        let time = |elements: usize| {
            let of_bytes = (elements * size_of::<f32>() * 8) as f64 / (gbit * 1e9);
            Duration::from_micros(micros) + Duration::from_secs_f64(of_bytes)
        };
        bucket_bytes(mebibytes << 20, bytes_of_fixed_time(time(SHORT), time(LONG)))
    }

    #[test]
    fn buckets_grow_with_the_fixed_time_of_a_call() {
        assert_eq!(on_link(16, 1.0, 200), Some(LEAST), "a cable");
        let (near, far) = (on_link(100, 10.0, 300).unwrap(), on_link(100, 1.0, 5000).unwrap());
        assert!((5 << 20..7 << 20).contains(&near), "{near}");
        assert!((7 << 20..9 << 20).contains(&far), "{far}");
        assert_eq!(on_link(10_000, 10.0, 5000), Some(MOST));
        let millis = Duration::from_millis;
        assert_eq!(bucket_bytes(100 << 20, bytes_of_fixed_time(millis(1), millis(5))), Some(LEAST), "no fixed time");
        assert_eq!(bucket_bytes(100 << 20, bytes_of_fixed_time(millis(2), millis(1))), None, "noise");
    }
}
