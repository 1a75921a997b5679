"""What an engine can do beside plain training, it does with split layers as one plain process does, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.huggingface import build_model
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.reference import PARITY, call_model, max_error, own_loss
from harness.refusals import refused
from harness.tensor import make_case, step_batches
from harness.training import make_config, make_optimizer
from shardwise import Engine, init, initialize
from shardwise import backward as backward_common
from shardwise.config.errors import ConfigError
from shardwise.models.decoder import generate
from shardwise.runtime.float64 import float64_throughout
from shardwise.tensor.hf_plans import find_plan
from shardwise.zero.tp_params import shard_param

pytest.importorskip("transformers")

STATES = ("param", "master", "grad", "exp_avg", "exp_avg_sq", "step")
LAYOUTS = {
    "tp2": {"mesh": {"tp": 2}, "zero": {"stage": 2}, "tensor": {"sequence_parallel": True}},
    "tp2-dp2": {"mesh": {"tp": 2}, "zero": {"stage": 3}, "tensor": {"sequence_parallel": True}},
    "tp4": {"mesh": {"tp": 4}, "zero": {"stage": 0}, "tensor": {"sequence_parallel": True}},
    "hybrid": {"mesh": {"tp": 2, "dp_replicate": 2}, "zero": {"stage": 2}},
}
TRANSPOSED = {("gpt2", "tp2")}
NUM_RANKS = {"tp2": 2, "tp2-dp2": 4, "tp4": 4, "hybrid": 4}
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
        batch_sum, batch_count = case.loss(output, batch) if case.loss else own_loss(model, output, batch)
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


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    cover(
        {"model": ["decoder", "gpt2"], "layout": list(LAYOUTS), "from_rank": [None, "last"]},
        # gpt2's transposed and packed weights where they are split; which rank gives a value is nothing to a model.
        quick=lambda options: (
            (options["model"], options["from_rank"]) == ("decoder", None)
            or (options["from_rank"] == "last" and (options["model"], options["layout"]) in TRANSPOSED)
        ),
    ),
)
def test_states_are_whole_tensors(ranks: WorkerPool, options: dict[str, Any]) -> None:
    name, layout = options["model"], options["layout"]
    from_rank = NUM_RANKS[layout] - 1 if options["from_rank"] == "last" else options["from_rank"]
    expected = plain_read_and_write(name, layout)
    for results in ranks(NUM_RANKS[layout]).run(read_and_write, name, layout, from_rank):
        for states, others in zip(results, expected, strict=True):
            check_states(states, others)


# Ways to train.


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    return {name: engine.read(name) for name, _ in engine.model.named_parameters()}


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the user's, with groups of other options."""
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[::2], "weight_decay": 0.3}, {"params": parameters[1::2]}], lr=1e-2)


def with_momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def plain_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return with_momentum(model.parameters())


def some_of(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[1::3]


FEATURES = {
    "freezing": (None, make_optimizer, None),
    "frozen-and-replicated": (None, make_optimizer, None),
    "optimizer-with-groups": (in_groups, in_groups, None),
    "momentum-no-sync-clipped": (with_momentum, plain_momentum, 0.05),
    "offload-lockstep": (None, make_optimizer, None),
}


def train_with(rank: int, world_size: int, name: str, layout: str, feature: str) -> dict[str, Tensor]:
    case = case_of(name)
    model = case.build(torch.float64)
    given, _, clip_norm = FEATURES[feature]
    optimizer = given(model) if given is in_groups else given
    zero = {"lockstep": feature == "offload-lockstep", "replicate_frozen": feature == "frozen-and-replicated"}
    sections = {**LAYOUTS[layout], "optimizer": {"clip_norm": clip_norm}}
    sections["zero"] = {**sections["zero"], **zero}
    frozen = some_of(model)
    freeze(frozen, feature, 0)
    config = make_config(1, sections)
    with float64_throughout(), initialize(model, config, loss_fn=case.loss, optimizer=optimizer) as engine:
        for step in range(3):
            freeze(frozen, feature, step)
            (batch,) = batches_of(name, layout, step, rank)
            if feature == "offload-lockstep":
                with engine.offloaded():
                    pass
            if feature == "momentum-no-sync-clipped":
                with engine.no_sync():
                    engine.backward(engine(batch))
            else:
                engine.backward(engine(batch))
            if feature == "offload-lockstep":
                engine.offload()
                engine.reload()
            engine.step()
        return parameters_of(engine)


def freeze(parameters: Sequence[nn.Parameter], feature: str, step: int) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not (feature.startswith("frozen") or (feature == "freezing" and step == 1)))


def train_plainly(name: str, layout: str, feature: str) -> dict[str, Tensor]:
    case = case_of(name)
    model = case.build(torch.float64)
    _, make, clip_norm = FEATURES[feature]
    frozen = some_of(model)
    freeze(frozen, feature, 0)
    optimizer = make(model)
    with float64_throughout():
        for step in range(3):
            freeze(frozen, feature, step)
            optimizer.zero_grad()
            backward(model, batches_of(name, layout, step), case)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options", cover({"feature": list(FEATURES), "model": ["decoder", "gpt2"], "layout": ["tp4", "tp2-dp2"]})
)
def test_ways_to_train(ranks: WorkerPool, options: dict[str, Any]) -> None:
    name, layout, feature = options["model"], options["layout"], options["feature"]
    expected = train_plainly(name, layout, feature)
    for parameters in ranks(NUM_RANKS[layout]).run(train_with, name, layout, feature):
        assert max_error(parameters, expected) <= PARITY


def train_two(rank: int, world_size: int, layout: str) -> dict[str, Tensor]:
    case = case_of("decoder")
    with make_engine("decoder", layout) as one, make_engine("decoder", layout, rank=1) as other:
        for step in range(2):
            (batch,) = batches_of("decoder", layout, step, rank)
            backward_common(common_loss(one.model, other.model, batch, case), [one, other])
            one.step()
            other.step()
        both = {"one": parameters_of(one), "other": parameters_of(other)}
    return {f"{key}.{name}": parameter for key, each in both.items() for name, parameter in each.items()}


def common_loss(one: nn.Module, other: nn.Module, batch: Any, case: ModelCase) -> Tensor:
    losses = [case.loss(call_model(model, batch, case.loss), batch)[0] for model in (one, other)]
    return 0.1 * losses[0] + 0.01 * losses[0] * losses[1]


@pytest.mark.parametrize("layout", ["tp4", "tp2-dp2"])
def test_two_engines_with_one_loss(ranks: WorkerPool, layout: str) -> None:
    case = case_of("decoder")
    models = {"one": case.build(torch.float64), "other": case.build(torch.float64, seed=1)}
    optimizers = [make_optimizer(model) for model in models.values()]
    for step in range(2):
        batches = batches_of("decoder", layout, step)
        for batch in batches:
            (common_loss(models["one"], models["other"], batch, case) / len(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = {f"{key}.{name}": p.detach() for key, model in models.items() for name, p in model.named_parameters()}
    for parameters in ranks(NUM_RANKS[layout]).run(train_two, layout):
        assert max_error(parameters, expected) <= 1e-7  # the decoder's norms are in float32


class Mlp(nn.Module):
    """A norm, two layers and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down, self.unused = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # [B, 8]


def make_mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Mlp(), Mlp()).double()


def points(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, 8, generator=generator, dtype=torch.float64).requires_grad_()


def penalised(output: Tensor, x: Tensor) -> Tensor:
    """With a penalty on the gradient by the input: its own gradient goes through a backward."""
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return output.square().mean() + 0.1 * gradient.square().mean()


def train_penalised(rank: int, world_size: int, tp: int, stage: int) -> dict[str, Tensor]:
    config = make_config(1, {"mesh": {"tp": tp}, "zero": {"stage": stage}})
    plan = {"*.up": "column", "*.down": "row"}
    with initialize(make_mlp(), config, loss_fn=penalised, plan=plan) as engine:
        for step in range(3):
            engine.train_step([points(step)])
        return parameters_of(engine)


@pytest.mark.parametrize(("tp", "stage"), [(2, 3), (4, 1)])
def test_a_penalty_on_gradients(ranks: WorkerPool, tp: int, stage: int) -> None:
    model = make_mlp()
    optimizer = make_optimizer(model)
    for step in range(3):
        optimizer.zero_grad()
        x = points(step)
        penalised(model(x), x).backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters in ranks(4).run(train_penalised, tp, stage):
        assert max_error(parameters, expected) <= PARITY


def train_compiled(rank: int, world_size: int) -> dict[str, Tensor]:
    sections = {"compile": {"enabled": True, "backend": "aot_eager"}, "recompute": {"mode": "selective"}}
    with float64_throughout(), make_engine("gpt2", "tp2", **sections) as engine:
        for step in range(3):
            engine.train_step(batches_of("gpt2", "tp2", step, rank))
        engine.eval_step(batches_of("gpt2", "tp2", 0, rank))
        return parameters_of(engine)


@pytest.mark.full
def test_compiled_blocks(ranks: WorkerPool) -> None:
    expected = train_plainly("gpt2", "tp2", "offload-lockstep")
    for parameters in ranks(2).run(train_compiled):
        assert max_error(parameters, expected) <= PARITY


# Around training.


def start(rank: int, world_size: int, is_deferred: bool) -> dict[str, Tensor]:
    torch.manual_seed(5 if rank == 0 else 6)  # rank 0's weights are everybody's
    case = case_of("decoder")
    if is_deferred:
        with init():
            model = case.make()
    else:
        model = case.make()
    with initialize(model, make_config(1, LAYOUTS["tp4"]), loss_fn=case.loss) as engine:
        return parameters_of(engine)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_model_starts_from_the_weights_of_rank_0(ranks: WorkerPool, is_deferred: bool) -> None:
    torch.manual_seed(5)
    expected = {name: parameter.double() for name, parameter in case_of("decoder").make().named_parameters()}
    for parameters in ranks(4).run(start, is_deferred):
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def train_with_other_degrees(rank: int, world_size: int) -> list[str]:
    """Names of what is not as before, over engines of tp 2, 4 and 1 on one model."""
    case, wrong = case_of("decoder"), []
    model = case.build(torch.float64, seed=rank)
    kinds = [(type(module), numbers_of(module)) for module in model.modules()]
    for step, tp in enumerate((2, 4, 1)):
        sections = {"mesh": {"tp": tp}, "zero": {"stage": 3}, "tensor": {"sequence_parallel": tp > 1}}
        with float64_throughout(), initialize(model, make_config(1, sections), loss_fn=case.loss) as engine:
            engine.train_step(batches_of("decoder", "tp4", step, 0))
            before = parameters_of(engine)
        wrong += [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
        wrong += [str(kind) for kind, own in zip(kinds, model.modules(), strict=True) if kind[0] is not type(own)]
        wrong += [str(kind) for kind, own in zip(kinds, model.modules(), strict=True) if kind[1] != numbers_of(own)]
    with float64_throughout():
        plain = case.build(torch.float64)
        for step in range(3):
            optimizer = make_optimizer(plain)
            optimizer.zero_grad()
            backward(plain, batches_of("decoder", "tp4", step), case)
            optimizer.step()
    trained, expected = ({k: p.detach() for k, p in each.named_parameters()} for each in (model, plain))
    return wrong if max_error(trained, expected) <= PARITY else [*wrong, "parity"]


def numbers_of(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}


def test_a_closed_model_is_as_before_and_starts_with_another_degree(ranks: WorkerPool) -> None:
    assert ranks(4).run(train_with_other_degrees) == [[]] * 4


PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])


def continued(model: nn.Module, name: str) -> Tensor:
    """Greedily, by five tokens; Hugging Face's with its cache of keys and values."""
    model.eval()
    if name == "decoder":
        return generate(model, PROMPT, 5, max_seq_len=16, temperature=0)
    mask = torch.ones_like(PROMPT)
    with torch.no_grad():
        return model.generate(PROMPT, max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=mask)


def generate_split(rank: int, world_size: int, name: str, layout: str) -> tuple[Tensor, Tensor, float, float]:
    with float64_throughout(), make_engine(name, layout, rank) as engine:
        outside = continued(engine.model, name)
        with engine.gathered():
            inside = continued(engine.model, name)
        batches = batches_of(name, layout, 0, rank)
        with torch.no_grad():
            alone = engine(*batches).item()
        engine.model.train()
        evaluated = engine.eval_step(batches).loss
        engine.train_step(batches)
    return outside, inside, alone, evaluated


@pytest.mark.parametrize(("name", "layout"), [("decoder", "tp4"), ("gpt2", "tp2"), ("llama", "tp4"), ("llama", "tp2")])
def test_generation_and_evaluation(ranks: WorkerPool, name: str, layout: str) -> None:
    """Also where sequences of a token could not be split along the sequence."""
    case = case_of(name)
    model = case.build(torch.float64)
    with float64_throughout():
        expected = continued(model, name)
        loss = backward(model, batches_of(name, layout, 0), case)
    for outside, inside, alone, evaluated in ranks(NUM_RANKS[layout]).run(generate_split, name, layout):
        assert torch.equal(outside, expected)
        assert torch.equal(inside, expected)
        assert [alone, evaluated] == pytest.approx([loss, loss], rel=1e-9)


def strays(engine: Engine) -> list[str]:
    """Parameters of which this rank's part, or its padding, is not that of the whole."""
    tp_index, found = engine.parts.comms.tensor.rank, []
    with engine.gathered():
        local = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    for place in (place for group in engine.layout.groups for place in group.params):
        whole = engine.read(place.name)
        if not torch.equal(shard_param(place.split, tp_index, whole), local[place.name]):
            found.append(place.name)
        if not torch.equal(engine.read(place.name, "master").to(whole.dtype), whole):
            found.append(f"master of {place.name}")
    return found


def train_in_bf16(rank: int, world_size: int, name: str, stage: int) -> tuple[list[str], dict[str, Tensor]]:
    sections = {"precision": {"param": "bf16"}, "zero": {"stage": stage}, "optimizer": {"decay_1d": True}}
    with make_engine(name, "tp2-dp2" if stage else "tp4", rank, **sections) as engine:
        for step in range(5):
            engine.train_step(batches_of(name, "tp2-dp2" if stage else "tp4", step % 3, rank))
        return strays(engine), parameters_of(engine)


@pytest.mark.parametrize(("name", "stage"), [("decoder", 0), ("gpt2", 1), ("decoder", 2), ("t5", 3)])
def test_what_ranks_share_stays_the_same_bits(ranks: WorkerPool, name: str, stage: int) -> None:
    (found, first), *others = ranks(4).run(train_in_bf16, name, stage)
    assert not found
    for found, parameters in others:
        assert not found
        assert all(torch.equal(parameters[key], first[key]) for key in first)


def write_gathered(rank: int, world_size: int, layout: str) -> tuple[list[str], dict[str, Tensor]]:
    with make_engine("decoder", layout, precision={"param": "bf16"}) as engine:
        engine.train_step(batches_of("decoder", layout, 0, rank))
        with engine.gathered(write=True) as model, torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1 + rank)  # padding too
        engine.train_step(batches_of("decoder", layout, 1, rank))
        return strays(engine), parameters_of(engine)


@pytest.mark.parametrize("layout", ["tp4", "tp2-dp2"])
def test_ranks_stay_equal_when_they_write_different_values(ranks: WorkerPool, layout: str) -> None:
    (found, first), *others = ranks(4).run(write_gathered, layout)
    assert not found
    assert first["norm.weight"].float().mean() == pytest.approx(2, abs=0.1)
    assert first["blocks.0.attention.key.weight"].float().mean() < 2.6  # the sharers' average would be 1.5 and 3.5
    for found, parameters in others:
        assert not found
        assert all(torch.equal(parameters[key], first[key]) for key in first)


def overflow_on_one_rank(rank: int, world_size: int) -> list[tuple[bool, float]]:
    found = []
    with make_engine("decoder", "tp4", precision={"param": "fp16"}) as engine:
        grads = next(group.grads for group in engine.parts.sharding.groups if group.grads is not None)
        own = grads.gradient
        for step in range(3):
            grads.gradient = own if rank != 3 or step != 1 else lambda: with_overflow(own())
            result = engine.train_step(batches_of("decoder", "tp4", step, rank))
            found.append((result.skipped, result.loss_scale))
    return found


def with_overflow(gradient: Tensor) -> Tensor:
    gradient[0] = torch.inf
    return gradient


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: WorkerPool) -> None:
    expected = [(False, 65536.0), (True, 65536.0), (False, 32768.0)]
    assert ranks(4).run(overflow_on_one_rank) == [expected] * 4


# Refusals.


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except ConfigError as error:
        return f"{error.code}: {error}"
    return ""


def give_other_batches(rank: int, world_size: int, checks_all: bool) -> str:
    with float64_throughout(), make_engine("decoder", "tp2", run={"check_collectives": checks_all}) as engine:
        if checks_all:
            engine.train_step(batches_of("decoder", "tp2", 0, rank))
        return error_of(lambda: engine.train_step([case_of("decoder").batch(rank, 2, torch.float64)]))


@pytest.mark.parametrize("checks_all", [False, True])
def test_ranks_that_share_layers_must_get_the_same_batch(ranks: WorkerPool, checks_all: bool) -> None:
    first, second = ranks(2).run(give_other_batches, checks_all)
    assert first.startswith("batches-differ: ")
    assert "rank 1 " in first
    assert first == second


def drop_outside(rank: int, world_size: int) -> tuple[str, str, float]:
    case = make_case("gpt2")
    with float64_throughout(), initialize(case.build(torch.float64), make_config(1, LAYOUTS["tp2"])) as engine:
        (batch,) = batches_of("gpt2", "tp2", 0, rank)
        torch.manual_seed(rank)
        raised = error_of(lambda: engine.model(**batch))
        with torch.no_grad():
            also = error_of(lambda: engine.model(**batch))
            loss = engine(batch).item()
        engine.model.eval()
        engine.model(**batch)
        return raised, also, loss


def test_dropout_that_ranks_would_draw_differently_is_refused(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(drop_outside)
    assert first == second
    assert first[0].startswith("dropout-outside-forward: transformer.drop ")
    assert first[0] == first[1]


def test_whole_parameters_in_a_region_are_refused() -> None:
    """What they add to the gradient of the region's input would count once for each rank."""
    adapted = build_model("llama", has_adapters=True)
    with refused("tp-plan-weight", "layers.0.self_attn.v_proj is a LowRank"):
        find_plan(adapted, 2, None, sequence_parallel=False)
    model = case_of("decoder").build(torch.float64)
    model.blocks[1].ffn.adapter = nn.Linear(16, 16)
    with refused("tp-whole-in-region", "blocks.1.ffn.adapter.weight"):
        find_plan(model, 2, None, sequence_parallel=False)
