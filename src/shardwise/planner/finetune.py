"""Say of a fine-tuning job whether it fits, how long its examples take, and what would make it fit: three lines.

>>> examples = Examples(num_examples=10_000, lengths=(400,))
>>> examples.num_sequences(2048), examples.words
(1954, '10,000 examples of 400 tokens')
>>> Examples(num_examples=3, lengths=(1500, 1500, 500)).num_sequences(2048)       # two of them share a sequence
2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.untrusted_files import read_text
from shardwise.layout.token_ranges import pack
from shardwise.planner.explain import Reasons
from shardwise.planner.fit import largest
from shardwise.planner.job import changed, trains_all
from shardwise.planner.pricer import Pricer
from shardwise.planner.results import Estimate, money_words
from shardwise.planner.search import SearchResult
from shardwise.runtime.format import format_bytes, format_s

USUAL_TOKENS: Final = 500
"""Mean tokens of an example where none are given: of a question and its answer."""
_MAX_BYTES: Final = 256 * 2**20
_LENGTH_STEP: Final = 256
_MOST_LENGTHS: Final = 4096


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
    texts = [lengths] if lengths.isascii() and lengths.isdecimal() else _words_of(Path(lengths))
    if not texts or not all(text.isascii() and text.isdecimal() and 0 < int(text) < 2**31 for text in texts):
        raise ConfigError(
            "lengths-of-examples",
            f"--lengths {lengths} says no tokens above 0; give their mean, or a file with a number for each example",
        )
    if num_examples is None and len(texts) == 1:
        raise ConfigError("examples-missing", "--lengths has a mean alone; say of how many examples by --examples N")
    counts = tuple(map(int, texts))
    return Examples(num_examples=num_examples or len(counts), lengths=counts, num_epochs=num_epochs), ()


def _words_of(path: Path) -> list[str]:
    text = read_text(path, "give a file with the tokens of each example, one a line", max_bytes=_MAX_BYTES)
    return text.replace(",", " ").replace("[", " ").replace("]", " ").split()


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
    each = "" if job.cluster.num_gpus == 1 else " each"
    if plan.winner is not None:
        price = plan.winner
        about = "" if price.memory.worst.is_simulated else "about "
        held = f"{about}{format_bytes(price.memory.worst.peak_bytes)} of {format_bytes(gpu.memory_bytes)}{each}"
        most = _longest(price, pricer)
        more = f"sequences of up to {most:,} tokens would fit too, with recompute.mode=full and one in a micro-batch"
        fits, takes = f"yes, {what}: {held}", run_line(price, examples)
        return Verdict(does_fit=True, fits=fits, takes=takes, more=more, price=price, num_steps=_steps(price, examples))
    first = min(reasons.changes, key=lambda change: change.price.time.step_s, default=None)
    takes = "nothing that was tried fits, so nothing is timed"
    if first is not None:
        takes = f"with {first.words}: {run_line(first.price, examples)}"
    return Verdict(
        does_fit=False,
        fits=f"no, {what}: {reasons.misses or 'no layout is near to it'}",
        takes=takes,
        more="; ".join(reasons.suggestions) or "a larger device, or a smaller model",
        price=None if first is None else first.price,
        num_steps=None if first is None else _steps(first.price, examples),
    )


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
        longer = Pricer(replace(job, seq_len=_LENGTH_STEP * count), pricer.margin_share)
        return longer.missing(longer.memory.estimate(lean)) is None

    return _LENGTH_STEP * max(1, largest(fits, _MOST_LENGTHS))


def _clock(seconds: float) -> str:
    """Write a duration of a run.

    >>> _clock(42.0), _clock(3000.0), _clock(30_000.0), _clock(400_000.0)
    ('42.0 s', '50 min', '8.3 h', '4.6 days')
    """
    for most, unit, name in ((7200.0, 60.0, "min"), (172_800.0, 3600.0, "h"), (math.inf, 86_400.0, "days")):
        if seconds < 120.0:
            return format_s(seconds)
        if seconds < most:
            return f"{seconds / unit:.0f} {name}" if name == "min" else f"{seconds / unit:.1f} {name}"
    raise AssertionError("no duration is longer than all")
