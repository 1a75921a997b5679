"""Maps a model's tensors to those of a folder: renamed, transposed, concatenated from several, or stacked.

A rule names a model's tensors by a pattern, and those of the folder by one or more; the same rule serves import and
export. In a pattern `*` is any text between two dots, `**` is any text. In the folder's patterns `#` counts from 0
along dim 0: the model has one tensor where the folder has one for each expert.

>>> names = NameMap.of({
...     "blocks.*.attention.query.weight": "model.layers.*.self_attn.q_proj.weight",
...     "blocks.*.gate_up.weight": ["model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"],
...     "head.weight": {"stored": "lm_head.weight", "transpose": True},
... })
>>> [part.stored for part in names.split("blocks.3.attention.query.weight", (8, 4))]
['model.layers.3.self_attn.q_proj.weight']
>>> [(part.stored, str(part.rect)) for part in names.split("blocks.0.gate_up.weight", (6, 4))]
[('model.layers.0.mlp.gate_proj.weight', '[0:3, 0:4]'), ('model.layers.0.mlp.up_proj.weight', '[3:6, 0:4]')]
>>> [part.stored_shape for part in names.split("head.weight", (9, 4))]
[(4, 9)]
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.layout.slicing import Rect, Shape

_WILDCARD: Final = re.compile(r"\*\*|\*")
_COUNTER: Final = "#"


@dataclass(frozen=True)
class WeightPart:
    """Describes a rectangle of a model's tensor that is one tensor of a folder, or some of its rows.

    Attributes:
        stored: the name of the folder's tensor.
        rect: the rectangle of the model's tensor.
        is_transposed: whether the folder has it transposed.
        is_stacked: whether dim 0 of `rect`, of one index, is no dim of the folder's tensor.
        first_row: where along dim 0 of the folder's tensor this part begins.
        num_rows: of the folder's tensor, where other tensors of the model have some; else None.
    """

    stored: str
    rect: Rect
    is_transposed: bool = False
    is_stacked: bool = False
    first_row: int = 0
    num_rows: int | None = None

    @property
    def stored_shape(self) -> Shape:
        """Return the shape of the folder's tensor."""
        shape = self.rect.shape[1:] if self.is_stacked else self.rect.shape
        shape = shape[::-1] if self.is_transposed else shape
        return shape if self.num_rows is None else (self.num_rows, *shape[1:])


@dataclass(frozen=True)
class Rule:
    """Maps the names and the form of tensors in a folder to the model's; see the module.

    Attributes:
        model: the pattern of the model's names.
        stored: patterns of the folder's names, all with the wildcards of `model`; several tensors are concatenated to
            one of the model.
        transpose: whether the folder has them transposed (2-D tensors only).
        dim: the dim of the model's tensor along which several are concatenated.
        shares: their relative lengths in that dim, for export; equal where left out. The matrix of 8 query and 2 times
            2 KV heads has `shares=(4, 1, 1)`.

    Raises:
        CheckpointError: wildcards differ, or the fields contradict one another.
    """

    model: str
    stored: tuple[str, ...]
    transpose: bool = False
    dim: int = 0
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where = f"name rule {self.model!r}"
        if not self.stored:
            raise CheckpointError(
                "rule-names-nothing", f"{where} names no tensor of the folder; give one name or several"
            )
        for pattern in self.stored:
            if _WILDCARD.findall(pattern) != _WILDCARD.findall(self.model):
                raise CheckpointError(
                    "rule-wildcards", f"{where} has other wildcards than {pattern!r}; give both the same, in order"
                )
            if (_COUNTER in pattern) != self.is_stacked or pattern.count(_COUNTER) > 1:
                raise CheckpointError(
                    "rule-counters", f"{where}: {self.stored} do not all have one {_COUNTER}; give all one, or none"
                )
        if self.shares and (len(self.shares) != len(self.stored) or min(self.shares) < 1):
            raise CheckpointError(
                "rule-shares", f"{where} has shares={self.shares}; give {len(self.stored)} positive integers"
            )
        if self.transpose and self.is_stacked:
            raise CheckpointError(
                "rule-transposes-stack",
                f"{where} transposes what {_COUNTER} stacks, which is not supported; drop one of them",
            )
        lowest = int(self.is_stacked and len(self.stored) > 1)
        if self.dim < lowest:
            raise CheckpointError("rule-dim", f"{where} has dim={self.dim}; give at least {lowest}")

    @property
    def is_stacked(self) -> bool:
        """Say whether each index along dim 0 is a tensor, or several, of the folder."""
        return _COUNTER in self.stored[0]

    def names(self, model_name: str) -> tuple[str, ...] | None:
        """Return the folder's names, with any `#`, for a tensor of the model; None where the rule does not apply."""
        match = re.fullmatch(_regex(self.model), model_name)
        if match is None:
            return None
        return tuple(_filled(pattern, match.groups()) for pattern in self.stored)


@dataclass(frozen=True)
class NameMap:
    """Maps names by rules: the first that fits applies; a tensor without a rule has the same name in the folder.

    Attributes:
        parts: by name, what tensors without a rule are in the folder where that is more than their name.
    """

    rules: tuple[Rule, ...] = ()
    parts: Mapping[str, tuple[WeightPart, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: NameMap | Mapping[str, Any] | None) -> NameMap:
        """Read what a user gives: by the model's pattern, the folder's, a list of those, or a table of `Rule`'s fields.

        Raises:
            CheckpointError: a rule is not legal; see `Rule`.
        """
        if isinstance(names, NameMap):
            return names
        return cls(tuple(_rule(model, value) for model, value in (names or {}).items()))

    def then(self, other: NameMap) -> Self:
        """Return a map of these rules, followed by those of `other`."""
        return type(self)((*self.rules, *other.rules), {**other.parts, **self.parts})

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the folder's names for a tensor of the model; those of a stack have `#` for the number."""
        rule, stored = self._find(name)
        return tuple(part.stored for part in self.parts[name]) if rule is _SAME and name in self.parts else stored

    def split(self, name: str, shape: Shape) -> tuple[WeightPart, ...]:
        """Split a tensor of the model into the parts that a folder has, in the folder's order.

        Raises:
            CheckpointError: the rule for the name does not fit the shape.
        """
        rule, stored = self._find(name)
        if rule is _SAME and name in self.parts:
            return self.parts[name]
        lengths = _share_out(rule, name, shape) if len(stored) > 1 else ()
        return tuple(_parts(rule, stored, name, shape, lengths))

    def join(self, name: str, shapes: Mapping[str, Shape]) -> tuple[Shape, tuple[WeightPart, ...]] | None:
        """Return the shape and parts of a tensor of the model, by the shapes in the folder; None if a part is missing.

        Raises:
            CheckpointError: the folder's shapes do not fit together by the rule.
        """
        rule, stored = self._find(name)
        if rule is _SAME and name in self.parts:
            parts = self.parts[name]
            shape = tuple(map(max, zip(*(part.rect.stop for part in parts), strict=True)))
        else:
            joined = _joined(rule, stored, name, shapes)
            if joined is None:
                return None
            shape, parts = joined
        for part in parts:
            if part.stored not in shapes:
                return None
            if shapes[part.stored] != part.stored_shape:
                raise CheckpointError(
                    "rule-shape-differs",
                    f"{name} {shape} would need {part.stored} of shape {part.stored_shape}, the folder has "
                    f"{shapes[part.stored]}; correct the name rule, or take a folder of this model",
                )
        return shape, parts

    def _find(self, name: str) -> tuple[Rule, tuple[str, ...]]:
        for rule in self.rules:
            stored = rule.names(name)
            if stored is not None:
                return rule, stored
        return _SAME, (name,)


_SAME: Final = Rule("**", ("**",))


def _joined(
    rule: Rule, stored: Sequence[str], name: str, shapes: Mapping[str, Shape]
) -> tuple[Shape, tuple[WeightPart, ...]] | None:
    """Return the shape and parts of a tensor by its rule, and as many experts as the folder has."""
    first = [pattern.replace(_COUNTER, "0") if rule.is_stacked else pattern for pattern in stored]
    if not all(each in shapes for each in first):
        return None
    block = [shapes[each][::-1] if rule.transpose else shapes[each] for each in first]
    if rule.is_stacked:
        count = next(i for i in itertools.count() if stored[0].replace(_COUNTER, str(i)) not in shapes)
        block = [(count, *shape) for shape in block]
    shape, lengths = block[0], tuple[int, ...]()
    if len(block) > 1:
        lengths = tuple(_length(rule, name, each) for each in block)
        shape = (*shape[: rule.dim], sum(lengths), *shape[rule.dim + 1 :])
    return shape, tuple(_parts(rule, stored, name, shape, lengths))


def _parts(rule: Rule, stored: Sequence[str], name: str, shape: Shape, lengths: Sequence[int]) -> Iterator[WeightPart]:
    if rule.transpose and len(shape) != 2:
        raise CheckpointError(
            "rule-transposes-matrix",
            f"{name} {shape} has {len(shape)} dims, name rule {rule.model!r} transposes 2; drop that",
        )
    ends = list(itertools.accumulate(lengths, initial=0))
    for index in range(shape[0]) if rule.is_stacked else (None,):
        for number, pattern in enumerate(stored):
            start, stop = [0] * len(shape), list(shape)
            if lengths:
                start[rule.dim], stop[rule.dim] = ends[number], ends[number + 1]
            if index is not None:
                start[0], stop[0] = index, index + 1
                pattern = pattern.replace(_COUNTER, str(index))
            yield WeightPart(pattern, Rect(tuple(start), tuple(stop)), rule.transpose, index is not None)


def _share_out(rule: Rule, name: str, shape: Shape) -> tuple[int, ...]:
    length, shares = _length(rule, name, shape), rule.shares or (1,) * len(rule.stored)
    unit, remainder = divmod(length, sum(shares))
    if remainder:
        raise CheckpointError(
            "rule-shares-divide",
            f"{name} {shape} is {length} long in dim={rule.dim}, which shares {shares} do not divide; "
            f"give name rule {rule.model!r} shares whose sum divides {length}",
        )
    return tuple(unit * share for share in shares)


def _length(rule: Rule, name: str, shape: Shape) -> int:
    if rule.dim >= len(shape):
        raise CheckpointError(
            "rule-dim-exists",
            f"{name} {shape} has no dim={rule.dim}, along which name rule {rule.model!r} concatenates; "
            f"give dim below {len(shape)}",
        )
    return shape[rule.dim]


def _regex(pattern: str) -> str:
    texts = (re.escape(text) for text in _WILDCARD.split(pattern))
    wildcards = ("(.+)" if each == "**" else r"([^.]+)" for each in _WILDCARD.findall(pattern))
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(texts, wildcards, fillvalue="")))


def _filled(pattern: str, texts: Sequence[str]) -> str:
    """Return a pattern with these texts in place of its wildcards."""
    literals = _WILDCARD.split(pattern)
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(literals, texts, fillvalue="")))


def _rule(model: str, value: Any) -> Rule:
    options = dict(value) if isinstance(value, Mapping) else {"stored": value}
    known = [field.name for field in fields(Rule) if field.name != "model"]
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1) or known
            raise CheckpointError(
                "rule-unknown-key",
                f"name rule {model!r} has an unknown {key}={options[key]!r}; did you mean {close[0]}?",
            )
    stored, shares = options.get("stored", ()), tuple(options.get("shares", ()))
    stored = (stored,) if isinstance(stored, str) else stored
    if not isinstance(stored, list | tuple) or not all(isinstance(each, str) for each in (model, *stored)):
        raise CheckpointError(
            "rule-of-names",
            f"name rule {model!r}: {value!r:.120} is no name; give the model's pattern and the folder's",
        )
    stored = tuple(stored)
    return Rule(model, stored, options.get("transpose", False), options.get("dim", 0), shares)
