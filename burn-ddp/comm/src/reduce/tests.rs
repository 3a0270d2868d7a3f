//! Every instruction set, dtype and operation against the contract, bit by bit.

use half::{bf16, f16};

use super::kernel::Isa;
use super::*;

/// Step between the sizes that are tested, since Miri is slow.
const STEP: usize = if cfg!(miri) { 12 } else { 1 };

/// Miri does not know the instructions that convert f16, which are used where `-C target-feature=+f16c` promises them.
fn may_run(dtype: &DType) -> bool {
    *dtype != DType::F16 || !cfg!(all(miri, target_feature = "f16c"))
}

/// Random numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// An element: any bits at all, or a number of ordinary size, or one of those that are special.
    fn element(&mut self, dtype: DType) -> Vec<u8> {
        let any = self.next().to_le_bytes();
        let small = (self.next() % 20001) as f64 / 100.0 - 100.0;
        let kind = self.below(4);
        match dtype {
            DType::F64 if kind > 1 => small.to_le_bytes().to_vec(),
            DType::F32 if kind > 1 => (small as f32).to_le_bytes().to_vec(),
            DType::F16 if kind > 1 => f16::from_f64(small).to_le_bytes().to_vec(),
            DType::BF16 if kind > 1 => bf16::from_f64(small).to_le_bytes().to_vec(),
            _ if dtype.is_float() && kind == 1 => self.special(dtype),
            _ => any[..dtype.size_bytes()].to_vec(),
        }
    }

    /// Zeros, the smallest and largest numbers, infinities, and NaNs quiet, signalling and of either sign.
    fn special(&mut self, dtype: DType) -> Vec<u8> {
        let (exponent, mantissa) = match dtype {
            DType::F64 => (0x7ff_u64 << 52, (1_u64 << 52) - 1),
            DType::F32 => (0xff << 23, (1 << 23) - 1),
            DType::F16 => (0x1f << 10, (1 << 10) - 1),
            _ => (0xff << 7, (1 << 7) - 1),
        };
        let sign = (exponent << 1) & !exponent & !mantissa;
        let top = mantissa ^ (mantissa >> 1);
        let bits =
            [0, 1, top, mantissa, exponent & (exponent >> 1), exponent - 1, exponent, exponent | 1, exponent | top]
                [self.below(9)];
        (bits | if self.below(2) == 0 { sign } else { 0 }).to_le_bytes()[..dtype.size_bytes()].to_vec()
    }
}

/// The contract for one element: pair up neighbours until one is left.
fn by_levels<T: Copy>(mut level: Vec<T>, fold: &impl Fn(T, T) -> T) -> T {
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| pair.iter().copied().reduce(fold).unwrap()).collect();
    }
    level[0]
}

macro_rules! expected_float {
    ($name:ident, $acc:ty) => {
        fn $name(elements: &[$acc], reduction: Reduction<'_>) -> $acc {
            let min = |a: $acc, b: $acc| if a < b || a.is_nan() { a } else { b };
            let max = |a: $acc, b: $acc| if a > b || a.is_nan() { a } else { b };
            let all = elements.to_vec();
            match reduction {
                Reduction::Op(ReduceOp::Sum) => by_levels(all, &|a, b| a + b),
                Reduction::Op(ReduceOp::Mean) => by_levels(all, &|a, b| a + b) / elements.len() as $acc,
                Reduction::Op(ReduceOp::Min) => by_levels(all, &min),
                Reduction::Op(ReduceOp::Max) => by_levels(all, &max),
                Reduction::Op(ReduceOp::Product) => by_levels(all, &|a, b| a * b),
                Reduction::Sums(weights) => {
                    by_levels(all, &|a, b| a + b) / by_levels(weights.to_vec(), &|a, b| a + b) as $acc
                }
                Reduction::Weighted(weights) => {
                    let present = || weights.iter().zip(elements).filter(|(weight, _)| **weight > 0.0);
                    // The largest weight of the tests is between 1 and 2, so none is scaled. Equal weights count as
                    // none.
                    let equal = present().all(|(weight, _)| *weight == 1.5);
                    let factor = |weight: f64| if equal { 1.0 } else { weight as $acc };
                    let total = present().map(|(weight, _)| f64::from(factor(*weight))).sum::<f64>() as $acc;
                    by_levels(present().map(|(weight, x)| factor(*weight) * x).collect(), &|a, b| a + b) / total
                }
            }
        }
    };
}

expected_float!(expected_f32, f32);
expected_float!(expected_f64, f64);

fn expected_integer(elements: &[i64], reduction: Reduction<'_>) -> i64 {
    let all = elements.to_vec();
    match reduction {
        Reduction::Op(ReduceOp::Min) => by_levels(all, &|a, b| a.min(b)),
        Reduction::Op(ReduceOp::Max) => by_levels(all, &|a, b| a.max(b)),
        Reduction::Op(ReduceOp::Product) => by_levels(all, &i64::wrapping_mul),
        _ => by_levels(all, &i64::wrapping_add),
    }
}

/// The bytes of the reduction of one element of each rank. Conversions are the ones in software.
fn expected(dtype: DType, reduction: Reduction<'_>, elements: &[&[u8]]) -> Vec<u8> {
    let bits = |bytes: &&[u8]| bytes.iter().rev().fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
    let f32s = |load: fn(u64) -> f32| elements.iter().map(|x| load(bits(x))).collect::<Vec<_>>();
    let integers = |load: fn(u64) -> i64| elements.iter().map(|x| load(bits(x))).collect::<Vec<_>>();
    match dtype {
        DType::F64 => {
            let inputs: Vec<f64> = elements.iter().map(|x| f64::from_bits(bits(x))).collect();
            let x = expected_f64(&inputs, reduction);
            if x.is_nan() { 0x7ff8_u64 << 48 } else { x.to_bits() }.to_le_bytes().to_vec()
        }
        DType::F32 => {
            let x = expected_f32(&f32s(|bits| f32::from_bits(bits as u32)), reduction);
            if x.is_nan() { 0x7fc0_0000_u32 } else { x.to_bits() }.to_le_bytes().to_vec()
        }
        DType::F16 => {
            let x = expected_f32(&f32s(|bits| f16::from_bits(bits as u16).to_f32_const()), reduction);
            if x.is_nan() { 0x7e00 } else { f16::from_f32_const(x).to_bits() }.to_le_bytes().to_vec()
        }
        DType::BF16 => {
            let x = expected_f32(&f32s(|bits| bf16::from_bits(bits as u16).to_f32_const()), reduction);
            if x.is_nan() { 0x7fc0 } else { bf16::from_f32_const(x).to_bits() }.to_le_bytes().to_vec()
        }
        DType::I64 => expected_integer(&integers(|bits| bits as i64), reduction).to_le_bytes().to_vec(),
        DType::I32 => {
            (expected_integer(&integers(|bits| i64::from(bits as i32)), reduction) as i32).to_le_bytes().to_vec()
        }
        DType::I8 => vec![expected_integer(&integers(|bits| i64::from(bits as i8)), reduction) as u8],
        DType::U8 => vec![expected_integer(&integers(|bits| i64::from(bits as u8)), reduction) as u8],
        DType::Bool => vec![expected_integer(&integers(|bits| i64::from(bits != 0)), reduction) as u8],
    }
}

/// Reduces random elements of `world` ranks with `isa`, at odd addresses, and compares each with the contract.
fn check(isa: Isa, dtype: DType, reduction: Reduction<'_>, (world, len): (usize, usize), random: &mut Random) {
    let size = dtype.size_bytes();
    let at = random.below(64);
    let inputs: Vec<Vec<u8>> = (0..world)
        .map(|_| {
            let elements = (0..len).flat_map(|_| random.element(dtype));
            vec![0; at].into_iter().chain(elements).collect()
        })
        .collect();
    // One of the ranks may be the output itself.
    let own = random.below(world + 1);
    let mut out: Vec<u8> = vec![0xaa; random.below(64)];
    let before = out.len();
    match inputs.get(own) {
        Some(input) => out.extend(&input[at..]),
        None => out.resize(before + len * size, 0xaa),
    }
    out.push(0xaa);
    let mut also = vec![0xaa; len * size];
    let sources: Vec<Source<'_>> =
        (0..world).map(|rank| if rank == own { Source::Output } else { Source::Bytes(&inputs[rank][at..]) }).collect();
    let second = (random.below(2) == 0).then_some(&mut also[..]);
    let has_second = second.is_some();
    let result = &mut out[before..before + len * size];
    reduce_with(isa, dtype, reduction, &sources, (result, second)).unwrap();

    let what = format!("{isa:?} {reduction:?} of {dtype} on {world} ranks, output {own}");
    for index in 0..len {
        let elements: Vec<&[u8]> = inputs.iter().map(|input| &input[at + index * size..][..size]).collect();
        let (got, expected) = (&out[before + index * size..][..size], expected(dtype, reduction, &elements));
        assert_eq!(got, expected, "{what}: element {index} of {len}, from {elements:02x?}");
    }
    assert!(out[..before].iter().chain(&out[before + len * size..]).all(|byte| *byte == 0xaa), "{what}: around it");
    let copied: &[u8] = if has_second { &out[before..before + len * size] } else { &vec![0xaa; len * size] };
    assert!(also == copied, "{what}: the second copy");
}

fn ops(dtype: DType) -> Vec<ReduceOp> {
    let all = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
    let defined = |op: &ReduceOp| match op {
        ReduceOp::Mean => dtype.is_float(),
        ReduceOp::Sum | ReduceOp::Product => dtype != DType::Bool,
        ReduceOp::Min | ReduceOp::Max => true,
    };
    all.into_iter().filter(defined).collect()
}

#[test]
#[cfg_attr(miri, ignore = "so many sizes take hours")]
fn all_instructions_yield_the_bits_of_the_contract() {
    let mut random = Random(7);
    for isa in Isa::all() {
        for dtype in DType::ALL {
            for op in ops(dtype) {
                for world in (1..=18).chain([33, 63, 64, 65, 129]) {
                    for len in [random.below(16), 16 + random.below(100), 64 + random.below(400)] {
                        check(isa, dtype, Reduction::Op(op), (world, len), &mut random);
                    }
                }
            }
        }
    }
}

/// Small enough for Miri: one pass and several, a whole vector and a rest.
#[test]
fn few_elements_yield_the_bits_of_the_contract() {
    let mut random = Random(11);
    for isa in Isa::all() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I32].into_iter().filter(may_run) {
            for op in ops(dtype) {
                let world = if matches!(op, ReduceOp::Sum | ReduceOp::Mean) { 9 } else { 2 };
                check(isa, dtype, Reduction::Op(op), (world, 33), &mut random);
            }
        }
    }
}

#[test]
fn weights_yield_the_bits_of_the_contract() {
    let mut random = Random(8);
    for isa in Isa::all() {
        let floats = [DType::F64, DType::F32, DType::F16, DType::BF16];
        for dtype in floats.into_iter().filter(may_run) {
            for world in (2..=20).chain([32, 33, 70]).step_by(STEP) {
                for len in [3, if cfg!(miri) { 33 } else { 150 }] {
                    let mut weights: Vec<f64> = (0..world).map(|_| random.below(8) as f64 / 8.0).collect();
                    weights[random.below(world)] = 1.5;
                    check(isa, dtype, Reduction::Weighted(&weights), (world, len), &mut random);
                    check(isa, dtype, Reduction::Sums(&weights), (world, len), &mut random);
                }
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "large buffers take too long")]
fn blocks_of_large_buffers_fit_together() {
    let mut random = Random(9);
    for isa in Isa::all() {
        for (dtype, world, len) in [(DType::F32, 2, 20_001), (DType::BF16, 3, 9000), (DType::F64, 9, 3000)] {
            check(isa, dtype, Reduction::Op(ReduceOp::Mean), (world, len), &mut random);
        }
        for (dtype, world, len) in [(DType::F32, 300, 200), (DType::I8, 5, 70_000), (DType::F16, 17, 2000)] {
            check(isa, dtype, Reduction::Op(ReduceOp::Max), (world, len), &mut random);
        }
    }
}

/// All of them, since the conversions are other instructions on each processor.
#[test]
fn every_half_is_widened_and_rounded_back() {
    for isa in Isa::all() {
        let types = [(DType::F16, 0x7e00_u16), (DType::BF16, 0x7fc0)];
        for (dtype, canonical) in types.into_iter().filter(|(dtype, _)| may_run(dtype)) {
            let halves = || (0..=u16::MAX).step_by(STEP.pow(3));
            let all: Vec<u8> = halves().flat_map(u16::to_le_bytes).collect();
            let mut out = vec![0; all.len()];
            let sum = Reduction::Op(ReduceOp::Sum);
            reduce_with(isa, dtype, sum, &[Source::Bytes(&all)], (&mut out, None)).unwrap();
            for (bits, got) in halves().zip(out.as_chunks::<2>().0) {
                let is_nan =
                    if dtype == DType::F16 { f16::from_bits(bits).is_nan() } else { bf16::from_bits(bits).is_nan() };
                assert_eq!(u16::from_le_bytes(*got), if is_nan { canonical } else { bits }, "{isa:?} {dtype}");
            }
        }
    }
}

/// At most half a unit in the last place of the result, from the rounding, and what f32 loses in each addition.
#[test]
fn halves_lose_no_more_than_one_rounding() {
    let mut random = Random(10);
    let mut values =
        |len: usize| -> Vec<f64> { (0..len).map(|_| random.next() as f64 / f64::powi(2.0, 63) - 1.0).collect() };
    let len = if cfg!(miri) { 65 } else { 1000 };
    for world in [2, 3, 4, 7, 8, 16, 33].into_iter().step_by(STEP) {
        let inputs: Vec<Vec<f64>> = (0..world).map(|_| values(len)).collect();
        let types = [(DType::F16, 11), (DType::BF16, 8)];
        for (dtype, digits) in types.into_iter().filter(|(dtype, _)| may_run(dtype)) {
            type Conversions = (fn(f64) -> u16, fn(u16) -> f64);
            let (round, load): Conversions = match dtype {
                DType::F16 => (|x| f16::from_f64(x).to_bits(), |bits| f16::from_bits(bits).to_f64()),
                _ => (|x| bf16::from_f64(x).to_bits(), |bits| bf16::from_bits(bits).to_f64()),
            };
            let inputs: Vec<Vec<u16>> = inputs.iter().map(|input| input.iter().map(|x| round(*x)).collect()).collect();
            let sources: Vec<Source<'_>> =
                inputs.iter().map(|input| Source::Bytes(bytemuck::cast_slice(input))).collect();
            let mut out = vec![0_u16; len];
            reduce(dtype, Reduction::Op(ReduceOp::Sum), &sources, bytemuck::cast_slice_mut(&mut out)).unwrap();
            for (index, got) in out.iter().enumerate() {
                let exact: f64 = inputs.iter().map(|input| load(input[index])).sum();
                let size: f64 = inputs.iter().map(|input| load(input[index]).abs()).sum();
                let got = load(*got);
                let smallest = if dtype == DType::F16 { -24 } else { -133 };
                let ulp = f64::powi(2.0, (got.abs().log2().floor() as i32).saturating_sub(digits - 1).max(smallest));
                let bound = ulp / 2.0 + (world - 1) as f64 * f64::powi(2.0, -24) * size;
                assert!((got - exact).abs() <= bound, "{dtype} on {world} ranks: {got} for {exact}, bound {bound}");
            }
        }
    }
}

#[test]
fn extreme_weights_neither_overflow_nor_vanish() {
    let inputs = [1.0_f32, 3.0].map(f32::to_le_bytes);
    let mean = |weights: &[f64]| {
        let mut out = [0; 4];
        let sources = inputs.each_ref().map(|input| Source::Bytes(input));
        reduce(DType::F32, Reduction::Weighted(weights), &sources, &mut out).unwrap();
        f32::from_le_bytes(out)
    };
    // 2 to the power of 1020, 0 and -1070, without `powi`, whose result for the last one is up to the compiler.
    for unit in [f64::from_bits(2043 << 52), 1.0, f64::from_bits(1 << 4)] {
        assert_eq!(mean(&[unit, 3.0 * unit]), 2.5, "{unit}");
    }
    assert_eq!(mean(&[f64::MAX, f64::MAX / 4.0]), 1.4);
}

#[test]
fn what_is_undefined_is_an_error() {
    for (dtype, op) in [(DType::I32, ReduceOp::Mean), (DType::Bool, ReduceOp::Sum)] {
        assert!(reduce(dtype, Reduction::Op(op), &[Source::Output], &mut [0; 4]).is_err());
    }
    let sum = Reduction::Op(ReduceOp::Sum);
    for (sources, len) in [(&[][..], 4), (&[Source::Output, Source::Bytes(&[0; 8])][..], 4), (&[Source::Output][..], 5)]
    {
        assert!(reduce(DType::F32, sum, sources, &mut vec![0; len]).is_err(), "{sources:?} into {len}");
    }
}
