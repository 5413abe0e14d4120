"""`ds-vertical limits`: measures this machine, and keeps the report in the user's cache for plans and training.

The report has the rates that bound a step (SSD, copies, CPU Adam, matrix products, a layer's forward and backward), and how
much each tier holds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ds_vertical.cli.bench import disk_limit, fio
from ds_vertical.cli.bench.host_bench import core_s_per_byte, core_share
from ds_vertical.cli.bench.machine_info import accelerator, describe_machine, process_rate, versions
from ds_vertical.cli.bench.ssd_bench import median_s, transfer_s, tune_aio
from ds_vertical.cli.common import JsonObject, first_line
from ds_vertical.cli.links import command as links
from ds_vertical.config.file import read_config
from ds_vertical.engine.machine_cache import (
    at_once,
    check_keeping,
    disks_of,
    joint_report,
    keep_report,
    shares_by_rates,
    shares_of,
)
from ds_vertical.errors import ConfigError
from ds_vertical.io import host as hostmemory
from ds_vertical.io.atomic_file import check_out, write_out
from ds_vertical.io.runs import stripes
from ds_vertical.model.hf import build_config, named_shape, read_fields
from ds_vertical.planner.machine import Machine

if TYPE_CHECKING:
    import torch

    from ds_vertical.io.aio import DiskQueue

_BAD_INPUT = 2
_EXAMPLE = """example:
  ds-vertical limits --path /mnt/nvme --config ds_config.json
  ds-vertical limits --path /mnt/nvme --tune-aio --out this_machine.json
"""
_DTYPES = ("bf16", "fp16", "fp32")
_ALIGNMENT = 4096
_PAIRS = 5  # of windows with and without other work, a round
_PIECE, _PIECES = 1 << 20, 8  # elements: 16 MB of state and gradient each


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON. Returns 0; 2 for bad input; a limited child's status with --ssd-limit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--links" in arguments:
        return links.main(arguments)
    options = _parser().parse_args(arguments)
    try:
        check_out(options.out)
        if options.ssd_limit is not None and not options.limited:
            return _run_limited(options, arguments)
        keeps = not (options.limited or options.no_keep)  # a limited disk is not this machine
        for folder in options.path if keeps else ():
            if folder.is_dir():
                check_keeping(folder)
        report, each = measure(options, keeps)
        for one in (report, *each):
            one["ssd_limit"] = json.loads(options.limited) if options.limited else None
        text = json.dumps(report, indent=2, allow_nan=False)
        if options.out:
            write_out(options.out, text + "\n")
        kept = [keep_report(one, folder) for one, folder in zip(each, options.path, strict=True)] if keeps else []
    except (ConfigError, OSError) as error:
        print(f"ds-vertical limits: {error}", file=sys.stderr)
        return _BAD_INPUT
    print(text if options.json else "\n".join(_lines(report, kept, options.out)))
    return 0


def _lines(report: JsonObject, kept: Sequence[Path], out: Path | None) -> list[str]:
    """For the terminal."""
    lines = [rates_table(report["rates"]), fio_line(report["rates"])]
    lines += [f"fastest aio: {json.dumps(report['aio'])}"] if report["aio"] else []
    lines += [f"{ssd['path']}: {ssd['share']:.1%} of each file" for ssd in report["ssds"] or ()]
    lines += [f"kept for plans and training: {path}" for path in kept]
    return lines + ([f"written: {out}"] if out else [])


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ds-vertical limits", description=__doc__, epilog=_EXAMPLE, formatter_class=form)
    paths = "folder on the disk to measure (default: here); several: those of nvme_paths, one on each SSD"
    parser.add_argument("--path", type=Path, nargs="+", default=[Path()], help=paths)
    parser.add_argument("--config", type=Path, help="DeepSpeed JSON whose aio section is used (default: DeepSpeed's)")
    parser.add_argument("--model", type=Path, help="Hugging Face config, or a shape's name: whose layer is timed")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the layer (default bf16)")
    parser.add_argument("--tokens", type=int, default=32, help="of a micro-batch (default 32)")
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch, which share its tokens (default 1)")
    parser.add_argument("--threads", type=int, help="of torch (default: as it chooses)")
    parser.add_argument("--size-mb", type=int, default=256, help="MB per transfer (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many counts, of a layer the mean (default 3)")
    parser.add_argument("--tune-aio", action="store_true", help="try aio settings first; plans write the fastest ones")
    parser.add_argument("--links", action="store_true", help="only the links between ranks; see `limits --links --help`")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    parser.add_argument("--no-fio", action="store_true", help="do not measure with fio too")
    parser.add_argument("--no-keep", action="store_true", help="do not keep the report in the user's cache")
    parser.add_argument(disk_limit.OPTION, metavar="READ,WRITE", help=disk_limit.HELP)
    parser.add_argument("--limited", help=argparse.SUPPRESS)  # given to the child that runs inside the group
    return parser


def _run_limited(options: argparse.Namespace, arguments: list[str]) -> int:
    with disk_limit.limited(disk_limit.parse_limit(options.ssd_limit), options.path) as group:
        command = [sys.executable, "-m", "ds_vertical.cli.bench.limits", *arguments, "--limited", json.dumps(group.to_json())]
        return subprocess.run(group.wrap(command)).returncode


def measure(options: argparse.Namespace, keeps: bool = False) -> tuple[JsonObject, list[JsonObject]]:
    """The report, and one for each SSD. `keeps`: those of the SSDs will decide how much of a file goes to each. Raises
    ConfigError for options that make no sense, and for a folder that cannot be written."""
    _check(options)
    if options.model:
        options.model = named_shape(str(options.model))
        build_config(str(options.model), read_fields(options.model))  # refused before a minute of measuring
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    num_bytes = options.size_mb << 20
    config = read_config(options.config) if options.config else {}
    tuned, tried = tune_aio(options.path[0], num_bytes, options.rounds) if options.tune_aio else (None, None)
    config = config if tuned is None else config | {"aio": tuned}
    each: list[JsonObject] = []
    with _queues(config, _ALIGNMENT):
        pass  # what makes no queue is refused before a minute of measuring, too
    others = _rates(options, config)
    for folder in options.path:
        rates = ssd_rates(folder, num_bytes, options.rounds, config, not options.no_fio) | others
        found = _report(options, rates, folder) | {"aio": tuned, "aio_rates": tried}
        each.append(found)
    if len(each) == 1:
        return each[0], each
    disks = disks_of(options.path)
    shares = shares_by_rates(each, disks) if keeps else shares_of(options.path)
    together = at_once(disks, striped_rates(options.path, shares, num_bytes, options.rounds, config))
    each = [report | {"at_once": together} for report in each]
    return _joint(each, options.path, shares), each


def _joint(each: list[JsonObject], folders: Sequence[Path], shares: Sequence[float]) -> JsonObject:
    """The report of all SSDs together, as files are spread over them in training."""
    joint = joint_report(each, shares, disks_of(folders))
    ssds = zip(folders, shares, each, strict=True)
    told = [{"path": str(f.absolute()), "share": share, "rates": report["rates"]} for f, share, report in ssds]
    return joint | {"ssds": told, "ours_over_fio": None}


def _report(options: argparse.Namespace, rates: dict[str, float], folder: Path) -> JsonObject:
    settings = {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {
        "machine": _as_machine(rates),
        "rates": rates,
        "capacity": capacity(folder),
        "ssds": None,
        "ours_over_fio": fio_ratios(rates) or None,
        "settings": settings | {"path": str(folder.absolute())},
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "facts": describe_machine(),
        "versions": versions(),
    }


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that make no sense, and for a folder that cannot be written."""
    for name in ("tokens", "sequences", "threads", "size_mb", "rounds"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: write 1 or more")
    if options.tokens % options.sequences:
        raise ConfigError(f"--tokens {options.tokens}: write a multiple of --sequences, {options.sequences}")
    for folder in options.path:
        if not folder.is_dir():
            raise ConfigError(f"--path {folder}: no such folder; name one on the disk to measure")
        try:
            tempfile.TemporaryDirectory(dir=folder).cleanup()
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            raise ConfigError(f"--path {folder}: {why}; name a folder on the disk to measure") from error


def _rates(options: argparse.Namespace, config: JsonObject) -> dict[str, float]:
    """Every rate that the options ask for but those of the SSDs, measured one after the other."""
    rates = copy_rates(options.size_mb << 20, options.rounds) | adam_rate(options.rounds) | norm_rate(options.rounds)
    rates |= product_rates(options.rounds) | process_rate()
    if accelerator() == "cpu":
        from ds_vertical.cli.bench.host_bench import event_s

        rates |= adam_share(options.rounds) | {"compute_latency_s": event_s(options.rounds)}
    return rates | (layer_seconds(options, config) if options.model else {})


def fio_ratios(rates: dict[str, float]) -> dict[str, float]:
    """Our rates over fio's, for those that fio has measured."""
    names = ("read", "write", "read_together", "write_together")
    measured = [name for name in names if rates.get(f"fio_{name}_bytes_per_s")]
    return {name: rates[f"ssd_{name}_bytes_per_s"] / rates[f"fio_{name}_bytes_per_s"] for name in measured}


def fio_line(rates: dict[str, float]) -> str:
    """Our rates over fio's in one line, or why there are none."""
    ratios = ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}" for name, ratio in fio_ratios(rates).items())
    return f"ours / fio: {ratios}" if ratios else fio.ABSENT


def _as_machine(rates: dict[str, float]) -> JsonObject:
    """The rates as `machine.Machine.from_dict` reads them."""
    known = {field.name for field in fields(Machine)}
    own: JsonObject = {key: value for key, value in rates.items() if key in known}
    one_memory = accelerator() == "cpu"
    return own | {"host_cores": len(os.sched_getaffinity(0)), "one_memory": one_memory, "adam_cores": 1 if one_memory else None}


def rates_table(rates: dict[str, float]) -> str:
    """One rate a line, in GB/s, million elements/s or milliseconds."""
    units = {
        "_bytes_per_s": ("GB/s", 1e-9),
        "_flops_per_s": ("Gflop/s", 1e-9),
        "_s_per_byte": ("s/GB", 1e9),
        "_elements_per_s": ("M elements/s", 1e-6),
        "_s": ("ms", 1e3),
        "_bytes": ("MB", 1e-6),
        "_share": ("of the cores", 1.0),
    }
    lines = []
    for key, value in rates.items():
        suffix = next(suffix for suffix in units if key.endswith(suffix))
        unit, scale = units[suffix]
        lines.append(f"{key.removesuffix(suffix).replace('_', ' '):24}{value * scale:10.3f} {unit}")
    return "\n".join(lines)


# ---- SSD


def ssd_rates(folder: Path, num_bytes: int, rounds: int, config: JsonObject, with_fio: bool = True) -> dict[str, float]:
    """Bytes/s past the page cache through the queues that training uses: each direction alone, and both together.

    Beside them what the transfers take from computation on the host, and what fio finds, where it is installed and asked for.
    Raises ConfigError for settings with which no queue can be made.
    """
    from ds_vertical.compat.stock_config import aio_settings

    aio = aio_settings(config)
    in_folder = tempfile.TemporaryDirectory(prefix="ds_vertical.limits.", dir=folder)
    with in_folder as scratch, _queues(config, num_bytes) as (queues, buffers):
        files = [Path(scratch, name) for name in ("read", "write")]
        rates, pieces = _own_rates(queues, buffers, files, rounds)
        if accelerator() == "cpu":
            rates["ssd_core_s_per_byte"] = _load(queues, pieces, files, rounds)
        return rates | (fio.fio_rates(Path(scratch), num_bytes, rounds, aio) if with_fio and fio.installed() else {})


def striped_rates(
    folders: Sequence[Path], shares: Sequence[float], num_bytes: int, rounds: int, config: JsonObject
) -> dict[str, float]:
    """Bytes/s of files of `num_bytes` that lie on several SSDs in these shares, as in training."""
    with contextlib.ExitStack() as stack:
        made = (tempfile.TemporaryDirectory(prefix="ds_vertical.limits.", dir=folder) for folder in folders)
        scratch = [Path(stack.enter_context(each)) for each in made]
        stripes.open_run(scratch, shares)
        stack.callback(stripes.close_run, scratch[0])
        queues, buffers = stack.enter_context(_queues(config, num_bytes))
        files = [scratch[0] / name for name in ("read", "write")]
        for file in files:
            stripes.spread_file(file, num_bytes)
        return _own_rates(queues, buffers, files, rounds)[0]


@contextlib.contextmanager
def _queues(config: JsonObject, num_bytes: int) -> Iterator[tuple[list[DiskQueue], list[torch.Tensor]]]:
    """Two queues with a DeepSpeed JSON's settings and a locked buffer for each. Raises ConfigError where none can be made."""
    from ds_vertical.compat import pinned_memory
    from ds_vertical.compat.ops import load
    from ds_vertical.compat.stock_config import aio_settings

    aio = aio_settings(config)
    try:
        queues = [load.new_disk_queue(aio) for _ in range(2)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"aio: no queue can be made of {aio} ({first_line(error)}); mend it in the JSON") from error
    buffers = [pinned_memory.lock_host_bytes(num_bytes) for _ in queues]
    try:
        for buffer in buffers:
            buffer.fill_(1)
        yield queues, buffers
    finally:
        for queue, buffer in zip(queues, buffers, strict=True):
            queue.close()
            pinned_memory.unlock_host_bytes(buffer)


def _own_rates(
    queues: Sequence[DiskQueue], buffers: Sequence[torch.Tensor], files: Sequence[Path], rounds: int
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Through two queues, one for each direction, with a whole buffer and a file of its own each. Beside the rates the parts
    of the buffers that take both directions equally long."""
    num_bytes = buffers[0].numel()
    transfer_s([queue.write for queue in queues], buffers, files, 1)
    read_s = transfer_s([queues[0].read], buffers[:1], files[:1], rounds)
    write_s = transfer_s([queues[1].write], buffers[1:], files[1:], rounds)
    rates = {"ssd_read_bytes_per_s": num_bytes / read_s, "ssd_write_bytes_per_s": num_bytes / write_s}
    # Shares of the file in proportion to the rates, so that both directions work to the end.
    fastest = max(rates.values())
    shares = [int(num_bytes * rate / fastest) // _ALIGNMENT * _ALIGNMENT for rate in rates.values()]
    pieces = [buffer[: max(_ALIGNMENT, share)] for buffer, share in zip(buffers, shares, strict=True)]
    together = transfer_s([queues[0].read, queues[1].write], pieces, files, rounds)
    for way, piece, alone in zip(("read", "write"), pieces, list(rates.values()), strict=True):
        rates[f"ssd_{way}_together_bytes_per_s"] = min(alone, piece.numel() / together)
    return rates, pieces


def _load(queues: Sequence[DiskQueue], pieces: Sequence[torch.Tensor], files: Sequence[Path], rounds: int) -> float:
    """Seconds of a core that a byte takes from what computes beside it; by an eighth of the pieces at a time."""
    shares = [max(_ALIGNMENT, piece.numel() // 8 // _ALIGNMENT * _ALIGNMENT) for piece in pieces]

    def transfer() -> int:
        issues = (queues[0].read, queues[1].write)
        works = zip(issues, pieces, shares, files, strict=True)
        flying = [issue(piece.data_ptr(), share, file) for issue, piece, share, file in works]
        for each in flying:
            each.wait()
        return sum(shares)

    return core_s_per_byte(transfer, len(os.sched_getaffinity(0)), _PAIRS * rounds)


# ---- memory, host cores, layers


def copy_rates(num_bytes: int, rounds: int) -> dict[str, float]:
    """Bytes/s of copies host to host, and to and from the device (page-locked) where it is not the host."""
    import torch

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source)
            _synchronize()

        return num_bytes / median_s(copy, rounds)

    host, other = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    rates = {"copy_host_bytes_per_s": rate(other, host)}
    if accelerator() != "cpu":
        host, device = host.pin_memory(), torch.ones(num_bytes, dtype=torch.uint8, device=accelerator())
        rates |= {"copy_in_bytes_per_s": rate(device, host), "copy_out_bytes_per_s": rate(host, device)}
    return rates


def adam_rate(rounds: int, numel: int = 1 << 23) -> dict[str, float]:
    """Elements/s of CPU Adam on fp32 state in memory, and of casting masters to bf16; bytes/s of the checksums.

    Adam and the cast run on the cores that training leaves for them: on one where it computes on the host, else on all but two;
    the checksums run on one.
    """
    import torch

    from ds_vertical.compat.ops import load
    from ds_vertical.io import host
    from ds_vertical.io.checksums import checksum

    everybody = torch.get_num_threads()
    torch.set_num_threads(1 if accelerator() == "cpu" else host.team_beside_device(1))
    kernel, kernel_id = load.free_adam(), 1 << 21
    kernel.create_adam(kernel_id, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    try:
        tensors = [torch.full((numel,), 0.5) for _ in range(4)]
        settings = (1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True)
        adam_s = median_s(lambda: kernel.adam_update(kernel_id, *settings, *tensors), rounds)
        target = torch.empty(numel, dtype=torch.bfloat16)
        cast_s = median_s(lambda: target.copy_(tensors[0]), rounds)
        rates = {"adam_elements_per_s": numel / adam_s, "cast_elements_per_s": numel / cast_s}
        data = tensors[0].numpy()
        return rates | {"checksum_bytes_per_s": data.nbytes / median_s(lambda: checksum(data), rounds)}
    finally:
        kernel.destroy_adam(kernel_id)
        torch.set_num_threads(everybody)


def adam_share(rounds: int) -> dict[str, float]:
    """The share of the cores that CPU Adam on one of them takes from a computation on all of them, see `host_bench`.

    It updates, casts and checksums pieces as large as a step's, each again only when it has left the caches.
    """
    import torch

    from ds_vertical.compat.ops import load
    from ds_vertical.io.checksums import checksum

    kernel, kernel_id = load.free_adam(), 1 << 22
    kernel.create_adam(kernel_id, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    pieces = [[torch.full((_PIECE,), 0.5) for _ in range(4)] for _ in range(_PIECES)]
    targets = [torch.empty(_PIECE, dtype=torch.bfloat16) for _ in pieces]
    turns = cycle(zip(pieces, targets, strict=True))

    def step() -> int:
        torch.set_num_threads(1)  # of the thread that calls
        (master, gradient, *moments), target = next(turns)
        kernel.adam_update(kernel_id, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, master, gradient, *moments)
        target.copy_(master)
        for written in (master, *moments, target.view(torch.int16)):
            checksum(written.numpy())
        return _PIECE

    everybody = torch.get_num_threads()
    try:
        return {"adam_core_share": core_share(step, _PAIRS * rounds)}
    finally:
        kernel.destroy_adam(kernel_id)
        torch.set_num_threads(everybody)


def norm_rate(rounds: int, numel: int = 1 << 22) -> dict[str, float]:
    """Elements/s of the norm that stock takes of an fp32 gradient on the device; each again only when no cache has it."""
    import torch

    from ds_vertical.compat.gradient_norm import NormMemory

    gradients = cycle([torch.ones(numel, device=accelerator()) for _ in range(_PIECES)])
    memory = NormMemory()

    def norm() -> None:
        gradient = next(gradients)
        memory.norm(gradient) if gradient.device.type == "cpu" else gradient.double().norm(2)
        _synchronize()

    return {"norm_elements_per_s": numel / median_s(norm, rounds)}


def product_rates(rounds: int, tokens: int = 128, width: int = 1024) -> dict[str, float]:
    """Floating-point operations per second of activations times weights, by dtype; sizes that fill a GPU on one."""
    import torch

    device = accelerator()
    tokens, width = (tokens, width) if device == "cpu" else (4096, 8192)
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        inputs = torch.ones(tokens, width, dtype=dtype, device=device)
        weights = torch.ones(width, width, dtype=dtype, device=device)

        def product(inputs: torch.Tensor = inputs, weights: torch.Tensor = weights) -> None:
            torch.nn.functional.linear(inputs, weights)
            _synchronize()

        rates[f"{name}_flops_per_s"] = 2 * tokens * width * width / median_s(product, rounds)
    return rates


def capacity(folder: Path) -> dict[str, int | None]:
    """Bytes that training may take in each tier, once this process has ended; the device's None where it is the host's."""
    import torch

    from ds_vertical.io import streams

    device = None if accelerator() == "cpu" else streams.module_of(torch.device(accelerator())).mem_get_info()[0]
    disk = os.statvfs(folder)
    return {"device_bytes": device, "host_bytes": hostmemory.room_bytes(), "ssd_bytes": disk.f_bavail * disk.f_frsize}


def layer_seconds(options: argparse.Namespace, config: JsonObject) -> dict[str, float]:
    """Seconds of a model's pieces for one micro-batch, see `block_timer`.

    They are timed with DeepSpeed's linear where ZeRO stage 3 of the JSON puts it in the place of torch's.
    """
    from ds_vertical.cli.bench.block_timer import BlockBatch, BlockTimer

    zero = config.get("zero_optimization") or {}
    zero_linear = zero.get("stage") == 3 and zero.get("memory_efficient_linear", True)
    batch = BlockBatch(options.tokens, options.sequences, options.dtype)
    return BlockTimer(options.model, batch, accelerator(), zero_linear).rates(options.rounds)


def _synchronize() -> None:
    from ds_vertical.compat.accelerator import synchronize

    synchronize()


if __name__ == "__main__":
    sys.exit(main())
