//! Measures burn-ddp next to its peers and to the hardware's limits: see README.md, or `burn-ddp-bench --help`.
#![forbid(unsafe_code)]

fn main() -> anyhow::Result<()> {
    burn_ddp_bench::main()
}
