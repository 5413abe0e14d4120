"""Steps of two halves (`vertical_schedule.acco`): what they are refused with, and what they write into DeepSpeed's part.

What follows from the number of ranks is refused in `engine.acco.refusals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ds_vertical.config.file import DeepSpeedJson
from ds_vertical.config.levels import PARTITION_SIZE
from ds_vertical.config.section import SECTION, VerticalConfig, load_section, show
from ds_vertical.types import OFFLOAD_DEVICES, Tier

_ZERO: Final = "zero_optimization"
_ACCO: Final = f"{SECTION}.acco"
_PERSISTENCE: Final = "stage3_param_persistence_threshold"
_STATE_BYTES: Final = 12  # of each parameter: its master and two moments in fp32
_NARROW: Final = ("bf16", "bfloat16", "fp16")  # sections with which a parameter has 2 bytes, and not 4
ValueAt = Callable[[str], object]  # of a dotted path in the whole JSON; None where it says nothing


def with_acco(config: Mapping[str, object]) -> DeepSpeedJson:
    """A shallow copy of a whole configuration, with the section on top, in which no parameter stays on the device where the
    section asks for two halves a step: each half computes with other values. Raises ConfigError for a wrong section."""
    section, zero = load_section(config), config.get(_ZERO)
    if section is None or not section.enabled or section.acco is None or not isinstance(zero, Mapping):
        return dict(config)
    written = zero.get(_PERSISTENCE)
    return {**config, _ZERO: {**zero, _PERSISTENCE: 0}} if written in (None, "auto") else dict(config)


def acco_faults(value_at: ValueAt, section: VerticalConfig) -> list[str]:
    """What is wrong with a section that asks for two halves a step, beside the rest of the JSON."""
    if section.acco is None:
        return []
    own = [*_timing_faults(section), *_levels_faults(section)]
    return [*own, *_place_faults(value_at), *_count_faults(value_at, section)]


def _timing_faults(section: VerticalConfig) -> list[str]:
    """The halves fix when steps are taken."""
    faults = []
    if section.order == "horizontal":
        faults.append(
            f'{_ACCO}: got {show(section.acco and section.acco.model_dump())} with order "horizontal", in which no step is'
            ' taken beside the forwards; remove it, or write "order": "vertical"'
        )
    if section.optimizer_speculation:
        faults.append(
            f"{SECTION}.optimizer_speculation: got true with {_ACCO}, whose prediction is what is stepped before the norm is"
            " known; write false or null"
        )
    if section.optimizer_delay not in (None, 1):
        faults.append(
            f"{SECTION}.optimizer_delay: got {show(section.optimizer_delay)} with {_ACCO}, where the next half takes the whole"
            " step; write 1 or null"
        )
    return faults


def _levels_faults(section: VerticalConfig) -> list[str]:
    """The halves keep copies of their own, of all units."""
    assert section.acco is not None
    levels, copies = section.levels, section.acco.copies
    faults = [
        f"{SECTION}.levels.{key}: got {show(value)} with {_ACCO}, which keeps two copies of all units; remove it"
        for key, value in (("copy_share", levels.copy_share), ("copy_on_device", levels.copy_on_device or None))
        if value is not None
    ]
    if copies == "node" and levels.ranks_per_node == 1:
        faults.append(
            f'{_ACCO}.copies: got "node" without {PARTITION_SIZE}, by which a node is one rank; write {PARTITION_SIZE}, the'
            ' number of ranks on a node, or "copies": "rank"'
        )
    if copies == "rank" and levels.ranks_per_node > 1:
        faults.append(
            f'{_ACCO}.copies: got "rank" with {PARTITION_SIZE} {levels.ranks_per_node}, with which the ranks of a node share a'
            f' copy; write "node", or remove {PARTITION_SIZE}'
        )
    return faults


def _place_faults(value_at: ValueAt) -> list[str]:
    """State is read twice in a step and written once, copies of the weights are in memory whatever rests on SSD."""
    faults, on_ssd = [], OFFLOAD_DEVICES[Tier.SSD]
    if value_at(f"{_ZERO}.offload_optimizer.device") == on_ssd:
        halves, exact = _ssd_bytes(value_at)
        faults.append(
            f"{_ZERO}.offload_optimizer.device: got {show(on_ssd)} with {_ACCO}, which would move {halves} bytes for"
            f' each parameter and step to and from the SSD, where the exact step moves {exact}; write "cpu", or remove acco'
        )
    if value_at(f"{_ZERO}.offload_param.device") == on_ssd:
        faults.append(
            f"{_ZERO}.offload_param.device: got {show(on_ssd)} with {_ACCO}, which keeps two copies of the weights in memory"
            ' anyway; write "cpu" or "none", or remove acco'
        )
    stays = value_at(f"{_ZERO}.{_PERSISTENCE}")
    if stays is not None and stays != 0:
        faults.append(
            f"{_ZERO}.{_PERSISTENCE}: got {show(stays)} with {_ACCO}, whose halves compute with different values of each"
            " parameter, so that none stays on the device; write 0 or remove it"
        )
    return faults


def _ssd_bytes(value_at: ValueAt) -> tuple[int, int]:
    """Bytes that a step reads from the SSD and writes there for each parameter, with optimizer state on it: two halves', then
    the exact step's. The exact step reads and writes the state once, and where weights are there, too, it reads them twice and
    writes them once. Two halves read the state once more, for the prediction, and read and write the weights twice as often."""
    if value_at(f"{_ZERO}.offload_param.device") != OFFLOAD_DEVICES[Tier.SSD]:
        weights = 0
    else:
        weights = 3 * (2 if any(value_at(f"{name}.enabled") for name in _NARROW) else 4)
    return 3 * _STATE_BYTES + 2 * weights, 2 * _STATE_BYTES + weights


def _count_faults(value_at: ValueAt, section: VerticalConfig) -> list[str]:
    """Each half of a step needs micro-batches, as many as the other one unless ranks bring different numbers."""
    elastic = section.elastic
    if elastic is not None:
        if elastic.min_micro_batches >= 2:
            return []
        return [
            f"{SECTION}.elastic.min_micro_batches: got {elastic.min_micro_batches} with {_ACCO}, in which a rank brings one"
            " micro-batch to each half of a step, at least; write 2 or more"
        ]
    count = value_at("gradient_accumulation_steps")
    fault = odd_fault(count) if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
    return [] if fault is None else [fault]


def odd_fault(count: int, derived: str = "") -> str | None:
    """What is wrong with a number of micro-batches that has no halves; None: nothing. `derived`: where the number comes from
    that the JSON does not write."""
    if count % 2 == 0:
        return None
    near = "2" if count == 1 else f"{count - 1} or {count + 1}"
    return (
        f"gradient_accumulation_steps: got {count}{derived} with {_ACCO}, in which a step has two halves of as many"
        f" micro-batches; write {near}, or remove acco"
    )
