//! What a tensor costs the reducer, apart from its bytes.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, Options, World};

use super::{Beside, Caps, Reducer, Reduction, Settings, Slot};
use crate::telemetry::meter::Meter;

const BYTES: usize = 16 << 20;
const STEPS: usize = 60;

/// The median time of a step in which two ranks (threads) average 16 MiB in `count` tensors and look where each average is.
fn step_of(count: usize) -> Duration {
    let rank_main = move |world: World| {
        let slots = (0..count).map(move |nth| Slot {
            path: nth.to_string(),
            dims: vec![BYTES / 4 / count],
            dtype: DType::F32,
            trainable: true,
            first_clone: nth,
        });
        let settings = Settings {
            reduction: Reduction::Mean,
            accumulation: 1,
            caps: Caps { first_bytes: 1 << 20, bytes: 25 << 20 },
            timeout: Duration::from_secs(60),
            replica_check: 0,
            overlap: false,
            on_device: false,
        };
        let meter = Meter::new(world.clone(), Arc::new(world.group().unwrap()));
        let mut reducer = Reducer::new(world.group().unwrap(), slots.collect(), settings, meter).unwrap();
        let gradients = vec![1; BYTES];
        let len = BYTES / 4 / count * 4;
        let mut times = Vec::new();
        for _ in 0..STEPS {
            let start = Instant::now();
            reducer.begin(1.0, false).unwrap();
            for slot in (0..count).rev() {
                reducer.put(slot, &gradients[slot * len..][..len]).unwrap();
            }
            reducer.depart(Beside::default()).unwrap();
            assert!(reducer.finish().unwrap().is_some());
            assert!((0..count).all(|slot| reducer.gradient(slot).is_some()));
            times.push(start.elapsed());
            reducer.end_step().unwrap();
        }
        times.sort_unstable();
        times[STEPS / 2]
    };
    let ranks: Vec<_> = World::threads(2, Options::default())
        .into_iter()
        .map(|world| thread::spawn(move || rank_main(world)))
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).max().unwrap_or_default()
}

#[test]
#[ignore = "a measurement"]
fn what_a_tensor_costs() {
    let counts = [10, 1_000, 10_000, 100_000];
    let mut rounds: Vec<Vec<Duration>> = (0..5).map(|_| counts.iter().map(|count| step_of(*count)).collect()).collect();
    let medians: Vec<f64> = (0..counts.len())
        .map(|nth| {
            rounds.sort_by_key(|round| round[nth]);
            rounds[rounds.len() / 2][nth].as_secs_f64()
        })
        .collect();
    for (count, seconds) in counts.iter().zip(&medians).skip(1) {
        let more = (seconds - medians[0]) / (count - counts[0]) as f64;
        println!(
            "{count} tensors: {:.2} ms, {:.2} × that of {}; {:.0} ns a tensor more",
            seconds * 1e3,
            seconds / medians[0],
            counts[0],
            more * 1e9
        );
    }
}
