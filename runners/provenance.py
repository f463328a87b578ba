"""What figures were measured with: the code and the machine."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch


def code_version() -> str:
    """The package's version, with the commit when it runs from a checkout."""
    package = version("draft-archspec")
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return package
    git = shutil.which("git")
    if git is None:
        return package
    command = [git, "-C", str(root), "describe", "--always", "--dirty"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{package}+{told.stdout.strip()}" if told.returncode == 0 else package


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
