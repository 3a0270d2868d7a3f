//! Hashes of trained models: `rank bits MODEL OPTIMIZER STEPS [sharded]`.

use burn_ddp::prelude::*;
use burn_ddp_tests::four_models;

fn arg(n: usize) -> String {
    std::env::args().nth(n).unwrap_or_default()
}

/// Prints the hash of the trained model.
pub(crate) fn run(ddp: &Ddp) -> anyhow::Result<()> {
    let config = match arg(5).as_str() {
        "sharded" => WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1),
        _ => WrapConfig::new(),
    };
    println!("{}", four_models::train(ddp, &arg(2), &arg(3), arg(4).parse()?, &config)?.hash);
    Ok(())
}
