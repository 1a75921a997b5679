"""An engine of Shardwise with verl's interface; import it where verl reads `external_lib`, and name it as strategy.

verl's losses are divided by what counts on all data ranks, times their number, and summed over micro-batches. So they
are losses of plain mode (`Engine.forward`), and the gradient is that of verl's other engines. What only infers, such as
a reference, runs in every layout (`Engine.log_probs`); training needs the logits of a sequence on one rank, or its
tensor-parallel ranks, so it refuses `mesh.pp` and `mesh.cp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.model import get_hf_auto_model_class, load_valuehead_model
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import ActorConfig, EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.construction.context import init
from shardwise.context.batch import IGNORED
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.layout.mesh_shape import CONTEXT_AXES, PIPELINE_AXES, TENSOR_AXES, MeshShape
from shardwise.runtime.device import KINDS
from shardwise.tensor.token_log_probs import token_log_probs

STRATEGY: Final = "shardwise"
_DEVICE: Final = "device"  # any name but "cpu" stands for it: verl knows no machine without an accelerator
_DTYPES: Final[Mapping[str, str]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass
class ShardwiseEngineConfig(EngineConfig):
    """Holds verl's settings of an engine, and the sections of a Shardwise config: its layout, tiers, precision."""

    strategy: str = STRATEGY
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class ShardwiseActorConfig(ActorConfig):
    """Holds verl's settings of an actor that `ShardwiseEngine` trains."""

    strategy: str = STRATEGY
    shardwise: ShardwiseEngineConfig = field(default_factory=ShardwiseEngineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.shardwise


def sections_of(model_config: Any, engine_config: Any, optimizer_config: Any) -> dict[str, dict[str, Any]]:
    """Return the sections of a Shardwise config; what the user's own sections say comes before what verl's say."""
    sections: dict[str, dict[str, Any]] = {
        "zero": {"stage": 3},
        "precision": {"param": _DTYPES[engine_config.dtype]},
        "optimizer": {"name": "none"},
        "recompute": {"mode": "full" if model_config.enable_gradient_checkpointing else "none"},
        "run": {"seed": engine_config.seed, "on_nonfinite": "skip"},
        "scheduler": {"name": "constant"},
    }
    if not engine_config.forward_only:
        options = optimizer_config
        sections["optimizer"] = {"name": "adamw", "lr": options.lr, "weight_decay": options.weight_decay}
        sections["optimizer"] |= {"betas": tuple(options.betas), "clip_norm": options.clip_grad}
    for name, values in getattr(engine_config, "config", {}).items():
        sections[name] = {**sections.get(name, {}), **values}
    return sections


@dataclass(frozen=True)
class _Padded:
    """Holds sequences of different lengths as a model takes them, and how they come back."""

    tokens: Tensor  # [B, S]
    mask: Tensor  # [B, S], true for what is no padding
    targets: Tensor  # [B, S], the next token, ignored after the last one
    offsets: Tensor  # [B + 1], where each sequence begins among all their tokens

    @classmethod
    def of(cls, nested: Tensor) -> _Padded:
        tokens, offsets = torch.nested.to_padded_tensor(nested, 0.0), nested.offsets()  # type: ignore[attr-defined]
        lengths, places = offsets.diff().unsqueeze(1), torch.arange(tokens.shape[1], device=tokens.device)
        return cls(tokens, places < lengths, tokens.roll(-1, 1).where(places < lengths - 1, IGNORED), offsets)

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.tokens, "attention_mask": self.mask.long(), "use_cache": False}

    def nested(self, values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values[self.mask], self.offsets)


class _SteppedByVerl:
    """Is the engine's schedule, which verl steps itself, after the optimizer's steps of a batch."""

    def __init__(self, schedule: Any) -> None:
        self.schedule, self.optimizer = schedule, schedule.optimizer
        self.state_dict, self.load_state_dict = schedule.state_dict, schedule.load_state_dict

    def step(self) -> None:
        """Do nothing."""


class _Mode(BaseEngineCtx):
    """Puts the model into a mode, and states where verl wants them, for a context."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.model.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


@EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=[*KINDS])
@EngineRegistry.register(model_type="value_model", backend=STRATEGY, device=[*KINDS])
class ShardwiseEngine(BaseEngine):
    """Trains a causal language model, or a critic: a model of token classification with one label.

    The arguments are those of verl's engines. After `initialize`, `inner` is the engine.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self._is_critic = model_config.model_type == "value_model"
        self.config = Config.from_dict(sections_of(model_config, engine_config, optimizer_config))
        self.mesh = MeshShape.from_config(self.config.resolve(dist.get_world_size()).mesh)
        if self.mesh.pp * self.mesh.cp > 1 and not engine_config.forward_only:
            raise ConfigError(
                "verl-layout",
                f"mesh.pp={self.mesh.pp}, mesh.cp={self.mesh.cp}: verl's losses read whole sequences; use mesh.tp",
            )
        self._away: frozenset[str] = frozenset()

    def initialize(self) -> None:
        self.inner = self._make_engine()
        self.model: Any = self.inner.model
        if not self.engine_config.forward_only:
            self.lr_scheduler = self._schedule()
            self.inner.scheduler = _SteppedByVerl(self.lr_scheduler)
        self._offload()

    def _offload(self) -> None:
        params, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to("cpu", model=params, optimizer=optimizer, grad=params)

    def _make_engine(self) -> Engine:
        config = self.model_config
        path, hf_config, trust = config.local_path, config.hf_config, config.trust_remote_code
        if self._is_critic:
            hf_config.num_labels = 1
            return initialize(load_valuehead_model(path, torch.float32, hf_config, trust), self.config)
        auto_class = get_hf_auto_model_class(hf_config=hf_config)
        if not config.lora_rank:
            with init():
                model = auto_class.from_config(hf_config, trust_remote_code=trust)
            return initialize(model, self.config, weights=path)
        from peft import LoraConfig, get_peft_model

        model = auto_class.from_pretrained(path, config=hf_config, trust_remote_code=trust)
        targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
        lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets, bias="none")
        return initialize(get_peft_model(model, lora), self.config)

    def _schedule(self) -> Any:
        options, optimizer = self.optimizer_config, self.inner.optimizer
        total, warmup = options.total_training_steps, options.lr_warmup_steps or 0
        warmup = warmup if warmup > 0 else int(options.lr_warmup_steps_ratio * total)
        if getattr(options, "lr_scheduler_type", "constant") == "constant":
            return get_constant_schedule_with_warmup(optimizer, warmup)
        least = options.min_lr_ratio or 0.0
        return get_cosine_schedule_with_warmup(optimizer, warmup, total, least, options.num_cycles)

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **options: Any) -> Any:
        return _Mode(self, "train", **options)

    def eval_mode(self, **options: Any) -> Any:
        return _Mode(self, "eval", **options)

    def optimizer_zero_grad(self) -> None:
        self.inner.zero_grad()

    def optimizer_step(self) -> float:
        return self.inner.step(partial=True).grad_norm

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        group, comm = self.get_data_parallel_group(), self.inner.parts.comms.data
        (num_tokens,) = comm.sum_scalars(data["loss_mask"].sum().reshape(1).to(comm.device), "tokens of verl's batch")
        num_ranks = self.get_data_parallel_size()
        tensordict_utils.assign_non_tensor(data, sp_size=1, batch_num_tokens=num_tokens, dp_size=num_ranks)
        batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        keeps_output = forward_only or tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        outputs = []
        for number, batch in enumerate(batches, 1):
            batch = batch.to(self.inner.device)
            output, loss, metrics = self._compute(batch, forward_only), torch.ones(()), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=output, data=batch, dp_group=group)
            if not forward_only:
                self.inner.backward(loss, is_boundary=number == len(batches))
            detached = {name: value.detach() for name, value in output.items()} if keeps_output else {}
            outputs.append({"model_output": detached, "loss": loss.item(), "metrics": metrics})
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _compute(self, batch: Any, forward_only: bool) -> dict[str, Tensor]:
        padded = _Padded.of(batch["input_ids"])
        if self._is_critic:
            with torch.set_grad_enabled(not forward_only):
                return {"values": padded.nested(self.inner.forward(**padded.inputs).logits.squeeze(-1))}
        entropy = bool(tensordict_utils.get_non_tensor_data(batch, "calculate_entropy", False))
        temperature = _temperature_of(batch)
        if forward_only:
            of_tokens = self.inner.log_probs((padded.inputs, padded.targets), temperature=temperature, entropy=entropy)
        else:
            output = self.inner.forward(**padded.inputs)
            of_tokens = token_log_probs(output, padded.targets, temperature=temperature, entropy=entropy)
        values = {"log_probs": of_tokens.log_probs, "entropy": of_tokens.entropies}
        return {name: padded.nested(value) for name, value in values.items() if value is not None}

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[Any], None]:
        """Walk over whole tensors in the folder's names, with adapters merged: so a server needs to know of none."""
        self.to(_DEVICE, model=True, optimizer=False, grad=False)
        return iter(self.inner.weights()), None

    def get_data_parallel_size(self) -> int:
        return self.mesh.num_data_ranks

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data_index(dist.get_rank())

    def get_data_parallel_group(self) -> Any:
        return self.inner.parts.comms.data.process_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return dist.get_rank() == min(
            self.mesh.ranks_along((*PIPELINE_AXES, *CONTEXT_AXES, *TENSOR_AXES), dist.get_rank())
        )

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move states to the host, or back; on a CPU they are there."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        names = {"params": model, "master": optimizer, "optimizer": optimizer, "grads": grad}
        moved = frozenset(name for name, is_moved in names.items() if is_moved)
        away = self._away | moved if device == "cpu" else self._away - moved
        if self.inner.device.type != "cpu" and away != self._away:
            self.inner.reload()
            self._away = away
            if away:
                self.inner.offload(sorted(away))

    def save_checkpoint(self, local_path: str, *more: Any, **options: Any) -> None:
        """Save into a folder of the step; verl removes old ones."""
        self.to(_DEVICE)
        self.inner.save(local_path, tag=STRATEGY)
        if self.checkpoint_config is not None and "hf_model" in self.checkpoint_config.get("save_contents", ()):
            self.inner.export_weights(Path(local_path, "huggingface"))
        self._offload()

    def load_checkpoint(self, local_path: str, *more: Any, **options: Any) -> None:
        self.to(_DEVICE)
        self.inner.load(local_path, tag=STRATEGY)
        self._offload()

    def disable_adapter(self) -> Any:
        return self.model.disable_adapter() if self.model_config.lora_rank else nullcontext()


def _temperature_of(batch: Any) -> float:
    """Return the temperature of a micro-batch, which all its samples share."""
    values = set(torch.as_tensor(tensordict_utils.get_non_tensor_data(batch, "temperature", 1.0)).flatten().tolist())
    if len(values) != 1:
        raise ConfigError("verl-temperatures", f"temperatures {sorted(values)} in one micro-batch; use one for all")
    return float(values.pop())
