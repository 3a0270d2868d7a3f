//! The table of variables, row by row.

use burn_ddp_comm::{Error, LaunchEnv, Meeting, Result};

fn read(set: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
    LaunchEnv::from_lookup(&|name| {
        set.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
    })
}

fn env(set: &[(&str, &str)]) -> LaunchEnv {
    read(set).unwrap_or_else(|e| panic!("{set:?}: {e}")).expect("something is set")
}

/// The message of the error that `set` must be; it must contain all of `expected`.
fn refused(set: &[(&str, &str)], expected: &[&str]) {
    let error = read(set).expect_err(&format!("{set:?} must be refused"));
    assert!(matches!(error, Error::Environment { .. }), "{error:?}");
    let text = error.to_string();
    for part in expected {
        assert!(text.contains(part), "{set:?}: {text:?} does not say {part:?}");
    }
}

const PLAIN: [(&str, &str); 4] =
    [("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];
const OURS: [(&str, &str); 3] =
    [("BURN_DDP_RANK", "3"), ("BURN_DDP_WORLD_SIZE", "8"), ("BURN_DDP_MASTER", "127.0.0.1:4000")];
const LOCAL: [(&str, &str); 2] = [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];

fn with<'a>(set: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [set, more].concat()
}

fn without<'a>(set: &[(&'a str, &'a str)], name: &str) -> Vec<(&'a str, &'a str)> {
    set.iter().copied().filter(|(known, _)| *known != name).collect()
}

#[test]
fn nothing_set_is_no_job() {
    assert_eq!(read(&[]).unwrap(), None);
    assert_eq!(read(&[("PATH", "/bin"), ("SLURM_JOB_NAME", "x")]).unwrap(), None);
}

#[test]
fn a_complete_family_is_read() {
    let plain = env(&PLAIN);
    assert_eq!(
        (plain.rank, plain.world_size, plain.local_rank, plain.local_world_size, plain.node_rank),
        (3, 8, 3, 8, 0)
    );
    assert_eq!(plain.meeting, Meeting::Rank0 { host: "localhost".into(), port: 29500 });
    assert_eq!(plain.launcher, "variables");

    let ours = env(&with(&OURS, &[("BURN_DDP_STORE", "launcher"), ("BURN_DDP_JOB_ID", "j")]));
    assert_eq!((ours.rank, ours.world_size, ours.local_rank), (3, 8, 3));
    assert_eq!(ours.meeting, Meeting::Launcher { host: "127.0.0.1".into(), port: 4000 });
    assert_eq!((ours.launcher, ours.job_id.as_str()), ("burnrun", "j"));
}

#[test]
fn local_ranks_are_needed_only_if_the_master_may_be_elsewhere() {
    let far = with(&without(&PLAIN, "MASTER_ADDR"), &[("MASTER_ADDR", "node1")]);
    refused(&far, &["LOCAL_RANK", "LOCAL_WORLD_SIZE", "node1"]);
    let env = env(&with(&far, &LOCAL));
    assert_eq!((env.local_rank, env.local_world_size, env.node_rank), (1, 2, 1));
}

#[test]
fn every_variable_alone_is_a_half_set_family() {
    for name in [
        "BURN_DDP_RANK",
        "BURN_DDP_WORLD_SIZE",
        "BURN_DDP_LOCAL_RANK",
        "BURN_DDP_LOCAL_WORLD_SIZE",
        "BURN_DDP_NODE_RANK",
        "BURN_DDP_JOB_ID",
    ] {
        refused(&[(name, "0")], &[&format!("{name} is set"), "BURN_DDP_MASTER", "not"]);
    }
    refused(
        &[("BURN_DDP_MASTER", "a:1")],
        &["BURN_DDP_MASTER is set", "BURN_DDP_RANK and BURN_DDP_WORLD_SIZE are not"],
    );
    for name in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    {
        refused(&[(name, "0")], &[&format!("{name} is set"), "MASTER_ADDR", "not"]);
    }
}

#[test]
fn what_is_set_and_what_is_missing_are_both_listed() {
    for (name, _) in PLAIN {
        refused(
            &without(&PLAIN, name),
            &["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", &format!("but {name} is not")],
        );
    }
    refused(
        &[("RANK", "0"), ("LOCAL_RANK", "0")],
        &["RANK and LOCAL_RANK are set", "WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not"],
    );
}

#[test]
fn half_of_ours_is_not_repaired_by_the_plain_ones_but_ours_need_no_plain_ones() {
    refused(
        &with(&PLAIN, &[("BURN_DDP_RANK", "3")]),
        &["BURN_DDP_RANK is set", "BURN_DDP_WORLD_SIZE and BURN_DDP_MASTER are not"],
    );
    assert_eq!(env(&with(&OURS, &[("MASTER_ADDR", "left over")])).rank, 3);
}

#[test]
fn values_that_are_no_numbers_are_shown() {
    for junk in ["", "three", "-1", "1.0", "0x1", "18446744073709551616"] {
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"]
        {
            refused(&with(&with(&PLAIN, &LOCAL), &[(name, junk)]), &[name, &format!("{junk:?}"), "number"]);
        }
        refused(&with(&OURS, &[("BURN_DDP_RANK", junk)]), &["BURN_DDP_RANK", &format!("{junk:?}")]);
    }
    assert_eq!(env(&with(&PLAIN, &[("RANK", " 5\n")])).rank, 5, "white space around a number is harmless");
}

#[test]
fn numbers_that_contradict_each_other_are_shown() {
    refused(&with(&PLAIN, &[("RANK", "8")]), &["RANK=8", "WORLD_SIZE=8", "0 to 7"]);
    refused(&with(&PLAIN, &[("WORLD_SIZE", "0")]), &["WORLD_SIZE=0"]);
    refused(&with(&PLAIN, &[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")]), &["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]);
    refused(&with(&PLAIN, &[("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "0")]), &["LOCAL_RANK=0", "LOCAL_WORLD_SIZE=0"]);
    refused(&with(&PLAIN, &[("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "9")]), &["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]);
    refused(&with(&PLAIN, &[("LOCAL_RANK", "0")]), &["LOCAL_RANK", "LOCAL_WORLD_SIZE is not"]);
    refused(&with(&PLAIN, &[("LOCAL_WORLD_SIZE", "8")]), &["LOCAL_WORLD_SIZE", "LOCAL_RANK is not"]);
}

#[test]
fn a_master_that_cannot_be_found_is_shown() {
    for junk in ["", "port", "65536", "-1", "0"] {
        refused(&with(&PLAIN, &[("MASTER_PORT", junk)]), &["MASTER_PORT"]);
    }
    refused(&with(&PLAIN, &[("MASTER_ADDR", " ")]), &["MASTER_ADDR is empty"]);
    for junk in ["", "node1", "node1:", ":1", "node1:x", "node1:0"] {
        refused(&with(&OURS, &[("BURN_DDP_MASTER", junk)]), &["BURN_DDP_MASTER"]);
    }
    refused(&with(&OURS, &[("BURN_DDP_STORE", "somewhere")]), &["BURN_DDP_STORE", "somewhere"]);
}

#[test]
fn two_launchers_that_disagree_are_an_error_that_shows_both() {
    let same = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "4000")];
    assert_eq!(env(&with(&with(&OURS, &PLAIN), &same)).launcher, "burnrun");
    refused(
        &with(&with(&OURS, &PLAIN), &[("RANK", "2")]),
        &["BURN_DDP_RANK=3 but RANK=2", "BURN_DDP_MASTER=127.0.0.1:4000 but MASTER_ADDR:MASTER_PORT=localhost:29500"],
    );
}

#[test]
fn torchruns_own_store_is_left_alone() {
    let torchrun =
        [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "run"), ("TORCHELASTIC_RESTART_COUNT", "2")];
    let agent = env(&with(&PLAIN, &torchrun));
    assert_eq!(agent.meeting, Meeting::Rank0Above { host: "localhost".into(), port: 29500 });
    assert_eq!(agent.launcher, "torchrun");
    let restarted = env(&with(&with(&PLAIN, &torchrun), &[("TORCHELASTIC_RESTART_COUNT", "3")]));
    assert_ne!(agent.job_id, restarted.job_id, "a restarted job does not meet its predecessor");

    let free = env(&with(&with(&PLAIN, &torchrun), &[("TORCHELASTIC_USE_AGENT_STORE", "False")]));
    assert_eq!(free.meeting, Meeting::Rank0 { host: "localhost".into(), port: 29500 });
    refused(&with(&PLAIN, &[("TORCHELASTIC_USE_AGENT_STORE", "maybe")]), &["TORCHELASTIC_USE_AGENT_STORE", "maybe"]);
}

#[test]
fn a_child_given_the_variables_is_the_same_rank() {
    for store in ["launcher", "rank0", "above"] {
        for master in ["node1:4000", "[fe80::1]:4000"] {
            let set = [
                ("BURN_DDP_STORE", store),
                ("BURN_DDP_MASTER", master),
                ("BURN_DDP_LOCAL_RANK", "1"),
                ("BURN_DDP_LOCAL_WORLD_SIZE", "2"),
            ];
            let parent = env(&with(&OURS, &set));
            let variables = parent.variables();
            let child: Vec<_> = variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            assert_eq!(env(&child), parent);
        }
    }
}

#[test]
fn a_job_id_has_a_sane_length() {
    refused(&with(&OURS, &[("BURN_DDP_JOB_ID", "")]), &["job id"]);
    refused(&with(&OURS, &[("BURN_DDP_JOB_ID", &"x".repeat(257))]), &["257"]);
}
