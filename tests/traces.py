"""Counts of traces. They hold when JAX drops programs from its caches, as tests/conftest.py makes it do."""

import collections

import jax

TRACES = collections.Counter()  # name of a function -> how often JAX traced it


@jax.monitoring.register_event_duration_secs_listener
def count_traces(event, duration, *, fun_name="", **_):
    TRACES[fun_name] += event == "/jax/core/compile/jaxpr_trace_duration"
