"""An eighth mixer, as a user would add it: one class, one line. Loaded as a pytest plugin."""

import os

import jax.numpy as jnp

from deconstruct.mixers import MIXERS
from deconstruct.mixers.standard import Standard


class Softplus(Standard):
    """A_ij = log(1 + exp(x_ij)), normalised over the visible keys."""

    def __call__(self, h_BTD, ctx):
        return self.defined_output(h_BTD, ctx)

    def normalise(self, scores, mask):
        if os.environ.get("EIGHTH_MIXER") == "looks ahead":
            mask = jnp.ones_like(mask)
        weights = jnp.where(mask, jnp.logaddexp(scores, 0.0), 0.0)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)


MIXERS["softplus"] = Softplus
