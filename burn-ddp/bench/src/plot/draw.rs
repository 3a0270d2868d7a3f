//! Drawing of line plots in SVG, both axes logarithmic.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::Line;

/// Panels side by side under one title.
pub(crate) struct Plot {
    title: String,
    panels: Vec<Panel>,
}

struct Panel {
    x: String,
    y: String,
    lines: Vec<Line>,
}

const PANEL: (u32, u32) = (720, 520);
const COLOURS: [RGBColor; 10] = [
    RGBColor(214, 39, 40),
    RGBColor(31, 119, 180),
    RGBColor(44, 160, 44),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(90, 90, 90),
    RGBColor(23, 190, 207),
    RGBColor(188, 189, 34),
    RGBColor(227, 119, 194),
    RGBColor(140, 86, 75),
];

impl Plot {
    pub(crate) fn new(title: &str) -> Plot {
        Plot { title: title.to_owned(), panels: Vec::new() }
    }

    pub(crate) fn panel(mut self, x: &str, y: &str, lines: Vec<Line>) -> Plot {
        let lines = lines.into_iter().filter(|line| !line.points.is_empty()).collect();
        self.panels.push(Panel { x: x.to_owned(), y: y.to_owned(), lines });
        self
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let count = self.panels.len().max(1);
        let size = (PANEL.0 * count as u32, PANEL.1);
        let area = SVGBackend::new(path, size).into_drawing_area();
        let drawn = || -> Result<(), DrawingAreaErrorKind<_>> {
            area.fill(&WHITE)?;
            let inner = area.titled(&self.title, ("sans-serif", 22))?;
            for (panel, part) in self.panels.iter().zip(inner.split_evenly((1, count))) {
                panel.draw(&part)?;
            }
            area.present()
        };
        drawn().map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
    }
}

impl Panel {
    fn draw<'a, B: DrawingBackend + 'a>(
        &self,
        area: &DrawingArea<B, plotters::coord::Shift>,
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let (x, y) = (range(points().map(|point| point.0)), range(points().map(|point| point.1)));
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(48)
            .y_label_area_size(64)
            .build_cartesian_2d((x.0..x.1).log_scale(), (y.0..y.1).log_scale())?;
        chart
            .configure_mesh()
            .x_desc(&self.x)
            .y_desc(&self.y)
            .x_label_formatter(&|x| compact(*x))
            .y_label_formatter(&|y| compact(*y))
            .light_line_style(RGBColor(235, 235, 235))
            .draw()?;
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let stroke = colour.stroke_width(2);
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), stroke))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], stroke));
            chart.draw_series(line.points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.85))
            .border_style(RGBColor(180, 180, 180))
            .draw()
    }
}

/// Range from a little below the smallest value to a little above the largest.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let positive = values.filter(|value| *value > 0.0 && value.is_finite());
    let (low, high) = positive.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    if high == 0.0 { (1.0, 10.0) } else { (low / 1.5, high * 1.5) }
}

/// Short form of a number: `65536` as `66k`, `0.001` as it is.
fn compact(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.0}G", v / 1e9),
        v if v >= 1e6 => format!("{:.0}M", v / 1e6),
        v if v >= 1e3 => format!("{:.0}k", v / 1e3),
        // Rounded, so that a binary fraction such as 0.1 does not show all its digits.
        v => format!("{}", (v * 1e6).round() / 1e6),
    }
}
