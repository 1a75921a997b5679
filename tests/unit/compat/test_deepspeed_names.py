"""DeepSpeed's names: each is here, or says in one sentence who answers for it."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.compat.deepspeed as deepspeed
from harness.refusals import refused
from shardwise.compat.deepspeed import names
from shardwise.compat.deepspeed.config import read_config
from shardwise.compat.deepspeed.finder import MissingNameError, placeholder
from shardwise.compat.deepspeed.runtime import lr_schedules
from shardwise.config.errors import ConfigError

pytestmark = pytest.mark.usefixtures("warm_python")

ROOT = "shardwise.compat.deepspeed"
NAMES = Path(names.__file__).with_name("names.txt")
LISTED = {module: listed.split() for module, _, listed in (x.partition(":") for x in NAMES.read_text().splitlines())}


def imported(module: str, name: str) -> Any:
    """Return what `from module import name` gives."""
    found: dict[str, Any] = {}
    exec(f"from {ROOT}{'.' if module else ''}{module} import {name}", found)
    return found[name]


def test_every_public_name_is_here_or_says_who_answers() -> None:
    unclear = []
    for module, listed in LISTED.items():
        for name in listed:
            try:
                found = imported(module, name)
            except ImportError as error:
                unclear += [str(error)] if "is not here: " not in str(error) else []
                continue
            if type(found) is type(placeholder("moe.layer.MoE")):
                with pytest.raises(MissingNameError, match="is not here: "):
                    found()
    assert not unclear


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import {}.inference.engine", "inference"),
        ("from {} import autotuning", "autotuning"),
        ("from {}.compile.backend import make_backend", "compile"),
        ("from {}.runtime.constants import ROUTE_TRAIN", "runtime.constants.ROUTE_TRAIN"),
        ("from {}.runtime.zero.stage3 import _private", "runtime.zero.stage3._private"),
        ("from {}.comm import no_such_collective", "comm.no_such_collective"),
        ("from {}.accelerator import AdamW", "accelerator.AdamW"),
    ],
)
def test_an_import_says_who_answers_and_is_caught_as_an_import_error(statement: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"^deepspeed.{name} is not here: .* "):
        exec(statement.format(ROOT))


def test_what_is_asked_for_by_attribute_is_absent_by_deepspeeds_name() -> None:
    assert not hasattr(deepspeed, "inference")
    assert not hasattr(deepspeed, "no_such")
    with pytest.raises(AttributeError, match=r"deepspeed\.comm\.no_such"):
        _ = deepspeed.comm.no_such
    with pytest.raises(AttributeError, match="get_accelerator"):
        _ = deepspeed.get_accelerator().no_such


def test_a_placeholder_does_no_harm_until_it_is_called() -> None:
    kind = imported("moe.sharded_moe", "TopKGate")
    assert kind is imported("moe.sharded_moe", "TopKGate")
    assert not isinstance(nn.Linear(1, 1), kind)
    assert kind.__module__ == "deepspeed.moe.sharded_moe"
    torch.serialization.add_safe_globals([kind, imported("runtime.fp16.loss_scaler", "LossScaler")])

    class Own(kind):  # type: ignore[misc,valid-type]
        pass

    for call in (kind, Own):
        with refused("deepspeed-name-missing", "deepspeed.moe.sharded_moe.TopKGate is not here"):
            call(1, 2)
    with pytest.raises(AttributeError, match="TopKGate is not here"):
        _ = kind.gate


def test_what_deepspeeds_checkpoints_contain_is_read_back() -> None:
    for path in ("utils.tensor_fragment.fragment_address", "runtime.fp16.loss_scaler.LossScaler"):
        module, _, name = path.rpartition(".")
        assert imported(module, name) is not None
    address = imported("utils.tensor_fragment", "fragment_address")(numel=3, start=4)
    stage = imported("runtime.zero.config", "ZeroStageEnum").weights
    assert pickle.loads(pickle.dumps((address, stage))) == (address, 3)


def packages(module: Any) -> Iterator[Any]:
    yield module
    for child in pkgutil.iter_modules(getattr(module, "__path__", [])):
        yield from packages(importlib.import_module(f"{module.__name__}.{child.name}"))


def test_no_module_hides_one_of_deepspeeds_by_a_name_of_its_own() -> None:
    """A module that is imported later is written over what its package calls by that name."""
    for module in packages(deepspeed):
        path = module.__name__.removeprefix(ROOT).removeprefix(".")
        children = {each.removeprefix(f"{path}.").partition(".")[0] for each in LISTED if each.startswith(f"{path}.")}
        for name in children & vars(module).keys():
            assert isinstance(vars(module)[name], types.ModuleType)
            assert vars(module)[name].__name__.startswith(ROOT)


def test_deepspeeds_own_path_answers_the_same(tmp_path: Path) -> None:
    code = (
        "import deepspeed\nfrom deepspeed.ops.lion import FusedLion\nfrom deepspeed.moe.layer import MoE\n"
        "try:\n    import deepspeed.inference.engine\nexcept ImportError as error:\n    print(error)\n"
        "import deepspeed.utils.z3_leaf_module as module\n"
        "print(deepspeed.utils.z3_leaf_module(None), deepspeed.__git_hash__ == '')"
    )
    run = [sys.executable, "-m", "shardwise", "run", "--as-deepspeed", "--", "python", "-c", code]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[0].startswith("deepspeed.inference is not here: ")
    assert printed[1:] == ["False True"]


def start(stage: int, **keys: Any) -> Any:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}, **keys}
    return deepspeed.initialize(model=nn.Linear(2, 1), config=config)[0]


KINDS = {
    "DeepSpeedOptimizer": "runtime.base_optimizer",
    "ZeROOptimizer": "runtime.base_optimizer",
    "DeepSpeedZeroOptimizer": "runtime.zero.stage_1_and_2",
    "DeepSpeedZeroOptimizer_Stage3": "runtime.zero.stage3",
    "BF16_Optimizer": "runtime.bf16_optimizer",
    "FP16_Optimizer": "runtime.fp16.fused_optimizer",
}
BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("stage", "keys", "kinds"),
    [
        (0, BF16, "FP16_Optimizer"),
        (1, {}, "ZeROOptimizer DeepSpeedZeroOptimizer"),
        (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, "ZeROOptimizer BF16_Optimizer"),
        (2, BF16, "ZeROOptimizer DeepSpeedZeroOptimizer"),
        (3, BF16, "ZeROOptimizer DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_isinstance_takes_the_optimizer_by_its_stage(stage: int, keys: dict[str, Any], kinds: str) -> None:
    engine = start(stage, **keys)
    found = {name for name, module in KINDS.items() if isinstance(engine.optimizer, imported(module, name))}
    engine.destroy()
    assert found == {"DeepSpeedOptimizer", *kinds.split()}
    with refused("deepspeed-optimizer-made", "deepspeed.initialize"):
        imported("runtime.base_optimizer", "ZeROOptimizer")(None)


def test_every_getter_answers() -> None:
    engine = start(2, steps_per_print=7, prescale_gradients=True, fp16={"enabled": True, "initial_scale_power": 4})
    expected = {
        "steps_per_print": 7,
        "optimizer_name": "adamw",
        "dynamic_loss_scale": True,
        "initial_dynamic_scale": 16.0,
        "postscale_gradients": False,
        "zero_reduce_bucket_size": 500_000_000,
        "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": False,
        "zero_cpu_offload": False,
        "get_mom": [(0.9, 0.999)],
        "get_model_parallel_rank": 0,
        "get_data_types": (torch.float16, torch.float16),
        "get_batch_info": (2, 2, 1),
    }
    assert {name: getattr(engine, name)() for name in expected} == expected
    assert (engine.communication_data_type, engine.mpu, engine.dist_backend) == (torch.float16, None, "gloo")
    assert engine.data_parallel_group is torch.distributed.group.WORLD
    with refused("deepspeed-own-reduction", "engine.allreduce_bucket"):
        engine.allreduce_bucket([])
    engine.monitor.write_events([("loss", 1.0, 1)])
    engine.destroy()


def test_another_batch_can_be_set() -> None:
    engine = start(1)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 6)
    engine.set_train_micro_batch_size(4)
    assert engine.get_batch_info() == (12, 4, 3)
    with refused("batch-not-divided", "train_batch_size=6"):
        engine.set_train_batch_size(6)
    engine.destroy()


def test_a_loader_is_made_for_evaluation() -> None:
    engine = start(1)
    samples = [torch.full((2,), float(number)) for number in range(5)]
    assert [len(each) for each in engine.deepspeed_io(samples, route="eval")] == [2, 2, 1]
    (first, *_) = engine.deepspeed_io(samples, batch_size=3, route="eval")
    torch.testing.assert_close(first, torch.stack(samples[:3]))
    engine.destroy()


def test_leaf_modules_are_marked_by_class_name_and_path() -> None:
    utils = deepspeed.utils

    class Base(nn.Module):
        pass

    class Derived(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

    model = nn.Sequential(Derived(), Base(), nn.ReLU())
    assert utils.set_z3_leaf_modules(model, [Base]) == [model[0], model[1]]
    assert utils.z3_leaf_module(model[0])
    assert utils.z3_leaf_parameter(model[0].inner.weight)
    assert utils.get_z3_leaf_modules(model) == [model[0], model[1]]
    assert utils.unset_z3_leaf_modules(model, ["Derived"]) == [model[0]]
    assert utils.get_z3_leaf_modules(model) == [model[1]]
    assert not utils.z3_leaf_parameter(model[0].inner.weight)
    assert utils.set_z3_leaf_modules_by_name(model, ["0.inner", "9"], raise_if_not_found=False)[1] == ["9"]
    assert utils.set_z3_leaf_modules_by_suffix(model, [".inner"]) == ([model[0].inner], [])
    assert utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="raise_if_not_found"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"b//c": 1,}, // of all\n "d": [1, 2,],}',
        '{# "x": 1\n a: {"b//c": 1}, /* "d": 0, */ "d": [1,\n2]}',
        "a: {\n 'b//c': 1\n}\nd: [\n 1\n 2 ]",
        "eyJhIjogeyJiLy9jIjogMX0sICJkIjogWzEsIDJdfQ==",
    ],
    ids=["comments and commas", "keys without quotes", "no commas and no braces", "base64"],
)
def test_a_config_may_be_hjson_or_base64(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    given = text if text.startswith("eyJ") else path
    assert read_config(given) == {"a": {"b//c": 1}, "d": [1, 2]}


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        (
            [
                "  type: AdamW",
                "  path: s3://local nvme, #1",
                "  on: true // a",
                "  lr: 1e-3 # a",
                "  none: null",
                "  a: a }",
            ],
            {"type": "AdamW", "path": "s3://local nvme, #1", "on": True, "lr": 1e-3, "none": None, "a": "a }"},
        ),
        (
            ["type: AdamW", "path: /data/x, y", "n: 5 GB", "lr: 1e-3 // low", "text:", "'''", " a", "  b", "'''"],
            {"type": "AdamW", "path": "/data/x, y", "n": "5 GB", "lr": 1e-3, "text": "a\n b"},
        ),
    ],
    ids=["on one line", "of many lines"],
)
def test_texts_of_hjson_may_have_no_quotes(lines: list[str], values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text("\n".join(["{", *lines, "}"]))
    assert read_config(path) == values


def test_a_file_that_is_no_hjson_is_refused_by_its_own_place(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(ConfigError, match="line 2"):
        read_config(path)


def test_schedules_have_deepspeeds_attributes() -> None:
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.1)
    warmup, cycle = lr_schedules.WarmupDecayLR(optimizer, 9), lr_schedules.OneCycle(optimizer, 0.01, 0.1)
    assert (warmup.min_lrs, warmup.max_lrs, warmup.delta_lrs) == ([0.0], [0.001], [0.001])
    assert (warmup.total_num_steps, warmup.warmup_num_steps, warmup.warmup_type) == (9, 1000, "log")
    assert (cycle.total_size, cycle.first_step_size, cycle.second_step_size) == (4000, 2000, 2000)
    assert (cycle.min_lrs, cycle.max_moms, cycle.get_mom()) == ([0.01], [(0.9, 0.99)], [(0.9, 0.99)])
    assert lr_schedules.LRRangeTest(optimizer).min_lr == [1e-3]
    assert (lr_schedules.WARMUP_LR, lr_schedules.CYCLE_MIN_LR) == ("WarmupLR", "cycle_min_lr")
    for wrong in ({"warmup_num_steps": None}, {"warmup_num_steps": -1}):
        with pytest.raises(ValueError, match="warmup_num_steps"):
            lr_schedules.WarmupLR(optimizer, **wrong)
    for kind in (lr_schedules.WarmupLR, lr_schedules.WarmupDecayLR, lr_schedules.WarmupCosineLR):
        total = {} if kind is lr_schedules.WarmupLR else {"total_num_steps": 9}
        with pytest.warns(UserWarning, match="warmup_type='cubic' is none of log, linear"):
            schedule = kind(optimizer, **total, warmup_type="cubic")
        assert schedule.warmup_type == "log"


def test_operations_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    count = imported("profiling.flops_profiler", "get_model_profile")
    flops, macs, params = count(model, (3, 4), print_profile=False, as_string=False)
    assert (flops, macs, params) == (2 * 3 * (32 + 16), 3 * (32 + 16), 58)


def test_the_accelerator_has_what_portable_scripts_ask() -> None:
    accelerator = deepspeed.get_accelerator()
    state = accelerator.get_rng_state()
    first = torch.rand(2)
    accelerator.set_rng_state(state)
    torch.testing.assert_close(torch.rand(2), first)
    assert torch.float32 in accelerator.supported_dtypes()
    assert (
        accelerator.max_memory_allocated() >= accelerator.memory_allocated() > 0 or accelerator.device_name() == "cuda"
    )
    assert accelerator.on_accelerator(torch.ones(1)) is (accelerator.device_name() == "cpu")
    assert accelerator.create_op_builder("CPUAdamBuilder").is_compatible()
    assert not accelerator.create_op_builder("InferenceBuilder").is_compatible()
    assert not deepspeed.ops.__compatible_ops__[imported("ops.op_builder", "InferenceBuilder").NAME]
    assert deepspeed.ops.__compatible_ops__[imported("ops.aio", "AsyncIOBuilder").NAME]
    with refused("deepspeed-name-missing", "deepspeed.ops.op_builder.InferenceBuilder is not here"):
        accelerator.get_op_builder("InferenceBuilder")().load()


def test_a_save_needs_a_folder() -> None:
    engine = start(0)
    for wrong in (None, ""):
        with refused("save-dir-missing", "save_dir="):
            engine.save_checkpoint(wrong)
    engine.destroy()
