"""Runs a training script as it is, with the section in its DeepSpeed JSON in force.

`python -m ds_vertical.run train.py ...`, `deepspeed --module ds_vertical.run train.py ...`,
`torchrun -m ds_vertical.run train.py ...` or `accelerate launch -m ds_vertical.run train.py ...`; `-m NAME` in the place of
`train.py` runs a module. The script sees what it sees in a plain launch: `sys.argv`, `sys.path`, `__main__`, its variables of
the environment, tracebacks and exit codes.
"""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from ds_vertical.engine.integrations.after_import import when_imported
from ds_vertical.engine.integrations.made_trainers import Trainer, bridge_trainers

_USAGE = "usage: python -m ds_vertical.run SCRIPT.py [arguments of SCRIPT.py]    (or -m MODULE [arguments])"
_RANK = "--local_rank"
_OURS = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Run the script that the command line names; returns where the script does, and raises what it raises."""
    arguments = sys.argv[1:]
    rank = [arguments.pop(0)] if arguments and arguments[0].split("=")[0] == _RANK else []
    is_module = bool(arguments) and arguments[0] in ("-m", "--module")
    if is_module:
        arguments.pop(0)
    if not arguments or arguments[0].startswith("-"):
        _end_for_usage(_USAGE)
    name, *rest = arguments
    if not is_module and not Path(name).is_file():
        _end_for_usage(f"ds_vertical.run: {name}: no such script; write the path of a Python file\n{_USAGE}")
    when_imported("deepspeed", _patch)
    when_imported("transformers.trainer", lambda: bridge_trainers(_bridge))  # its __init__ may be first to import deepspeed
    when_imported("accelerate.data_loader", lambda: None)  # known from its beginning, where it imports deepspeed half-way
    sys.excepthook = _show_error
    sys.argv = [name, *rank, *rest]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(name).resolve().parent)
        _run_script(Path(name).absolute())
    if "deepspeed" not in sys.modules:
        print(f"ds_vertical.run: {name} has ended and has not used DeepSpeed: nothing was trained layer-major", file=sys.stderr)


def _run_script(path: Path) -> None:
    """As Python runs it: `__main__` is the script's until the process ends, for what runs at exit, too."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(path)
    module.__loader__ = SourceFileLoader("__main__", str(path))
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, vars(module))


def _end_for_usage(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(2)


def _patch() -> None:
    from ds_vertical.engine.integrations.patch import patch

    patch()


def _bridge(made: Trainer) -> None:
    from ds_vertical.engine.integrations.trainer import bridge

    bridge(made)


def _show_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As Python does, without the frames between this file and the script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OURS:
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    main()
