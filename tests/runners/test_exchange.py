"""Drafts to and from other projects' formats, beside their target: the tiny one, on disk and as a feature store."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.weights import load_draft
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.acceptance import measure_acceptance
from runners.training.exchange import export_draft, import_draft
from runners.training.settings import EvalSettings
from runners.training.single import open_draft
from tests.runners.drafts import everything
from tests.runners.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer

CONFIG: dict[str, Any] = {  # as one writes it by hand for the tiny target
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 264,
    "draft_vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "fc_norm": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3],
}
SHAPES = {
    "fc.weight": (32, 64),
    "fc_norm.0.weight": (32,),
    "fc_norm.1.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "layers.1.input_layernorm.weight": (32,),
    "layers.1.self_attn.q_proj.weight": (32, 32),
    "layers.1.self_attn.k_proj.weight": (16, 32),
    "layers.1.self_attn.v_proj.weight": (16, 32),
    "norm.weight": (32,),
    "lm_head.weight": (100, 32),
    **{
        f"{layer}.{name}.weight": shape
        for layer in ("midlayer", "layers.1")
        for name, shape in {
            "self_attn.o_proj": (32, 32),
            "post_attention_layernorm": (32,),
            "mlp.gate_proj": (40, 32),
            "mlp.up_proj": (40, 32),
            "mlp.down_proj": (32, 40),
        }.items()
    },
}
VOCABULARY = torch.arange(0, 200, 2)


def write_checkpoint(folder: Path, embedding: Tensor | None, **changed: Any) -> dict[str, Tensor]:
    """A checkpoint of another project in bfloat16, of which nothing was written by the product."""
    torch.manual_seed(5)
    tensors = {name: 0.3 * torch.randn(shape) for name, shape in SHAPES.items()}
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    tensors["d2t"] = VOCABULARY - torch.arange(100)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changed), encoding="utf-8")
    return tensors


def length(draft: Any, store: FeatureStore) -> float:
    return measure_acceptance(draft, store, everything(store), EvalSettings(draft_length=3)).length


def test_a_checkpoint_by_hand_becomes_a_draft_that_is_measured(
    target: Target, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    tensors = write_checkpoint(tmp_path / "foreign", target.weights.embed_tokens)
    made, _ = import_draft(tmp_path / "foreign", tmp_path / "draft", None, None, tiny_store.path, False)
    assert made.spec.inputs.aux_layers == (1, 3)
    assert (made.spec.inputs.norm, made.spec.embedding, made.spec.head.weights) == ("each", "frozen", "own")
    assert made.spec.layers[1].fusion == "none"
    origin = json.loads((tmp_path / "draft" / "origin.json").read_text(encoding="utf-8"))
    assert origin == {"target": tiny_store.manifest.key.target, "imported_from": str(tmp_path / "foreign")}
    draft = open_draft(tmp_path / "draft", tiny_store)
    assert draft.vocab_ids.tolist() == VOCABULARY.tolist()
    state = draft.state_dict()
    assert torch.equal(state["lm_head.weight"], tensors["lm_head.weight"].float())
    assert torch.equal(state["layers.1.state_norm.weight"], tensors["layers.1.input_layernorm.weight"].float())
    assert torch.equal(state["embed_tokens.weight"], target.weights.embed_tokens)  # the target's own, not in bfloat16
    assert length(draft, tiny_store) >= 1.0


def test_a_trained_embedding_is_kept_and_one_left_out_is_the_targets(
    target: Target, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    tensors = write_checkpoint(tmp_path / "own", torch.randn(264, 32))
    own, notes = import_draft(tmp_path / "own", tmp_path / "a", None, None, tiny_store.path, False)
    assert own.spec.embedding == "trained"
    assert notes == [
        "its embedding is not this target's, so it counts as trained; make sure that this is the draft's target"
    ]
    kept = open_draft(tmp_path / "a", tiny_store).embed_tokens.weight
    assert torch.equal(kept, tensors["embed_tokens.weight"].float())
    write_checkpoint(tmp_path / "none", None)
    shared, _ = import_draft(tmp_path / "none", tmp_path / "b", None, None, tiny_store.path, False)
    assert shared.spec.embedding == "frozen"
    assert torch.equal(open_draft(tmp_path / "b", tiny_store).embed_tokens.weight, target.weights.embed_tokens)


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
def test_export_undoes_import(form: str, target: Target, tiny_store: FeatureStore, tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2]}  # of three layers SGLang reads no last one
    write_checkpoint(tmp_path / "foreign", target.weights.embed_tokens, **ids)
    first, _ = import_draft(tmp_path / "foreign", tmp_path / "draft", None, None, tiny_store.path, False)
    export_draft(tmp_path / "draft", tmp_path / form, form, None, tiny_store.path)
    again, _ = import_draft(tmp_path / form, tmp_path / "again", None, None, tiny_store.path, False)
    assert again.spec == first.spec
    drafts = [open_draft(tmp_path / name, tiny_store) for name in ("draft", "again")]
    states = [draft.state_dict() for draft in drafts]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert length(drafts[0], tiny_store) == length(drafts[1], tiny_store)


def test_the_target_may_be_a_model_folder(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """Which is also what a format tells of the target."""
    model = save_tiny(tmp_path / "target")
    write_checkpoint(tmp_path / "foreign", None)
    import_draft(tmp_path / "foreign", tmp_path / "draft", None, str(model), None, False)
    export_draft(tmp_path / "draft", tmp_path / "out", "speculators", str(model), None)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(model)
    export_draft(tmp_path / "draft", tmp_path / "nameless", "speculators", None, tiny_store.path)  # made from "tiny-0"
    config = json.loads((tmp_path / "nameless" / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_config"]["verifier"]["name_or_path"] is None
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "nameless")]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_a_folder_that_exists_is_refused(tiny_store: FeatureStore, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "foreign", None)
    for out in (tmp_path / "foreign", tmp_path / "foreign" / "config.json"):
        with pytest.raises(ArchspecError) as caught:
            import_draft(tmp_path / "foreign", out, None, None, tiny_store.path, False)
        assert str(caught.value) == f"{out}: exists; choose a new folder"
        with pytest.raises(ArchspecError, match="exists; choose a new folder"):
            export_draft(tmp_path / "foreign", out, "vllm", None, tiny_store.path)
    (tmp_path / "empty").mkdir()
    import_draft(tmp_path / "foreign", tmp_path / "empty", None, None, tiny_store.path, False)
    assert load_draft(tmp_path / "empty", tiny_store.weights()).spec.name == "vLLM"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 300}, "vocab_size = 300, but the target has 264; name the draft's target"),
        ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight: missing from the file"),
        ({"norm_output": True}, "norm_output is set, and projects read it differently"),
    ],
)
def test_a_checkpoint_that_does_not_fit_leaves_nothing(
    changed: dict[str, Any], message: str, tiny_store: FeatureStore, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "foreign", None, **changed)
    with pytest.raises(ArchspecError) as caught:
        import_draft(tmp_path / "foreign", tmp_path / "draft", None, None, tiny_store.path, False)
    assert str(caught.value).startswith(f"{tmp_path / 'foreign'}: {message}")
    assert not (tmp_path / "draft").exists()


def test_the_format_may_be_named(tiny_store: FeatureStore, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "foreign", None, norm_output=True)
    made, _ = import_draft(tmp_path / "foreign", tmp_path / "draft", "vllm", None, tiny_store.path, False)
    assert made.spec.feedback == "post_norm"


def test_a_draft_of_another_target_is_not_exported(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """Two models of equal sizes are two targets; and an import notes whose draft it is."""
    write_checkpoint(tmp_path / "foreign", None)
    import_draft(tmp_path / "foreign", tmp_path / "draft", None, None, tiny_store.path, False)
    other = save_tiny(tmp_path / "other", seed=7)
    with pytest.raises(ArchspecError, match=rf"was trained for target {tiny_store.manifest.key.target}, but "):
        export_draft(tmp_path / "draft", tmp_path / "out", "vllm", str(other), None)
    assert not (tmp_path / "out").exists()


def test_an_export_for_another_target_of_these_sizes_is_not_imported(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """The embedding of its own fits any target of the sizes; the fingerprint does not."""
    write_checkpoint(tmp_path / "foreign", torch.randn(264, 32))
    import_draft(tmp_path / "foreign", tmp_path / "draft", None, None, tiny_store.path, False)
    export_draft(tmp_path / "draft", tmp_path / "exported", "vllm", None, tiny_store.path)
    other, own = save_tiny(tmp_path / "other", seed=7), tiny_store.manifest.key.target
    with pytest.raises(ArchspecError) as caught:
        import_draft(tmp_path / "exported", tmp_path / "again", None, str(other), None, False)
    told = f"{tmp_path / 'exported'}: the draft was exported for target {own}, but {other} is target "
    assert str(caught.value).startswith(told)
    assert not (tmp_path / "again").exists()


def test_what_a_foreign_config_leaves_out_is_told(tiny_store: FeatureStore, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "foreign", None, speculators_config={"verifier": {"name_or_path": "some/model"}})
    _, notes = import_draft(tmp_path / "foreign", tmp_path / "draft", "vllm", None, tiny_store.path, False)
    assert notes == ["its config says that it was trained for some/model"]


def test_a_checkpoint_in_place_of_a_draft_is_named(tiny_store: FeatureStore, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "foreign", None)
    with pytest.raises(ArchspecError, match=r"foreign: is a checkpoint of another project; make a draft of it with"):
        open_draft(tmp_path / "foreign", tiny_store)


def test_a_draft_for_other_dimensions_is_not_exported(tiny_store: FeatureStore, tmp_path: Path) -> None:
    """Where nothing says which target a draft was made for, its spec does."""
    write_checkpoint(tmp_path / "foreign", None)
    import_draft(tmp_path / "foreign", tmp_path / "draft", None, None, tiny_store.path, False)
    (tmp_path / "draft" / "origin.json").unlink()
    tiny_model(tiny_config(num_hidden_layers=4)).save_pretrained(tmp_path / "deeper")
    tiny_tokenizer().save_pretrained(tmp_path / "deeper")
    with pytest.raises(ArchspecError) as caught:
        export_draft(tmp_path / "draft", tmp_path / "out", "vllm", str(tmp_path / "deeper"), None)
    rule = f"the draft is for a target of other dimensions than {tmp_path / 'deeper'}"
    assert str(caught.value) == f"{tmp_path / 'draft'}: {rule}"
