"""A draft's own folder: what it holds, that it comes back as it was, and what is said when it does not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archspec.builder import build_draft
from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.weights import SPEC_FILE, WEIGHTS_FILE, load_draft, save_draft
from runners.features.store import FeatureStore
from runners.training.acceptance import acceptance_chances
from runners.training.settings import EvalSettings
from tests.runners.drafts import everything, tiny_spec, trained_draft

SPECS: dict[str, tuple[str, dict[str, object]]] = {
    "eagle3": ("eagle3", {}),
    "reduced vocabulary": ("eagle3", {"head.vocab_size": 40}),
    "all of the target's tensors": ("eagle1", {}),
    "trained embedding, own width": ("eagle3", {"hidden_size": 24, "embedding": "trained"}),
    "norm each": ("eagle3.1", {}),
}


@pytest.mark.parametrize("kind", SPECS)
def test_a_draft_comes_back_as_it_was(tiny_store: FeatureStore, tmp_path: Path, kind: str) -> None:
    preset, changes = SPECS[kind]
    draft = trained_draft(tiny_store, tiny_spec(tiny_store.facts, preset, changes), tokens=600)
    save_draft(draft, tmp_path)
    again = load_draft(tmp_path, tiny_store.weights())
    assert again.spec == draft.spec
    state = again.state_dict()
    assert state.keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(state[name], tensor), name
    ours, theirs = (
        acceptance_chances(one, tiny_store, everything(tiny_store), EvalSettings(draft_length=3))
        for one in (draft, again)
    )
    assert all((a == b).all() for (_, a), (_, b) in zip(ours, theirs, strict=True))


@pytest.fixture
def folder(tiny_store: FeatureStore, tmp_path: Path) -> Path:
    spec = tiny_spec(tiny_store.facts, changes={"head.vocab_size": 40})
    save_draft(trained_draft(tiny_store, spec, tokens=1), tmp_path)
    return tmp_path


def test_the_file_holds_what_is_the_drafts_own_and_no_copy_of_the_target(
    folder: Path, tiny_store: FeatureStore
) -> None:
    names = set(load_file(folder / WEIGHTS_FILE))
    assert {"inputs.fc.weight", "lm_head.weight", "norm.weight", "d2t", "t2d"} < names
    assert "embed_tokens.weight" not in names
    save_draft(trained_draft(tiny_store, tiny_spec(tiny_store.facts, "eagle1"), tokens=1), folder / "eagle1")
    names = set(load_file(folder / "eagle1" / WEIGHTS_FILE))
    assert not {"embed_tokens.weight", "lm_head.weight", "inputs.norms.0.weight"} & names


def change(folder: Path, **tensors: Tensor | None) -> None:
    path = folder / WEIGHTS_FILE
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in named}
    save_file(kept | {name: tensor for name, tensor in named.items() if tensor is not None}, path)


def load(folder: Path, store: FeatureStore) -> Draft:
    return load_draft(folder, store.weights())


@pytest.mark.parametrize("name", ["norm__weight", "d2t", "t2d"])
def test_a_missing_tensor_is_named(folder: Path, tiny_store: FeatureStore, name: str) -> None:
    change(folder, **{name: None})
    with pytest.raises(ArchspecError, match=rf"draft.safetensors: tensor {name.replace('__', '.')} is missing"):
        load(folder, tiny_store)


def test_an_unknown_tensor_is_named(folder: Path, tiny_store: FeatureStore) -> None:
    change(folder, layers__7__weight=torch.zeros(2))
    with pytest.raises(ArchspecError, match=r"draft.safetensors: tensor layers.7.weight is not part of this draft"):
        load(folder, tiny_store)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path, tiny_store: FeatureStore) -> None:
    change(folder, norm__weight=torch.zeros(1))
    wanted = r"draft.safetensors: tensor norm.weight has shape \(1,\), but the spec says \(32,\)"
    with pytest.raises(ArchspecError, match=wanted):
        load(folder, tiny_store)
    change(folder, norm__weight=torch.zeros(32), d2t=torch.zeros(39, dtype=torch.int64))
    wanted = r"draft.safetensors: tensor d2t has shape \(39,\), but the spec says \(40,\)"
    with pytest.raises(ArchspecError, match=wanted):
        load(folder, tiny_store)


def test_a_vocabulary_map_that_makes_no_sense_is_told(folder: Path, tiny_store: FeatureStore) -> None:
    change(folder, d2t=torch.full((40,), 10_000))
    with pytest.raises(ArchspecError, match="must be 40 rising token ids below 264"):
        load(folder, tiny_store)


@pytest.mark.parametrize("damage", ["missing", "cut", "text"])
def test_an_unreadable_file_is_told(folder: Path, tiny_store: FeatureStore, damage: str) -> None:
    path = folder / WEIGHTS_FILE
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if damage == "cut" else b"not a tensor")
    with pytest.raises(ArchspecError, match=r"draft\.safetensors: not a readable draft"):
        load(folder, tiny_store)


def test_a_folder_without_a_spec_is_told(folder: Path, tiny_store: FeatureStore) -> None:
    (folder / SPEC_FILE).unlink()
    with pytest.raises(ArchspecError, match=r"spec.yaml"):
        load(folder, tiny_store)


def test_saving_leaves_the_draft_untouched(tiny_store: FeatureStore, tmp_path: Path) -> None:
    draft = build_draft(tiny_spec(tiny_store.facts))
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    save_draft(draft, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
