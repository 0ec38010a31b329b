"""specrt: speculative decoding of large language models, with the same bytes as without it."""

from __future__ import annotations

from . import drafters
from ._core import DraftTree, __version__, available_cpu_isas, cpu_isa
from .calibration import quantize
from .drafters import Drafter
from .engine import Engine
from .engine_metrics import Distribution, EngineMetrics
from .errors import (
    CapacityError,
    DeviceError,
    InternalError,
    InvalidArgumentError,
    LoadError,
    NumericError,
    QueueFullError,
    SpecrtError,
    UnsupportedError,
)
from .handle import RequestHandle
from .outputs import Completion, Increment, Logprob, Metrics, RequestOutput, SourceMetrics
from .planning import MemoryPlan, plan
from .sampling import SamplingParams
from .speculation import Speculation
from .structured import StructuredOutputs
from .text import Tokenizer

__all__ = [
    "CapacityError",
    "Completion",
    "DeviceError",
    "Distribution",
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineMetrics",
    "Increment",
    "InternalError",
    "InvalidArgumentError",
    "LoadError",
    "Logprob",
    "MemoryPlan",
    "Metrics",
    "NumericError",
    "QueueFullError",
    "RequestHandle",
    "RequestOutput",
    "SamplingParams",
    "SourceMetrics",
    "SpecrtError",
    "Speculation",
    "StructuredOutputs",
    "Tokenizer",
    "UnsupportedError",
    "__version__",
    "available_cpu_isas",
    "cpu_isa",
    "drafters",
    "plan",
    "quantize",
]
