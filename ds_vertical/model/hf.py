"""A Hugging Face causal language model from its configuration: a file, or one of `configs/models` by its name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ds_vertical.errors import ConfigError

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
    """Transformers' own configuration from the fields of a config.json. `name`: the model's, for messages. Raises
    ConfigError."""
    from transformers import AutoConfig

    given = dict(fields)
    try:
        return AutoConfig.for_model(given.pop("model_type"), **given)
    except Exception as error:  # whatever a model's own checks raise
        raise refused(name, "transformers does not take its configuration", error) from error


def build_model(name: str, fields: Mapping[str, Any], adjust: Callable[[Any], None], **options: Any) -> Any:
    """A model with random weights from the fields of a config.json.

    `adjust` changes its configuration first; `options` go to transformers' `from_config`. Raises ConfigError where transformers
    cannot build it.
    """
    from transformers import AutoModelForCausalLM

    config = build_config(name, fields)
    try:
        adjust(config)
        return AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # as above
        raise refused(name, "transformers cannot build it as a causal language model", error) from error


def refused(name: str, what: str, error: Exception) -> ConfigError:
    """The error for a model that transformers does not take: one line with what failed and what transformers said of it."""
    said = " ".join(str(error).split())
    said = said if len(said) <= _SHOWN else f"{said[:_SHOWN]} ..."
    return ConfigError(f"--model {name}: {what} ({type(error).__name__}: {said}); name another, or mend its config.json")


_HERE: Final = Path(__file__).resolve().parent
_INSTALLED: Final = _HERE.parent / "models"  # a wheel puts configs/models there: see pyproject.toml
SHAPES: Final = _INSTALLED if _INSTALLED.is_dir() else _HERE.parents[1] / "configs" / "models"


def shape_names() -> list[str]:
    """The names of the configurations in `configs/models`, sorted."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def named_shape(model: str) -> Path:
    """The file of the configuration with this name, or `model` as a path. Raises ConfigError where neither exists."""
    named = SHAPES / f"{model}.json"
    if named.is_file():
        return named
    path = Path(model)
    if path.exists():
        return path
    near = difflib.get_close_matches(model, shape_names(), n=2)
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"--model {model}: no such file, and no shape of that name ({', '.join(shape_names())}){guess}; write the path of a"
        " Hugging Face config.json or of its folder"
    )
