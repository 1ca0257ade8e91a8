"""The training loop with scripted objectives: which epoch is kept, when it stops, how it steps."""

import math
import random
from contextlib import nullcontext
from itertools import chain

import numpy as np
import pytest
import torch
from evaluation.invented import model_of

from mechtv.methods.training import POOL, Plan, like_lengths, train
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Site, TaskVector

LENGTHS = (1, 2, 2, 1, 2, 3, 2)
N = len(LENGTHS)


def prompts_of(lengths, answers=None):
    return Prompts.from_ids(model_of(), [[5] * n for n in lengths], answers=answers)


class Scripted:
    """Losses with gradient 1 everywhere, and scores from a list; what is asked is written down."""

    def __init__(self, scores=()):
        self.prompts = prompts_of(LENGTHS)
        self.scores = iter(scores)
        self.batches, self.seen = [], []

    def prepared(self, vector, show):
        return nullcontext()

    def loss(self, vector, rows):
        self.batches.append(rows.tolist())
        total = sum(edit.operation.value.sum() for edit in vector.edits)
        return total - total.detach() + rows

    def score(self, vector):
        self.seen.append([edit.operation.value.detach().clone() for edit in vector.edits])
        value = next(self.scores, (0.0, 1.0))
        accuracy, loss = value if isinstance(value, tuple) else (None, value)
        loss = float(loss)
        known = {} if accuracy is None else {"validation_accuracy": accuracy}
        return {"validation_loss": loss} | known


def as_vector(thetas):
    edits = tuple(
        Edit(site=Site(layer=i), operation=Add(value=theta)) for i, theta in enumerate(thetas)
    )
    return TaskVector(edits=edits, card=Card(method="by hand"))


def start_of(*shapes):
    return [torch.full(shape, 0.5, dtype=torch.float64, requires_grad=True) for shape in shapes]


def trained(scores=(), *, start=None, steps=(0.1,), seed=0, training=None, **plan):
    validation, training = Scripted(scores), training or Scripted()
    options = {"epochs": 6, "batch_size": 3, "patience": 2, "schedule": "constant"}
    best, curve = train(
        start or start_of((4,)),
        as_vector=as_vector,
        training=training,
        validation=validation,
        steps=steps,
        plan=Plan(**{**options, "weight_decay": 0.0, **plan}),
        rng=torch.Generator().manual_seed(seed),
        title="a test",
        show=False,
    )
    return best, curve, training, validation


@pytest.mark.parametrize(
    ("scores", "patience", "kept", "n_epochs"),
    [
        # (accuracy, loss): accuracy decides
        ([(0.1, 1), (0.5, 2), (0.3, 0), (0.4, 0), (0.6, 0)], 2, 1, 3),
        ([(0.1, 1), (0.5, 2), (0.3, 0), (0.4, 0), (0.6, 0)], 3, 4, 6),
        ([(0.9, 1), (0.5, 2), (0.3, 0), (0.4, 0)], 2, 0, 2),
        # equal accuracies: the lower loss decides, and counts as better for the patience
        ([(0.5, 3), (0.5, 2), (0.5, 2.5), (0.5, 1), (0.5, 1.5), (0.5, 1.4)], 2, 3, 5),
        # all is equal: the earlier one stays
        ([(0.5, 1)] * 7, 4, 0, 4),
        # no accuracy: the loss alone
        ([3.0, 2.0, 2.5, 1.0, 4.0, 4.0, 0.5], 2, 3, 5),
        ([3.0, 2.0, 2.5, 1.0, 4.0, 4.0, 0.5], 3, 6, 6),
        # always better: never beyond the epochs
        ([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5], 1, 6, 6),
        # not a number is never better
        ([3.0, math.nan, math.nan, 1.0], 2, 0, 2),
    ],
)
def test_the_best_epoch_is_kept_and_patience_ends_the_training(scores, patience, kept, n_epochs):
    start = start_of((4,), (1, 4))
    best, curve, training, validation = trained(
        scores, patience=patience, start=start, steps=(0.1, 0.2)
    )
    assert len(curve) == len(validation.seen) == n_epochs + 1
    assert [point["epoch"] for point in curve] == list(range(n_epochs + 1))
    assert [point["step"] for point in curve] == [3 * epoch for epoch in range(n_epochs + 1)]
    assert len(training.batches) == 3 * n_epochs
    for theta, wanted, others in zip(
        best, validation.seen[kept], zip(*validation.seen, strict=True), strict=True
    ):
        assert torch.equal(theta, wanted)
        assert sum(torch.equal(theta, other) for other in others) == 1
        assert not theta.requires_grad
    assert [point["validation_loss"] for point in curve[:2]] == pytest.approx(
        [s[1] if isinstance(s, tuple) else s for s in scores[:2]], nan_ok=True
    )


def test_the_start_is_scored_before_the_first_step():
    _, curve, _, validation = trained(epochs=1)
    assert torch.equal(validation.seen[0][0], start_of((4,))[0].detach())
    assert "train_loss" not in curve[0]
    assert (curve[0]["epoch"], curve[0]["step"]) == (0, 0)


def test_every_epoch_goes_once_through_all_rows_in_an_order_of_its_own():
    _, curve, training, _ = trained(epochs=4, patience=9)
    sizes = [[len(batch) for batch in training.batches[3 * e : 3 * e + 3]] for e in range(4)]
    assert all(sorted(own) == [1, 3, 3] for own in sizes)
    orders = [[*chain(*training.batches[3 * e : 3 * e + 3])] for e in range(4)]
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert [point["train_loss"] for point in curve[1:]] == pytest.approx([(N - 1) / 2] * 4)


def test_the_order_depends_on_the_generator_alone():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    first = trained()[2].batches
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(2)
    assert trained()[2].batches == first
    assert trained(seed=1)[2].batches != first


def test_batches_hold_rows_of_like_length_and_come_in_random_order():
    lengths = [1 + row % 9 for row in range(40)]
    answers = tuple((6,) * (1 + row % 2) for row in range(40))
    prompts = prompts_of(lengths, answers)
    sizes = [(len(answer), length) for length, answer in zip(lengths, answers, strict=True)]
    rng = torch.Generator().manual_seed(0)
    first, second = ([batch.tolist() for batch in like_lengths(prompts, 5, rng)] for _ in range(2))
    for batches in (first, second):
        assert [len(batch) for batch in batches] == [5] * 8
        assert sorted(chain(*batches)) == list(range(40))
        cut = [sorted(sizes[row] for row in batch) for batch in batches]
        assert [*chain(*sorted(cut))] == sorted(sizes), "a pool is sorted before it is cut"
        assert cut != sorted(cut)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}


def test_only_rows_of_one_pool_are_sorted_so_batches_stay_random():
    prompts = prompts_of([1 + row % 50 for row in range(3 * 2 * POOL)])
    batches = like_lengths(prompts, 2, torch.Generator().manual_seed(0))
    lengths = prompts.lengths
    differences = [int(lengths[batch].max() - lengths[batch].min()) for batch in batches]
    assert sum(differences) > 2 * len(batches), "sorting all rows would leave 1 a batch"


@pytest.mark.parametrize(("n", "batch_size"), [(1, 1), (1, 9), (7, 3), (50, 3), (49, 2), (48, 3)])
def test_there_are_as_many_batches_as_the_schedule_expects(n, batch_size):
    batches = like_lengths(prompts_of([2] * n), batch_size, torch.Generator().manual_seed(0))
    assert len(batches) == -(-n // batch_size)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_are_those_of_adamw_for_each_tensor_under_the_schedule(schedule, weight_decay):
    """With gradient 1 everywhere, Adam moves by the whole step; decay pulls towards 0."""
    _, _, _, validation = trained(
        start=start_of((4,), (1, 4)),
        steps=(0.1, 0.02),
        schedule=schedule,
        weight_decay=weight_decay,
        epochs=5,
        patience=9,
    )
    for tensor, size in enumerate((0.1, 0.02)):
        theta, total = 0.5, 5 * 3
        for step in range(total):
            now = size * ((1 + math.cos(math.pi * step / total)) / 2 if schedule == "cosine" else 1)
            theta = theta * (1 - now * weight_decay) - now
            if (step + 1) % 3 == 0:
                seen = validation.seen[(step + 1) // 3][tensor]
                torch.testing.assert_close(seen, torch.full_like(seen, theta), atol=1e-6, rtol=0)


def test_a_gradient_is_that_of_its_own_batch():
    """Adam's second moment would show a gradient that had been added up over batches."""

    class Alternating(Scripted):
        def loss(self, vector, rows):
            sign = (-1) ** len(self.batches)
            return sign * super().loss(vector, rows)

    start = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    _, _, _, validation = trained(start=[start], training=Alternating(), epochs=2, patience=9)
    reference = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.0)
    for step in range(6):
        optimizer.zero_grad()
        ((-1) ** step * reference.sum()).backward()
        optimizer.step()
    assert torch.equal(validation.seen[-1][0], reference.detach())
