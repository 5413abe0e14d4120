"""Interrupts while an engine is made, and while it is destroyed, at any function's boundary: neither leaves anything behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import forks
import pytest
from cut_kinds import make
from cut_setup import EndTrials, SetUpTrials, Whole, give_up_folders, is_over, state_digest, train, whole_run
from cutting import CtrlC, Cut, Site, are_reached, chosen
from harness import dispose

KINDS = ("delayed", "memory", "everything", "two ssds")


@pytest.fixture(autouse=True)
def python_hears_ctrl_c() -> Iterator[None]:
    """In the background of a shell it does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@cache
def reference(kind: str) -> Whole:
    with tempfile.TemporaryDirectory() as folder:
        return whole_run(Path(folder) / "reference", kind)


def share(kind: str, of: str) -> Counter[Site]:
    """Of what a kind's engine passes, that which none of the kinds before it does."""
    before = set().union(*(getattr(reference(each), of) for each in KINDS[: KINDS.index(kind)]))
    found: Counter[Site] = getattr(reference(kind), of)
    return Counter({site: number for site, number in found.items() if site not in before})


def set_up(folder: Path, kind: str, cuts: list[Cut]) -> None:
    cuts = [cut for cut in cuts if not is_over(cut)]
    with SetUpTrials(folder, kind, reference(kind)) as trials:
        for cut in cuts:
            trials.cut(cut)
    print(f"initialize, {kind}: {len(cuts)} cuts, {sum(bool(cut.done) for cut in cuts)} reached: {trials}")
    assert not trials.wrong, "\n".join(trials.wrong)
    assert are_reached(cuts), "most of them were to be reached"


def end(folder: Path, kind: str, cuts: list[Cut]) -> list[str]:
    """Returns what engines have said that cannot give their state."""
    trials = EndTrials(folder, kind, reference(kind))
    for cut in cuts:
        trials.cut(cut)
    print(f"destroy, {kind}: {len(cuts)} cuts, {sum(bool(cut.done) for cut in cuts)} reached: {trials}", *trials.torn, sep="\n")
    assert not trials.wrong, "\n".join(trials.wrong)
    assert are_reached(cuts), "most of them were to be reached"
    return trials.torn


def test_an_engine_whose_making_is_cut_anywhere(tmp_path: Path) -> None:
    """From `prepare` to the end of `initialize`."""
    made = reference("delayed").made
    assert len(made) > 500, f"boundaries of functions are not seen: {len(made)}"
    set_up(tmp_path / "ssd", "delayed", chosen(made, 4, CtrlC))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_whose_making_is_cut_everywhere(tmp_path: Path, kind: str) -> None:
    set_up(tmp_path / "ssd", kind, chosen(share(kind, "made"), None, CtrlC))


def test_an_engine_whose_end_is_cut_anywhere(tmp_path: Path) -> None:
    ended = reference("delayed").ended
    assert len(ended) > 100, f"boundaries of functions are not seen: {len(ended)}"
    end(tmp_path / "ssd", "delayed", chosen(ended, 4, CtrlC))


_LAST_STEPS = ("VerticalStage3.close", "LiveState.failure", "VerticalStage3.flush_state")


def test_an_engine_whose_end_is_cut_where_it_takes_the_last_steps(tmp_path: Path) -> None:
    """By Ctrl-C that comes a second time. The next `destroy` takes these steps."""
    ended = reference("delayed").ended
    cuts = [Cut(site, 1) for site in ended if site.function in _LAST_STEPS and site.event != "return"]
    assert len(cuts) > 3, f"where the last steps are taken is not seen: {cuts}"
    assert not end(tmp_path / "ssd", "delayed", cuts)


def test_an_engine_whose_last_steps_are_cut_whenever_they_are_tried_takes_them_in_the_next_destroy(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    expected = reference("delayed").digest
    engine, model = make("delayed", tmp_path)
    try:
        train(engine)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine.optimizer, "flush_state", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.destroy()
        engine.destroy()
        assert state_digest(engine, model) == expected
    finally:
        dispose(engine)
        give_up_folders()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_whose_end_is_cut_everywhere(tmp_path: Path, kind: str, again: bool) -> None:
    """`again`: by Ctrl-C that comes a second time, and so does not wait."""
    end(tmp_path / "ssd", kind, chosen(share(kind, "ended"), None, Cut if again else CtrlC))


@pytest.mark.slow
def test_a_patch_that_is_cut_everywhere(tmp_path: Path) -> None:
    """A second call of it replaces what is to be replaced, once."""
    worker = Path(__file__).parents[1] / "support" / "patch_cut_worker.py"
    done = forks.run(tmp_path, [sys.executable, str(worker)], dict(os.environ), 300, engine=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
