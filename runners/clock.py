"""The clock by which speed is measured."""

import time

import torch


def now() -> float:
    """Seconds from any start: this thread's processor time where torch computes in it alone, else wall time.

    On an idle machine they are one. On a busy one processor time leaves out the waiting for a processor.
    """
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
