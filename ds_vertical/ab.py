"""`ds-vertical ab`: one training script in both arms, losses compared before anything is said about speed."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ds_vertical import cgroup
from ds_vertical.arms import Arms, build_arms, nvme_paths
from ds_vertical.comparison import (
    ARMS,
    Agreement,
    ArmSummary,
    ComparisonError,
    LossVerdict,
    Run,
    check_runs,
    compare_losses,
    contract_of,
    describe_losses,
    summarize,
    table,
)
from ds_vertical.config import ConfigError
from ds_vertical.facts import accelerator, describe_machine, versions
from ds_vertical.metrics import METRICS_VARIABLE, STEPS_VARIABLE, encode_float, read_records

_FAILED, _BAD_INPUT = 1, 2
_LOG_LINES_SHOWN = 25
_GRACE_S = 30.0  # between asking a run's processes to end and ending them
_POLL_S = 0.25
_REPORT_EVERY_S = 30.0  # without a terminal; with one, the line is redrawn at each poll


class RunError(Exception):
    """A run that did not end well; the message says where its output lies."""


@dataclass(frozen=True)
class Plan:
    """Everything the command line asks for, checked."""

    arms: Arms
    config: Path
    stock_config: Path | None
    num_steps: int
    num_repeats: int
    num_ranks: int
    out: Path
    script: Path
    script_arguments: tuple[str, ...]
    ssd_limit: cgroup.Limit | None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the A/B. Returns 0; 1 if a run failed or the losses differ beyond the contract; 2 for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        plan = parse(arguments)
    except (ConfigError, OSError) as error:
        print(f"ds-vertical ab: {error}", file=sys.stderr)
        return _BAD_INPUT
    try:
        with _terminations_raised(), _disk_limit(plan) as group:
            return _execute(plan, group, ["ds-vertical", "ab", *arguments])
    except ConfigError as error:
        print(f"ds-vertical ab: {error}", file=sys.stderr)
        return _BAD_INPUT
    except (RunError, ComparisonError) as error:
        print(f"ds-vertical ab: {error}", file=sys.stderr)
        return _FAILED


# --- the command line ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-vertical ab",
        usage="ds-vertical ab --config CONFIG.json [options] -- SCRIPT [ARGS]",
        description="Runs SCRIPT under the deepspeed launcher with stock ZeRO-Infinity and with the vertical schedule, "
        "compares the losses, then the speed. SCRIPT takes --deepspeed_config, builds its engine with "
        "ds_vertical.initialize() and trains with engine.train_batch().",
    )
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed JSON that both arms start from")
    parser.add_argument("--stock-config", type=Path, help="JSON for the stock arm; only transfer settings may differ")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="dotted key and JSON value, in both arms"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps per run, 2 or more (default 10)")
    parser.add_argument("--repeat", type=int, default=1, help="runs per arm, interleaved (default 1)")
    parser.add_argument("--num-ranks", type=int, default=1, help="processes on this machine (default 1)")
    parser.add_argument(cgroup.OPTION, metavar="READ,WRITE", help=cgroup.HELP)
    parser.add_argument("--out", type=Path, help="folder for ab.json, both JSONs and logs (default runs/ab-<date>)")
    return parser


def parse(arguments: Sequence[str]) -> Plan:
    """The checked plan. Raises ConfigError for bad input, SystemExit (2) where argparse finds the fault."""
    own, separator, script = _split_at_separator(arguments)
    options = _parser().parse_args(own)
    if not separator or not script:
        raise ConfigError("no script given: write `-- SCRIPT [ARGS]` at the end, e.g. -- scripts/train.py --seq 64")
    for name, value, least in (
        ("--steps", options.steps, 2),
        ("--repeat", options.repeat, 1),
        ("--num-ranks", options.num_ranks, 1),
    ):
        if value < least:
            why = "; the first step of a run is left out of the medians" if name == "--steps" else ""
            raise ConfigError(f"{name} {value}: write {least} or more{why}")
    path = Path(script[0])
    if not path.is_file():
        raise ConfigError(f"{path}: no such script; write the path of a Python file after `--`")
    given = [argument for argument in script[1:] if argument.split("=")[0] == "--deepspeed_config"]
    if given:
        raise ConfigError(f"{given[0]} in SCRIPT's arguments: leave it out, each arm gets its own file; use --config")
    limit = cgroup.parse_limit(options.ssd_limit) if options.ssd_limit is not None else None
    arms = build_arms(options.config, options.stock_config, options.set, options.num_ranks)
    if limit is not None and not nvme_paths(arms.vertical):
        raise ConfigError(f"{cgroup.OPTION}: {options.config} keeps nothing on SSD (no nvme_path); leave the option out")
    for nvme_path in nvme_paths(arms.vertical) if limit else []:
        cgroup.disk_of(nvme_path)  # refused before --out is made
    return Plan(
        arms=arms,
        config=options.config,
        stock_config=options.stock_config,
        num_steps=options.steps,
        num_repeats=options.repeat,
        num_ranks=options.num_ranks,
        out=_make_out(options.out or Path("runs", f"ab-{datetime.datetime.now():%Y%m%d-%H%M%S}")),
        script=path,
        script_arguments=tuple(script[1:]),
        ssd_limit=limit,
    )


def _split_at_separator(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return list(arguments), False, []
    at = list(arguments).index("--")
    return list(arguments[:at]), True, list(arguments[at + 1 :])


def _make_out(out: Path) -> Path:
    """The folder, made and known to be writable; what an earlier run left there cannot pass for this one's."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_text("")
        probe.unlink()
        (out / "ab.json").unlink(missing_ok=True)
        for arm in ARMS:
            for stale in out.glob(f"{arm}.*.metrics"):
                shutil.rmtree(stale)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write there ({error}); name a folder that you may write to") from error
    return out.resolve()


# --- running -------------------------------------------------------------------------------------------------------


def _disk_limit(plan: Plan) -> contextlib.AbstractContextManager[cgroup.LimitedGroup | None]:
    if plan.ssd_limit is None:
        return contextlib.nullcontext()
    return cgroup.limited(plan.ssd_limit, nvme_paths(plan.arms.vertical))


def _execute(plan: Plan, group: cgroup.LimitedGroup | None, command: Sequence[str]) -> int:
    started = datetime.datetime.now().astimezone()
    for warning in plan.arms.warnings:
        print(f"warning: {warning}")
    for arm, config in zip(ARMS, (plan.arms.stock, plan.arms.vertical), strict=True):
        (plan.out / f"{arm}.json").write_text(json.dumps(config, indent=2) + "\n")
    runs = []
    for repeat in range(plan.num_repeats):
        # Alternating the order spreads a drift of the machine (heat, other load) over both arms.
        for arm in ARMS if repeat % 2 == 0 else reversed(ARMS):
            runs.append(_run(plan, group, arm, repeat))
    check_runs(runs, plan.num_steps, plan.num_ranks)
    contract = contract_of(plan.arms.vertical, plan.num_ranks, _tied(runs))
    verdict = compare_losses(runs, contract)
    summaries = {arm: summarize([run for run in runs if run.arm == arm]) for arm in ARMS}
    report = _report(plan, command, started, verdict, summaries)
    report["ssd_limit"] = group.to_json() if group else None
    (plan.out / "ab.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(describe_losses(verdict, plan.num_steps))
    if verdict.agreement is Agreement.DIFFERENT:
        print(f"ds-vertical ab: the arms do not compute the same thing; logs in {plan.out}", file=sys.stderr)
        return _FAILED
    print(table(summaries["stock"], summaries["vertical"], group.describe() if group else ""))
    print(f"written: {plan.out / 'ab.json'}")
    return 0


def _tied(runs: Sequence[Run]) -> bool | None:
    """What the runs say about tied weights; None as soon as one does not know."""
    told = {record.tied for run in runs for records in run.ranks.values() for record in records}
    return None if None in told else True in told


def _run(plan: Plan, group: cgroup.LimitedGroup | None, arm: str, repeat: int) -> Run:
    name = f"{arm}.{repeat}"
    log, metrics = plan.out / f"{name}.log", plan.out / f"{name}.metrics"
    environment = dict(os.environ) | {METRICS_VARIABLE: str(metrics), STEPS_VARIABLE: str(plan.num_steps)}
    environment["DS_ACCELERATOR"] = accelerator()
    # The launcher's children find this interpreter's tools (ninja, for ops) before the system's.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        # No host file: a machine that has /job/hostfile would otherwise train on all its hosts.
        *("--hostfile", os.devnull, *_devices(plan.num_ranks), "--master_port", str(_free_port())),
        *(str(plan.script), *plan.script_arguments, "--deepspeed_config", str(plan.out / f"{arm}.json")),
    ]
    progress = Progress(f"{arm} {repeat + 1}/{plan.num_repeats}", plan.num_steps, metrics, log)
    status = _run_process(group.wrap(command) if group else command, environment, log, progress)
    if status != 0:
        raise RunError(_failure(name, f"ended with status {status}", log))
    try:
        return Run(arm, repeat, read_records(metrics))
    except ValueError as error:
        raise RunError(_failure(name, f"trained nothing through engine.train_batch ({error})", log)) from error


def _run_process(command: Sequence[str], environment: dict[str, str], log: Path, progress: Progress) -> int:
    """Runs the command in a process group of its own with its output in `log`; ends the group if interrupted."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                progress.show()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        except BaseException:
            _end_group(process)
            raise
    progress.finish(process.returncode == 0)
    return process.returncode


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher and what it started, gently first, so that a run can remove its swap files."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + _GRACE_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
            # The launcher may end before the training processes: the group is gone when nobody is left in it.
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(_POLL_S)


@contextlib.contextmanager
def _terminations_raised() -> Iterator[None]:
    """SIGTERM becomes SystemExit, so that an ended A/B does not leave its run training on."""

    def raise_exit(signal_number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signal_number)

    previous = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _devices(num_ranks: int) -> tuple[str, str]:
    """The launcher's option for this many local processes, on the devices that the caller has made visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if accelerator() != "cuda" or len([device for device in visible if device]) < num_ranks:
        return "--num_accelerators", str(num_ranks)
    return "--include", f"localhost:{','.join(visible[:num_ranks])}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _failure(name: str, what: str, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
    return f"{name} {what}; the end of its log:\n" + "".join(f"    {line}\n" for line in lines) + f"whole log: {log}"


class Progress:
    """One line about the run under way: redrawn on a terminal, repeated now and then without one."""

    def __init__(self, name: str, num_steps: int, metrics: Path, log: Path) -> None:
        self._name, self._num_steps, self._log = name, num_steps, log
        self._records = metrics / "rank0.jsonl"
        self._terminal = sys.stdout.isatty()
        self._start = self._last_report = time.monotonic()
        if not self._terminal:
            print(f"{name}: started, log {log}", flush=True)

    def show(self) -> None:
        """Says how far the run is, if it is time to."""
        now = time.monotonic()
        if self._terminal:
            print(f"\r\033[K{self._text(now)}", end="", flush=True)
        elif now - self._last_report >= _REPORT_EVERY_S:
            self._last_report = now
            print(self._text(now), flush=True)

    def finish(self, good: bool) -> None:
        start, end = ("\r\033[K", "") if self._terminal else ("", "")
        print(f"{start}{self._text(time.monotonic())}, {'done' if good else 'failed'}{end}", flush=True)

    def _text(self, now: float) -> str:
        done = self._records.read_bytes().count(b"\n") if self._records.exists() else 0
        waiting = "" if done else f" (setting up, see {self._log})"
        return f"{self._name}: step {done}/{self._num_steps}, {now - self._start:.0f} s{waiting}"


# --- the report ----------------------------------------------------------------------------------------------------


def _report(
    plan: Plan,
    command: Sequence[str],
    started: datetime.datetime,
    verdict: LossVerdict,
    summaries: dict[str, ArmSummary],
) -> dict[str, Any]:
    """What ab.json holds. Speed is null where the losses differ beyond the contract."""
    comparable = verdict.agreement is not Agreement.DIFFERENT
    speedup = summaries["stock"].step_s / summaries["vertical"].step_s if comparable else None
    first = None if verdict.first is None else {key: _json(value) for key, value in asdict(verdict.first).items()}
    return {
        "arms": {arm: summaries[arm].to_json(with_speed=comparable) for arm in ARMS},
        "speedup": speedup,
        "losses_equal": verdict.agreement is Agreement.EQUAL,
        "losses_verdict": {
            "agreement": verdict.agreement.value,
            "tolerance": verdict.contract.tolerance,
            "tolerated_because": list(verdict.contract.reasons),
            "max_relative_difference": _json(verdict.max_relative),
            "first_difference": first,
        },
        "steps": plan.num_steps,
        "repeats": plan.num_repeats,
        "ranks": plan.num_ranks,
        "command": list(command),
        "date": started.isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": versions(),
        "configs": {"stock": plan.arms.stock, "vertical": plan.arms.vertical},
    }


def _json(value: Any) -> Any:
    return encode_float(value) if isinstance(value, float) else value
