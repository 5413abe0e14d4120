"""Training processes that step in turn: all but one are stopped, so that a drift of the machine hits each of them alike.

Each is started once, with the package and scripts of a checkout of its own, builds `configs/models`' model and waits for its
turns. What a turn returns are the seconds of its steps as the process itself takes them, and their losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from ds_vertical.cli.bench.disk_limit import LimitedGroup

ROOT = Path(__file__).resolve().parent.parent
LOG_LINES = 25
Arm = TypeVar("Arm")
NVME_PATH = "NVME_PATH"  # stands for the folder in what is recorded


class TurnError(RuntimeError):
    """A training process that has ended; the message has the end of its log."""


class Stepper:
    """One training process on one rank, a script that takes steps as `main` below does. Its folder, for log and state, is to be
    the process's own; the script gets `--config`, the JSON with its state in that folder, and `--answers`, a descriptor.
    `group`: under whose disk limit it runs (None: the full disk). `log`: the file of what it prints."""

    def __init__(
        self,
        name: str,
        checkout: Path,
        config: Mapping[str, Any],
        folder: Path,
        script: Sequence[str],
        words: Sequence[str],
        group: LimitedGroup | None = None,
    ) -> None:
        self.name = name
        folder.mkdir(parents=True)
        self.log = folder / "log"
        nvme = folder / "nvme"
        nvme.mkdir()
        (folder / "config.json").write_text(json.dumps(placed(config, str(nvme))))
        reading, writing = os.pipe()
        given = ["--config", str(folder / "config.json"), "--answers", str(writing)]
        command = [sys.executable, *script, *given, *words]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command if group is None else group.wrap(command),
                cwd=checkout,
                env=environment() | {"PYTHONPATH": str(checkout)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def wait_ready(self) -> None:
        """Return when the model is built, and stop the process until its first turn. Raises TurnError."""
        self._answer()
        self._signal(signal.SIGSTOP)

    def turn(self, num_steps: int = 1) -> list[dict[str, Any]]:
        """Let the process take some steps while all others stand still: seconds and loss of each. Raises TurnError."""
        return self.ask(str(num_steps))

    def ask(self, line: str) -> Any:
        """Give the process a line, and let it run until it has answered. Raises TurnError."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """End the process; its files on the SSD go with it."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGKILL)
            self._process.wait()
            self._answers.close()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)  # with the data loader's workers

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            self._process.wait()
            end = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise TurnError(f"{self.name}: status {self._process.returncode}; the end of its log:\n" + "\n".join(end))
        return json.loads(line)


class Trainer(Stepper):
    """Trains `configs/models`' model by `train_batch`. `checkout`: whose package and scripts it runs; `loaders`: worker
    processes of its data loader, which compute without a pause."""

    def __init__(
        self, name: str, checkout: Path, config: Mapping[str, Any], folder: Path, model: str, tokens: int, loaders: int = 0
    ) -> None:
        words = ["--model", model, "--tokens", str(tokens), "--loaders", str(loaders), "--checkout", str(checkout)]
        super().__init__(name, checkout, config, folder, [__file__], words)


_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1"}


def environment() -> dict[str, str]:
    """That of a process that is the only rank of its run."""
    return os.environ | _RANK | {"MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def placed(config: Mapping[str, Any], nvme_path: str) -> dict[str, Any]:
    """The configuration with all that rests on SSD in one folder."""
    zero = dict(config["zero_optimization"])
    for name in ("offload_param", "offload_optimizer"):
        if "nvme_path" in zero.get(name, {}):
            zero[name] = zero[name] | {"nvme_path": nvme_path}
    return {**config, "zero_optimization": zero}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What both benchmarks train."""
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpt_101m_cpu.json", help="of the vertical arm")
    parser.add_argument("--model", default="gpt_101m", help="shape in configs/models")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8, help="per micro-batch")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient_clipping")
    parser.add_argument("--folder", type=Path, help="on the SSD (default: the JSON's nvme_path)")


def arms(options: argparse.Namespace, stock: Path | None = None) -> Any:
    """The configurations of both arms, `stock`'s transfer settings in the stock arm."""
    from ds_vertical.cli.bench.arms import build_arms

    settings = [f"gradient_accumulation_steps={options.micro_batches}", f"gradient_clipping={options.clip}"]
    return build_arms(options.config, stock, settings)


@contextlib.contextmanager
def scratch_folder(options: argparse.Namespace, config: dict[str, Any]) -> Iterator[Path]:
    """A folder on the SSD, for as long as the block runs."""
    from ds_vertical.cli.bench.arms import ssd_folders

    base = options.folder or Path(ssd_folders(config)[0])
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="inturn.", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def steppers(
    configs: Mapping[str, Any], number: int, folder: Path, words: Sequence[str], group: LimitedGroup | None
) -> Iterator[dict[str, Stepper]]:
    """A new process of this checkout for each arm, by name, for as long as the block runs. `number`: of the round, by which
    another one is started first. `words`: of `main` below. Raises TurnError."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Stepper] = {}
        for arm in rotated([*configs], number):
            given = arm, ROOT, configs[arm], folder / f"run {number} {arm}", [__file__], words
            found[arm] = Stepper(*given, group=group)
            stack.callback(found[arm].close)
            found[arm].wait_ready()
        yield found


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """All of them in the order of a turn: with another one first from turn to turn."""
    by %= len(arms)
    return [*arms[by:], *arms[:by]]


def losses_equal(round_: Mapping[str, Any], arms: Sequence[str]) -> bool:
    """Whether all arms have the same losses, bit for bit, in a round's `warm_up` and `turns`."""
    steps = ([*round_["warm_up"][arm], *(turn[arm] for turn in round_["turns"])] for arm in arms)
    return len({tuple(step["loss"] for step in own) for own in steps}) == 1


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Processes beside the block that compute without a pause, each on a core wherever the kernel puts it."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.5 * bool(busy))  # they have started
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


# ---- in the training process


def main() -> None:
    """Train as told: a number of steps for each line of standard input, an answer for each on the descriptor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--loaders", type=int, required=True)
    parser.add_argument("--answers", type=int, required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(options.checkout / "scripts"))
    import model_config
    import torch
    import train
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    import ds_vertical

    if Path(ds_vertical.__file__).parents[1] != options.checkout.resolve():
        raise RuntimeError(f"{ds_vertical.__file__} is not of {options.checkout}")
    shape = model_config.resolve(options.model, [], None, options.tokens)
    config = ds_vertical.prepare(str(options.config))
    torch.manual_seed(0)
    zero_init = HfDeepSpeedConfig(config)  # zero.Init while it lives
    model = train.build_model(shape, config)
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    batches = _batches(options, shape.vocab_size, engine.device)
    with os.fdopen(options.answers, "w", buffering=1) as answers:
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            print(json.dumps([_step(engine, batches) for _ in range(int(line))]), file=answers)
    engine.destroy()
    del zero_init


def _step(engine: Any, batches: Iterator[Any]) -> dict[str, Any]:
    before, start = _moved(), time.perf_counter()
    loss = engine.train_batch(batches)
    taken = time.perf_counter() - start
    moved = {name: after - before[name] for name, after in _moved().items()}
    return {"step_s": taken, "loss": float(loss).hex(), **moved}


def _moved() -> dict[str, int]:
    """Bytes that this process has moved from and to disks so far; the kernel's own words, which every checkout finds."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(words[name]) for name in ("read_bytes", "write_bytes")}


def _batches(options: argparse.Namespace, vocabulary: int, device: Any) -> Iterator[Any]:
    """Micro-batches without end: by workers that compute all the time, further ahead than the run will come, or made here."""
    import torch
    import train

    samples = Samples(vocabulary, options.tokens, bool(options.loaders))
    ahead = AHEAD if options.loaders else None
    loader = torch.utils.data.DataLoader(
        cast("torch.utils.data.Dataset[torch.Tensor]", samples), num_workers=options.loaders, prefetch_factor=ahead
    )
    return (train.to_batch(ids.numpy(), device) for ids in loader)


SAMPLE_S = 0.02  # of a worker for a sample
AHEAD = 1 << 12  # samples: for longer than a run takes


class Samples:
    """Token ids by number, each of which takes a core for a while where `slow`."""

    def __init__(self, vocabulary: int, tokens: int, slow: bool) -> None:
        self._vocabulary, self._tokens, self._slow = vocabulary, tokens, slow

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Any:
        import torch

        end = time.process_time() + SAMPLE_S * self._slow
        while time.process_time() < end:
            pass
        return torch.randint(0, self._vocabulary, (self._tokens,), generator=torch.Generator().manual_seed(number))


if __name__ == "__main__":
    main()
