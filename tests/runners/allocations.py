"""What torch's CPU allocator hands out while something runs, from the trace that its profiler writes."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], object]) -> int:
    """The most bytes that were allocated at once by ``action``, what lived before it left out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    moves = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = peak = 0
    for _, size in moves:
        held += size
        peak = max(peak, held)
    return peak
