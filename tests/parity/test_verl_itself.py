"""verl's own configs, registry, micro-batches and losses over our engine, on CPUs: what its tests of engines show.

They are skipped where verl is not installed; `test_verl_engine` has the parts of verl's interface that they meet.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from harness.pool import WorkerPool
from harness.reference import max_error

if find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)
transformers = pytest.importorskip("transformers")

NUM_SAMPLES: Final = 8
LENGTH: Final = 24
TOLERANCE: Final = 1e-6  # the norms of Qwen3 compute in fp32
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "cp": {"mesh": {"cp": 2}},
    "pp": {"mesh": {"pp": 2}},
    "tp": {"mesh": {"tp": 2}},
    "zero-3": {},
}


def on_cpu() -> None:
    """Give verl a platform without an accelerator, of which it has none."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    names = PlatformBase.__abstractmethods__
    found = {name: (lambda self, *args, **options: None) for name in names}
    values = {"device_name": "cpu", "vendor_name": "cpu", "device_module": SimpleNamespace(), **found}
    values |= {"device_name": "cpu", "vendor_name": "cpu", "is_available": lambda self: True}
    platform: Any = type("PlatformCPU", (PlatformBase,), values)
    platform_manager.set_platform(platform())


def make_model(folder: Path, kind: str = "Qwen3Config", **others: Any) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, num_attention_heads=4, num_key_value_heads=2, **others)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_engine(folder: Path, layout: dict[str, Any], model_type: str = "language_model") -> Any:
    on_cpu()
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from shardwise.compat.verl import ShardwiseEngineConfig

    model = HFModelConfig(path=str(folder), load_tokenizer=False, model_type=model_type)
    sections = {"run": {"device": "cpu"}, "precision": {"param": "fp64"}, **layout}
    lengths: dict[str, Any] = {"max_token_len_per_gpu": 80, "infer_max_token_len_per_gpu": 80}
    config = ShardwiseEngineConfig(dtype="float32", config=sections, use_dynamic_bsz=True, **lengths)
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=10, lr_warmup_steps=0)
    engine = EngineRegistry.new(model_type, "shardwise", model, config, optimizer, None)
    engine.initialize()
    return engine


def make_batch(engine: Any, **more: Tensor) -> Any:
    """Return this data rank's samples, padded at both ends as answers to prompts are, in verl's own form."""
    from verl import DataProto
    from verl.utils import tensordict_utils
    from verl.utils.model import compute_position_id_with_mask
    from verl.workers.utils.padding import left_right_2_no_padding

    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (NUM_SAMPLES, LENGTH), generator=draws)
    mask = torch.ones_like(tokens)
    for row in range(NUM_SAMPLES):
        mask[row, : row % 4] = mask[row, LENGTH - row % 3 * 2 :] = 0
    answers = slice(LENGTH // 2, None)
    whole = {
        "input_ids": tokens,
        "prompts": tokens[:, : LENGTH // 2],
        "attention_mask": mask,
        "position_ids": compute_position_id_with_mask(mask),
        "responses": tokens[:, answers],
        "response_mask": mask[:, answers],
        "advantages": torch.randn(NUM_SAMPLES, LENGTH // 2, generator=draws),
        "returns": torch.randn(NUM_SAMPLES, LENGTH // 2, generator=draws),
        **more,
    }
    rank, num_ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    own = {name: values[rank::num_ranks] for name, values in whole.items()}
    batch = left_right_2_no_padding(DataProto.from_single_dict(own, meta_info={"temperature": 0.7}).to_tensordict())
    config = engine.engine_config
    tensordict_utils.assign_non_tensor(
        batch, use_dynamic_bsz=True, max_token_len_per_gpu=config.max_token_len_per_gpu, global_batch_size=NUM_SAMPLES
    )
    return batch


def padded_mask(batch: Any) -> Tensor:
    """Return what is an answer of the answers' tokens, as the losses take it."""
    mask: Tensor = batch.select("response_mask").to_padded_tensor()["response_mask"]
    return mask


def answers_of(engine: Any, outputs: Any, batch: Any, name: str) -> Tensor | None:
    """Return numbers of the answers' tokens, on the ranks that have them."""
    from verl.workers.utils.padding import no_padding_2_padding

    if not engine.is_mp_src_rank_with_outputs():
        return None
    return no_padding_2_padding(outputs["model_output"][name], batch) * padded_mask(batch)


def act(rank: int, world_size: int, folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(folder, layout)
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(strategy="shardwise", rollout_n=1, ppo_micro_batch_size_per_gpu=-1, entropy_coeff=0.01)
    batch = make_batch(engine)
    with engine.eval_mode():
        seen = answers_of(engine, engine.infer_batch(batch), batch, "log_probs")
    found: dict[str, Any] = {"seen": seen, "place": engine.get_data_parallel_rank(), "norms": [], "losses": []}
    old = torch.full((NUM_SAMPLES, LENGTH // 2), -4.0)
    for _ in range(2):
        batch = make_batch(engine, old_log_probs=old)
        from verl.utils import tensordict_utils

        tensordict_utils.assign_non_tensor(batch, calculate_entropy=True)
        with engine.train_mode():
            outputs = engine.train_batch(batch, partial(ppo_loss, config))
        engine.lr_scheduler_step()
        if engine.is_mp_src_rank_with_outputs():
            found["norms"].append(outputs["metrics"]["grad_norm"])
            found["losses"].append(sum(outputs["loss"]))
    found["parameters"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.inner.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("verl") / "qwen3")


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_an_actor_of_two_ranks_equals_one(ranks: WorkerPool, folder: Path, name: str) -> None:
    (alone,), results = ranks(1).run(act, folder, {}), ranks(2).run(act, folder, LAYOUTS[name])
    sources = [found for found in results if found["seen"] is not None]
    num_data_ranks = len(sources)
    assert num_data_ranks == (2 if name == "zero-3" else 1)
    for found in sources:
        own = alone["seen"][found["place"] :: num_data_ranks]
        torch.testing.assert_close(found["seen"], own, rtol=TOLERANCE, atol=TOLERANCE)
        assert found["norms"] == pytest.approx(alone["norms"], rel=TOLERANCE)
    mean = [sum(losses) / num_data_ranks for losses in zip(*(found["losses"] for found in sources), strict=True)]
    assert mean == pytest.approx(alone["losses"], rel=TOLERANCE, abs=TOLERANCE)
    for found in results:
        assert max_error(found["parameters"], alone["parameters"]) <= 10 * TOLERANCE


def compare(rank: int, world_size: int, folder: Path) -> None:
    engine = make_engine(folder, {})
    batch = make_batch(engine)
    with engine.eval_mode():
        seen = answers_of(engine, engine.infer_batch(batch), batch, "log_probs")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for row, ids in enumerate(batch["input_ids"].unbind()):
        logs = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0].detach()
        assert seen is not None
        num_answered = int(padded_mask(batch)[row].sum())
        torch.testing.assert_close(seen[row, :num_answered], logs[-num_answered:], rtol=TOLERANCE, atol=TOLERANCE)
    engine.inner.close()


def test_log_probs_are_those_of_the_model(ranks: WorkerPool, folder: Path) -> None:
    ranks(1).run(compare, folder)


def criticize(rank: int, world_size: int, folder: Path, layout: dict[str, Any]) -> list[float] | None:
    torch.manual_seed(3)  # of the head, which the folder has not
    engine = make_engine(folder, layout, "value_model")
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    config = CriticConfig(strategy="shardwise", rollout_n=1, ppo_micro_batch_size_per_gpu=-1)
    losses = []
    for _ in range(3):
        batch = make_batch(engine, values=torch.zeros(NUM_SAMPLES, LENGTH // 2))
        with engine.train_mode():
            outputs = engine.train_batch(batch, partial(value_loss, config))
        losses.append(sum(outputs["loss"]))
    has_outputs = engine.is_mp_src_rank_with_outputs()
    engine.inner.close()
    return losses if has_outputs else None


@pytest.mark.parametrize("name", ["cp", "pp"])
def test_a_critic_of_two_ranks_equals_one(ranks: WorkerPool, folder: Path, name: str) -> None:
    ((alone,), results) = ranks(1).run(criticize, folder, {}), ranks(2).run(criticize, folder, LAYOUTS[name])
    (found,) = [losses for losses in results if losses is not None]
    assert found == pytest.approx(alone, rel=TOLERANCE)
    assert alone[-1] < alone[0]


def walk(rank: int, world_size: int, folder: Path, layout: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    engine = make_engine(folder, layout)
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.get_per_tensor_param()[0]}
    engine.inner.close()
    return shapes


@pytest.mark.parametrize("kind", ["Qwen3Config", "Qwen3MoeConfig"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_names_and_shapes_are_those_of_the_folder(ranks: WorkerPool, tmp_path: Path, kind: str, name: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    experts = {"num_experts": 4, "moe_intermediate_size": 16} if kind == "Qwen3MoeConfig" else {}
    folder = make_model(tmp_path / "model", kind, **copy.deepcopy(experts))
    stored = safetensors.load_file(folder / "model.safetensors")
    for shapes in ranks(2).run(walk, folder, LAYOUTS[name]):
        assert shapes == {key: tuple(tensor.shape) for key, tensor in stored.items()}
