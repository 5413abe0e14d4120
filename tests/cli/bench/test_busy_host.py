"""What transfers and CPU Adam take from a computation beside them."""

from __future__ import annotations

from time import sleep

import pytest
import torch

from ds_vertical.cli.bench.host_bench import core_s_per_byte, core_share


def test_a_core_that_is_taken_shows_and_idle_bytes_are_free() -> None:
    """Transfers that work as hard as the products take cores from them; those of as many bytes that only sleep do not."""
    own = torch.ones(256, 1024), torch.ones(1024, 1024)

    def working() -> int:
        torch.nn.functional.linear(*own)
        return 1 << 20

    def sleeping() -> int:
        sleep(0.002)
        return 1 << 20

    busy, idle = core_s_per_byte(working, 2, 4), core_s_per_byte(sleeping, 2, 4)
    assert busy * (1 << 20) > 1e-4 and busy > 2 * idle


def test_what_goes_wrong_in_a_transfer_is_raised() -> None:
    def fails() -> int:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        core_s_per_byte(fails, 2, 1)


@pytest.mark.slow
def test_the_share_is_what_is_lost_over_what_is_done() -> None:
    """A thread that sleeps takes less than one that works as the products do."""
    own = torch.ones(512, 1024), torch.ones(1024, 1024)

    def sleeping() -> int:
        sleep(0.002)
        return 1

    def on_every_core() -> int:
        torch.nn.functional.linear(*own)
        return 1

    assert 0 <= core_share(sleeping, 5) < core_share(on_every_core, 5) < 4
    with pytest.raises(ZeroDivisionError):
        core_share(lambda: 1 // 0, 1)
