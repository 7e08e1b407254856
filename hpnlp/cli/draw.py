"""`hpnlp draw`: a picture of attention masks, and what they cost beside dense attention."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from absl import flags

from hpnlp import cli

EXAMPLE = '"Causal() & (Window(64) | Global(8))"'
USAGE = f"""
hpnlp draw {EXAMPLE} [MASK ...] [--length=256] [--keys=S] [--block=N] [--out=pattern.png]

Draws who may see whom, and the tiles that the executor visits; several masks make a gallery. Prints how many tiles are
live, and their share of dense attention's tiles and pairs: the predicted cost, and what it is at best. Masks combine
with & | ~ and .shift(n); PerHead((MASK, MASK)) gives each head one. In what follows i is the query, j the key, from 0.
A mask that is a function, `Where`, is drawn from Python: hpnlp.mask_plot.draw({{"mine": Where(function)}}, "mine.png").
"""

flags.DEFINE_integer("length", 256, "Queries. Beyond 1024 x 1024 pairs, a pixel is a square of tiles.")
flags.DEFINE_integer("keys", None, "Keys; as many as queries by default.")
flags.DEFINE_integer("block", None, "Rows and keys of a tile; by default a sixteenth of the longer side, at most 128.")
flags.DEFINE_string("out", "pattern.png", "File of the picture, or a directory for pattern.png.")


def run(argv: Sequence[str]) -> None:
    expressions = cli.parse(argv, USAGE + _masks(argv), positional=True)
    if not expressions:
        raise cli.InputError(f"no mask is given: write hpnlp draw {EXAMPLE}")
    from hpnlp import mask_plot
    from hpnlp.mask_parser import parse_mask

    f, out = cli.FLAGS, cli.plot_path(cli.FLAGS.out, "pattern.png")
    masks = {text: parse_mask(text) for text in expressions}
    print(f"{mask_plot.draw(masks, out, length=f.length, keys=f.keys, block=f.block)}\n{out}")


def _masks(argv: Sequence[str]) -> str:
    """Every mask that can be named, with its first line of documentation, for --help."""
    if "--help" not in argv:
        return ""
    from hpnlp.mask_parser import NAMES, signature

    lines = [f"  {signature(name)}\n      {(inspect.getdoc(NAMES[name]) or '').splitlines()[0]}" for name in NAMES]
    return "\nMasks:\n" + "\n".join(lines)
