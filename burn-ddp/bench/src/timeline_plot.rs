//! `timeline`: draws some steps of a recorded trace as a picture.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Deserialize;

/// Draws steps of a trace that `burnrun --timeline` wrote: a row for each kind of work of each rank.
#[derive(Args, Debug)]
pub(crate) struct Timeline {
    /// The trace that `burnrun --timeline` wrote.
    trace: PathBuf,
    /// The first step to draw.
    #[arg(long, default_value_t = 10)]
    step: u64,
    /// Number of steps to draw.
    #[arg(long, default_value_t = 2)]
    steps: u64,
    /// The SVG file to draw into.
    #[arg(long, value_name = "FILE.svg")]
    plot: PathBuf,
}

#[derive(Deserialize)]
struct Trace {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

/// An event of Chrome's trace event format; times in microseconds.
#[derive(Deserialize)]
struct Event {
    ph: String,
    name: String,
    pid: usize,
    #[serde(default)]
    tid: usize,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: serde_json::Value,
}

impl Event {
    fn end(&self) -> f64 {
        self.ts + self.dur
    }

    fn is_step(&self, steps: &std::ops::Range<u64>) -> bool {
        self.name.strip_prefix("step ").and_then(|step| step.parse().ok()).is_some_and(|step| steps.contains(&step))
    }

    /// Index of the span's kind in [`KINDS`]; `None` for the spans of whole steps, which contain the others.
    fn kind(&self) -> Option<usize> {
        let kind = |(_, of, _): &(_, &[&str], _)| of.iter().any(|prefix| self.name.starts_with(prefix));
        (!self.name.starts_with("step ")).then(|| KINDS.iter().position(kind).unwrap_or(KINDS.len() - 1))
    }
}

/// Kinds of spans: name in the legend, prefixes of the spans' names, colour. The last kind holds all other spans.
const KINDS: [(&str, &[&str], RGBColor); 6] = [
    ("forward, optimizer", &["outside"], RGBColor(200, 200, 200)),
    ("backward", &["backward"], RGBColor(31, 119, 180)),
    ("wait", &["wait"], RGBColor(214, 39, 40)),
    ("bucket", &["bucket"], RGBColor(44, 160, 44)),
    ("batch", &["batch"], RGBColor(255, 187, 60)),
    ("other collectives", &[], RGBColor(148, 103, 189)),
];

impl Timeline {
    pub(crate) fn run(&self) -> Result<()> {
        let text = std::fs::read(&self.trace).with_context(|| format!("cannot read {}", self.trace.display()))?;
        let events =
            serde_json::from_slice::<Trace>(&text).context("the file is not a trace in Chrome's format")?.events;
        let steps = self.step..self.step + self.steps;
        let shown: Vec<&Event> = events.iter().filter(|event| event.ph == "X" && event.is_step(&steps)).collect();
        ensure!(!shown.is_empty(), "there is no step {} in {}", self.step, self.trace.display());
        let begin = shown.iter().map(|event| event.ts).fold(f64::INFINITY, f64::min);
        let end = shown.iter().map(|event| event.end()).fold(0.0, f64::max);

        let names = events.iter().filter(|event| event.name == "thread_name");
        let names: BTreeMap<(usize, usize), &str> =
            names.filter_map(|event| Some(((event.pid, event.tid), event.args["name"].as_str()?))).collect();
        let spans: Vec<&Event> = events
            .iter()
            .filter(|event| event.ph == "X" && event.ts < end && event.end() > begin && event.kind().is_some())
            .collect();
        let mut rows: Vec<(usize, usize)> = spans.iter().map(|event| (event.pid, event.tid)).collect();
        rows.sort_unstable();
        rows.dedup();
        self.draw(&spans, &rows, &names, begin..end)
            .map_err(|error| anyhow!("cannot draw {}: {error}", self.plot.display()))
    }

    fn draw(
        &self,
        spans: &[&Event],
        rows: &[(usize, usize)],
        names: &BTreeMap<(usize, usize), &str>,
        shown: std::ops::Range<f64>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::new(&self.plot, (1100, 110 + 44 * rows.len() as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let ms = |us: f64| (us.clamp(shown.start, shown.end) - shown.start) / 1e3;
        let height = rows.len() as f64;
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(220)
            .build_cartesian_2d(0.0..1.25 * ms(shown.end), 0.0..height)?; // room for the legend
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc(format!("ms; steps {} to {}", self.step, self.step + self.steps - 1))
            .x_label_formatter(&|x| format!("{x:.1}"))
            .disable_y_axis()
            .draw()?;
        for (kind, (name, _, colour)) in KINDS.iter().enumerate() {
            let of_kind = spans.iter().filter(|event| event.kind() == Some(kind));
            // Spans of waiting lie inside other spans: they are drawn over these, and with less height.
            let boxes = of_kind.filter_map(|event| {
                let row = rows.iter().rev().position(|row| *row == (event.pid, event.tid))? as f64;
                let inner = if kind == 2 { 0.3 } else { 0.12 };
                let corners = [(ms(event.ts), row + inner), (ms(event.end()), row + 1.0 - inner)];
                Some(Rectangle::new(corners, colour.filled()))
            });
            chart
                .draw_series(boxes)?
                .label(*name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled()));
        }
        let right = Pos::new(HPos::Right, VPos::Center);
        let style = ("sans-serif", 14).into_font().into_text_style(&area).pos(right);
        for (nth, row) in rows.iter().rev().enumerate() {
            let (x, y) = chart.backend_coord(&(0.0, nth as f64 + 0.5));
            let name = names.get(row).copied().unwrap_or("?");
            area.draw_text(&format!("rank {}: {name}", row.0), &style, (x - 8, y))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.85))
            .border_style(RGBColor(180, 180, 180))
            .draw()?;
        area.present()?;
        Ok(())
    }
}
