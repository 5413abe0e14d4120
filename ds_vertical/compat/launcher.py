"""DeepSpeed's launcher, in this process: it starts the training processes and waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.launcher import runner


def launch_module(module: str, arguments: Sequence[str]) -> None:
    """Launch `python -m module SCRIPT ...` where `arguments`, the launcher's own words, say `SCRIPT ...`; `-m SCRIPT ...` where
    they hold `--module`. Raises SystemExit where the launcher does: for bad options, and with a training process's status."""
    parsed = runner.parse_args(list(arguments))
    num_words = 1 + len(parsed.user_args)
    options, words = list(arguments[:-num_words]), list(arguments[-num_words:])
    if parsed.module:
        words.insert(0, "-m")
    else:
        options.append("--module")
    runner.main([*options, module, *words])
