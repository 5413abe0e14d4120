"""What a run is besides its tensors: counters, learning rates, random states, settings; taken for a checkpoint, put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn

from ds_vertical.compat import accelerator, zero_optimizer
from ds_vertical.compat import engine as compat_engine
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.offload.cpu_adam import Powers
from ds_vertical.offload.param_store import ParamStore
from ds_vertical.types import RunSettings

LooseEnds = dict[str, Any]  # of a run besides its tensors: scheduler, random states, buffers, client state
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class FurtherState(Protocol):
    """What some runs have besides; see `TrainedEngine.further_state`."""

    def state(self) -> LooseEnds:
        """Of types that `torch.load(weights_only=True)` takes."""
        ...

    def load(self, found: LooseEnds | None) -> None:
        """Put back what `state` gave; None: the checkpoint has nothing, or it is not wanted."""
        ...


class TrainedEngine(Protocol):
    """The engine, as far as checkpoints know it: DeepSpeed's members, and what VerticalEngine adds."""

    module: nn.Module
    optimizer: VerticalStage3
    vertical: RunSettings
    self_check: FirstStepCheck
    global_steps: int
    lr_scheduler: Any  # the user's, or DeepSpeed's

    @property
    def param_store(self) -> ParamStore:
        """Where this rank's parameters rest."""
        ...

    @property
    def further_state(self) -> Mapping[str, FurtherState]:
        """What some runs have besides, by its name in a checkpoint."""
        ...

    @property
    def stream_seed(self) -> int | None:
        """Base of the micro-batches' random streams; None where the caller's own stream is used."""
        ...

    @stream_seed.setter
    def stream_seed(self, seed: int | None) -> None:
        """Set the base, as a checkpoint that was loaded has it."""

    def use_node_local_storage(self) -> bool:
        """Whether each host saves to a folder of its own, where hosts do not share the path."""
        ...

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch."""
        ...

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step."""
        ...

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0: no clipping."""
        ...

    def zero_sub_group_size(self) -> int:
        """Elements of stock's sub-groups."""
        ...


def settings_of(engine: TrainedEngine) -> dict[str, Any]:
    """Settings whose change changes the order of the arithmetic, or the data: the bits of a resumed run are promised with the
    same ones. By JSON path."""
    vertical = engine.vertical
    chosen = {"snake": vertical.snake, "blocks_per_layer": vertical.blocks_per_layer}
    chosen |= {"seed_micro_batches": vertical.seed_micro_batches}
    if not vertical.reasons.get("seed", "").startswith("null"):  # else the checkpoint's goes on
        chosen |= {"seed": vertical.seed}
    return {
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
        "zero_optimization.sub_group_size": int(engine.zero_sub_group_size()),
    } | {f"vertical_schedule.{key}": value for key, value in chosen.items()}


def numbers_of(engine: TrainedEngine) -> dict[str, Any]:
    """Counters, loss scaler, the optimizer's groups and CPU Adam's powers of beta, as JSON takes them."""
    adam: Any = engine.optimizer.optimizer
    groups = [{key: value for key, value in group.items() if key != "params"} for group in _groups(engine)]
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "loss_scaler": zero_optimizer.loss_scaler_numbers(engine.optimizer),
        "adam_w_mode": bool(adam.adam_w_mode),
        "groups": groups,
        "powers": asdict(engine.optimizer.driver.powers),
        "has_scheduler": engine.lr_scheduler is not None,
        "stream_seed": engine.stream_seed,
        "checked_model": engine.self_check.checked_model,
        "checked_state": sorted(engine.self_check.checked_state),
    }


def set_optimizer(engine: TrainedEngine, numbers: Mapping[str, Any]) -> None:
    """The optimizer's groups, its powers of beta and the loss scaler."""
    for group, saved in zip(_groups(engine), numbers["groups"], strict=True):
        group |= {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    engine.optimizer.driver.powers = Powers(**numbers["powers"])
    zero_optimizer.set_loss_scaler_numbers(engine.optimizer, numbers["loss_scaler"])


def set_counters(engine: TrainedEngine, numbers: Mapping[str, Any]) -> None:
    """The counters, and the seed of the micro-batches' random streams where the JSON does not write one."""
    counters = numbers["counters"]
    for name in _COUNTERS:
        if name in counters:  # DeepSpeed's checkpoints have not all of them
            setattr(engine, name, counters[name])
    if engine.stream_seed is not None and "vertical_schedule.seed" not in settings_of(engine):
        engine.stream_seed = numbers["stream_seed"]
    engine.self_check.checked_model = numbers.get("checked_model")
    engine.self_check.checked_state = set(numbers.get("checked_state", ()))


def _groups(engine: TrainedEngine) -> list[dict[str, Any]]:
    return engine.optimizer.optimizer.param_groups


# ---- what is not JSON


def loose_ends(engine: TrainedEngine) -> LooseEnds:
    """Learning rate scheduler and random states, of types that `torch.load(weights_only=True)` takes."""
    scheduler = engine.lr_scheduler
    ends = {"lr_scheduler": None if scheduler is None else scheduler.state_dict(), "random": _random_states()}
    return ends | {name: each.state() for name, each in engine.further_state.items()}


def set_further_state(engine: TrainedEngine, found: LooseEnds | None) -> None:
    """What some runs have besides. `found`: the loose ends; None: it is not wanted."""
    for name, each in engine.further_state.items():
        each.load((found or {}).get(name))


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if not accelerator.is_one_memory():
        states["device"] = accelerator.get_accelerator().get_rng_state()
    if "numpy" in sys.modules:
        import numpy

        kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        states["numpy"] = (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return states


def set_random_states(found: Mapping[str, Any]) -> None:
    """Those of torch, the device, Python and NumPy."""
    states = found["random"]
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states["python"]))
    if "device" in states and not accelerator.is_one_memory():
        accelerator.get_accelerator().set_rng_state(states["device"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def loose_faults(engine: TrainedEngine, found: object, scheduler: bool, run: bool, strict: bool = True) -> Iterator[str]:
    """What of the loose ends could not be put back, before anything is. `scheduler`, `run`: these are wanted; `strict`: the
    checkpoint's buffers must be those of the model."""
    where = "loose.pt"
    kinds = {"lr_scheduler": (dict, type(None)), "random": (dict,), "buffers": (dict,), "client_state": (dict,)}
    entries: dict[str, Any] = found if isinstance(found, dict) else {}
    wrong = [key for key, kind in kinds.items() if key not in entries or not isinstance(entries[key], kind)]
    if wrong:
        yield f"{where}: {', '.join(wrong)}: missing, or of another kind"
        return
    if not all(isinstance(buffer, torch.Tensor) for buffer in entries["buffers"].values()):
        yield f"{where}: buffers: not all of them are tensors"
        return
    yield from buffer_differences(engine, entries["buffers"], strict)
    if scheduler and engine.lr_scheduler is not None:
        yield from (f"{where}: lr_scheduler: {fault}" for fault in _scheduler_faults(engine, entries["lr_scheduler"]))
    if run:
        yield from (f"{where}: random: {fault}" for fault in _random_faults(entries["random"]))


def _scheduler_faults(engine: TrainedEngine, found: Mapping[str, Any] | None) -> Iterator[str]:
    here = engine.lr_scheduler.state_dict()
    if found is None:
        yield "missing"
        return
    for key, value in here.items():
        if key not in found:
            yield f"{key} is missing"
        elif value is not None and found[key] is not None and _family(value) != _family(found[key]):
            yield f"{key}: {type(found[key]).__name__}, and {type(value).__name__} here"


def _family(value: object) -> type:
    """Numbers of all kinds are one, and so are sequences."""
    families = ((int | float, float), (list | tuple, list))
    return next((family for kinds, family in families if isinstance(value, kinds)), type(value))


def _random_faults(states: Mapping[str, Any]) -> Iterator[str]:
    """Each state is tried on a generator that nobody uses."""
    trials: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.Generator().set_state(states["torch"]),
        "python": lambda: random.Random().setstate(_python_state(states["python"])),
    }
    if "device" in states and not accelerator.is_one_memory():
        trials["device"] = lambda: states["device"].new_empty(0, dtype=torch.uint8).copy_(states["device"][:0])
    if "numpy" in states:
        import numpy

        trials["numpy"] = lambda: numpy.random.RandomState().set_state(states["numpy"])
    for name, trial in trials.items():
        try:
            trial()
        except Exception as error:  # of many types, by what is wrong with the state
            yield f"{name}: no state of a generator ({type(error).__name__}: {str(error).partition(chr(10))[0]})"


def _python_state(state: Any) -> tuple[Any, ...]:
    version, inner, gauss = state
    return version, tuple(inner), gauss


# ---- buffers of the model


def buffers_of(engine: TrainedEngine) -> dict[str, torch.Tensor]:
    """Copies of the model's persistent buffers, by name."""
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in _buffers(engine).items()}


def buffer_differences(engine: TrainedEngine, saved: Mapping[str, torch.Tensor], strict: bool = True) -> list[str]:
    """By name, what `set_buffers` could not put back; if `strict`, also what only one of the two has."""
    here = _buffers(engine)
    found = [f"buffer {name}: in the checkpoint only" for name in saved if strict and name not in here]
    found += [f"buffer {name}: not in the checkpoint" for name in here if strict and name not in saved]
    both = [(name, here[name], saved[name]) for name in here if name in saved]
    kinds = [(name, _kind(mine), _kind(theirs)) for name, mine, theirs in both]
    return found + [f"buffer {name}: {mine} here, {theirs} in the checkpoint" for name, mine, theirs in kinds if mine != theirs]


def _kind(buffer: torch.Tensor) -> str:
    return f"{list(buffer.shape)} of {str(buffer.dtype).removeprefix('torch.')}"


def set_buffers(engine: TrainedEngine, saved: Mapping[str, torch.Tensor]) -> None:
    """Put the model's persistent buffers back, as far as `saved` has them: by name, as `buffers_of` gives them."""
    for name, buffer in _buffers(engine).items():
        if name in saved:
            with torch.no_grad():
                buffer.copy_(saved[name])


def tied_names(engine: TrainedEngine) -> dict[str, str]:
    """Names under which a parameter or persistent buffer of the model stands a second time, each with its first one."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, module in engine.module.named_modules(remove_duplicate=False):
        kept = compat_engine.persistent_buffers(module)
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        own |= {name: buffer for name, buffer in module.named_buffers(recurse=False) if name in kept}
        for name, tensor in own.items():
            full = f"{path}.{name}" if path else name
            if first.setdefault(id(tensor), full) != full:
                tied[full] = first[id(tensor)]
    return tied


def _buffers(engine: TrainedEngine) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in compat_engine.persistent_buffers(module):
                found[f"{path}.{name}" if path else name] = buffer
    return found
