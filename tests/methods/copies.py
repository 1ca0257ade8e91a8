"""Pairs of models to carry vectors between: a rotated copy, other widths, other tokenizers."""

import json
from functools import cache

import torch
from builders import D_MODEL, SENTENCES, VOCABULARY, tiny, tiny_hf, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mechtv.models import open_model
from mechtv.vectors import Card, Edit, Site, TaskVector

MISSING = ("Ġpalace", "Ġpast", "Ġwords", "Ġcity", "Ġcap", "ital")
READING = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
WRITING = ("o_proj", "down_proj")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_vector(*edits, acts_on="prompt"):
    card = Card(method="by hand", task="invented", template="{input} -> {answer}", seed=3)
    return TaskVector(edits=tuple(edits), card=card, acts_on=acts_on)


def at(operation, **site):
    return Edit(site=Site(**{"layer": 1, **site}), operation=operation)


@cache
def rotation():
    return torch.linalg.qr(noise(D_MODEL, D_MODEL, seed=5)).Q


@cache
def shuffled_tokenizer():
    """The tiny tokenizer without some words, all but the special tokens in another order."""
    plain = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    words = [w for w in sorted(plain["vocab"], key=plain["vocab"].get) if w not in MISSING]
    order = torch.randperm(len(words) - 3, generator=torch.Generator().manual_seed(1)) + 3
    vocabulary = {word: i for i, word in enumerate(words[:3])}
    vocabulary |= {words[old]: new for new, old in enumerate(order.tolist(), start=3)}
    merges = [(a, b) for a, b in plain["merges"] if {a, b, a + b} <= set(vocabulary)]
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=built, **names)


def bridge_of(hf, tokenizer):
    return open_model(hf, tokenizer=tokenizer, device="cpu", dtype=torch.float64)


def without_gains(hf):
    for name, weight in hf.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.fill_(1)
    return hf


@cache
def original():
    return bridge_of(without_gains(tiny_hf("llama")), tiny_tokenizer())


@cache
def rotated():
    """`original()` with its residual stream turned by R: h' = R^T h."""
    source = without_gains(tiny_hf("llama"))
    copy = without_gains(tiny_hf("llama", vocab_size=VOCABULARY - len(MISSING)))
    old, new = tiny_tokenizer().get_vocab(), shuffled_tokenizer().get_vocab()
    rows = torch.tensor([old[word] for word in sorted(new, key=new.get)])
    turn = rotation()
    for (name, weight), target in zip(source.named_parameters(), copy.parameters(), strict=True):
        value = weight.data
        if "embed_tokens" in name or "lm_head" in name:
            value = value[rows]
        if "embed_tokens" in name or any(part in name for part in READING):
            value = value @ turn
        elif any(part in name for part in WRITING):
            value = turn.T @ value
        target.data.copy_(value)
    return bridge_of(copy, shuffled_tokenizer())


@cache
def pair():
    return tiny("llama", hidden_size=48), tiny("qwen3", seed=2)


@cache
def pieces():
    """A tokenizer in the manner of SentencePiece: `▁` for a space, bytes as a last resort."""
    built = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    built.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    built.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=special, min_frequency=1, show_progress=False
    )
    built.train_from_iterator(SENTENCES, trainer)
    plain = json.loads(built.to_str())
    bytes_ = {f"<0x{byte:02X}>": built.get_vocab_size() + byte for byte in range(256)}
    plain["model"]["vocab"] |= bytes_
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    whole = Tokenizer.from_str(json.dumps(plain))
    return PreTrainedTokenizerFast(tokenizer_object=whole, **names)


@cache
def of_pieces():
    return bridge_of(tiny_hf("llama", vocab_size=500, hidden_size=16), pieces())
