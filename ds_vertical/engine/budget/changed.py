"""A run's JSON and settings with another number in them, as a refusal may advise it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_vertical.config.file import DeepSpeedJson
from ds_vertical.config.section import SECTION
from ds_vertical.types import RunSettings


def with_key(config: DeepSpeedJson, resolved: RunSettings, path: str, value: float) -> tuple[DeepSpeedJson, RunSettings]:
    """The JSON and the settings with another number at a path: of the section, or of DeepSpeed's `zero_optimization`."""
    section, *keys = path.split(".")
    if section == SECTION:
        return config, replace(resolved, **{keys[0]: value})
    return _replaced(config, [section, *keys], value), resolved


def _replaced(section: DeepSpeedJson, keys: Sequence[str], value: float) -> DeepSpeedJson:
    key, *inner = keys
    return {**section, key: _replaced(section.get(key) or {}, inner, value) if inner else value}
