"""The public scripts that run through the `deepspeed` shim, with the arguments for models and data of `local_hub`.

Paths are those of the projects' repositories, cloned side by side into one folder under their own names. TRL's
scripts come with its wheel, and the installed ones are run.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

NUM_STEPS: Final = 4
NUM_RANKS: Final = 2
ZERO: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "zero1": {"stage": 1},
        "zero2": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
        "zero3": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero3+offload": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
)
# What Hugging Face's documentation leaves to Trainer.
AUTOMATIC: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OF_STAGE_3: Final = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)

# The share of even tokens, which a sampler that does not know it misses half the time.
REWARD: Final = """\
def even(completion_ids, **_):
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]
"""


@dataclass(frozen=True)
class Job:
    """One run of a script: plain where `zero` is None."""

    hub: Path
    output: Path
    zero: str | None
    precision: str

    def micro_size(self, of_a_rank: int) -> int:
        """Return the micro-batch of one process: the plain one has that of all ranks."""
        return of_a_rank if self.zero else of_a_rank * NUM_RANKS

    def write_config(self, config: Mapping[str, Any]) -> str:
        return write_config(self.output, config)


@dataclass(frozen=True)
class Script:
    """A public script.

    Attributes:
        path: in the folder of clones; `trl/...` is in the installed package.
        arguments: of a job.
        options: of the recorder.
        accumulation: micro-batches a step.
        mean: whether the losses that it passes on are to be averaged over a step's micro-batches, or added.
        steps: whether its ranks record whole steps, as a pipeline's engine returns them.
        precisions: in which it runs.
        settings: of `ZERO`, those that it can be run with.
    """

    path: str
    arguments: Callable[[Job], list[str]]
    options: tuple[str, ...] = ()
    accumulation: int = 1
    mean: bool = False
    steps: bool = False
    precisions: tuple[str, ...] = ("fp32", "bf16")
    settings: tuple[str, ...] = tuple(ZERO)

    def find(self, clones: Path) -> Path | None:
        """Return where the script is, or None where it is missing."""
        if not self.path.startswith("trl/"):
            path = clones / self.path
        else:
            spec = importlib.util.find_spec("trl")
            if spec is None or spec.origin is None:
                return None
            path = Path(spec.origin).parent / self.path.removeprefix("trl/")
        return path if path.exists() else None


def trainer_arguments(job: Job, model: str, micro_size: int, accumulation: int, rate: float) -> list[str]:
    """Return what every script with a Trainer is given.

    Args:
        job: the run.
        model: a folder of the hub.
        micro_size: of a rank.
        accumulation: micro-batches a step.
        rate: of learning.
    """
    given = {
        "model_name_or_path": str(job.hub / model),
        "output_dir": str(job.output / "out"),
        "per_device_train_batch_size": job.micro_size(micro_size),
        "gradient_accumulation_steps": accumulation,
        "learning_rate": rate,
        "max_steps": NUM_STEPS,
        "save_steps": NUM_STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": job.precision == "bf16",
        "seed": 7,
    }
    if job.zero:
        given["deepspeed"] = job.write_config(trainer_config(job.zero))
    return [f"--{name}={value}" for name, value in given.items()]


def write_config(folder: Path, config: Mapping[str, Any]) -> str:
    """Write a JSON of DeepSpeed's into a folder, and return its path."""
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config, indent=2))
    return str(path)


def trainer_config(zero: str) -> dict[str, Any]:
    """Return a JSON as Hugging Face's documentation writes it."""
    stage_3 = dict.fromkeys(OF_STAGE_3, "auto") if "zero3" in zero else {}
    return {
        "zero_optimization": {**ZERO[zero], **stage_3},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys(AUTOMATIC, "auto"),
    }


def clm(job: Job) -> list[str]:
    return [
        *trainer_arguments(job, "gpt2", 2, 2, 5e-3),
        f"--train_file={job.hub}/text/train.json",
        f"--validation_file={job.hub}/text/test.json",
        "--block_size=32",
        "--do_train",
    ]


def sft(job: Job) -> list[str]:
    return [
        *trainer_arguments(job, "llama", 2, 2, 5e-3),
        f"--dataset_name={job.hub}/text",
        "--max_length=64",
        "--dtype=float32",
    ]


def dpo(job: Job) -> list[str]:
    return [
        *trainer_arguments(job, "llama", 2, 2, 1e-3),
        f"--dataset_name={job.hub}/pairs",
        "--beta=0.04",  # the loss takes differences of sums of log-probabilities, each rounded in bfloat16
        "--max_length=64",
        "--dtype=float32",
    ]


def grpo(job: Job) -> list[str]:
    (job.output / "tiny_reward.py").write_text(REWARD)
    return [
        *trainer_arguments(job, "llama", 4, 1, 1e-3),
        f"--dataset_name={job.hub}/prompts",
        "--dtype=float32",
        "--reward_funcs=tiny_reward.even",
        "--num_generations=2",
        "--max_completion_length=8",
        "--beta=0.05",
        # Answers end early, and on some rank before the other.
        '--generation_kwargs={"sequence_bias": [[[2], 4.5]]}',
    ]


def grpo_module_by_module(job: Job) -> list[str]:
    return [*grpo(job), "--ds3_gather_for_generation=False"]


def with_adapters(arguments: Callable[[Job], list[str]]) -> Callable[[Job], list[str]]:
    """Return the arguments of a TRL script that trains PEFT's adapters."""
    options = (
        "--use_peft=True",
        "--lora_r=4",
        "--lora_dropout=0.0",
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "up_proj",
    )
    return lambda job: [*arguments(job), *options]


def peft(job: Job) -> list[str]:
    return [
        *trainer_arguments(job, "llama", 2, 2, 2e-2),
        f"--dataset_name={job.hub}/text",
        "--dataset_text_field=content",
        "--chat_template_format=none",
        "--max_length=64",
        "--use_peft_lora=True",
        "--lora_r=4",
        "--lora_dropout=0.0",
        "--lora_target_modules=q_proj,v_proj,up_proj",
    ]


def accelerate_clm(job: Job) -> list[str]:
    # The launcher takes the JSON, see run.py; the loop itself does not clip.
    if job.zero:
        config = {**trainer_config(job.zero), "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
        job.write_config({**config, "bf16": {"enabled": job.precision == "bf16"}})
    return [
        f"--model_name_or_path={job.hub}/gpt2",
        f"--train_file={job.hub}/text/train.json",
        f"--validation_file={job.hub}/text/test.json",
        f"--output_dir={job.output}/out",
        f"--per_device_train_batch_size={job.micro_size(2)}",
        "--per_device_eval_batch_size=2",
        "--gradient_accumulation_steps=2",
        "--block_size=32",
        f"--max_train_steps={NUM_STEPS}",
        "--learning_rate=5e-3",
        "--lr_scheduler_type=constant",
        "--seed=7",
        "--load_best_model",
    ]


def cifar(job: Job) -> list[str]:
    stage = ["--stage", str(ZERO[job.zero]["stage"])] if job.zero else []
    return ["--epochs=1", "--log-interval=1", f"--dtype={job.precision}", *stage]


def own_config(job: Job, **given: Any) -> str:
    """Write the config of a script that gives it to DeepSpeed itself, and return its path."""
    zero = {"zero_optimization": ZERO[job.zero]} if job.zero else {}
    config = {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.99], "weight_decay": 0.01}},
        "bf16": {"enabled": job.precision == "bf16"},
        **zero,
        **given,
    }
    return job.write_config(config)


def gpt(job: Job) -> list[str]:
    # Both ranks draw the same batches: one process with a rank's batch does the same.
    config = own_config(job, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1)
    return [
        *(f"--{name}" for name in ("hidden_dim=32", "num_layers=2", "num_heads=4", "vocab_size=64")),
        *(f"--{name}" for name in ("batch_size=2", "seq_length=16", f"num_steps={NUM_STEPS}")),
        f"--deepspeed_config={config}",
    ]


def finetune(job: Job) -> list[str]:
    config = json.loads(Path(own_config(job, train_micro_batch_size_per_gpu=job.micro_size(2))).read_text())
    # The script brings its optimizer.
    del config["optimizer"]
    path = job.write_config(config)
    return [
        f"--model_name={job.hub}/llama",
        "--lr=1e-3",
        "--batch_size=2",
        f"--output_dir={job.output}/out",
        "--attn_implementation=sdpa",
        "--max_length=32",
        f"--bench_steps={NUM_STEPS}",
        f"--dataset_name={job.hub}/tasks",
        "--activation_checkpointing",
        "--deepspeed",
        f"--deepspeed_config={path}",
    ]


def pipeline(job: Job) -> list[str]:
    config = own_config(job, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    num_stages = 2 if job.zero else 0
    return [
        "--backend=gloo",
        f"--steps={NUM_STEPS}",
        f"--pipeline-parallel-size={num_stages}",
        f"--deepspeed_config={config}",
    ]


SCRIPTS: Final[Mapping[str, Script]] = MappingProxyType(
    {
        "transformers run_clm": Script(
            "transformers/examples/pytorch/language-modeling/run_clm.py", clm, accumulation=2
        ),
        "accelerate deepspeed example": Script(
            "accelerate/examples/by_feature/deepspeed_with_config_support.py",
            accelerate_clm,
            ("--accelerate",),
            accumulation=2,
            mean=True,
        ),
        "trl sft": Script("trl/scripts/sft.py", sft, accumulation=2),
        "trl dpo": Script("trl/scripts/dpo.py", dpo, accumulation=2),
        "trl dpo lora": Script("trl/scripts/dpo.py", with_adapters(dpo), accumulation=2),
        "trl grpo": Script("trl/scripts/grpo.py", grpo, ("--sample-by-row",)),
        "trl grpo lora": Script("trl/scripts/grpo.py", with_adapters(grpo), ("--sample-by-row",)),
        "trl grpo module by module": Script("trl/scripts/grpo.py", grpo_module_by_module, ("--sample-by-row",)),
        "peft sft": Script("peft/examples/sft/train.py", peft, accumulation=2),
        "deepspeed cifar": Script(
            "DeepSpeedExamples/training/cifar/cifar10_deepspeed.py",
            cifar,
            ("--deepspeed",),
            settings=("zero1", "zero2", "zero3"),
        ),
        "deepspeed transformer": Script(
            "DeepSpeedExamples/training/bf16_master_weight/train.py", gpt, ("--deepspeed",)
        ),
        "deepspeed finetune": Script(
            "DeepSpeedExamples/training/DeepSpeed-SuperOffload/finetune_zero3.py",
            finetune,
            ("--deepspeed",),
            precisions=("bf16",),
        ),
        "deepspeed pipeline": Script(
            "DeepSpeedExamples/training/pipeline_parallelism/train.py",
            pipeline,
            ("--deepspeed",),
            accumulation=2,
            mean=True,
            steps=True,
            precisions=("fp32",),
            settings=("zero1",),
        ),
    }
)
