"""Many families × layouts: each cell equals one plain process, in float64, or is refused in one line whose fix works.

What is expected of each cell is data, in `harness.zoo_expected`; docs/models.md shows the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.pool import WorkerPool
from harness.zoo import ZOO
from harness.zoo_cells import CELLS, Outcome, run_cells
from harness.zoo_expected import EXPECTED, FIXES, fix, make_cell, quick_cells, sign, table, words

pytest.importorskip("transformers")

DOCS = ROOT / "docs" / "models.md"


def check(ranks: WorkerPool, family: str, names: list[str], folder: Path) -> None:
    """Run cells of a family, and the fixes of those that are refused."""
    cells = {name: make_cell(family, name) for name in names}
    cells |= {f"the fix of {name}": fix(family, name) for name in names if sign(family, name) == "c"}
    both = ranks(2).run(run_cells, family, [*cells.values()], folder)
    problems = [
        f"{name}: {problem}"
        for name, *outcomes in zip(cells, *both, strict=True)
        if (problem := problem_of(family, name, outcomes))
    ]
    assert not problems, "\n".join([family, *problems])


def problem_of(family: str, name: str, outcomes: list[Outcome]) -> str:
    """What is wrong with the outcomes of both ranks in a cell; empty where nothing is."""
    expected = "=" if name.startswith("the fix") else sign(family, name)
    if expected == "!":
        return ""
    kind = "equal" if expected == "=" else "refused"
    failed = [each for each in outcomes if each.kind != kind]
    if failed or kind == "equal":
        return f"{failed[0].kind}: {failed[0].text}" if failed else ""
    # One that waits for a stage that refuses ends with a CommError.
    said = [each.text for each in outcomes if not each.text.startswith("CommError")]
    if not said:
        return f"no rank refuses: {outcomes[0].text}"
    mute = [each for each in said if not any(word in each for word in words(family, name))]
    return f"names none of {', '.join(words(family, name))}: {mute[0]}" if mute else ""


@pytest.mark.quick(len(ZOO) // 16)
@pytest.mark.parametrize("family", ZOO)
def test_a_family_equals_one_process_or_is_refused(ranks: WorkerPool, family: str, tmp_path: Path) -> None:
    check(ranks, family, quick_cells(family), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("family", ZOO)
def test_every_cell_of_a_family(ranks: WorkerPool, family: str, tmp_path: Path) -> None:
    check(ranks, family, [*CELLS], tmp_path)


def test_fixes_are_cells_that_are_equal() -> None:
    """Every row is whole, and what its refusals name is there."""
    assert [*EXPECTED] == [*ZOO]
    for family, row in EXPECTED.items():
        assert len(row) == len(CELLS)
        assert "-" not in row or sign(family, "stage 3") == "="
        assert "p" not in row or sign(family, "proposal") == "="
        for name in CELLS:
            assert (sign(family, name) == "c") == ((family, name) in FIXES)


def test_the_docs_show_the_same() -> None:
    assert table() in DOCS.read_text()
