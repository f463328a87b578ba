"""Small dumps of the tiny target, written just as SpecForge and speculators write them.

The states come from transformers' own ``hidden_states``, not from our hooks; only the state of layer n before the final
norm, which transformers does not give, is taken by a hook on that norm.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runners.features.store import FeatureStore
from runners.features.target import Target

Text = tuple[Tensor, Tensor]  # tokens and response mask, [T]


def texts(store: FeatureStore) -> list[Text]:
    """The texts of a native capture."""
    features = [store.read(document.index, []) for document in store.documents]
    return [(one.tokens, one.response_mask) for one in features]


def states(target: Target, tokens: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Layers 0 … n - 1 [T, H], and the last state before and after the final norm."""
    kept: list[Tensor] = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
    with torch.no_grad():
        found = target.model.model(input_ids=tokens[None], output_hidden_states=True)
    hook.remove()
    return [state[0] for state in found.hidden_states[:-1]], kept[0], found.last_hidden_state[0]


def specforge_point(target: Target, text: Text, layers: Sequence[int], pad: int = 0) -> dict[str, Any]:
    """What one ``.ckpt`` holds; ``pad`` zeros follow, as in a batch with longer texts."""
    tokens, mask = (torch.nn.functional.pad(part, (0, pad)) for part in text)
    below, last, normed = states(target, tokens)
    by_layer = [*below, last]
    return {
        "input_ids": tokens,
        "loss_mask": mask.long(),
        "hidden_state": normed[None].clone(),
        "aux_hidden_state": torch.cat([by_layer[layer] for layer in layers], dim=-1)[None],
    }


def specforge_dump(
    root: Path, target: Target, rows: Sequence[Text], layers: Sequence[int], dtype: torch.dtype = torch.float32
) -> Path:
    """Two files a folder, padded by turns."""
    for index, text in enumerate(rows):
        first = index // 2 * 2
        path = root / f"rows_{first}-{first + 2}" / f"data_{index}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        point = specforge_point(target, text, layers, pad=3 * (index % 2))
        torch.save({k: v.to(dtype) if v.is_floating_point() else v for k, v in point.items()}, path)
    return root


def speculators_dump(
    root: Path, target: Target, rows: Sequence[Text], layers: Sequence[int], masks: bool = True
) -> Path:
    """``hidden_states/hs_N.safetensors``; with ``masks`` the loss mask lies in them, else it has to be elsewhere."""
    folder = root / "hidden_states"
    folder.mkdir(parents=True)
    for index, (tokens, mask) in enumerate(rows):
        below, last, _ = states(target, tokens)
        by_layer = [*below, last]
        tensors = {"hidden_states": torch.stack([by_layer[layer] for layer in (*layers, 3)], 1), "token_ids": tokens}
        if masks:
            tensors["loss_mask"] = mask.long()
        save_file(tensors, folder / f"hs_{index}.safetensors")
    return root


def prepared_dataset(root: Path, rows: Sequence[Text], pyarrow: Any) -> Path:
    """``save_to_disk`` of a dataset with the columns that speculators prepares, in batches of five rows."""
    columns = {
        "input_ids": [tokens.tolist() for tokens, _ in rows],
        "loss_mask": [mask.long().tolist() for _, mask in rows],
        "seq_len": [len(tokens) for tokens, _ in rows],
    }
    table = pyarrow.table(columns)
    name = "data-00000-of-00001.arrow"
    root.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(root / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_fingerprint": "f"}))
    return root
