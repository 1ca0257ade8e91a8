"""OV reconstruction: against single passes written from the formula, and where it is exact."""

import functools
import itertools

import numpy as np
import pytest
import torch
from builders import FAMILIES, N_LAYERS, RARE_FAMILIES, tiny
from evaluation.invented import LABELS, model_of, task_of
from methods.untouched import left_alone
from torch.testing import assert_close

import mechtv
from mechtv.analysis import ov
from mechtv.analysis.answers import Answers
from mechtv.analysis.ov import Settings, head_vectors, mlp_rows, ov_rows
from mechtv.analysis.reconstructed import RECOVERED, Outcome, Reconstruction
from mechtv.analysis.reconstruction import SHARES, reconstruct_by_layer, reconstruct_ov
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.forward.probe import last_residual
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Site, TaskVector

EXACT = {"atol": 1e-10, "rtol": 1e-10}
LAYER, N = 1, 3
CENTRED = ("gpt2", "neox", "phi", "bloom", "opt", "native", "cohere", "olmo")


def theta_of(model, seed=0, size=2.0):
    generator = torch_rng(seed, "theta of a test")
    drawn = torch.randn(model.cfg.d_model, generator=generator, dtype=torch.float64)
    return size * drawn / drawn.norm() * model.cfg.d_model**0.5


def vector_of(model, layer=LAYER, seed=0):
    edit = Edit(site=Site(layer=layer), operation=Add(value=theta_of(model, seed)))
    return TaskVector(edits=(edit,), card=Card(method="made", seed=0))


# --- the naive reference: one prompt, plain hooks ------------------------------------------------


def naive_pass(model, ids, added, record=()):
    """Some activations at the last token, and the logits, with rows added at some hooks."""
    seen = {}

    def add(x, hook, row):
        x = x.clone()
        x[0, -1] += row
        return x

    def keep(x, hook, name):
        seen[name] = x[0, :, -1] if name.endswith("pattern") else x[0, -1]

    hooks = [(name, functools.partial(add, row=row)) for name, row in added.items()]
    hooks += [(name, functools.partial(keep, name=name)) for name in record]
    with torch.no_grad():
        logits = model.run_with_hooks(torch.tensor([list(ids)]), fwd_hooks=hooks)
    return seen, logits[0, -1]


def frozen_by_hand(norm, before, after, theta, centred):
    """A norm's map with its scale frozen, read off one input and output: no scale, no gain."""
    if not centred:
        return theta * after / before
    with torch.no_grad():
        bias = norm(torch.zeros(1, 1, len(theta), dtype=theta.dtype))[0, 0]
    return (theta - theta.mean()) * (after - bias) / (before - before.mean())


@functools.cache
def naive_parts(family, ids, norm, attention, mlp_state):
    """OV and MLP vectors of each block, of one query, from the formula."""
    model = model_of(family)
    theta, made, mlps = theta_of(model), {}, {}
    names = ["attn.hook_pattern", "ln1.hook_in", "ln1.hook_out", "hook_resid_pre"]
    names += [] if family in ("neox", "phi") else ["hook_resid_mid"]
    names += ["ln1_post.hook_in", "ln1_post.hook_out"] if family == "gemma2" else []
    layers = range(LAYER, N_LAYERS)
    record = [f"blocks.{i}.{name}" for i in layers for name in names]
    seen, _ = naive_pass(model, ids, {f"blocks.{LAYER}.hook_resid_pre": theta}, record)
    for i in layers:
        block, at = model.blocks[i], {name: seen[f"blocks.{i}.{name}"] for name in names}
        x = theta
        if norm == "frozen":
            x = frozen_by_hand(
                block.ln1, at["ln1.hook_in"], at["ln1.hook_out"], x, family in CENTRED
            )
        total = torch.zeros_like(theta)
        group = block.attn.W_O.shape[0] // block.attn.W_V.shape[0]
        for h in range(model.cfg.n_heads):
            weight = at["attn.hook_pattern"][h, -1] if attention == "self" else 1.0
            total += weight * (x @ block.attn.W_V[h // group]) @ block.attn.W_O[h]
        if norm == "frozen" and family == "gemma2":
            ends = at["ln1_post.hook_in"], at["ln1_post.hook_out"]
            total = frozen_by_hand(block.ln1_post, *ends, total, False)
        made[f"blocks.{i}.hook_attn_out"] = total.detach()
        h = at["hook_resid_mid" if "hook_resid_mid" in at else "hook_resid_pre"]
        sign = 1 if mlp_state == "seen" else -1
        change = naive_mlp(family, block, h + sign * theta) - naive_mlp(family, block, h)
        mlps[f"blocks.{i}.hook_mlp_out"] = sign * change
    return made, mlps


def naive_mlp(family, block, h):
    with torch.no_grad():
        norm = block.ln1 if family == "phi" else block.ln2
        out = block.mlp(norm(h[None, None]))
        return (block.ln2_post(out) if family == "gemma2" else out)[0, 0]


def seen_norm(family, x):
    return (x - x.mean() if family in CENTRED else x).norm()


def naive_placed(family, rows, settings, share):
    theta = theta_of(model_of(family))
    total = sum(rows.values())
    if share is not None:
        factor = share * seen_norm(family, theta) / seen_norm(family, total)
        rows = {name: factor * row for name, row in rows.items()}
    if settings.reading == "packed":
        return {f"blocks.{LAYER}.hook_resid_pre": sum(rows.values())}
    return rows


def naive_scores(model, task, query, ids, rows):
    _, logits = naive_pass(model, ids, rows)
    _, plain = naive_pass(model, ids, {})
    log_p = logits.log_softmax(dim=-1)
    answer = model.to_tokens(" " + query.answer, prepend_bos=False)[0, 0]
    correct = bool(logits.argmax() == answer)
    if task.labels:
        firsts = [model.to_tokens(" " + label, prepend_bos=False)[0, 0] for label in task.labels]
        others = torch.stack([logits[token] for token in firsts if token != answer])
        rival = others.mean()
    else:
        wrong = plain.index_fill(0, answer, -torch.inf)  # the rival is that of the zero-shot run
        rival = logits[wrong.argmax()]
    return correct, float(log_p[answer]), float(logits[answer] - rival)


def naive(family, task, settings, share, split="test"):
    """For each part the scores of each query."""
    model, found = model_of(family), {}
    for query in task.split(split, n=N, seed=0):
        ids = model.to_tokens(f"{query.fields['input']} ->", prepend_bos=False)[0].tolist()
        how = (settings.norm, settings.attention, settings.mlp_state)
        made, mlps = naive_parts(family, tuple(ids), *how)
        parts = {
            part: naive_placed(family, rows, settings, share)
            for part, rows in (("OV", made), ("MLP", mlps), ("OV + MLP", made | mlps))
        }
        theta = {f"blocks.{LAYER}.hook_resid_pre": theta_of(model)}
        for part, rows in ({"zero-shot": {}, "theta": theta} | parts).items():
            found.setdefault(part, []).append(naive_scores(model, task, query, ids, rows))
    return found


def check(family, labels=None, **options):
    task = task_of(labels)
    found = reconstruct_ov(
        model_of(family), task, vector_of(model_of(family)), n=N, n_null=0, **options
    )
    share = 1.0 if options.get("rescale") == "theta" else None
    wanted = naive(family, task, Settings(**options), share)
    assert list(found.outcomes) == ["zero-shot", "theta", "OV", "MLP", "OV + MLP"]
    for part, scores in wanted.items():
        answers = found.outcomes[part].answers
        correct, log_p, difference = zip(*scores, strict=True)
        assert answers.correct.tolist() == list(correct)
        np.testing.assert_allclose(answers.log_probability, log_p, **EXACT)
        np.testing.assert_allclose(answers.logit_difference, difference, **EXACT)


@pytest.mark.parametrize(
    ("reading", "norm", "attention", "rescale"),
    list(
        itertools.product(
            ("layered", "packed"), ("frozen", "none"), ("self", "none"), ("none", "theta")
        )
    ),
)
def test_every_reading_is_the_formula(reading, norm, attention, rescale):
    check("llama", reading=reading, norm=norm, attention=attention, rescale=rescale)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "neox", "phi"])
@pytest.mark.parametrize("reading", ["layered", "packed"])
def test_every_family_is_the_formula(family, reading):
    check(family, LABELS, reading=reading, rescale="theta" if reading == "packed" else "none")


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_the_mlps_may_begin_from_the_state_with_theta_in_it(family):
    check(family, mlp_state="seen")


def test_the_factor_is_the_best_one_on_the_validation_queries():
    model, task = model_of(), task_of()
    options = {"rescale": "validation", "reading": "packed", "mlp_state": "seen"}
    found = reconstruct_ov(model, task, vector_of(model), n=N, n_null=0, **options)
    settings = Settings(**options)
    tried = {share: naive("llama", task, settings, share, "validation") for share in SHARES}
    for part in ("OV", "MLP", "OV + MLP"):
        log_p = [np.mean([score[1] for score in tried[share][part]]) for share in SHARES]
        assert found.shares[part] == SHARES[int(np.argmax(log_p))]
        np.testing.assert_allclose(found.outcomes[part].norm, found.shares[part], **EXACT)
    assert len(set(found.shares.values())) > 1


# --- where it is exact ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *RARE_FAMILIES])
def test_each_head_is_what_the_attention_makes_of_theta_under_a_frozen_pattern_and_scale(family):
    """Measured: at the last token, theta behind the norm moves what one block's values read."""
    model, layer = model_of(family), 2
    ids, at = [5, 9, 14, 7, 30], "blocks.2."
    block = model.blocks[layer]
    names = [at + name for name in ("attn.hook_z", "attn.hook_out", "hook_attn_out")]
    norms = [at + name for name in ("ln1.hook_in", "ln1.hook_out") if hasattr(block, "ln1")]
    theta, vector = theta_of(model), vector_of(model)
    added = {f"blocks.{LAYER}.hook_resid_pre": theta}
    seen, _ = naive_pass(model, ids, added, [*names, *norms])
    ends = [seen[name] for name in norms]
    step = frozen_by_hand(block.ln1, *ends, theta, family in CENTRED) if ends else theta
    moved, _ = naive_pass(model, ids, added | {at + "attn.v.hook_in": step}, names)
    prompts = Prompts.from_ids(model, [ids])
    subject = Subject.of(model, vector)
    with torch.no_grad():
        heads = dict(head_vectors(model, subject, prompts, Settings()))[layer][0]
        rows = ov_rows(model, subject, prompts, Settings())
    change = {name: moved[name] - seen[name] for name in names}
    factor = 0.5 if family == "granite" else 1.0  # on what its blocks add to the stream
    measured = factor * torch.einsum("hw,hwd->hd", change[at + "attn.hook_z"], block.attn.W_O)
    whole = factor * change[at + "attn.hook_out"]
    if hasattr(block, "ln1_post"):  # behind the attention is a norm, whose scale is frozen too
        reads = [at + "ln1_post.hook_in", at + "ln1_post.hook_out"]
        ends, _ = naive_pass(model, ids, added, reads)
        post = functools.partial(frozen_by_hand, block.ln1_post, *(ends[name] for name in reads))
        measured = torch.stack([post(head, False) for head in measured])
        whole = post(whole, False)
    assert whole.norm() > 0.01
    assert_close(heads, measured.detach(), **EXACT)
    assert_close(rows[at + "hook_attn_out"][0], whole, **EXACT)


def test_the_literal_formula_is_the_whole_effect_where_nothing_else_can_act():
    """One token, one block left, no norms, no MLPs: the effect is theta + W_O W_V theta."""
    model = tiny("native", normalization_type=None, attn_only=True)
    vector = vector_of(model, layer=2)
    prompts, subject = Prompts.from_ids(model, [[5], [9]]), Subject.of(model, vector)
    literal = Settings(norm="none", attention="none")
    with torch.no_grad():
        effect = last_residual(model, prompts, vector) - last_residual(model, prompts)
        (row,) = ov_rows(model, subject, prompts, literal).values()
        assert mlp_rows(model, subject, prompts, literal) == {}
    assert_close(effect - subject.theta, row, **EXACT)
    assert row.norm() > 1


def test_a_model_without_mlps_has_no_control():
    model = tiny("native", normalization_type=None, attn_only=True)
    found = reconstruct_ov(model, task_of(), vector_of(model), norm="none", n=N, n_null=2)
    assert list(found.outcomes) == ["zero-shot", "theta", "OV"]
    assert {part for part, _ in found.nulls} == {"OV"}


@pytest.mark.parametrize("family", [*FAMILIES, *RARE_FAMILIES])
def test_the_mlps_parts_are_those_of_each_block_alone(family):
    """Each block by itself: its MLP reads theta twice, and what it gives changes."""
    model, ids = model_of(family), [5, 9, 14, 7]
    prompts, subject = Prompts.from_ids(model, [ids]), Subject.of(model, vector_of(model))
    with torch.no_grad():
        found = mlp_rows(model, subject, prompts, Settings(mlp_state="seen"))
    added = {f"blocks.{LAYER}.hook_resid_pre": subject.theta}
    for layer in range(LAYER, N_LAYERS):
        name = f"blocks.{layer}.hook_mlp_out"
        entrance = "hook_resid_pre" if family in ("neox", "phi", "cohere") else "hook_attn_out"
        place = f"blocks.{layer}.{entrance}"
        more = added | {place: added.get(place, 0) + subject.theta}
        change = naive_pass(model, ids, more, [name])[0][name]
        change = change - naive_pass(model, ids, added, [name])[0][name]
        assert_close(found[name][0], change, **EXACT)
        assert change.norm() > 0.01


def test_theta_rescaled_to_nothing_else_is_theta():
    """With its own norm and cosine 1, a packed vector is theta; a zero sum stays zero."""
    model = model_of()
    subject = Subject.of(model, vector_of(model))
    rows = {"a": 3 * subject.theta[None], "b": subject.theta[None], "c": 0 * subject.theta[None]}
    scaled = ov.rescaled(model, subject, rows, 0.5)
    assert_close(ov.summed(scaled)[0], 0.5 * subject.theta, **EXACT)
    assert_close(scaled["a"], 3 * scaled["b"], **EXACT)
    nothing = ov.rescaled(model, subject, {"c": rows["c"]}, 1.0)
    assert float(nothing["c"].abs().max()) == 0


# --- nulls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("across", [False, True])
def test_nulls_have_the_norms_and_cosines_they_promise(family, across):
    model = model_of(family)
    subject = Subject.of(model, vector_of(model))
    prompts = Prompts.from_ids(model, [[5, 9, 14], [7, 30, 8, 2]])
    generator = torch_rng(0, "a test")
    with torch.no_grad():
        rows = ov_rows(model, subject, prompts, Settings())
        drawn = ov.directions(model, subject, len(rows), generator, across=across)
        nulls = ov.null_rows(model, subject, rows, drawn, across=across)
    theta = subject.theta - (subject.theta.mean() if family == "gpt2" else 0)
    assert list(nulls) == list(rows)
    for name, row in rows.items():
        if family == "gpt2":
            row = row - row.mean(dim=1, keepdim=True)
            assert float(nulls[name].mean(dim=1).abs().max()) < 1e-12
        assert_close(nulls[name].norm(dim=1), row.norm(dim=1), **EXACT)
        cosines = [torch.cosine_similarity(x, theta, dim=1) for x in (nulls[name], row)]
        assert torch.allclose(*cosines, atol=1e-10) == across
        assert float(torch.cosine_similarity(nulls[name], row, dim=1).abs().max()) < 0.95


@pytest.mark.parametrize("reading", ["packed", "layered"])
def test_every_draw_is_another_and_its_outcome_says_what_it_was(reading):
    model = model_of()
    found = reconstruct_ov(
        model, task_of(LABELS), vector_of(model), n=N, n_null=4, reading=reading, rescale="theta"
    )
    assert set(found.nulls) == set(itertools.product(("OV", "MLP"), ("norm", "norm and cosine")))
    for (part, kind), draws in found.nulls.items():
        assert len({float(draw.answers.log_probability.mean()) for draw in draws}) == 4
        if reading == "packed":
            for draw in draws:
                np.testing.assert_allclose(draw.norm, 1.0, **EXACT)
                same = np.allclose(draw.cosine, found.outcomes[part].cosine, atol=1e-10)
                assert same == (kind == "norm and cosine")
    for part in ("OV", "MLP", "OV + MLP"):
        np.testing.assert_allclose(found.outcomes[part].norm, 1.0, **EXACT)
    np.testing.assert_allclose(found.outcomes["theta"].cosine, 1.0, **EXACT)


def test_the_same_seed_gives_the_same_numbers_and_the_model_is_left_alone():
    model, task = tiny("llama"), task_of()
    with left_alone(model):
        found = [
            reconstruct_ov(model, task, vector_of(model), n=N, n_null=1, seed=seed)
            for seed in (0, 0, 1)
        ]
    for key in found[0].nulls:
        first, again, other = (one.nulls[key][0].answers.log_probability for one in found)
        np.testing.assert_array_equal(first, again)
        assert not np.allclose(first, other)


# --- results -------------------------------------------------------------------------------------


def outcome(log_p, cosine=np.nan):
    log_p = np.asarray(log_p, dtype=float)
    answers = Answers(
        correct=log_p > -1, correct_label=None, log_probability=log_p, logit_difference=log_p
    )
    return Outcome(answers=answers, cosine=np.full(len(log_p), cosine), norm=np.ones(len(log_p)))


def made(theta, part, nulls=()):
    zero = np.array([-5.0, -4.0, -6.0, -5.5])
    outcomes = {"zero-shot": outcome(zero), "theta": outcome(theta), "OV": outcome(part, 0.5)}
    return Reconstruction(
        task="t", layer=3, split="test", settings=Settings(), outcomes=outcomes,
        nulls={("OV", "norm"): tuple(outcome(one, 0.1) for one in nulls)} if len(nulls) else {},
        shares={},
    )  # fmt: skip


def test_the_share_recovered_is_a_ratio_of_gains_with_its_interval():
    theta, part = np.array([-1.0, -2.0, -1.0, -0.5]), np.array([-3.0, -3.0, -3.5, -4.0])
    found = made(theta, part, nulls=[part - 1, part - 3])
    share = found.recovered("OV")
    zero = np.array([-5.0, -4.0, -6.0, -5.5])
    assert share.value == pytest.approx((part - zero).sum() / (theta - zero).sum())
    assert share.low < share.value < share.high
    assert (share.low, share.high) == pytest.approx((0.36, 0.48), abs=0.05)
    assert found.recovered("theta").value == 1
    assert found.recovered("theta").low == pytest.approx(1, abs=1e-12)
    assert found.recovered("zero-shot").high == 0
    null = found.recovered("OV", "norm")
    assert null.value == pytest.approx((part - 2 - zero).sum() / (theta - zero).sum())


def test_without_a_gain_there_is_no_share():
    zero = np.array([-5.0, -4.0, -6.0, -5.5])
    assert np.isnan(made(zero - 1, zero).recovered("OV").value)
    unsure = made(zero + np.array([3.0, -1.0, -1.0, 0.5]), zero).recovered("OV")
    assert unsure.value == 0
    assert np.isnan([unsure.low, unsure.high]).all()


def test_the_table_has_one_row_a_part_null_and_score():
    theta, part = np.array([-1.0, -2.0, -1.0, -0.5]), np.array([-3.0, -3.0, -0.5, -4.0])
    table = made(theta, part, nulls=[part - 1, part - 3, part]).table()
    rows = table.set_index(["part", "null", "score"])
    assert rows.index.is_unique
    assert set(table.loc[table["part"] == "zero-shot", "score"]) == {
        "accuracy, full vocabulary", "log-probability", "logit difference", RECOVERED
    }  # fmt: skip
    assert rows.loc[("OV", "", "cosine with theta"), "value"] == 0.5
    row = rows.loc[("OV", "norm", "log-probability")]
    assert row["value"] == pytest.approx(part.mean() - 4 / 3)
    assert (row["lowest"], row["highest"]) == pytest.approx((part.mean() - 3, part.mean()))
    assert (row["draws"], row["n"], row["layer"], row["task"]) == (3, 4, 3, "t")
    hits = rows.loc[("OV", "norm", "accuracy, full vocabulary")]
    assert (hits["value"], hits["lowest"], hits["highest"]) == pytest.approx((1 / 12, 0, 0.25))
    with pytest.raises(InvalidInput, match="There is no 'MLP' in this reconstruction; it has zero"):
        made(theta, part).recovered("MLP")


def test_several_layers_make_one_table():
    model, task = model_of(), task_of()
    vectors = [vector_of(model, layer) for layer in (2, 0)]
    found = reconstruct_by_layer(model, task, vectors, n=N, n_null=0)
    assert [one.layer for one in found.layers] == [0, 2]
    alone = reconstruct_ov(model, task, vectors[0], n=N, n_null=0).table()
    table = found.table()
    there = table[table["layer"] == 2].reset_index(drop=True)
    assert there.equals(alone)
    with pytest.raises(InvalidInput, match=r"layers \[1, 1\]; give one or more, each of another"):
        reconstruct_by_layer(model, task, [vector_of(model), vector_of(model)])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reading": "both"}, "reading='both' is unknown; use 'layered' or 'packed'"),
        ({"norm": "live"}, "norm='live' is unknown; use 'frozen' or 'none'"),
        ({"attention": True}, "attention=True is unknown; use 'self' or 'none'"),
        ({"rescale": "half"}, "rescale='half' is unknown; use 'none' or 'theta' or 'validation'"),
        ({"mlp_state": "h"}, "mlp_state='h' is unknown; use 'seen' or 'without'"),
        ({"n_null": -1}, "n_null=-1 is negative; use 10 or more"),
        ({"rescale": "validation", "split": "validation"}, "use split='test'"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    model = model_of()
    with pytest.raises(InvalidInput, match=sentence):
        reconstruct_ov(model, task_of(), vector_of(model), n=N, **options)


@pytest.mark.model
def test_on_the_real_model_theta_gains_and_its_parts_are_scored(model):
    task = mechtv.get_task("singular-plural")
    vector = mechtv.extract_hidden_state(model, task, 18, shots=5, n=8, operation="add")
    found = reconstruct_ov(model, task, vector, n=8, n_null=1)
    assert found.recovered("theta").value == 1
    assert abs(found.recovered("OV").value) < 2
    assert 0 < found.outcomes["OV"].norm.mean() < 10
