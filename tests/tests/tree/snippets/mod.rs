//! Every block of Rust in README.md and docs/, as code that is compiled and not run.
//!
//! The functions fill in what a page leaves to its reader: `…`, models, datasets. The test compares the rest.

mod data_page;
mod models_page;
mod other_pages;
#[cfg(feature = "train")]
mod trainer_page;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_ddp::checkpoint::Checkpoints;
use burn_ddp::data::ShardedLoader;
use burn_ddp::prelude::*;

use super::readme::{Model, ModelConfig, MyBatcher};
use super::root;

type Data = InMemDataset<[f32; 2]>;

/// Files whose code the pages show.
const COMPILED: [&str; 5] = [
    include_str!("../readme.rs"),
    include_str!("data_page.rs"),
    include_str!("models_page.rs"),
    include_str!("other_pages.rs"),
    include_str!("trainer_page.rs"),
];

/// The line up to `//`, where that is not in a string.
fn without_comment(line: &str) -> &str {
    let is_code = |at: &usize| line[..*at].matches('"').count().is_multiple_of(2);
    let end = line.match_indices("//").map(|(at, _)| at).find(is_code);
    &line[..end.unwrap_or(line.len())]
}

/// The code of `text`, however it is laid out.
fn code(text: &str) -> String {
    let lines = text.lines().map(without_comment);
    let code: String = lines.flat_map(str::chars).filter(|c| !c.is_whitespace()).collect();
    let code = code.replace("pub(super)", "");
    [")", "]", "}"].into_iter().fold(code, |code, end| code.replace(&format!(",{end}"), end))
}

/// Pieces of a page's blocks of Rust, which `…` separates, each with the number of its first line.
fn pieces(page: &str) -> Vec<(usize, String)> {
    let mut pieces: Vec<(usize, String)> = Vec::new();
    let mut inside = false;
    for (number, line) in (1..).zip(page.lines()) {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            inside = !inside && language.starts_with("rust");
            pieces.push((number + 1, String::new()));
        } else if inside {
            for (nth, part) in without_comment(line).split('…').enumerate() {
                if nth > 0 {
                    pieces.push((number + usize::from(part.trim().is_empty()), String::new()));
                }
                let (_, piece) = pieces.last_mut().unwrap();
                *piece = format!("{piece}{part}\n");
            }
        }
    }
    pieces.retain(|(_, piece)| !piece.trim().is_empty());
    pieces
}

#[test]
fn every_rust_block_of_the_docs_is_compiled() {
    let compiled = COMPILED.map(code);
    let docs = std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let (mut shown, mut wrong) = (0, String::new());
    for path in pages.chain([root().join("README.md")]) {
        for (number, piece) in pieces(&std::fs::read_to_string(&path).unwrap()) {
            shown += 1;
            if !compiled.iter().any(|compiled| compiled.contains(&code(&piece))) {
                let page = path.strip_prefix(root()).unwrap().display();
                wrong += &format!("\n{page}:{number}:\n{}\n", piece.trim_end());
            }
        }
    }
    assert!(shown > 30, "only {shown} pieces were found");
    assert!(wrong.is_empty(), "no file of tests/tests/tree/snippets has this code:\n{wrong}");
}

#[test]
fn three_pages_show_the_whole_program() {
    let file = code(COMPILED[0]);
    let (_, program) = file.split_once("fnmain()").unwrap();
    let (program, _) = program.split_once("Ok(ddp.finish()?)}").unwrap();
    let program = format!("fnmain(){program}Ok(ddp.finish()?)}}");
    for page in ["README.md", "docs/quickstart.md", "docs/migrating.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        assert!(pieces(&text).iter().any(|(_, piece)| code(piece).ends_with(&program)), "{page}: {program}");
    }
}
