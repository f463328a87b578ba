"""Commands on one draft as a user meets them: capture, train, eval, export, import."""

import json
from pathlib import Path

import pytest

from tests.commands import SPEC, World, answered, own_hash, refused, write


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
