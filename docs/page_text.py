"""Text of the pages: links of arXiv identifiers, exponents, formulas as pictures, and flags that are code and stay whole.

Formulas are `$...$` and `$$...$$` in Markdown, written in the subset of TeX that matplotlib draws. They become SVG when the
site is built, so that the pages need neither a script nor a network.
"""

from __future__ import annotations

import functools
import html
import re
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.path import Path
from matplotlib.textpath import TextPath

if TYPE_CHECKING:  # The tests import this file where mkdocs is not installed.
    from mkdocs.structure.pages import Page

# Elements whose text stays as it is.
VERBATIM = {"pre", "a", "autoref", "script", "style", "svg"}
VOID = {"br", "hr", "img", "input", "link", "meta", "source", "wbr"}
ARXIV = re.compile(r"\barXiv[: ](\d{4}\.\d{4,5})(v\d+)?\b")
# An exponent of a number, a name or a closing parenthesis: 2^20, N^0.74, H^(-1/4).
EXPONENT = re.compile(r"(?<=[\w)])\^(-?[\w.]*\w|\([^()]{1,20}\))")
# A flag in plain text, as in the help of commands: --data.path=PATH.
FLAG = re.compile(r"(?<![\w`-])--[a-z][\w.]*(?:=[\w.@:/]*\w)?")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
FORMULA_TEXT = re.compile(r"\\[(\[]")
# A browser may break a line after these characters.
BREAKS = re.compile(r"[-/|?!]")
EM = 1000  # units of a picture of a formula in the size of its font
COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}
LONG = 60  # characters of a word that may be longer than a line


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    if page.file.src_uri.endswith(".ipynb"):
        return content
    return FORMULA.sub(lambda match: formula(html.unescape(match[3]), display=match[2] == "["), transform(content))


def transform(content: str) -> str:
    """Changes the text between the tags of a page, by the element in which it stands."""
    pieces, open_elements = [], []
    for piece in re.split(r"(<!--.*?-->|<[^>]+>)", content, flags=re.DOTALL):
        if piece.startswith("<!"):
            pieces.append(piece)
        elif tag := re.match(r"<(/?)([a-zA-Z][\w-]*)", piece):
            name = tag[2].lower()
            if tag[1]:
                while open_elements and open_elements.pop() != name:
                    pass
            elif name not in VOID and not piece.endswith("/>"):
                open_elements.append(name)
            pieces.append(piece)
        else:
            pieces.append(text(piece, open_elements))
    return "".join(pieces)


def text(piece: str, open_elements: list[str]) -> str:
    if "pre" in open_elements:
        return piece
    if "code" in open_elements:
        return "".join(map(word, re.split(r"(\s+)", piece)))
    if VERBATIM.intersection(open_elements) or FORMULA_TEXT.match(piece):
        return piece
    piece = FLAG.sub(lambda match: f"<code>{word(match[0])}</code>", piece)
    linked = ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">\g<0></a>', piece)
    return EXPONENT.sub(lambda match: f"<sup>{match[1].removeprefix('(').removesuffix(')')}</sup>", linked)


def word(piece: str) -> str:
    """A word of inline code, in one piece where a browser would break it; a word that may be longer than a line can break."""
    if len(html.unescape(piece)) > LONG:
        return f'<span class="long">{piece}</span>'
    return f'<span class="whole">{piece}</span>' if BREAKS.search(piece) else piece


@functools.cache
def formula(tex: str, display: bool) -> str:
    """SVG of a formula, in the colour and size of the text around it. Raises ValueError where matplotlib cannot parse it."""
    with matplotlib.rc_context({"mathtext.fontset": "stix"}):
        outline = TextPath((0, 0), f"${tex.strip()}$", size=EM)
    box = outline.get_extents()
    strokes = "".join(
        COMMANDS[code] + " ".join(f"{x:.0f},{-y:.0f}" for x, y in points.reshape(-1, 2) if code != Path.CLOSEPOLY)
        for points, code in outline.iter_segments(simplify=False)
    )
    view = f"{box.x0:.0f} {-box.y1:.0f} {box.width:.0f} {box.height:.0f}"
    style = f"height: {box.height / EM:.3f}em; vertical-align: {box.y0 / EM:.3f}em"
    label = html.escape(tex.strip())
    opening = f'<svg class="formula" role="img" aria-label="{label}" viewBox="{view}" style="{style}">'
    picture = f'{opening}<path d="{strokes}"/></svg>'
    return f'<div class="formula">{picture}</div>' if display else picture
