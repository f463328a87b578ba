"""The command line as a user meets it: what all commands share, and the one message that every bad input gets."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import SPEC, World, answered, refused, write
from tests.runners.tiny import save_tiny

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
