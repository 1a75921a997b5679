"""Write timed actions in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open, and read them back.

A process of the trace is a rank, a thread is one of its streams. Times in the format are microseconds; the exact
seconds are in each event's `args`, where `read_chrome_trace` reads them.

>>> timed = TimedAction(Action.parse("1F0"), rank=1, start_s=0.5, end_s=0.75, stream="compute")
>>> event = chrome_trace([timed])["traceEvents"][-1]
>>> event["name"], event["ph"], event["pid"], event["tid"], event["ts"], event["dur"]
('1F0', 'X', 1, 0, 500000.0, 250000.0)
>>> read_chrome_trace(chrome_trace([timed])) == (timed,)
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwise.report.panel import TerminalPanel, describe
from shardwise.schedule import Action, ScheduleError, TimedAction

_US_PER_S: Final = 1e6
# Of a trace that a run recorded; drawings take time and memory by these.
_MAX_RANKS: Final = 2**20
_MAX_STREAMS: Final = 64
_MAX_S: Final = 1e12


def chrome_trace(actions: Sequence[TimedAction], rank_name: str = "pp rank") -> dict[str, Any]:
    """Return the trace as a value that `json.dump` writes."""
    panel = TerminalPanel("", actions)
    # Streams without time are kept too, so that no event is lost.
    streams = [*panel.streams, *sorted({action.stream for action in actions} - set(panel.streams))]
    events: list[dict[str, Any]] = []
    for rank in panel.rows:
        names = [("process_name", 0, {"name": f"{rank_name} {rank}"}), ("process_sort_index", 0, {"sort_index": rank})]
        for index, stream in enumerate(streams):
            names += [("thread_name", index, {"name": stream}), ("thread_sort_index", index, {"sort_index": index})]
        events += [{"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args} for name, tid, args in names]
    events += [_event(action, streams) for action in actions]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_chrome_trace(trace: Mapping[str, Any]) -> tuple[TimedAction, ...]:
    """Return the timed actions of a trace that `chrome_trace` made, in its order; other events are ignored.

    Raises:
        ScheduleError: it holds no timed action, or a damaged one.
    """
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(events, list):
        raise ScheduleError(
            "trace-format", "this is no Chrome trace: it has no list traceEvents; give a file that a run recorded"
        )
    arguments = [event.get("args") for event in events if isinstance(event, Mapping)]
    ours = [argument for argument in arguments if isinstance(argument, Mapping) and "action" in argument]
    if not ours:
        raise ScheduleError(
            "trace-without-actions",
            f"none of the {len(events)} events of the trace is a timed action; give a file that a run recorded",
        )
    timed = tuple(map(_timed, ours))
    if len({action.stream for action in timed}) > _MAX_STREAMS:
        raise ScheduleError(
            "trace-streams", f"the trace has more than {_MAX_STREAMS} streams; give a file that a run recorded"
        )
    return timed


def _event(timed: TimedAction, streams: Sequence[str]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": str(timed.action),
        "cat": timed.action.kind.name.lower(),
        "pid": timed.rank,
        "tid": streams.index(timed.stream),
        "ts": timed.start_s * _US_PER_S,
        "dur": timed.duration_s * _US_PER_S,
        "args": {
            "action": str(timed.action),
            "what": describe(timed.action),
            "rank": timed.rank,
            "lane": timed.stream,
            "start_s": timed.start_s,
            "end_s": timed.end_s,
        },
    }


def _timed(arguments: Mapping[str, Any]) -> TimedAction:
    try:
        action, rank, stream = Action.parse(str(arguments["action"])), int(arguments["rank"]), str(arguments["lane"])
        start_s, end_s = float(arguments["start_s"]), float(arguments["end_s"])
        if not -_MAX_S <= start_s <= end_s <= _MAX_S:
            raise ValueError(f"it lasts from {start_s:g} s to {end_s:g} s")
        counts = (rank, action.stage, action.micro_batch or 0)
        if not all(0 <= count < _MAX_RANKS for count in counts):
            raise ValueError("its rank, stage or micro-batch is none")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ScheduleError(
            "trace-event-damaged", f"damaged event of the action {arguments['action']!r}: {error}; record the run again"
        ) from None
    return TimedAction(action, rank, start_s, end_s, stream)
