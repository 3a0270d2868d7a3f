//! `--json` of the commands: the rows that machines read.
#![allow(missing_docs)]

use std::process::Command;

use serde_json::Value;

fn rows(words: &str) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_burn-ddp-bench")).args(words.split_whitespace()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{words}: {out}{err}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_all_reduce_has_times_and_ratios_to_the_limits() {
    let rows = rows(
        "all-reduce --engine tcp,threads --buffers slice,arena --world 2 --sizes 4,262144 --dtype f32 --json \
         --peers memcpy,cacheline,pump --rounds 2 --round-ms 1",
    );
    assert_eq!(rows.len(), 2 * 2 * 2);
    for row in &rows {
        assert_eq!((&row["bench"], &row["world"], &row["dtype"]), (&"all-reduce".into(), &2.into(), &"f32".into()));
        for number in ["median_us", "p95_us", "p99_us", "algbw_gbps"] {
            assert!(row[number].as_f64().unwrap() > 0.0, "{number}: {row}");
        }
        let limit = if row["bytes"] == 4 { "cacheline" } else { "memcpy" };
        assert!(row["times_of_limit"][limit].is_f64() && row["times_of_limit"]["pump"].is_f64(), "{row}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn all_reduces_and_barriers_are_measured_beside_neighbours() {
    let rows =
        rows("all-reduce --engine tcp --world 2 --sizes 8,0 --neighbours 1 --rounds 1 --round-ms 1 --alone --json");
    let of = |row: &Value| (row["bytes"].as_u64().unwrap(), row["neighbours"].as_u64().unwrap());
    assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), [(8, 0), (8, 1), (0, 0), (0, 1)]);
    for row in &rows {
        assert!(row["median_us"].as_f64().unwrap() > 0.0 && row["of_idle"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn more_ranks_than_cores_have_a_floor() {
    let rows = rows(
        "all-reduce --oversubscribe --engine tcp --buffers slice --world 4 --sizes 65536 --late-ms 2 --peers floor \
         --rounds 1 --round-ms 1 --json",
    );
    assert!(rows[0]["times_of_limit"]["floor/slice"].is_f64(), "{}", rows[0]);
    assert_eq!(rows[1]["bench"], "oversubscribe-wait");
}

#[test]
fn arrival_order_does_not_change_bits() {
    for row in rows("determinism --engine threads,tcp --worlds 3 --runs 2 --pause-us 50 --json") {
        assert_eq!((&row["different"], &row["results"]), (&0.into(), &(2 * 2 * 2 * 3).into()), "{row}");
    }
}

#[test]
fn ranks_meet_and_part() {
    let rows = rows("rendezvous --engine tcp --worlds 3 --rounds 2 --settle-ms 10 --alone --json");
    assert!(rows[0]["median_us"].as_f64().unwrap() > 0.0);
}

#[test]
fn halves_and_worlds() {
    let dtypes = rows(
        "all-reduce --engine threads --dtype f32,bf16,f16,f64 --elements 1000 --rounds 1 --round-ms 1 --alone --json",
    );
    assert_eq!(dtypes.len(), 4);
    for row in &dtypes {
        assert_eq!(row["elements"], 1000, "{row}");
        assert!(row["of_first"].as_f64().unwrap() > 0.0, "{row}");
    }
    let worlds =
        rows("all-reduce --scaling --engine tcp --world 2,3 --sizes 8192 --rounds 1 --round-ms 1 --alone --json");
    assert_eq!(worlds[1]["world"], 3);
    // The clock of processor time may not tick in a turn of a millisecond; then there is no multiple of it.
    let ticked = worlds[0]["cpu_ns_per_rank_byte"].as_f64().unwrap() > 0.0;
    assert_eq!(worlds[1]["of_smallest_world"].is_f64(), ticked, "{worlds:?}");
    assert!(worlds[1]["cpu_ns_per_rank_byte"].is_f64(), "{}", worlds[1]);
}

#[cfg(feature = "burn")]
#[test]
fn steps_have_what_data_parallelism_adds() {
    let rows = rows("step --model tensors --bytes 65536 --counts 4,8 --rounds 2 --round-ms 1 --alone --json");
    assert_eq!(rows.len(), 2);
    for row in &rows {
        assert_eq!(
            (&row["bench"], &row["who"], &row["model"]),
            (&"step".into(), &"burn-ddp/shm".into(), &"tensors".into())
        );
        for number in ["median_us", "base_us", "added_us", "beyond_nodes_us", "marginal_ns_per_tensor"] {
            assert!(row[number].is_f64(), "{number}: {row}");
        }
    }
}
