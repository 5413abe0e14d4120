"""The complete DeepSpeed JSON of a plan: it trains as it stands, in both arms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from ds_vertical.cli.common import JsonObject
from ds_vertical.config.deepspeed_keys import AIO
from ds_vertical.config.section import SECTION
from ds_vertical.planner import memory_budget
from ds_vertical.planner.budget import zero_init
from ds_vertical.planner.candidate import Candidate, Choice
from ds_vertical.planner.kept_activations import keep_keys
from ds_vertical.planner.model_shape import ModelSpec
from ds_vertical.types import OFFLOAD_DEVICES, TensorKind, Tier


@dataclass(frozen=True)
class TrainingOptions:
    """What the JSON says and the planner does not choose. `clip`: the norm to clip to, 0 for none; `nvme_paths`: a folder
    on each SSD; `locked`: page-locked memory, for a device with memory of its own."""

    clip: float
    nvme_paths: tuple[str, ...]
    locked: bool
    aio: Mapping[str, object] = field(default_factory=lambda: AIO)
    learning_rate: float = 1e-4


def write_config(candidate: Candidate, spec: ModelSpec, training: TrainingOptions) -> JsonObject:
    """The JSON as a dict: the planner's settings for the model, with the options that were given."""
    choice = candidate.choice
    precision = {"bf16": {"enabled": spec.dtype == "bf16"}}
    if spec.dtype == "fp16":
        precision |= {"fp16": {"enabled": True}}
    zero = _zero(candidate, spec, training)
    spread = len(training.nvme_paths) > 1 and "nvme_path" in zero["offload_param"] | zero["offload_optimizer"]
    paths = {"nvme_paths": list(training.nvme_paths)} if spread else {}
    return {
        "train_micro_batch_size_per_gpu": choice.micro_batch_size,
        "gradient_accumulation_steps": choice.num_micro_batches,
        "gradient_clipping": training.clip,
        "steps_per_print": 10,
        **precision,
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": training.learning_rate, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "zero_optimization": zero,
        "aio": dict(training.aio),
        SECTION: section(choice, candidate.machine.one_memory) | paths | _levels(candidate),
    }


def section(choice: Choice, one_memory: bool) -> JsonObject:
    """The `vertical_schedule` section with every key that the planner chose, so that the run is the one that was planned.
    `one_memory`: the device computes in host memory."""
    placement = choice.placement
    return {
        "blocks_per_layer": choice.blocks_per_layer,
        "prefetch_layers": choice.window,
        "optimizer_delay": choice.delay,
        "optimizer_speculation": None if choice.speculation else False,
        "gradient_host_share": round(placement.share(TensorKind.GRADIENTS, Tier.HOST), 6),
        "optimizer_host_share": round(placement.share(TensorKind.STATE, Tier.HOST), 6),
        "optimizer_read_ahead_bytes": choice.read_ahead_bytes,
        "activations": _activations(choice) | keep_keys(choice.kept, one_memory),
        **({} if one_memory else {"outside_layers": "fetched"}),
        **({"on_nonfinite": "stop"} if choice.in_place else {}),
    }


def _levels(candidate: Candidate) -> JsonObject:
    """Two levels of collectives, as keys of the section alone. DeepSpeed's own keys would be the stock arm's as well, which
    refuses them with parameters on SSD."""
    levels = candidate.choice.levels
    return {} if levels is None else {"levels": levels.keys}


def _activations(choice: Choice) -> JsonObject:
    shares = {tier: round(share, 6) for tier, share in choice.placement[TensorKind.ACTIVATIONS].items()}
    host, ssd = shares[Tier.HOST], shares[Tier.SSD]
    if ssd:
        return {"device": Tier.SSD.value, "share": ssd} | ({"host_share": host} if host else {})
    return {"device": Tier.HOST.value, "share": host} if host else {"device": Tier.DEVICE.value}


def _zero(candidate: Candidate, spec: ModelSpec, training: TrainingOptions) -> JsonObject:
    choice, num_ranks = candidate.choice, candidate.shape.num_shards
    largest, elements, locked = spec.largest_parameter, spec.num_elements, training.locked
    in_host = choice.placement.share(TensorKind.PARAMETERS, Tier.HOST)
    everything = in_host > 1 - 1e-6
    parameters_tier = Tier.HOST if everything else Tier.SSD
    parameters: JsonObject = {"device": OFFLOAD_DEVICES[parameters_tier], "pin_memory": locked}
    if not everything:
        parameters |= {
            "nvme_path": training.nvme_paths[0],
            "buffer_count": _buffer_count(candidate, largest),
            "buffer_size": zero_init.buffer_elements(largest, num_ranks),
            "max_in_cpu": int(in_host * elements / num_ranks),  # of each rank's shards
        }
    state_tier = Tier.SSD if choice.placement.share(TensorKind.STATE, Tier.SSD) else Tier.HOST
    state: JsonObject = {"device": OFFLOAD_DEVICES[state_tier], "pin_memory": locked}
    if state_tier is Tier.SSD:
        state |= {"nvme_path": training.nvme_paths[0], "buffer_count": 4, "pipeline_read": False, "pipeline_write": False}
    return {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": largest,
        "sub_group_size": memory_budget.sub_group_size(elements),
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 2 * max(largest, max(spec.block_elements)),
        "stage3_max_reuse_distance": 0,
        "offload_param": parameters,
        "offload_optimizer": state,
    }


def _buffer_count(candidate: Candidate, largest: int) -> int:
    """As many buffers of zero.Init as take no more memory than the plan does anyway."""
    room, one_memory = memory_budget.total_bytes(candidate.items, Tier.HOST), candidate.machine.one_memory
    taken = partial(zero_init.build_bytes, candidate.shape, largest, candidate.case.further, one_memory)
    return zero_init.buffer_count(largest, room, taken)
