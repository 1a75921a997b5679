"""Hooks of users, and what they keep for the loss, mean under split layers and stages what they mean in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.pool import WorkerPool
from harness.reference import PARITY, max_error, train_reference
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout

transformers = pytest.importorskip("transformers")

VOCAB, HIDDEN = 32, 16

SGD: Final = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}

Sections = dict[str, dict[str, Any]]
LAYOUTS: Final[dict[str, Sections]] = {
    "tp": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}},
    "tp-sequence": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}},
    "tp-recompute": {"mesh": {"tp": 2}, "recompute": {"mode": "full"}, "zero": {"stage": 3}},
    "tp-selective": {"mesh": {"tp": 2}, "recompute": {"mode": "selective"}, "tensor": {"sequence_parallel": True}},
    "pp": {"mesh": {"pp": 2}},
    "pp-split-backward": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}, "recompute": {"mode": "full"}},
    "cp": {"mesh": {"cp": 2}},
    "cp-all": {"mesh": {"cp": 2}},
}


QUICK_LAYOUTS = ("tp", "tp-recompute", "pp", "cp")


@dataclass
class Use:
    """What a script has beside the model: what its hooks keep, and the model that its loss reads."""

    model: nn.Module
    kept: list[Tensor] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def keep(self, value: Any) -> None:
        if torch.is_grad_enabled():
            self.kept.append(value[0] if isinstance(value, tuple) else value)

    def part(self, name: str) -> nn.Module:
        return self.model.get_submodule(f"model.layers.0.{name}" if name else "model.layers.0")

    def current_loss(self, output: Any, batch: Any) -> tuple[Tensor, int]:
        """Return what `loss` returns, which a case may replace."""
        return self.loss(output, batch)

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, int]:
        """Cross entropy, and a term that is no sum over features for each tensor that was kept."""
        total = F.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten(), reduction="sum")
        kept, self.kept = self.kept, []
        for each in kept:
            total = total + 0.3 * (each * ramp(each.shape[-1])).pow(2).sum() + each.pow(3).sum().cos()
        return total, batch["input_ids"].numel()


def ramp(size: int) -> Tensor:
    return torch.linspace(0.1, 1.0, size, dtype=torch.float64)


def scaled(value: Any, dim: int = -1) -> Any:
    if isinstance(value, tuple):
        return scaled(value[0], dim), *value[1:]
    return value * ramp(value.shape[dim]).view(-1, *[1] * (-1 - dim))


def on_forward(name: str, hook: Callable[[Use, Any, Any], Any], **options: Any) -> Callable[[Use], None]:
    def install(use: Use) -> None:
        use.part(name).register_forward_hook(
            (lambda module, args, kwargs, output: hook(use, args, output))
            if "with_kwargs" in options
            else (lambda module, args, output: hook(use, args, output)),
            **options,
        )

    return install


def watch(value: Any) -> None:
    tensor = value[0] if isinstance(value, tuple) else value
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: scaled(gradient))


def zero_rows(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[: len(gradient) - 4] = 0
    return gradient


def clear_rows(parameter: Tensor) -> None:
    parameter.grad[:5] = 0


def on_gradients(use: Use) -> None:
    use.model.get_parameter("model.embed_tokens.weight").register_hook(zero_rows)
    use.model.get_parameter("lm_head.weight").register_post_accumulate_grad_hook(clear_rows)
    for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
        weight = use.part(name).weight
        weight.register_hook(lambda gradient: scaled(gradient))
        weight.register_post_accumulate_grad_hook(lambda p: use.seen.append(tuple(p.grad.shape)))


def on_backward(use: Use) -> None:
    def scale(module: nn.Module, gradients: Any, others: Any = None) -> Any:
        return tuple(None if each is None else scaled(each) for each in gradients)

    for name in ("", "self_attn.q_proj"):
        use.part(name).register_full_backward_hook(scale)
    for name in ("mlp.gate_proj", "input_layernorm"):
        use.part(name).register_full_backward_pre_hook(scale)


def keep_attributes(use: Use) -> None:
    """A router's loss that a hook leaves on a module, and a read of a weight in a hook."""

    def leave(module: nn.Module, args: Any, output: Tensor) -> None:
        module.auxiliary = output.pow(3).sum().cos()
        use.keep(output * module.down_proj.weight.sum() if module.down_proj.weight.requires_grad else output)

    use.model.model.layers[1].mlp.register_forward_hook(leave)
    keep_loss = use.loss

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = keep_loss(output, batch)
        return total + use.model.model.layers[1].mlp.auxiliary, count

    use.loss = loss


def penalise(use: Use) -> None:
    """Norms of weights of the last layer, the final norm and the head."""
    keep_loss = use.loss

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = keep_loss(output, batch)
        weights = [*use.model.model.layers[1].parameters(), use.model.model.norm.weight, use.model.lm_head.weight[3:]]
        return total + sum(weight.norm() for weight in weights), count

    use.loss = loss


def read_outputs(use: Use) -> None:
    keep_loss = use.loss

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = keep_loss(output, batch)
        return total + 0.1 * sum((each * ramp(HIDDEN)).pow(2).sum() for each in output.hidden_states), count

    use.loss = loss


def on_model(use: Use) -> None:
    """Hooks on the model itself, which see what its forward returns."""

    def warm(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits * 1.5
        return output

    use.model.register_forward_hook(warm)
    use.model.register_forward_hook(lambda module, args, output: use.keep(output.hidden_states[1]))
    use.model.register_full_backward_hook(lambda module, gradients, others: None)


CASES: Final[dict[str, Callable[[Use], None]]] = {
    "keep-layer": on_forward("", lambda use, args, output: use.keep(output)),
    "keep-features": on_forward("self_attn.q_proj", lambda use, args, output: use.keep(output)),
    "keep-shared-features": on_forward(
        "self_attn.k_proj", lambda use, args, output: use.keep(output), with_kwargs=True
    ),
    "keep-activations": on_forward("mlp.act_fn", lambda use, args, output: use.keep(output), always_call=True),
    "keep-input": on_forward("mlp.down_proj", lambda use, args, output: use.keep(args)),
    "keep-input-of-all": on_forward("mlp.up_proj", lambda use, args, output: use.keep(args)),
    "keep-norm": on_forward("input_layernorm", lambda use, args, output: use.keep(output)),
    "mask-features": on_forward("self_attn.q_proj", lambda use, args, output: scaled(output)),
    "mask-positions": on_forward("", lambda use, args, output: scaled(output, -2)),
    "watch-features": on_forward("mlp.gate_proj", lambda use, args, output: watch(output)),
    "watch-layer": on_forward("", lambda use, args, output: watch(output)),
    "adapter": on_forward("mlp.up_proj", lambda use, args, output: output + 0.1 * args[0][..., :8].repeat(1, 1, 3)),
    "gradients": on_gradients,
    "backward": on_backward,
    "attributes": keep_attributes,
    "penalty": penalise,
    "hidden-states": read_outputs,
    "model": on_model,
}
# Under cp a hook sees this rank's tokens, as the loss does; a pass over all tokens has no part in one process.
SUMS = {"gradients", "mask-features", "watch-layer", "watch-features", "adapter", "hidden-states", "backward"}
TP = list(CASES)
OF = {
    "tp": TP,
    "tp-sequence": TP,
    "tp-recompute": ["keep-features", "keep-layer", "gradients", "penalty"],
    "tp-selective": ["keep-features", "keep-input", "watch-layer", "mask-features"],
    # A stage has whole layers: what is inside of one meets a hook as in one process.
    "pp": ["keep-layer", "watch-layer", "gradients", "backward", "attributes", "hidden-states", "model"],
    "pp-split-backward": [name for name in CASES if name != "penalty"],
    "cp": ["adapter", "backward", "gradients", "hidden-states"],  # a hook that changes, two that see, and an output
    "cp-all": sorted(SUMS),
}


def make_use() -> Use:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return Use(transformers.LlamaForCausalLM(config).double())


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randint(VOCAB, (2, 8), generator=generator) for _ in range(2)]
    return [{"input_ids": draw, "output_hidden_states": True} for draw in draws]


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


Result = tuple[float, dict[str, Tensor]]


def train(rank: int, world_size: int, names: list[str], layout: str, is_late: bool) -> list[Result]:
    """Loss and parameters of each case; the hooks are registered before `initialize`, or after it."""
    results = []
    for name in names:
        with float64_throughout():
            use = make_use()
            if not is_late:
                CASES[name](use)
            config = make_config(2, {"optimizer": SGD, **LAYOUTS[layout]})
            with initialize(use.model, config, loss_fn=use.current_loss) as engine:
                if is_late:
                    CASES[name](use)
                loss = engine.train_step(batches()).loss
                parameters = {key: engine.read(key).clone() for key, _ in engine.model.named_parameters()}
            results.append((loss, parameters))
    return results


@pytest.fixture(scope="module")
def expected() -> Callable[[str], Result]:
    done: dict[str, Result] = {}

    def of(name: str) -> Result:
        if name not in done:
            with float64_throughout():
                use = make_use()
                CASES[name](use)
                trace = train_reference(use.model, [batches()], use.current_loss, make_sgd)
            done[name] = trace.losses[0], trace.parameters
        return done[name]

    return of


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "layout",
    [each if each in QUICK_LAYOUTS else pytest.param(each, marks=pytest.mark.full) for each in LAYOUTS],
)
def test_hooks_mean_what_they_mean_in_one_process(
    ranks: WorkerPool, expected: Callable[[str], Result], layout: str
) -> None:
    is_late = layout in ("tp-sequence", "pp-split-backward", "tp-selective")
    results = ranks(2).run(train, OF[layout], layout, is_late)
    for each in results:
        for name, (loss, parameters) in zip(OF[layout], each, strict=True):
            wanted = expected(name)
            assert loss == pytest.approx(wanted[0], rel=PARITY), name
            assert max_error(parameters, wanted[1]) <= PARITY, name


def install_on_one_rank(use: Use, rank: int) -> None:
    """What a script has on rank 0 alone, to log."""
    if rank == 0:
        use.part("mlp.up_proj").register_forward_hook(lambda module, args, output: use.seen.append(output.shape[-1]))
        use.part("mlp.up_proj").weight.register_hook(lambda gradient: use.seen.append(gradient.shape[0]))
        use.part("self_attn.k_proj").weight.register_post_accumulate_grad_hook(
            lambda parameter: use.seen.append(tuple(parameter.shape))
        )


def refuse(rank: int, world_size: int) -> dict[str, Any]:
    """The codes of what is refused, with what a hook on one rank has seen."""

    def run(sections: Sections, change: Callable[[Use], Any]) -> str:
        use = make_use()
        handle = change(use)
        config = make_config(2, {"optimizer": SGD, "run": {"timeout_s": 20.0}, **sections})
        with initialize(use.model, config, loss_fn=use.current_loss) as engine:
            code, _ = refusal_of(lambda: engine.train_step(batches()))
            if handle is not None:
                handle.remove()
            return code

    def write(use: Use) -> None:
        def zero(module: nn.Module, args: Any) -> None:
            module.weight.data[3] = 0

        use.part("mlp.up_proj").register_forward_pre_hook(zero)

    def write_after(use: Use) -> None:
        def zero(parameter: Tensor) -> None:
            parameter.data[3] = 0

        use.part("mlp.up_proj").weight.register_post_accumulate_grad_hook(zero)

    def differ(use: Use) -> None:
        use.loss = lambda output, batch: (output.logits.sum() * (rank + 1), 1)

    def look(use: Use) -> None:
        use.part("").register_forward_hook(lambda module, args, output: use.keep(output))

    def look_where_the_loss_is(use: Use) -> None:
        if rank == 1:
            look(use)

    def weigh(use: Use) -> None:
        use.part("mlp.up_proj").register_forward_hook(lambda module, args, output: use.keep(module.weight.norm()))

    def on_all(use: Use) -> Any:
        return nn.modules.module.register_module_forward_hook(lambda module, args, output: None)

    with float64_throughout():
        found: dict[str, Any] = {
            "write": run(LAYOUTS["tp"], write),
            "write-after": run(LAYOUTS["tp"], write_after),
            "differ": run(LAYOUTS["tp"], differ),
            "some": run(LAYOUTS["pp"], look_where_the_loss_is),
            "weigh": run(LAYOUTS["pp"], weigh),
            "all": run(LAYOUTS["pp"], on_all),
        }
        use = make_use()
        install_on_one_rank(use, rank)
        config = make_config(2, {"optimizer": SGD, **LAYOUTS["tp-sequence"]})
        with initialize(use.model, config, loss_fn=use.current_loss) as engine:
            engine.train_step(batches())
        found["seen"] = sorted(use.seen, key=str)
    return found


def test_what_cannot_be_whole_is_refused_by_name(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(refuse)
    for found in (first, second):
        assert [found[name] for name in ("write", "write-after")] == [
            "split-parameter-written",
            "hook-writes-parameter",
        ]
        assert found["differ"] == "loss-differs-over-tp"
        assert found["all"] == "hook-on-all-modules"
    assert (second["some"], second["weigh"]) == ("hook-on-some-ranks", "hook-reads-other-stage")
    assert first["seen"] == [(8, HIDDEN), (8, HIDDEN), 24, 24, 24, 24]
    assert second["seen"] == []
