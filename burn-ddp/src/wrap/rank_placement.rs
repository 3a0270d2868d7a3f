//! Advice on the placement of ranks, where it makes machines send more than they need to.

use std::sync::atomic::{AtomicBool, Ordering};

use burn_ddp_comm::{Machines, ProcessGroup};

use crate::agreement::list_ranks;
use crate::ddp::Ddp;

/// Logs the [`advice`] on rank 0, once in a process.
pub(super) fn advise(ddp: &Ddp, group: &ProcessGroup) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let between_machines = group.engine() == "shm+tcp";
    if ddp.is_main()
        && between_machines
        && let Some(advice) = advice(ddp.world().machines(), group.ranks())
        && !SAID.swap(true, Ordering::Relaxed)
    {
        tracing::warn!("{advice}");
    }
}

/// Advice if a machine sends more than one partial sum of each gradient in a group of these world ranks; `None` if
/// every machine sends one.
fn advice(machines: &Machines, ranks: &[usize]) -> Option<String> {
    let most = machines.partial_results(ranks).into_iter().max().filter(|most| *most > 1)?;
    let is_scattered = |machine: &usize| {
        let is_here = |rank: &usize| machines.machine_of(*rank) == *machine;
        let (first, last) = (ranks.iter().position(is_here), ranks.iter().rposition(is_here));
        first.zip(last).is_some_and(|(first, last)| !ranks[first..=last].iter().all(is_here))
    };
    let (why, help) = match (0..machines.count()).find(is_scattered) {
        Some(machine) => (
            format!("ranks of one machine do not follow each other ({})", list_ranks(machines.ranks_of(machine))),
            "start them in blocks, as burnrun, `mpirun --map-by slot` and `srun --distribution=block` do",
        ),
        None => (
            "the tree in which ranks are summed cuts machines apart".to_string(),
            "2, 4 or 8 ranks on each machine send least",
        ),
    };
    Some(format!("a machine sends up to {most} partial sums of each gradient instead of 1: {why}; {help}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_that_cost_bytes_are_named_with_what_helps() {
        let advice = |of_ranks: &[usize]| {
            let all: Vec<usize> = (0..of_ranks.len()).collect();
            super::advice(&Machines::new(of_ranks), &all)
        };
        assert_eq!(advice(&[0; 3]), None);
        assert_eq!(advice(&[0, 0, 0, 0, 1, 1, 1, 1]), None);
        assert_eq!(
            advice(&[0, 1, 0, 1, 0, 1, 0, 1]).unwrap(),
            "a machine sends up to 4 partial sums of each gradient instead of 1: ranks of one machine do not follow \
            each other (ranks 0, 2, 4, 6); start them in blocks, as burnrun, `mpirun --map-by slot` and \
            `srun --distribution=block` do"
        );
        let uneven = advice(&[0, 0, 0, 1, 1, 1, 2, 2, 2]).unwrap();
        assert!(uneven.contains("up to 2 partial sums") && uneven.contains("2, 4 or 8 ranks"), "{uneven}");
        let part = super::advice(&Machines::new(&[0, 1, 0, 1]), &[0, 2]);
        assert_eq!(part, None, "a group on one machine");
    }
}
