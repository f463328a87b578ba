"""Which engine serves what: every preset and every single-field deviation from EAGLE-3, as a table for people.

``note``: served, though somebody has seen it go wrong or nobody has seen it run. The field that a verdict rests on
follows it. Where the table and docs/serving.md disagree, one of them is wrong.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.formats import FORMATS
from archspec.presets import load_preset, preset_names
from archspec.resolve import ResolvedSpec, resolve
from archspec.servable import ENGINES, Verdict, engine, servable_by, verdicts
from archspec.spec import DraftSpec
from tests.archspec.drafts import CONCAT, make, preset
from tests.smollm2 import SMOLLM2

PRESETS = """
preset                        | vllm                   | sglang
eagle1                        | no fusion_bias         | no fusion
eagle3                        | yes                    | yes
eagle3.1                      | yes                    | yes
eagle3-qwen3                  | yes                    | no qk_norm
eagle3-deep-fused-once        | yes                    | note layers
eagle3-deep-fused-every-layer | no fusion              | no fusion
eagle3-wide-stream            | no stream              | no stream
eagle3-mlp-stack              | no mlp.depth           | no mlp.depth
eagle3-mlp-residual           | no mlp.depth           | no mlp.depth
"""

FIELDS = """
deviation                                          | vllm              | sglang
inputs.aux_layers=[15]                             | yes               | no aux_layers
inputs.aux_layers=[2,27]                           | yes               | yes
inputs.aux_layers=[2,9,15,21,27]                   | yes               | yes
inputs.aux_layers=[0,15,27]                        | yes               | no aux_layers
inputs.aux_layers=[2,15,last]                      | yes               | no aux_layers
inputs.norm=each                                   | yes               | yes
inputs.norm=joint                                  | yes               | yes
inputs.norm=target inputs.aux_layers=[last]        | no norm           | no norm
inputs.projection=none inputs.aux_layers=[15]      | no projection     | no projection
inputs.bias=true                                   | no bias           | no bias
hidden_size=384 embedding=trained                  | yes               | yes
hidden_size=768 embedding=trained                  | yes               | note hidden_size
embedding=trained                                  | yes               | no embedding
layers.0.fusion=none layers.1.fusion=concat        | no fusion         | no fusion
layers.0.fusion=project                            | no fusion         | no fusion
layers.0.fusion=add                                | no fusion         | no fusion
layers.0.fusion=project layers.0.fusion_bias=true  | no fusion_bias    | no fusion
layers.0.stream=2h                                 | no stream         | no stream
layers.0.residual_from=normed                      | yes               | no residual_from
layers.0.repeat=2                                  | no fusion         | no fusion
layers.1.repeat=2                                  | yes               | note layers
layers.1.stream=2h                                 | no stream         | no stream
layers.1.residual_from=normed                      | no residual_from  | no residual_from
layers.1.attention=none                            | no attention      | no attention
layers.0.attention.heads=18                        | yes               | note heads
layers.0.attention.kv_heads=1                      | yes               | note kv_heads
layers.0.attention.kv_heads=9                      | yes               | note kv_heads
layers.0.attention.head_dim=32                     | yes               | note head_dim
layers.0.attention.head_dim=128                    | yes               | note head_dim
layers.0.attention.head_dim=48                     | note head_dim     | note head_dim
layers.0.attention.qk_norm=true                    | yes               | no qk_norm
layers.0.attention.bias=true                       | yes               | no bias
layers.0.attention.window=64                       | yes               | no window
layers.0.attention.norm=none                       | no attention.norm | no attention.norm
layers.1.attention.heads=18                        | no heads          | no heads
layers.1.attention.kv_heads=9                      | no kv_heads       | no kv_heads
layers.1.attention.head_dim=32                     | no head_dim       | no head_dim
layers.1.attention.qk_norm=true                    | no qk_norm        | no qk_norm
layers.1.attention.bias=true                       | no bias           | no bias
layers.1.attention.window=64                       | no window         | no window
layers.1.attention.norm=none                       | no attention.norm | no attention.norm
layers.0.mlp.depth=0                               | no mlp.depth      | no mlp.depth
layers.0.mlp.depth=2                               | no mlp.depth      | no mlp.depth
layers.0.mlp.intermediate_size=4096                | yes               | yes
layers.0.mlp.residual=false                        | yes               | yes
layers.0.mlp.norm=shared                           | yes               | yes
layers.1.mlp.intermediate_size=4096                | no size           | no size
feedback=post_norm                                 | yes               | yes
head.vocab_size=full                               | yes               | note vocab_size
head.vocab_size=2048                               | yes               | yes
head.weights=target                                | yes               | yes
head.norm=none                                     | no head.norm      | no head.norm
rope_theta=500                                     | yes               | yes
rope_scaling=target                                | yes               | yes
rope_scaling={"type":"linear","factor":4}          | yes               | note rope_scaling
rope_scaling={"type":"yarn","factor":4,"original_max_positions":1024} | yes | note rope_scaling
rope_scaling={"type":"yarn","factor":2,"original_max_positions":1024} | note rope_scaling | note rope_scaling
rope_scaling={"type":"yarn","factor":4,"original_max_positions":1024,"attention_factor":2} | yes | no attention_factor
norm_eps=1.0e-6                                    | yes               | yes
"""


def rows(table: str) -> list[tuple[str, ...]]:
    """The cells of every line but the first."""
    return [tuple(cell.strip() for cell in line.split("|")) for line in table.strip().splitlines()[1:]]


def deviating(changes: str) -> ResolvedSpec:
    """EAGLE-3 for SmolLM2 but for ``changes``, ``path=value`` with spaces between; layers are added as named."""
    data: dict[str, Any] = {"name": "draft", "layers": [{"fusion": "concat"}], "head": {"vocab_size": 32000}}
    for change in changes.split():
        path, _, text = change.partition("=")
        *parents, last = path.split(".")
        at: Any = data
        for key in parents:
            if isinstance(at, list):
                at += [{} for _ in range(int(key) + 1 - len(at))]
                at = at[int(key)]
            else:
                at = at.setdefault(key, {})
        at[last] = yaml.safe_load(text)
    return resolve(DraftSpec.model_validate(data), SMOLLM2)


def told(verdict: Verdict) -> str:
    """Word and fields of a verdict, as the tables write them: ``no fusion``, ``note layers``, ``yes``."""
    fields = {finding.limit.field for finding in verdict.limits or verdict.notes}
    word = {"yes": "yes", "no": "no", "with a note": "note"}[verdict.word]
    return " ".join([word, *sorted(fields)])


def fits(verdict: Verdict, cell: str) -> bool:
    """Whether the verdict has the cell's word, and among its fields one that ends as the cell's."""
    word, _, field = cell.partition(" ")
    found, *fields = told(verdict).split()
    return found == word and (field == "" or any(name.endswith(field) for name in fields))


@pytest.mark.parametrize(("name", "vllm", "sglang"), rows(PRESETS))
def test_presets(name: str, vllm: str, sglang: str) -> None:
    spec = resolve(load_preset(name), SMOLLM2)
    for verdict, cell in zip(verdicts(spec), (vllm, sglang), strict=True):
        assert fits(verdict, cell), f"{verdict.engine}: {told(verdict)}"


def test_the_table_has_every_preset() -> None:
    assert sorted(name for name, *_ in rows(PRESETS)) == preset_names()


@pytest.mark.parametrize(("changes", "vllm", "sglang"), rows(FIELDS))
def test_single_fields(changes: str, vllm: str, sglang: str) -> None:
    for verdict, cell in zip(verdicts(deviating(changes)), (vllm, sglang), strict=True):
        assert fits(verdict, cell), f"{verdict.engine}: {told(verdict)}"


def fields_of(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from fields_of(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from fields_of(value[0], f"{prefix}{key}.0.")
        else:
            yield prefix + key


def test_the_table_deviates_in_every_field_of_a_spec() -> None:
    """So that a new field cannot be added without a verdict on it."""
    fields = set(fields_of(DraftSpec.model_validate({"name": "x", "layers": [CONCAT]}).model_dump(mode="json")))
    deviations = {change.partition("=")[0] for changes, *_ in rows(FIELDS) for change in changes.split()}
    assert fields - deviations == {"name"}


# What a verdict says


def test_a_limit_names_field_rule_and_where_it_is_known_from() -> None:
    told = {
        verdict.engine: [str(finding) for finding in verdict.limits] for verdict in verdicts(preset("eagle3-qwen3"))
    }
    assert told == {"vllm": [], "sglang": ["layers.0.attention.qk_norm = true: use false (SGLang 0.5.23)"]}
    deep = make(layers=[CONCAT, CONCAT])
    rule = "layers.1.fusion = concat: use none; only the first layer reads the embedding"
    assert [[str(finding) for finding in verdict.limits] for verdict in verdicts(deep)] == [
        [f"{rule} (vllm#26164)"],
        [f"{rule} (sglang#18112)"],
    ]
    last = make(inputs={"aux_layers": [2, 8]})
    rule = "SGLang cannot read the last layer's output; use layers up to 7"
    assert [str(finding) for finding in engine("sglang").verdict(last).limits] == [
        f"inputs.aux_layers = [2, 8]: {rule} (SGLang 0.5.23; sglang#21272)"
    ]


def test_what_an_engine_does_not_take_of_eagle1_is_told() -> None:
    vllm, sglang = verdicts(preset("eagle1"))
    rule = "vLLM's EAGLE-1 has no bias on fc; use false"
    assert [str(finding) for finding in vllm.limits] == [f"layers.0.fusion_bias = true: {rule} (vLLM 0.32.0)"]
    rule = "SGLang's EAGLE-1 demands a bias on fc and was not run; use concat"
    assert [str(finding) for finding in sglang.limits] == [f"layers.0.fusion = project: {rule} (sglang#18112)"]
    data = load_preset("eagle1").model_dump(mode="json")
    data["layers"][0]["fusion_bias"] = False
    plain = engine("vllm").verdict(resolve(DraftSpec.model_validate(data), SMOLLM2))
    assert (plain.word, plain.form) == ("yes", "eagle1")


def notes(name: str, spec: ResolvedSpec) -> list[str]:
    verdict = engine(name).verdict(spec)
    assert verdict.servable
    assert verdict.word == ("with a note" if verdict.notes else "yes")
    return [str(finding) for finding in verdict.notes]


def test_notes_of_vllm() -> None:
    sizes = "144 cached elements a token and layer beside the target's 192, neither a multiple of the other"
    rule = "vLLM 0.32 pads the smaller, older versions refused"
    assert notes("vllm", deviating("layers.0.attention.head_dim=48")) == [
        f"layers.0.attention.head_dim = 48: {sizes}: {rule} (AngelSlim#5)"
    ]

    yarn = '{"type":"yarn","factor":1.5,"original_max_positions":1000}'
    rule = "its table ends at position 1500, the target's context at 4096; serve no further"
    assert notes("vllm", deviating(f"rope_scaling={yarn}")) == [
        f"rope_scaling = yarn: {rule} (vLLM 0.32.0, yarn_scaling_rope.py)"
    ]


def test_notes_of_sglang() -> None:
    source = "(SGLang 0.5.23, by its source)"
    assert notes("sglang", deviating("head.vocab_size=full")) == [
        f"head.vocab_size = 49152: the full vocabulary was not run {source}"
    ]
    assert notes("sglang", deviating("hidden_size=768 embedding=trained")) == [
        f"hidden_size = 768: wider than the target's 576 was not run, narrower was {source}"
    ]
    llama3 = '{"type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_positions":8192}'
    assert notes("sglang", deviating(f"rope_scaling={llama3}")) == [
        f"rope_scaling = llama3: scaled positions were not run {source}"
    ]
    assert notes("vllm", deviating(f"rope_scaling={llama3}")) == []
    assert notes("sglang", deviating("layers.1.fusion=none")) == [
        "layers = 2: version 0.5.23 serves more than one layer, older ones refused them (sglang#18175)"
    ]
    sizes = "layers.0.attention.heads=6 layers.0.attention.kv_heads=6 layers.0.attention.head_dim=96"
    assert notes("sglang", deviating(sizes)) == [
        f"layers.0.attention.heads = 6: other than the target's 9 was run with heads of 32 only {source}",
        f"layers.0.attention.kv_heads = 6: other than the target's 3 was run with heads of 32 only {source}",
        f"layers.0.attention.head_dim = 96: other than the target's 64 was run with heads of 32 only {source}",
    ]


def test_a_draft_that_is_refused_has_no_notes() -> None:
    verdict = engine("sglang").verdict(deviating("layers.0.attention.qk_norm=true head.vocab_size=full"))
    assert (verdict.word, verdict.notes) == ("no", ())


def test_verdicts_as_data() -> None:
    assert [verdict.as_dict() for verdict in verdicts(preset("eagle3-qwen3"))] == [
        {"servable": "yes", "version": "0.32.0", "format": "vllm", "because": [], "notes": []},
        {
            "servable": "no",
            "version": "0.5.23",
            "format": "sglang",
            "because": ["layers.0.attention.qk_norm = true: use false (SGLang 0.5.23)"],
            "notes": [],
        },
    ]
    assert servable_by(preset("eagle3")) == ["vllm", "sglang"]
    assert servable_by(preset("eagle3-qwen3")) == ["vllm"]
    assert servable_by(preset("eagle3-wide-stream")) == []


@pytest.mark.parametrize("facts", [SMOLLM2, SMOLLM2.model_copy(update={"num_layers": 12})])
def test_an_engine_serves_what_the_format_that_it_names_holds(facts: TargetFacts) -> None:
    for name in preset_names():
        spec = resolve(load_preset(name), facts)
        for verdict in verdicts(spec):
            assert not verdict.servable or FORMATS[verdict.form].limits(spec) == []


def test_an_unknown_engine_is_named_with_the_nearest() -> None:
    with pytest.raises(ArchspecError) as caught:
        engine("vlm")
    assert str(caught.value) == "engine 'vlm': did you mean 'vllm'? choose from vllm, sglang"
    assert all(name == each.name for name, each in ENGINES.items())
