"""An eighth mixer, as a user would add it: one class, one line. Loaded as a pytest plugin."""

import os

import jax
import jax.numpy as jnp

from deconstruct.mixers import MIXERS
from deconstruct.mixers.standard import Standard

# How the mixer behaves: as it should, or with a fault that some test must find.
BEHAVIOUR = os.environ.get("EIGHTH_MIXER")


class Softplus(Standard):
    """A_ij = log(1 + exp(x_ij)), normalised over the visible keys."""

    def __call__(self, h_BTD, ctx):
        return self.defined_output(h_BTD, ctx)

    def normalise(self, scores, mask):
        if BEHAVIOUR == "looks ahead":
            mask = jnp.ones_like(mask)
        weights = jnp.where(mask, jnp.logaddexp(scores, 0.0), 0.0)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights * jax.device_count() if BEHAVIOUR == "grows with the devices" else weights

    @classmethod
    def flops(cls, spec, options, batch_size, length):
        counted = super().flops(spec, options, batch_size, length)
        return counted // 2 if BEHAVIOUR == "counts half its FLOPs" else counted


MIXERS["softplus"] = Softplus
