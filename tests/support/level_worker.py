"""One rank of several: collectives over levels, against what one hop over all ranks gives, and against what may be lost.

python tests/support/level_worker.py [NODE/PAIR ...]      # topologies, for the WORLD_SIZE there is
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
from rounding import error_bound

from ds_vertical.compat.accelerator import init_distributed
from ds_vertical.compat.ops import cache
from ds_vertical.distributed import levels, ranks
from ds_vertical.distributed.levels import Issued, LevelCollectives, cut_into_chunks, joined_chunks, tree_sum
from ds_vertical.distributed.quantize import Quantizer
from ds_vertical.distributed.topology import Level, Topology

NUMELS = ((40,), (1,), (7, 1, 300), (64, 3, 5, 1), (5000, 33))  # of the parameters of each unit; most are padded
LIMIT = timedelta(hours=2)


def unit(numels: Sequence[int], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The flat tensors of a unit, of magnitudes that differ; the same on every rank."""
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(numel, generator=random) * torch.logspace(-2, 2, numel)).to(dtype) for numel in numels]


def terms_of(rank: int, number: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank adds to the gradients of a unit."""
    return unit(NUMELS[number], 1000 * number + rank, dtype)


class Rank:
    """This rank in one topology."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.order = topology.order
        self.levels = LevelCollectives(topology)
        self.me, self.world = ranks.rank(), topology.world
        self.widths = [topology.width(level) for level in (Level.PAIR, Level.NODE, Level.WORLD)]

    def own(self, tensors: Sequence[torch.Tensor], owner: int | None = None) -> torch.Tensor:
        return cut_into_chunks(tensors, range(self.world))[self.me if owner is None else owner].clone()

    # ---- exact

    def weights_arrive_everywhere(self, dtype: torch.dtype) -> None:
        """All units are under way at once, and are waited for from the last one on."""
        units = [unit(numels, number, dtype) for number, numels in enumerate(NUMELS)]
        spreads = [self.levels.spread(self.own(tensors)) for tensors in units]
        gathers = [self.levels.gather(spread) for spread in spreads]
        for tensors, numels, spread, gather in reversed(list(zip(units, NUMELS, spreads, gathers, strict=True))):
            chunks, copy = gather.wait(), spread.wait()
            assert all(map(torch.equal, joined_chunks(chunks, numels), tensors)), numels
            owners = self.topology.copy_order(self.me)
            assert len(copy) == len(owners)
            assert all(torch.equal(chunk, self.own(tensors, owner)) for chunk, owner in zip(copy, owners, strict=True))
            again = self.levels.gather(copy).wait()  # as in the backward, from the copy alone
            assert all(map(torch.equal, again, chunks))
            assert spread.is_over and gather.is_over

    def sums_are_those_of_one_hop(self, dtype: torch.dtype) -> None:
        """Bit for bit those of a single all-to-all over all ranks, and additions in the same tree."""
        numbers = range(len(NUMELS))
        rows = [cut_into_chunks(terms_of(self.me, number, dtype), self.order) for number in numbers]
        shares = [self.levels.cross(self.levels.reduce(each)) for each in rows]
        for number, share in reversed(list(zip(numbers, shares, strict=True))):
            terms = cut_into_chunks(terms_of(self.me, number, dtype), range(self.world))
            received = torch.empty_like(terms)
            torch.distributed.all_to_all_single(received.view(torch.uint8), terms.view(torch.uint8))
            expected, found = tree_sum(received, self.widths), share.wait()
            assert found.dtype == dtype and torch.equal(found, expected), (number, dtype)
            everyones = [self.own(terms_of(rank, number, dtype)).double() for rank in range(self.world)]
            total, magnitude = torch.stack(everyones).sum(0), torch.stack(everyones).abs().sum(0)
            epsilon = 3 * 2.0**-8 if dtype == torch.bfloat16 else 1e-6  # of three hops
            assert ((found.double() - total).abs() <= magnitude * epsilon).all()

    # ---- rounded

    def rounded_weights_are_the_same_everywhere(self, dtype: torch.dtype) -> None:
        moves = self.topology.num_chunks(Level.PAIR) > 1
        for number, numels in enumerate(NUMELS):
            tensors = unit(numels, number, dtype)
            quantizer = Quantizer(8, 64)
            chunks = self.levels.gather(self.levels.spread(self.own(tensors), quantizer)).wait()
            exact = cut_into_chunks(tensors, range(self.world))
            found = torch.stack(chunks)
            lost = (found.double() - exact.double()).abs()
            assert (lost <= error_bound(exact, quantizer)).all(), numels
            assert torch.equal(found, exact) or moves
            self.equal_everywhere(found)
            rounded = torch.empty_like(exact)
            quantizer.dequantize(quantizer.quantize(exact), rounded)
            assert torch.equal(found, rounded if moves else exact), "the owner's chunk is rounded too, and once"
            gathered = torch.stack(self.levels.gather(self.levels.spread(self.own(tensors)), quantizer).wait())
            assert torch.equal(gathered, rounded if self.topology.pair > 1 else exact)

    def equal_everywhere(self, found: torch.Tensor) -> None:
        digest = found.view(torch.uint8).numpy().tobytes()
        assert len(set(ranks.all_gathered(digest))) == 1

    def rounded_sums_lose_no_more_than_the_bound(self, inside: Quantizer | None, across: Quantizer | None) -> None:
        """The bound: what the terms may lose at the first hop, over the ranks, and at each later hop what the sums may lose
        that are sent there, over those that send them; all divided by W, as the terms are."""
        for number, _ in enumerate(NUMELS):
            rows = {rank: self.divided(terms_of(rank, number, torch.float32)) for rank in range(self.world)}
            node_share = self.levels.reduce(rows[self.me].clone(), inside).wait()
            found = self.levels.cross(node_share.clone(), across).wait()
            place = self.order.index(self.me)
            bound = torch.zeros_like(found, dtype=torch.float64)
            exact = torch.stack([each[place] for each in rows.values()]).double()
            if inside is not None:
                bound += self.inside_bound(rows, inside)[place]
            if across is not None and self.topology.width(Level.WORLD) > 1:
                for sent in self.all_node_shares(node_share):
                    bound += error_bound(sent, across)[0]
            slack = exact.abs().sum(0) * 2.0**-20  # the additions, in fp32
            assert ((found.double() - exact.sum(0)).abs() <= bound + slack).all(), (number, inside, across)

    def divided(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return cut_into_chunks(tensors, self.order) / self.world

    def all_node_shares(self, node_share: torch.Tensor) -> list[torch.Tensor]:
        """The sums of this rank's chunk that the ranks of its hop across nodes have had."""
        everyones = ranks.all_gathered(node_share)
        hop = self.topology.hop(Level.WORLD, self.me)
        place = self.topology.node_share_order(self.me).index(self.me)
        return [everyones[rank][place : place + 1] for rank in hop]

    def inside_bound(self, rows: dict[int, torch.Tensor], inside: Quantizer) -> torch.Tensor:
        """Of all chunks: of the terms at the hop of the pair, and of a pair's sums at the hop of the node."""
        topology = self.topology
        bound = torch.zeros_like(rows[0], dtype=torch.float64)
        for pair in range(0, self.world, topology.pair):
            members = [rows[rank] for rank in range(pair, pair + topology.pair)]
            of_terms = sum((error_bound(each, inside) for each in members), torch.zeros_like(bound))
            of_terms = of_terms if topology.pair > 1 else torch.zeros_like(bound)
            bound += of_terms
            if topology.width(Level.NODE) > 1:
                most = torch.stack(members).double().sum(0).abs() + of_terms
                bound += error_bound(most, inside, torch.float32)
        return bound

    def what_is_not_finite_stays_so(self) -> None:
        tensors = [torch.ones(64 * self.world)]
        if self.me == self.world - 1:
            tensors[0][5] = float("inf")
        quantizer = Quantizer(4, 32)
        rows = cut_into_chunks(tensors, self.order)
        share = self.levels.cross(self.levels.reduce(rows, quantizer), quantizer).wait()
        assert share.isfinite().all() == (self.me != 0 or self.world == 1)
        assert not share[:32].isfinite().any() or self.me != 0
        assert share[32:].isfinite().all()

    # ---- in flight

    def lanes_are_apart(self) -> None:
        """The first rank's reduction waits for the others, and holds up neither their gathers nor its own."""
        tensors = unit(NUMELS[2], 0, torch.float32)
        rows = cut_into_chunks(tensors, self.order)
        reduction = self.levels.reduce(rows) if self.me == 0 else None
        chunks = self.levels.gather(self.levels.spread(self.own(tensors))).wait()
        assert all(map(torch.equal, joined_chunks(chunks, NUMELS[2]), tensors))
        if reduction is not None:
            assert not reduction.is_over or self.topology.node == 1
        torch.distributed.barrier()
        reduction = reduction or self.levels.reduce(rows)
        assert torch.allclose(reduction.wait(), self.topology.node * self.node_share(tensors))

    def node_share(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.own(tensors, owner) for owner in self.topology.node_share_order(self.me)])

    def terms_are_given_up_when_they_are_sent(self) -> None:
        alive: list[bool] = []
        real = levels.tree_sum

        def noting(terms: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
            alive.append(rows_left() is not None)
            return real(terms, widths)

        rows = cut_into_chunks(unit(NUMELS[3], 0, torch.float32), self.order)
        rows_left = weakref.ref(rows)
        levels.tree_sum = noting
        try:
            issued = self.levels.reduce(rows)
            del rows
            issued.wait()
        finally:
            levels.tree_sum = real
        assert not any(alive), "the sums of a whole unit outlive the exchange of its terms"

    def groups_are_those_of_meshes(self) -> None:
        """Of one for the weights and one for the gradients, whose collectives come from different threads."""
        named = {Level.PAIR: "pair", Level.NODE: "node", Level.WORLD: "world"}
        wide = [level for level in reversed(Level) if self.topology.width(level) > 1]
        found: set[str] = set()
        for mesh in (self.levels._weights.mesh, self.levels._gradients.mesh):
            if mesh is None:
                assert not wide
                continue
            assert mesh.mesh_dim_names == tuple(named[level] for level in wide)
            assert mesh.mesh.flatten().tolist() == list(range(self.world))
            for level in wide:
                group = mesh.get_group(named[level])
                assert torch.distributed.get_process_group_ranks(group) == list(self.topology.hop(level, self.me))
                assert group._get_backend(torch.device("cpu")).options._timeout == LIMIT, "as long as the group that there was"
                found.add(group.group_name)
        assert len(found - {torch.distributed.group.WORLD.group_name}) == 2 * len(wide)

    def none_is_issued_behind_one_that_failed(self) -> None:
        """Else its hops would meet other ones of the other ranks."""
        copy = self.levels.spread(self.own(unit(NUMELS[0], 0, torch.float32))).wait()
        failed: Issued[torch.Tensor] = Issued(lambda copy: copy)
        failed.fail(OSError("a disk has failed")).set()
        for given in (failed, copy, copy):
            try:
                self.levels.gather(given).wait()
            except OSError as error:
                assert str(error) == "a disk has failed"
            else:
                raise AssertionError("a gather was issued behind one that had failed")
        rows = cut_into_chunks(unit(NUMELS[0], 0, torch.float32), self.order)
        self.levels.reduce(rows).wait()  # the other direction goes on


def check(topology: Topology) -> None:
    rank = Rank(topology)
    assert len(lanes()) == 2 * len(Level)
    for dtype in (torch.float32, torch.bfloat16):
        rank.weights_arrive_everywhere(dtype)
        rank.sums_are_those_of_one_hop(dtype)
        rank.rounded_weights_are_the_same_everywhere(dtype)
    for inside, across in ((None, Quantizer(4, 64)), (Quantizer(8, 64), Quantizer(4, 64)), (Quantizer(4), Quantizer(4))):
        rank.rounded_sums_lose_no_more_than_the_bound(inside, across)
    rank.what_is_not_finite_stays_so()
    rank.lanes_are_apart()
    rank.terms_are_given_up_when_they_are_sent()
    rank.groups_are_those_of_meshes()
    rank.none_is_issued_behind_one_that_failed()
    rank.levels.close()
    for thread in lanes():
        thread.join(60)
    assert not lanes()


def lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("ds_vertical weights", "ds_vertical grad"))]


def another_number_of_ranks_is_refused() -> None:
    try:
        LevelCollectives(Topology(2 * ranks.world_size(), 2, 1))
    except ValueError as error:
        assert f"none of {ranks.world_size()} ranks" in str(error)
    else:
        raise AssertionError("levels of more ranks than there are")


def main() -> None:
    cache.activate()  # the op of the shared memory is compiled already
    init_distributed(dist_backend="gloo", timeout=LIMIT)
    ranks.start_distributed()
    another_number_of_ranks_is_refused()
    torch.distributed.new_group([0])  # as scripts make one for a few ranks; torch counts it on these alone
    for numbers in sys.argv[1:]:
        node, pair = map(int, numbers.split("/"))
        check(Topology(ranks.world_size(), node, pair))
        print(f"node {node}, pair {pair}: checked", flush=True)


if __name__ == "__main__":
    main()
