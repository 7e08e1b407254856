"""Factors of auxiliary losses, `optimizer.aux`; `test_step` tests what they do to gradients."""

import pytest

from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.messages import raises


def test_names_and_factors_are_parsed():
    assert OptimizerConfig().aux_weights() == {}
    weights = OptimizerConfig(aux="balance_loss(0.01), z_loss(2)").aux_weights()
    assert weights == {"balance_loss": 0.01, "z_loss": 2.0}


def test_invalid_factors_raise():
    for aux in (
        "z_loss",
        "z_loss(-1)",
        "z_loss(1)*2",
        "z_loss(1),z_loss(2)",
    ):
        raises("expected the name of each loss once, with a factor of at least 0", OptimizerConfig, aux=aux)


def test_losses_that_no_layer_reports_raise():
    model = LM(LMConfig(layers=1, dim=8, heads=2, mlp_dim=8, vocab=9, max_len=8))
    with pytest.raises(InputError, match=r"optimizer.aux='z_loss\(1\)' weights z_loss, a loss that no layer reports"):
        make_trainer(model, OptimizerConfig(aux="z_loss(1)"), Plan("single"), steps=1)
