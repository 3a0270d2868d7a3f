//! Results of a comparison of all-reduces as a table, as JSON objects, and as lines of plots.

use burn_ddp_comm::DType;
use serde_json::{Map, Value, json};

use crate::contender::Contender;
use crate::interleaved_rounds::Timing;
use crate::plot::Line;
use crate::stats::median;
use crate::table::{Table, bytes, ratio, time_us};

/// Times of all contenders of one size, in one world.
pub(super) struct Measured {
    pub(super) world: usize,
    pub(super) dtype: DType,
    /// Number of programs that compute while the ranks are measured.
    pub(super) neighbours: usize,
    pub(super) bytes: usize,
    pub(super) timings: Vec<Timing>,
}

impl Measured {
    /// This project's times.
    fn ours(&self) -> impl Iterator<Item = &Timing> {
        self.timings.iter().filter(|timing| matches!(timing.contender, Contender::Ours(..)))
    }

    fn timing(&self, contender: Contender) -> Option<&Timing> {
        self.timings.iter().find(|timing| timing.contender == contender)
    }

    /// A JSON object for each of this project's contenders. `of_size` has all worlds and dtypes of the same size.
    pub(super) fn rows(&self, of_size: &[Measured]) -> Vec<Value> {
        self.ours().map(|own| self.row(own, of_size)).collect()
    }

    fn row(&self, own: &Timing, of_size: &[Measured]) -> Value {
        let Contender::Ours(engine, kind) = own.contender else { return Value::Null };
        let (mut faster, mut p99, mut limits, mut contenders) = (Map::new(), Map::new(), Map::new(), Map::new());
        for timing in self.timings.iter().filter(|timing| !matches!(timing.contender, Contender::Ours(..))) {
            let name = timing.contender.to_string();
            let times = json!({
                "median_us": timing.median_us(), "p95_us": timing.percentile_us(0.95),
                "p99_us": timing.percentile_us(0.99), "best_us": timing.best_us(), "bytes_sent": bytes_sent(timing),
                "cpu_ns_per_rank_byte": self.cpu_ns_per_byte(timing), "of_idle": self.of_idle(timing, of_size),
                "of_smallest_world": self.of_smallest_world(timing, of_size),
            });
            contenders.insert(name.clone(), times);
            if timing.contender.is_limit() {
                limits.insert(name, json!(own.times_longer_than(timing)));
            } else {
                p99.insert(name.clone(), json!(timing.percentile_us(0.99) / own.percentile_us(0.99)));
                faster.insert(name, json!(timing.times_longer_than(own)));
            }
        }
        json!({
            "bench": "all-reduce", "engine": engine.to_string(), "buffers": kind.to_string(), "world": self.world,
            "dtype": self.dtype.to_string(), "bytes": self.bytes, "elements": self.bytes / self.dtype.size_bytes(),
            "median_us": own.median_us(), "p95_us": own.percentile_us(0.95), "p99_us": own.percentile_us(0.99),
            "bytes_sent": bytes_sent(own), "neighbours": self.neighbours, "of_idle": self.of_idle(own, of_size),
            "best_us": own.best_us(), "algbw_gbps": self.bandwidth(own), "cpu_us": self.cpu_us(own),
            "cpu_ns_per_rank_byte": self.cpu_ns_per_byte(own), "rounds": own.medians.len(),
            "times_faster_than": faster, "p99_times_lower_than": p99, "times_of_limit": limits,
            "of_first": self.of_first_dtype(own, of_size), "of_smallest_world": self.of_smallest_world(own, of_size),
            "contenders": contenders,
        })
    }

    /// Time of `own` as a multiple of the same contender's time with the first dtype.
    fn of_first_dtype(&self, own: &Timing, of_size: &[Measured]) -> Option<f64> {
        let alike = |one: &&Measured| (one.world, one.neighbours) == (self.world, self.neighbours);
        Some(own.times_longer_than(of_size.iter().find(alike)?.timing(own.contender)?))
    }

    /// Time of `own` as a multiple of the same contender's time without neighbours.
    fn of_idle(&self, own: &Timing, of_size: &[Measured]) -> Option<f64> {
        let alike = |one: &&Measured| (one.world, one.dtype, one.neighbours) == (self.world, self.dtype, 0);
        Some(own.times_longer_than(of_size.iter().find(alike)?.timing(own.contender)?))
    }

    /// CPU time of `own` per rank and byte as a multiple of that in the first world; `None` if that measured as 0.
    fn of_smallest_world(&self, own: &Timing, of_size: &[Measured]) -> Option<f64> {
        let first = of_size.iter().filter(|one| (one.dtype, one.neighbours) == (self.dtype, self.neighbours));
        let (first, timing) = first.filter_map(|one| Some((one, one.timing(own.contender)?))).next()?;
        let first = first.cpu_ns_per_byte(timing);
        (first > 0.0).then(|| self.cpu_ns_per_byte(own) / first)
    }

    /// Bytes of one rank's buffer per time, in GB/s.
    pub(super) fn bandwidth(&self, timing: &Timing) -> f64 {
        self.bytes as f64 / timing.median_us() / 1e3
    }

    /// CPU time of a step, per rank.
    fn cpu_us(&self, timing: &Timing) -> f64 {
        median(&timing.cpu) / 1e3 / self.world as f64
    }

    /// CPU time of a step, per rank and byte.
    pub(super) fn cpu_ns_per_byte(&self, timing: &Timing) -> f64 {
        1e3 * self.cpu_us(timing) / self.bytes as f64
    }
}

/// A table with a row for each size, world, dtype and contender, and its ratio to each of this project's contenders.
pub(super) fn table(all: &[Vec<Measured>]) -> Table {
    let several = |differ: fn(&Measured, &Measured) -> bool| {
        all.iter().any(|of_size| of_size.iter().any(|one| differ(one, &of_size[0])))
    };
    let (dtypes, worlds) = (several(|a, b| a.dtype != b.dtype), several(|a, b| a.world != b.world));
    let neighbours = several(|a, b| a.neighbours != b.neighbours);
    let mut ours: Vec<Contender> = Vec::new();
    for own in all.iter().flatten().flat_map(Measured::ours) {
        if !ours.contains(&own.contender) {
            ours.push(own.contender);
        }
    }
    let header = ["ranks", "dtype", "bytes", "contender", "median", "best round", "p95", "p99", "GB/s", "CPU per rank"];
    let mut table = Table::new(header);
    if dtypes {
        table.add_column("of the first dtype's".into());
    }
    if worlds {
        table.add_column("CPU ns per rank and byte".into());
        table.add_column("of the smallest world's".into());
    }
    if neighbours {
        table.add_column("neighbours".into());
        table.add_column("of idle".into());
    }
    let machines = all.iter().flatten().flat_map(|one| &one.timings).any(|timing| !timing.sent.is_empty());
    if machines {
        table.add_column("bytes sent ÷ buffer".into());
    }
    ours.iter().for_each(|own| table.add_column(format!("{own} is")));
    for of_size in all {
        for measured in of_size {
            for timing in &measured.timings {
                let mut row = vec![
                    measured.world.to_string(),
                    measured.dtype.to_string(),
                    if measured.bytes == 0 { "barrier".into() } else { bytes(measured.bytes) },
                    timing.contender.to_string(),
                    time_us(timing.median_us()),
                    time_us(timing.best_us()),
                    time_us(timing.percentile_us(0.95)),
                    time_us(timing.percentile_us(0.99)),
                    format!("{:.3}", measured.bandwidth(timing)),
                    time_us(measured.cpu_us(timing)),
                ];
                if dtypes {
                    row.push(measured.of_first_dtype(timing, of_size).map_or(String::new(), |of| format!("{of:.2}")));
                }
                if worlds {
                    let of = measured.of_smallest_world(timing, of_size);
                    row.push(format!("{:.3}", measured.cpu_ns_per_byte(timing)));
                    row.push(of.map_or(String::new(), |of| format!("{:.0} %", 100.0 * of)));
                }
                if neighbours {
                    row.push(measured.neighbours.to_string());
                    row.push(measured.of_idle(timing, of_size).map_or(String::new(), ratio));
                }
                if machines {
                    let sent = bytes_sent(timing).filter(|_| measured.bytes > 0);
                    row.push(sent.map_or(String::new(), |sent| format!("{:.2}", sent / measured.bytes as f64)));
                }
                let own = |own: &Contender| measured.timing(*own).map_or(String::new(), |own| against(own, timing));
                row.extend(ours.iter().map(own));
                table.add(row);
            }
        }
    }
    table
}

/// Bytes that the busiest machine sends per step.
fn bytes_sent(timing: &Timing) -> Option<f64> {
    (!timing.sent.is_empty()).then(|| median(&timing.sent))
}

/// Ratio of `own` to `other`: multiples of a limit, or times faster than a peer.
fn against(own: &Timing, other: &Timing) -> String {
    match other.contender {
        Contender::Ours(..) => String::new(),
        limit if limit.is_limit() => format!("{} its time", ratio(own.times_longer_than(other))),
        _ => format!("{} faster", ratio(other.times_longer_than(own))),
    }
}

/// Lines of a plot: one for each contender and dtype, and, unless `x` is the number of ranks, for each world.
pub(super) fn lines(all: &[Vec<Measured>], x: X, y: fn(&Measured, &Timing) -> f64) -> Vec<Line> {
    let (first, mut lines) = (all.iter().flatten().next(), Vec::<Line>::new());
    for measured in all.iter().flatten() {
        for timing in &measured.timings {
            let mut name = timing.contender.to_string();
            if first.is_some_and(|first| first.dtype != measured.dtype) {
                name += &format!(", {}", measured.dtype);
            }
            if x == X::Bytes && first.is_some_and(|first| first.world != measured.world) {
                name += &format!(", {} ranks", measured.world);
            }
            if measured.neighbours > 0 {
                name += ", with neighbours";
            }
            let at = if x == X::Bytes { measured.bytes } else { measured.world };
            let point = (at as f64, y(measured, timing));
            match lines.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { name, points: vec![point] }),
            }
        }
    }
    lines
}

/// Horizontal axis of a plot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum X {
    Bytes,
    Ranks,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contender::Engine;
    use crate::rank::BufferKind;

    #[test]
    fn ratios_are_of_measurements_beside_as_many_neighbours() {
        let contender = Contender::Ours(Engine::Shm, BufferKind::Slice);
        let measured = |world: usize, dtype, neighbours, ns: f64| {
            let cpu = vec![ns * world as f64];
            let timing = Timing { medians: vec![ns], cpu, ..Timing::new(contender) };
            Measured { world, dtype, neighbours, bytes: 8, timings: vec![timing] }
        };
        let of_size = [
            measured(2, DType::F32, 0, 1e3),
            measured(2, DType::F32, 1, 10e3),
            measured(2, DType::F16, 1, 30e3),
            measured(4, DType::F32, 1, 20e3),
        ];
        let first = |nth: usize| of_size[nth].of_first_dtype(&of_size[nth].timings[0], &of_size);
        let smallest = |nth: usize| of_size[nth].of_smallest_world(&of_size[nth].timings[0], &of_size);
        assert_eq!((first(2), smallest(3)), (Some(3.0), Some(2.0)));
    }
}
