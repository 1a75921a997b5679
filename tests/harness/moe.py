"""Modules of experts as transformers has them, one for each combination of flags, and tokens with their routing.

`plain_experts` is the reference: a loop over choices, without a word of the library. `whole` runs a module over all
tokens, `part_of` gives the module that one of several ranks has.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_EXPERTS: Final = 8
HIDDEN: Final = 8


@dataclass(frozen=True)
class ExpertFamily:
    """The class of a family's experts, its config, and what it does between its products, written by hand."""

    module: str
    experts: str
    config: str
    options: Mapping[str, Any]
    activate: Callable[[Tensor], Tensor]


def silu_of_halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_GPT_OSS = {"hidden_size": HIDDEN, "intermediate_size": 12, "num_local_experts": NUM_EXPERTS}

# In each a flag has a value that it has in no other, or a combination.
FAMILIES: Final[Mapping[str, ExpertFamily]] = MappingProxyType(
    {
        "aria": ExpertFamily(  # transposed
            "aria",
            "AriaExperts",
            "AriaTextConfig",
            {
                "hidden_size": HIDDEN,
                "intermediate_size": 12,
                "moe_num_experts": NUM_EXPERTS,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
            silu_of_halves,
        ),
        "gpt_oss": ExpertFamily(  # transposed, biased, interleaved
            "gpt_oss",
            "GptOssExperts",
            "GptOssConfig",
            _GPT_OSS,
            lambda x: clamped(x[..., ::2], x[..., 1::2]),
        ),
        "mixtral": ExpertFamily("mixtral", "MixtralExperts", "MixtralConfig", _GPT_OSS, silu_of_halves),
        "muse_spark": ExpertFamily(  # a norm after each expert
            "muse_spark",
            "MuseSparkExperts",
            "MuseSparkTextConfig",
            {"moe_hidden_size": HIDDEN, "moe_intermediate_size": 12, "num_local_experts": NUM_EXPERTS},
            silu_of_halves,
        ),
        "nemotron_h": ExpertFamily(  # no gate
            "nemotron_h",
            "NemotronHExperts",
            "NemotronHConfig",
            {"hidden_size": HIDDEN, "moe_intermediate_size": 12, "n_routed_experts": NUM_EXPERTS},
            lambda x: F.relu(x).square(),
        ),
        "privacy_filter": ExpertFamily(  # transposed, biased
            "openai_privacy_filter",
            "OpenAIPrivacyFilterExperts",
            "OpenAIPrivacyFilterConfig",
            _GPT_OSS,
            lambda x: clamped(*x.chunk(2, -1)),
        ),
    }
)


def make_experts(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A module with random weights, the same in every process; it runs its own loop, not a kernel for groups."""
    row = FAMILIES[family]
    of_models = f"transformers.models.{row.module}"
    config_class = getattr(importlib.import_module(f"{of_models}.configuration_{row.module}"), row.config)
    config = config_class(**{**row.options, **options}, experts_implementation="eager")
    experts = getattr(importlib.import_module(f"{of_models}.modeling_{row.module}"), row.experts)(config)
    generator = torch.Generator().manual_seed(5)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return experts


def part_of(experts: nn.Module, rank: int, num_ranks: int) -> Any:
    """The module of one rank: its slices of the stacks, and all that is not of an expert."""
    part = copy.deepcopy(experts)
    for parameter in part.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.chunk(num_ranks)[rank].clone()
    return part


def plain_experts(family: str, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Each token through each of its experts, one after the other."""
    row = FAMILIES[family]
    up, down = getattr(experts, "gate_up_proj", None), experts.down_proj
    up = experts.up_proj if up is None else up
    up, down = (up, down) if experts.is_transposed else (up.transpose(1, 2), down.transpose(1, 2))
    tokens = []
    for token, chosen, shares in zip(hidden, index.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            x = token @ up[expert]
            x = x + experts.gate_up_proj_bias[expert] if experts.has_bias else x
            x = row.activate(x) @ down[expert]
            x = x + experts.down_proj_bias[expert] if experts.has_bias else x
            x = experts.post_expert_norm(x) if experts.has_post_expert_norm else x
            total = total + share * x
        tokens.append(total)
    return torch.stack(tokens) if tokens else hidden * weights.sum()


class DispatchedLayer(nn.Module):
    """What a block calls, with the experts of this rank."""

    def __init__(self, experts: nn.Module, dispatch: Any) -> None:
        super().__init__()
        self.experts = experts
        self.dispatch = dispatch

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        summed: Tensor = self.dispatch.forward(self.experts, hidden, index, weights, "layers.0")
        return summed


class RoutedLayer(nn.Module):
    """A router and Mixtral's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = make_experts("mixtral")

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and experts of rows [N, H]."""
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        return weights, index

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.route(x)
        mixed: Tensor = self.experts(x, index, weights)
        return x + mixed / 4


class RoutedModel(nn.Module):
    """A dense layer and two of experts, for rows [N, H] of which those that `keep` does not name are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList(RoutedLayer() for _ in range(2))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.dense(x if keep is None else x[keep])
        for layer in self.layers:
            x = layer(x)
        return x


def routed_rows(rank: int, step: int = 0) -> Tensor:
    """The rows of a rank in a step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, HIDDEN, generator=generator, dtype=torch.float64)


def square(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The loss of rows, of which each counts once."""
    return output.square().sum(), len(output)


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is full of NaN inside the context."""
    torch.use_deterministic_algorithms(True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)


@dataclass
class Tokens:
    """Tokens with their routing: the leaves of which gradients are taken, and the gradient of what is made of them."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    grad: Tensor

    @classmethod
    def join(cls, parts: Iterable[Tokens]) -> Tokens:
        """The tokens of all ranks, in their order."""
        given = list(parts)
        joined = (
            torch.cat([getattr(part, name).detach() for part in given])
            for name in ("hidden", "index", "weights", "grad")
        )
        return cls(*joined).as_leaves()

    def as_leaves(self) -> Tokens:
        self.hidden.requires_grad_()
        self.weights.requires_grad_()
        return self


# How many tokens ranks have, in turn, and which experts each of them is sent to.
CASES: Final = ("all", "few", "one expert", "plain", "two ranks without")


def make_tokens(
    case: str, rank: int = 0, dtype: torch.dtype = torch.float64, num_choices: int = 2, hidden_size: int = HIDDEN
) -> Tokens:
    """The tokens of a rank: in "few" most experts get none, in "two ranks without" ranks 0 and 3 have none."""
    generator = torch.Generator().manual_seed(100 + rank)
    num_tokens = 0 if case == "two ranks without" and rank in (0, 3) else (5, 6, 3, 7)[rank % 4]
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    index = scores.topk(num_choices, -1).indices
    if case == "one expert":
        index = torch.full((num_tokens, 1), 5)
    elif case == "few":
        index = index % 2 + torch.arange(num_choices) * 3
    elif case == "all":
        index = scores.argsort(-1)
    hidden, grad = (torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(index.shape, generator=generator, dtype=torch.float64)
    return Tokens(hidden.to(dtype), index, weights.to(dtype), grad.to(dtype)).as_leaves()


def gradients_of(experts: nn.Module, tokens: Tokens, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """The output of some tokens and all gradients, by name."""
    for parameter in experts.parameters():
        parameter.grad = None
    out = run(tokens.hidden, tokens.index, tokens.weights)
    leaves = {"hidden": tokens.hidden, "weights": tokens.weights, **dict(experts.named_parameters())}
    grads = torch.autograd.grad(out, list(leaves.values()), tokens.grad)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
