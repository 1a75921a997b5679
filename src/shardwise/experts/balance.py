"""Keep the experts of a model used evenly: losses of its routers, biases of their choices, and how uneven these are.

Routers and experts are watched in the forwards of training. A table of a layer with E experts has sums over N tokens:

    counts c [E]            choices that name an expert, k of each token, without a gradient
    probabilities P [E]     of softmax(logits)
    rows N, squares Z       the number of tokens; of logsumexp(logits)^2

The auxiliary loss is E x sum of c/N x P/N (Switch Transformers, eq. 4; with k choices an even router has k and not 1),
the z-loss Z/N (ST-MoE, eq. 5). Both are means over the layers.

[Note: Sums of several ranks]
Where ranks share the tokens, the product is taken of the sums over all of them. The counts have no gradient. So with c
and N of all and its own P and Z, a rank has its part of the gradient, and these add up where gradients are summed. The
value is that of all, on each rank.

[Note: Recomputed tables]
A table is a part of the block's graph, so a recomputation makes it again; it is noted inside of `forward` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.loss import LossSum
from shardwise.comm.mesh import CommGroups
from shardwise.config.errors import ConfigError, EngineError
from shardwise.config.resolve import ResolvedConfig
from shardwise.config.sections import ExpertsConfig
from shardwise.construction.experts import FoundExperts, experts_of, router_of
from shardwise.experts.adapter import SameTokens, has_part_of_sequence
from shardwise.hf.recorded import recorded_lists
from shardwise.layout.layout import Layout
from shardwise.runtime.class_swap import Call, answer_calls
from shardwise.runtime.device import numbers_on
from shardwise.runtime.forward_state import same_again
from shardwise.runtime.torch_private import storage_key

_BIASES: Final = ("e_score_correction_bias", "expert_bias")  # ends of their names in transformers' models


def router_table(logits: Tensor, index: Tensor, num_groups: int = 1) -> Tensor:
    """Sum over equal groups of tokens, one after the other: logits [N, E], index [N, k] -> [groups, 2E + 2]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(num_groups, -1, logits.shape[-1])
    counts = counts_of(index.view(num_groups, -1), logits.shape[-1]).to(wide.dtype)
    rows, squares = torch.full_like(counts[:, :1], wide.shape[1]), wide.logsumexp(-1).square().sum(1, keepdim=True)
    return torch.cat([counts, wide.softmax(-1).sum(1), rows, squares], 1)


def router_loss(table: Tensor, everywhere: Tensor, config: ExpertsConfig) -> Tensor:
    """Return a table's part of the weighted losses, whose counts and rows are those of a table of all tokens."""
    num_experts = table.shape[1] // 2 - 1
    sizes = [num_experts, num_experts, 1, 1]
    (counts, _, rows, _), (_, probabilities, _, squares) = everywhere.split(sizes, 1), table.split(sizes, 1)
    rows = rows.clamp(min=1)
    even = num_experts * (counts / rows * probabilities / rows).sum(1)
    return config.aux_loss * even.mean() + config.z_loss * (squares / rows).mean()


def counts_of(index: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen in each row of an index [G, n]: int64 [G, E]."""
    places = (index.long() + num_experts * torch.arange(len(index), device=index.device).unsqueeze(1)).flatten()
    counts = places.new_zeros(len(index) * num_experts)  # unlike bincount, whose size depends on values
    return counts.index_add_(0, places, torch.ones_like(places)).view(-1, num_experts)


def bias_changes(counts: Sequence[float], rate: float) -> list[float]:
    """Return what a step adds to a router's biases (Wang et al. 2024, algorithm 1): `rate` for experts below the mean,
    `-rate` for those above it.
    """
    mean = sum(counts) / len(counts)
    return [rate * ((mean > count) - (mean < count)) for count in counts]


def skew_of(counts: Sequence[float]) -> float:
    """Return the tokens of the fullest expert over the mean; 1 without tokens."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


@dataclass(frozen=True)
class _Layer:
    """Says where a layer's experts are among those of all, and names the bias of its router, if it has one.

    Attributes:
        is_split: whether ranks of tp have parts of its tokens; otherwise all have the same.
    """

    name: str
    num_experts: int
    places: slice
    bias: str | None
    is_split: bool


class RouterBalance:
    """Watches the routers of a model, if a key asks for it or experts are divided; `undo` puts its modules back.

    Args:
        same_tokens: of the ranks of tp, as for `ExpertLayers`.

    Attributes:
        tables: of the layers in the forward that runs, with those of earlier stages of a pipeline.
        counts: of this rank's tokens for each expert of each layer in this step; each token is of one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        config: ResolvedConfig,
        comms: CommGroups,
        same_tokens: SameTokens | None,
        undo: ExitStack,
    ) -> None:
        self.tables: list[Tensor] = []
        self._model, self._config, self._same_tokens = model, config.experts, same_tokens
        self._has_loss = config.experts.aux_loss + config.experts.z_loss > 0
        self._num_samples: int | None = None  # of the forward that runs
        self._logits: dict[str, list[Tensor]] = {}  # what could be them, by layer, until its experts are called
        layers = experts_of(model)
        is_asked = self._has_loss or config.experts.bias_rate > 0
        if is_asked and (config.compile.enabled or not layers):
            why = "compile.enabled=true compiles them" if layers else f"{type(model).__name__} has no such experts"
            raise ConfigError(
                "routers-not-seen",
                "experts.aux_loss, z_loss and bias_rate need routers of experts with Hugging Face's interface, which "
                f"run as they are, and {why}; set these keys to 0",
            )
        self._layers: list[_Layer] = []
        end = 0
        for experts in layers if is_asked or layout.mesh.divides_experts else ():
            start, end = end, end + experts.num_experts
            is_split = comms.tensor.world_size > 1 and has_part_of_sequence(layout, experts.name)
            self._layers.append(self._watch(experts, slice(start, end), is_split, undo))
        is_split = any(layer.is_split for layer in self._layers)
        self._tensor, self._num_parts = comms.tensor, comms.tensor.world_size if is_split else 1
        sharing = [comms.data if config.experts.aux_scope == "global" else comms.context]
        self._sharing = [comm for comm in [*sharing, *[comms.tensor] * is_split] if comm.world_size > 1]
        self.counts = torch.zeros(end, dtype=torch.int64, device=comms.all.device)

    def _watch(self, experts: FoundExperts, places: slice, is_split: bool, undo: ExitStack) -> _Layer:
        parent = experts.parent_name
        named = [*experts.parent.named_buffers(), *experts.parent.named_parameters()]
        biases = [bias for bias, tensor in named if bias.endswith(_BIASES) and not tensor.requires_grad]
        if self._config.bias_rate and len(biases) != 1:
            raise ConfigError(
                "router-without-bias",
                f"experts.bias_rate moves the bias of a router's choices, and {parent} has {len(biases)} frozen ones "
                f"named {' or '.join(_BIASES)}; set experts.bias_rate=0, and experts.aux_loss",
            )
        bias = f"{parent}.{biases[0]}".removeprefix(".") if biases else None
        layer = _Layer(experts.name, experts.num_experts, places, bias, is_split)
        if (router := router_of(experts.parent, experts.module)) is not None:
            undo.callback(answer_calls(router, partial(self._note_logits, layer)))
        undo.callback(answer_calls(experts.module, partial(self._note_choice, layer)))
        return layer

    @property
    def is_in_loss(self) -> bool:
        """Say whether the forward that runs has losses of routers: those of training have."""
        return self._has_loss and self._model.training and torch.is_grad_enabled()

    @contextmanager
    def forward(self, num_samples: int) -> Iterator[None]:
        """Note inside what routers do; `num_samples` are those of the micro-batch, 0 where they are not known."""
        self._num_samples = num_samples
        try:
            yield
        finally:
            self.tables.clear()  # they have the graph
            self._num_samples = None

    def _note_logits(self, layer: _Layer, router: nn.Module, own: Call, args: Any, kwargs: Any) -> Any:
        """Call a router, which returns logits, alone or among others."""
        output = own(*args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        wide = [tensor for tensor in tensors if tensor.shape[-1:] == (layer.num_experts,)]
        self._logits[layer.name] = wide
        same_tokens = self._same_tokens
        if layer.is_split and self._num_samples and same_tokens is not None and not same_tokens.keeps_whole():
            for logits in wide:
                self._record_whole(logits, same_tokens)
        return output

    def _note_choice(self, layer: _Layer, experts: nn.Module, own: Call, args: Any, kwargs: Any) -> Any:
        """Call a layer's experts, which are given the index [N, k] of those that tokens go to, and their weights."""
        index, weights = [*args, *kwargs.values()][1:3]
        # Where a token goes to all experts, weights are as wide as logits, and a router may return both.
        wide = self._logits.pop(layer.name, ())
        logits = next((tensor for tensor in wide if storage_key(tensor) != storage_key(weights)), None)
        is_training, is_first = experts.training and torch.is_grad_enabled(), self._num_samples is not None
        if is_training and self._has_loss:
            if logits is None or logits.numel() != len(index) * layer.num_experts:
                raise _unknown_logits(layer.name)
            num_groups = 1
            if self._config.aux_scope == "sequence":
                num_groups = same_again("samples", lambda: self._num_samples or 0)
                if not num_groups or len(index) % num_groups:
                    raise EngineError(
                        "aux-sequence-unknown",
                        f"{layer.name} gets {len(index)} tokens of {num_groups} sequences, so which token is of which "
                        "is not known; set experts.aux_scope=micro-batch",
                    )
            table = router_table(logits.reshape(-1, layer.num_experts), index, num_groups)
            if self._num_parts > 1 and not layer.is_split:
                # All ranks have the table of all tokens, and its whole gradient; but it is summed over them.
                table = table + (table / self._num_parts - table).detach()
            if is_first:
                self.tables.append(table)
        if is_training and is_first and (layer.is_split or self._tensor.rank == 0):  # each token once
            self.counts[layer.places] += counts_of(index.reshape(1, -1), layer.num_experts)[0]
        return own(*args, **kwargs)

    def add(self, loss: LossSum) -> LossSum:
        """Add the losses of routers in the forward that runs; all ranks that share tokens call it.

        Over the ranks, sums and counts are those of (loss + losses of routers) x count, summed over micro-batches.
        """
        if not self.is_in_loss:
            return loss
        if not self.tables:
            raise _unknown_logits("no layer")
        flat = [table.detach().flatten() for table in self.tables]
        sums = torch.cat([*flat, loss.count.to(flat[0].dtype).reshape(1)])
        for comm in self._sharing:
            comm.sum_in_place(sums, "sums of routers")
        *summed, (count,) = sums.split([*map(len, flat), 1])
        count = count / self._num_parts  # ranks of tp have one loss, and one count
        tables = [(table, of_all.view_as(table)) for table, of_all in zip(self.tables, summed, strict=True)]
        local = count * torch.stack([router_loss(*pair, self._config) for pair in tables]).mean()
        value = torch.stack([router_loss(of_all, of_all, self._config) for _, of_all in tables]).mean()
        return LossSum(loss.total + (local - local.detach()) + loss.count * value, loss.count, loss.is_counted)

    def end_step(self, counts: Sequence[float], skipped: bool) -> tuple[tuple[float, ...], dict[str, Tensor]]:
        """Move the biases that are buffers by the counts of all ranks, unless the step is `skipped`.

        Returns:
            the skew of each layer, and what is to be added to biases that are parameters, by name.
        """
        by_layer, changes = [counts[layer.places] for layer in self._layers], {}
        if self._config.bias_rate and not skipped:
            moves = [move for chosen in by_layer for move in bias_changes(chosen, self._config.bias_rate)]
            on_device = numbers_on(self.counts.device, moves)
            # [Note: Biases of other stages]
            # Each rank moves those of all layers: which rank saves a buffer is no matter of the stage that uses it.
            buffers = dict(self._model.named_buffers())
            for layer in self._layers:
                assert layer.bias is not None, "else it was refused"
                if layer.bias in buffers:
                    buffers[layer.bias] += on_device[layer.places].view_as(buffers[layer.bias])
                else:
                    changes[layer.bias] = on_device[layer.places]
        return tuple(map(skew_of, by_layer)), changes

    def forget(self) -> None:
        """Count from 0."""
        self.counts.zero_()

    # [Note: Recorded logits of a split sequence]
    # A model's own auxiliary loss takes the logits that transformers has recorded. Where ranks have parts of sequences,
    # each must take them all, in the order of the mask. All compute the same loss, so the gradient is sliced.
    def _record_whole(self, logits: Tensor, same_tokens: SameTokens) -> None:
        for items in recorded_lists().values():
            if items and items[-1] is logits:
                by_token = logits.view(self._num_samples or 1, -1, logits.shape[-1])
                items[-1] = same_tokens.gather(by_token, 1, "logits of routers").flatten(0, 1)


def _unknown_logits(name: str) -> EngineError:
    return EngineError(
        "router-logits-unknown",
        f"{name} gets its tokens from a router whose logits are not seen, so no loss of it is known; set "
        "experts.aux_loss=0 and experts.z_loss=0",
    )
