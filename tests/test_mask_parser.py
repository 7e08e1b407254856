"""Mask expressions equal the masks that Python evaluates them to; all other text is an error that names the place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpnlp.mask_parser import NAMES, parse_mask, signature
from hpnlp.ops import attention
from hpnlp.ops.attention import Causal, Full, Global, GlobalAt, PerHead, RandomBlocks, Sinks, Window
from hpnlp.types import InputError


def test_expression_equals_python_value():
    for text, mask in (
        ("Causal()", Causal()),
        ("Causal() & (Window(64) | Global(8))", Causal() & (Window(64) | Global(8))),
        ("~Window(4, right=2).shift(-3)", ~(Window(4, 2).shift(-3))),
        ("(~Window(4)).shift(n=3)", (~Window(4)).shift(3)),
        (" Causal()\n  & Sinks( 4 ) ", Causal() & Sinks(4)),
        ("GlobalAt((0, 7)) | GlobalAt([3])", GlobalAt((0, 7)) | GlobalAt((3,))),
        ("RandomBlocks(8, 2, among=None)", RandomBlocks(8, 2)),
        ("PerHead((Causal(), ~Full())) & Window(3)", PerHead((Causal(), ~Full())) & Window(3)),
        ("PerHead((Causal(),)).shift(2)", PerHead((Causal(),)).shift(2)),
        ("sparse_transformer_strided(8)", attention.sparse_transformer_strided(8)),
        (
            "sparse_transformer_fixed(8, 2, heads=4, causal=False)",
            attention.sparse_transformer_fixed(8, 2, heads=4, causal=False),
        ),
        ("bigbird(16, among=4)", attention.bigbird(16, among=4)),
    ):
        assert parse_mask(text) == mask


def test_every_exported_pattern_without_a_function_can_be_named():
    exported = {
        name for name in attention.__all__
        if isinstance(entry := getattr(attention, name), type) and issubclass(entry, attention.Mask)
    }  # fmt: skip
    assert exported - set(NAMES) == {"Mask", "Where"}


def test_invalid_expressions_raise_with_their_place():
    for text, message in (
        ("", "'', column 1: invalid syntax: expected masks, such as Causal()"),
        ("Causal() & Windw(64)", "column 12, 'Windw': unknown mask 'Windw': did you mean 'Window'?"),
        ("é & Windo", "column 1, 'é': unknown mask 'é': known: Blockwise, Causal,"),
        ("Window(é=Windo)", "column 10, 'Windo': unknown mask 'Windo': did you mean 'Window'?"),
        ("Causal() & (Window(64)", "column 12: '(' was never closed: expected masks"),
        ("Causal() & Window", "column 12, 'Window': expected a call with parentheses: Window(left, right=None)"),
        ("Causal().shfit(3)", "column 1, 'Causal().shfit': unknown method 'shfit': did you mean 'shift'?"),
        ("Window(-1)", "column 1, 'Window(-1)': mask 'Window(-1)': left=-1: expected at least 0"),
        ("Window(3, rigth=2)", "mask 'Window' has no argument 'rigth': did you mean 'right'?"),
        ("Window(1.5)", "column 8, '1.5': expected whole numbers below 2 ** 31"),
        ("Window(2 ** 3)", "column 8, '2 ** 3': expected masks"),
        ("Causal() and Full()", "column 1, 'Causal() and Full()': expected & in place of `and`"),
        ("Causal(), Full()", "expected masks"),
        ("Causal(**{})", "column 10, '{}': expected masks"),
        ("Window(5)(3)", "column 1, 'Window(5)': expected masks"),
        ("Where(lambda i, j: True)", "Where takes a function, which text cannot contain: call hpnlp.mask_plot.draw"),
        ("longformer(Causal())", "mask 'longformer' has window=Causal(): expected int"),
        ("PerHead((PerHead((Causal(),)),))", "column 1, 'PerHead((PerHead((Causal(),)),))': "),
        ("~" * 9000 + "Full()", "nested too deeply"),
        ("__import__('os').system('true')", "column 1, '__import__': unknown mask '__import__'"),
    ):
        with pytest.raises(InputError) as caught:
            parse_mask(text)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


@given(st.text(max_size=20) | st.text("CausalWindow()&|~.shift 12,=", max_size=30))
def test_any_text_gives_a_mask_or_an_input_error(text):
    try:
        mask = parse_mask(text)
    except InputError:
        return
    assert isinstance(mask, attention.Mask | PerHead)


def test_signature_has_arguments_and_defaults():
    assert signature("Window") == "Window(left, right=None)"
    assert signature("longformer") == "longformer(window=512, global_tokens=0, dilation=1, *, causal=False)"
