"""Drafts in the formats of other projects, on disk: written, read back, and held against their configs.

The config decides which tensors must be there: ``unpack`` refuses anything missing, extra or misshapen.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from archspec.builder import TargetTensors, build_draft
from archspec.errors import ArchspecError
from archspec.facts import TargetFacts
from archspec.files import save_tensors, write_json
from archspec.foreign_config import BLOCK
from archspec.format import Format
from archspec.formats import format_named, format_of
from archspec.layouts import tensor_names, tensor_shapes
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec

CONFIG, WEIGHTS, INDEX, PICKLED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
MAPS = ("d2t", "t2d")
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def export(draft: Draft, folder: Path, form: str, verifier: str | None = None, fingerprint: str | None = None) -> None:
    """Write ``draft`` into ``folder`` in the format ``form``, and read it back to see that it is the same draft.

    ``verifier`` is the hub name or folder of the target, for formats that tell it; ``fingerprint`` is the target's own,
    since two targets of the same sizes are two targets.

    Raises:
        ArchspecError: there is no such format, it cannot hold the draft (the message names every such field), or what
            was written reads as another draft. Before anything is written: a weight is not finite or of another dtype
            than checkpoints have, or the draft vocabulary was never set.
    """
    layout, spec = format_named(form), draft.spec
    if problems := layout.limits(spec):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ArchspecError(f"{spec.name}: {layout.project}'s format cannot hold this draft:\n{lines}")
    packed = pack(draft, layout)
    _require_weights({name: tensor for name, tensor in packed.items() if name not in MAPS}, spec.name)
    if spec.reduced_vocab:
        _require_set_map(packed["d2t"], spec.name)
    dtype = str(draft.lm_head.weight.dtype).removeprefix("torch.")
    block = {
        "name": spec.name,
        "format": form,
        "target": spec.target.model_dump(mode="json"),
        "target_fingerprint": fingerprint,
        "embedding": spec.embedding,
        "head_weights": spec.head.weights,
    }
    save_tensors(folder / WEIGHTS, packed, {"format": "pt"})
    write_json(folder / CONFIG, {**layout.config(spec, verifier), "torch_dtype": dtype, "dtype": dtype, BLOCK: block})
    _require_same(draft, folder)


def _require_same(draft: Draft, folder: Path) -> None:
    config, tensors = read_folder(folder)
    spec, state = read(format_of(config, tensors, str(folder)), config, tensors, None, str(folder))
    own = draft.state_dict()
    differing = [name for name, tensor in state.items() if not torch.equal(tensor, own[name].cpu())]
    if (spec.hash, spec.target) != (draft.spec.hash, draft.spec.target) or differing:
        what = f"its tensors {', '.join(differing)} differ" if differing else "its spec differs"
        raise ArchspecError(f"{folder}: reads back as another draft than was written ({what}); do not serve it")


def load(
    folder: Path, form: str | None = None, facts: TargetFacts | None = None, target: TargetTensors | None = None
) -> Draft:
    """The draft in ``folder``, at the checkpoint's own dtypes; ``form`` None finds its format.

    ``facts`` are needed for checkpoints that ``export`` did not write. ``target`` is needed where the target's tensors
    are left out; where they are there it tells whether they are the target's own, and so frozen.

    Raises:
        ArchspecError: a file is missing or damaged, the config describes no draft of this kind or one for another
            target, a tensor is missing, extra or misshapen, or a frozen one is not the target's.
    """
    config, tensors = read_folder(folder)
    source = str(folder)
    layout = format_named(form) if form is not None else format_of(config, tensors, source)
    spec, state = read(layout, config, tensors, facts, source)
    if "lm_head.weight" not in state:
        spec = spec.model_copy(update={"head": spec.head.model_copy(update={"weights": "target"})})
    state = _completed(spec, state, target, source)
    if target is not None:
        spec = _frozen_as_found(spec, state, target, source, ours=BLOCK in config)
        layout.require_runnable(spec, tensors, source)
    return assemble(spec, state)


def read(
    layout: Format, config: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: TargetFacts | None, source: str
) -> tuple[ResolvedSpec, dict[str, Tensor]]:
    """Spec and state dict from a config dict and tensors under the format's names; ``source`` is named in messages.

    The state lacks those of ``layout.absent`` that the checkpoint leaves out.

    Raises:
        ArchspecError: as ``load``.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    spec = layout.spec(config, shapes, facts, source)
    return spec, unpack(spec, layout, tensors, source)


def pack(draft: Draft, layout: Format) -> dict[str, Tensor]:
    """The draft's tensors under the format's names, detached, with its copies and padding."""
    state, spec = draft.state_dict(), draft.spec
    names, omitted = tensor_names(spec, layout.layout(())), layout.omitted(spec)
    tensors = {theirs: state[ours].detach().cpu() for ours, theirs in names.items() if ours not in omitted}
    tensors |= {second: tensors[name].clone() for second, name in layout.copies(spec).items()}
    return tensors | {
        name: torch.ones(shape, dtype=draft.lm_head.weight.dtype) for name, shape in layout.padding(spec).items()
    }


def unpack(spec: ResolvedSpec, layout: Format, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The state dict of a draft of ``spec`` from tensors under the format's names.

    Raises:
        ArchspecError: tensors are missing, extra, misshapen, of another dtype than weights have or not finite, or d2t
            and t2d disagree; the message names each one.
    """
    known, absent = tensor_names(spec, layout.layout(tensors)), layout.absent(spec)
    names = {ours: theirs for ours, theirs in known.items() if ours not in absent or theirs in tensors}
    shapes, copies = tensor_shapes(spec), layout.copies(spec)
    whole = spec.target.vocab_size
    maps = () if spec.reduced_vocab else tuple(name for name in MAPS if _says_nothing(name, tensors, whole))
    spare = {*copies, *layout.padding(spec), *maps}
    problems = [f"{name}: missing from the file" for name in sorted(set(names.values()) - set(tensors))]
    problems += [
        f"{name}: extra; a {layout.project} draft of this config has no such tensor"
        for name in sorted(set(tensors) - set(names.values()) - spare)
    ]
    for ours, theirs in names.items():
        if theirs in tensors and tuple(tensors[theirs].shape) != shapes[ours]:
            found = list(tensors[theirs].shape)
            problems.append(f"{theirs}: has shape {found}, but the config asks for {list(shapes[ours])}")
    if problems:
        raise ArchspecError("\n".join(f"{source}: {problem}" for problem in problems))
    weights = {*names.values(), *copies} - set(MAPS)
    _require_weights({name: tensor for name, tensor in tensors.items() if name in weights}, source)
    for second, name in copies.items():
        if second in tensors and not torch.equal(tensors[second], tensors[name]):
            rule = "engines read one or the other and would run two drafts"
            raise ArchspecError(f"{source}: {second}: differs from {name}; {rule}")
    state = {ours: tensors[theirs] for ours, theirs in names.items()}
    return _with_vocabulary(spec, state, source) if spec.reduced_vocab else state


def _require_weights(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse what no draft was trained with: numbers that are not finite, and quantised, whole or complex ones."""
    problems = []
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            found = str(tensor.dtype).removeprefix("torch.")
            problems.append(f"{name}: is {found}, but weights must be float32, bfloat16 or float16")
        elif not bool(tensor.isfinite().all()):
            problems.append(f"{name}: holds {'NaN' if bool(tensor.isnan().any()) else 'inf'}; weights must be finite")
    if problems:
        raise ArchspecError("\n".join(f"{source}: {problem}" for problem in problems))


def _require_set_map(d2t: Tensor, source: str) -> None:
    if not bool(d2t.any()):
        rule = f"so the draft could propose only the first {len(d2t)} tokens; a map that was never set"
        raise ArchspecError(f"{source}: d2t is all zeros, {rule}")


def assemble(spec: ResolvedSpec, state: Mapping[str, Tensor]) -> Draft:
    """A draft that holds ``state``, at the tensors' own dtypes."""
    draft = build_draft(spec)
    draft.load_state_dict(dict(state), strict=True, assign=True)
    draft.embed_tokens.requires_grad_(spec.embedding == "trained")
    draft.lm_head.requires_grad_(spec.head.weights == "own")
    return draft


def _completed(
    spec: ResolvedSpec, state: dict[str, Tensor], target: TargetTensors | None, source: str
) -> dict[str, Tensor]:
    """``state`` with the target's tensors where the checkpoint leaves them out."""
    lacking = sorted(set(tensor_shapes(spec)) - set(state))
    if not lacking:
        return state
    if target is None:
        raise ArchspecError(f"{source}: leaves out {', '.join(lacking)}, the target's own; name the target")
    whole = _copies_of(target, spec, state)
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    return state | {name: whole[name].to(dtype) for name in lacking}


def _copies_of(target: TargetTensors, spec: ResolvedSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The target's tensors under the names that a draft keeps its copies under."""
    ids = torch.arange(spec.head.vocab_size) + state.get("d2t", 0)
    copies = {"embed_tokens.weight": target.embed_tokens, "lm_head.weight": target.lm_head[ids]}
    return copies | ({"inputs.norms.0.weight": target.norm_weight} if spec.inputs.norm == "target" else {})


def _frozen_as_found(
    spec: ResolvedSpec, state: Mapping[str, Tensor], target: TargetTensors, source: str, *, ours: bool
) -> ResolvedSpec:
    """``spec`` with the embedding trained and the head its own where they are not the target's.

    Other projects' configs do not say. An export of ours (``ours``) does, and must be right.
    """
    frozen = {"embed_tokens.weight": spec.embedding == "frozen", "lm_head.weight": spec.head.weights == "target"}
    copies = _copies_of(target, spec, state)
    other = [n for n, held in frozen.items() if held and not torch.equal(state[n], copies[n].to(state[n].dtype))]
    if other and ours:
        raise ArchspecError(f"{source}: {other[0]}: is frozen but not this target's; name the draft's own target")
    head = spec.head.model_copy(update={"weights": "own"}) if "lm_head.weight" in other else spec.head
    embedding = "trained" if "embed_tokens.weight" in other else spec.embedding
    return spec.model_copy(update={"embedding": embedding, "head": head})


def _says_nothing(name: str, tensors: Mapping[str, Tensor], size: int) -> bool:
    """Whether a map over a full vocabulary is the identity, which SpecForge always writes."""
    if name not in tensors or tuple(tensors[name].shape) != (size,):
        return False
    return bool((tensors[name] == 0).all()) if name == "d2t" else bool(tensors[name].all())


def _with_vocabulary(spec: ResolvedSpec, state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """``state`` with maps of the draft's own types, the mask made from the offsets where it is left out."""
    d2t = state["d2t"]
    whole = not (d2t.is_floating_point() or d2t.is_complex())
    ids = (d2t if whole else torch.zeros_like(d2t, dtype=torch.long)).long() + torch.arange(len(d2t))
    rises = whole and bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < spec.target.vocab_size
    if not rises:
        rule = f"draft id + d2t must be rising ids below {spec.target.vocab_size}"
        raise ArchspecError(f"{source}: d2t: {rule}; the offsets in this file are not")
    _require_set_map(d2t, source)
    mask = torch.zeros(spec.target.vocab_size, dtype=torch.bool)
    mask[ids] = True
    if "t2d" in state and not torch.equal(state["t2d"].bool(), mask):
        raise ArchspecError(f"{source}: t2d: marks other target tokens than d2t leads to")
    return state | {"d2t": d2t.long(), "t2d": mask}


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and the tensors of ``model.safetensors``, of its shards, or of ``pytorch_model.bin``.

    The last, which older checkpoints have, is read without running anything that it holds (``weights_only``).

    Raises:
        ArchspecError: a file is missing or damaged.
    """
    config = _json_object(folder / CONFIG)
    if (folder / WEIGHTS).is_file():
        return config, _tensors(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        shards = _json_object(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise ArchspecError(f"{folder / INDEX}: weight_map must say which file holds which tensor")
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(map(str, shards.values()))):
            if Path(shard).name != shard:
                raise ArchspecError(f"{folder / INDEX}: weight_map names {shard!r}, which is not a file beside it")
            tensors |= _tensors(folder / shard)
        return config, tensors
    if (folder / PICKLED).is_file():
        return config, _pickled(folder / PICKLED)
    raise ArchspecError(f"{folder / WEIGHTS}: no such file; a checkpoint has {CONFIG} and {WEIGHTS}")


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ArchspecError(f"{path}: no such file; a checkpoint has {CONFIG} and {WEIGHTS}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArchspecError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ArchspecError(f"{path}: must hold one JSON object")
    return data


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ArchspecError(f"{path}: cannot be read: {error}") from None


def _pickled(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle ends in any error; torch's own text advises to run what it holds
        kind = type(error).__name__
        raise ArchspecError(f"{path}: cannot be read as plain tensors ({kind}); ask for {WEIGHTS} instead") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ArchspecError(f"{path}: must hold tensors by name and nothing else")
    return {str(name): tensor for name, tensor in tensors.items()}
