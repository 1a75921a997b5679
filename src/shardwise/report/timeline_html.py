"""Draw timelines as one self-contained HTML page: the drawing, and a table of what each rank did.

The page is apart from the drawing (`shardwise.report.timeline_svg`), which is used without it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from shardwise.report import timeline_svg
from shardwise.report.panel import COMPUTE, TerminalPanel, format_tick_s, percent

_COLUMNS = ("computing", "idle", "idle in its span", "bubble")
_HINT = (
    "A row is a rank, a cell a computation with the number of its micro-batch; point at one for its times. A rank's "
    "span lasts from its first computation to the end of its last."
)
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #14181f; --quiet: #5b6470; --paper: #ffffff; --line: #dfe3e8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6eaf0; --quiet: #9aa5b1; --paper: #14181f; --line: #313a46; }}
}}
body {{ margin: 24px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 20px; margin: 0 0 4px; }}
p {{ color: var(--quiet); margin: 0 0 12px; }}
.drawing {{ overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: 8px 0 24px; }}
.drawing svg {{ display: block; }}
#fit:checked ~ .drawing svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 3px 14px; border-bottom: 1px solid var(--line); }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
thead th {{ color: var(--quiet); font-weight: 500; }}
thead tr:first-child th {{ color: var(--ink); font-weight: 600; text-align: center; }}
tfoot td {{ font-weight: 600; border-bottom: none; }}
</style>
<h1>{title}</h1>
<p>{hint}</p>
<input type="checkbox" id="fit"> <label for="fit">fit the window</label>
<div class="drawing">
{svg}</div>
{table}
<script>
// Titles and names of ranks stay visible while the rows scroll.
for (const drawing of document.querySelectorAll(".drawing")) {{
  const pinned = drawing.querySelector(".pinned"), fit = document.getElementById("fit");
  const place = () => pinned.setAttribute("transform", `translate(${{fit.checked ? 0 : drawing.scrollLeft}},0)`);
  drawing.addEventListener("scroll", place);
  fit.addEventListener("change", place);
}}
</script>
</html>
"""


def draw(panels: Sequence[TerminalPanel], title: str = "Timeline", *, same_axis: bool = True) -> str:
    """Return a page with the drawing of `timeline_svg.draw`, and a table of busy and idle time by rank.

    Args:
        panels: the timelines to draw.
        title: title of the page.
        same_axis: use one scale for all panels, so that lengths can be compared; else each panel fills the width.
    """
    streams = list(dict.fromkeys(stream for panel in panels for stream in panel.streams if stream != COMPUTE))
    hint = _HINT + (f" Thin rows under a rank show, from above: {', '.join(streams)}." if streams else "")
    return _PAGE.format(
        title=escape(title),
        hint=escape(hint),
        svg=timeline_svg.draw(panels, same_axis=same_axis),
        table="\n".join(_table(panels)),
    )


def _table(panels: Sequence[TerminalPanel]) -> Iterator[str]:
    head = "".join(f"<th>{each}</th>" for each in _COLUMNS)
    yield "<table>\n<thead>"
    yield f"<tr><th></th>{''.join(f'<th colspan={len(_COLUMNS)}>{escape(each.title)}</th>' for each in panels)}</tr>"
    yield f"<tr><th>rank</th>{head * len(panels)}</tr>"
    yield "</thead>\n<tbody>"
    for rank in sorted({rank for panel in panels for rank in panel.rows}):
        yield f"<tr><td>{rank}</td>{''.join(_cells(panel, rank) for panel in panels)}</tr>"
    yield "</tbody>\n<tfoot>"
    yield f"<tr><td>mean</td>{''.join(_row('', '', '', percent(panel.bubble)) for panel in panels)}</tr>"
    if any(panel.formula_s is not None for panel in panels):
        formulas = ("" if each.formula_s is None else format_tick_s(each.formula_s, each.makespan_s) for each in panels)
        yield f"<tr><td>formula</td>{''.join(_row('', '', each, '') for each in formulas)}</tr>"
    yield "</tfoot>\n</table>"


def _cells(panel: TerminalPanel, rank: int) -> str:
    if rank not in panel.rows:
        return _row("", "", "", "")
    idle = panel.idle_fractions[rank]
    times_s = ((1.0 - idle) * panel.makespan_s, idle * panel.makespan_s, panel.spans_s[rank][1])
    return _row(*(format_tick_s(each, panel.makespan_s) for each in times_s), percent(idle))


def _row(*cells: str) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)
