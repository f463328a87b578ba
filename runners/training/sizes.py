"""Sizes that bound the memory of training; the trainer works by them and the estimate counts with them. No torch."""

ROUND_TO = 16  # lengths are padded to a multiple, because oneDNN keeps a kernel for every shape that it ever saw
CHUNK_ELEMENTS = 4 * 1024 * 1024  # logits of all steps in a chunk: 16 MiB in fp32, which a CPU's last cache holds
HEAD_ROWS = 1024  # rows whose logits are made at once when a draft is measured


def round_up(length: int) -> int:
    """The next multiple of ``ROUND_TO``."""
    return -(-length // ROUND_TO) * ROUND_TO
