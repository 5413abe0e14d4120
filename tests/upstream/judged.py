"""DeepSpeed's own tests, run against our engine: `judge.py` has them import this module, in every process, and `install` it.

[Note: the three calls] They train with `engine(...)`, `engine.backward(loss)`, `engine.step()`; ours takes the micro-batches of
a step at once. So a forward in training mode only remembers its inputs, the backward of the step's last micro-batch runs them
all with `train_batch`, and `step` has nothing left to do. Gradients are looked at between the two as before, from
`keep_gradients`; they cannot be changed there any more.

For both arms alike: the bf16 copy where fp16 is asked for, and an optimizer in host memory where the test says nothing of it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init

import ds_vertical
from ds_vertical.compat.ops import cache

ARM_VARIABLE = "DS_VERTICAL_JUDGED"  # "stock" or "vertical"
_FRAGMENTS = "test_zero_tensor_fragment"


class Loss:
    """Of one micro-batch's forward that has not run yet."""

    def __init__(self, judged: Judged, inputs: tuple[Any, ...]) -> None:
        self.judged, self.inputs = judged, inputs

    def backward(self) -> None:
        self.judged.backward(self)

    def __float__(self) -> float:
        return self.judged.engine.eval_batch(iter([self.inputs])).item()


class Judged:
    """Our engine, with DeepSpeed's three calls; see [Note: the three calls]."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.waiting: list[tuple[Any, ...]] = []
        self.at_boundary = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, *inputs: Any) -> Any:
        inputs = tuple(map(_narrowed, inputs))
        return Loss(self, inputs) if self.engine.module.training else self.engine(*inputs)

    def backward(self, loss: Loss) -> None:
        self.waiting.append(loss.inputs)
        self.at_boundary = len(self.waiting) == self.engine.gradient_accumulation_steps()
        if self.at_boundary:
            micro_batches, self.waiting = self.waiting, []
            self.engine.train_batch(iter(micro_batches))

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.at_boundary

    def step(self) -> None:
        assert self.at_boundary or self.waiting, "step() without a backward"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what is not ours: other stages, nothing offloaded, and the fp16 whose bf16 copy is there as well."""
    items[:] = [item for item in items if _is_ours(getattr(getattr(item, "callspec", None), "params", {}))]


def _is_ours(params: dict[str, Any]) -> bool:
    offloaded = str(getattr(params.get("offload_device"), "value", "")) != "none"
    return params.get("zero_stage", 3) == 3 and offloaded and params.get("dtype") is not torch.float16


def install() -> None:
    """Put the arm that the environment names in stock's place."""
    vertical = os.environ[ARM_VARIABLE] == "vertical"
    cache.activate()  # the ops are compiled already, for both arms
    get_accelerator().is_fp16_supported = lambda: True
    if get_accelerator().device_name() == "cpu":
        get_accelerator().current_device = lambda: "cpu"  # its number, which is what the tests get, names no device
    _patch_ddp()
    pending: list[tuple[Any, dict[str, Any]]] = []  # configurations that zero.Init was given, and what became of them
    stock_init, stock_initialize = Init.__init__, deepspeed.initialize

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("config_dict_or_path")
        if given is not None:
            made = translated(given, vertical)
            made = ds_vertical.prepare(made) if vertical else made
            pending.append((given, made))
            kwargs["config_dict_or_path"] = made
        stock_init(self, *args, **kwargs)

    def initialize(*args: Any, model: Any, config: Any, **kwargs: Any) -> tuple[Any, ...]:
        made = next((made for given, made in pending if given is config), None) or translated(config, vertical)
        pending.clear()
        if not vertical:
            engine, *others = stock_initialize(*args, model=model, config=made, **kwargs)
            engine.register_forward_pre_hook(lambda _, inputs: tuple(map(_narrowed, inputs)))
            return engine, *others
        made["vertical_schedule"] = {"enabled": True, "keep_gradients": True, "layers": _layers(model)}
        deepspeed.initialize = stock_initialize  # which ours calls
        try:
            engine, *others = ds_vertical.initialize(*args, model=model, config=made, **kwargs)
        finally:
            deepspeed.initialize = initialize
        _leave_gradients_alone()
        return Judged(engine), *others

    Init.__init__, deepspeed.initialize = init, initialize


def translated(config: Any, vertical: bool) -> dict[str, Any]:
    """The configuration of a test, for this processor and for both arms."""
    made = json.loads(json.dumps(config))
    zero = made["zero_optimization"]
    if zero["stage"] != 3:
        pytest.skip(f"ZeRO stage {zero['stage']}, which is not ours")
    if made.pop("fp16", {}).get("enabled"):
        made["bf16"] = {"enabled": True}
    zero.setdefault("offload_optimizer", {"device": "cpu"})
    if vertical:
        made.setdefault("vertical_schedule", {"enabled": True, "keep_gradients": True})
    return made


def _layers(model: Any) -> list[str] | None:
    """The linears that run once in a forward: `SimpleModel` calls the first half of several more often, as glue."""
    if not hasattr(model, "linears"):
        return None
    count = len(model.linears)
    reused = (count - 1) // 2 + 1 if type(model).__name__.startswith("Simple") and count > 1 else 0
    return [f"linears.{number}" for number in range(reused, count)]


def _narrowed(value: Any) -> Any:
    return value.bfloat16() if torch.is_tensor(value) and value.dtype == torch.half else value


def _leave_gradients_alone() -> None:
    """In the tests of setting fragments between backward and step: set the weights only."""
    module = next((each for name, each in list(sys.modules.items()) if name.rpartition(".")[2] == _FRAGMENTS), None)
    if module is None or hasattr(module, "judged"):
        return
    for helpers in module.helper_funcs_mapping.values():
        create = helpers["create_random_values"]

        def others(model: Any, keys: list[str], *args: Any, create: Any = create, **kwargs: Any) -> Any:
            kept = [key for key in keys if key != module.GRADIENT_KEY]
            return create(model, kept or keys, *args, **kwargs)

        helpers["create_random_values"] = others
    module.judged = True


def _patch_ddp() -> None:
    """Torch's DDP takes no device numbers for a model on the CPU."""
    ddp = torch.nn.parallel.DistributedDataParallel
    stock = ddp.__init__

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        on_cpu = next(module.parameters()).device.type == "cpu"
        stock(self, module, *((None, None) if on_cpu else (device_ids, output_device)), **kwargs)

    ddp.__init__ = init
