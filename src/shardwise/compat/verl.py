"""An engine of Shardwise with verl's interface; import it where verl reads `external_lib`, and name it as strategy.

verl's losses are divided by what counts on all data ranks, times their number, and summed over micro-batches. They read
whole sequences, of whose tokens each rank of `mesh.cp` has some: the numbers of the others are gathered. Under
`mesh.pp` the ranks with the last stage have the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForTokenClassification
from transformers.utils import is_flash_attn_2_available
from verl.utils import tensordict_utils
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import ActorConfig, EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from shardwise.checkpoint.deltas import HeldChanges
from shardwise.comm.collectives import CommResources
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.construction.context import init
from shardwise.context.batch import PaddedTokens, gather_tokens
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.layout.mesh_shape import DATA_AXES, MeshShape
from shardwise.layout.precision import dtype_key
from shardwise.runtime.device import KINDS
from shardwise.schedule.pipelines import placement_of
from shardwise.tensor.chunked import deferred_head
from shardwise.tensor.token_log_probs import token_log_probs

STRATEGY: Final = "shardwise"
_DEVICE: Final = "device"  # any name but "cpu" stands for it: verl knows no machine without an accelerator


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
        "precision": {"param": dtype_key(engine_config.dtype)},
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


class _Mode(BaseEngineCtx):
    """Puts the model into a mode, and states where verl wants them, for a context."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

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

    is_param_offload_enabled = property(lambda self: bool(self.engine_config.param_offload))
    is_optimizer_offload_enabled = property(lambda self: bool(self.engine_config.optimizer_offload))

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self._is_critic = model_config.model_type == "value_model"
        self.config = Config.from_dict(sections_of(model_config, engine_config, optimizer_config))
        self.mesh = MeshShape.from_config(self.config.resolve(dist.get_world_size()).mesh)
        self._away: frozenset[str] = frozenset()
        self._changes = HeldChanges()

    def initialize(self) -> None:
        self.inner = self._make_engine()
        self.module: Any = self.inner.model
        self.optimizer = self.inner.optimizer
        self.inner.parts.losses.adds_up = True
        parts, alone = self.inner.parts, CommResources.alone(self.inner.device, self.inner.config.run.timeout_s)
        self._data = parts.comm_factory.comm(DATA_AXES, "verl", alone, "data")
        if not self.engine_config.forward_only:
            schedule = self.lr_scheduler = self._schedule()
            saved = {"state_dict": schedule.state_dict, "load_state_dict": schedule.load_state_dict}
            # verl steps it, after the optimizer's steps of a batch.
            self.inner.scheduler = SimpleNamespace(step=lambda: None, optimizer=schedule.optimizer, **saved)
        self._offload()

    def _offload(self) -> None:
        params, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to("cpu", model=params, optimizer=optimizer, grad=params)

    def _make_engine(self) -> Engine:
        config = self.model_config
        path, hf_config, trust = config.local_path, config.hf_config, config.trust_remote_code
        if hf_config._attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
            hf_config._attn_implementation = "sdpa"
        if self._is_critic:
            hf_config.num_labels, hf_config.classifier_dropout = 1, 0.0
            model = AutoModelForTokenClassification.from_pretrained(path, config=hf_config, trust_remote_code=trust)
            return initialize(model.float(), self.config)
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
        inner, comm = self.inner, self._data
        (num_tokens,) = comm.sum_scalars(data["loss_mask"].sum().reshape(1).to(comm.device), "tokens of verl's batch")
        sizes = {"sp_size": self.mesh.cp, "dp_size": self.get_data_parallel_size(), "batch_num_tokens": num_tokens}
        tensordict_utils.assign_non_tensor(data, **sizes)
        keeps_output = forward_only or tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        batches, indices = prepare_micro_batches(data=data, dp_group=comm.process_group, same_micro_num_in_dp=True)
        batches = [batch.to(inner.device) for batch in batches]
        multiple = 2 * self.mesh.cp * self.mesh.tp  # by which whole sequences can be cut
        padded = [PaddedTokens.of(batch["input_ids"], multiple) for batch in batches]
        outputs: list[dict[str, Any]] = []  # of the ranks that have the last stage

        def loss_fn(output: Any, batch: Any) -> tuple[Tensor, float]:
            _, number, places = batch
            data, loss, metrics = batches[number], torch.ones((), device=inner.device), {}
            values = self._read(output, data, padded[number], places[0])
            if loss_function is not None:
                loss, metrics = loss_function(model_output=values, data=data, dp_group=comm.process_group)
            detached = {name: value.detach() for name, value in values.items()} if keeps_output else {}
            outputs.append({"model_output": detached, "loss": loss.item(), "metrics": metrics})
            return loss, 1.0

        to_compute = [(sequences.inputs, number, sequences.places) for number, sequences in enumerate(padded)]
        with inner.parts.state.with_own_loss(loss_fn):
            if not forward_only:
                inner.forward_backward(to_compute)
            else:
                with nullcontext() if self._is_critic else deferred_head(inner.model, inner.layout):
                    inner.eval_step(to_compute)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _read(self, output: Any, batch: Any, padded: PaddedTokens, places: Tensor) -> dict[str, Tensor]:
        """Return the numbers of all tokens, by verl's name, from the model's output for those at some places."""
        if self._is_critic:
            values = {"values": output.logits.squeeze(-1)}
        else:
            options = {"entropy": bool(tensordict_utils.get_non_tensor_data(batch, "calculate_entropy", False))}
            temperature = _temperature_of(batch)
            of_tokens = token_log_probs(output, padded.targets[:, places], temperature=temperature, **options)
            values = {"log_probs": of_tokens.log_probs, "entropy": of_tokens.entropies}
        values = {name: value for name, value in values.items() if value is not None}
        among = padded.tokens.shape[1], self.inner.parts.comms.context
        return {name: padded.nested(gather_tokens(value, places, *among)) for name, value in values.items()}

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[Any], None]:
        """Walk over whole tensors in the folder's names, with adapters merged: so a server needs to know of none."""
        self.to(_DEVICE, model=True, optimizer=False, grad=False)
        return iter(self.inner.weights()), None

    def prime_delta_snapshots(self) -> None:
        """Remember what each rank holds, which has just been sent."""
        for _ in self._deltas():
            pass

    def get_per_tensor_param_delta_shard(self, **options: Any) -> tuple[Iterator[Any], None]:
        """Walk over all tensors, the same on each rank, with what has changed since of those parts that it holds."""
        self.to(_DEVICE, model=True, optimizer=False, grad=False)
        return self._deltas(), None

    def _deltas(self) -> Iterator[Any]:
        source, device = self.inner.weights(), self.inner.device
        for (name, dtype, shape), places, values in self._changes.take(source.metadata(), source.shards(once=True)):
            counts, in_words = torch.tensor([len(places)]), str(dtype).removeprefix("torch.")
            yield [(name, shape)], in_words, counts, places.int().to(device), values.to(device), dist.group.WORLD

    def get_data_parallel_size(self) -> int:
        return self.mesh.num_data_ranks

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data_index(dist.get_rank())

    def get_data_parallel_group(self) -> Any:
        return self._data.process_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        rank_at, section = self.mesh.coordinate(dist.get_rank()), self.config.pipeline
        stages = placement_of(section.schedule, self.mesh.pp, section.virtual_stages)
        return (rank_at.pp, rank_at.cp, rank_at.tp) == (stages.rank_of(stages.num_stages - 1), 0, 0)

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
        return self.module.disable_adapter() if self.model_config.lora_rank else nullcontext()


def _temperature_of(batch: Any) -> float:
    """Return the temperature of a micro-batch, which all its samples share."""
    values = set(torch.as_tensor(tensordict_utils.get_non_tensor_data(batch, "temperature", 1.0)).flatten().tolist())
    if len(values) != 1:
        raise ConfigError("verl-temperatures", f"temperatures {sorted(values)} in one micro-batch; use one for all")
    return float(values.pop())
