//! Options of `all-reduce` for ranks on several machines.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::simulated_machines::{Cable, Machines};

/// Options for ranks on several simulated machines.
#[derive(Args, Debug)]
pub(super) struct MachineOptions {
    /// Number of ranks on each machine, such as 4,4. Machines are network namespaces, each with a cable to a switch
    /// (needs root, ip and tc). Compares with gloo and Open MPI. `bytes sent` are the bytes per all-reduce that the
    /// interface of the busiest machine counts.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "RANKS",
        conflicts_with_all = ["world", "oversubscribe", "scaling"]
    )]
    machines: Vec<usize>,
    /// Speed of a machine's cable each way, in Gbit/s; 0 for no limit.
    #[arg(long, default_value_t = 1.0, requires = "machines")]
    gbit: f64,
    /// Limit of each connection, in Mbit/s, as in many clouds; 0 for no limit.
    #[arg(long, default_value_t = 0.0, requires = "machines")]
    flow_mbit: f64,
    /// Time that each packet takes between two machines, in milliseconds, over cables without a limit (needs python3);
    /// 0 for no added delay.
    #[arg(long, default_value_t = 0.0, requires = "machines", conflicts_with_all = ["gbit", "flow_mbit"])]
    delay_ms: f64,
    /// Assigns ranks to the machines in turns (0, 1, 0, 1), instead of in blocks (0, 0, 1, 1).
    #[arg(long, requires = "machines")]
    cyclic: bool,
}

impl MachineOptions {
    /// True if the ranks are on several machines.
    pub(super) fn any(&self) -> bool {
        !self.machines.is_empty()
    }

    /// Starts the machines; `None` if the options name none.
    ///
    /// # Errors
    /// If a machine has no rank, or a speed is not valid; and the errors of [`Machines::new`] and
    /// [`Machines::with_delay`].
    pub(super) fn start(&self) -> Result<Option<Machines>> {
        if !self.any() {
            return Ok(None);
        }
        ensure!(self.machines.iter().all(|ranks| *ranks > 0), "a machine has at least one rank");
        let is_speed = |speed: f64| speed >= 0.0 && speed.is_finite();
        ensure!(is_speed(self.gbit) && is_speed(self.flow_mbit), "--gbit and --flow-mbit must be 0 or more");
        let placement = placement(&self.machines, self.cyclic);
        if self.delay_ms == 0.0 {
            let cable = Cable { gbit: self.gbit, flow_mbit: self.flow_mbit };
            return Machines::new(placement, cable).map(Some);
        }
        let delay = Duration::try_from_secs_f64(self.delay_ms / 1e3).context("--delay-ms must be 0 or more")?;
        Machines::with_delay(placement, delay).map(Some)
    }
}

impl fmt::Display for MachineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.any() {
            return Ok(());
        }
        let ranks: Vec<String> = self.machines.iter().map(usize::to_string).collect();
        write!(f, " of {} ranks{}", ranks.join(" + "), if self.cyclic { ", dealt in turns," } else { "" })?;
        if self.delay_ms > 0.0 {
            return write!(f, " on machines {} ms apart", self.delay_ms);
        }
        match self.gbit {
            0.0 => f.write_str(" on machines without a limit")?,
            gbit => write!(f, " on machines with {gbit} Gbit/s")?,
        }
        match self.flow_mbit {
            0.0 => Ok(()),
            limit => write!(f, ", {limit} Mbit/s a connection"),
        }
    }
}

/// Machine of each rank, by rank; machine `m` has `ranks[m]` ranks.
fn placement(ranks: &[usize], cyclic: bool) -> Vec<usize> {
    let places = ranks.iter().enumerate().flat_map(|(machine, ranks)| (0..*ranks).map(move |turn| (turn, machine)));
    let mut places: Vec<(usize, usize)> = places.collect();
    if cyclic {
        places.sort_unstable();
    }
    places.into_iter().map(|(_, machine)| machine).collect()
}

#[cfg(test)]
mod tests {
    use super::placement;

    #[test]
    fn ranks_lie_in_blocks_or_in_turns() {
        assert_eq!(placement(&[2, 3], false), [0, 0, 1, 1, 1]);
        assert_eq!(placement(&[2, 3], true), [0, 1, 0, 1, 1]);
    }
}
