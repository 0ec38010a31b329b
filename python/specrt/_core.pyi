"""
The C++ core of specrt. Private: use the names that the specrt package exports.
"""

from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing

__all__: list[str] = [
    "CoreDrafter",
    "CoreSamplingParams",
    "CostModel",
    "CudaCounts",
    "CudaDevice",
    "Decoder",
    "DraftTree",
    "FeatureRecorder",
    "MedusaBuilder",
    "MedusaConfig",
    "MedusaHeads",
    "MemoryUse",
    "Model",
    "ModelBuilder",
    "ModelConfig",
    "SequenceCounters",
    "SourceCounters",
    "StaticTree",
    "SuffixCache",
    "ThreadTeam",
    "TokenConstraint",
    "available_cpu_isas",
    "cpu_isa",
    "cuda_built",
    "cuda_counts",
    "cuda_devices",
    "cuda_free_memory",
    "default_thread_count",
    "head_kv_cache_bytes_for",
    "head_memory_of",
    "kv_cache_bytes_for",
    "make_head_drafter",
    "make_layers_drafter",
    "make_medusa_drafter",
    "make_merge_drafter",
    "make_model_drafter",
    "make_ngram_drafter",
    "make_python_constraint",
    "make_python_drafter",
    "make_self_draft",
    "make_suffix_drafter",
    "make_synthetic_drafter",
    "make_watched_drafter",
    "measure_cost",
    "medusa_logits",
    "medusa_tensors",
    "memory_of",
    "memory_of_draft_model",
    "memory_of_layers_drafter",
    "memory_of_medusa",
    "plan_fixed",
    "quantise_compensated",
    "resolve_cpu_isa",
    "resolve_kv_cache_dtype",
    "ring",
    "self_draft_bytes",
    "self_draft_config",
    "tensors_of",
    "trace_layer",
    "weight_bytes",
]


class ThreadTeam:
    """
    Threads that compute for one engine.
    """

    def __init__(
        self, threads: typing.SupportsInt | typing.SupportsIndex = 0, pin: bool = False
    ) -> None: ...
    @property
    def size(self) -> int: ...


class CudaDevice:
    """
    A GPU that this process sees.
    """

    @property
    def architecture(self) -> int:
        """
        Compute capability, major * 10 + minor.
        """

    @property
    def memory(self) -> int:
        """
        Bytes.
        """

    @property
    def name(self) -> str: ...


class CudaCounts:
    """
    What this process has asked of GPUs.
    """

    @property
    def allocations(self) -> int:
        """
        Of device and of pinned memory.
        """

    @property
    def copies_to_host(self) -> int: ...
    @property
    def launches(self) -> int:
        """
        Of kernels and of graphs.
        """

    @property
    def waits(self) -> int:
        """
        Of the host for a GPU.
        """


class MemoryUse:
    """
    Bytes by purpose.
    """

    @property
    def kv_cache(self) -> int: ...
    @property
    def other(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def weights(self) -> int: ...
    @property
    def workspace(self) -> int: ...


class DraftTree:
    """
    Candidate continuations of one sequence. Node i continues node parents[i], or the sequence itself where that is -1; parents come before children and siblings differ in token.
    """

    @staticmethod
    def chain(
        tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        *,
        source: str = "",
    ) -> DraftTree:
        """
        The tree in which every node's parent is the node before it.
        """

    def __init__(
        self,
        tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        parents: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        *,
        log_probs: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] = [],
        source: str = "",
    ) -> None: ...
    def __len__(self) -> int: ...
    def set_distribution(
        self,
        node: typing.SupportsInt | typing.SupportsIndex,
        probabilities: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        *,
        replacement: bool = False,
    ) -> None:
        """
        Tells that the children of `node` (-1: the root) were sampled from these probabilities, one a vocabulary id: for verification='rejection'.
        """

    @property
    def depths(self) -> list[int]:
        """
        1 for children of the root.
        """

    @property
    def log_probs(self) -> list[float]: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def parents(self) -> list[int]: ...
    @property
    def source(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...


class StaticTree:
    """
    A fixed shape for drafts: a path of ranks a node.
    """

    @staticmethod
    def chain(depth: typing.SupportsInt | typing.SupportsIndex) -> StaticTree: ...
    @staticmethod
    def from_accuracies(
        accuracies: collections.abc.Sequence[
            collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]
        ],
        nodes: typing.SupportsInt | typing.SupportsIndex,
    ) -> StaticTree:
        """
        The nodes that are accepted most often in sum; accuracies[d][r] is how often rank r at depth d + 1 is right once the path to it was.
        """

    @staticmethod
    def mc_sim_7b_63() -> StaticTree: ...
    def __init__(
        self,
        paths: collections.abc.Sequence[
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
        ],
    ) -> None: ...
    def __len__(self) -> int: ...
    def cut(self, depth: typing.SupportsInt | typing.SupportsIndex) -> StaticTree:
        """
        Without the nodes deeper than `depth`.
        """

    @property
    def depth(self) -> int: ...
    @property
    def is_chain(self) -> bool: ...
    @property
    def paths(self) -> list[list[int]]: ...


class TokenConstraint:
    """
    Decides which tokens may come next, as the core sees it.
    """


class CostModel:
    """
    What rounds cost on this machine, in seconds; it follows what they take.
    """

    @staticmethod
    def parse(text: str) -> CostModel: ...
    def __str__(self) -> str: ...
    def draft_seconds(
        self,
        drafter: str,
        steps: typing.SupportsInt | typing.SupportsIndex,
        sequences: typing.SupportsInt | typing.SupportsIndex = 1,
        step_share: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> float:
        """
        Drafting so many tokens of depth for so many sequences; step_share stands in for a
        drafter of which nothing is known.
        """

    def pass_seconds(
        self,
        rows: typing.SupportsInt | typing.SupportsIndex,
        sequences: typing.SupportsInt | typing.SupportsIndex = 1,
        context: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> float:
        """
        A pass of so many rows of so many sequences with so many tokens of context in all.
        """

    def text(self) -> str:
        """
        As text, for a file; parse() reads it.
        """

    @property
    def drafters(self) -> list[str]: ...
    @property
    def measured(self) -> bool:
        """
        False: a guess, right up to what passes have shown since.
        """

    @property
    def per_sequence(self) -> float: ...
    @property
    def per_token(self) -> float: ...
    @property
    def scale(self) -> float:
        """
        Of all passes, as last seen.
        """

    @property
    def table(self) -> list[tuple[int, float]]:
        """
        (rows, seconds), up to `scale`.
        """


class CoreSamplingParams:
    """
    The part of specrt.SamplingParams that the core applies.
    """

    def __init__(
        self,
        *,
        max_tokens: typing.SupportsInt | typing.SupportsIndex,
        min_tokens: typing.SupportsInt | typing.SupportsIndex = 0,
        temperature: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        top_k: typing.SupportsInt | typing.SupportsIndex = 0,
        top_p: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        min_p: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        repetition_penalty: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        frequency_penalty: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        presence_penalty: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        logit_bias: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsFloat | typing.SupportsIndex,
            ]
        ] = [],
        allowed_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        bad_words: collections.abc.Sequence[
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
        ] = [],
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        sample_index: typing.SupportsInt | typing.SupportsIndex = 0,
        stop_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        verification: str = "coupled",
        posterior_threshold: typing.SupportsFloat | typing.SupportsIndex = 0.09,
        posterior_alpha: typing.SupportsFloat | typing.SupportsIndex = 0.3,
        logprobs: typing.SupportsInt | typing.SupportsIndex = -1,
        prompt_logprobs: typing.SupportsInt | typing.SupportsIndex = -1,
        policy: str = "brake",
        num_speculative_tokens: typing.SupportsInt | typing.SupportsIndex = -1,
        target_tpot_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        target_ttft_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        synthetic_acceptance_rates: collections.abc.Sequence[
            typing.SupportsFloat | typing.SupportsIndex
        ] = [],
    ) -> None: ...
    def check(self, vocab_size: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def draft_changes_text(self) -> bool: ...
    @property
    def drafts(self) -> bool: ...
    @property
    def lossy(self) -> bool: ...
    @property
    def stop_token_ids(self) -> list[int]: ...


class ModelConfig:
    """
    Everything that decides a decoder-only transformer's arithmetic.
    """

    def __init__(self, **kwargs: typing.Any) -> None:
        """
        Fields as keywords: see specrt.loading.ModelFields. Raises InvalidArgumentError.
        """

    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def family(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class Model:
    """
    Packed, immutable weights with their config.
    """

    @staticmethod
    def map(path: str) -> Model:
        """
        Maps a file written by save().
        """

    def save(self, path: str) -> None:
        """
        Writes config and packed weights; the file appears whole or not at all.
        """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dtype(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...


class ModelBuilder:
    """
    Takes a model's tensors one at a time.
    """

    def __init__(self, config: ModelConfig, dtype: str) -> None: ...
    def build(self) -> Model:
        """
        Raises LoadError naming every tensor still missing.
        """

    def precision_of(self, name: str) -> str:
        """
        How a tensor is stored: a dtype's name, float32 for vectors.
        """

    def set(self, name: str, dtype: str, array: numpy.ndarray) -> None:
        """
        Packs one canonical tensor: float32, or uint16 with the bits of bfloat16.
        """

    def set_quantised(
        self,
        name: str,
        precision: str,
        codes: typing.Annotated[numpy.typing.ArrayLike, numpy.int8],
        scales: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
        minima: typing.Annotated[numpy.typing.ArrayLike, numpy.float32] | None = None,
        zero_points: bool = False,
    ) -> None:
        """
        Takes a matrix that is quantised already, without rounding.

        codes: int8 [outputs, inputs], -128 to 127 for int8 and w8a8, 0 to 15 for int4. scales:
        float32 [outputs], for int4 [outputs, ceil(inputs / 32)], as minima are; both values of
        float16. With zero_points the weight is scale * (code + minimum), else
        scale * code + minimum. `precision` has to be precision_of(name).
        """


class CoreDrafter:
    """
    A drafter as the core sees it.
    """

    @property
    def memory(self) -> MemoryUse: ...
    @property
    def name(self) -> str: ...


class FeatureRecorder(CoreDrafter):
    """
    A drafter that drafts nothing and keeps the target's hidden states of its sequences.
    """

    def __init__(
        self,
        *,
        feature_layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        feature_normed: bool,
    ) -> None:
        """
        Which states, as the decoder's arguments of these names.
        """

    def take(
        self, id: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.uint16]:
        """
        Those of a sequence that has ended, bfloat16 bits [positions, states * hidden], once.
        The last token was not run unless it belongs to the prompt, so it has none.
        """


class MedusaConfig:
    """
    What decides Medusa heads' arithmetic.
    """

    def __init__(
        self,
        *,
        vocab_size: typing.SupportsInt | typing.SupportsIndex,
        hidden_size: typing.SupportsInt | typing.SupportsIndex,
        num_heads: typing.SupportsInt | typing.SupportsIndex,
        num_blocks: typing.SupportsInt | typing.SupportsIndex,
        outputs: typing.SupportsInt | typing.SupportsIndex,
        bias: bool,
        shared_blocks: bool,
        shared_projection: bool,
        logits_scale: typing.SupportsFloat | typing.SupportsIndex,
        token_map: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    @property
    def bias(self) -> bool: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def shared_blocks(self) -> bool: ...
    @property
    def shared_projection(self) -> bool: ...
    @property
    def token_map(self) -> list[int]: ...


class MedusaHeads:
    """
    Packed, immutable Medusa heads.
    """

    @property
    def config(self) -> MedusaConfig: ...
    @property
    def weight_bytes(self) -> int: ...


class MedusaBuilder:
    """
    Takes heads' tensors one at a time.
    """

    def __init__(self, config: MedusaConfig, dtype: str) -> None: ...
    def build(self) -> MedusaHeads:
        """
        Raises LoadError naming every tensor still missing.
        """

    def set(self, name: str, dtype: str, array: numpy.ndarray) -> None:
        """
        Packs one canonical tensor: float32, or uint16 with the bits of bfloat16.
        """


class SuffixCache:
    """
    Responses of earlier requests, for the suffix drafters of one or more engines with one vocabulary; the oldest give way. Safe to use from several threads.
    """

    def __init__(
        self,
        *,
        max_depth: typing.SupportsInt | typing.SupportsIndex = 24,
        max_requests: typing.SupportsInt | typing.SupportsIndex = 10000,
        max_tokens: typing.SupportsInt | typing.SupportsIndex = 262144,
    ) -> None:
        """
        max_depth bounds a match and its draft together, the others what is kept.
        """

    def add(
        self, response: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None:
        """
        Keeps the token ids of a response.
        """

    def check_invariants(self) -> None:
        """
        For tests.
        """

    def set_vocabulary(self, size: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Says of which vocabulary the responses are; raises where another one was said before.
        """

    @property
    def bytes(self) -> int:
        """
        Memory held.
        """

    @property
    def max_bytes(self) -> int:
        """
        What `bytes` can come to.
        """

    @property
    def max_depth(self) -> int: ...
    @property
    def requests(self) -> int:
        """
        Responses kept.
        """

    @property
    def tokens(self) -> int:
        """
        Tokens of them.
        """


class SourceCounters:
    """
    What one drafter's nodes came to.
    """

    @property
    def accepted(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def source(self) -> str: ...


class SequenceCounters:
    """
    Counters of one sequence.
    """

    @property
    def accepted(self) -> int: ...
    @property
    def accepted_at(self) -> list[int]: ...
    @property
    def cached_prompt_tokens(self) -> int: ...
    @property
    def draft_seconds(self) -> float: ...
    @property
    def drafted(self) -> int: ...
    @property
    def drafted_at(self) -> list[int]: ...
    @property
    def drafts(self) -> int: ...
    @property
    def first_rejected_at(self) -> list[int]: ...
    @property
    def first_rejections(self) -> int: ...
    @property
    def full_accepted(self) -> int: ...
    @property
    def full_rounds(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def prefill_seconds(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def sample_seconds(self) -> float: ...
    @property
    def sources(self) -> list[SourceCounters]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def truncated_rounds(self) -> int: ...
    @property
    def verify_seconds(self) -> float: ...


class Decoder:
    """
    Rounds of draft, verify and commit over one target.
    """

    cost_model: CostModel

    def __init__(
        self,
        model: Model,
        *,
        kv_cache_bytes: typing.SupportsInt | typing.SupportsIndex,
        max_model_len: typing.SupportsInt | typing.SupportsIndex,
        max_batch_size: typing.SupportsInt | typing.SupportsIndex,
        max_rows: typing.SupportsInt | typing.SupportsIndex,
        block_size: typing.SupportsInt | typing.SupportsIndex,
        kv_cache_dtype: str = "auto",
        enable_prefix_caching: bool,
        team: ThreadTeam,
        cpu_isa: str,
        check_invariants: bool,
        feature_layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        feature_normed: bool = False,
        device: str = "cpu",
    ) -> None:
        """
        feature_layers, feature_normed: the target's hidden states that drafters may read: the
        residual stream as it enters these layers, and the final norm's output.
        """

    def add(
        self,
        prompt: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        params: CoreSamplingParams,
        drafter: CoreDrafter | None = None,
        constraint: TokenConstraint | None = None,
        reserve: typing.SupportsInt | typing.SupportsIndex = -1,
        waited_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> int:
        """
        reserve: output tokens to set KV blocks aside for; -1: all of them.
        """

    def can_add(
        self,
        prompt_tokens: typing.SupportsInt | typing.SupportsIndex,
        max_tokens: typing.SupportsInt | typing.SupportsIndex,
        reserve: typing.SupportsInt | typing.SupportsIndex = -1,
    ) -> bool: ...
    def can_resume(
        self,
        id: typing.SupportsInt | typing.SupportsIndex,
        reserve: typing.SupportsInt | typing.SupportsIndex = -1,
    ) -> bool: ...
    def cancel(self, id: typing.SupportsInt | typing.SupportsIndex) -> SequenceCounters:
        """
        Ends a sequence, also a preempted one; returns its counters.
        """

    def check(
        self,
        prompt: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        params: CoreSamplingParams,
    ) -> None:
        """
        Raises what add() would raise however empty the decoder is.
        """

    def check_invariants(self) -> None: ...
    def clear_totals(self) -> None:
        """
        Counts anew.
        """

    def draft_limit(
        self,
        id: typing.SupportsInt | typing.SupportsIndex,
        most: typing.SupportsInt | typing.SupportsIndex,
    ) -> int:
        """
        How many of `most` draft nodes are worth asking for, by this sequence's drafts so far.
        """

    def last_round(
        self,
    ) -> list[
        tuple[int, int, list[int], list[int], list[float], list[list[str]], list[int], list[int]]
    ]:
        """
        The sequences of the last finished round: (id, prompt_tokens, tokens, parents, log_probs, sources of each node, accepted nodes, emitted tokens).
        """

    def most_tokens(self, prompt_tokens: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        The tokens that context and KV cache have room for behind a prompt.
        """

    def policy_round(
        self, num_speculative_tokens: typing.SupportsInt | typing.SupportsIndex
    ) -> (
        tuple[
            list[tuple[int, int]],
            list[
                tuple[
                    int,
                    list[int],
                    list[tuple[float, int, list[tuple[int, float]]]] | None,
                    list[tuple[float, int, list[tuple[int, float]]]] | None,
                    str,
                    SequenceCounters | None,
                    str,
                ]
            ],
        ]
        | None
    ):
        """
        A round of every sequence under its own policy: the plan, and what round() gives.
        None where the pool lacks blocks for the plan and another sequence could make room.
        """

    def preempt(self, id: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Takes a sequence out and frees its blocks; resume() puts it back.
        """

    def resume(
        self,
        id: typing.SupportsInt | typing.SupportsIndex,
        reserve: typing.SupportsInt | typing.SupportsIndex = -1,
    ) -> None: ...
    def round(
        self,
        plan: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex
            ]
        ],
    ) -> list[
        tuple[
            int,
            list[int],
            list[tuple[float, int, list[tuple[int, float]]]] | None,
            list[tuple[float, int, list[tuple[int, float]]]] | None,
            str,
            SequenceCounters | None,
            str,
        ]
    ]:
        """
        A round, of (id, tokens) pairs: a list of (id, tokens, logprobs, prompt_logprobs, finish, counters, error).
        """

    def sequences(self) -> list[tuple[int, int, int, int, bool]]:
        """
        (id, prompt_left, length, tokens_left, has_drafter) of each running sequence.
        """

    def stop(
        self,
        id: typing.SupportsInt | typing.SupportsIndex,
        dropped: typing.SupportsInt | typing.SupportsIndex,
    ) -> SequenceCounters:
        """
        Ends a sequence in its last round less `dropped` tokens; returns its counters.
        """

    @property
    def cpu_isa(self) -> str: ...
    @property
    def ema_steps(self) -> int:
        """
        How many steps policy ema_tiers would have sequences draft now.
        """

    @property
    def free_kv_tokens(self) -> int: ...
    @property
    def idle(self) -> bool: ...
    @property
    def last_times(self) -> tuple[int, float, float, float]:
        """
        (rows, draft_seconds, verify_seconds, sample_seconds) of the last finished round.
        """

    @property
    def max_model_len(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def memory(self) -> MemoryUse: ...
    @property
    def threads(self) -> int: ...
    @property
    def totals(self) -> tuple[int, int, SequenceCounters]:
        """
        (passes, rows, counters of all sequences together) since it was made.
        """

    @property
    def vocab_size(self) -> int: ...


def available_cpu_isas() -> list[str]:
    """
    The levels that this build has and this machine can run, ascending.
    """


def cpu_isa() -> str:
    """
    The best instruction-set level that this machine runs: 'amx', 'avx512', 'avx2' or 'scalar'.
    """


def cuda_built() -> bool:
    """
    Whether this build has CUDA kernels (SPECRT_CUDA).
    """


def cuda_counts() -> CudaCounts:
    """
    What this process has asked of GPUs since it began; zeros where specrt was built without CUDA.
    """


def cuda_devices() -> list[CudaDevice]:
    """
    The GPUs of this machine, none where there is no driver. Raises UnsupportedError where specrt was built without CUDA.
    """


def cuda_free_memory(device: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Bytes of a GPU's memory that nobody has taken. Raises as cuda_devices() does, and InvalidArgumentError where there is no such GPU.
    """


def default_thread_count() -> int:
    """
    Cores that this process may use: affinity mask, then cgroup quota.
    """


def head_kv_cache_bytes_for(
    config: ModelConfig,
    dtype: str,
    *,
    max_model_len: typing.SupportsInt | typing.SupportsIndex,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_dtype: str,
    enable_prefix_caching: bool,
    feature_layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    feature_normed: bool,
    depth: typing.SupportsInt | typing.SupportsIndex,
    top_k: typing.SupportsInt | typing.SupportsIndex,
    modules: typing.SupportsInt | typing.SupportsIndex,
    sequences: typing.SupportsInt | typing.SupportsIndex,
    tokens: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    A head's KV bytes for that many sequences of that many tokens.
    """


def head_memory_of(
    config: ModelConfig,
    dtype: str,
    *,
    target_vocab_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_bytes: typing.SupportsInt | typing.SupportsIndex,
    max_model_len: typing.SupportsInt | typing.SupportsIndex,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_dtype: str,
    enable_prefix_caching: bool,
    feature_layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    feature_normed: bool,
    depth: typing.SupportsInt | typing.SupportsIndex,
    top_k: typing.SupportsInt | typing.SupportsIndex,
    modules: typing.SupportsInt | typing.SupportsIndex,
    target_of_draft: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    device: str = "cpu",
) -> MemoryUse:
    """
    What make_head_drafter() takes, before it is made.
    """


def kv_cache_bytes_for(
    config: ModelConfig,
    dtype: str,
    *,
    max_model_len: typing.SupportsInt | typing.SupportsIndex,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    enable_prefix_caching: bool,
    sequences: typing.SupportsInt | typing.SupportsIndex,
    tokens: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_dtype: str = "auto",
) -> int:
    """
    KV bytes for that many sequences of that many tokens.
    """


def make_head_drafter(
    modules: collections.abc.Sequence[Model],
    target: Model,
    *,
    name: str,
    kv_cache_bytes: typing.SupportsInt | typing.SupportsIndex,
    max_model_len: typing.SupportsInt | typing.SupportsIndex,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_dtype: str,
    enable_prefix_caching: bool,
    feature_layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    feature_normed: bool,
    depth: typing.SupportsInt | typing.SupportsIndex,
    top_k: typing.SupportsInt | typing.SupportsIndex,
    target_of_draft: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    team: ThreadTeam,
    cpu_isa: str,
    device: str = "cpu",
    check_invariants: bool = False,
) -> CoreDrafter:
    """
    A head over the target's hidden states: a chain (top_k 1) or EAGLE-2's trees. Of several modules the k-th drafts the k-th token.
    """


def make_layers_drafter(
    target: Model, *, layers: typing.SupportsInt | typing.SupportsIndex, cpu_isa: str
) -> CoreDrafter:
    """
    The target's first layers as its drafter, over the decoder's own KV cache.
    """


def make_medusa_drafter(
    heads: MedusaHeads,
    *,
    tree: StaticTree,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    team: ThreadTeam,
    cpu_isa: str,
    device: str = "cpu",
) -> CoreDrafter: ...
def make_merge_drafter(
    parts: collections.abc.Sequence[CoreDrafter],
    *,
    target_bytes: typing.SupportsInt | typing.SupportsIndex,
) -> CoreDrafter: ...
def make_model_drafter(
    model: Model,
    *,
    target_vocab_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_bytes: typing.SupportsInt | typing.SupportsIndex,
    max_model_len: typing.SupportsInt | typing.SupportsIndex,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_dtype: str = "auto",
    enable_prefix_caching: bool,
    vocabulary: tuple[
        collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        collections.abc.Sequence[
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
        ],
    ]
    | None = None,
    team: ThreadTeam,
    cpu_isa: str,
    device: str = "cpu",
    check_invariants: bool = False,
) -> CoreDrafter: ...
def make_ngram_drafter(
    *,
    min_match: typing.SupportsInt | typing.SupportsIndex,
    max_match: typing.SupportsInt | typing.SupportsIndex,
    most_recent: bool = True,
    num_candidates: typing.SupportsInt | typing.SupportsIndex = 1,
) -> CoreDrafter: ...
def make_python_constraint(object: typing.Any) -> TokenConstraint:
    """
    Wraps an object with fill_bitmask(mask), advance(token), finished(), accepts(tokens) and fork().
    """


def make_python_drafter(object: typing.Any) -> CoreDrafter:
    """
    Wraps an object with propose(tokens, budget) and observe(committed).
    """


def make_self_draft(
    target: Model, precision: str, layers: typing.SupportsInt | typing.SupportsIndex
) -> Model:
    """
    The target's first layers in that dtype, sharing what the target holds so already.
    """


def make_suffix_drafter(
    *,
    max_tree_depth: typing.SupportsInt | typing.SupportsIndex,
    max_spec_factor: typing.SupportsFloat | typing.SupportsIndex,
    max_spec_offset: typing.SupportsFloat | typing.SupportsIndex,
    min_token_prob: typing.SupportsFloat | typing.SupportsIndex,
    use_tree_spec: bool,
    cache: SuffixCache | None = None,
) -> CoreDrafter: ...
def make_synthetic_drafter() -> CoreDrafter:
    """
    Drafts the last token over and over, at no cost.
    """


def make_watched_drafter(inner: CoreDrafter, told: typing.Any) -> CoreDrafter:
    """
    The same drafter; told(tokens, tree) is called with every draft that it makes.
    """


def measure_cost(
    decoder: Decoder,
    drafter: CoreDrafter | None,
    num_speculative_tokens: typing.SupportsInt | typing.SupportsIndex,
    seconds: typing.SupportsFloat | typing.SupportsIndex = 2.0,
    passes: typing.SupportsInt | typing.SupportsIndex = 20,
) -> CostModel:
    """
    What passes and drafts cost here, measured with sequences of its own.
    """


def medusa_logits(
    heads: MedusaHeads,
    hidden: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
    cpu_isa: str = "auto",
) -> numpy.typing.NDArray[numpy.float32]:
    """
    What every head says of hidden states float32 [rows, hidden]: [heads, rows, outputs].
    """


def medusa_tensors(config: MedusaConfig) -> list[tuple[str, list[int]]]:
    """
    (canonical name, shape) of every tensor of such heads.
    """


def memory_of(
    config: ModelConfig,
    dtype: str,
    *,
    kv_cache_bytes: typing.SupportsInt | typing.SupportsIndex,
    max_model_len: typing.SupportsInt | typing.SupportsIndex,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_dtype: str = "auto",
    enable_prefix_caching: bool,
    feature_layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
    feature_normed: bool = False,
    device: str = "cpu",
) -> MemoryUse:
    """
    What a Decoder of these options takes, before it is made.
    """


def memory_of_draft_model(
    config: ModelConfig,
    dtype: str,
    *,
    target_vocab_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_bytes: typing.SupportsInt | typing.SupportsIndex,
    max_model_len: typing.SupportsInt | typing.SupportsIndex,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    kv_cache_dtype: str,
    enable_prefix_caching: bool,
    device: str = "cpu",
) -> MemoryUse:
    """
    What make_model_drafter() takes, before it is made.
    """


def memory_of_layers_drafter(target: ModelConfig) -> MemoryUse:
    """
    What it takes, before it is made.
    """


def memory_of_medusa(
    config: MedusaConfig,
    dtype: str,
    *,
    max_batch_size: typing.SupportsInt | typing.SupportsIndex,
    device: str = "cpu",
) -> MemoryUse:
    """
    What a Medusa drafter takes, before it is made.
    """


def plan_fixed(
    decoder: Decoder, num_speculative_tokens: typing.SupportsInt | typing.SupportsIndex
) -> list[tuple[int, int]]:
    """
    As if every sequence that drafts had policy fixed.
    """


def quantise_compensated(
    weights: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
    factor: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
) -> tuple[
    numpy.typing.NDArray[numpy.int8],
    numpy.typing.NDArray[numpy.float32],
    numpy.typing.NDArray[numpy.float32],
    numpy.typing.NDArray[numpy.float32],
]:
    """
    Rounds a group of at most 32 inputs [n, width] to int4, each input's error made up for by
    those behind it. `factor` [width, width] is the group's block of the upper Cholesky factor
    of the inverse of the inputs' second moments. Gives codes [n, width], scales and minima
    [n, 1], and errors [n, width]: inputs behind the group change by -errors @ U[group, behind].
    """


def resolve_cpu_isa(name: str) -> str:
    """
    'auto' or a level's name to the level; raises where it cannot run here.
    """


def resolve_kv_cache_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """
    What a kv_cache_dtype comes to for a model of that dtype.
    """


def ring(pipe: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    Writes a byte to a pipe that does not block, and keeps the GIL.
    """


def self_draft_bytes(
    config: ModelConfig,
    target: str,
    precision: str,
    layers: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Bytes of weights that it does not share with the target.
    """


def self_draft_config(
    config: ModelConfig,
    target: str,
    precision: str,
    layers: typing.SupportsInt | typing.SupportsIndex,
) -> ModelConfig:
    """
    Of the model that make_self_draft() makes of a target of that config and dtype.
    """


def tensors_of(config: ModelConfig) -> list[tuple[str, list[int]]]:
    """
    (canonical name, shape) of every tensor that a model of this config has.
    """


def trace_layer(
    layer: Model, stream: typing.Annotated[numpy.typing.ArrayLike, numpy.float32]
) -> tuple[
    numpy.typing.NDArray[numpy.float32],
    numpy.typing.NDArray[numpy.float32],
    numpy.typing.NDArray[numpy.float32],
    numpy.typing.NDArray[numpy.float32],
    numpy.typing.NDArray[numpy.float32],
]:
    """
    What a one-layer model's matrices read when `stream` [positions, hidden] takes the place
    of embeddings: inputs of q, k, v; of o; of gate, up; of down; then the stream behind it.
    """


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """
    Bytes of the packed weights.
    """


__version__: str = "0.1.0"
