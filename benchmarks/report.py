"""Measure the page of a run: seconds to write it, bytes, and milliseconds until a browser shows it.

    python benchmarks/report.py                        # 100,000 steps, 512 ranks x 128 micro-batches
    python benchmarks/report.py --steps 1000 --ranks 8 --micro-batches 16
    python benchmarks/report.py --out page.html        # keeps the page, to look at it

The run is made up: its files are those that `shardwise train` writes, with noise. The browser is Chromium without a
window; without one, only the first two are measured. A page that is opened does not wait for the network.
"""

from __future__ import annotations

import argparse
import http.server
import json
import math
import queue
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.config.resolve import Config
from shardwise.report import page
from shardwise.report.chrome_trace import chrome_trace
from shardwise.report.run_folder import run_source
from shardwise.schedule import Schedule, TimedAction, insert_transfers, pipeline_step
from shardwise.schedule.actions import COMPUTATIONS, STREAMS, ActionKind

_PASS_S = {ActionKind.FORWARD: 0.010, ActionKind.BACKWARD: 0.021}
_TRANSFER_S = 0.0004
_CATEGORIES = {"parameters": 4, "gradients": 8, "optimizer": 12, "gathered": 6, "activations": 30}
_GIB = 2**30
_FACTS = """<script>document.addEventListener("report-ready", () => {
  const panels = window.report.timelines.panels, began = performance.now();
  for (let count = 0; count < 20; count++) for (const panel of panels) panel.draw();
  const drawMs = (performance.now() - began) / 20;
  const {usableMs, readyMs} = window.report;
  const facts = {usableMs, readyMs, drawMs, actions: panels.map((panel) => panel.start.length)};
  fetch("/facts", {method: "POST", body: JSON.stringify(facts)});
});</script></body>"""


def write_run(folder: Path, num_steps: int, num_ranks: int, num_micro_batches: int) -> None:
    """Write the folder of a run that never was."""
    noise = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    settings = [f"mesh.pp={num_ranks}", f"batch.accumulation={num_micro_batches}", f"run.steps={num_steps}"]
    (folder / "config.json").write_text(Config().override(settings).to_json())
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(step)}\n" for step in _steps(num_steps, noise))
    ranks = [{name: round(size * _GIB * noise.uniform(0.9, 1.1)) for name, size in _CATEGORIES.items()}] * num_ranks
    (folder / "memory.json").write_text(json.dumps({"step": num_steps, "limit_bytes": 80 * _GIB, "ranks": ranks}))
    schedule = insert_transfers(pipeline_step("1f1b", num_ranks, num_micro_batches, 1))
    actions = [each for rank in range(num_ranks) for each in _timeline(schedule, rank, noise)]
    (folder / "timeline.json").write_text(json.dumps(chrome_trace(actions)))


def _steps(num_steps: int, noise: random.Random) -> Iterator[dict[str, object]]:
    memory = {name: size * _GIB for name, size in _CATEGORIES.items()}
    for step in range(1, num_steps + 1):
        yield {
            "step": step,
            "loss": 2.0 + 8.0 / step**0.4 + noise.gauss(0.0, 0.05),
            "count": 2**20,
            "grad_norm": abs(1.0 + noise.gauss(0.0, 0.3)),
            "lr": 3e-4 * (0.55 + 0.45 * math.cos(math.pi * step / num_steps)),
            "skipped": False,
            "step_s": 4.0 + noise.gauss(0.0, 0.05),
            "tokens_per_s": 2**20 / (4.0 + noise.gauss(0.0, 0.05)),
            "mfu": 0.42 + noise.gauss(0.0, 0.005),
            "memory_bytes": memory,
            **({"eval_loss": 2.05 + 8.0 / step**0.4} if step % 500 == 0 else {}),
        }


def _timeline(schedule: Schedule, rank: int, noise: random.Random) -> Iterator[TimedAction]:
    """Yield a rank's actions with noisy times, one after another; none waits for another rank."""
    now_s = rank * _PASS_S[ActionKind.FORWARD]
    for action in schedule.ranks[rank]:
        usual_s = _PASS_S[action.kind] if action.kind in COMPUTATIONS else _TRANSFER_S
        start_s, end_s = now_s, now_s + usual_s * noise.uniform(0.95, 1.1)
        if action.kind in COMPUTATIONS:
            now_s = end_s
        yield TimedAction(action, rank, start_s, end_s, STREAMS[action.kind])


def load_facts(path: Path) -> dict[str, Any] | None:
    """Open a page in Chromium, and return what it measured of itself in real time; None without a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        return None
    text = path.read_text(encoding="utf-8").replace("</body>", _FACTS).encode()
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing of requests."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        argv += ["--window-size=1400,1000", f"http://127.0.0.1:{server.server_port}/"]
        browser = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return found.get(timeout=60.0)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=128)
    parser.add_argument("--out", type=Path, help="keep the page")
    parser.add_argument("--loads", type=int, default=3, help="how often the page is opened; the fastest counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        write_run(folder, arguments.steps, arguments.ranks, arguments.micro_batches)
        start_s = time.process_time()
        source = run_source(folder, page.share_of(1), max_cells=5_000)
        read_s = time.process_time() - start_s
        path = arguments.out or Path(scratch) / "report.html"
        page.write(path, [source])
        print(f"page of {arguments.steps:,} steps, {arguments.ranks} ranks x {arguments.micro_batches} micro-batches")
        print(
            f"  written in {time.process_time() - start_s:.1f} s of one core, {read_s:.1f} s of them to read and pack"
        )
        print(f"  {path.stat().st_size:,} bytes of {page.MAX_BYTES:,}")
        loads = [facts for _ in range(arguments.loads) if (facts := load_facts(path)) is not None]
    if loads:
        best = min(loads, key=lambda facts: facts["readyMs"])
        print(f"  curves and memory can be used {best['usableMs']:.0f} ms after the page is opened")
        print(f"  all is drawn after {best['readyMs']:.0f} ms; actions of the timelines: {best['actions']}")
        print(f"  the timelines are drawn again, as when they move, in {best['drawMs']:.1f} ms")
    else:
        print("  no Chromium here: the load is not measured")


if __name__ == "__main__":
    main()
