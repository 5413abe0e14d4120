"""README.md and docs/ say what is so: scripts run, JSONs load, commands exist, links lead somewhere, tables are made."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import ROOT
from processes import free_port

from ds_vertical.config.cross_check import check
from ds_vertical.config.section import SECTION, VerticalConfig, load_section, with_section_on_top

sys.path.insert(0, str(ROOT / "scripts"))

import keys_table  # noqa: E402

TEXT = (ROOT / "README.md").read_text()
GUIDES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
MADE = {"docs/families.md"}  # by tests/support/sweep.py; its rows quote messages
PAGES = [*GUIDES, "patches/README.md", *(f"benchmarks/{name}.md" for name in ("README", "stock_best", "predictions/README"))]
# What a user has of their own: a model, data, an end.
OWN = """
import torch
num_steps = {steps}
_ids = torch.arange(16).view(1, 16)
micro_batches = iter([{{"input_ids": _ids, "labels": _ids}}] * {count})
_train = engine.train_batch
engine.train_batch = lambda data: print("LOSS", float(_train(data))) or 0
print("ENGINE", type(engine).__name__)
"""


# ---------------------------------------------------------------------------------------------------------------- blocks


class Block(NamedTuple):
    """A fenced block of a page; `line` is that of its fence."""

    page: str
    line: int
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.S | re.M)
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]


BLOCKS = [block for page in GUIDES for block in blocks_of(page)]


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in BLOCKS if block.language in languages]


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.S | re.M)


def test_every_block_is_run_or_checked_or_says_that_it_is_another_language() -> None:
    others = [block for block in BLOCKS if block.language not in ("python", "json", "bash", "text", "mermaid")]
    assert others == []


def own_json(folder: Path) -> dict[str, Any]:
    """README's JSON on an SSD of one's own, its section on top."""
    text = next(block.text for block in BLOCKS if block.page == "README.md" and block.language == "json")
    return with_section_on_top(json.loads(text.replace('"/ssd"', json.dumps(str(folder)))))


@pytest.mark.parametrize("block", of("json"))
def test_a_json_is_accepted_without_a_warning(block: Block, tmp_path: Path) -> None:
    """A whole configuration as it stands; a section alone within README's."""
    config = with_section_on_top(json.loads(block.text))
    assert list(config)[-1] == SECTION
    config = own_json(tmp_path) | config
    section = load_section(config)
    assert section is not None and section.enabled and check(config, section) == []


SCRIPTS = [block for block in BLOCKS if block.language == "python" and re.search(r"train_batch|Trainer\(", block.text)]


def launched(folder: Path, words: list[str], ends_well: bool = True) -> str:
    """What the deepspeed launcher's script printed, in a folder with a model `my_model`."""
    (folder / "ssd").mkdir()
    (folder / "my_model").mkdir()
    (folder / "my_model" / "config.json").write_text((ROOT / "configs" / "models" / "gpt_13m.json").read_text())
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    port = ["--master_port", str(free_port())]
    done = subprocess.run([launcher, *port, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=550)
    assert (done.returncode == 0) == ends_well, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_scripts_of_the_pages_are_known() -> None:
    assert [script.page for script in SCRIPTS] == ["README.md", "docs/usage.md"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("enabled", [True, False])
def test_the_first_script_runs_as_it_stands_under_both_launch_lines(tmp_path: Path, enabled: bool) -> None:
    """Stock trains it. But without a GPU it takes what a parameter's buffer held for its value when it saves."""
    config = own_json(tmp_path / "ssd")
    line = next(words for block in BLOCKS if block.page == "README.md" for words in lines_of(block) if words[0] == "deepspeed")
    words = [*line[1:], "--use_cpu", "true", "--max_steps", "2", "--logging_steps", "1", "--report_to", "none"]
    assert words[:2] == ["--module", "ds_vertical.run"]
    section = config.pop(SECTION)
    if enabled:
        config["zero_optimization"][SECTION] = section
    else:
        words = words[2:]
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    script = SCRIPTS[0].text.replace("(1000, 64)", "(40, 4)")  # the user's own data: bf16 takes minutes where AVX2 emulates it
    assert script != SCRIPTS[0].text
    (tmp_path / "train.py").write_text(script)
    printed = launched(tmp_path, words, ends_well=enabled)
    assert ("vertical schedule ACTIVE: bridge Trainer" in printed) is enabled
    losses = re.findall(r"'loss': '?([\d.]+)", printed)
    assert len(losses) == 2
    if not enabled:
        assert "in _save_checkpoint" in printed and "The weights trying to be saved contained shared tensors" in printed
        return
    assert (tmp_path / "out" / "config.json").is_file() and any((tmp_path / "out").glob("*.safetensors"))
    assert list((tmp_path / "ssd").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("enabled", [True, False])
def test_the_script_of_whole_steps_runs_as_it_stands(tmp_path: Path, enabled: bool) -> None:
    steps, config = 2, own_json(tmp_path / "ssd")
    config[SECTION] = {} if enabled else {"enabled": False}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    own = OWN.format(steps=steps, count=steps * config["gradient_accumulation_steps"])
    (tmp_path / "train.py").write_text(SCRIPTS[1].text.replace("\nfor step in", f"{own}\nfor step in"))
    printed = launched(tmp_path, ["train.py", "--deepspeed_config", "ds_config.json"])
    assert f"ENGINE {'VerticalEngine' if enabled else 'DeepSpeedEngine'}" in printed
    losses = [float(loss) for loss in re.findall(r"^LOSS (\S+)", printed, re.M)]
    assert len(losses) == steps and losses[1] < losses[0]
    assert list((tmp_path / "ssd").iterdir()) == []
    if enabled:
        assert (tmp_path / "out" / "config.json").is_file() and any((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize("block", [param for param in of("python") if param.values[0] not in SCRIPTS])
def test_other_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, but for checks that doctor would start: they are replaced by none."""
    (tmp_path / "ds_config.json").write_text(json.dumps(own_json(tmp_path)))
    doctor = importlib.import_module("ds_vertical.cli.doctor.command")
    monkeypatch.setattr(doctor, "CHECKS", ())
    exec(block.text, {"__name__": block.page, "config_path": tmp_path / "ds_config.json", "nvme_path": tmp_path})


# -------------------------------------------------------------------------------------------------------------- commands


@functools.cache
def entry() -> Any:
    """The function behind `ds-vertical`."""
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["ds-vertical"].partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def help_of(*words: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        entry()([*words, "--help"])
    assert ended.value.code == 0, words
    return printed.getvalue()


def lines_of(block: Block) -> Iterator[list[str]]:
    """The words of each command; a loop's head and end are none."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in ("for", "done"):
            yield words


def flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def check_script(path: str, words: list[str]) -> None:
    """A file of the repository, whose source has the flags."""
    source = (ROOT / path).read_text()
    shared = (ROOT / "benchmarks" / "inturn.py").read_text() if path.startswith("benchmarks/") else ""
    assert [flag for flag in flags(words) if flag not in source + shared] == [], path


def check_command(words: list[str]) -> None:
    """Its program, sub-command, flags and files exist."""
    program, *rest = words
    if program == "ds-vertical":
        own, _, script = " ".join(rest).partition(" -- ")
        name, *given = own.split()
        known = help_of(name, *(word for word in given if word == "--links" and name == "limits"))
        assert [flag for flag in flags(given) if flag not in known] == [], name
        for option in ("--config", "--stock-config", "--model"):
            path = given[given.index(option) + 1] if option in given else ""
            assert not path.startswith("configs/") or (ROOT / path).is_file(), path
        if script:
            check_script(script.split()[0], script.split()[1:])
    elif program in ("python", ".venv/bin/python") and rest[:2] == ["-m", "pytest"]:
        assert [word for word in rest[2:] if word.startswith("tests/") and not (ROOT / word).is_file()] == []
    elif program in ("python", "bash"):
        check_script(rest[0], rest[1:])
    else:
        assert program in (".", "deepspeed"), f"{words}: a program that this test does not know"


@pytest.mark.parametrize("block", of("bash"))
def test_a_command_exists_with_its_flags_and_files(block: Block) -> None:
    for words in lines_of(block):
        check_command(words)


def test_a_command_that_does_not_exist_is_found() -> None:
    check_command(shlex.split("ds-vertical ab --config configs/gpt_101m_cpu.json -- scripts/train.py --model gpt_13m"))
    for wrong in (
        "ds-vertical ab --nothing",
        "ds-vertical ab --config configs/none.json",
        "ds-vertical ab -- scripts/train.py --nothing",
        "python benchmarks/run.py --nothing",
        "python -m pytest tests/test_none.py",
        "rm -r /",
    ):
        with pytest.raises(AssertionError):
            check_command(shlex.split(wrong))


@pytest.mark.parametrize("page", PAGES)
def test_a_command_within_a_sentence_exists(page: str) -> None:
    for name, given in re.findall(r"`ds-vertical ([a-z-]+)([^`]*)`", prose(page)):
        assert name in help_of(), f"{page}: ds-vertical {name}"
        own = given.partition(" -- ")[0]
        assert [flag for flag in re.findall(r"--[a-z-]+", own) if flag not in help_of(name)] == [], f"{page}: {name} {own}"


def test_readme_has_every_command() -> None:
    named = re.findall(r"^\| `ds-vertical ([a-z-]+)` \|", TEXT, re.M)
    assert sorted(named) == sorted(re.findall(r"^    (\S+)", help_of(), re.M))


# ------------------------------------------------------------------------------------------------------- links and files


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, words and hyphens, the second of a kind with -1."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def broken_links(page: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (anchor and (there.suffix != ".md" or anchor not in anchors(there))):
            yield target


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_anchor_leads_somewhere(page: str) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("# One two?\n## `x.y`: z\n## One two\n[a](#one-two) [b](a.md#xy-z) [c](a.md#no) [d](b.md)")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert list(broken_links("a.md")) == ["a.md#no", "b.md"] and "one-two-1" in anchors(tmp_path / "a.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_in_a_page_exists(page: str) -> None:
    text = prose(page)
    named = set(re.findall(r"(?<![\w/.-])((?:docs|tests|benchmarks|configs|scripts|patches)/[\w/.-]*\w/?)", text))
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in re.findall(r"`(test_\w+\.py)`", text) if name not in tests] == []
    if page != "CONTRIBUTING.md" or (ROOT / "ds_vertical" / "engine").is_dir():  # it names the packages, not yet all there
        named |= set(re.findall(r"`(ds_vertical/[\w/.-]+)`", text))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_page_is_linked_from_readme() -> None:
    assert [page for page in GUIDES[1:] if f"]({page})" not in TEXT] == []


# ------------------------------------------------------------------------------------------------------------- the pages


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200 and len(TEXT.encode()) <= 14 * 1024


def test_the_table_of_keys_is_the_one_that_the_script_makes() -> None:
    assert keys_table.replaced(TEXT) == TEXT, "run: python scripts/keys_table.py --write"
    for field in VerticalConfig.model_fields.values():
        assert len(keys_table.first_sentence(field.description or "").split()) in range(1, keys_table.MAX_WORDS + 1)
    with pytest.raises(ValueError, match="more than 12 words"):
        keys_table.first_sentence("one " * 13)


def test_configuration_has_every_key_once_with_its_default() -> None:
    rows = re.findall(r"^- `(\w+)`, default `(.*?)`[:.]", (ROOT / "docs" / "configuration.md").read_text(), re.M)
    assert sorted(rows) == sorted((name, keys_table.default_of(name)) for name in VerticalConfig.model_fields)


@pytest.mark.parametrize("page", [page for page in GUIDES if page != "README.md"])
def test_a_page_opens_with_its_question(page: str) -> None:
    assert re.match(r"# [^\n]+\?\n\n", (ROOT / page).read_text())


@pytest.mark.parametrize("page", [page for page in GUIDES if page not in MADE])
def test_lines_of_prose_have_at_most_100_columns(page: str) -> None:
    wide = [line for line in prose(page).splitlines() if len(line) > 100 and not line.startswith(("|", "!["))]
    assert wide == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_a_path_of_one_machine(page: str) -> None:
    assert re.findall(r"(?<![\w.~/-])/(?:work|tmp|root|home)/[^\s`\"')]*", (ROOT / page).read_text()) == []
