"""Compare arms of one training on two hosts with a slow link: seconds, losses, the bytes that cross the link, and those that
the ranks of a host send to each other.

    python benchmarks/twonode.py --model gpt_13m --rate 500mbit --arms flat,stock --micro-batches 4 --steps 6
        [--ranks-per-node 2] [--slow nodeB:25] [--tokens 8] [--json FILE]
    python benchmarks/twonode.py --slow B:25 --arms even,uneven

The two hosts are this machine's (`rig/hosts.py`: network namespaces, a shaped link, DeepSpeed's own launcher with a hostfile).
All arms are launched first. Then each takes a step in turn while the others wait. Which arm begins changes from turn to turn,
and the first step of each arm does not count. Ranks that wait take next to nothing of the cores: they say once a second that
they are alive. The bytes of a step are what a host's interfaces have counted between the first rank's start and the last rank's
end: `inbound_bytes_per_step` is what has come in over the link, `within_bytes_per_step` what the host's processes have sent to
each other. Each is that of the host with more. The little that the ranks of waiting arms send each other meanwhile is among
them, and what ranks of the first host say to the store of their process group, which is there. `inbound_over_formula` and
`within_over_formula` divide by what `rig/traffic.py` computes from the step's collectives; where a host has one rank the
latter is null.

The links and the model's pieces are measured ahead of the arms' steps and behind them, for `twonode_plan.py`: a machine whose
processors other machines share is not as fast at each moment.

`--slow nodeB:25`, or `--slow B:25`, gives nodeB a quarter of its half of the cores; the other host then has its half and no
more. With the arms of uneven and acco 16 micro-batches of 128 tokens are the default. With those of uneven the first 3 steps of
each arm do not count: so long the ranks settle how many each of them takes. The benchmark needs root. Nothing else may
run on the machine. All arms are in memory at a time: name two at a time of those whose state rests there. However the benchmark
ends, by a kill, too, the hosts end with it, and their files are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any, Final

import portable
from rig import launch, steps, traffic
from rig.hosts import NAMES, RigError, TwoHosts, refusal

ROOT: Final = Path(__file__).resolve().parent.parent
READY_S: Final = 600.0  # for a launch to build its models
STEP_S: Final = 900.0  # for a step
LOG_LINES: Final = 30
POLL_S: Final = 0.05  # while ranks take a step: they measure its seconds themselves, and need the cores
LINKS_MB: Final = 16  # of what `limits --links` sends: as much as a unit of gpt_101m
SETTLING: Final = 3  # steps in which ranks settle how many micro-batches each takes
Config = dict[str, Any]


class ArmError(RuntimeError):
    """An arm's launch has ended, or has not taken its step in time; the message has the end of its log."""


# ---- the arms


def _stock_on_cpu(stock: Config) -> Config:
    """The stock arm with its parameters in host memory instead of on SSD."""
    found = copy.deepcopy(stock)
    param = found["zero_optimization"]["offload_param"]
    found["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": param.get("pin_memory", False)}
    return found


def _at_once(vertical: Config) -> Config:
    """The vertical arm, which waits at once for each collective, and for each transfer and step, too."""
    return {**vertical, "vertical_schedule": {**vertical["vertical_schedule"], "overlap": False}}


def _elastic(vertical: Config, **keys: int) -> Config:
    """The vertical arm, whose faster ranks take more micro-batches. `keys`: of the section's `elastic`."""
    return {**vertical, "vertical_schedule": {**vertical["vertical_schedule"], "elastic": keys}}


def _in_memory(config: Config) -> Config:
    """An arm with parameters and optimizer state in host memory."""
    zero = {key: dict(value) if isinstance(value, dict) else value for key, value in config["zero_optimization"].items()}
    zero |= {name: {"device": "cpu", "pin_memory": False} for name in ("offload_param", "offload_optimizer")}
    return {**config, "zero_optimization": zero}


def _exact(vertical: Config) -> Config:
    """The vertical arm with all in host memory, and with what backwards read kept, which halves do not choose by themselves."""
    made = _in_memory(vertical)
    return {**made, "vertical_schedule": {**made["vertical_schedule"], "activations": {"keep": "everything"}}}


def _in_halves(vertical: Config, copies: str) -> Config:
    """The exact arm with two halves a step. `copies`: of the weights, each rank's or each node's."""
    made = _exact(vertical)
    return {**made, "vertical_schedule": {**made["vertical_schedule"], "acco": {"copies": copies}}}


def _zero_1(stock: Config) -> Config:
    """The stock arm as ZeRO-1: whole weights on each rank, a share of the optimizer in host memory."""
    return {**stock, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}


def _over_levels(config: Config, ranks_per_node: int, **zero: bool) -> Config:
    """An arm with a copy of the weights on each host. `zero`: further keys of `zero_optimization`."""
    return {**config, "zero_optimization": {**config["zero_optimization"], "zero_hpz_partition_size": ranks_per_node, **zero}}


_INT8: Final = {"zero_quantized_weights": True}
_INT8_INT4: Final = {**_INT8, "zero_quantized_gradients": True}
# By the arm's name: what makes its JSON, given the JSON of the vertical and of the stock arm, and the ranks of a host
ARMS: Final[dict[str, Callable[[Config, Config, int], Config]]] = {
    "flat": lambda vertical, stock, ranks: vertical,
    "even": lambda vertical, stock, ranks: vertical,  # beside "uneven"
    "uneven": lambda vertical, stock, ranks: _elastic(vertical),
    "flat_sync": lambda vertical, stock, ranks: _at_once(vertical),
    "levels": lambda vertical, stock, ranks: _over_levels(vertical, ranks),
    "int8": lambda vertical, stock, ranks: _over_levels(vertical, ranks, **_INT8),
    "int8_int4": lambda vertical, stock, ranks: _over_levels(vertical, ranks, **_INT8_INT4),
    "exact": lambda vertical, stock, ranks: _exact(vertical),  # beside "acco"
    "exact_levels": lambda vertical, stock, ranks: _over_levels(_exact(vertical), ranks),  # beside "acco_node"
    "acco": lambda vertical, stock, ranks: _in_halves(vertical, "rank"),
    "acco_node": lambda vertical, stock, ranks: _over_levels(_in_halves(vertical, "node"), ranks),
    "exact_uneven": lambda vertical, stock, ranks: _elastic(_exact(vertical)),  # beside "acco_uneven" and "acco_node_uneven"
    "acco_uneven": lambda vertical, stock, ranks: _elastic(_in_halves(vertical, "rank"), min_micro_batches=2),
    "acco_node_uneven": lambda vertical, stock, ranks: _over_levels(
        _elastic(_in_halves(vertical, "node"), min_micro_batches=2), ranks
    ),
    "stock_zero1": lambda vertical, stock, ranks: _zero_1(stock),
    "stock": lambda vertical, stock, ranks: _stock_on_cpu(stock),
    "stock_hpz": lambda vertical, stock, ranks: _over_levels(_stock_on_cpu(stock), ranks),
    "stock_nvme": lambda vertical, stock, ranks: stock,
}


def build_configs(options: argparse.Namespace) -> dict[str, Config]:
    """{arm: its JSON}. Raises ConfigError."""
    from ds_vertical.cli.bench.arms import build_arms

    settings = [f"gradient_accumulation_steps={options.micro_batches}", f"gradient_clipping={options.clip}"]
    settings += [f"bf16.enabled={json.dumps(options.dtype == 'bf16')}"]  # whatever the file says
    source = options.config or ROOT / "configs" / f"{options.model}_cpu.json"
    made = build_arms(source, None, settings, num_ranks=len(NAMES) * options.ranks_per_node)
    return {name: ARMS[name](dict(made.vertical), dict(made.stock), options.ranks_per_node) for name in options.arms}


class Arm:
    """One launch over both hosts that takes a step when it is told to. `port`: the port of its first rank."""

    def __init__(self, name: str, hosts: TwoHosts, config: Config, port: int, options: argparse.Namespace) -> None:
        self.name = name
        self._hosts = hosts
        self._turns = hosts.shared / name
        self._turns.mkdir()
        self._num_ranks = len(NAMES) * options.ranks_per_node
        self._number = 0
        path = self._turns / "config.json"
        path.write_text(json.dumps(_placed(config, str(hosts.ssd))))
        self._log = self._turns / "log"
        words = ["--deepspeed_config", str(path), "--model", options.model, "--tokens", str(options.tokens)]
        words += ["--turns", str(self._turns)]
        pipes = [steps.turns_path(self._turns, rank) for rank in range(self._num_ranks)]
        for pipe in pipes:
            os.mkfifo(pipe)
        # for reading, too: so this does not wait for the rank, and a line stays until the rank reads it
        self._pipes = [os.open(pipe, os.O_RDWR) for pipe in pipes]
        self._process = launch.start(hosts, Path(steps.__file__), words, self._log, port)

    def wait_ready(self) -> None:
        """Return when all ranks have built their models. Raises ArmError."""
        self._wait(READY_S)

    def turn(self) -> dict[str, Any]:
        """Let all ranks take a step. Returns what the ranks and the interfaces say of it. Raises ArmError."""
        self._number += 1
        inbound, within = self._hosts.inbound_bytes(), self._hosts.within_bytes()
        busy, start = _busy_seconds(), time.perf_counter()
        self._tell(steps.TURN)
        ranks = self._wait(STEP_S)
        seconds, busy = time.perf_counter() - start, _busy_seconds() - busy
        found = {
            "step_s": max(rank["step_s"] for rank in ranks),
            "inbound_bytes": {name: count - inbound[name] for name, count in self._hosts.inbound_bytes().items()},
            "within_bytes": {name: count - within[name] for name, count in self._hosts.within_bytes().items()},
            "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
            "busy_cores": busy / seconds,
            "core_s": sum(rank["core_s"] for rank in ranks),
            "micro_batches": [rank.get("micro_batches") for rank in ranks],
        }
        found["formula_bytes"] = traffic.inbound(ranks[0]["scheduled"], self._num_ranks, len(NAMES))
        found["formula_within_bytes"] = traffic.within(ranks[0]["scheduled"], self._num_ranks, len(NAMES))
        return found

    def close(self) -> None:
        """Tell all ranks to end, and end the launch after 60 s. What still runs then ends with its host."""
        self._tell(steps.END)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in self._pipes:
            os.close(pipe)

    def _tell(self, word: str) -> None:
        for pipe in self._pipes:
            os.write(pipe, f"{word}\n".encode())

    def _wait(self, limit_s: float) -> list[Any]:
        """Wait until each rank has said something of the present step; returns that. Raises ArmError."""
        paths = [steps.done_path(self._turns, self._number, rank) for rank in range(self._num_ranks)]
        deadline = time.monotonic() + limit_s
        while not all(path.exists() for path in paths):
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                state = "waits" if self._process.returncode is None else f"ended with status {self._process.returncode}"
                raise ArmError(f"{self.name}, step {self._number}: the launch {state}; the end of its log:\n" + "\n".join(end))
            time.sleep(POLL_S)
        return [json.loads(path.read_text()) for path in paths]


def _placed(config: Config, nvme_path: str) -> Config:
    found = copy.deepcopy(config)
    for name in ("offload_param", "offload_optimizer"):
        if "nvme_path" in found["zero_optimization"].get(name, {}):
            found["zero_optimization"][name]["nvme_path"] = nvme_path
    return found


def _busy_seconds() -> float:
    """Seconds in which cores were busy since boot, of all cores together."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100  # all but idle and waiting for disks, in the kernel's USER_HZ


# ---- the measurement


def measure(arms: Mapping[str, Arm], num_steps: int, first_steps: int) -> dict[str, list[dict[str, Any]]]:
    """{arm: what its steps took}. The `first_steps` of each do not count; `summary` leaves them out."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for _ in range(first_steps):
        for name, arm in arms.items():
            found[name].append(arm.turn())
            print(f"{name}: first step {found[name][-1]['step_s']:.2f} s", flush=True)
    for number in range(num_steps):
        for name in itertools.islice(itertools.cycle(arms), number % len(arms), number % len(arms) + len(arms)):
            step = arms[name].turn()
            found[name].append(step)
            moved = [f"{count / 1e6:.1f} MB into {host}" for host, count in step["inbound_bytes"].items()]
            moved += [f"{count / 1e6:.1f} MB within {host}" for host, count in step["within_bytes"].items()]
            print(f"step {number + 1}, {name}: {step['step_s']:.2f} s, {', '.join(moved)}, loss {step['loss']:.4f}", flush=True)
    return found


def summary(taken: list[dict[str, Any]], num_samples: int, rate_bytes: float | None, first_steps: int = 1) -> dict[str, Any]:
    """Medians of one arm's steps, without the `first_steps`. `num_samples`: of a step. `link_bound_s`: what the link alone
    takes for a step's bytes. `core_s`: seconds of a core that all ranks of the arm take together; `busy_cores`: of the whole
    machine, the waiting arms and the kernel among them."""
    counted = taken[first_steps:]
    inbound, within = (
        max(median(step[key][name] for step in counted) for name in NAMES) for key in ("inbound_bytes", "within_bytes")
    )
    formula_within = counted[-1]["formula_within_bytes"]
    step_s = median(step["step_s"] for step in counted)
    return {
        "step_s": step_s,
        "inbound_bytes_per_step": inbound,
        "within_bytes_per_step": within,
        "samples_per_s": num_samples / step_s,
        "losses": [step["loss"] for step in taken],
        "busy_cores": median(step["busy_cores"] for step in counted),
        "core_s": median(step["core_s"] for step in counted),
        "link_bound_s": inbound / rate_bytes if rate_bytes else None,
        "inbound_over_formula": inbound / counted[-1]["formula_bytes"],
        "within_over_formula": within / formula_within if formula_within else None,
        "steps": taken,
    }


def line_of(name: str, found: Mapping[str, Any]) -> str:
    """What is printed of an arm at the end. `found`: see `summary`."""
    bound = "" if found["link_bound_s"] is None else f", link alone {found['link_bound_s']:.2f} s"
    moved = []
    for kind, where in (("inbound", "into"), ("within", "within")):
        over = found[f"{kind}_over_formula"]
        share = "" if over is None else f" ({over:.3f} of the formula)"
        moved.append(f"{found[f'{kind}_bytes_per_step'] / 1e6:.1f} MB {where} a host{share}")
    return (
        f"{name}: {found['step_s']:.2f} s a step{bound}, {', '.join(moved)}, {found['samples_per_s']:.2f} samples/s,"
        f" {found['busy_cores']:.2f} cores busy"
    )


def measured_links(hosts: TwoHosts) -> dict[str, Any]:
    """What `ds-vertical limits --links` says of the two hosts. Raises RigError."""
    words = ["limits", "--links", "--hostfile", launch.HOSTFILE, "--size-mb", str(LINKS_MB), "--no-keep", "--json"]
    words += ["--", "--master_port", str(launch.PORT - 1)]  # arms have those from it on
    command = [sys.executable, "-m", "ds_vertical.cli.main", *words]
    run = subprocess.run(command, cwd=hosts.shared, env=launch.environment(hosts), capture_output=True, text=True)
    if run.returncode:
        raise RigError(f"limits --links ended with status {run.returncode}: {run.stderr}")
    report = json.loads(run.stdout)
    print(f"links: {report['links']}", flush=True)
    return {name: report[name] for name in ("links", "settings", "date")}


@dataclass(frozen=True)
class Conditions:
    """How fast the machine was at a moment. `links`: see `measured_links`. `pieces`: seconds of the model's pieces, with all
    ranks side by side."""

    links: dict[str, Any]
    pieces: dict[str, float]

    @classmethod
    def now(cls, hosts: TwoHosts, options: argparse.Namespace) -> Conditions:
        """Measured. Raises RigError, ConfigError."""
        from ds_vertical.cli.plan.fake_run import read_spec
        from ds_vertical.cli.plan.pieces import time_pieces
        from ds_vertical.model.hf import read_fields

        links = measured_links(hosts)
        fields = read_fields(ROOT / "configs" / "models" / f"{options.model}.json")
        spec = read_spec(options.model, fields, options.tokens, options.dtype, None)
        pieces = time_pieces(spec, fields, 1, len(NAMES) * options.ranks_per_node).pieces
        print(f"pieces: {pieces}", flush=True)
        return cls(links, pieces)


def record_of(conditions: Sequence[Conditions]) -> dict[str, Any]:
    """What a record says of the machine ahead of the arms' steps and behind them: the means, and each."""
    links = {"links": means([each.links["links"] for each in conditions])}
    links |= {name: conditions[0].links[name] for name in ("settings", "date")}
    return {
        "links": links,
        "pieces": means([each.pieces for each in conditions]),
        "conditions": [vars(each) for each in conditions],
    }


def means(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By key the mean of the seconds: of a rate's reciprocals."""
    kinds = {key: harmonic_mean if key.endswith("_per_s") else fmean for key in every[0]}
    return {key: mean([each[key] for each in every]) for key, mean in kinds.items()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all arms. Returns what `--json` records. Raises ConfigError, RigError, ArmError."""
    import commits

    configs = build_configs(options)
    with TwoHosts(options.folder, options.rate, options.slow) as hosts, contextlib.ExitStack() as stack:
        launch.write_settings(hosts, options.ranks_per_node)
        arms = {}
        for number, (name, config) in enumerate(configs.items()):
            arms[name] = Arm(name, hosts, config, launch.PORT + number, options)
            stack.callback(arms[name].close)
            arms[name].wait_ready()
            print(f"{name}: ready", flush=True)
        conditions = [Conditions.now(hosts, options)]  # beside the waiting arms, as steps are
        first_steps = SETTLING if any("uneven" in name for name in options.arms) else 1
        taken = measure(arms, options.steps, first_steps)
        conditions.append(Conditions.now(hosts, options))
    num_samples = len(NAMES) * options.ranks_per_node * options.micro_batches
    num_samples *= next(iter(configs.values()))["train_micro_batch_size_per_gpu"]
    rate = rate_of(options.rate)
    keys = ("model", "rate", "dtype", "micro_batches", "ranks_per_node", "tokens", "clip", "slow")
    content = commits.made_of() | {"commit": commits.describe(ROOT), "command": sys.argv}
    content |= {key: getattr(options, key) for key in keys}
    content |= record_of(conditions)
    content["arms"] = {name: summary(each, num_samples, rate, first_steps) for name, each in taken.items()}
    content["configs"] = {name: _placed(config, "NVME_PATH") for name, config in configs.items()}
    return content


def rate_of(text: str | None) -> float | None:
    """Bytes/s of a rate as tc(8) writes it in bits. Raises ValueError."""
    if text is None:
        return None
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor / 8
    raise ValueError(f"{text}: write a rate as tc(8) does, e.g. 500mbit or 2gbit")


# ---- the command line


def _slow(text: str) -> dict[str, float]:
    name, _, percent = text.partition(":")
    name = name if name in NAMES else f"node{name}"
    if name not in NAMES or not 0 < float(percent or 0) <= 100:
        raise ValueError(text)
    return {name: float(percent)}


def _arms(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: there are {', '.join(ARMS)}")
    return names


def _rate(text: str) -> str:
    rate_of(text)
    return text


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt_13m", help="shape in configs/models")
    parser.add_argument("--config", type=Path, help="JSON of the vertical arm (default: configs/MODEL_cpu.json)")
    parser.add_argument("--rate", type=_rate, help="of the link in each direction, as tc(8) writes it (default: unlimited)")
    parser.add_argument("--arms", type=_arms, default=["flat"], metavar="ARM,ARM", help=", ".join(ARMS))
    parser.add_argument("--micro-batches", type=int, help="of each rank (default: 4, and 16 with the arms uneven and acco)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each arm, besides first ones that do not count")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--slow", type=_slow, metavar="NODE:PERCENT", help="of the half of all cores that is the host's")
    parser.add_argument("--tokens", type=int, help="tokens of a sample (default: 8, and 128 with the arms uneven and acco)")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient_clipping")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--folder", type=Path, help="on the SSD, for all files of the run (default: that for temporary files)")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args(argv)
    longer = any("uneven" in name or "acco" in name for name in options.arms)
    options.micro_batches = options.micro_batches or (16 if longer else 4)
    options.tokens = options.tokens or (128 if longer else 8)
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure all arms, print the results, and record them where `--json` says."""
    options = parse(argv)
    if (reason := refusal()) is not None:
        print(f"twonode.py: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of all `with` blocks
    try:
        content = run(options)
    except (RigError, ArmError) as error:
        print(f"twonode.py: {error}", file=sys.stderr)
        return 1
    for name, found in content["arms"].items():
        print(line_of(name, found))
    if options.json is not None:
        portable.write(options.json, content, ROOT / "runs" / "twonode", "twonode")
    return 0


if __name__ == "__main__":
    sys.exit(main())
