"""Cuts `ds_vertical.patch()` at every boundary, each time in a fork, then calls it again and looks at what is replaced.

Prints the number of cuts and of those that were reached, then a line for each fault.
"""

from __future__ import annotations

import os
import sys
import traceback
from ast import literal_eval

import deepspeed
from cutting import CtrlC, Site, chosen, recorded
from torch.utils.data import DataLoader

import ds_vertical
from ds_vertical.compat import entry_points
from ds_vertical.engine.integrations import after_import

STOCK, INIT, ITERATE = deepspeed.initialize, deepspeed.zero.Init.__init__, DataLoader.__iter__


def patch_twice(cut: CtrlC) -> bool:
    """Cut it, and call it again; returns whether the cut was reached."""
    try:
        with cut:
            ds_vertical.patch()
        assert not cut.done, "the interrupt was lost"
    except KeyboardInterrupt:
        pass
    ds_vertical.patch()
    replaced, init, iterate = deepspeed.initialize, deepspeed.zero.Init.__init__, DataLoader.__iter__
    assert entry_points._stock == [STOCK], "deepspeed.initialize"
    assert replaced is not STOCK and replaced.__wrapped__ is STOCK, "deepspeed.initialize"  # type: ignore[attr-defined]
    assert init is not INIT and init.__wrapped__ is INIT, "deepspeed.zero.Init"  # type: ignore[attr-defined]
    assert iterate is not ITERATE and iterate.__wrapped__ is ITERATE, "torch's loaders"  # type: ignore[attr-defined]
    waiting = {name: len(actions) for name, actions in after_import._waiting.items()}
    assert waiting == {"transformers.trainer": 1, "accelerate.data_loader": 1}, waiting
    return bool(cut.done)


def in_a_fork(cut: CtrlC) -> int:
    """0: not reached; 1: right; 2: not right, and the fork has said why."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        code = int(patch_twice(cut))
    except BaseException:
        print(cut, traceback.format_exc(), flush=True)
        code = 2
    os._exit(code)


def all_cuts() -> list[CtrlC]:
    """Of a call that nobody cuts, in a fork."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        with recorded() as found:
            ds_vertical.patch()
        lines = [f"{(*cut.site, cut.number)!r}\n" for cut in chosen(found, None, CtrlC)]
        os.write(writer, "".join(lines).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as sent:
        told = [literal_eval(line) for line in sent]
    os.wait()
    return [CtrlC(Site(*site), number) for *site, number in told]


def main() -> int:
    cuts = all_cuts()
    codes = [in_a_fork(cut) for cut in cuts]
    print(f"{len(cuts)} cuts, {len(codes) - codes.count(0)} reached, {codes.count(2)} wrong")
    return int(2 in codes or len(cuts) < 30)


if __name__ == "__main__":
    sys.exit(main())
