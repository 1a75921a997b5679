"""Keep the forwards that draw: the engine opens one, and its recomputations find it again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.config.errors import ConfigError
from shardwise.dropout.hash_rng import (
    Hashes,
    HashGrid,
    Samples,
    ShardRegion,
    Tokens,
    grid_of,
    hash_grid,
    keyed_dropout,
    keyed_hashes,
    keyed_mask,
)
from shardwise.dropout.numbers import (
    NumberGrid,
    SequencePart,
    TensorPlace,
    draw_bits,
    draw_exponential,
    draw_normal,
    draw_uniform,
    number_grid,
    place_of,
)
from shardwise.layout.token_ranges import Runs, count_tokens
from shardwise.runtime.device import forked_rng
from shardwise.runtime.forward_state import same_again
from shardwise.runtime.keyed_rng import derive_seed
from shardwise.runtime.torch_private import in_backward, in_fake_mode, no_torch_functions, unseen_by_op_modes

Opening = Callable[[], AbstractContextManager[Any]]


Zone = ShardRegion | None
_DRAW: Final[Mapping[str, Callable[[NumberGrid, int, torch.dtype], Tensor] | None]] = {
    "bits": None,
    "uniform": draw_uniform,
    "normal": draw_normal,
    "exponential": draw_exponential,
}


@dataclass(eq=False)
class _SitePart:
    """Names a call on some tokens of a sequence; the calls on its other tokens count as the same call.

    Attributes:
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
        held: the tokens of each sample's sequence that it computes; None for all.
        sequence: these tokens, or all, and the length; None where it is not known.
        numbers: of the calls of each site, by (site, number that torch's generator drew at the call), or a part's mark.
        num_calls: calls of each site in this pass: a rank with several stages runs the forward once for each.
        num_marks: how many numbers of torch's generator the calls of this pass have drawn.
        is_fake: its tensors are fake; where they are not, fake ones are placeholders of what another stage computes.
    """

    step: int
    samples: Samples
    held: Runs | None = None
    sequence: SequencePart | None = None
    numbers: dict[Hashable, int] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    num_marks: int = 0
    num_passes: int = 0
    is_fake: bool = field(default_factory=in_fake_mode)

    def begin_pass(self) -> None:
        """Count calls from 0 again."""
        self.num_passes += 1
        self.num_calls.clear()
        self.num_marks = 0

    def number(self, site: str, part: _SitePart | None) -> int:
        """Return the number of this call of a site: the same in the forward, its recomputation and every part."""
        if part is None:
            mark: Hashable = (site, _draw_mark())
            self.num_marks += 1
        else:
            mark = part.mark_of(site)
        number_before = self.numbers.get(mark)
        if number_before is not None and (part is not None or in_backward()):
            if number_before < 0:
                raise ConfigError(
                    "draw-ambiguous",
                    f"{site or 'the model'} draws in code that is recomputed, and two stages of this rank draw other "
                    "numbers before it; checkpoint a unit of the pipeline instead, or set pipeline.virtual_stages=1",
                )
            return number_before
        number = self.num_calls.get(site, 0)
        self.num_calls[site] = number + 1
        self.numbers[mark] = number if number_before in (None, number) else -1
        return number


def _draw_mark() -> int:
    # A checkpoint restores the CPU's generator, so a recomputation draws here the number that its forward drew.
    with unseen_by_op_modes(is_real=True), no_torch_functions():
        return int(torch.randint(2**62, (), device="cpu").item())


class KeyedDraws:
    """Draws the keyed numbers of one run.

    A forward's context has ended when its recomputation runs, perhaps after other forwards and on another thread. The
    recomputation finds it by the seed of torch's generator, whose state each checkpoint saves and restores.

    Args:
        device: of the model; its generator is seeded together with the CPU's.
        watching: opens what is around each forward of the run, as what watches checkpoints; None for nothing.
    """

    def __init__(
        self, seed: int, device: torch.device | str = "cpu", cp: int = 1, watching: Opening | None = None
    ) -> None:
        self._seed, self._cp = seed, cp
        # Entered inside `at`, in this order; `key_dropouts` adds what replaces torch's draws.
        self.around: list[Opening] = [] if watching is None else [watching]
        self._on_unseen: Callable[[], None] | None = None  # called after a forward that has drawn unseen
        self.at_step_end: Callable[[], None] | None = None  # called once, when nothing will be recomputed
        self.is_quiet = False  # no module draws by a site
        self.are_whole = False  # the tensors that code sees now are no rank's parts
        self._device = torch.device(device)
        self._forwards: dict[int, _Forward] = {}
        # Sites of one shape share their grids; those of one forward at a time are kept.
        self._grids: dict[Any, Any] = {}
        self._has_grids: _Forward | None = None
        self._part: _SitePart | None = None
        self.has_own_seed = False  # code has drawn after it has set torch's seed
        self._num_running = 0  # forwards
        self._newest: _Forward | None = None
        self._shapes: dict[Hashable, tuple[int, ...]] = {}  # of draws that have no tokens, where tokens are split

    @contextmanager
    def at(
        self,
        step: int,
        micro_batch: int,
        first_sample: int,
        num_samples: int,
        held: Runs | None = None,
        length: int | None = None,
    ) -> Iterator[None]:
        """Let a forward inside the context draw keyed numbers; torch's generators are restored when it ends.

        Args:
            step: to whose gradients the forward belongs.
            micro_batch: the number of the forward in its step; keyed draws do not depend on it.
            first_sample: the number of its first sample among the step's, over data ranks and micro-batches.
            num_samples: of this forward. Where a tensor's first dim is a multiple n of it, each sample has n rows.
            held: the tokens of each sample's sequence that this forward computes; None for all. A tensor of 3 or more
                dims whose dim 1 has that size gets the mask of these tokens in the whole sequence.
            length: of the sequence where `held` is None; None where it is not known.
        """
        seed = derive_seed(self._seed, "forward", step, micro_batch, first_sample, num_samples)
        is_new = seed not in self._forwards
        # A repeated forward draws the same numbers, and recomputations of both find their calls.
        sequence = None if length is None else SequencePart(((0, length),), length)
        if held is not None:
            sequence = SequencePart(held, count_tokens(held) * self._cp)
        forward = _Forward(step, Samples(first_sample, num_samples), held, sequence)
        self._newest = self._forwards.setdefault(seed, forward)
        self._newest.begin_pass()
        self._num_running += 1
        try:
            with forked_rng(self._device, seed), ExitStack() as stack:
                for opening in self.around:
                    stack.enter_context(opening())
                yield
                if self._on_unseen is not None and self.drew_unseen():
                    self._on_unseen()
        finally:
            self._num_running -= 1
            if is_new and not torch.is_grad_enabled():  # nothing will recompute it
                del self._forwards[seed]

    def unwatch(self, opening: Opening, on_unseen: Callable[[], None], has_modules: bool) -> None:
        """Open `opening` around no forward, and call `on_unseen` after one that draws other numbers than its calls.

        Args:
            has_modules: whether modules draw by sites all the same.
        """
        self.around.remove(opening)
        self._on_unseen, self.is_quiet = on_unseen, not has_modules

    def watch(self, opening: Opening) -> None:
        """Open `opening` around forwards again."""
        self.around.append(opening)
        self._on_unseen, self.is_quiet = None, False

    def stop(self) -> None:
        """Open nothing around forwards any more."""
        self.around.clear()
        self._on_unseen, self.at_step_end, self.is_quiet = None, None, False

    @contextmanager
    def for_tensors(self, are_whole: bool) -> Iterator[None]:
        """Draw for whole tensors inside the context, as for a hook that sees those of a split module, or for parts."""
        was, self.are_whole = self.are_whole, are_whole
        try:
            yield
        finally:
            self.are_whole = was

    def mark(self) -> int:
        """Draw the mark for `on_tokens` that the parts of a sequence share, where a module is called part by part."""
        if not self.is_open:
            return 0
        self._forwards[torch.initial_seed()].num_marks += 1
        return _draw_mark()

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
        self._newest = None
        self._grids.clear()
        self._has_grids = None
        at_step_end, self.at_step_end = self.at_step_end, None
        if at_step_end is not None:
            at_step_end()

    @property
    def is_open(self) -> bool:
        """Say whether a forward of this run is running or is recomputed."""
        return bool(self._forwards) and torch.initial_seed() in self._forwards

    @property
    def is_seeded(self) -> bool:
        """Say whether code in a forward has set torch's seed, so that what it draws from there on is its own."""
        return bool(self._forwards) and not self.is_open and (self._num_running > 0 or in_backward())

    @property
    def step(self) -> int:
        """Return the step of the open forward."""
        return self._forwards[torch.initial_seed()].step

    @property
    def is_second_pass(self) -> bool:
        """Say whether this rank has run the open forward before, for another stage."""
        return self._forwards[torch.initial_seed()].num_passes > 1 and not in_backward()

    @property
    def is_simulated(self) -> bool:
        """Say whether all tensors of the open forward are fake."""
        return self._forwards[torch.initial_seed()].is_fake

    @property
    def has_placeholders(self) -> bool:
        """Say whether tensors are placeholders now, which draw nothing, though a forward is open."""
        forward = self._forwards.get(torch.initial_seed(), self._newest if self._num_running else None)
        return forward is not None and forward.is_fake != in_fake_mode()

    def drop(self, site: str, values: Tensor, p: float, zone: ShardRegion | None) -> Tensor:
        """Drop values, at least one, by the mask of `mask`, and scale what is kept; counts as a call of it."""
        key = self._next_key(site)
        return keyed_dropout(values, self._grid_of_site(values.shape, zone, values.device), key, p)

    def mask(self, site: str, shape: Sequence[int], p: float, zone: ShardRegion | None, device: torch.device) -> Tensor:
        """Draw the elements of a tensor that a site keeps in the open forward; each call draws new ones.

        Args:
            site: the name of the module that drops.
            shape: of the tensor; none of its sizes is 0.
            p: the rate; between 0 and 1.
            zone: this rank's part of the tensor; None where it is whole.

        Returns:
            bools of the shape.
        """
        key = self._next_key(site)
        return keyed_mask(self._grid_of_site(shape, zone, device), key, p).view(shape)

    def _grid_of_site(self, shape: Sequence[int], zone: ShardRegion | None, device: torch.device) -> HashGrid:
        """Return the grid of a tensor that a site drops in the open forward."""
        forward = self._forwards[torch.initial_seed()]
        if len(shape) <= 2 and forward.sequence is not None and (layout := self.place(shape, zone)).token_dim == 0:
            grid: HashGrid = self._kept(("tokens", layout.spans, device), lambda: hash_grid(layout.spans, device))
            return grid
        return self._grid(shape, zone, device, held=forward.held)

    def hashes(
        self, site: str, shape: Sequence[int], zone: ShardRegion | None, device: torch.device, first_row: int = 0
    ) -> Hashes:
        """Return the hashes from which `mask` would draw, for attention that makes no mask; counts as a call of it.

        They cover whole sequences even where tokens are split, since a rank gets keys of other ranks. `first_row` is
        the index of the first row of the last dim but one.
        """
        key = self._next_key(site)
        return keyed_hashes(self._grid(shape, zone, device, first_row), key)

    def numbers(
        self, site: str, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, zone: Zone
    ) -> Tensor:
        """Draw numbers other than a dropout's mask for a tensor of the open forward; each call draws new ones.

        Args:
            dtype: of the numbers; for "bits" int64.
            zone: this rank's part of the tensors of the module; None where they are whole.
        """
        key, layout = self._next_key(site), self.place(shape, zone)
        self._check_shape(site, tuple(shape), zone, layout)
        with torch.no_grad(), unseen_by_op_modes():
            spans = layout.spans
            grid: NumberGrid = self._kept(("numbers", spans, device), lambda: number_grid(spans, device))
            draw = _DRAW[kind]
            drawn = draw_bits(grid, key) if draw is None else draw(grid, key, dtype)
            return drawn.view(tuple(shape))

    def place(self, shape: Sequence[int], zone: Zone) -> TensorPlace:
        """Return where a tensor that the open forward draws is in the unsplit one."""
        forward = self._forwards.get(torch.initial_seed(), self._newest)
        assert forward is not None, "a forward has begun"
        tokens = self._part.tokens if self._part is not None else None
        return place_of(shape, zone, forward.samples, forward.sequence, tokens)

    def _check_shape(self, site: str, shape: tuple[int, ...], zone: Zone, place: TensorPlace) -> None:
        """Refuse a draw whose sizes follow from the tokens that this rank has: as many others as other ranks draw."""
        forward = self._forwards[torch.initial_seed()]
        is_split = forward.held is not None or self._part is not None or (zone is not None and zone.dim == 1)
        if not is_split or place.token_dim is not None or in_backward() or not shape:
            return
        if shape[0] in (1, forward.samples.num):
            return
        length = None if forward.sequence is None else forward.sequence.length
        before = self._shapes.setdefault((site, forward.num_calls.get(site), forward.samples.num, length), shape)
        if before != shape:
            raise ConfigError(
                "draw-over-tokens",
                f"{site or 'the model'} draws for a tensor of shape {shape}, before of {before}: its size follows from "
                "tokens of which this rank has a part, and which of the drawn numbers are theirs is not known; draw "
                "one number for each token and choose from them, or set mesh.cp=1 and tensor.sequence_parallel=false",
            )

    def count_call(self, site: str) -> None:
        """Count a draw of placeholders, which has no numbers, as a call of a site: other stages draw them."""
        self._next_key(site)

    def reseeded(self, site: str, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Return a context in which torch's generators begin from this call of a site, in the open forward."""
        samples = self._forwards[torch.initial_seed()].samples
        return forked_rng(device or self._device, derive_seed(self._next_key(site), samples.first, samples.num))

    def stream_seed(self, site: str) -> int:
        """Return the seed of Python's and NumPy's numbers in a call of a site's module, in the open forward."""
        forward = self._forwards[torch.initial_seed()]
        name = f"{site} (streams)"

        def count() -> int:
            number = forward.num_calls[name] = forward.num_calls.get(name, 0) + 1
            return number

        number, samples = same_again(name, count), forward.samples
        return derive_seed(self._seed, "streams", forward.step, site, number, samples.first, samples.num)

    def drew_unseen(self) -> bool:
        """Say whether torch's generator of the CPU has given other numbers in this pass than those of the calls."""
        seed = torch.initial_seed()
        forward = self._forwards.get(seed)
        if forward is None or in_fake_mode():
            return forward is None and not self.has_own_seed
        expected = torch.Generator().manual_seed(seed)
        with no_torch_functions():
            torch.randint(2**62, (forward.num_marks,), generator=expected)
        return not torch.equal(expected.get_state(), torch.default_generator.get_state())

    def _next_key(self, site: str) -> int:
        forward = self._forwards[torch.initial_seed()]
        return derive_seed(self._seed, "dropout", forward.step, site, forward.number(site, self._part))

    def _kept(self, place: Hashable, make: Callable[[], Any]) -> Any:
        """Return the grid of tensors of one place, which is made once in a forward."""
        forward = self._forwards[torch.initial_seed()]
        if self._has_grids is not forward:
            self._grids.clear()
            self._has_grids = forward
        if place not in self._grids:
            with torch.inference_mode(False), unseen_by_op_modes():  # a graph may save it
                self._grids[place] = make()
        return self._grids[place]

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
        tokens = self._part.tokens if self._part is not None else None
        if tokens is not None and (len(shape) < 3 or shape[1] != tokens.num):
            raise ConfigError(
                "chunk-dropout",
                f"a dropout on a tensor of shape {tuple(shape)} in a feed-forward that takes {tokens.num} tokens at a "
                "time: which tokens it has is not known; leave context.chunk_tokens out, or set the rate to 0 (or "
                "tensor.sequence_parallel=false, where that gathers the tokens)",
            )
        grid_key = (tuple(shape), zone, device, first_row, tokens, held)
        grid: HashGrid = self._kept(
            grid_key, lambda: grid_of(shape, zone, forward.samples, device, first_row, tokens, held)
        )
        return grid
