"""`prepare_examples`: the split into training and held-out examples, the classes, the cache, and errors."""

import dataclasses
import json
import re
import tracemalloc

import numpy as np
import pytest

from hpnlp.cli import experiment
from hpnlp.data import tokenizers
from hpnlp.data.examples import ClassificationConfig, check_paths, prepare_examples
from hpnlp.data.reading.split import hash_fraction
from hpnlp.types import InputError
from tests.data.batches import assert_equal, take
from tests.data.examples.records import KINDS, classification, config, write
from tests.messages import raises


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a.jsonl", classification())


def heldout_texts(examples):
    return [text.decode() for text, *_ in examples.stored["heldout"].texts()]


def test_heldout_examples_are_chosen_by_hash_and_stay_when_data_is_added(path):
    examples = prepare_examples(config("classification", path))
    rows = classification()
    expected = [row["text"] for i, row in enumerate(rows) if hash_fraction(f"a.jsonl#{i}") < 0.2]
    assert heldout_texts(examples) == expected and examples.heldout_examples == len(expected)
    write(path, classification(90))
    assert heldout_texts(prepare_examples(config("classification", path)))[: len(expected)] == expected


def test_groups_are_held_out_as_a_whole(tmp_path):
    rows = [{**row, "page": f"page {i // 5}"} for i, row in enumerate(classification())]
    path = write(tmp_path / "a.jsonl", rows)
    examples = prepare_examples(config("classification", path, group_field="page"))
    assert heldout_texts(examples) == [row["text"] for row in rows if hash_fraction(row["page"]) < 0.2]
    pages = {row["text"]: row["page"] for row in rows}
    assert prepare_examples(config("classification", path)).group_numbers(4, None) is None
    for buckets in (1, 3):
        examples = prepare_examples(config("classification", path, group_field="page", buckets=buckets, heldout=0.5))
        batches, numbers = list(examples.heldout(batch_size=4)), examples.group_numbers(4, None)
        assert numbers.shape == (len(batches), 4)
        page_numbers = set()
        for batch, of_batch in zip(batches, numbers, strict=True):
            for tokens, weight, segments, number in zip(
                batch["tokens"], batch["weights"], batch["segment_ids"], of_batch, strict=True
            ):
                assert (number < 0) == (weight == 0)
                if weight:
                    text = examples.tokenizer.decode(tokens[segments > 0]).decode()
                    page_numbers.add((pages[text], number))
        assert len(page_numbers) == len({page for page, _ in page_numbers}) == len({n for _, n in page_numbers}) > 1
    rows[7].pop("page")
    with pytest.raises(InputError, match="line 8: no field 'page', .*: pass data.group_field=NAME"):
        prepare_examples(config("classification", write(path, rows), group_field="page"))


def test_examples_are_made_anew_when_the_code_or_the_options_of_their_kind_change(path, tmp_path):
    """The kind is in a file beside the one that is loaded, and has an option of its own."""
    code = """
import dataclasses
from hpnlp.data.examples.kinds import Classification

@dataclasses.dataclass(frozen=True)
class Changed(Classification):
    end: str = ""
    def texts(self, values):
        return ["PREFIX" + values["text_field"] + self.end]
"""
    own = """
from changed_kind import Changed
from hpnlp.data.examples import ClassificationConfig

class Config(ClassificationConfig):
    end = ""
    def kind(self):
        return Changed("text", "", "label", self.end)
"""
    fields = dataclasses.asdict(config("classification", path))
    (tmp_path / "own.py").write_text(own)
    for prefix, end, is_cached in (("a", "", False), ("a", "", True), ("bb", "", False), ("bb", "c", False)):
        (tmp_path / "changed_kind.py").write_text(code.replace("PREFIX", prefix))
        module = experiment.load(str(tmp_path / "own.py"))
        module.Config.end = end
        texts = heldout_texts(examples := prepare_examples(module.Config(**fields)))
        assert examples.is_cached == is_cached and all(t.startswith(prefix) and t.endswith(end) for t in texts)


def test_heldout_examples_limits_their_number(path):
    everything = prepare_examples(config("classification", path, heldout=0.5, heldout_examples=0))
    limited = prepare_examples(config("classification", path, heldout=0.5, heldout_examples=7))
    assert limited.heldout_examples == 7 and limited.train_examples == everything.train_examples
    lowest = sorted(range(60), key=lambda i: hash_fraction(f"a.jsonl#{i}"))[:7]
    assert heldout_texts(limited) == [classification()[i]["text"] for i in sorted(lowest)]
    assert "over data.heldout_examples=7 neither trained on nor evaluated" in limited.summary
    remark = "scores on 7 examples depend on chance (an accuracy has a standard error of up to 19 %): add examples"
    assert f"\n{remark}" in limited.summary


@pytest.mark.parametrize("heldout", [1e-9, 1 - 1e-9])
def test_small_data_sets_hold_out_one_example(tmp_path, heldout):
    path = write(tmp_path / "a.jsonl", [{"text": str(i), "label": "ab"[i % 2]} for i in range(6)])
    examples = prepare_examples(config("classification", path, heldout=heldout))
    assert (examples.train_examples, examples.heldout_examples) == (5, 1)


def test_other_paths_are_held_out_and_scored_apart(tmp_path, path):
    test = write(tmp_path / "test.csv", classification(7))
    hard = write(tmp_path / "hard.json", classification(9))
    options = {"heldout_path": str(test), "challenge_path": str(hard), "heldout_examples": 2}
    examples = prepare_examples(config("classification", tmp_path, **options))
    assert (examples.train_examples, examples.heldout_examples) == (60, 7)
    assert examples.heldout_sets == ("heldout", "challenge") and "9 examples scored apart" in examples.summary
    assert sum(batch["weights"].sum() for batch in examples.heldout(batch_size=4, name="challenge")) == 9
    assert (
        "1 held out by data.heldout_path (test.csv), 1 held out by data.challenge_path (hard.json)" in examples.summary
    )
    for name in ("heldout_path", "challenge_path"):
        with pytest.raises(
            InputError, match=f"^data.{name}='{path}' holds all files of the training data, data.path='{path}'"
        ):
            prepare_examples(config("classification", path, **{name: str(path)}))


def test_classes_are_sorted_names_of_training_labels(tmp_path):
    for names, expected in ((["b", " a", "c c "], ("a", "b", "c c")), ([10, 2, 1], ("1", "2", "10"))):
        rows = [{"text": f"{i}", "label": names[i % 3]} for i in range(60)]
        examples = prepare_examples(config("classification", write(tmp_path / "a.jsonl", rows)))
        assert examples.labels == expected and examples.class_counts.sum() == examples.train_examples
        for side in ("train", "heldout"):
            stored = examples.stored[side]
            for number in range(stored.count):
                name = str(names[int(stored.text(number, 0)) % 3]).strip()
                assert examples.labels[stored.labels(number)[0]] == name
        assert examples.class_counts.tolist() == np.bincount(examples.stored["train"].all_labels()).tolist()


def test_given_classes_keep_their_order(path):
    names = ("class 2", "more", "class 0", "class 1")
    examples = prepare_examples(config("classification", path), labels=names)
    assert examples.labels == names and "no training example of more" in examples.summary
    batch = next(examples.train(seed=0))
    for row, label in zip(batch["tokens"], batch["labels"], strict=True):
        number = int(examples.tokenizer.decode(row).split()[1])
        assert names[label] == f"class {number % 3}"
    with pytest.raises(
        InputError,
        match="a.jsonl, line 3: has label 'class 2', of which there is no class: did you mean .*train.init_from$",
    ):
        prepare_examples(config("classification", path), labels=names[1:])


def test_vocabulary_is_made_from_training_text_only(path):
    examples = prepare_examples(config("classification", path, tokenizer="words(500)"))
    texts = [text for text, *_ in examples.stored["train"].texts()]
    expected = tokenizers.build("words(500)", texts)
    assert examples.tokenizer.words == expected.words


def test_saved_tokenizer_and_labels_find_the_same_batches(path, tmp_path, cache):
    options = {"tokenizer": "words(60)"}
    examples = prepare_examples(config("classification", path, **options))
    examples.tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = prepare_examples(
        config("classification", path, **options), labels=examples.labels, tokenizer=tokenizers.load(str(tmp_path))
    )
    assert again.is_cached
    assert_equal(take(again.train(seed=0), 4), take(examples.train(seed=0), 4))
    assert_equal(list(again.heldout(batch_size=5)), list(examples.heldout(batch_size=5)))


def test_states_and_digests_do_not_depend_on_the_cache(path, tmp_path):
    """A run that found its classes continues with these classes on another machine."""
    write(path, classification()[::-1])  # classes occur in another order than that of their names
    examples = prepare_examples(config("classification", path))
    moved = config("classification", path, cache=str(tmp_path / "other"))
    again = prepare_examples(moved, labels=examples.labels)
    assert not again.is_cached and again.heldout_digest == examples.heldout_digest
    batches, expected = again.train(seed=0), examples.train(seed=0)
    take(expected, 3)
    batches.set_state(expected.get_state())
    assert_equal(take(batches, 3), take(expected, 3))
    others = prepare_examples(moved, labels=examples.labels[::-1])
    assert others.heldout_digest != examples.heldout_digest
    raises("of another data set and held-out examples", lambda: others.train(seed=0).set_state(expected.get_state()))


def test_cache_is_keyed_by_content_kind_and_split(path):
    calls = []

    def progress(step, done, total):
        assert 0 < done <= total
        calls.append(step)

    before = prepare_examples(config("classification", path), progress=progress)
    assert calls == ["tokenising"] * 60 and not before.is_cached
    again = prepare_examples(config("classification", path, seq_len=16, batch_size=2), progress=progress)
    assert len(calls) == 60 and again.is_cached and "read from the cache" in again.summary
    state = before.train(seed=0).get_state()
    again.train(seed=0).set_state(state)  # sequences of another length are of the same examples
    prepare_examples(config("classification", path, heldout=0.5), progress=progress)
    prepare_examples(config("pair classification", path), progress=progress)
    assert len(calls) == 180
    write(path, classification(61))
    prepare_examples(config("classification", path), progress=progress)
    assert len(calls) == 241


@pytest.mark.slow
def test_memory_does_not_grow_with_the_examples(tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"text": "so " * 40, "label": i % 3}) + "\n" for i in range(40_000))
    tracemalloc.start()
    examples = prepare_examples(config("classification", tmp_path))
    next(examples.train(seed=0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert examples.train_examples > 30_000 and peak < 15e6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heldout": 1.0}, "data.heldout=1.0: expected a fraction between 0 and 1"),
        ({"path": ""}, 'data.path="": expected the path of labelled examples'),
        ({"tokenizer": "byts"}, "did you mean 'bytes'?"),
        ({"heldout_path": "nowhere"}, "data.heldout_path='nowhere' does not exist"),
        ({"challenge_path": "nowhere"}, "data.challenge_path='nowhere' does not exist"),
    ],
)
def test_invalid_configs_raise(tmp_path, kind, options, message):
    path = write(tmp_path / "a.jsonl", KINDS[kind][0]())
    raises(re.escape(message), lambda: prepare_examples(config(kind, **{"path": path, **options})))


def test_fields_of_one_kind_are_checked():
    for kind, options, message in (
        ("pairs", {"pair_field": ""}, 'data.pair_field="": expected the name of the field with the second text'),
        ("pairs", {"pair_field": "text"}, "data.pair_field='text' is data.text_field, too"),
        ("pairs", {"negative_fields": "pair"}, "data.negative_fields='pair': expected names of different fields"),
        ("classification", {"label_field": "text"}, "data.label_field='text' is data.text_field, too, so"),
    ):
        raises(re.escape(message), config, kind, "a.jsonl", **options)


def row(label, text="t"):
    return {"text": text, "label": label}


# (training rows, held-out rows, options, message)
BAD = {
    "label without training example": ([row("a"), row("b")], [row("a"), row("c")], {}, "test.jsonl, line 2: the label 'c' is held out, and no training example has it: mend it, add training examples with it, or pass data.skip_bad"),  # noqa: E501
    "class named twice": ([row("a"), row("b"), row("a ")], [row("a")], {}, "train.jsonl, line 3: label 'a ' and label 'a' ("),
    "one class": ([row("a"), row("a")], [row("a")], {}, "the training examples have only the class 'a': expected at least two"),
    "empty file": ([], [row("a")], {}, "train.jsonl' holds no examples (left out: 1 empty ("),
    "empty held-out file": ([row("a"), row("b")], [], {}, "test.jsonl' holds no examples (left out: 1 empty ("),
    "all held out are bad": ([row("a"), row("b")], [row("c")], {"skip_bad_lines": True}, "no valid example is held out (left out: 1 held out with a label of no class ("),  # noqa: E501
    "text without tokens": ([row("a"), row("b", " ")], [row("a")], {"tokenizer": "words(9, by=whitespace)"}, "train.jsonl, line 2: has a text without tokens: mend"),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_examples_raise(tmp_path, case):
    train, heldout, options, message = BAD[case]
    write(tmp_path / "train.jsonl", train)
    write(tmp_path / "test.jsonl", heldout)
    paths = {"heldout_path": str(tmp_path / "test.jsonl")}
    with pytest.raises(InputError, match=re.escape(message)):
        prepare_examples(config("classification", tmp_path / "train.jsonl", **paths, **options))


def test_too_few_examples_raise(tmp_path):
    for rows, message in (([], "holds no examples"), ([row("a")], "holds only one example, which cannot be both")):
        path = write(tmp_path / "a.jsonl", rows)
        with pytest.raises(InputError, match=f"data.path='{path}' {message}"):
            prepare_examples(config("classification", path))
    path = write(tmp_path / "a.jsonl", [{**row("a"), "g": "all"}] * 9)
    with pytest.raises(InputError, match="holds only one group .'g'., which cannot be both"):
        prepare_examples(config("classification", path, group_field="g"))


def test_heldout_examples_without_a_class_are_left_out_if_skipped(tmp_path):
    write(tmp_path / "train.jsonl", [row("a"), row("b")])
    write(tmp_path / "test.jsonl", [row("a"), row("c"), row("b")])
    paths = {"heldout_path": str(tmp_path / "test.jsonl"), "skip_bad_lines": True}
    examples = prepare_examples(config("classification", tmp_path / "train.jsonl", **paths))
    assert examples.heldout_examples == 2 and examples.labels == ("a", "b")
    assert re.search("left out: 1 held out with a label of no class .*test.jsonl, line 2", examples.summary)


@pytest.mark.parametrize("labels", [None, ("a", "b")])
@pytest.mark.parametrize("field", ["heldout_path", "challenge_path"])
def test_scored_examples_without_a_class_are_counted_apart(tmp_path, labels, field):
    write(tmp_path / "train.jsonl", [row("a"), row("b"), row("a", ""), row("b")])
    write(tmp_path / "test.jsonl", [row("a"), *[row("c")] * 3, row("b", "")])
    write(tmp_path / "held.jsonl", [row("a")])
    paths = {"heldout_path": str(tmp_path / "held.jsonl")} | {field: str(tmp_path / "test.jsonl")}
    made = config("classification", tmp_path / "train.jsonl", skip_bad_lines=True, **paths)
    for _ in range(2):  # the second time from the cache
        examples = prepare_examples(made, labels)
        noun = "held-out" if field == "heldout_path" else "challenge"
        (unknown,) = examples.unknown_labels()
        assert f"3 of 4 {noun} examples (75 %) have a label that is no class of the run (" in unknown
        assert "test.jsonl, line 2, ...)" in unknown and f"{unknown}, and are not scored" in examples.summary
        assert [line.partition(" (")[0] for line in examples.left_out()] == [f"left out of {noun} examples: 1 invalid"]


def test_paths_are_checked_without_reading_files(tmp_path):
    path = write(tmp_path / "a.npz", classification())
    check_paths(config("classification", path, challenge_path=str(path)))
    check_paths(ClassificationConfig())
    for options, message in (
        ({"path": "stdlib_function"}, "did you mean 'stdlib_functions'"),
        ({"heldout_path": "stdlib_functions"}, "data.heldout_path='stdlib_functions' does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            check_paths(ClassificationConfig(**options))


def test_heldout_examples_are_the_same_with_saved_classes(tmp_path):
    """A run that resumes without its cache finds its held-out examples, although some labels are held out only."""
    rows = [
        {"text": f"text {i}", "label": "rare" if hash_fraction(f"a.jsonl#{i}") < 0.1 else f"class {i % 2}"}
        for i in range(60)
    ]
    path, options = write(tmp_path / "a.jsonl", rows), {"heldout": 0.5, "heldout_examples": 9, "skip_bad_lines": True}
    first, resumed = (
        prepare_examples(config("classification", path, cache=str(tmp_path / cache), **options), labels)
        for cache, labels in (("first", None), ("second", ("class 0", "class 1")))
    )
    assert first.labels == resumed.labels and first.heldout_examples == 9
    assert first.heldout_digest == resumed.heldout_digest and heldout_texts(first) == heldout_texts(resumed)


def test_too_many_classes_raise(tmp_path, monkeypatch):
    monkeypatch.setattr("hpnlp.data.examples.labels._MAX_CLASSES", 5)
    path = write(tmp_path / "a.jsonl", [row(f"t{i}") for i in range(9)])
    raises("a.jsonl, line 6: more than 5 classes, the next", lambda: prepare_examples(ClassificationConfig(str(path))))
