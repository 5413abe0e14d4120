"""One rank of a run on two hosts, or on one, for test_two_hosts.py: a small model, parameters and state on SSD.

    deepspeed --hostfile hostfile tests/support/two_hosts_worker.py --nvme FOLDER --out FOLDER [--steps 2] [--loop]
        [--save FOLDER ...] [--on-signal FOLDER] [--node-local] [--load FOLDER ...] [--keep FOLDER] [--die RANK POINT]
        [--trace FOLDER] [--levels RANKS] [--stand-in EVENT] [--stand-at POINT]

Each rank writes OUT/rank<R>.json at the end: losses, a digest of weights and of its share of the state, and per step the bytes
that came in over the host's link, and those that the host's processes got from each other. `--loop`: steps without end;
OUT/step<R> holds the number of the last one. `--save`: saves to each folder at the end, and says what came of it, as does
`--on-signal` of an engine with that `on_signal.save_dir`.
`--node-local`: hosts that do not share the folder have one each. `--load`: loads each folder's last checkpoint, with the digest
behind each, and goes on from the last one. `--keep`: ahead of all that follows a step and a save to the folder, and
OUT/kept<R>.json has the digest behind it. `--die`: that rank is killed in the save at the end, at that point. `--levels`: so
many ranks are a node. `--stand-in`: in the second step the ranks of the second half write OUT/inside<R> and stand still in a
hop of that event, one of `hops.HOPS`. `--stand-at`: the same, in the save at the end, at that point.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import rank_worker
import torch
import torch.distributed as dist
import two_hosts
from failing_worker import state_without_padding
from hops import act_in
from rig import traffic  # two_hosts has put benchmarks/ on the path

from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import save, shared_dir

COUNTED = {"inbound": two_hosts.INTERFACE, "within": two_hosts.LOOPBACK}


def received_bytes() -> dict[str, int]:
    """Over this host's link, and over its loopback; 0 where there is none."""
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]  # behind the table's head
    counts = {name.strip(): rest.split()[0] for name, _, rest in lines}
    return {key: int(counts.get(interface, 0)) for key, interface in COUNTED.items()}


def train(engine: Any, rank: int, count: int) -> dict[str, Any]:
    found: dict[str, list[Any]] = {name: [] for name in ("losses", "inbound", "within", "formula", "formula_within")}
    steps, first = itertools.cycle(rank_worker.batches(rank, dist.get_world_size())), engine.global_steps
    for step in itertools.islice(steps, first, first + count):
        dist.barrier()
        before = received_bytes()
        found["losses"].append(engine.train_batch(iter(step)).item().hex())
        dist.barrier()
        after, scheduled = received_bytes(), traffic.scheduled_bytes(engine)
        for key in COUNTED:
            found[key].append(after[key] - before[key])
        found["formula"].append(traffic.inbound(scheduled, dist.get_world_size(), 2))
        found["formula_within"].append(traffic.within(scheduled, dist.get_world_size(), 2))
    return found


def loop(engine: Any, rank: int, out: Path) -> None:
    for number, step in enumerate(itertools.cycle(rank_worker.batches(rank, dist.get_world_size()))):
        engine.train_batch(iter(step))
        (out / f"step{rank}.new").write_text(str(number))
        (out / f"step{rank}.new").rename(out / f"step{rank}")


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def act_at(point: str, act: Callable[[], object]) -> None:
    """Let this rank act where its save reaches the point."""

    def reach(now: str) -> None:
        if now == point:
            act()

    save.reach = reach


def stand(out: Path, rank: int, where: object) -> None:
    """Note where this rank stands, and stand still."""
    (out / f"inside{rank}.new").write_text(json.dumps(where))
    (out / f"inside{rank}.new").rename(out / f"inside{rank}")
    time.sleep(1000)


def let_stand(options: argparse.Namespace, rank: int) -> None:
    """Let this rank stand still where the options say so, if they do."""
    if options.stand_in is not None:
        passed = 5 if options.keep is None else 1  # a step has some five hops of each event
        act_in(options.stand_in, options.levels, passed, partial(stand, options.out, rank))
    if options.stand_at is not None:
        act_at(options.stand_at, partial(stand, options.out, rank, options.stand_at))


def digest(engine: Any, model: torch.nn.Module, rank: int) -> str:
    """Of the weights, and of this rank's masters and moments. Collective."""
    return harness.digest(harness.read_weights(model) | state_without_padding(engine, model, rank))


def keep(engine: Any, model: torch.nn.Module, folder: Path, out: Path) -> None:
    """A step and a save, with the digest of what was saved."""
    rank = dist.get_rank()
    engine.train_batch(iter(rank_worker.batches(rank, dist.get_world_size())[0]))
    engine.save_checkpoint(str(folder))
    (out / f"kept{rank}.json").write_text(json.dumps(digest(engine, model, rank)))


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--save", type=Path, nargs="*", default=[])
    parser.add_argument("--on-signal", type=Path)
    parser.add_argument("--node-local", action="store_true")
    parser.add_argument("--load", type=Path, nargs="*", default=[])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--die", nargs=2)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--levels", type=int)
    parser.add_argument("--stand-in")
    parser.add_argument("--stand-at")
    parser.add_argument("--local_rank", type=int)
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    config = rank_worker.config(options.nvme, "fp32")
    if options.levels is not None:
        config["zero_optimization"]["zero_hpz_partition_size"] = options.levels
    if options.node_local:
        config["checkpoint"] = {"use_node_local_storage": True}
    if options.trace is not None:
        config["vertical_schedule"]["trace"] = str(options.trace)
    return config


def main() -> int:
    options = options_given()
    torch.set_num_threads(1)
    shared_dir.BETWEEN_LOOKS_S = 0.05  # no wait shows a host what another one keeps to itself
    harness.start_process_group()
    rank = int(os.environ["RANK"])
    config, start = config_of(options), None
    if options.on_signal is not None:
        asking = copy.deepcopy(config)
        asking["vertical_schedule"]["on_signal"] = {"save_dir": str(options.on_signal)}
        start = told(lambda: harness.build_engine(asking, rank_worker.OddModel, vertical=True))
    engine, model = harness.build_engine(config, rank_worker.OddModel, vertical=True)
    loaded, at_load = [], []
    for folder in options.load:
        loaded.append(engine.load_checkpoint(str(folder))[0])
        at_load.append(digest(engine, model, rank))
    if options.keep is not None:
        keep(engine, model, options.keep, options.out)
    if rank >= dist.get_world_size() // 2:
        let_stand(options, rank)
    if options.die is not None and rank == int(options.die[0]):
        act_at(options.die[1], partial(os.kill, os.getpid(), signal.SIGKILL))
    if options.loop:
        loop(engine, rank, options.out)
    found = train(engine, rank, options.steps)
    found |= {"start": start, "loaded": loaded, "at_load": at_load, "neighbours": ranks.ranks_on_this_host()}
    calls = [partial(engine.save_checkpoint, str(folder)) for folder in options.save]
    found["saves"] = [told(call) if options.die is None and options.stand_at is None else call() for call in calls]
    found["digest"] = digest(engine, model, rank)
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
