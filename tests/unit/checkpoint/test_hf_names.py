"""Name rules: both directions of each are one, and wrong ones are refused with a fix."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.checkpoint.hf.families import decoder_names
from shardwise.checkpoint.hf.key_map import NameMap, Rule, WeightPart
from shardwise.layout.slicing import Rect, Shape
from shardwise.models import Decoder, DecoderConfig

PATTERNS = ["layers.*.up", "blocks.*.of.*.weight", "backbone.**", "plain.weight"]


@st.composite
def ruled_tensors(draw: st.DrawFn) -> tuple[Rule, str, Shape]:
    """A rule, a name that it is of, and a shape that it fits."""
    model = draw(st.sampled_from(PATTERNS))
    count = draw(st.integers(1, 3))
    is_stacked = draw(st.booleans())
    transpose = not is_stacked and draw(st.booleans())
    num_dims = 2 if transpose else draw(st.integers(1 + (is_stacked and count > 1), 3))
    dim = draw(st.integers(int(is_stacked and count > 1), num_dims - 1))
    shares = tuple(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)))
    shape = draw(st.lists(st.integers(1, 4), min_size=num_dims, max_size=num_dims))
    if count > 1:
        shape[dim] = sum(shares) * draw(st.integers(1, 3))
    stored = tuple(f"part{i}.{'#.' if is_stacked else ''}{model}.x" for i in range(count))
    name = model.replace("**", "any.3.thing").replace("*", "7")
    return Rule(model, stored, transpose, dim, shares), name, tuple(shape)


@given(ruled_tensors())
def test_a_folder_written_by_a_rule_is_read_by_it(case: tuple[Rule, str, Shape]) -> None:
    rule, name, shape = case
    names = NameMap((rule,))
    parts = names.split(name, shape)
    assert sum(part.rect.numel for part in parts) == Rect.whole(shape).numel
    assert all(a.rect.intersect(b.rect) is None for i, a in enumerate(parts) for b in parts[:i])
    assert len({part.stored for part in parts}) == len(parts)

    shapes = {part.stored: part.stored_shape for part in parts}
    assert names.join(name, shapes) == (shape, parts)

    del shapes[parts[0].stored]
    assert names.join(name, shapes) is None


def test_the_parts_of_a_transposed_and_fused_tensor() -> None:
    names = NameMap.of({"*.qkv": {"stored": ["*.q", "*.k", "*.v"], "shares": [2, 1, 1], "transpose": True}})
    assert names.split("a.qkv", (8, 3)) == (
        WeightPart("a.q", Rect((0, 0), (4, 3)), is_transposed=True),
        WeightPart("a.k", Rect((4, 0), (6, 3)), is_transposed=True),
        WeightPart("a.v", Rect((6, 0), (8, 3)), is_transposed=True),
    )
    # Unlike export, import takes lengths from the folder.
    joined = names.join("a.qkv", {"a.q": (3, 5), "a.k": (3, 1), "a.v": (3, 1)})
    assert joined is not None
    assert joined[0] == (7, 3)


def test_a_star_stays_between_dots_two_do_not_and_the_first_rule_counts() -> None:
    names = NameMap.of({"layers.*.up": "h.*.fc", "layers.**": "other.**"}).then(NameMap.of({"**.gate": "g.**"}))
    assert names.stored_names("layers.3.up") == ("h.3.fc",)
    assert names.stored_names("layers.3.mlp.up") == ("other.3.mlp.up",)
    assert names.stored_names("mlp.up.gate") == ("g.mlp.up",)
    assert names.stored_names("layersX3Xup") == ("layersX3Xup",)


@pytest.mark.parametrize(
    ("value", "code", "named"),
    [
        ("h.fc", "rule-wildcards", "'l.*' has other wildcards than 'h.fc'"),
        ([], "rule-names-nothing", "l.*"),
        (["a.*.#", "b.*"], "rule-counters", "('a.*.#', 'b.*')"),
        ({"stored": ["a.*", "b.*"], "shares": [1]}, "rule-shares", "shares=(1,); give 2"),
        ({"stored": "a.*.#", "transpose": True}, "rule-transposes-stack", "l.*"),
        ({"stored": ["a.*.#", "b.*.#"], "dim": 0}, "rule-dim", "dim=0; give at least 1"),
        ({"stored": "a.*", "transposed": True}, "rule-unknown-key", "transposed=True; did you mean transpose?"),
    ],
)
def test_wrong_rules_are_refused(value: Any, code: str, named: str) -> None:
    with refused(code, named):
        NameMap.of({"l.*": value})


def test_rules_that_do_not_fit_a_shape_are_refused() -> None:
    names = NameMap.of(
        {"fused": ["a", "b"], "t": {"stored": "t", "transpose": True}, "w": {"stored": ["c", "d"], "dim": 2}}
    )
    with refused("rule-shares-divide", "fused (5, 2)", "dim=0", "shares (1, 1)"):
        names.split("fused", (5, 2))
    with refused("rule-transposes-matrix", "t (3,)", "1 dims"):
        names.split("t", (3,))
    with refused("rule-dim-exists", "w (4, 4)", "dim=2"):
        names.split("w", (4, 4))
    with refused("rule-shape-differs", "fused (5, 2)", "b of shape (3, 2)", "(3, 4)"):
        names.join("fused", {"a": (2, 2), "b": (3, 4)})


CONFIG = DecoderConfig(
    vocab_size=64, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=6, ffn_size=48, max_seq_len=32
)


def test_each_tensor_of_our_decoder_has_a_name_of_its_own_in_a_folder() -> None:
    own = [name for name, _ in Decoder(CONFIG, device="meta").named_parameters()]
    stored = [decoder_names().stored_names(name)[0] for name in own]
    assert len(set(stored)) == len(own)
    assert all(name.startswith(("model.", "lm_head.")) for name in stored)
