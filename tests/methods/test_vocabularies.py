"""Tokens by the texts they stand for, whatever the tokenizer's spelling."""

import pytest
from builders import VOCABULARY, tiny_hf, tiny_tokenizer
from methods.copies import bridge_of, of_pieces, original, pieces, rotated

from mechtv.errors import InvalidInput
from mechtv.methods.vocabularies import shared_tokens, token_texts


def test_tokens_are_known_by_the_text_they_stand_for():
    byte_level, sentence_piece = token_texts(original()), token_texts(of_pieces())
    for text in (" jump", "ed", "s", " ->"):
        if text in byte_level:
            spelled = tiny_tokenizer().convert_ids_to_tokens(byte_level[text])
            assert spelled == text.replace(" ", "Ġ")
        if text in sentence_piece:
            spelled = pieces().convert_ids_to_tokens(sentence_piece[text])
            assert spelled == text.replace(" ", "▁")
    shared = set(byte_level) & set(sentence_piece)
    assert {" w", "ed", "a", " ->"} <= shared
    assert any(text.startswith(" ") and len(text) > 4 for text in shared)


def test_special_tokens_bytes_fragments_and_padding_rows_are_left_out():
    for model, special in ((original(), ("<s>", "</s>", "<pad>")), (of_pieces(), ("<unk>", "<s>"))):
        texts = token_texts(model)
        assert not set(special) & set(texts)
        assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
        assert len(set(texts.values())) == len(texts)
    texts = token_texts(of_pieces())
    assert texts["a"] == pieces().get_vocab()["a"] != pieces().get_vocab()["<0x61>"]
    assert "\n" in token_texts(original())
    padded = bridge_of(tiny_hf("llama", vocab_size=VOCABULARY + 7), tiny_tokenizer())
    assert token_texts(padded) == token_texts(original())


def test_texts_of_two_tokens_are_left_out():
    twice = tiny_tokenizer().__class__.from_pretrained(tiny_tokenizer().name_or_path)
    twice.add_tokens([" jumped", "a new word"])
    model = bridge_of(tiny_hf("llama", vocab_size=VOCABULARY + 2), twice)
    before, after = token_texts(original()), token_texts(model)
    assert set(after) - set(before) == {"a new word"} | ({" jumped"} - set(before))
    assert set(before) - set(after) == {" jumped"} & set(before)


def test_shared_tokens_are_in_the_same_order_in_both():
    first, second = token_texts(original()), token_texts(rotated())
    ids = shared_tokens(original(), rotated())
    names = {token: text for text, token in first.items()}, {t: x for x, t in second.items()}
    texts = [[own[token] for token in some] for own, some in zip(names, ids, strict=True)]
    assert texts[0] == texts[1]
    assert set(texts[0]) == set(first) & set(second)
    assert ids[0] != ids[1]
    words = {" new", " jump"}
    chosen = shared_tokens(original(), rotated(), words)
    assert chosen[0] == sorted(first[word] for word in words)
    assert {names[1][token] for token in chosen[1]} == words
    with pytest.raises(InvalidInput, match=r"The tokens \['no', 'such'\] are not shared"):
        shared_tokens(original(), rotated(), [" new", "such", "no"])
