"""Names that users of other libraries try: some work, the others say what to call."""

import numpy as np
import pytest
import torch
from torch import nn

import shardwise
from harness.refusals import refused


@pytest.fixture
def engine():
    config = {"run": {"device": "cpu"}, "optimizer": {"lr": 1e-3}}
    engine = shardwise.initialize(nn.Linear(4, 4), config, loss_fn=lambda out, batch: (out.square().sum(), out.numel()))
    yield engine
    engine.close()


def test_names_that_work(engine):
    assert engine.module is engine.model
    assert engine.eval() is engine
    assert not engine.model.training
    assert engine.train() is engine
    assert engine.model.training
    engine.train(False)
    assert not engine.model.training
    assert engine.get_lr() == [group["lr"] for group in engine.optimizer.param_groups]
    assert engine.get_lr()[0] == 1e-3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("save_checkpoint", "engine.save("),
        ("load_checkpoint", "engine.load("),
        ("get_global_grad_norm", ".grad_norm"),
        ("is_gradient_accumulation_boundary", "engine.step()"),
        ("gradient_accumulation_steps", "engine.config.batch.accumulation"),
        ("global_steps", "engine.num_steps"),
        ("train_batch", "engine.train_step("),
    ],
)
def test_names_that_say_what_to_call(engine, name, hint):
    assert not hasattr(engine, name)
    with pytest.raises(AttributeError) as error:
        getattr(engine, name)
    assert hint in str(error.value)
    assert name in str(error.value)


def test_a_name_of_no_library_has_no_hint(engine):
    with pytest.raises(AttributeError) as error:
        engine.trainstep  # noqa: B018
    assert str(error.value) == "'Engine' object has no attribute 'trainstep'"


class Fields(dict):
    """A batch as tokenizers make it."""


def test_a_dict_is_one_micro_batch_and_a_tuple_belongs_into_a_list(engine):
    engine.close()
    model = nn.Linear(4, 4)
    config = {"run": {"device": "cpu"}}
    engine = shardwise.initialize(model, config, loss_fn=lambda out, batch: (out.square().sum(), out.numel()))
    assert engine.train_step(Fields(input=torch.randn(2, 4))).step == 1
    assert engine.train_step({"input": torch.randn(2, 4)}).step == 2
    with refused("micro-batch-count", "a tuple of 2", "[batch]"):
        engine.train_step((torch.randn(2, 4), torch.randn(2, 4)))
    engine.close()


@pytest.mark.parametrize(
    ("batches", "shown"),
    [
        ((torch.ones(2, 4), torch.ones(2, 4)), "tuple of 2 tensors"),
        ([torch.ones(2, 4), torch.ones(2, dtype=torch.int64)], "list of 2 tensors"),
        (np.ones((2, 4), dtype=np.float32), "ndarray of 2"),
    ],
)
def test_the_parts_of_a_batch_are_no_micro_batches(engine, batches, shown):
    engine.close()
    config = {"run": {"device": "cpu"}, "batch": {"accumulation": 2}}
    engine = shardwise.initialize(nn.Linear(4, 4), config, loss_fn=lambda out, batch: (out.square().sum(), out.numel()))
    for call in (engine.train_step, engine.eval_step):
        with refused("micro-batch-parts", shown):
            call(batches)
    assert engine.train_step([torch.ones(2, 4), torch.ones(3, 4)]).count == 20
    engine.close()
