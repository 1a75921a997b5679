"""Log-probabilities and entropies of tokens, by the engine and in a loss: in every layout those of one process."""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from harness.huggingface import build_model
from harness.live_bytes import LiveBytes
from harness.pool import WorkerPool
from harness.reference import max_error
from harness.refusals import refused
from harness.training import make_config, make_optimizer
from shardwise import TokenLogProbs, initialize, token_log_probs
from shardwise.models.decoder import Decoder
from shardwise.models.presets import DecoderConfig

IGNORED: Final = -100
TEMPERATURE: Final = 0.7
NUM_WORDS: Final = 41
LAST: Final = torch.tensor([7])
NUM_STEPS: Final = 2
LAYOUTS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "alone": (1, {}),
    "chunks": (1, {"context": {"chunk_tokens": 3}}),
    "zero-3": (2, {"zero": {"stage": 3}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "sequence parallel": (2, {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}, "zero": {"stage": 1}}),
    "cp": (2, {"mesh": {"cp": 2}, "zero": {"stage": 3}}),
    "pp": (2, {"mesh": {"pp": 2}, "zero": {"stage": 1}}),
    "pp and tp": (4, {"mesh": {"pp": 2, "tp": 2}}),
    "cp and tp, chunks": (4, {"mesh": {"cp": 2, "tp": 2}, "context": {"chunk_tokens": 2}}),
}


def build_decoder(num_layers: int = 4, num_words: int = NUM_WORDS, length: int = 8) -> Decoder:
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=num_words,
        num_layers=num_layers,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        ffn_size=24,
        max_seq_len=length,
    )
    return Decoder(shape)


def make_batch(step: int, data_rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A batch of sequences, the first of which ends early, and what the loss needs of each token."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    tokens = torch.randint(4, NUM_WORDS, (2, 8), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORED
    targets[0, 5:] = IGNORED
    advantages = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    return tokens, {"targets": targets, "advantages": advantages}


def policy_loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """A clipped policy gradient with a bonus for entropy, over the tokens."""
    others = batch[1]
    mask = others["targets"] != IGNORED
    new = token_log_probs(output, others["targets"], temperature=TEMPERATURE, entropy=True)
    assert new.entropies is not None
    ratio, advantages = (new.log_probs - others["old"]).exp(), others["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.01 * new.entropies
    return -(gain * mask).sum(), mask.sum()


def plain_log_probs(logits: Tensor, targets: Tensor) -> TokenLogProbs:
    """By torch alone, of whole logits."""
    logs = (logits / TEMPERATURE).log_softmax(-1)
    counts = targets != IGNORED
    picked = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return TokenLogProbs(picked.where(counts, 0), -(logs.exp() * logs).sum(-1).where(counts, 0))


def run(rank: int, world_size: int, overrides: dict[str, Any]) -> dict[str, Any]:
    model = build_decoder().double()
    names = [name for name, _ in model.named_parameters()]
    found: dict[str, Any] = {"seen": [], "losses": []}
    with initialize(model, make_config(1, overrides), loss_fn=policy_loss) as engine:
        mesh = engine.layout.mesh
        found["data rank"] = mesh.data_index(rank)
        for step in range(NUM_STEPS):
            inputs, others = make_batch(step, found["data rank"])
            old = engine.log_probs((inputs, others["targets"]), temperature=TEMPERATURE, entropy=True)
            found["seen"].append(old)
            found["losses"].append(engine.train_step([(inputs, {**others, "old": old.log_probs})]).loss)
        found["parameters"] = {name: engine.read(name) for name in names}
    return found


def run_plainly(num_data_ranks: int) -> dict[str, Any]:
    model = build_decoder().double()
    optimizer = make_optimizer(model)
    found: dict[str, Any] = {"seen": [], "losses": []}
    for step in range(NUM_STEPS):
        total, count, seen = torch.zeros((), dtype=torch.float64), 0, []
        for rank in range(num_data_ranks):
            inputs, others = make_batch(step, rank)
            new = plain_log_probs(model(inputs), others["targets"])
            assert new.entropies is not None
            seen.append(TokenLogProbs(new.log_probs.detach(), new.entropies.detach()))
            ratio, advantages = (new.log_probs - new.log_probs.detach()).exp(), others["advantages"]
            mask = others["targets"] != IGNORED
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.01 * new.entropies
            total, count = total - (gain * mask).sum(), count + int(mask.sum())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        found["seen"].append(seen)
        found["losses"].append(total.item() / count)
    found["parameters"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_layout_equals_one_process(ranks: WorkerPool, name: str) -> None:
    num_ranks, overrides = LAYOUTS[name]
    results = ranks(num_ranks).run(run, overrides)
    expected = run_plainly(1 + max(found["data rank"] for found in results))
    for found in results:
        for step, seen in enumerate(found["seen"]):
            wanted = expected["seen"][step][found["data rank"]]
            for field in ("log_probs", "entropies"):
                torch.testing.assert_close(getattr(seen, field), getattr(wanted, field), rtol=1e-9, atol=1e-9)
        assert max_error(found["losses"], expected["losses"]) <= 1e-9
        assert max_error(found["parameters"], expected["parameters"]) <= 1e-9


def test_inputs_alone_predict_their_next_tokens() -> None:
    pytest.importorskip("transformers")
    model: Any = build_model("llama")
    plain = copy.deepcopy(model)
    tokens = torch.arange(12).view(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    targets = torch.full_like(tokens, IGNORED)
    targets[0, :5], targets[1, :3] = tokens[0, 1:], tokens[1, 1:4]
    batches: list[tuple[Any, Tensor]] = [
        ({"input_ids": tokens, "attention_mask": mask}, targets),
        ({"input_ids": tokens, "labels": tokens}, torch.cat([tokens[:, 1:], torch.full((2, 1), IGNORED)], 1)),
    ]
    with initialize(model, {"run": {"device": "cpu"}}) as engine:
        assert engine.model.training
        for batch, wanted in batches:
            with torch.no_grad():
                logits = plain(**{name: value for name, value in batch.items() if name != "labels"}).logits
            found = engine.log_probs(batch, temperature=TEMPERATURE)
            torch.testing.assert_close(found.log_probs, plain_log_probs(logits, wanted).log_probs)
            assert found.entropies is None
        assert engine.model.training
        assert not engine.model(tokens).logits.isnan().any()  # the head is as it was
        with refused("log-probs-batch"):
            engine.log_probs({"pixel_values": torch.ones(2, 3)})
        with refused("log-probs-shape"):
            engine.log_probs(({"input_ids": tokens}, tokens[:, 1:]))


def run_family(rank: int, world_size: int, overrides: dict[str, Any]) -> tuple[TokenLogProbs, TokenLogProbs]:
    torch.manual_seed(0)
    model: Any = build_model("llama").double()
    tokens = make_batch(0, 0)[0]
    with torch.no_grad():
        wanted = plain_log_probs(copy.deepcopy(model)(tokens).logits, tokens.roll(-1, 1).index_fill(1, LAST, IGNORED))
    with initialize(model, make_config(1, overrides)) as engine:
        return engine.log_probs({"input_ids": tokens}, temperature=TEMPERATURE, entropy=True), wanted


@pytest.mark.parametrize("name", ["cp", "pp", "tp"])
def test_models_of_transformers(ranks: WorkerPool, name: str) -> None:
    """Without a loss_fn; they round to fp32 within."""
    pytest.importorskip("transformers")
    for found, wanted in ranks(2).run(run_family, LAYOUTS[name][1]):
        torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.entropies, wanted.entropies, rtol=1e-6, atol=1e-6)


def refuse_after_log_probs(rank: int, world_size: int) -> None:
    """The loss is a mean of each rank's own tokens."""
    with initialize(
        build_decoder().double(),
        make_config(1, LAYOUTS["cp"][1]),
        loss_fn=lambda output, batch: (token_log_probs(output, batch[1]).log_probs.mean(), 1),
    ) as engine:
        inputs, others = make_batch(0, 0)
        engine.log_probs((inputs, others["targets"]))
        with refused("cp-token-loss"):
            engine.train_step([(inputs, others["targets"])])


def test_a_loss_is_tried_whatever_was_computed_before(ranks: WorkerPool) -> None:
    ranks(2).run(refuse_after_log_probs)


def test_logits_of_minus_infinity_have_no_share() -> None:
    """As those of a vocabulary that is masked to some tokens."""
    logits = torch.randn(1, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[..., 4:] = -torch.inf
    targets = torch.tensor([[0, 1, 2, 3]])
    found, wanted = (
        gradient_of(logits, lambda given: token_log_probs(given, targets, entropy=True)),
        gradient_of(logits[..., :4], lambda given: token_log_probs(given, targets, entropy=True)),
    )
    torch.testing.assert_close(found[..., :4], wanted)
    assert found[..., 4:].count_nonzero() == 0


def gradient_of(logits: Tensor, compute: Any) -> Tensor:
    leaf = logits.clone().requires_grad_()
    found = compute(leaf)
    (found.log_probs.sum() + 2 * found.entropies.sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


def peak_bytes(is_plain: bool, num_tokens: int, vocab_size: int) -> int:
    """Of log-probabilities and entropies of a small decoder, beside what lives before."""
    model = build_decoder(num_layers=1, num_words=vocab_size, length=num_tokens)
    tokens = torch.arange(num_tokens).unsqueeze(0) % vocab_size
    targets = tokens.roll(-1, 1)
    with initialize(model, make_config(1, {"precision": {"param": "fp32"}, "zero": {"stage": 0}})) as engine:
        engine.log_probs((tokens[:, :64], targets[:, :64]))
        with LiveBytes() as live, torch.no_grad():
            if is_plain:
                plain_log_probs(model(tokens), targets)
            else:
                engine.log_probs((tokens, targets), entropy=True)
        return live.peak_bytes()


def test_whole_logits_never_exist() -> None:
    num_tokens, vocab_size = 4096, 8192
    logits_bytes = num_tokens * vocab_size * 4
    assert peak_bytes(True, num_tokens // 4, vocab_size) > 2 * logits_bytes / 4
    assert peak_bytes(False, num_tokens, vocab_size) < logits_bytes / 4
