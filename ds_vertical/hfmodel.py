"""A Hugging Face causal language model from its configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_vertical.config import ConfigError

_SHOWN = 300  # characters of what transformers says, which may list all models it knows


def read_fields(path: Path) -> dict[str, Any]:
    """A Hugging Face configuration from its file, or a folder with a config.json. Raises ConfigError."""
    found = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: {error}; write the path of a Hugging Face config.json") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(f'--model {found}: no Hugging Face configuration: it has no "model_type"')
    return fields


def build_config(name: str, fields: Mapping[str, Any]) -> Any:
    """Transformers' own configuration. Raises ConfigError."""
    from transformers import AutoConfig

    given = dict(fields)
    try:
        return AutoConfig.for_model(given.pop("model_type"), **given)
    except Exception as error:  # whatever a model's own checks raise
        raise refused(name, "transformers does not take its configuration", error) from error


def build_model(name: str, fields: Mapping[str, Any], adjust: Callable[[Any], None], **options: Any) -> Any:
    """A model with weights of any value. `adjust` changes its configuration first; `options`: of transformers' `from_config`.
    Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    config = build_config(name, fields)
    try:
        adjust(config)
        return AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # as above
        raise refused(name, "transformers cannot build it as a causal language model", error) from error


def refused(name: str, what: str, error: Exception) -> ConfigError:
    """In one line."""
    said = " ".join(str(error).split())
    said = said if len(said) <= _SHOWN else f"{said[:_SHOWN]} ..."
    return ConfigError(f"--model {name}: {what} ({type(error).__name__}: {said}); name another, or mend its config.json")
