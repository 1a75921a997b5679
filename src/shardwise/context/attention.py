"""Compute attention of one sequence over the ranks of the `cp` axis: token layout x transport x kernel.

| transport | what moves |
|---|---|
| ring | keys and values, step by step, while attention over those that have arrived is computed (Liu et al. 2023) |
| all-gather | all needed keys and values at once (Llama Team 2024, section 3.3.2) |
| ulysses | heads for tokens, and back (Jacobs et al. 2023) |
| ring or all-gather with `heads_over` | heads for tokens inside teams of neighbours, keys between teams |

Each is a list of steps (`shardwise.context.plan`) for the same loop (`shardwise.context.ring`); only keys that a query
sees are sent. Autograd keeps q, k, v, the output and its log-sum-exp of this rank's tokens; where heads are exchanged,
those of this rank's heads, so that nothing of the forward is exchanged again.

The work is done by ops that each engine registers (`shardwise.runtime.op_registry`). They name a plan by a number,
because an op cannot take a layout as an argument.
"""

from __future__ import annotations

import functools
from operator import index

import torch
from torch import Tensor

from shardwise.attention.api import autocast, backend_for
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.custom_op import BACKENDS
from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ContextConfig
from shardwise.context.custom_op import ContextCustomOps
from shardwise.context.plan_cache import PlanCache
from shardwise.context.ulysses import check_heads, check_team, team_size
from shardwise.dropout import probability_hashes
from shardwise.layout.token_ranges import TokenSplit


class ContextAttention:
    """Computes attention over the ranks of one group; `close` removes the registered ops.

    Raises:
        ConfigError: the ranks do not make the teams that exchange heads.
    """

    def __init__(self, comm: Comm, section: ContextConfig) -> None:
        check_team(section, comm.world_size)
        self._comm, self._section = comm, section
        self._size = team_size(section, comm.world_size)
        self._plans = PlanCache(comm, section)
        self._ops = ContextCustomOps(self._plans, comm.is_simulated)
        # Compiled code takes functions and tuples of numbers as constants, but neither splits nor this object.
        self._place = self._plans.place_for_good

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout,
        split: TokenSplit,
        *,
        key_padding: Tensor | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Compute attention of this rank's queries. All ranks call it with the same arguments but q, k and v.
        Differentiable once.

        Args:
            q: [B, H, n, D], of this rank's tokens, ascending.
            k: [B, K, n, D], of the same tokens.
            v: [B, K, n, D], of the same tokens.
            layout: of the whole sequence, with 1 or H heads.
            split: which rank has which of its tokens.
            key_padding: bool [B, N] of the whole sequence, True for a real token; no query sees the others.
            dropout: the rate, 0 <= rate < 1, at which probabilities are dropped; the same ones as in one process.
            scale: of the scores; None for 1 / sqrt(D).

        Returns:
            [B, H, n, D], in memory [B, n, H, D].

        Raises:
            ConfigError: the arguments do not fit each other, or the ranks.
        """
        q, k, v = map(autocast, (q, k, v))
        _check_tensors(q, k, v, key_padding)
        self._check(q, k, layout, split, key_padding, dropout)
        if not q.shape[0]:
            return q + 0.0 * (k + v).sum()
        draw: tuple[Tensor | None, ...] = (None, None, None)
        if dropout > 0.0:
            shape = (q.shape[0], q.shape[1], split.num_tokens)
            hashes = probability_hashes((*shape, split.num_tokens), q.device)
            draw = hashes.factors.view(shape), hashes.offsets.view(shape), hashes.columns
        scale, p = q.shape[-1] ** -0.5 if scale is None else float(scale), float(dropout)
        out: Tensor = self._ops.attend(q, k, v, key_padding, *draw, self._size, self._plan(layout, split), scale, p)
        return out

    def close(self) -> None:
        """Remove the registered ops, and forget the plans; graphs through the ops raise from now on."""
        self._ops.close()
        self._plans.clear()

    def _plan(self, layout: BlockLayout, split: TokenSplit) -> int:
        if not torch.compiler.is_compiling():
            return self._plans.place(layout, split)
        # `index` makes compiled code treat these numbers as constants.
        shares = tuple([tuple([(index(start), index(stop)) for start, stop in share]) for share in split.shares])
        place = (split.kind, index(split.num_tokens), shares)
        return layout.cached(("context plan", self._plans.name, place), functools.partial(self._place, place))

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        layout: BlockLayout,
        split: TokenSplit,
        key_padding: Tensor | None,
        dropout: float,
    ) -> None:
        degree = self._comm.world_size
        if split.degree != degree:
            raise ConfigError(
                "cp-split-degree",
                f"a split over cp={split.degree} is not one over mesh.cp={degree}; split the tokens again",
            )
        if q.shape[2] != split.own_size or k.shape[2] != split.own_size:
            raise ConfigError(
                "cp-own-tokens",
                f"{q.shape[2]} queries and {k.shape[2]} keys are not the {split.own_size} tokens of a rank; give those "
                "that the split says",
            )
        if (layout.num_queries, layout.num_keys) != (split.num_tokens, split.num_tokens):
            raise ConfigError(
                "layout-length",
                f"a layout of {layout.num_queries} queries and {layout.num_keys} keys does not fit a sequence of "
                f"{split.num_tokens} tokens; make the layout for this length",
            )
        if layout.num_heads not in (1, q.shape[1]):
            raise ConfigError(
                "layout-heads",
                f"a layout of {layout.num_heads} heads does not fit {q.shape[1]} query heads; legal: 1 or {q.shape[1]}",
            )
        check_heads(q.shape[1], k.shape[1], self._section, degree)
        if key_padding is not None and (
            key_padding.dtype != torch.bool or tuple(key_padding.shape) != (q.shape[0], split.num_tokens)
        ):
            raise ConfigError(
                "cp-whole-padding",
                f"key_padding of {key_padding.dtype} and shape {tuple(key_padding.shape)} does not fit; give bools of "
                f"the whole sequence, [{q.shape[0]}, {split.num_tokens}]",
            )
        if backend_for(q.device.type) not in BACKENDS:
            raise ConfigError(
                "cp-flex",
                "attention_backend('flex') gives no gradients of parts, which context parallelism needs; choose one of "
                f"{', '.join(BACKENDS)}",
            )
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(
                "dropout-rate", f"dropout={dropout} is no rate; nearest legal: {0.0 if dropout < 0 else 0.99}"
            )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None) -> None:
    shapes = f"q of shape {tuple(q.shape)}, k of {tuple(k.shape)} and v of {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ConfigError(
            "qkv-shapes",
            f"{shapes} do not fit; give [samples, heads, tokens, head size], with equal samples and head sizes, and k "
            "and v of one shape",
        )
    if not all((*q.shape[1:], *k.shape[1:])):
        raise ConfigError("qkv-empty", f"{shapes} are empty; give 1 or more heads, tokens and head dims")
    if len({(each.dtype, each.device) for each in (q, k, v)}) > 1 or not q.is_floating_point():
        raise ConfigError(
            "qkv-dtype-device",
            f"q, k and v are of {q.dtype}, {k.dtype} and {v.dtype} on {q.device}, {k.device} and {v.device}; give all "
            "in one floating dtype on one device",
        )
    if key_padding is not None and key_padding.device != q.device:
        raise ConfigError(
            "operand-device",
            f"key_padding is on {key_padding.device} and q on {q.device}; move it with key_padding.to(q.device)",
        )
    if q.shape[1] % k.shape[1]:
        legal = [each for each in range(1, q.shape[1] + 1) if q.shape[1] % each == 0]
        raise ConfigError(
            "kv-heads-divide-heads",
            f"{k.shape[1]} KV heads do not divide {q.shape[1]} query heads; legal: {', '.join(map(str, legal))}",
        )
