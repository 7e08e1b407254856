"""Links, exponents, formulas and inline code of the documentation."""

import importlib.util
import re
from pathlib import Path

import pytest


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page_text = load("page_text")


@pytest.mark.parametrize(
    "before, after",
    {
        "<p>arXiv 2502.13189, eq. 5</p>": '<p><a href="https://arxiv.org/abs/2502.13189">arXiv 2502.13189</a>, eq. 5</p>',
        "<td>arXiv:1706.03762</td>": '<td><a href="https://arxiv.org/abs/1706.03762">arXiv:1706.03762</a></td>',
        '<a href="x">arXiv 2502.13189</a>': '<a href="x">arXiv 2502.13189</a>',
        "<p>2^20, N^0.74, H^(-1/4), n^-1.</p>": "<p>2<sup>20</sup>, N<sup>0.74</sup>, H<sup>-1/4</sup>, n<sup>-1</sup>.</p>",
        "<pre><code>2^20 --steps=3</code></pre>": "<pre><code>2^20 --steps=3</code></pre>",
        "<code>2^20</code>": "<code>2^20</code>",
        "<code>hpnlp plan --out=x.png</code>": '<code>hpnlp plan <span class="whole">--out=x.png</span></code>',
        "<td>as --config.a_b=RUN.</td>": '<td>as <code><span class="whole">--config.a_b=RUN</span></code>.</td>',
        "<p>a -- b, c--d</p>": "<p>a -- b, c--d</p>",
        f"<code>--x={'y' * 60}</code>": f'<code><span class="long">--x={"y" * 60}</span></code>',
        "<p>a<br>b <!-- 2^3 --> c^2</p>": "<p>a<br>b <!-- 2^3 --> c<sup>2</sup></p>",
    }.items(),
)
def test_text_changes_by_the_element_around_it(before, after):
    assert page_text.transform(before) == after


def test_formulas_are_outlines_in_the_colour_of_the_text():
    svg = page_text.formula(r"\frac{T^2}{x < y}", True)
    assert svg.startswith('<div class="formula"><svg') and svg.count("<path") == 1 and "fill" not in svg
    commands = re.findall(r"[A-Z][^A-Z]*", re.search(r' d="([^"]*)"', svg)[1])
    points = {"M": 1, "L": 1, "Q": 2, "C": 3, "Z": 0}
    assert all(len(command[1:].split()) == points[command[0]] for command in commands) and len(commands) > 100
    assert r'aria-label="\frac{T^2}{x &lt; y}"' in svg
    with pytest.raises(ValueError, match="nosuch"):
        page_text.formula(r"\nosuch{x}", False)


def test_code_in_cells_of_tables_keeps_its_characters():
    cell = load("hooks").cell
    assert cell("`a | *b_c*` or x < y") == "<code>a &#124; &#42;b&#95;c&#42;</code> or x &lt; y"
