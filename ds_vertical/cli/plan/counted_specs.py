"""The specs of `configs/models`, counted ahead: so a plan for one of these neither loads torch nor builds the model.

python -m ds_vertical.cli.plan.counted_specs      # count them again, and write them beside this file
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from ds_vertical.cli.common import JsonObject
from ds_vertical.model.hf import SHAPES, read_fields, shape_names
from ds_vertical.planner.model_shape import ModelSpec

_FOLDER: Final = Path(__file__).resolve().parent / "specs"
_DTYPE: Final = "bf16"
_MOST_TOKENS: Final = 2048  # of a sequence, where the model has more positions


def counted_spec(path: Path, fields: JsonObject, sequence_length: int, dtype: str) -> ModelSpec | None:
    """The spec of a shipped configuration; None for another file, for other fields, a length or dtype that was not counted, and
    where transformers has another major version than the one whose models were counted."""
    file = _FOLDER / path.name
    if path.resolve().parent != SHAPES.resolve() or not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["counted"] != _key(fields, sequence_length, dtype) or _major(found["transformers"]) != _major(_installed()):
        return None
    return TypeAdapter(ModelSpec).validate_python(found["spec"])


def default_length(fields: JsonObject) -> int:
    """Tokens of a sequence: as many as the model has positions, within reason."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    found = [fields[name] for name in names if isinstance(fields.get(name), int)]
    return min(_MOST_TOKENS, next((positions for positions in found if positions > 0), _MOST_TOKENS))  # -1: no limit


def _key(fields: JsonObject, sequence_length: int, dtype: str) -> str:
    """Of what a spec depends on."""
    return hashlib.sha256(json.dumps([fields, sequence_length, dtype], sort_keys=True).encode()).hexdigest()


def _installed() -> str:
    """Transformers' version; empty where it is missing."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


def _major(version: str) -> str:
    return version.partition(".")[0]


def count_all() -> None:
    """Write the specs as they are counted now."""
    from ds_vertical.cli.plan.fake_run import read_spec

    _FOLDER.mkdir(exist_ok=True)
    for name in shape_names():
        fields = read_fields(SHAPES / f"{name}.json")
        length = default_length(fields)
        spec = TypeAdapter(ModelSpec).dump_python(read_spec(name, fields, length, _DTYPE), mode="json")
        made = {"counted": _key(fields, length, _DTYPE), "transformers": _installed(), "spec": spec}
        text = json.dumps(made, indent=1)
        (_FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    count_all()
