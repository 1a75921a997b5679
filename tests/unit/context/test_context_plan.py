"""The plan of context parallelism against the table of visible pairs, over random layouts and splits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.structures import LocalSlidingWindowSparsityConfig
from shardwise.context.plan import find_moves, plan_steps
from shardwise.context.visibility import VisibilityIndex
from shardwise.layout.token_ranges import TokenSplit, contiguous, intersect, join, zigzag


def tokens(runs):
    return [token for run in runs for token in range(*run)]


def runs_of(chosen):
    return join([tuple((token, token + 1) for token in chosen)])


@st.composite
def splits(draw, num_tokens):
    """Of any tokens, or of chunks of some size, which need not be that of blocks."""
    degree = draw(st.sampled_from([each for each in (1, 2, 3, 4) if num_tokens % each == 0]))
    unit = draw(st.sampled_from([each for each in (1, 2, 3, 5, 7) if num_tokens % (each * degree) == 0]))
    dealt = draw(st.permutations(range(num_tokens // unit)))
    size = len(dealt) // degree
    shares = tuple(
        join([tuple((unit * each, unit * (each + 1)) for each in dealt[rank * size : (rank + 1) * size])])
        for rank in range(degree)
    )
    return TokenSplit("balanced", num_tokens, shares)


@st.composite
def layouts(draw):
    """Documents of random blocks, some with a row that sees all; a multiple of 12 tokens, which many splits divide."""
    block, num_heads = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    documents = []
    for _ in range(draw(st.integers(1, 3))):
        num_blocks = draw(st.integers(1, 20))
        density = draw(st.sampled_from((0.0, 0.0, 0.05, 0.3, 1.0)))
        blocks = torch.rand(num_heads, num_blocks, num_blocks, generator=generator) < density
        if draw(st.booleans()):
            blocks[:, draw(st.integers(0, num_blocks - 1))] = True
        num_tokens = num_blocks * block - draw(st.integers(0, block - 1))
        documents.append(BlockLayout.from_blocks(blocks, block, causal=draw(st.booleans()), num_tokens=num_tokens))
    if missing := -sum(each.num_queries for each in documents) % 12:
        documents.append(BlockLayout.from_blocks(torch.eye(-(-missing // block)), block, num_tokens=missing))
    return pack(documents)


@st.composite
def cases(draw):
    layout = draw(layouts())
    num_tokens = layout.num_queries
    kinds = [draw(splits(num_tokens))]
    kinds += [contiguous(num_tokens, each) for each in (2, 3, 4) if num_tokens % each == 0]
    kinds += [zigzag(num_tokens, each) for each in (2, 3) if num_tokens % (2 * each) == 0]
    return layout, draw(st.sampled_from(kinds)), draw(st.booleans())


def check(layout, split, one_by_one):
    """All that transports rely on."""
    allowed = layout.allowed().any(0)
    plans = [plan_steps(layout, split, rank, one_by_one=one_by_one) for rank in range(split.degree)]
    assert len({tuple(step.is_moving for step in steps) for steps in plans}) == 1
    computed = torch.zeros_like(allowed, dtype=torch.int64)
    for at, steps in enumerate(zip(*plans, strict=True)):
        for rank, step in enumerate(steps):
            share, received = split.shares[rank], step.received_keys
            check_exchange(allowed, split, steps, rank)
            if step.tile is None:
                assert not received
                continue
            assert intersect(step.tile.queries, share) == step.tile.queries != ()
            assert step.tile.keys == join([*received.values(), *([share] if at == 0 else [])])
            here = torch.tensor(tokens(step.tile.queries))[:, None], torch.tensor(tokens(step.tile.keys))
            assert torch.equal(step.tile.layout.allowed().any(0), allowed[here])
            assert torch.equal(step.tile.layout.allowed(), layout.select(step.tile.queries, step.tile.keys).allowed())
            computed[here] += allowed[here]
    assert torch.equal(computed, allowed.long())


def check_exchange(allowed, split, steps, rank):
    step, share = steps[rank], split.shares[rank]
    assert step.is_moving == any(each.sent_keys for each in steps)
    assert rank not in {*step.sent_keys, *step.received_keys}
    for other, there in enumerate(steps):
        assert step.sent_keys.get(other) == there.received_keys.get(rank) != ()
    for other, runs in step.sent_keys.items():
        assert runs == intersect(runs, share)
        assert allowed[tokens(steps[other].tile.queries)][:, tokens(runs)].any(0).all()


@settings(deadline=None, max_examples=100)
@given(cases())
def test_every_visible_pair_is_computed_once_by_the_owner_of_its_query(case):
    check(*case)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention_comes_in_one_step_or_one_by_one(causal):
    layout = BlockLayout.from_blocks(torch.ones(16, 16), 4, causal=causal)
    for rank in range(4):
        (whole,) = plan_steps(layout, contiguous(64, 4), rank, one_by_one=False)
        before = [each for each in range(4) if each < rank or (not causal and each != rank)]
        assert whole.received_keys == {each: ((16 * each, 16 * each + 16),) for each in before}
        ring = plan_steps(layout, contiguous(64, 4), rank, one_by_one=True)
        assert [step.is_moving for step in ring] == [False, True, True, True]
        assert [list(step.received_keys) for step in ring[1:]] == [
            [source] if (source := (rank - at) % 4) in before else [] for at in (1, 2, 3)
        ]


def test_steps_in_which_nothing_moves_are_left_out_on_all_ranks():
    layout = LocalSlidingWindowSparsityConfig(num_heads=1, block=4, num_sliding_window_blocks=3).layout(64)
    for rank in range(4):
        steps = plan_steps(layout, contiguous(64, 4), rank, one_by_one=True)
        assert [step.is_moving for step in steps] == [False, True]
        assert steps[1].received_keys == ({rank - 1: ((16 * rank - 4, 16 * rank),)} if rank else {})
        assert (steps[1].tile.queries if rank else steps[1].tile) == (((16 * rank, 16 * rank + 4),) if rank else None)


def test_the_second_half_of_a_zigzag_takes_part_alone_where_the_first_sees_nothing():
    layout = BlockLayout.from_blocks(torch.ones(8, 8), 4, causal=True)
    steps = plan_steps(layout, zigzag(32, 2), 0, one_by_one=True)
    assert steps[1].tile.queries == ((24, 32),)
    assert plan_steps(layout, zigzag(32, 2), 0, one_by_one=True) is steps


def test_an_empty_layout_has_the_step_of_own_keys_alone():
    layout = BlockLayout.from_blocks(torch.zeros(4, 4), 4)
    (step,) = plan_steps(layout, contiguous(16, 2), 0, one_by_one=True)
    assert step.tile is None
    assert not step.is_moving


@settings(deadline=None, max_examples=200)
@given(layouts(), st.data())
def test_visibility_is_exact(layout, data):
    allowed = layout.allowed().any(0)
    chosen = [data.draw(st.sets(st.integers(0, layout.num_queries - 1))) for _ in range(2)]
    first, second = sorted(chosen[0]), sorted(chosen[1])
    index = VisibilityIndex.of(layout)
    assert tokens(index.keys_seen(runs_of(first))) == allowed[first].any(0).nonzero().flatten().tolist()
    seeing = [each for each in second if allowed[each, first].any()]
    assert index.queries_seeing(runs_of(first), among=runs_of(second)) == runs_of(seeing)


def test_the_split_is_of_the_layouts_tokens():
    layout = BlockLayout.from_blocks(torch.ones(4, 4), 4)
    with refused("layout-length", "16 queries and 16 keys", "32 tokens"):
        plan_steps(layout, contiguous(32, 2), 0, one_by_one=True)
    with refused("layout-length", "8 queries and 16 keys"):
        plan_steps(layout.select(((0, 8),), ((0, 16),)), contiguous(16, 2), 0, one_by_one=True)


def test_moves_are_counted_by_rank():
    moves = find_moves(VisibilityIndex.of(BlockLayout.from_blocks(torch.ones(4, 4), 4, causal=True)), contiguous(16, 4))
    assert moves.tokens_received() == (0, 4, 8, 12)
