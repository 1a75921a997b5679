"""Whether a fine-tuning job fits a card, how long its examples take, and what would make it fit."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.planner.fit import Examples, Verdict, read_examples, verdict
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.plan import plan
from shardwise.planner.results import missing_memory
from shardwise.planner.search import Pricer
from shardwise.verify.finalists import simulate_finalists

TEN_THOUSAND = Examples(num_examples=10_000, lengths=(400,))


def judged(cluster: str, *settings: str, examples: Examples | None = TEN_THOUSAND, **sizes: int) -> Verdict:
    found = plan("llama-3-8b", cluster, settings=settings, **({"seq_len": 2048, "global_batch": 32} | sizes))
    return verdict(found.result, found.reasons, Pricer(found.asked.job), examples)


def test_sequences_are_those_of_the_packing() -> None:
    drawn = random.Random(0)
    lengths = tuple(drawn.randint(20, 3000) for _ in range(500))
    examples = Examples(num_examples=5000, lengths=lengths, num_epochs=2.0)
    cut = sum(min(length, 2048) for length in lengths)
    assert cut / 2048 <= examples.num_sequences(2048) / 10 <= 1.1 * cut / 2048
    assert examples.num_steps(2048, 32) == math.ceil(2 * examples.num_sequences(2048) / 32)
    assert examples.share_cut(2048) == sum(length > 2048 for length in lengths) / 500
    assert Examples(num_examples=8, lengths=(1500,) * 2).num_sequences(2048) == 8, "no two share a sequence"


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("300", (300,)), ("12\n7\n900\n", (12, 7, 900)), ("[12, 7, 900]", (12, 7, 900))],
)
def test_lengths_are_a_mean_or_a_file(tmp_path: Path, text: str, lengths: tuple[int, ...]) -> None:
    given = text
    if len(lengths) > 1:
        (tmp_path / "lengths.txt").write_text(text)
        given = str(tmp_path / "lengths.txt")
    examples, notes = read_examples(100, given)
    assert examples is not None
    assert (examples.num_examples, examples.lengths, notes) == (100, lengths, ())
    if len(lengths) > 1:
        found, _ = read_examples(None, given)
        assert found is not None
        assert found.num_examples == 3


@pytest.mark.parametrize("text", ["0", "-5", "1 2 x", "", "1.5"])
def test_lengths_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    with refused("examples-missing", "--examples"):
        read_examples(None, "300")  # a mean alone does not say of how many
    with refused("examples-missing", "--epochs"):
        read_examples(None, None, 3.0)
    (tmp_path / "lengths.txt").write_text(text)
    with refused("lengths-of-examples", "--lengths"):
        read_examples(100, str(tmp_path / "lengths.txt"))


def test_adapters_fit_where_all_weights_do_not() -> None:
    """8.03 B weights in bf16 take 15 GiB; with fp32 masters and Adam's moments 120 GiB, and a desktop has 64."""
    whole, adapters = judged("rtx-4090:1"), judged("rtx-4090:1", "lora.rank=16")
    assert adapters.does_fit
    assert not whole.does_fit
    assert "lora.rank=16" in whole.more
    assert whole.price is not None
    assert whole.price.config.lora.rank == 16, "the fastest fix is timed"
    assert missing_memory(whole.price.memory, whole.price.job.cluster, 0.06) is None
    assert whole.num_steps == adapters.num_steps == math.ceil(math.ceil(10_000 * 400 / 2048) / 32)


def test_a_base_in_4_bits_is_a_fix_of_adapters_that_do_not_fit() -> None:
    ruling = judged("t4:1", "lora.rank=16", "tiers.params=device", "tiers.optimizer=device")
    assert not ruling.does_fit
    assert "lora.base=nf4" in ruling.more
    assert ruling.price is not None
    assert ruling.price.config.lora.base == "nf4"


def test_a_base_in_4_bits_may_be_stored_on_the_host() -> None:
    """70.6 B weights take 131 GiB in bf16 and 35 GiB in 4 bits: more than the card has, and less than its desktop."""
    found = plan("llama-3-70b", "rtx-5090:1", settings=["lora.rank=16"])
    ruling = verdict(found.result, found.reasons, Pricer(found.asked.job), TEN_THOUSAND)
    assert not ruling.does_fit
    assert "lora.base=nf4" in ruling.more
    assert ruling.price is not None
    assert ruling.price.config.tiers.params == "host"


def test_the_time_is_the_steps_of_the_best() -> None:
    ruling = judged("h100:8", "lora.rank=16")
    assert ruling.price is not None
    seconds = ruling.values["run_s"]
    assert seconds == pytest.approx(ruling.num_steps * ruling.price.time.step_s)
    assert judged("h100:8", "lora.rank=16", examples=None).num_steps is None


def test_longer_sequences_that_are_said_to_fit_do() -> None:
    ruling = judged("rtx-4090:1", "lora.rank=16")
    most = int(next(word for word in ruling.more.split() if word[0].isdigit()).replace(",", ""))
    assert judged("rtx-4090:1", "lora.rank=16", seq_len=most, global_batch=1).does_fit


def test_three_lines_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [
        "plan",
        "llama-3-8b",
        "rtx-4090:1",
        "--examples",
        "10000",
        "--lengths",
        "400",
        "--epochs",
        "2",
        "--simulate",
        "0",
    ]
    tuned = ["--lora-rank", "8", "--lora-targets", "q_proj,v_proj", "--lora-base", "nf4"]
    assert cli.main([*asked, *tuned, "--json", "plan.json"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line[:2] != "  " and line.strip()]
    labels = [line[0] for line in lines]
    assert labels[:5] == ["fits", "takes", "also", "model", "batch"]
    assert {"yes,", "8"} <= set(lines[0])
    answer = json.loads(Path("plan.json").read_text())
    assert answer["fine_tuning"]["num_steps"] == 123
    assert (answer["job"]["seq_len"], answer["job"]["global_batch"]) == (2048, 32)
    assert cli.main(asked) == 1
    labels = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:2] != "  " and line.strip()]
    assert labels[:3] == ["fits", "takes", "to"]


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_usual_sizes_of_fine_tuning(num_gpus: int) -> None:
    asked = plan("llama-3-8b", parse_cluster(f"a100-80:{num_gpus}"), settings=["lora.rank=16"]).asked
    assert (asked.job.seq_len, asked.job.global_batch) == (2048, 32)


def test_adapters_stay_on_the_device_where_the_weights_beside_them_do_not() -> None:
    """8 B weights in bf16 leave too little of 24 GiB for activations; rank 16 takes 0.5 GiB."""
    tiers = plan("llama-3-8b", "rtx-4090:1", settings=["lora.rank=16"]).best.price.config.tiers
    assert (tiers.params, tiers.grads, tiers.optimizer) == ("host", "device", "device")


def test_adapters_of_a_model_without_weights_are_not_simulated() -> None:
    price, said = plan("llama-3-8b", "rtx-4090:1", settings=["lora.rank=16"]).best.price, list[str]()
    assert simulate_finalists([price], 30.0, said.append) == [price]
    assert said == []
