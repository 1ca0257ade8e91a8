"""Sites say where; what is no place is one sentence with the places there are."""

import pytest
import torch
from vectors.naive import noise, vector_of

from mechtv.errors import InvalidInput, MechtvError
from mechtv.vectors import Add, Card, Edit, Site, TaskVector

pytestmark = pytest.mark.usefixtures("unchecked")


def test_a_site_is_the_last_token_of_the_blocks_input_unless_told_otherwise() -> None:
    site = Site(layer=2)
    assert (site.component, site.positions) == ("resid_pre", (-1,))
    assert site.hook_name == "blocks.2.hook_resid_pre"
    assert str(site) == "resid_pre[2] at -1"
    assert str(Site(layer=0, component="z", positions="all")) == "z[0] at all"
    assert Site(layer=0, component="z").hook_name == "blocks.0.attn.hook_z"


@pytest.mark.parametrize("positions", [(-3, -2, -1), [-1, -2, -3], range(-3, 0)])
def test_equal_positions_make_equal_sites(positions: object) -> None:
    site = Site(layer=1, positions=positions)
    assert site == Site(layer=1, positions=(-3, -2, -1))
    assert hash(site) == hash(Site(layer=1, positions=(-3, -2, -1)))


def test_one_position_may_be_a_number() -> None:
    assert Site(layer=1, positions=-2) == Site(layer=1, positions=(-2,))


@pytest.mark.parametrize(
    "positions", [0, 3, (), (-1, 0), (-1, -1), (-1.0,), "last", None, {-1}, ("all",), (None,)]
)
def test_what_is_no_position_is_one_sentence(positions: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        Site(layer=1, positions=positions)
    assert f"positions={positions!r} are not positions" in str(caught.value)
    assert "-1 is that token" in str(caught.value)


def test_an_unknown_component_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput) as caught:
        Site(layer=1, component="resid_mid")
    sentence = "component='resid_mid' is unknown; use one of resid_pre, resid_post, attn_out"
    assert sentence in str(caught.value)


def test_a_negative_layer_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match="layer=-1 is negative; layers count up from 0"):
        Site(layer=-1)


def test_a_vector_needs_an_edit() -> None:
    with pytest.raises(InvalidInput, match="at least one edit"):
        TaskVector(edits=(), card=Card(method="test"))


def test_a_vector_acts_on_prompt_new_or_both() -> None:
    edit = Edit(site=Site(layer=1), operation=Add(value=noise(4)))
    with pytest.raises(InvalidInput, match="acts_on='answer' is unknown; use one of prompt, new"):
        TaskVector(edits=(edit,), card=Card(method="test"), acts_on="answer")
    with pytest.raises(InvalidInput, match="acts_on='answer' is unknown"):
        vector_of(edit).acting_on("answer")
    assert vector_of(edit).acting_on("both").acts_on == "both"


def test_every_error_is_a_mechtv_error_and_a_value_error() -> None:
    for kind in (MechtvError, ValueError):
        with pytest.raises(kind):
            Site(layer=-1)


def test_a_vector_shows_what_it_is() -> None:
    edits = [Edit(site=Site(layer=i), operation=Add(value=torch.ones(4))) for i in range(5)]
    vector = vector_of(*edits)
    assert repr(vector) == (
        "TaskVector(test for unknown: add at resid_pre[0] at -1; add at resid_pre[1] at -1; "
        "add at resid_pre[2] at -1; and 2 more)"
    )
    assert vector.n_parameters == 20
    assert vector.sites == tuple(edit.site for edit in edits)
    table = vector.table()
    assert table.layer.tolist() == [0, 1, 2, 3, 4]
    assert table.norm.tolist() == [2.0] * 5
    assert set(table.operation) == {"add"}


def test_only_a_vector_with_one_value_has_the_value() -> None:
    edit = Edit(site=Site(layer=1), operation=Add(value=torch.ones(4)))
    assert torch.equal(vector_of(edit).value(), torch.ones(4))
    with pytest.raises(InvalidInput, match=r"has 2 edit\(s\)"):
        vector_of(edit, edit).value()


def test_a_vector_that_was_not_trained_has_no_curve() -> None:
    edit = Edit(site=Site(layer=1), operation=Add(value=torch.ones(4)))
    with pytest.raises(InvalidInput, match="A test vector was not trained"):
        vector_of(edit).training_curve()
    card = Card(method="learned", curve=({"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}))
    curve = TaskVector(edits=(edit,), card=card).training_curve()
    assert curve.loss.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("heads", [(), (0, 0), (-1,), 1.5, ("a",)])
def test_what_is_no_head_is_one_sentence(heads: object) -> None:
    with pytest.raises(InvalidInput, match="are not heads; use distinct numbers from 0 on"):
        Site(component="z", layer=0, heads=heads)  # type: ignore[arg-type]


def test_heads_stand_at_z_alone() -> None:
    with pytest.raises(InvalidInput, match="name heads, but mlp_out has none; use z"):
        Site(component="mlp_out", layer=0, heads=(0,))


def test_heads_are_kept_in_rising_order_and_shown() -> None:
    site = Site(component="z", layer=3, heads=[4, 1])  # type: ignore[arg-type]
    assert site.heads == (1, 4)
    assert str(site) == "z[3] heads 1,4 at -1"
    assert site != Site(component="z", layer=3)


def test_a_value_has_a_row_for_each_head() -> None:
    site = Site(component="z", layer=0, heads=(1, 4))
    with pytest.raises(InvalidInput, match=r"does not fit the 2 head\(s\) of z\[0\] heads 1,4"):
        Edit(site=site, operation=Add(value=torch.ones(3, 8)))
