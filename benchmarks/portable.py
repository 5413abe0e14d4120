"""Results without a path of the machine that measured them: every folder in a record is one of this repository, or a bare name.

    python benchmarks/portable.py RESULT TARGET

records one JSON so. The scripts here record through `write`. `runs` is the folder in which the measured runs left their logs;
wherever that was, the record names it `runs/<kind>`, which is where the script puts it by default.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SSD = "/tmp/ds_vertical"  # the nvme_path that all files in configs/ have: part of a configuration, not of one machine
_OF_A_MACHINE = re.compile(r"(?<![\w.~/-])/(?:work|tmp|root|home)/[^\s\"'`]*")


def machine_paths(text: str) -> list[str]:
    """Absolute paths in `text` that only one machine has."""
    return [path for path in _OF_A_MACHINE.findall(text) if path != SSD]


def without_machine(text: str, runs: Path, kind: str) -> str:
    """`text` with `runs` as `runs/<kind>`, this repository's files relative to it, a run's own folder on the SSD as the SSD's
    path, and of any other path its last name."""
    for folder in (runs.resolve(), runs.absolute()):
        text = text.replace(str(folder), f"runs/{kind}")
    text = text.replace(f"{ROOT}/", "")
    text = re.sub(rf"{SSD}/[^\s\"'`]*", SSD, text)
    return _OF_A_MACHINE.sub(lambda found: found[0] if found[0] == SSD else f".../{Path(found[0]).name}", text)


def write(target: Path, content: Any, runs: Path, kind: str) -> None:
    """Record `content` as JSON at `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(without_machine(json.dumps(content, indent=2), runs, kind) + "\n")


if __name__ == "__main__":
    source, recorded = map(Path, sys.argv[1:])
    write(recorded, json.loads(source.read_text()), source.parent, recorded.parent.name)
