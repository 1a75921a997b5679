"""Logits that are kept and read later: those of the weights that computed them, or a refusal, in every layout."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.huggingface import VOCAB_SIZE, build_model
from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import Engine, initialize

CHUNKS = {"context": {"chunk_tokens": 3}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"mesh": {"tp": 2}}),
    "sequence parallel": (2, {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}, "zero": {"stage": 1}}),
    "chunks, zero-3": (2, {**CHUNKS, "zero": {"stage": 3}}),
    "tp, zero-3": (4, {"mesh": {"tp": 2}, "zero": {"stage": 3}}),
    "chunks, pp": (2, {**CHUNKS, "mesh": {"pp": 2}}),
}
# Whether it is computed when it is made, also where a backward follows.
KEPT: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "itself": (lambda logits: logits, False),
    "clone": (lambda logits: logits.clone(), False),
    "slice": (lambda logits: logits[:, :-1], False),
    "view": (lambda logits: logits.reshape(-1, VOCAB_SIZE), False),
    "other dtype": (lambda logits: logits.float(), False),
    "transposed": (lambda logits: logits.transpose(1, 2), False),
    "stacked": (lambda logits: torch.stack([logits[:, 1], logits[:, 2]]), True),
    "argmax": (lambda logits: logits[:, -1].argmax(-1), True),
}
TOKENS = torch.randint(4, VOCAB_SIZE, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = ({"input_ids": TOKENS}, TOKENS.roll(-1, 1))


class KeepingLoss:
    """Keeps all forms of the logits of the first batch, and a row that is read at once."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.row: list[float] = []

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, int]:
        if not self.kept:
            self.kept = {name: make(output.logits) for name, (make, _) in KEPT.items()}
            with torch.no_grad():
                self.row = output.logits[0, 0].tolist()
        return F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()

    def take(self) -> dict[str, Any]:
        kept, self.kept = self.kept, {}
        return kept


def read(kept: Mapping[str, Any], expected: Tensor) -> dict[str, str]:
    """By name "" for the values that they had, "wrong", or an error's code."""

    def state(name: str) -> str:
        values: list[Any] = []
        code, _ = refusal_of(lambda: values.append(pickle.loads(pickle.dumps(kept[name])).tolist()))
        if code:
            return code
        wanted = torch.tensor(KEPT[name][0](expected).tolist(), dtype=torch.float64)
        return "" if torch.allclose(torch.tensor(values[0], dtype=torch.float64), wanted, rtol=1e-6) else "wrong"

    return {name: state(name) for name in kept}


def change(engine: Engine, how: str) -> None:
    """Change the head's weight by another way than a step."""
    if how == "write":
        engine.write("lm_head.weight", torch.ones(VOCAB_SIZE, engine.model.config.hidden_size))
    elif how == "gathered":
        with engine.gathered(write=True) as model, torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)


def keep_logits(rank: int, world_size: int, overrides: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build_model("llama").double().eval()
    with torch.no_grad():
        expected = copy.deepcopy(model)(TOKENS).logits
    loss_fn, has_pipeline = KeepingLoss(), "pp" in overrides.get("mesh", {})
    engine = initialize(model, make_config(1, overrides), loss_fn=loss_fn)
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    evaluated: dict[str, Any] = {}
    direct: dict[str, Any] = {}
    hooked: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: hooked.append(output))
    for name, context in contexts.items():
        with context():
            engine.eval_step([BATCH])
        evaluated[name] = loss_fn.take()
        if not has_pipeline:
            with context():
                direct[f"{name}, engine"] = engine(input_ids=TOKENS).logits
                hooked.clear()
                direct[f"{name}, model"] = engine.model(TOKENS).logits
            direct[f"{name}, hook"] = hooked[-1]
    handle.remove()
    found: dict[str, Any] = {"at once": {name: read(kept, expected) for name, kept in evaluated.items()}}
    engine.train_step([BATCH])
    trained = loss_fn.take()
    found["evaluated"] = {name: read(kept, expected) for name, kept in evaluated.items()}
    found["direct"] = {name: read({"itself": each}, expected)["itself"] for name, each in direct.items()}
    found["trained"] = read(trained, expected)
    found["row"] = not loss_fn.row or bool(torch.allclose(torch.tensor(loss_fn.row), expected[0, 0].float()))
    found["read before the change"], found["after"] = {}, {}
    for how in () if has_pipeline else ("write", "gathered"):
        loss = engine(BATCH)
        kept = loss_fn.take()
        first = {name: kept.pop(name) for name in ("itself", "argmax")}
        with torch.no_grad():
            row = first["itself"][0, 0].clone()
            now = copy.deepcopy(row.tolist())
        engine.backward(loss)
        engine.step()
        found["read before the change"][how] = now == row.tolist()
        kept = {} if engine(BATCH) is None else loss_fn.take()
        change(engine, how)
        found["after"][how] = sorted(set(read(kept, expected).values()))
    engine.close()
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_kept_logits_are_those_of_their_weights(ranks: WorkerPool, name: str) -> None:
    pytest.importorskip("transformers")
    num_ranks, overrides = LAYOUTS[name]
    results = ranks(num_ranks).run(keep_logits, overrides)
    with_loss = [each for each in results if each["trained"]]
    assert len(with_loss) == (1 if "pp" in overrides.get("mesh", {}) else num_ranks)
    for result in with_loss:
        right = dict.fromkeys(KEPT, "")
        assert result["at once"] == result["evaluated"] == {"no_grad": right, "inference_mode": right}
        assert set(result["direct"].values()) <= {""}
        assert result["row"]
        assert result["trained"] == {key: "" if eager else "logits-stale" for key, (_, eager) in KEPT.items()}
        assert all(result["read before the change"].values())
        assert all("logits-stale" in codes for codes in result["after"].values())
