"""specrt: speculative decoding of large language models, with the same bytes as without it."""

from __future__ import annotations

from . import drafters
from ._core import DraftTree, __version__, available_cpu_isas, cpu_isa
from .calibration import quantize
from .drafters import Drafter
from .engine import Engine
from .errors import (
    CapacityError,
    InternalError,
    InvalidArgumentError,
    LoadError,
    NumericError,
    SpecrtError,
    UnsupportedError,
)
from .outputs import Completion, Increment, Logprob, Metrics, RequestOutput, SourceMetrics
from .planning import MemoryPlan, plan
from .sampling import SamplingParams
from .speculation import Speculation
from .structured import StructuredOutputs
from .text import Tokenizer

__all__ = [
    "CapacityError",
    "Completion",
    "DraftTree",
    "Drafter",
    "Engine",
    "Increment",
    "InternalError",
    "InvalidArgumentError",
    "LoadError",
    "Logprob",
    "MemoryPlan",
    "Metrics",
    "NumericError",
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
