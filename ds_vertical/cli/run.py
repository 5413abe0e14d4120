"""`ds-vertical run`: DeepSpeed's launcher, with the script run by `ds_vertical.run`."""

from __future__ import annotations

from collections.abc import Sequence

_HELP = """usage: ds-vertical run [options of the deepspeed launcher] SCRIPT [ARGS]

Launches SCRIPT as `deepspeed` does, with the "vertical_schedule" section of its DeepSpeed JSON in force: loops of Hugging
Face's Trainer, of Accelerate and of DeepSpeed's three calls train layer-major as they are.

example:
  ds-vertical run --num_gpus 1 train.py --deepspeed ds_config.json

The same as `deepspeed [options] --module ds_vertical.run SCRIPT [ARGS]`; `deepspeed --help` lists the options. With
--module, SCRIPT is the name of a module.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the launcher in this process. Returns 0; raises SystemExit with the status of a training process that failed."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if argv else 2
    from ds_vertical.compat.launcher import launch_module

    launch_module("ds_vertical.run", argv)
    return 0
