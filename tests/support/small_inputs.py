"""Inputs for the small models of `small.py`, by the names in a forward's signature, and what to try where a model asks for
others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from small import VOCAB, NotSmall, parts_of
from torch import nn

Batch = dict[str, Any]
MOST_ATTEMPTS = 8
_SIDES = ("image_size", "img_size", "input_size")
PATCHES = 16  # of an image that comes as a list of patches


_OTHER_WAY_ROUND = r"have \d+ channels?, but got|mat1 and mat2|multiple of|expected 3, got 2|mono|expected input with shape"
_MEL = ("feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel", "input_feat_size", "mel_bins")


@dataclass(frozen=True)
class Attempt:
    """What micro-batches hold: so many tokens that stand for an image, then so many for a sound, ahead of each text;
    `video`: `pixel_values` of several frames; `turned`: features as (time, channel); `everything`: optional inputs, too;
    `text_alone`: no images and sounds beside it."""

    image_tokens: int = 0
    video: bool = False
    sound_tokens: int = 0
    turned: bool = False
    everything: bool = False
    text_alone: bool = False


def further(attempt: Attempt, words: str) -> Iterator[Attempt]:
    """What else to try, by the words with which a model refuses an attempt."""
    if found := re.search(r"\((image|audio) features of (\d+) tokens\)", words):
        yield replace(attempt, **{"sound_tokens" if found[1] == "audio" else "image_tokens": int(found[2]) // 2})
    elif found := re.search(r"tokens: \d+, features:? (\d+)", words):
        yield replace(attempt, **{"sound_tokens" if "udio" in words else "image_tokens": int(found[1]) // 2})
    if "indexing result of shape [0]" in words:
        yield replace(attempt, sound_tokens=2)
    if "expected 5, got 4" in words:
        yield replace(attempt, video=True)
    if "at the same time" in words:
        yield replace(attempt, text_alone=True)
    if re.search(_OTHER_WAY_ROUND, words):
        yield replace(attempt, turned=not attempt.turned)
    yield replace(attempt, everything=True)
    yield replace(attempt, video=True)


def demanded(error: BaseException) -> str:
    """Where a model refuses its features for want of tokens that stand for them: how many it has, in words."""
    trace = error.__traceback__
    while trace is not None:
        place = trace.tb_frame.f_locals
        embedded = place.get("inputs_embeds")
        for kind in ("image", "audio"):
            features = place.get(f"{kind}_features")
            if isinstance(features, torch.Tensor) and isinstance(embedded, torch.Tensor) and kind in str(error).lower():
                return f" ({kind} features of {features.numel() // embedded.shape[-1]} tokens)"
        trace = trace.tb_next
    return ""


def find(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first of these settings that the configuration, or one in it, has."""
    for name in names:
        for each in parts_of(config):
            value = getattr(each, name, None)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


@dataclass
class _Making:
    """A micro-batch being made."""

    config: Any
    attempt: Attempt
    generator: torch.Generator
    ids: torch.Tensor
    names: frozenset[str]
    main: str

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def size(self, default: int, *names: str) -> int:
        return find(self.config, names, default)

    @property
    def merge(self) -> int:
        """How many patches a side become one token."""
        return self.size(2, "spatial_merge_size", "merge_kernel_size", "downsample_factor")

    @property
    def pixels(self) -> int:
        """Numbers in a patch."""
        return self.size(3, "in_channels", "in_chans", "num_channels") * self.size(8, "model_patch_size", "patch_size") ** 2


def _pixel_values(making: _Making) -> torch.Tensor:
    side, channels = making.size(32, *_SIDES), making.size(3, "num_channels", "in_channels")
    if {"image_grid_thw", "grid_thw", "image_grid_hw"} & making.names:
        count, patch = 2 * (2 * making.merge) ** 2, making.size(8, "patch_size")
        if making.attempt.video:
            return making.randn(count, channels, patch, patch)
        return making.randn(count, making.pixels * making.size(1, "temporal_patch_size"))
    if "target_sizes" in making.names:
        patch = making.size(8, "patch_size")
        return making.randn(1, channels, patch, 2 * 64 * patch)  # of both images, side by side
    if {"spatial_shapes", "image_position_ids", "pixel_position_ids"} & making.names:
        pooled = making.size(1, "pooling_kernel_size") ** 2
        return making.randn(2, PATCHES * (pooled if "spatial_shapes" not in making.names else 1), making.pixels)
    if "aspect_ratio_ids" in making.names:
        return making.randn(2, 1, making.size(4, "max_num_tiles"), channels, side, side)
    frames = (making.size(4, "num_frames", "frames_per_clip"),) if making.attempt.video else ()
    return making.randn(2, *frames, channels, side, side)


def _features(making: _Making) -> torch.Tensor:
    mel = making.size(80, *_MEL)
    as_whisper = any(hasattr(each, "max_source_positions") for each in parts_of(making.config))
    times = 2 * making.size(50, "max_source_positions") if as_whisper else 4 * making.size(16, "n_window")
    return making.randn(*((2, mel, times) if as_whisper != making.attempt.turned else (2, times, mel)))


def _positions(making: _Making) -> torch.Tensor:
    side = 4 * making.size(1, "pooling_kernel_size")
    rows = torch.arange(side * side)
    return torch.stack([rows % side, rows // side], -1).expand(2, -1, -1).clone()


def _grid(making: _Making) -> torch.Tensor:
    return torch.tensor([[1, 2 * making.merge, 2 * making.merge]] * 2)


def _token_kinds(making: _Making) -> torch.Tensor:
    image, sound = (find(making.config, names, -1) for names in (_IMAGE, _SOUND))
    return (making.ids == image).long() + 3 * (making.ids == sound).long()


def _times(making: _Making, *width: int) -> torch.Tensor:
    """A past: as long as the model's window, and as its longest lag ahead of it."""
    length = making.size(16, "context_length", "prediction_length") + max(getattr(making.config, "lags_sequence", None) or [0])
    return making.randn(2, length, *width)


def _past(making: _Making) -> torch.Tensor:
    return _times(making) if "past_time_features" in making.names else _times(making, making.size(1, "num_input_channels"))


def _waves(making: _Making) -> torch.Tensor:
    if hasattr(making.config, "frequency_stride"):
        return making.randn(2, making.size(64, "max_length"), making.size(80, "num_mel_bins"))
    return making.randn(2, 1, 4000) if making.attempt.turned else making.randn(2, 4000)


_IMAGE, _SOUND = ("image_token_id", "image_token_index"), ("audio_token_id", "audio_token_index", "audio_token")
_Maker = Callable[[_Making], torch.Tensor]
# given wherever the signature has them: without them the others have no meaning
_WITH_OTHERS: dict[str, _Maker] = {
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "image_merge_sizes": lambda making: torch.tensor([making.merge] * 2),
    "merge_sizes": lambda making: torch.tensor([making.merge] * 2),
    "image_sizes": lambda making: torch.tensor([[making.size(32, "image_size", "img_size")] * 2] * 2),
    "spatial_shapes": lambda making: torch.tensor([[4, 4]] * 2),
    "target_sizes": lambda making: torch.tensor([[8, 8]] * 2),
    "image_position_ids": _positions,
    "pixel_position_ids": _positions,
    "aspect_ratio_ids": lambda making: torch.ones(2, 1, dtype=torch.long),
    "aspect_ratio_mask": lambda making: torch.ones(2, 1, making.size(4, "max_num_tiles"), dtype=torch.long),
    "cross_attention_mask": lambda making: torch.ones(*making.ids.shape, 1, making.size(4, "max_num_tiles"), dtype=torch.long),
    "mm_token_type_ids": _token_kinds,
}
# given where the signature demands them, or a model refuses a try without them
_ON_DEMAND: dict[str, _Maker] = {
    "input_features_mask": lambda making: torch.ones(2, _features(making).shape[_time_axis(making)], dtype=torch.long),
    "attention_mask": lambda making: torch.ones(2, _features(making).shape[_time_axis(making)], dtype=torch.long),
    "feature_attention_mask": lambda making: torch.ones(2, _features(making).shape[_time_axis(making)], dtype=torch.long),
    "pixel_attention_mask": lambda making: torch.ones(2, PATCHES, dtype=torch.long),
    "qformer_input_ids": lambda making: making.ids % 10 + 1,
    "decoder_input_ids": lambda making: making.ids,
    "high_res_pixel_values": lambda making: making.randn(2, 3, 64, 64),
    "flattened_patches": lambda making: torch.cat(
        [torch.ones(2, PATCHES, 2), making.randn(2, PATCHES, making.size(192, "patch_embed_hidden_size"))], -1
    ),
    "image_patches": lambda making: making.randn(2, PATCHES, making.pixels),
    "past_values": _past,
    "past_time_features": lambda making: _times(making, making.config.num_time_features),
    "past_observed_mask": lambda making: torch.ones_like(_past(making)),
    "future_values": lambda making: making.randn(2, making.size(4, "prediction_length")),
    "future_time_features": lambda making: making.randn(
        2, making.size(4, "prediction_length"), making.config.num_time_features
    ),
    "pixel_values_images": _pixel_values,
    "input_values": _waves,
    "input_features": _features,
    "audio_mel": _features,
    "audio_mel_mask": lambda making: torch.zeros(2, _features(making).shape[1], dtype=torch.bool),
    "visual_feats": lambda making: making.randn(2, 4, making.size(64, "visual_feat_dim")),
    "visual_pos": lambda making: making.randn(2, 4, making.size(4, "visual_pos_dim")),
    "states": lambda making: making.randn(2, 4, making.size(17, "state_dim")),
    "actions": lambda making: making.randn(2, 4, making.size(4, "act_dim")),
    "rewards": lambda making: making.randn(2, 4, 1),
    "returns_to_go": lambda making: making.randn(2, 4, 1),
    "timesteps": lambda making: torch.arange(4).expand(2, -1).clone(),
    "image_attention_mask": lambda making: torch.ones(*making.ids.shape, 1, dtype=torch.long),
    "hidden_states": lambda making: (
        _pixel_values(making) if "grid_thw" in making.names else making.randn(2, 8, making.size(64, "hidden_size"))
    ),
    "inputs_embeds": lambda making: making.randn(2, 8, making.size(64, "hidden_size")),
    "query_embeds": lambda making: making.randn(2, 8, making.size(64, "hidden_size")),
}


def _time_axis(making: _Making) -> int:
    as_whisper = any(hasattr(each, "max_source_positions") for each in parts_of(making.config))
    return 2 if as_whisper != making.attempt.turned else 1


def batch(model: nn.Module, index: int, attempt: Attempt = Attempt()) -> Batch:
    """A micro-batch of two samples; texts of `index` have their own length, behind the tokens of the attempt."""
    config, generator = model.config, torch.Generator().manual_seed(1 + index)
    signature = inspect.signature(model.forward).parameters
    names = frozenset(signature)
    ids = torch.randint(200, VOCAB, (2, 7 + index), generator=generator)
    for count, token in ((attempt.sound_tokens, _SOUND), (attempt.image_tokens, _IMAGE)):
        if count:
            ids = torch.cat([torch.full((2, count), find(config, token, 0)), ids], 1)
    main = getattr(model, "main_input_name", "input_ids")
    making = _Making(config, attempt, generator, ids, names, main)
    needed = {name for name, each in signature.items() if each.default is inspect.Parameter.empty}
    asked = names if attempt.everything else needed
    made: Batch = {}
    by_text = main not in ("pixel_values", "input_values", "input_features") or "pixel_values" not in names
    if "input_ids" in names and (by_text or "input_ids" in asked):
        made |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made |= {} if made and attempt.text_alone else _signals(making, made)
    if "bbox" in names:
        made["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long)
    if "decoder_input_ids" in names and "labels" not in names:
        made["decoder_input_ids"] = ids
    for makers, wanted in ((_WITH_OTHERS, names), (_ON_DEMAND, asked)):
        made |= {name: make(making) for name, make in makers.items() if name in wanted and name not in made}
    if made.keys() >= {"input_ids", "inputs_embeds"}:
        del made["inputs_embeds"]
    tower = getattr(getattr(model, "model", None), "vision_tower", None)
    if config.model_type == "llava" and not hasattr(tower, "patch_size"):
        made.pop("image_sizes", None)  # which it divides by that of Pixtral's tower
    made |= _targets(model, made, ids, names)
    return {name: value for name, value in made.items() if name in names}


def _signals(making: _Making, made: Mapping[str, Any]) -> Batch:
    """Images, films and sounds; beside a text sounds where the model has no images."""
    names, frames = making.names, making.size(4, "num_frames", "frames_per_clip")
    side, channels = making.size(32, *_SIDES), making.size(3, "num_channels", "in_channels")
    found: Batch = {"pixel_values": _pixel_values(making)} if "pixel_values" in names else {}
    if "pixel_values_videos" in names and "pixel_values" not in names:
        found["pixel_values_videos"] = making.randn(2, frames, channels, side, side)
    if not made or not found:
        heard = [name for name in ("input_values", "input_features") if name in names]
        heard = [making.main] if making.main in heard else heard[:1]
        found |= {name: _ON_DEMAND[name](making) for name in heard}
        masks = [name for name in ("input_features_mask", "feature_attention_mask") if name in names and heard]
        found |= {name: _ON_DEMAND[name](making) for name in masks}
    if "spatial_shapes" in names:
        found["pixel_attention_mask"] = _ON_DEMAND["pixel_attention_mask"](making)
    return found


def _targets(model: nn.Module, made: Batch, ids: torch.Tensor, names: frozenset[str]) -> Batch:
    takes_boxes = type(model).__name__.endswith("Model") and "pixel_values" in made
    if "labels" in names and not takes_boxes:
        return {"labels": _labels(model, ids)}
    if "start_positions" in names:
        return {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([1, 3])}
    return {"return_loss": True} if "return_loss" in names else {}


def _labels(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    name = type(model).__name__
    if any(word in name for word in ("Classification", "Classifier")) and "Token" not in name:
        return torch.tensor([0, 1])
    if "CTC" in name:
        return ids[:, :3] % 20 + 1
    return ids


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss; where it has none, the mean square of what it returns that has a gradient."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    values = torch.utils._pytree.tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    floats = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad and v.is_floating_point()]
    if not floats:
        raise NotSmall("nothing that it returns has a gradient")
    return torch.stack([value.float().square().mean() for value in floats]).sum()
