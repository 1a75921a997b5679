"""Define `Action`, `Schedule` (the actions of all ranks in order) and `TimedAction` (an action with its times).

They are values only: nothing here runs, moves data or knows a schedule by name. The text forms round-trip and read
like those of torch.distributed.pipelining, with the ZeRO group in brackets:

>>> Action.parse("2SEND_F0") == Action(ActionKind.SEND, stage=2, micro_batch=0, payload=Payload.ACTIVATION)
True
>>> print(Action(ActionKind.UNSHARD, group="blocks.3"))
0UNSHARD[blocks.3]
>>> schedule = Schedule.parse("rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0")
>>> schedule.ranks[1][0].kind
<ActionKind.RECEIVE: 'RECV'>
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Self
from urllib.parse import quote, unquote

from shardwise.config.errors import CodedError


class ScheduleError(CodedError, ValueError):
    """Report a schedule that cannot run, or a text that is not one; the first line states value, rule and fix."""


class ActionKind(Enum):
    """Say what an action does; the value is its code in the text form."""

    FORWARD = "F"
    RECOMPUTE = "RECOMPUTE"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECEIVE = "RECV"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"
    FETCH = "FETCH"
    EVICT = "EVICT"
    STEP = "STEP"

    # Members are singletons; Enum's own hash is a call into Python, and large schedules hash millions of kinds.
    __hash__ = object.__hash__


class Payload(Enum):
    """Say what SEND and RECEIVE carry: activations to the next stage, or their gradients to the previous one."""

    ACTIVATION = "F"
    GRADIENT = "B"

    __hash__ = object.__hash__


COMPUTATIONS = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.RECOMPUTE,
        ActionKind.BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
    }
)
TRANSFERS = frozenset({ActionKind.SEND, ActionKind.RECEIVE})
COLLECTIVES = frozenset({ActionKind.UNSHARD, ActionKind.REDUCE})

# The actions of one stream run one after another; streams run side by side. RESHARD computes nothing, but it is in
# the stream of the computations because it frees memory directly after the computation that used it.
STREAMS: Mapping[ActionKind, str] = MappingProxyType(
    {
        **dict.fromkeys((*COMPUTATIONS, ActionKind.STEP, ActionKind.RESHARD), "compute"),
        ActionKind.UNSHARD: "gather",
        ActionKind.REDUCE: "reduce",
        ActionKind.SEND: "send",
        ActionKind.RECEIVE: "receive",
        ActionKind.FETCH: "fetch",
        ActionKind.EVICT: "evict",
    }
)

_ACTION_TEXT = re.compile(
    r"(?P<stage>\d+)(?P<code>[A-Z]+)(?:_(?P<payload>[FB]))?(?P<micro_batch>\d+)?(?:\[(?P<group>[^\s\[\]]+)\])?",
    re.ASCII,
)


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Action:
    """Describe one thing that a rank does; actions are ordered by stage, micro-batch, kind, payload and group.

    `micro_batch` is given for computations and transfers, may be given for FETCH and EVICT (activations), and
    is None for the other kinds: parameters and reduced gradients belong to no micro-batch. `group` names a ZeRO
    group of the stage; None is the whole stage. `payload` is given for SEND and RECEIVE only; their `stage`
    is that of the rank that acts. Raises ScheduleError where a field is missing or has no meaning.
    """

    kind: ActionKind
    stage: int = 0
    micro_batch: int | None = None
    group: str | None = None
    payload: Payload | None = None

    def __post_init__(self) -> None:
        kind, micro_batch = self.kind, self.micro_batch  # a kind's name is a call into Python: only errors read it
        if self.stage < 0:
            raise ScheduleError("stage-negative", f"stage={self.stage} of {kind.name} is negative; stages count from 0")
        if micro_batch is not None and micro_batch < 0:
            raise ScheduleError(
                "micro-batch-negative",
                f"micro_batch={micro_batch} of {kind.name} is negative; micro-batches count from 0",
            )
        if self.group == "":
            raise ScheduleError(
                "group-name-empty", f"group='' of {kind.name} names no group; use None for the whole stage"
            )
        if (self.payload is not None) != (kind in TRANSFERS):
            rule = "SEND and RECEIVE carry one, and nothing else does"
            raise ScheduleError("payload-of-transfers", f"payload={self.payload} for {kind.name}; {rule}")
        needs_micro_batch = kind in COMPUTATIONS or kind in TRANSFERS
        if needs_micro_batch and micro_batch is None:
            raise ScheduleError(
                "action-needs-micro-batch",
                f"{kind.name} has no micro_batch; computations and transfers belong to one, name it",
            )
        if not needs_micro_batch and micro_batch is not None and kind not in (ActionKind.FETCH, ActionKind.EVICT):
            raise ScheduleError(
                "action-without-micro-batch",
                f"micro_batch={micro_batch} for {kind.name}, which belongs to none; leave it out",
            )

    def __str__(self) -> str:
        payload = "" if self.payload is None else f"_{self.payload.value}"
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        group = "" if self.group is None else f"[{quote(self.group, safe='')}]"
        return f"{self.stage}{self.kind.value}{payload}{micro_batch}{group}"

    def __lt__(self, other: object) -> bool:
        return self._order() < other._order() if isinstance(other, Action) else NotImplemented

    def _order(self) -> tuple[int, int, str, str, str]:
        micro_batch = -1 if self.micro_batch is None else self.micro_batch
        payload = "" if self.payload is None else self.payload.value
        return (self.stage, micro_batch, self.kind.value, payload, self.group or "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, such as 0F1, 2SEND_F0 or 0UNSHARD[blocks.3]; raises ScheduleError."""
        match = _ACTION_TEXT.fullmatch(text.strip())
        codes = [kind.value for kind in ActionKind]
        if match is None or match["code"] not in codes:
            example = "0F1, 2SEND_F0 or 0UNSHARD[blocks.3]"
            raise ScheduleError(
                "action-text", f"{text!r} is not an action; write stage, kind, micro-batch, [group], as in {example}"
            )
        return cls(
            kind=ActionKind(match["code"]),
            stage=int(match["stage"]),
            micro_batch=None if match["micro_batch"] is None else int(match["micro_batch"]),
            group=None if match["group"] is None else unquote(match["group"]),
            payload=None if match["payload"] is None else Payload(match["payload"]),
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hold the actions of every rank in the order in which it issues them: one optimizer step or one evaluation.

    Three rules say what the actions must keep to; they are the columns of the table of ZeRO stages:
    `unshard_for_use`: parameters are stored as shards and are whole only between UNSHARD and RESHARD (stage 3);
    `reduce_each_backward`: each backward's gradients are reduced before the group's next one (stages 2 and
    3), else once, after the last (pipelines, unless stage 3 gathers for each micro-batch);
    `unshard_after_step`: parameters are stored whole but a STEP updates this rank's shard only, so an UNSHARD must
    follow it (stages 1 and 2). All False is stage 0. Raises ScheduleError where there is no rank, or where
    `unshard_for_use` and `unshard_after_step` are both set.
    """

    ranks: tuple[tuple[Action, ...], ...]
    unshard_for_use: bool = False
    reduce_each_backward: bool = False
    unshard_after_step: bool = False

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ScheduleError(
                "schedule-without-ranks", "a schedule of 0 ranks has nothing to run; give one row of actions per rank"
            )
        if self.unshard_for_use and self.unshard_after_step:
            raise ScheduleError(
                "schedule-rules-contradict",
                "unshard_after_step=True contradicts unshard_for_use=True; set the first where parameters are"
                " stored whole, the second where they are stored as shards",
            )

    def __str__(self) -> str:
        rules = [name for name in _RULES if getattr(self, name)]
        head = [f"rules: {' '.join(rules)}"] if rules else []
        rows = (" ".join([f"rank {rank}:", *map(str, row)]) for rank, row in enumerate(self.ranks))
        return "\n".join([*head, *rows])

    def compute_only(self) -> Self:
        """Return a schedule of the computations only, without rules: the input of the passes that lower a schedule."""
        rows = tuple(tuple(action for action in row if action.kind in COMPUTATIONS) for row in self.ranks)
        return type(self)(rows)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form: a line of rules if there are any, then a row `rank R: ...` per rank, in order.

        Raises ScheduleError.
        """
        lines = [line.strip() for line in text.strip().splitlines()]
        rules = lines.pop(0).removeprefix("rules:").split() if lines and lines[0].startswith("rules:") else []
        if unknown := sorted(set(rules) - set(_RULES)):
            raise ScheduleError(
                "schedule-rule-unknown", f"{unknown[0]!r} is not a rule of schedules; the rules are {', '.join(_RULES)}"
            )
        rows = []
        for rank, line in enumerate(lines):
            label, _, actions = line.partition(":")
            if label.split() != ["rank", str(rank)]:
                raise ScheduleError(
                    "schedule-row-label", f"row {line[:40]!r} is not that of rank {rank}; begin it with 'rank {rank}:'"
                )
            rows.append(tuple(Action.parse(action) for action in actions.split()))
        return cls(tuple(rows), **dict.fromkeys(rules, True))


_RULES = ("unshard_for_use", "reduce_each_backward", "unshard_after_step")


@dataclass(frozen=True, slots=True)
class TimedAction:
    """Hold an action of a rank, its times in seconds and its stream; real runs and simulated ones yield it."""

    action: Action
    rank: int
    start_s: float
    end_s: float
    stream: str

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s
