//! Agreement between ranks: an error or a difference that one rank finds is returned on all ranks, so that all of them
//! take the same path.

use burn_ddp_comm::ProcessGroup;

use crate::ddp::Ddp;
use crate::model::schema::{Entry, difference, digest};
use crate::{Error, Result};

/// Settings that must be the same on all ranks: a name that users know, and the value.
pub(crate) type Settings = Vec<(String, String)>;

/// Ends the waits of the other ranks with an error of this rank, unless it came from them or they have it, too.
pub(crate) fn tell_peers(ddp: &Ddp, error: &Error) {
    if !matches!(error, Error::Comm(_) | Error::NotFinite { .. }) {
        ddp.world().fail(error.to_string());
    }
}

/// This rank's result `mine` of doing `what`, if no rank failed. *Collective*.
///
/// # Errors
///
/// This rank's own error; without one, [`Error::Invalid`] with the error of the first rank that failed.
#[track_caller]
pub(crate) fn on_outcome<T>(group: &ProcessGroup, what: &str, mine: Result<T>) -> Result<T> {
    let outcomes = group.all_gather_object(&mine.as_ref().err().map(ToString::to_string))?;
    let mine = mine?;
    match outcomes.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?))) {
        None => Ok(mine),
        Some((rank, reason)) => {
            Err(Error::Invalid { rank: Some(group.ranks()[rank]), reason: format!("cannot {what}: {reason}") })
        }
    }
}

/// Settings that differ between the ranks, each with its values and the ranks that have them; `None` if all agree.
/// *Collective*: every rank gets the same answer.
#[track_caller]
pub(crate) fn on_settings(group: &ProcessGroup, settings: &Settings) -> burn_ddp_comm::Result<Option<String>> {
    Ok(differing_settings(&group.all_gather_object(settings)?, group.ranks()))
}

/// Compares the parameters and buffers of the ranks' models. *Collective*.
///
/// # Errors
///
/// [`Error::ModelsDiffer`] with the first difference, on every rank.
#[track_caller]
pub(crate) fn on_model(group: &ProcessGroup, entries: &[Entry]) -> Result<()> {
    let digests = group.all_gather_object(&digest(entries))?;
    if digests.iter().all(|digest| *digest == digests[0]) {
        return Ok(());
    }
    let models = group.all_gather_object(&entries.to_vec())?;
    let ranks = group.ranks();
    let (rank, difference) = difference(&models, ranks).unwrap_or_else(|| (ranks[0], "their digests differ".into()));
    Err(Error::ModelsDiffer { rank, difference })
}

/// The settings that differ, in words; `None` if all agree. `ranks[n]` is the rank with the settings `of_ranks[n]`.
fn differing_settings(of_ranks: &[Settings], ranks: &[usize]) -> Option<String> {
    // Loaders of different kinds have settings of different names. The first rank's names suffice to find that, since
    // one of the settings is the kind.
    let names = of_ranks.first()?.iter().map(|(name, _)| name);
    let differing: Vec<String> = names.filter_map(|name| differing_values(name, of_ranks, ranks)).collect();
    (!differing.is_empty()).then(|| differing.join("; "))
}

fn differing_values(name: &str, of_ranks: &[Settings], ranks: &[usize]) -> Option<String> {
    let mut values: Vec<(&str, Vec<usize>)> = Vec::new();
    for (&rank, settings) in ranks.iter().zip(of_ranks) {
        let value = settings.iter().find(|(other, _)| other == name).map_or("not set", |(_, value)| value);
        match values.iter_mut().find(|(seen, _)| *seen == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => values.push((value, vec![rank])),
        }
    }
    let say = |(value, ranks): &(&str, Vec<usize>)| format!("{value} on {}", list_ranks(ranks));
    (values.len() > 1).then(|| format!("{name} is {}", values.iter().map(say).collect::<Vec<_>>().join(" and ")))
}

/// `rank 3` or `ranks 0, 1, 2`; long lists are cut.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
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

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    #[test]
    fn names_every_value_and_its_ranks() {
        let a = settings(&[("the dataset length", "100"), ("the batch size", "8 per rank"), ("the seed", "1")]);
        let b = settings(&[("the dataset length", "99"), ("the batch size", "8 per rank"), ("the seed", "2")]);
        assert_eq!(differing_settings(&[a.clone(), a.clone(), a.clone()], &[0, 1, 2]), None);
        assert_eq!(
            differing_settings(&[a.clone(), b, a], &[0, 5, 2]).unwrap(),
            "the dataset length is 100 on ranks 0, 2 and 99 on rank 5; the seed is 1 on ranks 0, 2 and 2 on rank 5"
        );
    }

    #[test]
    fn another_kind_of_loader_is_a_difference() {
        let training = settings(&[("the kind", "training"), ("the seed", "1")]);
        let evaluation = settings(&[("the kind", "evaluation")]);
        assert_eq!(
            differing_settings(&[evaluation.clone(), training.clone()], &[0, 1]).unwrap(),
            "the kind is evaluation on rank 0 and training on rank 1"
        );
        let text = differing_settings(&[training, evaluation], &[0, 1]).unwrap();
        assert!(text.ends_with("the seed is 1 on rank 0 and not set on rank 1"), "{text}");
    }

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(list_ranks(&(0..10).collect::<Vec<_>>()), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }
}
