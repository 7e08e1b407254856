"""`hpnlp encode`: vectors of lines and records, their files, and errors."""

import functools
import io
import json
import os
import re
import types

import flax.linen as nn
import jax
import numpy as np
import pytest

import hpnlp
from hpnlp.data import tokenizers
from hpnlp.jobs.predictor import Predictor
from hpnlp.jobs.vector_files import DTYPES, VectorFile
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import config as configs
from hpnlp.training import run_directory as runs
from hpnlp.training.config_file import write_config
from hpnlp.training.files.checkpoint import Checkpointer
from tests import tiny
from tests.messages import raises

TEXTS = ["the quick fox", "", "old, copper\tkettles" * 3, *(" ".join(tiny.WORDS[:n]) for n in (8, 2, 7, 3, 6))]


def save_run(directory, task, labels=None, data=(), seed=0, **fields):
    """Writes a run of random parameters."""
    config = configs.default(task)
    config.data.update(tokenizer="bytes", seq_len=40, **dict(data))
    config.model.update(layers=1, dim=16, heads=2, mlp_dim=32, vocab=264, **fields)
    values, tokenizer = configs.resolve(config), tokenizers.build("bytes")
    vocabulary = Vocabulary(tokenizer, labels)
    model = runs.make_model(values, vocabulary)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(seed), model.example_batch(1, 2))["params"])
    checkpoints = Checkpointer(directory)
    checkpoints.save_params(jax.tree.map(np.asarray, params))
    checkpoints.close()
    vocabulary.save(directory)
    write_config(directory, values)
    return directory


@pytest.fixture(scope="module")
def dual_encoder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("dual_encoder") / "run", "dual_encoder")


@pytest.fixture(scope="module")
def expected(dual_encoder):
    with pytest.warns(UserWarning, match="1 of 7 texts were cut"):
        vectors = hpnlp.load(dual_encoder).encode([text for text in TEXTS if text])
    return np.insert(vectors, 1, 0.0, axis=0)


def test_rows_are_the_vectors_of_lines_and_records(run, dual_encoder, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("hpnlp.jobs.vector_files.CHUNK", 3)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS[:5]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"n": 1, "body": text}) for text in TEXTS[5:]))
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[5:]))
    out = tmp_path / "out.npy"
    stdin = types.SimpleNamespace(buffer=io.BytesIO("\r\n".join(TEXTS).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    files = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl")]
    for arguments in ([], [files[0], files[1], "--fields=body"], [files[0], files[2], "--batch_size=2"]):
        outcome = run("encode", dual_encoder, *arguments, f"--to={out}")
        assert (outcome.code, outcome.out) == (0, f"{out}: 8 vectors of 16 numbers, float32\n"), outcome
        left_out = f"1 without text: {files[0]}, line 2" if arguments else "1 without text: stdin, line 2"
        remarks = f"hpnlp: rows of zeros: {left_out}\nhpnlp: 1 of 8 texts were cut to data.seq_len=40 tokens\n"
        assert outcome.err.endswith(remarks)
        vectors = np.load(out, mmap_mode="r")
        assert vectors.dtype == np.float32 and vectors.shape == (8, 16)
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_smaller_dtypes_are_near(run, dual_encoder, expected, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    assert run("encode", dual_encoder, tmp_path / "a.txt", f"--to={tmp_path}/h.npy", "--dtype=float16").code == 0
    half = np.load(tmp_path / "h.npy")
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, expected, atol=1e-3)
    assert run("encode", dual_encoder, tmp_path / "a.txt", f"--to={tmp_path}/i.npy", "--dtype=int8").code == 0
    rows = np.load(tmp_path / "i.npy", mmap_mode="r")
    assert rows["codes"].dtype == np.int8 and rows["codes"].shape == (8, 16) and rows["scale"].dtype == np.float32
    error = np.abs(rows["codes"] * rows["scale"][:, None] - expected)
    assert (error <= 0.501 * rows["scale"][:, None] + 1e-6).all()
    assert np.abs(rows["codes"]).max(axis=1).tolist() == [127, 0, *[127] * 6]


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_of_any_number_of_vectors_are_read_by_numpy(dtype, tmp_path):
    """The header has the same length for one row and for a million."""
    with (tmp_path / "a.npy").open("wb") as file:
        vectors = VectorFile(file, dtype, 1)
        for _ in range(11):
            vectors.append(np.ones((100_003, 1), np.float32))
        vectors.finish()
    assert len(np.load(tmp_path / "a.npy")) == 11 * 100_003


ERRORS = {
    "no run": ([], "expected a run: write hpnlp encode RUN texts.txt --to=vectors.npy"),
    "another suffix": (["RUN", "DIR/a.txt", "--to=DIR/a.npz"], "expected a file .npy"),
    "no directory": (["RUN", "DIR/a.txt", "--to=DIR/absent/a.npy"], "expected a file in a directory that exists"),
    "a device": (["RUN", "DIR/a.txt", "--to=DIR/fifo.npy"], "fifo.npy is not a regular file: name another"),
    "the input as output": (["RUN", "DIR/a.npy", "--to=DIR/a.npy"], "is a file that is read"),
    "no such file": (["DIR/no_run", "DIR/absent.txt", "--to=DIR/a.npy"], "hpnlp: DIR/absent.txt: there is no such"),
    "no texts": (["RUN", "DIR/empty.txt", "--to=DIR/a.npy"], "there are no texts to encode"),
    "fields of texts": (["RUN", "DIR/a.txt", "--to=DIR/a.npy", "--fields=b"], "no effect without a file of records"),
    "a bad record": (["RUN", "DIR/bad.jsonl", "--to=DIR/a.npy"], "line 2: field 'text' is empty: mend or remove the"),
    "not UTF-8": (["RUN", "DIR/latin.txt", "--to=DIR/a.npy"], r"latin.txt, line 1: not UTF-8 \(byte 0xe9 at 0\)"),
    "a language model": (["LM", "DIR/a.txt", "--to=DIR/a.npy"], "task='lm' has no vectors of texts: use a run of"),
}


@pytest.mark.parametrize(("number", "dtype"), [(np.nan, "float32"), (np.inf, "int8"), (70_000, "float16")])
def test_vectors_that_are_not_finite_raise(number, dtype, run, dual_encoder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a\nb\n")
    vectors = {0: np.ones(16, np.float32), 1: np.full(16, number, np.float32)}
    monkeypatch.setattr(Predictor, "encode_valid", lambda *arguments: (vectors, 0))
    outcome = run("encode", dual_encoder, tmp_path / "a.txt", f"--to={tmp_path}/a.npy", f"--dtype={dtype}")
    message = f"a.txt, line 2: the vector has NaN, infinity or a number too large for {dtype}: name another run"
    assert outcome.code == 2 and message in outcome.err, outcome.err
    assert not (tmp_path / "a.npy").exists()


def test_partners_pass_the_second_tower(run, dual_encoder, tmp_path):
    directory = save_run(tmp_path / "run", "dual_encoder", shared=False)
    loaded, texts = hpnlp.load(directory), ["the quick fox", "old copper"]
    ids = [np.pad(x := loaded.run.tokenizer.encode(text.encode()), (0, 16 - len(x))) for text in texts]
    batch = loaded.run.model.example_batch(2, 20)
    framed = np.array(
        [[256, *x[: len(text)], 257, *[258] * (18 - len(text))] for x, text in zip(ids, texts, strict=True)]
    )
    batch |= {f"{side}tokens": framed for side in ("", "pair_")}
    batch |= {f"{side}segment_ids": (framed != 258).astype(np.int32) for side in ("", "pair_")}
    batch |= {f"{side}positions": np.tile(np.arange(20), (2, 1)) for side in ("", "pair_")}
    embed = jax.jit(functools.partial(loaded.run.model.apply, method="embed"))
    expected = embed({"params": loaded.run.params}, batch)
    (tmp_path / "a.txt").write_text("\n".join(texts))
    for flag, vectors in zip(([], ["--partners"]), expected, strict=True):
        assert run("encode", directory, tmp_path / "a.txt", f"--to={tmp_path}/a.npy", *flag).code == 0
        np.testing.assert_allclose(np.load(tmp_path / "a.npy"), vectors, atol=1e-5)
    shared = hpnlp.load(dual_encoder)
    np.testing.assert_array_equal(shared.encode(texts), shared.encode(texts, partners=True))


def test_products_of_bfloat16_change_vectors_by_their_rounding(run, dual_encoder, expected, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    outcome = run("encode", dual_encoder, tmp_path / "a.txt", f"--to={tmp_path}/a.npy", "--compute_dtype=bfloat16")
    assert outcome.code == 0, outcome.err
    difference = np.abs(np.load(tmp_path / "a.npy") - expected).max()
    assert 1e-5 < difference < 0.05
    raises("expected float32, bfloat16, float16", hpnlp.load, dual_encoder, dtype="float64")


def test_invalid_input_is_refused_and_leaves_the_older_file(run, dual_encoder, tmp_path):
    save_run(tmp_path / "lm", "lm")
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "a.npy").write_text("old")
    os.mkfifo(tmp_path / "fifo.npy")
    names = {"RUN": str(dual_encoder), "LM": str(tmp_path / "lm")}
    files = sorted(os.listdir(tmp_path))
    for name, (arguments, message) in ERRORS.items():
        outcome = run("encode", *(names.get(a, a).replace("DIR", str(tmp_path)) for a in arguments))
        assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1, (name, outcome)
        assert re.search(message.replace("DIR", str(tmp_path)), outcome.err.strip()), (name, outcome.err)
        assert (tmp_path / "a.npy").read_text() == "old" and sorted(os.listdir(tmp_path)) == files, name
