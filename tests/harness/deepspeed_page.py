"""Makes docs/deepspeed-config.md from the table of DeepSpeed's keys.

In the folder `tests`, `python -m harness.deepspeed_page > ../docs/deepspeed-config.md` writes the page again.
"""

from typing import Final

from shardwise.compat.deepspeed.keys import CLASSES, KEYS

_HEAD: Final = """# DeepSpeed's config keys

Made by `tests/harness/deepspeed_page.py` from the table of `shardwise.compat.deepspeed.keys`. The same table translates
a `ds_config.json` when a script runs by `shardwise.compat.deepspeed`, and makes its messages; `shardwise convert
ds_config.json` prints the translation as a config of Shardwise's, with what was left out as comments.

A value `"auto"` that was not filled in counts as absent, which is said once. A dotted key at the top, such as
`"zero_optimization.stage"`, is read as a path, and wins over the section. An unknown key is said with the nearest
known one, and fails nothing. Keys with `stage3_` are also known without it, and `bf16` as `bfloat16`. The batch is an
equation: `train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data ranks; two give
the third.

A section `"shardwise"` holds sections of Shardwise's own config, which reach what DeepSpeed's keys do not:
`{"shardwise": {"mesh": {"tp": 2}, "recompute": {"mode": "full"}}}`.

What the JSON says nothing about is as in DeepSpeed: stage 0, clipping at 1.0, a step without finite gradients is
skipped (`run.on_nonfinite`). In stage 3 small parameters stay whole (`zero.keep_whole_below`), and ranks may run
different blocks (`zero.lockstep`)."""


def reference_page() -> str:
    """Return the docs page of all keys as Markdown: a table for each section."""
    parts = [
        _HEAD,
        "\n".join(["| class | a key of it |", "|---|---|", *(f"| {a} | {b} |" for a, b in CLASSES.items())]),
    ]
    sections: dict[str, dict[tuple[str, str], list[str]]] = {}
    for key in KEYS.values():
        top, _, leaf = key.path.partition(".") if "." in key.path else ("", "", key.path)
        what = {"M": key.text, "N": f"no effect: {key.text}", "R": f"refused: {key.text}"}[key.action]
        sections.setdefault(top, {}).setdefault((key.kind, what), []).append(f"`{leaf}`")
    for section, rows in sections.items():
        table = [f"| {', '.join(names)} | {kind} | {what} |" for (kind, what), names in rows.items()]
        title = f"## {section}" if section else "## At the top"
        parts.append("\n".join([title, "", "| key | class | here |", "|---|---|---|", *table]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(reference_page())
