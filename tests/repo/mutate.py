# ruff: noqa: E501
"""Break ds_vertical on purpose, one line at a time, in a copy, and see whether the named tests notice.

    python tests/repo/mutate.py [--list] [NAME ...]      # all mutations without a name

Each mutation replaces a text that must stand exactly once in its file. The copy comes first on the path of the tests'
process and of the processes that it starts. A mutation is killed when its test fails; survivors make the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ds_vertical"
_TESTS_FAILED = 1  # pytest's exit code; any other above 0 says that the tests did not run, below 0 that they crashed
_TOY = "test_executor.py::test_steps_have_the_bits_of_plain_autograd[vertical-1-True]"
_TOY_FAULT = "test_executor.py::test_a_failure_leaves_everything_as_before_and_the_next_step_right"
_LATE = "test_io.py::test_reads_that_arrive_late_are_waited_for_in_a_failing_step_too"
_BEHIND = "test_io.py::test_a_unit_arrives_where_the_device_is_no_further_behind_than_the_window"
_TURNS = "test_threadstate.py::test_forwards_that_take_turns_see_their_own_state"
_RECOMPUTE = "test_threadstate.py::test_a_recompute_sees_what_its_forward_saw"
_ONCE = "test_last_layer.py::test_the_last_layer_runs_forward_once_and_every_other_one_twice"
_ALIVE = "test_last_layer.py::test_one_micro_batchs_graph_and_logits_are_alive_at_a_time[vertical-SkippingToy]"
_SUMS = "test_gradients.py::test_the_sum_has_the_bits_of_one_addition_after_the_other"
_PARITY = "test_parity.py::test_neox_on_ssd_is_bit_identical_to_stock[fp32-1.0]"
_ODD = "test_numerics.py::test_odd_sizes_in_several_stock_sub_groups[fp32-300001]"
_BARE = "test_flush.py::test_a_route_reads_what_stock_reads[half early, on SSD-bare_state_dict]"
_DELAYED_TOY = "test_executor.py::test_delayed_and_early_steps_have_the_bits_of_plain_autograd[0-delayed-vertical]"
_EARLY_TOY = "test_executor.py::test_delayed_and_early_steps_have_the_bits_of_plain_autograd[0-early-vertical]"
_DELAY = "test_delay.py::test_every_delay_is_bit_identical_to_stock"
_LATE_WRITES = "test_delay.py::test_parameters_written_late_are_read_after_that"
_SKIPPED = "test_delay.py::test_a_skipped_step_takes_early_ones_back_and_loses_none_that_is_due"
_TEARS = "test_nonfinite.py::test_stepped_in_place_a_step_that_is_not_finite_tears_the_state"
_ERROR = "test_delay.py::test_an_error_anywhere_in_a_step_loses_no_step_that_is_due"
_AHEAD_TOY = "test_executor.py::test_what_is_issued_ahead_of_the_next_step_has_the_bits_of_plain_autograd"
_AHEAD_READS = "test_ahead.py::test_reads_for_the_next_step_are_issued_before_train_batch_returns_and_once[1-kept0]"
_AHEAD_STEPS = "test_ahead.py::test_delayed_steps_are_issued_before_train_batch_returns_and_once"
_BETWEEN = "test_ahead.py::test_whatever_comes_between_two_steps_is_as_if_nothing_were_ahead"
_END = "test_flush.py::test_a_process_may_end_with_steps_left_and_reads_under_way"
_TIERS = "test_gradient_tiers.py::test_bits_are_stocks_wherever_gradients_wait"
_RESUME = "test_resume.py::test_"
_GOES_ON = f"{_RESUME}a_resumed_run_has_the_bits_of_one_that_never_stopped[fp32-0.0-0.25-2]"
_GOES_BACK = f"{_RESUME}loading_into_the_run_that_saved_goes_back"
_DURABLE = "test_durability.py::test_each_name_comes_after_what_it_names"
_EXPORT = "test_export_fp32.py::test_"
_ALONE = "alone_it_gives_masters_frozen_weights_buffers_and_second_names"
_PORTABLE = "test_portable.py::test_"
_FAULTS = "test_faults.py::test_"
_VERIFY = "test_verify.py::test_"
_FLIPPED = f"{_VERIFY}a_bit_that_flips_on_the_disk_is_noticed_and_tears_the_state[fp32-"
_FAILURES = "test_failures.py::test_"
_STOPPING = "test_stopping.py::test_"
_ASKED = f"{_STOPPING}a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not"
_BETWEEN_STEPS = f"{_STOPPING}between_two_steps_handlers_of_others_are_called_and_put_back"
_DOCTOR = "test_doctor.py::test_"
_TRAPS = "test_traps.py::test_"
_CLEAN = "test_clean.py::test_a_"
_OTHERS = "test_foreign_files.py::test_a_"
_FREED = "test_clean.py::test_bytes_are_what_deleting_frees"
_KILLED_REMOVAL = "test_clean.py::test_what_a_kill_leaves_of_a_removal_is_still_known_for_a_dead_runs[clean]"
_FAR = "test_storage.py::test_a_lock_of_another_host_is_never_taken_over"
_SHARED = "test_io.py::test_two_jobs_on_one_nvme_path_finish_as_if_alone_and_a_killed_ones_folder_goes[True]"
_RECOMPUTE_STATE = "with applied(call.state), torch.enable_grad():"


@dataclass(frozen=True)
class Mutation:
    """`old` in ds_vertical/`file` becomes `new`; `killer` is the test (file::test) that must fail."""

    name: str
    file: str
    old: str
    new: str
    killer: str

    def apply(self, package: Path) -> None:
        """Change the copy at `package`. Raises ValueError unless the text stands there exactly once."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"mutation {self.name}: {self.file} holds {text.count(self.old)} times {self.old!r}, not once")
        path.write_text(text.replace(self.old, self.new))


def _without_field(field: str) -> str:
    return _RECOMPUTE_STATE.replace(
        "call.state", f'__import__("dataclasses").replace(call.state, {field}=ThreadState.capture().{field})'
    )


MUTATIONS = (
    # waits
    Mutation(
        "ticket-wait-removed", "schedule/executor.py", "self._wait(flying.pop(needed), event)", "flying.pop(needed)", _TOY
    ),
    Mutation("read-wait-removed", "io/buffers.py", "self.reads[0].wait()", "pass", _LATE),
    Mutation(
        "failed-step-leaves-reads",
        "offload/param_store.py",
        "                buffer.complete_reads()\n",
        "                buffer.reads.clear()\n",
        _LATE,
    ),
    Mutation(
        "host-runs-ahead-of-the-device",
        "offload/param_store.py",
        "        self._backlog.wait()\n",
        "",
        f"{_BEHIND}[2]",
    ),
    Mutation("releases-not-marked", "offload/param_store.py", "self._backlog.mark()", "pass", f"{_BEHIND}[2]"),
    Mutation(
        "no-overlap-does-not-wait",
        "schedule/executor.py",
        "if ticket is not None and not self.overlap:",
        "if False:",
        "test_executor.py::test_without_overlap_every_issue_is_waited_for_at_once",
    ),
    # disks that fail
    Mutation(
        "early-writes-not-awaited-by-the-norm",
        "offload/stepper.py",
        "        self._pipeline.drain()\n        self._updates.close_updates()\n",
        "        self._updates.close_updates()\n",
        f"{_FAULTS}the_last_early_part_that_cannot_be_written_is_noticed_by_its_own_step[state]",
    ),
    Mutation(
        "early-parameters-not-awaited-by-the-norm",
        "offload/stepper.py",
        "        self._pipeline.drain()\n        self._updates.close_updates()\n",
        "        self._pipeline.drain()\n",
        f"{_FAULTS}the_last_early_part_that_cannot_be_written_is_noticed_by_its_own_step[parameter]",
    ),
    Mutation(
        "failed-early-writes-kept",
        "offload/param_store.py",
        "update.give_up(self._writer)",
        "pass",
        f"{_FAULTS}the_last_early_part_that_cannot_be_written_is_noticed_by_its_own_step[parameter]",
    ),
    Mutation(
        "torn-state-recovered",
        "offload/step_pipeline.py",
        "if self._error is not None and not self._torn:",
        "if self._error is not None:",
        "test_pipeline.py::test_what_fails_in_place_cannot_be_recovered_from[not written]",
    ),
    Mutation(
        "dropped-steps-in-place-forgotten",
        "offload/step_pipeline.py",
        "self._torn |= any(not job.beside for job, _ in dropped)",
        "pass",
        "test_pipeline.py::test_what_fails_in_place_cannot_be_recovered_from[dropped]",
    ),
    Mutation(
        "slots-lost-by-a-failure",
        "offload/step_pipeline.py",
        "            if slot not in self._free:\n",
        "            if False:\n",
        "test_pipeline.py::test_what_fails_beside_the_state_can_be_recovered_from[read]",
    ),
    Mutation(
        "state-set-within-a-step",
        "engine/zero3/live_state.py",
        "        if self.num_inside and self._calls.is_mine:\n",
        "        if False:\n",
        "test_flush.py::test_state_cannot_be_set_within_a_step[write_full_moments]",
    ),
    Mutation(
        "unsynced-switch-kept",
        "engine/checkpoint/tag_dir.py",
        "                self._put_back(old)\n                raise\n",
        "                raise\n",
        "test_manifest.py::test_a_switch_that_is_not_on_the_disk_is_taken_back[True-True]",
    ),
    Mutation(
        "unsynced-folder-left",
        "engine/checkpoint/tag_dir.py",
        "            path.rmdir()\n            raise\n",
        "            raise\n",
        "test_manifest.py::test_a_new_folder_that_is_not_on_the_disk_is_not_left_for_the_next_save",
    ),
    Mutation(
        "interrupted-wait-loses-a-slot",
        "offload/state_prefetch.py",
        "            self._give_up(self._entries[0])\n            self._entries.popleft()  # not",
        "            self._give_up(self._entries.popleft())  # not",
        "test_expected.py::test_an_interrupted_wait_loses_no_slot",
    ),
    Mutation(
        "old-state-read-ahead-kept",
        "offload/state_prefetch.py",
        "            self.clear()\n\n    def give_back_last",
        "            pass\n\n    def give_back_last",
        "test_expected.py::test_state_that_another_job_writes_meanwhile_is_read_again",
    ),
    Mutation(
        "reads-ahead-left-in-flight",
        "offload/step_pipeline.py",
        "            self._expected.clear()\n            self._free_all()\n",
        "            self._free_all()\n",
        "test_expected.py::test_nothing_expected_is_in_flight_when_the_pipeline_is_idle[wait_idle]",
    ),
    Mutation(
        "claimed-state-read-again",
        "offload/step_pipeline.py",
        "            job.started.extend(expected.reads)\n",
        "            pass\n",
        "test_expected.py::test_expected_state_is_read_while_nothing_is_submitted_and_once[3]",
    ),
    Mutation(
        "steps-told-across-the-norm",
        "schedule/events.py",
        "        if event.op is Op.NORM:\n            before = None\n        elif",
        "        if",
        "test_simulate.py::test_steps_are_told_by_the_one_before_and_not_across_the_norm",
    ),
    Mutation(
        "cut-files-linked",
        "engine/checkpoint/save.py",
        "if found < num_bytes:",
        "if False:",
        f"{_FAULTS}a_file_that_is_cut_or_gone_is_named_and_never_saved[state-truncated]",
    ),
    Mutation(
        "gathers-done-twice",
        "distributed/collective_replay.py",
        "return done[kind] >= 0",
        "return False",
        "test_company.py::test_a_step_that_fails_anywhere_leaves_nobody_alone[vertical-True]",
    ),
    Mutation(
        "evaluations-not-decided-together",
        "engine/handlers.py",
        "            if company is not None:\n                company.conclude()\n        if len(bodies) == 1",
        "        if len(bodies) == 1",
        "test_company.py::test_an_evaluation_is_decided_at_its_end",
    ),
    # a shared disk
    Mutation(
        "another-hosts-lock-called-gone", "io/runs/run_lock.py", 'return "gone" if here else "elsewhere"', 'return "gone"', _FAR
    ),
    Mutation("locks-not-deleted-last", "io/runs/run_dir.py", "guard.path, but=names)", "guard.path)", _KILLED_REMOVAL),
    Mutation(
        "removed-as-listed",
        "io/runs/run_dirs.py",
        'if found.state == "live" or not',
        "if not",
        _CLEAN + "run_that_starts_after_the_list_keeps_its_folder",
    ),
    Mutation(
        "removed-without-the-guard",
        "io/runs/run_dir.py",
        "                    fcntl.flock(fd, fcntl.LOCK_EX)\n",
        "                    pass\n",
        _CLEAN + "removal_waits_for_a_claim_that_is_under_way",
    ),
    Mutation(
        "looked-at-without-the-guard",
        "io/runs/run_dir.py",
        "                    fcntl.flock(fd, fcntl.LOCK_EX)\n",
        "                    pass\n",
        _CLEAN + "look_waits_for_a_claim_that_is_under_way",
    ),
    Mutation(
        "unknown-removed-unasked",
        "io/runs/run_dirs.py",
        ' or (found.state == "unknown" and not named)',
        "",
        _CLEAN + "run_that_is_unknown_by_now_is_kept_unless_named",
    ),
    # what is not ours
    Mutation(
        "others-folder-removed",
        "io/runs/run_dirs.py",
        " or not found.is_ours",
        "",
        f"{_OTHERS}folder_with_another_programs_lock_is_never_removed[-True]",
    ),
    Mutation(
        "moved-folder-taken-for-the-runs",
        "io/runs/run_dir.py",
        "if not os.path.samestat(os.fstat(guard.fd), os.fstat(self._fd)):",
        "if False:",
        f"{_OTHERS}run_whose_folder_was_moved_deletes_nothing",
    ),
    Mutation(
        "mounts-emptied",
        "io/remove_tree.py",
        "        if mount(fd) != mount(dir_fd):\n",
        "        if False:\n",
        "test_foreign_files.py::test_what_is_mounted_below_a_runs_folder_is_left",
    ),
    Mutation(
        "others-files-in-a-ranks-folder-deleted",
        "engine/checkpoint/leftovers.py",
        "if each not in ours or not stat",
        "if not stat",
        "test_foreign_tags.py::test_only_what_the_earlier_manifest_names_may_be_in_a_ranks_folder[notes.txt]",
    ),
    Mutation(
        "marks-not-asked-for",
        "engine/checkpoint/leftovers.py",
        '    return isinstance(found, dict) and isinstance(found.pop("run", None), str) and found == expected\n',
        "    return True\n",
        "test_foreign_tags.py::test_a_mark_counts_only_under_the_name_that_it_says",
    ),
    Mutation(
        "manifests-believed",
        "engine/checkpoint/manifest.py",
        '    _raise_for(path, rank_faults(data, rank, folder["world_size"]))\n',
        "",
        "test_hostile_checkpoints.py::test_a_manifest_that_makes_no_sense_is_refused_before_anything_is_touched",
    ),
    Mutation(
        "loose-ends-believed",
        "engine/checkpoint/load.py",
        "        _raise_for(folder, loading.loose_faults())\n",
        "",
        "test_hostile_checkpoints.py::test_loose_ends_that_are_missing_are_found_before_anything_is_touched",
    ),
    Mutation(
        "ssd-gathered-as-persistent",
        "compat/zero_optimizer.py",
        "if is_persistent(param) and chosen(param)",
        "if chosen(param)",
        "test_numerics.py::test_parameters_on_ssd_may_count_as_persistent",
    ),
    Mutation(
        "hole-not-noticed",
        "io/files.py",
        "(hole := _first_hole(path, size_bytes, mounts)) < size_bytes",
        "(hole := size_bytes) < size_bytes",
        "test_storage.py::test_check_files_finds_what_has_not_been_written",
    ),
    Mutation(
        "holes-refused-on-any-file-system",
        "io/files.py",
        "not size_bytes or mount_of(path, mounts).kind not in _HOLES_ARE_UNWRITTEN",
        "not size_bytes",
        "test_storage.py::test_holes_are_no_fault_where_zeros_may_be_kept_as_holes",
    ),
    Mutation(
        "result-half-written",
        "io/atomic_file.py",
        "            replace_file(out, text)",
        "            out.write_text(text)",
        "test_outfile.py::test_what_was_there_stays_where_the_disk_has_no_room",
    ),
    Mutation("linked-files-counted", "io/files.py", " if len(here) >= here[0].st_nlink", "", _FREED),
    Mutation("deepspeeds-folders-as-the-umask-says", "engine/api.py", "make_run_private(folder)", "pass", _SHARED),
    # timelines and reports
    Mutation(
        "unchanged-counters-recorded",
        "schedule/executor.py",
        "if self._counted.get(name) != value:",
        "if True:",
        "test_timeline.py::test_the_engine_counts_its_memory",
    ),
    Mutation(
        "late-records-left-with-a-later-step",
        "cli/report/timeline.py",
        "if step.step <= other.step <= step.step + 1]",
        "if step.step == other.step]",
        "test_timeline.py::test_records_go_to_the_step_whose_time_they_are_of",
    ),
    Mutation(
        "stall-put-to-whatever-was-busy",
        "cli/report/stalls.py",
        "(suspects is None or span.resource in suspects)",
        "True",
        "test_timeline.py::test_gaps_are_put_to_what_was_waited_for_and_to_what_that_kept_busy",
    ),
    Mutation(
        "exported-spans-overlap",
        "cli/report/chrome_trace.py",
        "row = next((row for row in rows if row[-1].end <= record.start), None)",
        "row = next(iter(rows), None)",
        "test_timeline.py::test_nothing_on_a_row_overlaps[measured]",
    ),
    Mutation(
        "report-not-escaped",
        "cli/report/page.py",
        "return escape(text, quote=True)",
        "return text",
        "test_report.py::test_names_from_files_are_text_and_nothing_else",
    ),
    # what moves
    Mutation(
        "others-may-hold-what-moves",
        "model/tensor_refs.py",
        "if any(type(holder) not in _TRANSPARENT for holder in found):",
        "if False:",
        "test_activations.py::test_a_tensor_in_a_list_of_anybodys_is_not_private",
    ),
    Mutation(
        "load-not-needed",
        "schedule/activations.py",
        "if state.loaded is None and state.touched != self._count - 1:",
        "if False:",
        "test_moves.py::test_every_load_is_needed",
    ),
    # thread state
    Mutation("rng-restore-off", "model/micro_batch.py", _RECOMPUTE_STATE, _without_field("rng"), _TOY),
    Mutation("rng-restore-off-in-the-engine", "model/micro_batch.py", _RECOMPUTE_STATE, _without_field("rng"), _PARITY),
    Mutation("autocast-restore-off", "model/micro_batch.py", _RECOMPUTE_STATE, _without_field("autocast"), _RECOMPUTE),
    Mutation(
        "context-lost-in-recompute",
        "model/micro_batch.py",
        "call.context.run(self.stubs.raw[block], *args",
        "self.stubs.raw[block](*args",
        _RECOMPUTE,
    ),
    Mutation(
        "hub-state-not-restored",
        "model/micro_batch.py",
        "self._guard = inference_guard(outer.inference)\n            outer.apply()",
        "self._guard = inference_guard(outer.inference)",
        f"{_TURNS}[plain-autocast]",
    ),
    Mutation(
        "inference-mode-leaks",
        "model/micro_batch.py",
        "self._guard = inference_guard(outer.inference)",
        "pass",
        f"{_TURNS}[inference-plain]",
    ),
    # gradients
    Mutation("gradient-dropped", "offload/grad_accumulator.py", "target.add_(grad)", "pass", _TOY),
    Mutation("gradient-dropped-in-the-engine", "offload/grad_accumulator.py", "target.add_(grad)", "pass", _PARITY),
    Mutation("stale-sum-of-an-unused-weight", "offload/grad_accumulator.py", "total.zero_()", "pass", _TOY),
    Mutation(
        "pair-added-in-reverse",
        "offload/grad_accumulator.py",
        "self._sum(unit, earlier, grads)",
        "self._sum(unit, grads, earlier)",
        _SUMS,
    ),
    Mutation(
        "gradient-in-others-memory-waits",
        "offload/grad_accumulator.py",
        "grad is None or is_alone(grad)",
        "True",
        "test_gradients.py::test_a_gradient_whose_memory_somebody_else_has_does_not_wait",
    ),
    Mutation(
        "joint-in-the-interpreter",
        "engine/module_hooks.py",
        "if plain and compiled is not None else",
        "if False else",
        "test_engine_api.py::test_an_engine_has_the_compiled_joints_and_sums_in_pairs_where_layers_do_not_take_turns[vertical]",
    ),
    Mutation(
        "pair-of-two-layers",
        "offload/grad_accumulator.py",
        "if self._waiting is not None and self._waiting[0] == unit:\n            (_, earlier)",
        "if self._waiting is not None:\n            (_, earlier)",
        "test_gradients.py::test_layers_in_turn_and_what_stands_around_them_do_not_mix",
    ),
    Mutation(
        "odd-gradient-forgotten",
        "offload/grad_accumulator.py",
        "self._settle()\n        if unit not in self._sums:",
        "pass\n        if unit not in self._sums:",
        _SUMS,
    ),
    Mutation(
        "waiting-gradient-outlives-its-step",
        "offload/grad_accumulator.py",
        "self._waiting = None\n        self._flat.pop",
        "pass\n        self._flat.pop",
        "test_gradients.py::test_what_waits_is_counted_and_goes_with_the_sums",
    ),
    Mutation(
        "gradient-not-rounded",
        "offload/grad_accumulator.py",
        "grad = grad.to(rounding)",
        "pass",
        "test_numerics.py::test_accumulation_and_communication_dtypes",
    ),
    Mutation(
        "prefix-drained-at-head-only",
        "engine/handlers.py",
        'self.gradients.add("pre")  # the glue',
        "pass  # the glue",
        _TOY,
    ),
    Mutation("glue-runs-late", "model/micro_batch.py", "            if block > 0:\n", "            if block < 0:\n", _TOY),
    Mutation(
        "side-tensor-flows-early",
        "model/autograd_segments.py",
        "if self._segment_of(waiting.edge.node) == segment]",
        "if self._segment_of(waiting.edge.node) <= segment]",
        _TOY,
    ),
    # the last layer
    Mutation(
        "last-layer-recomputes",
        "engine/handlers.py",
        "keep_graph=event in self.fused",
        "keep_graph=False",
        f"{_ONCE}[vertical]",
    ),
    Mutation(
        "every-graph-kept", "engine/handlers.py", "keep_graph=event in self.fused", "keep_graph=True", f"{_ONCE}[vertical]"
    ),
    Mutation(
        "graph-outlives-its-backward", "model/micro_batch.py", "self.calls.pop(block, None)", "self.calls.get(block)", _ALIVE
    ),
    Mutation(
        "whole-suffix-kept", "model/autograd_segments.py", "                owner = node\n", "                pass\n", _ALIVE
    ),
    Mutation(
        "short-step-divided-by-all",
        "engine/engine.py",
        "scale_if_loss(loss / len(bodies))\n\n        noted",
        "scale_if_loss(loss / self.gradient_accumulation_steps())\n\n        noted",
        "test_engine_api.py::test_a_short_last_batch_is_divided_by_its_own_number",
    ),
    # the step
    Mutation(
        "norm-per-layer",
        "engine/zero3/optimizer.py",
        "for group in self.stock_groups]",
        "for group in self.fp16_groups]",
        _ODD,
    ),
    Mutation(
        "adam-not-cut",
        "offload/cpu_adam.py",
        "for cut in cuts_within(cuts, part.start, part.numel):",
        "for cut in cuts_within([Cut(0, 1 << 40, 1 << 40, 0)], part.start, part.numel):",
        _ODD,
    ),
    Mutation(
        "bad-norm-not-skipped",
        "compat/zero_optimizer.py",
        "optimizer.overflow = True",
        "pass",
        "test_numerics.py::test_a_non_finite_step_is_skipped_whole",
    ),
    # delayed and early steps
    Mutation(
        "delayed-step-not-waited-for",
        "schedule/dependencies.py",
        "return [self.use(unit), *self.delayed.get(unit, ())]",
        "return [self.use(unit)]",
        _DELAYED_TOY,
    ),
    Mutation(
        "norm-and-commit-before-early-steps",
        "schedule/dependencies.py",
        "*walk.holds, *walk.early]",
        "*walk.holds]",
        _EARLY_TOY,
    ),
    Mutation(
        "pieces-in-flight-without-overlap",
        "planner/memory_budget.py",
        "SLOTS if overlap else 1",
        "SLOTS",
        "test_budget.py::test_the_budget_is_what_is_allocated[one at a time]",
    ),
    Mutation(
        "pieces-in-flight-without-overlap-in-the-budget",
        "engine/memory_check.py",
        "memory_budget.num_slots(len(self._piece_bytes), self._resolved.overlap)",
        "memory_budget.num_slots(len(self._piece_bytes), True)",
        "test_budget.py::test_the_budget_is_what_is_allocated[one at a time]",
    ),
    Mutation(
        "jobs-beside-the-writes-of-others-without-overlap",
        "offload/step_pipeline.py",
        "if not self._overlap:",
        "if False:",
        "test_pipeline.py::test_without_overlap_a_job_starts_when_the_one_before_it_is_complete[False]",
    ),
    Mutation(
        "jobs-beside-the-reads-of-others-without-overlap",
        "offload/step_pipeline.py",
        "self._start_one(patient=not self._reading) and self._overlap",
        "self._start_one(patient=not self._reading)",
        "test_pipeline.py::test_without_overlap_a_job_starts_when_the_one_before_it_is_complete[False]",
    ),
    Mutation(
        "pipeline-is-not-told-of-overlap",
        "engine/zero3/optimizer.py",
        "begin, self.checksums, overlap)",
        "begin, self.checksums)",
        "test_overlap.py::test_without_overlap_no_event_finds_anything_in_flight[1.0]",
    ),
    Mutation(
        "step-beside-the-reads-of-its-values-without-overlap",
        "offload/stepper.py",
        "if not self._overlap:",
        "if False:",
        "test_ahead.py::test_without_overlap_no_read_of_parameters_is_under_way_beside_cpu_adam",
    ),
    Mutation(
        "persistent-left-partitioned-by-a-load-that-failed",
        "engine/checkpoint/load.py",
        "partial(zero_optimizer.gather_persistent, engine.optimizer)",
        "lambda: None",
        "test_load_faults.py::test_a_write_that_is_refused_tears_the_state_and_the_checkpoint_loads",
    ),
    Mutation(
        "gathering-after-a-vote-that-failed",
        "distributed/ranks.py",
        "    if world_size() > 1 and not is_true_on_all_ranks(error is None):",
        "    try:\n        agree = is_true_on_all_ranks(error is None)\n    except Exception as raised:\n"
        "        raise_after(raised, then)\n    if world_size() > 1 and not agree:",
        "test_failing_ranks.py::test_one_ranks_failure_ends_the_other_and_is_named[vote-1]",
    ),
    Mutation(
        "persistent-left-partitioned-by-a-step",
        "distributed/ranks.py",
        "    then()\n\n\ndef raise_after",
        "\n\ndef raise_after",
        _BARE,
    ),
    Mutation(
        "persistent-left-partitioned-by-a-step-that-ends-the-run",
        "engine/zero3/step_driver.py",
        "ranks.raise_after(error, optimizer.gather_persistent)",
        "raise error",
        "test_nonfinite.py::test_what_stays_on_the_device_is_there_after_a_step_that_ends_the_run",
    ),
    Mutation(
        "persistent-gathered-ahead-of-its-step",
        "engine/zero3/step_driver.py",
        'self._optimizer.step_persistent(lambda unit, chunks: self._stepper.step(unit, chunks, due, "all"))',
        "pass",
        _BARE,
    ),
    Mutation(
        "serial-steps-leave-writes",
        "offload/stepper.py",
        "        self._pipeline.drain()\n        self._updates.complete_update(unit)",
        "        pass",
        "test_overlap.py::test_without_overlap_no_event_finds_anything_in_flight",
    ),
    Mutation(
        "workspace-outlives-its-ranks",
        "compat/accelerator.py",
        ".unlink(missing_ok=True)",
        "",
        "test_ranks.py::test_memory_through_which_ranks_of_a_host_reduce_ends_with_them",
    ),
    Mutation(
        "persistent-on-ssd",
        "compat/zero_params.py",
        "bool(param.ds_persist) and not is_on_ssd(param)",
        "bool(param.ds_persist)",
        "test_numerics.py::test_parameters_on_ssd_may_count_as_persistent[0.0]",
    ),
    Mutation(
        "flush-forgets-what-it-issued",
        "engine/zero3/optimizer.py",
        "if ticket := driver.step_ahead(unit):  #",
        "if ticket := driver.step_unit(unit):  #",
        "test_interrupts.py::test_a_flush_interrupted_in_its_wait_leaves_the_step_to_the_next_forward",
    ),
    # what is issued ahead of the next step
    Mutation(
        "step-ahead-not-waited-for",
        "engine/handlers.py",
        "return ticket if step is None else ticket.after(step)",
        "return ticket",
        f"{_AHEAD_TOY}[True-{{'delayed': True}}]",
    ),
    Mutation("waits-for-what-is-ahead", "schedule/executor.py", " and not event.ahead:", ":", _AHEAD_STEPS),
    Mutation("nothing-ahead", "engine/engine.py", "ahead=vertical.prefetch_layers > 0", "ahead=False", _AHEAD_READS),
    Mutation("read-ahead-for-nothing", "offload/param_store.py", " or self._ahead.pop(unit, None)", "", _AHEAD_READS),
    Mutation(
        "old-copy-handed-over",
        "offload/param_store.py",
        "(unit in self._updates or copy.version != self._versions[unit])",
        "unit in self._updates",
        f"{_BETWEEN}[0.0-write_gathered-SoonReads]",
    ),
    Mutation(
        "write-of-stock-unnoticed",
        "compat/zero_params.py",
        '("swap_out_and_release", "swap_out_partitioned_params")',
        '("swap_out_and_release",)',
        f"{_BETWEEN}[0.0-write_through_the_swapper-SoonReads]",
    ),
    Mutation(
        "reads-what-is-about-to-change",
        "schedule/passes.py",
        "layers[: min(window, lead) if delayed else window]",
        "layers[:window]",
        "test_passes.py::test_place_ahead_issues_what_comes_first_in_the_next_forward",
    ),
    Mutation(
        "due-unit-read-ahead-not-refused",
        "schedule/dependencies.py",
        "    _check_ahead(schedule)\n    _check_sums",
        "    _check_sums",
        "test_passes.py::test_what_is_read_for_the_next_step_must_have_taken_this_one",
    ),
    Mutation(
        "process-ends-during-steps",
        "offload/step_pipeline.py",
        "        _OPEN.add(self)\n",
        "",
        f"{_END}[all delayed, on SSD-]",
    ),
    Mutation("process-ends-during-reads", "io/aio.py", "        _OPEN.add(self)\n", "", f"{_END}[all early, on SSD-]"),
    Mutation(
        "skipped-step-committed",
        "engine/zero3/step_driver.py",
        "if hit := self.phase is StepPhase.COMMITTING:\n",
        "if hit := True:\n",
        f"{_SKIPPED}[False-None]",
    ),
    Mutation(
        "commit-without-discard",
        "offload/param_store.py",
        "        self._close_early()\n\n    def discard",
        "\n    def discard",
        f"{_DELAY}[fp32-False-0.0]",
    ),
    Mutation(
        "stale-buffer-handed-over",
        "offload/param_store.py",
        "entry = self._updates.pop(unit, None) or",
        "entry = self._updates.get(unit) or",
        "test_overlap.py::test_random_settings_on_a_slow_disk",
    ),
    Mutation(
        "fetch-ahead-of-writes",
        "offload/param_store.py",
        "        if shards:\n            self._wait_writes(unit)\n",
        "",
        f"{_LATE_WRITES}[False-1.0]",
    ),
    Mutation(
        "parameters-stay-in-old-files",
        "offload/param_store.py",
        "shard.generation = shard.other",
        "pass",
        f"{_DELAY}[fp32-False-0.3]",
    ),
    # checkpoints
    Mutation(
        "checkpoints-state-written-in-place",
        "engine/checkpoint/save.py",
        "self._generations.set_aside(shared)",
        "pass",
        _GOES_ON,
    ),
    Mutation(
        "checkpoints-weights-written-in-place",
        "engine/checkpoint/save.py",
        "self._engine.param_store.set_aside(shared)",
        "pass",
        _GOES_ON,
    ),
    Mutation(
        "users-write-to-a-checkpoint",
        "offload/param_store.py",
        "            if id(shard.param) in written:\n                self._leave(shard)",
        "            if id(shard.param) in written:\n                pass",
        f"{_RESUME}writes_by_the_user_leave_a_checkpoint_alone",
    ),
    Mutation(
        "checksums-of-what-the-user-overwrote",
        "offload/param_store.py",
        "                self._checksums.forget(shard.path)",
        "                pass",
        f"{_RESUME}writes_by_the_user_leave_a_checkpoint_alone",
    ),
    Mutation(
        "read-ahead-kept-over-a-load", "engine/checkpoint/load.py", "            store.note_write([param])\n", "", _GOES_BACK
    ),
    Mutation(
        "damage-not-looked-for",
        "engine/checkpoint/load.py",
        "        manifest.check_manifest(folder, saved)\n",
        "",
        f"{_RESUME}what_is_damaged_or_does_not_fit_is_refused_by_name",
    ),
    Mutation(
        "random-states-not-restored",
        "engine/checkpoint/load.py",
        "run_state.set_random_states(self._loose)",
        "pass",
        _GOES_BACK,
    ),
    Mutation(
        "save-reads-what-it-wrote",
        "io/checksums.py",
        "            found = list(read_pieces(Path(path), start, end))",
        "            pass\n        if True:\n            found = list(read_pieces(Path(path), start, end))",
        f"{_RESUME}a_save_shares_files_and_reads_no_state",
    ),
    Mutation(
        "tag-removed-ahead-of-the-switch",
        "engine/checkpoint/save.py",
        '                reach("folder complete")\n',
        '                folder.switch()\n                reach("folder complete")\n',
        f"{_RESUME}a_save_that_is_interrupted_leaves_the_earlier_one[one]",
    ),
    Mutation(
        "powers-of-a-resume-forgotten",
        "engine/checkpoint/run_state.py",
        'engine.optimizer.driver.powers = Powers(**numbers["powers"])',
        "pass",
        f"{_RESUME}a_resumed_run_has_the_bits_of_one_that_never_stopped[fp32-0.0-0.25-5]",
    ),
    Mutation(
        "checkpoints-deleted-with-the-runs-folder",
        "engine/checkpoint/save.py",
        "if (run := owned(save_dir)) is not None:",
        "if (run := owned(save_dir)) is not None and False:",
        f"{_RESUME}a_save_within_a_step_or_into_the_runs_folder_is_refused",
    ),
    Mutation(
        "saves-within-a-step",
        "engine/checkpoint/mixin.py",
        "if self.optimizer.live.num_inside and self.optimizer.calls.is_mine:",
        "if False:",
        f"{_RESUME}a_save_within_a_step_or_into_the_runs_folder_is_refused",
    ),
    Mutation(
        "a-switch-that-failed-deletes-the-earlier-checkpoint",
        "engine/checkpoint/tag_dir.py",
        "                self._put_back(old)\n",
        "",
        "test_manifest.py::test_a_switch_that_is_not_on_the_disk_is_taken_back[True-True]",
    ),
    # what a power cut would find
    Mutation(
        "linked-files-not-synced", "engine/checkpoint/save.py", "            sync_file(target)\n", "", f"{_DURABLE}[nvme-False]"
    ),
    Mutation(
        "written-files-not-synced",
        "engine/checkpoint/save.py",
        "            os.fsync(fd)\n    return SavedFile",
        "    return SavedFile",
        f"{_DURABLE}[cpu-False]",
    ),
    Mutation(
        "names-of-a-rank-not-synced",
        "engine/checkpoint/save.py",
        "            sync_folder(self._folder)\n",
        "",
        f"{_DURABLE}[nvme-False]",
    ),
    Mutation(
        "names-of-a-tag-not-synced",
        "engine/checkpoint/tag_dir.py",
        "            _sync(self.beside, _FOLDER)\n",
        "",
        f"{_DURABLE}[nvme-True]",
    ),
    Mutation(
        "switch-not-synced",
        "engine/checkpoint/tag_dir.py",
        "                _sync(self.path.parent, _FOLDER)\n",
        "                pass\n",
        f"{_DURABLE}[nvme-True]",
    ),
    Mutation(
        "latest-not-synced",
        "engine/checkpoint/tag_dir.py",
        "            sync_folder(path.parent)\n",
        "",
        f"{_DURABLE}[nvme-False]",
    ),
    Mutation(
        "placed-file-not-synced",
        "engine/checkpoint/tag_dir.py",
        "            file.flush()\n            os.fsync(fd)\n",
        "            file.flush()\n",
        f"{_DURABLE}[nvme-False]",
    ),
    # ways out of checkpoints
    Mutation(
        "script-left-to-others",
        "engine/checkpoint/save.py",
        "                _place_script(folder)\n",
        "",
        f"{_EXPORT}{_ALONE}",
    ),
    Mutation(
        "second-names-left-out",
        "engine/checkpoint/zero_to_fp32.py",
        "return state | {name: state[first] for name, first in self._tied.items() if first in state}",
        "return state",
        f"{_EXPORT}{_ALONE}",
    ),
    Mutation(
        "second-names-not-saved",
        "engine/checkpoint/run_state.py",
        "tied[full] = first[id(tensor)]",
        "pass",
        f"{_EXPORT}{_ALONE}",
    ),
    Mutation(
        "damage-exported",
        "engine/checkpoint/zero_to_fp32.py",
        "if _checksum(_pieces(path, offset, num_bytes)) != checksum:",
        "if False:",
        f"{_EXPORT}what_is_damaged_is_refused_by_name_and_nothing_is_written[0]",
    ),
    Mutation(
        "padding-exported",
        "engine/checkpoint/zero_to_fp32.py",
        "count = min(rank.share(name), full.numel() - start)",
        "count = rank.share(name)",
        f"{_EXPORT}shares_of_all_ranks_are_joined_and_the_padding_is_cut",
    ),
    Mutation(
        "two-files-of-weights-in-memory",
        "engine/checkpoint/zero_to_fp32.py",
        "save(_tensors(shard, shared=not safe_serialization), str(",
        "save(kept := _tensors(shard, shared=not safe_serialization), str(",
        f"{_EXPORT}one_file_of_weights_is_in_memory_at_a_time",
    ),
    Mutation(
        "portable-in-our-order",
        "engine/checkpoint/stock_format.py",
        "narrow(0, start + first, count)",
        "narrow(0, first, count)",
        f"{_PORTABLE}stock_loads_it_and_goes_on_with_the_same_bits",
    ),
    Mutation(
        "portable-without-steps",
        "compat/stock_checkpoint.py",
        '{"step": g.step,',
        '{"step": 0,',
        f"{_PORTABLE}stock_loads_it_and_goes_on_with_the_same_bits",
    ),
    Mutation(
        "portable-frozen-weights-from-stocks-buffer",
        "compat/stock_checkpoint.py",
        '        "_get_param_fragment_func": share_of,\n',
        "",
        f"{_PORTABLE}stock_loads_it_and_goes_on_with_the_same_bits",
    ),
    Mutation(
        "persistent-parameters-left-partitioned",
        "distributed/ranks.py",
        "    try:\n        then()",
        "    try:\n        pass",
        f"{_PORTABLE}it_is_complete_or_absent_and_leaves_the_run_and_our_checkpoints_alone",
    ),
    # failing ranks
    Mutation(
        "failures-untold",
        "distributed/failure_watch.py",
        "            self.tell(what, error)\n            return None",
        "            return None",
        f"{_FAILURES}a_rank_that_waits_for_ever_is_ended",
    ),
    Mutation(
        "nobody-looks-after-the-others",
        "distributed/host_peers.py",
        "and not process.is_alive():",
        "and False:",
        f"{_FAILURES}a_rank_that_is_killed_ends_the_others",
    ),
    Mutation(
        "ranks-go-on-out-of-step",
        "distributed/failure_watch.py",
        "if not self._inside and self._failed:",
        "if False:",
        f"{_FAILURES}a_rank_that_failed_alone_does_not_go_on",
    ),
    Mutation(
        "shared-failures-end-ranks",
        "distributed/failure_watch.py",
        "self._settled, self._failed = self._section, False",
        "self._failed = False",
        f"{_FAILURES}failures_that_all_share_leave_the_ranks_in_step",
    ),
    Mutation(
        "no-more-data-is-a-failure",
        "distributed/failure_watch.py",
        "(StopIteration, Unanimous)",
        "Unanimous",
        f"{_FAILURES}no_more_data_is_no_failure",
    ),
    Mutation(
        "what-all-have-decided-is-a-failure",
        "distributed/failure_watch.py",
        "(StopIteration, Unanimous)",
        "StopIteration",
        f"{_FAILURES}what_all_ranks_have_decided_is_no_failure",
    ),
    Mutation(
        "ranks-are-not-watched",
        "distributed/ranks.py",
        "    return _watch.section(what)",
        "    return contextlib.nullcontext()",
        "test_failing_ranks.py::test_one_ranks_failure_ends_the_other_and_is_named[kill-1]",
    ),
    # signals
    Mutation(
        "steps-in-place-are-left",
        "offload/speculation.py",
        "return not self.early or self.generations > 1",
        "return True",
        _ASKED,
    ),
    Mutation("seeds-of-a-step-that-was-left", "engine/signals.py", "torch.set_rng_state(random_state)", "pass", _ASKED),
    Mutation(
        "handlers-of-others-lost",
        "engine/signals.py",
        "if callable(before) and before not in (_leave_at_once, signal.default_int_handler):",
        "if False:",
        _BETWEEN_STEPS,
    ),
    Mutation("handlers-left-behind", "engine/signals.py", "signal.signal(number, handler)", "pass", _BETWEEN_STEPS),
    Mutation(
        "ranks-stop-one-by-one",
        "engine/signals.py",
        "        self._told = ranks.largest_of_all_ranks(self._number or 0) or None\n        return self._told is not None",
        "        return self._number is not None",
        f"{_STOPPING}steps_in_place_are_finished_by_all_ranks[0]",
    ),
    Mutation(
        "votes-forgotten-by-a-rank-that-failed",
        "distributed/collective_replay.py",
        "Op.RELEASE: vote, ",
        "",
        "test_company.py::test_a_step_that_fails_anywhere_leaves_nobody_alone[vertical-True]",
    ),
    Mutation(
        "a-step-left-without-a-rank-that-failed",
        "engine/handlers.py",
        "                self.company.conclude()\n            raise StepLeft",
        "                pass\n            raise StepLeft",
        "test_company.py::test_where_the_others_leave_a_step_the_one_that_failed_leaves_it_too[True]",
    ),
    # headroom
    Mutation(
        "waiting-gradients-need-no-disk",
        "engine/disk_check.py",
        "return self.state + self.second + self.gradients",
        "return self.state + self.second",
        "test_headroom.py::test_too_little_room_is_refused_with_what_would_fit",
    ),
    Mutation(
        "checkpoints-need-no-room",
        "engine/disk_check.py",
        "told if disk.left >= disk.frozen else",
        "told if True else",
        "test_headroom.py::test_room_for_a_checkpoint_is_told_and_demanded_where_one_is_sure",
    ),
    Mutation(
        "open-files-uncounted",
        "engine/disk_check.py",
        "if hard != resource.RLIM_INFINITY and needed > hard:",
        "if False:",
        "test_headroom.py::test_open_files_are_counted_and_the_soft_limit_is_raised",
    ),
    # verified reads
    Mutation(
        "state-read-unchecked",
        "offload/step_pipeline.py",
        "self._checksums.check(extent.path, extent.offset, view.numpy())",
        "pass",
        f"{_FLIPPED}early state]",
    ),
    Mutation(
        "parameters-read-unchecked",
        "offload/param_store.py",
        "            resident.buffer.check_reads()\n",
        "",
        f"{_FLIPPED}parameters, beside]",
    ),
    Mutation(
        "waiting-gradients-unchecked",
        "offload/grad_store.py",
        "self._checksums.note(extent.path, extent.offset, whole.numpy())",
        "pass",
        f"{_FLIPPED}gradients]",
    ),
    Mutation(
        "lost-parameters-are-saved",
        "engine/zero3/live_state.py",
        " or isinstance(error, ChecksumError)",
        "",
        f"{_FLIPPED}parameters, whole]",
    ),
    Mutation(
        "what-nobody-knows-stays-unknown",
        "io/checksums.py",
        "            self.note(name, start, view[start - offset : end - offset])",
        "            pass",
        f"{_VERIFY}pieces_inside_a_read_are_checked_and_bytes_that_nobody_knows_are_learned",
    ),
    Mutation(
        "reads-for-nobody-are-checked",
        "io/buffers.py",
        "        buffer.forget_reads()\n",
        "",
        f"{_VERIFY}what_is_written_or_dropped_between_steps_is_no_damage",
    ),
    # powers of beta
    Mutation(
        "powers-left-as-they-come",
        "offload/cpu_adam.py",
        "        self._powers = settings.powers\n        for cut",
        "        for cut",
        "test_powers.py::test_updates_in_any_order_have_the_bits_of_those_in_stocks[[(0.9, 0.999), (0.8, 0.95)]]",
    ),
    # a run that stops
    Mutation(
        "stop-skips",
        "engine/zero3/step_driver.py",
        "if norm is None and optimizer.regime.stops:",
        "if False:",
        f"{_TEARS}[fp32-first]",
    ),
    Mutation(
        "discarded-in-place-not-torn",
        "offload/state_files.py",
        "self.torn |= any(",
        "self.torn |= any([]) and any(",
        f"{_TEARS}[fp32-first]",
    ),
    Mutation(
        "stop-pays-the-disk",
        "offload/speculation.py",
        "return 2 if self.possible and not (self.stops and self.certain) else 1",
        "return 2 if self.possible else 1",
        "test_nonfinite.py::test_stopping_costs_no_second_generation[0.0-stop-1]",
    ),
    Mutation(
        "speculation-in-place",
        "offload/speculation.py",
        "not (self.stops and self.certain)",
        "not self.stops",
        "test_nonfinite.py::test_stopping_costs_no_second_generation[1.0-stop-2]",
    ),
    Mutation(
        "state-stays-in-old-files",
        "offload/state_files.py",
        "self._bits[index] = self._other(index)",
        "pass",
        f"{_DELAY}[fp32-False-0.3]",
    ),
    Mutation(
        "failed-step-goes-on",
        "engine/handlers.py",
        "cleanup.callback(optimizer.abandon)",
        "pass",
        f"{_ERROR}[False]",
    ),
    # gradients that wait
    Mutation(
        "gradient-that-may-be-redone-given-up",
        "engine/zero3/step_driver.py",
        "final = early and regime.final and optimizer.clip_grad == 0.0",
        "final = early",
        f"{_TIERS}[fp32-0.05-0.3-True-0.5]",
    ),
    Mutation(
        "gradients-of-all-layers-kept",
        "offload/stepper.py",
        'due.gradients.finish(part, "early step" if early else "step")',
        "pass",
        "test_gradient_tiers.py::test_with_early_steps_a_few_layers_gradients_are_in_memory[12]",
    ),
    Mutation(
        "gradients-dropped-while-due",
        "engine/zero3/step_driver.py",
        "self._gradients.abandon(self.backlog.units)",
        "self._gradients.abandon(())",
        f"{_ERROR}[False]",
    ),
    Mutation(
        "gradient-not-read-from-ssd",
        "offload/stepper.py",
        "inputs = [] if early else due.gradients.extents(part)",
        "inputs: list[Extent] = []",
        f"{_TIERS}[fp32-0.05-1.0-False-0.0]",
    ),
    Mutation(
        "gradient-memory-used-again-before-it-is-written",
        "offload/grad_store.py",
        "            transfer.wait()\n",
        "",
        "test_gradient_tiers.py::test_gradients_written_late_are_written_before_their_memory_is_used_again",
    ),
    Mutation(
        "norm-ahead-of-gradients-on-their-way",
        "schedule/dependencies.py",
        "for unit in (PRE, *range(walk.num_layers))), *walk.holds, *walk.early]",
        "for unit in (PRE, *range(walk.num_layers))), *walk.early]",
        "test_step_rules.py::test_a_step_is_decided_when_what_it_made_is_where_it_waits",
    ),
    Mutation(
        "norm-ahead-of-early-steps-on-their-way",
        "schedule/dependencies.py",
        "for unit in (PRE, *range(walk.num_layers))), *walk.holds, *walk.early]",
        "for unit in (PRE, *range(walk.num_layers))), *walk.holds]",
        "test_step_rules.py::test_a_step_is_decided_when_what_it_made_is_where_it_waits",
    ),
    # steps that do not count
    Mutation(
        "weights-wherever-chunks-begin",
        "engine/zero3/chunks.py",
        "        zero_optimizer.place_as_stock(self)\n",
        "",
        "test_unusual_models.py::test_weights_behind_one_of_odd_size_begin_where_stocks_do[cpu]",
    ),
    Mutation(
        "state-that-changes-late-unseen",
        "model/state/forward_state.py",
        "        found = self._find(None) if self._owner.handled and looks else []\n",
        "        found = self._find(None) if self._learns else []\n",
        "test_late_state.py::test_it_has_stocks_bits[LateDict]",
    ),
    Mutation(
        "steps-count-with-what-they-learned",
        "model/state/forward_state.py",
        "        if self._owner.probes or (self._news and (is_last or not self._learns)):\n",
        "        if self._owner.probes:\n",
        "test_late_state.py::test_a_lone_micro_batch_runs_as_stock_does[False]",
    ),
    Mutation(
        "resets-not-seen",
        "model/state/forward_state.py",
        "                known.tried = self._owner.probes = True\n",
        "                known.tried = True\n",
        "test_late_state.py::test_it_has_stocks_bits[ClearedFirst]",
    ),
    Mutation(
        "horizontal-takes-turns",
        "engine/engine.py",
        '        in_turn = vertical.order == "horizontal"\n',
        "        in_turn = False\n",
        "test_late_state.py::test_horizontal_runs_as_stock_does[CountUp]",
    ),
    Mutation(
        "elements-of-state-not-kept",
        "model/state/block_state.py",
        "for tensor, count, before in self._plain if tensor._version != count]",
        "for tensor, count, before in self._plain if False]",
        "test_late_state.py::test_it_has_stocks_bits[InPlace]",
    ),
    Mutation(
        "evaluations-share-their-numbers",
        "engine/train_loop.py",
        "        seeds = self._evaluation_seeds(len(batches))\n",
        "        seeds = [None] * len(batches)\n",
        "test_late_state.py::test_micro_batches_of_an_evaluation_have_numbers_of_their_own",
    ),
    Mutation(
        "values-unseen",
        "model/state/snapshot.py",
        "and all(map(operator.is_, chain.from_iterable(values), self._values))",
        "and values is not None",
        "test_late_state.py::test_what_is_changed_after_four_steps_is_followed[give_counter]",
    ),
    Mutation(
        "empty-carriers-that-fill",
        "model/state/block_state.py",
        "return self._found_nothing() and not any(each.owner for each in self._carriers)",
        "return self._found_nothing()",
        "test_late_state.py::test_it_has_stocks_bits[Collecting]",
    ),
    Mutation(
        "state-of-whoever-came-last",
        "model/state/forward_state.py",
        "                track.install(track.version(micro_batch) if sample is None else sample)\n",
        "                track.version(micro_batch)\n",
        "test_forward_state.py::test_training_has_stocks_bits[SharedContext]",
    ),
    Mutation(
        "recompute-from-later-state",
        "model/state/block_state.py",
        "            track.item.install(version)\n        put_back(self._carried)\n",
        "            pass\n        put_back(self._carried)\n",
        "test_forward_state.py::test_training_has_stocks_bits[Counting]",
    ),
    Mutation(
        "written-tensors-without-gradient",
        "model/micro_batch.py",
        "            self.calls[block] = BlockCall(\n                inputs, len(flat), spec, found, list(written), ",
        "            self.calls[block] = BlockCall(\n                inputs, len(flat), spec, found, [], ",
        "test_forward_state.py::test_training_has_stocks_bits[SharedUserDict]",
    ),
    Mutation(
        "self-check-finds-nothing",
        "engine/self_check/check.py",
        "self._differ(found[0]) if found else None\n",
        "self._differ(found[0]) if found and False else None\n",
        "test_self_check.py::test_what_cannot_be_followed_is_found_by_name_and_right_in_stocks_order",
    ),
    Mutation(
        "self-check-compares-sums",
        "engine/self_check/digests.py",
        "    return _scaled(torch.randn((_ROW",
        "    return torch.ones_like(torch.randn((_ROW",
        "test_digests.py::test_swapped_elements_are_apart",
    ),
    Mutation(
        "small-gradients-may-be-anything",
        "engine/self_check/digests.py",
        "_SHARE: Final = 2.0**-3",
        "_SHARE: Final = 2.0**30",
        "test_self_check.py::test_a_small_gradient_that_is_wholly_wrong_is_found",
    ),
    Mutation(
        "self-check-leaves-what-hooks-collected",
        "engine/self_check/check.py",
        "partial(_put_back, snapshot, Snapshot(*survey_backward(self.model)))",
        "partial(_put_back, snapshot)",
        "test_self_check.py::test_what_hooks_of_the_backward_collect_is_put_back",
    ),
    Mutation(
        "running-statistics-of-a-step-that-was-left",
        "model/state/forward_state.py",
        "            self._undo()\n",
        "            self._conclude()\n",
        f"{_STOPPING}a_step_that_is_left_has_moved_no_running_statistics",
    ),
    Mutation(
        "half-a-commit-is-whole",
        "engine/zero3/step_driver.py",
        "            with self._optimizer.condition.torn_if_interrupted():  # masters that count and parameters that do not\n",
        "            if True:\n",
        "test_interrupts.py::test_an_interrupt_while_a_step_is_made_to_count_tears_the_state_loudly[parameters]",
    ),
    Mutation(
        "an-answer-of-the-disk-is-lost",
        "io/aio.py",
        "self._answers.extend(map(self._queue.native.wait, (self._id,)))",
        "self._answers.append(self._queue.native.wait(self._id))",
        "test_interrupts.py::test_a_signal_in_a_wait_for_the_disk_loses_no_completion",
    ),
    Mutation(
        "a-unit-is-forgotten-before-it-is-given-up",
        "offload/param_store.py",
        "            zero_params.leave_shards(resident.partitioned)\n",
        "            zero_params.leave_shards(resident.gathered[:0])\n",
        "test_cut_anywhere.py::test_an_interrupt_while_something_is_given_up[release]",
    ),
    Mutation(
        "what-a-call-has-left-stays",
        "engine/call_guard.py",
        "        self._calls.put_in_order(call)\n        return self\n",
        "        return self\n",
        "test_cut_anywhere.py::test_a_failed_call_whose_clean_up_was_cut_is_put_in_order_by_the_next",
    ),
    Mutation(
        "calls-within-calls",
        "engine/call_guard.py",
        "            if not self._joins:\n",
        "            if False:\n",
        "test_one_call.py::test_a_call_within_a_step_is_refused_and_the_step_goes_on[in_loss]",
    ),
    Mutation(
        "calls-of-two-threads",
        "engine/call_guard.py",
        "return call.thread is not threading.current_thread() and call.thread.is_alive()",
        "return False",
        "test_one_call.py::test_two_threads_do_not_call_at_once",
    ),
    Mutation(
        "calls-in-a-forked-child",
        "engine/call_guard.py",
        "        if self._pid != os.getpid():\n",
        "        if False:\n",
        "test_one_call.py::test_a_forked_child_is_told_and_its_parent_goes_on",
    ),
    Mutation(
        "signals-cut-the-engines-code",
        "interrupts.py",
        "    if not _blocks or ",
        "    if True or not _blocks or ",
        "test_interrupts.py::test_a_signal_in_a_backward_waits_for_the_end_of_its_event",
    ),
    Mutation(
        "reductions-uncounted",
        "engine/zero3/step_driver.py",
        "        self.num_reductions += 1  # not before: an error ahead of the collective leaves the other ranks alone in it\n",
        "",
        "test_ranks.py::test_a_disk_fault_of_one_rank_is_told_on_both_and_the_step_is_taken_when_it_is_over",
    ),
    Mutation(
        "no-batches-no-checkpoint",
        "engine/signals.py",
        "            if self._number is not None and self._alone:\n                self._stop(engine, finished=False)\n",
        "",
        f"{_STOPPING}a_signal_before_the_batches_end_is_obeyed_at_their_end",
    ),
    Mutation(
        "frozen-weights-preallocated-again",
        "offload/param_store.py",
        "idle = {Path(shard.path) for shard in found if shard.is_idle}",
        "idle: set[Path] = set()",
        f"{_RESUME}frozen_weights_that_a_checkpoint_shares_take_no_more_room",
    ),
    Mutation(
        "room-for-frozen-weights-not-looked-for-before-a-load",
        "engine/checkpoint/load.py",
        "        loading.make_room()\n",
        "",
        f"{_RESUME}frozen_weights_that_a_checkpoint_shares_take_no_more_room",
    ),
    Mutation(
        "refused-weights-live-on-in-memory",
        "compat/zero_params.py",
        "            refused(params)\n",
        "",
        f"{_RESUME}frozen_weights_that_a_checkpoint_shares_take_no_more_room",
    ),
    # what a step leaves behind
    Mutation(
        "hooks-left-on",
        "engine/module_hooks.py",
        "owner.pop(hook_id, None)",
        "pass",
        _PARITY,
    ),
    Mutation(
        "hooks-not-put-back",
        "engine/module_hooks.py",
        "if hook_id not in removed]",
        "if hook_id not in ids[key]]",
        "test_engine_api.py::test_evaluation_and_generation_between_steps",
    ),
    Mutation("stubs-left-on", "model/stubs.py", 'block.module.__dict__.pop("forward", None)', "pass", f"{_TOY_FAULT}[layer]"),
    # what a run says of its steps
    Mutation(
        "line-without-a-terminal",
        "engine/progress.py",
        "stream is not None and stream.isatty()",
        "stream is not None",
        "test_progress.py::test_the_line_is_for_terminals_unless_the_key_says_otherwise",
    ),
    Mutation(
        "line-in-the-way-of-text",
        "engine/progress.py",
        "self._bar.clear(nolock=True)",
        "pass",
        "test_progress.py::test_the_line_stands_below_what_a_step_prints_and_goes_with_it",
    ),
    Mutation(
        "line-left-after-the-step",
        "engine/progress.py",
        "leave=False",
        "leave=True",
        "test_progress.py::test_the_line_stands_below_what_a_step_prints_and_goes_with_it",
    ),
    Mutation(
        "detour-left-after-the-step",
        "engine/progress.py",
        'del attributes["write"]',
        "pass",
        "test_progress.py::test_an_error_in_a_step_takes_the_line_away",
    ),
    Mutation(
        "every-rank-says-how-it-goes",
        "engine/progress.py",
        "first = ranks.rank() == 0",
        "first = True",
        "test_ranks.py::test_the_first_rank_alone_says_how_the_steps_go",
    ),
    Mutation(
        "seconds-of-another-model",
        "engine/progress.py",
        "return rates if same and _describes",
        "return rates if same or _describes",
        "test_progress.py::test_seconds_of_another_layer_are_not_taken_for_this_models",
    ),
    Mutation(
        "defaults-of-a-configuration-not-compared",
        "engine/progress.py",
        "keys = (written.keys() | own.keys())",
        "keys = fields.keys()",
        "test_progress.py::test_seconds_of_another_layer_are_not_taken_for_this_models",
    ),
    Mutation(
        "ragged-step-with-an-even-ones-seconds",
        "engine/progress.py",
        "bool(self._rates) and tokens == self._facts.tokens * ran.schedule.num_micro_batches",
        "bool(self._rates)",
        "test_progress.py::test_the_bound_is_that_of_the_schedule_that_ran",
    ),
    Mutation(
        "bound-of-the-first-step-for-all",
        "engine/progress.py",
        "key = (ran.schedule, ran.due, whole)",
        "key = (next(iter(self._known), (ran.schedule,))[0], ran.due, whole)",
        "test_progress.py::test_the_bound_is_that_of_the_schedule_that_ran",
    ),
    Mutation(
        "seconds-of-other-steps-are-busy",
        "engine/progress.py",
        "(max(begun, start), min(ended, end))",
        "(begun, ended)",
        "test_progress.py::test_the_meter_counts_each_second_of_the_step_once_and_passes_all_on",
    ),
    Mutation(
        "trace-lost-beside-a-meter",
        "engine/progress.py",
        "self._inner.span(resource, name, start, end, num_bytes, issue=issue)",
        "pass",
        "test_progress.py::test_a_traced_step_was_as_busy_as_its_trace_says",
    ),
    # costs
    Mutation(
        "simulated-event-does-not-wait",
        "planner/simulate.py",
        "self.waits[later] += 1",
        "self.waits[later] += 0 if by_values else 1",
        "test_simulate.py::test_a_delayed_step_hands_over_values_and_its_files_are_read_later",
    ),
    Mutation(
        "bound-with-a-recompute-that-is-not-there",
        "planner/run_record.py",
        "recompute_last=not fused",
        "recompute_last=True",
        "test_yardstick.py::test_figures_of_a_run",
    ),
    Mutation(
        "table-of-bytes-without-the-redo",
        "planner/run_record.py",
        "max(0.0, taken - 1)",
        "0.0",
        "test_yardstick.py::test_the_closed_table_is_what_the_schedule_moves",
    ),
    Mutation(
        "traced-runs-among-the-untraced",
        "cli/bench/efficiency.py",
        "[each for each in every if not each.run.traced]",
        "list(every)",
        "test_yardstick.py::test_traced_runs_do_not_count_as_steps",
    ),
    Mutation(
        "freed-memory-is-not-kept",
        "io/host.py",
        "max(num_bytes, least)",
        "least",
        "test_budget.py::test_freed_memory_is_used_again_instead_of_mapped_anew",
    ),
    Mutation(
        "a-team-of-its-own-for-cpu-adam",
        "offload/cpu_adam.py",
        "torch.get_num_threads()  #",
        "#",
        "test_hostthreads.py::test_the_thread_that_trains_keeps_its_cores_and_others_take_one",
    ),
    Mutation(
        "every-rank-takes-all-cores",
        "io/host.py",
        " // num_ranks)))",
        ")))",
        "test_hostthreads.py::test_ranks_beside_devices_share_the_cores_for_adam",
    ),
    Mutation(
        "threads-wait-awake-beside-others",
        "io/openmp_wait.py",
        "                if awake.denied():\n",
        "                if awake.denied() and False:\n",
        "test_contention.py::test_a_busy_neighbour_takes_its_share_and_no_more",
    ),
    Mutation(
        "own-threads-are-others",
        "io/contention.py",
        "max(0.0, min(waited, len(cores()) * seconds - (self.used_s - before.used_s)) / seconds)",
        "waited / seconds",
        "test_contention.py::test_what_our_own_threads_take_from_each_other_is_not_denied",
    ),
    Mutation(
        "thread-begins-on-no-device",
        "offload/step_pipeline.py",
        "            self._begin()\n",
        "            pass\n",
        "test_pipeline.py::test_the_thread_begins_once_ahead_of_its_first_job",
    ),
    Mutation(
        "host-cores-counted-apart",
        "planner/bound.py",
        'return ("host_cores",)',
        "return (lane,)",
        "test_simulate.py::test_host_cores_count_once",
    ),
    Mutation(
        "handed-over-parameters-read-again",
        "planner/costs.py",
        "() if event.layer in self.in_memory else self._read_parameters(elements)",
        "self._read_parameters(elements)",
        "test_costs.py::test_what_a_delayed_step_hands_over_is_not_read",
    ),
    Mutation(
        "budget-advice-does-not-fit",
        "planner/memory_budget.py",
        "if total_bytes(budget(shape, changed, further), tier) <= limit:",
        "if changed:",
        "test_memory.py::test_a_budget_that_does_not_fit_names_keys_and_numbers_that_do",
    ),
    Mutation(
        "budget-not-checked",
        "engine/memory_check.py",
        "if found is not None]",
        "if found is False]",
        "test_budget.py::test_too_small_a_budget_is_refused_before_anything_is_made_and_the_advice_helps",
    ),
    Mutation(
        "each-rank-takes-the-whole-hosts-memory",
        "engine/memory_check.py",
        "else limit // ranks_here",
        "else limit",
        "test_budget.py::test_the_ranks_of_a_host_share_what_is_written",
    ),
    Mutation(
        "lockable-memory-not-checked",
        "engine/memory_check.py",
        "if lockable is not None and needed > lockable:",
        "if False:",
        "test_budget.py::test_memory_that_a_device_locks_is_not_held_against_the_users_limit[True--True]",
    ),
    Mutation(
        "devices-memory-held-against-the-users-limit",
        "engine/memory_check.py",
        " if pinned_memory.counts_as_locked() else None",
        "",
        "test_budget.py::test_memory_that_a_device_locks_is_not_held_against_the_users_limit[False-torch-False]",
    ),
    Mutation(
        "budget-counts-small-shards-as-files",
        "engine/memory_check.py",
        "* self._param_bytes >= self._json.least_bytes",
        "* self._param_bytes >= 0",
        "test_budget.py::test_the_budget_is_what_is_allocated[speculating]",
    ),
    Mutation(
        "stocks-buffers-keep-their-memory",
        "engine/engine.py",
        "        swap_buffers.rest_stock_buffers(self.module.parameters(), self.optimizer)\n        tiers =",
        "        tiers =",
        "test_budget.py::test_stocks_buffers_hold_memory_only_while_they_are_used",
    ),
    Mutation(
        "stocks-buffers-lose-what-they-hold",
        "compat/swap_buffers.py",
        "if len(swapper.available_buffer_ids) == swapper.param_buffer_count:",
        "if True:",
        "test_budget.py::test_stocks_buffers_hold_memory_only_while_they_are_used",
    ),
    Mutation(
        "a-drivers-pages-given-back",
        "compat/swap_buffers.py",
        "if any(buffer.is_pinned() for buffer in free):",
        "if False:",
        "test_budget.py::test_buffers_that_a_driver_has_locked_keep_their_pages",
    ),
    Mutation(
        "control-groups-ignored",
        "io/host.py",
        "if limit is not None and used is not None and limit < _UNLIMITED:",
        "if False:",
        "test_budget.py::test_a_control_groups_limit_counts_in_both_versions",
    ),
    Mutation(
        "pieces-summed-on-the-host",
        "cli/bench/block_timer.py",
        "rounding, device=device, pairs",
        "rounding, pairs",
        "test_limits.py::test_gradients_of_a_models_pieces_are_summed_where_the_model_is",
    ),
    Mutation(
        "shared-parameters-of-glue-run-twice",
        "model/autograd_segments.py",
        "wanted = {*edges, *((leaf, 0) for leaf in leaves)}",
        "wanted = {*edges}",
        "test_numerics.py::test_parameters_that_several_pieces_of_glue_share[SharedBias]",
    ),
    # the machine as a run found it, and what its tiers hold
    Mutation(
        "speed-of-the-host-forgotten",
        "cli/bench/host_speed.py",
        "return mean(known) / usual if known and usual else 1.0",
        "return 1.0",
        "test_yardstick.py::test_a_step_has_the_speed_that_the_host_had_around_it",
    ),
    Mutation(
        "run-that-is-gauged-hangs-on-the-one-that-gauges",
        "cli/bench/host_speed_server.py",
        "; kill -CONT {pid}",
        "",
        "test_gauge.py::test_a_stopped_process_goes_on_when_the_one_that_measures_is_killed",
    ),
    Mutation(
        "layers-kernels-sum-in-the-models-dtype",
        "engine/memory_check.py",
        "max(map(zero_params.full_numel, params)) * FP32_BYTES",
        "max(map(zero_params.full_numel, params)) * self._param_bytes",
        "test_budget.py::test_a_layers_backward_has_its_gradients_and_an_fp32_copy_of_the_largest",
    ),
    Mutation(
        "run-goes-on-while-it-is-gauged",
        "cli/bench/host_speed_server.py",
        "        os.kill(pid, signal.SIGSTOP)\n",
        "        pass\n",
        "test_gauge.py::test_the_process_that_asks_stands_still_meanwhile",
    ),
    Mutation(
        "activations-beyond-their-budget",
        "offload/tensor_swapper.py",
        "            if held + num_bytes > self._host_limit:",
        "            if False:",
        "test_parcels.py::test_beyond_the_limit_nothing_is_taken_and_what_is_there_comes_back",
    ),
    Mutation(
        "budget-leaves-activations-everything",
        "engine/memory_check.py",
        "max(0, allowed - needed + max(0, setup))",
        "allowed",
        "test_budget.py::test_activations_may_take_what_the_budget_leaves",
    ),
    Mutation(
        "small-pages",
        "io/host.py",
        "    _libc().madvise(base + start, num_bytes, _HUGEPAGE)  # a kernel without them gives plain pages\n",
        "",
        "test_locked.py::test_a_large_buffer_is_in_huge_pages_and_its_memory_goes_with_it",
    ),
    Mutation(
        "stocks-folder-loaded-in-host-memory",
        "engine/checkpoint/manifest.py",
        "        if stock is not None:",
        "        if False:",
        f"{_RESUME}a_folder_of_stocks_is_refused_and_nothing_is_unpickled",
    ),
    # schedule and files
    Mutation(
        "layer-released-at-the-turn",
        "schedule/passes.py",
        "visits[i + 1 : i + 2 + window]",
        "visits[i + 1 : i + 1 + window]",
        "test_io.py::test_every_layer_is_fetched_once_per_sweep_and_the_prefix_once",
    ),
    Mutation(
        "optimizer-files-not-preallocated",
        "engine/disk_check.py",
        "require(one)",
        "pass",
        "test_io.py::test_initialize_preallocates_every_file[0.5-False-1]",
    ),
    Mutation(
        "gradient-file-alone",
        "engine/zero3/optimizer.py",
        "disk_check.require(file.sizes)",
        '__import__("ds_vertical.io.files").files.preallocate(file.sizes)',
        "test_ranks.py::test_room_for_gradients_that_one_rank_lacks_ends_both",
    ),
    Mutation(
        "ranks-decide-alone",
        "distributed/ranks.py",
        "dist.all_reduce(votes, op=dist.ReduceOp.MIN)",
        "pass",
        "test_ranks.py::test_room_that_one_rank_lacks_no_rank_uses",
    ),
    Mutation(
        "files-of-a-rank-with-room-stay",
        "engine/disk_check.py",
        "files.remove_files(path for path in wanted if path not in there)",
        "pass",
        "test_ranks.py::test_room_that_one_rank_lacks_no_rank_uses",
    ),
    Mutation(
        "parameter-files-not-checked",
        "engine/zero3/optimizer.py",
        "files.check_files({file.path: file.num_bytes for file in written})",
        "pass",
        "test_io.py::test_a_parameter_file_of_the_wrong_size_is_refused_with_the_numbers[short]",
    ),
    # doctor
    Mutation(
        "doctor-errors-are-success",
        "cli/doctor/command.py",
        "return _ERRORS_FOUND if",
        "return 0 if",
        f"{_DOCTOR}an_error_is_exit_status_1_with_what_mends_it",
    ),
    Mutation(
        "check-that-dies-ends-the-rest",
        "cli/doctor/worker.py",
        "return under_way + 1",
        "return len(checks)",
        f"{_DOCTOR}a_check_that_raises_dies_or_leaves_takes_no_other_along",
    ),
    Mutation(
        "bytes-that-come-back-not-compared",
        "cli/doctor/ssd_path.py",
        "return received == sent and",
        "return",
        f"{_DOCTOR}other_bytes_than_were_written_are_seen",
    ),
    Mutation(
        "mount-below-another-told",
        "io/files.py",
        "len(point.parts) >= len(",
        "len(point.parts) > len(",
        f"{_DOCTOR}the_deepest_and_last_mount_holds_a_path",
    ),
    Mutation(
        "dead-run-called-live",
        "cli/doctor/ssd_path.py",
        'if tenant.state == "stale":',
        "if False:",
        f"{_DOCTOR}live_runs_are_told_from_dead_ones",
    ),
    Mutation(
        "stale-compile-lock-called-live",
        "cli/doctor/installation.py",
        "if holders or not build_lock.is_stale(lock):",
        "if True:",
        f"{_DOCTOR}live_locks_are_told_from_stale_ones",
    ),
    Mutation(
        "live-compile-lock-called-stale",
        "cli/doctor/installation.py",
        "holders = build_lock.holders(lock)",
        "holders = []",
        f"{_DOCTOR}live_locks_are_told_from_stale_ones",
    ),
    Mutation(
        "memlock-limit-not-held-against-buffers",
        "cli/doctor/hardware.py",
        "if lockable is not None and lockable < needed:",
        "if False:",
        f"{_DOCTOR}a_memlock_limit_is_held_against_the_buffers_of_the_json",
    ),
    Mutation(
        "stocks-traps-in-the-vertical-arm",
        "cli/doctor/stock_traps.py",
        "if trap.arms & case.arms:",
        "if True:",
        f"{_TRAPS}a_trap_of_stock_alone_is_told_for_the_stock_arm_alone",
    ),
    Mutation(
        "block-size-of-any-bytes",
        "cli/doctor/stock_traps.py",
        'elif key == "block_size" and value % _SECTOR_BYTES:',
        "elif False:",
        f"{_TRAPS}a_trap_of_both_arms_is_told_for_each",
    ),
    Mutation(
        "auto-means-the-default-everywhere",
        "config/cross_check.py",
        'lenient = path.partition(".")[0] in _LENIENT',
        "lenient = True",
        f"{_TRAPS}auto_is_told_with_what_to_write",
    ),
    Mutation(
        "auto-trained-with",
        "engine/api.py",
        "    refuse_unfilled(config)\n",
        "",
        "test_engine_api.py::test_what_only_a_trainer_fills_in_is_refused_before_anything_is_made",
    ),
    Mutation(
        "a-drive-for-each-rank",
        "cli/plan/command.py",
        "whole.machine.shared(options.num_ranks)",
        "whole.machine",
        "test_plan.py::test_ranks_of_one_machine_share_its_ssd_and_its_host",
    ),
    Mutation(
        "timed-though-it-cannot-fit",
        "planner/search.py",
        "if all(linear_program.shortage(case) for case in untimed):",
        "if False:",
        "test_plan.py::test_what_does_not_fit_is_refused_and_never_timed",
    ),
    Mutation(
        "misspelt-top-level-keys-pass",
        "cli/doctor/config_checks.py",
        "if key in TOP_LEVEL_KEYS:",
        "if True:",
        f"{_TRAPS}keys_that_deepspeed_ignores_are_told_with_what_was_meant",
    ),
    Mutation(
        "ranks-choose-their-own-folder",
        "distributed/ranks.py",
        "torch.distributed.broadcast_object_list(shared, src=0, device=torch.device(accelerator.device_name()))",
        "pass",
        "test_ranks.py::test_prepare_gives_both_ranks_the_same_folder_and_each_call_another",
    ),
)


@contextmanager
def package_copy(mutations: Sequence[Mutation] = ()) -> Iterator[Path]:
    """A folder with a copy of the package, changed by `mutations`."""
    with tempfile.TemporaryDirectory(prefix="ds_vertical-mutant-") as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        for mutation in mutations:
            mutation.apply(Path(folder) / PACKAGE)
        yield Path(folder)


def locate(node: str) -> str:
    """The pytest node with its file's path: files of tests have names of their own, in whichever room they are."""
    file, _, test = node.partition("::")
    return f"{next((ROOT / 'tests').rglob(file))}::{test}"


def run_tests(folder: Path, nodes: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run pytest nodes on the package in `folder`. Raises RuntimeError when the tests could not run at all."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    check = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
    found = subprocess.run(check, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_relative_to(folder):
        raise RuntimeError(f"the tests would run on {found}, not on the copy in {folder}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "--basetemp", str(folder / "tmp")]
    command += [locate(node) for node in nodes]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s)
    if done.returncode > _TESTS_FAILED:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    return done


def is_killed(mutation: Mutation, limit_s: float = 900) -> bool:
    """Whether the mutation's test fails on the mutated copy (or crashes: SSD reads into memory given back do that)."""
    with package_copy([mutation]) as folder:
        return run_tests(folder, [mutation.killer], limit_s).returncode != 0


def killers(mutations: Sequence[Mutation] = MUTATIONS) -> list[str]:
    return list(dict.fromkeys(mutation.killer for mutation in mutations))


def _chosen(names: Sequence[str]) -> list[Mutation]:
    known = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such mutation: {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in names] or list(MUTATIONS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the mutations and their tests, run nothing")
    args = parser.parse_args(arguments)
    mutations = _chosen(args.names)
    if args.list:
        print("\n".join(f"{m.name:36} {m.file:16} {m.killer}" for m in mutations))
        return 0
    survivors = []
    for mutation in mutations:
        start = time.monotonic()
        killed = is_killed(mutation)
        survivors += [] if killed else [mutation.name]
        verdict = "killed" if killed else "SURVIVED"
        print(f"{verdict:9} {mutation.name:36} {time.monotonic() - start:5.1f} s  {mutation.killer}", flush=True)
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
