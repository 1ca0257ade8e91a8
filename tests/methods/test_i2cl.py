"""I2CL against single full passes with plain hooks, its calibration against a loop by hand."""

import json
import math
import random

import pytest
import torch
from builders import D_MODEL, N_LAYERS, tiny
from evaluation.invented import LABELS, WORDS, model_of, task_of
from evaluation.naive import naive_logits
from methods.untouched import left_alone

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.forward import last_logits
from mechtv.methods.calibration import noisy, rate
from mechtv.methods.i2cl import extract_i2cl
from mechtv.seeds import torch_rng
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES, Template
from mechtv.tasks.tokens import continuation_ids
from mechtv.vectors import Affine, Edit, Site, TaskVector

PLACES = [(layer, part) for layer in range(N_LAYERS) for part in ("attn_out", "mlp_out")]
SHORT = {"shots": 4, "epochs": 3}


def names_of(model):
    """The hook point of each place."""
    return [model.get_hook_point(f"blocks.{layer}.hook_{part}").name for layer, part in PLACES]


def naive_context(model, texts):
    """For each place the mean over texts of the activation at the text's last token."""
    names, totals = names_of(model), [0.0] * len(PLACES)
    for text in texts:
        ids = model.to_tokens(text)[0].tolist()
        keep = dict.fromkeys(names)
        naive_logits(model, ids, len(ids), keep=keep)
        totals = [total + keep[name][-1] for total, name in zip(totals, names, strict=True)]
    return [total / len(texts) for total in totals]


def naive_run(model, ids, n_prompt, vectors, lambdas, betas):
    """The logits of one row: in the prompt, a <- beta a + lambda v everywhere. Differentiable."""

    def hook_at(i):
        def change(x, hook):
            edited = betas[i] * x[:, :n_prompt] + lambdas[i] * vectors[i]
            return torch.cat([edited, x[:, n_prompt:]], dim=1)

        return change

    hooks = [(name, hook_at(i)) for i, name in enumerate(names_of(model))]
    return model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)[0]


def naive_loss(model, task, example, vectors, lambdas, betas):
    """-log p(answer): the mean over the answer's tokens, each given the true ones before it."""
    prompt = model.to_tokens(task.template.query(example))[0].tolist()
    answer = list(continuation_ids(model, " ->", f" {example.answer}"))
    ids = prompt + answer[:-1]
    log_p = naive_run(model, ids, len(prompt), vectors, lambdas, betas).log_softmax(-1)
    found = [log_p[len(prompt) - 1 + i, token] for i, token in enumerate(answer)]
    return -sum(found) / len(answer)


def shown_to(task, shots, seed=0):
    return task.demonstrations(None, shots, seed=seed)


def scales_of(vector):
    """Lambda and beta of each place, from the card."""
    found = vector.card.settings["scales"]
    return [[found[name][part][layer] for layer, part in PLACES] for name in ("lambda", "beta")]


# --- what it writes ---


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "neox", "native"])
def test_values_are_means_over_demonstrations_alone(family, labels):
    model, task = model_of(family), task_of(labels)
    vector = extract_i2cl(
        model, task, shots=4, context_scale=0.25, activation_scale=0.75, calibrate=False, seed=3
    )
    texts = [f"{e.fields['input']} -> {e.answer}" for e in shown_to(task, 4, 3)]
    context = naive_context(model, texts)
    sites = tuple(Site(component=c, layer=layer, positions="all") for layer, c in PLACES)
    assert vector.sites == sites
    assert vector.acts_on == "prompt"
    for edit, mean in zip(vector.edits, context, strict=True):
        assert type(edit.operation) is Affine
        assert edit.operation.scale == 0.75
        torch.testing.assert_close(edit.operation.value, 0.25 * mean, atol=1e-10, rtol=0)
        assert mean.abs().mean() > 1e-2
        assert not edit.operation.value.requires_grad
    assert vector.n_parameters == len(PLACES) * (D_MODEL + 1)


def test_text_behind_the_answer_belongs_to_the_demonstration():
    model, task = model_of(), task_of().with_template(Template(text="{input} -> {answer} word"))
    vector = extract_i2cl(model, task, shots=3, context_scale=1.0, calibrate=False)
    texts = [f"{e.fields['input']} -> {e.answer} word" for e in shown_to(task, 3)]
    for edit, mean in zip(vector.edits, naive_context(model, texts), strict=True):
        torch.testing.assert_close(edit.operation.value, mean, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "neox"])
def test_it_acts_on_every_prompt_token_of_every_layer(family):
    model, task = model_of(family), task_of()
    vector = extract_i2cl(
        model, task, shots=4, context_scale=0.5, activation_scale=0.8, calibrate=False
    )
    context = naive_context(model, [task.template.demonstration(e) for e in shown_to(task, 4)])
    prompts = Prompts.of(model, task, n=4)
    assert len(set(prompts.lengths.tolist())) > 1
    found, plain = last_logits(model, prompts, vector), last_logits(model, prompts)
    for row, text in enumerate(prompts.texts):
        ids = model.to_tokens(text)[0].tolist()
        with torch.no_grad():
            wanted = naive_run(model, ids, len(ids), context, [0.5] * 6, [0.8] * 6)[-1]
        torch.testing.assert_close(found[row], wanted, atol=1e-10, rtol=0)
    assert (found - plain).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "phi"])
def test_no_context_and_the_models_own_activations_are_the_plain_model(family):
    model, task = model_of(family), task_of()
    vector = extract_i2cl(model, task, shots=2, context_scale=0.0, calibrate=False)
    prompts = Prompts.of(model, task, n=4)
    torch.testing.assert_close(
        last_logits(model, prompts, vector), last_logits(model, prompts), atol=1e-10, rtol=0
    )


def test_demonstrations_are_balanced_over_the_labels():
    model, task = model_of(), task_of(LABELS)
    shown = shown_to(task, 6)
    assert sorted(e.answer for e in shown) == sorted(LABELS * 2)
    vector = extract_i2cl(model, task, shots=6, context_scale=1.0, calibrate=False)
    wanted = naive_context(model, [task.template.demonstration(e) for e in shown])
    torch.testing.assert_close(vector.edits[3].operation.value, wanted[3], atol=1e-10, rtol=0)


# --- calibration ---


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_gradients_are_central_differences_of_the_loss(family):
    """The gradients that the optimizer gets are central differences of single plain passes."""
    model, task = model_of(family), task_of()
    context, shown = naive_context_and_shown(model, task, 2)

    def loss(scales):
        with torch.no_grad():
            each = [naive_loss(model, task, e, context, *scales) for e in shown]
        return float(sum(each) / len(each))

    slopes = []
    for i in range(2):
        for j in range(len(PLACES)):
            ends = []
            for change in (1e-5, -1e-5):
                scales = [[0.1] * len(PLACES), [1.0] * len(PLACES)]
                scales[i][j] += change
                ends.append(loss(scales))
            slopes.append((ends[0] - ends[1]) / 2e-5)
    gradients = gradients_of_the_first_step(model, task, shots=2)
    assert min(map(abs, slopes)) > 1e-5
    torch.testing.assert_close(gradients, torch.tensor(slopes).double(), atol=1e-7, rtol=1e-5)


def naive_context_and_shown(model, task, shots, seed=0):
    shown = shown_to(task, shots, seed)
    return naive_context(model, [task.template.demonstration(e) for e in shown]), shown


def gradients_of_the_first_step(model, task, shots):
    """The gradients that the optimizer gets: lambdas, then betas."""
    seen = []

    class Watched(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            seen.append(torch.cat([x.grad.clone() for x in self.param_groups[0]["params"]]))
            return super().step(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Watched)
        extract_i2cl(model, task, shots=shots, batch_size=shots, epochs=1, noise=0.0)
    (gradients,) = seen
    return gradients


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_calibration_is_the_loop_written_by_hand(family):
    model, task = model_of(family), task_of()
    options = {"step_size": 0.05, "weight_decay": 0.1}
    vector = extract_i2cl(
        model, task, shots=5, epochs=4, batch_size=2, warm_up=0.25, noise=0.0, seed=1, **options
    )
    context, shown = naive_context_and_shown(model, task, 5, seed=1)
    rng = torch_rng(1, "calibration batches of invented")
    scales = [torch.full((6,), value, dtype=torch.float64).requires_grad_() for value in (0.1, 1.0)]
    optimizer = torch.optim.AdamW(scales, lr=1.0, weight_decay=options["weight_decay"])
    rates = [1 / 3, 2 / 3, *((1 + math.cos(math.pi * i / 6)) / 2 for i in range(6))]
    losses = []
    for share in rates:  # 4 epochs of 5 // 2 steps
        rows = torch.randperm(5, generator=rng)[:2].tolist()
        assert len(set(rows)) == 2
        each = [naive_loss(model, task, shown[row], context, *scales) for row in rows]
        loss = sum(each) / 2
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, scales)
        for x, gradient in zip(scales, gradients, strict=True):
            x.grad = gradient
        optimizer.param_groups[0]["lr"] = options["step_size"] * share
        optimizer.step()
    lambdas, betas = (x.detach() for x in scales)
    assert (lambdas - 0.1).abs().min() > 1e-3
    for i, edit in enumerate(vector.edits):
        torch.testing.assert_close(edit.operation.scale, betas[i], atol=1e-9, rtol=0)
        torch.testing.assert_close(edit.operation.value, lambdas[i] * context[i], atol=1e-9, rtol=0)
    found_lambdas, found_betas = scales_of(vector)
    assert found_lambdas == pytest.approx(lambdas.tolist(), abs=1e-9)
    assert found_betas == pytest.approx(betas.tolist(), abs=1e-9)
    curve = vector.training_curve()
    assert curve["epoch"].tolist() == [1, 2, 3, 4]
    assert curve["step"].tolist() == [2, 4, 6, 8]
    wanted = [(a + b) / 2 for a, b in zip(losses[0::2], losses[1::2], strict=True)]
    assert curve["train_loss"].tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
def test_calibration_lowers_the_loss_of_the_demonstrations(labels):
    model, task = model_of(), task_of(labels)
    options = {"shots": 4, "noise": 0.0, "seed": 2}
    before = extract_i2cl(model, task, calibrate=False, **options)
    after = extract_i2cl(model, task, epochs=10, **options)
    context, shown = naive_context_and_shown(model, task, 4, seed=2)
    with torch.no_grad():
        losses = [
            float(sum(naive_loss(model, task, e, context, *scales_of(v)) for e in shown)) / 4
            for v in (before, after)
        ]
    assert losses[1] < losses[0] - 0.1
    assert len(after.training_curve()) == 10


def test_a_batch_larger_than_the_demonstrations_is_all_of_them_once_an_epoch():
    model, task = model_of(), task_of()
    vector = extract_i2cl(model, task, shots=3, epochs=2, batch_size=8, noise=0.0)
    assert vector.training_curve()["step"].tolist() == [1, 2]
    context, shown = naive_context_and_shown(model, task, 3)
    with torch.no_grad():
        each = [naive_loss(model, task, e, context, [0.1] * 6, [1.0] * 6) for e in shown]
    found = vector.training_curve()["train_loss"][0]
    assert found == pytest.approx(float(sum(each) / 3), abs=1e-10)


def test_the_step_rises_in_a_line_and_falls_along_half_a_cosine():
    rates = [rate(step, 100, 0.05) for step in range(101)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert rates[5:] == pytest.approx(
        [0.5 + 0.5 * math.cos(math.pi * i / 95) for i in range(96)], abs=1e-12
    )
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert rate(0, 1, 0.05) == 1.0
    assert rate(0, 10, 0.0) == 1.0


# --- noise ---


def test_noise_has_the_size_of_the_activation_and_takes_no_gradient():
    activation = torch.randn(400, 32, generator=torch.Generator().manual_seed(0)).double()
    activation = (activation * torch.linspace(1, 9, 400)[:, None]).requires_grad_()
    value = torch.ones(32).double()
    plain = Affine(scale=torch.tensor(0.5).double().requires_grad_(), value=value)
    edit = Edit(site=Site(component="mlp_out", layer=0, positions="all"), operation=plain)
    slot = torch.zeros(400, dtype=torch.long)
    (noised,) = noisy([edit], 0.01, torch.Generator().manual_seed(1))
    wanted, found = (e.operation(activation, slot) for e in (edit, noised))
    assert noised.site == edit.site
    drawn = (found - wanted).detach() / (0.01 * wanted.detach().norm(dim=1, keepdim=True))
    assert drawn.mean().abs() < 0.03
    for part in (drawn[:200], drawn[200:]):  # small and large activations
        assert float(part.std()) == pytest.approx(1.0, abs=0.03)
    gradients = [torch.autograd.grad(x.sum(), (activation, plain.scale)) for x in (wanted, found)]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_noise_acts_in_training_only_and_there_it_matters():
    model, task = model_of(), task_of()
    quiet, slight, loud = (
        extract_i2cl(model, task, **SHORT, noise=noise) for noise in (0.0, 1e-9, 0.3)
    )
    for vector in (quiet, slight, loud):
        assert all(type(edit.operation) is Affine for edit in vector.edits)
    assert scales_of(slight)[1] == pytest.approx(scales_of(quiet)[1], abs=1e-5)
    assert scales_of(slight) != scales_of(quiet)
    assert (
        max(abs(a - b) for a, b in zip(*(scales_of(v)[1] for v in (quiet, loud)), strict=True))
        > 1e-3
    )
    first, second = (last_logits(model, Prompts.of(model, task, n=2), loud) for _ in range(2))
    assert torch.equal(first, second)


# --- what stays, what repeats, what is recorded ---


def test_it_is_the_same_every_time_and_another_for_another_seed():
    torch.manual_seed(0)
    first = extract_i2cl(model_of(), task_of(), **SHORT)
    random.seed(5)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    again = extract_i2cl(model_of(), task_of(), **SHORT)
    assert torch.equal(torch.get_rng_state(), state)
    other = extract_i2cl(model_of(), task_of(), **SHORT, seed=1)
    for a, b in zip(first.edits, again.edits, strict=True):
        assert torch.equal(a.operation.value, b.operation.value)
        assert torch.equal(a.operation.scale, b.operation.scale)
    assert first.card == again.card
    assert scales_of(first) != scales_of(other)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_model_is_left_as_it_was_also_where_gradients_are_off(context):
    model = tiny("llama")
    model.original_model.train()
    with left_alone(model):
        free = extract_i2cl(model, task_of(), **SHORT)
        with context():
            vector = extract_i2cl(model, task_of(), **SHORT)
            assert torch.is_grad_enabled() is False
        assert scales_of(vector) == scales_of(free)
        assert all(module.training for module in model.original_model.modules())


def test_half_precision_states_are_averaged_in_single_precision():
    vector = extract_i2cl(tiny("llama", torch.bfloat16), task_of(), **SHORT)
    value = vector.edits[1].operation.value
    assert (value.dtype, vector.edits[1].operation.scale.dtype) == (torch.float32, torch.float32)
    assert (value != value.bfloat16()).any()
    assert vector.card.dtype == "bfloat16"


def test_the_card_says_how_to_make_the_vector_again():
    model, task = model_of(), task_of()
    vector = extract_i2cl(model, task, shots=3, epochs=2, noise=0.01, seed=7)
    card = vector.card
    assert (card.method, card.task, card.template, card.seed) == (
        "i2cl", "invented", "{input} -> {answer}", 7
    )  # fmt: skip
    described = mechtv.models.describe(model)
    assert (card.model, card.model_revision) == (described.name, described.revision)
    settings = json.loads(json.dumps(card.settings))
    scales = settings.pop("scales")
    assert settings == {
        "shots": 3, "context_scale": 0.1, "activation_scale": 1.0, "calibrate": True, "epochs": 2,
        "batch_size": 2, "step_size": 0.01, "weight_decay": 0.001, "warm_up": 0.05, "noise": 0.01,
    }  # fmt: skip
    again = extract_i2cl(model, task, **settings, seed=card.seed)
    assert again.card == card
    for (layer, part), edit in zip(PLACES, vector.edits, strict=True):
        assert scales["beta"][part][layer] == float(edit.operation.scale)
    uncalibrated = extract_i2cl(model, task, shots=3, calibrate=False)
    assert uncalibrated.card.settings["scales"]["lambda"]["mlp_out"] == [0.1] * 3
    with pytest.raises(InvalidInput, match="i2cl vector was not trained; it has no curve"):
        uncalibrated.training_curve()


def test_a_saved_vector_evaluates_as_before(tmp_path):
    model, task = model_of(), task_of(LABELS)
    vector = extract_i2cl(model, task, **SHORT)
    loaded = TaskVector.load(vector.save(tmp_path / "context.safetensors"))
    first, second, plain = (evaluate(model, task, v) for v in (vector, loaded, None))
    assert (first.log_probabilities == second.log_probabilities).all()
    assert (first.log_probabilities != plain.log_probabilities).all()
    assert loaded.card == vector.card


# --- what cannot be ---


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shots": 0}, "shots=0 leaves nothing to extract; use 1 or more"),
        ({"shots": -1}, "shots=-1 leaves nothing to extract"),
        ({"shots": 25}, "shots=25 demonstrations were asked"),
        ({"epochs": 0}, "epochs=0 is too small; use 1 or more"),
        ({"batch_size": 0}, "batch_size=0 is too small; use 1 or more"),
        ({"step_size": 0}, "step_size=0 must be above 0 and finite"),
        ({"step_size": math.inf}, "step_size=inf must be above 0 and finite"),
        ({"weight_decay": -1}, "weight_decay=-1 must be 0 or more and finite"),
        ({"noise": -0.1}, "noise=-0.1 must be 0 or more and finite"),
        ({"noise": math.nan}, "noise=nan must be 0 or more and finite"),
        ({"warm_up": 1.0}, "warm_up=1.0 is no share of the steps"),
        ({"warm_up": -0.1}, "warm_up=-0.1 is no share of the steps"),
        ({"context_scale": math.nan}, "context_scale=nan is not finite"),
        ({"activation_scale": math.inf}, "activation_scale=inf is not finite"),
        ({"step_size": 1e200}, "Calibration diverged: the loss became .* smaller step_size"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        extract_i2cl(model_of(), task_of(), **{**SHORT, **options})


def test_a_demonstration_longer_than_the_context_is_refused():
    long = [Example.pair(f"{word} {'word ' * 200}", word) for word in WORDS]
    task = Task(name="long", examples=tuple(long), template=TEMPLATES["arrow"])
    with pytest.raises(InvalidInput, match="the model's context holds 128"):
        extract_i2cl(model_of(), task, shots=2)


@pytest.mark.model
def test_the_context_of_the_real_model_helps(model):
    task = mechtv.get_task("singular-plural")
    vector = extract_i2cl(model, task, shots=4, epochs=3)
    curve = vector.training_curve()["train_loss"]
    assert len(curve) == 3
    plain, injected = (evaluate(model, task, v, n=8) for v in (None, vector))
    assert injected.log_probability.value > plain.log_probability.value
