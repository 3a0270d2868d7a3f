//! Models whose parameters are hard to intercept. Each case is a function that every rank of a job runs, as a thread or
//! as a process, and that one rank runs alone with the whole batch: the trained values must be the same.

mod experts;
mod frozen;
mod gan;
mod lora;
mod losses;
mod nested_structures;
mod optimizers;
pub mod panicking_op;
mod panics;
mod records;
mod repeated_reads;
mod run;
mod shapes;
mod shared;
mod statistics;
mod two_models;
mod unused;

pub use run::{Outcome, PARTS, Run, adam, sgd};

/// Passes the list of all cases, by family, to the macro `$then`; a case that does not work yet has a reason.
#[macro_export]
macro_rules! awkward_cases {
    ($then:ident) => {
        $then! {
            shared: weight_read_twice, one_read_used_twice, embedding_tied_to_the_output, layer_in_two_places,
                cloned_params;
            repeated_reads: once, three_times, fifty_times, another_count_in_each_step, another_count_on_each_rank,
                lstm_of_1, lstm_of_3, lstm_of_50, gru;
            gan: detached_and_attached, discriminator_without_gradient, one_backward_for_both, wrapped_together;
            losses: one_backward_each, gradients_accumulator, sum_of_losses, two_backwards_over_one_read;
            panics: every_rank_goes_on, one_rank_goes_on;
            unused: everywhere, on_some_ranks, on_changing_ranks, by_all_but_one_rank, forward_without_backward,
                graph_dropped_half_way, graph_alive_beside, checkpointing;
            frozen: from_the_start, half_a_layer, unfrozen_midway, frozen_midway, thawing_layer_by_layer,
                everything_after_wrap;
            lora: adapters, adapters_unused_on_some_ranks, quantized_base;
            experts: routed_by_data, soft_mixture;
            shapes: scalars, empty_tensors, ten_thousand_tiny, larger_than_any_bucket, five_dimensions,
                embedding_with_few_touched_rows, convolution, in_f32, in_f16, in_bf16, in_mixed_dtypes;
            nested_structures: vectors, options, enums, nested, arrays_and_tuples;
            optimizers: sgd_plain, sgd_decay_and_nesterov, adam_ams, adam_w, ada_grad, adafactor, adan, lamb, lion,
                muon, rms_prop, learning_rates_per_group, optimizers_per_group, clipping_by_norm, clipping_by_value,
                lbfgs, lbfgs_with_unused;
            records: clone_goes_on, fork_goes_on, valid_and_train, moved_to_its_device, from_wrapped_to_wrapped,
                from_plain_to_wrapped, from_wrapped_to_plain, unwrap_and_wrap, optimizer_record, a_copy_is_kept_aside;
            statistics: batch_norm, batch_norm_of_rank_0;
            two_models: one_after_the_other, both_in_one_loss, with_accumulation, wrapped_twice;
        }
    };
}

/// Runs the case `family::name` on this rank; `None` if there is no such case.
pub fn run(name: &str, ddp: &burn_ddp::Ddp) -> Option<anyhow::Result<Outcome>> {
    run_with(name, || Run::new(ddp))
}

/// [`run`] with every parameter sharded that can be.
pub fn run_sharded(name: &str, ddp: &burn_ddp::Ddp) -> Option<anyhow::Result<Outcome>> {
    run_with(name, || Ok(Run::new(ddp)?.sharded()))
}

/// [`run_sharded`] with the whole batch on every rank, so that all ranks use the same parameters.
pub fn run_sharded_on_all_data(name: &str, ddp: &burn_ddp::Ddp) -> Option<anyhow::Result<Outcome>> {
    run_with(name, || Ok(Run::new(ddp)?.sharded().on_all_data()))
}

fn run_with(name: &str, run: impl Fn() -> anyhow::Result<Run>) -> Option<anyhow::Result<Outcome>> {
    macro_rules! find {
        ($($family:ident: $($case:ident $(= $why:literal)?),* $(,)?;)*) => {
            $($(if name == concat!(stringify!($family), "::", stringify!($case)) {
                // Optimizers that are to be checked are in `tests/sharding`.
                return Some(run().and_then(|run| run.ddp.clone().element_wise(|| $family::$case(&run))));
            })*)*
        };
    }
    awkward_cases!(find);
    None
}
