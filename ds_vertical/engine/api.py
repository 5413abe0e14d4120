"""A script's two calls: `prepare` checks the JSON and claims the run's folder, `initialize` builds the engine of either arm.

What cannot be trained is refused here, before anything is allocated: the JSON, the model, memory, the disk.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from ds_vertical import interrupts
from ds_vertical.compat import accelerator, stock_config, swap_handles, zero_params
from ds_vertical.compat import engine as compat_engine
from ds_vertical.compat.entry_points import Engines
from ds_vertical.config.acco import with_acco
from ds_vertical.config.cross_check import check, refuse_unfilled
from ds_vertical.config.file import DeepSpeedJson, num_micro_batches, read_config
from ds_vertical.config.levels import move_levels
from ds_vertical.config.resolve import explain, resolve
from ds_vertical.config.section import SECTION, VerticalConfig, load_section
from ds_vertical.distributed import ranks
from ds_vertical.distributed.elastic import ElasticCounts, open_elastic
from ds_vertical.distributed.unit_levels import refuse_levels
from ds_vertical.engine import disk_check, machine_cache
from ds_vertical.engine.acco.refusals import refuse_acco
from ds_vertical.engine.assembly import HostBudget
from ds_vertical.engine.autotune import (
    choose_all,
    choose_delay,
    late_copies,
    refuse_fetched_compiled,
    settle_read_ahead,
    spared,
)
from ds_vertical.engine.budget.room import host_room
from ds_vertical.engine.budget.zero_init import tight_buffers
from ds_vertical.engine.engine import VerticalEngine
from ds_vertical.engine.integrations.pretrained import write_full_weights
from ds_vertical.engine.integrations.stock_calls import StockCalls
from ds_vertical.engine.keeping.keeping import check_room
from ds_vertical.engine.keeping.planner import KeepPlanner, open_choice
from ds_vertical.engine.memory_check import Forecast, check_memory, groups_of, read_ahead_bytes
from ds_vertical.engine.progress import Progress
from ds_vertical.engine.signals import leave_on_sigterm
from ds_vertical.engine.train_loop import TrainLoop
from ds_vertical.engine.zero3.chunks import check_optimizer, refuse_compression
from ds_vertical.errors import ConfigError
from ds_vertical.io import preflight
from ds_vertical.io.files import check_length, make_run_private
from ds_vertical.io.host import MAPPED_AHEAD, keep_cores_for_this_thread, keep_freed_memory, map_blocks_from
from ds_vertical.io.runs import run_dir, stripes
from ds_vertical.model.compiled_blocks import refuse_compiled_around
from ds_vertical.model.layers import LayerMap, check_trainable, map_layers
from ds_vertical.planner import memory_budget
from ds_vertical.planner.memory_budget import SPARE_SHARE, kept_bytes
from ds_vertical.types import OFFLOAD_DEVICES, RunSettings, Tier

_HALF_BYTES: Final = 2
_QUANTIZED: Final = ("Params4bit", "Int8Params")  # of bitsandbytes, whatever its version


def offload_sections(config: Mapping[str, object]) -> list[dict[str, Any]]:
    """The JSON's offload sections with device "nvme" and a path, to be read or changed."""
    zero = config.get("zero_optimization") or {}
    sections = [zero.get(name) for name in ("offload_param", "offload_optimizer")] if isinstance(zero, dict) else []
    given = [section for section in sections if isinstance(section, dict) and section.get("nvme_path")]
    return [section for section in given if section.get("device") == OFFLOAD_DEVICES[Tier.SSD]]


def run_folder(config: Mapping[str, object]) -> Path | None:
    """The first nvme_path in use; of a prepared configuration it is the run's folder."""
    return next((Path(section["nvme_path"]) for section in offload_sections(config)), None)


def nvme_paths(config: Mapping[str, object]) -> list[str]:
    """Those in use, those of several SSDs included."""
    return [section["nvme_path"] for section in offload_sections(config)] + several_paths(config)[1:]


def several_paths(config: Mapping[str, object]) -> list[str]:
    """The section's paths on several SSDs; empty where it has none, or trains the stock arm."""
    section = load_section(config)
    return list(section.nvme_paths or ()) if section is not None and section.enabled else []


def _claim(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with folders of this run in the place of its paths. Files in them lie on all SSDs from then on."""
    run_id, several = ranks.common_run_id(run_dir.new_run_id()), several_paths(config)
    with interrupts.deferred(firmly=True):  # whatever is claimed is known to `run_dir`, which gives it up at the process's end
        prepared = run_dir.claim_config(config, run_id, ranks.rank(), several)
        if several:
            folders = [Path(os.path.realpath(path)) / run_id for path in several]
            prepared[SECTION]["nvme_paths"] = list(map(str, folders))
            stripes.open_run(folders, machine_cache.shares_of(several))
    return prepared


def _with_levels(config: DeepSpeedJson) -> DeepSpeedJson:
    """The configuration with DeepSpeed's keys of levels in the section, where that trains layer-major: zero.Init, too, is to
    make plain partitions, and with two halves a step no parameter stays on the device. Raises ConfigError."""
    section = load_section(config)
    return with_acco(move_levels(config)) if section is not None and section.enabled else config


def unclaimed_paths(config: Mapping[str, object]) -> list[str]:
    """The nvme_paths in use that `prepare` has not replaced by this run's folder."""
    return [s["nvme_path"] for s in offload_sections(config) if run_dir.owned(s["nvme_path"]) is None]


def refuse_foreign_model(model: nn.Module, config: Mapping[str, object]) -> None:
    """Refuse a model whose parameters zero.Init has already written below another path than this run's."""
    roots = [Path(section["nvme_path"]).resolve() for section in offload_sections(config)]
    unclaimed = unclaimed_paths(config)
    for param in model.parameters():
        folder = zero_params.swap_folder(param)
        if folder is None:
            continue
        if unclaimed or not any(folder.resolve().is_relative_to(root) for root in roots):
            raise ConfigError(
                f"zero_optimization.offload_param.nvme_path: the model's parameters lie in {folder}, written by zero.Init"
                " outside the folder of this run; before building the model write\n"
                "    config = ds_vertical.prepare(config)\n"
                "and pass that config to zero.Init (or HfDeepSpeedConfig) and to initialize"
            )


def refuse_late_fp32(model: nn.Module, config: dict[str, Any]) -> None:
    """Refuse an fp32 model that DeepSpeed would partition at initialize as bf16: see patches/0002."""
    on_ssd = ((config.get("zero_optimization") or {}).get("offload_param") or {}).get("device") == OFFLOAD_DEVICES[Tier.SSD]
    if on_ssd and zero_params.rounds_late_fp32(config) and not zero_params.is_partitioned_model(model):
        raise ConfigError(
            "zero_optimization.offload_param.device: DeepSpeed would write this fp32 model to SSD as bf16, since it was not"
            " built under zero.Init (patches/README.md, 0002); build it under\n"
            "    with deepspeed.zero.Init(config_dict_or_path=ds_vertical.prepare(config)):"
        )


def refuse_wide(model: nn.Module, config: DeepSpeedJson) -> None:
    """Refuse fp32 parameters of a model in half precision, such as PEFT's adapters, that are large enough for SSD: DeepSpeed's
    files have one dtype."""
    json = stock_config.OffloadSettings.read(config)
    if not json.params_in_files or not stock_config.wants_half(config) or not zero_params.keeps_dtypes(model.parameters()):
        return
    for name, param in model.named_parameters():
        numel = -(-zero_params.full_numel(param) // ranks.world_size())
        if param.dtype is torch.float32 and numel * _HALF_BYTES >= json.least_bytes:
            raise ConfigError(
                f"model parameter {name}: got torch.float32, {numel} elements a rank, in a run whose files on SSD hold half"
                " precision; make it half precision (adapters of PEFT: get_peft_model(..., autocast_adapter_dtype=False)),"
                ' or set zero_optimization.offload_param.device to "cpu"'
            )


def refuse_float64() -> None:
    """Refuse to begin where torch makes float64 tensors unless told otherwise: DeepSpeed's buffers would be."""
    if torch.get_default_dtype() is torch.float64:
        raise ConfigError(
            "torch.get_default_dtype(): got torch.float64, of which DeepSpeed would make its buffers; write"
            " torch.set_default_dtype(torch.float32) before ds_vertical.prepare and ds_vertical.initialize"
        )


def refuse_parameters(model: nn.Module, config: DeepSpeedJson) -> None:
    """Refuse to build an engine where torch makes float64, which DeepSpeed's buffers and CPU Adam do not take; parameters that
    bitsandbytes quantises, whose scales do not travel with a shard; those of `refuse_wide`; a model that is frozen whole."""
    refuse_wide(model, config)
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            "initialize(model=...): none of the model's parameters requires a gradient, so nothing would be trained; set"
            " requires_grad, or add adapters; an engine that only evaluates is made from a JSON without vertical_schedule"
        )
    refuse_float64()
    for name, param in model.named_parameters():
        if zero_params.has_second_partition(param):
            raise ConfigError(
                f"model parameter {name}: zero.Init has partitioned it for zero_optimization.zero_hpz_partition_size; build the"
                " model under deepspeed.zero.Init(config_dict_or_path=ds_vertical.prepare(config)), which leaves that to the"
                " schedule"
            )
        if param.dtype is torch.float64:
            raise ConfigError(
                f"model parameter {name}: got torch.float64, which CPU Adam does not step; call model.float(), or build the"
                " model under deepspeed.zero.Init(config_dict_or_path=ds_vertical.prepare(config))"
            )
        found = next((each.__name__ for each in type(param).__mro__ if each.__name__ in _QUANTIZED), None)
        if found is not None:
            raise ConfigError(
                f"model parameter {name}: got a {found}, which bitsandbytes quantises, and whose scales would be lost; load the"
                " model without quantization_config (load_in_4bit, load_in_8bit): frozen weights rest on SSD and take no"
                " optimizer state"
            )


def prepare(config: dict[str, Any] | str) -> dict[str, Any]:
    """Validate a DeepSpeed configuration and claim a folder of its own for this run's files.

    `config`: dict, path or base64, as `deepspeed.initialize` takes it. Returns the dict to give to `zero.Init`,
    `HfDeepSpeedConfig` and `initialize`: every nvme_path is replaced by `nvme_path/<run id>`, the same on all ranks, locked
    until the process ends. A configuration that is prepared already is given back. Initialises distributed if needed.
    With `host_memory_bytes` and parameters on SSD each call is collective: the ranks of a host count each other.

    Raises ConfigError (the JSON path, the value, what to write) and StorageError (the folder is in use).
    """
    prepared = _prepare(config)
    section = load_section(prepared)
    if section is not None and section.enabled:
        for line in tight_buffers(prepared, section.host_memory_bytes):
            accelerator.log(f"ds_vertical: {line}")
    return prepared


def _prepare(config: DeepSpeedJson | str) -> DeepSpeedJson:
    raw = _with_levels(read_config(config))
    preflight.check_process(nvme_paths(raw))
    section = load_section(raw)
    if section is not None:
        check(raw, section, accelerator.device_name())
        if section.enabled:
            refuse_float64()  # before zero.Init writes parameters
        refuse_levels(resolved := resolve(section))
        refuse_acco(resolved, raw)
        refuse_compression(resolved)
        if unclaimed_paths(raw):
            disk_check.check_before_the_model(raw)
        if section.enabled and accelerator.is_one_memory():
            keep_cores_for_this_thread()  # ahead of the first collective
            map_blocks_from(MAPPED_AHEAD)
            ranks.limit_heaps()
        if section.enabled:
            swap_handles.hold_parameters()
    if unclaimed_paths(raw):
        for path in nvme_paths(raw):
            check_length(path)
        leave_on_sigterm()
        return _claim(raw)
    return raw


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *positional: Any,
    config: dict[str, Any] | str | None = None,
    config_params: dict[str, Any] | str | None = None,
    **kwargs: Any,
) -> Engines:
    """`deepspeed.initialize` with the same arguments and results, plus `train_batch` and `eval_batch` on the engine.

    With `vertical_schedule` in the configuration the engine is a VerticalEngine; with the section absent or
    `"enabled": false` it is a plain DeepSpeedEngine. Raises ConfigError, StorageError, LayerError or MemoryBudgetError before
    anything is allocated.
    """
    names = ("distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param", "config_params")
    kwargs |= {"config": config, "config_params": config_params}
    kwargs |= dict(zip(names, positional, strict=False))
    kwargs |= dict(model=model, optimizer=optimizer, model_parameters=model_parameters)
    kwargs |= dict(training_data=training_data, lr_scheduler=lr_scheduler)
    args, given = single_config(args, kwargs.pop("config"), kwargs.pop("config_params"))
    raw = _with_levels(read_config(given))
    preflight.check_process(nvme_paths(raw))
    section = load_section(raw)
    resolved = resolve(section, torch.initial_seed()) if section is not None else None
    begun: list[VerticalEngine] = []
    first_change = interrupts.num_open()
    try:
        return _initialize_either(raw, resolved, begun, args=args, **kwargs)
    except BaseException as error:
        _give_back(begun, first_change, error)
        raise


def _initialize_either(
    config: dict[str, Any], resolved: RunSettings | None, begun: list[VerticalEngine], **kwargs: Any
) -> Engines:
    """The engine of one of the arms. `begun`: gets one of ours as soon as it is being made."""
    if resolved is None or not resolved.enabled:
        returned = _initialize_stock(config, resolved, **kwargs)
    else:
        try:
            with ranks.collective_section("initialize"):
                returned = _initialize_vertical(config, resolved, begun, **kwargs)
        except BaseException:
            if accelerator.is_one_memory():
                keep_freed_memory(0)  # ends what `prepare` has set, which no engine may have come to
            raise
    for folder in run_dir.claimed():
        make_run_private(folder)
    return returned


def _give_back(begun: list[VerticalEngine], first_change: int, error: BaseException) -> None:
    """At once what engines have that nobody gets, though somebody may keep the error, and with it them: a notebook does."""
    with interrupts.deferred(firmly=True):
        interrupts.end_generators(error)
        interrupts.take_back(first_change)
        for engine in begun:
            with contextlib.suppress(Exception):  # DeepSpeed's part may not be there yet; the first error is the cause
                engine.destroy()


def _initialize_stock(config: dict[str, Any], resolved: RunSettings | None, **kwargs: Any) -> Engines:
    if resolved is not None and isinstance(kwargs["model"], nn.Module):
        refuse_foreign_model(kwargs["model"], config)
        config = prepare(config)
    returned = compat_engine.stock_initialize(config=config, **kwargs)
    seeded = resolved is not None and resolved.seed_micro_batches
    progress = Progress(returned[0], resolved.progress if resolved is not None else None)
    loop = StockCalls(returned[0], resolved.seed if resolved is not None and seeded else None, progress)
    if resolved is not None:
        loop.elastic = open_elastic(resolved.elastic, returned[0].gradient_accumulation_steps(), measures=False)
    _bind(returned[0], loop)
    if loop.elastic is not None:
        loop.elastic.count_engine()
    if compat_engine.is_patched() or loop.elastic is not None:  # whose counts the three calls would ignore
        loop.watch()
    return returned


def _slowest_report(config: Mapping[str, object]) -> machine_cache.MeasuredReport | None:
    """Of the ranks, the limits of the slowest machine; None where one has none that were measured."""
    measured = machine_cache.training_report(run_folder(config), several_paths(config)[1:])
    return machine_cache.slowest_report(ranks.all_gathered(measured))


def _initialize_vertical(config: dict[str, Any], resolved: RunSettings, begun: list[VerticalEngine], **kwargs: Any) -> Engines:
    section = load_section(config)
    assert section is not None
    refuse_unfilled(config)
    warnings = check(config, section)
    elastic = _start_ranks(resolved, config)
    model = kwargs["model"]
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize(model=...): got {type(model).__name__}; vertical_schedule needs a torch.nn.Module")
    if isinstance(kwargs["optimizer"], torch.optim.Optimizer):
        check_optimizer(kwargs["optimizer"])
    refuse_parameters(model, config)
    resolved, layers = _cut(model, resolved)
    refuse_foreign_model(model, config)
    refuse_late_fp32(model, config)
    if isinstance(kwargs["model_parameters"], Iterator):
        kwargs["model_parameters"] = list(kwargs["model_parameters"])
    groups = groups_of(model, kwargs["model_parameters"], kwargs["optimizer"])
    forecast_of = partial(Forecast, layers, groups, config)
    room = host_room(model.parameters(), resolved.host_memory_bytes)
    report = _slowest_report(config)
    resolved = _with_delay(section, resolved, forecast_of, config, room)
    resolved = choose_all(section, resolved, forecast_of, model, report, room)
    resolved, planner = open_choice(KeepPlanner(forecast := forecast_of(resolved).paired(room), resolved, report, *room))
    disk_check.limit_ahead(forecast, config, resolved)
    needs, host_bytes, left = check_memory(forecast, model.parameters(), resolved.host_memory_bytes)
    check_room(resolved.activations, host_bytes, left)
    resolved = settle_read_ahead(section, resolved, forecast)
    needs += [*disk_check.check_disk(forecast, config, resolved, room), *late_copies(section, resolved, forecast.timing)]
    prepared = _prepare(config)
    for line in [*(f"warning: {warning}" for warning in warnings), *explain(resolved), *needs]:
        accelerator.log(f"ds_vertical: {line}")
    budget = _budget_of(forecast, host_bytes, left, planner, resolved.host_memory_bytes is not None)
    own = {"vertical": resolved, "layers": layers, "folder": run_folder(prepared), "budget": budget, "elastic": elastic}
    with compat_engine.substituted_engine(partial(VerticalEngine, **own, begun=begun.append)):
        returned = compat_engine.stock_initialize(config=prepared, **kwargs)
    write_full_weights(returned[0])
    return returned


def _with_delay(
    section: VerticalConfig,
    resolved: RunSettings,
    forecast_of: Callable[[RunSettings], Forecast],
    config: DeepSpeedJson,
    room: tuple[int, int],
) -> RunSettings:
    """`resolved` as `choose_delay` has it, where the SSD holds what early steps need: else they may be given up. Collective."""
    holds_second = disk_check.holds_second(forecast_of(resolved), config)
    return choose_delay(section, resolved, forecast_of, spared(room)) if holds_second else resolved


def _budget_of(forecast: Forecast, host_bytes: int, left: int, planner: KeepPlanner | None, is_limited: bool) -> HostBudget:
    """What the engine hears of the budget. `host_bytes`, `left`: as `check_memory` has found them. `is_limited`: whether the
    user has written how much host memory there is."""
    shape, terms = forecast.shape, forecast.terms
    kept, behind = kept_bytes(shape, terms) if accelerator.is_one_memory() else (0, 0)
    counted = tuple(item for item in memory_budget.budget(shape, terms, forecast.further(0)) if item.tier is Tier.DEVICE)
    needed, room = host_bytes + read_ahead_bytes(forecast), left - read_ahead_bytes(forecast)
    is_short = not forecast.keeps_freed or (is_limited and room < max(kept, behind) + SPARE_SHARE * needed)
    settled = forecast.pairs, forecast.keeps_freed, is_short
    return HostBudget(needed, kept, left, behind, planner, *settled, counted, forecast.fewer)


def _start_ranks(resolved: RunSettings, config: DeepSpeedJson) -> ElasticCounts | None:
    """How many micro-batches each rank brings; None: all bring as many. Raises ConfigError where the section asks for what
    these ranks cannot do."""
    if accelerator.is_one_memory():
        keep_cores_for_this_thread()  # ahead of the first collective
    ranks.start_distributed()
    refuse_levels(resolved)
    refuse_acco(resolved, config)
    refuse_compression(resolved)
    return open_elastic(resolved.elastic, num_micro_batches(config, ranks.world_size()))


def _cut(model: nn.Module, resolved: RunSettings) -> tuple[RunSettings, LayerMap]:
    """The model's layers, and `resolved` with what follows from the model. Raises LayerError and ConfigError."""
    check_trainable(model, lambda line: accelerator.log(f"ds_vertical: {line}"))
    refuse_fetched_compiled(resolved, model)
    layers = map_layers(model, resolved.layers, resolved.blocks_per_layer, apart=resolved.outside_layers == "fetched")
    refuse_compiled_around(model, layers.blocks)
    return resolved, layers


def _bind(engine: Any, loop: TrainLoop) -> None:
    """Give a plain engine the two calls; the loop holds the engine, as a bound method would."""
    engine.train_batch = MethodType(lambda _, data_iter=None, loss_fn=None: loop.train_batch(data_iter, loss_fn), engine)
    engine.eval_batch = MethodType(lambda _, data_iter, loss_fn=None: loop.eval_batch(data_iter, loss_fn), engine)


def single_config(args: Any, config: object, config_params: object) -> tuple[Any, Any]:
    """The one configuration given, by deepspeed.initialize's rules; args comes back without it."""
    given = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is None:
        if given is None:
            raise ConfigError("initialize: no configuration given; pass config=..., or --deepspeed_config through args")
        return args, given
    if given is not None:
        raise ConfigError(
            f"initialize: got both config= and args.deepspeed_config={from_args!r}; pass one:"
            " config=ds_vertical.prepare(args.deepspeed_config), without args"
        )
    args = copy.copy(args)
    args.deepspeed_config = None
    return args, from_args
