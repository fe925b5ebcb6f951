"""What a GPU was doing meanwhile: memory and activity of its multiprocessors, through NVML."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import torch

SAMPLE_S = 0.02


class GpuWatch:
    """Within, samples a GPU; afterwards `memory_bytes`, the most in use by all processes, and `sm_activity`.

    The activity is the share of time in which a multiprocessor had work, averaged over all of them. Both are
    None on a CPU, without the package nvidia-ml-py (the extra `gpu`), and where the driver does not say.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory_bytes: int | None = None
        self.sm_activity: float | None = None
        self._nvml = _load() if device.type == "cuda" else None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if self._nvml is not None:
            number = device.index if device.index is not None else torch.cuda.current_device()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(number)

    def __enter__(self) -> Self:
        if self._nvml is not None:
            self._before = self._activity_sample()
            self._thread = threading.Thread(target=self._watch_memory, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self.sm_activity = self._activity()

    def _watch_memory(self) -> None:
        assert self._nvml is not None
        while True:
            used = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            self.memory_bytes = max(self.memory_bytes or 0, used)
            if self._end.wait(SAMPLE_S):
                return

    def _activity_sample(self) -> Any:
        assert self._nvml is not None
        try:
            sample = self._nvml.nvmlGpmSampleAlloc()
            self._nvml.nvmlGpmSampleGet(self._handle, sample)
        except self._nvml.NVMLError:  # GPUs before Hopper have no such counters
            return None
        return sample

    def _activity(self) -> float | None:
        after = self._activity_sample()
        if self._before is None or after is None:
            return None
        nvml = self._nvml
        assert nvml is not None
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        wanted.sample1, wanted.sample2 = self._before, after
        wanted.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        try:
            nvml.nvmlGpmMetricsGet(wanted)
        except nvml.NVMLError:
            return None
        return float(wanted.metrics[0].value) / 100.0


def _load() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
