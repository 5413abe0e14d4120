"""`ds-vertical limits`: real measurements, small; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_vertical import limits

MODEL = Path(__file__).parents[1] / "configs" / "models" / "gpt_13m.json"


def test_rates_are_measured_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "limits.json"
    options = ["--path", str(tmp_path), "--size-mb", "4", "--rounds", "1", "--model", str(MODEL), "--out", str(out)]
    assert limits.main([*options, "--dtype", "fp32", "--tokens", "16"]) == 0
    report = json.loads(out.read_text())
    rates = report["rates"]
    names = {"ssd_read", "ssd_write", "ssd_read_together", "copy_host"}
    assert {f"{name}_bytes_per_s" for name in names} | {"adam_elements_per_s", "layer_forward_s"} <= set(rates)
    assert all(value > 0 for name, value in rates.items() if name != "layer_backward_s")  # a difference: noise at this size
    assert report["ssd_limit"] is None and report["facts"]["num_cores"] > 0
    assert f"{rates['ssd_read_bytes_per_s'] / 1e9:.3f} GB/s" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--path", "/no/such"], "--path /no/such: no such folder"),
        (["--rounds", "0"], "--rounds 0: write 1 or more"),
        (["--ssd-limit", "fast"], "write READ,WRITE"),
        (["--path", "/dev/shm", "--ssd-limit", "1M,1M"], "lies on tmpfs"),
    ],
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert limits.main(options) == 2
    assert words in capsys.readouterr().err
