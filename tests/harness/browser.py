"""A browser without a window: it opens a page and says what a script finds in it."""

from __future__ import annotations

import http.server
import json
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 120.0
_ASKED = """<script>
const answered = (value) => fetch("/answer", {method: "POST", body: JSON.stringify(value)});
const failed = (error) => answered({error: String(error?.stack ?? error)});
addEventListener("unhandledrejection", (event) => failed(event.reason));
addEventListener("error", (event) => failed(event.error ?? event.message));
document.addEventListener("report-ready", () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  (async () => { %s })().then(answered, failed);
});
</script>
"""


def find_browser() -> str:
    """Return the path of Chromium; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium")
    return found


def ask_page(page: str, script: str, folder: Path, *, width: int = 1300) -> Any:
    """Return what the body of an async function returns once a page is drawn; `await frame()` lets it draw again.

    Args:
        page: the text of a page of `shardwise report`; the browser reaches no other address than that of the page.
        script: JavaScript with a `return`.
        folder: for the browser's own files.
        width: of the window.
    """
    browser = find_browser()
    # Before the page's own scripts, so that their errors are answers, too.
    text = page.replace("<header", _ASKED % script + "<header", 1).encode()
    answers: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text if self.path == "/" else b"")

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing of requests."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
        flags += ["--proxy-server=127.0.0.1:9", f"--window-size={width},1000", "--force-device-scale-factor=1"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [browser, *flags, f"http://127.0.0.1:{server.server_port}/"], stdout=quiet, stderr=quiet
        )
        try:
            answer = answers.get(timeout=_TIMEOUT_S)
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
    assert not (isinstance(answer, dict) and "error" in answer), answer
    return answer
