//! Whether all ranks build the same loader.

use super::DataError;
use crate::Ddp;

/// What must be the same on all ranks: a name that people know, and the value.
pub(super) type Facts = Vec<(String, String)>;

/// Compares `facts` over all ranks. *Collective*: every rank gets the same answer.
#[track_caller]
pub(super) fn agree(ddp: &Ddp, loader: &str, facts: &Facts) -> Result<(), DataError> {
    let of_ranks = ddp.group().all_gather_object(facts)?;
    match difference(&of_ranks) {
        None => Ok(()),
        Some(difference) => Err(DataError::LoadersDiffer { loader: loader.to_string(), difference }),
    }
}

/// The facts that differ, with each value and the ranks that have it.
fn difference(of_ranks: &[Facts]) -> Option<String> {
    // The kinds of loader may differ, and with them the names: the first rank's suffice, since the kind is one of them.
    let names = of_ranks.first()?.iter().map(|(name, _)| name);
    let differing: Vec<String> = names.filter_map(|name| differing_values(name, of_ranks)).collect();
    (!differing.is_empty()).then(|| differing.join("; "))
}

fn differing_values(name: &str, of_ranks: &[Facts]) -> Option<String> {
    let mut values: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, facts) in of_ranks.iter().enumerate() {
        let value = facts.iter().find(|(other, _)| other == name).map_or("not set", |(_, value)| value);
        match values.iter_mut().find(|(seen, _)| *seen == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => values.push((value, vec![rank])),
        }
    }
    let say = |(value, ranks): &(&str, Vec<usize>)| format!("{value} on {}", list(ranks));
    (values.len() > 1).then(|| format!("{name} is {}", values.iter().map(say).collect::<Vec<_>>().join(" and ")))
}

/// `rank 3` or `ranks 0, 1, 2`; long lists are cut.
fn list(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
    let more = match ranks.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(pairs: &[(&str, &str)]) -> Facts {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    #[test]
    fn names_every_value_and_its_ranks() {
        let a = facts(&[("the dataset length", "100"), ("the batch size", "8 per rank"), ("the seed", "1")]);
        let b = facts(&[("the dataset length", "99"), ("the batch size", "8 per rank"), ("the seed", "2")]);
        assert_eq!(difference(&[a.clone(), a.clone(), a.clone()]), None);
        assert_eq!(
            difference(&[a.clone(), b, a]).unwrap(),
            "the dataset length is 100 on ranks 0, 2 and 99 on rank 1; the seed is 1 on ranks 0, 2 and 2 on rank 1"
        );
    }

    #[test]
    fn another_kind_of_loader_is_a_difference() {
        let training = facts(&[("the kind", "training"), ("the seed", "1")]);
        let evaluation = facts(&[("the kind", "evaluation")]);
        assert_eq!(
            difference(&[evaluation.clone(), training.clone()]).unwrap(),
            "the kind is evaluation on rank 0 and training on rank 1"
        );
        let text = difference(&[training, evaluation]).unwrap();
        assert!(text.ends_with("the seed is 1 on rank 0 and not set on rank 1"), "{text}");
    }

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(list(&(0..10).collect::<Vec<_>>()), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }
}
