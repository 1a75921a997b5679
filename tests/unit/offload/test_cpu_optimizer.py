"""The step on the host is the optimizer's own step, to rounding, for every optimizer, option, dtype and cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer

from harness.refusals import refused
from shardwise.config.resolve import OptimizerConfig
from shardwise.offload import cpu_optimizer as blocks
from shardwise.offload.cpu_optimizer import StepPiece, StepThreads, step_pieces
from shardwise.optim.elementwise import Lion, StepTensors
from shardwise.optim.rules import RULES, OptimizerRule, StateRule, build_optimizer, rule_of, state_names

# All that have a rule; Muon's steps whole matrices.
NAMES = tuple(rule.name for rule in RULES if rule.kernel and rule.name != "muon")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUM_STEPS = 3

# Options beyond the config's: each is followed. The step is fused, whichever of torch's implementations is chosen.
OPTIONS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adam-amsgrad": (Adam, {"amsgrad": True, "weight_decay": 0.1, "fused": True}),
    "adam-decoupled": (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "fused": True}),
    "adam-single": (Adam, {"fused": False, "foreach": False, "weight_decay": 0.1}),
    "adamw-amsgrad-maximize": (AdamW, {"amsgrad": True, "maximize": True, "fused": True}),
    "adamw-foreach": (AdamW, {"foreach": True, "maximize": True}),
    "adamw-not-fused": (AdamW, {"fused": False}),
    "adamw-tensor-lr": (AdamW, {"lr": torch.tensor(0.03), "fused": True}),
    # torch would round the decay by a learning rate in fp32 to that.
    "adamw-tensor-lr-single": (AdamW, {"lr": torch.tensor(0.03, dtype=torch.float64), "fused": False}),
    "adamw-tensor-betas": (AdamW, {"betas": (torch.tensor(0.8), torch.tensor(0.9)), "fused": True}),
    "sgd-plain": (SGD, {"fused": True}),
    "sgd-dampening": (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "fused": True}),
    "sgd-nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True, "fused": True}),
    "sgd-nesterov-foreach": (SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "sgd-momentum-single": (SGD, {"momentum": 0.9, "fused": False}),
    "sgd-tensor-lr": (SGD, {"lr": torch.tensor(0.03), "momentum": 0.5, "fused": True}),
    "adagrad-decay": (Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "fused": True}),
    "adagrad-maximize": (Adagrad, {"maximize": True, "weight_decay": 0.1, "foreach": True}),
    "adagrad-single": (Adagrad, {"lr_decay": 0.1, "fused": False}),
    "lion-maximize": (Lion, {"maximize": True, "weight_decay": 0.1}),
    "lion-tensor-lr": (Lion, {"lr": torch.tensor(0.03)}),
}


class Host:
    """Masters and states as they are stored on the host, stepped in parts by the rule of an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Sequence[Tensor],
        param_dtype: torch.dtype,
        threads: StepThreads | None = None,
    ) -> None:
        self.threads = threads
        self.rule = rule_of(optimizer)
        self.masters = [master.clone() for master in masters]
        self.params = [torch.zeros_like(master, dtype=param_dtype) for master in masters]
        self.states = [
            {name: torch.full_like(master, value) for name, value in self.rule.first_values(options).items()}
            for master, options in zip(masters, self._options(optimizer), strict=True)
        ]
        self.num_steps = 0

    def step(self, optimizer: Optimizer, grads: Sequence[Tensor], factor: float, cut: int | None = None) -> None:
        """Step under the options that the optimizer has now; pieces are parts of `cut` elements."""
        pieces = []
        for index, options in enumerate(self._options(optimizer)):
            is_copied = self.params[index].dtype != self.masters[index].dtype
            whole = StepPiece(
                options=options,
                master=self.masters[index],
                grad=grads[index],
                states=self.states[index],
                step=self.num_steps,
                is_first=self.num_steps == 0,
                param=self.params[index] if is_copied else None,
            )
            numel = whole.master.numel()
            pieces += [whole.part(at, min(numel, at + (cut or numel))) for at in range(0, numel, cut or max(1, numel))]
        step_pieces(self.rule, pieces, factor, self.threads)
        self.num_steps += 1

    @staticmethod
    def _options(optimizer: Optimizer) -> list[Mapping[str, Any]]:
        return [group for group in optimizer.param_groups for _ in group["params"]]

    def assert_equals(self, optimizer: Optimizer) -> None:
        """To rounding, states and counters too."""
        kept = [each for group in optimizer.param_groups for each in group["params"]]
        for master, param, states, expected in zip(self.masters, self.params, self.states, kept, strict=True):
            assert_close(master, expected)
            if param.dtype != master.dtype:
                assert torch.equal(param, master.to(param.dtype))
            if master.numel() == 0:
                continue
            of_torch = dict(optimizer.state[expected])
            counter = of_torch.pop("step", None)
            assert self.rule.has_counter == (counter is not None)
            if counter is not None:
                assert counter.item() == self.num_steps
                assert counter.dtype == torch.float32
            assert set(of_torch) == set(states)
            for name, state in states.items():
                assert_close(state, of_torch[name])


def assert_close(found: Tensor, expected: Tensor) -> None:
    bound = 1e-12 if expected.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def groups_of(masters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups with options of their own, two where there are two parameters."""
    half = (len(masters) + 1) // 2
    params = [nn.Parameter(master.clone()) for master in masters]
    return [{"params": params[:half]}, {"params": params[half:], "lr": 0.02, "weight_decay": 0.0}][: len(masters)]


def take_step(optimizer: Optimizer, grads: Sequence[Tensor], factor: float) -> None:
    kept = [each for group in optimizer.param_groups for each in group["params"]]
    for param, grad in zip(kept, grads, strict=True):
        param.grad = grad.to(param.dtype).mul_(factor)
    optimizer.step()


def tensors(lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(length, dtype=torch.float64).to(dtype) for length in lengths]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which a few thousand elements make many."""
    monkeypatch.setattr(blocks, "BLOCK_NUMEL", 256)


@pytest.fixture(scope="module", params=["one thread", "own threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[StepThreads | None]:
    """None where the blocks are stepped by the caller, with one or two threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one thread" else 2)
    own = StepThreads() if request.param == "own threads" else None
    yield own
    if own is not None:
        own.close()
    torch.set_num_threads(before)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.float64])
@settings(max_examples=40)
@given(data=st.data())
def test_steps_are_those_of_the_optimizer(
    threads: StepThreads | None, name: str, master_dtype: torch.dtype, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 1500), min_size=1, max_size=5))
    grad_dtype, param_dtype = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS))
    cut = data.draw(st.none() | st.integers(1, 700))
    factor = data.draw(st.sampled_from([1.0, 0.3, 2.0**-7]))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    masters = tensors(lengths, master_dtype)
    optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.1), groups_of(masters))
    host = Host(optimizer, masters, param_dtype, threads)
    for number in range(NUM_STEPS):
        grads = tensors(lengths, grad_dtype)
        before = [grad.clone() for grad in grads]
        for group in optimizer.param_groups:  # as a schedule does
            group["lr"] *= 0.7**number
        host.step(optimizer, grads, factor, cut)
        assert all(map(torch.equal, grads, before))
        take_step(optimizer, grads, factor)
        host.assert_equals(optimizer)


@pytest.mark.quick(5)
@pytest.mark.parametrize("threads", ["one thread", "torch's threads", "own threads"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_many_blocks_step_as_the_optimizer(threads: StepThreads | None, name: str) -> None:
    torch.manual_seed(0)
    lengths = [2 * blocks.BLOCK_NUMEL + 77, 5]
    masters = tensors(lengths, torch.float32)
    optimizer = build_optimizer(OptimizerConfig(name=name), groups_of(masters))
    host = Host(optimizer, masters, torch.bfloat16, threads)
    for _ in range(2):
        grads = tensors(lengths, torch.bfloat16)
        host.step(optimizer, grads, 0.3)
        take_step(optimizer, grads, 0.3)
    host.assert_equals(optimizer)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.float64])
def test_options_keep_their_meaning(case: str, master_dtype: torch.dtype) -> None:
    kind, options = OPTIONS[case]
    torch.manual_seed(0)
    lengths = [1, 64, 999]
    masters = tensors(lengths, master_dtype)
    optimizer = kind(groups_of(masters), **options)
    host = Host(optimizer, masters, torch.bfloat16)
    for _ in range(NUM_STEPS):
        grads = tensors(lengths, torch.float32)
        before = [grad.clone() for grad in grads]
        host.step(optimizer, grads, 0.3)
        assert all(map(torch.equal, grads, before))
        take_step(optimizer, grads, 0.3)
        host.assert_equals(optimizer)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_may_have_taken_different_numbers_of_steps(name: str) -> None:
    """A parameter that got no gradient lags the others, or has not begun."""
    torch.manual_seed(0)
    masters = tensors([70, 80], torch.float32)
    params = [nn.Parameter(master.clone()) for master in masters]
    optimizer = build_optimizer(OptimizerConfig(name=name), [{"params": params}])
    (group,) = optimizer.param_groups
    rule, counts = rule_of(optimizer), [0, 0]
    first_values = rule.first_values(group)
    states = [{key: torch.full_like(each, value) for key, value in first_values.items()} for each in masters]
    for used in ([1], [0, 1], [0, 1], [0]):
        grads = tensors([70, 80], torch.float32)
        pieces = [StepPiece(group, masters[i], grads[i], states[i], counts[i], counts[i] == 0, None) for i in used]
        step_pieces(rule, pieces, 1.0)
        for index in used:  # one by one: torch's fused SGD cannot take a first step beside a later one
            for param in params:
                param.grad = None
            params[index].grad = grads[index]
            optimizer.step()
            counts[index] += 1
    assert all(map(torch.equal, masters, params))


def test_steps_leave_what_is_beside_a_piece_alone() -> None:
    buffers = {name: torch.full((300,), 7.0) for name in ("master", "param", "exp_avg")}
    options = Lion([torch.zeros(1)], lr=1.0).param_groups[0]
    inside = slice(10, 210)
    piece = StepPiece(
        options,
        buffers["master"][inside],
        torch.ones(200),
        {"exp_avg": buffers["exp_avg"][inside]},
        0,
        True,
        buffers["param"][inside],
    )
    step_pieces(rule_of(Lion([torch.zeros(1)])), [piece], 1.0)
    for name, buffer in buffers.items():
        assert (buffer[inside] != 7.0).all(), name
        assert (torch.cat([buffer[:10], buffer[210:]]) == 7.0).all(), name


def test_masters_that_record_gradients_are_stepped_too() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(3))], lr=0.5)
    (group,) = optimizer.param_groups
    step_pieces(rule_of(optimizer), [StepPiece(group, group["params"][0], torch.ones(3), {}, 0, True, None)], 2.0)
    assert group["params"][0].tolist() == [0.0] * 3


@pytest.mark.parametrize("name", NAMES)
def test_states_are_the_layouts(name: str) -> None:
    config = OptimizerConfig(name=name)
    optimizer = build_optimizer(config, [{"params": [torch.ones(1)]}])
    assert tuple(rule_of(optimizer).first_values(optimizer.param_groups[0])) == state_names(config)


class OwnAdamW(AdamW):
    """May step otherwise."""


@pytest.mark.parametrize("kind", [NAdam, OwnAdamW])
def test_other_optimizers_are_refused(kind: type[Optimizer]) -> None:
    with refused("host-step-optimizer", "AdamW, Adam, SGD", f"got {kind.__name__};"):
        rule_of(kind([torch.ones(1)]))


@pytest.mark.parametrize("name", ["exp_avg_sq", "amsgrad"])
def test_a_rule_that_was_copied_from_another_optimizer_says_what_it_asks_for_in_vain(name: str) -> None:
    """Adam's kernel asks for a second moment, and for an option that Lion lacks."""
    options = Lion([torch.zeros(1)]).param_groups[0]
    adam = rule_of(Adam([torch.zeros(1)]))
    copied = OptimizerRule("lion", Lion, (StateRule("exp_avg"),), False, adam.kernel)
    states = [dict.fromkeys(("exp_avg", *(["exp_avg_sq"] if name == "amsgrad" else [])), torch.zeros(1))]
    given = {**options, "amsgrad": False, "decoupled_weight_decay": True, "eps": 1.0}
    if name == "amsgrad":
        del given["amsgrad"]
    with refused("rule-of-other-optimizer", f"the rule of Lion asks for '{name}'", "exp_avg"):
        copied.update(given, StepTensors([torch.zeros(1)], [torch.ones(1)], states, 0.0, True))
    wrong = OptimizerRule("lion", Lion, (StateRule("exp_avg", "initial"),), False, adam.kernel)
    with refused("rule-of-other-optimizer", "asks for 'initial'"):
        wrong.first_values(options)
