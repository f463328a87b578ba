"""A draft on disk in the project's own layout: ``spec.yaml`` beside ``draft.safetensors`` under module names.

Copies of the target's tensors (a frozen embedding, a target head, the target's norm) are left out: they are the
target's, and ``load_draft`` takes them from there. The vocabulary map belongs to the weights and is always kept.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from archspec.builder import TargetTensors, adopt_target, build_draft
from archspec.errors import ArchspecError
from archspec.files import save_tensors, write_text
from archspec.modules import Draft
from archspec.resolve import ResolvedSpec

SPEC_FILE, WEIGHTS_FILE = "spec.yaml", "draft.safetensors"


def save_draft(draft: Draft, folder: Path) -> None:
    """Write spec and weights into ``folder``."""
    own = {name: parameter.detach() for name, parameter in draft.named_parameters() if parameter.requires_grad}
    maps = {name: buffer for name, buffer in (("d2t", draft.d2t), ("t2d", draft.t2d)) if buffer is not None}
    save_tensors(folder / WEIGHTS_FILE, {name: tensor.cpu() for name, tensor in (own | maps).items()})
    write_text(folder / SPEC_FILE, draft.spec.dump())


def load_draft(folder: Path, target: TargetTensors) -> Draft:
    """The draft of ``save_draft``, with the target's tensors in their places.

    Raises:
        ArchspecError: a file is missing or damaged, or a tensor is missing, unknown or of the wrong shape.
    """
    draft = build_draft(ResolvedSpec.load(folder / SPEC_FILE))
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArchspecError(f"{path}: not a readable draft: {error}") from None
    state = draft.state_dict()
    expected = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    expected |= {"d2t", "t2d"} if draft.spec.reduced_vocab else set()
    for name in sorted(expected ^ set(tensors)):
        raise ArchspecError(f"{path}: tensor {name} is {'missing' if name in expected else 'not part of this draft'}")
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, but the spec says {tuple(state[name].shape)}"
            raise ArchspecError(f"{path}: tensor {name} has shape {shapes}")
    vocab_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"] if draft.spec.reduced_vocab else None
    adopt_target(draft, target, vocab_ids)
    draft.load_state_dict(tensors, strict=False)
    return draft
