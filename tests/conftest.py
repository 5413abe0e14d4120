"""Environment of every test: the CPU, the op cache, no downloads; gpu and browser tests only where there is a GPU, a browser.

DeepSpeed takes the CPU on a machine with a GPU, too: the tests speak of what is true there (one memory, one rank per process
over gloo, kernels without atomics). A gpu test that needs an engine starts a process of its own with DS_ACCELERATOR=cuda.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator

import browser
import pytest
import torch
import two_hosts

from ds_vertical.compat.ops import cache

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available asks the driver, and sets CUDA up in no process
HAS_GPU = torch.cuda.is_available()
ABSENT = [marker for marker, present in (("gpu", HAS_GPU), ("browser", browser.find() is not None)) if not present]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_VERTICAL_LIMITS", "")  # what a null means must not depend on what was measured here
# before anything imports DeepSpeed, and inherited by the processes that tests start
cache.set_environment()


# The longest modules, in this order: idle workers take the ends of others' queues, so what stands there should be short, and no
# fixture of a minute should be made twice. One worker begins with all of these, and so forks them all from one process.
FIRST = (
    *("test_ranks.py", "test_levels_engine.py", "test_in_flight.py", "test_levels.py", "test_reductions.py"),
    *("test_uneven.py", "test_acco.py", "test_uneven_refusals.py", "test_device_full.py", "test_late_training.py"),
    *("test_late_ranks.py", "test_failing_ranks.py", "test_late_device.py"),
    *("test_two_hosts.py", "test_scripts.py", "test_patch.py", "test_stock_calls.py", "test_links.py"),
)
# Members of matrices that take long and resemble others which stay in the fast suite.
SLOW_MEMBERS = {
    "test_activations.py::test_models_that_hold_what_passes_between_layers[held-by-others]",
    "test_activations.py::test_the_same_bits_on_ssd[half-snake]",
    "test_activations.py::test_the_same_bits_on_ssd[oracle-two-blocks]",
    "test_adapter_budget.py::test_memory_is_that_of_adapters_and_a_few_layers[64-True]",
    "test_adapter_budget.py::test_the_disk_needs_the_adapters_state_alone[64-402653184]",
    "test_ahead.py::test_destroy_completes_what_is_ahead[1.0]",
    "test_ahead.py::test_whatever_comes_between_two_steps_is_as_if_nothing_were_ahead[0.0-evaluate-LateReads]",
    "test_ahead.py::test_whatever_comes_between_two_steps_is_as_if_nothing_were_ahead[0.0-write_through_the_swapper-SoonReads]",
    "test_ahead.py::test_whatever_comes_between_two_steps_is_as_if_nothing_were_ahead[1.0-evaluate-LateReads]",
    "test_budget.py::test_the_budget_is_what_is_allocated[some in host memory]",
    "test_budget.py::test_the_budget_is_what_is_allocated[state shared whole]",
    "test_collective_replay.py::test_a_half_that_fails_anywhere_leaves_nobody_alone[standing0-False]",
    "test_collective_replay.py::test_a_half_that_fails_anywhere_leaves_nobody_alone[standing1-True]",
    "test_collective_replay.py::test_a_step_that_fails_anywhere_leaves_nobody_alone[horizontal-None-True]",
    "test_collective_replay.py::test_a_step_that_fails_anywhere_leaves_nobody_alone[vertical-0.0-True]",
    "test_collective_replay.py::test_a_step_that_fails_anywhere_leaves_nobody_alone[vertical-1.0-False]",
    "test_collective_replay.py::test_a_step_that_fails_anywhere_leaves_nobody_alone[vertical-None-False]",
    "test_collective_replay.py::test_where_the_others_leave_a_step_the_one_that_failed_leaves_it_too[False-False]",
    "test_collective_replay.py::test_where_the_others_leave_a_step_the_one_that_failed_leaves_it_too[True-True]",
    "test_compiled.py::test_blocks_that_are_compiled_between_two_steps_give_stocks_bits[aot_eager]",
    "test_compiled.py::test_whatever_way_blocks_are_compiled[Forwards]",
    "test_compiled.py::test_whatever_way_blocks_are_compiled[Function]",
    "test_compressed_cuts.py::test_an_interrupt_while_masters_are_made_whole[whole-6]",
    "test_compressed_cuts.py::test_two_interrupts_leave_every_master_as_it_was[a save]",
    "test_compressed_cuts.py::test_two_interrupts_leave_every_master_as_it_was[a user's write]",
    "test_compression.py::test_an_early_step_waits_for_what_its_buffer_still_writes[redo then skip]",
    "test_compression.py::test_an_engine_is_destroyed_with_compressed_masters[between steps]",
    "test_compression.py::test_bits_are_stocks[0.0-0.3-None]",
    "test_contention.py::test_a_script_that_imports_torch_first_waits_asleep_beside_a_busy_process",
    "test_contention.py::test_cpu_adam_alone_waits_asleep_beside_a_busy_process[alone]",
    "test_crash.py::test_a_process_killed_at_any_point_of_a_save_leaves_a_checkpoint_that_loads[again]",
    "test_cut_anywhere.py::test_a_call_between_steps_that_is_cut_anywhere[evaluate]",
    "test_cut_anywhere.py::test_a_step_that_is_cut_anywhere[delayed]",
    "test_cut_anywhere.py::test_a_step_that_is_cut_anywhere[early]",
    "test_cut_anywhere.py::test_an_interrupt_while_something_is_given_up[forwards put back]",
    "test_delay.py::test_a_skipped_step_takes_early_ones_back_and_loses_none_that_is_due[False-0.0]",
    "test_delay.py::test_a_skipped_step_takes_early_ones_back_and_loses_none_that_is_due[False-None]",
    "test_delay.py::test_destroy_completes_the_writes_under_way_before_their_memory_goes[1.0]",
    "test_delay.py::test_early_steps_in_every_tier[0.3-{'max_in_cpu': 1000000}]",
    "test_delay.py::test_early_steps_in_every_tier[0.3-{'optimizer': 'cpu'}]",
    "test_delay.py::test_early_steps_in_every_tier[0.3-{'persistence': None}]",
    "test_delay.py::test_every_delay_is_bit_identical_to_stock[bf16-False-0.3]",
    "test_delay.py::test_every_delay_is_bit_identical_to_stock[fp32-False-0.0]",
    "test_delay.py::test_every_delay_is_bit_identical_to_stock[fp32-False-0.3]",
    "test_delay.py::test_every_delay_is_bit_identical_to_stock[fp32-False-None]",
    "test_delay.py::test_every_delay_is_bit_identical_to_stock[fp32-True-0.0]",
    "test_delay.py::test_every_delay_is_bit_identical_to_stock[fp32-True-1.0]",
    "test_delay.py::test_parameters_written_late_are_read_after_that[False-0.0]",
    "test_destroyed.py::test_a_destroyed_engine_leaves_memory[the three calls-early]",
    "test_durability.py::test_each_name_comes_after_what_it_names[cpu-True]",
    "test_efficiency.py::test_a_vertical_engine_keeps_an_account_of_what_it_ran[0.05]",
    "test_efficiency.py::test_the_table_has_what_activations_gradients_and_kept_values_move_on_ssd[0.0-keep1-None]",
    "test_engine_api.py::test_forms_of_micro_batches[dict]",
    "test_engine_api.py::test_forms_of_micro_batches[list]",
    "test_engine_api.py::test_forms_of_micro_batches[tensor]",
    "test_engine_api.py::test_forms_of_the_configuration[dict]",
    "test_engine_api.py::test_no_micro_batch_left_touches_nothing[stock]",
    "test_engine_api.py::test_stocks_own_calls_out_of_turn_are_refused[step-args1]",
    "test_engine_api.py::test_without_the_section_the_engine_is_stocks[disabled]",
    "test_engine_state.py::test_an_exception_leaves_everything_as_it_was[backward]",
    "test_engine_state.py::test_an_exception_leaves_everything_as_it_was[glue]",
    "test_engine_state.py::test_an_exception_leaves_everything_as_it_was[loss_fn]",
    "test_engine_state.py::test_an_exception_leaves_everything_as_it_was[prefix]",
    "test_engine_state.py::test_an_exception_leaves_everything_as_it_was[suffix]",
    "test_engine_state.py::test_autocast[loss_fn]",
    "test_engine_state.py::test_autocast[outside]",
    "test_families.py::test_family_is_bit_identical_to_stock[deepseek_v3]",
    "test_families.py::test_family_is_bit_identical_to_stock[gemma4_text]",
    "test_families.py::test_family_is_bit_identical_to_stock[t5]",
    "test_families.py::test_frozen_parameters[a layer in the middle]",
    "test_families.py::test_models_of_ones_own_are_bit_identical_to_stock[sequential]",
    "test_families.py::test_stock_on_ssd_is_wrong_where_the_table_says_so[mixtral]",
    "test_families.py::test_tied_weights_within_the_tolerance[gpt2-0.001]",
    "test_flush.py::test_a_process_may_end_with_steps_left_and_reads_under_way[all delayed, on SSD-]",
    "test_flush.py::test_a_route_reads_what_stock_reads[full_moments, all delayed, in host memory]",
    "test_flush.py::test_a_route_reads_what_stock_reads[full_moments, all delayed, reads late]",
    "test_flush.py::test_a_route_reads_what_stock_reads[full_moments, all early, on SSD]",
    "test_flush.py::test_a_route_reads_what_stock_reads[gathered, all delayed, in host memory]",
    "test_flush.py::test_a_route_reads_what_stock_reads[gathered, all delayed, reads late]",
    "test_flush.py::test_a_route_reads_what_stock_reads[local_moments, half early, on SSD]",
    "test_flush.py::test_a_route_reads_what_stock_reads[module_call, half early, on SSD]",
    "test_flush.py::test_a_route_reads_what_stock_reads[safe_get_full_grad, all delayed, in host memory]",
    "test_flush.py::test_a_route_reads_what_stock_reads[safe_get_full_grad, all delayed, on SSD]",
    "test_flush.py::test_a_route_reads_what_stock_reads[safe_get_full_grad, all delayed, reads late]",
    "test_flush.py::test_a_route_reads_what_stock_reads[safe_get_full_grad, all early, on SSD]",
    "test_flush.py::test_a_route_reads_what_stock_reads[safe_get_local_grad, half early, on SSD]",
    "test_flush.py::test_a_route_reads_what_stock_reads[state_dict, half early, on SSD]",
    "test_flush.py::test_destroying_the_engine_takes_the_steps_that_were_left[all delayed, on SSD]",
    "test_flush.py::test_state_cannot_be_set_within_a_step[write_full_master]",
    "test_flush.py::test_state_cannot_be_set_within_a_step[write_local_moments]",
    "test_flush.py::test_training_goes_on_from_what_was_written[load_state_dict, half early, on SSD]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_full_moments, all delayed, in host memory]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_full_moments, all delayed, on SSD]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_full_moments, all delayed, reads late]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_full_moments, all early, on SSD]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_gathered, all delayed, in host memory]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_gathered, all delayed, on SSD]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_gathered, all delayed, reads late]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_gathered, all early, on SSD]",
    "test_flush.py::test_training_goes_on_from_what_was_written[write_local_moments, half early, on SSD]",
    "test_foreign_files.py::test_nothing_outside_is_deleted_whenever_a_neighbour_acts[aside-link_rank0]",
    "test_foreign_files.py::test_nothing_outside_is_deleted_whenever_a_neighbour_acts[dead-link_run0]",
    "test_forward_state.py::test_evaluation_sees_its_own_state[BufferThroughParent]",
    "test_forward_state.py::test_evaluation_sees_its_own_state[GlobalList]",
    "test_forward_state.py::test_evaluation_sees_its_own_state[MaskOnBlocks]",
    "test_forward_state.py::test_evaluation_sees_its_own_state[SharedUserDict]",
    "test_forward_state.py::test_evaluation_sees_its_own_state[Statistics]",
    "test_forward_state.py::test_parameters_frozen_before_the_first_step_are_refused_by_name[horizontal]",
    "test_forward_state.py::test_training_has_stocks_bits[MaskOnBlocks]",
    "test_forward_state.py::test_training_has_stocks_bits[PythonRandom]",
    "test_forward_state.py::test_what_a_hook_keeps_is_its_micro_batchs[attribute-False]",
    "test_forward_state.py::test_what_a_hook_keeps_is_its_micro_batchs[attribute-True]",
    "test_forward_state.py::test_what_a_hook_keeps_is_its_micro_batchs[dict-True]",
    "test_forward_state.py::test_what_a_hook_keeps_is_its_micro_batchs[list-False]",
    "test_forward_state.py::test_what_a_hook_keeps_is_its_micro_batchs[list-True]",
    "test_fp16.py::test_overflows_and_all_bits_are_stocks[0.0-section0]",
    "test_fp16.py::test_overflows_and_all_bits_are_stocks[1.0-section1]",
    "test_fp16.py::test_overflows_and_all_bits_are_stocks[1.0-section5]",
    "test_frozen_base.py::test_a_frozen_base_costs_no_writes_and_no_optimizer_files[8-False]",
    "test_gauge.py::test_a_stopped_process_goes_on_when_the_one_that_measures_is_killed",
    "test_gauge.py::test_the_process_that_asks_stands_still_meanwhile",
    "test_gpu_check.py::test_a_command_is_asked_once_to_end_ahead_of_the_stages_limit[plain]",
    "test_gpu_engine.py::test_bits_are_stocks_in_a_process_of_its_own_on_the_cpu",
    "test_gpu_engine.py::test_gradients_of_a_busy_device_are_whole_for_another_thread[cpu]",
    "test_gradient_sums.py::test_sums_that_leave_one_by_one_have_stocks_bits[fp32-1-0.0]",
    "test_gradient_tiers.py::test_bits_are_stocks_wherever_gradients_wait[fp32-0.0-0.3-None-0.0]",
    "test_gradient_tiers.py::test_bits_are_stocks_wherever_gradients_wait[fp32-0.0-1.0-None-0.5]",
    "test_gradient_tiers.py::test_bits_are_stocks_wherever_gradients_wait[fp32-0.05-1.0-False-0.0]",
    "test_gradient_tiers.py::test_bits_are_stocks_wherever_gradients_wait[fp32-1000000.0-0.3-True-0.0]",
    "test_gradient_tiers.py::test_memory_is_made_once[0.0-0.5-None-False]",
    "test_gradient_tiers.py::test_memory_is_made_once[0.0-0.5-None-True]",
    "test_gradient_tiers.py::test_memory_is_made_once[0.05-1.0-False-True]",
    "test_gradient_tiers.py::test_memory_is_made_once[1000000.0-0.5-True-False]",
    "test_gradient_tiers.py::test_memory_is_made_once[1000000.0-0.5-True-True]",
    "test_gradient_tiers.py::test_on_ssd_a_few_layers_gradients_are_in_memory[0.05-0.5-True]",
    "test_host_beats.py::test_a_host_whose_ranks_are_stopped_is_not_lost_for_a_while[0]",
    "test_interrupts.py::test_a_checkpoint_loaded_while_a_step_is_due_is_the_checkpoint[0]",
    "test_interrupts.py::test_an_interrupt_while_a_step_is_made_to_count_tears_the_state_loudly[parameters]",
    "test_io.py::test_a_parameter_file_of_the_wrong_size_is_refused_with_the_numbers[long]",
    "test_io.py::test_bytes_per_step_of_every_regime[0.0-0.0-10]",
    "test_io.py::test_bytes_per_step_of_every_regime[0.0-1.0-0]",
    "test_io.py::test_bytes_per_step_of_every_regime[0.5-0.0-6]",
    "test_io.py::test_gradients_go_to_ssd_once_and_come_back_once[the delayed wait]",
    "test_io.py::test_horizontal_order_reads_more_with_every_micro_batch",
    "test_io.py::test_initialize_preallocates_every_file[0.0-False-2]",
    "test_io.py::test_initialize_preallocates_every_file[0.5-None-2]",
    "test_io.py::test_two_jobs_on_one_nvme_path_finish_as_if_alone_and_a_killed_ones_folder_goes[True]",
    "test_kept.py::test_stocks_bits_with_kept_values_on_ssd[products]",
    "test_kept_tiers.py::test_an_interrupt_of_the_choice_leaves_it_to_the_next_step_with_stocks_bits[_take]",
    "test_kept_tiers.py::test_an_interrupt_of_the_choice_leaves_it_to_the_next_step_with_stocks_bits[measured_step]",
    "test_late_checks.py::test_late_state_that_only_stocks_order_gets_right_is_found[FromOneOn-None]",
    "test_late_checks.py::test_late_state_that_only_stocks_order_gets_right_is_found[FromOneOn-True]",
    "test_late_checks.py::test_late_state_that_only_stocks_order_gets_right_is_found[LateCountUp-None]",
    "test_late_checks.py::test_state_of_evaluations_that_only_stocks_order_gets_right_is_found[LateEvalCountUp]",
    "test_late_state.py::test_it_has_stocks_bits[ClearedFirst]",
    "test_late_state.py::test_it_has_stocks_bits[Collecting]",
    "test_late_state.py::test_it_has_stocks_bits[CountedTwice]",
    "test_late_state.py::test_it_has_stocks_bits[GivenAway]",
    "test_late_state.py::test_it_has_stocks_bits[InPlace]",
    "test_late_state.py::test_it_has_stocks_bits[PutOnByTheForward]",
    "test_late_state.py::test_it_has_stocks_bits[WithLoss]",
    "test_late_state.py::test_what_is_changed_after_four_steps_is_followed[give_counter]",
    "test_late_state.py::test_what_is_changed_after_four_steps_is_followed[give_notes]",
    "test_late_state.py::test_what_is_changed_after_four_steps_is_followed[set_defaults]",
    "test_late_state.py::test_what_is_changed_after_four_steps_is_followed[set_of_class]",
    "test_links.py::test_ranks_of_one_host_have_links_of_their_own",
    "test_locked_memory.py::test_a_limit_below_what_deepspeed_locks_is_refused_and_the_one_that_is_advised_suffices",
    "test_matrix.py::test_every_tier_is_bit_identical_to_stock[cpu-cpu-threshold_default-1]",
    "test_matrix.py::test_every_tier_is_bit_identical_to_stock[none-cpu-threshold0-1]",
    "test_matrix.py::test_every_tier_is_bit_identical_to_stock[nvme-cpu-threshold_default-1]",
    "test_matrix.py::test_every_tier_is_bit_identical_to_stock[nvme_part_in_cpu-nvme-threshold_default-3]",
    "test_misuse.py::test_a_script_without_launcher_is_told_of_it",
    "test_node_local_saves.py::test_a_host_that_vanishes_in_a_save_ends_the_other_and_leaves_the_checkpoint_before_it",
    "test_node_local_saves.py::test_a_link_that_drops_and_returns_is_used_again",
    "test_nonfinite.py::test_a_skipped_step_changes_nothing[fp32-first-1.0]",
    "test_nonfinite.py::test_stepped_in_place_a_step_that_is_not_finite_tears_the_state[bf16-last]",
    "test_nonfinite.py::test_stepped_in_place_a_step_that_is_not_finite_tears_the_state[fp32-first]",
    "test_nonfinite.py::test_steps_in_place_have_stocks_bits[fp32-None]",
    "test_nonfinite.py::test_stopping_costs_no_second_generation[0.0-skip-2]",
    "test_nonfinite.py::test_stopping_costs_no_second_generation[1.0-stop-2]",
    "test_nonfinite.py::test_where_nothing_was_stepped_the_state_is_whole[fp32-first-0.0-{'optimizer_delay': 1}]",
    "test_nonfinite.py::test_where_nothing_was_stepped_the_state_is_whole[fp32-first-1.0-{}]",
    "test_nonfinite.py::test_where_nothing_was_stepped_the_state_is_whole[fp32-last-0.0-{'optimizer_delay': 1}]",
    "test_nonfinite.py::test_where_nothing_was_stepped_the_state_is_whole[fp32-last-1.0-{'optimizer_speculation': True}]",
    "test_nonfinite.py::test_where_nothing_was_stepped_the_state_is_whole[fp32-last-1.0-{}]",
    "test_numerics.py::test_a_non_finite_step_is_skipped_whole[fp32-0.0]",
    "test_numerics.py::test_a_non_finite_step_is_skipped_whole[fp32-1.0]",
    "test_numerics.py::test_accumulation_and_communication_dtypes[bf16-{'communication_data_type': 'fp32'}]",
    "test_numerics.py::test_accumulation_and_communication_dtypes[fp32-{'communication_data_type': 'bf16'}]",
    "test_numerics.py::test_accumulation_and_communication_dtypes[fp32-{'communication_data_type': 'fp16'}]",
    "test_numerics.py::test_accumulation_and_communication_dtypes[fp32-{'data_types': {}}]",
    "test_numerics.py::test_odd_layers_on_ssd_where_stock_is_right[fp32]",
    "test_numerics.py::test_odd_sizes_in_several_stock_sub_groups[fp32-300001]",
    "test_numerics.py::test_odd_sizes_in_several_stock_sub_groups[fp32-600001]",
    "test_numerics.py::test_parameters_on_ssd_may_count_as_persistent[0.05]",
    "test_numerics.py::test_parameters_that_several_pieces_of_glue_share[SharedBias]",
    "test_numerics.py::test_parameters_that_several_pieces_of_glue_share[SharedLinear]",
    "test_numerics.py::test_snake_changes_the_last_bits_at_most[2]",
    "test_numerics.py::test_tensors_that_go_around_layers[LongSkips]",
    "test_numerics.py::test_the_norm_of_a_gradient_is_stocks_without_an_fp64_copy_of_it[2]",
    "test_numerics.py::test_the_norm_of_a_gradient_is_stocks_without_an_fp64_copy_of_it[3]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'blocks_per_layer': 2}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'blocks_per_layer': 3}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'blocks_per_layer': 4}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'order': 'horizontal', 'overlap': False}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'order': 'horizontal', 'prefetch_layers': 3}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'order': 'horizontal'}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'overlap': False, 'prefetch_layers': 3}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'overlap': False}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'prefetch_layers': 0}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'prefetch_layers': 1}]",
    "test_numerics.py::test_timing_and_order_are_bit_identical_to_stock[{'prefetch_layers': 3}]",
    "test_one_call.py::test_a_call_within_another_is_refused_and_that_goes_on[in_data-train_batch]",
    "test_one_call.py::test_a_call_within_another_is_refused_and_that_goes_on[in_hook-eval_batch]",
    "test_one_call.py::test_a_call_within_another_is_refused_and_that_goes_on[in_loss-eval_batch]",
    "test_openmp_wait.py::test_the_thread_that_trains_keeps_its_cores_and_others_take_one[False]",
    "test_overlap.py::test_random_settings_in_memory",
    "test_overlap.py::test_without_overlap_no_event_finds_anything_in_flight[0.0]",
    "test_own_backward.py::test_a_backward_of_loss_fn_is_refused_by_name[freed-true]",
    "test_own_backward.py::test_a_backward_of_loss_fn_is_refused_by_name[head-true]",
    "test_own_backward.py::test_a_backward_of_loss_fn_is_refused_by_name[kept-true]",
    "test_own_backward.py::test_a_backward_of_the_models_forward_is_refused_by_name[BackwardAheadOfTheBlocks-false]",
    "test_own_backward.py::test_a_backward_of_the_models_forward_is_refused_by_name[BackwardAheadOfTheBlocks-true]",
    "test_own_backward.py::test_a_backward_of_the_models_forward_is_refused_by_name[BackwardBehindABlock-true]",
    "test_own_backward.py::test_a_backward_of_the_models_forward_is_refused_by_name[FreeingAheadOfTheBlocks-true]",
    "test_own_backward.py::test_a_backward_of_the_models_forward_is_refused_by_name[FreeingBehindABlock-false]",
    "test_own_backward.py::test_a_backward_of_the_models_forward_is_refused_by_name[FreeingBehindABlock-true]",
    "test_own_backward.py::test_checkpoints_round_blocks_are_refused_by_name[Checkpoints-true]",
    "test_own_backward.py::test_checkpoints_round_blocks_are_refused_by_name[ReentrantCheckpoints-false]",
    "test_own_backward.py::test_checkpoints_round_blocks_are_refused_by_name[ReentrantCheckpoints-true]",
    "test_parity.py::test_neox_on_ssd_is_bit_identical_to_stock[fp32-1.0]",
    "test_plan.py::test_ranks_of_one_machine_share_its_ssd_and_its_host",
    "test_plan.py::test_the_spec_has_the_models_own_sizes[llama_3_8b]",
    "test_plan.py::test_what_a_plan_writes_trains_as_it_stands[True]",
    "test_powers.py::test_a_resumed_run_has_the_bits_of_one_that_never_stopped[cpu-False]",
    "test_progress.py::test_the_line_is_for_terminals_unless_the_key_says_otherwise[stock-False-None-False]",
    "test_progress.py::test_the_line_is_for_terminals_unless_the_key_says_otherwise[stock-True-False-False]",
    "test_progress.py::test_the_line_is_for_terminals_unless_the_key_says_otherwise[vertical-True-None-True]",
    "test_read_ahead.py::test_a_step_that_fails_in_its_backward_leaves_nothing_of_what_it_read[0]",
    "test_read_ahead.py::test_bits_are_stocks_however_much_is_read_before_the_norm[fp32-0.05-None-False-2]",
    "test_renamed_folders.py::test_a_model_is_built_and_prepared_in_its_own_folder[building-folder]",
    "test_renamed_folders.py::test_a_model_is_built_and_prepared_in_its_own_folder[built-link]",
    "test_renamed_folders.py::test_a_run_goes_on_in_its_own_folder[inner-link]",
    "test_renamed_folders.py::test_a_run_goes_on_in_its_own_folder[run-folder]",
    "test_saving.py::test_checkpoints_in_host_memory[none]",
    "test_saving.py::test_from_pretrained_train_save_read_back[bf16-False]",
    "test_saving.py::test_from_pretrained_train_save_read_back[fp32-True]",
    "test_scripts.py::test_a_loops_script_has_stocks_losses_and_weights[accelerate_loop-False]",
    "test_scripts.py::test_a_loops_script_has_stocks_losses_and_weights[three_calls-False]",
    "test_scripts.py::test_a_trainers_script_has_stocks_numbers_and_weights[trl_sft with LoRA]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[Base-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[Base-True]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[NumpyGenerators-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[NumpyRandom-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[OwnGenerators-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[PythonRandom-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[PythonRandom-True]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[Ranges-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[Ranges-True]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[SharedContext-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[SharedContext-True]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[SharedUserDict-False]",
    "test_self_check.py::test_a_check_that_agrees_puts_all_generators_back[SharedUserDict-True]",
    "test_self_check.py::test_an_exception_is_named_with_order_layer_and_remedy[Raising-words0-horizontal]",
    "test_self_check.py::test_an_exception_is_named_with_order_layer_and_remedy[RaisingScheduled-words1-vertical]",
    "test_self_check.py::test_an_exception_of_the_backward_is_named[True]",
    "test_self_check.py::test_it_agrees_and_leaves_everything_as_it_was[NumpyGenerators]",
    "test_self_check.py::test_it_agrees_and_leaves_everything_as_it_was[NumpyRandom]",
    "test_self_check.py::test_it_agrees_and_leaves_everything_as_it_was[PythonRandom]",
    "test_self_check.py::test_it_agrees_and_leaves_everything_as_it_was[Ranges]",
    "test_self_check.py::test_it_agrees_and_leaves_everything_as_it_was[SharedContext]",
    "test_self_check.py::test_it_finds_a_hook_whose_output_is_another_micro_batchs[True]",
    "test_self_check.py::test_it_finds_what_is_not_handled[MaskOnBlocks]",
    "test_self_check.py::test_it_finds_what_is_not_handled[SharedContext]",
    "test_speculation.py::test_bits_are_stocks_whether_or_not_it_comes_true[0.0-both]",
    "test_speculation.py::test_the_hit_rate_is_printed_with_the_steps[None]",
    "test_state_prefetch.py::test_the_engine_reads_the_state_of_each_step_before_it_issues_it[0.5-1.0-untold2]",
    "test_stopping.py::test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not[{'on_nonfinite': 'stop'}-2-75-2]",
    "test_sums.py::test_a_sum_that_is_none_is_found[adds_one_twice-horizontal]",
    "test_sums.py::test_a_sum_that_is_none_is_found[drops_a_later_one-horizontal]",
    "test_sums.py::test_a_sum_that_is_none_is_found[leaves_the_last_element_out-horizontal]",
    "test_sums.py::test_a_sum_that_is_none_is_found[rounds_each_addition-horizontal]",
    "test_sums.py::test_a_sum_that_is_none_is_found[sums_in_another_dtype-horizontal]",
    "test_sums.py::test_it_agrees_with_each_kind_of_sum[False-fp32]",
    "test_sums.py::test_it_agrees_with_each_kind_of_sum[True-fp32]",
    "test_tensor_swapper.py::test_the_same_bits_from_host_memory[both]",
    "test_tensor_swapper.py::test_what_went_away_comes_back_as_often_as_it_is_asked_for[host]",
    "test_torn.py::test_a_step_that_failed_whole_is_as_if_it_had_not_been[backward-False-0.05-1.0]",
    "test_torn.py::test_a_step_that_failed_whole_is_as_if_it_had_not_been[forward-False-0.0-0.5]",
    "test_torn.py::test_the_refusal_names_the_last_good_tag[None]",
    "test_trace.py::test_without_overlap_no_two_resources_work_at_a_time[0.0]",
    "test_trace.py::test_without_overlap_no_two_resources_work_at_a_time[1.0]",
    "test_two_hosts.py::test_two_hosts_have_the_bits_of_one_and_move_what_the_formula_says[1]",
    "test_uncounted_writes.py::test_a_large_one_that_begins_late_is_refused_by_name[add-1]",
    "test_uncounted_writes.py::test_a_large_one_that_begins_late_is_refused_by_name[into_array-3]",
    "test_uncounted_writes.py::test_what_a_forward_makes_and_blocks_write_has_stocks_bits[1-MadeInForward]",
    "test_uneven.py::test_four_ranks_compute_what_one_process_does",
    "test_unusual_models.py::test_weights_behind_one_of_odd_size_begin_where_stocks_do[none]",
    "test_verify.py::test_a_bit_that_flips_on_the_disk_is_noticed_and_tears_the_state[fp32-delayed state]",
    "test_verify.py::test_a_bit_that_flips_on_the_disk_is_noticed_and_tears_the_state[fp32-parameters, beside]",
    "test_verify.py::test_every_byte_that_steps_read_is_checked_and_no_bit_changes[fp32-0.0-{}]",
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector: what the modules make as they are imported stays. Afterwards Python goes through all of it
    only where it is told to, as `harness.dispose` does: that takes a second, and would come with every few tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 10**6)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))
    members = {f"{item.path.name}::{item.name}": item for item in items}
    for name in SLOW_MEMBERS & members.keys():
        members[name].add_marker(pytest.mark.slow)
    files = {item.path.name for item in items}
    stale = [name for name in SLOW_MEMBERS - members.keys() if files > {*FIRST} and config.args_source.name != "ARGS"]
    if stale:
        raise pytest.UsageError(f"tests/conftest.py, SLOW_MEMBERS: there are no such tests: {sorted(stale)}")
    need_hosts = [item for item in items if item.get_closest_marker("two_hosts")]
    refused = two_hosts.refusal() if need_hosts else None
    for item in need_hosts if refused is not None else ():
        item.add_marker(pytest.mark.skip(reason=str(refused)))
    without = [item for item in items if any(item.get_closest_marker(marker) for marker in ABSENT)]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


def pytest_runtest_setup(item: pytest.Item) -> None:
    # tests that use DeepSpeed without ds_vertical must not compile ops of their own either
    if "deepspeed" in sys.modules:
        cache.activate()


@pytest.fixture
def fp16_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor counts as good at fp16 for DeepSpeed, which would refuse it otherwise."""
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)
