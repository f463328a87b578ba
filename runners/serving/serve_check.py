"""The engine check from end to end: prompts of held-out conversations, the engine's answer, and the evaluator's."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from archspec import checkpoints
from archspec.errors import ArchspecError
from archspec.files import exclusive, write_json
from archspec.modules import Draft
from archspec.servable import verdicts
from runners.features.store import FeatureStore
from runners.features.target import load_target
from runners.serving.check import TOLERANCE, Expected, ServeCheck, compare
from runners.serving.engine import Engine, Request, find_engine, run_engine
from runners.serving.model_folder import model_folder, require_target
from runners.serving.replay import replay
from runners.serving.vllm_worker import vocabulary
from runners.training.acceptance import spans
from runners.training.single import heldout, open_draft

WORK = Path("runs/serve-check")
PROMPTS, NEW_TOKENS = 16, 64
Report = Callable[[str], None]
_TEXTS = TypeAdapter(tuple[tuple[int, ...], ...])


@dataclass(frozen=True)
class ServeOptions:
    """How much is decoded and how close the figures must be.

    Raises:
        ArchspecError: a number is out of its range.
    """

    draft_length: int = 4
    prompts: int = PROMPTS
    max_new_tokens: int = NEW_TOKENS
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--draft-length", self.draft_length, 1),
            ("--prompts", self.prompts, 1),
            ("--max-new-tokens", self.max_new_tokens, 2),
        ):
            if value < least:
                raise ArchspecError(f"{option} {value}: must be at least {least}")
        if not 0 <= self.tolerance < 1:
            raise ArchspecError(f"--tolerance {self.tolerance:g}: must lie between 0 and 1, for example {TOLERANCE}")


def serve_check(
    draft: Path,
    features: Path,
    options: ServeOptions | None = None,
    *,
    target: str | None = None,
    engine: str = "vllm",
    engine_python: Path | None = None,
    served: Path | None = None,
    work: Path = WORK,
    trust_remote_code: bool = False,
    report: Report = lambda _: None,
) -> ServeCheck:
    """Serve the draft meant by ``draft`` and hold the engine's counters against the evaluator's on the same text.

    Prompts are the tokens before the answer in held-out conversations of the store ``features``. ``target`` is by
    default the store's own. ``served`` is a folder with an exported draft that the engine loads in place of one that
    is exported here; the evaluator takes ``draft`` all the same. ``work`` keeps the export, the engine's log and, for
    the next check, the target as a folder and the engine's text without a draft. ``report`` gets a line for every step.

    Raises:
        ArchspecError: a wrong option, draft, store, target or engine, or an engine that refuses the draft or dies.
    """
    options = options or ServeOptions()
    found = find_engine(engine, engine_python)
    if served is not None and not (served / "config.json").is_file():
        raise ArchspecError(f"{served}: holds no config.json; --served takes a draft's folder as an engine loads it")
    store = FeatureStore.open(features)
    ours = open_draft(draft, store)
    prompts = choose_prompts(store, heldout(draft, store, None), options)
    fingerprint = store.manifest.key.target
    with exclusive(work, "another check runs in this folder; choose another by --work"):
        report(f"{found.name}: {len(prompts)} prompts of held-out conversations, {work} keeps target, draft and logs")
        folder = model_folder(target or store.manifest.target_path, fingerprint, work, trust_remote_code)
        request = Request(
            target=folder,
            prompts=prompts,
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=store.manifest.eos_token_ids,
            draft_length=options.draft_length,
        )
        exported = served or _exported(ours, work / "draft", folder, fingerprint)
        report(f"{found.name}: decoding with the draft in {exported}")
        answer = run_engine(found, replace(request, draft=exported.absolute(), method=_method(exported)), work, "draft")
        plain, plain_seconds = _plain_text(found, request, work, fingerprint, report)
        report("evaluator: one forward over every response")
        loaded = load_target(folder, "float32", "cpu", trust_remote_code)
        require_target(loaded, fingerprint, folder)
        pairs = zip(prompts, answer.responses, strict=True)
        counts = reduce(add, (replay(loaded, ours, prompt, text, options.draft_length) for prompt, text in pairs))
        check = compare(
            answer,
            plain,
            counts,
            Expected(ours.spec.inputs.aux_layers, store.facts.num_layers, vocabulary(ours.d2t)),
            draft=str(exported),
            draft_length=options.draft_length,
            engine=found.name,
            tolerance=options.tolerance,
        )
    seconds = {f"with the draft: {name}": value for name, value in answer.seconds.items()} | plain_seconds
    return replace(check, seconds=seconds)


def choose_prompts(store: FeatureStore, indices: Sequence[int], options: ServeOptions) -> list[list[int]]:
    """Token ids before the first answer in at most ``options.prompts`` of these conversations, spread over them.

    Raises:
        ArchspecError: with the new tokens and the draft's, none fits into the target's positions.
    """
    room = store.facts.max_positions - options.max_new_tokens - options.draft_length - 2
    found = []
    for index in indices:
        features = store.read(index, ())
        answers = spans(features.response_mask)
        if answers and answers[0][0] <= room:
            found.append([int(token) for token in features.tokens[: answers[0][0]]])
    if not found:
        raise ArchspecError(
            f"--max-new-tokens {options.max_new_tokens}: no held-out prompt of {store.path} leaves room for them in "
            f"the {store.facts.max_positions} positions of the target; ask for fewer"
        )
    count = min(options.prompts, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _exported(draft: Draft, folder: Path, target: str, fingerprint: str) -> Path:
    """The draft in the format of vLLM's that holds it, or the nearest, whose refusal says what is in the way."""
    form = next(verdict.form for verdict in verdicts(draft.spec) if verdict.engine == "vllm")
    checkpoints.export(draft, folder, form, target, fingerprint)
    return folder


def _method(folder: Path) -> str:
    """The kind of draft in ``folder``, as vLLM calls it.

    Raises:
        ArchspecError: its config cannot be read.
    """
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names = [str(name).lower() for name in config.get("architectures") or ()]
    except (ValueError, AttributeError) as error:
        raise ArchspecError(f"{file}: is no config of a draft ({error})") from None
    return "eagle3" if not names or any("eagle3" in name for name in names) else "eagle"


def _plain_text(
    engine: Engine, request: Request, work: Path, fingerprint: str, report: Report
) -> tuple[tuple[tuple[int, ...], ...], dict[str, float]]:
    """The engine's text without a draft, kept in ``work`` under all that decides it, and the seconds it took."""
    asked = request.as_json(engine.cpu)
    decides = {name: asked[name] for name in ("prompts", "max_new_tokens", "stop_token_ids")}
    key = json.dumps([engine.name, engine.cpu, fingerprint, decides])
    file = work / f"plain-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if file.is_file():
        try:
            return _TEXTS.validate_json(file.read_bytes()), {}
        except ValidationError:
            report(f"{file}: damaged, so it is made anew")
    report(f"{engine.name}: decoding without a draft")
    answer = run_engine(engine, request, work, "plain")
    write_json(file, answer.responses)
    return answer.responses, {f"without: {name}": value for name, value in answer.seconds.items()}
