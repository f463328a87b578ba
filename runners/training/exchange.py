"""Drafts to and from the formats of other projects, with the target's tensors where a draft copies them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archspec import checkpoints
from archspec.errors import ArchspecError
from archspec.files import write_json
from archspec.foreign_config import BLOCK, aux_layers_of, mapping_of
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
        manifest = store.manifest
        checkpoints.export(open_draft(path, store), out, form, _served_name(manifest.target_path), manifest.key.target)
        return
    folder, target = find_draft(path), load_target(model or "", "float32", "cpu", trust_remote_code)
    require_target(folder, target.fingerprint, str(model))
    draft = load_draft(folder, target.weights)
    if draft.spec.target != target.facts:
        raise ArchspecError(f"{path}: the draft is for a target of other dimensions than {model}")
    checkpoints.export(draft, out, form, _served_name(str(model)), target.fingerprint)


def import_draft(
    checkpoint: Path, out: Path, form: str | None, model: str | None, features: Path | None, trust_remote_code: bool
) -> tuple[Draft, list[str]]:
    """Turn another project's checkpoint into a draft in the new folder ``out``; returns it with what had to be guessed.

    ``form`` None finds the format. The target is named by ``model`` or is that of the store at ``features``. Weights
    are kept in float32.

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
    config = json.loads((checkpoint / checkpoints.CONFIG).read_text(encoding="utf-8"))
    own = mapping_of(config, BLOCK, str(checkpoint)).get("target_fingerprint")
    if own not in (None, fingerprint):
        named = model or f"the target of {features}"
        raise ArchspecError(
            f"{checkpoint}: the draft was exported for target {own}, but {named} is target {fingerprint}"
        )
    save_draft(draft, out)
    write_json(out / ORIGIN_FILE, {"target": fingerprint, "imported_from": str(checkpoint)})
    return draft, [] if own else list(_guesses(draft, config, str(checkpoint)))


def _guesses(draft: Draft, config: dict[str, Any], source: str) -> Iterator[str]:
    """What a foreign config does not say, and how it was taken."""
    spec = draft.spec
    if aux_layers_of(config, source) is None and spec.inputs.norm != "target":
        yield f"its config names no aux layers, so it is taken to read the default, {list(spec.inputs.aux_layers)}"
    if spec.embedding == "trained" and spec.hidden_size == spec.target.hidden_size:
        yield "its embedding is not this target's, so it counts as trained; make sure that this is the draft's target"
    verifier = mapping_of(mapping_of(config, "speculators_config", source), "verifier", source).get("name_or_path")
    if verifier:
        yield f"its config says that it was trained for {verifier}"


def _served_name(model: str) -> str | None:
    """``model`` if an engine can load it by this name: a hub name, or a transformers folder by its absolute path."""
    if (Path(model) / "config.json").is_file():
        return str(Path(model).absolute())
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists() and not model.endswith(".gguf")
    return model if hub else None


def _require_new(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArchspecError(f"{out}: exists; choose a new folder")
