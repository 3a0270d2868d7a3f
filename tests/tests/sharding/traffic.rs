//! Bytes of a step, counted as they are passed to the engine.

use burn_ddp::Stats;
use burn_ddp_examples::text::gpt::GptConfig;
use burn_ddp_tests::four_models::train;

use super::*;

/// The communication counters of the fifth step on two ranks.
fn fifth_step(model: &str, config: &WrapConfig) -> Stats {
    let ranks = Ddp::spawn(2, |ddp| Ok(train(&ddp, model, "sgd", 5, config)?.last_step)).unwrap();
    assert_eq!((ranks[0].bytes, ranks[0].gathered), (ranks[1].bytes, ranks[1].gathered));
    ranks[0]
}

/// Each rank of N sends and receives (N − 1)/N of the bytes twice for an average, and once for a gather or a scatter.
/// The first layer's weight is not gathered again, as its input needs no gradient.
#[test]
fn a_step_moves_one_and_a_half_times_the_bytes() {
    // Bytes of the matrices, which are sharded, and of the vectors, which are not.
    let mlp = (4 * (6 * 16 + 16 * 16 + 16 * 3), 4 * (16 + 16 + 3));
    let tied = (4 * (11 * 6 + 6 * 6), 0);
    let lstm = (4 * (4 * (6 * 7 + 7 * 7) + 7 * 3), 4 * 3);
    for (model, (matrices, vectors), least) in [("mlp", mlp, 1.3), ("tied", tied, 0.95), ("lstm", lstm, 0.95)] {
        let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| fifth_step(model, &config));
        let flags = whole.bytes - (matrices + vectors);
        assert!(flags <= 64 && whole.gathered == 0, "{model}: {whole:?}");
        // The gradients of all parameters, and the flags of the buckets.
        assert!((0..=64).contains(&(parts.bytes as i64 - (matrices + vectors) as i64)), "{model}: {parts:?}");
        let averaged = 2 * whole.bytes;
        let moved = parts.gathered + matrices + 2 * (parts.bytes - matrices);
        // What is read several times is gathered once. A gradient with an odd number of rows is sent with one row more.
        let ratio = moved as f64 / averaged as f64;
        assert!((least..1.6).contains(&ratio), "{model}: {ratio}, {parts:?} and {whole:?}");
    }
}

#[test]
fn a_recurrent_layer_gathers_its_weights_once_a_step() {
    let parts = fifth_step("lstm", &sharded());
    // The head is gathered in forward and in backward.
    let lstm = 4 * 4 * (6 * 7 + 7 * 7);
    let head = 2 * 4 * (7 * 3);
    assert_eq!(parts.gathered, lstm + head);
}

/// For some input shapes Burn's `Linear` reshapes its weight; the graph then holds the whole weight until backward,
/// unless the device uses gradient checkpointing.
#[test]
fn a_transformer_with_gradient_checkpointing_gathers_each_matrix_twice() {
    let gathered = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff().gradient_checkpointing();
        let model = ddp.wrap_with(GptConfig::new(1, 12, 2, 7).init(&device), &sharded())?;
        ddp.optimizer(SgdConfig::new().init(), &model)?;
        let bytes = Tensor::<2, Int>::ones([4, 7], &device);
        ddp.backward(&model.loss(bytes.clone(), bytes), &model)?;
        Ok(ddp.telemetry().stats().gathered)
    });
    // Embeddings are not gathered in backward.
    let (embeddings, matrices) = (4 * 12 * (256 + 7), 4 * (4 * 12 * 12 + 2 * 12 * 48 + 12 * 256));
    assert_eq!(gathered.unwrap(), [embeddings + 2 * matrices; 2]);
}
