"""Collectives over the levels of a cluster, in flight: spread and gather weights, reduce gradients and send them across.

[Note: lanes] Each level has a process group per direction (weights, gradients), and on the CPU a thread per group: a lane. A
lane takes its hops first in, first out. A collective of several hops goes from lane to lane. All ranks issue collectives in the
order of one schedule, so the order in each lane is the same on all ranks, whatever the other lanes do. A rank whose hop has
failed issues none behind it any more: its hops would meet other ones of the other ranks. Every later collective of that
direction raises that hop's error. On a GPU hops are issued at once by the calling thread.

[Note: trees] A sum goes to its owner hop by hop: all-to-all of the ranks' terms, then their addition in ascending order of ranks,
in fp32, rounded to the dtype of communication at the end of each hop. The first hop is over w ranks, then over g/w, then over
W/g. So the bits of a sum depend on the topology's numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from ds_vertical.distributed.quantize import Quantizer
from ds_vertical.distributed.topology import Topology

T = TypeVar("T")


class Issued(Generic[T]):
    """A collective that this rank has issued."""

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        raise NotImplementedError

    def wait(self) -> T:
        """The result, once it has come. May be called again. Raises what a hop has failed with."""
        raise NotImplementedError


class LevelCollectives:
    """See [Note: lanes]. Made on all ranks together. Chunks are ordered by `topology.order`; S is the elements of a chunk, of all
    parameters of a unit together, which DeepSpeed has padded. Tensors given belong to the collective until it is over."""

    def __init__(self, topology: Topology) -> None:
        raise NotImplementedError

    def spread(self, share: torch.Tensor, quantizer: Quantizer | None = None) -> Issued[torch.Tensor]:
        """From this rank's own chunk (S elements) to its copy: the chunks of `topology.copy_order(rank)`, (W/w, S).

        With a quantizer each chunk is rounded once, by its owner, whose copy has the rounded values, too. The hop across
        nodes comes first.
        """
        raise NotImplementedError

    def gather(
        self, copy: torch.Tensor | Issued[torch.Tensor], quantizer: Quantizer | None = None
    ) -> Issued[list[torch.Tensor]]:
        """From the copies of a pair to the whole unit: the chunks of all W ranks, in the order of the ranks (views of one flat
        tensor). `copy`: what `spread` gives, over or not."""
        raise NotImplementedError

    def reduce(self, rows: torch.Tensor, quantizer: Quantizer | None = None) -> Issued[torch.Tensor]:
        """From this rank's terms of all chunks, (W, S) as `cut_into_chunks` orders them, to the sums over its node of the chunks of
        `topology.node_share_order(rank)`, (W/g, S). Hops: pair, then node. With a quantizer each hop's terms are rounded."""
        raise NotImplementedError

    def cross(
        self, node_share: torch.Tensor | Issued[torch.Tensor], quantizer: Quantizer | None = None
    ) -> Issued[torch.Tensor]:
        """From the sums over each node to the sums over all ranks of this rank's own chunk (S elements). `node_share`: what
        `reduce` gives, over or not."""
        raise NotImplementedError

    def mesh(self) -> DeviceMesh:
        """The process groups of the weights as torch's mesh, outermost first: "world", "node", "pair"; those of more than one
        rank."""
        raise NotImplementedError

    def close(self) -> None:
        """End the lanes' threads, once their hops are over."""
        raise NotImplementedError


def cut_into_chunks(tensors: Sequence[torch.Tensor], order: Sequence[int]) -> torch.Tensor:
    """Flat tensors as DeepSpeed partitions them over the ranks: (W, S), a row for each rank of `order`. A row has the rank's shard
    of each tensor, one behind the other. Each tensor is padded with zeros to a multiple of W."""
    raise NotImplementedError


def joined_chunks(chunks: Sequence[torch.Tensor], numels: Sequence[int]) -> list[torch.Tensor]:
    """The flat tensors, of `numels` elements, from all ranks' chunks in the order of the ranks: undoes `cut_into_chunks`."""
    raise NotImplementedError


def tree_sum(terms: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """The sum over the first dimension of `terms`, one hop after the other, see [Note: trees]: the first of `widths` is the
    number of neighbours that are added first."""
    raise NotImplementedError
