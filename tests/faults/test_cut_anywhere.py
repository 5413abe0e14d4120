"""Interrupts at any function's boundary: what follows has the bits of a run without them, or the engine says it has not."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_first import FirstTrials, in_check, in_step, sites_of_check
from cut_kinds import BUILD, FIRST, KINDS, SECTION, STEPS, evaluate, make, state_of, three_calls
from cutting import Cut, Reference, Site, Trials, are_reached, chosen, recorded, reference_of, surroundings
from harness import base_config, contents, differing, dispose, read_weights, running, small_buffers

from ds_vertical.errors import TornStateError

pytestmark = pytest.mark.usefixtures("fp16_allowed")


@cache
def reference(kind: str) -> Reference:
    with tempfile.TemporaryDirectory() as folder:
        return reference_of(Path(folder) / "reference", partial(make, kind), STEPS)


def trials_of(folder: Path, kind: str) -> Trials:
    return Trials(folder, partial(make, kind), STEPS, reference(kind))


@cache
def sites_of_step(kind: str) -> frozenset[Site]:
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = make(kind, Path(folder))
        try:
            for step in STEPS[:2]:
                engine.train_batch(iter(step))
            with recorded() as found:
                engine.train_batch(iter(STEPS[2]))
        finally:
            dispose(engine)
    return frozenset(found)


def share(found: Counter[Site], kinds: Sequence[str], kind: str, sites_of: Callable[[str], Collection[Site]]) -> list[Cut]:
    """Of all boundaries those that no kind before this one passes, and this kind's part of the others: each is cut in the first
    kind that passes it, and in one more."""
    index = list(kinds).index(kind)
    before = set().union(*map(sites_of, kinds[:index]))
    return [cut for number, cut in enumerate(chosen(found)) if cut.site not in before or number % len(kinds) == index]


WHOLE = ("stateful",)  # kinds in which each boundary is cut


def in_train_batch(folder: Path, kind: str, count: int | None) -> None:
    with trials_of(folder, kind) as trials:
        shared = count is None and kind not in WHOLE
        cuts = share(trials.found, list(KINDS), kind, sites_of_step) if shared else chosen(trials.found, count)
        assert len(trials.found) > 600, "boundaries of functions are not seen"
        for cut in cuts:
            trials.cut(cut)
    say(f"a step, {kind}", cuts, trials)
    assert not trials.wrong, "\n".join(trials.wrong)
    assert are_reached(cuts), "most of them were to be reached"
    # only where a step is being made to count, or has been taken in place before it is known whether it does
    assert count or len(trials.torn) < (0.7 if kind == "in place" else 0.35) * len(cuts), "\n".join(trials.torn)


def say(what: str, cuts: Sequence[Cut], trials: Trials) -> None:
    print(f"{what}: {len(cuts)} cuts, {sum(bool(cut.done) for cut in cuts)} reached: {trials}")
    print(*trials.others, sep="\n")


@pytest.mark.parametrize("kind", ["early", "delayed", "stateful"])
def test_a_step_that_is_cut_anywhere(tmp_path: Path, kind: str) -> None:
    in_train_batch(tmp_path, kind, 7)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_cut_everywhere(tmp_path: Path, kind: str) -> None:
    in_train_batch(tmp_path, kind, None)


# ---- the first step


FIRST_STEPS = STEPS[:3]


@cache
def first_reference(kind: str) -> Reference:
    recording = sites_of_check if kind == "self-check" else lambda _: recorded()
    with tempfile.TemporaryDirectory() as folder:
        return reference_of(Path(folder) / "reference", partial(make, kind), FIRST_STEPS, 0, recording)


KEEPING = ("model/kept/", "engine/keeping/", "offload/kept_store")  # the code that keeps, and tries what it keeps


def in_first_step(folder: Path, kind: str, count: int | None, files: tuple[str, ...] = ("",)) -> None:
    around = in_check if kind == "self-check" else in_step
    with FirstTrials(folder, partial(make, kind), FIRST_STEPS, first_reference(kind), around=around) as trials:
        cuts = chosen(Counter({site: n for site, n in trials.found.items() if site.file.startswith(files)}), count)
        assert len(trials.found) > 500, "boundaries of functions are not seen"
        for cut in cuts:
            trials.cut(cut)
    say(kind, cuts, trials)
    assert not trials.wrong, "\n".join(trials.wrong)
    assert are_reached(cuts), "most of them were to be reached"
    assert count or len(trials.torn) < 0.35 * len(cuts), "\n".join(trials.torn)


@pytest.mark.parametrize("kind", ["first step", "self-check"])
def test_a_first_step_that_is_cut_anywhere(tmp_path: Path, kind: str) -> None:
    """While it learns which state the forwards change, and in the self-check before it."""
    in_first_step(tmp_path, kind, 4)


@pytest.mark.parametrize("kind", ["first step, everything", pytest.param("first step, products", marks=pytest.mark.slow)])
def test_a_first_step_that_is_cut_where_it_keeps(tmp_path: Path, kind: str) -> None:
    """While it tries what it keeps, or measures what could be kept."""
    in_first_step(tmp_path, kind, 5, KEEPING)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", FIRST)
def test_a_first_step_that_is_cut_everywhere(tmp_path: Path, kind: str) -> None:
    in_first_step(tmp_path, kind, None)


# ---- what is no step


def save(engine: Any, folder: Path, **options: Any) -> None:
    engine.save_checkpoint(str(folder), tag=f"step{engine.global_steps}", **options)


def weights(engine: Any, folder: Path) -> None:
    engine.save_16bit_model(str(folder))


def sites_of(action: Callable[[Any], object], trials: Trials) -> Counter[Site]:
    engine, _ = trials.ready()
    with recorded() as found:
        action(engine)
    return found


def action_of(name: str, folder: Path) -> Callable[[Any], object]:
    actions: dict[str, Callable[[Any], object]] = {
        "evaluate": evaluate,
        "save": partial(save, folder=folder / "saved"),
        "portable": partial(save, folder=folder / "saved", portable=True),
        "three calls": three_calls,
        "weights": partial(weights, folder=folder / "weights"),
        "flush": lambda engine: engine.flush(),
        "read": lambda engine: read_weights(engine.module),
    }
    return actions[name]


@cache
def sites_of_call(name: str, kind: str) -> frozenset[Site]:
    with tempfile.TemporaryDirectory() as folder, trials_of(Path(folder), kind) as trials:
        return frozenset(sites_of(action_of(name, Path(folder)), trials))


BETWEEN = ("early", "delayed", "memory")
# boundaries that a call passes at least, in any of these kinds
LEAST = {"evaluate": 600, "save": 300, "portable": 250, "three calls": 600, "weights": 60, "flush": 60, "read": 60, "load": 250}


def check_reached(name: str, found: Counter[Site], cuts: Sequence[Cut]) -> None:
    assert len(found) > LEAST[name], f"boundaries of functions are not seen: {len(found)}"
    assert are_reached(cuts), [str(cut) for cut in cuts if not cut.done]


def between_steps(folder: Path, kind: str, name: str, count: int | None) -> None:
    action = action_of(name, folder)
    for each in BETWEEN if count is None else ():
        sites_of_call(name, each)  # ahead of the trials: an engine on SSD sets this process's handler of SIGTERM
    with trials_of(folder, kind) as trials:
        found = sites_of(action, trials)
        cuts = share(found, BETWEEN, kind, partial(sites_of_call, name)) if count is None else chosen(found, count)
        for cut in cuts:
            trials.cut(cut, action)
            shutil.rmtree(folder / "saved", ignore_errors=True)
    say(f"{name}, {kind}", cuts, trials)
    assert not trials.wrong, "\n".join(trials.wrong)
    check_reached(name, found, cuts)
    assert count or len(trials.torn) < 0.35 * len(cuts), "\n".join(trials.torn)


@pytest.mark.parametrize("name", ["evaluate", "save", "three calls"])
def test_a_call_between_steps_that_is_cut_anywhere(tmp_path: Path, name: str) -> None:
    between_steps(tmp_path, "delayed", name, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["evaluate", "save", "portable", "three calls", "weights", "flush", "read"])
@pytest.mark.parametrize("kind", BETWEEN)
def test_a_call_between_steps_that_is_cut_everywhere(tmp_path: Path, kind: str, name: str) -> None:
    between_steps(tmp_path, kind, name, None)


def again(engine: Any) -> float:
    """The loss of an evaluation with the random numbers of the engine's first one; those of a cut one are used up."""
    engine._loop._evaluations._num_seeded = 0
    loss: float = engine.eval_batch(iter(STEPS[0])).item()
    return loss


def evaluations(folder: Path, count: int) -> Iterator[tuple[dict[str, Any], float]]:
    """What a model that keeps state holds after two steps, and the loss of an evaluation behind that; then both after each of
    `count` evaluations."""
    engine, model = make("stateful", folder)
    try:
        for step in STEPS[:2]:
            engine.train_batch(iter(step))
        for _ in range(count):
            before = state_of(model)
            yield before, again(engine)
    finally:
        dispose(engine)


def in_evaluations(folder: Path, count: int | None) -> None:
    """One that is cut has happened, or it has not: what modules hold and the loss of the next one are as in a run without."""
    engine, model = make("stateful", folder / "cut")
    wrong: list[str] = []
    try:
        for step in STEPS[:2]:
            engine.train_batch(iter(step))
        around = surroundings(model)
        again(engine)  # the first one is checked, and learns
        with recorded() as found:
            again(engine)
        cuts, done = chosen(found, count), 2
        expected = list(evaluations(folder / "whole", 2 * len(cuts) + done + 2))
        for cut in cuts:
            with contextlib.suppress(KeyboardInterrupt), cut:
                again(engine)
            done += state_of(model) == expected[done + 1][0]
            if state_of(model) != expected[done][0] or again(engine) != expected[done][1]:
                wrong.append(str(cut))
                break
            done += 1
        assert surroundings(model) == around
    finally:
        dispose(engine)
    print(f"evaluate, stateful: {len(cuts)} cuts, {sum(bool(cut.done) for cut in cuts)} reached: {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)
    check_reached("evaluate", found, cuts)


def test_an_evaluation_that_keeps_state_and_is_cut_anywhere(tmp_path: Path) -> None:
    in_evaluations(tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_evaluation_that_keeps_state_and_is_cut_everywhere(tmp_path: Path) -> None:
    in_evaluations(tmp_path, None)


def _train(engine: Any, model: Any) -> dict[str, torch.Tensor]:
    """Ahead of each load: what that passes depends on what it replaces."""
    engine.train_batch(iter(STEPS[2]))
    return contents(engine, model)


@cache
def sites_of_load(kind: str) -> frozenset[Site]:
    with tempfile.TemporaryDirectory() as folder:
        engine, model = make(kind, Path(folder) / "run")
        try:
            for step in STEPS[:2]:
                engine.train_batch(iter(step))
            engine.save_checkpoint(f"{folder}/saved", tag="two")
            _train(engine, model)
            with recorded() as found:
                engine.load_checkpoint(f"{folder}/saved", tag="two")
        finally:
            dispose(engine)
    return frozenset(found)


def loads(folder: Path, kind: str, count: int | None) -> None:
    """A load that is cut has happened, or has not, or has torn the state."""
    engine, model = make(kind, folder / "first")
    made, wrong, whole = 1, list[str](), 0
    try:
        for step in STEPS[:2]:
            engine.train_batch(iter(step))
        engine.save_checkpoint(str(folder / "saved"), tag="two")
        saved = contents(engine, model)
        _train(engine, model)
        with recorded() as found:
            engine.load_checkpoint(str(folder / "saved"), tag="two")
        cuts = share(found, BETWEEN, kind, sites_of_load) if count is None else chosen(found, count)
        for cut in cuts:
            trained = _train(engine, model)
            try:
                with cut:
                    engine.load_checkpoint(str(folder / "saved"), tag="two")
            except KeyboardInterrupt:
                pass
            try:
                state = contents(engine, model)
                if differing(saved, state) and differing(trained, state):
                    wrong.append(str(cut))
                engine.load_checkpoint(str(folder / "saved"), tag="two")
                assert not differing(saved, contents(engine, model))
                whole += 1
            except TornStateError:
                made += 1
                _dispose(engine)
                engine, model = make(kind, folder / str(made))
                engine.load_checkpoint(str(folder / "saved"), tag="two")
    finally:
        _dispose(engine)
    reached = sum(bool(cut.done) for cut in cuts)
    counts = f"{whole - len(wrong)} right, {made - 1} marked torn, {len(wrong)} wrong"
    print(f"load, {kind}: {len(cuts)} cuts, {reached} reached: {counts}")
    assert not wrong, "\n".join(wrong)
    check_reached("load", found, cuts)


def _dispose(engine: Any) -> None:
    try:
        dispose(engine)
    except Exception as error:
        assert "torn" in str(error)


def test_a_load_that_is_cut_anywhere(tmp_path: Path) -> None:
    loads(tmp_path, "delayed", 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", BETWEEN)
def test_a_load_that_is_cut_everywhere(tmp_path: Path, kind: str) -> None:
    loads(tmp_path, kind, None)


# ---- what was found


def cuts_in(found: Counter[Site], files: tuple[str, ...], functions: tuple[str, ...]) -> list[Cut]:
    named = [site for site in found if site.file in files and any(name in site.function for name in functions)]
    return [Cut(site, number) for site in named for number in range(1, found[site] + 1)]


@pytest.mark.parametrize(
    ("files", "functions"),
    [
        pytest.param(
            ("offload/param_store.py", "offload/param_shards.py", "compat/zero_params.py"),
            ("ParamStore.release", "complete_writes", "taken_buffers", "UnitBuffers.reset", "partition"),
            id="release",
        ),
        pytest.param(
            ("model/stubs.py", "engine/module_hooks.py"),
            ("Stubs.", "suspended_hooks", "_HooksOfModules.", "reading_plainly"),
            id="forwards put back",
        ),
    ],
)
def test_an_interrupt_while_something_is_given_up(tmp_path: Path, files: tuple[str, ...], functions: tuple[str, ...]) -> None:
    """A unit's full values outlived the step; forwards and hooks were never put back."""
    with trials_of(tmp_path, "early") as trials:
        cuts = cuts_in(trials.found, files, functions)
        assert len(cuts) > 8
        for cut in cuts[:: max(1, len(cuts) // 8)]:
            trials.cut(cut)
    assert not trials.wrong and not trials.torn, "\n".join(trials.wrong + trials.torn)


def test_an_interrupt_while_micro_batches_are_moved(tmp_path: Path) -> None:
    """The iterator had lost one of the step's two."""
    kind = "first step"
    with FirstTrials(tmp_path, partial(make, kind), FIRST_STEPS, first_reference(kind), around=in_step) as trials:
        cuts = cuts_in(trials.found, ("model/batch.py",), ("to_device", "collect"))
        assert len(cuts) > 8
        for cut in cuts[:: len(cuts) // 4]:
            trials.cut(cut)
    assert not trials.wrong and not trials.torn, "\n".join(trials.wrong + trials.torn)


def test_an_interrupt_while_the_check_gathers_is_heard(tmp_path: Path) -> None:
    """Giving up what was on its way failed in DeepSpeed's words, and the step ended with that as the model's fault."""
    kind = "self-check"
    with FirstTrials(tmp_path, partial(make, kind), FIRST_STEPS, first_reference(kind), around=in_check) as trials:
        sites = [site for site in trials.found if site.file == "compat/zero_params.py" and "start_gather" in site.function]
        cuts = [Cut(site, 1) for site in sites]
        assert len(cuts) > 3
        for cut in cuts:
            trials.cut(cut)
    assert not trials.wrong and not trials.torn, "\n".join(trials.wrong + trials.torn)


def test_an_interrupt_while_an_evaluation_lets_a_forward_go_on(tmp_path: Path) -> None:
    """The caller was left with gradients off."""
    with trials_of(tmp_path, "early") as trials:
        found = sites_of(evaluate, trials)
        cuts = cuts_in(found, ("model/forward_coroutine.py",), ("ForwardCoroutine._switch", "ForwardCoroutine._let_go_on"))
        entered = [cut for cut in cuts if "entered" in str(cut)]
        assert len(cuts) > 40
        for cut in [*entered[::4], *cuts[:: len(cuts) // 8]]:
            trials.cut(cut, evaluate)
    assert not trials.wrong and not trials.torn, "\n".join(trials.wrong + trials.torn)


@pytest.mark.slow
def test_an_interrupt_while_a_step_gives_the_turn_to_the_loop(tmp_path: Path) -> None:
    """What the step had changed was forgotten, and never undone: the next step took the model for a compiled one."""
    with trials_of(tmp_path, "early") as trials:
        cuts = cuts_in(sites_of(three_calls, trials), ("interrupts.py",), ("LaidAside.lay", "LaidAside.put_back"))
        ends = [cut for cut in cuts if cut.site.event != "c_return" and cut.number == 1]
        assert len(ends) == 4
        for cut in ends:
            trials.cut(cut, three_calls)
    assert not trials.wrong and not trials.torn, "\n".join(trials.wrong + trials.torn)


@pytest.mark.slow
def test_an_interrupt_while_a_portable_save_lends_stock_other_values(tmp_path: Path) -> None:
    """The engine and its optimizer were left with those that DeepSpeed's writer had been given."""
    with trials_of(tmp_path, "early") as trials:
        action = action_of("portable", tmp_path)
        cuts = cuts_in(sites_of(action, trials), ("compat/stock_checkpoint.py",), ("_replaced",))
        assert len(cuts) > 8
        for cut in cuts:
            trials.cut(cut, action)
            shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    assert not trials.wrong and not trials.torn, "\n".join(trials.wrong + trials.torn)


def test_an_interrupt_while_a_step_is_handed_over(tmp_path: Path) -> None:
    """The pipeline seemed idle though it had been given a step, whose gradient was then taken away. It may tear the state: of a
    step that is made to count."""
    with trials_of(tmp_path, "early") as trials:
        cuts = cuts_in(trials.found, ("offload/step_pipeline.py",), ("StepPipeline.submit",))
        after = [cut for cut in cuts if "extend" in str(cut)]
        assert after
        for cut in after:
            trials.cut(cut)
    assert not trials.wrong, "\n".join(trials.wrong)


@pytest.mark.slow
def test_an_interrupt_where_nobody_is_told_of_it(tmp_path: Path) -> None:
    """What was torn behind the last call that could say so is said by the next one, as what it is."""
    with trials_of(tmp_path, "early") as trials:
        cuts = cuts_in(trials.found, ("offload/consistency.py",), ("_Section.__enter__",))
        assert cuts
        for cut in cuts[:: max(1, len(cuts) // 6)]:
            trials.cut(cut)
    assert trials.torn and not trials.wrong, "\n".join(trials.wrong)


def test_a_call_that_was_cut_is_over(tmp_path: Path) -> None:
    """An interrupt in the very end of a call, where nothing puts things in order any more: the next call does, or a read."""
    config = small_buffers(base_config(tmp_path, num_micro_batches=2, dtype="fp32", section=SECTION), 600_000)
    with running(config, BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        for use in (lambda: engine.train_batch(iter(STEPS[1])), lambda: read_weights(model), engine.flush):
            engine.optimizer.calls.end, end = _interrupted, engine.optimizer.calls.end
            with pytest.raises(KeyboardInterrupt):
                engine.eval_batch(iter(STEPS[0]))
            engine.optimizer.calls.end = end
            use()


def test_a_failed_call_whose_clean_up_was_cut_is_put_in_order_by_the_next(tmp_path: Path) -> None:
    config = small_buffers(base_config(tmp_path, num_micro_batches=2, dtype="fp32", section=SECTION), 600_000)
    with running(config, BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        calls = engine.optimizer.calls
        put_in_order = calls.put_in_order

        def fail(*_: Any) -> None:
            calls.put_in_order = engine._runner._clean_up = _interrupted
            raise ArithmeticError

        uses = (lambda: engine.train_batch(iter(STEPS[1])), lambda: read_weights(model), engine.flush)
        for use in uses:
            before = surroundings(model)
            hook = model.blocks[1].register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                engine.train_batch(iter(STEPS[0]))
            calls.put_in_order = put_in_order
            del engine._runner._clean_up
            hook.remove()
            use()
            assert surroundings(model) == before


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt
