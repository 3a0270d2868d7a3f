//! The suite as tests, for this crate's engines and for those of other crates: these include `topics.rs` and call
//! `conformance!` themselves.

/// The suite as tests of the surrounding module. `$make` is a [`harness::Make`].
macro_rules! conformance {
    ($make:expr) => {
        crate::conformance!($make; but the means of unequal weights);
        crate::conformance!($make; weighted_means:
            unequal_weights_are_exact,
            weight_zero_means_absent,
            weights_that_differ_are_an_error_on_all_ranks,
            parts_of_a_weighted_mean_are_those_of_the_whole,
        );
        crate::conformance!($make; leaves:
            means_of_leaves_do_not_depend_on_the_ranks,
            leaves_without_weight_are_refused_on_all_ranks_alike,
        );
    };
    // For engines that scale before they add.
    ($make:expr; but the means of unequal weights) => {
        crate::conformance!($make; numerics:
            all_reduce_of_every_dtype_and_op,
            all_reduce_of_every_length,
            reduce_scatter_of_every_dtype_and_op,
            all_gather_of_every_dtype,
            broadcast_from_every_root,
            half_precision_rounds_once,
            nan_wins_min_and_max,
            integers_wrap,
            equal_weights_are_the_mean,
            large_messages_both_ways,
        );
        crate::conformance!($make; divided:
            parts_of_every_division_are_gathered,
            parts_are_gathered_in_shared_buffers,
            parts_of_every_division_are_reduced,
            divisions_that_differ_are_an_error_on_all_ranks,
            divisions_that_do_not_fit_are_refused_by_all,
        );
        crate::conformance!($make; agreement:
            each_difference_is_a_mismatch_with_both_call_sites,
            a_mismatch_names_the_odd_rank_in_a_larger_world,
            tensors_of_other_shapes_are_a_mismatch_that_shows_both,
            a_missing_call_is_a_mismatch,
            swapped_order_is_a_mismatch,
            call_sites_may_differ,
            what_all_ranks_refuse_leaves_the_group_usable,
            what_one_rank_refuses_is_noticed_at_its_next_call,
            bad_weights_are_refused_by_all,
        );
        crate::conformance!($make; sequence:
            mixed_collectives_back_to_back,
            ten_thousand_small_collectives,
            groups_are_independent,
            threads_of_a_rank_take_turns,
            leaving_after_the_last_collective_is_fine,
            a_world_knows_its_ranks,
        );
        crate::conformance!($make; failure:
            a_panic_ends_pending_calls_everywhere,
            giving_up_ends_pending_calls_everywhere,
            giving_up_ends_own_calls_too,
            a_rank_that_never_comes_is_named_after_the_deadline,
            a_rank_that_never_makes_the_group_is_named,
            early_leavers_are_named,
            leaving_is_no_error_for_those_who_need_nothing,
            a_closed_group_is_named,
            the_first_cause_stays_for_all_groups,
            errors_name_the_call,
        );
        crate::conformance!($make; objects:
            objects_of_different_sizes,
            large_objects,
            objects_that_cannot_travel_are_refused_by_all,
            objects_of_different_types_are_an_error,
        );
        crate::conformance!($make; rooted:
            reduce_of_every_dtype_op_and_root,
            reduce_is_all_reduce_for_one,
            gather_to_every_root,
            scatter_from_every_root,
            all_to_all_of_every_dtype,
            what_cannot_be_is_refused_by_all,
            a_root_without_rows_is_noticed,
            each_difference_is_a_mismatch,
            a_failure_ends_each_of_them,
        );
        crate::conformance!($make; send_recv:
            what_is_sent_arrives,
            around_a_ring,
            halves_fit_to_whole_ones,
            swaps_of_different_lengths,
            transfers_and_collectives_are_in_one_order,
            what_does_not_fit_is_a_mismatch,
            ranks_that_cannot_be_are_refused,
            a_rank_that_never_receives_is_named,
            a_failure_ends_transfers,
            a_peer_that_left_is_named,
        );
        crate::conformance!($make; splits:
            members_are_ordered_by_key,
            ids_are_unique_and_agreed,
            who_wants_none_gets_none,
            all_collectives_in_a_part,
            parts_and_parents_at_the_same_time,
            siblings_do_not_wait_for_each_other,
            parts_of_parts,
            the_parent_may_go_first,
            a_mismatch_in_a_part_names_ranks_of_the_world,
            a_missing_member_is_named_by_its_rank_in_the_world,
            a_failure_anywhere_ends_all_parts,
            a_failure_outside_wakes_those_who_wait,
            an_early_leaver_of_a_part_is_named,
            a_split_is_compared,
            a_part_refuses_ranks_it_does_not_have,
        );
        crate::conformance!($make; async_collectives:
            each_yields_what_the_blocking_one_does,
            the_order_is_that_of_the_program,
            many_at_once,
            a_dropped_handle_is_still_done,
            a_handle_outlives_its_group,
            errors_come_out_of_wait,
            the_end_of_the_world_ends_what_is_pending,
            a_panic_with_pending_calls_is_told,
            a_missing_rank_is_named,
            groups_have_their_own,
            several_threads_may_start_and_wait,
        );
        crate::conformance!($make; out_of_step:
            stopping_before_a_peer_gets_there,
            stopping_after_a_peer_passed,
            stopping_ends_pending_collectives,
            stopping_together_is_fine,
            a_later_epoch_is_fine,
        );
    };
    ($make:expr; $topic:ident: $($case:ident),* $(,)?) => {
        mod $topic {
            $(
                #[test]
                fn $case() {
                    crate::$topic::$case($make);
                }
            )*
        }
    };
}
pub(crate) use conformance;
