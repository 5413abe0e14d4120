"""Run both arms on the same data with the real DeepSpeed and collect what the numerics contract speaks of.

Everything runs in one process with one rank; the process group is started at the first use.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpuinfo
import torch
import torch._dynamo  # zero.Init patches tensor constructors, under which a first import of dynamo fails
from processes import status
from torch import nn

# every CPU Adam asks for the vendor's name, which takes py-cpuinfo more than a second each time
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)

COLLECTED_KIB = 256 << 10  # by which the process may grow between two collections of what engines leave in cycles
MIN_SSD_BYTES = 1 << 20  # smaller shards never leave host memory


def base_config(
    folder: Path | str,
    *,
    num_micro_batches: int = 3,
    dtype: str = "bf16",
    clip: float = 1.0,
    params: str = "nvme",
    optimizer: str = "nvme",
    max_in_cpu: int = 0,
    persistence: int | None = 0,
    sub_group_size: int = 700_001,
    weight_decay: float = 0.01,
    lr: float = 1e-3,
    section: dict[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A stage-3 JSON as users write it. `section` is vertical_schedule without `enabled`; `persistence` None: stock's."""
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": sub_group_size,
        "reduce_bucket_size": 2_000_000,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "offload_optimizer": {"device": optimizer, "buffer_count": 5},
    }
    if persistence is not None:
        zero["stage3_param_persistence_threshold"] = persistence
    if params != "none":
        zero["offload_param"] = {"device": params}
    if params == "nvme":
        zero["offload_param"] |= {
            "nvme_path": str(folder),
            "buffer_count": 12,  # locking and touching as many as stock's default takes longer than training
            "buffer_size": 1_100_000,
            "max_in_cpu": max_in_cpu,
        }
    if optimizer == "nvme":
        zero["offload_optimizer"]["nvme_path"] = str(folder)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": weight_decay}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": lr / 10, "warmup_max_lr": lr, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1},
        "vertical_schedule": {"self_check": False} | dict(section or {}),  # tests compare with stock themselves
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config | top


def start_process_group() -> None:
    """One rank over gloo, once per process, through a file: a free port found here may be another process's a moment later.
    The launcher's variables win."""
    launched = "MASTER_PORT" in os.environ
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    import deepspeed
    from deepspeed.runtime.zero import utils

    from ds_vertical.compat.ops import cache

    # it collects garbage for each engine without offloaded parameters: most of the time that the smallest of them take
    utils.gc = SimpleNamespace(collect=lambda: 0)
    cache.activate()  # in processes that tests start, too: DeepSpeed's communication loads an op
    if torch.distributed.is_initialized():
        return
    if launched:
        deepspeed.init_distributed(verbose=False)
        return
    os.environ["MASTER_PORT"] = "0"  # unused, but asked for
    folder = tempfile.mkdtemp(prefix="ds_vertical_group.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    deepspeed.init_distributed(verbose=False, init_method=f"file://{folder}/store", rank=0, world_size=1)
    del os.environ["MASTER_PORT"]


@dataclass
class Run:
    """What one arm computed: per step losses, norms and full gradients (fp32 sums over the micro-batches, before
    clipping); at the end weights (model dtype), fp32 masters and moments, and the model's buffers, all by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    ssd_bytes: int = 0


Batches = Sequence[Sequence[Any]]  # per step, the micro-batches


def build_engine(
    config: dict[str, Any],
    build: Callable[[], nn.Module],
    *,
    vertical: bool,
    groups: Callable[[nn.Module], Any] | None = None,
    under_zero_init: bool = True,
    recording: bool = True,
) -> tuple[Any, nn.Module]:
    """An engine as users make one: prepare, zero.Init, initialize. Seeds torch with 0 before the model is built.

    `recording`: what `read_grads` needs of a vertical engine, each gradient copied to the host at once."""
    start_process_group()
    import deepspeed

    import ds_vertical

    config = copy.deepcopy(config)
    config["vertical_schedule"] = config.get("vertical_schedule", {}) | {"enabled": vertical}
    prepared = ds_vertical.prepare(config)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=prepared, enabled=under_zero_init):
        model = build()
    model.train()
    parameters = groups(model) if groups is not None else [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=parameters, config=prepared)
    if vertical and recording:
        _record_gradients(engine)
    return engine, model


def _record_gradients(engine: Any) -> None:
    """Keep a copy of each gradient as it leaves the device, for `read_grads`: the engine gives them up once they are used."""
    optimizer = engine.optimizer
    hold, optimizer.recorded = optimizer.gradients.hold, {}

    def recording(unit: Any, indices: Sequence[int], sums: Any, **options: Any) -> bool:
        def noted() -> Iterator[torch.Tensor]:
            for param, share in zip(optimizer.in_chunk_order(unit), sums.shares, strict=True):
                padding = torch.zeros(param.partition_numel() - share.numel())
                optimizer.recorded[param.ds_id] = torch.cat([share.detach().to("cpu", torch.float32), padding])
                yield share

        shares = noted() if sums.flat is None else list(noted())
        return hold(unit, indices, replace(sums, shares=shares), **options)

    optimizer.gradients.hold = recording


def run_arm(
    config: dict[str, Any],
    build: Callable[[], nn.Module],
    batches: Batches,
    *,
    vertical: bool,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    groups: Callable[[nn.Module], Any] | None = None,
    between: Callable[[Any, int], None] | None = None,
    under_zero_init: bool = True,
) -> Run:
    """Train one arm over `batches`; `between(engine, step)` runs after each step. The engine is destroyed at the end."""
    engine, model = build_engine(config, build, vertical=vertical, groups=groups, under_zero_init=under_zero_init)
    run = Run()
    try:
        assert type(engine).__name__ == ("VerticalEngine" if vertical else "DeepSpeedEngine")
        for step, micro_batches in enumerate(batches):
            run.losses.append(engine.train_batch(iter(micro_batches), loss_fn).item())
            run.norms.append(float(engine.get_global_grad_norm()))
            run.grads.append(read_grads(engine, model))
            if between is not None:
                between(engine, step)
        run.weights = read_weights(model)
        run.state = read_state(engine, model)
        run.buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
        run.ssd_bytes = bytes_on_ssd(model)
        names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
        run.counters = {name: getattr(engine, name) for name in names} | {"lr": engine.get_lr()}
    finally:
        dispose(engine)
    return run


class _Garbage:
    """What engines leave in cycles. A collection goes through all that the tests have imported, for a second: so there is one
    when the process has grown, or forty engines have gone."""

    def __init__(self) -> None:
        self._resident: int | None = None
        self._engines = itertools.count(1)

    def note_engine(self) -> None:
        resident = status("VmRSS")
        if self._resident is None:
            self._resident = resident
        if resident > self._resident + COLLECTED_KIB or next(self._engines) % 40 == 0:
            gc.collect()
            self._resident = status("VmRSS")


_garbage = _Garbage()


def dispose(engine: Any) -> None:
    """Destroy an engine and drop what stock keeps alive of it: a global stack of modules, and so all its locked buffers."""
    swappers = {id(s): s for p in engine.module.parameters() if (s := getattr(p, "nvme_swapper", None)) is not None}
    state_swapper = engine.optimizer.optimizer_swapper
    engine.destroy()
    free_stock_buffers(swappers.values(), [] if state_swapper is None else [state_swapper])
    forget_stock_globals()
    _garbage.note_engine()


def free_stock_buffers(of_parameters: Iterable[Any], of_state: Iterable[Any]) -> None:
    """Those that its swappers have locked."""
    for swapper in of_parameters:
        swapper.aio_read_handle.free_cpu_locked_tensor(swapper.buffers)
        if getattr(swapper, "partitioned_swap_buffer", None) is not None:  # one that was cut while it was made has none
            swapper.aio_write_handle.free_cpu_locked_tensor(swapper.partitioned_swap_buffer)
    for swapper in of_state:
        for buffer in swapper.swap_buffer_manager.all_buffers:
            swapper.aio_handle.free_cpu_locked_tensor(buffer)
        swapper.swap_buffer_manager.all_buffers = []  # it would free them once more, perhaps under a new owner


def forget_stock_globals() -> None:
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero import parameter_offload, partition_parameters

    parameter_offload.FWD_MODULE_STACK.clear()
    partition_parameters.top_level_context = None
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False


def run_both(config: dict[str, Any], build: Callable[[], nn.Module], batches: Batches, **options: Any) -> tuple[Run, Run]:
    """(stock, vertical) on the same JSON, in folders of their own."""
    return run_arm(config, build, batches, vertical=False, **options), run_arm(config, build, batches, vertical=True, **options)


def read_grads(engine: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's share of every parameter's accumulated gradient, in fp32 as DeepSpeed's safe_get_full_grad gives it:
    stock holds it in the accumulation dtype; the vertical arm's is what left the device."""
    optimizer = engine.optimizer
    recorded = getattr(optimizer, "recorded", None)
    held = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition if recorded is None else recorded
    grads = {name: held[p.ds_id].detach() for name, p in model.named_parameters() if p.ds_id in held}
    return {name: grad.to("cpu", torch.float32, copy=True) for name, grad in grads.items()}


def read_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    import deepspeed

    weights: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            weights[name] = param.detach().cpu().clone()
    return weights


def read_state(engine: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's share of fp32 master and moments of every trainable parameter, from memory or from its file."""
    names = {param.ds_id: name for name, param in model.named_parameters()}
    optimizer = engine.optimizer
    getattr(optimizer, "flush_state", lambda: None)()
    state: dict[str, torch.Tensor] = {}
    for index, params in enumerate(optimizer.fp16_groups):
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            flat = _flat_state(optimizer, index, kind)
            offset = 0
            for param in params:
                share = param.partition_numel()
                state[f"{names[param.ds_id]}/{kind}"] = flat.narrow(0, offset, share).clone()
                offset += share
    return state


def own_shares(shares: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's shares, by names of parameters (and "/", and more), without what stands behind a parameter's end, which is
    nobody's."""
    found, num_ranks = {}, torch.distributed.get_world_size()
    for name, share in shares.items():
        numel = weights[name.partition("/")[0]].numel()
        found[name] = share.flatten()[: max(0, numel - rank * -(-numel // num_ranks))]
    return found


def own_state(engine: Any, model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """This rank's shares of masters and moments: see `own_shares`."""
    return own_shares(read_state(engine, model), read_weights(model), rank)


def _flat_state(optimizer: Any, index: int, kind: str) -> torch.Tensor:
    master = optimizer.fp32_partitioned_groups_flat[index]
    if not optimizer._swappable_optimizer_subgroup(index):
        return master.detach() if kind == "master" else optimizer.optimizer.state[master][kind]
    from ds_vertical.io.runs import held_folders, stripes

    prefix = "" if kind == "master" else f"{kind}-"
    file = Path(optimizer.optimizer_swapper.swap_folder) / f"{prefix}{master.ds_id}.tensor.swp"
    numel = optimizer.fp16_partitioned_groups_flat_numel[index]
    found = bytearray()
    for span in stripes.stripes_of(file, 0, 4 * numel):
        with os.fdopen(held_folders.open_file(span.path), "rb") as part:
            part.seek(span.offset)
            found += part.read(span.num_bytes)
    return torch.frombuffer(found, dtype=torch.float32)


def bytes_on_ssd(model: nn.Module) -> int:
    from ds_vertical.compat import zero_params

    return sum(zero_params.shard_bytes(p) for p in model.parameters() if zero_params.is_on_ssd(p))


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not bit-identical."""
    assert a.keys() == b.keys() and a
    return [name for name in a if not _same_bits(a[name], b[name])]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def largest_relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per tensor: norm of the difference over the norm of `a` (0 where both are 0)."""
    result: dict[str, float] = {}
    for name in a:
        norm = a[name].double().norm().item()
        gap = (a[name].double() - b[name].double()).norm().item()
        result[name] = gap / norm if norm else (0.0 if gap == 0 else float("inf"))
    return result


def assert_identical(stock: Run, vertical: Run) -> None:
    """N1: losses, norms, gradients of every step, weights, masters and moments, buffers, counters: bit for bit."""
    assert stock.losses == vertical.losses
    assert stock.norms == vertical.norms
    for step, (a, b) in enumerate(zip(stock.grads, vertical.grads, strict=True)):
        assert not differing(a, b), f"gradients of step {step}"
    assert not differing(stock.weights, vertical.weights)
    assert not differing(stock.state, vertical.state)
    assert not (stock.buffers or vertical.buffers) or not differing(stock.buffers, vertical.buffers)
    assert stock.counters == vertical.counters


def small_buffers(config: dict[str, Any], numel: int = 300_000) -> dict[str, Any]:
    """The same JSON locking no more host memory than a small model needs; locking would take longer than training."""
    config["zero_optimization"]["offload_param"]["buffer_size"] = numel
    return config


@contextlib.contextmanager
def running(
    config: dict[str, Any], build: Callable[[], nn.Module], *, vertical: bool, under_zero_init: bool = True
) -> Iterator[tuple[Any, nn.Module]]:
    """(engine, model) as `build_engine` makes them; destroyed at the end."""
    engine, model = build_engine(config, build, vertical=vertical, under_zero_init=under_zero_init)
    try:
        yield engine, model
    finally:
        dispose(engine)


def contents(engine: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """What training has made: weights, and this rank's share of fp32 masters and moments."""
    return read_weights(model) | read_state(engine, model)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names and bits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def counters(engine: Any) -> dict[str, Any]:
    """The engine's counters and learning rates, by name."""
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return {name: getattr(engine, name) for name in names} | {"lr": engine.get_lr()}


class TwoMemories:
    """`compat.accelerator` on a machine whose host and device are two memories: put in the place of a module's own."""

    @staticmethod
    def is_one_memory() -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        from ds_vertical.compat import accelerator

        return getattr(accelerator, name)


def two_memories(monkeypatch: Any) -> None:
    """Let an engine see two memories: on one nothing that is kept moves to the host's. `monkeypatch`: pytest's."""
    from ds_vertical.engine import assembly
    from ds_vertical.engine.keeping import keeping

    for module in (assembly, keeping):
        monkeypatch.setattr(module, "accelerator", TwoMemories())
