"""The linear map at the last block with several ridges, from states that are read once."""

from mechtv.methods.linear import LinearSettings, linear_from_states
from mechtv.methods.states import paired_states
from mechtv.vectors import Site

RIDGES = (5.0, 1e3, 1e4, 1e5)  # the paper's is next to nothing where states have norms in hundreds


def linear_maps(model, task, *, shots: int, n: int, seed: int):
    """A task vector for each of `RIDGES`."""
    site = Site(layer=model.cfg.n_layers - 1, component="resid_post")
    states = paired_states(model, task, site, shots=shots, n=n, seed=seed)
    settings = {
        ridge: LinearSettings(
            layer=site.layer,
            component="resid_post",
            shots=shots,
            n=n,
            ridge=ridge,
            solver="auto",
            intercept=False,
            fit="same site",
        )
        for ridge in RIDGES
    }
    return {
        ridge: linear_from_states(model, task, own, states, seed=seed)
        for ridge, own in settings.items()
    }
