"""The language model's part of reports: bits per byte beside those of compressors, a sample, and rankings of runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpnlp.data.baselines import NAMES, WINDOW
from hpnlp.nn.output import is_normalized
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.reports.reporting import NOT_FINITE, Outcome, Ranking, Report, Section, TaskReport, decimals
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.corpus import Corpus
    from hpnlp.tasks.task import RunConfig

BITS_PER_BYTE = "held-out bits/byte"
PERPLEXITY = "held-out perplexity"
PROMPT = "def "  # the report's command of text generation continues it

# With fewer held-out bytes, compressors have seen too little to reach their rate, and the model's score is mostly chance.
MIN_COMPARED_BYTES = 10_000

# Losses above this have no meaningful perplexity, and e to their power may overflow.
MAX_PERPLEXITY_LOSS = 100


class LanguageModelReport(TaskReport):
    """The language model's part of reports and comparisons."""

    numbers_compared: Mapping[str, bool] = {
        "heldout_bits_per_byte": True,
        "heldout_loss": True,
        "heldout_bytes": False,
    }
    unit = "token"
    samples_text = True

    def numbers(self, dataset: Corpus, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, identity of the held-out text, and bits per byte of compressors on the same text.

        The bits per byte of a tokenizer that loses text or of an output layer that gives no probabilities are None.
        """
        heldout_text = dataset.read_heldout()
        return {
            "heldout_bits_per_byte": scores.get("bits_per_byte"),
            "heldout_loss": scores["loss"],
            "heldout_bytes": len(heldout_text),
            "heldout_digest": dataset.heldout_digest,
            # Unlike heldout_digest, which is of tokens, this one does not depend on the tokenizer.
            "heldout_text_digest": hashlib.blake2b(heldout_text, digest_size=16).hexdigest(),
            **dict.fromkeys(NAMES),
            **baselines,
        }

    def fault(self, report: Report) -> str:
        for name in ("heldout_digest", "heldout_text_digest"):  # absent from reports of early versions
            if not isinstance(report.get(name) or "", str):
                return f"{name} is {report[name]!r:.40}"
        if "model.output" not in report["config"]:
            return "it lacks config[model.output]"
        return "" if isinstance(report["config"]["model.output"], str) else "config[model.output] is no spec"

    def verdict(self, report: Report) -> str:
        """Comparison of the model's bits per byte with those of general compressors, or the reason why there is none.

        The model is reported as the best only if xz with the training text as its dictionary was measured and needs more bits,
        and if the model did not start from another model, which has seen more text.
        """
        if obstacle := _obstacle(report):
            return obstacle
        bits = {"the model": report["heldout_bits_per_byte"]}
        bits |= {name: value for name, value in _compressors(report) if value is not None}
        model = bits["the model"]
        figures = {name: f"{name} {value:.3f}" for name, value in bits.items() if name != "the model"}
        if not figures:
            return f"The model needs {model:.3f} bits per byte of held-out text; compressors were not measured."
        best, second, *_ = sorted(bits, key=lambda name: bits[name])
        if unfair := _unfairness(report, best):
            compressors = ", ".join(figures.values())
            text = f"The model needs {model:.3f} bits per byte of held-out text; {compressors}"
            return f"{text}. {unfair}: this says little of the model."
        if best == "the model":
            lead = 100 * (1 - model / bits[second])
            text = f"The model needs the fewest bits: {model:.3f} per byte of held-out text, {lead:.0f} % fewer than {second}"
        else:
            excess = 100 * (model / bits[best] - 1)
            text = f"{best} needs the fewest bits: {bits[best]:.3f} per byte of held-out text; "
            text += f"the model {model:.3f}, {excess:.0f} % more"
        compressors = ", ".join(figure for name, figure in figures.items() if name != best)
        return f"{text} ({compressors}). Neither the model's own size nor the training text is counted."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        loss, gives_probabilities = report["heldout_loss"], is_normalized(report["config"]["model.output"])
        perplexity = None  # given only where bits per byte, which compare across tokenizers, are unknown
        if gives_probabilities and report["heldout_bits_per_byte"] is None and loss is not None:
            perplexity = f"{math.exp(loss):.5g}" if loss < MAX_PERPLEXITY_LOSS else None
        compressors = {f"{name}, the same bytes": decimals(bits) for name, bits in _compressors(report)}
        if perplexity and report.get("xz_bits_per_byte") and report.get("xz_trained_bits_per_byte") is None:
            compressors[list(compressors)[-1]] = "- (the tokenizer does not keep every byte)"
        return [
            ("held-out bytes", f"{report['heldout_bytes']:,}"),
            ("held-out bits per byte", decimals(report["heldout_bits_per_byte"])),
            *compressors.items(),
            ("held-out loss, nats per token" if gives_probabilities else "held-out loss", decimals(loss)),
            *([(PERPLEXITY, perplexity)] if perplexity else []),
        ]

    def section(self, outcome: Outcome) -> Section:
        """A sample of generated text."""
        length = outcome.config.train.sample
        if outcome.params is None or not length:  # `hpnlp generate` reads the checkpoint instead
            return Section()
        from hpnlp.models.decode import sample_text  # generation, which a run without a sample does not load

        sample = sample_text(outcome.model, outcome.params, outcome.dataset.tokenizer, length)
        return Section(f"A sample:\n\n```\n{sample.rstrip()}\n```" if sample else "")

    def levels(self, report: Report) -> dict[str, float]:
        """Losses of compressors, if tokens are bytes."""
        if report["config"]["data.tokenizer"] != "bytes":
            return {}
        return {f"held-out: {name}": bits * math.log(2) for name, bits in _compressors(report) if bits}

    def commands(self, workdir: Path, config: RunConfig) -> dict[str, list[str]]:
        if not config.model.decodes:
            return {}
        return {"continue a text": ["generate", str(workdir), *_generation(workdir, config)]}

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by held-out bits per byte.

        If a tokenizer loses text, so that its run has none, the score is perplexity (e to the power of the held-out loss) of
        the runs that were scored on the same tokens.
        """
        unscored = {name: reason for name, report in reports.items() if (reason := _reason_unscored(report))}
        scored = {name: report for name, report in reports.items() if name not in unscored}
        if all(report["heldout_bits_per_byte"] is not None for report in scored.values()):
            scores = {name: report["heldout_bits_per_byte"] for name, report in scored.items()}
            # Bits are proportional to the loss, by the number of tokens of a byte.
            slopes = {
                name: scores[name] / report["heldout_loss"] for name, report in scored.items() if report["heldout_loss"]
            }
            remark = _different_texts(scored, scores)
            return Ranking(BITS_PER_BYTE, scores, unscored, remark=remark, metric="loss", slopes=slopes)
        # Perplexities compare on the same tokens only: those that most runs were scored on.
        digests = {name: report.get("heldout_digest") for name, report in scored.items()}
        most_common = max(filter(None, digests.values()), key=list(digests.values()).count, default="")
        unknown = "its report lacks the digest of the tokens that it was scored on: run its training command again"
        elsewhere = "scored on other tokens than the runs above, so that perplexities do not compare"
        unscored |= {
            name: elsewhere if digest else unknown for name, digest in digests.items() if digest != most_common
        }
        scored = {name: scored[name] for name, digest in digests.items() if digest == most_common}
        scores = {name: math.exp(min(report["heldout_loss"], MAX_PERPLEXITY_LOSS)) for name, report in scored.items()}
        remark = _different_texts(scored, scores)
        options: dict[str, Any] = {"digits": ".5g", "is_ratio": True, "metric": "loss", "slopes": scores}  # exp' is exp
        return Ranking(PERPLEXITY, scores, unscored, remark=remark, **options)


def _obstacle(report: Report) -> str:
    """Sentence on why a model cannot be compared with compressors; "" if it can."""
    if report["heldout_loss"] is None:
        return NOT_FINITE
    if report["heldout_bits_per_byte"] is None:
        if is_normalized(report["config"]["model.output"]):
            reason = "The tokenizer does not keep every byte"
        else:
            reason = "The output layer gives no probabilities of tokens"
        return f"{reason}, so the loss cannot be put beside a compressor's."
    if report["heldout_bytes"] < MIN_COMPARED_BYTES:
        return (
            f"{report['heldout_bytes']:,} bytes of held-out text are too few to put the model beside compressors: raise "
            "data.heldout or data.heldout_bytes, or pass data.heldout_path=PATH."
        )
    return ""


def _unfairness(report: Report, best: str) -> str:
    """Clause on why a comparison with compressors shows nothing; "" if it does. `best` needs the fewest bits."""
    if report.get("xz_trained_bits_per_byte") is None:
        return "The compressors have not seen the training text, and xz after it could not be measured"
    source = report["config"].get("train.init_from")
    if source and best == "the model":
        return f"The model started from {source}, and the compressors have not seen the text that this was trained on"
    return ""


def _compressors(report: Report) -> list[tuple[str, float | None]]:
    """`(name, bits per byte)` of each compressor; xz names the share of the training text that its dictionary held."""
    names = dict(NAMES)
    if 0 < (share := report.get("xz_trained_share") or 0) < 1:
        size = report.get("xz_trained_bytes", WINDOW) / 2**20  # absent from reports of early versions
        seen = f"the last {size:.2g} MiB ({100 * share:.2g} %) of the training text"
        names["xz_trained_bits_per_byte"] = f"xz -9e after {seen}"
    optional = ("ppmd_trained_bits_per_byte", "zpaq_trained_bits_per_byte")  # a row only where they are installed
    figures = {field: report.get(field) for field in names}
    return [(names[field], bits) for field, bits in figures.items() if bits is not None or field not in optional]


def _reason_unscored(report: Report) -> str:
    """Reason why a run's loss cannot be compared with that of any other run; "" if it can."""
    if report["heldout_loss"] is None:
        return "its held-out loss is not finite"
    output = report["config"]["model.output"]
    try:
        if is_normalized(output):
            return ""
    except InputError as error:
        return str(error)
    return f"{output} gives no probabilities of tokens, and its loss is of a kind of its own"


def _different_texts(reports: Mapping[str, Report], scores: Mapping[str, float]) -> str:
    """Sentence with the held-out text of each run, best first; "" if it is the same for all.

    Reports of early versions have only its size.
    """
    digests = {report.get("heldout_text_digest") for report in reports.values()} - {None}
    sizes = {report["heldout_bytes"] for report in reports.values()}
    if len(digests) < 2 and len(sizes) < 2:
        return ""
    texts = "; ".join(
        f"{name}: {report['heldout_bytes']:,} bytes, digest {str(report.get('heldout_text_digest', 'unknown'))[:8]}"
        for name, report in sorted(reports.items(), key=lambda item: scores[item[0]])
    )
    return f"The runs were scored on different held-out text: quality cannot be compared ({texts})."


def _generation(workdir: Path, config: RunConfig) -> list[str]:
    """Flags of `hpnlp generate` that the model's positions, output layer and vocabulary allow."""
    prompt, length = [f"--prompt={PROMPT}"], len(PROMPT)
    vocabulary = vocabularies.load(workdir)
    if vocabulary is not None:
        try:
            length = len(vocabulary.tokenizer.encode_prompt(PROMPT))
        except InputError:  # a vocabulary of words without the prompt's: generate without a prompt
            prompt, length = [], 1
    tokens = 200
    if config.model.position == "learned":
        tokens = max(1, min(tokens, (config.model.max_len or config.data.seq_len) - length))
    choice = ["--temperature=0.8", "--top_p=0.95"] if is_normalized(config.model.output) else ["--temperature=0"]
    return [*prompt, f"--tokens={tokens}", *choice]
