"""Every model type of transformers, made small, layer-major against plain autograd, in one process without DeepSpeed.

The oracle has what decides stock's bits: ZeRO-3's own linear, and the identity nodes that its hooks put around every module.
`python tests/support/sweep.py OUT.jsonl [--shard 0/2] [TYPE ...]` writes a line per type; each is tried in a process of its
own. With DS_VERTICAL_ENDS=fetched in the environment what lies outside the layers is fetched where it is used.
`... OUT.jsonl --table FILE [--fetched FETCHED.jsonl]` makes the table of these rows.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import transformers
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from small import VARIANTS, NotAModel, NotSmall, model_types, small_model, words_of
from small_inputs import MOST_ATTEMPTS, Attempt, batch, demanded, further, loss_of
from torch import nn
from toy import MemoryOptimizer, MemoryParams

from ds_vertical.engine.handlers import ScheduleRunner
from ds_vertical.engine.module_hooks import _identity_hook
from ds_vertical.errors import LayerError
from ds_vertical.model.layers import check_trainable, map_layers
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.forward_state import ForwardState
from ds_vertical.model.state.restart import until_known
from ds_vertical.model.thread_state import ThreadState, applied
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.schedule.passes import TrainingStep, build_training

NUM_MICRO_BATCHES = 2
ROUNDING = 1e-5  # relative, in fp32: the tolerance of the numerics contract
LIMIT_S = 40  # of a core
LIMIT_BYTES = 12 << 30  # of address space
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

    def reduce_unit(self, unit: Any, sums: Iterator[torch.Tensor], *_: Any) -> bool:
        trained = [param for param in self.params.units[unit] if param.requires_grad]
        self.grads |= {id(p): total.view(p.shape).clone() for p, total in zip(trained, sums, strict=True)}
        return False

    def _stepped(self, param: nn.Parameter) -> torch.Tensor:
        return self.params.home[id(param)]


def run_vertical(
    model: nn.Module, bodies: Sequence[Callable[[], torch.Tensor]], named: Sequence[str] | None = None
) -> tuple[list[torch.Tensor], Grads, str]:
    check_trainable(model, print)
    layers = map_layers(model, named, apart=os.environ.get("DS_VERTICAL_ENDS") == "fetched")
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
    """One row: `kind`, `result` (exact, rounding, differs, refused, fails, no model, not made), `figure` or `words`."""
    words, refused = "", None
    for variant in VARIANTS:
        try:
            row = _compared(model_type, variant)
        except NotAModel as error:
            return {"type": model_type, "result": "no model", "words": str(error)}
        except NotSmall as error:
            words = words or str(error)
            continue
        if row["result"] != "refused":
            return row
        refused = refused or row
    missing = re.search(r"ImportError.*requires the (\w+) library", words)
    lacking = {"result": "no package", "words": missing[1]} if missing else {"result": "not made", "words": words}
    return refused or {"type": model_type} | lacking


def _compared(model_type: str, variant: Mapping[str, int]) -> dict[str, Any]:
    """The row of the first attempt that plain torch takes and that is not refused; then those refused, with the layers named as
    the message asks; else the first of them. Raises NotSmall."""
    words, attempts = [""], [Attempt()]
    refused: list[tuple[Attempt, dict[str, Any]]] = []
    model = small_model(model_type, variant)[1]
    inputs: list[dict[str, Any]] = []
    for attempt in attempts:
        given = {name: getattr(value, "shape", value) for name, value in batch(model, 0, attempt).items()}
        if given in inputs:
            continue
        inputs.append(given)
        try:
            row = _tried(model_type, variant, attempt)
            trouble = row.get("words", "") if row["result"] == "refused" else ""
        except NotAModel:
            raise
        except NotSmall as error:
            trouble = str(error)
        else:
            if not trouble:
                return row
            refused.append((attempt, row))
        if trouble not in words:  # else the attempt has changed nothing
            new = [each for each in further(attempt, trouble) if each not in attempts]
            attempts += new[: MOST_ATTEMPTS - len(attempts)]
        words.append(trouble)
    for attempt, row in refused:
        named = _tried(model_type, variant, attempt, names_layers=True)
        if named["result"] != "refused":
            return named
        row["words"] += "" if named["words"] in row["words"] else f". With the layers named: {named['words']}"
    if refused:
        return refused[0][1]
    raise NotSmall(words[1])


def _tried(model_type: str, variant: Mapping[str, int], attempt: Attempt, names_layers: bool = False) -> dict[str, Any]:
    """What the layer-major step gives, beside plain autograd. Raises NotSmall where plain torch refuses the attempt."""
    kind, model = small_model(model_type, variant)
    row: dict[str, Any] = {"type": model_type, "kind": kind, "class": type(model).__name__}
    row["how"] = [VARIANTS.index(dict(variant)), asdict(attempt)]
    bodies, before, losses, grads = _prepared(model, attempt)
    buffers = _buffers(model)
    named = _called_once(model, bodies) if names_layers else None
    _put_back(model, before)
    if named == []:
        return row | {"result": "refused", "words": "there are none to name, since no block runs exactly once."}
    with joined(model):
        try:
            _tell(_OURS)
            ours, ours_grads, row["layers"] = run_vertical(model, bodies, named)
            _tell(_PLAIN)
        except LayerError as error:
            return row | {"result": "refused", "words": " ".join(str(error).split())}
        except Exception as error:  # a lack of memory, too: plain torch has had enough
            return row | {"result": "fails", "words": words_of(error, 300)}
    row |= {} if named is None else {"named": named}
    return row | _verdict(losses, grads, buffers, ours, ours_grads, _buffers(model))


def _called_once(model: nn.Module, bodies: Sequence[Callable[[], torch.Tensor]]) -> list[str]:
    """The layers that a user would name: blocks that every micro-batch calls once, in the order of its calls."""
    try:
        blocks = {block.path: block.module for block in map_layers(model).blocks}
    except LayerError:  # no stack: the members of every outermost list
        lists = [path for path, each in model.named_modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
        outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
        members = [(f"{path}.{name}", each) for path in outer for name, each in model.get_submodule(path).named_children()]
        blocks = {path: each for path, each in members if any(True for _ in each.parameters())}
    calls: list[list[str]] = []
    handles = [each.register_forward_pre_hook(lambda *_, path=path: calls[-1].append(path)) for path, each in blocks.items()]
    for body in bodies:
        calls.append([])
        with torch.no_grad(), contextlib.suppress(NotSmall):  # without gradients no loss need be found
            body()
    for handle in handles:
        handle.remove()
    return [path for path in calls[0] if all(each.count(path) == 1 for each in calls)]


def _loss(model: nn.Module, micro_batch: dict[str, Any], index: int) -> torch.Tensor:
    random.seed(index)  # models mask their inputs at random with NumPy
    np.random.seed(index)
    return loss_of(model(**micro_batch))


def _prepared(model: nn.Module, attempt: Attempt) -> tuple[Any, ...]:
    """The model's bodies, with what plain torch makes of them. Raises NotSmall."""
    before = _buffers(model)
    try:
        batches = [batch(model, index, attempt) for index in range(NUM_MICRO_BATCHES)]
        bodies = [partial(_loss, model, each, index) for index, each in enumerate(batches)]
        for runs in (bodies[:1], bodies):  # some models replace modules in their first forward (big_bird)
            _put_back(model, before)
            with joined(model):
                losses, grads = run_plain(model, runs)
    except NotSmall:
        raise
    except Exception as error:
        _put_back(model, before)
        raise NotSmall(f"plain torch: {words_of(error, 300)}{demanded(error)}") from error
    if not all(map(torch.isfinite, losses)):
        raise NotSmall("plain torch: its loss is not finite")
    return bodies, before, losses, grads


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


_OURS, _PLAIN = "ours", "plain"  # what the child runs
_told: list[TextIO] = []  # the child's pipe


def _tell(phase: str) -> None:
    for pipe in _told:
        print(phase, file=pipe, flush=True)


def in_a_child(model_type: str, compared: Callable[[str], dict[str, Any]] = compare) -> dict[str, Any]:
    """`compare` in a forked process, ended after LIMIT_S. Where it is ended in our own pass, which plain torch has done within
    the limits, the result is "fails"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writer, "w") as pipe:
            _told.append(pipe)
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # not by the clock: others use the machine, too
            signal.alarm(20 * LIMIT_S)  # where it only waits
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            try:
                found = compared(model_type)
            except BaseException as error:
                found = {"type": model_type, "result": "fails", "words": words_of(error, 300)}
            print(json.dumps(found), file=pipe)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        last = (pipe.read().splitlines() or [""])[-1]
    status = os.waitpid(child, 0)[1]
    if last.startswith("{"):
        return json.loads(last)
    ended = f"ended by signal {status & 127} (no more than {LIMIT_S} s of a core and {LIMIT_BYTES >> 30} GiB)"
    return {"type": model_type, "result": "fails" if last == _OURS else "not made", "words": ended}


def table(rows: Sequence[dict[str, Any]], heading: str) -> str:
    """The rows as Markdown: what trains exactly by kind, then each row that does not, with its figure or its words."""
    by_result: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["type"]):
        by_result.setdefault(result_of(row), []).append(row)
    lines = [heading, "", "| result | types |", "|---|---|"]
    lines += [f"| {_TITLES[result]} | {len(by_result.get(result, []))} |" for result in _TITLES]
    exact = by_result.get("exact", [])
    lines += ["", "## Exact", "", "| kind | types |", "|---|---|"]
    for kind in sorted({row["kind"] for row in exact}):
        lines.append(f"| {kind} | {', '.join(row['type'] for row in exact if row['kind'] == kind)} |")
    for result in list(_TITLES)[1:]:
        found = by_result.get(result, [])
        lines += ["", f"## {_TITLES[result].capitalize()}", ""]
        if result in ("no model", "no package"):
            lines += [", ".join(row["type"] + (f" ({row['words']})" if result == "no package" else "") for row in found)]
            continue
        lines += ["| type | class | what |", "|---|---|---|"]
        lines += [f"| {row['type']} | {row.get('class', '')} | {_what(row)} |" for row in found]
    return "\n".join(lines) + "\n"


def _what(row: dict[str, Any]) -> str:
    figure = f"{row['figure']:.1e} in {row['where'] or 'the loss'}; {row['count']} tensors" if "figure" in row else ""
    if "named" not in row:
        return (row.get("words") or figure).replace("|", "\\|")
    holders = [name for name, _ in groupby(re.sub(r"\.\d+$", "", path) for path in row["named"])]
    named = holders if len({*holders}) == len(holders) else row["named"]  # by turns: each block
    return f"`layers`: {', '.join(named)}" + (f"; {figure}" if figure else "")


def results_of(text: str) -> dict[str, str]:
    """Result by type, as a table of `table` has them."""
    titles = {title.capitalize(): result for result, title in _TITLES.items()}
    found: dict[str, str] = {}
    result = ""
    for line in text.splitlines():
        if line.startswith("## "):
            result = titles[line[3:]]
        elif result in ("no model", "no package"):
            found |= {word.split(" (")[0]: result for word in line.split(", ") if word}
        elif result and line.startswith("| ") and not line.startswith(("| type ", "| kind ")):
            cells = line.split(" | ")
            found |= dict.fromkeys(cells[1].removesuffix(" |").split(", ") if result == "exact" else [cells[0][2:]], result)
    return found


def worse(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The types whose result is worse than before, with both: one that trained no longer does, or has lost its bits."""
    ranks = {"exact": 0, "named": 1, "rounding": 2, "refused": 3}
    lost = {name: (then, now[name]) for name, then in before.items() if name in now and then in ranks}
    return {name: f"{then}, now {found}" for name, (then, found) in lost.items() if ranks.get(found, 4) > ranks[then]}


def result_of(row: Mapping[str, Any]) -> str:
    """As the table groups it."""
    return "named" if row["result"] in ("exact", "rounding") and "named" in row else row["result"]


def _fetched(rows: Sequence[dict[str, Any]], fetched: Sequence[dict[str, Any]]) -> str:
    """What the table says of the rows that were made with the ends fetched; nothing where there are none."""
    here = {row["type"]: result_of(row) for row in rows}
    others = [f"{row['type']} ({result_of(row)})" for row in fetched if here.get(row["type"]) != result_of(row)]
    if not fetched:
        return ""
    all_same = not others and len(fetched) == len(rows)
    same = f"each of the {len(rows)}\ntypes" if all_same else f"{len(fetched) - len(others)} of the {len(rows)}\ntypes"
    at = ", ".join(sorted({row["commit"] for row in fetched}))
    said = f"had the same result as in this table (at {at})" + (f"; not {', '.join(others)}" if others else "")
    return f'With `"outside_layers": "fetched"` (see [memory.md](memory.md#embedding-and-head)) {same} {said}.\n\n'


_TITLES = {
    "exact": "exact",
    "named": "once `layers` names the layers: exact, or as said",
    "rounding": "to rounding",
    "refused": "refused, with our message",
    "differs": "differs",
    "fails": "fails, with torch's words",
    "no model": "no model of its own: a part of other types",
    "no package": "needs a package that is not installed",
    "not made": "not made small here, or plain torch fails",
}
_HEADING = """# Which model types of transformers {version} train layer-major, and how exactly?

Find your type below.

- "Exact": losses, gradients and buffers have the bits of plain autograd.
- "To rounding": they differ by what the table names, at most 1e-5 of a tensor's norm.
- "Differs": some tensor's gradient differs by more than that. There is no such type.
- "Refused": the run ends with the message that the table quotes.
- "Once `layers` names the layers": the run is refused until the JSON's `layers` names the lists of
  blocks. The refusal says what to write, and the table has the lists that were named.

The table was made on {date}.
The types were tried at commits {commits}.

Each of the {count} types is made small by `tests/support/small.py`, with a head where it has one, in
fp32 and with dropout. It gets two micro-batches of two samples, with the images and sounds that it
takes (`tests/support/small_inputs.py`). It runs once layer-major (`ds_vertical.engine.handlers`),
while all weights but those of the units in use are overwritten by NaN. It runs once more as plain
autograd does it. Both runs have what decides stock's bits: ZeRO-3's own linear, and identity nodes
where stock's hooks put them. Losses, summed gradients and buffers are compared.

{fetched}Why are some types only to rounding? In t5, dab-detr and mask2former one micro-batch gives all bits
of plain autograd, and two do not. What differs are parameters outside the layers that the code
uses at several layers (an embedding, a norm, a small head). Plain autograd adds up the parts of one
micro-batch first. Layer-major order adds the parts as the layers come, those of all micro-batches
at one layer before those at the next. Holding each micro-batch's parts back would take memory for
each of them.

Three commands make this file; `tests/parity/test_kinds.py` holds types of each kind against real
stock:

```bash
python tests/support/sweep.py OUT.jsonl
python tests/support/sweep.py FETCHED.jsonl  # with DS_VERTICAL_ENDS=fetched in the environment
python tests/support/sweep.py OUT.jsonl --table docs/families.md --fetched FETCHED.jsonl
```"""


def _rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--table", type=Path, help="write OUT's rows as a table here; `types` are further files of rows")
    parser.add_argument("--fetched", type=Path, help="rows made with DS_VERTICAL_ENDS=fetched, for a sentence in the table")
    parser.add_argument("types", nargs="*")
    options = parser.parse_args(arguments)
    if options.table is not None:
        files = [options.out, *map(Path, options.types)]
        rows = _rows(files)
        commits = Counter(row["commit"] for row in rows)
        tried = ", ".join(f"{commit} ({count} type{'s' * (count > 1)})" for commit, count in commits.most_common())
        facts = {"version": transformers.__version__, "date": date.today(), "commits": tried, "count": len(rows)}
        facts["fetched"] = _fetched(rows, [] if options.fetched is None else _rows([options.fetched]))
        options.table.write_text(table(rows, _HEADING.format(**facts)))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    index, count = map(int, options.shard.split("/"))
    torch.set_num_threads(1)
    _identity_hook(False, False)
    with options.out.open("a") as out:
        for model_type in options.types or model_types()[index::count]:
            start = time.monotonic()
            row = in_a_child(model_type) | {"seconds": round(time.monotonic() - start, 1), "commit": commit}
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
