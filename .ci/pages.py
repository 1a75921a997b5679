"""Adapt the pages to the site: mkdocs calls these functions while it builds (`make site`).

The pages are written to be read in the repository. So here links out of docs/ go to the repository, links whose text is
a file's name get the name that the navigation has, a note after a fence's language (`python no-run: why`) is removed,
the page of the config gets a table of keys for each section, and the page of the Python names is made from
`shardwise.__all__`.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
from shardwise.config.resolve import reference_tables  # noqa: E402

REPOSITORY: Final = "https://github.com/shardwise/shardwise/blob/main"
FIRST: Final = ("initialize", "init", "gathered", "Engine", "StepResult", "EvalResult", "LoadReport", "Config")
HEAD: Final = """# Python

All that `import shardwise` offers; each name is imported when it is first used. Keys of configs are in
[config.md](config.md).
"""


def public_names() -> list[str]:
    """Return `shardwise.__all__`, what a script needs first in front."""
    tree = ast.parse((ROOT / "src" / "shardwise" / "__init__.py").read_text())
    found = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [*FIRST, *sorted(set(found[0]) - set(FIRST), key=str.lower)]


def on_files(files: Files, config: Any) -> Files:
    """Add the page of the Python names."""
    blocks = [f"::: shardwise.{name}" for name in public_names()]
    files.append(File.generated(config, "api.md", content="\n\n".join([HEAD, *blocks]) + "\n"))
    return files


def titles(nav: Any) -> dict[str, str]:
    """Return the names of pages in the navigation, by file."""
    if isinstance(nav, list):
        return {file: title for each in nav for file, title in titles(each).items()}
    found = nav if isinstance(nav, dict) else {}
    own = {file: title for title, file in found.items() if isinstance(file, str)}
    return own | {
        file: title for each in found.values() if isinstance(each, list) for file, title in titles(each).items()
    }


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page with the links and fences of the site."""
    here, named = Path(page.file.src_uri).parent, titles(config.nav)
    if page.file.src_uri == "config.md":
        markdown = f"{markdown}\n{reference_tables()}\n"

    def absolute(found: re.Match[str]) -> str:
        target = os.path.normpath(Path("docs") / here / found[1])
        return found[0] if target.startswith("docs/") else f"]({REPOSITORY}/{target}{found[2]})"

    markdown = re.sub(r"\[([a-z-]+\.md)\](?=\(\1)", lambda found: f"[{named.get(found[1], found[1])}]", markdown)
    markdown = re.sub(r"\]\((\.\./[^)#\s]+)([^)]*)\)", absolute, markdown)
    return re.sub(r"^( *```)(python|toml|sh|console|text) [^\n]+$", r"\1\2", markdown, flags=re.M)
