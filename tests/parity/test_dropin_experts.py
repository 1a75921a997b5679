"""Mixtures of experts by DeepSpeed's names: Trainer and TRL divide them, save them whole, and go on in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file

from harness.huggingface import build_model
from harness.local_hub import train_tokenizer
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.trainer_runs import Run, assert_same_history
from shardwise.compat import deepspeed
from shardwise.runtime.float64 import float64_throughout

EP_2 = {"expert_parallel": {"enabled": True, "autoep_size": 2, "expert_tensor_parallel_size": 1}}
OWN_EP_2 = {"shardwise": {"mesh": {"ep": 2}}}
WHOLE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "mixtral"
    torch.manual_seed(0)
    build_model("mixtral", output_router_logits=False).save_pretrained(folder)
    train_tokenizer().save_pretrained(folder)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(("zero", "sections"), [("zero2", EP_2), ("zero3", OWN_EP_2)])
def test_a_trainer_divides_experts_and_saves_the_weights_of_one_process(folder, tmp_path, zero, sections) -> None:
    runs = [Run(tmp_path / "plain", folder, 1, None, max_steps=3)]
    runs += [Run(tmp_path / "ep", folder, 2, zero, max_steps=3, sections=sections)]
    plain, divided = (run.wait() for run in runs)
    assert_same_history(divided, plain)
    theirs, ours = stored(tmp_path / "plain"), stored(tmp_path / "ep")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("is_sft", [False, True])
def test_a_run_with_divided_experts_goes_on_without_and_with_them(folder, tmp_path, is_sft) -> None:
    if is_sft:
        pytest.importorskip("trl")
    whole = Run(tmp_path / "whole", folder, 2, "zero2", max_steps=6, sections=EP_2, sft=is_sft).wait()
    for zero, sections, max_steps in (("zero2", EP_2, 2), ("zero3", WHOLE, 4), ("zero3", EP_2, 6)):
        options = {"max_steps": max_steps, "save_steps": 2, "resume_from_checkpoint": max_steps > 2}
        parts = Run(tmp_path / "parts", folder, 2, zero, sections=sections, sft=is_sft, **options).wait()
    assert_same_history(parts, whole)
    torch.testing.assert_close(stored(parts.folder), stored(whole.folder), rtol=0, atol=1e-5)


ARMS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, stage, mesh
    "ep 2": (2, 2, {"ep": 2}),
    "ep 2, stage 3": (2, 3, {"ep": 2}),
    "ep 4": (4, 1, {"ep": 4}),
    "tp 2, ep 4": (4, 3, {"tp": 2, "ep": 4}),
    "whole": (1, 0, {}),
}
NUM_STEPS, BATCH = 6, 4


def open_engine(arm: str, num_ranks: int, seed: int = 0, timeout_s: float = 30.0) -> Any:
    """16 experts in float64, clipped in each step."""
    _, stage, mesh = ARMS[arm]
    torch.manual_seed(seed)
    model = build_model("mixtral", output_router_logits=False, num_local_experts=16).double()
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH * mesh.get("tp", 1) // num_ranks,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "shardwise": {"mesh": mesh, "precision": {"param": "fp64"}, "run": {"timeout_s": timeout_s}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def train(engine: Any, first: int, last: int) -> list[tuple[float, float]]:
    """The loss over all data ranks, and the norm, of each step."""
    found = []
    mesh = engine.inner.layout.mesh
    for step in range(first, last):
        tokens = torch.randint(3, 41, (BATCH, 8), generator=torch.Generator().manual_seed(step))
        own = tokens.chunk(mesh.num_data_ranks)[mesh.data_index(engine.inner.comm.rank)]
        with float64_throughout():
            loss = engine(input_ids=own, labels=own).loss
            engine.backward(loss)
            engine.step()
        found.append((loss.item(), float(engine.get_global_grad_norm())))
    return found


def states_of(engine: Any) -> dict[str, torch.Tensor]:
    inner = engine.inner
    names = [name for name, _ in engine.module.named_parameters()]
    return {f"{name} {key}": inner.read(name, key) for name in names for key in ("param", "exp_avg", "exp_avg_sq")}


def train_arm(rank: int, world_size: int, arm: str, folder: Path) -> list[tuple[float, float]]:
    engine = open_engine(arm, world_size)
    found = train(engine, 0, NUM_STEPS)
    state = engine.module.state_dict()
    if rank == 0:
        engine.module.save_pretrained(folder, state_dict=state)
    engine.destroy()
    return found


@pytest.mark.parametrize("arm", sorted(set(ARMS) - {"whole", "ep 2, stage 3", "tp 2, ep 4"}))
def test_hf_48516_saved_weights_of_each_arm_are_those_of_one_process(ranks: WorkerPool, tmp_path, arm) -> None:
    """16 experts, 6 steps, clipped in each: the loss, the norm and what is saved."""
    (expected,) = ranks(1).run(train_arm, "whole", tmp_path / "one")
    found = ranks(ARMS[arm][0]).run(train_arm, arm, tmp_path / "many")
    for step, (loss, norm) in enumerate(expected):
        assert sum(each[step][0] for each in found) / len(found) == pytest.approx(loss, rel=1e-9)
        assert [each[step][1] for each in found] == pytest.approx([norm] * len(found), rel=1e-9)
        assert norm > 0.1
    torch.testing.assert_close(stored(tmp_path / "many"), stored(tmp_path / "one"), rtol=0, atol=1e-9)


def save(rank: int, world_size: int, arm: str, folder: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train and save half-way; return what the other half gives, and the states saved."""
    engine = open_engine(arm, world_size)
    train(engine, 0, 2)
    engine.save_checkpoint(folder / "0")
    states = states_of(engine)
    found = train(engine, 2, 4)
    engine.destroy()
    return found, states


def load(rank: int, world_size: int, arm: str, folder: Path, number: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Load what the layout before has saved, save it, and go on."""
    engine = open_engine(arm, world_size, seed=1)
    engine.load_checkpoint(folder / str(number))
    engine.save_checkpoint(folder / str(number + 1))
    states = states_of(engine)
    found = train(engine, 2, 4)
    engine.destroy()
    return found, states


@pytest.mark.parametrize("arm", ["tp 2, ep 4"])
def test_hf_48569_a_sharded_mixture_resumes_in_any_layout_bit_for_bit(
    ranks: WorkerPool, tmp_path, arm, pytestconfig
) -> None:
    """Optimizer states too, from ranks that hold other experts: ep 4 with tp, itself, ep 4, one rank, ep 2."""
    said = ranks(ARMS[arm][0]).run(save, arm, tmp_path)
    expected, states = said[0]
    more = ("ep 4",) if pytestconfig.getoption("--full") else ()
    for number, target in enumerate((arm, *more, "whole", "ep 2, stage 3")):
        for found, loaded in ranks(ARMS[target][0]).run(load, target, tmp_path, number):
            assert loaded.keys() == states.keys()
            assert all(loaded[key].equal(value) for key, value in states.items())
            norms = [norm for _, norm in found]
            assert norms == pytest.approx([norm for _, norm in expected], rel=0 if target == arm else 1e-9)


def save_alone(rank: int, world_size: int) -> None:
    engine = open_engine("ep 2", world_size, timeout_s=1.0)
    if rank == 0:
        with refused("collective-failed", "rank 1 has not started", "experts.gate_up_proj over ep"):
            engine.module.state_dict()


def test_hf_48569_a_save_on_one_rank_alone_names_the_missing_one(ranks: WorkerPool) -> None:
    """Each rank has experts that are in the whole, so rank 0 would wait for ever."""
    ranks(2).run(save_alone)


def load_whole(rank: int, world_size: int, arm: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a state dict of a script has, and what the model has once it is loaded."""
    engine = open_engine(arm, world_size)
    train(engine, 0, 1)
    given = {name: value.cpu() for name, value in engine.module_state_dict().items()}
    given = {name: value * 0.5 if value.is_floating_point() else value for name, value in given.items()}
    engine.load_module_state_dict({"module": given})
    loaded = {name: value.cpu() for name, value in engine.module_state_dict().items()}
    name = next(name for name in given if name.endswith("experts.down_proj"))
    with refused("state-dict-shape", name, "(8, ", "(16, "), engine.inner.gathered(write=True) as model:
        model.load_state_dict({**given, name: given[name][:8]})
    engine.destroy()
    return given, loaded


@pytest.mark.parametrize("arm", ["ep 2, stage 3", "tp 2, ep 4"])
def test_a_state_dict_of_whole_tensors_is_loaded_by_ranks_with_parts(ranks: WorkerPool, arm: str) -> None:
    for given, loaded in ranks(ARMS[arm][0]).run(load_whole, arm):
        assert given.keys() == loaded.keys()
        assert [name for name, value in given.items() if not loaded[name].equal(value)] == []
