"""Run one use that scripts make of Hugging Face's libraries, and write down its numbers.

    torchrun --nproc_per_node 2 features.py CASE MODEL FOLDER [deepspeed.json]

With a config it trains through `deepspeed`; without one it is the plain process that has the samples of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_SAMPLES: Final = 32
NUM_RANKS: Final = 2
STEP_OF_USE: Final = 2
ARGUMENTS: Final = (
    *("output_dir", "use_cpu", "report_to", "logging_steps", "max_steps", "save_strategy", "learning_rate"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "deepspeed"),
)


class Use:
    """Where a case runs: its model, its folder, and DeepSpeed's config where it has one."""

    def __init__(self, model: str, folder: str, config: str | None = None) -> None:
        self.model, self.folder, self.config = model, Path(folder), config
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def arguments(self, **more: Any) -> Any:
        """Return Trainer's arguments; the ranks share micro-batches of four samples."""
        from transformers import TrainingArguments

        given = {
            "output_dir": str(self.folder / "out"),
            "use_cpu": True,
            "report_to": "none",
            "logging_steps": 1,
            "max_steps": 4,
            "save_strategy": "no",
            "learning_rate": 5e-3,
            "per_device_train_batch_size": 4 // self.world,
            "per_device_eval_batch_size": 4 // self.world,
            "deepspeed": self.config,
        }
        return TrainingArguments(**{**given, **more})

    def load(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model)

    def trainer(self, model: Any = None, arguments: Any = None, wrap: Callable[[Any], Any] | None = None) -> Any:
        from transformers import Trainer

        arguments = arguments or self.arguments()  # before the model: under stage 3 it is loaded as shards
        model = model or self.load()
        model = wrap(model) if wrap else model
        return Trainer(model, arguments, train_dataset=samples(), eval_dataset=samples()[:8])

    def whole(self, parameters: Any, modifier_rank: int | None = None) -> AbstractContextManager[Any]:
        """Return what makes parameters whole; nothing does where the run is plain."""
        if self.config is None:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters, modifier_rank)
        return context

    def listed(self, value: Any) -> list[Any]:
        """Return each rank's value."""
        found = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found

    def mean(self, value: Tensor) -> float:
        """Return the mean of the ranks' values."""
        found: float = sum(self.listed(value.item())) / self.world
        return found

    def my_ranks(self) -> Sequence[int]:
        """Return the ranks whose share this process computes: the plain one has all."""
        return [self.rank] if self.world > 1 else range(NUM_RANKS)


def samples() -> list[Mapping[str, Tensor]]:
    rows = torch.randint(3, 200, (NUM_SAMPLES, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def total(values: Tensor) -> float:
    return values.detach().double().abs().sum().item()


def at_a_step(do: Callable[[], object]) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == STEP_OF_USE:
                do()

    return Callback()


def generate(use: Use) -> list[Any]:
    """Generate in training, each rank another number of tokens."""
    from trl.models.utils import unwrap_model_for_generation

    trainer, tokens = use.trainer(), []

    def continued(model: Any) -> list[list[int]]:
        found = []
        for rank in use.my_ranks():
            prompts = torch.randint(3, 200, (2, 5), generator=torch.Generator().manual_seed(rank))
            options = {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            found += model.generate(prompts, attention_mask=torch.ones_like(prompts), **options).tolist()
        return found

    def generate_both_ways() -> None:
        apart = continued(trainer.model)
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            assert continued(model) == apart
        tokens.extend(each for found in use.listed(apart) for each in found)

    trainer.add_callback(at_a_step(generate_both_ways))
    trainer.train()
    return [losses(trainer), tokens]


def predict(use: Use) -> list[Any]:
    """Train T5 and BART by Seq2SeqTrainer, which generates in each evaluation."""
    import transformers

    found: list[Any] = []
    sizes = {"vocab_size": 200, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0}
    t5 = transformers.T5Config(**sizes, d_kv=4, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    bart = transformers.BartConfig(
        **sizes, **layers, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0
    )
    for config, kind in ((t5, "T5ForConditionalGeneration"), (bart, "BartForConditionalGeneration")):
        given = use.arguments().to_dict()
        options = {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "steps", "eval_steps": 2}
        # These models ignore the number of tokens that Trainer counts, but it scales their loss by the ranks.
        chosen = {key: given[key] for key in ARGUMENTS} | {"average_tokens_across_devices": False}
        arguments = transformers.Seq2SeqTrainingArguments(**chosen, **options)
        torch.manual_seed(0)
        trainer = transformers.Seq2SeqTrainer(
            getattr(transformers, kind)(config),
            arguments,
            train_dataset=samples(),
            eval_dataset=samples()[:8],
            compute_metrics=lambda found: {"tokens": float(found.predictions.sum())},
        )
        trainer.train()
        rows = trainer.state.log_history
        found += [losses(trainer), [row["eval_tokens"] for row in rows if "eval_tokens" in row]]
        found.append([row["eval_loss"] for row in rows if "eval_loss" in row])
    return found


class Towers(nn.Module):
    """Reads words, and an image where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.tower = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, words: Tensor, image: Tensor | None) -> Tensor:
        hidden = self.words(words)
        if image is not None:
            for layer in self.tower:
                image = layer(image).tanh()
            hidden = hidden + image
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


def images(use: Use) -> list[Any]:
    """Train and evaluate a model of which the ranks use different parts."""
    torch.manual_seed(0)
    model: Any = Towers()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    if use.config:
        import deepspeed

        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "gradient_clipping": 0.0}
        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    found = []
    draw = torch.Generator().manual_seed(1)
    for with_image in ([0], [1], [], [0, 1], [0]):
        words = torch.randint(0, 16, (NUM_RANKS, 2, 5), generator=draw)
        image = torch.randn(NUM_RANKS, 2, 1, 8, generator=draw)
        mine = [(words[rank], image[rank] if rank in with_image else None) for rank in use.my_ranks()]
        loss = torch.stack([model(*each) for each in mine]).mean()
        if use.config:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            evaluated = torch.stack([model(*each) for each in mine]).mean()
        found += [use.mean(loss), use.mean(evaluated)]
    return found


def adapters(use: Use) -> list[Any]:
    """Train adapters alone, save them without their base and without gathering it, and load them again."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        options = {"target_modules": ["q_proj"], "modules_to_save": ["v_proj"], "task_type": "CAUSAL_LM"}
        return get_peft_model(model, LoraConfig(r=2, **options))

    saves, final = {"save_strategy": "steps", "save_steps": STEP_OF_USE}, use.folder / "final"
    trainer = use.trainer(arguments=use.arguments(**saves), wrap=adapted)
    trainer.train()
    read = note_reads() if use.config else ["lora"]
    trainer.save_model(str(final))
    assert all("lora" in name or "v_proj.modules_to_save" in name for name in read), read
    use.listed("the files are written")
    assert {each.name for each in final.glob("*.safetensors")} == {"adapter_model.safetensors"}
    found = [losses(trainer)]
    checkpoint = use.folder / "out" / f"checkpoint-{STEP_OF_USE}"
    if use.config:
        trained = {name for name, each in trainer.model.named_parameters() if each.requires_grad}
        assert trained == {name for name, _ in trainer.model.named_parameters() if "lora" in name or "to_save" in name}
        base = sum(each.nbytes for name, each in trainer.model.named_parameters() if name not in trained)
        assert sum(each.stat().st_size for each in checkpoint.rglob("*.safetensors")) < base / 2
    again = use.trainer(arguments=use.arguments(**saves), wrap=adapted)
    again.train(resume_from_checkpoint=str(checkpoint))
    found.append(losses(again))

    def loaded(model: Any) -> Any:
        with use.whole(model.parameters()):  # PEFT copies values into the modules to save
            return PeftModel.from_pretrained(model, str(final))

    found.append(use.trainer(wrap=loaded).evaluate()["eval_loss"])
    return found


def note_reads() -> list[str]:
    """Return a list to which the name of each parameter is added whose whole values the engine gathers."""
    from shardwise.engine.engine import Engine
    from shardwise.zero.param_group import ParamGroup

    read: list[str] = []
    plain_read, plain_unshard = Engine.read, ParamGroup.unshard

    def note_read(engine: Engine, name: str, *rest: Any, **options: Any) -> Any:
        read.append(name)
        return plain_read(engine, name, *rest, **options)

    def note_unshard(group: ParamGroup, *rest: Any, **options: Any) -> Any:
        read.extend(place.name for place in group.spec.params)
        return plain_unshard(group, *rest, **options)

    Engine.read, ParamGroup.unshard = note_read, note_unshard  # type: ignore[method-assign]
    return read


def let_train_again(use: Use, trainer: Any) -> None:
    """Let a plain Trainer start its optimizer without states at the next `train()`, as it does under DeepSpeed."""
    if use.config is None:
        trainer.model_wrapped = trainer.model
        trainer.optimizer = None


def evaluate_first(use: Use) -> list[Any]:
    """Evaluate before training, after it, and by a Trainer that never trains."""
    trainer = use.trainer()
    before = trainer.evaluate()["eval_loss"]
    let_train_again(use, trainer)
    trainer.train()
    return [before, losses(trainer), trainer.evaluate()["eval_loss"], use.trainer().evaluate()["eval_loss"]]


def train_twice(use: Use) -> list[Any]:
    """Call `train()` again, from a checkpoint too, hand the model over to another Trainer and take it back."""
    saves = {"save_strategy": "steps", "save_steps": STEP_OF_USE}
    trainer = use.trainer(arguments=use.arguments(**saves))
    found = []
    for checkpoint in (None, None, str(use.folder / "out" / f"checkpoint-{STEP_OF_USE}")):
        let_train_again(use, trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        found += losses(trainer)
    second = use.trainer(trainer.model)
    second.train()
    let_train_again(use, trainer)
    trainer.train()
    return found + losses(second) + losses(trainer)


def best(use: Use) -> list[Any]:
    """Load the best checkpoint at the end, which is not the last."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = use.trainer(arguments=use.arguments(**options))
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2"), trainer.state.log_history
    again = trainer.evaluate()["eval_loss"]
    assert abs(again - trainer.state.best_metric) < 1e-5, (again, trainer.state.best_metric)
    return [losses(trainer), again]


def recompute(use: Use, use_reentrant: bool) -> list[Any]:
    """Train with gradient checkpointing."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    trainer = use.trainer(arguments=use.arguments(gradient_accumulation_steps=2, **options))
    trainer.train()
    return losses(trainer)


def resize(use: Use) -> list[Any]:
    """Give the model more tokens before it trains, the new rows being the mean of the old, and other ones after."""
    from safetensors.torch import load_file

    arguments, model = use.arguments(), use.load()
    old = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(old + 9, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        with use.whole(layer.weight, modifier_rank=0), torch.no_grad():
            if use.rank == 0:
                layer.weight[old:] = layer.weight[:old].mean(0)
    trainer = use.trainer(model, arguments)
    trainer.train()
    found = [losses(trainer)]
    torch.manual_seed(use.rank)  # the values of rank 0 count
    trainer.model.resize_token_embeddings(old + 3, mean_resizing=False)
    trainer.model.resize_token_embeddings(old + 5, mean_resizing=False)
    trainer.save_model(str(use.folder / "resized"))
    use.listed("the files are written")
    saved = load_file(use.folder / "resized" / "model.safetensors")
    found += [list(saved["model.embed_tokens.weight"].shape), total(saved["model.embed_tokens.weight"])]
    torch.manual_seed(0)
    let_train_again(use, trainer)
    trainer.train()
    weight = trainer.model.get_input_embeddings().weight
    with use.whole([weight]):
        return [*found, losses(trainer), list(weight.shape), total(weight)]


def references(use: Use) -> list[Any]:
    """Evaluate with two frozen models beside the one that trains, as trainers by preference do."""
    from trl.models.utils import prepare_deepspeed

    trainer = use.trainer()
    held = [use.load(), use.load()]
    if use.config:
        held = [prepare_deepspeed(model, trainer.accelerator) for model in held]
    found: list[float] = []
    mine = torch.stack([row["input_ids"] for row in samples()[:4]]).chunk(use.world)[use.rank]

    def evaluate() -> None:
        with torch.no_grad():
            found.extend(use.mean(model(input_ids=mine, labels=mine).loss) for model in (*held, trainer.model_wrapped))

    trainer.add_callback(at_a_step(evaluate))
    trainer.train()
    evaluate()
    assert found[0] == found[1] == found[3] == found[4], found
    return [losses(trainer), found]


def access(use: Use) -> list[Any]:
    """Read and write states between steps, as users of DeepSpeed and of LLaVA do."""
    trainer, found = use.trainer(), []
    change = change_states if use.config else change_plain_states
    trainer.add_callback(at_a_step(lambda: change(use, trainer, found)))
    trainer.train()
    return [losses(trainer), found]


CHANGED: Final = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")


def change_plain_states(use: Use, trainer: Any, found: list[float]) -> None:
    weight, norm = map(trainer.model.get_parameter, CHANGED)
    average = trainer.optimizer.state[weight]["exp_avg"]
    found += [total(average), total(weight)]
    with torch.no_grad():
        average.mul_(2)
        weight.mul_(1.5)
        norm.add_(0.25)
    found += [total(weight), total(norm)]


def change_states(use: Use, trainer: Any, found: list[float]) -> None:
    from deepspeed import utils
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    weight, norm = map(trainer.model.get_parameter, CHANGED)
    trainer.model_wrapped.offload_states()
    trainer.model_wrapped.reload_states()
    average = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert hasattr(weight, "ds_id")
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters([weight]):
        whole = weight.data.detach().cpu().clone()
    assert torch.equal(whole, utils.safe_get_full_fp32_param(weight))
    found += [total(average), total(whole)]
    utils.safe_set_full_optimizer_state(weight, average * 2, "exp_avg")
    utils.safe_set_full_fp32_param(weight, whole * 1.5)
    with GatheredParameters(each for each in trainer.model.parameters()):
        with GatheredParameters(norm, modifier_rank=0), torch.no_grad():
            if use.rank == 0:
                norm.add_(0.25)
        found.append(total(weight))
    with GatheredParameters(norm):
        found.append(total(norm))


def train(use: Use) -> list[Any]:
    """Train, save and evaluate, as in a notebook where no launcher has started the process."""
    trainer = use.trainer()
    trainer.train()
    trainer.save_model(str(use.folder / "final"))
    assert (use.folder / "final" / "model.safetensors").exists()
    return [losses(trainer), trainer.evaluate()["eval_loss"]]


def lightning(use: Use, stage: int) -> list[Any]:
    """Train by Lightning's own strategy, which by itself refuses machines without an accelerator."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
    from torch.utils.data import DataLoader, TensorDataset

    class OnCPU(DeepSpeedStrategy):  # type: ignore[misc]
        setup_environment = DDPStrategy.setup_environment

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    class Net(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
            self.seen: list[float] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
            self.seen.append(use.mean(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = DataLoader(data, batch_size=8 // use.world, sampler=range(use.rank, len(data), use.world))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    seen, checkpoint = [], None
    for num_epochs in (1, 2):  # the second goes on from the checkpoint of the first
        model = Net()
        trainer = Trainer(
            strategy=OnCPU(config=dict(config)) if use.config else "auto",
            accelerator="cpu",
            devices=use.world,
            max_epochs=num_epochs,
            logger=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            default_root_dir=str(use.folder),
        )
        trainer.fit(model, loader, ckpt_path=checkpoint)
        checkpoint = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        seen.append(model.seen)
    return seen


CASES: Final[Mapping[str, Callable[[Use], list[Any]]]] = MappingProxyType(
    {
        "generate": generate,
        "predict": predict,
        "images": images,
        "adapters": adapters,
        "evaluate_first": evaluate_first,
        "train_twice": train_twice,
        "best": best,
        "reentrant": lambda use: recompute(use, True),
        "not_reentrant": lambda use: recompute(use, False),
        "resize": resize,
        "references": references,
        "access": access,
        "train": train,
        "lightning2": lambda use: lightning(use, 2),
        "lightning3": lambda use: lightning(use, 3),
    }
)


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    use = Use(*arguments[1:])
    found = CASES[arguments[0]](use)
    (use.folder / f"found-{use.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
