"""Structures in their default mode: DeepSpeed's layouts without its quirks, at any length."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from harness.sparsity import WAYS, cases
from shardwise.attention import structures
from shardwise.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    CustomSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

BACK = "unidirectional"


def structure_of(case):
    return getattr(structures, case["cls"])(**case["params"], seed=case["random_seed"])


def is_random(structure):
    return getattr(structure, "num_random_blocks", 0) > 0


@settings(deadline=None)
@given(case=cases(are_legal=True))
def test_any_length_has_a_layout_of_its_tokens_in_which_each_sees_itself(case):
    structure, length = structure_of(case), case["seq_len"]
    layout = structure.layout(length)
    allowed = layout.allowed()
    assert allowed.shape == (layout.num_heads, length, length)
    assert layout.num_heads in (1, structure.num_heads)
    assert allowed.diagonal(dim1=1, dim2=2).all()
    assert layout.patterns[0].causal == (structure.attention == BACK)
    made = structure.make_layout(length)
    assert torch.equal(made.bool(), layout.patterns[0].blocks.expand(made.shape))


@settings(deadline=None)
@given(case=cases(are_legal=True))
def test_unidirectional_sees_nothing_ahead_and_begins_every_longer_layout(case):
    case["params"].pop("horizontal_global_attention", None)
    structure = structure_of(case | {"params": case["params"] | {"attention": BACK}})
    long = structure.layout(case["seq_len"]).allowed()
    assert not long.triu(1).any()
    short_length = 1 + case["seq_len"] // 2
    short = replace(structure).layout(short_length).allowed()
    if short.shape[0] == long.shape[0] or not structure.different_layout_per_head:
        assert torch.equal(short, long[:, :short_length, :short_length])
    else:  # heads that differ later on alone
        assert torch.equal(short.expand(structure.num_heads, -1, -1), long[:, :short_length, :short_length])


@settings(deadline=None)
@given(case=cases(are_legal=True))
def test_where_there_is_no_quirk_it_is_what_deepspeed_has(case):
    structure = structure_of(case)
    looks_back = structure.attention == BACK
    num_blocks = -(-case["seq_len"] // structure.block)
    length = num_blocks * structure.block
    try:
        theirs = replace(structure, strict_deepspeed=True, seed=0).make_layout(length).bool()
    except ValueError:
        return  # too short for DeepSpeed
    ours = structure.make_layout(length).bool()
    if is_random(structure):
        fixed_part = replace(structure, num_random_blocks=0)
        theirs = replace(fixed_part, strict_deepspeed=True).make_layout(length).bool()
        extra = (ours & ~fixed_part.make_layout(length).bool()).sum(-1)
        assert extra.max() <= structure.num_random_blocks
        ours = fixed_part.make_layout(length).bool()
    if looks_back:
        theirs = theirs.tril()
    if looks_back and isinstance(structure, FixedSparsityConfig) and num_blocks % structure.num_local_blocks:
        assert not (ours & ~theirs).any()
        assert not (theirs & ~ours)[:, :, : -structure.num_local_blocks - structure.num_global_blocks].any()
    elif num_blocks >= getattr(structure, "num_global_blocks", 0):
        assert torch.equal(ours, theirs)


def test_a_short_last_window_adds_nothing_that_a_longer_unidirectional_layout_lacks():
    structure = FixedSparsityConfig(
        2, 16, True, num_local_blocks=4, num_global_blocks=2, attention=BACK, num_different_global_patterns=2
    )
    whole = structure.make_layout(16 * 16)
    for num_blocks in range(1, 16):
        assert torch.equal(structure.make_layout(16 * num_blocks), whole[:, :num_blocks, :num_blocks])


def test_random_blocks_follow_the_seed_alone():
    first = BigBirdSparsityConfig(4, num_random_blocks=2, different_layout_per_head=True, seed=1)
    random.seed(0)
    state = random.getstate()
    made = first.make_layout(640)
    assert random.getstate() == state
    assert torch.equal(made, replace(first).make_layout(640))
    assert not torch.equal(made, replace(first, seed=2).make_layout(640))
    assert len({head.numpy().tobytes() for head in made}) == 4
    assert torch.equal(made[0], BigBirdSparsityConfig(1, num_random_blocks=2, seed=1).make_layout(640)[0])


@pytest.mark.parametrize("kind", [BigBirdSparsityConfig, VariableSparsityConfig])
def test_rows_that_look_back_have_as_many_random_blocks_as_fit(kind):
    no_others = {"num_global_blocks": 0, "num_sliding_window_blocks": 1}
    if kind is VariableSparsityConfig:
        no_others = {"global_block_indices": [], "local_window_blocks": [1]}
    made = kind(1, num_random_blocks=3, attention=BACK, **no_others).make_layout(16 * 12)[0]
    off_diagonal = made.sum(-1) - made.diagonal()
    for row, count in enumerate(off_diagonal.tolist()):
        assert min(2, row) <= count <= min(3, row)
    assert off_diagonal[2] == 2  # all that there are


def test_global_blocks_of_a_short_last_window_still_represent_it_when_looking_both_ways():
    made = FixedSparsityConfig(1, num_local_blocks=4, num_global_blocks=2).make_layout(16 * 9)[0]
    assert made[:, 7:9].all()
    short = FixedSparsityConfig(1, num_local_blocks=4, num_global_blocks=4).make_layout(16 * 3)[0]
    assert short.all()


def test_windows_longer_than_the_sequence_are_cut():
    for structure in (
        BigBirdSparsityConfig(2, num_random_blocks=9, num_sliding_window_blocks=9, num_global_blocks=9),
        BSLongformerSparsityConfig(2, num_sliding_window_blocks=9, global_block_indices=[7]),
        VariableSparsityConfig(2, num_random_blocks=9, local_window_blocks=[8]),
        LocalSlidingWindowSparsityConfig(2, num_sliding_window_blocks=9, attention="bidirectional"),
    ):
        assert structure.layout(40).allowed().all()


def test_layouts_are_kept_for_each_instance_and_length_and_not_for_ever():
    first, second = FixedSparsityConfig(2), FixedSparsityConfig(2)
    assert first == second
    assert hash(first) == hash(second)
    kept = first.layout(64)
    assert first.layout(64) is kept
    assert second.layout(64) is not kept
    for length in range(65, 96):
        first.layout(length)
    assert first.layout(64) is kept
    for length in range(96, 130):
        first.layout(length)
    assert first.layout(64) is not kept


def test_heads_have_layouts_of_their_own_only_where_they_differ():
    assert BigBirdSparsityConfig(4, different_layout_per_head=True).layout(640).num_heads == 4
    assert BSLongformerSparsityConfig(4, different_layout_per_head=True).layout(640).num_heads == 1
    patterns = FixedSparsityConfig(5, different_layout_per_head=True, num_different_global_patterns=2)
    blocks = patterns.layout(640).patterns[0].blocks
    assert torch.equal(blocks[[0, 1, 0, 1, 0]], blocks)
    assert not torch.equal(blocks[0], blocks[1])


def test_documents_have_the_layouts_of_their_lengths():
    structure = FixedSparsityConfig(2, attention=BACK)
    packed = structure.layout_of_documents([40, 7, 100])
    assert packed.num_queries == 147
    assert torch.equal(packed.allowed()[:, 47:, 47:], structure.layout(100).allowed())
    with refused("documents-of-one-kind"):
        structure.layout_of_documents([])


@given(way=WAYS, length=st.integers(1, 150))
def test_a_function_of_block_indices_is_a_structure(way, length):
    custom = CustomSparsityConfig(
        3, 16, True, function=lambda head, query, key: (query - key).abs() <= head, attention=way
    )
    layout = custom.layout(length)
    for head, window in enumerate((1, 3, 5)):
        expected = LocalSlidingWindowSparsityConfig(1, 16, window, way).layout(length).allowed()[0]
        assert torch.equal(layout.allowed()[head % layout.num_heads], expected)


def test_the_functions_of_users_may_give_what_broadcasts_and_errors_say_what_to_mend():
    assert CustomSparsityConfig(2, function=lambda head, query, key: key == 0).layout(64).density == 0.25
    assert CustomSparsityConfig(2, function=lambda head, query, key: True).layout(64).density == 1
    with refused("block-function", "Boolean value"):
        CustomSparsityConfig(2, function=lambda head, query, key: query == key and key == 0).layout(64)
    with refused("block-function"):
        CustomSparsityConfig(2, function=lambda head, query, key: torch.ones(3)).layout(64)


def test_a_structure_without_blocks_says_so():
    with pytest.raises(NotImplementedError, match="make_layout"):
        SparsityConfig(4).layout(64)


@pytest.mark.parametrize(
    ("make", "code", "value"),
    [
        (lambda: FixedSparsityConfig(0), "structure-count", "num_heads=0"),
        (lambda: FixedSparsityConfig(2, block=16.0), "structure-count", "block=16.0"),
        (lambda: FixedSparsityConfig(2, num_global_blocks=0), "structure-count", "num_global_blocks=0"),
        (lambda: FixedSparsityConfig(2, num_local_blocks=6, num_global_blocks=4), "global-blocks-divide", "1, 2, 3, 6"),
        (lambda: FixedSparsityConfig(2, attention="causal"), "attention-direction", "attention='causal'"),
        (
            lambda: FixedSparsityConfig(2, attention=BACK, horizontal_global_attention=True),
            "horizontal-attention",
            "attention=unidirectional",
        ),
        (lambda: FixedSparsityConfig(2, num_different_global_patterns=2), "patterns-need-heads", "_patterns=2"),
        (
            lambda: FixedSparsityConfig(2, different_layout_per_head=True, num_different_global_patterns=5),
            "pattern-count",
            "1 to 4",
        ),
        (lambda: VariableSparsityConfig(2, num_random_blocks=-1), "structure-count", "num_random_blocks=-1"),
        (lambda: VariableSparsityConfig(2, local_window_blocks=[]), "window-sizes", "local_window_blocks=[]"),
        (lambda: VariableSparsityConfig(2, local_window_blocks=[4, 0]), "window-sizes", "local_window_blocks=[4, 0]"),
        (
            lambda: VariableSparsityConfig(2, global_block_indices=[-1]),
            "global-block-index",
            "global_block_indices=[-1]",
        ),
        (
            lambda: VariableSparsityConfig(2, attention=BACK, horizontal_global_attention=True),
            "horizontal-attention",
            "attention=unidirectional",
        ),
        (lambda: BSLongformerSparsityConfig(2, global_block_end_indices=[1, 2]), "global-block-ranges", "1 entries"),
        (
            lambda: BSLongformerSparsityConfig(2, global_block_indices=[3], global_block_end_indices=[3]),
            "global-block-end",
            "3 to 3",
        ),
        (lambda: BSLongformerSparsityConfig(2, attention="back"), "attention-direction", "attention='back'"),
        (lambda: LocalSlidingWindowSparsityConfig(2, attention="back"), "attention-direction", "attention='back'"),
        (
            lambda: LocalSlidingWindowSparsityConfig(2, num_sliding_window_blocks=0),
            "structure-count",
            "num_sliding_window_blocks=0",
        ),
        (lambda: BigBirdSparsityConfig(2, attention="back"), "attention-direction", "attention='back'"),
        (lambda: BigBirdSparsityConfig(2, num_global_blocks=True), "structure-count", "num_global_blocks=True"),
        (lambda: DenseSparsityConfig(2, attention="back"), "attention-direction", "attention='back'"),
        (
            lambda: DenseSparsityConfig(2, attention=BACK, strict_deepspeed=True),
            "strict-dense-attention",
            "attention='unidirectional'",
        ),
        (
            lambda: CustomSparsityConfig(2, function=lambda head, query, key: key == 0, strict_deepspeed=True),
            "strict-unknown-structure",
            "strict_deepspeed=True",
        ),
        (lambda: FixedSparsityConfig(2).layout(0), "seq-len-positive", "seq_len=0"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_given(make, code, value):
    with refused(code, value) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_strict_layouts_are_of_whole_blocks_and_let_a_block_see_itself():
    strict = FixedSparsityConfig(2, attention=BACK, num_global_blocks=2, strict_deepspeed=True)
    layout = strict.layout(128)
    assert not layout.patterns[0].causal
    assert layout.patterns[0].blocks.triu(1).any()
    assert torch.equal(strict.make_layout(128)[0].bool(), layout.patterns[0].blocks[0])


def test_lengths_of_as_many_blocks_share_them():
    structure = BigBirdSparsityConfig(2, block=16, different_layout_per_head=True)
    first, second, third = (structure.layout(length) for length in (100, 112, 113))
    assert first.patterns[0].blocks is second.patterns[0].blocks
    assert third.patterns[0].blocks.shape[1] == 8
    for layout, length in ((first, 100), (second, 112)):
        assert layout.num_keys == length
        fresh = BigBirdSparsityConfig(2, block=16, different_layout_per_head=True).layout(length)
        assert layout.allowed().equal(fresh.allowed())
