//! What a comparison of all-reduces says: tables for people, objects for machines.

use burn_ddp_comm::DType;
use serde_json::{Map, Value, json};

use crate::comparison::Timing;
use crate::contender::Contender;
use crate::plot::Line;
use crate::stats::median;
use crate::table::{Table, bytes, ratio, time_us};

/// All contenders' times of one size.
pub(crate) struct Measured {
    pub(crate) world: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: usize,
    pub(crate) timings: Vec<Timing>,
}

impl Measured {
    /// This project's.
    pub(crate) fn ours(&self) -> impl Iterator<Item = &Timing> {
        self.timings.iter().filter(|timing| matches!(timing.who, Contender::Ours(..)))
    }

    fn others(&self) -> impl Iterator<Item = &Timing> {
        self.timings.iter().filter(|timing| !matches!(timing.who, Contender::Ours(..)))
    }

    /// One object for each of this project's.
    pub(crate) fn rows(&self, bench: &str) -> Vec<Value> {
        self.ours().map(|own| self.row(bench, own)).collect()
    }

    fn row(&self, bench: &str, own: &Timing) -> Value {
        let Contender::Ours(engine, kind) = own.who else { return Value::Null };
        let (mut faster, mut p99, mut limits, mut contenders) = (Map::new(), Map::new(), Map::new(), Map::new());
        for timing in self.others() {
            let name = timing.who.to_string();
            let times = json!({
                "median_us": timing.median_us(), "p95_us": timing.percentile_us(0.95), "p99_us": timing.percentile_us(0.99),
                "best_us": timing.best_us(),
            });
            contenders.insert(name.clone(), times);
            if timing.who.is_limit() {
                limits.insert(name, json!(own.times_longer_than(timing)));
            } else {
                p99.insert(name.clone(), json!(timing.percentile_us(0.99) / own.percentile_us(0.99)));
                faster.insert(name, json!(timing.times_longer_than(own)));
            }
        }
        json!({
            "bench": bench, "engine": engine.to_string(), "buffers": kind.to_string(), "world": self.world,
            "dtype": self.dtype.to_string(), "bytes": self.bytes,
            "median_us": own.median_us(), "p95_us": own.percentile_us(0.95), "p99_us": own.percentile_us(0.99),
            "best_us": own.best_us(), "algbw_gbps": self.bandwidth(own), "cpu_us": self.cpu_us(own),
            "rounds": own.medians.len(), "times_faster_than": faster, "p99_times_lower_than": p99, "times_of_limit": limits,
            "contenders": contenders,
        })
    }

    /// GB/s: bytes of one rank's buffer by time.
    pub(crate) fn bandwidth(&self, timing: &Timing) -> f64 {
        self.bytes as f64 / timing.median_us() / 1e3
    }

    /// CPU time of a step, per rank.
    pub(crate) fn cpu_us(&self, timing: &Timing) -> f64 {
        median(&timing.cpu) / 1e3 / self.world as f64
    }
}

/// One row per size and contender, with what each of this project's is to it.
pub(crate) fn table(all: &[Measured]) -> Table {
    let mut table = Table::new(["ranks", "bytes", "who", "median", "best round", "p95", "p99", "GB/s", "CPU per rank"]);
    let mut ours: Vec<Contender> = Vec::new();
    for who in all.iter().flat_map(Measured::ours).map(|timing| timing.who) {
        if !ours.contains(&who) {
            ours.push(who);
            table.add_column(format!("{who} is"));
        }
    }
    for measured in all {
        for timing in &measured.timings {
            let mut row = vec![
                measured.world.to_string(),
                bytes(measured.bytes),
                timing.who.to_string(),
                time_us(timing.median_us()),
                time_us(timing.best_us()),
                time_us(timing.percentile_us(0.95)),
                time_us(timing.percentile_us(0.99)),
                format!("{:.3}", measured.bandwidth(timing)),
                time_us(measured.cpu_us(timing)),
            ];
            let own = |who| measured.timings.iter().find(|own| own.who == who);
            row.extend(ours.iter().map(|who| own(*who).map_or(String::new(), |own| against(own, timing))));
            table.add(row);
        }
    }
    table
}

/// `own` beside `other`: times a limit, or times faster than a peer.
fn against(own: &Timing, other: &Timing) -> String {
    match other.who {
        Contender::Ours(..) => String::new(),
        who if who.is_limit() => format!("{} its time", ratio(own.times_longer_than(other))),
        _ => format!("{} faster", ratio(other.times_longer_than(own))),
    }
}

/// One line per contender, over the sizes.
pub(crate) fn lines(all: &[Measured], value: fn(&Measured, &Timing) -> f64) -> Vec<Line> {
    let mut names: Vec<Contender> = Vec::new();
    for who in all.iter().flat_map(|measured| &measured.timings).map(|timing| timing.who) {
        if !names.contains(&who) {
            names.push(who);
        }
    }
    let point = |measured: &Measured, who: Contender| {
        let timing = measured.timings.iter().find(|timing| timing.who == who)?;
        Some((measured.bytes as f64, value(measured, timing)))
    };
    let line = |who: Contender| Line {
        name: who.to_string(),
        points: all.iter().filter_map(|measured| point(measured, who)).collect(),
    };
    names.into_iter().map(line).collect()
}
