"""What an engine can do beside plain training, it does with split layers as one plain process does, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.huggingface import build_model, float64_throughout
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.reference import PARITY, call_model, max_error
from harness.tensor import make_case, step_batches
from harness.training import make_config, make_optimizer
from shardwise import Engine, initialize

pytest.importorskip("transformers")

STATES = ("param", "master", "grad", "exp_avg", "exp_avg_sq", "step")
LAYOUTS = {
    "tp2": {"mesh": {"tp": 2}, "zero": {"stage": 2}, "tensor": {"sequence_parallel": True}},
    "tp2-dp2": {"mesh": {"tp": 2}, "zero": {"stage": 3}, "tensor": {"sequence_parallel": True}},
    "tp2-dp2-plain": {"mesh": {"tp": 2}, "zero": {"stage": 1}},
    "tp4": {"mesh": {"tp": 4}, "zero": {"stage": 0}, "tensor": {"sequence_parallel": True}},
    "hybrid": {"mesh": {"tp": 2, "dp_replicate": 2}, "zero": {"stage": 2}},
}
NUM_RANKS = {"tp2": 2, "tp2-dp2": 4, "tp2-dp2-plain": 4, "tp4": 4, "hybrid": 4}
Named = dict[str, dict[str, Tensor | None]]


def case_of(name: str) -> ModelCase:
    """A case that drops nothing."""
    case = make_case(name)
    return case if name == "decoder" else ModelCase(name, lambda: build_model(name), case.batch, None)


def make_engine(name: str, layout: str, rank: int = 0, num_micro_batches: int = 1, **sections: Any) -> Engine:
    case = case_of(name)
    merged = {**LAYOUTS[layout]}
    for section, values in sections.items():
        merged[section] = {**merged.get(section, {}), **values}
    return initialize(case.build(torch.float64, seed=rank), make_config(num_micro_batches, merged), loss_fn=case.loss)


def num_data_ranks(layout: str) -> int:
    return NUM_RANKS[layout] // LAYOUTS[layout]["mesh"]["tp"]


def batches_of(name: str, layout: str, step: int, rank: int | None = None) -> list[Any]:
    """One micro-batch a data rank: those of all of them, or of a rank's."""
    batches = step_batches(case_of(name), step, num_data_ranks(layout))[: num_data_ranks(layout)]
    return batches if rank is None else [batches[rank // LAYOUTS[layout]["mesh"]["tp"]]]


def backward(model: nn.Module, batches: Sequence[Any], case: ModelCase) -> float:
    """The mean gradient of batches, in one plain process; returns the mean loss."""
    total, count = 0.0, 0.0
    for batch in batches:
        output = call_model(model, batch, case.loss)
        batch_sum, batch_count = case.loss(output, batch) if case.loss else (output["loss"], 1)
        batch_sum.backward()
        total, count = total + batch_sum.item(), count + float(batch_count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    return total / count


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def read_all(engine: Engine, to_rank: int | None = None) -> Named:
    return {
        name: {state: engine.read(name, state, to_rank=to_rank) for state in engine.states_of(name)}
        for name in names_of(engine.model)
    }


def plain_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    return {
        name: {"param": p, "master": p, "grad": p.grad, **optimizer.state.get(p, {})}
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def check_states(actual: Named, expected: Named) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert {key for key, value in actual[name].items() if value is not None} == {
            key for key, value in expected[name].items() if value is not None
        }, name
    for state in STATES:
        sides = [
            {name: value.detach() for name in side if (value := side[name].get(state)) is not None}
            for side in (actual, expected)
        ]
        assert not sides[1] or max_error(*sides) <= PARITY, state


def value_for(name: str, state: str, shape: torch.Size) -> Tensor:
    scale = {"param": 0.3, "exp_avg": -0.01, "exp_avg_sq": 0.02, "grad": 0.05, "master": 0.2}[state]
    generator = torch.Generator().manual_seed(len(state) + len(name))
    return scale * torch.rand(shape, generator=generator, dtype=torch.float64)


def read_and_write(rank: int, world_size: int, name: str, layout: str, from_rank: int | None) -> tuple[Named, Named]:
    """States before a step's end, then training on after each parameter has been written."""
    with float64_throughout(), make_engine(name, layout, rank) as engine:

        def write(key: str, state: str, shape: torch.Size) -> None:
            engine.write(
                key, value_for(key, state, shape) if from_rank in (None, rank) else None, state, from_rank=from_rank
            )

        shapes = {key: engine.read(key).shape for key, _ in engine.model.named_parameters()}
        engine.train_step(batches_of(name, layout, 0, rank))
        engine.backward(engine(*batches_of(name, layout, 1, rank)))
        states = read_all(engine)
        written = list(shapes)[::2]
        for key in written:
            write(key, "grad", shapes[key])
        engine.step()
        for key in written:
            for state in ("exp_avg", "exp_avg_sq", "param"):
                write(key, state, shapes[key])
            engine.write(key, 7.0, "step")
        write(written[0], "master", shapes[written[0]])
        engine.train_step(batches_of(name, layout, 2, rank))
        return states, read_all(engine)


def plain_read_and_write(name: str, layout: str) -> tuple[Named, Named]:
    case = case_of(name)
    model = case.build(torch.float64)
    optimizer = make_optimizer(model)
    parameters = dict(model.named_parameters())
    written = list(parameters)[::2]
    with float64_throughout():
        backward(model, batches_of(name, layout, 0), case)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, batches_of(name, layout, 1), case)
        states = {
            key: {state: None if value is None else value.detach().clone() for state, value in each.items()}
            for key, each in plain_states(model, optimizer).items()
        }
        for key in written:
            parameters[key].grad = value_for(key, "grad", parameters[key].shape)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for key in written:
                for state in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[parameters[key]][state].copy_(value_for(key, state, parameters[key].shape))
                optimizer.state[parameters[key]]["step"].fill_(7.0)
                parameters[key].copy_(value_for(key, "param", parameters[key].shape))
            parameters[written[0]].copy_(value_for(written[0], "master", parameters[written[0]].shape))
        backward(model, batches_of(name, layout, 2), case)
        optimizer.step()
        optimizer.zero_grad()
    return states, plain_states(model, optimizer)


@pytest.mark.parametrize(
    "options", cover({"model": ["decoder", "gpt2", "qwen2"], "layout": list(LAYOUTS), "from_rank": [None, 0, "last"]})
)
def test_states_are_whole_tensors(ranks: WorkerPool, options: dict[str, Any]) -> None:
    name, layout = options["model"], options["layout"]
    from_rank = NUM_RANKS[layout] - 1 if options["from_rank"] == "last" else options["from_rank"]
    expected = plain_read_and_write(name, layout)
    for results in ranks(NUM_RANKS[layout]).run(read_and_write, name, layout, from_rank):
        for states, others in zip(results, expected, strict=True):
            check_states(states, others)
