"""Small models of every type that transformers knows: configurations shrunk by their keys' names, inputs by the forward's
signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MOST_PARAMETERS = 20_000_000
VOCAB = 320
Batch = dict[str, Any]

# the first pattern that fits a key decides: what an integer above the value becomes
_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_feat_extract_layers|num_channels|.*kernel.*|.*stride.*", 1 << 30),
    (r"codebook_size", 256),
    (r"mamba_d_head|mamba_head_dim", 32),
    (r"vocab_size.*|.*_vocab_size|.*vocabulary_size|n_words", VOCAB),
    (r"(num_)?experts_per_tok|num_selected_experts|moe_topk|moe_k|top_k|moe_top_k|topk_group|n_group", 2),
    (r"(num_|n_)?(local_|routed_)?experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"n_layers?|num_blocks|depth|.*_layers", 3),
    (r".*(num_|n_)(key_value|kv)_heads|num_kv_heads|num_key_value_heads", 2),
    (r".*num_heads|n_heads?|.*attention_heads|num_.*_heads|n_.*_heads", 4),
    (r".*rope_head_dim|rotary_dim", 8),
    (r".*head_dim|d_kv|.*_head_size|attention_head_size|head_size|kv_channels|d_head", 16),
    (r".*lora_rank|.*_rank", 16),
    (r"d_model|n_embd|dim|emb_dim|.*embed_dim|.*hidden_size|projection_(dim|size)|.*_hidden_dim|hidden_dim|embedding_size", 64),
    (r".*embed.*_dim|.*proj.*_dim|.*_embed_proj_dim|width|.*_width|feat.*_dim|.*hidden_size_per_layer_input|lru_width", 64),
    (r".*intermediate_size|.*ffn_dim|d_ff|n_inner|mlp_dim|.*ffn_hidden_size|d_inner|.*ffn_size|ffn_.*|encoder_ffn_dim", 64),
    (r".*max_.*positions?.*|n_positions|max_position.*|n_ctx|.*sequence_length|max_seq_len.*|max_source_positions", 128),
    (r"sliding_window|attention_window|local_attention|attention_chunk_size", 4),
    (r"image_size|input_size|img_size", 32),
    (r"patch_size|.*_patch_size", 8),
    (r"num_queries|num_query_tokens|num_latents|num_object_queries|num_prompts", 8),
    (r"num_frames|frames_per_clip", 4),
    (r"chunk_size|mamba_chunk_size", 8),
    (r"codebook_dim|num_mel_bins|.*mel_bins|feature_size", 32),
    (r".*conv.*groups|num_conv_pos_embedding_groups", 4),
    (r"num_conv_pos_embeddings", 16),
    (r"dt_rank|time_step_rank", 4),
    (r"decoder_start_token_id", 2),
)
_PATTERNS = [(re.compile(f"^({pattern})$"), value) for pattern, value in _SIZES]
# derived from others, or names of what is no longer there: left to the configuration's own rules
_LEFT_OUT = ("out_features", "out_indices", "stage_names", "qk_head_dim", "per_layer_config", "attention_layers", "layer_ids")
_OVERRIDES: dict[str, dict[str, Any]] = {"gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]}}
_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
_OFF = ("use_cache", "tie_word_embeddings", "output_router_logits", "use_mems", "use_mems_train", "output_hidden_states")
_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_KINDS = (
    ("encoder-decoder", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("audio", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("vision-language", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    ("masked", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("audio", "MODEL_FOR_CTC_MAPPING"),
    ("audio", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING"),
    ("two towers", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING"),
    ("vision", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    ("vision", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING"),
    ("sequence classification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    ("question answering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING"),
    ("base", "MODEL_MAPPING"),
)


# further attempts where plain torch refuses the first: sizes that some models derive others from
VARIANTS: tuple[dict[str, int], ...] = ({}, {"kv": 4}, {"image": 1 << 30}, {"kv": 4, "image": 64, "head": 8})


class NotSmall(ValueError):
    """No small model of this type can be made here; the message says why."""


def model_types() -> list[str]:
    """Every type, in alphabetical order."""
    return sorted(CONFIG_MAPPING.keys())


def _limit(key: str, value: int, variant: Mapping[str, int]) -> int:
    for pattern, limit in _PATTERNS:
        if pattern.match(key):
            marks = {"kv": ("kv", "key_value"), "image": ("image_size", "img_size", "input_size"), "head": ("head_dim",)}
            named = [mark for mark, parts in marks.items() if any(part in key for part in parts)]
            return min(value, variant.get(named[0], limit) if named else limit)
    return value


def shrunk(settings: Mapping[str, Any], variant: Mapping[str, int], layers: int = 3) -> dict[str, Any]:
    """The settings of a configuration with small sizes."""
    made: dict[str, Any] = {}
    depth = settings.get("num_hidden_layers")
    tokens = iter(range(10, VOCAB))
    for key, value in settings.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, Mapping) and "mrope_section" in value:
            made[key] = {**value, "mrope_section": [2, 3, 3]}
        elif isinstance(value, Mapping) and key.endswith(("config", "_cfg")) and value:
            made[key] = shrunk(value, variant)
        elif key in _OFF and value is True:
            made[key] = False
        elif key in _DROPS:
            made[key] = 0.0
        elif isinstance(value, list) and (key in _LISTS or len(value) == depth):
            made[key] = value[: layers - 1] + value[-1:] if len(value) >= layers else value
        elif re.search(r"token_(id|index)$|_idx$|^(image|video|audio)_token", key) and isinstance(value, int) and value >= 4:
            made[key] = next(tokens)
        elif isinstance(value, int) and not isinstance(value, bool):
            made[key] = _limit(key, value, variant)
        elif isinstance(value, list) and value and all(type(each) is int for each in value):
            made[key] = _shorter(key, value)
        else:
            made[key] = value
    heads = made.get("num_heads")
    if isinstance(heads, list) and heads and isinstance(made.get("embed_dim"), int):
        made["embed_dim"] = 8 * heads[0]  # of each stage's heads
    return made


def _shorter(key: str, values: list[int]) -> list[int]:
    """A list with a value per stage: sizes an eighth, depths 2 at most; anything else as it is."""
    if re.search("hidden_sizes|embed_dims|channels|.*_dims?$|conv_dim|widths?", key):
        return [max(8, value // 8) if value >= 64 else value for value in values]
    return [min(value, 2) for value in values] if re.search("depths|num_blocks|layers", key) else values


def small_config(model_type: str, variant: Mapping[str, int]) -> Any:
    """The type's own configuration, shrunk. Raises NotSmall."""
    try:
        cls = CONFIG_MAPPING[model_type]
        own = cls()
        settings = own.to_dict()
        for name in ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype"):
            settings.pop(name, None)
        config = cls(**shrunk(settings, variant) | _OVERRIDES.get(model_type, {}))
        for each in (config, config.get_text_config()):
            each.use_cache = False
            for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 2)):
                if getattr(each, name, None) is None:
                    setattr(each, name, value)
        return config
    except Exception as error:
        raise NotSmall(f"configuration: {words_of(error)}") from error


def model_class(config: Any, wanted: str | None = None) -> tuple[str, Any]:
    """(kind, class): the first of the kinds above that the type has, or the wanted one. Raises NotSmall."""
    for kind, name in _KINDS:
        if wanted not in (None, kind):
            continue
        mapping = getattr(modeling_auto, name, None)
        try:
            found = mapping[type(config)] if mapping is not None and type(config) in mapping else None
        except Exception as error:
            raise NotSmall(f"class: {words_of(error)}") from error
        if found is not None:
            return kind, found[0] if isinstance(found, tuple) else found
    raise NotSmall("no class that trains")


def small_model(model_type: str, variant: Mapping[str, int], wanted: str | None = None) -> tuple[str, nn.Module]:
    """(kind, model), its weights from torch's random stream. Raises NotSmall."""
    config = small_config(model_type, variant)
    kind, cls = model_class(config, wanted)
    try:
        with torch.device("meta"):
            count = sum(param.numel() for param in cls(config).parameters())
        if count > MOST_PARAMETERS:
            raise NotSmall(f"{count / 1e6:.0f} M parameters remain")
        torch.manual_seed(0)
        model = cls(config)
    except NotSmall:
        raise
    except Exception as error:
        raise NotSmall(f"model: {words_of(error)}") from error
    for param in model.parameters():
        if not torch.isfinite(param).all() or not param.any():
            nn.init.normal_(param, 0.0, 0.02)  # filled by nobody, or zero as a classifier's head may begin
    return kind, model.train()


def _find(config: Any, names: tuple[str, ...], default: int) -> int:
    configs = [config, *(each for each in vars(config).values() if isinstance(each, transformers.PretrainedConfig))]
    for name in names:
        for each in configs:
            value = getattr(each, name, None)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


def batch(model: nn.Module, index: int, image_tokens: int = 0, video: bool = False) -> Batch:
    """A micro-batch of two samples; texts of `index` have their own length, behind so many tokens that stand for an image.
    `video`: `pixel_values` are of several frames."""
    config, generator = model.config, torch.Generator().manual_seed(1 + index)
    names = set(inspect.signature(model.forward).parameters)
    ids = torch.randint(200, VOCAB, (2, 7 + index), generator=generator)
    if image_tokens:
        token = _find(config, ("image_token_id", "image_token_index"), 0)
        ids = torch.cat([torch.full((2, image_tokens), token), ids], 1)
    main = getattr(model, "main_input_name", "input_ids")
    made: Batch = {}
    if "input_ids" in names and main not in ("pixel_values", "input_values", "input_features") or "pixel_values" not in names:
        made |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if "input_ids" in names else {}
    made |= _signals(config, names - {"input_values", "input_features"} if made else names, generator, video)
    if "bbox" in names:
        made["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long)
    if "decoder_input_ids" in names and "labels" not in names:
        made["decoder_input_ids"] = ids
    if "labels" in names:
        made["labels"] = _labels(model, made, ids)
    elif "start_positions" in names:
        made |= {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([1, 3])}
    elif "return_loss" in names:
        made["return_loss"] = True
    return {name: value for name, value in made.items() if name in names}


def _signals(config: Any, names: set[str], generator: torch.Generator, video: bool) -> Batch:
    side, channels = _find(config, ("image_size", "img_size"), 32), _find(config, ("num_channels", "in_channels"), 3)
    frames = _find(config, ("num_frames", "frames_per_clip"), 4)
    mel = _find(config, ("num_mel_bins", "feature_size", "input_feat_per_channel"), 80)
    times = 2 * _find(config, ("max_source_positions",), 50)
    shapes = {
        "pixel_values": (2, frames, channels, side, side) if video else (2, channels, side, side),
        "pixel_values_videos": (2, frames, channels, side, side),
        "input_values": (2, 4000),
        "input_features": (2, mel, times) if hasattr(config, "max_source_positions") else (2, 60, mel),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items() if name in names}


def _labels(model: nn.Module, made: Batch, ids: torch.Tensor) -> torch.Tensor:
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


def words_of(error: BaseException, longest: int = 160) -> str:
    """An error in one line, without the place where this machine has its packages."""
    text = re.sub(r"/[^' ]*/site-packages/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:longest]
