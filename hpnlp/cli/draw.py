"""`hpnlp draw`: draws attention masks, and prints their cost relative to dense attention."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from absl import flags

from hpnlp import cli

EXAMPLE = '"Causal() & (Window(64) | Global(8))"'
USAGE = f"""
hpnlp draw {EXAMPLE} [MASK ...] [--length=256] [--keys=S] [--block=N] [--out=pattern.png]

Draws which keys each query may attend to, and the tiles that the block-sparse executor computes; several masks are drawn side
by side. Prints the number of active tiles, and the tiles and pairs as shares of those of dense attention: the predicted cost
and its lower bound. Masks combine with & | ~ and .shift(n); PerHead((MASK, MASK)) has one mask for each head. Below, i is the
index of the query and j that of the key, from 0. Masks defined by a function, `Where`, are drawn from Python:
hpnlp.mask_plot.draw({{"mine": Where(function)}}, "mine.png").
"""

flags.DEFINE_integer("length", 256, "Number of queries. Beyond 1024 x 1024 pairs, a pixel is a square of tiles.")
flags.DEFINE_integer("keys", None, "Number of keys; by default as many as queries.")
flags.DEFINE_integer("block", None, "Queries and keys of a tile; by default 1/16 of the longer side, at most 128.")
flags.DEFINE_string("out", "pattern.png", "File of the image, or a directory for pattern.png.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp draw`.

    Args:
      argv: "hpnlp draw" and the arguments of the command.

    Raises:
      InputError: There is no mask, or a mask or flag is invalid.
    """
    expressions = cli.parse(argv, USAGE + _masks(argv), positional=True)
    if not expressions:
        raise cli.InputError(f"no mask: write hpnlp draw {EXAMPLE}")
    from hpnlp import mask_plot
    from hpnlp.mask_parser import parse_mask

    f, out = cli.FLAGS, cli.plot_path(cli.FLAGS.out, "pattern.png")
    masks = {text: parse_mask(text) for text in expressions}
    print(f"{mask_plot.draw(masks, out, length=f.length, keys=f.keys, block=f.block)}\n{out}")


def _masks(argv: Sequence[str]) -> str:
    """All masks with the first line of their documentation, for --help; empty without --help."""
    if "--help" not in argv:
        return ""
    from hpnlp.mask_parser import NAMES, signature

    lines = [f"  {signature(name)}\n      {(inspect.getdoc(NAMES[name]) or '').splitlines()[0]}" for name in NAMES]
    return "\nMasks:\n" + "\n".join(lines)
