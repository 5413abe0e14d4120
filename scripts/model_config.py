"""`--model`: a name from configs/models, a Hugging Face config file or folder, or any architecture by its type."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from text_data import NUM_TOKEN_IDS
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SHAPES = Path(__file__).resolve().parent.parent / "configs" / "models"


def resolve(model: str, dims: Sequence[str], dropout: float | None, seq_len: int) -> PretrainedConfig:
    """The configuration of a causal language model that can take our tokens, `seq_len` of them at a time.

    dims are `KEY=JSON` fields that replace those of the shape; dropout replaces every dropout rate that it has.
    Raises ValueError, saying what to write instead.
    """
    fields = _read_shape(model) | _parse_dims(dims)
    model_type = fields.pop("model_type")
    _refuse_unknown_fields(model_type, fields.keys(), dims)
    if dropout is not None:
        fields |= _dropout_fields(model_type, dropout)
    config = AutoConfig.for_model(model_type, **fields)
    _check_shape(config, model, seq_len)
    text = config.get_text_config()
    text.use_cache = config.use_cache = False
    if text.pad_token_id is not None and text.pad_token_id >= text.vocab_size:
        text.pad_token_id = config.pad_token_id = None
    return config


def _read_shape(model: str) -> dict[str, Any]:
    """Fields of a Hugging Face config, `model_type` among them."""
    named, path = SHAPES / f"{model}.json", Path(model)
    if path.is_dir():
        path = path / "config.json"
    found = named if named.is_file() else path
    if not found.is_file():
        if model in CONFIG_MAPPING:
            return {"model_type": model}
        shapes = sorted(file.stem for file in SHAPES.glob("*.json"))
        near = difflib.get_close_matches(model, [*shapes, *CONFIG_MAPPING], n=3)
        raise ValueError(
            f"--model {model}: neither a shape ({', '.join(shapes)}), nor a config file, nor a Hugging Face model type"
            + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    try:
        fields = json.loads(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{found}: not valid JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(f'{found}: no Hugging Face config: it needs a "model_type" that transformers knows')
    return fields


def _parse_dims(dims: Sequence[str]) -> dict[str, Any]:
    fields = {}
    for dim in dims:
        key, equals, text = dim.partition("=")
        try:
            fields[key] = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--dims {dim}: write KEY=JSON, e.g. hidden_size=256 or hidden_act='\"gelu\"'") from error
        if key == "model_type":
            raise ValueError(f"--dims {dim}: name the model type with --model instead")
    return fields


def _refuse_unknown_fields(model_type: str, fields: Iterable[str], dims: Sequence[str]) -> None:
    """Hugging Face configs keep any key in silence, so a misspelt dimension would leave the default's size."""
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map, "architectures", "transformers_version", "torch_dtype"}
    given = {dim.partition("=")[0] for dim in dims}
    for key in sorted(given.intersection(fields) - known):
        near = difflib.get_close_matches(key, sorted(known), n=1)
        hint = f'did you mean "{near[0]}"?' if near else "see the model's Hugging Face config class"
        raise ValueError(f"--dims {key}=...: {model_type} has no such field; {hint}")


def _dropout_fields(model_type: str, dropout: float) -> dict[str, float]:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"--dropout {dropout}: write a rate from 0 up to, not including, 1")
    default: Mapping[str, Any] = AutoConfig.for_model(model_type).to_dict()
    names = [
        key
        for key, value in default.items()
        if ("drop" in key and "layerdrop" not in key or key.endswith("_pdrop")) and isinstance(value, int | float)
    ]
    if not names:
        raise ValueError(f"--dropout {dropout}: {model_type} has no dropout rate; leave it out")
    return dict.fromkeys(names, dropout)


def _check_shape(config: PretrainedConfig, model: str, seq_len: int) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"--model {model}: {config.model_type} is no causal language model; this script trains those")
    text = config.get_text_config()
    if text.vocab_size < NUM_TOKEN_IDS:
        raise ValueError(
            f"--model {model}: vocab_size {text.vocab_size}; byte tokens and the end of a text need {NUM_TOKEN_IDS}"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions and seq_len > positions:
        raise ValueError(f"--seq {seq_len}: {model} has {positions} positions; write {positions} or less")
