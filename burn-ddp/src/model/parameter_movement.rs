//! Movement of parameters between two comparisons of the replicas. It tells differences by rounding from ranks that
//! train different models.
//!
//! Burn's arithmetic need not repeat its bits. Flex with several threads sums tensors of 4 Mi elements and more in the
//! order in which they finish, so norm clipping, LAMB, Adafactor and Muon scale by factors that differ in the last bit;
//! GPUs of different kinds round differently. So if digests differ, the comparison measures the difference: with the
//! movements `m` of two ranks since the last comparison, `|m₁ - m₂| <= tolerance · min(|m₁|, |m₂|)` is rounding.
//!
//! The tolerance is 1e-3, and 1e-2 for half types. Rounding gives about 1e-7, and 1e-5 where updates are small beside
//! the last bits of the values. A learning rate that is off by 1 % gives 1e-2; an update in bf16, 1.6e-3; one step of
//! a hundred with a gradient of its own, about 1e-2.
//!
//! Movements are compared instead of values, since a difference by rounding stays: the program owns the model, and
//! neither a backward nor `save` could correct its values. But the difference does not grow by itself: each step moves
//! the parameters of all ranks by the same average, bit by bit, and the same holds for the state of optimizers. So each
//! comparison judges the differences that were added since the last one.
//!
//! A difference of a few last bits counts as rounding, too, if the parameter moved: a small parameter may move by only
//! a few last bits of its values, and then one element that is rounded the other way already exceeds the tolerance.
//!
//! But last bits of one sign in every comparison would add up to any difference. So a comparison judges the movement
//! since the ranks were last equal, too: beside the path, the sum of the movements between comparisons. The last bits
//! that rounding adds have random signs: after `n` comparisons they amount to `√n` times those of one.
//!
//! A movement is known by its [`Sketch`]: a comparison sends 1,000 bytes per parameter instead of a copy of the model.

use std::collections::HashMap;

use burn::tensor::{DType, TensorData};
use burn_ddp_comm::DType as CommDType;

/// Number of sums in a sketch. A prime, so that the columns of a matrix spread over all of them.
const SUMS: usize = 31;
/// Numbers of a movement as it travels: two sketches and the path.
const ROW_LEN: usize = 4 * SUMS + 1;
/// Difference of two sums up to which it is rounding, even if a parameter moved less; in last bits of the sum's largest
/// element. It is the norm of 16 elements that differ by one last bit each.
const LAST_BITS: f64 = 4.0;

/// Sums of the elements of a value with random signs, each of every 31st element.
///
/// Sketches of two values subtract like the values, and the [norm](Sketch::norm) of a sketch estimates that of the
/// value, with an error of about 13 % whichever elements differ; exactly if there are at most 31 elements. Computing
/// one costs about 0.5 ns per element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sketch {
    sums: [f64; SUMS],
    /// For each sum, the last bit of its largest element, or up to twice as much; 0 for half types, whose tolerance is
    /// larger.
    last_bits: [f64; SUMS],
}

impl Sketch {
    /// Sketch of an unknown value. Its difference from any sketch is unknown, too.
    pub(crate) const UNKNOWN: Sketch = Sketch { sums: [f64::NAN; SUMS], last_bits: [f64::NAN; SUMS] };

    /// Sketch of the elements of `data`; unknown if they are no floats.
    pub(crate) fn of(data: &TensorData) -> Self {
        let sketch = match data.dtype() {
            DType::F64 => data.as_slice().map(|elements| sketch(elements, f64::EPSILON)),
            DType::F32 | DType::Flex32 => data.as_slice().map(|elements| sketch(elements, f32::EPSILON)),
            DType::F16 => data.as_slice().map(|elements| sketch(elements, half::f16::ZERO)),
            DType::BF16 => data.as_slice().map(|elements| sketch(elements, half::bf16::ZERO)),
            _ => return Self::UNKNOWN,
        };
        sketch.unwrap_or(Self::UNKNOWN)
    }

    /// Sketch of the movement from the value `before` to this one.
    #[must_use]
    pub(crate) fn minus(&self, before: &Sketch) -> Sketch {
        Sketch {
            sums: std::array::from_fn(|i| self.sums[i] - before.sums[i]),
            last_bits: std::array::from_fn(|i| self.last_bits[i].max(before.last_bits[i])),
        }
    }

    /// Sketch of this movement and the `next`. Last bits add up like steps of a random walk.
    fn plus(&self, next: &Sketch) -> Sketch {
        Sketch {
            sums: std::array::from_fn(|i| self.sums[i] + next.sums[i]),
            last_bits: std::array::from_fn(|i| self.last_bits[i].hypot(next.last_bits[i])),
        }
    }

    /// Estimate of the value's Euclidean norm; NaN if it is unknown.
    fn norm(&self) -> f64 {
        norm(self.sums)
    }

    /// Difference from the movement of another rank as a part of `moved`; infinite if one is unknown. Without sums
    /// that differ by less than [`LAST_BITS`], if the parameter moved.
    fn distance(&self, other: &Sketch, moved: f64) -> f64 {
        let rounding = |i: usize| match moved > 0.0 {
            true => LAST_BITS * self.last_bits[i].max(other.last_bits[i]),
            false => 0.0,
        };
        let difference = |i: usize| match self.sums[i] - other.sums[i] {
            difference if difference.abs() < rounding(i) => 0.0,
            difference => difference,
        };
        let difference = norm(std::array::from_fn(difference));
        match difference / moved {
            _ if difference == 0.0 => 0.0,
            ratio if ratio.is_nan() => f64::INFINITY,
            ratio => ratio,
        }
    }
}

fn norm(sums: [f64; SUMS]) -> f64 {
    sums.iter().map(|sum| sum * sum).sum::<f64>().sqrt()
}

fn sketch<E: Copy + Into<f64>>(elements: &[E], epsilon: E) -> Sketch {
    let (mut sums, mut largest) = ([0.0; SUMS], [0.0_f64; SUMS]);
    for (nth, row) in elements.chunks(SUMS).enumerate() {
        let signs = mixed(nth as u64);
        for (i, (sum, &element)) in sums.iter_mut().zip(row).enumerate() {
            let sign = (signs >> i) << 63;
            let element: f64 = element.into();
            largest[i] = largest[i].max(element.abs());
            *sum += f64::from_bits(element.to_bits() ^ sign);
        }
    }
    Sketch { sums, last_bits: largest.map(|largest| largest * epsilon.into()) }
}

/// 64 bits that are as good as random (SplitMix64).
fn mixed(n: u64) -> u64 {
    let z = n.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Movement of a parameter on one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Movement {
    since_compared: Sketch,
    /// Movement since the last comparison in which the ranks were equal.
    since_equal: Sketch,
    /// Sum of the norms of the movements between comparisons since the ranks were equal.
    path: f64,
}

impl Movement {
    pub(crate) const UNKNOWN: Movement =
        Movement { since_compared: Sketch::UNKNOWN, since_equal: Sketch::UNKNOWN, path: f64::NAN };

    /// The first movement since the ranks were equal.
    pub(crate) fn first(movement: Sketch) -> Movement {
        Movement { since_compared: movement, since_equal: movement, path: movement.norm() }
    }

    /// This movement and the `next`, after a comparison in which the ranks were not equal.
    fn then(&self, next: Sketch) -> Movement {
        Movement { since_compared: next, since_equal: self.since_equal.plus(&next), path: self.path + next.norm() }
    }

    fn to_row(self) -> impl Iterator<Item = f64> {
        let sketches = [self.since_compared, self.since_equal];
        sketches.into_iter().flat_map(|sketch| sketch.sums.into_iter().chain(sketch.last_bits)).chain([self.path])
    }

    fn from_row(row: &[i64; ROW_LEN]) -> Movement {
        let numbers = |from: usize| std::array::from_fn(|i| f64::from_bits(row[from + i] as u64));
        let sketch = |from| Sketch { sums: numbers(from), last_bits: numbers(from + SUMS) };
        let path = f64::from_bits(row[ROW_LEN - 1] as u64);
        Movement { since_compared: sketch(0), since_equal: sketch(2 * SUMS), path }
    }
}

/// The bits of movements, one after the other, as integers: the form in which digests travel, too.
pub(crate) fn to_row(movements: impl Iterator<Item = Movement>) -> Vec<i64> {
    movements.flat_map(Movement::to_row).map(|number| number.to_bits() as i64).collect()
}

/// The inverse of [`to_row`].
pub(crate) fn from_row(row: &[i64]) -> Vec<Movement> {
    row.as_chunks().0.iter().map(Movement::from_row).collect()
}

/// Difference of two ranks' movements as a part of the smaller one, or of the shorter path: the larger of that since
/// the last comparison and that since the ranks were equal. Infinite if a movement is unknown; 0 for a few last bits,
/// if both ranks moved.
pub(crate) fn distance(one: &Movement, other: &Movement) -> f64 {
    let moved = one.since_compared.norm().min(other.since_compared.norm());
    let last = one.since_compared.distance(&other.since_compared, moved);
    last.max(one.since_equal.distance(&other.since_equal, one.path.min(other.path)))
}

/// Largest [`distance`] of movements that is rounding, for a parameter of this type.
pub(crate) fn tolerance(dtype: CommDType) -> f64 {
    match dtype {
        CommDType::F16 | CommDType::BF16 => 1e-2,
        _ => 1e-3,
    }
}

/// Movements of the parameters of a model on this rank.
pub(crate) struct Movements {
    /// Values at the last comparison in which every rank read the parameter; before the first one, the values that
    /// `wrap` gave all ranks. `None` until the first backward.
    since: Option<Vec<Sketch>>,
    /// Movements until the last comparison, of the parameters in which the ranks were not equal then.
    unequal: HashMap<usize, Movement>,
    /// Values that the running backward's forward read; unknown for parameters that it did not read.
    now: Vec<Sketch>,
}

impl Movements {
    pub(crate) fn new(parameters: usize) -> Self {
        Movements { since: None, unequal: HashMap::new(), now: vec![Sketch::UNKNOWN; parameters] }
    }

    /// True if there are no values yet from which to measure movements.
    pub(crate) fn is_new(&self) -> bool {
        self.since.is_none()
    }

    /// Measures movements from these values on, which are the same on all ranks.
    pub(crate) fn measure_from(&mut self, values: Vec<Sketch>) {
        self.since = Some(values);
    }

    /// Drops the values from which movements are measured, since all ranks got new values.
    pub(crate) fn restart(&mut self) {
        self.since = None;
        self.unequal.clear();
    }

    /// Sets the values that the running backward's forward read.
    pub(crate) fn set_now(&mut self, values: Vec<Sketch>) {
        self.now = values;
    }

    /// Movements of all parameters until the running backward.
    pub(crate) fn until_now(&self) -> Vec<Movement> {
        self.now.iter().enumerate().map(|(i, now)| self.until(i, now)).collect()
    }

    /// Movement of a parameter until it had the value `now`.
    pub(crate) fn until(&self, parameter: usize, now: &Sketch) -> Movement {
        let Some(since) = &self.since else { return Movement::UNKNOWN };
        let last = now.minus(&since[parameter]);
        self.unequal.get(&parameter).map_or_else(|| Movement::first(last), |before| before.then(last))
    }

    /// Ends a comparison, after which movements of the parameters `all_read` are measured from the values of now.
    /// Ranks were not equal in the parameters
    /// `differing`, in ascending order.
    pub(crate) fn accept(&mut self, all_read: impl Fn(usize) -> bool, differing: &[usize]) {
        for parameter in (0..self.now.len()).filter(|i| all_read(*i)) {
            let now = self.now[parameter];
            match differing.binary_search(&parameter).is_ok() {
                true => self.unequal.insert(parameter, self.until(parameter, &now)),
                false => self.unequal.remove(&parameter),
            };
            if let Some(since) = &mut self.since {
                since[parameter] = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    fn sketch(elements: Vec<f32>) -> Sketch {
        let len = elements.len();
        Sketch::of(&TensorData::new(elements, [len]))
    }

    /// Numbers in -1 … 1.
    fn numbers(n: usize, salt: u64) -> Vec<f32> {
        (0..n as u64).map(|i| (mixed(i ^ (salt << 40)) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    fn norm(elements: &[f32]) -> f64 {
        elements.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn the_norm_of_a_difference_is_estimated_whichever_elements_differ() {
        let before = numbers(100_000, 0);
        let dense = numbers(100_000, 1);
        let constant = vec![1e-4; 100_000];
        let one = (0..100_000).map(|i| if i == 77_777 { 1e-6 } else { 0.0 }).collect();
        let column = (0..100_000).map(|i| if i % 64 == 5 { 0.5 } else { 0.0 }).collect();
        let row = (0..100_000).map(|i| if i / 64 == 5 { 0.5 } else { 0.0 }).collect();
        for (name, change) in [("dense", dense), ("constant", constant), ("one", one), ("column", column), ("row", row)]
        {
            let after: Vec<f32> = before.iter().zip(&change).map(|(b, c)| b + c).collect();
            let changed: Vec<f32> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
            let estimate = sketch(after).minus(&sketch(before.clone())).norm();
            let ratio = estimate / norm(&changed);
            assert!((0.6..1.5).contains(&ratio), "{name}: {ratio}");
        }
        let few = numbers(31, 2);
        assert!((sketch(few.clone()).norm() - norm(&few)).abs() < 1e-12, "exact");
    }

    #[test]
    fn rounding_is_far_below_the_tolerance_and_another_learning_rate_above() {
        let (value, gradient) = (numbers(10_000, 3), numbers(10_000, 4));
        let moved = |factor: f32| {
            let after = value.iter().zip(&gradient).map(|(v, g)| v - 1e-3 * factor * g).collect();
            Movement::first(sketch(after).minus(&sketch(value.clone())))
        };
        let rounding = distance(&moved(1.0), &moved(1.0 + 256.0 * f32::EPSILON));
        assert!(rounding > 0.0 && rounding < 1e-4, "{rounding}");
        let another = distance(&moved(1.0), &moved(1.01));
        assert!((0.005..0.02).contains(&another), "{another}");
    }

    #[test]
    fn a_few_last_bits_are_rounding_however_little_a_parameter_moved() {
        let value = sketch(vec![1.0; 64]);
        let moved = |elements: &[f32]| Movement::first(sketch(elements.to_vec()).minus(&value));
        // Each element moves by three last bits, one of them by a fourth on one rank.
        let one = vec![1.0 + 3.0 * f32::EPSILON; 64];
        let mut other = one.clone();
        other[7] += f32::EPSILON;
        assert_eq!(distance(&moved(&one), &moved(&other)), 0.0);
        other[7] += 4.0 * f32::EPSILON;
        assert!(distance(&moved(&one), &moved(&other)) > 0.1);
    }

    #[test]
    fn what_did_not_move_must_not_differ() {
        let (a, b) = (sketch(vec![1.0, 2.0]), sketch(vec![1.0, 2.5]));
        let still = Movement::first(a.minus(&a));
        assert_eq!(distance(&still, &still), 0.0);
        assert_eq!(distance(&Movement::first(b.minus(&a)), &still), f64::INFINITY);
        assert_eq!(distance(&Movement::UNKNOWN, &still), f64::INFINITY);
        for not_finite in [f32::NAN, f32::INFINITY] {
            let moved = |to: f32| Movement::first(sketch(vec![to]));
            assert_eq!(distance(&moved(not_finite), &moved(1.0)), f64::INFINITY);
        }
    }

    #[test]
    fn every_float_has_a_sketch_and_it_travels() {
        let data = TensorData::new(numbers(100, 5), [100]);
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let sketch = Sketch::of(&data.clone().convert_dtype(dtype));
            assert!(sketch.norm() > 1.0, "{dtype:?}");
            let other = Sketch { sums: [1.5; SUMS], last_bits: [0.5; SUMS] };
            let two = [Movement::first(other).then(sketch), Movement::first(other)];
            let row = to_row(two.into_iter());
            assert_eq!((row.len() * 8, from_row(&row)), (2000, two.to_vec()));
        }
        assert!(Sketch::of(&TensorData::new(vec![1_i64], [1])).norm().is_nan());
    }

    #[test]
    fn movements_are_measured_from_what_every_rank_read() {
        let value = |x: f32| sketch(vec![x]);
        let mut movements = Movements::new(2);
        assert!(movements.is_new() && movements.until_now()[0].path.is_nan());
        movements.measure_from(vec![value(1.0), value(1.0)]);
        movements.set_now(vec![value(3.0), Sketch::UNKNOWN]);
        assert_eq!(movements.until_now()[0].since_compared.sums, value(2.0).sums);
        movements.accept(|parameter| parameter == 0, &[]);
        movements.set_now(vec![value(4.0), value(4.0)]);
        let sums: Vec<_> = movements.until_now().iter().map(|m| m.since_compared.sums).collect();
        assert_eq!(sums, [value(1.0), value(3.0)].map(|v| v.sums));
    }

    #[test]
    fn movements_add_up_until_the_ranks_are_equal() {
        let value = |x: f32| sketch(vec![x]);
        let mut movements = Movements::new(1);
        movements.measure_from(vec![value(0.0)]);
        // Value, whether the ranks differ; movement since the last comparison, since the ranks were equal, and path.
        for (now, differ, last, total, path) in [
            (2.0, true, 2.0, 2.0, 2.0),
            (1.0, true, -1.0, 1.0, 3.0),
            (4.0, false, 3.0, 4.0, 6.0),
            (5.0, true, 1.0, 1.0, 1.0),
        ] {
            movements.set_now(vec![value(now)]);
            let movement = movements.until_now()[0];
            assert_eq!(movement.since_compared.sums, value(last).sums, "{now}");
            assert_eq!((movement.since_equal.sums, movement.path), (value(total).sums, path), "{now}");
            movements.accept(|_| true, if differ { &[0] } else { &[] });
        }
        movements.restart();
        movements.measure_from(vec![value(5.0)]);
        movements.set_now(vec![value(7.0)]);
        assert_eq!(movements.until_now()[0].path, 2.0);
    }
}
