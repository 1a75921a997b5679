"""Modules that public scripts import and this machine lacks: image data, trackers, and DeepSpeed on one plain process.

The plain DeepSpeed is what the shim is compared with, so it imports nothing of the library: a module, an optimizer of
`torch.optim` over float32 masters, and the learning rate by its formula.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def install_modules(script: str) -> None:
    """Put beside a script what its text imports."""
    if "import wandb" in script:
        add_module("wandb")
    if "import torchvision" in script:
        add_module("torchvision")
        names = ("Compose", "ToTensor", "Normalize", "Resize", "CenterCrop")
        add_module("torchvision.transforms", **dict.fromkeys(names, Ignored))
        add_module("torchvision.datasets", CIFAR10=Images)
        add_module("torchvision.models", AlexNet=SmallNet, vgg19=SmallNet)
    if not torch.cuda.is_available():
        torch.cuda.set_device = torch.cuda.reset_peak_memory_stats = lambda *_: None


def add_module(name: str, **members: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


class Ignored:
    """A transformation of images that are ready."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Images(Dataset):
    """Ninety-six images of noise, twenty for tests: two of each class."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        num_images = 96 if train else 20
        draw = torch.Generator().manual_seed(int(train))
        self.images = torch.randn(num_images, 3, 32, 32, generator=draw)
        self.labels = torch.arange(num_images) % 10

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


class SmallNet(nn.Module):
    """A network cut as those of torchvision are: features, a pool, a classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(4)
        self.classifier = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


def install_plain_deepspeed() -> None:
    """Make `import deepspeed` give plain PyTorch on one process."""
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed = add_module(
        "deepspeed",
        initialize=initialize,
        init_distributed=init_distributed,
        add_config_arguments=add_config_arguments,
        PipelineModule=None,
    )
    add_module("deepspeed.comm", get_rank=lambda: 0, get_world_size=lambda: 1)
    add_module("deepspeed.pipe", PipelineModule=None)
    add_module("deepspeed.accelerator", get_accelerator=Processor)
    add_module("deepspeed.utils", RepeatingLoader=repeat)
    add_module("deepspeed.ops")
    add_module("deepspeed.ops.adam", DeepSpeedCPUAdam=cpu_adam)
    add_module("deepspeed.moe")
    add_module("deepspeed.moe.utils", split_params_into_different_moe_groups_for_optimizer=None)
    deepspeed.__version__ = "0.19.8"  # type: ignore[attr-defined]


class Processor:
    """Answers what `get_accelerator()` is asked."""

    def set_device(self, index: int) -> None:
        """Choose nothing: there is one."""

    def device_name(self, index: int | None = None) -> str:
        return "cpu"


def cpu_adam(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"weight_decay": 0.0, **options})


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def init_distributed(*args: Any, **kwargs: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config", type=str)
    return parser


class PlainEngine(nn.Module):
    """Trains a module with an optimizer over float32 masters."""

    local_rank = 0
    device = torch.device("cpu")

    def __init__(self, module: nn.Module, config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.config = config
        self.module = module.bfloat16() if self.bfloat16_enabled() else module
        self.masters = {p: p.detach().float().clone() for p in module.parameters() if p.requires_grad}
        if optimizer is None:
            options = dict(config["optimizer"]["params"])
            groups: list[dict[str, Any]] = [{"params": list(self.masters.values()), **options}]
        else:
            groups = [
                {**group, "params": [self.masters[p] for p in group["params"]]} for group in optimizer.param_groups
            ]
        self.optimizer = torch.optim.AdamW(groups)
        self.num_steps = self.num_micro_batches = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def bfloat16_enabled(self) -> bool:
        return bool(self.config.get("bf16", {}).get("enabled", False))

    def fp16_enabled(self) -> bool:
        return False

    def gradient_accumulation_steps(self) -> int:
        return int(self.config.get("gradient_accumulation_steps", 1))

    def batch_size(self) -> int:
        micro = self.config.get("train_micro_batch_size_per_gpu")
        return int(micro or self.config["train_batch_size"] // self.gradient_accumulation_steps())

    def backward(self, loss: Tensor) -> None:
        (loss / self.gradient_accumulation_steps()).backward()

    def step(self) -> None:
        """Step at a boundary, with the rate of DeepSpeed's logarithmic warm-up where the config has one."""
        self.num_micro_batches += 1
        if self.num_micro_batches % self.gradient_accumulation_steps():
            return
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        if clip := self.config.get("gradient_clipping"):
            nn.utils.clip_grad_norm_(list(self.masters.values()), clip)
        if scheduler := self.config.get("scheduler"):
            self.optimizer.param_groups[0]["lr"] = warm_up(self.num_steps, **scheduler["params"])
        self.optimizer.step()
        self.num_steps += 1
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master)

    def destroy(self) -> None:
        """Free nothing."""


def warm_up(step: int, warmup_min_lr: float, warmup_max_lr: float, warmup_num_steps: int) -> float:
    """Return the rate of a step counted from 0: the first two have the least."""
    share = min(math.log(max(step, 1)) / math.log(warmup_num_steps), 1.0)
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    collate_fn: Any = None,
    config: Any = None,
    **_: Any,
) -> tuple[PlainEngine, Any, Any, None]:
    """Return an engine, its optimizer, and a loader of the data in the order that DeepSpeed's has.

    Args:
        args: the script's, which may name the config.
        model: what trains.
        optimizer: the script's own, or None for the config's.
        model_parameters: not used: all that train do.
        training_data: a data set, or None.
        collate_fn: of the loader.
        config: a mapping or a path.
    """
    init_distributed()
    config = config if config is not None else args.deepspeed_config
    if isinstance(config, str):
        with open(config) as file:
            config = json.load(file)
    assert model is not None
    engine, loader = PlainEngine(model, config, optimizer), None
    if training_data is not None:
        sampler = DistributedSampler(training_data, num_replicas=1, rank=0)
        loader = DataLoader(training_data, batch_size=engine.batch_size(), sampler=sampler, collate_fn=collate_fn)
    return engine, engine.optimizer, loader, None
