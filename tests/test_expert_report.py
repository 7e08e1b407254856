"""The report's section on experts: counts against the hash router, whose choices are known, and the files that are written."""

import dataclasses
import json

import matplotlib.image
import numpy as np
import pytest

from hpnlp.data import corpus
from hpnlp.data.tokenizers import ByteTokenizer
from hpnlp.models.lm import LM, LMConfig
from hpnlp.ops import moe
from hpnlp.report import experts, single
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training.config import Config
from tests.drawn import drawn_params
from tests.test_report import Corpus, result

SIZES = {"layers": 3, "unroll": 1, "dim": 8, "heads": 2, "mlp_dim": 4, "vocab": 256, "max_len": 16, "mlp": "hash(4,2)"}
SIZES |= {"form": "block(mlp='gelu'),block,block(mlp='hash(6,1)')"}


def batch(seed=0):
    draw = np.random.default_rng(seed)
    tokens = draw.integers(97, 105, (2, 16)).astype(np.int32)
    segments = (np.arange(16) < np.array([[16], [9]])).astype(np.int32)
    positions = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    weights = segments.astype(np.float32)
    return {"tokens": tokens, "labels": tokens, "segment_ids": segments, "positions": positions, "weights": weights}


@pytest.fixture(scope="module")
def outcome():
    model = LM(LMConfig(**SIZES))
    return Outcome(Config(model=model.config), None, model, drawn_params(model, 0.5), {})


@pytest.fixture(scope="module")
def uses(outcome):
    return experts.counted_use(outcome, [batch(), batch(1)])


def test_use_equals_the_choices_of_the_router_without_padding(uses):
    assert [(layer, len(use.load)) for layer, use in uses.items()] == [(1, 4), (2, 6)]
    ids = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in (batch(), batch(1))])
    chosen = np.asarray(moe.hashed_experts(ids, 2, 4, 0))
    use = uses[1]
    assert use.tokens == 50 and use.largest_gates == pytest.approx(25.0) and use.has_pairs
    np.testing.assert_array_equal(use.load, np.bincount(chosen.reshape(-1), minlength=4))
    pairs = np.zeros((4, 4), int)
    for first, second in chosen:
        pairs[first, second] += 1
        pairs[second, first] += 1
    np.testing.assert_array_equal(use.pairs - np.diag(use.load), pairs)
    assert np.nansum(use.shared_use, axis=1)[use.load > 0] == pytest.approx(1.0)
    assert uses[2].tokens == 50 and uses[2].load.sum() == 50 and not uses[2].has_pairs


def test_a_dropped_token_has_no_gate():
    use = experts.Use.zeros(2, 4)
    use.add(np.array([[0.5, 0.0], [0.0, 0.0]]), np.array([1, 2]))
    assert (use.tokens, use.routed, use.largest_gate) == (2, 1, 0.5)


def test_specific_words_are_those_of_the_expert(uses):
    use = uses[2]
    for expert in range(6):
        words = use.specific_words(expert)
        assert all(int(moe.hashed_experts(np.array([word]), 1, 6, 0)[0, 0]) == expert for word, _, _ in words)
        assert sum(share for _, share, _ in words) <= 1.0 + 1e-6
        assert bool(words) == bool(use.load[expert])


def test_models_without_experts_or_parameters_have_no_section(outcome):
    dense = LM(dataclasses.replace(outcome.model.config, mlp="gelu", form="block"))
    assert single.has_experts(outcome)
    assert not single.has_experts(dataclasses.replace(outcome, model=dense))
    assert not single.has_experts(dataclasses.replace(outcome, params=None))


def test_reports_of_models_with_experts_have_a_section_and_pictures(outcome, uses, tmp_path, monkeypatch):
    class Text(Corpus, corpus.Corpus):
        tokenizer = ByteTokenizer()

        def __init__(self):
            pass

        def heldout(self, **options):
            assert options["limit"] == experts.TOKENS // (64 * 256)
            return iter(["batches"])

    monkeypatch.setattr(experts, "counted_use", lambda outcome, batches: uses if list(batches) == ["batches"] else {})
    lines = [{"step": step, "loss": 5.0, "load_max": 2.0, "load_min": 0.5} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = dataclasses.replace(
        outcome.config, data=dataclasses.replace(outcome.config.data, seq_len=256, batch_size=64)
    )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, sample=0))
    report = single.write(tmp_path, config, result(model=outcome.model, params=outcome.params, dataset=Text()))
    text = (tmp_path / "report.md").read_text()
    assert "| 1 | 4 | 2.00 |" in text and "| 2 | 6 | 1.00 |" in text and "(expert_pairs.png)" in text
    assert "Tokens most specific to the experts of layer 2:" in text
    assert report["expert_load_max"] >= 1.0 and 0.5 <= report["expert_largest_gate"] <= 1.0
    for name in experts.PICTURES:
        assert np.ptp(matplotlib.image.imread(tmp_path / name)[..., :3]) > 0.5
