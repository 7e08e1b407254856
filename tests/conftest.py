"""Set-up of all tests: eight CPU devices, strict promotion in tests of operations, fresh trace counts."""

import collections
import gc
import importlib.metadata
import os
import pathlib
import re
import signal
import threading

# Set before jax is imported, and inherited by the processes that tests start.
# Programs are compiled in one part: splitting them over threads costs 20 % more, and the workers use all cores anyway.
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Tests mostly compile, and the fusion emitters, which later releases always use, take three times as long.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["JAX_PLATFORMS"] = os.environ.get("HPNLP_TEST_PLATFORM", "cpu")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
# No source locations in programs: recording them takes 5 % of the time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
if os.environ["JAX_PLATFORMS"] == "cpu":  # LLVM's optimizations take longer than they save
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["NPROC"] = "32"  # the value that hpnlp.__main__.spare_threads sets
# Several threads of numpy would spin while they wait for a core that another worker uses.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background processes with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
gc.set_threshold(50_000)  # at Python's default of 700, tracing spends 10 % of its time in garbage collection

import chex  # noqa: E402  (imports jax)
import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

# Programs are written to and read from a cache on disk in the tests that set its directory (tests/tiny.py). Without a directory
# JAX would still compute the key of every program, which takes 4 % of the time of small programs.
jax.config.update("jax_enable_compilation_cache", False)

# No deadline, since first examples compile. The same examples in every run, so that failures are reproducible.
hypothesis.settings.register_profile("hpnlp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("hpnlp")

MAX_MAPS = 40_000
LOWERINGS = 50
STRICT = re.compile(r"tests[/\\](ops|nn|models)[/\\]")


def reuse_contexts(make_ir_context):
    """Reuses the MLIR context of a thread `LOWERINGS` times, as releases of JAX after 0.10 do; to make one takes 3 ms."""
    current = threading.local()

    def make():
        if getattr(current, "left", 0) == 0:
            current.context, current.left = make_ir_context(), LOWERINGS
        current.left -= 1
        return current.context

    return make


if not hasattr(mlir, "_thread_local_context"):
    mlir.make_ir_context = reuse_contexts(mlir.make_ir_context)


def pytest_addoption(parser):
    parser.addoption(
        "--thin", type=int, default=1, metavar="N", help="run every Nth test of each file, beginning with the first"
    )
    parser.addoption(
        "--register",
        action="append",
        default=[],
        metavar="FILE",
        help="run a file that adds entries to tables, and test them",
    )


def pytest_configure(config):
    if config.getoption("register"):
        from hpnlp import cli

        cli.register(config.getoption("register"))


def pytest_ignore_collect(collection_path, config):
    """Skips the import of torch and transformers, which takes seconds, if no oracles run."""
    unused = "not oracle" in config.getoption("markexpr") and collection_path.name.endswith("_oracle.py")
    return True if unused else None


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config, items):
    selected, deselected, counts = [], [], collections.Counter()
    for item in items:
        (deselected if counts[item.path] % config.getoption("thin") else selected).append(item)
        counts[item.path] += 1
    items[:] = selected
    config.hook.pytest_deselected(items=deselected)


@pytest.fixture(scope="module", autouse=True)
def small_collections():
    """Freezes what modules and earlier files have left alive, mostly programs; to traverse them takes seconds each time.

    A program has about 7 memory maps, and Linux allows a process 65,530: programs are dropped before these run out, which would
    be a segmentation fault.
    """
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def strict_numerics(request):
    """Makes implicit promotion of dtypes and ranks an error in tests of ops, nn and models."""
    if not STRICT.search(str(request.path)):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def symbolic_sizes():
    """Disables run-time type checks, by which sizes that are symbols are no integers."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def fresh_trace_counter():
    """Resets the counts of `chex.assert_max_traces`, which are global to the process."""
    yield
    chex.clear_trace_counter()
