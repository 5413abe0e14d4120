"""A DeepSpeed configuration as users give it: a dict, the path of a JSON file, or base64 of JSON."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from pathlib import Path
from typing import Any

from ds_vertical.config.section import show, with_section_on_top
from ds_vertical.errors import ConfigError

DeepSpeedJson = dict[str, Any]  # a whole configuration, with whatever the user has written


def read_config(config: DeepSpeedJson | str | os.PathLike[str]) -> DeepSpeedJson:
    """The DeepSpeed configuration as a dict of the caller's own, with the section at the top level (`with_section_on_top`).

    Accepts what deepspeed.initialize does: a dict (deep-copied), the path of a JSON file (comments allowed, as hjson
    reads them) or base64 of JSON (url-safe or standard alphabet). Raises ConfigError, also on duplicate keys, and where both
    places have a section.
    """
    return with_section_on_top(read_as_written(config))


def read_as_written(config: DeepSpeedJson | str | os.PathLike[str]) -> DeepSpeedJson:
    """As `read_config`, with the section where the user has written it."""
    if isinstance(config, dict):
        return copy.deepcopy(config)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config: got a {type(config).__name__}; need a dict, the path of a JSON file, or base64 of JSON")
    if os.path.exists(config):  # noqa: PTH110 - false for base64 that is too long for a path, where Path.exists raises
        return _read_file(Path(config))
    if not isinstance(config, str):
        raise ConfigError(f"config: {os.fspath(config)}: no such file; write the path of a DeepSpeed JSON")
    return _read_base64(config)


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ConfigError(f"duplicate keys {', '.join(map(show, repeated))}; keep one of each")
    return dict(pairs)


def _parse(text: str, source: str, comments: bool) -> DeepSpeedJson:
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_pairs)
    except json.JSONDecodeError as error:
        parsed = _parse_hjson(text) if comments else None
        if parsed is None:
            raise ConfigError(
                f"{source}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; mend it there"
            ) from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f'{source}: got {show(parsed)}; need one JSON object, e.g. {{"zero_optimization": ...}}')
    return parsed


def _parse_hjson(text: str) -> object:
    """DeepSpeed reads files with hjson, so comments and trailing commas that run under stock must run here too."""
    import hjson  # a dependency of deepspeed

    try:
        return hjson.loads(text, object_pairs_hook=_unique_pairs)
    except hjson.HjsonDecodeError:
        return None  # the caller reports the position that the JSON parser found


def _read_file(path: Path) -> DeepSpeedJson:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}; write the path of a readable UTF-8 JSON file") from error
    return _parse(text, str(path), comments=True)


def _read_base64(config: str) -> DeepSpeedJson:
    shown = config if len(config) <= 60 else config[:60] + "..."
    compact = "".join(config.split()).replace("-", "+").replace("_", "/")
    try:
        text = base64.b64decode(compact, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f'config: "{shown}" is neither an existing file nor base64 of JSON ({error}); write the path of a '
            "DeepSpeed JSON, a dict, or base64.urlsafe_b64encode of its text"
        ) from error
    return _parse(text, f'config: "{shown}" is no file; read as base64', comments=False)


def num_micro_batches(config: DeepSpeedJson, num_ranks: int) -> int:
    """Micro-batches of each rank in a step, as DeepSpeed derives them where `gradient_accumulation_steps` is not written."""
    written, micro, train = (
        value if isinstance(value := config.get(key), int) else None
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    )
    if written is not None:
        return written
    return 1 if micro is None or train is None else max(1, train // (micro * num_ranks))
