"""What fewer bits cost: two trainings for each seed, which differ in the bits alone."""

from __future__ import annotations

import pytest

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.report.console import Terminal
from shardwise.verify import quality
from shardwise.verify.quality import measure_quality, render


def test_trainings_differ_in_the_bits_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[Config] = []

    def held_out_loss(config: Config, data: object) -> float:
        trained.append(config)
        return 5.0 + config.run.seed + (0.01 if config.precision.states == "int8" else 0.0)

    monkeypatch.setattr(quality, "_held_out_loss", held_out_loss)
    monkeypatch.setattr(quality, "prepare_job_data", lambda config: "data")
    given = Config.from_dict({"precision": {"states": "int8"}, "data": {"text_key": "body"}})
    found = measure_quality(given, range(2), num_steps=7)
    assert found.shares == pytest.approx((0.01 / 5, 0.01 / 6))
    assert [(each.run.seed, each.precision.states) for each in trained] == [
        (seed, states) for seed in range(2) for states in ("master", "int8")
    ]
    exact, encoded = (each.model_copy(update={"precision": None}) for each in trained[:2])
    assert exact == encoded
    assert {(each.run.steps, each.data.text_key) for each in trained} == {(7, "body")}
    Terminal(width=100).print(render(found))
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("+0.20%", "+0.17%", "by +0.18% after 7 steps", "up to 18.18%"):
        assert part in printed, part


def test_codecs_of_parameters_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Config] = []
    monkeypatch.setattr(quality, "_held_out_loss", lambda config, data: trained.append(config) or 5.0)
    monkeypatch.setattr(quality, "prepare_job_data", lambda config: "data")
    given = Config.from_dict({"precision": {"gather": "fp8", "param": "bf16"}})
    assert measure_quality(given, range(1), num_steps=2).codecs == ("precision.gather=fp8",)
    assert [(each.precision.gather, each.precision.states) for each in trained] == [
        ("param", "master"),
        ("fp8", "master"),
    ]


def test_encoded_gradients_are_measured_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Config] = []

    def loss_of_ranks(config: Config, num_ranks: int, environ: object) -> float:
        trained.append(config)
        return 5.0 + (0.01 if config.precision.reduce_feedback else 0.0)

    monkeypatch.setattr(quality, "_loss_of_ranks", loss_of_ranks)
    monkeypatch.setattr(quality, "prepare_job_data", lambda config: "data")
    given = Config.from_dict({"precision": {"reduce": "int4", "reduce_feedback": True}})
    found = measure_quality(given, range(1), num_steps=7)
    assert found.codecs == ("precision.reduce=int4", "precision.reduce_feedback=true")
    assert found.shares == pytest.approx((0.01 / 5,))
    exact, encoded = trained
    assert (exact.precision.reduce, encoded.precision.reduce) == ("param", "int4")
    assert exact.mesh.dp_shard == exact.batch.global_size == quality.NUM_RANKS


@pytest.mark.parametrize("reduce", ["param", "fp32"])
def test_a_config_without_codecs_has_no_price(reduce: str) -> None:
    with refused("nothing-encoded", "precision.states=master", "precision.gather=param", f"precision.reduce={reduce}"):
        measure_quality(Config.from_dict({"precision": {"reduce": reduce}}), range(1), num_steps=1)
