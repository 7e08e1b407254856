"""What every test stands on: eight CPU devices, strict types where the maths is, no trace counts left over."""

import importlib.metadata
import os
import re

# Before jax is imported, and inherited by the processes that tests start.
FLAGS = ["--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Compiling is most of what tests do, and these emitters, which later releases have no choice of, take three times as long.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["JAX_PLATFORMS"] = os.environ.get("HPNLP_TEST_PLATFORM", "cpu")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ["NPROC"] = "32"  # of hpnlp.__main__.spare_threads

import chex  # noqa: E402  (imports jax)
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Compiling makes first examples slow, so no deadline. The same examples in every run, so that a red run repeats.
hypothesis.settings.register_profile("hpnlp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("hpnlp")

STRICT = re.compile(r"tests[/\\](ops|nn|models)[/\\]")


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
