"""Every number of micro-batches that is advised can be written, and is what a rank then brings at most."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from ds_vertical.config.cross_check import check
from ds_vertical.config.file import num_micro_batches
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.distributed import elastic
from ds_vertical.engine.memory_check import _fewer
from ds_vertical.planner.budget.fewer import FewerMicroBatches
from ds_vertical.types import RunSettings

RANKS = 3


def json_with(steps: int | None, section: dict[str, Any], **top: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"bf16": {"enabled": True}, "optimizer": optimizer, "zero_optimization": zero, "vertical_schedule": section} | top
    return config if steps is None else config | {"gradient_accumulation_steps": steps}


def read(config: dict[str, Any]) -> tuple[FewerMicroBatches, RunSettings]:
    """What a run makes of it. Raises ConfigError where it is refused."""
    section = load_section(config)
    assert section is not None
    check(config, section)
    resolved, steps = resolve(section, 0), num_micro_batches(config, RANKS)
    if resolved.elastic is not None:
        elastic._refuse_total(resolved.elastic, steps, RANKS)
    return _fewer(config, resolved, RANKS), resolved


def changed(config: dict[str, Any], advice: str) -> dict[str, Any]:
    made, found = copy.deepcopy(config), re.findall(r'"([a-z_.]+)": (\d+) \(now (\d+)\)', advice)
    assert found and len(found) == advice.count(": ")
    for path, value, _ in found:
        *outer, key = path.split(".")
        place = made
        for name in outer:
            place = place[name]
        place[key] = int(value)
    return made


CASES: list[tuple[dict[str, Any], list[int]]] = [
    (json_with(5, {}, train_micro_batch_size_per_gpu=2), [4, 3, 2, 1]),
    (json_with(4, {}, train_batch_size=4 * 2 * RANKS, train_micro_batch_size_per_gpu=2), [3, 2, 1]),
    (json_with(None, {}, train_batch_size=4 * 2 * RANKS, train_micro_batch_size_per_gpu=2), [3, 2, 1]),
    (json_with(4, {}, train_batch_size=4 * 2 * RANKS), [3, 2, 1]),
    (json_with(None, {}, train_micro_batch_size_per_gpu=2), []),
    (json_with(1, {}, train_micro_batch_size_per_gpu=2), []),
    (json_with(8, {"acco": {}}, train_micro_batch_size_per_gpu=2), [6, 4, 2]),
    (json_with(2, {"acco": {}}, train_micro_batch_size_per_gpu=2), []),
    (json_with(3, {"elastic": {}}, train_micro_batch_size_per_gpu=2), [6, 5, 4, 3, 2, 1]),
    (json_with(3, {"elastic": {"max_micro_batches": 3}}, train_micro_batch_size_per_gpu=2), [2, 1]),
    (json_with(3, {"elastic": {"total": 10, "min_micro_batches": 2}}, train_micro_batch_size_per_gpu=2), [5, 4, 3, 2]),
    (json_with(3, {"elastic": {"min_micro_batches": 3}}, train_micro_batch_size_per_gpu=2), []),
    (json_with(3, {"acco": {}, "elastic": {"min_micro_batches": 2}}, train_micro_batch_size_per_gpu=2), [4, 3, 2]),
]


@pytest.mark.parametrize(("config", "counts"), CASES, ids=str)
def test_each_number_that_is_advised_is_taken_and_is_the_most_that_a_rank_brings(
    config: dict[str, Any], counts: list[int]
) -> None:
    now, _ = read(config)
    assert list(now.counts()) == counts and all(count < now.most for count in counts)
    for count in counts:
        found, _ = read(changed(config, now.written(count)))
        assert found.most == count
        batch, size = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
        if batch is not None and size is not None:
            assert found.batch == count * size * RANKS
    assert (now.told is None) == (not counts)


@pytest.mark.parametrize(("config", "counts"), [case for case in CASES if case[1]], ids=str)
def test_the_most_that_fits_is_what_is_written(config: dict[str, Any], counts: list[int]) -> None:
    now, _ = read(config)
    for limit in counts:
        assert now.fitting(lambda count, limit=limit: count <= limit) == now.written(limit)
    assert now.fitting(lambda count: False) is None
    assert "(now" not in now.written(counts[-1], says_now=False)


def test_where_nobody_knows_how_many_fit_the_words_name_what_is_refused() -> None:
    def told(config: dict[str, Any]) -> str | None:
        return read(config)[0].told

    assert told(CASES[0][0]) == "fewer gradient_accumulation_steps"
    assert told(CASES[2][0]) == f"a smaller train_batch_size (now {8 * RANKS})"
    assert told(CASES[6][0]) == "fewer gradient_accumulation_steps, an even number"
    assert told(CASES[8][0]) == 'a smaller "vertical_schedule.elastic.max_micro_batches" (now 7, 3 or more)'
    assert told(CASES[9][0]) == 'a smaller "vertical_schedule.elastic.total" (now 9, 3 or more)'


def test_a_log_of_counts_has_to_go_or_to_be_anothers() -> None:
    config = json_with(3, {"elastic": {"counts": "/logs/first"}}, train_micro_batch_size_per_gpu=1)
    now, _ = read(config)
    assert now.written(4).endswith('(now 7) with null, or the log of a run that had it, as "counts"')
