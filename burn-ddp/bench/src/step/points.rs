//! `tensors`: the same bytes as few and as many tensors.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::contender::{Framework, Model, Side};
use crate::machine::describe;
use crate::plot::{Line, Plot};
use crate::table::{Table, bytes, ratio, time_us};
use crate::training::{Task, Training, pairs};

/// The same bytes as few and as many tensors through the reducer: a model that is nothing but parameters, whose loss is their sum;
/// wrapped, against the same step unwrapped whose ranks meet at a bare barrier; and torch DDP against torch likewise. To intercept a
/// gradient takes two nodes in Burn's graph: what two that do nothing cost is beside it.
#[derive(Args, Debug)]
pub(crate) struct Tensors {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Bytes of all parameters.
    #[arg(long, default_value_t = 16 << 20)]
    bytes: usize,
    /// Numbers of tensors.
    #[arg(long, value_delimiter = ',', default_value = "10,100,1000,10000")]
    counts: Vec<usize>,
    /// Draws what data parallelism adds by number of tensors into this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    training: Training,
}

/// What was measured of one framework at one count.
struct Point {
    who: String,
    ours: bool,
    count: usize,
    step_us: f64,
    base_us: f64,
    added_us: f64,
    /// The same over a step whose parameters are read through nodes that do nothing.
    beyond_nodes_us: Option<f64>,
}

/// A count beside the fewest tensors of the same framework.
struct Growth {
    /// How many times as long a step is.
    growth: f64,
    /// What a tensor more adds to what data parallelism adds, in nanoseconds.
    marginal_ns: f64,
    /// The same of what it adds beyond nodes that do nothing.
    own_marginal_ns: Option<f64>,
}

impl Point {
    fn beside_fewest(&self, points: &[Point]) -> Growth {
        let of_framework = points.iter().filter(|point| point.who == self.who);
        let fewest = of_framework.min_by_key(|point| point.count).unwrap_or(self);
        let more = (self.count - fewest.count).max(1) as f64;
        let own = self.beyond_nodes_us.zip(fewest.beyond_nodes_us);
        Growth {
            growth: self.step_us / fewest.step_us,
            marginal_ns: 1e3 * (self.added_us - fewest.added_us) / more,
            own_marginal_ns: own.map(|(here, fewest)| 1e3 * (here - fewest) / more),
        }
    }
}

impl Tensors {
    pub(crate) fn run(&self) -> Result<()> {
        let sides = &[Side::Barrier, Side::Nodes];
        // What counts are microseconds per tensor.
        let task = Task { model: Model::Tensors, sides, world: self.world, keeps_memory: true };
        let mut field = self.training.field(&task)?;
        let mut points: Vec<Point> = Vec::new();
        for &count in &self.counts {
            let timings = field.measure_of(self.bytes, count, &self.training.steps.effort())?;
            points.extend(pairs(&timings).into_iter().map(|pair| Point {
                ours: pair.framework != Framework::Torch,
                count,
                step_us: pair.wrapped.median_us(),
                base_us: pair.base.median_us(),
                added_us: pair.added_us(),
                beyond_nodes_us: pair.nodes.map(|nodes| pair.wrapped.longer_than_us(nodes)),
                who: pair.who,
            }));
        }
        self.show(&points)
    }

    fn show(&self, points: &[Point]) -> Result<()> {
        let header = [
            "who",
            "tensors",
            "step",
            "unwrapped",
            "added",
            "beyond two nodes",
            "of fewest's step",
            "added ns a tensor more",
            "beyond two nodes",
            "faster than torch",
        ];
        let mut table = Table::new(header);
        let mut lines: Vec<Line> = Vec::new();
        for point in points {
            let Growth { growth, marginal_ns, own_marginal_ns } = point.beside_fewest(points);
            let torch = points.iter().find(|torch| point.ours && !torch.ours && torch.count == point.count);
            // Less than nothing is noise, of which there is no quotient.
            let faster = torch.map(|torch| torch.added_us / point.added_us).filter(|_| point.added_us > 0.0);
            if self.training.steps.json {
                let row = json!({"bench": "tensors", "who": point.who, "world": self.world, "dtype": "f32", "bytes": self.bytes,
                    "tensors": point.count, "median_us": point.step_us, "base_us": point.base_us, "added_us": point.added_us,
                    "beyond_nodes_us": point.beyond_nodes_us, "step_of_fewest": growth, "marginal_ns_per_tensor": marginal_ns,
                    "marginal_ns_per_tensor_beyond_nodes": own_marginal_ns, "added_times_less_than_torch": faster});
                println!("{row}");
            }
            table.add(vec![
                point.who.clone(),
                point.count.to_string(),
                time_us(point.step_us),
                time_us(point.base_us),
                time_us(point.added_us),
                point.beyond_nodes_us.map_or(String::new(), time_us),
                ratio(growth),
                format!("{marginal_ns:.0}"),
                own_marginal_ns.map_or(String::new(), |ns| format!("{ns:.0}")),
                faster.map_or(String::new(), ratio),
            ]);
            let at = (point.count as f64, point.added_us / 1e3);
            match lines.iter_mut().find(|line| line.name == point.who) {
                Some(line) => line.points.push(at),
                None => lines.push(Line { name: point.who.clone(), points: vec![at] }),
            }
        }
        if !self.training.steps.json {
            println!("{} of gradients, {} ranks, on {}\n\n{table}", bytes(self.bytes), self.world, describe());
        }
        match &self.plot {
            Some(path) => {
                Plot::new("what data parallelism adds to a step").panel("tensors", "added, ms", lines).write(path)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_beside_the_fewest_in_whatever_order() {
        let point = |who: &str, count: usize, step_us: f64| Point {
            who: who.to_owned(),
            ours: true,
            count,
            step_us,
            base_us: 10.0,
            added_us: step_us - 10.0,
            beyond_nodes_us: Some((step_us - 10.0) / 2.0),
        };
        let points = [point("a", 100, 290.0), point("a", 10, 20.0), point("b", 1, 1.0)];
        let growth = points[0].beside_fewest(&points);
        assert_eq!((growth.growth, growth.marginal_ns, growth.own_marginal_ns), (14.5, 3000.0, Some(1500.0)));
        let growth = points[1].beside_fewest(&points);
        assert_eq!((growth.growth, growth.marginal_ns, growth.own_marginal_ns), (1.0, 0.0, Some(0.0)));
    }
}
