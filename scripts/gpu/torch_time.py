"""Times of torch's kernels: CUDA graphs by events; on a CPU, for tests, by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


class Captured:
    """`work` as a CUDA graph; on a CPU, itself."""

    def __init__(self, work: Callable[[], object], device: torch.device) -> None:
        self.work, self.device = work, device
        if device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = work()  # what a graph writes has to stay

    def __call__(self) -> None:
        if self.device.type == "cuda":
            self.graph.replay()
        else:
            self.work()


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = 9) -> float:
    """Of some runs, after one for warmth."""
    times = []
    for index in range(repeats + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) * 1e-3
        else:
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
        if index:
            times.append(seconds)
    return statistics.median(times)
