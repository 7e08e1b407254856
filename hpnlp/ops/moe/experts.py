"""MLPs of experts applied to the tokens that are assigned to them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.checkpoint_names import HIDDEN
from hpnlp.ops.moe import pallas_gpu
from hpnlp.ops.moe.dispatch import rows_of_tokens, tokens_of_rows
from hpnlp.ops.moe.grouped import Activation, Experts, grouped_mlp, hidden_columns
from hpnlp.ops.moe.routing import Routing
from hpnlp.ops.moe.schedule import ExpertSchedule, block_sizes, equal_schedule, make_schedule
from hpnlp.ops.weight import dense
from hpnlp.types import InputError

IMPLEMENTATIONS = ("auto", "loops", "ragged", "pallas", "batched", "dense")


@array_op("N D", x="N D")
def expert_mlp(
    x: Float[Array, "N D"], routing: Routing, experts: Experts, activation: Activation, impl: str = "auto"
) -> Float[Array, "N D"]:
    """Applies to each token the MLPs of its experts, and adds up their results, multiplied by the gates.

    Args:
      x: Tokens.
      routing: Assignments of tokens to experts.
      experts: "up" `[E, D, F]` and "down" `[E, F, D]`; "gate" `[E, D, F]` of gated MLPs.
      activation: Elementwise function, of "gate" where there is one, else of "up".
      impl: "loops" over blocks of rows of one expert, for CPUs; "ragged", `jax.lax.ragged_dot` over sorted rows, for TPUs;
        "pallas", kernels of JAX over sorted rows, for Hopper GPUs, bfloat16 or float16, D and F multiples of 64 and at most
        128 experts; "batched", a product over `[E, C, D]` with C the largest number of assignments of one expert that the
        routing allows; "dense", `reference_expert_mlp`, for runtimes without sorts and loops, such as runtimes of ONNX files;
        "auto": "loops" on a CPU, "ragged" on a TPU; on a GPU "pallas" where it can compute the call and E C > A, else
        "batched" where E C <= 4 A, else "loops".

    Returns:
      The sums in the dtype of x; 0 for tokens without an expert.

    Raises:
      InputError: Unknown `impl`, or "pallas" cannot compute the call.

    Cost: 6 A D F FLOPs for A assignments (4 without a gate); "batched" computes E C rows, "dense" E N. "ragged" is a product of
    all rows with all experts where XLA has no kernel for it: on CPUs, and on GPUs with jaxlib 0.10.

    References: Shazeer et al. 2017, arXiv 1701.06538; Gale et al. 2022, "MegaBlocks", arXiv 2211.15841.
    """
    if impl not in IMPLEMENTATIONS:
        raise InputError(f"impl={impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "dense":
        return reference_expert_mlp(x, routing, experts, activation)
    count = expert_count(experts)
    impl = _implementation(impl, x, routing, experts)
    if impl != "loops":
        experts = {name: dense(stack) for name, stack in experts.items()}
    if impl == "batched":
        schedule = equal_schedule(routing.experts, count, routing.most)
    else:
        expected = routing.expected or routing.experts.shape[0]
        sizes = block_sizes(expected, count) if impl == "loops" else ()
        if jax.default_backend() == "gpu":  # a block costs the launches of its kernels, however few rows it has
            sizes = sizes[:1]
        schedule = make_schedule(routing.experts, count, sizes, expected)
    if impl == "loops":
        return grouped_mlp(x, routing, experts, schedule, activation)
    compute = {"batched": _batched, "ragged": _ragged, "pallas": _pallas}[impl]
    rows = compute(experts, activation, rows_of_tokens(x, routing, schedule.source, schedule.row), schedule)
    return tokens_of_rows(rows, routing, schedule.row, x.shape[0])


def _implementation(impl: str, x: jax.Array, routing: Routing, experts: Experts) -> str:
    """The implementation that "auto" stands for; another `impl` itself. Raises where "pallas" cannot compute the call."""
    backend = jax.default_backend()
    if impl == "auto" and backend != "gpu":
        return "ragged" if backend == "tpu" else "loops"
    if impl not in ("auto", "pallas"):
        return impl
    assignments, (count, *sizes) = routing.experts.shape[0], jax.eval_shape(dense, experts["up"]).shape
    reasons = pallas_gpu.limits(assignments, count, tuple(sizes), x.dtype)
    if impl == "pallas":
        if reasons:
            raise InputError(f"impl='pallas' of experts does not support {', '.join(reasons)}: pass impl='auto'")
        return impl
    # Estimates, not measurements: one product of A rows, "batched", is faster than "pallas", which computes more; "loops"
    # computes A rows in blocks that run one after another and fill a part of the GPU, at 1/4 of the rate of a large product.
    # "ragged" computes E A rows, never fewer than the E C of "batched".
    rows = count * routing.most
    if not reasons and rows > assignments:
        return "pallas"
    return "batched" if rows <= 4 * assignments else "loops"


@array_op("N D", x="N D")
def reference_expert_mlp(
    x: Float[Array, "N D"], routing: Routing, experts: Experts, activation: Activation
) -> Float[Array, "N D"]:
    """`expert_mlp` by one-hot sums: every expert on every token.

    Args:
      x: Tokens.
      routing: Assignments of tokens to experts.
      experts: Stacks of matrices, see `expert_mlp`.
      activation: Elementwise function, see `expert_mlp`.

    Returns:
      The sums in the dtype of x.
    """
    experts = {name: dense(stack) for name, stack in experts.items()}
    weights = token_gates(routing, x.shape[0], experts["up"].shape[0])
    up = jnp.einsum("nd,edf->nef", x, experts["up"].astype(x.dtype))
    if "gate" in experts:
        hidden = activation(jnp.einsum("nd,edf->nef", x, experts["gate"].astype(x.dtype))) * up
    else:
        hidden = activation(up)
    results = jnp.einsum("nef,efd->ned", hidden, experts["down"].astype(x.dtype))
    return jnp.einsum("ne,ned->nd", weights, results.astype(jnp.float32)).astype(x.dtype)


def expert_count(experts: Experts) -> int:
    """Number of experts.

    Args:
      experts: As for `expert_mlp`.

    Returns:
      E.
    """
    return jax.tree.leaves(experts["up"])[0].shape[0]


def token_gates(routing: Routing, count: int, experts: int) -> jax.Array:
    """The gate of each token and expert.

    Args:
      routing: Assignments of tokens to experts.
      count: Number of tokens N.
      experts: Number of experts E.

    Returns:
      `[N, E]`, float32; 0 for experts that the token does not use.
    """
    if routing.tokens is not None:
        return jnp.zeros((count, experts)).at[routing.tokens, routing.experts].add(routing.gates, mode="drop")
    is_chosen = routing.experts.reshape(count, -1)[:, :, None] == jnp.arange(experts, dtype=jnp.int32)[None, None]
    return jnp.sum(jnp.where(is_chosen, routing.gates.reshape(count, -1)[:, :, None], 0.0), axis=1)


def _ragged(experts: Experts, activation: Activation, rows: jax.Array, schedule: ExpertSchedule) -> jax.Array:
    return _mlp(experts, activation, rows, lambda x, stack: lax.ragged_dot(x, stack, schedule.counts))


def _pallas(experts: Experts, activation: Activation, rows: jax.Array, schedule: ExpertSchedule) -> jax.Array:
    padded = jnp.pad(rows, ((0, -len(rows) % pallas_gpu.ROWS), (0, 0)))
    products = _mlp(experts, activation, padded, lambda x, stack: pallas_gpu.grouped_product(x, stack, schedule.counts))
    return products[: len(rows)]


def _batched(experts: Experts, activation: Activation, rows: jax.Array, schedule: ExpertSchedule) -> jax.Array:
    x = rows.reshape(experts["up"].shape[0], -1, rows.shape[1])
    return _mlp(experts, activation, x, lambda x, stack: jnp.einsum("erk,ekn->ern", x, stack)).reshape(rows.shape)


def _mlp(
    experts: Experts, activation: Activation, x: jax.Array, product: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """The MLPs by a product of rows with a stack of matrices of all experts."""

    def named(name: str, x: jax.Array) -> jax.Array:
        return checkpoint_name(product(x, experts[name].astype(x.dtype)), HIDDEN)

    products = {name: named(name, x) for name in experts if name != "down"}
    return named("down", hidden_columns(activation, products))
