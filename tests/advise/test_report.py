"""The words of a report of `hpnlp advise`."""

import dataclasses

from hpnlp.advise import AdviseSettings, report
from hpnlp.advise.kept_quality import KeptQuality, subset
from hpnlp.training.config import default, resolve
from tests.advise.test_search import searched, trained  # noqa: F401  (fixture)


def test_too_few_examples_are_counted_by_the_answers_that_differ(trained):  # noqa: F811
    advice, _ = searched(trained, settings=AdviseSettings(only=("int8",), batches=10), ratios={"int8": 0.5})
    original = advice.baseline.models[0]
    assert original.examples is not None
    examples = subset(original.examples, original.examples.identity < 160)
    original = dataclasses.replace(original, scores={"accuracy": 0.4313}, examples=examples)
    quality = KeptQuality(1.0, 0.7949, 0.97, 0.3, 80, has_learned=True, discordant=0.0)
    values = default("classification")
    values.update_from_flattened_dict({"data.path": "reviews.csv"})
    text = report.render(
        dataclasses.replace(
            advice,
            config=resolve(values),
            baseline=dataclasses.replace(advice.baseline, models=(original,), trivial=0.2375),
            findings=[dataclasses.replace(advice.findings[0], quality=quality, is_kept=False)],
            recommended=None,
            seconds=900.0,
        )
    )
    assert "is shown to keep 97 % of the quality" in text and "keeps 100 % of the quality, at least 79.4 %" in text
    assert "losses under 4.3 points cannot be excluded for models that differ on 2.4 % of them" in text
    assert "--keep=0.97 needs about 4,500 in each half: leave out --batches, or lower --keep." in text
    assert "| technique | time (unchanged: 1) |" in text and "| 100 %, at least 79.4 % | loss not excluded |" in text
    assert "the search took 15.0 min of 10.0" in text
