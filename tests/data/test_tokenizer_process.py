"""Large batches of the package tokenizers are encoded in a process of their own."""

import copy
import gc
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpnlp.data.tokenizers import huggingface, tokenizer_process
from hpnlp.data.tokenizers.huggingface import HFTokenizer
from hpnlp.data.tokenizers.tokenizer_process import TokenizerProcess
from hpnlp.types import InputError
from tests.messages import raises

TEXTS = [f"text {i} of many: naïve <eos> words, 世界\n".encode() for i in range(300)]


@pytest.fixture(autouse=True)
def little_is_much(monkeypatch):
    monkeypatch.setattr(huggingface, "_MUCH_TEXT", 4000)


@pytest.fixture(scope="module")
def tokenizer():
    return HFTokenizer.train(300, TEXTS)


def process_of(tokenizer):
    tokenizer.encode_batch(TEXTS)
    return tokenizer._process._process


def has_ended(pid):
    """Whether a process that is no child of this one has ended; its new parent may not have asked for its code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_large_batch_is_encoded_as_its_texts_one_by_one(tokenizer):
    assert tokenizer._process is None
    expected = [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer._process is None
    encoded = tokenizer.encode_batch(TEXTS)
    assert tokenizer._process is not None
    for ids, wanted in zip(encoded, expected, strict=True):
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, wanted)
    long = b"".join(TEXTS) * 40
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_names_of_special_tokens_are_read_as_in_this_process(tokenizer):
    inner = copy.deepcopy(tokenizer._inner)
    inner.add_special_tokens(["[X]"])
    for split in (False, True):
        other = HFTokenizer(inner, {"split_special_tokens": split})
        texts = [b"a [X] b"] * 300
        np.testing.assert_array_equal(other.encode_batch(texts)[299], other.encode(texts[0]))


def test_a_process_that_is_killed_is_an_error_and_is_replaced(tokenizer):
    process = process_of(tokenizer)
    process.send_signal(signal.SIGKILL)
    process.wait()
    raises(r"ended with code -9: free some memory", tokenizer.encode_batch, TEXTS)
    assert len(tokenizer.encode_batch(TEXTS)) == 300


def test_an_interrupted_call_leaves_no_reply_for_the_next_one(tokenizer, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TokenizerProcess, "_receive", interrupt)
        tokenizer.encode_batch([b"other text"] * 300)
    np.testing.assert_array_equal(tokenizer.encode_batch(TEXTS)[7], tokenizer.encode(TEXTS[7]))


def test_the_process_ends_with_its_tokenizer(tokenizer):
    other = copy.deepcopy(tokenizer)
    process = process_of(other)
    assert process.poll() is None
    del other
    gc.collect()
    assert process.poll() == -signal.SIGKILL


def test_the_process_ends_with_a_parent_that_is_killed():
    code = (
        "import os, signal; from hpnlp.data.tokenizers.huggingface import HFTokenizer; texts = [b'some words ' * 99] * 300; "
        "t = HFTokenizer.train(300, texts); t.encode_batch(texts); print(t._process._process.pid, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    deadline = time.monotonic() + 20
    while not has_ended(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


def test_a_fork_has_a_process_of_its_own():
    code = (
        "import os; import numpy as np; from hpnlp.data.tokenizers.huggingface import HFTokenizer; "
        "texts = [b'some words ' * 99] * 300; "
        "t = HFTokenizer.train(300, texts); expected = t.encode_batch(texts); child = os.fork(); "
        "assert all(map(np.array_equal, t.encode_batch(texts), expected)); "
        "code = os.waitpid(child, 0)[1] if child else 0; assert code == 0"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_a_fork_that_lives_does_not_hold_up_the_end_of_the_process():
    code = (
        "import os, time; from hpnlp.data.tokenizers.huggingface import HFTokenizer; texts = [b'some words ' * 99] * 300; "
        "t = HFTokenizer.train(300, texts); t.encode_batch(texts); child = os.fork(); "
        "child or (time.sleep(60), os._exit(0)); begun = time.monotonic(); del t; print(time.monotonic() - begun); "
        "os.kill(child, 9); os.waitpid(child, 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120, check=True)
    assert float(done.stdout) < 10


def test_texts_that_cannot_be_read_end_the_making_of_a_vocabulary():
    def texts():
        yield from TEXTS * 40
        raise InputError("no text")

    begun = time.monotonic()
    raises("^no text$", lambda: HFTokenizer.train(30_000, texts()))
    assert time.monotonic() - begun < 20


def test_errors_of_the_package_are_named(tokenizer):
    form = json.loads(tokenizer._inner.to_str())
    form["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    form["pre_tokenizer"], form["post_processor"], form["decoder"] = {"type": "Whitespace"}, None, None
    with pytest.raises(InputError, match=r"cannot encode the text: .*Missing \[UNK\] token"):
        HFTokenizer(type(tokenizer._inner).from_str(json.dumps(form)), {}).encode_batch(TEXTS)


@pytest.mark.parametrize("sent", [b"", b'["a", "b', None], ids=["nothing", "half a message", "closed replies"])
def test_the_process_of_an_interrupted_parent_ends_without_a_traceback(tokenizer, sent):
    form = json.dumps((tokenizer._inner.to_str(), False, None)).encode() + b"\n"
    messages = (
        form + json.dumps([text.decode() for text in TEXTS * 40]).encode() + b"\n"
        if sent is None
        else form * bool(sent)
    )
    command = [sys.executable, "-P", tokenizer_process.__file__]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1) as process:
        if sent is None:
            process.stdout.close()
        process.stdin.write(messages + (sent or b""))
        process.stdin.close()
        assert process.stderr.read() == b"" and process.wait() == 0
