"""Hugging Face folders: read under the model's names, whatever the folder calls them; the same bytes from any ranks.

Oracles: folders that transformers writes, models that it reads, the public safetensors library.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.huggingface import build_model
from harness.refusals import refused
from shardwise.checkpoint.hf import exporter as exporting
from shardwise.checkpoint.hf.exporter import (
    ExportTensor,
    begin_export,
    discard_export,
    finish_export,
    plan_export,
    stored_blocks,
    temporary_folder,
    write_export,
)
from shardwise.checkpoint.hf.families import decoder_names, family_names, hf_config_of
from shardwise.checkpoint.hf.importer import open_folder, read_config
from shardwise.checkpoint.hf.key_map import NameMap
from shardwise.checkpoint.manifest import CheckpointError, StoredTensor
from shardwise.checkpoint.safetensors_io import dtype_name, named_dtype
from shardwise.layout.slicing import Chunk, Rect
from shardwise.models import Decoder, DecoderConfig
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.state_shards import StateShard, TensorFlatState

TOKENS = torch.arange(20).view(2, 10)  # [B, S]
FAMILIES = ["llama", "qwen2", "mistral", "gpt2", "mixtral"]


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Each tensor's aliases, by its first name."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(aliases) for first, *aliases in names.values()}


def read(folder: Path, tensor: StoredTensor) -> Tensor:
    """All of a stored tensor, straight from the bytes."""
    state = tensor.states["param"]
    values = torch.empty(tensor.shape, dtype=named_dtype(state.dtype))
    for piece in state.pieces:
        num_bytes = piece.rect.numel * values.element_size()
        data = (folder / piece.file).read_bytes()[piece.offset : piece.offset + num_bytes]
        block = torch.frombuffer(bytearray(data), dtype=values.dtype)
        shape = piece.rect.shape[::-1] if piece.is_transposed else piece.rect.shape
        block = block.view(shape).T if piece.is_transposed else block.view(shape)
        values[piece.rect.slices_in(Rect.whole(tensor.shape))] = block
    return values


def check_folder_has(model: nn.Module, folder: Path, names: Any = None) -> None:
    """The folder has each tensor of the model, with its values, and no other."""
    own = names_of(model)
    found = {tensor.name: tensor for tensor in open_folder(folder, own, names)}
    assert list(found) == list(own)
    for name, values in model.state_dict().items():
        if name in own:
            assert found[name].aliases == own[name]
            torch.testing.assert_close(read(folder, found[name]), values, rtol=0, atol=0)


def held_whole(model: nn.Module) -> list[StateShard]:
    """What one rank holds, and writes, that has all of a model."""
    state = model.state_dict()
    return [
        StateShard(
            name, aliases, "param", tuple(state[name].shape), TensorFlatState(state[name].flatten()), whole, whole
        )
        for name, aliases in names_of(model).items()
        for whole in [(Chunk(Rect.whole(tuple(state[name].shape)), 0),)]
    ]


def export(
    folder: Path, ranks: Sequence[Sequence[StateShard]], names: Any = None, others: Any = None, **options: Any
) -> None:
    """A folder of what these ranks hold, in the dtypes that they hold it in."""
    held = {state_shard.name: state_shard for state_shards in ranks for state_shard in state_shards}
    tensors = [
        ExportTensor(name, held[name].aliases, held[name].global_shape, dtype_name(held[name].flat.dtype))
        for name in sorted(held)
    ]
    plan = plan_export(tensors, names, **options)
    begin_export(plan, folder, others)
    written = (write_export(plan, folder, stored_blocks(plan, state_shards)) for state_shards in ranks)
    assert sum(written) == plan.num_tensor_bytes
    finish_export(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Import


@pytest.mark.parametrize("max_shard_size", ["5GB", "8KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_found(family: str, max_shard_size: str, tmp_path: Path) -> None:
    model = build_model(family)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert (num_files > 1) == (max_shard_size == "8KB")
    check_folder_has(model, tmp_path)


@pytest.fixture
def gpt2_folders(tmp_path: Path) -> dict[str, tuple[nn.Module, Path]]:
    """A language model and its base model, each with a folder of its own."""
    model = build_model("gpt2")
    folders = {"whole": (model, tmp_path / "whole"), "base": (model.get_submodule("transformer"), tmp_path / "base")}
    for each, folder in folders.values():
        each.save_pretrained(folder)
    return folders


@pytest.mark.parametrize("wanted", ["whole", "base"])
@pytest.mark.parametrize("there", ["whole", "base"])
def test_the_base_models_prefix_may_be_there_or_not(
    wanted: str, there: str, gpt2_folders: dict[str, tuple[nn.Module, Path]]
) -> None:
    check_folder_has(gpt2_folders[wanted][0], gpt2_folders[there][1])


def test_a_wrapped_model_finds_its_folder(tmp_path: Path) -> None:
    model = build_model("llama")
    model.save_pretrained(tmp_path)
    check_folder_has(nn.ModuleDict({"wrapped": model}), tmp_path)

    # Where a user says what is what, nothing is passed over.
    own = names_of(nn.ModuleDict({"wrapped": model.get_submodule("model")}))
    found = [tensor.name for tensor in open_folder(tmp_path, own, {"wrapped.**": "model.**"})]
    assert found == [*own, "lm_head.weight"]


def test_a_base_model_leaves_no_head_over_and_a_whole_one_lacks_it(tmp_path: Path) -> None:
    model = build_model("llama", tie_word_embeddings=False)
    base = model.get_submodule("model")
    model.save_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    check_folder_has(base, tmp_path / "whole")
    found = [tensor.name for tensor in open_folder(tmp_path / "base", names_of(model))]
    assert found == [name for name in names_of(model) if name != "lm_head.weight"]


def test_no_prefix_is_made_up_for_one_tensor(tmp_path: Path) -> None:
    """A tensor that is missing is not some other one whose name happens to end in the same way."""
    save_file({"up.weight": torch.ones(2), "old.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    found = open_folder(tmp_path, {"up.weight": (), "norm.weight": (), "down.weight": ()})
    assert [tensor.name for tensor in found] == ["up.weight", "old.norm.weight"]


def test_a_tied_weight_may_be_there_twice_or_once_by_any_name(tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    for present in (["wte", "head"], ["wte"], ["head"]):
        folder = tmp_path / "-".join(present)
        folder.mkdir()
        save_file({name: weight.clone() for name in present}, folder / "model.safetensors")
        (found,) = open_folder(folder, {"wte": ("head",)})
        assert (found.name, found.aliases) == ("wte", ("head",))
        torch.testing.assert_close(read(folder, found), weight, rtol=0, atol=0)


@pytest.mark.parametrize("place", [0, 50_000, 99_999], ids=["first", "middle", "last"])
def test_weights_that_differ_are_not_tied_silently(place: int, tmp_path: Path) -> None:
    head = torch.ones(100_000)
    head[place] = 0
    save_file({"wte": torch.ones(100_000), "head": head}, tmp_path / "model.safetensors")
    with refused("tied-weights-differ", "model.safetensors", "head", "wte"):
        open_folder(tmp_path, {"wte": ("head",)})


def test_what_old_versions_saved_beside_weights_is_passed_over_and_what_else_there_is_is_not(tmp_path: Path) -> None:
    junk = {
        "h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
        "embeddings.position_ids": torch.arange(8).view(1, 8),
    }
    left_over = {"h.1.attn.bias": torch.ones(8), "h.0.attn.weight": torch.ones(2, 2)}
    save_file({"norm": torch.ones(2), **junk, **left_over}, tmp_path / "model.safetensors")
    found = {tensor.name: tensor.shape for tensor in open_folder(tmp_path, {"norm": ()})}
    assert found == {"norm": (2,), "h.1.attn.bias": (8,), "h.0.attn.weight": (2, 2)}
    wanted = {tensor.name for tensor in open_folder(tmp_path, dict.fromkeys(junk, ()))}
    assert wanted >= junk.keys()


def test_a_user_maps_names_of_any_model(tmp_path: Path) -> None:
    query, key, up = torch.randn(4, 3), torch.randn(2, 3), torch.randn(3, 5)
    save_file({"q": query, "k": key, "h.0.fc": up}, tmp_path / "model.safetensors")
    names = {"qk.weight": ["q", "k"], "blocks.*.up": {"stored": "h.*.fc", "transpose": True}}
    fused, transposed = open_folder(tmp_path, {"qk.weight": (), "blocks.0.up": ()}, names)
    torch.testing.assert_close(read(tmp_path, fused), torch.cat((query, key)), rtol=0, atol=0)
    torch.testing.assert_close(read(tmp_path, transposed), up.T, rtol=0, atol=0)


def test_parts_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    save_file({"q": torch.ones(2), "k": torch.ones(2).half()}, tmp_path / "model.safetensors")
    with refused("mixed-dtypes", "qk", "q F32, k F16"):
        open_folder(tmp_path, {"qk": ()}, {"qk": ["q", "k"]})


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_damage_is_named(tmp_path: Path) -> None:
    names: dict[str, tuple[str, ...]] = {"a": (), "b": ()}
    save_file({"a": torch.ones(8)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with refused("index-names-absent-file", "two.safetensors", "model.safetensors.index.json"):
        open_folder(tmp_path, names)
    save_file({"other": torch.ones(8)}, tmp_path / "two.safetensors")
    with refused("index-names-absent-tensor", "two.safetensors lacks b,"):
        open_folder(tmp_path, names)
    save_file({"b": torch.ones(8)}, tmp_path / "two.safetensors")
    assert len(open_folder(tmp_path, names)) == 2
    whole = (tmp_path / "two.safetensors").read_bytes()
    (tmp_path / "two.safetensors").write_bytes(whole[:-1])
    with refused("file-size-differs", "two.safetensors"):
        open_folder(tmp_path, names)
    write_index(tmp_path, {"a": "../one.safetensors"})
    with refused("index-names-foreign-file", "../one.safetensors"):
        open_folder(tmp_path, names)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ')
    with refused("not-json", "index.json"):
        open_folder(tmp_path, names)


def test_the_index_says_which_of_two_tensors_of_one_name_counts(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(8), "b": torch.ones(8), "unlisted": torch.ones(8)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    found = open_folder(tmp_path, {"a": (), "b": ()})
    assert [tensor.name for tensor in found] == ["a", "b", "unlisted"]
    torch.testing.assert_close(read(tmp_path, found[0]), torch.ones(8), rtol=0, atol=0)


def test_a_folder_without_safetensors_is_refused_with_a_fix(tmp_path: Path) -> None:
    with refused("not-a-folder", "nowhere"):
        open_folder(tmp_path / "nowhere", {})
    with refused("no-safetensors", "model.safetensors"):
        open_folder(tmp_path, {})
    (tmp_path / "pytorch_model.bin").touch()
    with refused("weights-pickled", "pytorch_model.bin"):
        open_folder(tmp_path, {})


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert len(open_folder(tmp_path, {"a": ()})) == 1
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with refused("weights-quantized", "fp8"):
        open_folder(tmp_path, {"a": ()})


# Export


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_exported(family: str, tmp_path: Path) -> None:
    model = build_model(family).eval()
    model.save_pretrained(tmp_path / "own")
    others = {name: tmp_path / "own" / name for name in ("config.json", "generation_config.json")}
    names = family_names(read_config(tmp_path / "own"))
    export(tmp_path / "out", [held_whole(model)], names, others, max_file_bytes=8000)
    assert len(list((tmp_path / "out").glob("model-0*.safetensors"))) > 1
    check_folder_has(model, tmp_path / "out")
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(loaded.eval()(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-6)


CONFIG = DecoderConfig(
    vocab_size=64,
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_size=48,
    max_seq_len=32,
    rope_theta=500.0,
    norm_eps=1e-3,
)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_our_decoder_is_a_llama_of_the_same_logits(tie_embeddings: bool, tmp_path: Path) -> None:
    from transformers.models.llama import LlamaForCausalLM

    config = DecoderConfig(**{**CONFIG.__dict__, "tie_embeddings": tie_embeddings})
    model = Decoder(config, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.2, 0.4)  # far from what is drawn at first: norms of 1, and logits near 0
    others = {"config.json": json.dumps(hf_config_of(config, "F64")).encode()}
    export(tmp_path / "out", [held_whole(model)], decoder_names(), others)
    with float64_throughout():
        loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values())
        assert loaded.dtype == torch.float64
        theirs = loaded(TOKENS).logits  # [B, S, V]
    ours = model(TOKENS)
    assert ours.abs().max() > 1
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_folder_of_a_family_makes_our_decoder_of_the_same_logits(family: str, tmp_path: Path) -> None:
    options = {"sliding_window": None} if family == "mistral" else {}
    theirs = build_model(family, **options).eval()
    theirs.save_pretrained(tmp_path)
    sizes = theirs.config
    ours = Decoder(
        DecoderConfig(
            vocab_size=sizes.vocab_size,
            num_layers=sizes.num_hidden_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_attention_heads,
            num_kv_heads=sizes.num_key_value_heads,
            head_dim=sizes.hidden_size // sizes.num_attention_heads,
            ffn_size=sizes.intermediate_size,
            max_seq_len=sizes.max_position_embeddings,
            norm_eps=sizes.rms_norm_eps,
            tie_embeddings=sizes.tie_word_embeddings,
        )
    )
    found = {tensor.name: tensor for tensor in open_folder(tmp_path, names_of(ours), decoder_names())}
    assert found.keys() == names_of(ours).keys()
    ours.load_state_dict({name: read(tmp_path, tensor) for name, tensor in found.items()})
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)


def cut(rect: Rect, rng: random.Random, depth: int) -> list[Rect]:
    """The rectangle in at most 2**depth, cut at random."""
    dims = [dim for dim, length in enumerate(rect.shape) if length > 1]
    if depth == 0 or not dims:
        return [rect]
    dim = rng.choice(dims)
    at = rng.randrange(rect.start[dim] + 1, rect.stop[dim])
    first = Rect(rect.start, (*rect.stop[:dim], at, *rect.stop[dim + 1 :]))
    second = Rect((*rect.start[:dim], at, *rect.start[dim + 1 :]), rect.stop)
    return [*cut(first, rng, depth - 1), *cut(second, rng, depth - 1)]


def spread(tensors: Mapping[str, Tensor], num_ranks: int, rng: random.Random) -> list[list[StateShard]]:
    """Random rectangles over ranks, in buffers with padding; each is held by two ranks and written by one."""
    ranks: list[list[StateShard]] = [[] for _ in range(num_ranks)]
    for name, values in tensors.items():
        shape = tuple(values.shape)
        rects = cut(Rect.whole(shape), rng, depth=4)
        writers = [rng.randrange(num_ranks) for _ in rects]
        for rank in range(num_ranks):
            pieces, written, buffer = [], [], [torch.full((3,), 7).to(values.dtype)]
            for rect, writer in zip(rects, writers, strict=True):
                if rank in (writer, (writer + 1) % num_ranks):
                    piece = Chunk(rect, sum(map(len, buffer)))
                    pieces.append(piece)
                    written += [piece] if rank == writer else []
                    buffer += [values[rect.slices_in(Rect.whole(shape))].reshape(-1), buffer[0][:1]]
            ranks[rank].append(
                StateShard(name, (), "param", shape, TensorFlatState(torch.cat(buffer)), tuple(pieces), tuple(written))
            )
    return ranks


MIXED: Mapping[str, Any] = {
    "fused": {"stored": ["f.a", "f.b"], "dim": 1, "shares": [1, 2]},
    "turned": {"stored": "t", "transpose": True},
    "experts": {"stored": ["e.#.up", "e.#.gate"], "dim": 1},
}


def mixed_tensors() -> dict[str, Tensor]:
    return {
        "a.weight": torch.randn(13, 7).bfloat16(),
        "b.scale": torch.randn(()),
        "c.counts": torch.arange(5),
        "d.cube": torch.randn(3, 4, 5, dtype=torch.float64),
        "experts": torch.randn(3, 6, 2),
        "fused": torch.randn(4, 9).half(),
        "mask": torch.tensor([True, False, True]),
        "turned": torch.randn(6, 11),
    }


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 8]), st.sampled_from([16, 200, 2**20]))
def test_any_ranks_write_the_same_bytes(seed: int, num_ranks: int, chunk_bytes: int) -> None:
    tensors = mixed_tensors()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        folder = Path(name)
        export(folder / "one", spread(tensors, 1, random.Random(0)), MIXED, max_file_bytes=500)
        patch.setattr(exporting, "_CHUNK_BYTES", chunk_bytes)
        export(folder / "many", spread(tensors, num_ranks, random.Random(seed)), MIXED, max_file_bytes=500)
        assert contents(folder / "many") == contents(folder / "one")
        assert len(contents(folder / "one")) > 2


def test_the_public_library_reads_the_values(tmp_path: Path) -> None:
    tensors = mixed_tensors()
    export(tmp_path / "out", spread(tensors, 3, random.Random(1)), MIXED)
    assert list(contents(tmp_path / "out")) == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    left, right = tensors["fused"].split([3, 6], 1)
    expected = {name: values for name, values in tensors.items() if name not in MIXED}
    expected |= {"f.a": left, "f.b": right, "t": tensors["turned"].T}
    for index, expert in enumerate(tensors["experts"]):
        expected[f"e.{index}.up"], expected[f"e.{index}.gate"] = expert.chunk(2)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0)


def test_values_are_cast_to_the_dtype_of_the_plan(tmp_path: Path) -> None:
    master = torch.randn(6, 4)
    whole = (Chunk(Rect.whole((6, 4)), 0),)
    plan = plan_export([ExportTensor("w", (), (6, 4), "BF16")])
    begin_export(plan, tmp_path / "out")
    optimizer = StateShard("w", (), "exp_avg", (6, 4), TensorFlatState(torch.zeros(24)), whole, whole)
    other = StateShard("v", (), "param", (6, 4), TensorFlatState(torch.zeros(24)), whole, whole)
    held = StateShard("w", (), "param", (6, 4), TensorFlatState(master.flatten()), whole, whole)
    seen: list[int] = []
    assert (
        write_export(plan, tmp_path / "out", stored_blocks(plan, [held, optimizer, other]), seen.append)
        == 48
        == sum(seen)
    )
    finish_export(tmp_path / "out")
    torch.testing.assert_close(
        load_file(tmp_path / "out" / "model.safetensors")["w"], master.bfloat16(), rtol=0, atol=0
    )


def test_a_plan_fills_files_in_the_order_of_names() -> None:
    tensors = [ExportTensor(name, (), (size,), "F32") for name, size in [("d", 1), ("b", 20), ("c", 100), ("a", 30)]]
    plan = plan_export(tensors, max_file_bytes=200)
    files = [(tensor.name, tensor.file[6:11]) for tensor in plan.tensors]
    assert files == [("a", "00001"), ("b", "00001"), ("c", "00002"), ("d", "00003")]
    index = json.loads(plan.index)
    assert index["metadata"]["total_size"] == 4 * 151
    assert list(index["weight_map"]) == ["a", "b", "c", "d"]
    assert plan.num_file_bytes["model-00002-of-00003.safetensors"] == len(plan.headers[plan.tensors[2].file]) + 400


def test_two_tensors_of_one_name_are_refused() -> None:
    tensors = [ExportTensor("a", (), (2,), "F32"), ExportTensor("b", ("c",), (2,), "F32")]
    for names in ({"a": "x", "b": "x"}, {"a": "c"}):
        with refused("export-names-clash", "a and b"):
            plan_export(tensors, NameMap.of(names))


def test_a_folder_is_not_written_over_and_is_not_there_until_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    plan = plan_export([ExportTensor("w", (), (2,), "F32")])
    folder.mkdir()
    begin_export(plan, folder, {"config.json": b"{}"})
    assert not any(folder.iterdir())
    (temporary_folder(folder) / "leftover").touch()
    begin_export(plan, folder)
    assert [path.name for path in temporary_folder(folder).iterdir()] == ["model.safetensors"]
    (folder / "mine").touch()
    for step in (lambda: begin_export(plan, folder), lambda: finish_export(folder)):
        with refused("export-exists", "out"):
            step()
    (folder / "mine").unlink()
    discard_export(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    begin_export(plan, folder)
    finish_export(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    with refused("export-file-name", "model.safetensors"):
        begin_export(plan, tmp_path / "new", {"model.safetensors": b""})


@pytest.mark.timeout(60)  # nothing ever writes into the pipe
def test_only_regular_files_are_copied_beside_the_weights(tmp_path: Path) -> None:
    plan = plan_export([ExportTensor("w", (), (2,), "F32")])
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with refused("folder-refused", str(file), "not a regular file"):
            begin_export(plan, tmp_path / "out", {"a.txt": file})


def test_a_config_of_other_types_is_refused_in_one_line(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    for config in ({"quantization_config": "a"}, {"architectures": 7}, {"model_type": [1]}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with refused("hf-json-malformed"):
            open_folder(tmp_path, {})


def test_an_index_of_other_types_is_refused_in_one_line(tmp_path: Path) -> None:
    for weight_map in ({"a": 1}, {"a": ["b"]}, [], {}, None, {"a": "../b"}, {"a": ".."}, {"a": "\x1b[31m"}):
        write_index(tmp_path, weight_map)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError) as caught:
            open_folder(tmp_path, {})
        assert str(caught.value).isprintable()
