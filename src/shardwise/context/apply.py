"""Give a model the attention of a config: on one rank, or over the ranks of the `cp` axis.

Two kinds of models can be split over `cp`: those of transformers, and our decoder and models like it. The latter have a
forward with an argument `positions`, the places of its tokens in the whole sequence, and modules with an attribute
`attend` (`shardwise.models.decoder_attention.Attend`) to which they pass these positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import index
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from shardwise.attention.block_layout import BlockLayout, keep_last
from shardwise.attention.cp_hook import DenseVisibility
from shardwise.attention.huggingface import attends_causally, use_sparse_attention, whole_layout
from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ContextConfig, ResolvedConfig
from shardwise.context.attention import ContextAttention
from shardwise.context.batch import (
    POSITIONS,
    BatchSharder,
    TokenShard,
    TokenShardedBatch,
    by_name,
    cut_batch,
    for_proof,
    main_input,
    parts_for_proof,
)
from shardwise.context.huggingface import (
    RankInputs,
    check_length,
    check_model,
    describe_mask,
    inputs_for_proof,
    is_huggingface,
    split_inputs,
    trained_length,
)
from shardwise.context.length_proof import LengthProofs, ProofInputs, numbers_of_a_token, signature_of, sizes_of
from shardwise.context.load_balance import choose_split
from shardwise.context.locality import (
    CONTEXT_RULE,
    NO_CONTEXT,
    ContextSplitting,
    Shapes,
    SplitRule,
    attend_alone,
    check_tokens_apart,
    copy_again,
    copy_for_proof,
    warn_unproved,
)
from shardwise.context.ulysses import check_heads, team_size
from shardwise.hf.losses import count_targets, take_num_items
from shardwise.hf.masks import MaskWindow, find_mask_window
from shardwise.layout.token_ranges import TokenSplit, contiguous
from shardwise.models.apply_attention import apply_attention
from shardwise.models.decoder_attention import Attend
from shardwise.runtime.class_swap import set_attribute
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.module_calls import change_inputs
from shardwise.runtime.torch_private import constant_in_graphs, pytree

_AS_THEY_ARE: Final[Shapes] = MappingProxyType({})


def check_context(model: nn.Module, config: ResolvedConfig) -> None:
    """Check that a model can be given attention over the `cp` axis.

    Args:
        model: only its modules and their attributes are read.

    Raises:
        ConfigError: it cannot.
    """
    cp = config.mesh.cp
    if cp == 1:
        return
    if is_huggingface(model):
        check_model(model)
    elif not _takes_positions(model) or not _attending(model):
        raise ConfigError(
            "cp-model",
            f"mesh.cp={cp} needs a model whose attention the library can reach: one of transformers, Decoder, or one "
            f"whose forward takes positions and hands them to modules with an attend, and this {type(model).__name__} "
            "is none; set mesh.cp=1, and see docs/context.md",
        )
    for num_heads, num_kv_heads in _heads(model):
        check_heads(num_heads, num_kv_heads, config.context, cp, config.mesh.tp)


def check_split(model: nn.Module, config: ResolvedConfig, length: int) -> None:
    """Check that sequences of one length can be split as the config says.

    What a Hugging Face model's attention sees depends on its batches, so those are checked as they come.

    Raises:
        ConfigError: the length does not divide.
    """
    if config.mesh.cp > 1 and not is_huggingface(model):
        _own_splits(model, config)(length)


def apply_context_parallel(
    model: nn.Module,
    config: ResolvedConfig,
    comm: Comm,
    shifts_labels: bool | None = None,
    shapes: Shapes = _AS_THEY_ARE,
) -> tuple[BatchSharder | None, list[Callable[[], None]]]:
    """Give a model the attention of a config, over the ranks of the `cp` axis where there are several.

    Args:
        shifts_labels: how the model's own loss counts targets, as in `ModelFacts`.
        shapes: of whole parameters, by name, where this rank has parts of them.

    Returns:
        what takes this rank's tokens of batches, None where it has all of them, and functions that give the model
        back; call them in reverse order.

    Raises:
        ConfigError: the model cannot be given it.
    """
    cp = config.mesh.cp
    if cp == 1:
        return None, apply_attention(model, config.attention)
    check_context(model, config)
    attention = ContextAttention(comm, config.context)
    if is_huggingface(model):
        limits = SequenceLimits() if comm.is_simulated else find_limits(model, cp, shapes)
        splits_of = TokenSplits(partial(whole_layout, model), config.context, cp)

        def spread(
            q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, lengths: tuple[int, ...], **extras: Any
        ) -> Tensor:  # [B, H, S / cp, D], [B, K, S / cp, D]
            return attention(q, k, v, layout, splits_of(lengths), **extras)

        undo = apply_attention(model, config.attention, spread)
        return HuggingFaceSequences(model, comm.rank, splits_of, limits, shifts_labels), [attention.close, *undo]
    prove = None if comm.is_simulated else prove_own(model, cp, shapes)
    undo = [attention.close, *apply_attention(model, config.attention)]
    split_of = _own_splits(model, config)
    made: dict[int, ContextParallelAttend] = {}  # layers that share an attend share its plans
    for module in _attending(model):
        own = module.attend
        if id(own) not in made:
            made[id(own)] = ContextParallelAttend(own, attention, split_of, cp)
        undo.append(set_attribute(module, "attend", made[id(own)]))
    return TokenShardedBatch(model, comm.rank, split_of, prove), undo


def prove_huggingface(model: nn.Module, shapes: Shapes = _AS_THEY_ARE) -> int | None:
    """Prove, by running a copy, that a model of transformers computes tokens apart from each other but for attention.

    Args:
        shapes: of whole parameters, by name, where this rank has parts of them.

    Returns:
        the number of positions up to which it does; None for any number.

    Raises:
        ConfigError: it does not, or its attention cannot be replaced.
    """
    copied = copy_alone(model, CONTEXT_RULE, shapes)
    if copied is None:
        return None
    try:
        _check_short(copied)
    except ConfigError as error:
        num_positions = trained_length(model)
        # The first may have grown its frequencies.
        again = None if num_positions is None else copy_alone(model, CONTEXT_RULE, shapes)
        if again is None:
            raise
        try:
            _check_short(again, num_positions)
        except ConfigError:
            raise error from None
        return num_positions
    return None


def _check_short(copied: nn.Module, num_positions: int | None = None, num_samples: int = 1) -> int:
    """Check a short sequence of a model of transformers, in two halves; return its length."""
    inner, attempts = inputs_for_proof(copied, num_positions, num_samples)
    check_tokens_apart(inner, ContextSplitting(2), attempts)
    return main_input(attempts[0][0]).shape[1]


def find_window(model: nn.Module, shapes: Shapes = _AS_THEY_ARE) -> MaskWindow | None:
    """Return the shortest window that a model of transformers has in its masks only, by running a copy; None without
    one.

    Raises:
        ConfigError: its masks say more than that.
    """
    copied = copy_for_proof(model, CONTEXT_RULE, shapes)
    if copied is None:
        return None
    inner, attempts = inputs_for_proof(copied)
    given = {name: value for name, value in attempts[0][1].items() if name != "attention_mask"}
    try:
        with torch.no_grad(), float64_throughout():
            return find_mask_window(inner, given)
    except ConfigError as error:
        raise _not_for(model, error) from error
    except Exception as error:
        warn_unproved(model, error)
        return None


def _not_for(model: nn.Module, error: ConfigError) -> ConfigError:
    return ConfigError(error.code, f"mesh.cp is not for {type(model).__name__}: {error}; or {NO_CONTEXT}")


def copy_alone(model: nn.Module, rule: SplitRule, shapes: Shapes = _AS_THEY_ARE) -> nn.Module | None:
    """Return a copy for a proof in which attention is a function of one token; None if it cannot be copied.

    Args:
        shapes: of whole parameters, by name, where this rank has parts of them.

    Raises:
        ConfigError: the attention of a model of transformers cannot be replaced.
    """
    copied = copy_for_proof(model, rule, shapes)
    if copied is None:
        return None
    for module in _attending(copied):
        module.attend = _alone
    try:
        if is_huggingface(copied):
            use_sparse_attention(copied, DenseVisibility(attends_causally(copied)), spread=_alone)
    except ConfigError as error:
        raise _not_for(model, error) from error
    return copied


def find_limits(model: nn.Module, cp: int, shapes: Shapes = _AS_THEY_ARE) -> SequenceLimits:
    """Return how long the sequences of a model of transformers may be, and what proves the lengths of its batches.

    Args:
        shapes: of whole parameters, by name, where this rank has parts of them.

    Raises:
        ConfigError: it cannot be split, whatever its sequences.
    """
    num_positions, window = prove_huggingface(model, shapes), find_window(model, shapes)
    copied = copy_alone(model, CONTEXT_RULE, shapes)
    proof = None if copied is None else _ProofOfBatches(model, copied, cp, num_positions)
    return SequenceLimits(num_positions, window, proof)


class _ProofOfBatches:
    """Proves that a model of transformers computes tokens apart in sequences as long as those of its batches.

    Args:
        model: in training, whose attributes say how its inputs are split.
        copied: by `copy_alone`, all of whose code is run: a module may wrap the model of transformers.
        num_positions: up to which it does; None for any number.
    """

    def __init__(self, model: nn.Module, copied: nn.Module, cp: int, num_positions: int | None) -> None:
        inner, _ = inputs_for_proof(copied)
        change_inputs(inner.base_model, describe_mask)
        per_token = numbers_of_a_token(copied)
        self._model, self._copied, self._num_positions = model, copied, num_positions
        self._proofs = LengthProofs(copied, ContextSplitting(cp), lambda length: per_token)
        self._numbers_of_samples: set[int] = set()  # of which a short sequence was proved

    def __call__(self, inputs: Mapping[str, Any]) -> None:
        """Prove the sizes of a batch's inputs, of whole sequences, by name; see `LengthProofs.prove`."""
        sizes = sizes_of(inputs)
        num_samples = sizes["samples"]
        if num_samples not in self._numbers_of_samples and self._proofs.is_costly(sizes):
            self._numbers_of_samples.add(num_samples)
            length = _check_short(copy_again(self._copied), self._num_positions, num_samples)
            self._proofs.proved.append((None, {"samples": num_samples, "tokens": length}))
        self._proofs.prove(signature_of(inputs, sizes), sizes, lambda: self._parts(inputs))

    def _parts(self, inputs: Mapping[str, Any]) -> ProofInputs:
        batch = pytree.tree_map(for_proof, dict(inputs))

        def part(degree: int, rank: int) -> RankInputs:
            return split_inputs(self._model, batch, lambda lengths: contiguous(sum(lengths), degree), rank)

        cp = self._proofs.splitting.degree
        parts = [part(degree, rank) for degree in (1, cp) for rank in range(degree)]
        all_tokens, *of_ranks = [share.inputs for share in parts]
        # Code around the model of transformers gets all tokens as in one process: masks and labels are others there.
        plain = {
            **batch,
            **{name: value for name, value in all_tokens.items() if name in ("position_ids", "use_cache")},
        }
        attempts = [[take_num_items(plain)[0], *of_ranks], [all_tokens, *of_ranks]]
        return ProofInputs(attempts, [share.loss_weight for share in parts])


def prove_own(
    model: nn.Module, cp: int = 2, shapes: Shapes = _AS_THEY_ARE
) -> Callable[[Mapping[str, Any]], None] | None:
    """Return a proof like `prove_huggingface` for a model that takes positions: call it with the inputs of each batch,
    by name. It proves a short sequence first, and then each length that is new.

    It is None where no copy of the model can be made.
    """
    copied = copy_alone(model, CONTEXT_RULE, shapes)
    if copied is None:
        return None
    per_token = numbers_of_a_token(copied)
    proofs = LengthProofs(copied, ContextSplitting(cp), lambda length: per_token)

    def prove(inputs: Mapping[str, Any]) -> None:
        length, num_samples = len(inputs[POSITIONS]), main_input(inputs).shape[0]
        signature = signature_of(inputs, {"samples": num_samples, "tokens": length})
        for num in sorted({min(length, max(_NUM_PROOF_TOKENS // cp, 1) * cp), length}):
            proofs.prove(signature, {"samples": num_samples, "tokens": num}, partial(_own_parts, inputs, num, cp))

    return prove


def _own_parts(inputs: Mapping[str, Any], num_tokens: int, cp: int) -> ProofInputs:
    return ProofInputs([parts_for_proof(inputs, num_tokens, cp)])


def _alone(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
    return attend_alone(q, k, v)


@dataclass(frozen=True)
class SequenceLimits:
    """Holds how long a model's sequences may be when they are split.

    Attributes:
        num_positions: up to which it computes tokens apart; None for any number.
        window: that no sequence may be longer than; None without one.
        prove: called with the inputs of each batch, by name; None for no proof.
    """

    num_positions: int | None = None
    window: MaskWindow | None = None
    prove: Callable[[Mapping[str, Any]], None] | None = None


class HuggingFaceSequences:
    """Gives a rank its tokens of every sample, with what a model of transformers needs to know of the other tokens.

    Args:
        model: with a model of transformers in it.
        rank: of this process along the `cp` axis.
        split_of: returns the token split of a sequence, by the lengths of its documents.
        limits: of the length of its sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        split_of: TokenSplits[tuple[int, ...]],
        limits: SequenceLimits,
        shifts_labels: bool | None,
    ) -> None:
        self._model, self._limits, self._shifts_labels = model, limits, shifts_labels
        self._names = list(inspect.signature(model.forward).parameters)
        self._rank = rank
        self._split_of = split_of

    def share(self, batch: Any, has_more: bool) -> TokenShard:
        """Return the tokens of this rank: `batch` and `has_more` are those of `BatchSharder.share`.

        Raises:
            ConfigError: the batch cannot be split.
        """
        inputs = by_name(batch[0] if has_more else batch, self._names)
        if self._limits.num_positions is not None:
            check_length(self._model, inputs, self._limits.num_positions)
        own = split_inputs(self._model, inputs, self._split_of, self._rank)
        if self._limits.window is not None:
            self._limits.window.check(own.inputs["attention_mask"].shape[-1])
        if self._limits.prove is not None:
            self._limits.prove(inputs)
        main = main_input(inputs)
        cut, num_targets = cut_batch(batch, main, own.tokens), count_targets(inputs, self._shifts_labels)
        return TokenShard(cut, own.inputs, own.tokens, own.loss_weight, num_targets)


def _own_splits(model: nn.Module, config: ResolvedConfig) -> TokenSplits[int]:
    first = _attending(model)[0]
    attend, num_heads = first.attend, first.num_heads
    return TokenSplits(lambda length: attend.layout(length, 0, num_heads), config.context, config.mesh.cp)


def _heads(model: nn.Module) -> set[tuple[int, int]]:
    """Return the numbers of query heads and KV heads of the whole model's layers."""
    if not is_huggingface(model):
        return {(module.num_heads, module.num_kv_heads) for module in _attending(model)}
    configs = [module.config for module in model.modules() if hasattr(module, "base_model_prefix")]
    numbers = [(config, getattr(config, "num_attention_heads", None)) for config in configs]
    return {(number, getattr(each, "num_key_value_heads", None) or number) for each, number in numbers if number}


def _takes_positions(model: nn.Module) -> bool:
    return POSITIONS in inspect.signature(model.forward).parameters


def _attending(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if callable(getattr(module, "attend", None))]


Kind = TypeVar("Kind", bound=Hashable)

_MAX_LAYOUTS: Final = 32
_NUM_PROOF_TOKENS: Final = 128


@dataclass(frozen=True, eq=False)
class TokenSplits(Generic[Kind]):
    """Chooses which rank has which tokens of sequences of some kind (a length, or lengths of documents), by the work of
    a model's attention, and keeps the choice.

    Attributes:
        layout_of: returns what all heads of the model see in such a sequence.
    """

    layout_of: Callable[[Kind], BlockLayout]
    section: ContextConfig
    degree: int
    _splits: dict[Kind, TokenSplit] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, kind: Kind) -> TokenSplit:
        """Return the split of a sequence.

        Raises:
            ConfigError: its length does not divide.
        """
        keep_last(self._splits, kind, lambda: self._choose(kind), _MAX_LAYOUTS)
        return self._splits[kind]

    def _choose(self, kind: Kind) -> TokenSplit:
        size = team_size(self.section, self.degree)
        return choose_split(self.section.token_layout, self.layout_of(kind), self.degree, size)


@dataclass(frozen=True, eq=False)
class ContextParallelAttend:
    """Attends over the ranks where tokens are given their positions, and plainly where the whole sequence is on this
    rank.

    Attributes:
        own: the attention that it replaces, which says which keys each query sees.
        split_of: returns the token split of a sequence of some length.
    """

    own: Attend
    attention: ContextAttention
    split_of: Callable[[int], TokenSplit]
    degree: int
    _layouts: dict[tuple[int, int, int], tuple[BlockLayout, TokenSplit]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, first_head: int, positions: Tensor | None = None
    ) -> Tensor:  # [B, H, S / cp, D], [B, K, S / cp, D]
        if positions is None:
            return self.own(q, k, v, first_head)
        place = index(q.shape[2]) * self.degree, first_head, index(q.shape[1])  # compiled code fixes them
        self._lay_out(*place)
        layout, split = self._layouts[place]
        return self.attention(q, k, v, layout, split)

    def layout(self, length: int, first_head: int, num_heads: int) -> BlockLayout:
        """Return the layout of `own` for `length` tokens and `num_heads` query heads from `first_head` on."""
        return self.own.layout(length, first_head, num_heads)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttend:
        return self

    @constant_in_graphs
    def _lay_out(self, length: int, first_head: int, num_heads: int) -> None:
        """Keep layout and split; compiled code calls this when it is compiled."""
        keep_last(
            self._layouts,
            (length, first_head, num_heads),
            lambda: (self.own.layout(length, first_head, num_heads), self.split_of(length)),
            _MAX_LAYOUTS,
        )
