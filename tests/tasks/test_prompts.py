"""Prompts: BOS, padding, marks of demonstrations, answers as continuations, and what is refused."""

import string
import tempfile
from functools import cache

import pytest
import torch
from builders import D_MODEL, N_CTX, SENTENCES, tiny, tiny_hf, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import dntp, evaluate
from mechtv.models import open_model
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES, Template
from mechtv.tasks.tokens import bos_ids, continuation_ids, fragment_ids, prompt_ids

BOS = 0
WORDS = ("jump", "walk", "play", "look", "talk", "hot", "naïve ☃", "two words", "France", "tree")
CLOSING = Template(text="<{input}>\t{answer}</>", separator=" ; ")
TEXTS = ("jump ->", "jump -> jumped\nwalk ->", "☃", "the past of the word is the word ->")


def open_task(n=40, template=TEMPLATES["arrow"]):
    """Answers of one to ten tokens; some inputs and answers end in characters of many bytes."""
    examples = tuple(
        Example.pair(f"{WORDS[i % 10]} {i} {WORDS[i % 7]}", f"{WORDS[i % 9]}{'ed' * (i % 3)}")
        for i in range(n)
    )
    return Task(name="invented", examples=examples, template=template)


def closed_task(labels=("jump", "hot", "talked"), n=40):
    examples = tuple(Example.pair(f"word {i}", labels[i % len(labels)]) for i in range(n))
    return Task(name="invented", examples=examples, template=TEMPLATES["arrow"], labels=labels)


def real_ids(prompts, row):
    return prompts.tokens[row][prompts.mask[row]].tolist()


@cache
def model_of(family="llama", bos=False):
    """A model that is only read."""
    return tiny(family, bos=bos)


@cache
def sentencepiece_like():
    """A tokenizer as Llama 2 has one: it puts a space before every text, also before fragments."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Split("\n", "isolated")]
    )
    trained.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<s>", "</s>", "<pad>", "<unk>"],
        initial_alphabet=[*string.printable],
        show_progress=False,
    )
    trained.train_from_iterator(SENTENCES, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    folder = tempfile.mkdtemp(prefix="mechtv-tiny-sentencepiece-")
    PreTrainedTokenizerFast(tokenizer_object=trained, **names).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def without_offsets(model):
    """The model with a tokenizer that has no offsets, as those written in Python."""

    class Slow(type(model.tokenizer)):
        is_fast = False

        def __call__(self, text, **options):
            assert "return_offsets_mapping" not in options
            return super().__call__(text, **options)

    model.tokenizer.__class__ = Slow
    return model


# --- the beginning of a sequence ---


@pytest.mark.parametrize("prepend", [None, True, False])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("family", ["llama", "native"])
def test_a_prompt_has_exactly_as_many_bos_as_the_model_wants(family, bos, prepend):
    model = tiny(family, bos=bos)
    if prepend is not None:
        model.cfg.default_prepend_bos = prepend
    wanted = bos if prepend is None else prepend
    prompts = Prompts.from_texts(model, TEXTS)
    for row, text in enumerate(TEXTS):
        ids = real_ids(prompts, row)
        assert ids == model.to_tokens(text)[0].tolist()
        assert ids.count(BOS) == wanted
        assert ids[wanted:] == tiny_tokenizer(bos)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("bos", [True, False])
def test_a_text_that_begins_with_bos_is_not_given_another(bos):
    prompts = Prompts.from_texts(model_of(bos=bos), ["<s>jump ->", "jump ->"])
    first, second = real_ids(prompts, 0), real_ids(prompts, 1)
    assert first == [BOS, *second[bos:]]
    assert first.count(BOS) == 1


def test_the_bos_of_a_text_is_counted_where_demonstrations_are_marked():
    task = open_task(template=Template(text="<s>{input} -> {answer}"))
    shown = task.examples[1:3]
    for bos in (True, False):
        model = model_of(bos=bos)
        prompts = Prompts.from_examples(model, task, task.examples[:1], [shown])
        ids = real_ids(prompts, 0)
        assert ids.count(BOS) == 3, "one for each piece of text, none besides"
        ends = [ids[: column + 1] for column in prompts.separators[0].tolist()]
        assert [model.tokenizer.decode(end).rpartition("\n")[2] for end in ends] == [
            f"<s>{example.fields['input']} ->" for example in shown
        ]


@pytest.mark.parametrize("bos", [True, False])
def test_answer_and_label_ids_come_without_bos(bos):
    model = model_of(bos=bos)
    prompts = Prompts.of(model, closed_task(), shots=2)
    assert [model.tokenizer.decode(list(ids)) for ids in prompts.label_tokens] == [
        " jump",
        " hot",
        " talked",
    ]
    assert prompts.labels == ("jump", "hot", "talked")
    for ids, example in zip(prompts.answers, prompts.examples, strict=True):
        assert model.tokenizer.decode(list(ids)) == f" {example.answer}"
    assert BOS not in {i for ids in (*prompts.answers, *prompts.label_tokens) for i in ids}
    assert prompts.first_label_tokens.tolist() == [ids[0] for ids in prompts.label_tokens]
    assert prompts.first_answer_tokens.tolist() == [ids[0] for ids in prompts.answers]


def test_a_tokenizer_without_bos_gives_none_even_if_the_model_asks():
    model = tiny("llama")
    model.tokenizer.bos_token = None
    model.cfg.default_prepend_bos = True
    assert bos_ids(model) == []
    assert prompt_ids(model, "jump ->") == fragment_ids(model, "jump ->")


# --- answers ---


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("template", [*TEMPLATES.values(), CLOSING], ids=[*TEMPLATES, "closing"])
def test_prompt_and_answer_ids_together_are_the_ids_of_the_whole_text(template, bos):
    model = model_of(bos=bos)
    examples = [
        Example(fields=dict.fromkeys(sorted(template.fields), word), answer=answer)
        for word, answer in (("jump", "jumped"), ("☃ 4", "naïve ☃"), ("two words", "x"))
    ]
    task = Task(
        name="invented",
        template=TEMPLATES["arrow"],
        examples=tuple(Example.pair(str(i), "x") for i in range(3)),
    )
    object.__setattr__(task, "template", template)
    prompts = Prompts.from_examples(model, task, examples, [[], [], []])
    for row, example in enumerate(examples):
        whole = template.query(example) + template.answer(example.answer)
        assert [*real_ids(prompts, row), *prompts.answers[row]] == prompt_ids(model, whole)


@pytest.mark.parametrize(
    "template",
    [TEMPLATES["arrow"], TEMPLATES["qa"], Template(text="{input} {answer}"), CLOSING,
     Template(text="{input}\n{answer}")],
    ids=lambda template: template.text,
)  # fmt: skip
def test_a_tokenizer_that_begins_every_text_with_a_space_puts_none_before_answers(template):
    model = open_model(tiny_hf("llama"), tokenizer=sentencepiece_like())
    assert model.tokenizer.tokenize("walk") == ["▁walk"]
    task = open_task(template=template)
    examples = [Example.pair("walk", "walked"), Example.pair("word", "words")]
    prompts = Prompts.from_examples(model, task, examples, [[], []])
    for row, example in enumerate(examples):
        whole = template.query(example) + template.answer(example.answer)
        assert [*real_ids(prompts, row), *prompts.answers[row]] == fragment_ids(model, whole)


def test_an_answer_that_grows_together_with_the_text_before_it_is_taken_alone():
    model = model_of()
    assert fragment_ids(model, " jumped")[:1] != fragment_ids(model, " j")
    assert continuation_ids(model, " j", "umped") == tuple(fragment_ids(model, "umped"))


@pytest.mark.parametrize("template", ["arrow", "{input}->{answer}", "qa"])
def test_an_empty_answer_is_refused(template):
    task = open_task().with_template(template)
    with pytest.raises(InvalidInput, match=r"answer .* is empty; give every example"):
        Prompts.from_examples(model_of(), task, [Example.pair("jump", "")], [[]])


def test_prompts_without_answers_say_so_when_answers_are_asked():
    prompts = Prompts.from_texts(model_of(), TEXTS)
    assert prompts.answers == ((),) * len(TEXTS)
    assert len(prompts) == len(TEXTS)
    with pytest.raises(InvalidInput, match="no answers; build them from a task"):
        _ = prompts.first_answer_tokens
    with pytest.raises(InvalidInput, match=r"open answers.*task.with_labels"):
        _ = prompts.first_label_tokens


# --- padding and marks ---


def marked_texts(model, prompts, row):
    """The text up to each separator, and up to each demonstration's end, read back from the ids."""
    start = int(prompts.mask[row].long().argmax())
    first = start + (prompts.tokens[row, start] == BOS).long()
    both = zip(prompts.separators[row].tolist(), prompts.demonstration_ends[row].tolist())  # noqa: B905
    return [
        tuple(model.tokenizer.decode(prompts.tokens[row, first : end + 1]) for end in pair)
        for pair in both
        if pair != (-1, -1)
    ]


def wanted_marks(task, shown):
    """The same, written from the template."""
    before, marks = "", []
    for example in shown:
        whole = before + task.template.demonstration(example)
        marks.append((before + task.template.query(example), whole))
        before = whole + task.template.separator
    return marks


def uneven(task):
    """Four queries with 3, 0, 1 and 2 demonstrations."""
    e = task.examples
    return e[:4], [e[4:7], (), e[8:9], e[16:18]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("template", ["arrow", "qa", CLOSING], ids=["arrow", "qa", "closing"])
def test_marks_point_at_the_tokens_before_the_answer_and_at_the_end(template, slow, bos, side):
    model = without_offsets(tiny("llama", bos=bos)) if slow else model_of(bos=bos)
    task = open_task().with_template(template)
    queries, shown = uneven(task)
    prompts = Prompts.from_examples(model, task, queries, shown, padding_side=side)
    for made, rows in (
        (prompts, (0, 1, 2, 3)),
        (prompts.select([3, 1]), (3, 1)),
        (prompts.select([2, 0, 2]), (2, 0, 2)),
        (prompts.with_answers(), (0, 1, 2, 3)),
        (prompts.select([3, 0]).with_answers(), (3, 0)),
    ):
        for row, original in enumerate(rows):
            assert marked_texts(model, made, row) == wanted_marks(task, shown[original])
            last = int(made.last[row])
            assert made.mask[row, last]
            start = int(made.mask[row].long().argmax())
            assert (
                model.tokenizer.decode(made.tokens[row, start + bos : last + 1])
                == (prompts.texts[original])
            )


def test_rows_with_fewer_demonstrations_are_filled_with_minus_one():
    task = open_task()
    queries, shown = uneven(task)
    for prompts in (
        Prompts.from_examples(model_of(), task, queries, shown),
        Prompts.from_examples(model_of(), task, queries, shown).with_answers(),
    ):
        assert (prompts.separators >= 0).sum(1).tolist() == [3, 0, 1, 2]
        assert (prompts.demonstration_ends >= 0).sum(1).tolist() == [3, 0, 1, 2]
        assert (prompts.separators[1] == -1).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_lies_on_its_side_and_is_masked(side):
    ids = [[5, 6, 7], [8], [9, 10]]
    prompts = Prompts.from_ids(model_of(), ids, padding_side=side)
    assert prompts.tokens.shape == prompts.mask.shape == (3, 3)
    assert [real_ids(prompts, row) for row in range(3)] == ids
    assert prompts.lengths.tolist() == [3, 1, 2]
    assert prompts.last.tolist() == ([2, 2, 2] if side == "left" else [2, 0, 1])
    assert prompts.mask[1].tolist() == [side == "right", False, side == "left"]
    assert set(prompts.tokens[~prompts.mask].tolist()) == {model_of().tokenizer.pad_token_id}


@pytest.mark.parametrize("side", ["left", "right"])
def test_selected_rows_are_those_rows_as_if_built_alone(side):
    task = open_task()
    queries, shown = uneven(task)
    model = model_of(bos=True)
    prompts = Prompts.from_examples(model, task, queries, shown, padding_side=side)
    rows = [2, 1]
    some = prompts.select(rows)
    alone = Prompts.from_examples(
        model, task, [queries[r] for r in rows], [shown[r] for r in rows], padding_side=side
    )
    for name in ("tokens", "mask", "last"):
        assert torch.equal(getattr(some, name), getattr(alone, name))
    for name in ("answers", "texts", "examples", "labels", "label_tokens"):
        assert getattr(some, name) == getattr(alone, name)
    assert torch.equal(some.separators[:, :1], alone.separators)
    assert some.tokens.shape[1] < prompts.tokens.shape[1]


def test_no_rows_can_be_neither_built_nor_selected():
    with pytest.raises(InvalidInput, match="There are no prompts; give at least one"):
        Prompts.from_texts(model_of(), [])
    with pytest.raises(InvalidInput, match="There are no prompts; give at least one"):
        Prompts.from_examples(model_of(), open_task(), [], [])
    with pytest.raises(InvalidInput, match="There are no prompts; give at least one"):
        Prompts.from_texts(model_of(), TEXTS).select([])


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_follow_the_prompts_but_for_their_last_token(side):
    ids = [[5, 6, 7, 8], [9], [10, 11]]
    answers = ((20,), (21, 22, 23, 24), ())
    prompts = Prompts.from_ids(model_of(), ids, answers=answers, padding_side=side)
    forced = prompts.with_answers()
    assert [real_ids(forced, row) for row in range(3)] == [ids[0], [9, 21, 22, 23], ids[2]]
    for row, own in enumerate(ids):
        last = int(forced.last[row])
        start = last + 1 - len(own)
        assert forced.tokens[row, start : last + 1].tolist() == own
        assert forced.mask[row, start : last + 1].all()
        assert not forced.mask[row, :start].any()
    assert forced.answers == answers


# --- contexts ---


def test_a_row_without_tokens_is_named():
    with pytest.raises(InvalidInput, match="Row 1 has no real token"):
        Prompts.from_ids(model_of(), [[5], []])
    with pytest.raises(InvalidInput, match="The prompt '' has no tokens"):
        Prompts.from_texts(model_of(), ["jump", ""])
    assert Prompts.from_texts(model_of(bos=True), [""]).tokens.tolist() == [[BOS]]


def test_a_model_without_a_tokenizer_takes_ids_and_refuses_text():
    model = tiny("llama")
    model.tokenizer = None
    prompts = Prompts.from_ids(model, [[5, 6], [7]])
    assert prompts.tokens.tolist() == [[5, 6], [0, 7]]
    with pytest.raises(InvalidInput, match="has no tokenizer; open it with open_model"):
        Prompts.from_texts(model, ["jump"])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_context_must_hold_the_prompt_and_all_but_the_last_answer_token(family):
    model = model_of(family)
    fits = [[5] * (N_CTX - 2)]
    prompts = Prompts.from_ids(model, fits, answers=((6, 7, 8),))
    forced = prompts.with_answers()
    assert forced.tokens.shape == (1, N_CTX)
    model(forced.tokens)
    with pytest.raises(InvalidInput, match=rf"Prompt 1 has {N_CTX + 1} tokens .* holds {N_CTX};"):
        Prompts.from_ids(model, [[5], *fits], answers=((6,), (6, 7, 8, 9)))
    with pytest.raises(InvalidInput, match=rf"Prompt 0 has {N_CTX + 1} tokens"):
        Prompts.from_ids(model, [[5] * (N_CTX + 1)])


def test_prompts_longer_than_the_context_are_refused_before_any_pass():
    model = tiny("llama")
    calls = []
    model.original_model.register_forward_pre_hook(lambda *_: calls.append(1))
    asks = {
        "evaluate": lambda: evaluate(model, open_task(), shots=12),
        "dntp": lambda: dntp(model, open_task(), shots=12),
        "extract": lambda: mechtv.extract_hidden_state(model, open_task(), shots=12),
        "learn": lambda: mechtv.learn(model, open_task(), shots=12),
    }
    for name, ask in asks.items():
        with pytest.raises(InvalidInput, match=rf"Prompt \d+ has \d\d\d tokens .* holds {N_CTX};"):
            ask()
        assert not calls, name
    evaluate(model, open_task(), n=1)
    assert calls, "the probe sees passes"


# --- the queries of a task ---


@pytest.mark.parametrize("task", [open_task(), closed_task()], ids=["open", "closed"])
@pytest.mark.parametrize("how", ["per query", "fixed"])
def test_a_querys_prompt_does_not_depend_on_how_many_there_are(task, how):
    options = {"shots": 3, "seed": 4, "demonstrations": how}
    few = Prompts.of(model_of(), task, n=3, **options)
    many = Prompts.of(model_of(), task, **options)
    assert len(few) == 3 < len(many)
    assert [real_ids(few, row) for row in range(3)] == [real_ids(many, row) for row in range(3)]
    assert few.examples == many.examples[:3] == task.split("test", n=3, seed=4)


@pytest.mark.parametrize("task", [open_task(), closed_task()], ids=["open", "closed"])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_prompt_is_its_demonstrations_and_its_query(task, split):
    prompts = Prompts.of(model_of(), task, split=split, shots=4, n=6, seed=2)
    for text, query in zip(prompts.texts, task.split(split, n=6, seed=2), strict=True):
        shown = task.demonstrations(query, 4, seed=2)
        lines = [f"{e.fields['input']} -> {e.answer}" for e in shown]
        assert text == "\n".join([*lines, f"{query.fields['input']} ->"])
        assert query.key not in {e.key for e in shown}


def test_fixed_demonstrations_are_the_same_for_all_queries():
    task = open_task()
    prompts = Prompts.of(model_of(), task, shots=3, demonstrations="fixed")
    heads = {text.rpartition("\n")[0] for text in prompts.texts}
    shown = task.demonstrations(None, 3)
    assert heads == {"\n".join(map(task.template.demonstration, shown))}
    anew = Prompts.of(model_of(), task, shots=3)
    assert len({text.rpartition("\n")[0] for text in anew.texts}) == len(anew)


def test_fixed_demonstrations_refuse_queries_that_are_among_them():
    task = open_task()
    with pytest.raises(InvalidInput, match="query of the train split is among the fixed"):
        Prompts.of(model_of(), task, split="train", shots=3, demonstrations="fixed")
    Prompts.of(model_of(), task, split="train", shots=3)


def test_n_out_of_range_names_both_numbers():
    with pytest.raises(InvalidInput, match=r"n=9 examples .* test split .* holds 8"):
        Prompts.of(model_of(), open_task(), n=9)


def test_labels_that_share_a_first_token_are_named_only_when_the_label_score_is_asked():
    model = model_of()
    task = closed_task(labels=("jump", "hot", "jumped"))
    prompts = Prompts.of(model, task, shots=1)
    with pytest.raises(InvalidInput, match="labels 'jump', 'jumped' share a first token"):
        _ = prompts.first_label_tokens
    with pytest.raises(InvalidInput, match=r"'jump', 'jumped' share .*task.with_labels\(None\)"):
        evaluate(model, task)
    with pytest.raises(InvalidInput, match=r"'jump', 'jumped' share .*over='vocabulary'"):
        dntp(model, task, shots=1)
    scores = evaluate(model, task.with_labels(None))
    assert scores.label_accuracy is None
    assert dntp(model, task, shots=1, over="vocabulary").n_tokens == model.cfg.d_vocab


@pytest.mark.model
@pytest.mark.parametrize("name", ["present-past", "entailment", "sentiment", "delayed-reward"])
def test_prompts_of_the_real_model_are_its_own_tokens(model, name):
    task = mechtv.get_task(name)
    prompts = Prompts.of(model, task, shots=3, n=4)
    for row, text in enumerate(prompts.texts):
        assert real_ids(prompts, row) == model.to_tokens(text)[0].tolist()
        answer = task.template.answer(prompts.examples[row].answer)
        assert [*real_ids(prompts, row), *prompts.answers[row]] == fragment_ids(
            model, text + answer
        )
        shown = task.demonstrations(prompts.examples[row], 3)
        assert marked_texts(model, prompts, row) == wanted_marks(task, shown)
    assert prompts.tokens.shape[1] < model.cfg.n_ctx
    assert model.cfg.d_model > D_MODEL
