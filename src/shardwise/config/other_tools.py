"""Names the key for an option of other trainers: a user of those tries theirs first."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_MICRO, _GLOBAL, _LENGTH, _LR = "batch.micro_size=...", "batch.global_size=...", "data.seq_len=...", "optimizer.lr=..."
_RANKS, _PLACE, _MODEL, _DATA = "run.num_procs=...", "run.dir=...", "model.path=...", "data.path=..."
_DTYPE, _TP, _PP, _CP = "precision.param=...", "mesh.tp=...", "mesh.pp=...", "mesh.cp=..."

# What to write for options of transformers, accelerate, DeepSpeed, Megatron-LM, torchtitan, axolotl and LLaMA-Factory.
SETTING_OF: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bf16": "precision.param=bf16", "fp16": "precision.param=fp16", "fp32": "precision.param=fp32",
        "fp8": "precision.linears=fp8", "precision": _DTYPE, "mixed_precision": _DTYPE, "dtype": _DTYPE,
        "torch_dtype": _DTYPE, "batch_size": f"{_MICRO} or {_GLOBAL}", "train_batch_size": _GLOBAL,
        "global_batch_size": _GLOBAL, "micro_batch_size": _MICRO, "per_device_train_batch_size": _MICRO,
        "train_micro_batch_size_per_gpu": _MICRO, "local_batch_size": _MICRO,
        "gradient_accumulation_steps": "batch.accumulation=...", "grad_accum": "batch.accumulation=...",
        "epochs": "run.epochs=...", "num_epochs": "run.epochs=...", "num_train_epochs": "run.epochs=...",
        "max_epochs": "run.epochs=...", "max_steps": "run.steps=...", "num_steps": "run.steps=...",
        "train_iters": "run.steps=...", "iterations": "run.steps=...", "learning_rate": _LR,
        "max_learning_rate": _LR, "optim": "optimizer.name=...", "optimizer": "optimizer.name=...",
        "max_grad_norm": "optimizer.clip_norm=...", "clip_grad": "optimizer.clip_norm=...",
        "gradient_clipping": "optimizer.clip_norm=...", "wd": "optimizer.weight_decay=...",
        "lr_scheduler": "scheduler.name=...", "lr_scheduler_type": "scheduler.name=...",
        "scheduler": "scheduler.name=...", "warmup": "scheduler.warmup_steps=...",
        "warmup_ratio": "scheduler.warmup_steps=...", "lr_warmup_iters": "scheduler.warmup_steps=...",
        "seq_length": _LENGTH, "max_length": _LENGTH, "max_seq_length": _LENGTH, "max_seq_len": _LENGTH,
        "block_size": _LENGTH, "cutoff_len": _LENGTH, "sequence_len": _LENGTH, "sequence_length": _LENGTH,
        "output": _PLACE, "output_dir": _PLACE, "out": _PLACE, "out_dir": _PLACE,
        "logging_dir": _PLACE, "log_dir": _PLACE,
        "save": "checkpoint.path=...", "save_dir": "checkpoint.path=...", "checkpoint_dir": "checkpoint.path=...",
        "save_steps": "checkpoint.every=...", "save_interval": "checkpoint.every=...",
        "save_every": "checkpoint.every=...", "save_total_limit": "checkpoint.keep_last=...",
        "load": "--resume PATH", "resume_from_checkpoint": "--resume PATH", "resume_from": "--resume PATH",
        "checkpoint": "--resume PATH", "eval_steps": "run.eval_every=...", "eval_interval": "run.eval_every=...",
        "model_name": _MODEL, "model_name_or_path": _MODEL, "pretrained_model_name_or_path": _MODEL,
        "base_model": _MODEL, "preset": "model.preset=...", "dataset": _DATA, "dataset_name": _DATA,
        "data_path": _DATA, "train_file": _DATA, "train_data": _DATA, "train_data_path": _DATA, "datasets": _DATA,
        "tokenizer_name": "data.tokenizer=...", "lora_r": "lora.rank=...", "lora_rank": "lora.rank=...",
        "lora_alpha": "lora.alpha=...", "lora_dropout": "lora.dropout=...",
        "lora_target_modules": "lora.targets=...", "lora_target": "lora.targets=...", "qlora": "lora.base=nf4",
        "load_in_4bit": "lora.base=nf4", "gradient_checkpointing": "recompute.mode=full",
        "activation_checkpointing": "recompute.mode=full", "recompute_activations": "recompute.mode=selective",
        "torch_compile": "compile.enabled=true", "compile": "compile.enabled=true", "zero": "zero.stage=...",
        "zero_stage": "zero.stage=...", "fsdp": "zero.stage=3", "ddp": "zero.stage=0",
        "deepspeed": "zero.stage=..., or shardwise convert for a JSON of DeepSpeed",
        "deepspeed_config": "zero.stage=..., or shardwise convert for a JSON of DeepSpeed",
        "offload": "tiers.optimizer=host", "cpu_offload": "tiers.optimizer=host",
        "tensor_parallel": _TP, "tensor_parallel_size": _TP, "tensor_model_parallel_size": _TP, "tp_size": _TP,
        "pipeline_parallel": _PP, "pipeline_parallel_size": _PP, "pipeline_model_parallel_size": _PP, "pp_size": _PP,
        "context_parallel": _CP, "context_parallel_size": _CP, "sequence_parallel_size": _CP, "cp_size": _CP,
        "nproc_per_node": _RANKS, "num_processes": _RANKS, "num_gpus": _RANKS, "gpus": _RANKS, "devices": _RANKS,
        "nproc": _RANKS, "report_to": "run.sinks=...", "wandb": 'run.sinks=["jsonl","wandb"]',
        "logger": "run.sinks=...",
        "run_name": "run.name=...", "experiment_name": "run.name=...", "threads": "run.num_threads=...",
        "timeout": "run.timeout_s=...", "cpu": "run.device=cpu", "use_cpu": "run.device=cpu", "cuda": "run.device=cuda",
        "gpu": "run.device=cuda",
    }
)  # fmt: skip


def setting_of(option: str) -> str:
    """Return what to write for an option of another trainer, such as `--bf16` or `num-epochs`; empty if not known.

    >>> setting_of("--output-dir"), setting_of("colour")
    ('run.dir=...', '')
    """
    return SETTING_OF.get(option.lstrip("-").replace("-", "_").lower(), "")
