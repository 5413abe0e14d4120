"""Models by name: the Hugging Face configurations of `configs/models`, and files."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from ds_vertical.config import ConfigError

_HERE: Final = Path(__file__).resolve().parent
_INSTALLED: Final = _HERE / "models"  # a wheel puts configs/models there: see pyproject.toml
SHAPES: Final = _INSTALLED if _INSTALLED.is_dir() else _HERE.parent / "configs" / "models"


def shape_names() -> list[str]:
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def named_shape(model: str) -> Path:
    """The file of a shape's name, or `model` as a path. Raises ConfigError where there is neither."""
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
