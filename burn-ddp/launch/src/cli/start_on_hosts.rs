//! Builds the job on several hosts from the options of this burnrun.

use std::ffi::OsString;
use std::path::PathBuf;

use burn_ddp_launch::hosts::{FanOut, Host};
use burn_ddp_launch::{LaunchError, Launcher};
use clap::ArgMatches;

use super::next_node_command;
use super::options::{Cli, StdioMode};

/// Arguments that are not passed on to the hosts, or with a value that differs per host.
const NOT_PASSED_ON: [&str; 14] = [
    "hostfile",
    "host",
    "export",
    "working_dir",
    "ssh",
    "remote_burnrun",
    "host_timeout",
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "secret_file",
    "program",
];

/// The job that `cli` describes, with the command line of each host.
pub(super) fn fan_out(matches: &ArgMatches, cli: &Cli) -> Result<FanOut, LaunchError> {
    let usage = |message: &str| LaunchError::Usage(message.into());
    if cli.nnodes > 1 || cli.node_rank.is_some() || cli.rdzv_endpoint.is_some() || cli.standalone {
        return Err(usage(
            "--hostfile and --host set the number of each machine: leave out --nnodes, --node-rank, --rdzv-endpoint \
             and --standalone",
        ));
    }
    if matches!(cli.stdio, StdioMode::FirstRankInherits) {
        return Err(usage("--stdio first-rank-inherits needs the terminal of the first host: start burnrun there"));
    }
    let options = &cli.hosts;
    let hosts = match &options.hostfile {
        Some(path) => Host::read(path)?,
        None => Host::list(options.host.iter().map(String::as_str))?,
    };
    let text = |word: &OsString| {
        let text = word.to_str().map(str::to_owned);
        text.ok_or_else(|| {
            LaunchError::Usage(format!(
                "{} is not UTF-8, as a program, its arguments and its directory on other hosts must be",
                word.display()
            ))
        })
    };
    let program = cli.program.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    let master = cli.master_addr.as_deref().unwrap_or(hosts[0].address()).to_owned();
    let words = hosts.iter().enumerate().map(|(node, host)| {
        let slots = host.slots.map(|slots| slots.to_string());
        let slots = slots.or_else(|| next_node_command::given(matches, "nproc_per_node")).unwrap_or_else(|| "1".into());
        let mut words = vec!["burnrun".to_owned()];
        words.extend(next_node_command::options(matches, &NOT_PASSED_ON));
        words.extend(["--nproc-per-node".into(), slots, "--nnodes".into(), hosts.len().to_string()]);
        if hosts.len() > 1 {
            let port = cli.master_port.to_string();
            words.extend(["--node-rank".into(), node.to_string(), "--master-addr".into(), master.clone()]);
            words.extend(["--master-port".into(), port]);
        }
        words.push("--".into());
        words.extend(program.iter().cloned());
        words
    });
    let words = words.collect();
    let here =
        || std::env::current_dir().map_err(|source| LaunchError::System { doing: "find this directory", source });
    let directory = options.working_dir.clone().map_or_else(here, Ok)?;
    text(&directory.clone().into_os_string())?;
    let ssh: Vec<OsString> = options.ssh.split_whitespace().map(OsString::from).collect();
    if ssh.is_empty() {
        return Err(usage("--ssh names no program"));
    }
    let secret_file = cli.secret_file.clone().or_else(|| std::env::var_os("BURN_DDP_SECRET_FILE").map(PathBuf::from));
    Ok(FanOut {
        env: exported(&options.export)?,
        hosts,
        ssh,
        burnrun: options.remote_burnrun.clone(),
        host_timeout: options.host_timeout,
        grace: cli.grace,
        preempt_signal: cli.preempt_signal,
        preempt_grace: cli.preempt_grace,
        preempt_exit_code: cli.preempt_exit_code,
        peer_timeout: cli.peer_timeout.unwrap_or(Launcher::DEFAULT_PEER_TIMEOUT),
        directory,
        secret_file,
        words,
    })
}

/// The variables that `wanted` names, and BURN_DDP_ENCRYPT: without it, the hosts would not encrypt.
fn exported(wanted: &[String]) -> Result<Vec<(String, String)>, LaunchError> {
    let mut env: Vec<(String, String)> = Vec::new();
    env.extend(std::env::var("BURN_DDP_ENCRYPT").ok().map(|value| ("BURN_DDP_ENCRYPT".into(), value)));
    for variable in wanted {
        env.push(match variable.split_once('=') {
            Some((name, value)) => (name.to_owned(), value.to_owned()),
            None => {
                let value = std::env::var(variable).map_err(|error| {
                    LaunchError::Usage(format!("-x {variable}: {error}; write -x {variable}=VALUE"))
                })?;
                (variable.clone(), value)
            }
        });
    }
    Ok(env)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, FromArgMatches};

    fn of(line: &str) -> Result<FanOut, LaunchError> {
        let matches = Cli::command().try_get_matches_from(line.split(' ')).unwrap();
        let cli = Cli::from_arg_matches(&matches).unwrap();
        fan_out(&matches, &cli)
    }

    #[test]
    fn each_host_gets_its_own_command_line() {
        let job = of("burnrun -H me@a:4,b -n auto --grace 5 -x A=1 --working-dir /w ./train -n 8").unwrap();
        let lines: Vec<_> = job.words.iter().map(|words| words.join(" ")).collect();
        let line = |ranks, node| {
            format!(
                "burnrun --grace 5 --nproc-per-node {ranks} --nnodes 2 --node-rank {node} --master-addr a \
                 --master-port 29500 -- ./train -n 8"
            )
        };
        assert_eq!(lines, [line("4", 0), line("auto", 1)]);
        assert_eq!((job.env, job.directory), (vec![("A".into(), "1".into())], "/w".into()));
    }

    #[test]
    fn one_host_meets_no_other() {
        assert_eq!(
            of("burnrun -H a ./train").unwrap().words,
            [["burnrun", "--nproc-per-node", "1", "--nnodes", "1", "--", "./train"]]
        );
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for (line, part) in [
            ("burnrun -H a --nnodes 2 --master-addr a ./train", "leave out"),
            ("burnrun -H a --stdio first-rank-inherits ./train", "terminal"),
            ("burnrun -H a -x BURN_DDP_NO_SUCH_VARIABLE ./train", "write -x"),
            ("burnrun -H a,a ./train", "twice"),
            ("burnrun --hostfile /no/such/file ./train", "the hostfile /no/such/file cannot be used: "),
        ] {
            let error = of(line).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
