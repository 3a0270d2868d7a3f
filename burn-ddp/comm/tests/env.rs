//! The variables of each launcher, and what a rank makes of them.

use burn_ddp_comm::{Error, LaunchEnv, Meeting, Result};

fn read(set: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
    LaunchEnv::from_lookup(&|name| {
        set.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
    })
}

fn env(set: &[(&str, &str)]) -> LaunchEnv {
    read(set).unwrap_or_else(|e| panic!("{set:?}: {e}")).expect("something is set")
}

/// Fails unless the variables `set` are refused with a message that contains all of `expected`.
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
/// Rank 1 of 3 on one machine, as `mpirun` of Open MPI 4.1.4 sets it.
const OPEN_MPI: [(&str, &str); 8] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "3"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
    ("OMPI_COMM_WORLD_NODE_RANK", "1"),
    ("PMIX_NAMESPACE", "1235419137"),
    ("PMIX_RANK", "1"),
    ("PMIX_SERVER_TMPDIR", "/tmp/ompi.vm.0/pid.9565"),
];
/// The same rank, as MPICH 4.0.2 sets it.
const MPICH: [(&str, &str); 7] = [
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "3"),
    ("PMI_FD", "8"),
    ("MPI_LOCALRANKID", "1"),
    ("MPI_LOCALNRANKS", "3"),
    ("HYDI_CONTROL_FD", "7"),
    ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "n7"),
];
/// The same rank, as `srun` of Slurm 22.05 sets it.
const SLURM: [(&str, &str); 11] = [
    ("SLURM_PROCID", "1"),
    ("SLURM_STEP_NUM_TASKS", "3"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "3"),
    ("SLURM_NODEID", "0"),
    ("SLURM_JOB_ID", "12"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "vm"),
    ("SLURM_STEP_NUM_NODES", "1"),
    ("SLURM_NTASKS", "3"),
    ("SLURM_JOB_NODELIST", "vm"),
];
/// A batch script of Slurm, which is no rank, though its `SLURM_PROCID` is set.
const BATCH: [(&str, &str); 5] = [
    ("SLURM_JOB_ID", "12"),
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_JOB_NODELIST", "vm"),
];
const TORCHRUN: [(&str, &str); 3] =
    [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "run"), ("TORCHELASTIC_RESTART_COUNT", "2")];
const LOCAL: [(&str, &str); 2] = [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];

fn local(name: &str) -> Meeting {
    Meeting::Local { name: name.into() }
}

fn rank0(host: &str, port: u16) -> Meeting {
    Meeting::Rank0 { host: host.into(), port }
}

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
    assert_eq!(plain.meeting, local("variables, port 29500, restart 0"));
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
fn half_of_ours_is_not_repaired_by_others_but_ours_need_no_others() {
    for others in [&PLAIN[..], &OPEN_MPI, &MPICH, &SLURM] {
        refused(
            &with(others, &[("BURN_DDP_RANK", "3")]),
            &["BURN_DDP_RANK is set", "BURN_DDP_WORLD_SIZE and BURN_DDP_MASTER are not"],
        );
    }
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
    refused(&with(&with(&OURS, &PLAIN), &[("RANK", "2")]), &["BURN_DDP_RANK=3 but RANK=2"]);
    refused(&with(&OURS, &PLAIN), &["BURN_DDP_MASTER=127.0.0.1:4000 but MASTER_ADDR:MASTER_PORT=localhost:29500"]);
    refused(&with(&OURS, &[("RANK", "2")]), &["BURN_DDP_RANK=3 but RANK=2"]);
    // Variables that a script exported before mpirun or srun would give all ranks the same number.
    let left_over = with(&PLAIN, &[("RANK", "0"), ("WORLD_SIZE", "1")]);
    refused(
        &with(&left_over, &OPEN_MPI),
        &["RANK=0 but OMPI_COMM_WORLD_RANK=1", "WORLD_SIZE=1 but OMPI_COMM_WORLD_SIZE=3"],
    );
    refused(&with(&left_over, &MPICH), &["RANK=0 but PMI_RANK=1", "WORLD_SIZE=1 but PMI_SIZE=3"]);
    refused(&with(&left_over, &SLURM), &["RANK=0 but SLURM_PROCID=1", "WORLD_SIZE=1 but SLURM_STEP_NUM_TASKS=3"]);
    refused(&with(&OPEN_MPI, &[("LOCAL_RANK", "0")]), &["OMPI_COMM_WORLD_LOCAL_RANK=1 but LOCAL_RANK=0"]);
    // A script that sets the plain variables from srun's.
    let passed_on = with(&PLAIN, &[("RANK", "1"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "3")]);
    assert_eq!(env(&with(&passed_on, &SLURM)).launcher, "variables");
}

#[test]
fn torchruns_own_store_is_left_alone() {
    let far = with(&with(&PLAIN, &LOCAL), &[("MASTER_ADDR", "node1")]);
    let agent = env(&with(&far, &TORCHRUN));
    assert_eq!(agent.meeting, Meeting::Rank0Above { host: "node1".into(), port: 29500 });
    assert_eq!((agent.launcher, agent.restart_count), ("torchrun", 2));

    let free = env(&with(&with(&far, &TORCHRUN), &[("TORCHELASTIC_USE_AGENT_STORE", "False")]));
    assert_eq!(free.meeting, rank0("node1", 29500));
    let told = env(&with(&with(&far, &TORCHRUN), &[("BURN_DDP_MASTER", "node1:4000")]));
    assert_eq!(told.meeting, rank0("node1", 4000));
    refused(&with(&PLAIN, &[("TORCHELASTIC_USE_AGENT_STORE", "maybe")]), &["TORCHELASTIC_USE_AGENT_STORE", "maybe"]);
}

#[test]
fn ranks_that_are_all_here_meet_at_a_socket_named_after_the_job() {
    let torchrun = with(&PLAIN, &TORCHRUN);
    assert_eq!(env(&torchrun).meeting, local("torchrun, run, port 29500, restart 2"));
    assert_eq!(
        env(&with(&torchrun, &[("TORCHELASTIC_RESTART_COUNT", "3")])).meeting,
        local("torchrun, run, port 29500, restart 3"),
        "a restarted job does not meet its predecessor"
    );
    // torchrun gives its machine's name as the master, though all ranks are on that machine.
    let named = with(&torchrun, &[("MASTER_ADDR", "vm"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "8")]);
    assert_eq!(env(&named).meeting, local("torchrun, run, port 29500, restart 2"));
    assert_eq!(env(&OURS).meeting, local("burnrun, port 4000, restart 0"));
    assert_eq!(env(&OPEN_MPI).meeting, local("Open MPI, 1235419137 /tmp/ompi.vm.0/pid.9565"));
    assert_eq!(env(&SLURM).meeting, local("Slurm, Slurm job 12.0, restart 0"));
    assert_eq!(env(&with(&SLURM, &[("SLURM_RESTART_COUNT", "1")])).meeting, local("Slurm, Slurm job 12.0, restart 1"));
    for on_one_machine in [&torchrun[..], &OPEN_MPI, &SLURM] {
        let master = [("BURN_DDP_MASTER", "node1:4000")];
        assert_eq!(env(&with(on_one_machine, &master)).meeting, env(on_one_machine).meeting);
    }
    let by_name = env(&with(&OURS, &[("BURN_DDP_MASTER", "local:mine")]));
    assert_eq!((by_name.meeting, by_name.job_id.as_str()), (local("mine"), "mine"));
}

#[test]
fn mpirun_and_srun_say_who_this_is() {
    for (set, launcher) in [(&OPEN_MPI[..], "Open MPI"), (&MPICH, "MPICH"), (&SLURM, "Slurm")] {
        let env = env(set);
        assert_eq!(
            (env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank, env.launcher),
            (1, 3, 1, 3, 0, launcher)
        );
    }
    assert_eq!(env(&MPICH).meeting, Meeting::Pmi { fd: 8, host: "n7".into() });
    assert_eq!(env(&with(&SLURM, &[("BURN_DDP_JOB_ID", "mine")])).job_id, "mine");
}

#[test]
fn on_several_machines_the_master_is_told_or_known() {
    let two = |set: &[(&'static str, &'static str)]| {
        let size = [
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "1"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "1,2"),
            ("SLURM_STEP_NODELIST", "n[07-08]"),
            ("SLURM_STEP_NUM_NODES", "2"),
        ];
        let sizes: Vec<_> = size.into_iter().filter(|(name, _)| set.iter().any(|(known, _)| known == name)).collect();
        with(set, &sizes)
    };
    refused(&two(&OPEN_MPI), &["mpirun -x BURN_DDP_MASTER=node1:29500", "burnrun secret"]);
    assert_eq!(env(&two(&MPICH)).meeting, Meeting::Pmi { fd: 8, host: "n7".into() });
    let Meeting::Rank0Above { host, port } = env(&two(&SLURM)).meeting else { panic!("{:?}", env(&two(&SLURM))) };
    assert!(host == "n07" && (20_000..32_000).contains(&port), "{host}:{port}");

    for set in [&OPEN_MPI[..], &MPICH, &SLURM] {
        let plain = with(&two(set), &[("MASTER_ADDR", "n1"), ("MASTER_PORT", "29500")]);
        assert_eq!(env(&plain).meeting, rank0("n1", 29500));
        assert_eq!(env(&with(&plain, &[("BURN_DDP_MASTER", "n2:4000")])).meeting, rank0("n2", 4000));
        refused(&with(&two(set), &[("BURN_DDP_MASTER", "n2")]), &["BURN_DDP_MASTER", "host:port"]);
    }
    let second = with(&two(&SLURM), &[("SLURM_NODEID", "1"), ("SLURM_LOCALID", "1"), ("SLURM_PROCID", "2")]);
    let second = env(&second);
    assert_eq!((second.rank, second.local_rank, second.local_world_size, second.node_rank), (2, 1, 2, 1));
    refused(&with(&two(&SLURM), &[("SLURM_NODEID", "2")]), &["SLURM_STEP_TASKS_PER_NODE", "machine 2"]);
    refused(&with(&two(&SLURM), &[("SLURM_STEP_NODELIST", "n[")]), &["SLURM_STEP_NODELIST", "n["]);
}

#[test]
fn a_part_of_what_mpirun_or_srun_sets_is_an_error_that_lists_the_rest() {
    for (set, needed) in [(&OPEN_MPI[..], 5), (&MPICH, 5), (&SLURM, 8)] {
        let required: Vec<&str> = match set[0].0 {
            "OMPI_COMM_WORLD_RANK" => [0, 1, 2, 3, 5].map(|i: usize| set[i].0).to_vec(),
            _ => set[..needed].iter().map(|(name, _)| *name).collect(),
        };
        assert_eq!(required.len(), needed);
        for name in required.into_iter().filter(|name| *name != "SLURM_STEP_ID") {
            refused(&without(set, name), &[&format!("but {name} is not")]);
        }
    }
    for hint in ["PMIX_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE"] {
        refused(&[(hint, "0")], &[&format!("{hint} is set"), "OMPI_COMM_WORLD_RANK"]);
    }
    for hint in ["PMI_FD", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"] {
        refused(&[(hint, "0")], &[&format!("{hint} is set"), "BURN_DDP_WORLD_SIZE"]);
    }
    refused(&with(&SLURM, &[("SLURM_PROCID", "x")]), &["SLURM_PROCID", "\"x\""]);
    refused(&with(&SLURM, &[("SLURM_STEP_ID", "x")]), &["SLURM_STEP_ID", "\"x\""]);
}

#[test]
fn a_shell_in_an_allocation_is_no_rank_and_not_taken_for_a_world_of_one() {
    assert_eq!(read(&BATCH).unwrap(), None);
    assert_eq!(read(&with(&BATCH, &[("SLURM_NTASKS", "1")])).unwrap(), None);
    refused(&with(&BATCH, &[("SLURM_NTASKS", "4")]), &["Slurm job 12", "SLURM_NTASKS=4", "srun"]);
    // `salloc` and `srun --pty` give an interactive shell as a step of its own.
    let interactive = with(&SLURM, &[("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1")]);
    refused(&interactive, &["SLURM_NTASKS=3", "srun"]);
    assert_eq!(env(&with(&interactive, &OPEN_MPI)).launcher, "Open MPI");
}

#[test]
fn a_launcher_within_another_wins() {
    let batch = with(&BATCH, &[("SLURM_NTASKS", "4")]);
    for (inner, name) in [(&OPEN_MPI[..], "Open MPI"), (&MPICH, "MPICH"), (&OURS, "burnrun"), (&PLAIN, "variables")] {
        assert_eq!(env(&with(&batch, inner)).launcher, name);
    }
    // One task per machine, which is orted, Hydra's proxy, torchrun or burnrun.
    let around = with(&SLURM, &[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "0")]);
    let torchrun = with(&PLAIN, &TORCHRUN);
    let burnrun = with(&OURS, &[("BURN_DDP_STORE", "launcher")]);
    for (inner, name) in
        [(&OPEN_MPI[..], "Open MPI"), (&MPICH, "MPICH"), (&torchrun, "torchrun"), (&burnrun, "burnrun")]
    {
        assert_eq!(env(&with(&around, inner)).launcher, name);
    }
    for outer in [&OPEN_MPI[..], &MPICH] {
        assert_eq!(env(&with(outer, &torchrun)).launcher, "torchrun");
        // burnrun removes mpirun's variables, so here mpirun runs inside a rank of burnrun.
        refused(&with(outer, &burnrun), &["BURN_DDP_RANK=3"]);
        refused(&with(outer, &OURS), &["BURN_DDP_RANK=3"]);
    }
    // `srun --mpi=pmi2` and `--mpi=pmix` set these besides Slurm's own variables.
    let pmi2 = [("PMI_RANK", "1"), ("PMI_SIZE", "3"), ("PMI_FD", "11"), ("PMI_JOBID", "12.0")];
    assert_eq!(env(&with(&SLURM, &pmi2)).launcher, "Slurm");
    assert_eq!(env(&with(&SLURM, &[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "slurm.pmix.12.0")])).launcher, "Slurm");
}

#[test]
fn what_any_launcher_may_be_given_besides() {
    let more = [
        ("BURN_DDP_SECRET_FILE", "/s"),
        ("BURN_DDP_TRUST_NETWORK", "1"),
        ("BURN_DDP_INTERFACE", "eth0"),
        ("BURN_DDP_BIND", "0.0.0.0"),
        ("BURN_DDP_ADVERTISE", "198.51.100.7"),
        ("BURN_DDP_MACHINE", "left"),
        ("BURN_DDP_EVENTS", "/e"),
        ("BURN_DDP_REPORT_DIR", "/r"),
    ];
    assert_eq!(read(&more).unwrap(), None, "they start no job");
    for set in [&OURS[..], &PLAIN, &OPEN_MPI, &MPICH, &SLURM] {
        let env = env(&with(set, &more));
        assert_eq!((env.secret_file, env.trust_network), (Some("/s".into()), true));
        assert_eq!((env.interface.as_deref(), env.events), (Some("eth0"), Some("/e".into())));
        assert_eq!((env.bind.as_deref(), env.advertise.as_deref()), (Some("0.0.0.0"), Some("198.51.100.7")));
        assert_eq!((env.report_dir, env.machine.as_deref()), (Some("/r".into()), Some("left")));
        refused(&with(set, &[("BURN_DDP_TRUST_NETWORK", "please")]), &["BURN_DDP_TRUST_NETWORK", "please"]);
    }
}

#[test]
fn a_child_given_the_variables_is_the_same_rank() {
    for store in ["launcher", "rank0", "above"] {
        for master in ["node1:4000", "[fe80::1]:4000", "local:mine"] {
            let set = [
                ("BURN_DDP_STORE", store),
                ("BURN_DDP_MASTER", master),
                ("BURN_DDP_LOCAL_RANK", "1"),
                ("BURN_DDP_LOCAL_WORLD_SIZE", "2"),
                ("BURN_DDP_RESTART_COUNT", "4"),
                ("BURN_DDP_SECRET_FILE", "/s"),
                ("BURN_DDP_INTERFACE", "eth0"),
                ("BURN_DDP_BIND", "::"),
                ("BURN_DDP_ADVERTISE", "node1"),
                ("BURN_DDP_MACHINE", "left"),
            ];
            let parent = env(&with(&OURS, &set));
            assert_eq!(parent.restart_count, 4);
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
