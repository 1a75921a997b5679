"""What the rebuilt reports share: layouts, tiny models, training on the engine and in one plain process, a comparison.

A case is a function of a layout, which runs on each of two ranks. It returns where the layout trains as one plain
process does, raises `DiffersError` where it does not, and passes every other error on.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import Engine

Steps = Sequence[Sequence[Any]]  # by step, the micro-batches of all data ranks
LossFn = Callable[[Any, Any], Any]
Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
WIDTH: Final = 8
LR: Final = 0.05


class DiffersError(AssertionError):
    """Raised where the values are others than those of one plain process."""


class RefusedError(RuntimeError):
    """Carries the code of an error of the library, in brackets, and its message."""


@dataclass(frozen=True)
class Layout:
    """A layout by its name, and the sections of a config that make it."""

    name: str
    sections: Mapping[str, Mapping[str, Any]]

    @property
    def num_data_ranks(self) -> int:
        """Return the ranks that read different micro-batches."""
        return 1 if set(self.sections.get("mesh", {})) & {"tp", "pp", "cp"} else 2

    @property
    def is_rounded(self) -> bool:
        """Say whether parameters or states have fewer bits than the reference's."""
        return "precision" in self.sections


def _layouts() -> Iterator[Layout]:
    for stage in range(4):
        zero = {"zero": {"stage": stage}}
        yield Layout(f"{stage}", zero)
        yield Layout(f"bf16-{stage}", {**zero, "precision": {"param": "bf16"}})
        yield Layout(f"int8-{stage}", {**zero, "precision": {"states": "int8"}})
    three = {"zero": {"stage": 3}}
    yield Layout("auto", {"zero": {"stage": 3, "lockstep": "auto"}})
    yield Layout("keep", {"zero": {"stage": 3, "keep_whole_below": 20}})
    yield Layout("host", {"zero": {"stage": 2}, "tiers": {"optimizer": "host"}})
    yield Layout("host3", {**three, "tiers": {"params": "host", "grads": "host", "optimizer": "host"}})
    yield Layout("full", {**three, "recompute": {"mode": "full"}})
    yield Layout("selective", {**three, "recompute": {"mode": "selective"}})
    yield Layout("chunk", {**three, "context": {"chunk_tokens": 3}})
    yield Layout("tp", {"mesh": {"tp": 2}})
    yield Layout("sp", {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}})
    yield Layout("tp-full", {"mesh": {"tp": 2}, "recompute": {"mode": "full"}})
    yield Layout("tp-chunk", {"mesh": {"tp": 2}, "context": {"chunk_tokens": 3}})
    yield Layout("pp", {"mesh": {"pp": 2}})
    yield Layout("pp-full", {"mesh": {"pp": 2}, "recompute": {"mode": "full"}})
    yield Layout("zb", {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}})
    yield Layout("cp", {"mesh": {"cp": 2}})
    yield Layout("ulysses", {"mesh": {"cp": 2}, "context": {"transport": "ulysses"}})
    yield Layout("cp-full", {"mesh": {"cp": 2}, "recompute": {"mode": "full"}})


LAYOUTS: Final[Mapping[str, Layout]] = {layout.name: layout for layout in _layouts()}


@dataclass(frozen=True)
class Report:
    """Where a bug was reported, what kind it is of, and the layouts where the kind can go wrong."""

    source: str
    kind: str
    layouts: tuple[str, ...]


def report(source: str, kind: str, layouts: str) -> Callable[[Callable[[Layout], None]], Callable[[Layout], None]]:
    """Mark a function as the case of a report; `layouts` are names between spaces."""

    def mark(function: Callable[[Layout], None]) -> Callable[[Layout], None]:
        function.report = Report(source, kind, tuple(layouts.split()))  # type: ignore[attr-defined]
        return function

    return mark


def run_case(rank: int, world_size: int, module: str, name: str, layout: str) -> None:
    """Run one case in one layout on this rank of the pool; an error with a code becomes `RefusedError`."""
    try:
        getattr(importlib.import_module(module), name)(LAYOUTS[layout])
    except Exception as error:
        if code := getattr(error, "code", ""):
            raise RefusedError(f"[{code}] {type(error).__name__}: {error}") from error
        raise


@dataclass
class Trained:
    """What a training leaves: losses and norms by step, parameters and buffers by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model as the engine does: a dict by name, else the first item of the batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def sum_and_count(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> tuple[Tensor, Any]:
    """Return sum and count of one micro-batch's loss; a causal model's own loss counts its shifted targets."""
    output = call(model, batch)
    if loss_fn is not None:
        loss = loss_fn(output, batch)
        return loss if isinstance(loss, tuple) else (loss, 1)
    labels = batch["labels"]
    is_causal = type(model).__name__.endswith("ForCausalLM")
    count = int((labels[:, 1:] if is_causal else labels).ne(-100).sum()) if is_causal else 1
    return (output.loss * count, count) if count else (output.logits.sum() * 0.0, 0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make the plain optimizer that `config_of` names."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the plain optimizer that `ADAMW` names."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def fading(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Make a schedule that is another rate in every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


ADAMW: Final = {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}


def plain(
    model: nn.Module,
    steps: Steps,
    loss_fn: LossFn | None = None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    clip: float = 0.5,
    after: Callable[[nn.Module, int], None] | None = None,
    schedule: Schedule | None = None,
) -> Trained:
    """Train a copy in one process on all micro-batches of each step; `after` runs between steps."""
    model = copy.deepcopy(model).train()
    optimizer, result = make(model), Trained()
    scheduler = schedule(optimizer) if schedule else None
    for number, batches in enumerate(steps):
        optimizer.zero_grad()
        parts = [sum_and_count(model, batch, loss_fn) for batch in batches]
        loss = sum(part for part, _ in parts) / max(1e-30, sum(count for _, count in parts))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        result.lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler:
            scheduler.step()
        result.losses.append(float(loss))
        result.norms.append(float(norm))
        if after:
            after(model, number)
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    result.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return result


def config_of(layout: Layout, accumulation: int, clip: float | None = 0.5, **sections: Any) -> dict[str, Any]:
    """Return a layout's config with plain SGD; sections are merged into it."""
    config: dict[str, Any] = {
        "batch": {"accumulation": accumulation},
        "optimizer": {"name": "sgd", "lr": LR, "momentum": 0.9, "weight_decay": 0.0},
        "run": {"timeout_s": 20.0, "watchdog_s": 8.0, "device": "cpu"},
    }
    if isinstance(sections.get("optimizer"), dict):
        config["optimizer"] = dict(sections.pop("optimizer"))
    config["optimizer"]["clip_norm"] = clip
    for name, values in [*layout.sections.items(), *sections.items()]:
        config[name] = {**config.get(name, {}), **values}
    return config


@contextmanager
def engine_of(
    model: nn.Module, layout: Layout, accumulation: int, loss_fn: LossFn | None = None, **options: Any
) -> Iterator[Engine]:
    """Start an engine on a copy of the model and close it; `plan`, `optimizer` and such go to `initialize`."""
    model = copy.deepcopy(model).train()
    handed = {key: options.pop(key) for key in ("plan", "weights") if key in options}
    if callable(options.get("optimizer")):
        handed["optimizer"] = options.pop("optimizer")(model)
    if "schedule" in options:
        handed["scheduler"] = options.pop("schedule")(handed["optimizer"])
    if "tp" not in layout.sections.get("mesh", {}):
        handed.pop("plan", None)
    engine = shardwise.initialize(model, config_of(layout, accumulation, **options), loss_fn=loss_fn, **handed)
    try:
        yield engine
    finally:
        engine.close()


def own(engine: Engine, batches: Sequence[Any], layout: Layout) -> Sequence[Any]:
    """Return this data rank's share of a step's micro-batches."""
    number = len(batches) // layout.num_data_ranks
    index = engine.layout.mesh.data_index(dist.get_rank())
    return batches[index * number : (index + 1) * number]


def ours(
    model: nn.Module,
    steps: Steps,
    layout: Layout,
    loss_fn: LossFn | None = None,
    after: Callable[[Engine, int], None] | None = None,
    **options: Any,
) -> Trained:
    """Train a copy on the engine, each data rank on its share; `after` runs between steps."""
    with engine_of(model, layout, len(steps[0]) // layout.num_data_ranks, loss_fn, **options) as engine:
        result = Trained()
        for number, batches in enumerate(steps):
            taken = engine.train_step(own(engine, batches, layout))
            result.losses.append(taken.loss)
            result.norms.append(taken.grad_norm)
            result.lrs.append(taken.lr)
            if after:
                after(engine, number)
        fill(result, engine)
    return result


def fill(result: Trained, engine: Engine) -> None:
    """Read all parameters, and the buffers that are on this rank."""
    names = [name for name, _ in engine.model.named_parameters()]
    result.parameters = {name: engine.read(name) for name in names}
    result.buffers = {name: b.detach().clone() for name, b in engine.model.named_buffers() if not b.is_meta}


def check(actual: Trained, expected: Trained, tolerance: float = 1e-6, buffers: bool = False) -> None:
    """Raise `DiffersError` unless losses, norms and parameters are the same to the tolerance."""
    near(
        "losses",
        torch.tensor(actual.losses, dtype=torch.float64),
        torch.tensor(expected.losses, dtype=torch.float64),
        tolerance,
    )
    if actual.norms and expected.norms:
        near(
            "norms",
            torch.tensor(actual.norms, dtype=torch.float64),
            torch.tensor(expected.norms, dtype=torch.float64),
            tolerance,
        )
    if actual.lrs and len(actual.lrs) == len(expected.lrs):
        near("rates", torch.tensor(actual.lrs), torch.tensor(expected.lrs), tolerance)
    named = [("parameters", actual.parameters, expected.parameters)]
    if buffers:
        named.append(("buffers", actual.buffers, expected.buffers))
    for kind, found, wanted in named:
        largest = max((float(each.abs().max()) for each in wanted.values() if each.numel()), default=1.0)
        for name, value in wanted.items():
            if name in found:
                near(f"{kind}, {name}", found[name], value, tolerance, largest)


def near(what: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-6, largest: float = 0.0) -> None:
    """Raise `DiffersError` where two tensors differ by more than the tolerance, relative to the largest."""
    if actual.shape != expected.shape:
        raise DiffersError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    error = float((actual - expected).abs().max()) / max(largest, float(expected.abs().max()), 1e-12)
    if not (math.isfinite(error) and error <= tolerance):
        raise DiffersError(f"{what}: relative error {error:.2g}")


def same_on_all_ranks(what: str, value: Tensor | float) -> None:
    """Raise `DiffersError` where ranks have different values."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    for other in found[1:]:
        near(what, torch.as_tensor(other), torch.as_tensor(found[0]))


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_PLAN: Final = {"blocks.*.up": "column", "blocks.*.down": "row"}


def net(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    """Make a model in float64, the same on all ranks."""
    torch.manual_seed(seed)
    return kind().double()


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of squared errors, and how many there are."""
    return (output - batch[1]).square().sum(), len(batch[1])


def vectors(num_steps: int = 3, num_batches: int = 4, rows: int = 3, seed: int = 5) -> list[list[Any]]:
    """Make micro-batches of (input, target) in float64."""
    draw = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        pair = torch.randn(rows, WIDTH + 1, generator=draw, dtype=torch.float64)
        return pair[:, :WIDTH].contiguous(), pair[:, WIDTH:].contiguous()

    return [[batch() for _ in range(num_batches)] for _ in range(num_steps)]


def llama(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Make a tiny causal model of transformers in float64; `head=True` gives a sequence classifier."""
    import transformers as hf

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    classes = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "classifier": (hf.LlamaConfig, hf.LlamaForSequenceClassification),
    }
    if kind == "qwen3":
        sizes["head_dim"] = 4
    make_config, make_model = classes[kind]
    return make_model(make_config(**{**sizes, **changes})).double()


def tokens(
    num_steps: int = 2, num_batches: int = 4, rows: int = 2, length: int = 8, vocab: int = 24, seed: int = 3
) -> list[list[dict[str, Tensor]]]:
    """Make micro-batches of tokens whose own labels are partly left out, more or less in each."""
    draw = torch.Generator().manual_seed(seed)

    def batch(number: int) -> dict[str, Tensor]:
        ids = torch.randint(1, vocab, (rows, length), generator=draw)
        labels = ids.clone()
        labels[:, : 1 + number % 4] = -100
        return {"input_ids": ids, "labels": labels}

    return [[batch(number) for number in range(num_batches)] for _ in range(num_steps)]


def shifted(steps: Steps, **extra: Tensor) -> list[list[Any]]:
    """Turn batches with own labels into (inputs, targets) whose targets are shifted already."""

    def turn(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        targets = torch.full_like(batch["labels"], -100)
        targets[:, :-1] = batch["labels"][:, 1:]
        return {"input_ids": batch["input_ids"], **extra}, targets

    return [[turn(batch) for batch in batches] for batches in steps]


def cross_entropy(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum over targets that count, and their number."""
    logits = output.logits if hasattr(output, "logits") else output
    total = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1), ignore_index=-100, reduction="sum"
    )
    return total, batch[1].ne(-100).sum()
