//! Checks of the documents: statements about the source tree hold, code blocks compile, and the README's program runs.

mod readme;
mod snippets;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const ALLOW: &str = "#![allow(unsafe_code)]";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Rust files below the folders `src` of all crates, with their text, by path from the root of the repository.
fn sources() -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    walk(&path, found);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
                if name.split('/').any(|folder| folder == "src") {
                    found.push((name, std::fs::read_to_string(&path).unwrap()));
                }
            }
        }
    }
    let mut found = Vec::new();
    for crates in ["burn-ddp", "burn-ddp-examples", "tests"] {
        walk(&root().join(crates), &mut found);
    }
    assert!(found.len() > 100, "only {} files were found", found.len());
    found
}

#[test]
fn files_with_unsafe_code_are_listed() {
    let page = std::fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let section = page.split("## Files with `unsafe`").nth(1).expect("a section about unsafe code");
    let listed: BTreeSet<&str> = section.split("```").nth(1).expect("a list").lines().skip(1).collect();
    let sources = sources();
    let allowed = sources.iter().filter(|(_, text)| text.lines().any(|line| line == ALLOW));
    let allowed: BTreeSet<&str> = allowed.map(|(name, _)| name.as_str()).collect();
    let (missing, extra): (Vec<_>, Vec<_>) =
        (allowed.difference(&listed).collect(), listed.difference(&allowed).collect());
    assert!(
        missing.is_empty() && extra.is_empty(),
        "docs/architecture.md lacks {missing:?}, and should not list {extra:?}"
    );
}

#[test]
fn every_variable_is_in_the_configuration_page() {
    let page = std::fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let mut missing = BTreeSet::new();
    for (name, text) in sources() {
        let is_test = name.starts_with("tests/") || name.split('/').any(|part| part.trim_end_matches(".rs") == "tests");
        let parts = text.split("\"BURN_DDP_").skip(1).filter(|_| !is_test);
        let variables = parts.filter_map(|rest| rest.split_once('"')).map(|(variable, _)| variable);
        let is_name = |text: &str| text.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        let names = variables.filter(|variable| is_name(variable) && !variable.starts_with("TEST_"));
        missing.extend(names.map(|v| format!("BURN_DDP_{v}")).filter(|v| !page.contains(&format!("`{v}`"))));
    }
    assert!(missing.is_empty(), "docs/configuration.md lacks {missing:?}");
}

/// Without a lint against `unsafe` in its root, a crate's files could use unsafe code without allowing it visibly.
#[test]
fn unsafe_code_is_denied_in_every_crate() {
    let is_root = |name: &str| {
        let path: Vec<&str> = name.rsplit('/').collect();
        matches!(path[..], ["lib.rs" | "main.rs", "src", ..] | ["main.rs", _, "bin", "src", ..] | [_, "bin", "src", ..])
    };
    let denies = |text: &str| {
        text.lines()
            .any(|line| line.starts_with("#![deny(unsafe_code)]") || line.starts_with("#![forbid(unsafe_code)]"))
    };
    let open: Vec<String> =
        sources().into_iter().filter(|(name, text)| is_root(name) && !denies(text)).map(|(name, _)| name).collect();
    assert!(open.is_empty(), "no #![deny(unsafe_code)] in {open:?}");
}
