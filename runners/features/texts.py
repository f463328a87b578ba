"""Capture as the command line does it: files in, progress shown, files out."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from archspec.errors import ArchspecError, nearest
from archspec.facts import TargetFacts
from archspec.resolve import aux_layer_id
from archspec.spec import AUX_NAMES
from runners.features.answers import answer_prompts
from runners.features.capture import capture
from runners.features.conversations import read_conversations
from runners.features.generate import Generated
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.features.work import Workers
from runners.progress import Meter


def parse_layers(words: Sequence[str], facts: TargetFacts) -> list[int]:
    """Layer ids from ids and words such as ``middle``, rising.

    Raises:
        ArchspecError: one is neither an id nor a known word, or lies beyond the target.
    """
    found = set[int]()
    for word in (word.strip() for word in words):
        if word not in AUX_NAMES and not word.isdecimal():
            raise ArchspecError(f"layer {word!r}: neither an id nor a word; {nearest(word, AUX_NAMES)}, or give an id")
        layer = aux_layer_id(int(word) if word.isdecimal() else word, facts.num_layers)
        if not 0 <= layer <= facts.num_layers:
            raise ArchspecError(f"layer {word!r} is {layer}, but the target's are 0 (embeddings) to {facts.num_layers}")
        found.add(layer)
    return sorted(found)


def capture_files(
    target: Target,
    paths: Sequence[Path],
    layers: Sequence[str],
    out: Path,
    dtype: str,
    max_length: int,
    batch_tokens: int,
    console: Console,
    workers: Workers | None = None,
) -> FeatureStore:
    """Capture the conversations of JSONL files into the store ``out``, or reuse it; ``workers`` None is this process.

    Raises:
        ArchspecError: as ``capture`` and ``read_conversations``.
    """
    ids, conversations = parse_layers(layers, target.facts), read_conversations(paths)
    with Meter(console, "captured tokens") as meter:
        store = capture(
            target,
            conversations,
            ids,
            out,
            dtype=dtype,
            max_length=max_length,
            batch_tokens=batch_tokens,
            on_progress=meter,
            report=lambda line: console.print(line, soft_wrap=True),
            sources=[str(path) for path in paths],
            workers=workers,
        )
    manifest, layer_ids = store.manifest, ", ".join(map(str, store.manifest.layer_ids))
    console.print(
        f"{out}: {len(store.documents)} conversations, {manifest.tokens:,} tokens, of which "
        f"{manifest.response_tokens:,} are responses ({manifest.text_origin} text), layers {layer_ids}",
        soft_wrap=True,
    )
    return store


def generate_file(
    target: Target,
    prompts: Sequence[Path],
    responses: Path,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    console: Console,
    workers: Workers | None = None,
    top_p: float = 1.0,
) -> Generated:
    """Let ``target`` answer the prompts of JSONL files; answers that ``responses`` already holds are kept.

    ``workers`` None is this process.

    Raises:
        ArchspecError: as ``answer_prompts`` and ``read_conversations``.
    """
    conversations = read_conversations(prompts)
    with Meter(console, "answered prompts") as meter:

        def on_progress(done: int, total: int, tokens: int) -> None:
            meter.note = f"{tokens:,} new tokens" if tokens else ""
            meter(done, total)

        made = answer_prompts(
            target, conversations, max_new_tokens, temperature, batch_size, seed, responses, on_progress, workers, top_p
        )
    console.print(
        f"{responses}: {made.answered} prompts answered, {made.skipped} were before; {made.tokens:,} new tokens in "
        f"{made.seconds:.0f} s; {made.unfinished} answers were cut at {max_new_tokens} tokens",
        soft_wrap=True,
    )
    return made
