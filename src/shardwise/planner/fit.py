"""Find the largest that a machine holds, by a few ways to split a job; say whether a fine-tuning job fits, in short.

>>> examples = Examples(num_examples=10_000, lengths=(400,))
>>> examples.num_sequences(2048), examples.words
(1954, '10,000 examples of 400 tokens')
>>> Examples(num_examples=3, lengths=(1500, 1500, 500)).num_sequences(2048)       # two of them share a sequence
2
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Dtype, ResolvedConfig
from shardwise.config.untrusted_files import read_text
from shardwise.layout.token_ranges import pack
from shardwise.models.shape import ModelShape
from shardwise.planner.explain import Reasons
from shardwise.planner.hardware import Cluster
from shardwise.planner.job import BASE, PlanJob, changed, trains_all
from shardwise.planner.memory import MemoryModel
from shardwise.planner.request import CHUNK_TOKENS
from shardwise.planner.results import USUAL_MARGIN, Estimate, missing_memory, money_words
from shardwise.planner.search import Pricer, SearchResult
from shardwise.runtime.format import format_bytes, format_s

_HEAD_DIM: Final = 128
_VOCAB_SIZE: Final = 128_256
_HEADS_STEP: Final = 4
_MOST_HEADS: Final = 512
_MOST_SAMPLES: Final = 4096
_LENGTH_STEP: Final = 1024
_MOST_LENGTHS: Final = 16_384


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Hold the largest of each kind that a way to split a job holds, the other two at their least; None: nothing fits.

    Attributes:
        config: the way to split a job over all GPUs.
        shape: of the largest model of the family, at the given length and one sample.
        micro_size: samples of the given model, at the given length.
        seq_len: tokens of a sequence of the given model, one sample.
    """

    name: str
    config: ResolvedConfig
    shape: ModelShape | None = None
    micro_size: int | None = None
    seq_len: int | None = None


def family_shape(num_heads: int) -> ModelShape:
    """Return a decoder of the Llama family with `num_heads` heads of 128 and as many layers.

    >>> shape = family_shape(32)
    >>> shape.num_layers, shape.hidden_size, round(shape.num_params / 1e9, 1)
    (32, 4096, 8.0)
    """
    hidden = _HEAD_DIM * num_heads
    return ModelShape(
        num_layers=num_heads,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=math.gcd(8, num_heads),
        head_dim=_HEAD_DIM,
        ffn_size=hidden * 7 // 2,
        vocab_size=_VOCAB_SIZE,
        name=f"{num_heads} layers of {hidden:,}",
    )


def setups(cluster: Cluster, param: Dtype = "bf16") -> Iterator[Fit]:
    """Yield well-known ways to split a job, from the simplest to the one that holds most."""
    ranks = cluster.num_gpus
    sharded = changed(BASE, {"mesh.dp_shard": ranks, "precision.param": param})
    yield Fit(name="DDP" if ranks > 1 else "on the device", config=sharded)
    for stage in (1, 2, 3) if ranks > 1 else ():
        yield Fit(name=f"ZeRO-{stage}", config=changed(sharded, {"zero.stage": stage}))
    saving = changed(sharded, {"zero.stage": 3, "recompute.mode": "full"})
    yield Fit(name="... recompute full" if ranks > 1 else "recompute full", config=saving)
    team = min(cluster.gpus_per_node, max(1, cluster.gpu.link_domain), 8)
    if team > 1 and ranks % team == 0:
        tensor = changed(saving, {"mesh.tp": team, "mesh.dp_shard": ranks // team, "tensor.sequence_parallel": True})
        yield Fit(name=f"... TP {team}+SP", config=tensor)
        yield Fit(name=f"... CP {team}", config=changed(saving, {"mesh.cp": team, "mesh.dp_shard": ranks // team}))
    yield Fit(name="... in chunks", config=changed(saving, {"context.chunk_tokens": CHUNK_TOKENS}))
    host = changed(saving, {"tiers.optimizer": "host"})
    yield Fit(name="... optimizer on host", config=host)
    on_host = dict.fromkeys(("tiers.params", "tiers.grads", "tiers.activations"), "host")
    away = changed(host, on_host | {"context.chunk_tokens": CHUNK_TOKENS})
    yield Fit(name="... chunks, all on host", config=away)
    if cluster.host.nvme_bytes > 0:
        on_disk = changed(away, {"tiers.params": "nvme", "tiers.grads": "nvme", "tiers.optimizer": "nvme"})
        yield Fit(name="... chunks, states on NVMe", config=on_disk)


def fit(
    cluster: Cluster,
    *,
    seq_len: int,
    shape: ModelShape | None = None,
    margin_share: float = USUAL_MARGIN,
    param: Dtype = "bf16",
) -> Iterator[Fit]:
    """Yield the largest that each setup holds, one setup after the other.

    Args:
        cluster: the machine; all of it is used.
        seq_len: tokens of a sequence of the largest model.
        shape: the model whose largest micro-batch and sequence are also found; None finds the largest model alone.
        margin_share: share of a device's memory that is to stay free.
    """
    for setup in setups(cluster, param):
        yield _largest_of(setup, partial(_holds, cluster, setup.config, margin_share), seq_len, shape)


def _largest_of(
    setup: Fit, holds: Callable[[ModelShape, int, int], bool], seq_len: int, shape: ModelShape | None
) -> Fit:
    fours = largest(lambda count: holds(family_shape(_HEADS_STEP * count), seq_len, 1), _MOST_HEADS // _HEADS_STEP)
    setup = replace(setup, shape=family_shape(_HEADS_STEP * fours) if fours else None)
    if shape is None or shape.num_heads % setup.config.mesh.tp:
        return setup
    samples = largest(lambda size: holds(shape, seq_len, size), _MOST_SAMPLES)
    length = _LENGTH_STEP * largest(lambda count: holds(shape, _LENGTH_STEP * count, 1), _MOST_LENGTHS)
    return replace(setup, micro_size=samples or None, seq_len=length or None)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, 0 for none; where one fits, all below it must fit."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _holds(
    cluster: Cluster, config: ResolvedConfig, margin_share: float, shape: ModelShape, seq_len: int, micro_size: int
) -> bool:
    config = changed(config, {"batch.micro_size": micro_size})
    job = PlanJob(shape=shape, seq_len=seq_len, global_batch=config.batch.global_size, cluster=cluster)
    return missing_memory(MemoryModel(job).estimate(config), cluster, margin_share) is None


USUAL_TOKENS: Final = 500
"""Mean tokens of an example where none are given: of a question and its answer."""
_MAX_BYTES: Final = 256 * 2**20
_TUNED_STEP: Final = 256
_MOST_STEPS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Hold the examples of a run: whole ones share a sequence, as many as fit, as `shardwise train` packs chats.

    Attributes:
        lengths: tokens of each of them, or of a sample of them; or their mean alone.
    """

    num_examples: int
    lengths: tuple[int, ...]
    num_epochs: float = 1.0

    @property
    def words(self) -> str:
        """Return how many of which length."""
        mean = f"{sum(self.lengths) / len(self.lengths):,.0f} tokens"
        length = mean if len(self.lengths) == 1 else f"{mean} on average"
        again = "" if self.num_epochs == 1 else f", {self.num_epochs:g} times"
        return f"{self.num_examples:,} examples of {length}{again}"

    def num_sequences(self, seq_len: int) -> int:
        """Return the sequences into which they are packed, once; by the mean alone as if none had padding."""
        cut = [min(length, seq_len) for length in self.lengths]
        filled = len(pack(cut, seq_len)) if len(cut) > 1 else sum(cut) / seq_len
        return math.ceil(self.num_examples * filled / len(cut))

    def num_steps(self, seq_len: int, global_batch: int) -> int:
        """Return the optimizer steps of all epochs."""
        return max(1, math.ceil(self.num_epochs * self.num_sequences(seq_len) / global_batch))

    def share_cut(self, seq_len: int) -> float:
        """Return the share of the examples that are longer than a sequence, and lose their end."""
        return sum(length > seq_len for length in self.lengths) / len(self.lengths)


def read_examples(
    num_examples: int | None, lengths: str | None, num_epochs: float | None = None
) -> tuple[Examples | None, tuple[str, ...]]:
    """Return what a user says of the examples, or None if nothing, and notes on what was assumed.

    Args:
        num_examples: None takes as many as the file of lengths has.
        lengths: the mean number of tokens, or a file with the tokens of each example; None takes the usual mean.

    Raises:
        ConfigError: there is no such file, or it has something else than counts of tokens.
    """
    if lengths is None and num_examples is None and num_epochs is not None:
        raise ConfigError("examples-missing", "--epochs says not of how many examples; add --examples N")
    if lengths is None and num_examples is None:
        return None, ()
    num_epochs = num_epochs or 1.0
    if lengths is None:
        note = f"examples of {USUAL_TOKENS} tokens are assumed; --lengths N, or a file with the length of each"
        return Examples(num_examples=num_examples or 1, lengths=(USUAL_TOKENS,), num_epochs=num_epochs), (note,)
    texts = [lengths]
    if not (lengths.isascii() and lengths.isdecimal()):
        text = read_text(Path(lengths), "give a file with the tokens of each example, one a line", max_bytes=_MAX_BYTES)
        texts = text.translate(str.maketrans(",[]", "   ")).split()
    if not texts or not all(text.isascii() and text.isdecimal() and 0 < int(text) < 2**31 for text in texts):
        raise ConfigError(
            "lengths-of-examples",
            f"--lengths {lengths} says no tokens above 0; give their mean, or a file with a number for each example",
        )
    if num_examples is None and len(texts) == 1:
        raise ConfigError("examples-missing", "--lengths has a mean alone; say of how many examples by --examples N")
    counts = tuple(map(int, texts))
    return Examples(num_examples=num_examples or len(counts), lengths=counts, num_epochs=num_epochs), ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hold the three lines: whether it fits, how long it takes, what would make it fit or what else would.

    Attributes:
        price: of what is timed: the best layout, or where nothing fits the fastest change that does.
        num_steps: of the run; None where the examples are not known.
    """

    does_fit: bool
    fits: str
    takes: str
    more: str
    price: Estimate | None
    num_steps: int | None

    @property
    def values(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        steps, price = self.num_steps, self.price
        return {
            "fits": self.does_fit,
            "num_steps": steps,
            "run_s": None if steps is None or price is None else steps * price.time.step_s,
            "lines": [self.fits, self.takes, self.more],
        }


def verdict(plan: SearchResult, reasons: Reasons, pricer: Pricer, examples: Examples | None) -> Verdict:
    """Return the three lines of a fine-tuning job.

    Args:
        pricer: prices the candidates of its job.
        examples: None where they are not known; then a step is timed.
    """
    job, gpu, lora = plan.job, plan.job.cluster.gpu, plan.job.base.lora
    what = "all weights" if trains_all(job.base) else f"adapters of rank {lora.rank}"
    what += " beside weights in 4 bits" if lora.base == "nf4" else ""
    apiece = "" if job.cluster.num_gpus == 1 else " each"
    price, does_fit = plan.winner, plan.winner is not None
    if price is not None:
        about = "" if price.memory.worst.is_simulated else "about "
        peak = f"{about}{format_bytes(price.memory.worst.peak_bytes)} of {format_bytes(gpu.memory_bytes)}{apiece}"
        fits, takes, most = f"yes, {what}: {peak}", run_line(price, examples), _longest(price, pricer)
        more = f"sequences of up to {most:,} tokens would fit too, with recompute.mode=full and one in a micro-batch"
    else:
        fits = f"no, {what}: {reasons.misses or 'no layout is near to it'}"
        takes = "nothing that was tried fits, so nothing is timed"
        more = "; ".join(reasons.suggestions) or "a larger device, or a smaller model"
        if reasons.changes:
            fastest = min(reasons.changes, key=lambda change: change.price.time.step_s)
            price = fastest.price
            takes = f"with {fastest.words}: {run_line(price, examples)}"
    num_steps = None if price is None else _steps(price, examples)
    return Verdict(does_fit=does_fit, fits=fits, takes=takes, more=more, price=price, num_steps=num_steps)


def run_line(price: Estimate, examples: Examples | None) -> str:
    """Say how long the examples take under a config, and what they cost; of a step where there are none."""
    time, job = price.time, price.job
    if (num_steps := _steps(price, examples)) is None or examples is None:
        return f"{format_s(time.step_s)} for {job.global_batch:,} sequences; --examples N says how long N examples take"
    span = f"{_clock(num_steps * time.step_s)} ({_clock(num_steps * time.low_s)} to {_clock(num_steps * time.high_s)})"
    money = "" if price.usd_per_step is None else f", {money_words(num_steps * price.usd_per_step)}"
    sequences = f"{examples.num_sequences(job.seq_len):,} sequences of {job.seq_len:,}"
    return f"{span}{money}: {examples.words} are {sequences}, {num_steps:,} steps of {format_s(time.step_s)}"


def notes_of(examples: Examples, seq_len: int) -> Iterator[str]:
    """Yield a note where examples are longer than a sequence."""
    if share := examples.share_cut(seq_len):
        cut = f"{100 * share:.2g} % of the examples are longer than {seq_len:,} tokens and lose their end"
        yield f"{cut}; --seq {max(examples.lengths)}"


def _steps(price: Estimate, examples: Examples | None) -> int | None:
    return None if examples is None else examples.num_steps(price.job.seq_len, price.job.global_batch)


def _longest(price: Estimate, pricer: Pricer) -> int:
    """Return the longest sequences of which one fits a rank under a config that recomputes all."""
    job = price.job
    lean = changed(price.config, {"batch.micro_size": 1, "recompute.mode": "full", "recompute.every": 1})

    def fits(count: int) -> bool:
        longer = Pricer(replace(job, seq_len=_TUNED_STEP * count), pricer.margin_share)
        return longer.missing(longer.memory.estimate(lean)) is None

    return _TUNED_STEP * max(1, largest(fits, _MOST_STEPS))


def _clock(seconds: float) -> str:
    """Write a duration of a run.

    >>> _clock(42.0), _clock(3000.0), _clock(30_000.0), _clock(400_000.0)
    ('42.0 s', '50 min', '8.3 h', '4.6 days')
    """
    if seconds < 120.0:
        return format_s(seconds)
    if seconds < 7200.0:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
