"""`SparseSelfAttention` against DeepSpeed's semantics, written out densely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.refusals import refused
from shardwise.attention import BlockLayout, SparseSelfAttention
from shardwise.attention.structures import FixedSparsityConfig

LENGTH, BLOCK = 64, 16


def config(**given: Any) -> FixedSparsityConfig:
    return FixedSparsityConfig(4, block=BLOCK, num_local_blocks=2, **given)


def tensors(length: int = LENGTH, num_kv_heads: int = 4) -> list[Tensor]:
    shapes = [(2, heads, length, 8) for heads in (4, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def deepspeeds(inputs: list[Tensor], layout: Tensor, modes: dict[str, str], given: dict[str, Tensor]) -> Tensor:
    """DeepSpeed's order: scaled scores, rpe, key padding mask, attention mask, softmax over the layout's blocks.

    Args:
        inputs: q, k and v, [B, H, N, D] each.
        layout: [H, blocks, blocks].
        modes: of the two masks.
        given: rpe, key_padding_mask, attn_mask.
    """
    q, k, v = inputs
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [B, H, N, N]
    scores = scores + given.get("rpe", 0)
    for name, shape in (("key_padding_mask", (2, 1, 1, -1)), ("attn_mask", (1, 1, q.shape[2], -1))):
        if name in given:
            mask = given[name].reshape(shape)
            if modes[f"{name}_mode"] == "mul":
                mask = torch.zeros_like(mask).masked_fill(mask == 0, -torch.inf)
            scores = scores + mask
    seen = layout.bool().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)  # [H, N, N]
    scores = scores.masked_fill(~seen, -torch.inf)
    sees_none = scores.amax(-1, keepdim=True) == -torch.inf
    return scores.masked_fill(sees_none, 0).softmax(-1).masked_fill(sees_none, 0) @ v


@pytest.mark.parametrize("key_mode", ["add", "mul"])
@pytest.mark.parametrize("attn_mode", ["add", "mul"])
@pytest.mark.parametrize(
    "names", [(), ("rpe",), ("key_padding_mask",), ("attn_mask",), ("rpe", "key_padding_mask", "attn_mask")]
)
def test_masks_act_as_deepspeeds(key_mode: str, attn_mode: str, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    inputs, modes = tensors(), {"key_padding_mask_mode": key_mode, "attn_mask_mode": attn_mode}
    given = {
        "rpe": torch.randn(2, 4, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True),
        "key_padding_mask": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [37]])).double(),
        "attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril(),
    }
    if key_mode == "add":
        given["key_padding_mask"] = (1 - given["key_padding_mask"]) * -10000.0
    given = {name: given[name] for name in names}
    module = SparseSelfAttention(config(), **modes)
    leaves = inputs + ([given["rpe"]] if "rpe" in given else [])
    found = module(*inputs, **given)
    expected = deepspeeds(inputs, config().make_layout(LENGTH), modes, given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(each.sin().sum(), leaves) for each in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_masks_of_deepspeeds_shapes() -> None:
    """With dims of 1, of any dtype where they multiply."""
    module, inputs = SparseSelfAttention(config(), "mul"), tensors()
    mask = torch.arange(LENGTH) < torch.tensor([[50], [37]])
    expected = module(*inputs, key_padding_mask=mask, attn_mask=torch.ones(LENGTH, LENGTH).tril())
    found = module(
        *inputs, key_padding_mask=mask[:, None, None].long(), attn_mask=torch.ones(1, 1, LENGTH, LENGTH).tril().bool()
    )
    assert torch.equal(found, expected)


def test_rows_that_see_nothing_give_zeros() -> None:
    module, inputs = SparseSelfAttention(config(), "mul"), tensors()
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [0]])
    attn_mask = torch.ones(LENGTH, LENGTH)
    attn_mask[5] = 0
    out = module(*inputs, key_padding_mask=mask, attn_mask=attn_mask)
    assert not out[1].any()
    assert not out[:, :, 5].any()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), inputs))


def test_fewer_kv_heads_and_other_dtypes() -> None:
    inputs = tensors(num_kv_heads=2)
    repeated = [inputs[0], *(each.repeat_interleave(2, 1) for each in inputs[1:])]
    module = SparseSelfAttention(config())
    torch.testing.assert_close(module(*inputs), module(*repeated))
    assert module(*(each.bfloat16() for each in inputs)).dtype == torch.bfloat16


def test_instances_of_one_length_keep_their_own_structures() -> None:
    inputs = tensors()
    other = FixedSparsityConfig(4, block=BLOCK, num_local_blocks=1)
    found = [SparseSelfAttention(each)(*inputs) for each in (config(), other)]
    expected = [deepspeeds(inputs, each.make_layout(LENGTH), {}, {}) for each in (config(), other)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(*found)


class TestStrict:
    def test_crops_the_longest_layout(self) -> None:
        """Where the last window is short, that is another one."""
        strict = config(strict_deepspeed=True)
        module, inputs = SparseSelfAttention(strict, max_seq_length=128), tensors(48)
        whole = strict.make_layout(128)
        assert torch.equal(module.master_layout, whole)
        assert list(module.state_dict()) == ["master_layout"]
        expected = deepspeeds(inputs, whole[:, :3, :3], {}, {})
        torch.testing.assert_close(module(*inputs), expected, rtol=0, atol=1e-12)

    def test_takes_a_checkpoints_layout(self) -> None:
        module, inputs = SparseSelfAttention(config(strict_deepspeed=True), max_seq_length=LENGTH), tensors()
        before = module(*inputs)
        layout = torch.eye(4, dtype=torch.int64).expand(4, 4, 4).contiguous()
        module.load_state_dict({"master_layout": layout})
        torch.testing.assert_close(module(*inputs), deepspeeds(inputs, layout, {}, {}), rtol=0, atol=1e-12)
        assert not torch.allclose(module(*inputs), before)

    @pytest.mark.parametrize("length", [40, 144])
    def test_refuses_other_lengths(self, length: int) -> None:
        module = SparseSelfAttention(config(strict_deepspeed=True), max_seq_length=128)
        with refused("strict-length", f"{length}", "16", "max_seq_length=128"):
            module(*tensors(length))

    def test_others_take_any_length(self) -> None:
        module = SparseSelfAttention(config(attention="unidirectional"))
        assert module(*tensors(41)).isfinite().all()
        assert not module.state_dict()


class TestRefusals:
    def test_modes(self) -> None:
        with refused("mask-mode", "attn_mask_mode='and'"):
            SparseSelfAttention(config(), attn_mask_mode="and")

    def test_bools_that_would_be_added(self) -> None:
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        with refused("mask-addable", "key_padding_mask is of torch.bool", 'key_padding_mask_mode="mul"'):
            SparseSelfAttention(config())(*tensors(), key_padding_mask=mask)

    def test_shapes(self) -> None:
        with refused("mask-shape", "attn_mask", "(2, 64, 64)", "[64, 64]"):
            SparseSelfAttention(config())(*tensors(), attn_mask=torch.ones(2, LENGTH, LENGTH))
        with refused("qkv-dims", "query", "(64, 8)", "2 dims"):
            SparseSelfAttention(config())(*torch.ones(3, 64, 8))


def test_a_layout_of_ones_own() -> None:
    class Whole:
        def layout(self, seq_len: int) -> BlockLayout:
            return BlockLayout.from_blocks(torch.ones(1, 1), seq_len)

    inputs = tensors()
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(SparseSelfAttention(Whole())(*inputs), expected)
