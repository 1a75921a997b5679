"""Hugging Face's Trainer with a DeepSpeed config, through the shim: it trains as one plain process does."""

import os
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from harness.local_hub import make_hub
from harness.trainer_runs import Run, assert_same_history, whole_checkpoints
from scripts.catalogue import SCRIPTS, ZERO, Job
from scripts.run import compare, describe, run_script

# Public scripts are not part of the repository: this names a folder with clones, see tests/scripts/run.py. TRL's are in
# its package.
CLONES = os.environ.get("DROPIN_SCRIPTS", "no-clones")


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    return make_hub(tmp_path_factory.mktemp("hub"))


@pytest.mark.begin
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_trainer_with_a_deepspeed_config_trains_as_one_process_does(hub, tmp_path, has_adapters) -> None:
    if has_adapters:
        pytest.importorskip("peft")
    options = {"max_steps": 3, "adapters": has_adapters}
    runs = [Run(tmp_path / "plain", hub / "llama", 1, None, **options)]
    runs += [Run(tmp_path / "zero3", hub / "llama", 2, "zero3", **options)]
    plain, sharded = (run.wait() for run in runs)
    assert_same_history(sharded, plain)


@pytest.mark.full
@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3+offload"])
def test_a_run_resumed_on_other_numbers_of_ranks_is_the_uninterrupted_one(hub, tmp_path, zero) -> None:
    whole = Run(tmp_path / "whole", hub / "llama", 2, zero, max_steps=6).wait()
    for num_ranks, max_steps in ((2, 2), (1, 4), (2, 6)):
        options = {"max_steps": max_steps, "save_steps": 2, "resume_from_checkpoint": max_steps > 2}
        parts = Run(tmp_path / "parts", hub / "llama", num_ranks, zero, **options).wait()
    assert_same_history(parts, whole)


@pytest.mark.full
def test_a_kill_in_a_save_leaves_the_checkpoint_before_it(hub, tmp_path) -> None:
    whole = Run(tmp_path / "whole", hub / "llama", 2, "zero3", max_steps=6).wait()
    Run(tmp_path / "killed", hub / "llama", 2, "zero3", max_steps=6, save_steps=2, kill_in_save=4).wait(fails=True)
    assert whole_checkpoints(tmp_path / "killed") == ["checkpoint-2"]
    newest = str(tmp_path / "killed" / "checkpoint-2")
    resumed = Run(tmp_path / "killed", hub / "llama", 2, "zero3", max_steps=6, resume_from_checkpoint=newest).wait()
    assert_same_history(resumed, whole)


@pytest.mark.full
def test_loading_under_stage_3_takes_a_shard_and_about_a_block(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "model")
    num_bytes, block_bytes = (
        sum(each.nbytes for each in module.parameters()) for module in (model, model.model.layers[0])
    )
    Run(tmp_path, tmp_path / "model", 2, "zero3", measure=str(tmp_path)).wait()
    for rank in range(2):
        assert int((tmp_path / f"peak-{rank}").read_text()) <= num_bytes / 2 + 2 * block_bytes


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", list(ZERO))
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_a_public_script_trains_as_it_does_without_deepspeed(hub, tmp_path, name, zero, precision) -> None:
    script = SCRIPTS[name]
    if zero not in script.settings or precision not in script.precisions:
        pytest.skip("the script has no such setting")
    path = script.find(Path(CLONES))
    if path is None:
        pytest.skip(f"no {script.path}: TRL is not installed, or DROPIN_SCRIPTS names no folder of clones")
    plain, sharded = (Job(hub, tmp_path / (each or "plain"), each, precision) for each in (None, zero))
    row = compare(name, sharded, run_script(script, path, sharded), run_script(script, path, plain))
    assert row.passed, describe(row)
