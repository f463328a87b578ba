"""Checkpoints on disk: what damage is refused and how it is told, and tensors that are the target's own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archspec import checkpoints
from archspec.checkpoints import export, load
from archspec.errors import ArchspecError
from archspec.format import Format
from archspec.vllm import Vllm
from tests.archspec.drafts import (
    CONCAT,
    ToyTarget,
    assert_same,
    logits,
    make,
    make_draft,
    preset,
    refused,
    target_of,
)
from tests.archspec.strategies import TOY

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]


def change_tensors(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changed: Any) -> None:
    """Put other values into the config; None leaves the key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changed
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")


def drop(*names: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, make_tensor: Callable[[Tensors], Tensor]) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = make_tensor(tensors)

    return change


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two layers in vLLM's format."""
    export(make_draft(make(layers=[CONCAT, {}])), tmp_path, "vllm")
    return tmp_path


# Export


def test_export_refuses_with_every_field_at_once_and_writes_nothing(tmp_path: Path) -> None:
    draft = make_draft(make(layers=[CONCAT, CONCAT], feedback="post_norm"))
    with pytest.raises(ArchspecError) as caught:
        export(draft, tmp_path / "out", "specforge")
    assert str(caught.value) == (
        "draft: SpecForge's format cannot hold this draft:\n"
        "  layers = 2: SpecForge has 1; use 1\n"
        "  feedback = post_norm: SpecForge feeds back pre_norm\n"
        "  layers.1.fusion = concat: use none; only the first layer reads the embedding"
    )
    with pytest.raises(ArchspecError, match="format 'spec-forge': did you mean 'specforge'"):
        export(draft, tmp_path / "out", "spec-forge")
    assert not (tmp_path / "out").exists()


def test_export_refuses_numbers_that_no_checkpoint_has_and_writes_nothing(tmp_path: Path) -> None:
    damaged, unset = make_draft(make()), make_draft(make())
    with torch.no_grad():
        dict(damaged.named_parameters())["inputs.fc.weight"][0, 0] = torch.nan
    assert unset.d2t is not None
    unset.d2t.zero_()
    for draft, message in (
        (damaged, "draft: fc.weight: holds NaN; weights must be finite"),
        (make_draft(make()).double(), "draft: fc.weight: is float64, but weights must be float32, bfloat16 or float16"),
        (
            unset,
            "draft: d2t is all zeros, so the draft could propose only the first 20 tokens; a map that was never set",
        ),
    ):
        with pytest.raises(ArchspecError) as caught:
            export(draft, tmp_path / "out", "vllm")
        assert message in str(caught.value).splitlines()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_keep_their_dtype(dtype: str, tmp_path: Path) -> None:
    draft = make_draft(make()).to(getattr(torch, dtype))
    export(draft, tmp_path, "specforge")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["torch_dtype"], config["dtype"]) == (dtype, dtype)
    assert load(tmp_path).lm_head.weight.dtype == draft.lm_head.weight.dtype
    assert load(tmp_path).d2t is not None


class ForgetfulConfig(Vllm):
    """A format whose config says nothing of the state that is fed back."""

    def switches(self, spec: Any) -> dict[str, Any]:
        return super().switches(spec) | {"norm_output": False}


class SwappedNorms(Vllm):
    """A format that writes one tensor in another's place."""

    def copies(self, spec: Any, /) -> dict[str, str]:
        return {"norm.weight": "midlayer.hidden_norm.weight"}


@pytest.mark.parametrize(
    ("form", "what"),
    [(ForgetfulConfig(), "its spec differs"), (SwappedNorms(), "its tensors norm.weight differ")],
)
def test_export_reads_back_what_it_wrote(
    form: Format, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a draft which an engine would run as another one is known before it is served."""
    monkeypatch.setattr(checkpoints, "format_named", lambda _: form)
    with pytest.raises(ArchspecError) as caught:
        export(make_draft(preset("eagle3.1")), tmp_path, "vllm")
    assert str(caught.value) == (f"{tmp_path}: reads back as another draft than was written ({what}); do not serve it")


# Tensors against the config


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("fc.weight"), "fc.weight: missing from the file"),
        (drop("d2t"), "d2t: missing from the file"),
        (drop("midlayer.self_attn.q_proj.weight"), "midlayer.self_attn.q_proj.weight: missing from the file"),
        (
            drop("lm_head.weight", "layers.1.input_layernorm.weight"),
            "layers.1.input_layernorm.weight: missing from the file\nlm_head.weight: missing from the file",
        ),
        (
            put("midlayer.self_attn.q_proj.bias", lambda _: torch.zeros(16)),
            "midlayer.self_attn.q_proj.bias: extra; a vLLM draft of this config has no such tensor",
        ),
        (
            put("layers.2.mlp.up_proj.weight", lambda _: torch.zeros(24, 16)),
            "layers.2.mlp.up_proj.weight: extra; a vLLM draft of this config has no such tensor",
        ),
        (
            put("fc.weight", lambda tensors: tensors["fc.weight"][:, :32].contiguous()),
            "fc.weight: has shape [16, 32], but the config asks for [16, 48]",
        ),
        (
            put("lm_head.weight", lambda tensors: tensors["lm_head.weight"][:19].contiguous()),
            "lm_head.weight: has shape [19, 16], but the config asks for [20, 16]",
        ),
        (
            put("t2d", lambda tensors: tensors["t2d"][:47].contiguous()),
            "t2d: has shape [47], but the config asks for [48]",
        ),
        (
            put("layers.1.hidden_norm.weight", lambda _: torch.ones(16)),
            (
                "layers.1.hidden_norm.weight: differs from layers.1.input_layernorm.weight; "
                "engines read one or the other and would run two drafts"
            ),
        ),
        (
            put("d2t", lambda tensors: tensors["d2t"].flip(0).contiguous()),
            "d2t: draft id + d2t must be rising ids below 48; the offsets in this file are not",
        ),
        (
            put("d2t", lambda tensors: tensors["d2t"].float()),
            "d2t: draft id + d2t must be rising ids below 48; the offsets in this file are not",
        ),
        (
            put("d2t", lambda tensors: tensors["d2t"] + 40),
            "d2t: draft id + d2t must be rising ids below 48; the offsets in this file are not",
        ),
        (put("t2d", lambda _: torch.arange(48) < 20), "t2d: marks other target tokens than d2t leads to"),
        (
            put("d2t", lambda tensors: tensors["d2t"].to(torch.complex64)),
            "d2t: draft id + d2t must be rising ids below 48; the offsets in this file are not",
        ),
        (
            put("d2t", lambda tensors: torch.zeros_like(tensors["d2t"])),
            "d2t is all zeros, so the draft could propose only the first 20 tokens; a map that was never set",
        ),
        (
            put("fc.weight", lambda tensors: tensors["fc.weight"].to(torch.int8)),
            "fc.weight: is int8, but weights must be float32, bfloat16 or float16",
        ),
        (
            put("fc.weight", lambda tensors: tensors["fc.weight"].to(torch.float8_e4m3fn)),
            "fc.weight: is float8_e4m3fn, but weights must be float32, bfloat16 or float16",
        ),
        (
            put("norm.weight", lambda tensors: tensors["norm.weight"].to(torch.complex64)),
            "norm.weight: is complex64, but weights must be float32, bfloat16 or float16",
        ),
        (
            put("norm.weight", lambda tensors: tensors["norm.weight"].index_fill(0, torch.tensor(3), torch.nan)),
            "norm.weight: holds NaN; weights must be finite",
        ),
        (
            put("lm_head.weight", lambda tensors: tensors["lm_head.weight"].index_fill(0, torch.tensor(3), -torch.inf)),
            "lm_head.weight: holds inf; weights must be finite",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_tensor(damage: Change, message: str, folder: Path) -> None:
    change_tensors(folder, damage)
    assert refused(folder) == message


@pytest.mark.parametrize("form", ["sglang", "vllm", "specforge", "speculators"])
def test_every_tensor_that_is_written_is_asked_for_or_follows_from_others(form: str, tmp_path: Path) -> None:
    """What may lack: the second name of a norm, the mask, and the target's embedding where the target is at hand."""
    draft = make_draft(make())
    export(draft, tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
        if name == "t2d":
            assert_same(draft, load(tmp_path))
        elif name == "embed_tokens.weight":
            assert_same(draft, load(tmp_path, target=target_of(draft)))
        else:
            assert refused(tmp_path) == f"{name}: missing from the file"


def test_the_second_name_of_a_norm_may_lack(folder: Path) -> None:
    draft = load(folder)
    change_tensors(folder, drop("layers.1.hidden_norm.weight"))
    assert_same(draft, load(folder))


def test_maps_of_other_types_and_a_mask_that_lacks_come_back_as_ours(folder: Path) -> None:
    draft = load(folder)
    change_tensors(folder, put("d2t", lambda tensors: tensors["d2t"].int()))
    change_tensors(folder, put("t2d", lambda tensors: tensors["t2d"].int()))
    assert_same(draft, load(folder))
    change_tensors(folder, drop("t2d"))
    assert_same(draft, load(folder))


def test_the_identity_maps_of_a_full_vocabulary_say_nothing(tmp_path: Path) -> None:
    draft = make_draft(make(head={"vocab_size": "full"}))
    export(draft, tmp_path, "specforge")
    maps = {"d2t": torch.zeros(48, dtype=torch.long), "t2d": torch.ones(48, dtype=torch.bool)}
    change_tensors(tmp_path, lambda tensors: tensors.update(maps))  # as SpecForge itself writes them
    assert load(tmp_path).spec == draft.spec
    change_tensors(tmp_path, put("t2d", lambda _: torch.arange(48) > 0))
    assert refused(tmp_path) == "t2d: extra; a SpecForge draft of this config has no such tensor"
    change_tensors(tmp_path, drop("t2d"))
    change_tensors(tmp_path, put("d2t", lambda _: torch.ones(48, dtype=torch.long)))
    assert refused(tmp_path) == "d2t: extra; a SpecForge draft of this config has no such tensor"
    change_tensors(tmp_path, put("d2t", lambda _: torch.zeros(20, dtype=torch.long)))
    assert refused(tmp_path) == "d2t: extra; a SpecForge draft of this config has no such tensor"


# The target's own tensors


def strip(folder: Path) -> None:
    """Make an export of ours look like another project's."""
    change_config(folder, draft_archspec=None)


def test_an_embedding_that_is_left_out_is_the_targets(folder: Path) -> None:
    draft = load(folder)
    change_tensors(folder, drop("embed_tokens.weight"))
    assert refused(folder) == "leaves out embed_tokens.weight, the target's own; name the target"
    target = target_of(draft)
    assert_same(draft, load(folder, target=target))
    half = replace(target, embed_tokens=target.embed_tokens.double())
    assert load(folder, target=half).embed_tokens.weight.dtype == torch.float32  # as the checkpoint's other tensors


def test_an_embedding_of_its_own_must_be_there(tmp_path: Path) -> None:
    draft = make_draft(make(embedding="trained"))
    export(draft, tmp_path, "vllm")
    change_tensors(tmp_path, drop("embed_tokens.weight"))
    assert refused(tmp_path, target=ToyTarget()) == "embed_tokens.weight: missing from the file"


def test_a_whole_head_that_is_left_out_is_the_targets_for_vllm_alone(tmp_path: Path) -> None:
    draft = make_draft(make(head={"vocab_size": "full"}))
    for form in ("vllm", "specforge"):
        export(draft, tmp_path / form, form)
        change_tensors(tmp_path / form, drop("lm_head.weight"))
    assert refused(tmp_path / "vllm") == "leaves out lm_head.weight, the target's own; name the target"
    again = load(tmp_path / "vllm", target=target_of(draft))
    assert again.spec.head.weights == "target"
    assert not again.lm_head.weight.requires_grad
    assert torch.equal(again.lm_head.weight, draft.lm_head.weight)
    assert refused(tmp_path / "specforge", target=ToyTarget()) == "lm_head.weight: missing from the file"


def test_an_eagle1_checkpoint_takes_norm_and_head_from_the_target(tmp_path: Path) -> None:
    draft = make_draft(preset("eagle1"))
    export(draft, tmp_path, "eagle1")
    told = "leaves out inputs.norms.0.weight, lm_head.weight, the target's own; name the target"
    assert refused(tmp_path) == told
    assert_same(draft, load(tmp_path, target=target_of(draft)))


@pytest.mark.parametrize("form", ["speculators", "vllm"])
def test_what_is_frozen_is_told_from_the_target(form: str, tmp_path: Path) -> None:
    """speculators' head is the target's unless it differs; nobody else's is. An embedding is frozen if it is equal."""
    draft = make_draft(make(head={"vocab_size": 20, "weights": "target"}))
    target = target_of(draft)
    export(draft, tmp_path, form)
    strip(tmp_path)
    same = load(tmp_path, facts=TOY, target=target)
    assert same.spec.embedding == "frozen"
    assert same.spec.head.weights == ("target" if form == "speculators" else "own")
    assert not same.embed_tokens.weight.requires_grad
    assert same.lm_head.weight.requires_grad == (form == "vllm")
    other = load(tmp_path, facts=TOY, target=ToyTarget())
    assert (other.spec.embedding, other.spec.head.weights) == ("trained", "own")
    assert other.embed_tokens.weight.requires_grad
    assert other.lm_head.weight.requires_grad
    for ours, theirs in zip(logits(draft), logits(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_frozen_copy_in_half_precision_is_still_the_targets(tmp_path: Path) -> None:
    draft = make_draft(make())
    target = target_of(draft)
    export(draft.bfloat16(), tmp_path, "vllm")
    strip(tmp_path)
    assert load(tmp_path, facts=TOY, target=target).spec.embedding == "frozen"


@pytest.mark.parametrize(("weights", "lost"), [("own", "embed_tokens"), ("target", "lm_head")])
def test_an_export_of_ours_beside_another_target_is_refused(weights: str, lost: str, tmp_path: Path) -> None:
    draft = make_draft(make(head={"vocab_size": 20, "weights": weights}))
    export(draft, tmp_path, "vllm")
    other = replace(target_of(draft), **{lost: getattr(ToyTarget(), lost)})
    told = f"{lost}.weight: is frozen but not this target's; name the draft's own target"
    assert refused(tmp_path, target=other) == told


def test_an_embedding_of_its_own_that_sglang_would_replace_is_not_read_as_its(tmp_path: Path) -> None:
    draft = make_draft(make())
    export(draft, tmp_path, "sglang")
    strip(tmp_path)
    assert load(tmp_path, "sglang", TOY, target_of(draft)).spec.embedding == "frozen"
    assert refused(tmp_path, "sglang", TOY, ToyTarget()).splitlines() == [
        "embedding = trained: SGLang puts the target's in its place; use frozen",
        "SGLang would not run this draft as it is; read it as vllm",
    ]
    assert load(tmp_path, "vllm", TOY, ToyTarget()).spec.embedding == "trained"
