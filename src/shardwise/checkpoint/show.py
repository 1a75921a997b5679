"""Renders checkpoints, and the results of work on them, as text, tables and JSON; pure, and needs no torch.

>>> describe_layout(Manifest(1, (), {}, layout={"mesh": {"dp_shard": 2, "tp": 2, "pp": 1}, "stage": 3}))
'ZeRO-3 over 4 ranks, dp_shard 2 × tp 2'
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, JustifyMethod, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.commit import step_of
from shardwise.checkpoint.find import Found
from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    CheckpointError,
    Manifest,
    StoredState,
    StoredTensor,
    tensor_to_json,
)
from shardwise.checkpoint.match import listed_names

if TYPE_CHECKING:
    from shardwise.checkpoint.compare import ChangedState, ChangedValues, StateDifference
    from shardwise.checkpoint.convert import Exported
    from shardwise.checkpoint.offline import Verification

# How many of many things are listed, unless all are asked for.
MAX_SHOWN: Final = 20
_MAX_VALUE: Final = 60
_LABEL_WIDTH: Final = 10
_KIND_LABELS: Final[Mapping[str, str]] = MappingProxyType({"buffer": "buffers", "rank": "of ranks"})
# The states and tiers of a layout that its description names.
_ROLES: Final = MappingProxyType({"params": "parameters", "grads": "gradients", "optimizer": "optimizer states"})
_TIERS: Final = MappingProxyType({"host": "in host memory", "nvme": "on NVMe"})
_CONTENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "all": "all that a run needs to go on",
        "trainable": "what is trained, with its optimizer states; nothing frozen",
        "weights": "parameters and buffers, no optimizer states",
    }
)


def render_root(root: Path, found: Sequence[Found]) -> RenderableType:
    """Render the checkpoints in a folder, in the order given."""
    table = _table("step", "saved", "size", "", right=("step", "size"))
    for each in found:
        step = f"{step_of(each.folder)}"
        # Without the folder's path and the advice to use another one: the rows show which ones there are.
        damage = each.damage.replace(f"{each.folder}/", "").partition("; use")[0]
        state = Text("whole", style="green") if each.manifest else Text(f"damaged: {damage}", style="red")
        if each.is_latest:
            state = Text.assemble(("latest", "bold"), ", ", state)
        saved = _time(each.manifest.saved_at) if each.manifest else ""
        table.add_row(step, saved, decimal(each.num_bytes) if each.manifest else "", state)
    note = Text("whole: every file is there with its size; `verify` reads all bytes", style="dim")
    return Group(Text(str(root), style="bold"), "", table, "", note)


def render_checkpoint(folder: Path, manifest: Manifest) -> RenderableType:
    """Render one checkpoint: where it comes from, and its bytes by state and by file."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=_LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in _facts(manifest):
        grid.add_row(label, Text(value))
    return Group(Text(str(folder), style="bold"), "", grid, "", _state_table(manifest))


def render_tensors(tensors: Sequence[StoredTensor]) -> RenderableType:
    """Render tensors with their shapes and states."""
    table = _table("tensor", "shape", "states", right=("shape",), fold=("tensor", "states"))
    for tensor in tensors:
        names = Text(tensor.name)
        for alias in tensor.aliases:
            names.append(f"\n  = {alias}", style="dim")
        table.add_row(names, " × ".join(map(str, tensor.shape)) or "scalar", _signature(tensor))
    return Group("", table)


def matching(tensors: Sequence[StoredTensor], pattern: str) -> list[StoredTensor]:
    """Return the tensors with a name, or an alias, that contains `pattern` or, if that has wildcards, matches it.

    Raises:
        CheckpointError: there is none; the message says what names there are.
    """
    glob = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    found = [each for each in tensors if any(fnmatch.fnmatchcase(name, glob) for name in (each.name, *each.aliases))]
    if not found:
        names = [tensor.name for tensor in tensors]
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
        fix = f"did you mean {' or '.join(close)}?" if close else f"names are such as {', '.join(names[:3])}"
        raise CheckpointError("no-such-tensor", f"no tensor's name matches {pattern!r}; {fix}")
    return found


def to_json(folder: Path, manifest: Manifest, tensors: Sequence[StoredTensor] = ()) -> dict[str, Any]:
    """Return what `render_checkpoint` and `render_tensors` show as JSON values, for other programs.

    Args:
        tensors: those to list; empty lists none.
    """
    return {
        "folder": str(folder),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "library": manifest.library,
        "contents": manifest.contents,
        "layout": dict(manifest.layout),
        "model": dict(manifest.model),
        "optimizer": _optimizer(manifest),
        "num_parameters": _num_elements(manifest, "parameter"),
        "num_buffers": sum(tensor.kind == "buffer" for tensor in manifest.tensors),
        "states": [
            {"state": row.name, "dtypes": list(row.dtypes), "num_tensors": row.num_tensors, "bytes": row.num_bytes}
            for row in _state_rows(manifest)
        ],
        "files": dict(manifest.files),
    } | ({"tensors": [tensor_to_json(tensor, _state_json) for tensor in tensors]} if tensors else {})


def root_to_json(root: Path, found: Sequence[Found]) -> dict[str, Any]:
    """Return what `render_root` shows as JSON values, for other programs."""
    checkpoints = [
        {
            "folder": str(each.folder),
            "step": step_of(each.folder),
            "saved_at": each.manifest.saved_at if each.manifest else None,
            "bytes": each.num_bytes if each.manifest else None,
            "damage": each.damage or None,
            "is_latest": each.is_latest,
        }
        for each in found
    ]
    return {"root": str(root), "checkpoints": checkpoints}


def describe_layout(manifest: Manifest) -> str:
    """Describe the layout that wrote a checkpoint, as far as the manifest says.

    >>> tiers = {"params": "device", "grads": "host", "optimizer": "nvme"}
    >>> describe_layout(Manifest(1, (), {}, layout={"mesh": {}, "stage": 2, "tiers": tiers}))
    'ZeRO-2 over 1 rank, gradients in host memory, optimizer states on NVMe'
    >>> pipeline = {"schedule": "1f1b", "starts": ["embed", "blocks.2"]}
    >>> describe_layout(Manifest(1, (), {}, layout={"mesh": {"pp": 2}, "stage": 1, "pipeline": pipeline}))
    'ZeRO-1 over 2 ranks, pp 2, 1f1b over 2 stages from embed, blocks.2'
    """
    layout = manifest.layout
    axes = {name: size for name, size in (layout.get("mesh") or {}).items() if size > 1}
    parts = []
    if "stage" in layout:
        parts.append(f"ZeRO-{layout['stage']} over {_count(math.prod(axes.values()), 'rank')}")
    if len(axes) > 1 or "pp" in axes:
        parts.append(" × ".join(f"{name} {size}" for name, size in axes.items()))
    if pipeline := layout.get("pipeline"):
        starts = pipeline["starts"]
        parts.append(f"{pipeline['schedule']} over {_count(len(starts), 'stage')} from {listed_names(starts)}")
    precision = layout.get("precision") or {}
    if "param" in precision:
        master = precision.get("master", precision["param"])
        parts.append(precision["param"] + (f" with {master} master" if master != precision["param"] else ""))
    tiers = layout.get("tiers") or {}
    parts += [f"{name} {_TIERS[tiers[role]]}" for role, name in _ROLES.items() if tiers.get(role) in _TIERS]
    return ", ".join(parts) or "an unknown layout"


def render_verification(folder: Path, found: Verification, took_s: float) -> RenderableType:
    """Render what is damaged, and in the last line whether anything is."""
    lines: list[RenderableType] = [Text(f"{damage}") for damage in found.damages[:MAX_SHOWN]]
    lines += _more(len(found.damages), "damages")
    read = f"{_speed(found.num_read_bytes, took_s, 'read ')}"
    if found.manifest is None or found.damages:
        files = len({damage.file for damage in found.damages})
        where = f"{_count(len(found.damages), 'damage')} in {_count(files, 'file')}"
        lines.append(Text(f"{folder.name} is damaged: {where}; {read}", style="bold red"))
        return Group(*lines)
    num_tensors, num_files = len(found.manifest.tensors), len(found.manifest.files)
    what = f"{_count(num_tensors, 'tensor')}, {_count(num_files, 'file')}"
    lines.append(Text(f"{folder.name} is whole: {what}, {read}", style="green"))
    return Group(*lines)


def render_difference(a: Path, b: Path, found: StateDifference, show_all: bool = False) -> RenderableType:
    """Render what differs between two checkpoints, kind by kind, and in the last line whether anything does.

    Args:
        show_all: list everything, not only the first `MAX_SHOWN` of each kind.
    """
    limit = None if show_all else MAX_SHOWN
    blocks: list[RenderableType] = [Text(f"A  {a}\nB  {b}")]
    tensors = found.tensors if show_all else _merged(found.tensors)
    for title, changes in (("tensor", tensors), ("config", found.config), ("run", found.run)):
        if changes:
            table = _table(title, "A", "B", fold=(title, "A", "B"))
            for change in changes[:limit]:
                table.add_row(change.key, _short(change.a), _short(change.b))
            blocks += ["", table, *_more(len(changes), "changes", limit)]
    if found.values:
        right = ("elements", "max |a − b|")
        table = _table("values", "state", *right, right=right, fold=("values",))
        for each in sorted(found.values, key=_severity, reverse=True)[:limit]:
            number = "all" if each.num_different == each.numel else f"{each.num_different:,}"
            table.add_row(each.name, each.state, number, f"{each.max_abs:.3g}")
        blocks += ["", table, *_more(len(found.values), "states", limit)]
    blocks.append("")
    if not found:
        blocks.append(Text(f"equal: {_count(found.num_states, 'state')}, bit for bit", style="green"))
        return Group(*blocks)
    parts = [
        (len(found.values), f"values of {len(found.values):,} of {_count(found.num_states, 'state')}"),
        (len(found.tensors), "tensors"),
        (len(found.config), _count(len(found.config), "config key")),
        (len(found.run), "run"),
    ]
    blocks.append(Text(f"different: {', '.join(text for number, text in parts if number)}", style="bold yellow"))
    return Group(*blocks)


def render_exported(source: Path, exported: Exported, took_s: float) -> RenderableType:
    """Render what `export_checkpoint` has written."""
    what = (
        f"{_count(exported.num_tensors, 'tensor')}, {exported.dtype}, {_speed(exported.num_bytes, took_s, 'written ')}"
    )
    return Text(f"{exported.folder} has the weights of {source}: {what}", style="green")


@dataclass(frozen=True)
class _StateRow:
    """Holds a row of the table of states: the totals of one state over the tensors of one kind."""

    name: str
    num_tensors: int
    dtypes: tuple[str, ...]
    num_bytes: int


def _state_rows(manifest: Manifest) -> list[_StateRow]:
    rows: dict[str, _StateRow] = {}
    for tensor in manifest.tensors:
        for name, state in tensor.states.items():
            if state.value is None:
                label = name if tensor.kind == "parameter" else _KIND_LABELS[tensor.kind]
                old = rows.get(label, _StateRow(label, 0, (), 0))
                dtypes = tuple(dict.fromkeys((*old.dtypes, state.dtype)))
                num_bytes = math.prod(tensor.shape) * ITEM_BYTES.get(state.dtype, 0)
                rows[label] = _StateRow(label, old.num_tensors + 1, dtypes, old.num_bytes + num_bytes)
    return list(rows.values())


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    by = f" by shardwise {manifest.library}" if manifest.library else ""
    yield "step", f"{manifest.step:,}, saved {_time(manifest.saved_at) or 'at an unknown time'}{by}"
    yield "holds", _CONTENTS.get(manifest.contents, manifest.contents)
    parameters = [tensor for tensor in manifest.tensors if tensor.kind == "parameter"]
    num_frozen = sum(not tensor.trainable for tensor in parameters)
    num_tied = sum(bool(tensor.aliases) for tensor in parameters)
    parts = [f"{number:,} {what}" for number, what in ((num_frozen, "frozen"), (num_tied, "tied")) if number]
    of_which = f", of which {' and '.join(parts)}" if parts else ""
    name = f"{manifest.model['class']}, " if "class" in manifest.model else ""
    num_buffers = sum(tensor.kind == "buffer" for tensor in manifest.tensors)
    buffers = f", {_count(num_buffers, 'buffer')}" if num_buffers else ""
    numel = _num_elements(manifest, "parameter")
    yield "model", f"{name}{_count(numel, 'parameter')} in {_count(len(parameters), 'tensor')}{of_which}{buffers}"
    yield "written by", describe_layout(manifest)
    if optimizer := _optimizer(manifest):
        yield "optimizer", optimizer
    yield "files", f"{len(manifest.files):,}, {decimal(sum(manifest.files.values()))} in all"
    if manifest.extra is not None:
        yield "extra", _shown_extra(manifest.extra)


def _shown_extra(extra: Any) -> str:
    from shardwise.checkpoint.tagged_json import from_json  # imports torch, which most commands can do without

    try:
        value = from_json(extra, "extra")
    except ValueError:  # of a class that is not imported here
        return "values of the user"
    if isinstance(value, Mapping):
        return ", ".join(key if isinstance(key, str) else reprlib.repr(key) for key in value)
    return reprlib.repr(value)


def _optimizer(manifest: Manifest) -> str:
    """Return the optimizer's name and its states that are numbers, as text."""
    options = manifest.trajectory.get("optimizer")
    name = options.get("kind") if isinstance(options, Mapping) else None
    numbers: dict[str, set[float]] = {}
    for tensor in manifest.tensors:
        for state, stored in tensor.states.items():
            if stored.value is not None:
                numbers.setdefault(state, set()).add(stored.value)
    shown = [f"{state} {' to '.join(f'{v:g}' for v in sorted({min(vs), max(vs)}))}" for state, vs in numbers.items()]
    return ", ".join([*([name] if name else []), *shown])


def _state_table(manifest: Manifest) -> Table:
    table = _table("state", "tensors", "dtype", "size", "", right=("tensors", "size", ""))
    rows = _state_rows(manifest)
    total_bytes = sum(row.num_bytes for row in rows)
    for row in rows:
        share = f"{row.num_bytes / max(1, total_bytes):.0%}"
        table.add_row(row.name, f"{row.num_tensors:,}", " ".join(row.dtypes), decimal(row.num_bytes), share)
    return table


def _signature(tensor: StoredTensor) -> str:
    """Return a tensor's kind and states as text: `param F32, exp_avg F32, step`."""
    states = [name if state.value is not None else f"{name} {state.dtype}" for name, state in tensor.states.items()]
    kind = "" if tensor.kind == "parameter" and tensor.trainable else "frozen, "
    return (kind if tensor.kind == "parameter" else f"{_KIND_LABELS[tensor.kind]}, ") + ", ".join(states)


def _state_json(state: StoredState) -> dict[str, Any]:
    """Return a state as JSON, with the number of its pieces instead of their places."""
    extent = {"num_pieces": len(state.pieces)} if state.value is None else {"value": state.value}
    return {"dtype": state.dtype} | extent


def _merged(changes: Sequence[ChangedState]) -> list[ChangedState]:
    """Merge equal changes of several tensors into one, such as those of a number of steps."""
    groups: dict[tuple[str, str, str], list[ChangedState]] = {}
    for change in changes:
        groups.setdefault((change.key.rpartition(" ")[2], str(change.a), str(change.b)), []).append(change)
    return [
        members[0] if len(members) == 1 else replace(members[0], key=f"{what} of {_count(len(members), 'tensor')}")
        for (what, _, _), members in groups.items()
    ]


def _severity(values: ChangedValues) -> float:
    return math.inf if math.isnan(values.max_abs) else values.max_abs


def _table(*names: str, right: Sequence[str] = (), fold: Sequence[str] = ()) -> Table:
    """Make a table with these headings; the columns in `fold` wrap their text where the terminal is narrow."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    for name in names:
        folds = name in fold or name == ""
        justify: JustifyMethod = "right" if name in right else "left"
        table.add_column(Text(name), justify=justify, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    return table


def _more(number: int, what: str, limit: int | None = MAX_SHOWN) -> list[Text]:
    return [Text(f"and {number - limit:,} more {what}", style="dim")] if limit and number > limit else []


def _speed(num_bytes: int, took_s: float, done: str) -> str:
    return f"{decimal(num_bytes)} {done}in {took_s:.1f} s ({decimal(int(num_bytes / max(took_s, 1e-9)))}/s)"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _time(saved_at: str) -> str:
    """Return a time stamp as a UTC date and time of day, to the second."""
    try:
        return f"{datetime.fromisoformat(saved_at):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return saved_at


def _num_elements(manifest: Manifest, kind: str) -> int:
    return sum(math.prod(tensor.shape) for tensor in manifest.tensors if tensor.kind == kind)
