"""SpecForge's format: what of a draft it holds, what it refuses, and names and switches that are only read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from archspec.checkpoints import assemble, export, load, read
from archspec.errors import ArchspecError
from archspec.formats import FORMATS, format_of
from archspec.layouts import Layout, tensor_names
from archspec.modules import Draft
from tests.archspec.drafts import CONCAT, assert_same, logits, make, make_draft
from tests.archspec.strategies import TOY

SPECFORGE = FORMATS["specforge"]
HELD: dict[str, dict[str, Any]] = {
    "full vocabulary": {"head": {"vocab_size": "full"}},
    "norm for each": {"inputs": {"norm": "each"}},
    "five aux layers": {"inputs": {"aux_layers": [1, 2, 4, 7, 8]}},
    "every target layer": {"inputs": {"aux_layers": [1, 2, 3, 4, 5, 6, 7, 8], "norm": "each"}},
    "no final norm": {"head": {"vocab_size": 20, "norm": "none"}},
    "another hidden size": {"hidden_size": 12, "embedding": "trained"},
    "frozen head": {"head": {"vocab_size": 20, "weights": "target"}},
    "own sizes": {
        "layers": [
            {**CONCAT, "attention": {"heads": 6, "kv_heads": 3, "head_dim": 8}, "mlp": {"intermediate_size": 10}}
        ],
        "rope_theta": 500.0,
        "norm_eps": 1e-6,
    },
}


@pytest.mark.parametrize("fields", HELD.values(), ids=HELD.keys())
def test_every_field_that_the_format_holds_comes_back(fields: dict[str, Any], tmp_path: Path) -> None:
    draft = make_draft(make(**fields))
    export(draft, tmp_path, "specforge")
    assert_same(draft, load(tmp_path))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"inputs": {"aux_layers": [0, 4, 5]}},
        "inputs.aux_layers = [0, 4, 5]: SpecForge cannot read the embedding (0); use layers from 1",
    ),
    ({"inputs": {"norm": "joint"}}, "inputs.norm = joint: use none or each"),
    ({"inputs": {"aux_layers": ["last"], "norm": "target"}}, "inputs.norm = target: use none or each"),
    ({"inputs": {"aux_layers": [4], "projection": "none"}}, "inputs.projection = none: use linear"),
    ({"inputs": {"bias": True}}, "inputs.bias = true: use false"),
    ({"feedback": "post_norm"}, "feedback = post_norm: SpecForge feeds back pre_norm"),
    (
        {"layers": [{"fusion": "project"}]},
        "layers.0.fusion = project: use concat; only the first layer reads the embedding",
    ),
    ({"layers": [CONCAT, {}]}, "layers = 2: SpecForge has 1; use 1"),
    ({"layers": [{**CONCAT, "stream": "2h"}]}, "layers.0.stream = 2h: use h"),
    ({"layers": [{**CONCAT, "residual_from": "normed"}]}, "layers.0.residual_from = normed: use raw"),
    ({"layers": [{**CONCAT, "mlp": {"depth": 2}}]}, "layers.0.mlp.depth = 2: use 1"),
    ({"layers": [{**CONCAT, "attention": {"norm": "none"}}]}, "layers.0.attention.norm = none: use own"),
    ({"layers": [{**CONCAT, "attention": {"qk_norm": True}}]}, "layers.0.attention.qk_norm = true: use false"),
    ({"layers": [{**CONCAT, "attention": {"bias": True}}]}, "layers.0.attention.bias = true: use false"),
    ({"layers": [{**CONCAT, "attention": {"window": 9}}]}, "layers.0.attention.window = 9: use null"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_a_field_that_the_format_lacks_is_named(fields: dict[str, Any], message: str) -> None:
    assert [str(limit) for limit in SPECFORGE.limits(make(**fields))] == [message]


# What is only read


def renamed(draft: Draft, layout: Layout) -> dict[str, Tensor]:
    return {theirs: draft.state_dict()[ours] for ours, theirs in tensor_names(draft.spec, layout).items()}


SGLANG = Layout(lambda i: "midlayer" if i == 0 else f"layers.{i}", "hidden_norm")
NUMBERED = Layout(lambda i: f"layers.{i}")
MIDLAYERS = Layout(lambda i: f"midlayers.{i}")
ADDITIONAL = Layout(lambda i: f"additional_layers.{i - 1}" if i else "fuse_layer", "hidden_norm")
MIDLAYER = Layout(lambda i: "midlayer" if i == 0 else f"layers.{i}")


@pytest.mark.parametrize(
    ("layout", "form", "layers"),
    [
        pytest.param(NUMBERED, "vllm", [CONCAT, {}], id="numbered"),
        pytest.param(SGLANG, "sglang", [CONCAT, {}, {}], id="SGLang's norm"),
        pytest.param(MIDLAYERS, "specforge", [CONCAT, CONCAT], id="#401"),
        pytest.param(ADDITIONAL, "specforge", [CONCAT, {}], id="#449"),
        pytest.param(MIDLAYER, "vllm", [{**CONCAT, "mlp": {"depth": 3, "residual": False}}], id="stacked MLPs"),
    ],
)
def test_names_that_are_only_read(layout: Layout, form: str, layers: list[dict[str, Any]]) -> None:
    draft = make_draft(make(layers=layers))
    config, tensors = SPECFORGE.config(draft.spec), renamed(draft, layout)
    assert format_of(config, tensors, "checkpoint").name == form
    spec, state = read(FORMATS[form], config, tensors, TOY, "checkpoint")
    assert spec.hash == draft.spec.hash
    for ours, theirs in zip(logits(draft), logits(assemble(spec, state)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_depth_in_the_config_of_a_stack_of_mlps_is_not_a_count_of_layers() -> None:
    """Pull request 401's first commit writes the number of MLPs where layers are counted."""
    draft = make_draft(make(layers=[{**CONCAT, "mlp": {"depth": 3, "residual": False}}]))
    config = SPECFORGE.config(draft.spec) | {"num_hidden_layers": 3}
    assert read(SPECFORGE, config, renamed(draft, MIDLAYER), TOY, "checkpoint")[0].hash == draft.spec.hash


def test_norm_output_is_the_norm_before_the_head() -> None:
    """And it is there where nothing is said, or where it is said to be."""
    draft = make_draft(make())
    for config in ({}, {"norm_output": True}, {"norm_output": None}):
        spec, _ = read(SPECFORGE, SPECFORGE.config(draft.spec) | config, renamed(draft, MIDLAYER), TOY, "checkpoint")
        assert (spec.head.norm, spec.feedback) == ("own", "pre_norm")
    spec, state = read(
        SPECFORGE, SPECFORGE.config(draft.spec) | {"norm_output": False}, renamed(draft, MIDLAYER), TOY, "checkpoint"
    )
    assert (spec.head.norm, spec.feedback) == ("none", "pre_norm")
    assert "norm.weight" not in state


def test_a_final_norm_that_is_not_used_is_written_as_ones_and_may_lack(tmp_path: Path) -> None:
    draft = make_draft(make(head={"vocab_size": 20, "norm": "none"}))
    export(draft, tmp_path, "specforge")
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors.pop("norm.weight"), torch.ones(16))
    spec, _ = read(SPECFORGE, SPECFORGE.config(draft.spec), tensors, TOY, "checkpoint")
    assert spec.hash == draft.spec.hash


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc"])
def test_switches_that_specforge_does_not_know_are_refused(flag: str) -> None:
    draft = make_draft(make())
    config = SPECFORGE.config(draft.spec) | {flag: True}
    with pytest.raises(ArchspecError) as caught:
        read(SPECFORGE, config, renamed(draft, MIDLAYER), TOY, "checkpoint")
    assert str(caught.value) == (
        f"checkpoint: {flag} is true, but SpecForge does not know it; read the checkpoint as vllm, or name the format "
        "it was written in"
    )
    read(SPECFORGE, config | {flag: False}, renamed(draft, MIDLAYER), TOY, "checkpoint")


def test_names_that_only_specforge_has_are_not_sent_to_vllm() -> None:
    draft = make_draft(make(layers=[CONCAT, CONCAT]))
    tensors, config = renamed(draft, MIDLAYERS), SPECFORGE.config(draft.spec)
    windowed = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    for changed, message in (
        (windowed, "layers.0.attention.window = 4: SpecForge's Llama draft has no windows"),
        (
            {"eagle_config": None},
            (
                "eagle_aux_hidden_state_layer_ids stands at the top alone, where SpecForge does not look; "
                "put the ids into eagle_config too, counted from 0"
            ),
        ),
    ):
        with pytest.raises(ArchspecError) as caught:
            read(SPECFORGE, config | changed, tensors, TOY, "checkpoint")
        assert str(caught.value) == f"checkpoint: {message}"
