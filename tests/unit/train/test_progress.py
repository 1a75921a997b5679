"""The picture of a run: it fits its terminal, says what the state says, and is drawn without a scroll."""

import io
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.cells import cell_len
from rich.console import Console

from shardwise.train import progress
from shardwise.train.metrics import StepRecord
from shardwise.train.progress import CURVE_POINTS, Display, Header, Progress, curve, plain_line, render
from shardwise.train.rank_watch import RanksMemory, SlowStep

HEADER = Header(
    model="tiny, 6.0 M parameters, 4 layers of 320",
    layout="ZeRO-2 over 2 ranks, CPU, bf16 with fp32 master",
    batch="global batch 16 = 8 samples a micro-batch x 1 accumulation x 2 data-parallel ranks, 256 tokens each",
    data="the source of Python 3.11's standard library, 2.8 M tokens",
)
ALL_CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "buckets", "activations", "other")


SLOW = SlowStep(57, 1.23, 0.4, 8, rank=3, part="data", extra_s=0.8)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch) -> None:
    """That draws, whatever these tests are started from."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def stepped(state: Progress, step: int, **changes) -> Progress:
    values = {"loss": 8.0, "lr": 1e-3, "grad_norm": 1.25, "step_s": 0.5, "tokens_per_s": 8192.0}
    values |= {"count": 4096, "skipped": False, "memory_bytes": {}}
    return state.after_step(StepRecord(step=step, **(values | changes)))


def after(num_steps: int, total_steps: int = 400, **changes) -> Progress:
    state = Progress(HEADER, total_steps)
    for step in range(1, num_steps + 1):
        state = stepped(state, step, **changes)
    return state


def with_memory(state: Progress, *ranks: dict[str, int], limit_bytes: int | None = 16 * 2**20) -> Progress:
    return replace(state, memory=RanksMemory(state.step, limit_bytes, ranks))


def filled(num_ranks: int, limit_bytes: int | None = 64 * 2**30) -> RanksMemory:
    """All categories, the last rank fullest."""
    sizes = {name: 2**30 * (index + 1) for index, name in enumerate(ALL_CATEGORIES)}
    ranks = tuple({name: size + rank for name, size in sizes.items()} for rank in range(num_ranks))
    return RanksMemory(2, limit_bytes, ranks)


def picture(state: Progress, width: int, height: int = 24, is_coloured: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(state, width, height, is_coloured=is_coloured))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 80, 110])
@pytest.mark.parametrize("num_steps", [0, 400])
def test_it_fits_the_terminal(width, num_steps):
    state = after(num_steps)
    if num_steps:
        state = replace(state, memory=filled(2), slow=SLOW, eval_loss=(state.step, 7.5))
    lines = picture(state, width)
    assert max(map(cell_len, lines)) <= width
    if width >= 80:
        assert len(lines) <= 23, "it must fit a terminal of 24 lines, or it cannot be redrawn in place"


@pytest.mark.parametrize("width", [40, 120])
def test_states_off_the_device_take_a_line(width):
    away = replace(HEADER, tiers="device: parameters 6.96 MiB; host: gradients 6.96 MiB, optimizer 20.87 MiB")
    lines = picture(Progress(away, 400), width)
    assert max(map(cell_len, lines)) <= width
    assert away.tiers in " ".join(" ".join(lines).split())


def falling(num_steps: int, total_steps: int = 400) -> Progress:
    """A run whose loss falls, evaluated every 50 steps."""
    state = Progress(HEADER, total_steps)
    for step in range(1, num_steps + 1):
        loss = 2 + 6 * 0.99**step
        state = stepped(state, step, loss=loss, eval_loss=None if step % 50 else loss + 0.3)
    return state


def test_what_a_run_looks_like(snapshots):
    """Before its first step, under way at three widths, without colours, and gone on; then as a log has it."""
    late = replace(with_memory(falling(250), {"activations": 3 * 2**20, "parameters": 2**20}, {"parameters": 2**20}))
    resumed = resumed_after(1)
    wide = replace(late, mfu=0.41, activity="evaluating", slow=SLOW)
    pictures = [
        *picture(after(0), 80),
        "",
        *picture(late, 80),
        "",
        *picture(late, 100, 30),
        "",
        *picture(wide, 140),
        "",
    ]
    pictures += [*picture(replace(late, memory=filled(2)), 80, is_coloured=False), "", *picture(resumed, 80), ""]
    lines = [line.rstrip() for line in (*pictures, plain_line(late), plain_line(resumed))]
    snapshots.check("train-progress", "\n".join(lines) + "\n")


def test_it_says_what_the_state_says():
    few = {"activations": 2**20, "parameters": 2**20, "gathered": 0}
    state = with_memory(after(100), few, {"activations": 3 * 2**20, "parameters": 2**20})
    state = replace(state, eval_loss=(100, 7.25))
    lines = picture(replace(state, slow=SLOW), 80, is_coloured=False)
    text = "\n".join(lines)
    for part in ("step 100/400", "8.0000", "1.00e-03", "1.25", "8,192, smoothed", "0:50 gone, 2:30 to go"):
        assert part in text
    assert HEADER.model in text
    assert re.search(r"held-out loss +7\.2500, step 100", text)
    assert re.search(r"peak memory +4\.00 MiB of 16\.0 MiB \(25%\), step 100, rank 1 of 2", text)
    assert "gathered" not in text, "what holds nothing takes no line"
    (bar,) = re.findall(r"a+p+·+|p+a+·+", text)
    assert bar.count("a") == pytest.approx(3 * bar.count("p"), abs=2)
    assert len(bar) == pytest.approx(4 * (bar.count("a") + bar.count("p")), abs=3), "a quarter of the memory"
    assert "waited for rank 3, 800 ms longer in data" in " ".join(" ".join(lines).split())


def test_memory_without_a_limit_is_shown_without_a_share():
    text = "\n".join(picture(replace(after(3), memory=filled(1, limit_bytes=None)), 80))
    assert "28.0 GiB, step 2" in text
    assert "%" not in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 40), (100, 30), (140, 24)])
def test_a_curve_has_several_rows_and_its_axes(width, height):
    lines = picture(with_memory(falling(400), {"parameters": 2**20}), width, height)
    rows = [line for line in lines if re.search("[┤│]", line)]
    assert 3 <= len(rows) <= 10
    assert "7.94 ┤" in rows[0], "the highest value of the trend"
    assert re.search(r"2\.\d\d ┤", rows[-1])
    assert any(re.search(r"└ step 1 ─+ 400", line) for line in lines)
    assert any("smoothed over about 10 steps" in line for line in lines)
    ends = [max((at for at, char in enumerate(line) if "▁" <= char <= "█"), default=-1) for line in rows]
    assert ends == sorted(ends), "it falls from left to right"
    if height > 24:
        assert len(rows) > 4


def test_a_curve_of_one_value_or_none():
    assert curve([], 40, 5) == []
    assert curve([(1, math.nan)], 40, 5) == []
    (*rows, axis) = [line.plain for line in curve([(1, 3.0), (2, 3.0)], 40, 5)]
    assert "step 1" in axis
    assert len([row for row in rows if re.search("[▁-█]", row)]) == 1, "a level line"


def test_the_bar_is_as_long_as_the_run_is_old():
    bar = next(line for line in picture(after(100), 80) if "step 100/400" in line)
    assert bar.count("━") == pytest.approx(bar.count("─") / 3, abs=1)


def test_the_trend_is_smoothed_and_survives_an_overflow():
    state = after(1, loss=8.0)
    assert state.loss == state.trend == 8.0
    steady = stepped(after(20, loss=8.0), 21, loss=7.0)
    assert steady.loss == 7.0, "the step's own, as metrics.jsonl has it"
    assert "loss 7.0000" in plain_line(steady)
    assert steady.trend == pytest.approx(7.9)
    overflow = stepped(steady, 22, loss=math.inf)
    assert overflow.trend == steady.trend
    assert math.isfinite(sum(loss for _, loss in overflow.losses))


@pytest.mark.parametrize("num_steps", [3, CURVE_POINTS, 1000])
def test_the_points_of_the_curve_span_the_run_evenly(num_steps):
    steps = [step for step, _ in after(num_steps, num_steps).losses]
    assert steps[0] == 1
    assert steps[-1] == num_steps
    assert min(num_steps, CURVE_POINTS // 2) <= len(steps) <= CURVE_POINTS + 1
    assert len({after - before for before, after in pairwise(steps[:-1])}) == 1


def make_display(monkeypatch, **options) -> tuple[Display, io.StringIO, list[float]]:
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    file = io.StringIO()
    return Display(Console(file=file, width=80, height=24, **options), Progress(HEADER, 100)), file, now_s


def test_a_pipe_gets_a_few_plain_lines(monkeypatch):
    display, file, _ = make_display(monkeypatch)
    for step in range(1, 101):
        display.show(after(step, 100))
    display.close()
    lines = file.getvalue().splitlines()
    assert lines[:4] == [HEADER.model, HEADER.layout, HEADER.batch, HEADER.data]
    steps = [int(match[1]) for line in lines if (match := re.match(r"step (\d+)/100", line))]
    assert steps == [1, *range(5, 101, 5)]
    assert file.getvalue().isascii()
    assert "\x1b" not in file.getvalue()


def test_a_terminal_is_redrawn_in_place_and_not_too_often(monkeypatch):
    display, file, now_s = make_display(monkeypatch, force_terminal=True)
    for step in range(1, 101):
        now_s[0] += 0.1
        display.show(after(step, 100))
    written = file.getvalue()
    pictures = re.split(r"\x1b\[\d+F", written)
    assert 30 <= len(pictures) <= 35, "every third of 100 steps in 10 s"
    assert "step 100/100" in pictures[-1], "the last step is always drawn"
    assert "\x1b[2J" not in written, "clearing the screen flickers"
    for line_count, following in zip(re.findall(r"\x1b\[(\d+)F", written), pictures, strict=False):
        assert int(line_count) == following.count("\n"), "each picture starts where the one before did"


def test_a_picture_higher_than_the_terminal_is_cut(monkeypatch):
    file = io.StringIO()
    display = Display(Console(file=file, width=80, height=10, force_terminal=True), after(1))
    display.show(after(400))
    assert max(int(count) for count in re.findall(r"\x1b\[(\d+)F", file.getvalue())) <= 9


def resumed_after(num_taken: int, first_step: int = 100, total_steps: int = 400) -> Progress:
    header = replace(HEADER, resumed="from step 100 of /shared/runs/20250101-000000-tiny/checkpoints")
    state = Progress(header, total_steps, step=first_step, first_step=first_step)
    for step in range(first_step + 1, first_step + num_taken + 1):
        state = stepped(state, step, grad_norm=1.0)
    return state


def test_a_resumed_run_starts_where_it_goes_on_with_the_speed_it_has():
    state = resumed_after(1)
    assert (state.step_s, state.tokens_per_s, state.loss) == (0.5, 8192.0, 8.0)
    assert "0:00 gone, 2:30 to go" in "\n".join(picture(state, 80))
    assert resumed_after(300).losses[0][0] == 101, "from where this run began"


@pytest.mark.parametrize("width", [80, 120])
def test_a_resumed_run_fits_the_terminal(width):
    state = replace(resumed_after(5), memory=filled(2), slow=SLOW)
    lines = picture(state, width)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= 23


def test_a_log_begins_with_the_step_a_run_goes_on_from():
    shown = io.StringIO()
    display = Display(Console(file=shown, width=80), resumed_after(0))
    display.show(resumed_after(1))
    assert "resumed from step 100 of /shared" in shown.getvalue()
    assert "step 101/400" in shown.getvalue()
