"""verl's engine over ours: registered by verl's own registry, it trains and infers as plain torch does, in any layout.

verl is not among the packages of the tests; modules of the same shape stand for it.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from harness.huggingface import VOCAB_SIZE, build_model
from harness.pool import WorkerPool
from harness.reference import max_error
from harness.verl_stub import Batch, EngineRegistry, instead_of_verl, jagged

pytest.importorskip("transformers")
LENGTHS: Final = (5, 9, 7, 6)
NUM_STEPS: Final = 3
OPTIMIZER: Final = SimpleNamespace(
    lr=1e-2,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    clip_grad=1.0,
    total_training_steps=10,
    lr_warmup_steps=2,
    lr_warmup_steps_ratio=0.0,
)
LAYOUTS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "alone": (1, {}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "dp, cp": (4, {"mesh": {"cp": 2}}),
    "dp, pp": (4, {"mesh": {"pp": 2}}),
    "pp, cp": (4, {"mesh": {"pp": 2, "cp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}}),
    "pp, zero-2, zb-v": (2, {"mesh": {"pp": 2}, "zero": {"stage": 2}, "pipeline": {"schedule": "zb-v"}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "zero-2, host": (2, {"zero": {"stage": 2}, "tiers": {"optimizer": "host"}}),
    "zero-3": (2, {}),
}


def sequences(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def mask_of(ids: Tensor) -> Tensor:
    return torch.ones(len(ids)).index_fill(0, torch.arange(2), 0.0)


def sft_loss(model_output: Any, data: Batch, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """As verl's: a place counts where the next token does; over all tokens of the batch, times the data ranks.

    The squares are functions of whole sequences.
    """
    mask = data["loss_mask"].values().roll(-1)
    counted = model_output["log_probs"].values() * mask
    lengths = data["loss_mask"].offsets().diff().tolist()
    total = counted.sum() - sum(0.1 * sequence.sum().square() for sequence in counted.split(lengths))
    return -total / data["batch_num_tokens"] * data["dp_size"], {}


def make_engine(folder: Path, model: Any, layout: dict[str, Any], model_type: str = "language_model") -> Any:
    with instead_of_verl() as verl:
        settings = {"enable_gradient_checkpointing": False, "lora_rank": 0, "trust_remote_code": False}
        model_config = SimpleNamespace(
            local_path=str(folder), hf_config=copy.deepcopy(model.config), model_type=model_type, **settings
        )
        sections = {"run": {"device": "cpu"}, "precision": {"param": "fp64"}, **layout}
        config = verl.ShardwiseEngineConfig(dtype="float32", config=sections)
        actor = verl.ShardwiseActorConfig(shardwise=config)
        assert actor.engine.strategy == "shardwise"
        kind = EngineRegistry.engines[model_type, actor.strategy, "cpu"]
        assert EngineRegistry.engines[model_type, "shardwise", "cuda"] is kind
        return kind(model_config, config, OPTIMIZER, {"save_contents": ["model", "hf_model"]})


def train(rank: int, world_size: int, folder: Path, layout: dict[str, Any], saved: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = make_engine(folder, build_model("llama"), layout)
    first, num_data_ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    engine.initialize()
    found: dict[str, Any] = {"first": first, "seen": [], "norms": [], "rates": []}
    for step in range(NUM_STEPS):
        own = sequences(step)[first::num_data_ranks]
        batch = {"input_ids": jagged(own), "loss_mask": jagged(list(map(mask_of, own))), "temperature": 1.0}
        with engine.eval_mode():
            found["seen"].append(engine.infer_batch(Batch(batch))["model_output"].get("log_probs"))
        with engine.train_mode():
            found["norms"].append(engine.train_batch(Batch(batch), sft_loss)["grad_norm"])
        found["rates"].append(engine.lr_scheduler_step())
    found["has_outputs"] = engine.is_mp_src_rank_with_outputs()
    engine.save_checkpoint(str(saved))
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    with engine.train_mode():
        engine.train_batch(Batch(batch), sft_loss)
    engine.load_checkpoint(str(saved))
    found["parameters"] = dict(engine.get_per_tensor_param()[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in found["parameters"].items())
    engine.inner.close()
    return found


def train_plainly() -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = build_model("llama").double()
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for parameter in model.parameters():
        groups[parameter.dim() < 2]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    found: dict[str, Any] = {"seen": [], "norms": []}
    for step in range(NUM_STEPS):
        own, total, count, seen = sequences(step), 0.0, 0.0, []
        for ids in own:
            logs = model(ids[None]).logits[0].log_softmax(-1)
            picked = logs[:-1].gather(-1, ids[1:, None])[:, 0]
            mask = mask_of(ids)
            counted = (picked * mask[1:]).sum()
            total, count = total - counted + 0.1 * counted.square(), count + mask.sum().item()
            seen.append(picked.detach())
        found["seen"].append(seen)
        optimizer.zero_grad()
        (total / count).backward()  # type: ignore[attr-defined]
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, step / 2)
        optimizer.step()
    return {**found, "parameters": {name: tensor.detach() for name, tensor in model.named_parameters()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("verl") / "llama"
    model: Any = build_model("llama")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_verls_engine_equals_plain_torch(ranks: WorkerPool, folder: Path, tmp_path: Path, name: str) -> None:
    num_ranks, layout = LAYOUTS[name]
    results, expected = ranks(num_ranks).run(train, folder, layout, tmp_path), train_plainly()
    assert any(found["has_outputs"] for found in results)
    for found in results:
        assert found["rates"] == pytest.approx([5e-3, 1e-2, 1e-2])
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for step, seen in enumerate(found["seen"] if found["has_outputs"] else ()):
            num_shares = len(LENGTHS) // len(seen)
            wanted = expected["seen"][step][found["first"] :: num_shares]
            for actual, picked in zip(seen, wanted, strict=True):
                torch.testing.assert_close(actual[:-1], picked, rtol=1e-9, atol=1e-9)
                assert actual[-1] == 0
        assert max_error(found["parameters"], expected["parameters"]) <= 1e-9


def value(rank: int, world_size: int, folder: Path) -> None:
    engine = make_engine(folder, build_model("llama"), {}, "value_model")
    engine.initialize()
    own = sequences(0)
    batch = {"input_ids": jagged(own), "loss_mask": jagged(list(map(mask_of, own)))}
    losses = []

    def loss_of(model_output: Any, data: Batch, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        return (model_output["values"].values() - 1.0).square().sum() / data["batch_num_tokens"], {}

    for _ in range(4):
        with engine.train_mode():
            losses.append(sum(engine.train_batch(Batch(batch), loss_of)["loss"]))
        engine.lr_scheduler_step()
    with engine.eval_mode():
        values = engine.infer_batch(Batch(batch))["model_output"]["values"]
    assert [len(each) for each in values] == list(LENGTHS)
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))
    engine.inner.close()


def test_a_critic_learns_values(ranks: WorkerPool, folder: Path) -> None:
    ranks(1).run(value, folder)


def accumulate(rank: int, world_size: int, folder: Path, layout: dict[str, Any]) -> list[float]:
    engine = make_engine(folder, build_model("llama"), layout)
    engine.initialize()
    own = sequences(0)[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    batch = {"input_ids": jagged(own), "loss_mask": jagged(list(map(mask_of, own))), "temperature": 1.0}
    # Of cp ranks, which all have outputs of the last stage, one is the source.
    has_outputs, norms = engine.is_mp_src_rank_with_outputs() or engine.mesh.cp > 1, []
    for num_batches in (1, 2):
        with engine.train_mode(zero_grad_on_exit=False):
            for _ in range(num_batches):
                outputs = engine.forward_backward_batch(Batch(batch, return_model_output=True), sft_loss)
                assert bool(outputs["model_output"]) == has_outputs
        engine.optimizer.param_groups[0]["lr"] = 0.0
        engine.optimizer.param_groups[1]["lr"] = 0.0
        norms.append(engine.optimizer_step())
    engine.inner.close()
    return norms


@pytest.mark.parametrize("name", ["cp", "pp", "pp, zero-2, zb-v", "zero-2, host", "zero-3"])
def test_batches_before_a_step_add_up(ranks: WorkerPool, folder: Path, name: str) -> None:
    num_ranks, layout = LAYOUTS[name]
    for once, twice in ranks(num_ranks).run(accumulate, folder, layout):
        assert twice == pytest.approx(2 * once, rel=1e-9)


DELTA_LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "pp": {"mesh": {"pp": 2}},
    "tp": {"mesh": {"tp": 2}},
    "zero-2": {"zero": {"stage": 2}},
    "zero-3": {},
}


def change(rank: int, world_size: int, folder: Path, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Return whole tensors after each of two steps, and what verl is given of the second, on this rank."""
    engine = make_engine(folder, build_model("llama"), layout)
    engine.initialize()
    own = sequences(0)[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    batch = {"input_ids": jagged(own), "loss_mask": jagged(list(map(mask_of, own))), "temperature": 1.0}
    engine.optimizer.param_groups[1]["lr"] = 0.0  # of the norms, which do not change
    found = []
    for _ in range(2):
        engine.prime_delta_snapshots()
        found.append({name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]})
        with engine.train_mode():
            engine.train_batch(Batch(batch), sft_loss)
        engine.lr_scheduler_step()
        engine.optimizer.param_groups[1]["lr"] = 0.0
    deltas = {}
    for slots, dtype, counts, places, values, group in engine.get_per_tensor_param_delta_shard()[0]:
        ((name, shape),) = slots
        assert (dtype, places.dtype, counts.tolist()) == ("float64", torch.int32, [len(values)])
        assert torch.distributed.get_world_size(group) == world_size
        deltas[name] = (shape, places, values)
    found.append(dict(engine.get_per_tensor_param()[0]))
    engine.inner.close()
    return [*found[1:], deltas]


@pytest.mark.parametrize("name", sorted(DELTA_LAYOUTS))
def test_what_has_changed_makes_the_new_weights_of_the_old(ranks: WorkerPool, folder: Path, name: str) -> None:
    results = ranks(2).run(change, folder, DELTA_LAYOUTS[name])
    before, after, _ = results[0]
    num_elements = dict.fromkeys(after, 0)
    for *_, deltas in results:
        assert list(deltas) == list(after)
        for key, (shape, places, values) in deltas.items():
            assert tuple(shape) == after[key].shape
            before[key].view(-1)[places.long()] = values
            num_elements[key] += len(places)
    assert all(torch.equal(before[key], tensor) for key, tensor in after.items())
    assert num_elements["model.norm.weight"] == 0
    assert all(number <= after[key].numel() for key, number in num_elements.items())
