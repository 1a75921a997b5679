"""What happens to a model of the zoo in a layout: it equals one plain process, or it is refused, or neither.

A cell is a family in a layout. Ranks train it, compare it with the plain process there and then, and return an
`Outcome`; so a call of the pool serves all cells of a family.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist

from harness.models import ModelCase
from harness.reference import PARITY, Trace, max_error, train_reference
from harness.training import make_config, make_optimizer
from harness.zoo import ZOO, Family
from shardwise import Engine, initialize, propose_plan
from shardwise.runtime.float64 import float64_throughout

NUM_STEPS: Final = 2
NUM_RANKS: Final = 2
SHARDED: Final[Mapping[str, Any]] = {"zero": {"stage": 3}}
LAYOUTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "stage 3": SHARDED,
        "own plan": {"mesh": {"tp": 2}},
        "proposal": {"mesh": {"tp": 2}},
        "pipeline": {"mesh": {"pp": 2}},
        "context": {"mesh": {"cp": 2}},
    }
)
CELLS: Final = (*LAYOUTS, "reload")


@dataclass(frozen=True)
class Cell:
    """A family's model in a layout.

    Attributes:
        name: of `CELLS`.
        target: of a reload, the layout that loads what two ranks of stage 3 have saved.
        options: of the model's config, for both sides.
        sections: of the engine's config, beside the layout's.
    """

    name: str
    target: str = "stage 3"
    options: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: "equal", "refused", "wrong" or "crash", and the error's words or the deviation."""

    kind: str
    text: str


def run_cells(rank: int, world_size: int, name: str, cells: Sequence[Cell], folder: Path) -> list[Outcome]:
    """One outcome for each cell, of this rank; the ranks begin each of them together."""
    outcomes: list[Outcome] = []
    with float64_throughout():
        expected: dict[str, Trace] = {}
        for number, cell in enumerate(cells):
            case = case_of(name, cell.options)
            key = repr(sorted(cell.options.items()))
            expected[key] = expected.get(key) or _of_rank_0(rank, case)
            outcomes.append(_attempt(rank, case, cell, expected[key], folder / str(number)))
            dist.barrier()
    return outcomes


def case_of(name: str, options: Mapping[str, Any]) -> ModelCase:
    """A family's case; `options` are of its config, where it has one."""
    entry = ZOO[name]
    return entry.case(**options) if isinstance(entry, Family) else entry


def plain_run(case: ModelCase) -> Trace:
    """What one process without the library computes."""
    batches = [_micro_batches(case, step) for step in range(NUM_STEPS)]
    trace = train_reference(case.build(torch.float64), batches, case.loss, make_optimizer)
    return Trace(trace.losses, trace.grad_norms, {}, trace.parameters)


def _of_rank_0(rank: int, case: ModelCase) -> Trace:
    """The plain run, which one rank computes for all: on few cores the ranks would wait for each other."""
    found = [plain_run(case) if rank == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _micro_batches(case: ModelCase, step: int) -> list[Any]:
    return [case.batch(NUM_RANKS * step + micro, 2, torch.float64) for micro in range(NUM_RANKS)]


def _attempt(rank: int, case: ModelCase, cell: Cell, expected: Trace, folder: Path) -> Outcome:
    run = _reload if cell.name == "reload" else _train
    try:
        found = run(rank, case, cell, folder, expected.parameters.keys())
    except Exception as error:
        return _explain(error)
    pairs = [
        (found.losses, expected.losses),
        (found.grad_norms, expected.grad_norms),
        (found.parameters, expected.parameters),
    ]
    error = max(max_error(one, other) for one, other in pairs)
    return Outcome("equal" if error <= PARITY else "wrong", f"{error:.1e}")


def _explain(error: Exception) -> Outcome:
    """A refusal is an error of the library's own, in one line."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__module__.partition(".")[0] == "shardwise" and "\n" not in str(error):
        return Outcome("refused", text)
    return Outcome("crash", text + "\n" + "".join(traceback.format_tb(error.__traceback__)[-6:]))


def _train(rank: int, case: ModelCase, cell: Cell, folder: Path, names: Collection[str]) -> Trace:
    with _open(case, cell.name, cell.sections, seed=rank) as engine:
        losses, norms = _steps(engine, case, range(NUM_STEPS))
        return Trace(losses, norms, {}, _parameters(engine, names))


def _reload(rank: int, case: ModelCase, cell: Cell, folder: Path, names: Collection[str]) -> Trace:
    """A step over two sharding ranks, whose checkpoint another layout goes on from."""
    with _open(case, "stage 3", cell.sections, seed=rank) as engine:
        losses, norms = _steps(engine, case, range(1))
        engine.save(folder)
    with _open(case, cell.target, cell.sections, seed=7) as engine:
        engine.load(folder)
        if "mesh" in LAYOUTS[cell.target] and cell.target != "pipeline":
            _see_one_value(engine)
        more = _steps(engine, case, range(1, NUM_STEPS))
        parameters = _parameters(engine, names)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return Trace(losses + more[0], norms + more[1], {}, parameters)


def _see_one_value(engine: Engine) -> None:
    """Buffers of ranks that compute one model's parts together are the same."""
    for name, buffer in engine.model.named_buffers():
        both = [torch.empty_like(buffer) for _ in range(NUM_RANKS)]
        dist.all_gather(both, buffer)
        if not torch.equal(*both):
            raise AssertionError(f"the ranks hold different values of the buffer {name}")


def _open(case: ModelCase, layout: str, sections: Mapping[str, Any], seed: int) -> Engine:
    overrides = dict(LAYOUTS[layout])
    for section, values in sections.items():
        overrides[section] = {**overrides.get(section, {}), **values}
    num_micro_batches = 1 if "mesh" not in overrides else NUM_RANKS
    model = case.build(torch.float64, seed=seed)
    plan = None
    if layout == "proposal":
        batch = case.batch(0, 2, torch.float64)
        plan = propose_plan(model, batch if case.loss is None else batch[0], tp=NUM_RANKS)
    return initialize(model, make_config(num_micro_batches, overrides), loss_fn=case.loss, plan=plan)


def _steps(engine: Engine, case: ModelCase, steps: range) -> tuple[list[float], list[float]]:
    mesh = engine.layout.mesh
    results = []
    for step in steps:
        batches = _micro_batches(case, step)
        if mesh.num_data_ranks > 1:
            batches = [batches[mesh.data_index(engine.comm.rank)]]
        results.append(engine.train_step(batches))
    return [each.loss for each in results], [each.grad_norm for each in results]


def _parameters(engine: Engine, names: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: engine.read(name).clone() for name in names}
