"""Models that many tests share, each made once a session."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny

import specrt

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
DEFAULTS: dict[str, object] = specrt.Engine.__init__.__kwdefaults__
DEFAULT_POLICY = DEFAULTS["policy"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", type=Path, help="specrt's wheel, where it has been built already")


def pytest_configure() -> None:
    """Of several workers each gets a share of the cores, so that they keep out of each other's way:
    that is what specrt takes where a test says no number, and torch."""
    if WORKER:
        cores = sorted(os.sched_getaffinity(0))
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = int(WORKER.removeprefix("gw")) % len(cores)
        os.sched_setaffinity(0, cores[first::workers])
        os.environ["OMP_NUM_THREADS"] = str(len(cores[first::workers]))


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Beside a test marked `alone` no other worker runs one."""
    if not WORKER:
        return (yield)
    # What there is to lock anyway. Whoever waits to be alone keeps the gate, or the others would
    # never leave a gap.
    gate, room = Path(__file__), Path(__file__).parent
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as stack:
        with _locked(gate, fcntl.LOCK_EX):
            stack.enter_context(_locked(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _drafts_that_repeat() -> Iterator[None]:
    """Engines that are not told a policy take "brake" here. The default goes by what passes take on
    this machine, and in models so small it rightly finds that drafts seldom pay."""
    DEFAULTS["policy"] = "brake"
    yield
    DEFAULTS["policy"] = DEFAULT_POLICY


@pytest.fixture
def own_default_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines as users make them."""
    monkeypatch.setitem(DEFAULTS, "policy", DEFAULT_POLICY)


@pytest.fixture(scope="session")
def l2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the BYTE tokenizer."""
    return _with_bytes(tiny.tiny_llama(tmp_path_factory.mktemp("models") / "l2", vocab=264))


@pytest.fixture(scope="session")
def l2_eos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`l2` with end tokens, which its samples meet now and then."""
    path = tmp_path_factory.mktemp("models") / "eos"
    return _with_bytes(tiny.tiny_llama(path, vocab=264, eos_token_id=[10, 100, 200]))


@pytest.fixture(scope="session")
def l2_other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of another size and other weights, for a draft model without a clue."""
    path = tmp_path_factory.mktemp("models") / "other"
    model = tiny.tiny_llama(path, vocab=264, hidden=32, heads=2, kv_heads=1, ffn=48, seed=7)
    return _with_bytes(model)


@pytest.fixture(scope="session")
def l2_close(tmp_path_factory: pytest.TempPathFactory, l2: Path) -> Path:
    """`l2` with slightly other weights: a draft model that is right now and then."""
    from safetensors.numpy import load_file

    tensors = load_file(l2 / "model.safetensors")
    noise = np.random.default_rng(3)
    for name in sorted(tensors):
        if name.endswith("proj.weight"):
            spread = 0.12 * tensors[name].std()
            shape = tensors[name].shape
            tensors[name] = tensors[name] + noise.normal(0, spread, shape).astype(np.float32)
    path = tmp_path_factory.mktemp("models") / "close"
    tiny.write_checkpoint(path, _config(l2), tensors)
    return _with_bytes(path)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with biases and a vocabulary padded beyond its tokenizer."""
    return _with_bytes(tiny.tiny_qwen2(tmp_path_factory.mktemp("models") / "qwen2"))


@pytest.fixture(scope="session")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts modulo 256: every output is known by arithmetic, and as text with BYTE."""
    return _with_bytes(tiny.counter(tmp_path_factory.mktemp("models") / "counter", 256))


@pytest.fixture(scope="session")
def make_bigram(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Bigram models of given tables, with BYTE where they have its size."""

    def make(table: np.ndarray, **options: object) -> Path:
        path = tiny.bigram(tmp_path_factory.mktemp("bigram"), table, **options)
        return _with_bytes(path) if len(table) == 256 else path

    return make


@pytest.fixture(scope="session")
def demo_tokenizer() -> specrt.Tokenizer:
    from specrt.demo import demo_model_path

    return specrt.Tokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="session")
def demo_fp32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model in float32, packed, so that many engines can map it at once."""
    yield from _packed(tmp_path_factory, "float32")


@pytest.fixture(scope="session")
def demo_bf16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model in bfloat16, packed."""
    yield from _packed(tmp_path_factory, "bfloat16")


def _packed(factory: pytest.TempPathFactory, dtype: str) -> Iterator[Path]:
    from specrt.demo import demo_model_path

    path = factory.mktemp("demo") / f"{dtype}.specrt"
    with specrt.Engine(demo_model_path(), dtype=dtype, max_model_len=32, max_batch_size=1) as one:
        one.save(path)
    yield path
    path.unlink()  # pytest keeps the folders of a few sessions


def _with_bytes(path: Path) -> Path:
    return tiny.byte_tokenizer(path)


def _config(path: Path) -> dict[str, object]:
    import json

    return dict(json.loads((path / "config.json").read_text()))
