"""Hugging Face folders into and out of an engine that is split and sharded: the same bytes, values and logits.

Oracles: folders that transformers saves, models that it loads, an engine of one process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from harness.combinations import cover
from harness.huggingface import VOCAB_SIZE, build_model
from harness.pool import WorkerPool
from harness.random_models import LayoutSpec
from harness.refusals import refused
from shardwise import Engine, initialize
from shardwise.checkpoint.load import LoadReport
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.cli import main as cli
from shardwise.construction.values import ParamInitializer
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.runtime.float64 import float64_throughout
from shardwise.zero.state_access import GRAD

pytest.importorskip("transformers")

Options = Mapping[str, Any]
Values = dict[str, Tensor]
LONE = LayoutSpec(1, 1, 1, 0)
TOKENS = torch.arange(20).view(2, 10)  # [B, S]
DECODER = DecoderConfig(
    vocab_size=VOCAB_SIZE,
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    max_seq_len=32,
)
# Of query heads there are 4, of those of keys and values 2; 41 words are no multiple of 4.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "decoder": ("decoder", {}),
    "decoder tied": ("decoder", {"tie_embeddings": True}),
    "mixtral": ("mixtral", {"output_router_logits": False}),
}
PRECISIONS = {"bf16": "BF16", "fp32": "F32", "fp64": "F64"}


def make_model(name: str, seed: int = 0) -> nn.Module:
    """Values far from what is drawn at first: norms of 1, biases of 0, logits near 0."""
    family, options = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = Decoder(DecoderConfig(**{**DECODER.__dict__, **options})) if family == "decoder" else None
        model = own or build_model(family, **options)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.1, 0.3)
    return model.double()


def make_engine(model: nn.Module, layout: LayoutSpec, precision: str, tiers: Options | None = None) -> Engine:
    config = {
        **layout.sections(),
        "tiers": tiers or {},
        "precision": {"param": precision},
        "optimizer": {"lr": 0.01},
        "run": {"device": "cpu", "timeout_s": 30.0},
    }
    return initialize(model, config, loss_fn=lm_loss_of if isinstance(model, Decoder) else None)


def lm_loss_of(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def batch_of(engine: Engine) -> Any:
    """Depends on the step and the data rank alone."""
    rank = engine.layout.mesh.data_index(engine.comm.rank)
    tokens = torch.randint(VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(10 * engine.num_steps + rank))
    if isinstance(engine.model, Decoder):
        return tokens[:, :-1], tokens[:, 1:].contiguous()
    return {"input_ids": tokens, "labels": tokens}


def logits_of(engine: Engine) -> Tensor:
    """Whole, on every rank."""
    engine.model.eval()
    is_wide = engine.config.precision.param == "fp64"
    with torch.no_grad(), float64_throughout() if is_wide else nullcontext():
        output = engine.model(TOKENS)
        return (output if isinstance(output, Tensor) else output.logits) + 0  # [B, S, V]


def parameters_of(engine: Engine, state: str = "param") -> Values:
    return {name: engine.read(name, state).clone() for name, _ in engine.model.named_parameters()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Export


def export(
    rank: int, world_size: int, name: str, layout: LayoutSpec, precision: str, folder: Path, options: Options
) -> Tensor:
    with make_engine(make_model(name), layout, precision) as engine:
        assert engine.export_weights(folder, **options) == folder
        return logits_of(engine)


SPLIT = LayoutSpec(1, 1, 4, 3)
EXPORT_FACTORS = {
    "model": [each for each in MODELS if each != "mixtral"],
    "layout": [SPLIT, LayoutSpec(2, 1, 2, 2), LayoutSpec(3, 1, 1, 3)],
    "dtypes": [("bf16", None), ("bf16", "fp32"), ("fp64", "bf16")],
}


def is_quick_to_export(run: Options) -> bool:
    """Each model in the layout that splits and shards most; the other layouts and dtypes with two models."""
    return run["model"] in ("gpt2", "decoder tied") or (run["layout"], run["dtypes"]) == (SPLIT, ("bf16", "fp32"))


@pytest.mark.quick(2)
@pytest.mark.parametrize("run", cover(EXPORT_FACTORS, quick=is_quick_to_export))
def test_every_layout_exports_the_folder_of_one_process(ranks: WorkerPool, run: Options, tmp_path: Path) -> None:
    name, (precision, dtype), layout = run["model"], run["dtypes"], run["layout"]
    options = {"dtype": dtype}
    ranks(1).run(export, name, LONE, precision, tmp_path / "one", options)
    ranks(layout.num_ranks).run(export, name, layout, precision, tmp_path / "many", options)
    one = contents(tmp_path / "one")
    assert contents(tmp_path / "many") == one
    expected = {"model.safetensors", "config.json"} | (set() if "decoder" in name else {"generation_config.json"})
    assert one.keys() == expected
    assert {path.name for path in tmp_path.iterdir()} == {"one", "many"}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", EXPORT_FACTORS["model"])
def test_transformers_loads_what_a_split_and_sharded_engine_exports(
    ranks: WorkerPool, name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    (logits, *_) = ranks(4).run(export, name, SPLIT, "fp64", tmp_path / "hf", {})
    with float64_throughout():
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
        assert not any(info.values())
        assert loaded.dtype == torch.float64
        assert type(loaded).__name__ == json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"][0]
        theirs = loaded.eval()(TOKENS).logits  # [B, S, V]
    assert logits.shape == theirs.shape
    assert logits.abs().max() > 1
    # Our decoder and transformers' turn positions into angles in fp64 and in fp32.
    torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-5 if "decoder" in name else 1e-9)


def test_the_files_given_stand_beside_the_weights_and_large_weights_are_in_several_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("mine")
    files = [tmp_path / "tokenizer.json", str(tmp_path / "generation_config.json")]
    with make_engine(make_model("llama"), LONE, "fp32") as engine:
        engine.export_weights(str(tmp_path / "hf"), files=files)
    found = contents(tmp_path / "hf")
    assert found["tokenizer.json"] == b"{}"
    assert found["generation_config.json"] == b"mine"
    assert json.loads(found["config.json"])["torch_dtype"] == "float32"


def test_the_exported_folder_has_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    with make_engine(make_model("llama"), LONE, "fp32") as engine:
        engine.export_weights(tmp_path / "model", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("a b c")["input_ids"] == [0, 1, 2]


def train_and_export(
    rank: int, world_size: int, layout: LayoutSpec, folder: Path | None
) -> tuple[list[float], dict[Any, Tensor]]:
    losses = []
    with make_engine(make_model("llama"), layout, "bf16") as engine:
        for step in range(4):
            losses.append(engine.train_step([batch_of(engine)]).loss)
            if folder is not None:
                engine.export_weights(folder / str(step))
        names = [name for name, _ in engine.model.named_parameters()]
        return losses, {
            (name, state): engine.read(name, state).clone()
            for name in names
            for state in engine.states_of(name)
            if state != GRAD
        }


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", [LayoutSpec(2, 1, 1, 1), LayoutSpec(2, 1, 2, 3)], ids=str)
def test_training_goes_on_bitwise_as_if_nothing_had_been_exported(
    ranks: WorkerPool, layout: LayoutSpec, tmp_path: Path
) -> None:
    losses, states = ranks(layout.num_ranks).run(train_and_export, layout, None)[0]
    exporting_losses, exporting_states = ranks(layout.num_ranks).run(train_and_export, layout, tmp_path)[0]
    assert exporting_losses == losses
    assert exporting_states.keys() == states.keys()
    for key, value in states.items():
        assert torch.equal(exporting_states[key], value), key
    assert len({contents(tmp_path / str(step))["model.safetensors"] for step in range(4)}) == 4


def fail_to_export(rank: int, world_size: int, folder: Path) -> list[str]:
    """What ranks raise where one of them cannot write, asks for something else, or a folder is taken."""
    said = []
    with make_engine(make_model("llama"), LayoutSpec(2, 1, 1, 3), "bf16") as engine:
        for options in (
            {"dtype": "fp32" if rank else "bf16"},
            {"folder": folder / "elsewhere" if rank else folder / "hf", "timeout_s": 0.5},
            {"folder": folder},
            {"files": [folder / "nowhere" / "tokenizer.json"]},
            {"names": {"**.up_proj.weight": "**.down_proj.weight"}},
        ):
            given = {"folder": folder / "hf", **options}
            with pytest.MonkeyPatch.context() as patch:
                if "timeout_s" in given:
                    patch.setattr("shardwise.checkpoint.commit._FOLDER_S", given.pop("timeout_s"))
                try:
                    engine.export_weights(given.pop("folder"), **given)
                except CheckpointError as error:
                    said.append(f"{error.code}: {error}")
        engine.export_weights(folder / "hf")
    return said


def test_what_fails_fails_on_all_ranks_and_leaves_nothing(ranks: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    first, second = ranks(2).run(fail_to_export, tmp_path)
    # The subject names the folder as each rank was given it; what failed has the same words.
    assert [re.sub(": .* failed on ", " ", text) for text in first] == [
        re.sub(": .* failed on ", " ", text) for text in second
    ]
    parts = [
        ("exports-differ", "rank 1 would"),
        ("folder-not-shared", "rank 1: "),
        ("export-exists", "rank 0: "),
        ("folder-refused", "tokenizer.json"),
        ("export-names-clash", "up_proj"),
    ]
    assert len(first) == len(parts)
    for text, (code, part) in zip(first, parts, strict=True):
        assert text.startswith(f"{code}: ")
        assert part in text
        assert "\n" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "hf"}


# Import


def pass_through_tiers(rank: int, world_size: int, tiers: Options, folder: Path, out: Path) -> float:
    """Import, train a step, which the export waits for, and go on."""
    with make_engine(make_model("llama", seed=1), LayoutSpec(1, 1, 2, 3), "bf16", tiers) as engine:
        engine.import_weights(folder)
        engine.export_weights(out / "imported")
        engine.train_step([batch_of(engine)])
        engine.export_weights(out / "trained")
        return engine.train_step([batch_of(engine)]).loss


@pytest.mark.parametrize("where", [("host", "host", "host"), ("nvme", "nvme", "nvme"), ("host", "host", "nvme")])
def test_weights_come_and_go_through_every_tier(ranks: WorkerPool, tmp_path: Path, where: tuple[str, ...]) -> None:
    tiers = dict(zip(("params", "grads", "optimizer"), where, strict=True))
    tiers |= {"nvme_path": str(tmp_path / "swap")} if "nvme" in where else {}
    ranks(1).run(export, "llama", LONE, "bf16", tmp_path / "hf", {})
    plain = ranks(2).run(pass_through_tiers, {}, tmp_path / "hf", tmp_path / "plain")
    found = ranks(2).run(pass_through_tiers, tiers, tmp_path / "hf", tmp_path / "found")
    assert found == plain
    assert contents(tmp_path / "found" / "imported") == contents(tmp_path / "hf")
    for name in ("imported", "trained"):
        assert contents(tmp_path / "found" / name) == contents(tmp_path / "plain" / name)
    assert contents(tmp_path / "found" / "trained") != contents(tmp_path / "hf")


def read_imported(
    rank: int, world_size: int, name: str, layout: LayoutSpec, precision: str, folder: Path
) -> tuple[LoadReport, dict[str, Values], Tensor]:
    """Import after a step; the optimizer and the schedule stay. Returns values of parameters and of masters."""
    with make_engine(make_model(name, seed=1), layout, precision) as engine:
        engine.train_step([batch_of(engine)])
        before = parameters_of(engine, "exp_avg")
        report = engine.import_weights(folder)
        after = parameters_of(engine, "exp_avg")
        if engine.num_steps != 1 or any(not torch.equal(after[each], before[each]) for each in before):
            raise RuntimeError("an import has changed more than weights")
        states = ("param", "master") if precision == "bf16" else ("param",)
        return report, {state: parameters_of(engine, state) for state in states}, logits_of(engine)


IMPORT_FACTORS = {
    "model": ["llama", "qwen2 tied", "gpt2", "gpt2 untied", "decoder"],
    "layout": [
        LayoutSpec(1, 1, 4, 3),
        LayoutSpec(2, 1, 2, 1),
        LayoutSpec(1, 2, 2, 2),
        LayoutSpec(3, 1, 1, 3),
        LayoutSpec(2, 1, 1, 0),
    ],
    "precision": ["bf16", "fp32"],
    "stored": ["bf16", "fp32"],
    "max_shard_size": ["5GB", "8KB"],
}


def is_quick_to_import(run: Options) -> bool:
    """Each model where layers are split over four ranks; the other layouts with two models, one of them tied."""
    return run["model"] in ("qwen2 tied", "gpt2 untied") or run["layout"] == LayoutSpec(1, 1, 4, 3)


@pytest.mark.quick(2)
@pytest.mark.parametrize("run", cover(IMPORT_FACTORS, quick=is_quick_to_import))
def test_every_layout_imports_just_the_values_of_the_folder(ranks: WorkerPool, run: Options, tmp_path: Path) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[run["stored"]]
    model = make_model(run["model"]).to(dtype)
    save_pretrained(model, tmp_path, run["max_shard_size"])
    layout = run["layout"]
    results = ranks(layout.num_ranks).run(read_imported, run["model"], layout, run["precision"], tmp_path)
    dtypes = {"param": torch.bfloat16 if run["precision"] == "bf16" else torch.float32, "master": torch.float32}
    for report, states, logits in results:
        assert (report.missing, report.skipped, report.step) == ((), (), 1)
        assert torch.equal(logits, results[0][2])
        for state, values in states.items():
            assert values.keys() == dict(model.named_parameters()).keys()
            for key, parameter in model.named_parameters():
                assert values[key].dtype == dtypes[state]
                assert torch.equal(values[key], parameter.to(dtypes[state])), key
    if run["precision"] == run["stored"] == "fp32":
        with torch.no_grad():
            output = model.eval()(TOKENS)
        expected = output if isinstance(output, Tensor) else output.logits  # [B, S, V]
        torch.testing.assert_close(results[0][2], expected, rtol=0, atol=1e-4)


def save_pretrained(model: nn.Module, folder: Path, max_shard_size: str = "5GB") -> None:
    """As transformers saves it; our decoder goes through its Llama."""
    if not isinstance(model, Decoder):
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return
    from transformers import AutoModelForCausalLM

    dtype = next(model.parameters()).dtype
    config = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    with make_engine(model, LONE, config) as engine:
        engine.export_weights(folder / "own")
    AutoModelForCausalLM.from_pretrained(folder / "own").save_pretrained(folder, max_shard_size=max_shard_size)


def build_from(rank: int, world_size: int, layout: LayoutSpec, folder: Path, is_deferred: bool) -> tuple[Values, str]:
    """An engine that has its values from a folder, and draws none; what one says that cannot have them there."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("values were read that are not needed")

    values, said = {}, ""
    for weights in (folder, folder / "nowhere"):
        with shardwise.init(seed=3) if is_deferred else nullcontext():
            model = build_model("llama", tie_word_embeddings=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ParamInitializer, "read", refuse)
            config = {**layout.sections(), "precision": {"param": "bf16"}, "run": {"device": "cpu"}}
            try:
                with initialize(model, config, weights=weights) as engine:
                    values = parameters_of(engine, "master")
                    engine.train_step([batch_of(engine)])
            except CheckpointError as error:
                said = f"{error.code}: {error}"
    return values, said


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("layout", [LayoutSpec(2, 1, 1, 3), LayoutSpec(2, 1, 2, 1)], ids=str)
def test_an_engine_starts_from_a_folder_without_drawing_values(
    ranks: WorkerPool, layout: LayoutSpec, is_deferred: bool, tmp_path: Path
) -> None:
    model = make_model("llama tied").float()
    model.save_pretrained(tmp_path)
    for values, said in ranks(layout.num_ranks).run(build_from, layout, tmp_path, is_deferred):
        assert values.keys() == dict(model.named_parameters()).keys()
        for key, parameter in model.named_parameters():
            assert torch.equal(values[key], parameter), key
        assert said.startswith("not-a-folder: ")
        assert "nowhere" in said


ADAPTERS = {"**.base.weight": "**.weight"}


def adapt(rank: int, world_size: int, layout: LayoutSpec, seed: int, base: Path, root: Path, is_saver: bool) -> Any:
    torch.manual_seed(seed)
    model = build_model("llama", has_adapters=True)
    with make_engine(model, layout, "bf16") as engine:
        with refused("model-misfit", "missing ", "q_proj."):
            engine.import_weights(base, names=ADAPTERS)
        report = engine.import_weights(base, names=ADAPTERS, strict=False)
        if is_saver:
            engine.train_step([batch_of(engine)])
            engine.save(root, contents="trainable")
        else:
            engine.load(root)
        return report, parameters_of(engine), logits_of(engine)


def test_adapters_are_loaded_beside_an_imported_base(ranks: WorkerPool, tmp_path: Path) -> None:
    base = build_model("llama").bfloat16()
    base.save_pretrained(tmp_path / "base")
    root = tmp_path / "adapters"
    saved = ranks(2).run(adapt, LayoutSpec(2, 1, 1, 3), 1, tmp_path / "base", root, True)[0]
    loaded = ranks(3).run(adapt, LayoutSpec(3, 1, 1, 2), 2, tmp_path / "base", root, False)[0]
    adapters = {name for name in saved[1] if name.endswith((".up", ".down"))}
    assert set(saved[0].missing) == set(loaded[0].missing) == adapters
    assert saved[1].keys() == loaded[1].keys()
    for name, value in saved[1].items():
        assert torch.equal(loaded[1][name], value), name
    for name, value in base.named_parameters():
        own = name.replace(".q_proj.", ".q_proj.base.").replace(".v_proj.", ".v_proj.base.")
        assert torch.equal(loaded[1][own].bfloat16(), value), name
    torch.testing.assert_close(loaded[2], saved[2], rtol=0, atol=0.05)


def fail_to_import(rank: int, world_size: int, folders: list[Path], whole: Path) -> list[str]:
    said = []
    with make_engine(make_model("llama"), LayoutSpec(2, 1, 1, 3), "bf16") as engine:
        before = parameters_of(engine)
        for folder in folders:
            try:
                engine.import_weights(folder if rank or folder.name != "nowhere" else whole)
            except CheckpointError as error:
                said.append(f"{type(error).__name__}: {error}")
        after = parameters_of(engine)
        assert all(torch.equal(after[name], before[name]) for name in before)
        report = engine.import_weights(folders[1], strict=False)
        said.append(f"{len(report.missing)} missing, {report.skipped}")
        engine.import_weights(whole)
    return said


def test_a_folder_that_does_not_fit_is_refused_on_all_ranks(ranks: WorkerPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model("llama").bfloat16()
    folders = [tmp_path / name for name in ("nowhere", "lacks", "other", "pickle", "torn")]
    for folder in (tmp_path / "whole", folders[1], folders[4]):
        model.save_pretrained(folder)
    make_model("gpt2").save_pretrained(folders[2])
    path = folders[1] / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file({**tensors, "model.more": torch.ones(1)}, path)
    folders[3].mkdir()
    (folders[3] / "pytorch_model.bin").touch()
    torn = folders[4] / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-8])
    first, second = ranks(2).run(fail_to_import, folders, tmp_path / "whole")
    assert first == second
    parts = [
        "CheckpointError: .*nowhere is no folder; give one with model.safetensors",
        "CheckpointError: .*lacks does not fit the model: missing model.norm.weight, "
        "model.layers.1.mlp.up_proj.weight.*; unexpected model.more; load with strict=False",
        "CheckpointError: .*other does not fit the model: missing ",
        "CheckpointError: .*pickle has its weights as a pickle alone",
        "DamagedError: .*torn.model.safetensors has ",
        r"2 missing, \('unexpected model.more',\)",
    ]
    assert len(first) == len(parts)
    for text, part in zip(first, parts, strict=True):
        assert re.match(part, text), text


# Without an engine


def train_and_save(rank: int, world_size: int, name: str, layout: LayoutSpec, root: Path) -> tuple[Values, Tensor]:
    with make_engine(make_model(name), layout, "bf16") as engine:
        engine.train_step([batch_of(engine)])
        engine.save(root)
        engine.export_weights(root / "by the engine")
        return parameters_of(engine), logits_of(engine)


def import_values(
    rank: int, world_size: int, name: str, layout: LayoutSpec, folder: Path, again: Path
) -> tuple[dict[str, Values], Tensor]:
    with make_engine(make_model(name, seed=1), layout, "bf16") as engine:
        engine.import_weights(folder)
        engine.export_weights(again)
        return {state: parameters_of(engine, state) for state in ("param", "master")}, logits_of(engine)


@pytest.mark.parametrize("name", ["decoder", "decoder tied", "qwen2 tied", "mixtral"])
def test_a_checkpoint_goes_out_as_a_folder_and_comes_back(ranks: WorkerPool, name: str, tmp_path: Path) -> None:
    """Trained, saved, exported by the command, loaded by transformers, imported: the same."""
    from transformers import AutoModelForCausalLM

    root, folder, again = (tmp_path / each for each in ("run", "hf", "again"))
    layout = LayoutSpec(2, 1, 1 if name == "mixtral" else 2, 3)
    values, logits = ranks(layout.num_ranks).run(train_and_save, name, layout, root)[0]
    assert cli.main(["checkpoint", "export", str(root), str(folder)]) == 0
    assert contents(folder) == contents(root / "by the engine")

    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(TOKENS).logits, logits, rtol=0, atol=0.1)

    states, logits_back = ranks(1).run(import_values, name, LONE, folder, again)[0]
    for key, value in values.items():
        assert torch.equal(states["param"][key], value), key
        assert torch.equal(states["master"][key], value.float()), key
    torch.testing.assert_close(logits_back, logits, rtol=0, atol=0.1)

    # What was imported goes out again as it came; and in another dtype.
    assert contents(again)["model.safetensors"] == contents(folder)["model.safetensors"]
    assert cli.main(["checkpoint", "export", str(root), str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.dtype == torch.float32
    for key, parameter in loaded.named_parameters():
        assert torch.equal(wide.get_parameter(key).bfloat16(), parameter), key


def test_what_is_frozen_after_a_start_from_a_folder_keeps_its_values(tmp_path: Path) -> None:
    model = make_model("llama tied").float()
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    with initialize(
        build_model("llama", tie_word_embeddings=True), {"run": {"device": "cpu"}}, weights=tmp_path
    ) as engine:
        engine.model.get_parameter(name).requires_grad_(False)
        engine.train_step([batch_of(engine)])
        assert torch.equal(engine.read(name), model.get_parameter(name))
