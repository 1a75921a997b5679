"""Plan the layout of a model with which a run starts, and prove its plan of tensor parallelism before it is used.

>>> from shardwise.config.resolve import Config
>>> from shardwise.models import DecoderConfig
>>> shape = DecoderConfig(vocab_size=65, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4,
...                       ffn_size=48, max_seq_len=32)
>>> config = Config.from_dict({"mesh": {"tp": 2}}).resolve(world_size=4)
>>> layout = plan_layout(Decoder(shape, device="meta"), config)
>>> {param.name: param.shape for group in layout.groups for param in group.params if param.name.startswith("embed")}
{'embed.weight': (33, 16)}

A plan is proved on the model itself where it is small, or on a tiny copy of it. For a plan that cannot be proved, one
line of the log (`shardwise`, level WARNING) says why, and what would prove it.

>>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
>>> print(prove_plan(model, torch.ones(2, 8), {"0": "column", "2": "row"}, tp=2))
0 by 32 features -> 2
proved in float64 over tp=2
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.config.arguments import checked
from shardwise.config.errors import CodedError, ConfigError
from shardwise.config.resolve import ResolvedConfig
from shardwise.config.sections import Ranks
from shardwise.construction.scan import scan_model
from shardwise.context.apply import check_context
from shardwise.layout.facts import ModelFacts
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.resolve import resolve_layout
from shardwise.layout.tensor_plan import PROVED, ProvedPlan, TensorPlan, fused_by, kinds_of
from shardwise.models import Decoder
from shardwise.models.apply_attention import check_attention
from shardwise.models.shrink import Scale, shrink_huggingface
from shardwise.optim.rules import matrix_state_names
from shardwise.runtime.torch_private import is_fake, pytree, unseen_by_op_modes
from shardwise.tensor.hf_plans import find_plan
from shardwise.tensor.plan_table import Table, table_plan
from shardwise.tensor.prove import NotProvedError, in_short, refute

MAX_ELEMENTS: Final = 2**21  # of a model that is proved, which takes about a second
_SEQ_LEN: Final = 8
_VOCAB_SIZE: Final = 512  # more than twice the hidden sizes, as those of the models that are copied
_LOG: Final = logging.getLogger("shardwise")


@checked
def plan_layout(
    model: nn.Module, config: ResolvedConfig, plan: TensorPlan | Mapping[str, Any] | None = None, *, rank: int = 0
) -> Layout:
    """Compute the layout of `model` under a resolved config, on every axis.

    Args:
        model: any module; only names, shapes and `requires_grad` are read, so meta tensors will do.
        plan: how layers are split where `mesh.tp` is more than 1; None for the one that the model brings or its family
            has. See `docs/tensor-parallel.md`.
        rank: whose stages are the layout's own, in a pipeline.

    Raises:
        ConfigError: the model has no parameters, `zero.blocks` does not fit it, there is no plan, sizes do not divide,
            the model cannot be cut into the stages, or it cannot have the config's attention, or attention over split
            sequences.
    """
    config = ResolvedConfig.of(config)
    return layout_by(scan_model(model, config), model, config, plan, rank=rank)


def proved_layout(
    facts: ModelFacts, model: nn.Module, config: ResolvedConfig, plan: Table | TensorPlan | None, *, rank: int
) -> Layout:
    """Return the layout that `plan_layout` returns, after `check_small_copy`; rank 0 logs why a plan is not proved."""
    layout = layout_by(facts, model, config, plan, rank=rank)
    why_not = check_small_copy(model, plan, config.mesh.tp, config.tensor.sequence_parallel)
    if why_not and rank == 0:
        is_found = isinstance(plan, TensorPlan) and not isinstance(plan, ProvedPlan)
        options = f"tp={config.mesh.tp}" + ", sequence_parallel=True" * config.tensor.sequence_parallel
        fix = f"plan=shardwise.prove_plan(small_model, batch, small_plan, {options}, large_plan=plan) proves it"
        warn(model, why_not, propose_fix(config.mesh.tp) if is_found else fix)
    return layout


def layout_by(
    facts: ModelFacts, model: nn.Module, config: ResolvedConfig, plan: Table | TensorPlan | None = None, *, rank: int
) -> Layout:
    """Return the layout that `plan_layout` returns, of a model that has been scanned."""
    check_attention(model, config.attention)
    check_context(model, config)
    degree = config.mesh.tp
    if matrix_state_names(config.optimizer.name):
        # What a plan knows of fused weights holds in every layout, so it is that of one rank which says it.
        with suppress(ConfigError):  # without a plan such weights are one matrix
            facts = facts.with_fused(fused_by(find_plan(model, 1, plan, sequence_parallel=False)))
    if degree == 1:
        if isinstance(plan, Mapping):
            table_plan(model, plan, degree)  # it may be wrong, even if it is not used
        return resolve_layout(facts, config, rank=rank)
    for entry in facts.params:
        if entry.is_opaque:
            raise ConfigError(
                "opaque-over-tp",
                f"mesh.tp={degree} splits matrices, but parameter {entry.name} is packed or of integers, and its "
                "elements are bytes; set mesh.tp=1, and shard it by zero.stage=3",
            )
    found = find_plan(model, degree, plan, config.tensor.sequence_parallel)
    return resolve_layout(facts, config, found, rank=rank)


@checked
def prove_plan(
    model: nn.Module,
    batch: Any,
    plan: Table | TensorPlan | None,
    tp: Ranks,
    sequence_parallel: bool = False,
    large_plan: Table | TensorPlan | None = None,
) -> TensorPlan:
    """Prove a plan of tensor parallelism in numbers, and return it: `initialize` takes it without a warning.

    The model runs whole, and split over `tp` ranks in this process, forward and backward, in float64. To prove a plan
    for a large model, give a small model of the same code with fewer and narrower layers: `initialize` makes the large
    model's plan from the same table, and takes it as proved if it splits the same kinds of modules in the same way.

    Args:
        model: of at most two million elements, with values; it is copied.
        batch: the model's arguments: a dict gives keyword arguments, a tuple or list positional ones.
        plan: a table, or a plan; None for the one that the model brings, or its family has.
        sequence_parallel: whether the plan's stacks are split along the sequence.
        large_plan: the large model's table or plan, where it is another, such as one with numbers of features; these
            numbers alone are not proved.

    Raises:
        ConfigError: outputs or gradients are not those of the whole model, or the plan does not fit it, or the model is
            too large or does not run.
    """
    found = find_plan(model, tp, plan, sequence_parallel)
    try:
        check_provable(model, batch)
        wrong = refute(model, found, batch, tp, sequence_parallel)
    except NotProvedError as error:
        raise ConfigError(
            "tp-plan-unproved",
            f"the plan is not proved: {error}; give a small model with values, and a batch that it takes",
        ) from error
    except CodedError:
        raise
    except Exception as error:  # any error of the model's code with split layers
        wrong = in_short(error)
    if wrong:
        raise ConfigError("tp-plan-refuted", f"the plan is refuted, in float64 over tp={tp}: {wrong}")
    proved = with_proof(found, tp, sequence_parallel)
    source = plan.source if isinstance(plan, ProvedPlan) else plan
    source = source if large_plan is None else large_plan
    if source is found:
        return proved
    fields: dict[str, Any] = {name: getattr(proved, name) for name in TensorPlan.__dataclass_fields__}
    return ProvedPlan(**fields, source=source)


def check_small_copy(
    model: nn.Module, given: Table | TensorPlan | None, degree: int, sequence_parallel: bool = False
) -> str:
    """Refuse the plan that a Hugging Face model brings, or a table for one, where a tiny copy of the model refutes it.

    The copy has the model's config with small sizes.

    Args:
        model: as it is given to `initialize`.
        given: the user's table; None for the model's own plan. A `TensorPlan` has the model's sizes: it counts as
            proved where its notes say so, as `propose_plan` and `prove_plan` write them.
        sequence_parallel: whether the plan's stacks are split along the sequence.

    Returns:
        why nothing is proved; empty where the plan is, or is our own decoder's.

    Raises:
        ConfigError: outputs or gradients of the split copy are not those of the whole.
    """
    if degree == 1 or (given is None and isinstance(model, Decoder)):
        return ""
    if isinstance(given, TensorPlan):
        return "" if _proof(degree, sequence_parallel) in given.notes else "it was not run on a small model"
    theirs = list(_outermost(model)) if given is None else [model] if _is_theirs(model) else []
    if not theirs:
        return "no config says how a tiny copy of the model is made"
    for each in theirs:
        try:
            small, batch = small_copy(each, degree)
            plan = find_plan(small, 2, given, sequence_parallel)
            if kinds_of(plan) != kinds_of(find_plan(each, degree, given, sequence_parallel)):
                return "its tiny copy is split otherwise"
            wrong = refute(small, plan, batch, 2, sequence_parallel)
        except Exception as error:  # any error of foreign code, at sizes that it was not made for
            return f"its tiny copy tells nothing: {error if isinstance(error, NotProvedError) else in_short(error)}"
        if wrong:
            raise ConfigError(
                "tp-plan-refuted",
                f"the tensor-parallel plan of {type(each).__name__} is refuted by a tiny copy, in float64 over tp=2: "
                f"{wrong}; let shardwise.propose_plan(model, batch, tp={degree}) make one",
            )
    return ""


def small_copy(model: nn.Module, degree: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a tiny model of a Hugging Face model's class, which two ranks divide as `degree` ranks divide the model,
    and its batch.

    Raises:
        NotProvedError: it is no such model, or not all of its sizes are known.
        Exception: the model's code raises at these sizes.
    """
    if not _is_theirs(model):
        raise NotProvedError("no config says how a tiny copy of the model is made")
    config: Any = model.config
    with torch.random.fork_rng(devices=[]), unseen_by_op_modes(is_real=True):
        values = _shrunk(config.to_dict(), Scale(MeshShape(tp=degree), MeshShape(tp=2)))
        if "output_router_logits" in values:
            values["output_router_logits"] = False  # parts of those of a sequence are gathered in an engine alone
        small_config = type(config).from_dict(values)
        with torch.device("meta"):
            num_elements = sum(parameter.numel() for parameter in type(model)(small_config).parameters())
        if num_elements > MAX_ELEMENTS:
            raise NotProvedError(f"of {num_elements:,} elements, as not all sizes in its config are known")
        with torch.device("cpu"):
            small: Any = type(model)(small_config)
            if hasattr(small, "set_experts_implementation"):
                small.set_experts_implementation("eager")  # the others have no float64
            numbers = torch.Generator().manual_seed(0)
            tokens = torch.randint(4, _VOCAB_SIZE, (2, _SEQ_LEN), generator=numbers)
    takes = inspect.signature(small.forward).parameters
    return small, {name: tokens for name in ("input_ids", "labels") if name in takes}


def check_provable(model: nn.Module, batch: Any) -> None:
    """Check that a model is small and that it and its batch have values.

    Raises:
        NotProvedError: the model is too large, or values are missing.
    """
    tensors = [*model.parameters(), *model.buffers()]
    given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    num_elements = sum(tensor.numel() for tensor in tensors)
    if num_elements > MAX_ELEMENTS:
        raise NotProvedError(f"the model has {num_elements:,} elements, and at most {MAX_ELEMENTS:,} are computed")
    if any(each.is_meta or is_fake(each) for each in (*tensors, *given)):
        raise NotProvedError("the model or its batch has no values")


def with_proof(plan: TensorPlan, degree: int, sequence_parallel: bool = False) -> TensorPlan:
    """Return the plan with a note that it is proved.

    Args:
        degree: ranks for which it was proved.
        sequence_parallel: whether it was proved with stacks split along the sequence.
    """
    proof = _proof(degree, sequence_parallel)
    return plan if proof in plan.notes else replace(plan, notes=(*plan.notes, proof))


def propose_fix(degree: int) -> str:
    """Return the call that proves what `propose_plan` finds for a model that is too large to be run."""
    return f"shardwise.propose_plan(model, batch, tp={degree}, small=(small_model, small_batch)) proves what it finds"


def warn(model: nn.Module, why_not: str, fix: str) -> None:
    """Log that a plan is used that is not proved."""
    name = type(model).__name__
    _LOG.warning(
        "the tensor-parallel plan of %s is not proved: %s; %s, for a small model of the kind", name, why_not, fix
    )


def _proof(degree: int, sequence_parallel: bool) -> str:
    return f"{PROVED} tp={degree}" + (", and along the sequence" if sequence_parallel else "")


def _is_theirs(model: nn.Module) -> bool:
    return hasattr(type(model), "base_model_prefix") and hasattr(getattr(model, "config", None), "to_dict")


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the Hugging Face models in a module that are in no other."""
    if _is_theirs(model):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _shrunk(values: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """Return the values of a config with small sizes, as far as they are known, and those of configs in it too."""
    parts = {
        key: _shrunk(each, scale) for key, each in values.items() if isinstance(each, dict) and "model_type" in each
    }
    vocabulary = values.get("vocab_size") or _VOCAB_SIZE
    try:
        small = shrink_huggingface({**values, "vocab_size": vocabulary}, scale, _SEQ_LEN)
    except ConfigError:  # of several parts, or of no text
        return {**values, **parts}
    if "vocab_size" in values:
        small["vocab_size"] = _VOCAB_SIZE + (vocabulary % scale.mesh.tp > 0)
    else:
        del small["vocab_size"]
    return small | parts
