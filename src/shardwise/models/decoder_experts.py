"""Defines mixtures of experts in plain PyTorch: a router, and stacks of feed-forwards.

`Experts` has the attributes of transformers' interface of experts, so `mesh.ep` divides it among ranks.

Shapes: N tokens, k experts of each, E experts, H hidden, I inner.

>>> mlps = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(3))
>>> experts = Experts.stacked(mlps, gate=None, up="0", down="2", act_fn=F.relu)
>>> {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
{'up_proj': (3, 6, 4), 'down_proj': (3, 4, 6), 'up_proj_bias': (3, 6), 'down_proj_bias': (3, 4)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.models.grouped_experts import run_experts
from shardwise.models.presets import DecoderConfig

INIT_STD: Final = 0.02
# The parameters of a linear layer, and what a stack of them has after its name.
_SUFFIXES: Final[Mapping[str, str]] = MappingProxyType({"weight": "", "bias": "_bias"})


def draw_normal(weight: Tensor, std: float) -> None:
    """Draw a weight from normal(0, std)."""
    if not weight.is_meta:  # on meta torch would import its compiler, 0.9 s, without drawing
        nn.init.normal_(weight, std=std)


class Router(nn.Module):
    """Sends each token to the `num_chosen` experts of the largest probability, which are normalised to a sum of 1.

    It computes in fp32 or wider. With a bias, which no gradient reaches, the choice is by probability plus bias, and
    the weights are without it (Wang et al. 2024, arXiv 2408.15664, section 3).

    Args:
        factory: device and dtype of the weight.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, **factory))
        # It has values on meta too: they are no parameter, which would be drawn later.
        device = "cpu" if self.weight.is_meta else self.weight.device
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device) if config.router_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_normal(self.weight, INIT_STD)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for the tokens x [N, H] the logits [N, E], and weights and indices of the experts [N, k]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1)
        bias = self.e_score_correction_bias
        index = torch.topk(scores if bias is None else scores + bias.to(scores), self.num_chosen, dim=-1).indices
        weights = scores.gather(-1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index


class Experts(nn.Module):
    """Is a stack of feed-forwards, down(act(gate(x)) * up(x)) or down(act(up(x))), of which each token passes some.

    Args:
        stacks: the weights [E, out, in], `gate_up_proj` (gate first) or `up_proj`, and `down_proj`; their biases
            [E, out] under these names with `_bias`.
    """

    is_transposed: Final = False
    has_post_expert_norm: Final = False
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, stacks: Mapping[str, nn.Parameter], act_fn: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        for name, parameter in stacks.items():
            setattr(self, name, parameter)
        self.num_experts = len(stacks["down_proj"])
        self.has_gate, self.has_bias = "gate_up_proj" in stacks, "down_proj_bias" in stacks
        self.act_fn = act_fn

    @classmethod
    def stacked(
        cls,
        experts: Iterable[nn.Module],
        *,
        gate: str | None = "gate_proj",
        up: str = "up_proj",
        down: str = "down_proj",
        act_fn: Callable[[Tensor], Tensor] = F.silu,
    ) -> Experts:
        """Stack feed-forwards of equal sizes, such as those of a `ModuleList`, in their order.

        Args:
            gate: the name, in each of them, of the linear layer whose output is activated and multiplied by that of
                `up`; None where there is none, and `up` is activated.

        Raises:
            ConfigError: one of them has no such layers, or they differ in sizes, biases or dtype.
        """
        mlps = list(experts)
        layers_of: dict[str, tuple[str, ...]] = {"up_proj": (up,)} if gate is None else {"gate_up_proj": (gate, up)}
        layers_of["down_proj"] = (down,)
        shapes = {tuple((name, p.shape, p.dtype) for name, p in mlp.named_parameters()) for mlp in mlps}
        weights, biases = (
            {f"{layer}.{tensor}" for layers in layers_of.values() for layer in layers} for tensor in _SUFFIXES
        )
        if len(shapes) != 1 or {name for name, *_ in next(iter(shapes))} not in (weights, weights | biases):
            raise ConfigError(
                "experts-not-equal",
                f"{len(mlps)} experts have {len(shapes)} kinds of parameters, and a stack is of one kind with "
                f"{', '.join(sorted(weights))}, and a bias of each or none; name their layers by gate=, up= and down=",
            )
        stacks = {}
        for tensor, suffix in _SUFFIXES.items():
            for stack, layers in layers_of.items():
                rows = [[getattr(mlp.get_submodule(layer), tensor) for layer in layers] for mlp in mlps]
                if rows[0][0] is not None:
                    stacked = torch.stack([torch.cat(row) for row in rows]).detach()
                    stacks[stack + suffix] = nn.Parameter(stacked, requires_grad=rows[0][0].requires_grad)
        module = cls(stacks, act_fn)
        module._check(mlps[0])
        return module

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return for tokens [N, H] the sum of what their experts, index [N, k], make of them, by weights [N, k].

        The k results of a token are added in the order of its choices.
        """
        chosen, order = index.reshape(-1).sort(stable=True)  # [N * k], by expert, then by token
        names = torch.arange(self.num_experts, dtype=chosen.dtype, device=chosen.device)
        ends = torch.searchsorted(chosen, names, right=True, out_int32=True)
        # Torch's product of groups needs no number of rows on the host, which then need not wait for the router.
        made = run_experts(self, hidden[order // index.shape[-1]], ends, None)
        results = made[order.argsort()].view(*index.shape, made.shape[-1])  # [N, k, H]
        return (results * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    @torch.no_grad()
    def _check(self, mlp: nn.Module) -> None:
        """Refuse stacks whose first expert makes something else of a token than the module that it was."""
        if self.down_proj.is_meta:
            return
        token = torch.linspace(-1, 1, self.down_proj.shape[1], out=torch.empty_like(self.down_proj[0, :, 0]))
        was_training = mlp.training
        ends = torch.ones(self.num_experts, dtype=torch.int32, device=token.device)  # the first has the only row
        expected, computed = mlp.eval()(token[None]), run_experts(self, token[None], ends, None)
        mlp.train(was_training)
        if (expected - computed).abs().max() > 64 * torch.finfo(token.dtype).eps * expected.abs().max():
            raise ConfigError(
                "experts-not-equal",
                f"{type(mlp).__name__} computes something else than a stack with act_fn={self.act_fn}; give the "
                "function that it has, and its layers by gate=, up= and down=",
            )


class DrawnExperts(Experts):
    """Is our decoder's stack, drawn as its dense layers are.

    Args:
        down_std: standard deviation of the initial values of `down_proj`.
    """

    def __init__(self, config: DecoderConfig, down_std: float, **factory: Any) -> None:
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.size_of_expert
        super().__init__(
            {
                "gate_up_proj": nn.Parameter(torch.empty(num_experts, 2 * inner, hidden, **factory)),
                "down_proj": nn.Parameter(torch.empty(num_experts, hidden, inner, **factory)),
            }
        )
        self.down_std = down_std
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_normal(self.gate_up_proj, INIT_STD)
        draw_normal(self.down_proj, self.down_std)


class MixtureOfExperts(nn.Module):
    """Computes the sum of the experts that a token is sent to, and of the shared ones, which all tokens pass.

    Args:
        shared: the shared experts as one feed-forward; None where there are none.
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # [N, H]
        _, weights, index = self.router(rows)
        mixed = self.experts(rows, index, weights).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)
