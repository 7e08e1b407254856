"""Arguments and masks that linear attention cannot honour raise an error."""

import pytest

from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Causal, Full, Window
from hpnlp.types import InputError

NAMES = "linear", "retention", "gla", "gated_delta"


@pytest.mark.parametrize("name", NAMES)
def test_other_masks_raise(name):
    mixer = MIXERS[name]()
    assert mixer.within(Causal()) == Causal()
    for mask in (Window(3, 0), Causal() & Window(3), *([] if mixer.traits.bidirectional else [Full()])):
        with pytest.raises(InputError, match="cannot apply the mask"):
            mixer.within(mask)


@pytest.mark.parametrize("name", NAMES)
def test_invalid_arguments_raise(name):
    for chunk in (0, 48):
        with pytest.raises(InputError, match=rf"{name}\(chunk={chunk}\): expected a power of 2"):
            MIXERS[name](chunk)


def test_invalid_ranks_and_convolutions_raise():
    with pytest.raises(InputError, match=r"gla\(rank=0\)"):
        MIXERS["gla"](rank=0)
    for conv in (-1, 129):
        with pytest.raises(InputError, match=rf"gated_delta\(conv={conv}\)"):
            MIXERS["gated_delta"](conv=conv)
