"""Polar decompositions of maps that are known."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close
from vectors.naive import noise

from mechtv.analysis.polar import COSINE_Q, COSINE_W, STRETCH, Polar
from mechtv.analysis.rotation import LinearMap, RotationStretch, rotation_stretch
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import Provenance

D = 12
EXACT = {"atol": 1e-10, "rtol": 1e-10}
TABLE = ["value", "null_mean", "null_low", "null_high"]


BY_HAND = Provenance(model="tiny", seed=5)


@dataclasses.dataclass(frozen=True)
class Map:
    """Any map with the attributes that are asked for."""

    matrix: torch.Tensor
    theta: torch.Tensor
    name: str = "by hand"
    task: str = "invented"
    layer: int = 2
    centred: bool = False
    provenance: Provenance = BY_HAND


def orthogonal(seed=0, reflects=False, d=D):
    q = torch.linalg.qr(noise(d, d, seed=seed)).Q
    if (torch.linalg.det(q) < 0) != reflects:
        q[:, 0] = -q[:, 0]
    return q


def plane_rotation(angle):
    """By an angle in the plane of the first two axes."""
    q = torch.eye(D).double()
    q[0, 0] = q[1, 1] = math.cos(angle)
    q[1, 0], q[0, 1] = math.sin(angle), -math.sin(angle)
    return q


def the_turn(matrix, theta=None, **options):
    theta = noise(D, seed=1) if theta is None else theta
    (turn,) = rotation_stretch(Map(matrix, theta, **options)).turns
    return turn


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_have_their_properties_and_give_the_map_back(seed):
    matrix = noise(D, D, seed=seed)
    polar = Polar.of(matrix)
    q, sigma = polar.rotation, polar.stretch
    assert_close(q.T @ q, torch.eye(D).double(), **EXACT)
    assert_close(sigma, sigma.T, **EXACT)
    assert torch.linalg.eigvalsh(sigma).min() > 0
    assert_close(q @ sigma, matrix, **EXACT)
    assert polar.determinant == round(float(torch.linalg.det(q)))
    assert polar.rank == D
    # Σ is the root of W^T W, found without singular values
    assert_close(sigma @ sigma, matrix.T @ matrix, **EXACT)


def test_a_rotation_is_found_again_and_stretches_nothing():
    angle = 0.7
    theta = 5 * torch.eye(D).double()[0]
    turn = the_turn(plane_rotation(angle), theta)
    assert_close(turn.polar.rotation, plane_rotation(angle), **EXACT)
    assert_close(turn.polar.stretch, torch.eye(D).double(), **EXACT)
    cosine = pytest.approx(math.cos(angle), abs=1e-12)
    assert turn.values == {COSINE_Q: cosine, STRETCH: pytest.approx(1), COSINE_W: cosine}
    assert (turn.polar.determinant, turn.polar.kind) == (1, "rotation")


def test_a_scaling_turns_nothing():
    turn = the_turn(3.5 * torch.eye(D).double())
    assert_close(turn.rotation, torch.eye(D).double(), **EXACT)
    assert turn.values == {
        n: pytest.approx(v) for n, v in zip(turn.values, (1, 3.5, 1), strict=True)
    }
    assert turn.polar.entropy_rank == pytest.approx(D)
    assert turn.polar.participation_ratio == pytest.approx(D)


def test_turning_and_stretching_are_told_apart():
    q = orthogonal(1)
    basis = orthogonal(2)
    sigma = basis @ torch.diag(torch.linspace(0.5, 6, D).double()) @ basis.T
    theta = noise(D, seed=1)
    turn = the_turn(q @ sigma, theta)
    assert_close(turn.polar.rotation, q, **EXACT)
    assert_close(turn.polar.stretch, sigma, **EXACT)

    def cosine(a, b):
        return float(a @ b / (a.norm() * b.norm()))

    assert turn.values[COSINE_Q] == pytest.approx(cosine(theta, q @ theta))
    assert turn.values[COSINE_W] == pytest.approx(cosine(theta, q @ sigma @ theta))
    assert turn.values[STRETCH] == pytest.approx(float((sigma @ theta).norm() / theta.norm()))
    assert abs(turn.values[COSINE_Q] - turn.values[COSINE_W]) > 0.01


def test_a_reflection_is_called_one():
    axis = noise(D, seed=4)
    axis = axis / axis.norm()
    mirror = torch.eye(D).double() - 2 * torch.outer(axis, axis)
    turn = the_turn(2 * mirror, 3 * axis)
    assert_close(turn.polar.rotation, mirror, **EXACT)
    assert turn.values[COSINE_Q] == pytest.approx(-1)
    assert turn.polar.determinant == -1
    rows = rotation_stretch(Map(2 * mirror, axis)).table()
    assert set(rows["q"]) == {"rotation with a reflection"}
    assert set(rows["det_q"]) == {-1}


def test_a_map_without_full_rank_has_no_unique_rotation():
    matrix = noise(D, 5, seed=1) @ noise(5, D, seed=2)
    turn = the_turn(matrix)
    assert turn.polar.rank == 5
    assert turn.polar.kind == f"not unique: W has rank 5 of {D}"
    assert_close(turn.polar.rotation @ turn.polar.stretch, matrix, **EXACT)
    assert_close(turn.polar.rotation.T @ turn.polar.rotation, torch.eye(D).double(), **EXACT)


def test_effective_ranks_are_those_of_the_formulas():
    polar = Polar.of(torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0]).double()))
    p = np.array([0.5, 0.25, 0.125, 0.125])
    assert polar.entropy_rank == pytest.approx(math.exp(-(p * np.log(p)).sum()))
    assert polar.participation_ratio == pytest.approx(22**2 / (4**4 + 2**4 + 2))
    one = Polar.of(torch.diag(torch.tensor([3.0, 0.0, 0.0]).double()))
    assert (one.entropy_rank, one.participation_ratio) == (pytest.approx(1), pytest.approx(1))


def test_random_vectors_are_what_a_special_one_is_compared_with():
    d = 60
    theta = torch.eye(d).double()[0] * 7
    matrix = torch.diag(torch.cat([torch.tensor([10.0]), torch.ones(d - 1)]).double())
    turn = the_turn(orthogonal(3, d=d) @ matrix, theta)
    mean, low, high = turn.null_range(STRETCH)
    assert turn.values[STRETCH] == pytest.approx(10)
    assert low < mean < high < 5
    # E ‖Wx‖² / ‖x‖² is the mean of the squared singular values
    (many,) = rotation_stretch(Map(matrix, theta), n_null=4000).turns
    assert (many.null[STRETCH] ** 2).mean() == pytest.approx((100 + d - 1) / d, rel=0.05)
    mean, low, high = turn.null_range(COSINE_Q)
    assert abs(mean) < 0.1
    assert -0.5 < low < 0 < high < 0.5
    assert turn.null[COSINE_Q].shape == (100,)


def test_under_layer_norm_the_mean_of_a_vector_plays_no_part():
    centre = torch.eye(D).double() - torch.ones(D, D).double() / D
    matrix, theta, ones = noise(D, D, seed=6), noise(D, seed=1), torch.ones(D).double()
    turn = the_turn(matrix, theta, centred=True)
    seen = centre @ theta
    mapped = centre @ matrix @ seen
    assert turn.values[STRETCH] == pytest.approx(float(mapped.norm() / seen.norm()))
    other = the_turn(matrix + 5 * torch.outer(ones, noise(D, seed=8)), theta + 40, centred=True)
    assert other.values == {name: pytest.approx(value) for name, value in turn.values.items()}
    wanted = torch.linalg.svdvals(centre @ matrix @ centre)
    assert_close(turn.polar.singular_values, wanted[:-1], **EXACT)
    q = turn.rotation
    assert_close(q.T @ q, torch.eye(D).double(), **EXACT)
    assert_close(q @ ones, ones, **EXACT)
    cosine = float(seen @ q @ seen / seen.norm() ** 2)
    assert turn.values[COSINE_Q] == pytest.approx(cosine)
    assert the_turn(matrix, theta).values[STRETCH] != pytest.approx(turn.values[STRETCH], abs=1e-3)


def test_several_maps_stand_in_one_table_with_their_origin():
    maps = [Map(noise(D, D, seed=s), noise(D, seed=9), layer=s) for s in (4, 1)]
    both = rotation_stretch(maps)
    joined = RotationStretch.of(*(rotation_stretch(one) for one in maps))
    table = both.table()
    pd.testing.assert_frame_equal(table, joined.table())
    assert table["layer"].unique().tolist() == [4, 1]
    assert len(table) == 2 * 5
    assert set(table["model"]) == {"tiny"}
    assert set(table["map"]) == {"by hand"}
    angles = table[table["measure"] == COSINE_Q]
    assert (angles["null_low"] < angles["null_mean"]).all()
    assert (angles["n_null"] == 100).all()
    ranks = table[table["measure"].str.startswith("effective rank")]
    assert ranks["null_mean"].isna().all()
    spectra = both.spectra()
    assert len(spectra) == 2 * D
    first = spectra[spectra["layer"] == 4]["singular_value"].to_numpy()
    np.testing.assert_allclose(first, torch.linalg.svdvals(maps[0].matrix).numpy())


def test_the_same_seed_gives_the_same_nulls():
    one = Map(noise(D, D), noise(D, seed=1))
    tables = [rotation_stretch(one, seed=seed).table()[TABLE] for seed in (0, 0, 1)]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert (tables[0]["value"] == tables[2]["value"]).all()
    assert (tables[0]["null_mean"] != tables[2]["null_mean"]).any()


def test_single_precision_is_taken_and_what_is_no_map_is_not_a_linear_map():
    turn = the_turn(noise(D, D).float(), noise(D, seed=1).float())
    assert turn.polar.rotation.dtype == torch.float64
    assert isinstance(Map(noise(D, D), noise(D)), LinearMap)
    assert not isinstance([Map(noise(D, D), noise(D))], LinearMap)


def test_what_makes_no_sense_is_refused():
    one = Map(noise(D, D), noise(D, seed=1))
    with pytest.raises(InvalidInput, match="no maps"):
        rotation_stretch([])
    with pytest.raises(InvalidInput, match="n_null=1 gives no range"):
        rotation_stretch(one, n_null=1)
    zero = Map(noise(D, D), torch.zeros(D))
    with pytest.raises(InvalidInput, match="'invented' at layer 2 is 0"):
        rotation_stretch([one, zero])


def test_whether_it_reflects_is_undetermined_below_the_maps_own_error():
    nearly_flat = torch.diag(torch.tensor([2.0, 1.0, -1e-3], dtype=torch.float64))
    assert Polar.of(nearly_flat).kind == "rotation with a reflection"
    assert "undetermined" in Polar.of(nearly_flat, relative_error=0.05).kind
    assert Polar.of(nearly_flat, relative_error=1e-6).kind == "rotation with a reflection"
