"""The page of runs, as a browser draws it: `window.report` has the charts and timelines, and counts what they draw."""

import json
import math
from pathlib import Path

import pytest

from harness.browser import ask_page
from harness.run_folders import MEASURED, PREDICTED, record, write_run, write_steps
from shardwise.cli import main as cli
from shardwise.report import page
from shardwise.report.packing import buckets
from shardwise.report.run_folder import run_source, write_run_page
from shardwise.train.metrics import to_json_line

SHARE = page.share_of(1)
# What is not white of a canvas, as a share of its pixels.
INK = """const ink = (canvas) => {
  const {data, width, height} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let index = 3; index < data.length; index += 4) found += data[index] > 0;
  return found / (width * height);
};"""


def text_of(section: str) -> str:
    return f'document.getElementById("{section}").innerText'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


def test_a_run_is_drawn_whole(run, tmp_path):
    script = f"""{INK}
    const {{curves, timelines}} = window.report;
    return {{
      steps: curves.charts.map((chart) => chart.plot.data[0].length),
      loss: curves.charts[0].plot.data[1], heldOut: curves.charts[0].plot.data[2],
      ink: curves.charts.map((chart) => ink(chart.plot.ctx.canvas)),
      panels: timelines.panels.map((panel) => ({{...panel.drawn, ink: ink(panel.canvas)}})),
      tiles: [...document.querySelectorAll(".tile b")].map((each) => each.textContent),
      memory: {text_of("memory")}, parts: {text_of("parts")}, wire: {text_of("wire")}, config: {text_of("config")},
      environment: {text_of("environment")}, experts: {text_of("experts")},
    }};"""
    found = ask_page(page.draw([run_source(run, SHARE)]), script, tmp_path)
    assert found["steps"] == [21, 21, 21, 21]
    assert found["loss"] == pytest.approx([10.0 - step / 100 for step in range(1, 22)])
    assert found["heldOut"] == [None] * 20 + [9.5]
    assert min(found["ink"]) > 0.005
    # The plan and the recorded step under it: six forwards, six backwards; the thin rows are the transfers.
    plan, recorded = found["panels"]
    assert plan["names"] == recorded["names"] == [0, 1]
    assert plan["labels"] == recorded["labels"] == 12
    assert recorded["single"] >= 12
    assert min(plan["ink"], recorded["ink"]) > 0.3
    assert found["tiles"][:2] == ["21", "9.7900"]
    assert f"{sum(PREDICTED.values()) / 1024:.3g} KiB" in found["memory"]
    assert f"{sum(MEASURED.values()) / 1024:.3g} KiB · {100 * sum(MEASURED.values()) / 8000:.0f} %" in found["memory"]
    assert "7.81 KiB" in found["memory"], "the device's limit"
    assert "500 ms" in found["parts"]
    assert "2 KiB" in found["wire"]
    assert found["experts"].split()[-6:] == ["1", "1.25", "1.25", "2", "5.10", "3.10"], "layer, last step, mean"
    assert "mesh.pp" in found["config"]
    assert "2.13" in found["environment"]


def test_a_run_that_goes_on_is_shown_up_to_its_last_whole_line(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "timeline.json").unlink()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 22, "loss": 3.')
    (tmp_path / "run" / "memory.json").write_text('{"step": 3, "ran')
    script = f"""return {{
      steps: window.report.curves.charts[0].plot.data[0].at(-1), memory: {text_of("memory")},
      panels: window.report.timelines.panels.length, timelines: {text_of("timelines")}, curves: {text_of("curves")},
    }};"""
    found = ask_page(page.draw([run_source(tmp_path / "run", SHARE)]), script, tmp_path)
    assert found["steps"] == 21
    assert "damaged" not in found["curves"]
    assert f"{sum(MEASURED.values()) / 1024:.3g} KiB" in found["memory"], "what rank 0's metrics say"
    assert found["panels"] == 1
    assert "run.record_timeline" in found["timelines"]


def test_a_folder_with_metrics_alone_says_what_is_missing(tmp_path):
    write_steps(tmp_path / "run", 3)
    script = """return Object.fromEntries([...document.querySelectorAll("section")].map((each) =>
      [each.id, each.querySelectorAll(".empty").length]).concat([["step",
      document.querySelector(".tile").innerText.split("\\n")[2] ?? ""]]));"""
    found = ask_page(page.draw([run_source(tmp_path / "run", SHARE)]), script, tmp_path)
    assert found == {
        **dict.fromkeys(("memory", "parts", "timelines", "wire", "config", "environment"), 1),
        "curves": 0,
        "step": "",
    }


def test_runs_are_laid_over_each_other_and_their_configs_compared(tmp_path):
    write_run(tmp_path / "first")
    write_run(tmp_path / "second", 30, "optimizer.lr=0.5")
    script = """return {
      series: window.report.curves.charts[0].labels.map((label) => label.name),
      steps: window.report.curves.charts[0].plot.data[0].length,
      titles: window.report.timelines.panels.map((panel) => panel.canvas.getAttribute("aria-label")),
      differs: document.querySelector("#config table").innerText,
    };"""
    sources = [run_source(tmp_path / name, page.share_of(2)) for name in ("first", "second")]
    found = ask_page(page.draw(sources), script, tmp_path)
    assert found["series"] == ["first", "first, held out", "second", "second, held out"]
    assert found["steps"] == 31
    assert [title.partition(" ")[0] for title in found["titles"]] == ["first", "first", "second", "second"]
    rows = [line.split("\t") for line in found["differs"].splitlines()]
    assert [row for row in rows if row[0].strip() in ("optimizer.lr", "run.steps")] == [
        ["optimizer.lr", "0.0003", "0.5"],
        ["run.steps", "21", "31"],
    ]


def test_charts_zoom_together(run, tmp_path):
    script = """const {curves} = window.report;
    curves.charts[0].plot.setScale("x", {min: 5, max: 9});
    await frame();
    const zoomed = curves.charts.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max]);
    curves.reset();
    await frame();
    return {zoomed, all: curves.charts.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max])};"""
    found = ask_page(page.draw([run_source(run, SHARE)]), script, tmp_path)
    assert found == {"zoomed": [[5, 9]] * 4, "all": [[1, 21]] * 4}


def test_the_pages_of_long_runs_stay_small_and_keep_their_extremes(tmp_path):
    folder, num_steps = tmp_path / "run", 100_000
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            values = {
                "step": step,
                "loss": 5.0 + math.sin(step**2),
                "grad_norm": math.cos(step**2),
                "lr": math.sin(step),
            }
            values |= {"tokens_per_s": 1e5 * math.sin(3 * step**2), "mfu": math.sin(7 * step**2), "step_s": 1.0}
            values |= {"loss": 50.0} if step == 77_777 else {}
            file.write(json.dumps(values) + "\n")
    (folder / "memory.json").write_text(json.dumps({"ranks": [MEASURED] * 512}))
    text = page.draw([run_source(folder, SHARE)])
    assert len(text.encode()) <= page.MAX_BYTES
    script = """const [chart] = window.report.curves.charts;
    const high = chart.plot.data[chart.labels[0].high];
    const at = high.indexOf(Math.max(...high.filter((each) => each !== null)));
    return {points: high.length, most: high[at], step: chart.plot.data[0][at],
      ranks: document.querySelectorAll("#memory .rank").length};"""
    found = ask_page(text, script, tmp_path)
    assert 2_000 <= found["points"] < num_steps
    assert found["most"] == 50.0
    assert abs(found["step"] - 77_777) <= num_steps / found["points"]
    assert found["ranks"] == 512


def test_a_bucket_leaves_out_what_is_not_finite():
    values = [1.0, math.nan, 3.0, math.nan, math.nan, math.nan]
    assert buckets(values, 3) != buckets(values, 2)
    assert buckets([1.0, math.nan, 3.0], 3)["mean"] == buckets([2.0], 1)["mean"]


def test_a_page_is_data_whatever_its_files_hold(tmp_path):
    write_steps(tmp_path / "run", 2)
    config = {"model": {"preset": "</script><script>document.body.innerHTML = ''</script>"}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    found = ask_page(page.draw([run_source(tmp_path / "run", SHARE)]), f"return {text_of('config')};", tmp_path)
    assert "</script>" in found


@pytest.mark.parametrize(
    "line", ["[]", "null", '{"loss": {}}', '{"step": "x"}', '{"loss": 1e999}', '{"peak_bytes": [1]}', "\x00"]
)
def test_strange_lines_are_no_obstacle(tmp_path, line):
    write_steps(tmp_path / "run", 2)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    source = run_source(tmp_path / "run", SHARE)
    assert page.draw([source])
    assert source["curves"]["num_steps"] + source["curves"]["num_damaged"] == 3


def test_the_command_writes_into_the_runs_folder(run, capsys):
    assert cli.main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert "metrics" in (run / "report.html").read_text()
    other = run.parent / "other.html"
    assert cli.main(["report", str(run), "--compare", str(run), "-o", str(other)]) == 0
    assert other.stat().st_size > (run / "report.html").stat().st_size
    assert {each.name for each in run.parent.iterdir()} == {"run", "other.html"}


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / "empty")]) == 2
    assert "not-a-run" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2


def test_the_page_of_a_run_that_goes_on_is_written_beside_its_files(run):
    assert write_run_page(run) == run / "report.html"
    assert record(1).step == 1


def test_numbers_of_a_script_have_curves_of_their_own(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 5):
            values = {"reward": step / 8} if step > 1 else None
            file.write(to_json_line(record(step, values=values)) + "\n")
        hostile = {f"name {number}": 1.0 for number in range(1_000)}
        file.write(to_json_line(record(5, values=hostile)) + "\n")
    metrics = run_source(tmp_path, SHARE)["curves"]["metrics"]
    assert "values/reward" in metrics
    assert len(metrics) < 32
