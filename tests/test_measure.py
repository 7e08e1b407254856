import json
import platform
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from hpnlp import measure
from hpnlp.cost.flop_count import expected_iterations
from hpnlp.planner.jaxpr.jaxpr_cost import program_cost
from tests.messages import raises

X = jnp.ones((8, 8))
PRODUCT = 2 * 8**3  # FLOPs of X @ X


def square(x):
    return x @ x


# --- FLOPs: a product of all-ones arrays sums to the number of multiply-adds ---


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def test_flops_of_products():
    for fn, args in (
        (jnp.dot, (ones(3, 5), ones(5, 7))),
        (lambda a, b: jnp.einsum("bqnh,bknh->bnqk", a, b), (ones(2, 3, 4, 5), ones(2, 6, 4, 5))),
        (lambda a, b: jnp.einsum("abc,dbc->ad", a, b), (ones(2, 3, 4), ones(5, 3, 4))),
        (lambda a, b: lax.ragged_dot(a, b, jnp.array([3, 0, 5])), (ones(8, 4), ones(3, 4, 6))),
    ):
        assert measure.count_flops(fn, *args) == 2 * int(fn(*args).sum())


@pytest.mark.parametrize(
    ("lhs", "rhs", "options"),
    [
        ((2, 3, 16), (4, 3, 5), {"padding": "VALID"}),
        ((2, 3, 16), (4, 3, 5), {"padding": "SAME", "window_strides": (3,)}),
        ((1, 4, 9, 11), (6, 2, 3, 2), {"padding": "SAME", "feature_group_count": 2}),
        ((1, 4, 9, 11), (8, 4, 3, 3), {"padding": ((4, 0), (1, 2)), "rhs_dilation": (2, 1)}),
        ((1, 2, 7), (3, 2, 4), {"padding": ((3, 3),), "lhs_dilation": (2,)}),
        ((4, 2, 9), (6, 2, 3), {"padding": "VALID", "batch_group_count": 2}),
    ],
)
def test_flops_of_convolutions(lhs, rhs, options):
    def convolve(x, w):
        return lax.conv_general_dilated(x, w, **{"window_strides": (1,) * (len(lhs) - 2), **options})

    assert measure.count_flops(convolve, ones(*lhs), ones(*rhs)) == 2 * int(convolve(ones(*lhs), ones(*rhs)).sum())


def test_flops_agree_with_xla_where_xla_is_right():
    def fn(a, b):
        return jnp.einsum("btd,df->btf", a, b)

    compiled = measure.compile(fn, ones(2, 8, 16), ones(16, 32))
    assert compiled.flops == int(compiled.executable.cost_analysis()["flops"])


def test_ragged_gradients_cost_as_much_as_the_product():
    sizes = jnp.array([3, 0, 5])
    forward = measure.count_flops(lax.ragged_dot, ones(8, 4), ones(3, 4, 6), sizes)
    gradients = jax.grad(lambda a, b: lax.ragged_dot(a, b, sizes).sum(), argnums=(0, 1))
    assert measure.count_flops(gradients, ones(8, 4), ones(3, 4, 6)) == 3 * forward


def test_flops_through_control_flow():
    for fn, products in (
        (lambda x: lax.scan(lambda c, _: (square(c), None), x, length=7)[0], 7),
        (lambda x: lax.scan(lambda c, row: (c @ row, None), x, jnp.ones((3, 8, 8)))[0], 3),
        (lambda x: lax.fori_loop(0, 5, lambda _, c: lax.fori_loop(0, 3, lambda _, d: square(d), c), x), 15),
        (lambda x: lax.map(lambda row: x @ row, x), 1),
        (lambda x: lax.cond(x[0, 0] > 0, square, lambda y: square(square(y)), x), 2),
        (lambda x: lax.switch(x[0, 0].astype(int), [square, lambda y: y], x), 1),
        (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), 0),
        (jax.jit(lambda x: jax.jit(square)(x) + 1), 1),
        (jax.vmap(lambda row: X @ row), 1),
        (jax.value_and_grad(lambda x: (jnp.sin(X @ x) @ X).sum()), 4),
        (jax.value_and_grad(lambda x: jax.checkpoint(lambda y: jnp.sin(X @ jnp.sin(X @ y)).sum())(x)), 6),
        (lambda x: jnp.linalg.cholesky(x) + jnp.cumsum(x) @ X.reshape(64, -1)[:, :1], 1 / 8),
    ):
        assert measure.count_flops(fn, X) == products * PRODUCT


def test_flops_of_custom_derivatives():
    @jax.custom_vjp
    def once(x):
        return square(x)

    once.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x @ x @ x,))

    @jax.custom_jvp
    def twice(x):
        return square(square(x))

    twice.defjvp(lambda primals, tangents: (twice(*primals), 2.0 * tangents[0]))

    assert measure.count_flops(once, X) == PRODUCT
    assert measure.count_flops(jax.value_and_grad(lambda x: once(x).sum()), X) == 4 * PRODUCT
    assert measure.count_flops(twice, X) == 2 * PRODUCT
    assert measure.count_flops(jax.value_and_grad(lambda x: twice(x).sum()), X) == 2 * PRODUCT


def test_loop_of_unknown_length_needs_while_trips():
    def fn(x, n):
        return lax.fori_loop(0, n, lambda _, c: square(c), x)

    raises("while_trips=", measure.count_flops, fn, X, 3)
    assert measure.count_flops(fn, X, 3, while_trips=11) == 11 * PRODUCT


def test_loop_of_a_stated_length_counts_as_often():
    def fn(x, n):
        with expected_iterations(5):
            return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, square(c[1])), (0, x))[1]

    assert measure.count_flops(jax.checkpoint(fn), X, 3) == 5 * PRODUCT
    cost = program_cost(jax.jit(fn).trace(X, 3).jaxpr)
    assert cost.flops == 5 * PRODUCT
    assert cost.bytes < 5 * X.nbytes  # slices of its operands, which all iterations together read once


def test_linear_solve_counts_its_solve_only():
    def fn(b):
        return lax.custom_linear_solve(lambda c: X @ c, b, lambda _, c: X @ c, lambda _, c: X @ X @ c)

    assert measure.count_flops(fn, X) == PRODUCT


@pytest.mark.parametrize("manual", [{"a", "b"}, {"a"}])
def test_flops_of_shard_map_are_those_of_all_devices(manual):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("a", "b" if "b" in manual else None)

    def product(x):
        return lax.psum(x @ jnp.ones((x.shape[1], 16)), "b") if "b" in manual else x @ jnp.ones((x.shape[1], 16))

    sharded = jax.shard_map(product, mesh=mesh, in_specs=spec, out_specs=PartitionSpec("a"), axis_names=manual)
    assert measure.count_flops(sharded, ones(32, 8)) == 2 * 32 * 8 * 16


@pytest.mark.parametrize(("estimate", "flops"), [(None, 4 * PRODUCT), (pl.CostEstimate(77, 0, 0), 77)])
def test_flops_of_pallas_kernels(estimate, flops):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] @ x_ref[...]

    block = pl.BlockSpec((8, 8), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((32, 8), jnp.float32),
        grid=(4,),
        in_specs=[block],
        out_specs=block,
        cost_estimate=estimate,
        interpret=True,
    )
    assert measure.count_flops(call, ones(32, 8)) == flops


def test_flops_need_shapes_only():
    huge = jax.ShapeDtypeStruct((10**6, 10**6), jnp.bfloat16)
    assert measure.count_flops(square, huge) == 2 * 10**18


# --- compiling ---


def test_compiled_program_runs_and_reports_memory():
    x = jnp.arange(64.0).reshape(8, 8)
    compiled = measure.compile(square, x)
    np.testing.assert_array_equal(compiled(x), square(x))
    memory = compiled.memory
    assert (memory.argument, memory.output, memory.alias) == (x.nbytes, x.nbytes, 0)
    assert compiled.flops == PRODUCT
    assert compiled.trace_seconds > 0 and compiled.compile_seconds > 0


def test_memory_counts_temporaries_and_donated_arguments():
    def fn(x, w):
        return x + jnp.sin(x @ w) @ w.T

    x, w = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    kept = measure.compile(fn, x, w).memory
    donated = measure.compile(fn, x, w, jit_options={"donate_argnums": 0}).memory
    assert kept.temp >= 64 * 4096 * 4
    assert kept.peak == kept.argument + kept.output + kept.temp
    assert donated.alias == 64 * 8 * 4
    assert donated.peak == donated.argument + donated.temp


def test_compile_takes_options_and_static_arguments():
    compiled = measure.compile(
        lambda x, n: x**n,
        X,
        n=2,
        jit_options={"static_argnames": "n"},
        compiler_options={"xla_cpu_enable_fast_math": True},
    )
    np.testing.assert_array_equal(compiled(2 * X), 4 * X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        measure.compile(square, X, compiler_options={"xla_no_such_option": True})
    raises("donate_argnums", lambda: measure.compile(jax.jit(square), X, jit_options={"donate_argnums": 0}))


# --- time ---


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the functions under test advance; `log` lists their calls."""

    class Clock:
        now = 0.0
        log: list[str] = []

        def spender(self, name, seconds):
            seconds = iter(seconds)

            def spend():
                self.log.append(name)
                self.now += next(seconds)

            return spend

    clock = Clock()
    clock.log = []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    return clock


def test_timeit_interleaves_and_pairs(clock):
    # Two calls to warm up, then five rounds while the machine grows slower: B takes twice A's time all along.
    functions = {"A": clock.spender("A", [9, 1, 1, 2, 4, 8, 3]), "B": clock.spender("B", [9, 1, 2, 4, 8, 16, 6])}
    times = measure.timeit(functions)
    assert "".join(clock.log) == "AABB" + "AB" * 5
    assert times["A"].all == (1, 2, 4, 8, 3)
    assert (times["A"].median, times["A"].min) == (3, 1)
    assert times["B"].over(times["A"]) == 2
    assert times["B"].ratios(times["A"]) == (2, 2, 2, 2, 2)


@pytest.mark.parametrize(("rounds", "interval"), [(1, (1, 1)), (5, (1, 5)), (9, (2, 8)), (15, (4, 12))])
def test_interval_of_a_ratio_is_of_order_statistics(rounds, interval):
    """The second ratio of each end of 9 rounds, and the fourth of 15, bound the median with 96.1 and 96.5 %."""
    first, second = measure.Timing(tuple(range(1, rounds + 1))), measure.Timing((1,) * rounds)
    assert first.interval(second) == interval


def test_timeit_repeats_quick_functions(clock):
    times = measure.timeit({"quick": clock.spender("quick", [0.25] * 100)}, rounds=3, warmup=4, min_seconds=2.0)
    assert len(clock.log) == 4 + 1 + 3 * 8
    assert times["quick"].all == (0.25,) * 3


def test_timeit_reports_its_progress(clock):
    calls = []
    functions = {name: clock.spender(name, [1] * 9) for name in "ab"}
    measure.timeit(functions, rounds=2, progress=lambda *call: calls.append(call))
    assert calls == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_timeit_without_rounds_or_warmup_raises():
    for argument in ("rounds", "warmup"):
        raises(f"{argument}=0", measure.timeit, {"square": lambda: square(X)}, **{argument: 0})


def test_timeit_waits_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    measure.timeit({"answer": lambda: 42}, rounds=3, min_seconds=0.0)
    assert waited == [42] * 5


def test_enqueued_calls_wait_once_for_each_measurement(clock, monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    quick = clock.spender("quick", [0.25] * 100)
    measure.timeit({"quick": quick}, rounds=3, warmup=2, min_seconds=2.0, enqueue=True)
    assert len(clock.log) == 2 + 1 + 3 * 8 and len(waited) == 2 + 1 + 3


# --- memory ---


def test_peak_memory_of_the_process_is_in_bytes():
    block = np.ones(1 << 25, np.uint8)
    held = psutil.Process().memory_info().rss
    peak = measure.peak_memory_bytes()
    del block
    assert held * 0.99 <= peak < psutil.virtual_memory().total
    assert measure.peak_memory_bytes() >= held * 0.99  # though the block is gone


def test_peak_memory_of_the_fullest_device(monkeypatch):
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    devices = [Device({"peak_bytes_in_use": 5}), Device({"peak_bytes_in_use": 7}), Device(None)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert measure.peak_memory_bytes() == 7


# --- FLOP/s of the data sheet ---


def test_peak_flops():
    for kind, peak in (
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("TPU v5", 459e12),
        ("TPU v5 lite", 197e12),
        ("NVIDIA L40S", None),
        ("cpu", None),
    ):
        assert measure.peak_flops(kind) == peak


def test_training_flops_equal_the_products_of_a_dense_model():
    layers, width, length = 3, 8, 16

    def loss(params, x):
        for w_q, w_o in params:
            q = x @ w_q
            x = jax.nn.softmax(q @ x.T) @ x @ w_o + x
        return (x**2).sum()

    params = [(jnp.ones((width, width)),) * 2] * layers
    # The input of the first layer is differentiated as well: everywhere else in a model, it belongs to a layer below.
    traced = measure.count_flops(jax.value_and_grad(loss, argnums=(0, 1)), params, ones(length, width))
    sizes = {"layers": layers, "width": width, "length": length}
    parameters = 2 * layers * width**2
    assert measure.training_flops(parameters, length, causal=False, **sizes) == traced
    products = 6 * parameters * length
    assert measure.training_flops(parameters, length, **sizes) == products + (traced - products) / 2


def test_mfu_is_a_fraction_of_the_peak_of_all_devices():
    assert measure.mfu(312e12, 2.0, devices=4, device_kind="NVIDIA A100-SXM4-40GB") == 1 / 8
    assert measure.mfu(1e12, 1.0) is None  # the tests' own devices have no data sheet


# --- environment and results ---


def test_environment_has_versions_and_no_paths():
    environment = measure.environment()
    text = json.dumps(environment)
    assert environment["jax"] == jax.__version__ and environment["devices"] == 8 and environment["cores"] >= 1
    assert environment["python"] in text and environment["cpu"]
    for private in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert private not in text


def test_commit_is_that_of_the_checkout_of_the_file(tmp_path, monkeypatch):
    def git(*command):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *command], check=True, capture_output=True, text=True
        ).stdout

    source = tmp_path / "measure.py"
    source.write_text("")
    monkeypatch.setattr(measure, "__file__", str(source))
    assert measure._commit() == (None, None)
    monkeypatch.setenv("HPNLP_COMMIT", "0123abc")  # of a copy without the repository
    assert measure.environment()["commit"] == "0123abc"
    git("init")
    git("commit", "--allow-empty", "-m", "of another project, in which this file was merely installed")
    assert measure._commit() == (None, None)
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "results.json").write_text("{}")
    assert measure._commit() == (commit, False)
    source.write_text("changed = True")
    assert measure._commit() == (commit, True)


def test_results_are_written_atomically(tmp_path):
    rows = [{"name": "flash", "seconds": np.float32(0.5), "all": [1.0, 2.0], "bytes": np.int64(3)}]
    path = measure.write_result("step", rows, tmp_path / "results")
    assert path.name == "step-cpu.json"
    written = json.loads(path.read_text())
    assert written["bench"] == "step" and written["environment"] == measure.environment()
    assert written["rows"] == [{"name": "flash", "seconds": 0.5, "all": [1.0, 2.0], "bytes": 3}]
    with pytest.raises(ValueError, match="JSON compliant"):
        measure.write_result("step", [{"seconds": float("nan")}], tmp_path / "results")
    assert json.loads(path.read_text()) == written
    assert [p.name for p in path.parent.iterdir()] == [path.name]
