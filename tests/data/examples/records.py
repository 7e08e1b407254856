"""Records of each kind, files of each format, and configs for tests."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hpnlp.data.examples import ClassificationConfig, PairsConfig, Seq2SeqConfig, TaggingConfig

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def classification(count=60):
    return [
        {"text": f"text {i} " + "so " * (i % 9), "second": f"other {i}", "label": f"class {i % 3}"}
        for i in range(count)
    ]


def tagging(count=60):
    words = [[f"w{digit}" * (1 + int(digit) % 3) for digit in str(i + 100)] for i in range(count)]
    return [{"words": row, "labels": ["odd" if len(word) % 4 else "even" for word in row]} for row in words]


def pairs(count=60):
    return [{"text": f"question {i}", "pair": f"answer {i} " + "long " * (i % 5)} for i in range(count)]


def seq2seq(count=60):
    return [{"source": f"{i}", "target": " ".join(WORDS[int(digit)] for digit in str(i))} for i in range(count)]


SMALL = {"seq_len": 40, "batch_size": 4, "heldout": 0.2}
# Name -> (records, config class, options).
KINDS = {
    "classification": (classification, ClassificationConfig, {}),
    "pair classification": (classification, ClassificationConfig, {"pair_field": "second"}),
    "tagging": (tagging, TaggingConfig, {}),
    "seq2seq": (seq2seq, Seq2SeqConfig, {"target_len": 12}),
    "pairs": (pairs, PairsConfig, {}),
}


def config(kind, path, **options):
    _, make, more = KINDS[kind]
    return make(path=str(path), **{**SMALL, **more, **options})


def _flat(rows):
    return [{name: " ".join(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows]


def write(path, rows):
    """Writes rows in the format of the path's extension; lists become strings in CSV and arrays."""
    extension = path.suffix
    if extension == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    elif extension == ".json":
        path.write_text(json.dumps(rows), "utf-8")
    elif extension == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif extension == ".npz":
        flat = _flat(rows)
        np.savez(path, **{name: np.array([row[name] for row in flat]) for name in flat[0]})
    elif extension == ".tsv":
        flat = _flat(rows)
        lines = [list(flat[0]), *([str(value) for value in row.values()] for row in flat)]
        path.write_text("".join("\t".join(cells) + "\n" for cells in lines), "utf-8")
    else:
        flat = _flat(rows)
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(flat[0]), delimiter=",")
            writer.writeheader()
            writer.writerows(flat)
    return path
