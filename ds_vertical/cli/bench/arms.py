"""The two configurations of an A/B: what is written for the stock arm, what for the vertical arm, and what is refused.

Both arms train the same thing. The stock arm may be given transfer settings of its own (its best ones), nothing else:
a difference that moves bits, or places data elsewhere, would make losses or bytes incomparable.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_vertical.cli.bench.machine_info import accelerator
from ds_vertical.cli.common import JsonObject
from ds_vertical.compat.stock_config import check_zero
from ds_vertical.config.cross_check import check
from ds_vertical.config.deepspeed_keys import AIO_KEYS, TOP_LEVEL_KEYS
from ds_vertical.config.file import read_config
from ds_vertical.config.section import SECOND_PLACE, SECTION, load_section
from ds_vertical.errors import ConfigError
from ds_vertical.types import OFFLOAD_DEVICES, Tier

_ABSENT = object()
_ZERO = "zero_optimization"

# [Note: transfer settings]
# These decide how bytes move, never which values: I/O calls, staging buffers and how far stock looks ahead.
# Left out on purpose: sub_group_size (cuts the norm and CPU Adam's calls), reduce_bucket_size (order of sums over three
# or more ranks), memory_efficient_linear (another matrix product), the persistence threshold, max_in_cpu, device and
# nvme_path (where data lies: the arms would not be given the same machine).
_OFFLOAD_TRANSFER = ("buffer_count", "buffer_size", "pin_memory")
TRANSFER_PATHS = frozenset(
    [
        *(f"{_ZERO}.offload_param.{name}" for name in _OFFLOAD_TRANSFER),
        *(f"{_ZERO}.offload_optimizer.{name}" for name in _OFFLOAD_TRANSFER),
        *(f"{_ZERO}.offload_optimizer.{name}" for name in ("pipeline_read", "pipeline_write", "fast_init")),
        *(
            f"{_ZERO}.{prefix}{name}"
            for prefix in ("stage3_", "")
            for name in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
        ),
        f"{_ZERO}.overlap_comm",
        f"{_ZERO}.contiguous_gradients",
    ]
)
TRANSFER_SECTION = "aio"


@dataclass(frozen=True)
class Arms:
    """The DeepSpeed configuration of each arm, and warnings about settings that are odd and not wrong."""

    stock: JsonObject
    vertical: JsonObject
    warnings: tuple[str, ...]


def build_arms(
    config: str | os.PathLike[str],
    stock_config: str | os.PathLike[str] | None,
    assignments: Sequence[str],
    num_ranks: int = 1,
    with_stock: bool = True,
) -> Arms:
    """Reads the files, applies the `KEY=VALUE` assignments to both, and derives the two arms.

    Raises ConfigError, naming file and JSON path, for anything that DeepSpeed or the vertical arm would refuse (what the stock
    arm alone would, where it is run: `with_stock`), and for a stock configuration that differs in more than transfer settings.
    """
    base = _read_assigned(config, assignments)
    stock = dict(base if stock_config is None else _read_assigned(stock_config, assignments))
    if SECTION in base:  # seeds of micro-batches are read in both arms: one section serves both
        stock[SECTION] = base[SECTION]
    arms = _with_enabled(stock, False), _with_enabled(base, True)
    for source, arm in zip((stock_config or config, config), arms, strict=True):
        try:
            _check_arm(arm, num_ranks, with_stock)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    if stock_config is not None:
        _refuse_unlike(arms[1], arms[0], str(config), str(stock_config))
    section = load_section(arms[1])
    assert section is not None
    warnings = check(arms[1], section)
    if len(section.nvme_paths or ()) > 1:
        warnings.append(
            f"{SECTION}.nvme_paths: the stock arm has no such key, and keeps everything in {ssd_folders(stock)[0]}; for one SSD"
            f" in both arms write --set {SECTION}.nvme_paths=null"
        )
    return Arms(stock=arms[0], vertical=arms[1], warnings=tuple(warnings))


def ssd_folders(config: JsonObject) -> list[str]:
    """Where a configuration keeps parameters and optimizer state on SSD, on each of several SSDs; empty where it keeps neither
    there."""
    sections = [config[_ZERO].get(name) or {} for name in ("offload_param", "offload_optimizer")]
    found = [section.get("nvme_path") for section in sections if section.get("device") == OFFLOAD_DEVICES[Tier.SSD]]
    several = (config.get(SECTION) or {}).get("nvme_paths") or () if any(found) else ()
    return list(dict.fromkeys(os.fspath(path) for path in (*several, *sorted(filter(None, found)))))


def _read_assigned(source: str | os.PathLike[str], assignments: Sequence[str]) -> JsonObject:
    if not os.path.isfile(source):  # noqa: PTH113  # false, where Path.is_file raises, below a folder that may not be read
        raise ConfigError(f"{source}: no such file; write the path of a DeepSpeed JSON")
    config = read_config(source)
    for assignment in assignments:
        _assign(config, assignment)
    return config


def _assign(config: JsonObject, assignment: str) -> None:
    """Applies one `dotted.key=JSON` in place, making the objects on the way. Raises ConfigError for nonsense."""
    key, equals, text = assignment.partition("=")
    parts = key.strip().removeprefix(f"{_ZERO}." if key.strip().startswith(SECOND_PLACE) else "").split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {assignment}: write KEY=VALUE, e.g. --set gradient_accumulation_steps=16")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--set {assignment}: {text!r} is not JSON ({error.msg}); write a number, true, false, null, or a string "
            f"in quotes: --set '{key}={json.dumps(text)}'"
        ) from None
    if parts[0] not in TOP_LEVEL_KEYS and parts[0] not in config:
        raise ConfigError(f"--set {assignment}: {_unknown_key(parts[0], TOP_LEVEL_KEYS)}")
    if parts[0] == TRANSFER_SECTION and len(parts) == 2 and parts[1] not in AIO_KEYS:
        raise ConfigError(f"--set {assignment}: {_unknown_key(parts[1], AIO_KEYS)}")
    holder = config
    for depth, part in enumerate(parts[:-1], start=1):
        below = holder.setdefault(part, {})
        if not isinstance(below, dict):
            path = ".".join(parts[:depth])
            raise ConfigError(f"--set {assignment}: {path} is {json.dumps(below)}, which holds no keys; set {path}")
        holder = below
    holder[parts[-1]] = value


def _unknown_key(key: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    guess = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(sorted(known))}"
    return f"DeepSpeed knows no key {json.dumps(key)} there and would ignore it; {guess}"


def _with_enabled(config: JsonObject, enabled: bool) -> JsonObject:
    """A copy whose section says which arm it is; the section is made where it is absent."""
    copied = copy.deepcopy(dict(config))
    section = copied.setdefault(SECTION, {})
    if isinstance(section, dict):  # anything else is refused by load_section, with the words for it
        section["enabled"] = enabled
    return copied


def _check_arm(config: JsonObject, num_ranks: int, with_stock: bool) -> None:
    section = load_section(config)
    assert section is not None
    # The stock arm must pass as well: both train the same thing, and a file that cannot be the vertical arm's base
    # differs in more than transfer settings.
    check(config, section.model_copy(update={"enabled": True}))
    if with_stock and not section.enabled:
        check(config, section, accelerator())
    if section.elastic is not None and section.elastic.counts is None:
        raise ConfigError(
            f"{SECTION}.elastic.counts: got null, with which the arms would not train on the same micro-batches; write the log"
            " of a run with elastic, whose counts both arms then take, or remove elastic"
        )
    check_zero(config[_ZERO])
    _check_batch(config, num_ranks)


def _check_batch(config: JsonObject, num_ranks: int) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, accumulation = (None if config.get(key) == "auto" else config.get(key) for key in keys)
    if train and micro and accumulation and train != micro * accumulation * num_ranks:
        raise ConfigError(
            f"train_batch_size: got {train}, but train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{accumulation} x {num_ranks} ranks is {micro * accumulation * num_ranks}; leave train_batch_size out"
        )


def _refuse_unlike(vertical: JsonObject, stock: JsonObject, config: str, stock_config: str) -> None:
    faults = [
        f"{path}: {_show(left)} in {config}, {_show(right)} in {stock_config}"
        for path, left, right in _differences(vertical, stock, ())
        if not _may_differ(path)
    ]
    if faults:
        raise ConfigError(
            "--stock-config may differ only in transfer settings (aio, buffers, prefetch, pipeline); "
            "make these equal:\n" + "\n".join(faults)
        )


def _differences(left: object, right: object, path: tuple[str, ...]) -> Iterator[tuple[str, object, object]]:
    """(dotted path, left, right) of every leaf that is not the same; an absent key is `_ABSENT`."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted({*left, *right}):
            yield from _differences(left.get(key, _ABSENT), right.get(key, _ABSENT), (*path, key))
    elif isinstance(left, Mapping) and right is _ABSENT:
        yield from _differences(left, {}, path)
    elif isinstance(right, Mapping) and left is _ABSENT:
        yield from _differences({}, right, path)
    elif left != right or isinstance(left, bool) != isinstance(right, bool):
        yield ".".join(path), left, right


def _may_differ(path: str) -> bool:
    section = path.split(".")[0]
    return section in (TRANSFER_SECTION, SECTION) or path in TRANSFER_PATHS


def _show(value: object) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)
