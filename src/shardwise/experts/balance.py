"""Keep the experts of a model used evenly: losses of its routers, biases of their choices, and how uneven these are.

Routers and experts are watched in the forwards of training. What they are called with is summed over tokens:

    counts of an expert c_e     choices that name it, without a gradient
    its probabilities P_e       sum over the tokens of softmax(logits)
    rows N                      tokens, each with k choices
    squares Z                   sum over the tokens of logsumexp(logits)^2

The auxiliary loss of a layer of E experts is E x sum over e of c_e/N x P_e/N (Switch Transformers, eq. 4; with k
choices an even router has k and not 1), its z-loss Z/N (ST-MoE, eq. 5). Both are means over the layers.

[Note: Sums of several ranks]
Where ranks share the tokens, the sums are of all of them, and the product is taken after that. The counts have no
gradient. So a rank needs no gradient of the other ranks' sums: with c_e and N of all, and its own P_e and Z, it has its
part of the gradient, and the parts add up where gradients are summed. The value is that of all, on each rank.

[Note: Recomputed tables]
A table is a part of the block's graph, so a recomputation makes it again, and it is noted inside of `forward` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.loss import LossSum
from shardwise.comm.mesh import CommGroups
from shardwise.config.errors import ConfigError, EngineError
from shardwise.config.resolve import ResolvedConfig
from shardwise.config.sections import ExpertsConfig
from shardwise.construction.experts import is_experts, router_of, wrappers_of
from shardwise.experts.adapter import all_rows, has_part_of_sequence
from shardwise.hf.recorded import recorded_lists
from shardwise.layout.layout import Layout
from shardwise.runtime.class_swap import set_attribute, subclass_module
from shardwise.runtime.forward_state import same_again

_LAYER: Final = "_shardwise_balance"
_BIASES: Final = ("e_score_correction_bias", "expert_bias")  # ends of their names in transformers' models


@dataclass(frozen=True)
class RouterSums:
    """Holds the sums of a layer over groups of tokens [G]: counts and probabilities [G, E], rows and squares [G, 1]."""

    counts: Tensor
    probabilities: Tensor
    rows: Tensor
    squares: Tensor

    @classmethod
    def of(cls, logits: Tensor, index: Tensor, num_groups: int) -> RouterSums:
        """Sum over tokens, which are in equal groups one after the other: logits [N, E], index [N, k]."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(num_groups, -1, logits.shape[-1])
        counts = counts_of(index.view(num_groups, -1), logits.shape[-1]).to(wide.dtype)
        rows = torch.full_like(counts[:, :1], wide.shape[1])
        return cls(counts, wide.softmax(-1).sum(1), rows, wide.logsumexp(-1).square().sum(1, keepdim=True))

    @classmethod
    def unpacked(cls, table: Tensor) -> RouterSums:
        """Return what `packed` has put into one tensor."""
        num_experts = table.shape[1] // 2 - 1
        return cls(*table.split([num_experts, num_experts, 1, 1], 1))

    def packed(self) -> Tensor:
        """Return all as one tensor [G, 2E + 2]."""
        return torch.cat([self.counts, self.probabilities, self.rows, self.squares], 1)

    def loss(self, everywhere: RouterSums, config: ExpertsConfig) -> Tensor:
        """Return these tokens' part of the weighted losses, whose counts and rows are those of `everywhere`."""
        rows = everywhere.rows.clamp(min=1)
        shares, num_experts = everywhere.counts / rows, self.counts.shape[1]
        even = num_experts * (shares * self.probabilities / rows).sum(1)
        return config.aux_loss * even.mean() + config.z_loss * (self.squares / rows).mean()


def counts_of(index: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen in each row of an index [G, n]: int64 [G, E]."""
    places = index.long() + num_experts * torch.arange(len(index), device=index.device).unsqueeze(1)
    counts = torch.zeros(len(index) * num_experts, dtype=torch.int64, device=index.device)
    return counts.index_add_(0, places.flatten(), torch.ones_like(places).flatten()).view(-1, num_experts)


def bias_changes(counts: Sequence[float], rate: float) -> list[float]:
    """Return what a step adds to a router's biases: `rate` for experts below the mean, `-rate` for those above it.

    It is the rule of auxiliary-loss-free balancing (Wang et al. 2024, algorithm 1).
    """
    mean = sum(counts) / len(counts)
    return [rate * ((mean > count) - (mean < count)) for count in counts]


def skew_of(counts: Sequence[float]) -> float:
    """Return the tokens of the fullest expert over the mean; 1 without tokens."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


def balance_of(
    model: nn.Module, layout: Layout, config: ResolvedConfig, comms: CommGroups, keeps_whole: Callable[[], bool]
) -> RouterBalance | None:
    """Return what watches the routers of a model; None where no key asks for it, and no experts are divided.

    Raises:
        ConfigError: a key asks for it, and there are no routers that can be watched.
    """
    wanted, modules = config.experts, [*model.modules()]
    asked = wanted.aux_loss + wanted.z_loss + wanted.bias_rate > 0
    has_experts = any(map(is_experts, modules))
    if asked and not has_experts:
        raise ConfigError(
            "balance-without-experts",
            f"experts.aux_loss, z_loss and bias_rate balance experts, and {type(model).__name__} has none with Hugging "
            "Face's interface of experts; leave them at 0",
        )
    if asked and config.compile.enabled:
        raise ConfigError(
            "compile-with-balance",
            "compile.enabled=true compiles a block as one graph, in which routers are not watched; set it to false, or "
            "leave experts.aux_loss, z_loss and bias_rate at 0",
        )
    if not has_experts or not (asked or layout.mesh.divides_experts):
        return None
    return RouterBalance(model, layout, config, comms, keeps_whole)


def _unknown_logits(name: str) -> EngineError:
    return EngineError(
        "router-logits-unknown",
        f"{name} gets its tokens from a router whose logits are not seen, so no loss of it is known; set "
        "experts.aux_loss=0 and experts.z_loss=0",
    )


@dataclass(eq=False)
class _Layer:
    """Watches one layer's router and experts.

    Attributes:
        places: of its experts among those of all layers.
        biases: names of the biases of its router.
        logits: of the router's last call, until its experts are called.
    """

    balance: RouterBalance
    name: str
    places: slice
    biases: Sequence[str]
    logits: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.places.stop - self.places.start

    def note_logits(self, output: Any) -> None:
        """Take what the router has returned: logits, alone or first."""
        outputs = output if isinstance(output, tuple | list) else (output,)
        tensors = (each for each in outputs if isinstance(each, Tensor) and each.is_floating_point())
        self.logits = next((each for each in tensors if each.shape[-1:] == (self.num_experts,)), None)

    def note_choice(self, index: Tensor, is_training: bool) -> None:
        """Take the experts that tokens go to, [N, k]."""
        logits, self.logits = self.logits, None
        self.balance.note(self, logits, index, is_training and torch.is_grad_enabled())


class RouterBalance:
    """Watches all routers of a model; `close` puts its modules back.

    Args:
        keeps_whole: says whether the evaluation that runs has not split its sequence.

    Attributes:
        tables: of the layers in the forward that runs, with those of earlier stages of a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        config: ResolvedConfig,
        comms: CommGroups,
        keeps_whole: Callable[[], bool],
    ) -> None:
        self.tables: list[Tensor] = []
        self._config, self._keeps_whole = config.experts, keeps_whole
        self._has_loss = config.experts.aux_loss + config.experts.z_loss > 0
        self._num_samples: int | None = None  # of the forward that runs
        self._undo: list[Callable[[], None]] = []
        modules = dict(model.named_modules(remove_duplicate=False))
        layers = {id(module): name for name, module in modules.items() if is_experts(module)}
        self._layers: list[_Layer] = []
        end = 0
        for name in layers.values():
            start, end = end, end + modules[name].num_experts
            self._layers.append(self._watch(modules, name, slice(start, end)))
        self._is_split = any(has_part_of_sequence(layout, layer.name) for layer in self._layers)
        self._tensor, self._counts = comms.tensor, torch.zeros(end, dtype=torch.int64, device=comms.all.device)
        sharing = [comms.data if config.experts.aux_scope == "global" else comms.context]
        sharing += [comms.tensor] if self._is_split else []
        self._sharing = [comm for comm in sharing if comm.world_size > 1]
        self._model = model

    def _watch(self, modules: Mapping[str, nn.Module], name: str, places: slice) -> _Layer:
        experts = modules[name]
        parent = min(wrappers_of(name, modules), key=len, default=name).rpartition(".")[0]
        router = router_of(modules[parent], experts)
        named = [*modules[parent].named_buffers(), *modules[parent].named_parameters()]
        biases = [
            f"{parent}.{each}".removeprefix(".")
            for each, bias in named
            if each.endswith(_BIASES) and not bias.requires_grad and bias.numel() == places.stop - places.start
        ]
        if self._config.bias_rate and len(biases) != 1:
            raise ConfigError(
                "router-without-bias",
                f"experts.bias_rate={self._config.bias_rate:g} moves the bias of a router's choices, and {parent} has "
                f"{len(biases)} buffers named {' or '.join(_BIASES)}; set experts.bias_rate=0, and experts.aux_loss",
            )
        layer = _Layer(self, name, places, biases)
        for module, kind in ((router, _WatchedRouter), (experts, _WatchedExperts)):
            if module is not None:
                self._undo += [subclass_module(module, kind), set_attribute(module, _LAYER, layer)]
        return layer

    @property
    def is_in_loss(self) -> bool:
        """Say whether the forward that runs has losses of routers: those of training have."""
        return self._has_loss and self._model.training and torch.is_grad_enabled()

    @contextmanager
    def forward(self, num_samples: int) -> Iterator[None]:
        """Note inside what routers do; `num_samples` are those of the micro-batch, 0 where they are not known."""
        self.tables.clear()
        self._num_samples = num_samples
        try:
            yield
        finally:
            self.tables.clear()  # they have the graph
            self._num_samples = None

    def note(self, layer: _Layer, logits: Tensor | None, index: Tensor, is_training: bool) -> None:
        """Take what one layer's router does with its tokens."""
        is_first = self._num_samples is not None
        if is_training and self._has_loss:
            if logits is None or logits.numel() != len(index) * layer.num_experts:
                raise _unknown_logits(layer.name)
            num_groups = 1
            if self._config.aux_scope == "sequence":
                num_groups = same_again("samples", lambda: self._num_samples or 0)
                if num_groups == 0 or len(index) % num_groups:
                    raise EngineError(
                        "aux-sequence-unknown",
                        f"{layer.name} gets {len(index)} tokens of {num_groups} sequences, so which token is of which "
                        "is not known; set experts.aux_scope=micro-batch",
                    )
            table = RouterSums.of(logits.reshape(-1, layer.num_experts), index, num_groups).packed()
            if is_first:
                self.tables.append(table)
        if is_training and is_first and (self._is_split or self._tensor.rank == 0):
            self._counts[layer.places] += counts_of(index.view(1, -1), layer.num_experts)[0]
        if is_first and logits is not None and self._is_split and not self._keeps_whole():
            self._record_whole(logits)

    def add(self, loss: LossSum) -> LossSum:
        """Add the routers' losses of the forward that runs, weighted as its loss; all ranks that share tokens call it.

        Over the ranks, sums and counts are those of (loss + routers' losses) x count, summed over micro-batches.
        """
        if not self.is_in_loss:
            return loss
        if not self.tables:
            raise _unknown_logits("no layer")
        own = list(self.tables)
        sums = torch.cat([*(table.detach().flatten() for table in own), loss.count.to(own[0].dtype).reshape(1)])
        for comm in self._sharing:
            comm.sum_in_place(sums, "sums of routers")
        *parts, count = sums.split([*(table.numel() for table in own), 1])
        if self._tensor in self._sharing:  # its ranks have one loss, and one count
            count = count / self._tensor.world_size
        local, everywhere = torch.zeros_like(count), torch.zeros_like(count)
        for table, summed in zip(own, parts, strict=True):
            of_all = RouterSums.unpacked(summed.view_as(table))
            local = local + RouterSums.unpacked(table).loss(of_all, self._config) / len(own)
            everywhere += of_all.loss(of_all, self._config) / len(own)
        weighted = (count * local).reshape(())
        total = loss.total + (weighted - weighted.detach()) + loss.count * everywhere.reshape(())
        return LossSum(total, loss.count, loss.is_counted)

    def counts(self) -> Tensor:
        """Return how many tokens this rank has sent to each expert of each layer in this step, each token once."""
        return self._counts

    def end_step(self, counts: Sequence[float], skipped: bool) -> tuple[tuple[float, ...], dict[str, Tensor]]:
        """Move the biases that are buffers by the counts of all ranks, unless the step is `skipped`.

        Returns:
            the skew of each layer, and what is to be added to biases that are parameters, by name.
        """
        by_layer = [counts[layer.places] for layer in self._layers]
        changes: dict[str, Tensor] = {}
        if self._config.bias_rate and not skipped:
            rate, device = self._config.bias_rate, self._counts.device
            moves = [move for own in by_layer for move in bias_changes(own, rate)]
            on_device = torch.tensor(moves, dtype=torch.float64).to(device, torch.float32)
            for layer in self._layers:
                (name,) = layer.biases
                parent, _, own_name = name.rpartition(".")
                bias = getattr(self._model.get_submodule(parent), own_name)
                if isinstance(bias, nn.Parameter):
                    changes[name] = on_device[layer.places]
                else:
                    bias += on_device[layer.places].view_as(bias)
        return tuple(map(skew_of, by_layer)), changes

    def forget(self) -> None:
        """Count from 0."""
        self._counts.zero_()

    def close(self) -> None:
        """Give the modules their own classes again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # [Note: Recorded logits of a split sequence]
    # A model's own auxiliary loss takes the logits that transformers has recorded at the router. Where ranks of tp have
    # parts of the sequence, each must take all of them, with the mask of the whole sequence.
    def _record_whole(self, logits: Tensor) -> None:
        """Put the logits of whole sequences [B x S, E] in place of this rank's, where the model has recorded these.

        Their gradient is sliced: all ranks compute the same loss.
        """
        for items in recorded_lists().values():
            if items and items[-1] is logits:
                by_token = logits.view(self._num_samples or 1, -1, logits.shape[-1]).transpose(0, 1)
                whole = all_rows(by_token, self._tensor, len(by_token) * self._tensor.world_size)
                items[-1] = whole.transpose(0, 1).reshape(-1, logits.shape[-1])


class _WatchedRouter(nn.Module):
    """Is joined with the class of a router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        layer: _Layer = getattr(self, _LAYER)
        layer.note_logits(output)
        return output


class _WatchedExperts(nn.Module):
    """Is joined with the class of a module of experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        layer: _Layer = getattr(self, _LAYER)
        layer.note_choice(top_k_index, self.training)
        return super().forward(hidden_states, top_k_index, top_k_weights)
