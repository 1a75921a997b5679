"""Buffers keep their dtype and values in every layout, and parameters that must not be narrowed stay in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import FAMILIES, build_model
from harness.pool import WorkerPool
from harness.states import engine_of, square_loss, take_steps
from harness.training import make_config
from shardwise import Config, initialize, simulate
from shardwise.checkpoint.commit import read_manifest
from shardwise.construction.scan import build_layout

BF16 = {"param": "bf16"}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero": {"stage": stage}} for stage in range(4)},
    "hybrid": {"zero": {"stage": 3}, "mesh": {"dp_replicate": 2, "dp_shard": 1}},
    "offload": {"zero": {"stage": 3}, "tiers": {"params": "host", "grads": "host", "optimizer": "host"}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "batch": {"accumulation": 2}},
    "cp": {"mesh": {"cp": 2}},
}
TABLES: dict[str, Tensor] = {
    "exact": 1 / torch.arange(3.0, 9.0),
    "wide": 1 / torch.arange(3.0, 9.0, dtype=torch.float64),
    "narrow": torch.arange(3.0).bfloat16(),
    "turns": torch.polar(torch.ones(3), torch.arange(3.0)),
    "count": torch.tensor(2**40 + 1),
    "mask": torch.tensor([True, False]),
}
Facts = dict[str, Tensor]


def llama() -> nn.Module:
    torch.manual_seed(0)
    model = build_model("llama")
    for name, table in TABLES.items():
        model.model.register_buffer(name, table.clone(), persistent=name != "mask")
    return model


def facts(model: nn.Module) -> Facts:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def live(rank: int, world_size: int, root: Path, options: dict[str, Any]) -> list[Facts]:
    """The buffers before and after each thing that an engine does."""
    config = make_config(options.get("batch", {}).get("accumulation", 1), {"precision": BF16, **options})
    index = rank if "mesh" not in options or "dp_shard" in options["mesh"] else 0
    batch = FAMILIES["llama"].batch(index, 2, torch.float32)
    batches = [{name: each[:, :4] for name, each in batch.items()}] * (config.batch.accumulation or 1)
    model = llama()
    seen = [facts(model)]
    with initialize(model, config) as engine:
        seen.append(facts(model))
        engine.train_step(batches)
        engine.eval_step(batches)
        seen.append(facts(model))
        engine.save(root)
        engine.load(root)
        seen.append(facts(model))
        engine.export_weights(root / "exported")
        engine.import_weights(root / "exported")
        seen.append(facts(model))
    return seen


def assert_kept(seen: list[Facts]) -> None:
    before, *later = seen
    assert before["model.rotary_emb.inv_freq"].dtype is torch.float32
    for after in later:
        assert after.keys() == before.keys()
        for name, value in before.items():
            assert after[name].dtype == value.dtype, name
            assert torch.equal(after[name], value), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_buffer_keeps_its_dtype_and_its_values(ranks: WorkerPool, tmp_path: Path, layout: str) -> None:
    for seen in ranks(2).run(live, tmp_path, LAYOUTS[layout]):
        assert_kept(seen)


def test_buffers_follow_the_parameters_where_that_is_asked_for() -> None:
    with initialize(llama(), make_config(1, {"precision": {"param": "bf16", "buffers": "param"}})) as engine:
        dtypes = {name.rpartition(".")[2]: each.dtype for name, each in engine.model.named_buffers()}
    assert [dtypes[name] for name in ("exact", "wide", "inv_freq")] == [torch.bfloat16] * 3
    assert [dtypes[name] for name in ("turns", "count", "mask")] == [torch.complex64, torch.int64, torch.bool]


# Positions of 4096 and more in bf16, where rounded frequencies turn by a radian too much.


def far_positions() -> dict[str, Tensor]:
    tokens = torch.randint(0, 32, (1, 512), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": torch.arange(4096, 8192, 8)[None]}


def far_llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = build_model("llama", **sizes, max_position_embeddings=8192, rope_theta=1e4)
    assert isinstance(model, nn.Module)
    return model


def logits_of(rank: int, world_size: int, root: Path, given: str, stage: int) -> Tensor:
    from transformers import LlamaForCausalLM

    dtype = torch.float32 if given == "fp32" else torch.bfloat16
    model = LlamaForCausalLM.from_pretrained(root, dtype=dtype)
    config = make_config(1, {"precision": {"param": "bf16"}, "zero": {"stage": stage}})
    with initialize(model, config) as engine, torch.no_grad():
        return engine.model.eval()(**far_positions()).logits.clone()


@pytest.mark.parametrize("given", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_far_logits_are_hugging_faces_own_bit_for_bit(
    ranks: WorkerPool, tmp_path: Path, given: str, stage: int
) -> None:
    from transformers import LlamaForCausalLM

    far_llama().save_pretrained(tmp_path)
    with torch.no_grad():
        plain = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        expected = plain(**far_positions()).logits
    for found in ranks(2).run(logits_of, tmp_path, given, stage):
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, expected)


# Statistics.


class Counting(nn.Module):
    """A batch norm, a float counter and a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.01)
        self.line = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.average.lerp_(x.detach().square().mean().to(self.average.dtype), 0.001)
        return self.line(self.norm(x))  # [b, 2]


@pytest.mark.parametrize("param", ["bf16", "fp16"])
def test_statistics_are_exact_whatever_the_parameters(param: str) -> None:
    torch.manual_seed(0)
    exact, inputs = Counting(), [torch.randn(8, 3).bfloat16() for _ in range(300)]
    with engine_of(Counting, precision={"param": param}) as engine, torch.no_grad():
        for x in inputs:
            exact(x.float())
            engine.model(x.to(torch.bfloat16 if param == "bf16" else torch.float16))
        assert engine.model.count == 300
        assert float(engine.model.average) == pytest.approx(float(exact.average), rel=0.01)
        for name in ("running_mean", "running_var"):
            found, expected = getattr(engine.model.norm, name), getattr(exact.norm, name)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert engine.model.norm.weight.dtype is torch.float32
        assert engine.model.line.weight.dtype is (torch.bfloat16 if param == "bf16" else torch.float16)


def test_fp64_widens_buffers_as_it_does_parameters() -> None:
    with engine_of(Counting, precision={"param": "fp64"}) as engine:
        engine.train_step([torch.randn(4, 3)])
        assert {each.dtype for each in engine.model.buffers()} == {torch.float64, torch.int64}


class Promoting(nn.Module):
    """A table in fp32 that widens what it meets, so that a layer in bf16 cannot take it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x + self.table)  # [b, 2]


def test_an_error_of_dtypes_names_the_buffer_and_a_fix_that_works() -> None:
    with engine_of(Promoting, precision=BF16) as engine, pytest.raises(RuntimeError) as caught:
        take_steps(engine, 1)
    (note,) = caught.value.__notes__
    assert "table in torch.float32" in note
    assert "precision.buffers=param" in note
    with engine_of(Promoting, precision={"param": "bf16", "buffers": "param"}) as engine:
        take_steps(engine, 1)


def test_what_an_older_checkpoint_has_rounded_does_not_replace_the_exact_table(tmp_path: Path) -> None:
    with initialize(llama(), make_config(1, {"precision": {"param": "bf16", "buffers": "param"}})) as engine:
        engine.model.model.narrow.fill_(7.0)
        engine.save(tmp_path)
    stored = {tensor.name: tensor.states["param"].dtype for tensor in read_manifest(tmp_path / "step-00000000").tensors}
    assert (stored["model.exact"], stored["model.wide"]) == ("BF16", "BF16")
    model = llama()
    with initialize(model, make_config(1, {"precision": BF16})) as engine:
        engine.model.model.wide.fill_(5.0)
        engine.load(tmp_path)
        assert torch.equal(model.model.exact, TABLES["exact"])
        assert torch.equal(model.model.wide, TABLES["wide"].bfloat16().double())  # another value than that stored
        assert torch.equal(model.model.narrow, torch.full((3,), 7.0).bfloat16())


# Parameters that stay in fp32.


def wide_t5(strict: bool) -> nn.Module:
    torch.manual_seed(0)
    model = build_model("t5")
    if strict:
        model._keep_in_fp32_modules_strict = {
            "encoder.block.*.SelfAttention.relative_attention_bias",
            "DenseReluDense.wo",
        }
    return model


def t5_states(rank: int, world_size: int, param: str, options: dict[str, Any], root: Path) -> Any:
    model = wide_t5(strict=param == "bf16")
    batch = FAMILIES["t5"].batch(rank, 2, torch.float32)
    with initialize(model, make_config(1, {"precision": {"param": param, "loss_scale": 1.0}, **options})) as engine:
        dtypes = {name: each.dtype for name, each in model.named_parameters()}
        first = engine.eval_step([batch]).loss
        losses = [engine.train_step([batch]).loss for _ in range(3)]
        engine.save(root)
        before = {name: engine.read(name, "master") for name in dtypes if "wo" in name}
        losses.append(engine.train_step([batch]).loss)
        engine.load(root)
        after = {name: engine.read(name, "master") for name in before}
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert engine.train_step([batch]).loss == losses[-1]
        at_rest = engine.layout.bytes_at_rest(engine.layout.mesh.index_along(("dp_shard", "cp"), rank))
        return dtypes, first, losses, at_rest


@pytest.mark.quick(2)
@pytest.mark.parametrize("param", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["stage 0", "stage 2", "stage 3", "offload"])
def test_what_a_hugging_face_model_keeps_in_fp32_stays_in_fp32(
    ranks: WorkerPool, tmp_path: Path, param: str, layout: str
) -> None:
    narrow = torch.float16 if param == "fp16" else torch.bfloat16
    plain = wide_t5(strict=param == "bf16")
    plan = plain._get_dtype_plan(narrow)
    assert plan
    for name, parameter in plain.named_parameters():
        is_wide = "wo" in name or (param == "bf16" and "relative" in name and name.startswith("encoder"))
        parameter.data = parameter.data.to(torch.float32 if is_wide else narrow)
    with torch.no_grad():
        batches = [FAMILIES["t5"].batch(rank, 2, torch.float32) for rank in range(2)]
        counts = [int(batch["labels"].ne(-100).sum()) for batch in batches]
        total = sum(plain(**batch).loss.item() * count for batch, count in zip(batches, counts, strict=True))
    results = ranks(2).run(t5_states, param, LAYOUTS[layout], tmp_path)
    for dtypes, first, trained, _ in results:
        assert dtypes == {name: each.dtype for name, each in plain.named_parameters()}
        assert first == pytest.approx(total / sum(counts), rel=2e-3)
        assert trained[-1] < trained[0]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(48, 2))


@pytest.mark.parametrize("layout", ["stage 0", "stage 1", "stage 2", "stage 3", "hybrid", "offload"])
def test_the_tracker_knows_what_stays_in_fp32(layout: str) -> None:
    config = Config.from_dict({"precision": BF16, **LAYOUTS[layout]})
    found = simulate(convolutions, config, lambda: torch.randn(2, 3, 4, 4), rank=1, world_size=2, loss_fn=square_loss)
    assert {group.name for group in found.layout.groups if group.is_wide}
    shard = 0 if layout == "hybrid" else 1
    assert found.states_bytes == found.layout.bytes_at_rest(shard, "device")
    assert found.moved_bytes == found.layout.bytes_across(1)
    narrow = build_layout(convolutions(), config.override(["precision.buffers=param"]).resolve(2))
    assert sum(found.layout.bytes_at_rest().values()) != sum(narrow.bytes_at_rest().values())
    sent = sum(call.wire_bytes for call in found.calls if not call.op.endswith("scalars"))
    assert sent == sum(found.layout.bytes_on_wire(1).values())


# Loads into another layout.


class Normed(nn.Module):
    """A layer that tensor parallelism splits, after a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # [b, 4]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Normed() for _ in range(2)))


PLAN = {"*.up": "column", "*.down": "row"}
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "dp 2": (2, {}),
    "tp 2": (2, {"tp": 2}),
    "pp 2": (2, {"pp": 2}),
    "dp 2 x tp 2": (4, {"tp": 2}),
    "dp 2 x pp 2": (4, {"pp": 2}),
    "dp 4": (4, {}),
}


def statistics(model: nn.Module) -> Facts:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def normed_engine(mesh: dict[str, int]) -> Any:
    arguments = (lambda _: {"plan": PLAN}) if "tp" in mesh else None
    return engine_of(Net, mesh=mesh, batch={"accumulation": 2}, arguments=arguments)


def save_statistics(rank: int, world_size: int, root: Path, mesh: dict[str, int]) -> Facts:
    with normed_engine(mesh) as engine:
        index = engine.layout.mesh.data_index(rank)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + index)
            engine.train_step([torch.randn(4, 4, generator=generator) + index for _ in range(2)])
        engine.save(root)
        return statistics(engine.model)


def load_statistics(rank: int, world_size: int, root: Path, mesh: dict[str, int]) -> tuple[int, Facts, float]:
    with normed_engine(mesh) as engine:
        engine.load(root)
        loss = engine.eval_step([torch.arange(16.0).view(4, 4)] * 2).loss
        return engine.layout.mesh.data_index(rank), statistics(engine.model), loss


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("dp 2", "tp 2"),
        ("dp 2", "dp 2"),
        ("dp 2", "dp 2 x tp 2"),
        ("dp 2", "dp 4"),
        ("dp 2 x tp 2", "dp 2"),
        ("dp 2 x pp 2", "dp 2 x tp 2"),
        ("dp 4", "pp 2"),
        pytest.param("dp 2 x pp 2", "dp 2 x pp 2", marks=pytest.mark.full),
        pytest.param("dp 2 x tp 2", "dp 2 x pp 2", marks=pytest.mark.full),
    ],
)
def test_statistics_are_those_of_the_data_rank_after_any_load(
    ranks: WorkerPool, tmp_path: Path, there: str, here: str
) -> None:
    num_there, mesh_there = MESHES[there]
    num_here, mesh_here = MESHES[here]
    saved = ranks(num_there).run(save_statistics, tmp_path, mesh_there)
    of_data = saved[:: mesh_there.get("tp", 1)]
    if "pp" in mesh_there:  # each stage has those of its own block
        of_data = [
            {**first, **{name: second[name] for name in second if name.startswith("1.")}}
            for first, second in zip(saved[:2], saved[2:], strict=True)
        ]
    assert not torch.equal(of_data[0]["1.norm.running_mean"], of_data[1]["1.norm.running_mean"])
    loaded = ranks(num_here).run(load_statistics, tmp_path, mesh_here)
    for index, found, _ in loaded:
        expected = of_data[index if index < len(of_data) else 0]
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, index)
    assert len({loss for _, _, loss in loaded}) == 1


def load_under_cp(rank: int, world_size: int, root: Path) -> list[float]:
    """A buffer after loads of what data ranks, and of what ranks of one sample, had each for itself."""
    found = []
    for name, there, here in (("data", {}, {"cp": 2}), ("tokens", {"cp": 2}, {"cp": 2}), ("tokens", None, {})):
        if there is not None:
            with initialize(llama(), make_config(1, {"mesh": there})) as engine:
                engine.model.model.exact.fill_(rank + 1.0)
                engine.save(root / name)
        with initialize(llama(), make_config(1, {"mesh": here})) as engine:
            engine.load(root / name)
            found.append(float(engine.model.model.exact[0]))
    return found


def test_ranks_of_one_sample_have_the_same_buffers_after_any_load(ranks: WorkerPool, tmp_path: Path) -> None:
    assert ranks(2).run(load_under_cp, tmp_path) == [[1.0, 1.0, 1.0]] * 2


# A config that names no dtype.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("is_simulated", [False, True])
def test_a_model_trains_in_its_own_dtype_where_the_config_names_none(dtype: torch.dtype, is_simulated: bool) -> None:
    model, name = Net().to(dtype), {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if is_simulated:
        options = {"world_size": 1, "rank": 0, "loss_fn": square_loss}
        found = simulate(model, Config(), lambda: torch.randn(4, 4), **options)
        assert found.layout.precision.param == name.get(dtype, "fp64")
        return
    with engine_of(model) as engine:
        engine.train_step([torch.randn(4, 4)])
        assert {each.dtype for each in model.parameters()} == {dtype}
        assert engine.config.precision.param == engine.layout.precision.param == name.get(dtype, "fp64")
        assert engine.layout.precision.master == ("fp64" if dtype is torch.float64 else "fp32")


def test_what_stays_in_fp32_does_not_hide_a_models_own_dtype(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = wide_t5(strict=True).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "wo" in name:
            parameter.data = parameter.data.float()
    with initialize(model, {"run": {"device": "cpu"}}) as engine:
        assert engine.config.precision.param == "bf16"
        assert {each.dtype for name, each in model.named_parameters() if "wo" in name} == {torch.float32}
    assert "float32" not in caplog.text


def test_a_model_in_two_dtypes_trains_in_fp32_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model[0].bfloat16()
    with engine_of(model) as engine:
        assert engine.config.precision.param == "fp32"
    assert "bfloat16 and float32" in caplog.text
    assert "precision.param" in caplog.text
