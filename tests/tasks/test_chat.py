"""The chat form: every prompt against text written by hand, for chat templates of several kinds."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from builders import D_MODEL, SENTENCES, tiny
from evaluation.naive import greedy, naive_logits, next_logits, row_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.methods.state_vector import extract_state_vector
from mechtv.tasks.chat import template_for
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES, Template
from mechtv.tasks.tokens import fragment_ids
from mechtv.vectors import Add, Card, Edit, Site, TaskVector

BOS = 0
WORDS = ("jump", "walk", "play", "look", "talk", "hot", "naïve ☃", "two words", "France", "a")


@dataclass(frozen=True)
class Style:
    """A chat template, and the same by hand.

    `by_hand` gives the text of a whole chat; `lead` is the white space before an answer,
    `before_answer` and `closing` what stands around it, and `bos` whether the text begins with BOS.
    """

    jinja: str
    by_hand: Callable[..., str]
    before_answer: str
    closing: str
    lead: str = ""
    bos: bool = False


def chatml(pairs, query, system=None):
    """`query` None: up to the last answer."""
    text = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    for question, answer in pairs:
        text += f"<|im_start|>user\n{question}<|im_end|>\n"
        text += f"<|im_start|>assistant\n{answer}<|im_end|>\n"
    return f"{text}<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n"


def with_default_system(pairs, query, system="You are tiny."):
    return chatml(pairs, query, system)


def header(pairs, query, system=None):
    turns = [] if system is None else [("system", system)]
    for question, answer in pairs:
        turns += [("user", question), ("assistant", answer)]
    turns.append(("user", query))
    body = "".join(f"<|im_start|>{role}\n\n{text}<|im_end|>" for role, text in turns)
    return f"<s>{body}<|im_start|>assistant\n\n"


def instruct(pairs, query):
    return (
        "<s>" + "".join(f"[INST] {q} [/INST] {a}</s>" for q, a in pairs) + f"[INST] {query} [/INST]"
    )


def bare(pairs, query):
    return (
        "".join(f"User: {q}\nAssistant: {a}\n\n" for q, a in pairs) + f"User: {query}\nAssistant:"
    )


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STYLES = {
    "chatml": Style(CHATML, chatml, "<|im_start|>assistant\n", "<|im_end|>"),
    "default system": Style(
        "{% if messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are tiny.<|im_end|>\n' }}{% endif %}" + CHATML,
        with_default_system,
        "<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "writes bos": Style(
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + "
        "m['content'] | trim + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}",
        header,
        "<|im_start|>assistant\n\n",
        "<|im_end|>",
        bos=True,
    ),
    "no generation prompt": Style(
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'system' %}"
        "{{ raise_exception('no system messages') }}{% else %}"
        "{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
        instruct,
        " [/INST]",
        "</s>",
        lead=" ",
        bos=True,
    ),
    "no end of turn": Style(
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n' }}"
        "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + '\n\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        bare,
        "\nAssistant:",
        "",
        lead=" ",
    ),
}


@cache
def chat_tokenizer(bos=False):
    """A byte-level tokenizer that knows the marks of turns, saved and reopened."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    marks = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([*SENTENCES, *["user\nassistant\nsystem\n"] * 9], trainer)
    if bos:
        trained.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    folder = tempfile.mkdtemp(prefix="mechtv-chat-tokenizer-")
    PreTrainedTokenizerFast(tokenizer_object=trained, **names).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@cache
def model_of(style="chatml", bos=False, family="llama", slow=False):
    """A model that is only read."""
    return with_template(STYLES[style].jinja, bos, family, slow)


def with_template(jinja, bos=False, family="llama", slow=False):
    room = {"n_positions": 512} if family == "gpt2" else {"max_position_embeddings": 512}
    model = tiny(family, bos=bos, **room)
    model.tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer(bos).name_or_path)
    model.tokenizer.chat_template = jinja
    return without_offsets(model) if slow else model


def without_offsets(model):
    """The model with a tokenizer that has no offsets, as those written in Python."""

    class Slow(type(model.tokenizer)):
        is_fast = False

        def __call__(self, text, **options):
            assert "return_offsets_mapping" not in options
            return super().__call__(text, **options)

    model.tokenizer.__class__ = Slow
    return model


def task_of(labels=None, n=40, template=TEMPLATES["arrow"], **chat):
    """Answers of one to many tokens, or labels."""
    answers = labels or [f"{WORDS[i % 9]}{'ed' * (i % 3)}" for i in range(n)]
    examples = tuple(
        Example.pair(f"{WORDS[i % 10]} {'x' * (i // 10)}", answers[i % len(answers)])
        for i in range(n)
    )
    task = Task(name="invented", examples=examples, template=template, labels=labels)
    return task.as_chat(**chat)


def pairs_of(shown):
    """What user and assistant say in each demonstration, under the template `arrow`."""
    return [(f"{e.fields['input']} ->", e.answer) for e in shown]


def queries_of(task):
    """Four queries with 3, 0, 1 and 2 demonstrations."""
    e = task.examples
    return e[:4], [e[4:7], (), e[8:9], e[16:18]]


def read(model, prompts, row, column):
    """The text of a row from its first real token to one column, read back from the ids."""
    start = int(prompts.mask[row].long().argmax())
    return model.tokenizer.decode(prompts.tokens[row, start : column + 1])


# --- prompts ---


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_prompts_are_the_text_by_hand_and_marks_lie_around_the_answers(style, bos, slow, side):
    model, task = model_of(style, bos, slow=slow), task_of()
    by_hand, kind = STYLES[style].by_hand, STYLES[style]
    queries, shown = queries_of(task)
    prompts = Prompts.from_examples(model, task, queries, shown, padding_side=side)
    begin = "<s>" if bos and not kind.bos else ""
    for made, rows in ((prompts, (0, 1, 2, 3)), (prompts.with_answers(), (0, 1, 2, 3)),
                       (prompts.select([3, 1]), (3, 1))):  # fmt: skip
        for row, original in enumerate(rows):
            pairs, query = pairs_of(shown[original]), f"{queries[original].fields['input']} ->"
            whole = by_hand(pairs, query)
            assert made.texts[row] == whole
            assert read(model, made, row, int(made.last[row])) == begin + whole
            columns = [c for c in made.separators[row].tolist() if c >= 0]
            ends = [c for c in made.demonstration_ends[row].tolist() if c >= 0]
            assert len(columns) == len(ends) == len(pairs)
            for i, (separator, end) in enumerate(zip(columns, ends, strict=True)):
                asked = by_hand(pairs[:i], pairs[i][0])
                assert asked.endswith(kind.before_answer)
                assert read(model, made, row, separator) == begin + asked
                said = asked + kind.lead + pairs[i][1] + kind.closing
                assert read(model, made, row, end) == begin + said
                assert whole.startswith(said)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("style", ["chatml", "writes bos"])
def test_bos_stands_once_where_the_tokenizer_adds_it_or_the_template_writes_it(style, bos):
    model = model_of(style, bos)
    prompts = Prompts.of(model, task_of(), shots=2)
    for row in range(len(prompts)):
        ids = row_of(prompts, row)
        assert ids.count(BOS) == (bos or STYLES[style].bos)
        assert ids.index(BOS) == 0 if BOS in ids else True
    if bos and STYLES[style].bos:
        assert model.tokenizer(prompts.texts[0])["input_ids"].count(BOS) == 2, "the wrong way"


@pytest.mark.parametrize("style", STYLES)
def test_answers_continue_the_generation_prompt(style):
    model, task = model_of(style), task_of()
    queries, shown = queries_of(task)
    prompts = Prompts.from_examples(model, task, queries, shown)
    for row, query in enumerate(queries):
        whole = prompts.texts[row] + STYLES[style].lead + query.answer
        if style != "writes bos":  # there "\n\n" is one token before nothing and two before words
            assert [*row_of(prompts, row), *prompts.answers[row]] == fragment_ids(model, whole)
        assert model.tokenizer.decode(list(prompts.answers[row])) == (
            STYLES[style].lead + query.answer
        )


def test_labels_continue_the_generation_prompt_and_may_not_share_a_first_token():
    model = model_of()
    prompts = Prompts.of(model, task_of(("jump", "hot", "talk")), shots=1)
    assert [model.tokenizer.decode(list(ids)) for ids in prompts.label_tokens] == [
        "jump",
        "hot",
        "talk",
    ]
    assert prompts.first_label_tokens.tolist() == [
        fragment_ids(model, word)[0] for word in prompts.labels
    ]
    shared = Prompts.of(model, task_of(("jump", "hot", "jumped")), shots=1)
    with pytest.raises(InvalidInput, match="labels 'jump', 'jumped' share a first token"):
        _ = shared.first_label_tokens
    with pytest.raises(InvalidInput, match="answer ' ' is empty; give every example"):
        Prompts.from_examples(
            model_of("no end of turn"), task_of(), [Example.pair("jump", " ")], [[]]
        )


@pytest.mark.parametrize("style", ["chatml", "default system", "writes bos"])
@pytest.mark.parametrize("system", ["Answer in one word.", ""])
def test_a_system_message_begins_the_chat_and_replaces_the_default(style, system):
    task = task_of(system=system)
    queries, shown = queries_of(task)
    prompts = Prompts.from_examples(model_of(style), task, queries, shown)
    for text, query, own in zip(prompts.texts, queries, shown, strict=True):
        wanted = STYLES[style].by_hand(pairs_of(own), f"{query.fields['input']} ->", system)
        assert text == wanted


def test_white_space_around_turns_and_text_behind_the_answer_are_left_out():
    template = Template(text="{input} =\n{answer}.", separator=" ; ")
    task = replace(task_of(), template=template).as_chat()
    shown, query = Example.pair(" jump", "jumped "), Example.pair("\twalk", " walked\n")
    for style in ("chatml", "writes bos"):
        model = model_of(style)
        prompts = Prompts.from_examples(model, task, [query], [[shown]])
        assert prompts.texts == (STYLES[style].by_hand([("jump =", "jumped")], "walk ="),)
        assert model.tokenizer.decode(list(prompts.answers[0])) == "walked"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("bos", [True, False])
def test_a_demonstration_alone_is_the_beginning_of_a_prompt(style, bos):
    model, task = model_of(style, bos), task_of()
    shown = task.examples[4:7]
    template = template_for(model, task.template)
    alone = Prompts.from_texts(model, [template.demonstration(example) for example in shown])
    for row, example in enumerate(shown):
        prompts = Prompts.from_examples(model, task, task.examples[:1], [[example]])
        end = int(prompts.demonstration_ends[0, 0])
        assert row_of(alone, row) == prompts.tokens[0, : end + 1].tolist()
        assert alone.texts[row].endswith(example.answer + STYLES[style].closing)
    assert template.closing == STYLES[style].closing


def test_a_plain_template_is_its_own_form():
    template = TEMPLATES["qa"]
    assert template_for(model_of(), template) is template


# --- what is done with the prompts ---


def vector_of():
    draw = torch.Generator().manual_seed(0)
    value = 2 * torch.randn(2, D_MODEL, generator=draw, dtype=torch.float64)
    edit = Edit(site=Site(layer=1, positions=(-2, -1)), operation=Add(value=value))
    return TaskVector(edits=(edit,), card=Card(method="by hand"))


@pytest.mark.parametrize("vector", [None, vector_of()], ids=["plain", "vector"])
@pytest.mark.parametrize(
    ("style", "family", "bos"),
    [("chatml", "llama", True), ("writes bos", "gpt2", True), ("no generation prompt", "llama", 0)],
)
def test_answers_of_several_tokens_score_as_by_hand(style, family, bos, vector):
    model, task = model_of(style, bool(bos), family), task_of()
    scores = evaluate(model, task, vector, shots=2, n=5, seed=3, progress=False)
    lengths = set()
    for place, query in enumerate(task.split("test", n=5, seed=3)):
        pairs = pairs_of(task.demonstrations(query, 2, seed=3))
        text = STYLES[style].by_hand(pairs, f"{query.fields['input']} ->")
        ids = [BOS] * (bos and not STYLES[style].bos) + fragment_ids(model, text)
        answer = fragment_ids(model, text + STYLES[style].lead + query.answer)
        answer = answer[len(fragment_ids(model, text)) :]
        if style == "writes bos":
            answer = fragment_ids(model, query.answer)
        total = 0.0
        for column, token in enumerate(answer):
            logits = torch.tensor(
                next_logits(model, tuple(ids + answer[:column]), len(ids), vector),
                dtype=torch.float64,
            )
            total += float(logits.log_softmax(0)[token])
        assert scores.log_probabilities[place] == pytest.approx(total / len(answer), abs=1e-10)
        assert bool(scores.correct_exact[place]) == (
            greedy(model, ids, len(answer), vector) == answer
        )
        lengths.add(len(answer))
    assert max(lengths) > 2
    assert not math.isnan(scores.log_probability.value)


def test_a_state_vector_reads_the_ends_of_the_generation_prompts():
    model, task = model_of(bos=True), task_of()
    vector = extract_state_vector(model, task, 1, shots=3, window=4, n=1, seed=2)
    (query,) = task.split("train", n=1, seed=2)
    text = chatml(pairs_of(task.demonstrations(query, 3, seed=2)), f"{query.fields['input']} ->")
    ids = model.tokenizer(text)["input_ids"]
    before = fragment_ids(model, "<|im_start|>assistant\n")
    ends = [c for c in range(len(ids)) if ids[c + 1 - len(before) : c + 1] == before]
    assert len(ends) == 4
    for layer in (0, 1):
        keep = {model.get_hook_point(f"blocks.{layer}.attn.hook_z").name: None}
        naive_logits(model, ids, len(ids), keep=keep)
        (z,) = keep.values()
        torch.testing.assert_close(
            vector.edits[layer].operation.value, z[ends].mean(0), atol=1e-10, rtol=0
        )


# --- what is refused ---


def refused(jinja, match, task=None, shots=2):
    model = unfriendly()
    model.tokenizer.chat_template = jinja
    with pytest.raises(InvalidInput, match=match):
        Prompts.of(model, task or task_of(), shots=shots)


@cache
def unfriendly():
    """A model whose chat template is changed again and again."""
    return with_template(None)


def test_a_model_without_a_chat_template_is_named_with_the_remedy():
    model = tiny("llama")
    match = r"tokenizer of 'LlamaForCausalLM' has no chat template; use the task's plain template"
    with pytest.raises(InvalidInput, match=match):
        Prompts.of(model, task_of())
    with pytest.raises(InvalidInput, match=match):
        evaluate(model, task_of(), shots=2)
    model.tokenizer = None
    with pytest.raises(InvalidInput, match="has no tokenizer"):
        Prompts.of(model, task_of())


def test_chat_templates_that_mechtv_cannot_follow_are_refused_in_one_sentence():
    refused(
        STYLES["no generation prompt"].jinja,
        r"refuses the turns or the system message \(no system messages\); use the task's plain",
        task_of(system="Be brief."),
    )
    refused("{{ raise_exception('no chats') }}", r"refuses the turns \(no chats\)")
    refused(STYLES["no end of turn"].jinja, "no place for a system", task_of(system="Be brief."))
    refused(CHATML.replace("m['content']", "m['content'] | replace('e', 'E')"), "changes what is")
    refused(CHATML.replace("m['content']", "m['content'] | upper"), "changes what is said")
    refused("{{ messages[0]['content'] }}", "does not write every turn")
    refused(
        CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"),
        r"ends a prompt with '.*<think>\\n', but puts '.*assistant\\n' before an answer",
    )
    refused(
        CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"), "before an answer", shots=0
    )
    refused(
        STYLES["no end of turn"].jinja.replace("{{ 'Assistant:' }}", "{{ 'Assistant: ' }}"),
        "last space tokenizers give to the answer",
    )


@pytest.mark.parametrize(
    "ask",
    [
        lambda t, e: t.anchor,
        lambda t, e: t.answer("x"),
        lambda t, e: t.demonstration(e),
        lambda t, e: t.prompt(e),
    ],
    ids=["anchor", "answer", "demonstration", "prompt"],
)
def test_a_chat_form_without_its_model_gives_no_text_that_stands_around_turns(ask):
    template, example = TEMPLATES["arrow"].as_chat(), Example.pair("jump", "jumped")
    assert template.query(example) == "jump ->"
    with pytest.raises(InvalidInput, match=r"differs from model to model; use .*template_for"):
        ask(template, example)


def test_a_system_message_needs_a_chat():
    with pytest.raises(InvalidInput, match=r"'Be brief\.' needs the chat form"):
        Template(text="{input} -> {answer}", system="Be brief.")


# --- records ---


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATES["arrow"],
        TEMPLATES["qa"].as_chat(),
        TEMPLATES["qa"].as_chat(""),
        TEMPLATES["arrow"].as_chat('Say "é"] \\ {x}\nonly.'),
        replace(TEMPLATES["qa"], separator="\n\n"),
        replace(TEMPLATES["arrow"], separator='"] é'),
    ],
    ids=lambda template: template.description,
)
def test_a_description_tells_forms_apart_and_can_be_read_back(template):
    described = template.description
    assert Template.from_description(described) == template
    usual = not template.chat and template.separator == "\n"
    assert (described == template.text) == usual
    assert template.text in described


def test_a_plain_text_cannot_pass_for_a_chat_form():
    described = TEMPLATES["arrow"].as_chat().description
    assert described == "[chat] {input} -> {answer}"
    with pytest.raises(
        InvalidInput, match=r"begins like the description of a template.*from_description"
    ):
        Template(text=described)
    for wrong in (
        "[chat {input} {answer}",
        '[chat, system "a] {input} {answer}',
        "[separator ;] {input} {answer}",
        '[chat, separator "; "] {input} {answer}',
    ):
        with pytest.raises(InvalidInput, match="describes no template"):
            Template.from_description(wrong)


def test_a_task_takes_the_chat_form_and_leaves_it():
    task = task_of(system="Be brief.")
    assert task.template == Template(text="{input} -> {answer}", chat=True, system="Be brief.")
    assert task.splits() == task.with_template("arrow").splits()
    assert not task.with_template("arrow").template.chat
    assert task.as_chat().template.system is None


# --- the real model ---


@pytest.mark.model
@pytest.mark.parametrize("system", [None, "Answer in one word."])
def test_the_default_model_has_a_chat_template(model, system):
    task = mechtv.get_task("present-past").as_chat(system)
    prompts = Prompts.of(model, task, shots=3, n=4)
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    for row, query in enumerate(prompts.examples):
        pairs = pairs_of(task.demonstrations(query, 3))
        text = chatml(pairs, f"{query.fields['input']} ->", default if system is None else system)
        assert prompts.texts[row] == text
        messages = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in pairs:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": f"{query.fields['input']} ->"})
        ids = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert row_of(prompts, row) == ids
        assert [*ids, *prompts.answers[row]] == fragment_ids(model, text + query.answer)
        for i, column in enumerate(prompts.separators[row].tolist()):
            asked = read(model, prompts, row, column)
            assert asked.endswith(f"{pairs[i][0]}<|im_end|>\n<|im_start|>assistant\n")
        ends = prompts.tokens[row, prompts.demonstration_ends[row]].tolist()
        assert ends == [model.tokenizer.eos_token_id] * 3


@pytest.mark.parametrize("labels", [None, ("jump", "hot", "talk")], ids=["open", "closed"])
def test_every_score_reads_the_chat_form(labels):
    model, task = model_of(), task_of(labels)
    for over in ("labels", "vocabulary"):
        assert mechtv.dntp(model, task, shots=2, over=over, n=4).value > 0
    written = mechtv.evaluate_generated(model, task, shots=2, n=4)
    forced = evaluate(model, task, shots=2, n=4)
    assert (written.correct_start == forced.correct_exact).all()
    answers = labels or {example.answer for example in task.examples}
    longest = max(len(fragment_ids(model, answer)) for answer in answers)
    assert written.new_tokens == longest + 2


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("extract_hidden_state", {"shots": 2, "n": 3}),
        ("extract_function_vector", {"shots": 2, "n": 3, "n_shuffled": 2}),
        ("extract_state_vector", {"shots": 2, "optimisation": "none"}),
        ("extract_i2cl", {"shots": 2, "calibrate": False}),
        ("fit_linear", {"shots": 2, "n": 3}),
        ("learn", {"epochs": 1, "n_train": 4, "n_validation": 2}),
    ],
)
def test_every_method_makes_another_vector_in_the_chat_form_and_says_so(make, options):
    model, task = model_of(), task_of()
    plain = replace(task, template=TEMPLATES["arrow"])
    chat, other = (getattr(mechtv, make)(model, each, **options) for each in (task, plain))
    assert chat.card.template == "[chat] {input} -> {answer}"
    assert other.card.template == "{input} -> {answer}"
    assert task.with_template(chat.card.template) == task
    for mine, theirs in zip(chat.edits, other.edits, strict=True):
        tensors = zip(
            mine.operation.tensors().values(), theirs.operation.tensors().values(), strict=True
        )
        assert any(not torch.allclose(a, b) for a, b in tensors)
