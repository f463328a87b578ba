"""Drafts to and from the formats of other projects, with the target's tensors where a draft copies them."""

import re
from pathlib import Path

from archspec import checkpoints
from archspec.errors import ArchspecError
from archspec.files import write_json
from archspec.modules import Draft
from archspec.weights import load_draft, save_draft
from runners.features.store import FeatureStore
from runners.features.target import Target, load_target
from runners.training.single import find_draft, open_draft, require_target
from runners.training.trial import ORIGIN_FILE


def export_draft(
    path: Path, out: Path, form: str, model: str | None, features: Path | None, trust_remote_code: bool = False
) -> None:
    """Write the draft meant by ``path`` into the new folder ``out``, its frozen tensors from a target or a store.

    Raises:
        ArchspecError: there is no such draft, it is for another target, the format cannot hold it, or ``out`` exists.
    """
    _require_new(out)
    if features is not None:
        store = FeatureStore.open(features)
        checkpoints.export(open_draft(path, store), out, form, _served_name(store.manifest.target_path))
        return
    folder, target = find_draft(path), load_target(model or "", "float32", "cpu", trust_remote_code)
    require_target(folder, target.fingerprint, str(model))
    draft = load_draft(folder, target.weights)
    if draft.spec.target != target.facts:
        raise ArchspecError(f"{path}: the draft is for a target of other dimensions than {model}")
    checkpoints.export(draft, out, form, _served_name(str(model)))


def import_draft(
    checkpoint: Path, out: Path, form: str | None, model: str | None, features: Path | None, trust_remote_code: bool
) -> Draft:
    """Turn another project's checkpoint into a draft in the new folder ``out``, and return it.

    ``form`` None finds the format. The target is named by ``model`` or is that of the store at ``features``.

    Raises:
        ArchspecError: the checkpoint holds no draft for this target, strictly read, or ``out`` exists.
    """
    _require_new(out)
    target: FeatureStore | Target
    if features is not None:
        target = FeatureStore.open(features)
        weights, fingerprint = target.weights(), target.manifest.key.target
    else:
        target = load_target(model or "", "float32", "cpu", trust_remote_code)
        weights, fingerprint = target.weights, target.fingerprint
    draft = checkpoints.load(checkpoint, form, target.facts, weights).float()
    save_draft(draft, out)
    write_json(out / ORIGIN_FILE, {"target": fingerprint, "imported_from": str(checkpoint)})
    return draft


def _served_name(model: str) -> str | None:
    """``model`` if an engine can load it by this name: a hub name or a transformers folder."""
    return model if re.fullmatch(r"[\w.-]+/[\w.-]+", model) or (Path(model) / "config.json").is_file() else None


def _require_new(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArchspecError(f"{out}: exists; choose a new folder")
