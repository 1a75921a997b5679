"""Train a model of `local_hub` with transformers' Trainer, whose arguments alone name DeepSpeed's config.

    torchrun --nproc_per_node 2 trainer.py arguments.json MODEL

The JSON has the arguments of `TrainingArguments`, and may have `kill_in_save`, a step at whose save the process kills
itself, `measure`, for the memory that loading takes, `adapters`, to train PEFT's alone, `packed`, for a base in 4 bits,
and `sft`, for TRL's SFTTrainer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

NUM_SAMPLES = 64


class PeakMemory:
    """Samples the anonymous memory of this process while it is open."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = resident_bytes()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.ended.wait(0.001):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def kill_in_save(step: int) -> None:
    """Kill this process when it is about to make the checkpoint of a step whole."""

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and f"checkpoint-{step}/global_step" in str(arguments[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(listen)


def main(arguments: Sequence[str]) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments, set_seed

    given = json.loads(Path(arguments[0]).read_text())
    if step := given.pop("kill_in_save", None):
        kill_in_save(step)
    measure, has_adapters = given.pop("measure", None), given.pop("adapters", False)
    how = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)} if given.pop("packed", False) else {}
    torch.set_num_threads(1)
    kind, arguments_of = Trainer, TrainingArguments
    is_sft = given.pop("sft", False)
    if is_sft:
        from trl import SFTConfig, SFTTrainer

        kind, arguments_of = SFTTrainer, partial(SFTConfig, bf16=False, dataset_kwargs={"skip_prepare_dataset": True})
    options = arguments_of(use_cpu=True, report_to="none", logging_steps=1, **given)
    set_seed(options.seed)
    if measure:
        with PeakMemory() as memory:
            model = AutoModelForCausalLM.from_pretrained(arguments[1])
        path = Path(measure) / f"peak-{os.environ.get('RANK', '0')}"
        path.write_text(str(memory.peak - memory.before))
        return
    model = AutoModelForCausalLM.from_pretrained(arguments[1], **how)
    vocab_size = model.config.vocab_size
    if has_adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    tokens = torch.randint(3, vocab_size, (NUM_SAMPLES, 12), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    if is_sft:
        from datasets import load_dataset

        rows = Path(arguments[0]).with_name(f"tokens-{os.environ.get('RANK', '0')}.json")
        rows.write_text("".join(f"{json.dumps({'input_ids': row})}\n" for row in tokens.tolist()))
        data = load_dataset("json", data_files=str(rows), split="train")
    trainer = kind(model, options, train_dataset=data)
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main(sys.argv[1:])
