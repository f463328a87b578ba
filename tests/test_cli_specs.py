"""Commands on specs and files as a user meets them: presets, show, validate, diff, schema."""

import json
import re
from pathlib import Path

import pytest
import yaml

from archspec.accelerators import ACCELERATORS
from runners.features.target import target_facts
from tests.commands import SPEC, World, answered, archspec, refused, write


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


def test_show_tells_what_a_step_takes_on_an_accelerator(world: World, tmp_path: Path) -> None:
    spec, known = write(tmp_path / "spec.yaml", SPEC), ("--target", world.target)
    use = ("--accelerator", "h100 sxm", "--dtype", "float32", "--batch", 2, "--context", 64)
    told = json.loads(answered("show", spec, *known, *use, "--json"))["times"]
    assert told["source"] == "roofline H100-SXM, float32, batch 2, context 64"
    assert list(told["parts"]) == ["embedding", "layer 0", "head", "choice"]
    assert sum(told["parts"].values()) == pytest.approx(told["draft_ms"])
    assert list(told["target_ms"]) == ["1", "2", "3", "4", "5", "7", "9"]
    shown = answered("show", spec, *known, *use)
    step, fixed, alone = (told["draft_ms"], told["cycle_ms"], told["target_ms"]["1"])
    assert f"draft step {step:.3f} (roofline), T_0 {fixed:.3f}, T(1) {alone:.3f}\n" in shown
    layer = told["parts"]["layer 0"]
    assert re.search(rf"^layer 0 +{layer:.3f} +{layer / step:.1%}$", shown, flags=re.MULTILINE)
    cycle = told["target_ms"]["4"] + 3 * step + fixed
    assert cycle > 4 * alone  # the draft is as large as this target
    row = rf"^ +3 +{told['target_ms']['4']:.3f} +{cycle:.3f} +never$"
    assert re.search(row, shown, flags=re.MULTILINE)
    assert json.loads(answered("show", spec, *known, "--json"))["times"] is None


def test_show_tells_what_a_step_takes_by_a_profile(world: World, tmp_path: Path) -> None:
    spec, profile = write(tmp_path / "spec.yaml", SPEC), world.profile(tmp_path / "p.json")
    known = ("--target", world.target, "--profile", profile)
    told = json.loads(answered("show", spec, *known, "--json"))["times"]
    assert told["source"] == "profile of a quiet machine, float32, 1 thread; batch 1, context 256"
    assert (told["draft_ms"], told["draft_source"], told["cycle_ms"], told["parts"]) == (2.0, "measured", 0.5, None)
    assert told["target_ms"]["7"] == pytest.approx(10.7)
    shown = answered("show", spec, *known)
    assert "draft step 2.000 (measured), T_0 0.500, T(1) 10.100\n" in shown
    assert "part of a draft step" not in shown
    even = (10.2 + 2 + 0.5) / 10.1  # of at most 2 at k = 1
    assert re.search(rf"^ +1 +10.200 +12.700 +{even:.3f}$", shown, flags=re.MULTILINE)
    deep = write(tmp_path / "deep.yaml", SPEC | {"layers": [{"fusion": "concat", "repeat": 2}]})
    assert json.loads(answered("show", deep, *known, "--json"))["times"]["draft_source"] == "scaled"


def test_show_asks_for_a_target_and_times_that_fit(world: World, tmp_path: Path) -> None:
    profile, known = world.profile(tmp_path / "p.json"), ("--target", world.target)
    spec = write(tmp_path / "spec.yaml", SPEC)
    rule = "what a draft step takes depends on the target; name it by --target"
    assert refused("show", spec, "--accelerator", "H200") == f"error: --accelerator H200: {rule}\n"
    assert refused("show", spec, "--profile", profile) == f"error: --profile {profile}: {rule}\n"
    message = refused("show", spec, *known, "--accelerator", "H100-SMX")
    names = ", ".join(one.name for one in ACCELERATORS)
    rule = "accelerator 'H100-SMX' is unknown: did you mean 'H100-SXM'? choose from"
    assert message == f"error: --accelerator: {rule} {names}\n"
    assert refused("show", spec, *known, "--context", 9) == (
        "error: --context 9: needs times; add --profile FILE or --accelerator NAME\n"
    )
    facts = target_facts(str(world.target)).model_dump(mode="json") | {"num_layers": 9, "vocab_size": 300}
    other = world.profile(tmp_path / "other.json", target={"model": "another", "facts": facts})
    assert refused("show", spec, *known, "--profile", other) == (
        f"error: --profile: {other}: measured for another target (another: num_layers 9, vocab_size 300) than this one "
        "(num_layers 8, vocab_size 264); measure it with archspec profile\n"
    )


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
