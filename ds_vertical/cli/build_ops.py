"""`ds-vertical build-ops`: compile the ops ahead of the first run."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ds_vertical.compat.ops import cache, load, side_by_side


def main(argv: list[str] | None = None) -> int:
    """`ds-vertical build-ops`: compile what is missing; DeepSpeed and torch are imported only where something is."""
    options = _parse(argv)
    with _terminations_raised():
        return _build(options)


@contextlib.contextmanager
def _terminations_raised() -> Iterator[None]:
    """SIGTERM ends the compilers, too, and becomes SystemExit, so that locks are let go of."""

    def end(number: int, _: object) -> None:
        for process in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _below(process: int) -> list[int]:
    """Ids of the processes that a process has started, of those that these have, and so on."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended since
            for child in path.read_text().split():
                found += [int(child), *_below(int(child))]
    return found


def _build(options: argparse.Namespace) -> int:
    start = time.monotonic()
    cache.set_environment()
    needed = load.needed_ops()
    if options.only:
        cache.join_turn(options.within)
        cache.activate()
        return side_by_side.STAND_IN if _is_stand_in(_load(options.only)) else 0
    for name in needed if options.force else ():
        cache.forget(name)
    own = cache.is_own_folder()
    missing = [name for name in needed if not own or cache.ready_library(name) is None]
    slow, failed = _compile(missing, len(needed), own) if missing else ([], [])
    if failed:
        print(f"{', '.join(failed)}: not compiled; the compiler's words are above", file=sys.stderr)
    if slow:
        print(f"{', '.join(slow)}: not compiled, slower stand-ins work in their place; see above", file=sys.stderr)
    if failed or slow:
        return 1
    where = cache.cache_folder() if own else Path(os.environ["TORCH_EXTENSIONS_DIR"])
    print(f"the ops are ready in {where} ({time.monotonic() - start:.1f} s)")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Compile the ops into this user's cache, once per machine."
    parser = argparse.ArgumentParser(prog="ds-vertical build-ops", description=description)
    parser.add_argument("--force", action="store_true", help="throw this machine's ops away and compile them again")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # of a process that another one has started: see `side_by_side`
    parser.add_argument("--within", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _compile(missing: Sequence[str], num_needed: int, own: bool) -> tuple[list[str], list[str]]:
    """Compile the ops of these names. Returns those that have a slower stand-in, and those that nothing stands in for. `own`:
    into this package's cache. Elsewhere, and where few files may be compiled at a time, here and one after the other: then
    raises what DeepSpeed raises for one that nothing stands in for."""
    cache.say(f"{len(missing)} of {num_needed} ops are to be compiled: {', '.join(missing)}")
    cache.activate()
    builders = {name: load.needed_ops()[name]() for name in missing}
    for builder in builders.values():
        with cache.architectures_readable(builder):  # says once what is left out of them, or refuses them
            pass
    jobs = side_by_side.files_at_a_time() if own else 1
    first = [name for name in missing if name == load.LINKED_BY_OTHERS]
    others = [name for name in missing if name not in first]
    if jobs == 1 or len(others) <= 1:
        return [name for name in missing if _is_stand_in(_load(name))], []
    for name in first:
        _load(name)
    return side_by_side.compile_side_by_side({name: load.num_files(builders[name]) for name in others}, jobs, _command)


def _command(name: str, pid: int) -> list[str]:
    return [sys.executable, "-m", "ds_vertical.cli.build_ops", "--only", name, "--within", str(pid)]


def _with_stand_in() -> dict[str, Callable[[], object]]:
    return {
        load.FREE_ADAM.build_name: load.free_adam,
        load.IDENTITY_NODE.build_name: load.identity_node,
        load.HOST_STATE.build_name: load.state_reader,
        load.BLOCK_QUANTIZE.build_name: load.block_quantizer,
        load.MASTER_HALVES.build_name: load.master_halves,
    }


def _load(name: str) -> object:
    return _with_stand_in().get(name, lambda: load.needed_ops()[name]().load(verbose=False))()


def _is_stand_in(loaded: object) -> bool:
    return loaded is None or isinstance(loaded, load.PiecewiseAdam)


if __name__ == "__main__":
    sys.exit(main())
