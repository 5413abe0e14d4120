"""Hooks on a block that compute with the block's parameters: the bits of stock, in training and in evaluation.

Such a hook needs the parameters again in the backward, when the code around the block no longer finds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, differing, read_weights, running, small_buffers
from stateful import WIDTH, Base, Block, batches
from torch import nn

from ds_vertical.compat import accelerator


class ScaledBlock(Block):
    """`scale` is for hooks only; it is too large to stay in memory as stock's small parameters do."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))
        self.calls = 0


class Scaled(Base):
    """A forward hook on one block in two, which multiplies by a parameter and adds a bias of a layer in the block."""

    block = ScaledBlock

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.put_on()

    def put_on(self) -> None:
        for block in self.blocks[::2]:
            block.register_forward_hook(self.after)

    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * block.scale + block.down.bias


class InAllBlocks(Scaled):
    """Hooks ahead of each block and behind it, by position and by name, one of which needs its weights as a matrix."""

    def put_on(self) -> None:
        for block in self.blocks:
            block.register_forward_pre_hook(self.ahead, with_kwargs=True)
            block.register_forward_hook(self.after)

    def ahead(self, block: ScaledBlock, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> Any:
        return (torch.tanh(args[0] @ block.up.weight), *args[1:]), kwargs


class InTheLast(Scaled):
    def put_on(self) -> None:
        self.blocks[-1].register_forward_hook(self.after)


class Reading(Scaled):
    """A hook that changes nothing but keeps what it computes: the loss needs it."""

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.kept.clear()
        return ()

    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> None:
        self.kept.append((output * block.scale).square().mean())

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * sum(self.kept, x.new_zeros(()))


class Counting(Scaled):
    """A hook that counts its calls, and draws random numbers: running again in the backward shows in neither."""

    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> torch.Tensor:
        block.calls += 1
        noise = torch.rand_like(output) if block.training else 1.0
        return output * block.scale * noise * (1 + 0.1 * block.calls)

    def left(self) -> list[int]:
        return [block.calls for block in self.blocks]


class Frozen(Scaled):
    """The parameter gets no gradient, and the product needs it all the same."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale.requires_grad_(False)


class InTheFirst(Scaled):
    """A hook ahead of the first block only, which autograd reaches last."""

    def put_on(self) -> None:
        self.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] * block.scale, *args[1:]))


class ByLayer(Scaled):
    """A hook that calls layers of the block: in DeepSpeed's function for them autograd follows no single operation."""

    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.tanh(block.down(torch.relu(block.up(output)))) + output


class ByFrozenLayer(ByLayer):
    """The layers get no gradient, so that the graph does not lead to them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
            block.down.requires_grad_(False)


class Product(torch.autograd.Function):
    """A user's own function, in the form that has a `setup_context`."""

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * x).sum((0, 1))


class ByFunction(Scaled):
    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> torch.Tensor:
        return Product.apply(output, block.scale)  # type: ignore[return-value]


@torch.jit.script
def product(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


class Scripted(Scaled):
    """Hooks in TorchScript, ahead of one block and behind another."""

    def put_on(self) -> None:
        self.blocks[1].register_forward_pre_hook(lambda block, args: (product(args[0], block.scale), *args[1:]))
        self.blocks[2].register_forward_hook(lambda block, args, output: product(output, block.scale))


class FrozenScripted(Scaled):
    """In TorchScript with frozen parameters: no node of the graph leads to them, but some keep them for the backward."""

    def put_on(self) -> None:
        for block in self.blocks[:-1]:
            block.register_forward_hook(lambda block, args, output: product(output, block.scale))
            block.scale.requires_grad_(False)


class WithKeywords(Scaled):
    """Hooks behind the blocks in the middle that get keyword arguments, and beside them hooks of the backward."""

    def put_on(self) -> None:
        for block in self.blocks[1:-1]:
            block.register_forward_hook(self.by_name, with_kwargs=True, always_call=True)
            block.register_full_backward_hook(lambda block, grads, _: (grads[0] * 1.5,))

    def by_name(self, block: ScaledBlock, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * block.scale


class Late(Counting):
    """The hook begins to compute with the parameter in the third step, or amid an earlier one."""

    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> torch.Tensor:
        block.calls += 1
        return output * block.scale if block.calls > 5 else output


class Twice(Scaled):
    """A hook that calls the block's forward once more."""

    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + block.forward(0.5 * args[0])


class Logging(Scaled):
    """A hook that looks at a parameter without a gradient."""

    def after(self, block: ScaledBlock, args: Any, output: torch.Tensor) -> None:
        with torch.no_grad():
            self.kept[:] = [block.scale.norm()]


CASES = [Scaled, InAllBlocks, InTheLast, Reading, Counting, Frozen]
CASES += [InTheFirst, ByLayer, ByFrozenLayer, ByFunction, Scripted, FrozenScripted, WithKeywords, Late, Twice, Logging]


def outcome(case: type[Base], folder: Path, num: int, dtype: str, vertical: bool, **section: Any) -> dict[str, Any]:
    config = small_buffers(base_config(folder, num_micro_batches=num, dtype=dtype, clip=0.5, section=section))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluations": []}
    with running(config, case, vertical=vertical) as (engine, model):
        kind = next(model.parameters()).dtype
        for step in batches(3):
            step = [{"x": each["x"].to(kind)} for each in (step * 2)[:num]]
            found["losses"].append(engine.train_batch(iter(step)).item())
            found["norms"].append(float(engine.get_global_grad_norm()))
            found["evaluations"].append(engine.eval_batch(iter(step)).item())
        found["left"] = model.left() if hasattr(model, "left") else []
        found["weights"] = read_weights(model)
    return found


def assert_stocks_bits(tmp_path: Path, case: type[Base], num: int = 3, dtype: str = "fp32", **section: Any) -> None:
    stock, ours = (outcome(case, tmp_path / str(v), num, dtype, v, **(section if v else {})) for v in (False, True))
    for key in ("losses", "norms", "evaluations", "left"):
        assert stock[key] == ours[key], key
    assert not differing(stock["weights"], ours["weights"])


def test_it_has_stocks_bits_after_the_self_check(tmp_path: Path) -> None:
    assert_stocks_bits(tmp_path, InAllBlocks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_it_has_stocks_bits(tmp_path: Path, case: type[Base], num: int, dtype: str) -> None:
    assert_stocks_bits(tmp_path, case, num, dtype, self_check=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_has_stocks_bits_in_stocks_order(tmp_path: Path, case: type[Base]) -> None:
    assert_stocks_bits(tmp_path, case, order="horizontal")


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (InTheLast, ["blocks.3"]),
        pytest.param(ByFrozenLayer, ["blocks.2"], marks=pytest.mark.slow),
        pytest.param(ByFunction, ["blocks.2"], marks=pytest.mark.slow),
        pytest.param(Scripted, ["blocks.2"], marks=pytest.mark.slow),
        (FrozenScripted, ["blocks.2"]),
        pytest.param(Logging, [], marks=pytest.mark.slow),
    ],
)
def test_the_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: type[Base], named: list[str]) -> None:
    lines: list[str] = []
    monkeypatch.setattr(accelerator, "log", lines.append)
    outcome(case, tmp_path, 2, "fp32", True, self_check=False)
    assert [line for line in lines if "starts over" in line and "hooks on" in line] == [
        f"ds_vertical: this step starts over, now that it is known that hooks on {each} compute with its parameters"
        for each in named
    ]
