"""compat's table of DeepSpeed's members: complete, true of the installed DeepSpeed, and what a wrong one is told."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from ds_vertical.compat import deepspeed_members, version
from ds_vertical.compat.deepspeed_members import ENGINE, STAGE3
from ds_vertical.engine.engine import VerticalEngine
from ds_vertical.engine.zero3.optimizer import VerticalStage3

PACKAGE = Path(inspect.getfile(version)).parents[1]
MEMBERS = tuple(deepspeed_members.members_of(version.SUPPORTED))
TORCHS_OWN = {"_non_persistent_buffers_set", "_parameters"}


LEFT_BY_ZERO_INIT = {"_old_init"}  # on the class of every module, where an earlier test in this process has built one


def overridden(cls: type) -> dict[str, str]:
    """Name -> module of ours, of every method that our classes above `cls` override of DeepSpeed's."""
    theirs = {name for base in cls.__mro__ if base.__module__.startswith("deepspeed.") for name in vars(base)}
    ours = [base for base in cls.__mro__ if base.__module__.startswith("ds_vertical.")]
    return {
        name: base.__module__.removeprefix("ds_vertical.")
        for base in reversed(ours)
        for name, member in vars(base).items()
        if name in theirs - LEFT_BY_ZERO_INIT and callable(member) and not isinstance(member, type)
    }


@pytest.mark.parametrize(("cls", "owner"), [(VerticalEngine, ENGINE), (VerticalStage3, STAGE3)])
def test_every_override_is_in_the_table(cls: type, owner: str) -> None:
    listed = {row[0]: row[1] for row in deepspeed_members.OVERRIDDEN[owner]}
    assert listed == overridden(cls)


def test_an_override_takes_what_deepspeed_gives_it() -> None:
    """Each parameter of DeepSpeed's method has a place in ours."""
    for cls, owner in ((VerticalEngine, ENGINE), (VerticalStage3, STAGE3)):
        for name, _, parameters, *_ in deepspeed_members.OVERRIDDEN[owner]:
            ours = inspect.signature(getattr(cls, name)).parameters.values()
            if not any(each.kind is each.VAR_KEYWORD for each in ours):
                expected = set(re.findall(r"\w+", parameters.replace("=...", "")))
                assert expected <= {each.name for each in ours}, name


def test_each_row_names_a_file_that_uses_the_member() -> None:
    for member in MEMBERS:
        file = PACKAGE.joinpath(*member.used_by.split(".")).with_suffix(".py")
        name = member.name.removeprefix("_init") if member.used_by == "model.layers" else member.name
        assert name in file.read_text(), member


def test_each_private_name_of_compat_is_in_the_table() -> None:
    known = {member.name for member in MEMBERS} | TORCHS_OWN
    for file in (PACKAGE / "compat").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            private = isinstance(node, ast.Attribute) and re.match(r"_[A-Za-z]\w*$", node.attr)
            if private and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                assert node.attr in known, f"{file.name}:{node.lineno} {node.attr}"


def test_each_row_has_a_text_for_each_version() -> None:
    for table, lead in ((deepspeed_members.OVERRIDDEN, 2), (deepspeed_members.CALLED, 2), (deepspeed_members.READ, 1)):
        for rows in table.values():
            assert all(len(row) == lead + len(deepspeed_members.VERSIONS) for row in rows)


def test_the_installed_deepspeed_passes() -> None:
    assert version.check_deepspeed() == len(MEMBERS)


# ---- a wrong DeepSpeed


def refusal() -> str:
    with pytest.raises(version.DeepSpeedVersionError) as caught:
        version.check_deepspeed()
    return str(caught.value)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    told = refusal()
    assert "needs deepspeed==0.19.8" in told and "found 0.20.0" in told and "pip install deepspeed==0.19.8" in told


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, closure: Any, scale: float = 1.0) -> None:
        del self, closure, scale

    monkeypatch.setattr(deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3, "step", step)
    told = refusal()
    assert "deepspeed 0.19.8" in told and "DeepSpeedZeroOptimizer_Stage3.step takes (self, closure, scale=...)" in told
    assert "ds_vertical.engine.zero3.optimizer overrides it as (self, closure=...)" in told
    assert "pip install deepspeed==0.19.8" in told


def test_a_missing_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(deepspeed.runtime.utils, "combine_grad_norm_groups")
    assert "deepspeed.runtime.utils.combine_grad_norm_groups is missing" in refusal()


def test_an_attribute_that_nothing_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {STAGE3: (("compat.zero_optimizer", "fp16_groups fp17_groups"),)}
    monkeypatch.setattr(deepspeed_members, "READ", rows)
    assert "DeepSpeedZeroOptimizer_Stage3.fp17_groups is missing" in refusal()


def counted(stock: Any) -> Any:
    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, *args, **kwargs)

    return count


@pytest.mark.parametrize(
    "wrapped",
    [counted, lambda stock: lambda *a, **kw: stock(*a, **kw), lambda stock: functools.partial(stock, tag=None)],
    ids=["self first", "other names", "partial"],
)
def test_a_wrapper_that_passes_everything_on_is_no_other_method(monkeypatch: pytest.MonkeyPatch, wrapped: Any) -> None:
    """Scripts and tools wrap DeepSpeed's methods before they import this package."""
    stock = deepspeed.DeepSpeedEngine.save_checkpoint
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "save_checkpoint", wrapped(stock))
    assert version.check_deepspeed() == len(MEMBERS)
