"""Measures how many seeded faults the tests detect: each is one wrong statement, such as a sign, an edge or a missing term.

    python experiments/bench/faults.py [--only=window_edge,kv_len]

Each fault is written into a copy of the source tree, and the tests that are likeliest to detect it run until the first failure:
those of `make test`, and, if they pass, those of `make test-all`. A fault whose text is no longer in its file is an error:
adapt it to the code. About fifteen minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags
from fault import Fault
from mixer_faults import MIXER_FAULTS
from wiring_faults import WIRING_FAULTS

from hpnlp import measure

ROOT = Path(__file__).parents[2]

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names of the faults to seed; empty for all.")
flags.DEFINE_integer("limit", 600, "Seconds after which the tests of a fault are stopped.")
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")


FAULTS = (
    Fault(
        "window_edge",
        "Window excludes the key at its left edge",
        "hpnlp/ops/attention/masks/patterns.py",
        "return (k - q >= -self.left) & (k - q <= self._right)",
        "return (k - q > -self.left) & (k - q <= self._right)",
        "tests/ops/attention/masks tests/ops/attention",
    ),
    Fault(
        "strided_tile",
        "Strided.tile drops tiles whose only multiple of the stride is at their lower bound",
        "hpnlp/ops/attention/masks/patterns.py",
        "self.stride * self.stride >= low,",
        "self.stride * self.stride > low,",
        "tests/ops/attention/block_sparse/test_block_mask.py tests/ops/attention",
    ),
    Fault(
        "segment_bound",
        "the scan compares the first segment of the queries with the first, not the last, of the keys",
        "hpnlp/ops/attention/block_sparse/steps.py",
        'q_bounds("segment", jnp.min) <= k_bounds("segment", jnp.max)',
        'q_bounds("segment", jnp.min) <= k_bounds("segment", jnp.min)',
        "tests/ops/attention/test_attend.py tests/ops/attention",
    ),
    Fault(
        "kv_len",
        "kv_lengths admit one key too many",
        "hpnlp/ops/attention/block_sparse/tile.py",
        "(keys.index[..., None, :] < lengths[..., None, None])",
        "(keys.index[..., None, :] <= lengths[..., None, None])",
        "tests/ops/attention/test_attend.py tests/ops/attention",
    ),
    Fault(
        "shift_band",
        "the band of a shifted mask moves its left bound the wrong way",
        "hpnlp/ops/attention/masks/base.py",
        "None if left is None else left - self.keys",
        "None if left is None else left + self.keys",
        "tests/ops/attention/masks tests/ops/attention",
    ),
    Fault(
        "combine_rescale",
        "the running denominator is not rescaled to the new maximum",
        "hpnlp/ops/attention/block_sparse/tile.py",
        "return top, a[1] * wa + b[1] * wb,",
        "return top, a[1] + b[1] * wb,",
        "tests/ops/attention/test_attend.py tests/ops/attention",
    ),
    Fault(
        "dlse_sign",
        "delta adds the cotangent of the log-sum-exp instead of subtracting it",
        "hpnlp/ops/attention/block_sparse/flash.py",
        "delta = delta - jnp.where(sees_nothing, 0.0, dlse)",
        "delta = delta + jnp.where(sees_nothing, 0.0, dlse)",
        "tests/ops/attention/test_attend.py tests/ops/attention",
    ),
    Fault(
        "bias_grad_scale",
        "the gradient of the bias is multiplied by the scale of the scores",
        "hpnlp/ops/attention/block_sparse/tile.py",
        "_over_queries(residuals.q.astype(dtype), ds), dv, db",
        "_over_queries(residuals.q.astype(dtype), ds), dv, db * options.scale",
        "tests/ops/attention/test_attend.py tests/ops/attention",
    ),
    Fault(
        "float16_scale",
        "scores of float16 queries are not scaled",
        "hpnlp/ops/attention/block_sparse/tile.py",
        "s = s if early != 1.0 else s * options.scale",
        "s = s if q.dtype != jnp.bfloat16 else s * options.scale",
        "tests/ops/attention/test_attend.py tests/ops/attention",
    ),
    Fault(
        "residue_padding",
        "a tile of residue classes counts as full although some classes lack its last key",
        "hpnlp/ops/attention/block_sparse/decomposition/decompose.py",
        "inside &= (last_query * selection.stride <= length) & (last_key * selection.stride <= keys)",
        "inside &= last_query * selection.stride <= length",
        "tests/ops/attention/block_sparse/test_flash.py tests/ops/attention",
    ),
    Fault(
        "rope_direction",
        "RoPE turns in the opposite direction",
        "hpnlp/ops/attention/positions/rope.py",
        "[a * cos - b * sin, b * cos + a * sin]",
        "[a * cos + b * sin, b * cos - a * sin]",
        "tests/ops/attention/positions tests/models",
    ),
    Fault(
        "alibi_slopes",
        "ALiBi slopes of a head count that is no power of two take the even exponents",
        "hpnlp/ops/attention/positions/bias.py",
        "for n in range(1, 2 * (heads - power), 2)]",
        "for n in range(2, 2 * (heads - power) + 1, 2)]",
        "tests/ops/attention/positions tests/ops/attention/test_operands_oracle.py tests/ops/test_numpy.py tests/models",
    ),
    Fault(
        "cache_ring_slot",
        "the ring of the cache is indexed without subtracting the pinned slots",
        "hpnlp/ops/attention/decoding/kv_cache.py",
        "self.pinned + (self.lengths - self.pinned) % self.ring",
        "self.pinned + self.lengths % self.ring",
        "tests/ops/attention/decoding tests/models",
    ),
    Fault(
        "decode_eos",
        "a sequence forgets one step after eos that it has ended",
        "hpnlp/models/decode.py",
        'ended = state.ended | jnp.isin(token, ids["eos"])',
        'ended = jnp.isin(token, ids["eos"])',
        "tests/models/test_decode.py tests/models",
    ),
    Fault(
        "top_p_mass",
        "top-p compares with masses that are not normalised",
        "hpnlp/ops/sampling.py",
        "mass = jax.nn.softmax(logits, axis=-1)",
        "mass = jnp.exp(logits)",
        "tests/ops/test_sampling.py tests/models/test_decode.py tests/models/huggingface/test_generate_oracle.py",
    ),
    Fault(
        "merge_empty",
        "merging parts that all saw nothing gives NaN",
        "hpnlp/ops/attention/block_sparse/decomposition/permuted.py",
        "top = jnp.where(jnp.isneginf(top), 0.0, top)",
        "top = top + 0.0",
        "tests/ops/attention/test_attend.py tests/ops/attention",
    ),
    Fault(
        "ce_smoothing_label",
        "the label's gradient in chunks of tokens lacks the term of label smoothing",
        "hpnlp/ops/softmax/chunked_cross_entropy.py",
        "spec.scale_gradient(target, d_target + d_logit_sum)",
        "spec.scale_gradient(target, d_target)",
        "tests/ops/softmax/test_chunked_cross_entropy.py tests/nn tests/models/test_lm.py tests/ops/softmax",
    ),
    Fault(
        "ce_cap_temperature",
        "the slope of the soft cap of logits leaves out the temperature",
        "hpnlp/ops/softmax/logits_spec.py",
        "(s * (self.temperature / self.soft_cap)) ** 2",
        "(s / self.soft_cap) ** 2",
        "tests/ops/softmax/test_chunked_cross_entropy.py tests/nn tests/models/test_lm.py tests/ops/softmax",
    ),
    Fault(
        "nce_label",
        "NCE does not correct the label's score by its log expected count",
        "hpnlp/ops/softmax/sampled_losses.py",
        "_logistic(target - samples.labels_expected,",
        "_logistic(target,",
        "tests/ops/softmax/test_sampled_losses.py tests/ops/softmax",
    ),
    Fault(
        "adaptive_cutoff",
        "the first word of a cluster is counted to the cluster before",
        "hpnlp/ops/softmax/structured/adaptive.py",
        'labels, side="right")',
        'labels, side="left")',
        "tests/ops/softmax/test_adaptive.py tests/ops/softmax",
    ),
    Fault(
        "tree_doubling",
        "log-probabilities of a tree take one round of pointer doubling too few",
        "hpnlp/ops/softmax/structured/hierarchical.py",
        "range((tree.depth - 1).bit_length() if tree.depth else 0)",
        "range(tree.depth.bit_length() - 1 if tree.depth else 0)",
        "tests/ops/softmax/test_hierarchical.py tests/ops/softmax",
    ),
    Fault(
        "vmf_slope",
        "the derivative of the Bessel ratio subtracts its correction",
        "hpnlp/ops/softmax/vmf.py",
        "(1.0 / (1.0 + t) + _evaluate(correction, t))",
        "(1.0 / (1.0 + t) - _evaluate(correction, t))",
        "tests/ops/softmax/test_vmf.py",
    ),
    Fault(
        "alias_duplicates",
        "several deficits that one column fills in a round are subtracted once",
        "hpnlp/ops/softmax/alias_sampler.py",
        "np.subtract.at(mass, over[giver[filled]], deficits[filled])",
        "mass[over[giver[filled]]] -= deficits[filled]",
        "tests/ops/softmax/test_alias_sampler.py tests/ops/softmax",
    ),
    Fault(
        "unigram_draw",
        "draws of the learned unigram distribution are off by one at the edges of words",
        "hpnlp/ops/softmax/proposals.py",
        'jnp.searchsorted(below, at, side="right")',
        'jnp.searchsorted(below, at, side="left")',
        "tests/ops/softmax/test_proposals.py tests/ops/softmax",
    ),
    Fault(
        "muon_correction",
        "Nesterov momentum of muon is corrected by this step's count, not the next one's",
        "hpnlp/training/optimizers/muon.py",
        "optax.tree.bias_correction(mu, decay, count + 1)",
        "optax.tree.bias_correction(mu, decay, count)",
        "tests/training/test_optim.py tests/training/test_optim_oracle.py tests/training/test_step.py",
    ),
    Fault(
        "loss_scale_counter",
        "the counter of finite steps is not reset when the loss scale doubles",
        "hpnlp/training/optimizers/loss_scale.py",
        "jnp.where(is_finite & (count < GROWTH_INTERVAL), count, 0)",
        "jnp.where(is_finite, count, 0)",
        "tests/training/test_loss_scale.py tests/training/test_step.py",
    ),
    Fault(
        "aux_weight",
        "auxiliary losses are not multiplied by the weight of the summed loss",
        "hpnlp/training/gradients.py",
        "* mean(value, weight) * out.weight",
        "* mean(value, weight)",
        "tests/training/test_step.py tests/nn tests/training/test_loop.py",
    ),
    Fault(
        "clip_norm",
        "clipped gradients have norm 1 whatever clip_norm is",
        "hpnlp/training/optim.py",
        "g / norm.astype(g.dtype) * max_norm)",
        "g / norm.astype(g.dtype))",
        "tests/training/test_optim.py tests/training/test_optim_oracle.py tests/training/test_step.py",
    ),
    Fault(
        "ring_gaps",
        "the ring judges a pair of chunks without its largest distance",
        "hpnlp/parallel/ring_schedule.py",
        "gaps = np.arange((apart - 1) * size + 1, (apart + 1) * size)",
        "gaps = np.arange((apart - 1) * size + 1, (apart + 1) * size - 1)",
        "tests/parallel/test_ring_schedule.py tests/parallel",
    ),
    Fault(
        "pipeline_busy",
        "only the first round of a circular pipeline counts for the auxiliary metrics",
        "hpnlp/parallel/pipeline.py",
        "busy = (item >= 0) & (item < rounds * count)",
        "busy = (item >= 0) & (item < count)",
        "tests/parallel/test_pipeline.py tests/training/test_step.py tests/parallel",
    ),
    Fault(
        "ring_dlse",
        "the gradient of a partial log-sum-exp on the ring leaves out the merged output",
        "hpnlp/parallel/context_parallel.py",
        "((partial_o.astype(jnp.float32) - o) * do).sum(axis=-1)",
        "(partial_o.astype(jnp.float32) * do).sum(axis=-1)",
        "tests/parallel/test_context_parallel.py tests/parallel tests/training/test_step.py",
    ),
    Fault(
        "vocab_lookup",
        "a device also adds a row for the first word of the next device",
        "hpnlp/parallel/vocab_parallel.py",
        "is_local = (index >= 0) & (index < table.shape[0])",
        "is_local = (index >= 0) & (index <= table.shape[0])",
        "tests/parallel/test_vocab_parallel.py tests/parallel tests/training/test_step.py",
    ),
    Fault(
        "planner_runs",
        "operations in nested loops count with the outer loop's length only",
        "hpnlp/planner/jaxpr/walker.py",
        "runs=operation.runs * runs,",
        "runs=runs,",
        "tests/planner/test_jaxpr_cost.py tests/planner tests/cli/test_plan.py",
    ),
    Fault(
        "planner_liveness",
        "buffers are freed before the peak of the step that reads them last is taken",
        "hpnlp/planner/jaxpr/liveness.py",
        "        peak = max(peak, live + step.scratch)\n        live -= sum(buffer.size for buffer in freed)\n",
        "        live -= sum(buffer.size for buffer in freed)\n        peak = max(peak, live + step.scratch)\n",
        "tests/planner/test_jaxpr_cost.py tests/planner",
    ),
    Fault(
        "packing_boundary",
        "the first token of the next document carries loss",
        "hpnlp/data/packing.py",
        "(label < np.repeat(tokens.ends[doc], length))",
        "(label <= np.repeat(tokens.ends[doc], length))",
        "tests/data/test_packing.py tests/data",
    ),
    Fault(
        "stream_resume",
        "a resumed stream skips one batch",
        "hpnlp/data/batches.py",
        'self._batches.set_state({"next_index": batches})',
        'self._batches.set_state({"next_index": batches + 1})',
        "tests/data/test_corpus.py tests/data tests/training/test_loop.py",
    ),
    Fault(
        "words_decode",
        "decoding separates a word from punctuation before it by a space",
        "hpnlp/data/tokenizers/word_tokenizer.py",
        "after_word = is_word\n",
        "after_word = after_word or is_word\n",
        "tests/data/test_tokenizers.py tests/data",
    ),
    Fault(
        "quantization_scale",
        "the scale of a row is its largest number, not its largest magnitude",
        "hpnlp/ops/dynamic_quantization.py",
        "scales = jnp.max(jnp.abs(x), axis=-1,",
        "scales = jnp.max(x, axis=-1,",
        "tests/ops/test_dynamic_quantization.py tests/training/test_adamw8bit.py",
    ),
    Fault(
        "spec_repeat",
        "a spec of one entry with a repeat passes as a single entry",
        "hpnlp/spec.py",
        "if len(specs) != 1 or specs[0].repeat != 1:",
        "if len(specs) != 1:",
        "tests/test_spec.py tests/training/test_config.py tests/cli/test_bad_input.py",
    ),
    Fault(
        "compare_unscored",
        "runs without a score are ranked first",
        "hpnlp/report/comparison.py",
        "if name in scores else math.inf",
        "if name in scores else 0.0",
        "tests/test_report.py tests/cli/test_sweep.py",
    ),
)


def test_files(tree: Path, names: str) -> list[str]:
    """Test files of files and directories, each once, in order."""
    files: dict[str, None] = {}
    for name in names.split():
        path = tree / name
        found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        files |= dict.fromkeys(str(file.relative_to(tree)) for file in found)
    return list(files)


def detected_by(tree: Path, tests: list[str], keyword: str, markers: str) -> str:
    """The first test that fails; "" if none does, and "timeout" after `--limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    command += ["-m", markers] if markers else []
    command += ["-k", keyword] if keyword else []
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=FLAGS.limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    lines = [line.split(maxsplit=1)[1].split(" - ")[0] for line in failed]  # names of cases have spaces
    return lines[0] if lines else "" if done.returncode in (0, 5) else f"exit code {done.returncode}"


def seed(fault: Fault) -> dict[str, Any]:
    """Runs the tests of a fault in a copy of the tree."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        for name in ("hpnlp", "tests", "experiments"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        right = (tree / fault.path).read_text("utf-8")
        fault.write(tree)
        start, tests, tier = time.perf_counter(), test_files(tree, fault.tests), 1
        test = detected_by(tree, tests, fault.keyword, "")
        if not test or test == "timeout":
            tier, test = 2, detected_by(tree, tests, fault.keyword, "(oracle or slow) and not notebook")
        detected = test not in ("", "timeout")
        if "::" in test:
            (tree / fault.path).write_text(right, "utf-8")
            if failing := detected_by(tree, [test], "", "oracle or slow or not slow"):
                raise ValueError(
                    f"{failing} fails without the fault, too: mend it, or choose other tests of {fault.name}"
                )
        row = {
            "fault": fault.name,
            "effect": fault.effect,
            "detected": detected,
            "tier": tier if detected else 0,
            "test": test,
        }
        return row | {"seconds": time.perf_counter() - start}


def main(_: Any) -> None:
    rows = []
    for fault in (*FAULTS, *MIXER_FAULTS, *WIRING_FAULTS):
        if not FLAGS.only or fault.name in FLAGS.only:
            rows.append(seed(fault))
            print(rows[-1], flush=True)
    print(f"{sum(row['detected'] for row in rows)} of {len(rows)} detected")
    print(measure.write_result("faults", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
