"""Running commands as a user does, and a small world for them: a target on disk, its own text, and its features."""

import json
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from cli import app
from runners.features.generate import generate_responses
from runners.features.target import Target, target_facts
from tests.runners.tiny import conversation, tiny_config, tiny_model, tiny_tokenizer

SPEC = {"name": "small", "layers": [{"fusion": "concat"}], "head": {"vocab_size": 128}}


def archspec(*words: object) -> Any:
    """Run a command; the real program but for the process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def answered(*words: object) -> str:
    """What a command prints that must succeed."""
    result = archspec(*words)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return str(result.stdout)


def refused(*words: object) -> str:
    """The message of a command that must find fault with its input."""
    result = archspec(*words)
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return str(result.stderr)


def write(path: Path, data: Any) -> Path:
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


def own_hash(spec: Path, world: "World") -> str:
    """The hash that show tells for a spec and the world's target."""
    return str(json.loads(answered("show", spec, "-t", world.target, "--json"))["hash"])


class World:
    """A target of 8 layers on disk, text of its own, and a feature store; it writes searches and profiles over them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, folder / "target"
        model, tokenizer = tiny_model(tiny_config(num_hidden_layers=8)), tiny_tokenizer()
        model.save_pretrained(self.target)
        tokenizer.save_pretrained(self.target)
        prompts = [
            conversation("word " * (1 + i % 4), category=("chat", "code")[i % 2], name=f"p{i}") for i in range(16)
        ]
        self.text, self.features = folder / "own.jsonl", folder / "features"
        loaded = Target(model, tokenizer, str(self.target))
        generate_responses(loaded, prompts, 24, 0.0, 16, 0, self.text)
        command = ("capture", "-t", self.target, "-c", self.text, "-o", self.features, "--layers", "2,4,5")
        assert "16 conversations" in answered(*command, "--max-length", 256)

    def search_file(self, path: Path, **changes: Any) -> Path:
        """Two baselines and one candidate, in rungs of a few hundred tokens."""
        data = {
            "target": {"model": str(self.target)},
            "data": {"conversations": [str(self.text)], "max_length": 256, "holdout": 0.3},
            "features": str(self.features),
            "space": {"base": "eagle3", "choices": {"depth": [1, 2]}},
            "fixed": {"head.vocab_size": 128},
            "baselines": ["eagle3"],
            "train": {"ttt_steps": 2, "batch_tokens": 256, "threads": 1},
            "objective": {"draft_length": 3},
            "budget": {"trials": 2, "rungs": [300, 600], "reduction": 2},
        }
        return write(path, data | changes)

    def profile(self, path: Path, **changes: Any) -> Path:
        """A profile by hand: batch 1 to 4, contexts 64 to 256, k to 8, and one draft of a layer with a head of 128."""
        points = [(batch, context) for batch in (1, 4) for context in (64, 256)]
        facts = target_facts(str(self.target)).model_dump(mode="json")
        data = {
            "hardware": "a quiet machine",
            "dtype": "float32",
            "threads": 1,
            "target": {"model": "the world's", "facts": facts},
            "target_times": [
                {"batch": batch, "context": context, "rows": rows, "ms": 10 * batch + rows / 10}
                for batch, context in points
                for rows in (1, 2, 9)
            ],
            "drafts": [{"spec": SPEC, "times": [at(batch, context, 2.0, 0.5) for batch, context in points]}],
        }
        path.write_text(json.dumps(data | changes, indent=1), encoding="utf-8")
        return path


def at(batch: int, context: int, step_ms: float, cycle_ms: float) -> dict[str, Any]:
    """A draft's time in a profile."""
    return {"batch": batch, "context": context, "step_ms": step_ms, "cycle_ms": cycle_ms}
