"""Which conversations train together, in an order that is a function of the seed alone, so that a resume repeats it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runners.features.store import FeatureStore
from runners.training.sizes import round_up

BUCKET_BATCHES = 16  # documents of this many batches are sorted by length together: little padding, still shuffled


@dataclass(frozen=True)
class Batch:
    """Conversations padded on the right. Shapes: B conversations, T tokens, M aux layers.

    ``tokens`` and ``response_mask`` are [B, T], ``aux`` [B, T, M, h_t], ``last`` [B, T, h_t]; ``real_tokens`` counts
    the tokens that are no padding.
    """

    tokens: Tensor
    response_mask: Tensor
    aux: Tensor
    last: Tensor
    documents: tuple[int, ...]
    real_tokens: int

    @property
    def next_tokens(self) -> Tensor:
        """x_{t+1} at row t, [B, T]; 0 at the last row."""
        return torch.nn.functional.pad(self.tokens[:, 1:], (0, 1))


def read_batch(store: FeatureStore, documents: Sequence[int], layer_ids: Sequence[int], device: str) -> Batch:
    """Copy these documents out of the memory-mapped store into one padded batch, in fp32."""
    features = [store.read(index, layer_ids) for index in documents]
    lengths = [len(f.tokens) for f in features]
    shape = (len(features), round_up(max(lengths)))
    hidden = features[0].last.shape[-1]
    tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    aux, last = torch.zeros(*shape, len(layer_ids), hidden), torch.zeros(*shape, hidden)
    for row, (f, length) in enumerate(zip(features, lengths, strict=True)):
        tokens[row, :length], mask[row, :length] = f.tokens, f.response_mask
        aux[row, :length], last[row, :length] = f.aux, f.last
    tokens, mask, aux, last = (part.to(device) for part in (tokens, mask, aux, last))
    return Batch(tokens, mask, aux, last, tuple(documents), sum(lengths))


def epoch_batches(lengths: dict[int, int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """One pass over the documents ``{index: length}`` in batches of at most ``batch_tokens`` padded tokens.

    A document longer than that is a batch of its own. Order depends on the arguments alone.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    indices = sorted(lengths)
    shuffled = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
    batches: list[list[int]] = []
    for bucket in _buckets(shuffled, lengths, BUCKET_BATCHES * batch_tokens):
        batches += _fill(sorted(bucket, key=lambda index: lengths[index]), lengths, batch_tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def length_batches(lengths: dict[int, int], batch_tokens: int) -> list[list[int]]:
    """All documents in rising length, in batches of at most ``batch_tokens`` padded tokens, for evaluation."""
    return _fill(sorted(lengths, key=lambda index: (lengths[index], index)), lengths, batch_tokens)


def _buckets(indices: list[int], lengths: dict[int, int], bucket_tokens: int) -> Iterator[list[int]]:
    bucket: list[int] = []
    tokens = 0
    for index in indices:
        bucket.append(index)
        tokens += lengths[index]
        if tokens >= bucket_tokens:
            yield bucket
            bucket, tokens = [], 0
    if bucket:
        yield bucket


def _fill(ordered: list[int], lengths: dict[int, int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in ordered:
        longest = round_up(max([lengths[index], *(lengths[other] for other in batches[-1])])) if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
