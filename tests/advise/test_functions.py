"""Advice on a function of the user's: planted gains and losses, differences of results, failures and wrong arguments."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.advise import advise_function, functions
from tests.messages import raises


def many_operations(x):
    for _ in range(40):
        x = jnp.sin(x) + 1.0
    return x


def test_compilation_of_many_operations_is_found_and_confirmed():
    advice = advise_function(many_operations, np.ones(64, np.float32), rounds=8)
    first = advice.findings[0]
    by_name = {finding.name: finding for finding in advice.findings}
    assert by_name["jax.jit"].is_confirmed and by_name["jax.jit"].ratio.median < 0.5, advice
    assert by_name["jax.jit"].difference < 1e-5 < by_name["jax.jit + arguments of bfloat16"].difference
    assert first.ratio.median <= by_name["jax.jit"].ratio.median and advice.render().startswith("A call takes ")
    assert "times the batch" not in advice.render()


def test_a_batch_counts_by_its_examples(monkeypatch):
    monkeypatch.setattr(functions, "OPTIONS", {})
    advice = advise_function(jax.jit(many_operations), np.ones((16, 4), np.int32), batched=(0,), rounds=8)
    by_name = {finding.name: finding for finding in advice.findings}
    assert set(by_name) == {"2 times the batch", "4 times the batch"}  # integers have no other dtype, and it is jitted
    assert by_name["4 times the batch"].ratio.median < 0.9 and by_name["4 times the batch"].difference is None


def test_a_change_that_fails_is_a_row_and_a_function_that_fails_raises(monkeypatch):
    monkeypatch.setattr(functions, "OPTIONS", {"cpu": {"xla_no_such_option": True}})

    def only_float32(x):
        if x.dtype != jnp.float32:
            raise TypeError("float32 is needed")
        return x + 1.0

    advice = advise_function(jax.jit(only_float32), np.ones(4, np.float32), rounds=8)
    errors = {finding.name: finding.error for finding in advice.findings if finding.error}
    assert errors["arguments of bfloat16"] == "float32 is needed" and len(errors) == 3
    raises("cannot be compiled: float32 is needed", advise_function, only_float32, np.ones(4, np.int32))
    raises("batched=1: the function has 1 arguments", advise_function, only_float32, np.ones(4), batched=(1,))


def test_results_of_any_dtype_are_compared(monkeypatch):
    monkeypatch.setattr(functions, "OPTIONS", {})

    def results(x, key):
        masked = jnp.where(x > 2, x, -jnp.inf)
        return masked, jnp.fft.fft(x.astype(jnp.float32)), jax.random.split(key), None, 3

    advice = advise_function(results, np.arange(4, dtype=np.float32), jax.random.key(0), rounds=1)
    assert [finding.error for finding in advice.findings] == [""] * 3
    assert {finding.difference for finding in advice.findings} == {0.0}
    assert "inf" not in advice.render()
    difference = functions._difference(np.array([1j, 2j]), np.array([1j, 1j]))
    assert difference == 0.5 and functions._difference(np.zeros(2), np.array([0.0, 1e-9])) == np.inf
    assert functions._difference(np.array([np.nan, 1.0]), np.array([0.0, 1.0])) == np.inf


def test_any_error_of_a_changed_function_is_a_row(monkeypatch):
    monkeypatch.setattr(functions, "OPTIONS", {})

    def asserting(x):
        if x.shape != (2, 3):
            raise AssertionError  # without a message
        return x

    advice = advise_function(jax.jit(asserting), np.ones((2, 3), np.int32), batched=(0,), rounds=1)
    assert [finding.error for finding in advice.findings] == ["AssertionError"] * 2
    assert "No change applies." in advise_function(jax.jit(asserting), np.ones((2, 3), np.int32), rounds=1).render()


def test_functions_that_donate_and_static_arguments_raise():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones(3)
    raises("donates its arguments", advise_function, donating, x)
    assert not x.is_deleted()
    raises("an argument is no array", advise_function, lambda x, name: x, x, "name")
