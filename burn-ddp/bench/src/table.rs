//! Tables in Markdown, and numbers for people.

use std::fmt;

/// Rows under a header; columns as wide as they need to be.
pub(crate) struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<const N: usize>(header: [&str; N]) -> Table {
        Table { header: header.map(str::to_owned).to_vec(), rows: Vec::new() }
    }

    pub(crate) fn add_column(&mut self, name: String) {
        self.header.push(name);
    }

    pub(crate) fn add(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = || std::iter::once(&self.header).chain(&self.rows);
        let len = |column: usize| all().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
        let widths: Vec<usize> = (0..self.header.len()).map(|column| len(column).unwrap_or(0)).collect();
        for (nth, row) in all().enumerate() {
            for (column, width) in widths.iter().enumerate() {
                let cell = row.get(column).map_or("", String::as_str);
                write!(f, "| {cell:width$} ")?;
            }
            writeln!(f, "|")?;
            if nth == 0 {
                widths.iter().try_for_each(|width| write!(f, "|{}", "-".repeat(width + 2)))?;
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

/// `26214400` as `25 MiB`.
pub(crate) fn bytes(n: usize) -> String {
    match n {
        n if n >= 1 << 20 && n.is_multiple_of(1 << 18) => format!("{} MiB", n as f64 / f64::from(1 << 20)),
        n if n >= 1 << 10 && n.is_multiple_of(1 << 8) => format!("{} KiB", n as f64 / 1024.0),
        n => format!("{n} B"),
    }
}

/// A time in a readable unit, from microseconds.
pub(crate) fn time_us(us: f64) -> String {
    match us {
        us if us < 0.0 => format!("-{}", time_us(-us)),
        us if us < 1.0 => format!("{:.0} ns", us * 1e3),
        us if us < 100.0 => format!("{us:.2} µs"),
        us if us < 10_000.0 => format!("{us:.0} µs"),
        us => format!("{:.1} ms", us / 1e3),
    }
}

/// A quotient with two decimals, or none from 20 on.
pub(crate) fn ratio(x: f64) -> String {
    if x >= 20.0 { format!("{x:.0} ×") } else { format!("{x:.2} ×") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([4, 8192, 26_214_400, 1000].map(bytes), ["4 B", "8 KiB", "25 MiB", "1000 B"]);
        assert_eq!([0.25, 12.3, 480.0, 25_000.0].map(time_us), ["250 ns", "12.30 µs", "480 µs", "25.0 ms"]);
        let mut table = Table::new(["a", "b"]);
        table.add(vec!["long".into(), "x".into()]);
        assert_eq!(table.to_string(), "| a    | b |\n|------|---|\n| long | x |\n");
    }
}
