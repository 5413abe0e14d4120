"""Which hosts see one `save_dir`, and whether all hosts hold the same checkpoint.

All ranks write into one folder, which rank 0 makes and puts in place, unless the JSON says `"checkpoint":
{"use_node_local_storage": true}`. Then each host may have a folder of its own under the path: a place. The first rank of each
place makes the tag's folder there and puts it in place.

[Note: places] Places are found by what ranks see, not by names: the first rank of each host writes a file of a random name, and
all ranks look for all of these. So hosts that share the folder are one place, whatever the JSON says.

[Note: a save that ends half-way] All places put the new folder in place, then all delete the old one, then all write `latest`.
A save that dies among the first leaves a tag whose folder is old on some hosts and new on others. Both are whole on all hosts,
one under the tag's name and one beside it. The next load or save puts the old one back on all hosts. A save that dies among the
last leaves files `latest` that differ; both tags are whole on all hosts, and a load takes the older one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import leftovers, manifest
from ds_vertical.engine.checkpoint.tag_dir import PLACED, Found, TagFolder, check_placed, found_saves, make_folder
from ds_vertical.errors import CheckpointError
from ds_vertical.io.runs.this_host import host_id

KEY = "checkpoint.use_node_local_storage"
_BY_JSON = 'or write "checkpoint": {"use_node_local_storage": true} into the JSON, for a folder on each host'
_NEVER = 'or pass save_strategy="no" where no checkpoint is wanted'
# the Trainer's ranks go separate ways where weights are gathered: those of other hosts get none, and save a checkpoint instead
_BY_TRAINER = (
    'or pass save_on_each_node=True to TrainingArguments, with "stage3_gather_16bit_weights_on_model_save": false in the JSON,'
    f" for a folder on each host; {_NEVER}"
)
_SHARE = "All hosts need one folder for a checkpoint; write a path on a file system that they share, such as NFS or Lustre, %s"
NUM_LOOKS: Final = 60  # for what a rank of another host has made: an NFS client may take a folder as absent for a minute
BETWEEN_LOOKS_S: Final = 1.0


class Place(NamedTuple):
    """A folder, with the ranks that see it and the name of the first one's host."""

    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """All places under one path; `rank`: this process's number."""

    every: tuple[Place, ...]
    rank: int

    @property
    def are_several(self) -> bool:
        """Whether hosts have folders of their own."""
        return len(self.every) > 1

    @property
    def own(self) -> Place:
        """That of this rank."""
        return next(place for place in self.every if self.rank in place.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one of its place, which makes what all ranks of it need."""
        return self.own.ranks[0] == self.rank


# ---- ahead of a save


def check_all_see(path: Path, save_dir: Path, what: str, made_at: Place, remedy: str = _BY_JSON) -> None:
    """Let all ranks look for the new folder or file that the first rank of `made_at` has just made in `save_dir`; where ranks
    are on several hosts and one does not see it, all look again, for up to a minute. `what`: as for `find_places`; `remedy`:
    what the user may write in place of a shared path, for the message. Collective. Raises CheckpointError where a rank does not
    see it, OtherRankError, OSError."""
    is_on_one_host = ranks.ranks_on_this_host() == ranks.world_size()
    for look in range(0 if is_on_one_host else NUM_LOOKS):
        with ranks.all_or_none(what):
            is_seen = path.exists()
        if ranks.is_true_on_all_ranks(is_seen):
            return
        if look == 0:
            accelerator.log(
                f"ds_vertical: {save_dir}: not every host sees what rank {made_at.ranks[0]} on host {made_at.host} has just"
                f" written there; all ranks look again for up to {NUM_LOOKS * BETWEEN_LOOKS_S:.0f} s"
            )
        time.sleep(BETWEEN_LOOKS_S)  # on all ranks, and not in a collective, which Ctrl-C would not end
    with ranks.all_or_none(what):
        _check_seen(path, save_dir, made_at, remedy)


def _check_seen(path: Path, save_dir: Path, made_at: Place, remedy: str = _BY_JSON) -> None:
    if not path.exists():
        raise CheckpointError(
            f"{save_dir}: host {socket.gethostname()} does not see what rank {made_at.ranks[0]} on host {made_at.host} has just"
            f" written there. {_SHARE % remedy}"
        )


def check_at_start(save_dir: Path, node_local: bool) -> None:
    """Refuse an `on_signal.save_dir` whose files of others a save would refuse, or which hosts do not share; see
    `check_shared`. Collective. Raises CheckpointError, StorageError, OtherRankError, OSError."""
    what = "vertical_schedule.on_signal.save_dir"
    with ranks.all_or_none(what):
        check_placed(save_dir, PLACED)
    check_shared(save_dir, node_local, what)


def check_output_dir(output_dir: Path, node_local: bool, may_be_apart: bool) -> None:
    """As `check_shared`, for the folder in which a Trainer makes one for each checkpoint. `may_be_apart`: whether it can save
    to a folder on each host. Collective."""
    check_shared(output_dir, node_local, "TrainingArguments.output_dir", _BY_TRAINER if may_be_apart else _NEVER)


def check_shared(folder: Path, node_local: bool, what: str, remedy: str = _BY_JSON) -> None:
    """Where ranks are on several hosts, let all of them look for a file that rank 0 writes in a folder and removes again; with
    `node_local`, find the places. The folder is made then where there is none. `what`: as for `find_places`; `remedy`: as
    `check_all_see` has it. Collective. Raises CheckpointError, OtherRankError, OSError."""
    if ranks.ranks_on_this_host() == ranks.world_size():
        return
    if node_local:
        find_places(folder, what)
        return
    token, host = ranks.all_gathered((secrets.token_hex(8), socket.gethostname()))[0]
    path, is_first = folder / f".ds_vertical.{token}", ranks.rank() == 0
    try:
        with ranks.all_or_none(what):
            if is_first:
                make_folder(folder)
                path.touch()
        check_all_see(path, folder, what, Place(host, (0,)), remedy)
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                path.unlink()


def find_places(save_dir: Path, what: str) -> Places:
    """Find the places, see [Note: places]; folders that are not there are made. `what`: for the message of an error on another
    rank. Collective. Raises CheckpointError, OtherRankError, OSError."""
    told = ranks.all_gathered((secrets.token_hex(8), host_id(), socket.gethostname()))
    ids, own = [each[1] for each in told], ranks.rank()
    firsts = [ids.index(host) for host in dict.fromkeys(ids)]

    def token_of(first: int) -> Path:
        return save_dir / f".ds_vertical.{told[0][0]}.{first}"

    try:
        with ranks.all_or_none(what):
            if own in firsts:
                make_folder(save_dir)
                token_of(own).touch()
        with ranks.all_or_none(what):
            seen = [first for first in firsts if token_of(first).exists()]
            first = ids.index(ids[own])
            if first not in seen:
                _check_seen(token_of(first), save_dir, Place(told[first][2], (first,)))
        leads = ranks.all_gathered(min(seen))
    finally:
        if own in firsts:
            with contextlib.suppress(OSError):
                token_of(own).unlink()
    every = (tuple(rank for rank, lead in enumerate(leads) if lead == first) for first in sorted(set(leads)))
    return Places(tuple(Place(told[group[0]][2], group) for group in every), own)


# ---- ahead of a load


@dataclass(frozen=True)
class Held:
    """What one rank's host holds of a tag. `save`: which save the tag's folder is of (None: there is none). `there`: the
    tag's folder, and what saves that ended half-way have left beside it. `lacks`: this rank's missing files. `saved_on`: by
    rank, the host that has saved its files, where that is written. `complete`: all complete tags on the host. `under_way`: some
    process is saving to the tag."""

    host: str
    boot: str
    save: int | None
    there: tuple[Found, ...]
    lacks: tuple[str, ...]
    saved_on: dict[int, str]
    complete: tuple[str, ...]
    under_way: bool


def agreed_latest(load_dir: Path, own: str | None) -> str | None:
    """The tag that `latest` names on all hosts; `own`: on this one (None: there is no such file). Where hosts differ, as behind
    a save that died among the writes of `latest`, the oldest of the tags that are named, if all hosts have all of these.
    Collective. Raises CheckpointError otherwise, OSError, OtherRankError."""
    with ranks.all_or_none("load_checkpoint"):
        complete = tuple(manifest.complete_tags(load_dir))
    told = ranks.all_gathered((own, host_id(), socket.gethostname(), complete))
    named: dict[str | None, list[int]] = {}
    for rank, (tag, *_) in enumerate(told):
        named.setdefault(tag, []).append(rank)
    if len(named) == 1 or len({host for _, host, *_ in told}) == 1:
        return told[0][0]
    names = [each[2] for each in told]
    shown = "; ".join(f"{_where(names, found)}: {'no such file' if t is None else t}" for t, found in named.items())
    tags = {tag for tag in named if tag is not None}
    if all(tags <= set(each[3]) for each in told):
        oldest = max(tags, key=told[0][3].index)
        accelerator.log(
            f"ds_vertical: warning: {load_dir / manifest.LATEST}: names different tags on the hosts: {shown}. A save has ended"
            f" half-way; {oldest} is loaded, the oldest of them, which all hosts have"
        )
        return oldest
    raise CheckpointError(
        f"{load_dir / manifest.LATEST}: names different tags on the hosts: {shown}. Give a tag that all hosts have"
        f" ({_common(each[3] for each in told)}), or write it into that file on each host"
    )


def settle(load_dir: Path, tag: str) -> None:
    """Where a save has died half-way, put the old folder back, see [Note: a save that ends half-way]. Then check that all hosts
    hold the same save of the tag, each with its ranks' files. Collective; does nothing where all ranks are on one host.

    Raises CheckpointError that names hosts, ranks and files, on all ranks, where they do not; OSError, StorageError,
    OtherRankError.
    """
    if ranks.ranks_on_this_host() == ranks.world_size():
        return
    told = _mended(load_dir, tag, "load_checkpoint")
    saves = {each.save for each in told}
    if saves == {None}:
        return  # no checkpoint of ours; the load says so
    names = [each.host for each in told]
    if len(saves) > 1 and (saving := [rank for rank, each in enumerate(told) if each.under_way]):
        raise CheckpointError(
            f"{load_dir / tag}: {_where(names, saving)}: a save to the tag is under way, and some hosts have yet to switch"
            f" to it: load the tag when that has ended, or another tag ({_common(each.complete for each in told)})"
        )
    _refuse_missing(load_dir / tag, told)
    if len(saves) > 1:
        by_save = (
            [rank for rank, each in enumerate(told) if each.save == save] for save in dict.fromkeys(t.save for t in told)
        )
        shown = "; ".join(f"{_where(names, found)}: {tag} of save {told[found[0]].save or 0:016x}" for found in by_save)
        raise CheckpointError(
            f"{load_dir / tag}: the hosts hold different saves under this tag: {shown}. Load another tag"
            f" ({_common(each.complete for each in told)}), or bring the folder of one save to all hosts"
        )


def mend(save_dir: Path) -> None:
    """Put back the old folders of all tags whose last save has died half-way: a new save deletes what lies beside the tags, but
    not what another job's save, which is under way, keeps there.
    Collective. Raises OSError, StorageError, OtherRankError."""
    with ranks.all_or_none("save_checkpoint"):
        own = {tag for _, tag, _ in leftovers.marked_beside(save_dir)}
    for tag in sorted(set[str]().union(*ranks.all_gathered(own))):
        _mended(save_dir, tag, "save_checkpoint")


def _mended(load_dir: Path, tag: str, what: str) -> list[Held]:
    """What all ranks hold, once a save that has died half-way is undone. `what`: the call. Collective."""
    told = _held_by_all(load_dir, tag, what)
    differ = len({each.save for each in told}) > 1 and not any(each.under_way for each in told)
    chosen = _whole_on_all(told) if differ else None
    if chosen is None:
        return told
    _put_back(load_dir, tag, chosen, what)
    return _held_by_all(load_dir, tag, what)


def _held_by_all(load_dir: Path, tag: str, what: str) -> list[Held]:
    with ranks.all_or_none(what):
        own = _held(load_dir, tag)
    return ranks.all_gathered(own)


def _held(load_dir: Path, tag: str) -> Held:
    folder, rank = load_dir / tag, ranks.rank()
    beside = leftovers.marked_beside(load_dir) if load_dir.is_dir() else []
    under_way = any(name == tag and leftovers.is_held(path) for path, name, _ in beside)  # ahead of what it may change
    found = found_saves(load_dir, tag)
    own = next((each for each in found if each.path == folder), None)
    needed = [folder / manifest.NAME, manifest.rank_folder(folder, rank) / manifest.NAME]
    saved_on: dict[int, str] = {}
    if own is not None:
        with contextlib.suppress(CheckpointError):  # a damaged one, as the load says
            described = manifest.read_folder(folder)
            saved_on = {number: each["name"] for each in described.get("hosts") or [] for number in each["ranks"]}
            if described["world_size"] != ranks.world_size():
                needed.pop()  # the load says that the numbers of ranks differ
    lacks = tuple(str(path.relative_to(load_dir)) for path in needed if not path.is_file())
    complete = tuple(manifest.complete_tags(load_dir))
    save = own.save if own else None
    return Held(socket.gethostname(), host_id(), save, tuple(found), lacks, saved_on, complete, under_way)


def _whole_on_all(told: Sequence[Held]) -> int | None:
    """The oldest save that all hosts have, and some host under the tag's name; None where there is none."""
    on_all = set.intersection(*({each.save for each in held.there} for held in told))
    ages = {each.save: each.mtime_ns for each in told[0].there}
    return min(on_all & {held.save for held in told if held.save is not None}, key=ages.__getitem__, default=None)


def _put_back(load_dir: Path, tag: str, save: int, what: str) -> None:
    places = find_places(load_dir, what)
    with ranks.all_or_none(what):
        if places.is_first:
            there = {each.save: each for each in found_saves(load_dir, tag)}
            if there[save].path != load_dir / tag:
                TagFolder(load_dir, tag, there[save].token).put_back(there[save].path)


def _refuse_missing(folder: Path, told: Sequence[Held]) -> None:
    lacking = [rank for rank, each in enumerate(told) if each.lacks]
    if not lacking:
        return
    names = [each.host for each in told]
    saved_on = next((each.saved_on for each in told if each.saved_on), {})
    lines = []
    for group in _by_host(told, lacking):
        files = ", ".join(dict.fromkeys(name for rank in group for name in told[rank].lacks))
        hosts = ", ".join(sorted({saved_on[rank] for rank in group if rank in saved_on}))
        lines.append(f"{_where(names, group)} lacks {files}" + (f", saved on host {hosts}" if hosts else ""))
    raise CheckpointError(
        f"{folder.parent}: of the tag {folder.name}, "
        + "; ".join(lines)
        + ". List the hosts in the hostfile in the order of the save, so that each has its own ranks; or copy each rank's"
        f" folder, and {manifest.NAME} beside it, from where they were saved; or load another tag"
        f" ({_common(each.complete for each in told)})"
    )


def _by_host(told: Sequence[Held], numbers: Iterable[int]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for rank in numbers:
        groups.setdefault(told[rank].boot, []).append(rank)
    return list(groups.values())


def _where(names: Sequence[str], numbers: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(names[rank] for rank in numbers))
    shown = ", ".join(map(str, numbers))
    return f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)} (rank{'s' * (len(numbers) > 1)} {shown})"


def _common(tags: Iterable[Sequence[str]]) -> str:
    """Complete tags that all ranks have, the newest first, as words."""
    found = list(tags)
    on_all = [tag for tag in found[0] if all(tag in each for each in found[1:])]
    return f"complete on all hosts: {', '.join(on_all) or 'none'}"
