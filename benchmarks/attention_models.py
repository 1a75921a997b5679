"""A training step of BERT-Base and GPT-2 with dense and with block-sparse attention: time, and the longest sequence.

Time is that of the CPU, for forward and backward of the real model in fp32, one sample. Ways alternate; medians of
rounds. Recomputation is Hugging Face's own.

The longest sequence that trains within `--gib` is found by `shardwise.simulate`: the engine itself over tensors without
memory, bf16 with fp32 master weights and AdamW, one sample, multiples of 512 tokens; what the back end needs while it
works is not in it. Published by DeepSpeed (V100 32 GB, 2020): 10 times longer for BERT-Base with sparse attention and
recomputation than with dense attention, written out, without; and 6.3 times faster. Like for like is beside it: all
ways, with and without recomputation.

Without `--head` the model ends at its last hidden states: logits over the vocabulary, the same in all ways, would hide
what attention holds. Nothing drops: with dropout on probabilities dense attention would hold more.

    python benchmarks/attention_models.py --json attention_models.json
    python benchmarks/attention_models.py --quick
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel, GPT2Model

from shardwise import simulate
from shardwise.attention.huggingface import use_sparse_attention
from shardwise.attention.structures import BigBirdSparsityConfig
from step_time import machine

STEP: Final = 512  # the search's grain, in tokens
WAYS: Final = ("eager", "sdpa", "sparse", "eager + recompute", "sdpa + recompute", "sparse + recompute")
PAIRS: Final = (
    ("sparse + recompute", "eager", "as published"),
    ("sparse + recompute", "eager + recompute", "like for like"),
    ("sparse", "eager", "like for like"),
    ("sparse + recompute", "sdpa + recompute", "like for like, against SDPA"),
    ("sparse", "sdpa", "like for like, against SDPA"),
)


@dataclass(frozen=True)
class Kind:
    """A model's classes and the name of its number of positions."""

    config: Callable[..., Any]
    trunk: Callable[[Any], nn.Module]
    with_head: Callable[[Any], nn.Module]
    positions: str
    no_dropout: Mapping[str, float]
    quick: Mapping[str, int]
    is_causal: bool


MODELS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "bert-base": Kind(
            BertConfig,
            lambda config: BertModel(config, add_pooling_layer=False),
            BertForMaskedLM,
            "max_position_embeddings",
            {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256},
            is_causal=False,
        ),
        "gpt2": Kind(
            GPT2Config,
            GPT2Model,
            GPT2LMHeadModel,
            "n_positions",
            {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            {"n_layer": 2, "n_embd": 128, "n_head": 2},
            is_causal=True,
        ),
    }
)


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        block: tokens of a block of the sparse structure.
        has_head: logits and loss over the vocabulary.
        is_quick: models of two narrow layers.
        gib: of memory, for the longest sequence.
    """

    block: int
    has_head: bool
    is_quick: bool
    gib: float


def build(name: str, way: str, length: int, options: Options) -> nn.Module:
    """A model with random weights whose attention is that of a way; recomputation is not set up yet."""
    kind = MODELS[name]
    sizes = dict(kind.quick) if options.is_quick else {}
    config = kind.config(**{kind.positions: length}, **kind.no_dropout, **sizes, use_cache=False)
    attention = way.partition(" ")[0]
    config._attn_implementation = "eager" if attention == "eager" else "sdpa"
    model = (kind.with_head if options.has_head else kind.trunk)(config)
    if attention == "sparse":
        direction: Literal["unidirectional", "bidirectional"] = "unidirectional" if kind.is_causal else "bidirectional"
        structure = BigBirdSparsityConfig(config.num_attention_heads, block=options.block, attention=direction)
        use_sparse_attention(model, structure)
    return model


def batch_of(length: int, options: Options) -> dict[str, Tensor]:
    """One sample of `length` tokens."""
    tokens = torch.zeros(1, length, dtype=torch.long)
    return {"input_ids": tokens, **({"labels": tokens} if options.has_head else {})}


def loss_of(output: Any, batch: Any) -> Tensor:
    """The model's own loss, or the mean square of its last hidden states."""
    found: Tensor = output.loss if "labels" in batch else output.last_hidden_state.square().mean()
    return found


def measure_times(name: str, length: int, rounds: int, options: Options) -> dict[str, list[float]]:
    """CPU seconds of a training step, by way; the ways alternate."""
    models: dict[str, Any] = {}
    for way in WAYS:
        torch.manual_seed(0)
        model: Any = build(name, way, length, options).train()
        if way.endswith("recompute"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        models[way] = model
    batch = batch_of(length, options)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, model in models.items():
            start_s = time.process_time()
            loss_of(model(**batch), batch).backward()
            elapsed_s = time.process_time() - start_s
            model.zero_grad()
            if number:  # the first one plans and warms up
                found[way].append(elapsed_s)
    return found


@contextmanager
def values_unread() -> Iterator[None]:
    """Masks as transformers makes them for real tensors: for fake ones it takes documents to be packed."""
    with (
        mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None),
        mock.patch("transformers.masking_utils.is_tracing", return_value=False),
    ):
        yield


def peak_bytes(name: str, way: str, options: Options, length: int) -> int:
    """The most that a step of a way holds, by the memory tracker of fake tensors."""
    config = {
        "zero": {"stage": 0},
        "precision": {"param": "bf16"},
        "recompute": {"mode": "full" if way.endswith("recompute") else "none"},
    }
    with values_unread():
        simulation = simulate(
            lambda: build(name, way, length, options),
            config,
            lambda: batch_of(length, options),
            rank=0,
            world_size=1,
            loss_fn=loss_of,
        )
    return simulation.peak.peak_bytes


def longest(peak: Callable[[int], int], limit_bytes: int) -> int:
    """The longest sequence, a multiple of `STEP`, whose peak is within a limit; peaks grow as a polynomial of length.

    A parabola through the three lengths that are nearest to the limit says where to look, until the answer and the
    length after it have both been looked at.
    """
    peaks = {length: peak(length) for length in (STEP, 2 * STEP, 4 * STEP)}
    while True:
        fits = max((length for length in peaks if peaks[length] <= limit_bytes), default=0)
        fails = min((length for length in peaks if peaks[length] > limit_bytes), default=None)
        if fails is not None and fails - fits <= STEP:
            return fits
        nearest = sorted(peaks, key=lambda length: abs(peaks[length] - limit_bytes))[:3]
        highest = 64 * max(peaks) if fails is None else fails
        guess = int(_crossing([(length, peaks[length]) for length in nearest], limit_bytes)) // STEP * STEP
        if guess in peaks:
            guess += STEP
        guess = min(max(guess, fits + STEP), highest - STEP if fails is not None else highest)
        peaks[guess] = peak(guess)


def _crossing(points: Sequence[tuple[int, int]], limit_bytes: int) -> float:
    lengths, peaks = np.array(points, dtype=np.float64).T
    curve = np.polyfit(lengths, peaks - limit_bytes, 2)
    if abs(curve[0]) < 1e-3:  # bytes for the square of a token: a line
        curve = np.polyfit(lengths, peaks - limit_bytes, 1)
    roots = [root.real for root in np.roots(curve) if abs(root.imag) < 1e-6 and root.real > 0]
    return max(roots, default=2 * float(lengths.max()))


def table_of(name: str, values: Mapping[str, float], title: str, better: Callable[[float, float], float]) -> Table:
    """The ways, and pairs of them."""
    table = Table("way", title, title=name)
    for way, value in values.items():
        table.add_row(way, f"{value:,}" if isinstance(value, int) else f"{value:,.3f}")
    for first, second, what in PAIRS:
        ratio = f"{better(values[first], values[second]):.2f}x" if values[first] and values[second] else "none fits"
        table.add_row(f"{first} / {second} ({what})", ratio)
    return table


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--length", type=int, default=2048, help="tokens, for the times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--gib", type=float, default=32.0)
    parser.add_argument("--head", action="store_true", help="logits and loss over the vocabulary")
    parser.add_argument("--no-times", dest="times", action="store_false", help="the longest sequences alone")
    parser.add_argument("--quick", action="store_true", help="narrow models, 256 tokens, one round, 1/4 GiB")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args(arguments)
    if given.quick:
        given.length, given.rounds, given.gib = 256, 1, 0.25
    torch.set_num_threads(1)
    console = Console()
    options = Options(given.block, given.head, given.quick, given.gib)
    results: dict[str, dict[str, Any]] = {}
    for name in given.models.split(","):
        found: dict[str, Any] = {}
        if given.times:
            found["cpu_s"] = measure_times(name, given.length, given.rounds, options)
            medians = {way: statistics.median(each) for way, each in found["cpu_s"].items()}
            console.print(table_of(name, medians, f"CPU seconds, {given.length} tokens", lambda new, old: old / new))
        limit_bytes = int(options.gib * 2**30)
        found["longest"] = {
            way: longest(functools.partial(peak_bytes, name, way, options), limit_bytes) for way in WAYS
        }
        console.print(table_of(name, found["longest"], f"longest in {options.gib:g} GiB", lambda new, old: new / old))
        results[name] = found
    if given.json:
        facts = {"machine": machine(), "options": vars(options), "length": given.length}
        given.json.write_text(json.dumps({**facts, "results": results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
