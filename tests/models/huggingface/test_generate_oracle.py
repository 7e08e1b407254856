"""Greedy continuations of converted checkpoints equal those of `generate` in transformers."""

import json

import numpy as np
import pytest
import tokenizers as hf

from hpnlp.data import tokenizers
from hpnlp.models import decode
from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM
from hpnlp.training import run_directory as runs

pytestmark = pytest.mark.oracle

TEXT = ["the quick brown fox jumps over the lazy dog, the end of the story\n"] * 3
TOKENS = 12
PROMPTS = [
    "the quick",
    "a lazy dog jumps",
    "",
    "  the\n\n caf\u00e9 \u6f22 \U0001f98a e\u0301\t",
    "<|im_start|>the fox<|im_end|>\n </s>x",
]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 56, "max_position_embeddings": 64}


def byte_level(special, template=None, normalizer=None):
    """A tokenizer like those of GPT-2, Llama 3 and Qwen, with added tokens `special` and a post-processor's `template`."""
    inner = hf.Tokenizer(hf.models.BPE())
    inner.normalizer = normalizer
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = hf.decoders.ByteLevel()
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    trainer = hf.trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(TEXT, trainer)
    return with_special_tokens(inner, special, template, [hf.processors.ByteLevel(trim_offsets=False)])


def metaspace(special, template, replaces_spaces=False):
    """A tokenizer like those of Llama 2 and Mistral: words begin with a mark, and unknown characters fall back to bytes.

    As in Gemma, `replaces_spaces` puts the mark in place of spaces alone.
    """
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        *sorted(set("".join(TEXT)) - {" "}),
    ]
    model = hf.models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    inner = hf.Tokenizer(model)
    inner.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if replaces_spaces:
        inner.normalizer = hf.normalizers.Replace(" ", "\u2581")
        inner.pre_tokenizer = hf.pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [hf.decoders.Replace("\u2581", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
    strip = [] if replaces_spaces else [hf.decoders.Strip(" ", 1, 0)]
    inner.decoder = hf.decoders.Sequence([*steps, *strip])
    return with_special_tokens(inner, special, template, [])


def with_special_tokens(inner, special, template, processors):
    inner.add_special_tokens(special)
    ids = [(name, inner.token_to_id(name)) for name in special]
    if template:
        processors = [*processors, hf.processors.TemplateProcessing(single=template, special_tokens=ids)]
    inner.post_processor = hf.processors.Sequence(processors)
    return inner


END, BEGIN = "<|endoftext|>", "<|begin_of_text|>"
CHAT = ["<|im_start|>", "<|im_end|>"]
# name -> (model_type, tokenizer, tokenizer_config.json, changes of config.json)
CASES = {
    "llama2": (
        "llama",
        lambda: metaspace(["<s>", "</s>", "<unk>"], "<s> $A"),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "tokenizer_class": "LlamaTokenizer"},
        {},
    ),
    "llama3": (
        "llama",
        lambda: byte_level([BEGIN, END], f"{BEGIN} $A"),
        {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"},
        {},
    ),
    "llama_without_bos": (
        "llama",
        lambda: byte_level([BEGIN, END]),
        {"bos_token": BEGIN, "eos_token": END, "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 90.0, "factor": 2.0}, "hidden_act": "gelu"},
    ),
    "mistral": (
        "mistral",
        lambda: metaspace(["<s>", "</s>", "<unk>"], "<s> $A"),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "tokenizer_class": "LlamaTokenizer"},
        {"sliding_window": 4},
    ),
    "qwen2": (
        "qwen2",
        lambda: byte_level([END], normalizer=hf.normalizers.NFC()),
        {"bos_token": None, "eos_token": END, "tokenizer_class": "Qwen2Tokenizer"},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3_chat": (
        "qwen3",
        lambda: byte_level([END, *CHAT], normalizer=hf.normalizers.NFC()),
        {
            "bos_token": None,
            "eos_token": CHAT[1],
            "additional_special_tokens": CHAT,
            "tokenizer_class": "Qwen2Tokenizer",
        },
        {"head_dim": 16},
    ),
    "qwen3": (
        "qwen3",
        lambda: byte_level([END], normalizer=hf.normalizers.NFC()),
        {"bos_token": None, "eos_token": END, "tokenizer_class": "Qwen2Tokenizer"},
        {"head_dim": 16},
    ),
    "gemma2": (
        "gemma2",
        lambda: metaspace(["<bos>", "<eos>", "<unk>", "<pad>"], "<bos> $A", replaces_spaces=True),
        {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "tokenizer_class": "GemmaTokenizer"},
        {"head_dim": 12, "sliding_window": 4, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0},
    ),
    "gpt2": (
        "gpt2",
        lambda: byte_level([END]),
        {"bos_token": END, "eos_token": END, "add_bos_token": False, "tokenizer_class": "GPT2Tokenizer"},
        {},
    ),
    "gpt2_adding_bos": (
        "gpt2",
        lambda: byte_level([END], f"{END} $A"),
        {"bos_token": END, "eos_token": END, "tokenizer_class": "GPT2Tokenizer"},
        {},
    ),
}


@pytest.fixture(params=CASES)
def checkpoint(request, tmp_path):
    """(model of transformers, its tokenizer, directory of both)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model_type, make, tokenizer_config, changes = CASES[request.param]
    inner = make()
    vocab = max(inner.get_vocab().values()) + 1
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} if model_type == "gpt2" else SIZES
    ids = {f"{role}_token_id": inner.token_to_id(tokenizer_config[f"{role}_token"] or END) for role in ("bos", "eos")}
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=vocab, **sizes | changes, **ids, tie_word_embeddings=False, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return model, transformers.AutoTokenizer.from_pretrained(tmp_path), tmp_path


def continue_and_compare(model, hf_tokenizer, directory, prompts):
    """Continues prompts with both libraries, checks that the ids are equal, and returns them."""
    import torch

    tokenizer = tokenizers.load(str(directory))
    config, params = convert.load(directory)
    rows = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    generation = decode.Generation(
        LM(config),
        params,
        rows,
        tokens=TOKENS,
        sampling=decode.Sampling(0.0, allowed=tokenizer.drawable_ids()),
        eos_id=runs.eos_ids(directory, tokenizer, config.vocab),
        pad_id=tokenizer.pad_id,
    )
    continued = np.concatenate(list(generation), axis=1)
    continuations = []
    for prompt, row, continuation in zip(prompts, rows, continued.tolist(), strict=True):
        ids = hf_tokenizer(prompt)["input_ids"]
        # `generate` starts an empty prompt with bos_token_id.
        inputs = {"input_ids": torch.tensor([ids])} if ids else {}
        assert row.tolist() == (ids or [model.generation_config.bos_token_id]), prompt
        output = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)[0].tolist()
        expected = output[len(row) :]
        assert continuation[: len(expected)] == expected, prompt
        assert set(continuation[len(expected) :]) <= {tokenizer.pad_id}
        text = tokenizer.decode(expected).decode("utf-8", "replace")
        assert text == hf_tokenizer.decode(expected, skip_special_tokens=True)
        continuations.append(expected)
    return continuations


def test_greedy_continuations_match_transformers(checkpoint):
    continuations = continue_and_compare(*checkpoint, PROMPTS)
    assert len({i for ids in continuations for i in ids}) > 5  # fewer ids would not reveal a wrong prompt


@pytest.mark.parametrize("checkpoint", ["llama2", "qwen3_chat", "gpt2"], indirect=True)
def test_continuations_end_at_each_eos_of_generation_config(checkpoint):
    transformers = pytest.importorskip("transformers")
    _, hf_tokenizer, directory = checkpoint
    continuations = continue_and_compare(*checkpoint, PROMPTS[:2])
    path = directory / "generation_config.json"
    settings = json.loads(path.read_text()) | {"eos_token_id": [continuations[0][3], continuations[1][5]]}
    path.write_text(json.dumps(settings))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ended = continue_and_compare(model, hf_tokenizer, directory, PROMPTS[:2])
    assert len(ended[0]) <= 4 and len(ended[1]) <= 6
