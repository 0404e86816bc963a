"""Tiny models that tests share. Axes: B batch, T time, D model, L stream length."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from deconstruct import decoder, mixers
from deconstruct.mixers import MIXERS, MixerContext, options_of
from deconstruct.spec import ModelSpec, plan_layers

VOCAB = 300


def make_spec(mixer="standard", plan="uniform", num_layers=2, max_len=64, **overrides) -> ModelSpec:
    """A model of width 32 with 4 heads in 2 groups."""
    sizes = {"model_dim": 32, "feed_forward_dim": 48, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"vocab_size": VOCAB, **overrides}
    spec = ModelSpec(max_len=max_len, layers=plan_layers(num_layers, mixer, plan), **sizes)
    return mixers.resolve(spec)


def make_params(spec: ModelSpec, seed=0, std=0.15):
    """Initial parameters with noise added to all, so that no bias is 0 and no map is uniform."""
    params = nn.meta.unbox(decoder.init(spec, jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: x + rng.normal(0, std, x.shape).astype(np.float32), params)
    for name in ("embedding", "head"):
        if name in params:
            rows = jnp.arange(spec.padded_vocab_size)[:, None] < spec.vocab_size
            params[name]["table"] = jnp.where(rows, params[name]["table"], 0.0)
    return params


def make_fixed(spec: ModelSpec):
    """Start values of the fixed streams, from a made-up text."""
    return decoder.init_fixed(spec, np.random.default_rng(5).integers(0, VOCAB, spec.max_len))


def make_tokens(batch_size=2, length=64, seed=1):
    return np.random.default_rng(seed).integers(0, VOCAB, (batch_size, length)).astype(np.int32)


def make_documents(batch_size, length, seed=2):
    """(segments_BT, positions_BT) of random documents, lengths from 1 on, another cut a row."""
    rng = np.random.default_rng(seed)
    starts = rng.random((batch_size, length)) < 0.15
    starts[:, 0] = True
    starts[0, 1:3] = True  # documents of length 1, where the row is that long
    segments = np.cumsum(starts, axis=1)
    order = np.arange(length)
    begin = np.maximum.accumulate(np.where(starts, order[None, :], 0), axis=1)
    return segments.astype(np.int32), (order[None, :] - begin).astype(np.int32)


def make_mixer(name: str, dtype=jnp.float32, max_len=64, **overrides):
    """(mixer module, its parameters with noise) of a one-layer spec."""
    spec = make_spec(name, num_layers=1, max_len=max_len, **overrides)
    mixer = MIXERS[name](spec, options_of(spec.layers[0]), dtype)
    return mixer, make_params(spec)["layer_01"]["mixer"]


def make_inputs(mixer, batch_size=2, length=64, isolate=False, seed=3):
    """(h_BTD, ctx) such as a block would give to the mixer."""
    rng = np.random.default_rng(seed)
    spec = mixer.spec

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    h_BTD = normal(batch_size, length, spec.model_dim)
    segments = positions = None
    if isolate:
        segments, positions = map(jnp.asarray, make_documents(batch_size, length))
    ctx = MixerContext(
        positions_BT=jnp.arange(length)[None, :] if positions is None else positions,
        segments_BT=segments,
        embeddings_BTD=normal(*h_BTD.shape) if mixer.uses_embeddings else None,
        stream_LD=normal(spec.max_len, spec.model_dim) if mixer.stream else None,
    )
    return h_BTD, ctx
