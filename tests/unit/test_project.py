"""The files around the code: the site builds, workflows and forms are well-formed and name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import shardwise
from harness.paths import ROOT
from lines_of_code import LINES, SIDES, TASKS, count_lines

yaml = pytest.importorskip("yaml")
GITHUB = ROOT / ".github"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("material") and find_spec("mkdocstrings")), reason="no mkdocs"
)
def test_the_site_builds_and_asks_no_other_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.name: path.read_text() for path in (tmp_path / "site").glob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= set(pages)
    assert all(f'id="shardwise.{name}"' in pages["api.html"] for name in shardwise.__all__)
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]+src="([^"]+)"|<link[^>]+href="([^"]+)"', text)
        outside = [link for pair in loaded for link in pair if re.match(r"(https?:)?//", link)]
        assert not outside, f"{name} loads {outside}"
        assert not re.findall(r'href="\.\./[^"]*"', text), f"{name} links out of the site"


def test_tools_see_every_public_name() -> None:
    """Type checkers, editors and the site read the imports that Python leaves out."""
    source = Path(str(shardwise.__file__)).read_text()
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imported = {name.name for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported == set(shardwise.__all__) - {"__version__"}


def test_all_pages_are_in_the_navigation() -> None:
    # mkdocs.yml alone is no proof: without mkdocs no strict build runs.
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} | {"api.md"}


def test_the_workflow_runs_what_exists() -> None:
    workflow = load(GITHUB / "workflows" / "test.yml")
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads `on` as true
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert job["timeout-minutes"], name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), f"{name}: {step}"
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in targets, target
            for path in re.findall(r"\btests/\S+", step.get("run", "")):
                assert (ROOT / path).exists(), path
    # The versions are those that the package supports.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = [each.rpartition(":: ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d", each)]
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == supported
    (oldest,) = re.findall(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert any(each["torch"].startswith(oldest) for each in matrix["include"])


def test_the_forms_ask_for_the_doctor() -> None:
    for name in ("bug", "feature", "question"):
        form = load(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
        assert {"name", "description", "body"} <= set(form)
        assert any("shardwise doctor" in each["attributes"]["label"] for each in form["body"]), name
        identifiers = [each["id"] for each in form["body"]]
        assert len(identifiers) == len(set(identifiers))
    for link in load(GITHUB / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]:
        page = re.search(r"/blob/main/(.+)", link["url"])
        assert page is None or (ROOT / page[1]).exists(), link["url"]


def test_the_citation_is_of_this_version() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == shardwise.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)


def test_the_image_copies_what_exists() -> None:
    """The Dockerfile copies files of the repository, and gives pip a constraint that it has copied."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / word).exists() for word in copied)
    pinned = re.findall(r"^torch==([\d.]+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert re.findall(r"^ARG TORCH=([\d.]+)", "\n".join(lines), re.M) == pinned


def test_the_lines_of_code_of_the_benchmarks_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Lines of code")[2]
    rows = re.findall(r"^\| .+? \| (\d+) \| (\d+) \|", page, re.M)
    counted = [[str(count_lines((LINES / f"{task}_{side}.py").read_text())) for side in SIDES] for task in TASKS]
    assert [list(row) for row in rows[: len(TASKS)]] == counted


def test_links_of_llms_txt_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert len(links) > 20
    assert all((ROOT / link).exists() for link in links), links
