"""One vector explained in every way, on a tiny model: the parts, the page, the command."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from builders import tiny, tiny_hf, tiny_tokenizer
from evaluation.invented import task_of
from test_cli import call
from test_report import Page
from torch.testing import assert_close
from vectors.naive import noise

from mechtv import explain, get_task
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.accuracy import evaluate
from mechtv.report import explanation_html
from mechtv.report.explanation import SECTIONS, _command
from mechtv.report.findings import FINDINGS, finding
from mechtv.study.explain import PARTS, Finding
from mechtv.vectors import Add, Card, Edit, Replace, Site, TaskVector

MANY_HEADS = {"num_attention_heads": 8, "num_hidden_layers": 5}
SOME = ("reconstruction", "heads", "ablation", "lens")


def vector_at(bridge, layer: int = 1, **card: object) -> TaskVector:
    value = noise(bridge.cfg.d_model, seed=2).to(bridge.cfg.dtype)
    edit = Edit(site=Site(layer=layer), operation=Add(value=value))
    return TaskVector(edits=(edit,), card=Card(method="learned", seed=0, **card))


@pytest.fixture(scope="module")
def explained():
    model = tiny("llama", **MANY_HEADS)
    task = task_of(("jump", "hot", "talked"))
    return model, task, explain(model, task, vector_at(model), n=6, progress=False)


def test_every_part_is_there_with_a_table_and_a_sentence(explained) -> None:
    _, _, found = explained
    assert [part.name for part in found.findings] == list(PARTS) == list(SECTIONS)
    tables = found.tables()
    for part in found.findings:
        assert not part.refusal, part.refusal
        assert len(tables[part.name])
        assert part.seconds >= 0
        assert (finding(part) is None) == (part.name not in FINDINGS)
    assert {"zero-shot", "learned"} == set(tables["evaluation"]["setting"])


def test_the_parts_are_what_the_analyses_give_by_themselves(explained) -> None:
    model, task, found = explained
    vector = found.vector
    scores = evaluate(model, task, vector, n=6)
    np.testing.assert_array_equal(found.injected.correct, scores.correct)
    jacobian = found["jacobian"]
    turned = {turn.name: turn for turn in found["rotation"].turns}
    assert turned.keys() == {"fitted", "integrated"}
    theta = Subject.of(model, vector).theta
    assert_close(jacobian.theta.double(), theta.double())
    left, _, right = torch.linalg.svd(jacobian.matrix.double())
    assert_close(turned["integrated"].rotation, left @ right, atol=1e-8, rtol=1e-8)
    assert set(found["ablation"].heads) == set(found["heads"].saliency.top(0.1))


def test_parts_can_be_chosen_and_come_as_they_are_done() -> None:
    model, task, seen = tiny("gpt2", n_head=8, n_layer=5), task_of(), []
    found = explain(
        model, task, vector_at(model), parts=SOME, n=4, progress=False, on_finished=seen.append
    )
    assert [part.name for part in seen] == list(SOME)
    assert "lens" in found
    assert "readers" not in found
    with pytest.raises(UnknownName, match="readers"):
        found["readers"]


def test_what_one_part_refuses_is_said_and_the_others_go_on() -> None:
    model, task = tiny("llama"), task_of()  # 8 heads behind block 1: too few for 20 random sets
    found = explain(model, task, vector_at(model), parts=("ablation", "lens"), n=4, progress=False)
    refused, done = found.findings
    assert "head" in refused.refusal
    assert refused.result is None
    assert not done.refusal
    assert done.result is found["lens"]
    html = explanation_html(found)
    assert f"Not done: {refused.refusal[:20]}" in " ".join(Page(html).words)
    assert list(found.tables()["ablation"]["refusal"]) == [refused.refusal]


def test_bad_input_is_refused_before_anything_runs() -> None:
    model, task = tiny("llama"), task_of()
    with pytest.raises(UnknownName, match="readers"):
        explain(model, task, vector_at(model), parts=("reader",))
    replaced = TaskVector(
        edits=(Edit(site=Site(layer=1), operation=Replace(value=noise(32))),),
        card=Card(method="hidden_state"),
    )
    with pytest.raises(InvalidInput, match="single Add"):
        explain(model, task, replaced)


def test_behind_a_late_block_attention_is_compared_with_all_other_heads() -> None:
    model = tiny("llama", **MANY_HEADS)
    late = vector_at(model, layer=4)
    found = explain(model, task_of(), late, parts=("attention",), n=4, progress=False)
    (part,) = found.findings
    assert not part.refusal
    assert len(part.result.heads) + len(part.result.random_heads) == 8


def test_the_page_is_whole_and_shows_every_part(explained) -> None:
    _, _, found = explained
    html = explanation_html(found)
    page = Page(html)
    assert not page.open
    words = " ".join(page.words)
    for section in SECTIONS.values():
        assert section.title in words
    assert "mechtv explain VECTOR" in words
    assert sum(tag == "figure" for tag, _ in page.elements) == sum(
        len(section.figures) for section in SECTIONS.values()
    )
    assert "nan" not in words.lower().split()


def test_the_page_tells_how_to_make_it_again(explained) -> None:
    _, _, found = explained
    words = shlex.split(_command(found))
    assert words[:3] == ["mechtv", "explain", "VECTOR"]
    said = dict(zip(words[3::2], words[4::2], strict=True))
    assert said == {
        "--model": found.model.name, "--task": "invented", "--template": "{input} -> {answer}",
        "--dtype": "float64", "--n": "6", "--seed": "0",
    }  # fmt: skip
    card = replace(
        found.vector.card, model=found.model.name, task="invented", template="{input} -> {answer}"
    )
    at_home = replace(found, vector=replace(found.vector, card=card))
    assert _command(at_home) == "mechtv explain VECTOR --dtype float64 --n 6 --seed 0"
    elsewhere = replace(at_home, task=replace(found.task, source="some words.json"))
    assert "--task 'some words.json' --template '{input} -> {answer}'" in _command(elsewhere)


def test_a_run_without_right_answers_has_no_half_of_them(explained) -> None:
    lens = explained[2]["lens"]
    none = replace(lens.injected, correct=np.zeros_like(lens.injected.correct))
    part = Finding(name="lens", result=replace(lens, injected=none), seconds=0.0)
    assert finding(part).startswith("The injected run gives no right answer")


def test_the_command_writes_the_page_and_the_tables(tmp_path: Path) -> None:
    tiny_hf("llama", torch.float32, **MANY_HEADS).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    pairs = [
        {"input": e.fields["input"], "output": e.answer} for e in get_task("capitalize").examples
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs[:40]))
    model = tiny("llama", torch.float32, **MANY_HEADS)
    made = {"model": str(tmp_path / "model"), "task": str(tmp_path / "pairs.json")}
    file = vector_at(model, **made, template="{input} -> {answer}").save(tmp_path / "v.safetensors")
    out = tmp_path / "new" / "out"
    result = call("explain", file, "--out", out, "--parts", "readers, lens", "--n", 4)
    assert result.exit_code == 0, result.output
    assert "Shapley" in result.output
    assert {path.name for path in (out / "tables").iterdir()} == {
        f"{name}.csv" for name in ("readers", "lens", "evaluation", "seconds")
    }
    assert len(pd.read_csv(out / "tables" / "lens.csv"))
    assert "<html" in (out / "explanation.html").read_text(encoding="utf-8")
    refused = call_fails("explain", file, "--parts", "nonsense")
    assert "nonsense" in refused
    with pytest.raises(InvalidInput, match=r"The folder '.*v.safetensors.*' cannot be made"):
        call("explain", file, "--out", file, "--parts", "lens")


def call_fails(*words: object) -> str:
    with pytest.raises(UnknownName) as caught:
        call(*words)
    return str(caught.value)
