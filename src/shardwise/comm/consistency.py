"""Ranks compare through the store, without a tensor, what must be the same on all of them.

Once for each engine they compare the model and the config (`agree_on_setup`). In the first step, ranks that share
layers compare the batches (`BatchCheck`). In the debug mode `run.check_collectives` they compare every batch and,
before it starts, every collective (`CallCheck`). `agreement` has the exchange of their notes.

>>> first, other = RankFacts({}, {"up": {"of shape": "(13, 8)"}}), RankFacts({}, {"up": {"of shape": "(13, 7)"}})
>>> first.difference(other)
('up of shape (13, 8)', '(13, 7)')
>>> RankFacts({"zero.stage": "2"}, {}).difference(RankFacts({"zero.stage": "3"}, {}))
('zero.stage=2', '3')
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.agreement import Agreement, listed, odd_ranks
from shardwise.comm.collectives import Comm
from shardwise.comm.records import Collective, CollectiveNote, CommError
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig, RunConfig
from shardwise.layout.layout import Layout
from shardwise.runtime.device import numbers_on
from shardwise.runtime.pinned_memory import bits_of
from shardwise.runtime.torch_private import pytree

# Each rank may name its own folders and threads.
_OWN_KEYS: Final = frozenset(
    {
        "run.dir",
        "run.name",
        "run.num_threads",
        "data.path",
        "data.cache_dir",
        "data.tokenizer",
        "checkpoint.path",
        "tiers.nvme_path",
        "tiers.cores",
    }
)
_HASH_CHUNK: Final = 1 << 20
_HASH_FACTORS: Final = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd, without a pattern
_MAX_EXACT: Final = 1 << 53  # of fp64, in which ranks compare numbers


class CallCheck:
    """Compares every collective with those of its group's ranks, before it starts.

    Args:
        rank: of this process in the world.
    """

    def __init__(self, store: dist.Store, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self.timeout_s = timeout_s

    def __call__(self, call: Collective) -> None:
        """Return when all ranks of the group are about to start the same collective.

        Raises:
            CommError: they are not; every rank raises it, with the same message.
            MissingRankError: not all have come in time.
        """
        note = call.note()
        prefix = f"calls/{note.group}/{note.position}"
        agreement = Agreement(self._store, call.group.ranks, self._rank, self.timeout_s, prefix)
        verdict = agreement.run("call", lambda: json.dumps(asdict(note)), _judge_calls, note.title)
        if text := verdict.checked():
            raise CommError("collectives-differ", text)


class BatchCheck:
    """Compares the batches of ranks that compute one forward together, where different batches would give a wrong
    result.

    Args:
        store: of the engine; None where there is one process.
        ranks: of the world, that share the model's layers or the layers' matrices.
        rank: of this process in the world.
        config: of the run; with `check_collectives` all batches are compared, and not only those of the first step.

    Attributes:
        has_others: other ranks compute the same forwards.
    """

    def __init__(self, store: dist.Store | None, ranks: tuple[int, ...], rank: int, config: RunConfig) -> None:
        self.agreement = Agreement(store, ranks, rank, config.timeout_s, f"notes/{ranks[0]}")
        self.has_others = self.agreement.is_shared
        self._compares_all = config.check_collectives

    def __call__(self, batch: Any, is_first_step: bool) -> None:
        """Return when all ranks have come with the same batch.

        Raises:
            ConfigError: a rank has another batch; every rank raises it.
            CommError: not all have come in time.
        """
        if not (is_first_step or self._compares_all) or not self.agreement.is_shared:
            return
        text = self.agreement.compare("the same forward", _batch_digest(batch), _judge_batches)
        if text:
            raise ConfigError(
                "batches-differ",
                f"{text} in one forward, whose layers they share; give {listed(self.agreement.ranks)} "
                "the same batches: read data by engine.layout.mesh.data_index(rank), not by rank",
            )

    def some_have(self, names: Collection[str]) -> set[str]:
        """Return the names that some ranks have and others have not; all ranks call it.

        Raises:
            CommError: not all have come in time.
        """
        if not self.agreement.is_shared:
            return set()
        note = json.dumps(sorted(names))
        return set(json.loads(self.agreement.compare("the hooks of one forward", note, _judge_names)))


def hash_of_bits(flat: Tensor) -> Tensor:
    """Return a number, 0-d on the tensor's device, that changes with the bits of a contiguous 1-D tensor."""
    bits = bits_of(flat)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _HASH_CHUNK):
        # A plain weighted sum of equal values with many low zero bits, such as ones, may be that of zeros.
        chunk = bits[start : start + _HASH_CHUNK].long() * _HASH_FACTORS[0]
        chunk += torch.arange(start, start + chunk.numel(), device=total.device) * _HASH_FACTORS[1]
        total += (chunk.bitwise_xor_(chunk >> 29) * _HASH_FACTORS[0]).sum()
    return total


def have_same_bits(comm: Comm, flats: Sequence[Tensor], name: str) -> bool:
    """Say whether contiguous 1-D tensors have the same bits on all ranks of a group, which all call it."""
    if comm.world_size == 1 or comm.is_simulated:
        return True
    hashes = [int(hash_of_bits(flat)) % _MAX_EXACT for flat in flats]
    bounds = numbers_on(comm.device, [*hashes, *(-value for value in hashes)])
    most, least = torch.tensor(comm.max_scalars(bounds, name), dtype=torch.float64).view(2, -1)
    return torch.equal(most, -least)


def _judge_names(notes: Mapping[int, str]) -> str:
    given = [set(json.loads(note)) for note in notes.values()]
    return json.dumps(sorted(set.union(*given) - set.intersection(*given)))


def _batch_digest(batch: Any) -> str:
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().view(-1)
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode() if isinstance(leaf, int | float | str) else type(leaf).__name__.encode())
    return digest.hexdigest()


def _judge_batches(notes: Mapping[int, str]) -> str:
    odd = odd_ranks(notes)
    return odd and f"{odd} took another batch than rank {min(notes)}"


def divergence(notes: Mapping[int, CollectiveNote]) -> str:
    """Say how the calls of ranks at one position of their group differ, and how to fix it; empty if they do not.

    >>> gather = CollectiveNote(12, "all_gather", "blocks.7", "dp_shard", "0.0", 9, 4096, "bf16")
    >>> reduce = CollectiveNote(12, "reduce_scatter", "blocks.6", "dp_shard", "0.0", 9, 4096, "bf16")
    >>> print(divergence({0: gather, 1: reduce, 2: gather}).partition(";")[0])
    rank 1 is at reduce_scatter #12 of blocks.6 (4096 x bf16 over dp_shard), ranks 0, 2 at all_gather #12 of blocks.7 \
(4096 x bf16 over dp_shard)
    >>> divergence({0: gather, 1: gather})
    ''
    """
    ranks_of: dict[tuple[str, str, int, str], list[int]] = {}
    for rank, note in sorted(notes.items()):
        ranks_of.setdefault(note.signature, []).append(rank)
    if len(ranks_of) <= 1:
        return ""
    # The fewest first; of equally many, those without the lowest rank.
    camps = sorted(ranks_of.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    texts = [f"{listed(ranks)}{' is' if len(ranks) == 1 else ' are'} at {notes[ranks[0]]}" for ranks in camps[:1]]
    texts += [f"{listed(ranks)} at {notes[ranks[0]]}" for ranks in camps[1:]]
    same_names = len({signature[:2] for signature in ranks_of}) == 1
    fix = (
        "build the same model under the same config on every rank"
        if same_names
        else "let every rank run the same blocks in the same order, or set zero.lockstep=true"
    )
    return f"{', '.join(texts)}; {fix}"


def _judge_calls(notes: Mapping[int, str]) -> str:
    if len(set(notes.values())) == 1:
        return ""
    return divergence({rank: CollectiveNote(**json.loads(note)) for rank, note in notes.items()})


@dataclass(frozen=True)
class RankFacts:
    """Holds what must be the same on all ranks: values of config keys; facts of parameters and buffers, by name, in
    order.
    """

    config: Mapping[str, str]
    model: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, layout: Layout, config: ResolvedConfig, buffers: Iterable[tuple[str, Tensor]]) -> Self:
        """Collect the facts of this rank."""
        values = {
            f"{section}.{key}": json.dumps(value)
            for section, keys in config.model_dump().items()
            for key, value in keys.items()
            if f"{section}.{key}" not in _OWN_KEYS
        }
        model: dict[str, dict[str, str]] = {}
        for group in layout.model_groups:
            facts = {"in block": group.unit, "on stages": str(group.stages), "with requires_grad": str(group.trainable)}
            model |= {param.name: {"of shape": str(param.shape), **facts} for param in group.params}
        for name, buffer in buffers:
            model[f"buffer {name}"] = {"of shape": str(tuple(buffer.shape)), "of dtype": str(buffer.dtype)}
        return cls(values, model)

    def to_json(self) -> str:
        """Return the facts as JSON text for other ranks."""
        return json.dumps(asdict(self))

    def difference(self, other: RankFacts) -> tuple[str, str] | None:
        """Return the first fact that differs, of this rank and of the other, config keys first; None if none does."""
        for key, value in self.config.items():
            if other.config.get(key) != value:
                return f"{key}={value}", str(other.config.get(key))
        for name in (*self.model, *other.model):
            own, others = self.model.get(name), other.model.get(name)
            if own is None or others is None:
                return (f"no {name}", "has it") if own is None else (f"{name}", "not")
            for fact, value in own.items():
                if others.get(fact) != value:
                    return f"{name} {fact} {value}", str(others.get(fact))
        for number, names in enumerate(zip(self.model, other.model, strict=True)):
            if names[0] != names[1]:
                return f"{names[0]} as parameter {number}", names[1]
        return None


def agree_on_setup(agreement: Agreement, setup: RankFacts) -> None:
    """Return once all ranks of the world have the same setup.

    Raises:
        ConfigError: they differ, on every rank; the message names the first difference.
        CommError: not all have come in time.
    """
    if not agreement.is_shared:
        return
    digest = hashlib.sha256(setup.to_json().encode()).hexdigest()
    if agreement.compare("shardwise.initialize", digest, odd_ranks):
        raise ConfigError(
            "setups-differ", agreement.compare("the comparison of setups", setup.to_json(), _judge_setups)
        )


def _judge_setups(notes: Mapping[int, str]) -> str:
    first, *_ = sorted(notes)
    odd = next(rank for rank in sorted(notes) if notes[rank] != notes[first])
    same = [rank for rank in sorted(notes) if notes[rank] == notes[odd]]
    setups = [RankFacts(**json.loads(notes[rank])) for rank in (odd, first)]
    theirs, its = setups[0].difference(setups[1]) or ("another setup", "its own")
    return (
        f"{listed(same)} {'has' if len(same) == 1 else 'have'} {theirs}, rank {first} {its}; "
        "build the same model under the same config on every rank"
    )
