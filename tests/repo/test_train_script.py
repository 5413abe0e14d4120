"""scripts/train.py and its parts: the text and its split, deterministic batches, `--model`, and real training runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "scripts"))

import model_config  # noqa: E402
import text_data  # noqa: E402

# One layer's matrices are 1 MiB and more in fp32, so that they go to SSD; everything else is as small as it gets.
TINY = ("gpt_neox", "hidden_size=256", "intermediate_size=1024", "num_hidden_layers=3", "num_attention_heads=4")
TINY_DIMS = (*TINY[1:], "vocab_size=272", "max_position_embeddings=64")


def write_files(folder: Path, count: int = 40) -> Path:
    """A folder of different small texts, one of them in a folder below."""
    folder.mkdir()
    (folder / "deeper").mkdir()
    for index in range(count):
        (folder / ("deeper" if index == 0 else "") / f"{index:03}.txt").write_text(f"text {index} " * (index + 5))
    return folder


def stream_of(data: text_data.TextData) -> bytes:
    return b"".join(sorted(split_documents(data.train) + split_documents(data.held_out)))


def split_documents(tokens: text_data.Tokens) -> list[bytes]:
    ends = np.flatnonzero(tokens == text_data.END_OF_TEXT)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else []
    return [bytes(tokens[start:end].astype(np.uint8)) for start, end in zip(starts, ends, strict=True)]


# --- text ----------------------------------------------------------------------------------------------------------


def test_every_document_is_in_exactly_one_stream_and_the_manifest_says_which(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "text")
    data = text_data.build([folder], tmp_path / "cache")
    train, held_out = split_documents(data.train), split_documents(data.held_out)
    contents = sorted(path.read_bytes() for path in folder.rglob("*.txt"))
    assert sorted(train + held_out) == contents
    assert held_out and train
    manifest = json.loads((data.folder / "manifest.json").read_text())
    assert (manifest["num_train_tokens"], manifest["num_held_out_tokens"]) == (len(data.train), len(data.held_out))
    for document in manifest["documents"]:
        content = (tmp_path / document["name"]).read_bytes()
        assert document["sha256"] == hashlib.sha256(content).hexdigest()
        assert (content in held_out) == (document["held_out"] == 1.0)


def test_adding_a_file_moves_no_other_across(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "text", count=60)
    before = set(split_documents(text_data.build([folder], tmp_path / "cache").held_out))
    (folder / "000.txt").write_text("new")
    assert before <= set(split_documents(text_data.build([folder], tmp_path / "cache").held_out)) | {b"new"}


@pytest.mark.parametrize("count", [1, 2])
def test_the_smallest_texts_still_have_both_streams(tmp_path: Path, count: int) -> None:
    data = text_data.build([write_files(tmp_path / "text", count)], tmp_path / "cache")
    assert len(data.train) and len(data.held_out)
    if count == 1:  # the tail of the lone document
        assert len(data.held_out) < len(data.train)


def test_a_built_set_is_used_again_and_another_content_is_another_set(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "text")
    first = text_data.build([folder], tmp_path / "cache")
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    assert text_data.build([folder], tmp_path / "cache").folder == first.folder
    assert (first.folder / "train.bin").stat().st_mtime_ns == stamp
    (folder / "001.txt").write_text("changed")
    assert text_data.build([folder], tmp_path / "cache").folder != first.folder


def test_builders_at_the_same_time_leave_one_whole_set(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "text")
    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(lambda _: text_data.build([folder], tmp_path / "cache"), range(8)))
    assert len({data.folder for data in built}) == 1
    assert len({stream_of(data) for data in built}) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [built[0].folder.name]


def test_missing_and_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        text_data.build([tmp_path / "missing"], tmp_path / "cache")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="no text"):
        text_data.build([tmp_path / "empty.txt"], tmp_path / "cache")


def test_standard_library_has_no_tests_in_it() -> None:
    names = [name for _, name in text_data.standard_library_files()]
    assert len(names) > 300 and names == sorted(names)
    assert "json/decoder.py" in names
    assert not [name for name in names if "test" in name.split("/")[:-1] or "site-packages" in name]


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens() -> text_data.Tokens:
    return np.arange(5000, dtype=np.uint16) % 257


def test_a_batch_depends_on_its_key_and_nothing_else(tokens: text_data.Tokens) -> None:
    first = text_data.sample_batch(tokens, 3, 16, (0, 1, 2, 0))
    assert first.shape == (3, 16) and first.dtype == np.int64
    assert (first == text_data.sample_batch(tokens, 3, 16, (0, 1, 2, 0))).all()
    for key in ((1, 1, 2, 0), (0, 2, 2, 0), (0, 1, 3, 0), (0, 1, 2, 1)):
        assert (first != text_data.sample_batch(tokens, 3, 16, key)).any()


def test_stream_of_batches_is_that_of_steps_and_micro_batches(tokens: text_data.Tokens) -> None:
    stream = list(islice(text_data.train_batches(tokens, 2, 8, 3, seed=5, rank=1), 7))
    for index, batch in enumerate(stream):
        assert (batch == text_data.sample_batch(tokens, 2, 8, (5, index // 3, index % 3, 1))).all()


def test_held_out_batches_are_fixed_and_differ_between_ranks(tokens: text_data.Tokens) -> None:
    def windows(rank: int) -> Iterator[bytes]:
        for batch in text_data.held_out_batches(tokens[:3001], 2, 8, 5, rank, 2):
            yield from (row.tobytes() for row in batch)

    first = list(windows(0))
    assert first == list(windows(0)) and len(first) == 10
    assert not set(first) & set(windows(1))


def test_last_window_reaches_the_end_and_a_short_text_is_refused(tokens: text_data.Tokens) -> None:
    (batch,) = text_data.held_out_batches(tokens, 2, 8, 1, 0, 1)
    assert (batch[0] == tokens[:8]).all() and (batch[1] == tokens[-8:]).all()
    assert text_data.sample_batch(tokens[:8], 4, 8, (0,)).shape == (4, 8)
    with pytest.raises(ValueError, match="--seq 9"):
        text_data.sample_batch(tokens[:8], 1, 9, (0,))


# --- models --------------------------------------------------------------------------------------------------------


def resolve(model: str, *dims: str, dropout: float | None = None, seq_len: int = 16) -> Any:
    return model_config.resolve(model, dims, dropout, seq_len)


def test_shapes_resolve_by_name_file_and_folder(tmp_path: Path) -> None:
    named = resolve("gpt_13m")
    file = ROOT / "configs" / "models" / "gpt_13m.json"
    (tmp_path / "config.json").write_text(file.read_text())
    assert named.hidden_size == 512 and named.num_hidden_layers == 4 and named.use_cache is False
    assert resolve(str(file)).to_dict() == resolve(str(tmp_path)).to_dict() == named.to_dict()


@pytest.mark.parametrize("model", ["gpt2", "llama", "gpt_neox", "qwen3", "opt", "bloom"])
def test_any_architecture_resolves_by_type_and_dimensions(model: str) -> None:
    aliases = AutoConfig.for_model(model).attribute_map
    dims = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 272}
    config = resolve(model, *(f"{aliases.get(key, key)}={value}" for key, value in dims.items()))
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    assert network.get_input_embeddings().weight.shape[0] == 272
    assert config.num_hidden_layers == 2 and config.use_cache is False


def test_dropout_replaces_every_rate() -> None:
    config = resolve("gpt2", dropout=0.25)
    assert (config.attn_pdrop, config.embd_pdrop, config.resid_pdrop) == (0.25, 0.25, 0.25)
    config = resolve("gpt_13m", dropout=0.25)
    assert (config.attention_dropout, config.hidden_dropout) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "gpt_13"}, "gpt_13m"),
        ({"model": "llamma"}, "llama"),
        ({"model": "bert_of_my_own"}, "neither a shape"),
        ({"model": "gpt2", "dims": ("hiden_size=3",)}, "hidden_size"),
        ({"model": "gpt2", "dims": ("n_embd",)}, "KEY=JSON"),
        ({"model": "gpt2", "dims": ("model_type=3",)}, "--model"),
        ({"model": "gpt2", "dims": ("vocab_size=256",)}, "need 257"),
        ({"model": "gpt_13m", "seq_len": 1000}, "256 positions"),
        ({"model": "gpt2", "dropout": 1.0}, "--dropout"),
        ({"model": "vit"}, "no causal language model"),
    ],
)
def test_senseless_models_are_refused(arguments: dict[str, Any], words: str) -> None:
    given = {"dims": (), "dropout": None, "seq_len": 16} | arguments
    with pytest.raises(ValueError, match=words):
        model_config.resolve(**given)


def test_model_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, words in (("{", "not valid JSON"), ('{"hidden_size": 3}', "model_type"), ("[]", "model_type")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            resolve(str(path))


# --- real runs -----------------------------------------------------------------------------------------------------


def tiny_config(folder: Path) -> Path:
    """configs/gpt_13m_cpu.json with swap files below this test's folder, and M = 2."""
    config = json.loads((ROOT / "configs" / "gpt_13m_cpu.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section]["nvme_path"] = str(folder / "swap")
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def train_arguments(folder: Path) -> list[str]:
    text = write_files(folder / "text")
    return [
        *("scripts/train.py", "--model", TINY[0], "--dims", *TINY_DIMS, "--text", str(text)),
        *("--cache", str(folder / "cache"), "--seq", "32", "--eval-every", "4", "--eval-batches", "3"),
    ]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_ab_of_the_training_script_is_equal_and_reads_less_vertically(tmp_path: Path) -> None:
    own = ["--config", str(tiny_config(tmp_path)), "--out", str(tmp_path / "out"), "--steps", "8"]
    run([sys.executable, "-m", "ds_vertical.cli.main", "ab", *own, "--", *train_arguments(tmp_path)])
    report = json.loads((tmp_path / "out" / "ab.json").read_text())
    assert report["losses_equal"] is True
    stock, vertical = report["arms"]["stock"], report["arms"]["vertical"]
    assert 0 < vertical["read_bytes_per_step"] < stock["read_bytes_per_step"]
    curves = [
        [line for line in read_lines(tmp_path / "out" / f"{arm}.0.metrics" / "metrics.jsonl") if "held_out_loss" in line]
        for arm in ("stock", "vertical")
    ]
    assert [line["step"] for line in curves[0]] == [0, 4, 8]
    assert curves[0][-1]["held_out_loss"] < curves[0][0]["held_out_loss"] - 0.5
    assert [line["step"] for line in curves[1]] == [0, 4, 8]
    for left, right in zip(*curves, strict=True):
        assert left["held_out_loss"] == pytest.approx(right["held_out_loss"], rel=1e-6)


@pytest.mark.slow
def test_saved_model_is_read_back_and_predicts_as_trained(tmp_path: Path) -> None:
    config, out, saved = tiny_config(tmp_path), tmp_path / "out", tmp_path / "saved"
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "1"]
    arguments = [*train_arguments(tmp_path), "--steps", "6", "--out", str(out), "--save", str(saved)]
    done = run([*command, "--master_port", "29617", *arguments, "--deepspeed_config", str(config)])
    lines = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert all(
        line["tokens"] == 2 * 2 * 32 and line["step_s"] > 0 and line["grad_norm"] > 0 for line in lines if "loss" in line
    )
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert f"held-out {held_out[0]:.4f} -> {held_out[-1]:.4f}" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(saved)
    data = text_data.build([tmp_path / "text"], tmp_path / "cache")
    batches = text_data.held_out_batches(data.held_out, 2, 32, 4, 0, 1)  # 3 rounded up to M = 2
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in map(torch.from_numpy, batches)]
    assert sum(losses) / len(losses) == pytest.approx(held_out[-1], rel=1e-4)
    assert not list((tmp_path / "swap").rglob("*.swp"))


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_with_the_same_numbers(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "1"]
    command += ["--master_port", "29618", *train_arguments(tmp_path), "--deepspeed_config", str(config)]
    run([*command, "--steps", "6", "--out", str(tmp_path / "whole")])
    parts = ["--out", str(tmp_path / "parts"), "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2"]
    run([*command, "--steps", "3", *parts])
    assert {path.name for path in (tmp_path / "saved").glob("global_step*")} == {"global_step2", "global_step3"}
    assert "trained 3 steps" in run([*command, "--steps", "6", *parts]).stdout
    told = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    whole, found = ([(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line] for lines in told)
    assert found == whole and [step for step, *_ in whole] == [1, 2, 3, 4, 5, 6]
    refused = subprocess.run([*command, "--checkpoint-every", "2"], capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert refused.returncode != 0 and "--checkpoint DIR" in refused.stderr + refused.stdout
