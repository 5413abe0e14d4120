"""Small models of every type that transformers knows: configurations shrunk by their keys' names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MOST_PARAMETERS = 30_000_000
VOCAB = 320

# the first pattern that fits a key decides: what an integer above the value becomes
_COUNTS: tuple[tuple[str, int], ...] = (
    (r"num_feat_extract_layers|num_channels|.*kernel.*|.*stride.*|.*_id|.*_idx|.*_index|.*token.*_ids?", 1 << 30),
    (r"vocab_size.*|.*_vocab_size|.*vocabulary_size|n_words", VOCAB),
    (r"(num_)?experts_per_tok(en)?|num_selected_experts|moe_topk|moe_k|top_k|moe_top_k|topk_group|n_group", 2),
    (r"(mamba_)?n_?groups|num_mem_blocks", 2),
    (r"(num_|n_)?(local_|routed_)?experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"n_layers?|num_blocks|depth|.*_layers", 3),
    (r".*max_.*positions?.*|n_positions|max_position.*|n_ctx|.*sequence_length|max_seq_len.*|max_source_positions", 128),
    (r"sliding_window|attention_window|local_attention|attention_chunk_size", 4),
    (r"num_queries|num_query_tokens|num_latents|num_object_queries|num_prompts", 8),
    (r"num_frames|frames_per_clip", 4),
    (r"chunk_size|mamba_chunk_size", 8),
)
_WIDTHS: tuple[tuple[str, int], ...] = (
    (r"codebook_size", 256),
    (r"mamba_d_head|mamba_head_dim", 32),
    (r".*(num_|n_)(key_value|kv)_heads|num_kv_heads|num_key_value_heads|kv_n_heads", 2),
    (r".*num_heads|n_heads?|.*attention_heads|num_.*_heads|n_.*_heads", 4),
    (r".*rope_head_dim|rotary_dim", 8),
    (r".*head_dim|d_kv|.*_head_size|attention_head_size|head_size|kv_channels|d_head", 16),
    (r".*lora_rank|.*_rank", 16),
    (r"d_model|n_embd|dim|emb_dim|.*embed_dim|.*hidden_size|projection_(dim|size)|.*_hidden_dim|hidden_dim|embedding_size", 64),
    (r".*embed.*_dim|.*proj.*_dim|.*_embed_proj_dim|width|.*_width|feat.*_dim|.*hidden_size_per_layer_input|lru_width", 64),
    (r".*intermediate_size|.*ffn_dim|d_ff|n_inner|mlp_dim|.*ffn_hidden_size|d_inner|.*ffn_size|ffn_.*|encoder_ffn_dim", 64),
    (r"image_size|input_size|img_size", 32),
    (r"patch_size|.*_patch_size", 8),
    (r"codebook_dim|num_mel_bins|.*mel_bins|feature_size", 32),
    (r".*conv.*groups|num_conv_pos_embedding_groups", 4),
    (r"num_conv_pos_embeddings", 16),
    (r"dt_rank|time_step_rank", 4),
    (r"upsample_groups", 64),
)
_PATTERNS = [(re.compile(f"^({pattern})$"), value) for pattern, value in _COUNTS + _WIDTHS]
_COUNTED = re.compile("|".join(f"^({pattern})$" for pattern, _ in _COUNTS))
# what a variant that divides leaves as it is: sizes of images and of what is cut out of them, of sounds, and numbers of heads
_NOT_DIVIDED = re.compile(
    ".*(heads?|image_size|img_size|input_size|patch|bins|(?<!upsample_)group|rate|length|queries|frames|num_).*|seed|factor"
)
# derived from others, or names of what is no longer there: left to the configuration's own rules
_LEFT_OUT = ("out_indices", "stage_names", "qk_head_dim", "per_layer_config", "attention_layers", "layer_ids", "mamba_headdim")
_OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "llama4": {"vision_config": {"intermediate_size": 256, "vision_output_dim": 64}},  # four times its width; as its projection
    # the last of its widths is `hidden_dim`, and each block is there once
    "efficientnet": {"width_coefficient": 0.05, "depth_coefficient": 1.0},
    "align": {"vision_config": {"width_coefficient": 1.6, "depth_coefficient": 1.0}},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "mllama": {"vision_config": {"vision_output_dim": 192}},  # its width, and that of two layers whose outputs it hands on
    "qwen2_5_omni_thinker": {"vision_start_token_id": 20, "vision_end_token_id": 21, "audio_start_token_id": 22},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 20, "vision_end_token_id": 21, "audio_start_token_id": 22},
}
# what some configurations leave to the checkpoint
_MISSING: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "prediction_length": 4,
    "audio_token_id": 15,
    "image_token_id": 14,
    "image_token_index": 14,
}
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


# further attempts where plain torch refuses the first: sizes that some models derive others from; `divide`: widths keep their
# ratios, and numbers of heads stay
VARIANTS: tuple[dict[str, int], ...] = (
    *({}, {"kv": 4}, {"image": 1 << 30}, {"kv": 4, "image": 64, "head": 8}),
    *({"divide": 8}, {"divide": 8, "image": 64}, {"divide": 16}),
)


class NotSmall(ValueError):
    """No small model of this type can be made here; the message says why."""


class NotAModel(NotSmall):
    """The type is a part of other types' configurations, without a model of its own."""


def model_types() -> list[str]:
    """Every type, in alphabetical order."""
    return sorted(CONFIG_MAPPING.keys())


def _limit(key: str, value: int, variant: Mapping[str, int]) -> int:
    divisor = variant.get("divide", 0)
    if divisor and not _COUNTED.match(key):
        if re.search("image_size|img_size|input_size", key):
            return min(value, variant.get("image", 1 << 30))
        divides = value >= 4 * divisor and value % divisor == 0 and not _NOT_DIVIDED.match(key)
        return value // divisor if divides else value
    for pattern, limit in _PATTERNS:
        if pattern.match(key):
            marks = {"kv": ("kv", "key_value"), "image": ("image_size", "img_size", "input_size"), "head": ("head_dim",)}
            named = [mark for mark, parts in marks.items() if any(part in key for part in parts)]
            return min(value, variant.get(named[0], limit) if named else limit)
    return value


def shrunk(settings: Mapping[str, Any], variant: Mapping[str, int]) -> dict[str, Any]:
    """The settings of a configuration with small sizes."""
    made: dict[str, Any] = {}
    layers = _num_layers(settings)
    tokens = iter(range(10, VOCAB))
    for key, value in settings.items():
        if key in _LEFT_OUT:
            continue
        if re.search(r"token_(id|index)$|_idx$|^(image|video|audio)_token", key) and type(value) is int and value >= 4:
            made[key] = next(tokens)
        else:
            made[key] = _small_value(key, value, settings, variant, layers)
    return _agreeing(made, settings, layers)


def _num_layers(settings: Mapping[str, Any]) -> int:
    """Three; one for each feature that a backbone hands on; two that share keys and values with two ahead of them."""
    if settings.get("num_kv_shared_layers"):
        return 4
    return max(3, len(settings.get("out_features") or ()))


def _small_value(key: str, value: Any, settings: Mapping[str, Any], variant: Mapping[str, int], layers: int) -> Any:
    depth = settings.get("num_hidden_layers")
    if isinstance(value, Mapping) and value and (key.endswith(("config", "_cfg")) or "model_type" in value):
        return shrunk(value, variant)
    if value is None or isinstance(value, bool):
        return _MISSING.get(key) if value is None else value and key not in _OFF
    if key in _DROPS:
        return 0.0
    if isinstance(value, list) and (key in _LISTS or len(value) == depth):
        kinds = [*dict.fromkeys(map(str, value))]
        if layers == 4 and key == "layer_types" and len(kinds) == 2:
            return kinds * 2
        return value[: layers - 1] + value[-1:] if len(value) >= layers else value
    if isinstance(value, int):
        return layers if key == "num_hidden_layers" and value > layers else _limit(key, value, variant)
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        if re.search("ind(ex|ic)es$", key):
            return [*range(min(len(value), layers - 1))]
        if re.match("vision_feature_layers?$", key):
            return [-2, -1]
        if key == "cross_attention_layers":
            return [1]
        return _shorter(key, value)
    return value


def _agreeing(made: dict[str, Any], settings: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """`made` with the sizes that follow from others."""
    heads = made.get("num_heads")
    if isinstance(heads, list) and heads and isinstance(made.get("embed_dim"), int):
        made["embed_dim"] = 8 * heads[0]  # of each stage's heads
    if settings.get("num_kv_shared_layers"):
        made["num_kv_shared_layers"] = 2
    names = made.get("out_features")
    stages = len(made["depths"]) if isinstance(made.get("depths"), list) else layers
    if names and any(re.fullmatch(r"stage\d+", str(name)) and int(name[5:]) > stages for name in names):
        made["out_features"] = [f"stage{stages - len(names) + 1 + index}" for index in range(len(names))]
    if isinstance(made.get("image_grid_pinpoints"), list) and "vision_config" in made:
        side = made["vision_config"]["image_size"]
        made["image_grid_pinpoints"] = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    expand, hidden = made.get("mamba_expand", made.get("expand")), made.get("hidden_size")
    pairs = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("num_heads", "head_dim"))
    for count, size in pairs if isinstance(expand, int) and isinstance(hidden, int) else ():
        if isinstance(made.get(count), int) and size in made:
            made[size] = (made.get("mamba_d_ssm") or expand * hidden) // made[count]  # the first is Falcon-H1's own width
    return made


def _shorter(key: str, values: list[int]) -> list[int]:
    """A list with a value per stage: sizes an eighth, depths 2 at most; anything else as it is."""
    if re.search("hidden_sizes|embed_dims|channels|.*_dims?$|conv_dim|widths?", key):
        return [max(8, value // 8) if value >= 64 else value for value in values]
    return [min(value, 2) for value in values] if re.search("depths|num_blocks|layers", key) else values


def _settings(cls: Any) -> dict[str, Any]:
    """The type's own settings, with the parts that it leaves out, and with no backbone of a package that may not be here."""
    settings = cls().to_dict()
    for key, spec in (getattr(cls, "sub_configs_defaults", None) or {}).items():
        own = settings.get(key)
        if (own is not None and own.get("model_type") != "timm_backbone") or key.startswith("audio"):
            continue
        try:
            part = CONFIG_MAPPING[spec.model_type]
        except KeyError:
            part = spec.config_class
        if issubclass(part, transformers.PretrainedConfig):
            settings[key] = part(**{name: value for name, value in spec.init_kwargs.items() if name != "model_type"}).to_dict()
    for name in ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype"):
        settings.pop(name, None)
    return settings


def small_config(model_type: str, variant: Mapping[str, int]) -> Any:
    """The type's own configuration, shrunk. Raises NotSmall."""
    try:
        cls = CONFIG_MAPPING[model_type]
        settings = shrunk(_settings(cls), variant)
        for key, value in _OVERRIDES.get(model_type, {}).items():
            settings[key] = settings[key] | value if isinstance(value, dict) else value
        config = cls(**settings)
        for each in (config, _text_of(config)):
            each.use_cache = False
            for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 2)):
                if getattr(each, name, None) is None:
                    setattr(each, name, value)
        for part in parts_of(config):
            _set_rope(part)
        return config
    except Exception as error:
        raise NotSmall(f"configuration: {words_of(error)}") from error


def _text_of(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # it has several
        return config


def parts_of(config: Any) -> list[Any]:
    """A configuration and those in it."""
    own = [each for each in vars(config).values() if isinstance(each, transformers.PretrainedConfig)]
    return [config, *(part for each in own for part in parts_of(each))]


def _set_rope(config: Any) -> None:
    """A width of heads and a base where only the checkpoint has them; sections of time, height and width that add up to half of
    what each head turns."""
    rope = getattr(config, "rope_parameters", None)
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(rope, dict):
        return
    if vars(config).get("head_dim", 0) is None and isinstance(heads, int) and isinstance(hidden, int):
        config.head_dim = hidden // heads
    for each in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if "rope_theta" in each:
            each["rope_theta"] = each["rope_theta"] or 10000.0
    if isinstance(heads, int) and isinstance(hidden, int) and "mrope_section" in _source_beside(config):
        turned = int((vars(config).get("head_dim") or hidden // heads) * rope.get("partial_rotary_factor", 1.0)) // 2
        third = max(1, 3 * turned // 8)
        rope["mrope_section"] = [turned - 2 * third, third, third]


def model_class(config: Any, wanted: str | None = None) -> tuple[str, Any]:
    """(kind, class): the first of the kinds above that the type has, or the wanted one, or else the first in the module of its
    models that takes this configuration. Raises NotAModel."""
    for kind, name in _KINDS:
        if wanted not in (None, kind):
            continue
        mapping = getattr(modeling_auto, name, None)
        try:
            found = mapping[type(config)] if mapping is not None and type(config) in mapping else None
        except ValueError:  # named in the mapping, and nowhere defined
            found = None
        if found is not None:
            return kind, found[0] if isinstance(found, tuple) else found
    if wanted is None and (own := _own_classes(config)):
        return "part or other head", own[0]
    raise NotAModel("no class that trains")


def _models_beside(config: Any) -> Any:
    """The module of the models of this configuration's family, if there is one."""
    try:
        return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None


def _source_beside(config: Any) -> str:
    module = _models_beside(config)
    return inspect.getsource(module) if module else ""


def _own_classes(config: Any) -> list[Any]:
    """Models that take this configuration, those with a head first."""
    module = _models_beside(config)
    own = [each for each in vars(module).values() if inspect.isclass(each)] if module else []
    own = [each for each in own if each.__module__ == module.__name__]
    models = [each for each in own if issubclass(each, transformers.PreTrainedModel) and each.config_class is type(config)]
    whole = [each for each in models if "forward" in vars(each) and not each.__name__.endswith("PreTrainedModel")]
    return sorted(whole, key=lambda each: "For" not in each.__name__)


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


def words_of(error: BaseException, longest: int = 160) -> str:
    """An error in one line, without the place where this machine has its packages."""
    text = re.sub(r"/[^' ]*/site-packages/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:longest]
