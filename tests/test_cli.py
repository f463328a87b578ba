"""The command line as a user meets it: what it answers, and the one message that every kind of bad input gets."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from cli import app
from runners.display.live import PlainLines
from runners.features.generate import generate_responses
from runners.features.target import Target
from runners.search.driver import Search
from runners.search.executor import Event, Failure, Finished, Started
from runners.search.local import LocalExecutor
from tests.runners.tiny import conversation, save_tiny, tiny_config, tiny_model, tiny_tokenizer

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
    """A target of 8 layers on disk, text of its own, and a feature store; ``search_file`` writes searches over them."""

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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What comes at once


def test_light_commands_do_not_load_torch_and_answer_within_a_second(tmp_path: Path) -> None:
    write(tmp_path / "spec.yaml", SPEC)
    words = [["presets"], ["show", "eagle3"], ["diff", "eagle3", "eagle3.1"], ["schema", "best-config"]]
    script = (
        "import sys; from typer.testing import CliRunner; from cli import app\n"
        f"for words in {[['--help'], *words, ['validate', str(tmp_path / 'spec.yaml')]]!r}:\n"
        "    result = CliRunner().invoke(app, words); assert result.exit_code == 0, result.output\n"
        "print(sorted({'torch', 'transformers', 'optuna'} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert told.stdout.strip() == "[]", told.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0  # all of them together


def test_every_command_has_an_example() -> None:
    for command in ("presets", "show", "validate", "diff", "schema", "capture", "train", "eval", "search", "status"):
        assert f"archspec {command}" in answered(command, "--help")
    assert "archspec export" in answered("export", "--help")
    assert "archspec import" in answered("import", "--help")


def test_presets_tell_their_layers_and_fusion() -> None:
    assert "SpecForge pull" in answered("presets")
    assert "[embedding, state]" in answered("presets")  # no markup is made of it
    found = {preset["name"]: preset for preset in json.loads(answered("presets", "--json"))}
    assert found["eagle3-deep-fused-once"]["fusion"] == ["concat", "none", "none"]


def test_show_as_written_resolved_and_with_a_target(world: World, tmp_path: Path) -> None:
    assert answered("show", "eagle3").startswith("# EAGLE-3 (arXiv")
    assert "residual_from: raw" in answered("show", "eagle3", "--resolved")
    spec = write(tmp_path / "spec.yaml", SPEC)
    shown = answered("show", spec, "--target", world.target)
    assert "aux_layers: [2, 4, 5]" in shown
    assert "layers.0 attention" in shown
    assert [line.split()[:3] for line in shown.splitlines() if line.startswith(("vllm", "sglang"))] == [
        ["vllm", "0.32.0", "yes"],
        ["sglang", "0.5.23", "yes"],
    ]
    norms = write(tmp_path / "norms.yaml", SPEC | {"layers": [{"fusion": "concat", "attention": {"qk_norm": True}}]})
    told = answered("show", norms, "--target", world.target)
    rule = "layers.0.attention.qk_norm = true: use false (SGLang 0.5.23)"
    assert [line.split(maxsplit=3)[2:] for line in told.splitlines() if line.startswith("sglang")] == [["no", rule]]
    data = json.loads(answered("show", spec, "--target", world.target, "--json"))
    assert sum(part["trainable_params"] for part in data["parts"].values()) == data["cost"]["trainable_params"]
    assert {name: verdict["servable"] for name, verdict in data["servable"].items()} == {"vllm": "yes", "sglang": "yes"}


def test_diff_names_fields_and_costs(world: World, tmp_path: Path) -> None:
    assert "inputs.norm  none" in answered("diff", "eagle3", "eagle3.1")
    found = json.loads(answered("diff", "eagle3", "eagle3-deep-fused-once", "--json"))["differences"]
    assert found == {f"layers.{i}": {"a": "—", "b": "fusion: none"} for i in (1, 2)}
    deep = write(tmp_path / "b.yaml", SPEC | {"layers": [{"fusion": "concat", "repeat": 2}]})
    shallow = write(tmp_path / "a.yaml", SPEC)
    costs = json.loads(answered("diff", shallow, deep, "-t", world.target, "--json"))["cost"]
    assert costs["b"]["params"] > costs["a"]["params"]
    assert "describe the same draft" in answered("diff", shallow, shallow)


def test_schema_of_every_kind_accepts_what_the_program_writes(world: World, tmp_path: Path) -> None:
    import jsonschema

    search = world.search_file(tmp_path / "search.yaml", space="depth-and-fusion")
    jsonschema.validate(yaml.safe_load(search.read_text()), json.loads(answered("schema", "search")))
    jsonschema.validate(SPEC, json.loads(answered("schema", "spec")))
    assert "did you mean 'search'" in refused("schema", "serch")


def test_validate_tells_kinds_apart_and_reports_every_file(world: World, tmp_path: Path) -> None:
    good = write(tmp_path / "good.yaml", SPEC)
    space = write(tmp_path / "space.yaml", {"base": "good.yaml", "choices": {"depth": [1, 2]}})
    search = world.search_file(tmp_path / "search.yaml")
    kinds = [found["kind"] for found in json.loads(answered("validate", good, space, search, "--json"))]
    assert kinds == ["spec", "space", "search"]
    bad = write(tmp_path / "bad.yaml", SPEC | {"layers": [{"fusion": "concatt"}, {"stream": "3h"}]})
    result = archspec("validate", bad, good, tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert result.stdout == f"{good}: a valid spec\n"
    assert result.stderr.count("error: ") == 3
    assert f"{bad}:3: layers.0.fusion = 'concatt': did you mean 'concat'?" in result.stderr
    assert f"{tmp_path / 'none.yaml'}: no such file" in result.stderr
    assert "neither spec" in refused("validate", write(tmp_path / "odd.yaml", {"colour": "red"}))


def test_validate_for_an_engine(world: World, tmp_path: Path) -> None:
    """A draft as it is; of a space or a search some draft. A resolved spec needs no target."""
    known = ("--target", world.target)
    norms = {"layers": [{"fusion": "concat", "attention": {"qk_norm": True}}, {"repeat": 2, "stream": "2h"}]}
    good, bad = write(tmp_path / "good.yaml", SPEC), write(tmp_path / "bad.yaml", SPEC | norms)
    assert answered("validate", good, *known, "--engine", "sglang") == f"{good}: a valid spec\n"
    assert refused("validate", bad, *known, "--engine", "sglang").splitlines() == [
        f"error: {bad}:5: sglang cannot serve layers.0.attention.qk_norm = true: use false (SGLang 0.5.23)",
        f"error: {bad}:7: sglang cannot serve layers.1.stream = 2h: use h (SGLang 0.5.23)",
    ]  # once for both repeats
    assert f"{good}: whether vllm serves it depends on the target; give --target" in refused(
        "validate", good, "--engine", "vllm"
    )
    assert "engine 'vlm': did you mean 'vllm'?" in refused("validate", good, *known, "--engine", "vlm")


def test_validate_spaces_and_searches_for_an_engine(world: World, tmp_path: Path) -> None:
    known = ("--target", world.target)
    write(tmp_path / "norms.yaml", SPEC | {"layers": [{"fusion": "concat", "attention": {"qk_norm": True}}]})
    space = write(tmp_path / "space.yaml", {"base": "norms.yaml", "choices": {"depth": [1, 2]}})
    answered("validate", space, *known, "--engine", "vllm")
    message = refused("validate", space, *known, "--engine", "sglang")
    assert message.startswith(f"error: {space}: no draft of the space can be used: of 2 drawn, 2 break the constraints")
    assert "sglang cannot serve layers.0.attention.qk_norm = true" in message
    fixed = {"layers.all.attention.qk_norm": True, "head.vocab_size": 128}
    search = world.search_file(tmp_path / "search.yaml", fixed=fixed, constraints={"servable_by": ["vllm"]})
    answered("validate", search, *known, "--engine", "vllm")
    assert "sglang cannot serve" in refused("validate", search, *known, "--engine", "sglang")
    assert "sglang cannot serve" in refused("validate", search, "--engine", "sglang")  # it names its target itself


# Bad input


def test_misspelt_key(world: World, tmp_path: Path) -> None:
    spec = write(tmp_path / "spec.yaml", {"name": "x", "layrs": []})
    assert f"{spec}:2: layrs: unknown key; did you mean 'layers'?" in refused("validate", spec)
    search = world.search_file(tmp_path / "search.yaml", budgt={"trials": 1})
    assert "budgt: unknown key; did you mean 'budget'?" in refused("search", search, "--out", tmp_path / "run")


def test_wrong_type(world: World, tmp_path: Path) -> None:
    spec = write(tmp_path / "spec.yaml", SPEC | {"hidden_size": "wide"})
    assert "hidden_size = 'wide': must be a positive whole number or 'target'" in refused("validate", spec)
    search = world.search_file(tmp_path / "search.yaml", budget={"trials": "many", "rungs": [100]})
    assert "budget.trials = 'many'" in refused("search", search, "--out", tmp_path / "run")


def test_kv_heads_must_divide_heads(tmp_path: Path) -> None:
    spec = write(tmp_path / "spec.yaml", SPEC | {"layers": [{"attention": {"heads": 8, "kv_heads": 3}}]})
    assert "kv_heads=3 must divide heads=8; use one of [1, 2, 4, 8]" in refused("validate", spec)


def test_aux_layer_beyond_the_target(world: World, tmp_path: Path) -> None:
    spec = write(tmp_path / "spec.yaml", SPEC | {"inputs": {"aux_layers": [2, 9]}})
    message = refused("validate", spec, "--target", world.target)
    assert f"{spec}:7: inputs.aux_layers: layer 9 is beyond the target, whose layers are 1 to 8" in message
    fixed = {"inputs.aux_layers": [2, 9], "head.vocab_size": 128}
    search = world.search_file(tmp_path / "search.yaml", fixed=fixed)
    assert "layer 9 is beyond the target" in refused("search", search, "--out", tmp_path / "run")


def test_draft_vocabulary_larger_than_the_target(world: World, tmp_path: Path) -> None:
    message = refused("show", "eagle3", "--target", world.target)
    assert "head.vocab_size: 32000 is larger than the target's vocabulary of 264; use full or less" in message
    search = world.search_file(tmp_path / "search.yaml", fixed={})
    assert "32000 is larger than" in refused("search", search, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_empty_space(world: World, tmp_path: Path) -> None:
    space = write(tmp_path / "space.yaml", {"base": "eagle3", "choices": {}})
    assert "the space is empty; name at least one choice" in refused("validate", space)
    search = world.search_file(tmp_path / "search.yaml", constraints={"params": {"max": 10}})
    message = refused("search", search, "--out", tmp_path / "run")
    assert "no draft of the space can be used" in message
    assert "above the greatest allowed, 10" in message


def test_range_with_low_above_high(world: World, tmp_path: Path) -> None:
    choices = {"depth": {"low": 3, "high": 1}}
    search = world.search_file(tmp_path / "search.yaml", space={"base": "eagle3", "choices": choices})
    message = refused("search", search, "--out", tmp_path / "run")
    assert f"{search}:" in message
    assert "low <= high must hold, but got (low=3, high=1)" in message


def test_baseline_that_is_no_preset(world: World, tmp_path: Path) -> None:
    search = world.search_file(tmp_path / "search.yaml", baselines=["eagle3", "eagel3.1"])
    message = refused("search", search, "--out", tmp_path / "run")
    assert "baselines.1 = 'eagel3.1'" in message
    assert "did you mean 'eagle3.1'?" in message


def test_baselines_that_are_one_or_too_many(world: World, tmp_path: Path) -> None:
    twins = {
        "baselines": ["eagle3", "eagle3-qwen3"],
        "fixed": {"layers.all.attention.qk_norm": True, "head.vocab_size": 128},
    }
    message = refused("search", world.search_file(tmp_path / "twins.yaml", **twins), "--out", tmp_path / "run")
    assert "eagle3 and eagle3-qwen3 are the same architecture" in message
    many = {"baselines": ["eagle3", "eagle3-qwen3", "eagle3.1"]}
    message = refused("search", world.search_file(tmp_path / "many.yaml", **many), "--out", tmp_path / "run")
    assert "budget.trials: 2 trials do not hold 3 baselines, which count as trials; use at least 3" in message


def test_target_folder_missing_or_no_causal_model(world: World, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert f"target {missing}: no such file or folder" in refused("show", "eagle3", "--target", missing)
    folder = tmp_path / "t5"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    search = world.search_file(tmp_path / "search.yaml", target={"model": str(folder)})
    assert "T5Model is not a causal language model" in refused("search", search, "--out", tmp_path / "run")


def test_jsonl_with_a_broken_line(world: World, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(world.text.read_text().splitlines()[0] + '\n{"messages": [\n')
    data = {"conversations": [str(text)], "holdout": 0.3}
    search = world.search_file(tmp_path / "search.yaml", data=data, features=str(tmp_path / "features"))
    assert f"{text}:2: broken line, not JSON" in refused("search", search, "--out", tmp_path / "run")
    message = refused("capture", "-t", world.target, "-c", text, "-o", tmp_path / "features")
    assert f"{text}:2: broken line" in message


def test_store_of_another_target_or_without_a_layer(world: World, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=7)
    command = ("capture", "-t", other, "-c", world.text, "-o", world.features, "--layers", "1", "--max-length", 256)
    assert "already holds another feature store: target" in refused(*command)
    fixed = {"inputs.aux_layers": [3], "head.vocab_size": 128}
    search = world.search_file(tmp_path / "search.yaml", fixed=fixed)
    assert "no layer 3 (it has 2, 4, 5, 8)" in refused("search", search, "--out", tmp_path / "run")
    spec = write(tmp_path / "spec.yaml", SPEC | {"inputs": {"aux_layers": [3]}})
    assert "the store lacks layer 3" in refused("train", spec, "-f", world.features, "-o", tmp_path / "one")


def test_store_with_a_damaged_shard(world: World, tmp_path: Path) -> None:
    features = shutil.copytree(world.features, tmp_path / "features")
    shard = features / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    search = world.search_file(tmp_path / "search.yaml", features=str(features))
    assert f"{shard}: damaged" in refused("search", search, "--out", tmp_path / "run")
    spec = write(tmp_path / "spec.yaml", SPEC)
    assert f"{shard}: damaged" in refused("train", spec, "-f", features, "-o", tmp_path / "one")


def test_run_folder_that_exists(world: World, tmp_path: Path) -> None:
    search = world.search_file(tmp_path / "search.yaml")
    message = refused("search", search, "--out", world.folder)
    assert f"{world.folder}: the run folder exists; go on with --resume, or choose another with --out" in message
    assert "holds no run to resume" in refused("search", search, "--out", tmp_path / "run", "--resume")
    assert "holds no run" in refused("status", tmp_path / "nothing")
    assert "give a search file" in refused("search")


def test_no_free_disk(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    search = world.search_file(tmp_path / "search.yaml", features=str(tmp_path / "features"))
    message = refused("search", search, "--out", tmp_path / "run")
    assert "1000 bytes are free; ask for fewer layers" in message
    assert not (tmp_path / "run").exists()


def test_options_that_do_not_fit_together(world: World, tmp_path: Path) -> None:
    assert "belong together" in refused("capture", "-t", world.target, "--generate", world.text)
    assert "nothing to do" in refused("capture", "-t", world.target)
    message = refused("capture", "-t", world.target, "-c", world.text, "-o", tmp_path / "f", "--layers", "midle")
    assert "did you mean 'middle'?" in message
    assert "is no count" in refused("train", "eagle3", "-f", world.features, "-o", tmp_path, "--tokens", "few")
    assert "holds no draft" in refused("export", tmp_path, "-f", world.features, "-o", tmp_path / "x")
    assert "by --target, or" in refused("export", tmp_path, "-o", tmp_path / "x")
    assert "did you mean 'specforge'?" in refused(
        "export", tmp_path, "-f", world.features, "-o", tmp_path / "x", "--format", "specforgee"
    )
    assert "by --target, or" in refused("import", tmp_path, "-o", tmp_path / "x")
    assert "config.json: no such file" in refused("import", tmp_path, "-f", world.features, "-o", tmp_path / "x")


# One draft


def test_capture_generates_and_captures_in_one_go(world: World, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    command = ["capture", "-t", world.target, "--generate", prompts, "--responses", tmp_path / "own.jsonl"]
    command += ["--max-new-tokens", 8, "--max-length", 128, "--out", tmp_path / "features"]
    told = answered(*command)
    assert "4 prompts answered, 0 were before" in told
    assert "(own text), layers 2, 4, 5, 8" in told
    assert "0 prompts answered, 4 were before" in answered(*command)


@pytest.mark.usefixtures("few_threads")
def test_train_eval_export_one_draft(world: World, tmp_path: Path) -> None:
    spec = write(tmp_path / "spec.yaml", SPEC)
    command = ["train", spec, "-f", world.features, "-o", tmp_path / "one", "--rungs", "300,600", "--holdout", 0.3]
    command += [
        "--batch-tokens",
        256,
        "--ttt-steps",
        2,
        "--threads",
        1,
        "--set",
        "warmup=0.2",
        "--set",
        "dtype=float32",
    ]
    assert "acceptance length 1." in answered(*command)
    assert json.loads((tmp_path / "one/train.json").read_text())["train"]["warmup"] == 0.2
    again = json.loads(answered(*command, "--json"))  # answered from the record
    assert [result["rung"] for result in again] == [0, 1]
    assert "other values of seed" in refused(*command, "--seed", 1)
    evaluated = ["eval", tmp_path / "one", "-f", world.features, "--holdout", 0.3, "--decode", 2]
    told = json.loads(answered(*evaluated, "--json"))
    assert told["acceptance"] == again[-1]["acceptance"]
    assert told["decoding"]["same_text"] == told["decoding"]["responses"] == 2
    assert told["decoding"]["length"] == pytest.approx(told["decoding"]["evaluator"]["length"])
    assert "2 of 2 texts equal plain greedy decoding" in answered(*evaluated)
    own_holdout = json.loads(answered("eval", tmp_path / "one", "-f", world.features, "--json"))
    assert own_holdout["acceptance"] == told["acceptance"]
    message = refused("eval", tmp_path / "one", "-f", world.features, "--holdout", 0.5)
    assert "holdout=0.5: the draft was trained with a holdout of 0.3; a larger one would measure" in message
    origin = tmp_path / "one/draft/origin.json"
    right = origin.read_text()
    origin.write_text(right.replace(json.loads(right)["target"], "another-target"))
    for words in (("eval",), ("export", "-o", tmp_path / "wrong")):
        message = refused(words[0], tmp_path / "one", "-f", world.features, *words[1:])
        assert "the draft was trained for target another-target, but the target of" in message
    origin.write_text(right)
    answered("export", tmp_path / "one", "-f", world.features, "-o", tmp_path / "a")
    answered("export", tmp_path / "one", "-t", world.target, "-o", tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    told = answered("import", tmp_path / "a", "-f", world.features, "-o", tmp_path / "again")
    assert told.startswith(f"{tmp_path / 'again'}: small, {own_hash(spec, world)}; aux layers ")
    assert f"{tmp_path / 'again'}: embedding frozen, head weights own, fed back pre_norm" in told
    assert "note:" not in told  # an export of ours says all that it is
    assert own_hash(spec, world) == json.loads(answered("show", tmp_path / "again", "--json"))["hash"]
    assert "describe the same draft" in answered("diff", tmp_path / "again", tmp_path / "one")
    assert json.loads(answered("eval", tmp_path / "again", "-f", world.features, "--holdout", 0.1, "--json"))
    assert "exists; choose a new folder" in refused(
        "export", tmp_path / "one", "-f", world.features, "-o", tmp_path / "a"
    )


@pytest.mark.usefixtures("few_threads")
def test_training_that_cannot_go_on_is_told_and_can_be_mended(world: World, tmp_path: Path) -> None:
    spec = write(tmp_path / "spec.yaml", SPEC)
    command = ["train", spec, "-f", world.features, "--rungs", "300,600", "--batch-tokens", 256, "--threads", 1]
    out = tmp_path / "one"
    assert "device 'tpu': choose from auto, cpu" in refused(*command, "-o", out, "--device", "tpu")
    assert "device 'cuda:7': this machine has" in refused(*command, "-o", out, "--device", "cuda:7")
    assert "holdout must lie between 0 and 1" in refused(*command, "-o", out, "--holdout", 1.5)
    assert not out.exists()  # nothing is left that would stop the next try
    message = refused(*command, "-o", out, "--holdout", 0.3, "--learning-rate", 1e30)
    assert "did you mean 'learning_rate_rule'?" in refused(*command, "-o", out, "--set", "learning_rate_rul=constant")
    assert "--set warmup: write NAME=VALUE" in refused(*command, "-o", out, "--set", "warmup")
    assert "training diverged" in message
    assert "use a lower learning rate" in message


# A search


def rungs_begun(run: Path) -> dict[str, list[str]]:
    """Which rungs every trial's processes began, from their logs."""
    logs = sorted(run.glob("trials/*/log.txt"))
    return {
        log.parent.name: [line.split()[1] for line in log.read_text().splitlines() if line.startswith("rung ")]
        for log in logs
    }


def test_search_end_to_end(world: World, tmp_path: Path) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    told = answered("search", search, "--out", run)
    assert "trial 0 eagle3: rung 1 of 2, acceptance length 1." in told
    assert "leads" in told
    best = json.loads((run / "best-config.json").read_text())
    assert best["data"]["text_origin"] == "own"
    assert best["baselines"][0]["name"] == "eagle3"
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert files >= {"search.yaml", "study.log", "leaderboard.csv", "provenance.json", "best/draft.safetensors"}
    trials = {path.name for path in (run / "trials").iterdir()}
    assert len(trials) > 1
    assert files >= {f"trials/{trial}/{name}" for trial in trials for name in ("spec.yaml", "metrics.jsonl", "log.txt")}
    assert json.loads(answered("validate", run / "best-config.json", run / "best/spec.yaml", "--json"))
    assert best["servable"]["vllm"]["servable"] == "yes"
    answered("validate", run / "best-config.json", run / "best/spec.yaml", "--engine", "vllm")
    best["spec"]["layers"][0]["stream"] = "2h"
    other = tmp_path / "other-best.json"
    other.write_text(json.dumps(best, indent=2))
    line = 1 + other.read_text()[: other.read_text().index('"stream": "2h"')].count("\n")
    told = refused("validate", other, "--engine", "vllm")
    assert f"{other}:{line}: vllm cannot serve layers.0.stream = 2h: use h (vLLM 0.32.0)" in told
    status = json.loads(answered("status", run, "--json"))
    assert (status["state"], status["trials"]) == ("finished", {"ended": 2, "planned": 2})
    assert "2 of 2 trials" in answered("status", run)
    answered("export", run, "-f", world.features, "-o", tmp_path / "draft")

    before = rungs_begun(run)
    assert before == {trial: ["0", "1"] for trial in trials}
    answered("search", "--resume", "--out", run)
    assert rungs_begun(run) == before
    larger = world.search_file(tmp_path / "other.yaml", train={"ttt_steps": 3, "batch_tokens": 256})
    assert "other values of train" in refused("search", larger, "--out", run, "--resume")


@pytest.fixture
def on_event(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Search, Event], None]], None]:
    """Let a function see every event of the searches of this test, in the search's own process."""

    def see(look: Callable[[Search, Event], None]) -> None:
        show = PlainLines.show

        def both(lines: PlainLines, search: Search, event: Event) -> None:
            show(lines, search, event)
            look(search, event)

        monkeypatch.setattr(PlainLines, "show", both)

    return see


Hook = Callable[[Callable[[Search, Event], None]], None]


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="begun where Ctrl-C is ignored")
def test_ctrl_c_in_the_middle_and_resume(world: World, tmp_path: Path, on_event: Hook) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    fired: list[Event] = []

    def interrupt(_: Search, event: Event) -> None:
        if isinstance(event, Started) and event.task.rung == 1 and not fired:
            fired.append(event)
            signal.raise_signal(signal.SIGINT)

    on_event(interrupt)
    result = archspec("search", search, "--out", run)
    assert result.exit_code == 130, result.output
    assert f"go on with: archspec search --resume --out {run}" in result.stderr
    assert json.loads(answered("status", run, "--json"))["state"] == "stopped"
    answered("search", "--resume", "--out", run)
    assert rungs_begun(run)["0000"][0] == "0"
    assert rungs_begun(run)["0000"].count("0") == 1
    assert json.loads(answered("status", run, "--json"))["state"] == "finished"


def test_a_killed_worker_is_run_again(world: World, tmp_path: Path, on_event: Hook) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    events: list[Event] = []

    def kill(search: Search, event: Event) -> None:
        if isinstance(event, Started) and not events:
            assert isinstance(search.executor, LocalExecutor)
            os.kill(search.executor._running[0].process.pid or 0, signal.SIGKILL)
        events.append(event)

    on_event(kill)
    told = answered("search", search, "--out", run)
    failures = [e.result for e in events if isinstance(e, Finished) and isinstance(e.result, Failure)]
    assert [failure.kind for failure in failures] == ["crashed"]
    assert "ended by SIGKILL" in told
    assert "running it again" in told
    assert json.loads(answered("status", run, "--json"))["trials"]["ended"] == 2


def _drive(words: list[str]) -> None:
    app(words)


def test_a_killed_driver_loses_at_most_the_trial_in_flight(world: World, tmp_path: Path) -> None:
    search, run = world.search_file(tmp_path / "search.yaml"), tmp_path / "run"
    driver = get_context("forkserver").Process(target=_drive, args=(["search", str(search), "--out", str(run)],))
    driver.start()
    measured = run / "trials/0000/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not measured.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert driver.pid is not None
    os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    first = measured.read_text().splitlines()[0]
    answered("search", "--resume", "--out", run)
    assert measured.read_text().splitlines()[0] == first  # seconds and all: not trained again
    assert rungs_begun(run)["0000"].count("0") == 1
    assert json.loads(answered("status", run, "--json"))["state"] == "finished"


def test_foreign_text_is_called_a_proxy(world: World, tmp_path: Path) -> None:
    given = [json.loads(line) for line in world.text.read_text().splitlines()]
    text = tmp_path / "foreign.jsonl"
    text.write_text("".join(json.dumps({**row, "generation": None}) + "\n" for row in given))
    search = world.search_file(
        tmp_path / "search.yaml",
        data={"conversations": [str(text)], "max_length": 256, "holdout": 0.3},
        features=str(tmp_path / "features"),
        budget={"trials": 1, "rungs": [300]},
    )
    told = answered("search", search, "--out", tmp_path / "run")
    assert "acceptance length (proxy)" in told
    assert "proxy: the text was not written by the target" in told
    assert "proxy:" in answered("status", tmp_path / "run")
