"""The numbers of a step: in JSON that any reader takes, and by one name each."""

import json
import logging
import math

import pytest
import torch
from torch import nn

from shardwise import initialize
from shardwise.train.metrics import WORDS, StepRecord, scalars, to_json_line, token_mult_prob_error


def make_record(step: int, **changes) -> StepRecord:
    values = {
        "loss": 8.0 - step,
        "count": 64,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "skipped": False,
        "step_s": 0.5,
        "tokens_per_s": 128.0,
        "memory_bytes": {"parameters": 1024, "activations": 0},
    }
    return StepRecord(step=step, **(values | changes))


def test_a_line_says_what_is_known(tmp_path):
    plain = json.loads(to_json_line(make_record(1)))
    assert plain["loss"] == 7.0
    assert plain["memory_bytes"] == {"parameters": 1024, "activations": 0}
    assert not {"peak_bytes", "eval_loss"} & set(plain)
    full = json.loads(to_json_line(make_record(2, peak_bytes={"parameters": 2048}, eval_loss=6.5)))
    assert full["peak_bytes"] == {"parameters": 2048}
    assert full["eval_loss"] == 6.5


def test_an_overflow_stays_json():
    line = to_json_line(make_record(1, loss=math.inf, grad_norm=math.nan, skipped=True))
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None
    assert record["grad_norm"] is None


def test_numbers_of_the_script_are_kept_by_name():
    record = make_record(1, values={"reward": 0.25, "gap": math.nan})
    assert json.loads(to_json_line(record))["values"] == {"reward": 0.25, "gap": None}
    assert scalars(record)["values/reward"] == 0.25


def mult_prob_error(rank: int, world_size: int, gap: float) -> tuple[float, list[str]]:
    """Rank 0 has two tokens that count, rank 1 one; one token on rank 0 differs by `gap`, and one that does not
    count."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    with initialize(nn.Linear(4, 1), {"run": {"device": "cpu"}}) as engine:
        trained = torch.full((1, 3), -2.0)
        sampled = trained - torch.tensor([[gap * (rank == 0), 0.0, 9.0]])
        error = token_mult_prob_error(engine, trained, sampled, torch.tensor([[1, rank == 0, 0]]))
    logging.getLogger("shardwise").removeHandler(handler)
    return error, [line for line in lines if "token_mult_prob_error" in line]


@pytest.mark.parametrize(("gap", "is_alarming"), [(0.0, False), (math.log(1.09), False), (math.log(2), True)])
def test_probabilities_of_training_and_generation_are_compared(ranks, gap, is_alarming):
    (error, lines), (other, silent) = ranks(2).run(mult_prob_error, gap)
    assert error == other == pytest.approx((math.exp(gap) + 2) / 3)
    assert bool(lines) is is_alarming
    assert not silent


def test_every_number_has_its_name_of_the_file():
    record = make_record(2, peak_bytes={"parameters": 1024, "activations": 512}, eval_loss=6.5, mfu=0.4)
    names, line = scalars(record), json.loads(to_json_line(record))
    assert names["peak_bytes/total"] == 1536
    for name, value in names.items():
        key, _, category = name.partition("/")
        assert category == "total" or value == (line[key][category] if category else line[key])
    assert {"eval_loss", "mfu"} <= set(names)
    assert not {"eval_loss", "mfu", "peak_bytes/total"} & set(scalars(make_record(1)))
    assert WORDS["eval_loss"] == "held-out loss"
