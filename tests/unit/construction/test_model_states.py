"""Model states by stage: the ZeRO paper's table 1 and figure 1, and what our own engine's Layout says of models."""

import pytest
import torch
from torch import nn

import shardwise
from harness.refusals import refused
from shardwise.compat.deepspeed.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from shardwise.compat.deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from shardwise.construction.model_states import estimate_model_states
from shardwise.models import Decoder, DecoderConfig

SHAPE = DecoderConfig(
    vocab_size=96, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=96, max_seq_len=64
)
HALF = {"precision": {"param": "bf16", "accumulate": "param"}}

# Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: GB of a device by stage 1, 2, 3, as printed there.
TABLE_1 = {
    7_500_000_000: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128_000_000_000: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1_000_000_000_000: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}


@pytest.mark.parametrize("num_params", TABLE_1)
@pytest.mark.parametrize("num_gpus", [1, 4, 16, 64, 256, 1024])
def test_table_1_of_the_zero_paper(num_params: int, num_gpus: int) -> None:
    estimates = estimate_model_states(num_params, num_gpus=num_gpus, stages=(1, 2, 3), config=HALF)
    for each, printed in zip(estimates, TABLE_1[num_params][num_gpus], strict=True):
        digits = len(printed.partition(".")[2])
        # Some of its entries are rounded and some cut off: all are within one of the last digit.
        assert each.device_bytes / 1e9 == pytest.approx(float(printed), abs=10.0**-digits)


def test_figure_1_of_the_zero_paper() -> None:
    estimates = shardwise.estimate_model_states(7_500_000_000, num_gpus=64, config=HALF)
    assert [each.stage for each in estimates] == [0, 1, 2, 3]
    assert [round(each.device_bytes / 1e9, 1) for each in estimates] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tiers", [{}, {"optimizer": "host"}, {"optimizer": "host", "grads": "host"}])
def test_of_a_model_they_are_its_layouts(stage: int, tiers: dict[str, str]) -> None:
    model = Decoder(SHAPE, device="meta")
    config = {"tiers": tiers, "optimizer": {"name": "lion"}}
    (states,) = estimate_model_states(model, num_gpus=6, gpus_per_node=3, stages=(stage,), config=config)
    sections = {**config, "zero": {"stage": stage}, "precision": {"param": "bf16"}}
    layout = shardwise.plan_layout(model, shardwise.Config.from_dict(sections).resolve(world_size=6))
    assert states.device_bytes == sum(layout.bytes_at_rest(tier="device").values())
    assert states.host_bytes == 3 * sum(layout.bytes_at_rest(tier="host").values())
    block = max(group.padded_numel for group in layout.groups if group.unit != "root")
    assert states.unsharded_bytes == {1: 2 * block * ("grads" in tiers), 2: 2 * block, 3: 4 * block}[stage]


def test_what_stays_in_fp32_is_gathered_in_fp32() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)]))
    model._keep_in_fp32_modules_strict = ["0.1"]
    (states,) = estimate_model_states(model, num_gpus=2, stages=(3,), config={"zero": {"blocks": ["0.*"]}})
    assert states.unsharded_bytes == 2 * 64 * 4


def test_a_module_of_any_kind_will_do() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    (states,) = estimate_model_states(model, num_gpus=1, stages=(0,))
    assert states.device_bytes == 18 * 10**6
    assert str(states) == "stage 0: 17.2 MiB a GPU"


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ({"model": 0, "num_gpus": 1}, "params-positive", "0 parameters"),
        ({"model": 10, "num_gpus": 0}, "gpu-count-positive", "num_gpus=0"),
        ({"model": 10, "num_gpus": 1, "largest_block": 11}, "largest-block-range", "largest_block=11"),
        ({"model": 10, "num_gpus": 1, "stages": (4,)}, "out-of-range", "zero.stage=4"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], code: str, named: str) -> None:
    with refused(code, named):
        estimate_model_states(**arguments)


def test_deepspeeds_names_answer_with_what_our_engine_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate_zero2_model_states_mem_needs(10**9, 8, 1, cpu_offload=False) == (0, 2 * 10**9 + 16 * 10**9 // 8)
    assert estimate_zero2_model_states_mem_needs(10**9, 8, 2) == (8 * 10**9, 2 * 10**9)
    host_bytes, gpu_bytes, layer_bytes = estimate_zero3_model_states_mem_needs(10**9, 10**8, 8, 1)
    assert (host_bytes, gpu_bytes, layer_bytes) == (18 * 10**9, 4 * 10**8, 4 * 10**8)
    doubled, _, _ = estimate_zero3_model_states_mem_needs(10**9, 10**8, 8, 1, additional_buffer_factor=2.0)
    assert doubled == 2 * host_bytes
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=4)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(4 * 1024**2, num_gpus_per_node=4)
    assert "zero.stage=2, 1 node of 4 GPUs" in live
    assert "offload_optimizer=cpu" in live
    assert "MiB" in live
    assert capsys.readouterr().out.splitlines()[0] == live.splitlines()[0]
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=4, num_nodes=2)
    live = capsys.readouterr().out
    estimate_zero3_model_states_mem_needs_all_cold(4 * 1024**2, 1024**2, num_gpus_per_node=4, num_nodes=2)
    assert capsys.readouterr().out == live
