"""Every model type of transformers, made small, layer-major against plain autograd, in one process without DeepSpeed.

The oracle has what decides stock's bits: ZeRO-3's own linear, and the identity nodes that its hooks put around every module.
`python tests/support/sweep.py OUT.jsonl [--shard 0/2] [TYPE ...]` writes a line per type; each is tried in a process of its
own. With DS_VERTICAL_ENDS=fetched in the environment what lies outside the layers is fetched where it is used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from small import VARIANTS, NotSmall, batch, loss_of, model_types, small_model, words_of
from torch import nn
from toy import MemoryOptimizer, MemoryParams

from ds_vertical.engine.handlers import Body, ScheduleRunner
from ds_vertical.engine.module_hooks import _identity_hook
from ds_vertical.errors import LayerError
from ds_vertical.model.layers import check_trainable, map_layers
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.model.state.restart import until_known
from ds_vertical.model.thread_state import ThreadState, applied
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.schedule.passes import TrainingStep, build_training

NUM_MICRO_BATCHES = 2
ROUNDING = 1e-4  # relative, in fp32: above it is no rounding
LIMIT_S = 40
LIMIT_BYTES = 5 << 30  # of address space
Grads = dict[str, torch.Tensor]


def run_plain(model: nn.Module, bodies: Sequence[Callable[[], torch.Tensor]]) -> tuple[list[torch.Tensor], Grads]:
    losses, sums = [], {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index, body in enumerate(bodies):
        with applied(ThreadState.capture().seeded(100 + index)):
            loss = body()
            (loss / len(bodies)).backward()
        losses.append(loss.detach())
        for name, param in model.named_parameters():
            if param.grad is not None:
                sums[name] += param.grad.float()
            param.grad = None
    return losses, sums


class _Trained(MemoryOptimizer):
    """Frozen parameters have no sum."""

    def reduce_unit(self, unit: Any, sums: Sequence[torch.Tensor], *_: Any) -> bool:
        trained = [param for param in self.params.units[unit] if param.requires_grad]
        self.grads |= {id(p): total.view(p.shape).clone() for p, total in zip(trained, sums, strict=True)}
        return False

    def _stepped(self, param: nn.Parameter) -> torch.Tensor:
        return self.params.home[id(param)]


def run_vertical(model: nn.Module, bodies: Sequence[Callable[[], torch.Tensor]]) -> tuple[list[torch.Tensor], Grads, str]:
    check_trainable(model, print)
    layers = map_layers(model, apart=os.environ.get("DS_VERTICAL_ENDS") == "fetched")
    params = MemoryParams(layers)
    optimizer = _Trained(params)
    numel, dtype = (lambda p: params.home[id(p)].numel()), (lambda p: p.dtype)
    runs = [Body(body, 100 + index) for index, body in enumerate(bodies)]
    state = ForwardState(model, layers, lambda: 0)

    def step() -> list[torch.Tensor]:
        layers.apart.difference_update(layers.missed)  # as all ranks do ahead of each run
        schedule = build_training(TrainingStep(layers.num_layers, len(bodies), outside=layers.outside))
        sums = GradientStore(layers.units, torch.float32, ParamFacts(numel, dtype), pairs=True)
        sweeps = ScheduleRunner(layers, params, overlap=True, state=state)
        return sweeps.train(schedule, runs, sums, optimizer, lambda loss: loss / len(runs))

    losses = until_known(step, state.forget)
    grads = {n: optimizer.grads.get(id(p), torch.zeros(p.shape)) for n, p in model.named_parameters()}
    return losses, grads, layers.describe()


@contextlib.contextmanager
def joined(model: nn.Module) -> Iterator[None]:
    hook = _identity_hook(False, False)
    linear, nn.functional.linear = nn.functional.linear, zero3_linear_wrap
    handles = [each for m in model.modules() for each in (m.register_forward_pre_hook(hook), m.register_forward_hook(hook))]
    try:
        yield
    finally:
        nn.functional.linear = linear
        for handle in handles:
            handle.remove()


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def compare(model_type: str) -> dict[str, Any]:
    """One row: `kind`, `result` (exact, rounding, differs, refused, fails, not made), `figure` or `words`."""
    row: dict[str, Any] = {"type": model_type}
    words = ""
    for variant in VARIANTS:
        try:
            made = _prepared(model_type, variant)
        except NotSmall as error:
            words = words or str(error)
            continue
        break
    else:
        return row | {"result": "not made", "words": words}
    row["kind"], row["how"], model, bodies, before, losses, grads = made
    row["class"] = type(model).__name__
    buffers = _buffers(model)
    _put_back(model, before)
    with joined(model):
        try:
            ours, ours_grads, row["layers"] = run_vertical(model, bodies)
        except LayerError as error:
            return row | {"result": "refused", "words": " ".join(str(error).split())}
        except Exception as error:
            return row | {"result": "fails", "words": words_of(error, 300)}
    return row | _verdict(losses, grads, buffers, ours, ours_grads, _buffers(model))


def _loss(model: nn.Module, micro_batch: dict[str, Any], index: int) -> torch.Tensor:
    random.seed(index)  # models mask their inputs at random with NumPy
    np.random.seed(index)
    return loss_of(model(**micro_batch))


def _prepared(model_type: str, variant: Mapping[str, int]) -> tuple[Any, ...]:
    """The model and its bodies, with what plain torch makes of them. Raises NotSmall."""
    kind, model = small_model(model_type, variant)
    before = _buffers(model)
    words, tries = "", [(0, False)]
    for image_tokens, video in tries:
        try:
            batches = [batch(model, index, image_tokens, video) for index in range(NUM_MICRO_BATCHES)]
            bodies = [partial(_loss, model, each, index) for index, each in enumerate(batches)]
            for runs in (bodies[:1], bodies):  # some models replace modules in their first forward (big_bird)
                _put_back(model, before)
                with joined(model):
                    losses, grads = run_plain(model, runs)
        except NotSmall:
            raise
        except Exception as error:
            words = words or f"plain torch: {words_of(error, 300)}"
            found = re.search(r"tokens: 0, features:? (\d+)", str(error))
            if found and len(tries) == 1:
                tries += [(int(found[1]) // 2, False), (int(found[1]) // 128, False)]
            elif "expected 5, got 4" in str(error) and len(tries) == 1:
                tries += [(0, True)]
            _put_back(model, before)
            continue
        if not all(map(torch.isfinite, losses)):
            raise NotSmall("plain torch: its loss is not finite")
        how = [VARIANTS.index(dict(variant)), image_tokens, video]
        return kind, how, model, bodies, before, losses, grads
    raise NotSmall(words)


def _put_back(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


def _verdict(
    losses: Sequence[torch.Tensor], grads: Grads, buffers: Grads, ours: Sequence[torch.Tensor], own: Grads, own_buffers: Grads
) -> dict[str, Any]:
    whole = max((g.double().norm().item() for g in grads.values()), default=0.0)
    if not whole:
        return {"result": "not made", "words": "no gradient"}
    worst, where = 0.0, ""
    for name, grad in grads.items():
        gap = (grad.double() - own[name].double()).norm().item()
        relative = gap / max(grad.double().norm().item(), 1e-6 * whole)
        if not relative <= worst:
            worst, where = relative, name
    for name, buffer in buffers.items():
        if name in own_buffers and buffer.shape == own_buffers[name].shape and not torch.equal(buffer, own_buffers[name]):
            gap = (buffer.double() - own_buffers[name].double()).norm() / (buffer.double().norm() + 1e-12)
            if not gap.item() <= worst:
                worst, where = gap.item(), f"buffer {name}"
    same_losses = all(torch.equal(a, b) for a, b in zip(losses, ours, strict=True))
    exact = same_losses and all(torch.equal(grad, own[name].view(grad.shape)) for name, grad in grads.items()) and worst == 0.0
    gaps = [(a - b).abs().item() / max(abs(a.item()), 1e-12) for a, b in zip(losses, ours, strict=True)]
    worst = max([worst, *gaps])
    result = "exact" if exact else "rounding" if worst <= ROUNDING else "differs"
    count = sum(not torch.equal(grad, own[name].view(grad.shape)) for name, grad in grads.items())
    return {"result": result} | ({} if exact else {"figure": worst, "where": where, "count": f"{count} of {len(grads)}"})


def in_a_child(model_type: str) -> dict[str, Any]:
    """`compare` in a forked process, ended after LIMIT_S."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writer, "w") as pipe:
            signal.alarm(LIMIT_S)
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            try:
                pipe.write(json.dumps(compare(model_type)))
            except BaseException as error:
                pipe.write(json.dumps({"type": model_type, "result": "fails", "words": words_of(error, 300)}))
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    ended = f"ended by signal {status & 127} (no more than {LIMIT_S} s and {LIMIT_BYTES >> 30} GiB)"
    return json.loads(text) if text else {"type": model_type, "result": "not made", "words": ended}


def table(rows: Sequence[dict[str, Any]], heading: str) -> str:
    """The rows as Markdown: what trains exactly by kind, then each row that does not, with its figure or its words."""
    by_result: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["type"]):
        by_result.setdefault(row["result"], []).append(row)
    lines = [heading, "", "| result | types |", "|---|---|"]
    lines += [f"| {_TITLES[result]} | {len(by_result.get(result, []))} |" for result in _TITLES]
    exact = by_result.get("exact", [])
    lines += ["", "## Exact", "", "| kind | types |", "|---|---|"]
    for kind in sorted({row["kind"] for row in exact}):
        lines.append(f"| {kind} | {', '.join(row['type'] for row in exact if row['kind'] == kind)} |")
    for result in list(_TITLES)[1:]:
        lines += ["", f"## {_TITLES[result].capitalize()}", "", "| type | class | what |", "|---|---|---|"]
        for row in by_result.get(result, []):
            figure = f"{row['figure']:.1e} in {row['where'] or 'the loss'}; {row['count']} tensors" if "figure" in row else ""
            words = (row.get("words") or figure).replace("|", "\\|")
            lines.append(f"| {row['type']} | {row.get('class', '')} | {words} |")
    return "\n".join(lines) + "\n"


_TITLES = {
    "exact": "exact",
    "rounding": "to rounding",
    "refused": "refused, with our message",
    "differs": "differs",
    "fails": "fails, with torch's words",
    "not made": "not made small here, or plain torch fails",
}
_HEADING = """# Which model types of transformers {version} train layer-major, and how exactly?

Find your type below: "exact" has the bits of plain autograd, "to rounding" differs by what is
named, "refused" ends with the message that is quoted.

{date}, commit {commit}. Each of the {count} types is made small by `tests/support/small.py` (a class with a
head where it has one, two micro-batches of two samples, fp32, dropout on). It runs layer-major
(`ds_vertical.engine.handlers`; all weights but those of the units in use overwritten by NaN) and as plain
autograd does it, with what decides stock's bits on both sides: ZeRO-3's own linear, and identity
nodes where its hooks put them. Losses, summed gradients and buffers are compared.
`python tests/support/sweep.py OUT.jsonl` and `python tests/support/sweep.py OUT.jsonl --table docs/families.md`
make this file; `tests/parity/test_kinds.py` holds types of each kind against real stock."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--table", type=Path, help="write OUT's rows as a table here; `types` are further files of rows")
    parser.add_argument("types", nargs="*")
    options = parser.parse_args(arguments)
    if options.table is not None:
        files = [options.out, *map(Path, options.types)]
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        facts = {"version": transformers.__version__, "date": date.today(), "commit": commit, "count": len(rows)}
        options.table.write_text(table(rows, _HEADING.format(**facts)))
        return
    index, count = map(int, options.shard.split("/"))
    torch.set_num_threads(1)
    _identity_hook(False, False)
    with options.out.open("a") as out:
        for model_type in options.types or model_types()[index::count]:
            start = time.monotonic()
            row = in_a_child(model_type) | {"seconds": round(time.monotonic() - start, 1)}
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
