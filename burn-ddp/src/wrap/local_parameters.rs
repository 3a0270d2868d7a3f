//! Parameters and buffers that each rank keeps for itself, selected by their paths.

use std::collections::{BTreeMap, HashSet};

use burn_ddp_comm::ProcessGroup;

use crate::model::schema::{Entry, list_paths};
use crate::{Error, Result};

/// Number of paths that an error proposes.
const PROPOSED: usize = 3;

/// For each path, true if one of `patterns` names it or a module that it is in. `what` are the patterns.
///
/// # Errors
///
/// [`Error::Invalid`] if a pattern names nothing, with the paths that are most like it.
pub(super) fn select(what: &str, patterns: &[String], paths: &[&str]) -> Result<Vec<bool>> {
    // Each path is compared with each pattern, but not with each name: there may be as many names as paths.
    let (with_stars, names): (Vec<&String>, Vec<&String>) = patterns.iter().partition(|pattern| pattern.contains('*'));
    let names: HashSet<&str> = names.into_iter().map(String::as_str).collect();
    let mut found = HashSet::new();
    let mut selected = Vec::new();
    for path in paths {
        let named = modules_and(path).filter_map(|name| names.get(name).copied());
        let is_match = |pattern: &str| modules_and(path).any(|name| matches(pattern.as_bytes(), name.as_bytes()));
        let starred = with_stars.iter().map(|pattern| pattern.as_str()).filter(|pattern| is_match(pattern));
        let of_path: Vec<&str> = named.chain(starred).collect();
        selected.push(!of_path.is_empty());
        found.extend(of_path);
    }
    match patterns.iter().find(|pattern| !found.contains(pattern.as_str())) {
        None => Ok(selected),
        Some(pattern) => Err(Error::invalid(format!(
            "the {what} {pattern:?} names no parameter, buffer or module of the model; closest are {}",
            closest(pattern, paths).join(", ")
        ))),
    }
}

/// Refuses accumulation by `what` if some of the `local` parameters are trained: no tap holds their gradients.
///
/// # Errors
///
/// [`Error::Invalid`] with their paths.
pub(crate) fn refuse_accumulation<'a>(what: &str, local: impl IntoIterator<Item = &'a Entry>) -> Result<()> {
    let trained: Vec<&Entry> = local.into_iter().filter(|entry| entry.trainable).collect();
    if trained.is_empty() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{what} with local parameters ({}) is not possible: every backward returns their gradients, but the gradients \
         of the other parameters only at the end of the step. Move the local parameters to a model of their own that \
         is not wrapped, or leave {what} out and add up the gradients of micro-batches by hand (Burn's \
         `GradientsAccumulator`)",
        list_paths(trained)
    )))
}

/// The first path that is local on one rank and shared on another. *Collective*.
#[track_caller]
pub(super) fn disagreement(
    group: &ProcessGroup,
    paths: &[&str],
    is_local: &[bool],
) -> burn_ddp_comm::Result<Option<String>> {
    let mine: Vec<(String, bool)> = paths.iter().map(ToString::to_string).zip(is_local.iter().copied()).collect();
    let all = group.all_gather_object(&mine)?;
    let mut seen: BTreeMap<&str, (usize, bool)> = BTreeMap::new();
    for (&rank, of_rank) in group.ranks().iter().zip(&all) {
        for (path, is_local) in of_rank {
            let (first, there) = *seen.entry(path).or_insert((rank, *is_local));
            if there != *is_local {
                let (local, shared) = if there { (first, rank) } else { (rank, first) };
                return Ok(Some(format!("{path} is a local parameter on rank {local} and not on rank {shared}")));
            }
        }
    }
    Ok(None)
}

/// The paths of the modules that `path` is in, and `path`.
fn modules_and(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('.').map(|(end, _)| &path[..end]).chain([path])
}

/// True if `text` is `pattern`, where `*` stands for any text.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, rest) => rest.is_none(),
        (Some((b'*', rest)), _) => (0..=text.len()).any(|skipped| matches(rest, &text[skipped..])),
        (Some((one, pattern)), Some((other, text))) => one == other && matches(pattern, text),
        (Some(_), None) => false,
    }
}

/// The `paths` that are most like `pattern`.
fn closest<'a>(pattern: &str, paths: &[&'a str]) -> Vec<&'a str> {
    let mut by_distance: Vec<&str> = paths.to_vec();
    by_distance.sort_by_cached_key(|path| distance(pattern, path));
    by_distance.truncate(PROPOSED);
    by_distance
}

/// Fewest characters to insert, delete or replace between two texts (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATHS: [&str; 5] = ["embed.weight", "experts.0.weight", "experts.0.bias", "experts.1.weight", "head.weight"];

    fn selected(patterns: &[&str]) -> Vec<&'static str> {
        let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
        let selected = select("local parameter", &patterns, &PATHS).unwrap();
        PATHS.iter().zip(selected).filter_map(|(path, selected)| selected.then_some(*path)).collect()
    }

    #[test]
    fn names_are_paths_modules_and_patterns() {
        assert_eq!(selected(&[]), [""; 0]);
        assert_eq!(selected(&["experts.0.bias", "embed.weight"]), ["embed.weight", "experts.0.bias"]);
        assert_eq!(selected(&["experts"]), &PATHS[1..4]);
        assert_eq!(selected(&["experts.0"]), &PATHS[1..3]);
        assert_eq!(selected(&["experts.*.weight"]), ["experts.0.weight", "experts.1.weight"]);
        assert_eq!(selected(&["*.bias", "h*"]), ["experts.0.bias", "head.weight"]);
        assert_eq!(selected(&["*"]), PATHS);
    }

    #[test]
    fn a_name_that_is_not_there_is_an_error_with_the_closest() {
        for (pattern, closest) in [("expert.0.weight", "experts.0.weight, "), ("embd", "embed.weight, ")] {
            let error = select("local parameter", &["head".into(), pattern.into()], &PATHS).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{pattern:?}")) && error.contains(&format!("closest are {closest}")),
                "{error}"
            );
        }
        assert!(select("local parameter", &["expert".into()], &PATHS).is_err(), "a part of a name is no module");
    }
}
