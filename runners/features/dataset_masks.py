"""The loss masks of a speculators dump, which lie in its prepared dataset instead of beside the states.

speculators 0.9.0 (``data_generation/preprocessing.py``, ``train/data.py``): ``load_from_disk`` of a folder written by
the library datasets: ``state.json`` names the Arrow stream files, row N belongs to ``hs_N.safetensors`` and has
``input_ids`` and ``loss_mask``, lists of T integers; the mask is 1 where token t is trained on.
"""

import json
import re
from bisect import bisect_right
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archspec.errors import ArchspecError

_STATE = "state.json"


class DatasetMasks:
    """Rows of a prepared dataset, memory-mapped; use :meth:`beside`."""

    def __init__(self, folder: Path, batches: list[Any]) -> None:
        self.folder = folder
        self._batches = batches
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)

    @classmethod
    def beside(cls, states: Path) -> "DatasetMasks":
        """Open the dataset in the folder of the states, or in the one above it.

        Raises:
            ArchspecError: there is none, it is damaged, or the package that reads it is missing.
        """
        folder = next((folder for folder in (states, states.parent) if (folder / _STATE).is_file()), None)
        if folder is None:
            raise ArchspecError(
                f"{states}: nothing says which tokens are responses: the prepared dataset ({_STATE} and *.arrow), "
                "which holds the loss masks, must lie in this folder or the one above"
            )
        if find_spec("pyarrow") is None:
            raise ArchspecError(
                f"{folder}: reading the loss masks of a prepared dataset needs the package pyarrow; pip install pyarrow"
            )
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            names = [str(entry["filename"]) for entry in state["_data_files"]]
            if any(Path(name).name != name for name in names):
                raise ValueError(f"{_STATE} names a file outside its folder")
            return cls(folder, [batch for name in names for batch in _batches(folder / name)])
        except Exception as error:  # the readers of damaged files raise whatever they like
            raise ArchspecError(f"{folder}: damaged dataset ({type(error).__name__}: {error})") from error

    def mask(self, path: Path, tokens: Tensor) -> Tensor:
        """The mask [T] bool of the file ``hs_N.safetensors`` at ``path``, which holds ``tokens`` [T].

        Raises:
            ArchspecError: the dataset has no such row, or its row has other tokens or another length.
        """
        found = re.search(r"\d+", path.name)
        row = int(found[0]) if found else -1
        if not 0 <= row < self._starts[-1]:
            raise ArchspecError(f"{path}: {self.folder} has rows 0 to {self._starts[-1] - 1}, but none for this file")
        at = bisect_right(self._starts, row) - 1
        batch, offset = self._batches[at], row - self._starts[at]
        ids, mask = (torch.tensor(batch.column(name)[offset].as_py()) for name in ("input_ids", "loss_mask"))
        if ids.tolist() != tokens.tolist():
            raise ArchspecError(f"{path}: its token_ids are not the input_ids of row {row} of {self.folder}")
        if mask.shape != ids.shape or bool(((mask != 0) & (mask != 1)).any()):
            raise ArchspecError(f"{self.folder}: loss_mask of row {row} must hold {len(ids)} entries, 0 or 1")
        return mask != 0


def _batches(path: Path) -> list[Any]:
    """The record batches of one Arrow stream file; they stay on disk."""
    arrow = import_module("pyarrow")
    reader = import_module("pyarrow.ipc").open_stream(arrow.memory_map(str(path)))
    batches = list(reader)
    lacking = [name for name in ("input_ids", "loss_mask") if name not in reader.schema.names]
    if lacking:
        raise ValueError(f"{path.name} has no column {' and '.join(lacking)}")
    return batches
