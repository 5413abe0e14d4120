"""`ds-vertical clean`: lists the folders of runs below an nvme_path, and removes those that dead runs left there."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ds_vertical import errors
from ds_vertical.cli.common import gib
from ds_vertical.cli.doctor.check import Target
from ds_vertical.engine.checkpoint.parts import FoundParts, find_parts, remove_parts
from ds_vertical.io.files import disk_bytes
from ds_vertical.io.runs import run_lock
from ds_vertical.io.runs.run_dirs import FoundRun, examine, find_runs, remove_run

_NOT_REMOVED: Final = 1
_STOCK: Final = "zero_stage_3"  # DeepSpeed's folder below an nvme_path
_EPILOG: Final = """examples:
  ds-vertical clean --path /mnt/nvme              # what is there
  ds-vertical clean --path /mnt/nvme --remove     # delete what is stale
  ds-vertical clean --path /mnt/nvme --remove 20260131-235959-node7-1f2e3d4c

A run's folder is live while one of its owners is, and stale once all are known to be gone. It is unknown where that cannot
be told here: its owners are, or were, on another host. An unknown one is removed only by its name, a live one never. A folder
in which no lock says that a run made it under its name is never removed, whatever it is called. A run on several SSDs has a
folder on each; those on SSDs that were not named are listed, too. Parts of a checkpoint lie on another SSD than its folder: an
orphan's checkpoint is not where it was; it is removed only by its name. What runs of stock DeepSpeed have left is listed and
never removed: they take no lock.

Exit status: 0; 1 where something that was to be removed could not be; 2 for bad usage."""


@dataclass
class ListedRun:
    """A run's folder as listed. `num_bytes`: what deleting it frees; `result`: what came of that, empty where not asked."""

    run: FoundRun
    num_bytes: int
    result: str = ""  # "removed", "gone" (meanwhile, without us), "kept" (it is live, or may be), "failed"
    error: str = ""

    @property
    def name(self) -> str:
        """The run's id, which is its folder's name."""
        return self.run.folder.name

    @property
    def word(self) -> str:
        """What the line says of the run, and under which the last line counts it: what came of its removal, else its state."""
        return self.result or self.run.state


@dataclass(frozen=True)
class ListedParts:
    """Parts of a checkpoint (`engine.checkpoint.parts`) as listed; `result` and `error` as in ListedRun."""

    found: FoundParts
    num_bytes: int
    result: str = ""
    error: str = ""

    @classmethod
    def of(cls, found: FoundParts, names: Sequence[str]) -> ListedParts:
        """After their removal, where they are among `names` and no checkpoint needs them."""
        num_bytes = disk_bytes(found.home)
        if found.home.name not in names:
            return cls(found, num_bytes)
        if found.is_used:
            return cls(found, num_bytes, "kept")
        try:
            remove_parts(found.home)
        except OSError as error:
            return cls(found, num_bytes, "failed", f"{error.strerror or error}")
        return cls(found, num_bytes, "removed")


def main(argv: Sequence[str] | None = None) -> int:
    """Lists, and removes where asked, a line each as it comes, or one JSON object. Returns 1 where a removal failed, else 0."""
    parser = _parser()
    options = parser.parse_args(argv)
    roots = _roots(options, parser)
    entries: list[ListedRun] = []
    for root in roots:
        if not options.json:
            print(f"{root}:" if root.is_dir() else f"{root}: no such folder: no run has been there", flush=True)
        for entry in _walk(root, options.remove, parser):
            entries.append(entry)
            if not options.json:
                print("\n".join(_lines(entry)), flush=True)
    for entry in _on_other_ssds(entries, options.remove):
        entries.append(entry)
        if not options.json:
            print("\n".join([f"{entry.run.folder.parent}:", *_lines(entry)]), flush=True)
    listed = [ListedParts.of(found, options.remove or []) for root in roots if root.is_dir() for found in find_parts(root)]
    if listed and not options.json:
        print("\n".join(line for each in listed for line in _parts_lines(each)))
    stock = {root / _STOCK: disk_bytes(root / _STOCK) for root in roots if (root / _STOCK).is_dir()}
    if stock and not options.json:
        print("\n".join(line for folder, num_bytes in stock.items() for line in _stock_lines(folder, num_bytes)))
    names = {entry.name for entry in entries} | {each.found.home.name for each in listed}
    missing = [name for name in options.remove or [] if name not in names]
    freed = sum(entry.num_bytes for entry in entries if entry.result == "removed")
    counts = Counter(entry.word for entry in entries)
    if options.json:
        runs = [_described(entry) for entry in entries]
        told = {"counts": counts, "freed_bytes": freed, "not_found": missing, "runs": runs}
        left = [{"folder": str(folder), "bytes": num_bytes} for folder, num_bytes in stock.items()]
        print(json.dumps(told | {"parts": [_parts_entry(each) for each in listed], "stock": left}, indent=2))
    else:
        print("\n".join(_summary(entries, counts, freed, missing, options.remove is not None)))
    refused = [entry for entry in entries if entry.result == "failed" or (entry.result == "kept" and options.remove)]
    refused_parts = [each for each in listed if each.result in ("failed", "kept")]
    return _NOT_REMOVED if refused or refused_parts or missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-vertical clean", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, metavar="NVME_PATH", help="folder on the SSD (default: those in the JSON)")
    parser.add_argument("--config", type=Path, metavar="JSON", help="DeepSpeed JSON whose nvme_path is meant")
    parser.add_argument(
        "--remove", nargs="*", metavar="RUN_ID", help="delete the stale folders; with names: these, unknown ones included"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _roots(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Path, ...]:
    """The folders to look into; exits with a usage error where that is not clear."""
    from ds_vertical.config.file import read_config
    from ds_vertical.errors import ConfigError

    if options.path is None and options.config is None:
        parser.error("which folder? write --path /mnt/nvme, or --config ds_config.json")
    if options.config is not None:
        if not options.config.is_file():
            parser.error(f"--config {options.config}: no such file; name a DeepSpeed JSON")
        try:
            read_config(options.config)
        except ConfigError as error:
            parser.error(f"--config {options.config}: {error}")
    if options.path is not None and not options.path.is_dir():
        parser.error(f"--path {options.path}: no such folder; write the nvme_path of the runs")
    roots = tuple(path.resolve() for path in Target(options.config, options.path).nvme_paths)
    for root in roots:
        if (above := run_lock.owner_above(root)) is not None and above[0] == root:
            parser.error(f"{root}: the folder of a run; name the one above it: --path {root.parent}")
    return tuple(dict.fromkeys(roots))


def _walk(root: Path, names: Sequence[str] | None, parser: argparse.ArgumentParser) -> Iterator[ListedRun]:
    """The runs below one folder, each after what was to be done with it. `names`: None: nothing, empty: all that are stale."""
    if not root.is_dir():
        return
    try:
        found = find_runs(root)
    except OSError as error:
        parser.error(f"{root}: {error.strerror}; name a folder that can be read")
    for run in found:
        yield _treated(run, names)


def _treated(run: FoundRun, names: Sequence[str] | None) -> ListedRun:
    entry = ListedRun(run, disk_bytes(run.folder))
    named = run.folder.name in (names or ())
    if named or (names == [] and run.state == "stale"):
        _remove(entry, named)
    return entry


def _on_other_ssds(entries: Sequence[ListedRun], names: Sequence[str] | None) -> Iterator[ListedRun]:
    """Of runs on several SSDs that are listed, the folders on SSDs that were not named."""
    seen = {entry.run.folder for entry in entries}
    for folder in dict.fromkeys(folder for entry in entries for folder in entry.run.beside if folder not in seen):
        run = examine(folder)
        if run is not None:
            yield _treated(run, names)


def _remove(entry: ListedRun, named: bool) -> None:
    if entry.run.fault:
        entry.result = "failed"  # the line about the folder says why
        return
    try:
        entry.result = remove_run(entry.run.folder, named)
    except (OSError, errors.StorageError) as error:
        entry.result, entry.error = "failed", str(error)
    if entry.result == "kept":
        entry.run = examine(entry.run.folder) or entry.run


def _owner(run: FoundRun) -> str:
    """Whose the folder is, and how that is known, in words."""
    if run.fault:
        return f"a run {run.fault}"
    if not run.is_ours:
        return "no lock in it says that a run made it under this name"
    first = str(run.owners[0] or "a process that did not write its name")
    others = f" and {len(run.owners) - 1} more" if len(run.owners) > 1 else ""
    if run.state == "live":
        return f"{first}{others}"
    return f"{first}{others}; " + ("gone" if run.state == "stale" else "on another host, so nothing can be told of it here")


def _lines(entry: ListedRun) -> Iterator[str]:
    yield f"  {entry.word:8}{gib(entry.num_bytes):>10}  {entry.name}  {_owner(entry.run)}"
    folder = entry.run.folder
    if not entry.run.is_ours:
        yield f"{'':22}-> never removed here: rm -r {folder}  # once you know what it is"
    elif entry.result == "kept":
        yield f"{'':22}-> not removed: end the run first"
    elif entry.error:
        yield from (f"{'':22}-> {line}" for line in entry.error.splitlines())
    elif entry.word == "unknown" and not entry.run.fault:
        yield f"{'':22}-> ds-vertical clean --path {folder.parent} --remove {folder.name}  # once you know that it is over"


def _parts_lines(listed: ListedParts) -> Iterator[str]:
    found = listed.found
    word = listed.result or ("in use" if found.is_used else "orphan")
    whose = f"parts of the checkpoint {found.checkpoint}" + ("" if found.is_used else ", which is not there or has others")
    yield f"  {word:8}{gib(listed.num_bytes):>10}  {found.home.name}  {whose}"
    if listed.error:
        yield f"{'':22}-> {listed.error}"
    elif listed.result == "kept":
        yield f"{'':22}-> not removed: delete the checkpoint first"
    elif not found.is_used and not listed.result:
        path = found.home.parent.parent
        yield f"{'':22}-> ds-vertical clean --path {path} --remove {found.home.name}  # once you know that it was deleted"


def _stock_lines(folder: Path, num_bytes: int) -> Iterator[str]:
    yield f"  {'stock':8}{gib(num_bytes):>10}  {folder.name}  of runs of stock DeepSpeed, which take no lock: one may be alive"
    yield f"{'':22}-> never removed here: rm -r {folder}  # once you know that none is"


def _parts_entry(listed: ListedParts) -> dict[str, object]:
    found = listed.found
    told = {"name": found.home.name, "folder": str(found.home), "checkpoint": str(found.checkpoint), "in_use": found.is_used}
    return told | {"bytes": listed.num_bytes, "result": listed.result or None, "error": listed.error or None}


def _summary(entries: list[ListedRun], counts: Counter[str], freed: int, missing: list[str], asked: bool) -> Iterator[str]:
    stale = sum(entry.num_bytes for entry in entries if entry.word == "stale")
    notes = {"stale": f" ({gib(stale)})", "removed": f" ({gib(freed)})"}
    told = [f"{counts[word]} {word}{notes.get(word, '')}" for word in sorted(counts)]
    yield ", ".join(told) or "no run's folder"
    if counts["stale"] and not asked:
        yield "add --remove to delete what is stale"
    for name in missing:
        yield f"{name}: no folder of a run has that name"


def _described(entry: ListedRun) -> dict[str, object]:
    """JSON form; `since`: when the first of its owners took its lock."""
    run = entry.run
    owners = [
        {"state": state, **(run_lock.plain_entry(owner) if owner else {})}
        for state, group in (("live", run.live), ("unknown", run.elsewhere), ("gone", run.gone))
        for owner in group
    ]
    since = min((owner.since for owner in run.owners if owner is not None), default=None)
    told = {"run_id": entry.name, "folder": str(run.folder), "state": run.state, "why": _owner(run), "since": since}
    return told | {"bytes": entry.num_bytes, "owners": owners, "result": entry.result or None, "error": entry.error or None}


if __name__ == "__main__":
    sys.exit(main())
