//! `tensors`: the same bytes as few and as many tensors.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::contender::{Framework, Model, Side};
use crate::machine::describe;
use crate::plot::{Line, Plot};
use crate::table::{Table, bytes, ratio, time_us};
use crate::training::{Training, pairs};

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

impl Tensors {
    pub(crate) fn run(&self) -> Result<()> {
        let mut field = self.training.field(Model::Tensors, &[Side::Barrier, Side::Nodes], self.world)?;
        let mut points: Vec<Point> = Vec::new();
        for &count in &self.counts {
            let timings = field.measure_of(self.bytes, count, &self.training.effort())?;
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
            let fewest = points.iter().find(|first| first.who == point.who).unwrap_or(point);
            let growth = point.step_us / fewest.step_us;
            let more = (point.count - fewest.count).max(1) as f64;
            let marginal_ns = 1e3 * (point.added_us - fewest.added_us) / more;
            let own = point.beyond_nodes_us.zip(fewest.beyond_nodes_us);
            let own_marginal_ns = own.map(|(here, fewest)| 1e3 * (here - fewest) / more);
            let torch = points.iter().find(|torch| point.ours && !torch.ours && torch.count == point.count);
            // Less than nothing is noise, of which there is no quotient.
            let faster = torch.map(|torch| torch.added_us / point.added_us).filter(|_| point.added_us > 0.0);
            if self.training.json {
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
        if !self.training.json {
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
