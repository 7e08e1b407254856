"""AdamW, compared with torch over ten steps with the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.training.optim import OptimizerConfig, make_optimizer

pytestmark = pytest.mark.oracle

STEPS = 10
SHAPES = {"embed": {"table": (11, 6)}, "dense": {"kernel": (2, 6, 5), "bias": (2, 5)}, "norm": {"scale": (6,)}}
DECAYED = ("table", "kernel")


def draw(seed, scale):
    rng = np.random.default_rng(seed)
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
    return treedef.unflatten([(scale * rng.normal(size=shape)).astype(np.float32) for shape in shapes])


# The norms of the gradients go up and down, so that clipping acts on some steps only.
GRADIENTS = [draw(step, 0.05 if step % 2 else 0.3) for step in range(1, STEPS + 1)]


def cosine_after_two(step):
    """Linear warm-up over two steps, then a cosine to 1/10 over eight (Loshchilov and Hutter 2017, eq. 5)."""
    return (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 2) / 8))


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"schedule": "constant", "warmup": 0, "clip_norm": 0.0}, lambda step: 1.0),
        ({"schedule": "cosine", "warmup": 2, "final": 0.1, "clip_norm": 1.0}, cosine_after_two),
    ],
    ids=["plain", "clipped_cosine"],
)
def test_adamw_matches_torch(options, rate):
    torch = pytest.importorskip("torch")
    peak, decay = 0.02, 0.3
    config = OptimizerConfig("adamw", learning_rate=peak, weight_decay=decay, b1=0.8, b2=0.95, eps=1e-3, **options)
    optimizer = make_optimizer(config, STEPS)
    ours = jax.tree.map(jnp.asarray, draw(0, 1.0))
    state, update = optimizer.init(ours), jax.jit(optimizer.update)

    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(draw(0, 1.0)), strict=True)
    theirs = [torch.nn.Parameter(torch.from_numpy(leaf)) for leaf in leaves]
    is_decayed = [path[-1].key in DECAYED for path in paths]
    groups = [
        {
            "params": [p for p, yes in zip(theirs, is_decayed, strict=True) if yes == wanted],
            "weight_decay": decay * wanted,
        }
        for wanted in (True, False)
    ]
    twin = torch.optim.AdamW(groups, lr=peak, betas=(0.8, 0.95), eps=1e-3)

    clipped = 0
    for step, gradient in enumerate(GRADIENTS):
        updates, state = update(jax.tree.map(jnp.asarray, gradient), state, ours)
        ours = optax.apply_updates(ours, updates)

        for parameter, value in zip(theirs, jax.tree.leaves(gradient), strict=True):
            parameter.grad = torch.from_numpy(value.copy())
        if config.clip_norm:
            clipped += bool(torch.nn.utils.clip_grad_norm_(theirs, config.clip_norm) > config.clip_norm)
        for group in twin.param_groups:
            group["lr"] = peak * rate(step)
        twin.step()

        for mine, other in zip(jax.tree.leaves(ours), theirs, strict=True):
            np.testing.assert_allclose(mine, other.detach().numpy(), atol=2e-6, rtol=2e-6)
    assert not config.clip_norm or 0 < clipped < STEPS
