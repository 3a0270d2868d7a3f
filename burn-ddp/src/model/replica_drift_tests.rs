//! Simulated trainings on two ranks, compared as a training's steps are: ranks that train differently are found,
//! ranks that only round differently are not.

use burn::tensor::TensorData;

use super::parameter_movement::{Movements, Sketch, distance, tolerance};

/// Values of one parameter on two ranks, and their comparisons.
struct Replicas {
    values: [Vec<f32>; 2],
    velocities: [Vec<f32>; 2],
    movements: [Movements; 2],
    comparisons: usize,
}

/// One rank's optimizer: SGD with momentum and weight decay.
#[derive(Clone, Copy)]
struct Sgd {
    lr: f32,
    momentum: f32,
    decay: f32,
    /// Element that is never updated.
    skips: Option<usize>,
    order: Order,
}

/// Order of the update's operations.
#[derive(Clone, Copy)]
enum Order {
    Plain,
    Fused,
    LrFirst,
}

const SGD: Sgd = Sgd { lr: 1e-4, momentum: 0.9, decay: 0.0, skips: None, order: Order::Plain };

impl Sgd {
    fn step(&self, values: &mut [f32], velocities: &mut [f32], gradient: impl Fn(usize) -> f32) {
        for (i, (x, v)) in values.iter_mut().zip(velocities).enumerate() {
            *v = self.momentum * *v + gradient(i) + self.decay * *x;
            *x = match self.order {
                _ if self.skips == Some(i) => *x,
                Order::Plain => *x - self.lr * *v,
                Order::Fused => self.lr.mul_add(-*v, *x),
                Order::LrFirst => {
                    let before = (*v - gradient(i)) * self.lr;
                    *x - (before + self.lr * gradient(i))
                }
            };
        }
    }
}

impl Replicas {
    fn new(values: Vec<f32>) -> Replicas {
        let movements = [(); 2].map(|()| {
            let mut movements = Movements::new(1);
            movements.measure_from(vec![sketch(&values)]);
            movements
        });
        let velocities = [(); 2].map(|()| vec![0.0; values.len()]);
        Replicas { values: [values.clone(), values], velocities, movements, comparisons: 0 }
    }

    fn step(&mut self, optimizers: [Sgd; 2], gradient: impl Fn(usize, f32) -> f32) {
        // The average over the ranks.
        let [one, other] = &self.values;
        let mean: Vec<f32> = one.iter().zip(other).map(|(one, other)| (one + other) / 2.0).collect();
        for (rank, optimizer) in optimizers.into_iter().enumerate() {
            optimizer.step(&mut self.values[rank], &mut self.velocities[rank], |i| gradient(i, mean[i]));
        }
    }

    /// The outcome of a comparison: true if it is an error.
    fn are_refused(&mut self) -> bool {
        self.comparisons += 1;
        let [one, other] = &mut self.movements;
        one.set_now(vec![sketch(&self.values[0])]);
        other.set_now(vec![sketch(&self.values[1])]);
        let differing: &[usize] = if self.values[0] == self.values[1] { &[] } else { &[0] };
        let apart = distance(&one.until_now()[0], &other.until_now()[0]);
        one.accept(|_| true, differing);
        other.accept(|_| true, differing);
        !differing.is_empty() && apart > tolerance(burn_ddp_comm::DType::F32)
    }

    /// Number of the comparison that is an error, in a training of this many steps.
    fn found(mut self, steps: u64, optimizers: [Sgd; 2], gradient: impl Fn(u64, usize, f32) -> f32) -> Option<usize> {
        (0..steps).find_map(|step| {
            let compared = step.is_power_of_two() && step < 100 || step.is_multiple_of(100) && step > 0;
            let refused = compared && self.are_refused();
            self.step(optimizers, |i, x| gradient(step, i, x));
            refused.then_some(self.comparisons)
        })
    }
}

fn sketch(values: &[f32]) -> Sketch {
    Sketch::of(&TensorData::new(values.to_vec(), [values.len()]))
}

/// A number in -1 … 1.
fn noise(step: u64, i: usize) -> f32 {
    let mut bits = (step << 20 | i as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits ^= bits >> 29;
    bits = bits.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Values around `scale`; the first is `first`, if it is given.
fn values(len: usize, scale: f32, first: Option<f32>) -> Vec<f32> {
    let mut values: Vec<f32> = (0..len).map(|i| scale * (1.0 + 0.5 * noise(u64::MAX >> 20, i))).collect();
    values[0] = first.unwrap_or(values[0]);
    values
}

/// Parameters of all sizes: their names, values, and the size of their gradients.
fn parameters() -> impl Iterator<Item = (String, Vec<f32>, f32)> {
    let scales = [("1", 1.0, None), ("1e-6", 1e-6, None), ("0.2 and one 1e5", 0.2, Some(1e5))];
    [8, 100, 10_000].into_iter().flat_map(move |len| {
        scales.map(|(name, scale, first)| (format!("{len} elements of {name}"), values(len, scale, first), scale))
    })
}

#[test]
fn ranks_that_train_differently_are_found_in_the_first_comparisons() {
    let faults = [
        ("twice the rate", Sgd { lr: 2.0 * SGD.lr, ..SGD }),
        ("a rate of 101 %", Sgd { lr: 1.01 * SGD.lr, ..SGD }),
        ("weight decay", Sgd { decay: 0.1, ..SGD }),
        ("another momentum", Sgd { momentum: 0.8, ..SGD }),
        ("an element without update", Sgd { skips: Some(5), ..SGD }),
    ];
    for (name, values, scale) in parameters() {
        for (fault, other) in faults {
            let gradient = |step, i, _| scale * (1.0 + noise(step, i));
            let found = Replicas::new(values.clone()).found(20, [SGD, other], gradient);
            assert!(found.is_some_and(|comparison| comparison <= 3), "{fault}, {name}: {found:?}");
        }
    }
}

/// The parameter moves by one last bit in some steps, by two on the other rank: the comparisons see at most four last
/// bits each.
#[test]
fn a_drift_of_last_bits_is_found() {
    let bit = f32::EPSILON;
    let rates = [1.0, 2.0].map(|lr| Sgd { lr, momentum: 0.0, ..SGD });
    for every in [40, 60, 110] {
        for len in [8, 31] {
            let gradient = |step: u64, _: usize, _: f32| if step.is_multiple_of(every) { -bit } else { 0.0 };
            let found = Replicas::new(vec![1.0; len]).found(10_000, rates, gradient);
            assert!(found.is_some_and(|comparison| comparison <= 50), "{every}, {len}: {found:?}");
        }
    }
}

/// A gradient, from step, element and value.
type Gradient = fn(u64, usize, f32) -> f32;

/// Gradients: of a parameter that moves steadily, of one that oscillates, and of one that converges to 1.1 times its
/// first value, whose gradients become so small that it moves by last bits.
const TRAININGS: [(&str, Gradient); 4] = [
    ("steady", |step, i, _| 1.0 + noise(step, i)),
    ("oscillating", |step, i, _| 100.0 * noise(step, i)),
    ("alternating", |step, i, _| if step % 2 == 0 { 10.0 } else { -10.0 } * (1.0 + 0.1 * noise(step, i))),
    ("converging", |step, i, x| {
        let noise = noise(step, i) / (1.0 + step as f32 / 100.0).powi(2);
        10.0 * (x - 1.1) + noise
    }),
];

fn never_refused(len: usize, steps: u64) {
    for (name, training) in TRAININGS {
        for (order, decay) in [(Order::Fused, 0.0), (Order::Fused, 0.01), (Order::LrFirst, 0.0), (Order::LrFirst, 0.01)]
        {
            for (scale, first) in [(1.0, None), (1e-6, None), (0.2, Some(1e5))] {
                let one = Sgd { decay, ..SGD };
                let other = Sgd { order, ..one };
                let start = values(len, scale, first);
                let gradient = |step, i, x: f32| scale * training(step, i, x / start[i]);
                let found = Replicas::new(start.clone()).found(steps, [one, other], gradient);
                assert_eq!(found, None, "{name}, {scale}, {len} elements, decay {decay}");
            }
        }
    }
}

#[test]
fn ranks_that_round_differently_are_never_refused() {
    never_refused(8, 20_000);
    never_refused(100, 2_000);
    never_refused(5_000, 64);
}

#[test]
#[ignore = "takes 20 s"]
fn ranks_that_round_differently_are_never_refused_in_a_million_steps() {
    never_refused(8, 1_000_000);
}
