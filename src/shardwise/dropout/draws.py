"""Keep the forwards that draw: the engine opens one, and its recomputations find it again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.config.resolve import ConfigError
from shardwise.dropout.hash_rng import Hashes, HashGrid, Samples, ShardRegion, Tokens, grid_of, keyed_hashes, keyed_mask
from shardwise.layout.token_ranges import Runs
from shardwise.runtime.keyed_rng import derive_seed, seeded
from shardwise.runtime.torch_private import in_fake_mode, unseen_by_op_modes


@dataclass(eq=False)
class _SitePart:
    """Names a call on some tokens of a sequence; the calls on its other tokens count as the same call.

    Attributes:
        tokens: of this part.
        mark: common to all parts of the sequence.
        num_calls: calls of each site within this part.
    """

    tokens: Tokens
    mark: int
    num_calls: dict[str, int] = field(default_factory=dict)

    def mark_of(self, site: str) -> Hashable:
        """Return the mark of this call of a site, which is the same in every part."""
        number = self.num_calls[site] = self.num_calls.get(site, 0) + 1
        return site, self.mark, number


@dataclass(eq=False)
class _Forward:
    """One forward, kept until the step ends, since its recomputations draw the same numbers.

    Attributes:
        step: in which it runs.
        samples: that it computes.
        held: the tokens of each sample's sequence that it computes; None for all.
        numbers: of the calls of each site, by (site, number that torch's generator drew at the call), or a part's mark.
        num_calls: calls of each site.
        is_fake: its tensors are fake; where they are not, fake ones are placeholders of what another stage computes.
    """

    step: int
    samples: Samples
    held: Runs | None = None
    numbers: dict[Hashable, int] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    is_fake: bool = field(default_factory=in_fake_mode)

    def number(self, site: str, part: _SitePart | None) -> int:
        """Return the number of this call of a site: the same in the forward, its recomputation and every part."""
        mark = (site, _draw_mark()) if part is None else part.mark_of(site)
        if mark not in self.numbers:
            self.numbers[mark] = self.num_calls.get(site, 0)
            self.num_calls[site] = self.numbers[mark] + 1
        return self.numbers[mark]


def _draw_mark() -> int:
    # A checkpoint restores the CPU's generator, so a recomputation draws here the number that its forward drew.
    with unseen_by_op_modes(is_real=True):
        return int(torch.randint(2**62, (), device="cpu").item())


class KeyedDraws:
    """Draws the keyed numbers of one run.

    A forward's context has ended when its recomputation runs, perhaps after other forwards and on another thread. The
    recomputation finds it by the seed of torch's generator, whose state each checkpoint saves and restores.

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
        """Let a forward inside the context draw keyed numbers; torch's generators are restored when it ends.

        Args:
            step: to whose gradients the forward belongs.
            micro_batch: the number of the forward in its step; keyed draws do not depend on it.
            first_sample: the number of its first sample among the step's, over data ranks and micro-batches.
            num_samples: of this forward. Where a tensor's first dim is a multiple n of it, each sample has n rows.
            held: the tokens of each sample's sequence that this forward computes; None for all. A tensor of 3 or more
                dims whose dim 1 has that size gets the mask of these tokens in the whole sequence.
        """
        seed = derive_seed(self._seed, "forward", step, micro_batch, first_sample, num_samples)
        is_new = seed not in self._forwards
        # A repeated forward draws the same numbers, and recomputations of both find their calls.
        self._forwards.setdefault(seed, _Forward(step, Samples(first_sample, num_samples), held))
        try:
            with seeded(seed, self._device):
                yield
        finally:
            if is_new and not torch.is_grad_enabled():  # nothing will recompute it
                del self._forwards[seed]

    def mark(self) -> int:
        """Draw the mark for `on_tokens` that the parts of a sequence share, where a module is called part by part."""
        return _draw_mark() if self.is_open else 0

    @contextmanager
    def on_tokens(self, tokens: Tokens, mark: int) -> Iterator[None]:
        """Let sites inside the context, which a recomputation enters again, draw for a part of a sequence.

        Together the parts draw the numbers that one call on the whole sequence would draw.

        Args:
            tokens: of the part; they are dim 1 of tensors that drop.
            mark: of `mark`, the same for all the parts.
        """
        before, self._part = self._part, _SitePart(tokens, mark)
        try:
            yield
        finally:
            self._part = before

    def forget(self) -> None:
        """Drop all forwards at the end of a step: none of them will be recomputed."""
        self._forwards.clear()
        self._grids.clear()
        self._has_grids = None

    @property
    def is_open(self) -> bool:
        """Say whether a forward of this run is running or is recomputed."""
        return bool(self._forwards) and torch.initial_seed() in self._forwards

    @property
    def has_placeholders(self) -> bool:
        """Say whether tensors are placeholders now, which draw nothing, though a forward is open."""
        forward = self._forwards.get(torch.initial_seed())
        return forward is not None and forward.is_fake != in_fake_mode()

    def mask(self, site: str, shape: Sequence[int], p: float, zone: ShardRegion | None, device: torch.device) -> Tensor:
        """Draw the elements of a tensor that a site keeps in the open forward; each call draws new ones.

        Args:
            site: the name of the module that drops.
            shape: of the tensor; none of its sizes is 0.
            p: the rate; between 0 and 1.
            zone: this rank's part of the tensor; None where it is whole.
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
        """Return the hashes from which `mask` would draw, for attention that makes no mask; counts as a call of it.

        They cover whole sequences even where tokens are split, since a rank gets keys of other ranks.

        Args:
            site: the name of the module that drops.
            shape: of the tensor; none of its sizes is 0.
            zone: this rank's part of the tensor; None where it is whole.
            device: of the tensor.
            first_row: index of the first row of its last dim but one.
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
        """Return the grid of a tensor of the open forward."""
        forward = self._forwards[torch.initial_seed()]
        if self._has_grids is not forward:
            self._grids.clear()
            self._has_grids = forward
        tokens = self._part.tokens if self._part is not None else None
        if tokens is not None and (len(shape) < 3 or shape[1] != tokens.num):
            raise ConfigError(
                "chunk-dropout",
                f"a dropout on a tensor of shape {tuple(shape)} in a feed-forward that takes {tokens.num} tokens at a "
                "time: which tokens it has is not known; leave context.chunk_tokens out, or set the rate to 0 (or "
                "tensor.sequence_parallel=false, where that gathers the tokens)",
            )
        place = (tuple(shape), zone, device, first_row, tokens, held)
        if place not in self._grids:
            with unseen_by_op_modes():
                self._grids[place] = grid_of(shape, zone, forward.samples, device, first_row, tokens, held)
        return self._grids[place]
