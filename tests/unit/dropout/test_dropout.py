"""Keyed dropout: the numbers of every layout, recomputation and path through torch are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.refusals import refused
from shardwise.dropout import KeyedDraws, ShardRegion, key_dropouts
from shardwise.runtime.class_swap import swap_class
from shardwise.runtime.recompute import recompute_forward

P = 0.3


@contextmanager
def keyed(
    module: nn.Module,
    zones: dict[str, ShardRegion] | None = None,
    step: int = 0,
    first: int = 0,
    num: int = 4,
    seed: int = 7,
) -> Iterator[KeyedDraws]:
    """A context of the engine's round a forward; all is undone at the end."""
    draws = KeyedDraws(seed)
    undo = key_dropouts(module, draws, zones)
    try:
        with draws.at(step, 0, first, num):
            yield draws
    finally:
        for each in reversed(undo):
            each()


def mask(
    *shape: int, zone: ShardRegion | None = None, p: float = P, dtype: torch.dtype = torch.float32, **where: int
) -> Tensor:
    """What a dropout keeps of a tensor; [*shape] of bools."""
    module = nn.Dropout(p)
    with keyed(module, None if zone is None else {"": zone}, **where):
        dropped = module(torch.ones(shape, dtype=dtype))
    assert set(dropped.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - p), dtype=dtype).item()}
    return dropped != 0


def correlation(one: Tensor, other: Tensor) -> float:
    """Of two masks of the same shape, in standard deviations of that of independent ones."""
    pair = torch.stack([one.flatten(), other.flatten()]).double()  # [2, elements]
    return float(torch.corrcoef(pair)[0, 1]) * pair.shape[1] ** 0.5


@pytest.mark.parametrize("has_gradients", [True, False])
def test_where_ranks_share_a_forward_all_that_draws_is_keyed(has_gradients: bool) -> None:
    """Also without gradients, as when a model in training mode is sampled; such a forward is forgotten at once."""
    model, draws = nn.Sequential(nn.Dropout(P)), KeyedDraws(7)
    key_dropouts(model, draws, must_be_keyed=True)
    dropped = []
    with torch.set_grad_enabled(has_gradients):
        for seed in (1, 2):
            torch.manual_seed(seed)
            with draws.at(0, 0, 0, 4):
                dropped.append(model(torch.ones(4, 64)))
        assert torch.equal(*dropped)
        assert bool(draws._forwards) == has_gradients
        with refused("dropout-outside-forward", "0 drops"):
            model(torch.ones(4, 64))


class TestDistribution:
    @pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
    @pytest.mark.parametrize("shape", [(4, 1 << 18), (1 << 18, 4), (16, 8, 128, 64), (4, 2, 1 << 17, 1)])
    def test_keeps_its_share(self, shape: tuple[int, ...], p: float) -> None:
        kept = mask(*shape, p=p).double()
        num = kept.numel()
        assert abs(float(kept.mean()) - (1 - p)) < 5 * (p * (1 - p) / num) ** 0.5
        # The same in every column and in every row: the squared deviations of their means are a chi-square.
        table = kept.view(-1, kept.shape[-1]) if kept.shape[-1] > 1 else kept.view(-1, 64)
        for dim in (0, 1):
            deviations = (table.mean(dim) - (1 - p)).square() * table.shape[dim] / (p * (1 - p))
            assert abs(float(deviations.mean()) - 1) < 5 * (2 / len(deviations) + 6 / num) ** 0.5 + 5 / num**0.5 / p

    def test_is_independent_of_its_neighbours(self) -> None:
        kept = mask(4, 64, 1024, p=0.5)
        for distance in (1, 2, 3, 4, 8, 16, 32):
            assert abs(correlation(kept[:, :, distance:], kept[:, :, :-distance])) < 5
            assert abs(correlation(kept[:, distance:], kept[:, :-distance])) < 5
        for distance in (1, 2, 3):
            assert abs(correlation(kept[distance:], kept[:-distance])) < 5

    def test_is_independent_of_pairs(self) -> None:
        kept = mask(4, 64, 1024, p=0.5)
        for distance in (1, 2, 5):
            rows = kept[:, distance:] ^ kept[:, :-distance]
            assert abs(correlation(rows[:, :, 1:], rows[:, :, :-1])) < 5
            assert abs(correlation(rows[:, 1:], rows[:, :-1])) < 5

    def test_no_two_rows_are_equal(self) -> None:
        assert len(mask(64, 1024, 64, p=0.5).view(-1, 64).unique(dim=0)) == 64 * 1024

    def test_sites_calls_steps_samples_and_seeds_differ(self) -> None:
        pair = nn.ModuleList([nn.Dropout(P), nn.Dropout(P)])
        ones = torch.ones(4, 4096)
        with keyed(pair):
            masks = [pair[0](ones) != 0, pair[1](ones) != 0, pair[0](ones) != 0]
        masks += [mask(4, 4096, step=1), mask(4, 4096, first=4), mask(4, 4096, seed=8)]
        for index, one in enumerate(masks):
            assert all(abs(correlation(one, other)) < 5 for other in masks[:index])


class TestLayouts:
    @pytest.mark.parametrize("shape", [(8, 16), (8, 4, 16), (8, 4, 12, 16), (8,), (8, 2, 4, 4, 8)])
    @pytest.mark.parametrize("degree", [2, 4])
    def test_parts_draw_what_the_whole_draws(self, shape: tuple[int, ...], degree: int) -> None:
        whole = mask(*shape, num=4)
        for dim in range(-1, len(shape)):
            if shape[dim] % degree:
                continue
            for index, expected in enumerate(whole.chunk(degree, dim)):
                assert torch.equal(mask(*expected.shape, zone=ShardRegion(dim, index, degree), num=4), expected)

    @pytest.mark.parametrize("per_sample", [1, 3])
    def test_data_ranks_draw_their_samples(self, per_sample: int) -> None:
        whole = mask(8 * per_sample, 5, 16, num=8)
        for first in (0, 4):
            own = mask(4 * per_sample, 5, 16, first=first, num=4)
            assert torch.equal(own, whole[first * per_sample : (first + 4) * per_sample])

    def test_tensors_without_samples_draw_otherwise_on_each_data_rank(self) -> None:
        assert not torch.equal(mask(3, 64, num=4), mask(3, 64, first=4, num=4))

    def test_dtypes_and_strides_have_no_part(self) -> None:
        expected = mask(4, 8, 32)
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            assert torch.equal(mask(4, 8, 32, dtype=dtype), expected)
        module = nn.Dropout(P)
        with keyed(module):
            assert torch.equal(module(torch.ones(32, 8, 4).permute(2, 1, 0)) != 0, expected)

    def test_chunks_have_no_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = mask(4, 300, 64)
        monkeypatch.setattr("shardwise.dropout.hash_rng._CHUNK_ELEMENTS", 64 * 7)
        assert torch.equal(mask(4, 300, 64), expected)
        monkeypatch.setattr("shardwise.dropout.hash_rng._CHUNK_ELEMENTS", 1)
        assert torch.equal(mask(4, 300, 64), expected)

    def test_numbers_stay_what_they_were(self) -> None:
        """A resumed run draws on; so the numbers must not change from version to version, nor with the device."""
        assert ["".join(map(str, row)) for row in mask(2, 32, num=2, p=0.5).int().tolist()] == [
            "01001111001000000010100110101110",
            "10011100000000001011111100011100",
        ]


class TestModule:
    def test_gradient_is_the_mask_and_so_is_the_second(self) -> None:
        module = nn.Dropout(P)
        x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
        with keyed(module):
            y = module(x)
        scaled = mask(4, 32).double() / (1 - P)
        torch.testing.assert_close(y, x * scaled)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        torch.testing.assert_close(grad, 2 * x * scaled**2)
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, 2 * scaled**2)

    def test_saves_hashes_of_rows_and_columns_that_draws_share(self) -> None:
        modules, saved = nn.ModuleList([nn.Dropout(P), nn.Dropout(P)]), []
        x = torch.randn(4, 32, requires_grad=True)
        with keyed(modules), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            for module in modules:
                module(x)
        assert [tensor.nbytes for tensor in saved] == [4 * 8, 32 * 4] * 2
        assert len({tensor.data_ptr() for tensor in saved}) == 2

    def test_one_under_inference_mode_leaves_later_ones_their_gradients(self) -> None:
        module, x = nn.Dropout(P), torch.ones(4, 32, requires_grad=True)
        with keyed(module):
            with torch.inference_mode():
                module(torch.ones(4, 32))
            module(x).sum().backward()
        assert set((x.grad == 0).unique().tolist()) == {False, True}

    def test_inplace(self) -> None:
        module = nn.Dropout(P, inplace=True)
        x = torch.randn(4, 32, requires_grad=True)
        with keyed(module):
            y = x * 1.0
            assert module(y) is y
        torch.testing.assert_close(y, x * mask(4, 32) / (1 - P))
        y.sum().backward()
        torch.testing.assert_close(x.grad, mask(4, 32) / (1 - P))

    @pytest.mark.parametrize("p", [0.0, 1.0])
    def test_all_or_nothing(self, p: float) -> None:
        module, x = nn.Dropout(p), torch.randn(4, 32)
        with keyed(module):
            assert torch.equal(module(x), x * (1 - p))
            assert module(x[:0]).shape == (0, 32)

    def test_scalars_and_empty_tensors(self) -> None:
        module = nn.Dropout(P)
        with keyed(module):
            assert module(torch.ones(())).shape == ()
            assert module(torch.ones(4, 0, 3)).shape == (4, 0, 3)

    def test_evaluation_drops_nothing(self) -> None:
        module, x = nn.Dropout(P).eval(), torch.randn(4, 32)
        with keyed(module):
            assert module(x) is x

    def test_outside_of_a_forward_it_is_torchs_own(self) -> None:
        module, x = nn.Dropout(P), torch.randn(4, 32)
        torch.manual_seed(3)
        expected = module(x)
        draws = KeyedDraws(0)
        key_dropouts(module, draws)
        with draws.at(0, 0, 0, 4):
            module(x)
        for forget in (False, True):
            if forget:
                draws.forget()
            torch.manual_seed(3)
            assert torch.equal(module(x), expected)

    def test_a_copy_is_torchs_own(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(P))
        with keyed(model):
            copied = copy.deepcopy(model)
            x, state = torch.randn(4, 8), torch.get_rng_state()
            first = copied(x)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            assert torch.equal(first, F.dropout(copied[0](x), P))

    def test_undo_leaves_nothing(self) -> None:
        model = attention()
        before = [(type(each), dict(each.__dict__)) for each in model.modules()]
        with keyed(model):
            assert [type(each) for each in model.modules()] != [kind for kind, _ in before]
        assert [(type(each), dict(each.__dict__)) for each in model.modules()] == before

    def test_modules_of_one_class_get_one_class(self) -> None:
        model = nn.ModuleList([nn.Dropout(P), nn.Dropout(P)])
        with keyed(model):
            assert type(model[0]) is type(model[1])
            assert type(model[0]).__name__ == "Dropout"

    def test_a_dropout_with_a_forward_of_its_own_is_left_alone(self) -> None:
        class Own(nn.Dropout):
            def forward(self, input: Tensor) -> Tensor:  # noqa: A002
                return input + 1

        module = Own(P)
        with keyed(module):
            assert torch.equal(module(torch.zeros(4)), torch.ones(4))

    def test_become_is_undone(self) -> None:
        class Other(nn.Dropout):
            pass

        module = nn.Dropout(P)
        undo = swap_class(module, Other)
        assert type(module) is Other
        undo()
        assert type(module) is nn.Dropout

    def test_compiles_whole(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(P), attention_free())
        with keyed(model):
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            assert compiled(torch.randn(4, 8)).shape == (4, 8)


class TestGenerators:
    def test_a_forward_leaves_the_users_state(self) -> None:
        state = torch.get_rng_state()
        mask(4, 32)
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(KeyError), keyed(nn.Dropout(P)):
            raise KeyError
        assert torch.equal(torch.get_rng_state(), state)

    def test_other_draws_of_the_model_follow_step_and_samples(self) -> None:
        draws = KeyedDraws(0)

        def drawn(*place: int) -> float:
            with draws.at(*place):
                return torch.rand(()).item()

        assert drawn(0, 0, 0, 4) == drawn(0, 0, 0, 4)
        assert len({drawn(*place) for place in [(0, 0, 0, 4), (1, 0, 0, 4), (0, 1, 0, 4), (0, 0, 4, 4)]}) == 4


def attention_free() -> nn.Module:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, P, self.training)

    return Block()


def attention(p: float = P, **given: Any) -> nn.Module:
    """Attention by torch's function; `given` goes to it."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p if self.training else 0.0, **given)

    return Attention()


class TestAttention:
    CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()

    @pytest.mark.parametrize(
        "given",
        [
            {},
            {"is_causal": True},
            {"scale": 0.3},
            {"attn_mask": CAUSAL},
            {"attn_mask": CAUSAL.clone().fill_diagonal_(False)},
            {"attn_mask": torch.zeros(6, 6, dtype=torch.float64).masked_fill(CAUSAL.T, -torch.inf)},
            {"attn_mask": torch.arange(36.0, dtype=torch.float64).view(1, 1, 6, 6)},
            {"enable_gqa": True},
        ],
        ids=lambda given: "-".join(given) or "plain",
    )
    def test_is_torchs_up_to_the_mask(self, given: dict[str, Any]) -> None:
        """At a rate that drops nothing in so few probabilities only the code differs."""
        num_keys = 2 if given.get("enable_gqa") else 4
        shapes = [(2, 4, 6, 8), (2, num_keys, 6, 8), (2, num_keys, 6, 5)]
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        expected = attention(0.0, **given)(*inputs)
        module = attention(1e-9, **given)
        with keyed(module, num=2):
            found = module(*inputs)
        torch.testing.assert_close(found, expected)
        assert found.isfinite().all()
        weights = torch.randn_like(expected)
        for one, other in zip(
            torch.autograd.grad((found * weights).sum(), inputs),
            torch.autograd.grad((expected * weights).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(one, other)

    def test_drops_probabilities(self) -> None:
        q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
        module = attention()
        with keyed(module, num=2):
            found = module(q, k, v)
        probabilities = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) * mask(2, 4, 6, 6, num=2) / (1 - P)
        torch.testing.assert_close(found, probabilities @ v)

    def test_heads_of_a_rank_draw_what_they_draw_in_the_whole(self) -> None:
        q, k, v = torch.randn(3, 2, 4, 6, 8)
        module = attention()
        with keyed(module, num=2):
            whole = module(q, k, v)
        for index in range(2):
            own = slice(2 * index, 2 * index + 2)
            with keyed(module, {"": ShardRegion(1, index, 2)}, num=2):
                part = module(q[:, own], k[:, own], v[:, own])
            torch.testing.assert_close(part, whole[:, own])

    def test_refuses_as_torch_does(self) -> None:
        module = attention(attn_mask=self.CAUSAL, is_causal=True)
        with keyed(module), pytest.raises(RuntimeError):
            module(*torch.randn(3, 2, 4, 6, 8))

    def test_functions_under_all_their_names(self) -> None:
        class Block(nn.Module):
            def forward(self, x: Tensor) -> list[Tensor]:
                return [
                    F.dropout(x, P),
                    torch.dropout(x, P, True),
                    torch.dropout(x, p=P, train=True),
                    F.dropout(x.clone(), p=P, inplace=True),
                    torch.dropout_(x.clone(), P, True),
                    F.dropout(x, P, False),
                    torch.dropout(x, P, train=False),
                ]

        block, x = Block(), torch.randn(4, 64)
        with keyed(block):
            first = block(x)
        with keyed(block):
            again = block(x)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
        torch.testing.assert_close(first[0], x * mask(4, 64) / (1 - P))
        assert len({tuple(each.flatten().tolist()) for each in first[:5]}) == 5
        assert torch.equal(first[5], x)
        assert torch.equal(first[6], x)


class TestQuiet:
    """A module whose training forward dropped nothing by function is spared the mode, and its cost, afterwards."""

    @pytest.mark.parametrize(("own", "other", "is_keyed"), [(0.0, 0.0, False), (P, 0.0, True), (0.0, P, True)])
    def test_follows_the_first_training_forward(self, own: float, other: float, is_keyed: bool) -> None:
        class Module(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                F.dropout(x, other, self.training)
                modes.append(torch.overrides._len_torch_function_stack())
                return F.dropout(x, own, self.training)

        modes: list[int] = []
        module = Module()
        draws = KeyedDraws(7)
        key_dropouts(module, draws)
        for step in range(2):
            with draws.at(step, 0, 0, 4):
                module.train()(torch.ones(4, 8))
        module.eval()(torch.ones(4, 8))
        assert modes == [1, int(is_keyed), 0]

    @pytest.mark.parametrize("shares", ["", "mesh.tp=2"])
    def test_a_model_is_left_as_it_is_until_it_draws(self, shares: str) -> None:
        class Module(nn.Module):
            rate = 0.0

            def forward(self, x: Tensor) -> Tensor:
                return F.dropout(x, self.rate)

        module, draws, is_own = Module(), KeyedDraws(7), []
        key_dropouts(module, draws, shares=shares)
        for step in range(6):
            module.rate = 0.0 if step < 3 else P
            is_refused = step == 3 and shares
            with refused("draw-began-late", shares) if is_refused else nullcontext(), draws.at(step, 0, 0, 4):
                is_own.append(type(module) is Module)
                dropped = module(torch.ones(4, 8))
            draws.forget()
        assert is_own == [False, False, True, True, False, False]
        assert torch.equal(dropped != 0, mask(4, 8, step=5))

    def test_a_forward_that_fails_tells_nothing(self) -> None:
        class Module(nn.Module):
            def forward(self, x: Tensor, fails: bool) -> Tensor:
                if fails:
                    raise KeyError
                return F.dropout(x, P)

        module = Module()
        with keyed(module):
            with pytest.raises(KeyError):
                module(torch.ones(4, 8), True)
            assert torch.equal(module(torch.ones(4, 8), False) != 0, mask(4, 8))


class Block(nn.Module):
    """Dropout as a module, called twice, by function, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.dropout = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.linear(x))
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)  # [B, H, S, D]
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=P)
        return F.dropout(self.dropout(heads.transpose(1, 2).flatten(2)), P) + x


class Stack(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.run(self.blocks[0], x)


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, x: block(x),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "non-reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
}


class CountedDropouts(TorchDispatchMode):
    """Counts the calls of the op of keyed dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func is torch.ops.shardwise.keyed_dropout.default
        return func(*args, **(kwargs or {}))


class TestRecomputation:
    @staticmethod
    def gradients(kind: str, micro_batches: int = 3) -> list[Tensor]:
        """Of all parameters and inputs, after backwards in another order than the forwards."""
        torch.manual_seed(0)
        model = Stack(RUNS.get(kind, RUNS["plain"]))
        draws = KeyedDraws(1)
        key_dropouts(model, draws)
        if kind in ("full", "selective"):
            for block in model.blocks:
                recompute_forward(block, kind)
        inputs = [torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(micro_batches)]
        losses = []
        for index, each in enumerate(inputs):
            with draws.at(5, index, 2 * index, 2):
                losses.append(model(each).square().sum())
        for index in (1, 0, 2):
            torch.rand(index + 1)
            losses[index].backward()
        draws.forget()
        return [each.grad for each in (*inputs, *model.parameters())]

    @pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "full", "selective"])
    def test_draws_the_numbers_of_its_forward(self, kind: str) -> None:
        for found, expected in zip(self.gradients(kind), self.gradients("plain"), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    def test_selective_keeps_no_dropout(self) -> None:
        model, draws, counted = nn.Sequential(nn.Linear(8, 8), nn.Dropout(P)), KeyedDraws(1), CountedDropouts()
        key_dropouts(model, draws)
        recompute_forward(model, "selective")
        with draws.at(5, 0, 0, 2):
            loss = model(torch.randn(2, 3, 8, requires_grad=True)).square().sum()
        with counted:
            loss.backward()
        assert counted.num_calls == 2  # of the recomputation, and of the gradient

    @pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "full", "selective"])
    @pytest.mark.parametrize("trains", [True, False])
    def test_so_does_one_in_a_backward_inside_the_forward(self, kind: str, trains: bool) -> None:
        found = []
        for each in ("plain", kind):
            torch.manual_seed(0)
            model, draws = Stack(RUNS.get(each, RUNS["plain"])), KeyedDraws(1)
            model.training = trains  # the blocks train in any case
            key_dropouts(model, draws)
            if each in ("full", "selective"):
                for block in model.blocks:
                    recompute_forward(block, each)
            x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
            with draws.at(5, 0, 0, 2):
                model(x).square().sum().backward()
            found.append([x.grad, *(each.grad for each in model.parameters())])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def hugging_face(kind: str, attn: str) -> nn.Module:
    small = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": attn}
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **small
        )
        return transformers.BertForMaskedLM(config).double().train()
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **small)
    return transformers.GPT2LMHeadModel(config).double().train()


def hugging_face_gradients(kind: str, attn: str, recompute: bool = False, batches: int = 1) -> list[Tensor]:
    """Of a step over four samples, in `batches` micro-batches or data ranks."""
    model = hugging_face(kind, attn)
    if recompute:
        model.gradient_checkpointing_enable()
    draws = KeyedDraws(2)
    key_dropouts(model, draws)
    ids = torch.randint(50, (4, 12))  # [B, S]
    padding = torch.ones_like(ids)
    padding[1, 8:] = 0
    parts = zip(ids.chunk(batches), padding.chunk(batches), strict=True)
    for index, (own, attention_mask) in enumerate(parts):
        with draws.at(0, index, index * len(own), len(own)):
            output = model(input_ids=own, attention_mask=attention_mask, use_cache=False)
        output.logits.square().mean().div(batches).backward()
    return [each.grad for each in model.parameters()]


class TestHuggingFace:
    @pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
    @pytest.mark.parametrize("kind", ["bert", "gpt2"])
    def test_all_paths_agree(self, kind: str) -> None:
        expected = hugging_face_gradients(kind, "sdpa")
        paths: list[dict[str, Any]] = [
            {"attn": "eager"},
            {"attn": "sdpa", "recompute": True},
            {"attn": "eager", "batches": 2},
        ]
        for path in paths:
            for found, own in zip(hugging_face_gradients(kind, **path), expected, strict=True):
                torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("zone", "own", "cut"),
    [
        (None, (2, 8, 5), lambda whole: whole),
        (ShardRegion(1, 1, 2), (2, 4, 5), lambda whole: whole[:, 4:]),
        (ShardRegion(-1, 1, 2), (2, 8, 3), lambda whole: whole[..., 3:]),
    ],
    ids=["whole", "sequence parallel", "features"],
)
def test_some_tokens_of_a_sequence_drop_as_in_the_whole(
    zone: ShardRegion | None, own: tuple[int, ...], cut: Callable[[Tensor], Tensor]
) -> None:
    """As in any layout of tokens over ranks; a tensor of fewer dims, or of other tokens, draws for itself."""
    held = ((2, 6), (12, 16))
    draws = KeyedDraws(7)

    def drawn(shape: tuple[int, ...], zone: ShardRegion | None, is_held: bool) -> Tensor:
        with draws.at(0, 0, 0, 2, held if is_held else None):
            found = draws.mask("site", shape, P, zone, torch.device("cpu"))
        draws.forget()
        return found

    whole = drawn((2, 16, 5 if zone is None or zone.dim == 1 else 6), None, False)
    assert drawn(own, zone, True).equal(cut(torch.cat([whole[:, start:stop] for start, stop in held], 1)))
    for shape in ((2, 8), (2, 7, 5)):
        assert drawn(shape, None, True).equal(drawn(shape, None, False))
