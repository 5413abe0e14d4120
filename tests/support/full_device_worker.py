"""Training as a device's memory runs out. Run by tests/engine/test_device_full.py on the late device, in a process of its own:

    python tests/support/full_device_worker.py FOLDER

Leaves what each case has found in FOLDER/found.pt, by its name. On a GPU `gpu_worker` calls it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
from models import MixerBlock, MixerModel, token_batches

NUM_LAYERS, NUM_MICRO_BATCHES = 4, 8
NONE = {"keep": "none"}
ALL_KEPT = {"keep": "everything", "keep_device": "device"}
UNLIMITED = 1 << 40
HALF_OF_WHAT_IS_KEPT = 12 << 20  # bytes, with `SMALL`
SHORT = 4  # tokens of a sequence


@dataclass(frozen=True)
class Sizes:
    """Of a model and its micro-batches: `rows` sequences of `tokens` each, or more. `less`: bytes without which a step that
    keeps nothing does not fit any more."""

    width: int
    rows: int
    tokens: int
    less: int


SMALL = Sizes(256, 2, 64, 1 << 18)
LARGE = Sizes(1024, 8, 1024, 1 << 29)  # for a GPU, which gives memory out by the MiB


@dataclass(frozen=True)
class Mood:
    """What blocks do once the device has been full: with "words" they raise another error in the place of its next one, and
    with "refuses" they raise one in each forward; with "" they count their forwards, and a step starts over to know of it.
    `marker`: the file that says that the device has been full; what Python holds is as it was ahead of a step that fails."""

    action: str
    marker: Path


class MoodyBlock(MixerBlock):
    """See `Mood`."""

    def __init__(self, width: int, mood: Mood) -> None:
        super().__init__(width, dropout=0.1)
        self.mood = mood
        if not mood.action:
            self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        was_full = self.mood.marker.exists()
        if was_full and self.mood.action == "refuses":
            raise KeyError("a tap that is closed")
        if not self.mood.action:
            self.count.add_(1)
        try:
            return super().forward(x)
        except torch.OutOfMemoryError as error:
            self.mood.marker.touch()
            if was_full and self.mood.action == "words":
                raise RuntimeError("the block failed") from error
            raise


def moody(mood: Mood, width: int) -> MixerModel:
    model = MixerModel(0, width)
    model.blocks = torch.nn.ModuleList(MoodyBlock(width, mood) for _ in range(NUM_LAYERS))
    return model


def config_in(folder: Path, activations: dict[str, Any], **keys: Any) -> dict[str, Any]:
    section = {"seed": 7, "activations": activations} | keys
    options = {"dtype": "fp32", "clip": 0.0, "params": "cpu", "optimizer": "cpu"}
    return harness.base_config(folder, num_micro_batches=NUM_MICRO_BATCHES, section=section, **options)


def batches_of(sizes: Sizes, num_steps: int, tokens: int | None = None) -> harness.Batches:
    return token_batches(num_steps, NUM_MICRO_BATCHES, rows=sizes.rows, shortest=tokens or sizes.tokens)


def train(
    place: Path,
    activations: dict[str, Any],
    sizes: Sizes,
    batches: harness.Batches,
    between: Callable[[Any, Any], None] = lambda *_: None,
    look: Callable[[Any], None] = lambda _: None,
) -> harness.Run:
    """Losses, weights and state. `between`: called with engine and model behind the first step; `look` with the engine at the
    end."""
    build = partial(MixerModel, NUM_LAYERS, sizes.width, dropout=0.1)
    engine, model = harness.build_engine(config_in(place, activations), build, vertical=True, recording=False)
    run = harness.Run()
    try:
        for step, batch in enumerate(batches):
            run.losses.append(engine.train_batch(iter(batch)).item())
            if step == 0:
                between(engine, model)
        look(engine)
        run.weights, run.state = harness.read_weights(model), harness.read_state(engine, model)
    finally:
        harness.dispose(engine)
    return run


def state_of(engine: Any, model: Any) -> dict[str, torch.Tensor]:
    return harness.read_weights(model) | harness.read_state(engine, model)


class Limited:
    """The device with so many bytes for tensors, in the block."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._ballast: torch.Tensor | None = None

    def __enter__(self) -> None:
        if torch.accelerator.current_accelerator() == torch.device("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            left = self._num_bytes - torch.cuda.memory_allocated()
            self._ballast = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
            return
        import late_device

        late_device.library().set_capacity(0, self._num_bytes)

    def __exit__(self, *_: object) -> None:
        if self._ballast is not None:
            self._ballast = None
            return
        import late_device

        late_device.library().set_capacity(0, UNLIMITED)


def peak(place: Path, activations: dict[str, Any], sizes: Sizes) -> int:
    """Bytes of the device that are in use at most in a step."""
    torch.accelerator.reset_peak_memory_stats()
    train(place, activations, sizes, batches_of(sizes, 1))
    return torch.accelerator.memory_stats()["active_bytes.all.peak"]


def failed(place: Path, activations: dict[str, Any], sizes: Sizes, capacity: int) -> dict[str, Any]:
    """A second step that the device has no room for, what it says and leaves, and a shorter one behind it."""
    found: dict[str, Any] = {}

    def fill(engine: Any, model: Any) -> None:
        before = state_of(engine, model)
        with Limited(capacity):
            try:
                engine.train_batch(iter(batches_of(sizes, 1)[0]))
            except Exception as error:
                found.update(text=str(error), kind=type(error).__name__, notes=getattr(error, "__notes__", []))
                found.update(cause=type(error.__cause__).__name__, steps=engine.global_steps, args=len(error.args))
                found.update(is_torchs=isinstance(error, torch.OutOfMemoryError))
        found["differing"] = harness.differing(before, state_of(engine, model))

    found["run"] = train(place, activations, sizes, batches_of(sizes, 2, SHORT), fill)
    return found


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return harness.read_weights(model) | {name: each.cpu().clone() for name, each in model.named_buffers()}


def first(place: Path, sizes: Sizes, capacity: int, action: str = "") -> dict[str, Any]:
    """A first step that the device has no room for. `action`: see `Mood`."""
    place = Path(place, f"first{action}{capacity}")
    place.mkdir()
    config, mood = config_in(place, ALL_KEPT, self_check=False), Mood(action, place / "full")
    engine, model = harness.build_engine(config, partial(moody, mood, sizes.width), vertical=True, recording=False)
    found: dict[str, Any] = {}
    try:
        before = values_of(model)
        with Limited(capacity):
            try:
                engine.train_batch(iter(batches_of(sizes, 1)[0]))
            except Exception as error:
                found.update(text=str(error), kind=type(error).__name__, notes=getattr(error, "__notes__", []))
        after = values_of(model)
        found["differing"] = harness.differing(before, after)
    finally:
        harness.dispose(engine)
    return found


class LastHook(MixerBlock):
    """Its backward finds the device full once `armed`."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if out.requires_grad and self.armed:
            out.register_hook(self._fail)
        return out

    def _fail(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("late out of memory.")


def torn(place: Path) -> dict[str, Any]:
    """A step that has written the state of layers in place as the device is full, in the backward of the first layer."""
    place = Path(place, "torn")
    place.mkdir()
    section = {"activations": ALL_KEPT, "optimizer_delay": 0.0, "on_nonfinite": "stop"}
    config = harness.small_buffers(harness.base_config(place, num_micro_batches=4, clip=0.0, section=section), 768 * 768)
    engine, model = harness.build_engine(config, partial(MixerModel, 3, 768), vertical=True, recording=False)
    found: dict[str, Any] = {}
    try:
        engine.train_batch(iter(token_batches(1, 4, rows=1, shortest=8)[0]))
        model.blocks[0].__class__ = LastHook
        model.blocks[0].armed = True
        try:
            engine.train_batch(iter(token_batches(1, 4, rows=1, shortest=8)[0]))
        except Exception as error:
            found.update(text=str(error), kind=type(error).__name__, notes=getattr(error, "__notes__", []))
    finally:
        harness.dispose(engine)
    return found


def mended(place: Path, text: str, sizes: Sizes, capacity: int) -> dict[str, harness.Run]:
    """Training with each of the changes that a message names, on the same device."""
    changes: list[dict[str, Any]] = [{"keep_share": float(each)} for each in re.findall(r'"keep_share": ([\d.]+)', text)]
    changes += [{"keep_device": each} for each in re.findall(r'"keep_device": "(\w+)"', text)]
    with Limited(capacity):
        return {str(change): train(place, ALL_KEPT | change, sizes, batches_of(sizes, 2)) for change in changes}


def chosen(place: Path, sizes: Sizes, capacity: int) -> dict[str, Any]:
    """A run that chooses by itself what it keeps. The seconds of its first step are not left to chance, its bytes are."""
    from ds_vertical.engine.keeping import keeping

    measured, kept = keeping.measured_step, []

    def certain(probe: Any, *given: Any) -> Any:
        for kind, times in probe.found.items():
            points = [replace(point, saved_s=1.0) for point in times.points if point.policy == "everything"]
            probe.found[kind] = replace(times, points=tuple(points))
        return measured(probe, *given)

    keeping.measured_step = certain
    try:
        with Limited(capacity):
            run = train(place, {}, sizes, batches_of(sizes, 2), look=lambda engine: kept.append(engine.kept))
    finally:
        keeping.measured_step = measured
    return {"run": run, "kept": kept[0]}


def study(place: Path, sizes: Sizes, half: int | None = None) -> dict[str, Any]:
    """All cases. `half`: of the bytes that a step keeps; None: they are measured."""
    none = peak(place, {"keep": "none"}, sizes)
    capacity = none + (half or (peak(place, ALL_KEPT, sizes) - none) // 2)
    torch.accelerator.reset_peak_memory_stats()  # as in a process whose device never had more
    found: dict[str, Any] = {"chosen": chosen(place, sizes, capacity)}
    found["kept"] = failed(place, ALL_KEPT, sizes, capacity)
    found["later"] = chosen(place, sizes, capacity)  # in the process in which a step has filled the device
    found["mended"] = mended(place, found["kept"]["text"], sizes, capacity)
    found["short"] = {keep: failed(place, {"keep": keep}, sizes, none - sizes.less) for keep in ("none", "everything")}
    return found


def silent() -> tuple[int, int]:
    """As `torch.xpu.mem_get_info` where the driver does not tell."""
    raise RuntimeError("the device doesn't support querying the available free memory")


def main(folder: str) -> int:
    import late_accelerator
    import late_device

    late_accelerator.use()
    found = study(Path(folder), SMALL, HALF_OF_WHAT_IS_KEPT)
    capacity = peak(Path(folder), {"keep": "none"}, SMALL)
    found["first"] = first(Path(folder), SMALL, capacity + HALF_OF_WHAT_IS_KEPT)
    found["refuses"] = first(Path(folder), SMALL, capacity + HALF_OF_WHAT_IS_KEPT, "refuses")
    found["words"] = first(Path(folder), SMALL, capacity - SMALL.less, "words")
    found["tight"] = failed(Path(folder), ALL_KEPT, SMALL, capacity + SMALL.less)
    found["torn"] = torn(Path(folder))
    module = torch.get_device_module(late_device.NAME)
    asked, module.mem_get_info = module.mem_get_info, silent
    found["silent"] = train(Path(folder), NONE, SMALL, batches_of(SMALL, 1, SHORT)).losses
    module.mem_get_info = asked
    found["violations"] = late_device.library().take_violations()
    torch.save(found, Path(folder, "found.pt"))
    return 0


if __name__ == "__main__":
    import full_device_worker  # what is pickled is of a module that the test imports, too

    sys.exit(full_device_worker.main(*sys.argv[1:]))
