//! Results of `step` as a table, as JSON objects, and as lines of plots.

use serde_json::{Value, json};

use super::memory::Memory;
use crate::contender::{Framework, Model, Side, Trainer};
use crate::interleaved_rounds::Timing;
use crate::plot::Line;
use crate::table::{Table, bytes, ratio, time_us};

/// A step with data parallelism, and the steps with which it is compared.
pub(super) struct Pair<'a> {
    pub(super) wrapped: &'a Timing,
    /// The step without data parallelism.
    pub(super) base: &'a Timing,
    /// The base with an autodiff node per parameter that does nothing.
    nodes: Option<&'a Timing>,
    /// The wrapped step over the same engine with the reducer's default bucket size.
    own_buckets: Option<&'a Timing>,
    /// For a sharded step, the same step with whole parameters.
    whole: Option<&'a Timing>,
    trainer: Trainer,
}

/// The steps with data parallelism among `timings`, each with the steps with which it is compared.
pub(super) fn pairs(timings: &[Timing]) -> Vec<Pair<'_>> {
    let find = |is: &dyn Fn(Trainer) -> bool| timings.iter().find(|timing| timing.trainer().is_some_and(is));
    timings
        .iter()
        .filter_map(|wrapped| {
            let trainer = wrapped.trainer().filter(|one| matches!(one.side, Side::Wrapped | Side::Sharded))?;
            let torch = trainer.framework == Framework::Torch;
            let of = |sides: &'static [Side]| {
                find(&|one| (one.framework == Framework::Torch) == torch && sides.contains(&one.side))
            };
            let own_buckets = find(&|one| one == Trainer { bucket_bytes: None, ..trainer });
            let base = of(&[Side::Plain, Side::Barrier])?;
            let whole = find(&|one| trainer.side == Side::Sharded && one == Trainer { side: Side::Wrapped, ..trainer });
            Some(Pair { wrapped, base, nodes: of(&[Side::Nodes]), own_buckets, whole, trainer })
        })
        .collect()
}

/// A step of one model with data parallelism, and its ratios.
pub(super) struct Point {
    contender: String,
    trainer: Trainer,
    world: usize,
    bytes: usize,
    count: usize,
    step_us: f64,
    best_us: f64,
    p95_us: f64,
    base_us: f64,
    /// Microseconds that data parallelism adds to the base.
    added_us: f64,
    /// `added_us` as a percentage of the base.
    added_percent: f64,
    /// Microseconds more than a step whose parameters are read through nodes that do nothing.
    beyond_nodes_us: Option<f64>,
    /// Time as a multiple of the time with the reducer's default bucket size.
    of_own: Option<f64>,
    /// Speed as a multiple of the speed with whole parameters.
    speed_of_whole: Option<f64>,
    pub(super) memory: Option<Memory>,
}

/// Times of a contender compared with its own run with the fewest tensors.
struct Growth {
    /// Time of a step as a multiple of the time with the fewest tensors.
    growth: f64,
    /// Nanoseconds that data parallelism adds for each further tensor.
    marginal_ns: f64,
    /// `marginal_ns` without the share of the nodes that do nothing.
    own_marginal_ns: Option<f64>,
}

impl Point {
    pub(super) fn new(pair: &Pair<'_>, (world, bytes, count): (usize, usize, usize)) -> Point {
        let Pair { wrapped, base, .. } = pair;
        Point {
            contender: wrapped.contender.to_string(),
            trainer: pair.trainer,
            world,
            bytes,
            count,
            step_us: wrapped.median_us(),
            best_us: wrapped.best_us(),
            p95_us: wrapped.percentile_us(0.95),
            base_us: base.median_us(),
            added_us: wrapped.longer_than_us(base),
            added_percent: 100.0 * (wrapped.times_longer_than(base) - 1.0),
            beyond_nodes_us: pair.nodes.map(|nodes| wrapped.longer_than_us(nodes)),
            of_own: pair.own_buckets.map(|own| wrapped.times_longer_than(own)),
            speed_of_whole: pair.whole.map(|whole| 1.0 / wrapped.times_longer_than(whole)),
            memory: None,
        }
    }

    fn engine(&self) -> Option<String> {
        match self.trainer.framework {
            Framework::Burn(engine) => Some(engine.to_string()),
            Framework::Torch => None,
        }
    }

    fn added_ns_per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| 1e3 * self.added_us / self.bytes as f64)
    }

    fn beside_fewest(&self, points: &[Point]) -> Growth {
        let same = |point: &&Point| {
            point.contender == self.contender && point.world == self.world && point.bytes == self.bytes
        };
        let fewest = points.iter().filter(same).min_by_key(|point| point.count).unwrap_or(self);
        let more = (self.count - fewest.count).max(1) as f64;
        let own = self.beyond_nodes_us.zip(fewest.beyond_nodes_us);
        Growth {
            growth: self.step_us / fewest.step_us,
            marginal_ns: 1e3 * (self.added_us - fewest.added_us) / more,
            own_marginal_ns: own.map(|(here, fewest)| 1e3 * (here - fewest) / more),
        }
    }

    /// Time that torch's DDP adds, as a multiple of the time that this contender adds.
    fn times_less_than_torch(&self, points: &[Point]) -> Option<f64> {
        let same = |point: &&Point| {
            point.trainer.framework == Framework::Torch
                && (point.world, point.bytes, point.count) == (self.world, self.bytes, self.count)
        };
        let torch = points.iter().find(same).filter(|_| self.trainer.framework != Framework::Torch)?;
        // If the wrapped step was not slower than the base, the difference is noise and a quotient has no meaning.
        (self.added_us > 0.0).then(|| torch.added_us / self.added_us)
    }

    pub(super) fn row(&self, model: Model, points: &[Point]) -> Value {
        let Growth { growth, marginal_ns, own_marginal_ns } = self.beside_fewest(points);
        let mut row = json!({"bench": "step", "who": self.contender, "engine": self.engine(), "world": self.world,
            "dtype": "f32", "model": model.to_string(), "bytes": self.bytes, "count": self.count, "tensors": self.count,
            "bucket_bytes": self.trainer.bucket_bytes, "keeps_memory": self.trainer.keeps_memory,
            "median_us": self.step_us, "p95_us": self.p95_us,
            "best_us": self.best_us, "base_us": self.base_us, "added_us": self.added_us,
            "added_percent": self.added_percent, "added_ns_per_byte": self.added_ns_per_byte(), "of_own": self.of_own,
            "speed_of_whole": self.speed_of_whole, "beyond_nodes_us": self.beyond_nodes_us, "step_of_fewest": growth,
            "marginal_ns_per_tensor": marginal_ns,
            "marginal_ns_per_tensor_beyond_nodes": own_marginal_ns,
            "added_times_less_than_torch": self.times_less_than_torch(points)});
        if let (Some(memory), Some(row)) = (&self.memory, row.as_object_mut()) {
            row.insert("extra_pss_bytes".into(), json!(memory.pss_bytes));
            row.insert("extra_rss_bytes".into(), json!(memory.rss_bytes));
            row.insert("extra_of_gradients".into(), json!(memory.pss_bytes / self.bytes as f64));
            row.insert("faults_per_step".into(), json!(memory.faults));
            row.insert("base_faults_per_step".into(), json!(memory.base_faults));
        }
        row
    }
}

/// A column of a table: its name, and the cell of a point among all points.
type Column = (&'static str, fn(&Point, &[Point]) -> String);

/// A table with a row for each point, and the columns that apply to `model`.
pub(super) fn table(model: Model, points: &[Point]) -> Table {
    let mut columns: Vec<Column> =
        vec![("ranks", |point, _| point.world.to_string()), ("contender", |point, _| point.contender.clone())];
    if model != Model::Cnn {
        columns.push(("bytes", |point, _| bytes(point.bytes)));
        columns.push((if model == Model::Tensors { "tensors" } else { "items" }, |point, _| point.count.to_string()));
    }
    columns.extend::<[Column; 6]>([
        ("step", |point, _| time_us(point.step_us)),
        ("best round", |point, _| time_us(point.best_us)),
        ("p95", |point, _| time_us(point.p95_us)),
        ("without", |point, _| time_us(point.base_us)),
        ("added", |point, _| time_us(point.added_us)),
        ("share", |point, _| format!("{:.1} %", point.added_percent)),
    ]);
    if points.iter().any(|point| point.beyond_nodes_us.is_some()) {
        columns.push(("beyond a node", |point, _| point.beyond_nodes_us.map_or(String::new(), time_us)));
    }
    if points.iter().any(|point| point.count != points[0].count) {
        columns.extend::<[Column; 3]>([
            ("of fewest's step", |point, points| ratio(point.beside_fewest(points).growth)),
            ("added ns a tensor more", |point, points| format!("{:.0}", point.beside_fewest(points).marginal_ns)),
            ("ns beyond a node", |point, points| {
                point.beside_fewest(points).own_marginal_ns.map_or(String::new(), |ns| format!("{ns:.0}"))
            }),
        ]);
    }
    if points.iter().any(|point| point.speed_of_whole.is_some()) {
        columns.push(("speed of whole", |point, _| point.speed_of_whole.map_or(String::new(), ratio)));
    }
    if points.iter().any(|point| point.trainer.bucket_bytes.is_some()) {
        columns.push(("of the reducer's own", |point, _| point.of_own.map_or(String::new(), ratio)));
    }
    if points.iter().any(|point| point.times_less_than_torch(points).is_some()) {
        columns.push(("less than torch's", |point, points| {
            point.times_less_than_torch(points).map_or(String::new(), ratio)
        }));
    }
    if points.iter().any(|point| point.memory.is_some()) {
        columns.extend::<[Column; 6]>([
            ("extra PSS", |point, _| of_memory(point, |memory| mib(memory.pss_bytes))),
            ("extra RSS", |point, _| of_memory(point, |memory| mib(memory.rss_bytes))),
            ("of gradients (PSS)", |point, _| {
                let share = |memory: &Memory| memory.pss_bytes / point.bytes as f64;
                point.memory.as_ref().map_or(String::new(), |memory| format!("{:.2}", share(memory)))
            }),
            ("faults a step", |point, _| of_memory(point, |memory| format!("{:.0}", memory.faults))),
            ("without", |point, _| of_memory(point, |memory| format!("{:.0}", memory.base_faults))),
            ("added ns per byte", |point, _| point.added_ns_per_byte().map_or(String::new(), |ns| format!("{ns:.3}"))),
        ]);
    }
    let mut table = Table::new([]);
    columns.iter().for_each(|(name, _)| table.add_column((*name).to_owned()));
    points.iter().for_each(|point| table.add(columns.iter().map(|(_, cell)| cell(point, points)).collect()));
    table
}

fn of_memory(point: &Point, cell: fn(&Memory) -> String) -> String {
    point.memory.as_ref().map_or(String::new(), cell)
}

fn mib(bytes: f64) -> String {
    format!("{:.1} MiB", bytes / f64::from(1 << 20))
}

/// Lines of a plot: the time that each contender adds, by number of tensors.
pub(super) fn lines(points: &[Point]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for point in points {
        let at = (point.count as f64, point.added_us / 1e3);
        match lines.iter_mut().find(|line| line.name == point.contender) {
            Some(line) => line.points.push(at),
            None => lines.push(Line { name: point.contender.clone(), points: vec![at] }),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contender::Engine;

    #[test]
    fn counts_are_beside_the_fewest_in_whatever_order() {
        let trainer = Trainer {
            framework: Framework::Burn(Engine::Shm),
            model: Model::Tensors,
            side: Side::Wrapped,
            bucket_bytes: None,
            keeps_memory: true,
        };
        let point = |name: &str, count: usize, step_us: f64| Point {
            contender: name.to_owned(),
            trainer,
            world: 2,
            bytes: 1024,
            count,
            step_us,
            best_us: step_us,
            p95_us: step_us,
            base_us: 10.0,
            added_us: step_us - 10.0,
            added_percent: 0.0,
            beyond_nodes_us: Some((step_us - 10.0) / 2.0),
            of_own: None,
            speed_of_whole: None,
            memory: None,
        };
        let points = [point("a", 100, 290.0), point("a", 10, 20.0), point("b", 1, 1.0)];
        let growth = points[0].beside_fewest(&points);
        assert_eq!((growth.growth, growth.marginal_ns, growth.own_marginal_ns), (14.5, 3000.0, Some(1500.0)));
        let growth = points[1].beside_fewest(&points);
        assert_eq!((growth.growth, growth.marginal_ns, growth.own_marginal_ns), (1.0, 0.0, Some(0.0)));
    }
}
