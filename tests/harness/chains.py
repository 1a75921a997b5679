"""Models that are cut into pipeline stages, whose blocks return what blocks may return; for tests of any model.

>>> case = CHAINS["tuples"]
>>> model, batch = case.build(torch.float64), case.batch(0, 2, torch.float64)
>>> model(batch["x"]).shape
torch.Size([2, 8])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from harness.models import ModelCase
from shardwise import LayerList, LayerSpec

WIDTH: Final = 8
VOCAB_SIZE: Final = 13

# B samples, S positions, D = WIDTH features


class Carried(NamedTuple):
    """What a block hands on."""

    x: Tensor
    mask: Tensor
    nothing: None = None


@dataclass
class State:
    """The same as a dataclass that torch's pytree knows."""

    x: Tensor
    positions: Tensor


pytree.register_dataclass(State)


class Layer(nn.Module):
    """x + tanh(Wx)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))  # [B, D]


class TupleBlock(Layer):
    """Returns tensors of four dtypes, some of which want no gradient, and None."""

    def forward(self, x: Tensor, is_kept: Tensor, number: Tensor, nothing: None, depth: int) -> tuple[Any, ...]:  # type: ignore[override]
        x = super().forward(x) * torch.where(is_kept, 1.0, 0.5) + number.to(x.dtype) / 7
        return x, ~is_kept, number + 1, None, depth + 1


class Tuples(nn.Module):
    """Blocks that return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state: tuple[Any, ...] = (x, x > 0, torch.arange(WIDTH), None, 0)
        for block in self.blocks:
            state = block(*state)
        assert state[4] == len(self.blocks)
        return state[0]


class DictBlock(Layer):
    """Returns a dict whose detached entry has no gradient, and one entry more than it got."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        x = super().forward(state["x"])
        return {"x": x + state["before"], "before": x.detach(), "history": [*state["history"], x.mean(-1)]}


class Dicts(nn.Module):
    """Blocks that return dicts of growing lists."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DictBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x, "before": torch.zeros_like(x), "history": []}
        for block in self.blocks:
            state = block(state)
        return state["x"] + torch.stack(state["history"]).sum(0)[:, None]


class NamedBlock(Layer):
    def forward(self, state: Carried) -> Carried:  # type: ignore[override]
        return Carried(super().forward(state.x) * state.mask, ~state.mask, state.nothing)


class StateBlock(Layer):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.x) + state.positions, state.positions + 1)


class Structured(nn.Module):
    """Blocks that take and return one structure."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        is_named = isinstance(self.blocks[0], NamedBlock)
        state: Any = Carried(x, x < 1) if is_named else State(x, torch.arange(WIDTH))
        for block in self.blocks:
            state = block(state)
        return state.x


class FrozenStart(nn.Module):
    """Blocks of which the first two are frozen: what crosses the cut wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        for block in self.blocks[:2]:
            block.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CachingBlock(Layer):
    """Keeps a table that its first forward makes from the input's type, and its last input, for its own use."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones_like(x[0]).cumsum(0).detach()
        self.last = x
        return super().forward(x) + self.table / 9


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachingBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MaskedBlock(Layer):
    def forward(self, x: Tensor, mask: Tensor, *, angles: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * torch.cos(angles)).masked_fill(mask, 0.0)


class Masked(nn.Module):
    """Masks and angles from the inputs, which every stage computes for itself, and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, WIDTH), persistent=False)
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [B, S, D]
        mask = (tokens == 0)[..., None]  # [B, S, 1]
        angles = torch.arange(tokens.shape[1])[:, None].to(x.dtype) * self.get_buffer("frequencies")  # [S, D]
        for block in self.blocks:
            x = block(x, mask, angles=angles)
        return self.head(x)


class Shared(nn.Module):
    """Parameters of its own, used before, between and after the blocks, so by every stage, and units in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x + self.shift)
        return self.head(x) * self.scale


def _sequential() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def _tied_layers() -> nn.Module:
    """An embedding and a head of one weight, with a function and layers between."""
    return LayerList(
        [
            LayerSpec(nn.Embedding, VOCAB_SIZE, WIDTH, tied="embed"),
            torch.tanh,
            *(LayerSpec(Layer) for _ in range(4)),
            nn.LayerNorm(WIDTH),
            LayerSpec(nn.Embedding, VOCAB_SIZE, WIDTH, tied="embed", forward_fn=_project),
        ]
    )


def _project(layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, layer.get_parameter("weight"))  # [B, S, V]


def _vectors(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    x = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)  # [B, D]
    return {"x": x}


def _vector_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - 1.0).square().sum(), output.numel()


def _tokens(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (num_samples, 4 + seed % 3), generator=generator)  # [B, S]
    return tokens, tokens.flip(-1)


def _token_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def _only(seed: int, num_samples: int, dtype: torch.dtype) -> Tensor:
    return _vectors(seed, num_samples, dtype)["x"]


CHAINS: Final[Mapping[str, ModelCase]] = MappingProxyType(
    {
        "tuples": ModelCase("tuples", Tuples, _vectors, _vector_loss),
        "dicts": ModelCase("dicts", Dicts, _vectors, _vector_loss),
        "named tuples": ModelCase("named tuples", partial(Structured, NamedBlock), _vectors, _vector_loss),
        "dataclasses": ModelCase("dataclasses", partial(Structured, StateBlock), _vectors, _vector_loss),
        "frozen start": ModelCase("frozen start", FrozenStart, _vectors, _vector_loss),
        "own caches": ModelCase("own caches", Caching, _vectors, _vector_loss),
        "masks": ModelCase("masks", Masked, _tokens, _token_loss),
        "shared": ModelCase("shared", Shared, _vectors, _vector_loss),
        "sequential": ModelCase("sequential", _sequential, _only, _vector_loss),
        "tied layers": ModelCase("tied layers", _tied_layers, _tokens, _token_loss),
    }
)
