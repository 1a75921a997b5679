"""Which forward draws: opened by the engine, found again by its recomputations."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.dropout.hash_rng import Hashes, HashGrid, Samples, ShardRegion, Tokens, grid_of, keyed_hashes, keyed_mask
from shardwise.layout.token_ranges import Runs
from shardwise.runtime.keyed_rng import derive_seed, seeded
from shardwise.runtime.torch_private import unseen_by_op_modes


@dataclass(eq=False)
class _SitePart:
    """A call on some tokens of a sequence; those on the others are one call with it.

    Attributes:
        tokens: which.
        mark: of all parts of the sequence.
        num_calls: of each site within this part.
    """

    tokens: Tokens
    mark: int
    num_calls: dict[str, int] = field(default_factory=dict)

    def mark_of(self, site: str) -> Hashable:
        """Of this call of a site, alike in every part."""
        number = self.num_calls[site] = self.num_calls.get(site, 0) + 1
        return site, self.mark, number


@dataclass(eq=False)
class _Forward:
    """One forward, known until the step ends, since its recomputations draw the same.

    Attributes:
        step: in which it runs.
        samples: that it computes.
        held: the tokens of each sample's sequence that it computes; None for all.
        numbers: of the calls of each site, by (site, what torch's generator gave at the call), or by a part's mark.
        num_calls: of each site.
    """

    step: int
    samples: Samples
    held: Runs | None = None
    numbers: dict[Hashable, int] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)

    def number(self, site: str, part: _SitePart | None) -> int:
        """Of this call of a site, in the forward and in its recomputation alike, and in every part of a sequence."""
        mark = (site, _draw_mark()) if part is None else part.mark_of(site)
        if mark not in self.numbers:
            self.numbers[mark] = self.num_calls.get(site, 0)
            self.num_calls[site] = self.numbers[mark] + 1
        return self.numbers[mark]


def _draw_mark() -> int:
    # A checkpoint puts the CPU's generator back, so a recomputation gets here what its forward got.
    with unseen_by_op_modes(is_real=True):
        return int(torch.randint(2**62, (), device="cpu").item())


class KeyedDraws:
    """The keyed numbers of one run.

    A forward's context is over when its recomputation runs, perhaps behind other forwards and on another thread. It is
    found by the seed of torch's generator, whose state each checkpoint saves and restores.

    Args:
        seed: of the run.
        device: of the model; its generator is seeded together with the CPU's.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self._device = torch.device(device)
        self._forwards: dict[int, _Forward] = {}
        # Sites of one shape share their grids; those of one forward at a time are kept.
        self._grids: dict[Any, HashGrid] = {}
        self._has_grids: _Forward | None = None
        self._part: _SitePart | None = None

    @contextmanager
    def at(
        self, step: int, micro_batch: int, first_sample: int, num_samples: int, held: Runs | None = None
    ) -> Iterator[None]:
        """Inside the context a forward draws keyed numbers; torch's generators are as before when it ends.

        Args:
            step: whose gradients the forward belongs to.
            micro_batch: the number of the forward in its step; it moves no keyed draw.
            first_sample: the number of its first sample among the step's, over data ranks and micro-batches.
            num_samples: of this forward. Where a tensor's first dim is a multiple of it, each sample has as many rows.
            held: the tokens of each sample's sequence that this forward computes, where not all. A tensor of 3 or more
                dims whose dim 1 has as many is masked as these tokens are in the whole.
        """
        seed = derive_seed(self._seed, "forward", step, micro_batch, first_sample, num_samples)
        is_new = seed not in self._forwards
        # The same forward once more draws the same, and recomputations of both find their calls.
        self._forwards.setdefault(seed, _Forward(step, Samples(first_sample, num_samples), held))
        try:
            with seeded(seed, self._device):
                yield
        finally:
            if is_new and not torch.is_grad_enabled():  # nothing will recompute it
                del self._forwards[seed]

    def mark(self) -> int:
        """What the parts of a sequence are to be given, where a module is called with one part at a time."""
        return _draw_mark() if self.is_open else 0

    @contextmanager
    def on_tokens(self, tokens: Tokens, mark: int) -> Iterator[None]:
        """Inside the context, which a recomputation enters again, sites draw for a part of a sequence.

        Together the parts draw what one call on the whole sequence would.

        Args:
            tokens: of the part; tensors that drop have it as their dim 1.
            mark: what `mark` gave for all the parts.
        """
        before, self._part = self._part, _SitePart(tokens, mark)
        try:
            yield
        finally:
            self._part = before

    def forget(self) -> None:
        """The step has ended: none of its forwards will be recomputed."""
        self._forwards.clear()
        self._grids.clear()
        self._has_grids = None

    @property
    def is_open(self) -> bool:
        """Whether a forward of this run's runs or is recomputed."""
        return bool(self._forwards) and torch.initial_seed() in self._forwards

    def mask(self, site: str, shape: Sequence[int], p: float, zone: ShardRegion | None, device: torch.device) -> Tensor:
        """What a site keeps of a tensor in the open forward; each call draws the next.

        Args:
            site: the name of the module that drops.
            shape: of the tensor; none of its sizes is 0.
            p: the rate; between 0 and 1.
            zone: of the tensor, None where it is whole.
            device: of the tensor.

        Returns:
            bools of the shape.
        """
        key = self._next_key(site)
        held = self._forwards[torch.initial_seed()].held
        return keyed_mask(self._grid(shape, zone, device, held=held), key, p).view(shape)

    def hashes(
        self, site: str, shape: Sequence[int], zone: ShardRegion | None, device: torch.device, first_row: int = 0
    ) -> Hashes:
        """As `mask`, whose next call this is, but its hashes: attention that makes no mask draws by them.

        They are of whole sequences, where tokens are split too: a rank has others' keys.

        Args:
            site: the name of the module that drops.
            shape: of the tensor; none of its sizes is 0.
            zone: of the tensor, None where it is whole.
            device: of the tensor.
            first_row: where its last dim but one begins.
        """
        key = self._next_key(site)
        return keyed_hashes(self._grid(shape, zone, device, first_row), key)

    def _next_key(self, site: str) -> int:
        forward = self._forwards[torch.initial_seed()]
        return derive_seed(self._seed, "dropout", forward.step, site, forward.number(site, self._part))

    def _grid(
        self,
        shape: Sequence[int],
        zone: ShardRegion | None,
        device: torch.device,
        first_row: int = 0,
        held: Runs | None = None,
    ) -> HashGrid:
        """Of a tensor of the open forward."""
        forward = self._forwards[torch.initial_seed()]
        if self._has_grids is not forward:
            self._grids.clear()
            self._has_grids = forward
        tokens = self._part.tokens if self._part is not None else None
        if tokens is not None and (len(shape) < 3 or shape[1] != tokens.num):
            raise ValueError(
                f"a dropout on a tensor of shape {tuple(shape)} in a feed-forward that takes {tokens.num} tokens at a "
                "time: which tokens it has is not known; leave context.chunk_tokens out, or set the rate to 0 (or "
                "tensor.sequence_parallel=false, where that gathers the tokens)"
            )
        place = (tuple(shape), zone, device, first_row, tokens, held)
        if place not in self._grids:
            with unseen_by_op_modes():
                self._grids[place] = grid_of(shape, zone, forward.samples, device, first_row, tokens, held)
        return self._grids[place]
