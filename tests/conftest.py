"""What every test stands on: eight CPU devices, strict types where the maths is, no trace counts left over."""

import collections
import gc
import importlib.metadata
import os
import re
import signal

# Before jax is imported, and inherited by the processes that tests start.
# LLVM gets a program in one part: dividing it over threads costs a fifth more, and the workers fill the cores anyway.
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Compiling is most of what tests do, and these emitters, which later releases have no choice of, take three times as long.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["JAX_PLATFORMS"] = os.environ.get("HPNLP_TEST_PLATFORM", "cpu")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ["NPROC"] = "32"  # of hpnlp.__main__.spare_threads
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of numpy: its threads spin while they wait for a core that a worker has
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(50_000)  # at the 700 of Python, tracing spends a tenth of its time in looking for garbage

import chex  # noqa: E402  (imports jax)
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Compiling makes first examples slow, so no deadline. The same examples in every run, so that a red run repeats.
hypothesis.settings.register_profile("hpnlp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("hpnlp")

STRICT = re.compile(r"tests[/\\](ops|nn|models)[/\\]")


def pytest_addoption(parser):
    parser.addoption(
        "--thin", type=int, default=1, metavar="N", help="of each file's cases, run the first and each Nth after it"
    )


@pytest.hookimpl(trylast=True)  # of what the marks have left
def pytest_collection_modifyitems(config, items):
    kept, left, seen = [], [], collections.Counter()
    for item in items:
        (left if seen[item.path] % config.getoption("thin") else kept).append(item)
        seen[item.path] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish():
    gc.freeze()  # what is imported by now stays: no collection needs to walk through it


@pytest.fixture(autouse=True)
def strict_numerics(request):
    """In tests of ops, nn and models, no dtype and no rank is promoted in silence."""
    if not STRICT.search(str(request.path)):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def fresh_trace_counter():
    """`chex.assert_max_traces` counts by function, over the whole process."""
    yield
    chex.clear_trace_counter()
