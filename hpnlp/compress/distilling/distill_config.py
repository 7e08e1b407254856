"""The config of a distillation."""

from __future__ import annotations

import dataclasses

from hpnlp.types import InputError, check_options, option

INITS = ("none", "alternate", "bottom")
DEFAULT_LOSSES = "hinton"


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """A teacher whose outputs the model learns."""

    teacher: str = option(
        "",
        "A run's workdir (its best checkpoint is used) or a directory in the Hugging Face layout with the same task, tokenizer "
        'and labels, "" for no teacher.',
    )
    losses: str = option(
        DEFAULT_LOSSES,
        "Sum of entries of DISTILLATION_LOSSES with their weights, as in "
        '"logits(temperature=2, weight=0.5),labels(0.5),hidden(((4, 2), (8, 4)))"; or a recipe: hinton, regression_only, '
        "distilbert, tinybert_intermediate, tinybert_prediction, tinybert, mobilebert.",
    )
    init: str = option(
        "none",
        "Layers of the teacher that the student starts from, together with all parameters outside of the layers: alternate, "
        "bottom; none for random parameters.",
        among=INITS,
    )
    cache: str = option(
        "",
        "Directory in which logits of the teacher are stored and from which they are read, for losses of logits alone; "
        '"" to run the teacher in every step.',
    )
    cache_top_k: int = option(0, "Number of the largest logits of a label that are stored, 0 for all.", least=0)

    def __post_init__(self) -> None:
        check_options(self, "distill")
        if not self.teacher:
            for name in ("cache", "init"):
                if (value := getattr(self, name)) not in ("", "none"):
                    raise InputError(f"distill.{name}={value!r} without a teacher: set distill.teacher as well")
        if self.cache_top_k and not self.cache:
            raise InputError(f"distill.cache_top_k={self.cache_top_k}: set distill.cache, a directory, as well")
        if self.losses != DEFAULT_LOSSES or self.cache:
            self._check_losses()

    def _check_losses(self) -> None:
        """Raises InputError for losses that are not valid, or that need more than the stored logits."""
        from hpnlp.compress.distilling.distillation_terms import parse_terms  # only runs with a teacher need it

        terms = parse_terms(self.losses)
        if self.cache and (others := [term.kind for term in terms if term.taps - {"logits"}]):
            raise InputError(
                f"distill.cache={self.cache!r} stores logits, and distill.losses={self.losses!r} has {others[0]}, which needs "
                "states of the teacher: leave out distill.cache, or this loss"
            )
        if self.cache_top_k and any(term.kind == "regression" for term in terms):
            raise InputError(
                f"distill.cache_top_k={self.cache_top_k}: regression needs all logits: set distill.cache_top_k=0"
            )
