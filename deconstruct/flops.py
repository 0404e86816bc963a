"""What a model costs: parameters, FLOPs, bytes of activations and of decode caches.

Parameters are all that is trained: neither the rows that pad the tables nor the start values of the
fixed streams count.

FLOPs are those of matrix products alone, two for a multiply-add. Causal attention counts as the
full square; a kernel that skips what is masked does (T + 1) / 2T of that part. All projections,
the head over the true vocabulary and the fixed streams' pre-pass count; embedding look-ups, norms,
rotary positions, softmax, running sums and the optimizer do not. A train step counts as three
forwards; what remat computes a second time does not count, so that MFU is of useful work.

The formulas that the paper prints for one mixer, which count otherwise, are in `paper.py`.

Axes: B batch, T time, D model, F feed-forward, L stream length.
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend import core

from deconstruct import decoder
from deconstruct.decoder import Compute
from deconstruct.mixers import MIXERS, MixerContext, options_of
from deconstruct.spec import LayerSpec, ModelSpec


def num_params(spec: ModelSpec) -> int:
    """Trained values of the whole model."""
    shapes = _shapes(spec, spec.layers[0])
    num_tables = 1 if spec.tied_embeddings else 2
    padding = num_tables * (spec.padded_vocab_size - spec.vocab_size) * spec.model_dim
    outside = _num_values(shapes) - _num_values(shapes["layer_01"]) - padding
    return outside + sum(layer_params(spec, layer) for layer in spec.layers)


def layer_params(spec: ModelSpec, layer: LayerSpec) -> int:
    """Trained values of one layer: mixer, feed-forward, two norms."""
    return _num_values(_shapes(spec, layer)["layer_01"])


def mixer_params(spec: ModelSpec, layer: LayerSpec) -> int:
    """Trained values of one layer's mixer."""
    return _num_values(_shapes(spec, layer)["layer_01"]["mixer"])


def _shapes(spec: ModelSpec, layer: LayerSpec):
    return _one_layer_shapes(dataclasses.replace(spec, layers=(LayerSpec(1, *layer.kind),)))


@functools.cache
def _one_layer_shapes(spec: ModelSpec):
    """Shapes of the parameters of a model of one layer; nothing is computed."""
    return nn.meta.unbox(jax.eval_shape(lambda: decoder.init(spec, jax.random.key(0))))


def _num_values(shapes) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@dataclasses.dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward by part; `streams` is the pre-pass of the fixed streams."""

    mixers: int
    feed_forward: int
    streams: int
    head: int

    @property
    def total(self) -> int:
        return self.mixers + self.feed_forward + self.streams + self.head


def forward_flops(spec: ModelSpec, batch_size: int, length: int | None = None) -> ForwardFlops:
    """FLOPs of the forward on `batch_size` rows of `length` (default max_len) tokens.

    The pre-pass runs one row a stream, up to the last layer that reads one.
    """
    length = spec.max_len if length is None else length
    num_streams = len(decoder.stream_names(spec))
    return ForwardFlops(
        mixers=sum(mixer_flops(spec, layer, batch_size, length) for layer in spec.layers),
        feed_forward=spec.num_layers * _feed_forward_flops(spec, batch_size * length),
        streams=sum(
            mixer_flops(spec, layer, num_streams, length)
            + _feed_forward_flops(spec, num_streams * length)
            for layer in _prepass_layers(spec)
        ),
        head=2 * batch_size * length * spec.model_dim * spec.vocab_size,
    )


def mixer_flops(spec: ModelSpec, layer: LayerSpec, batch_size: int, length: int) -> int:
    """FLOPs of one layer's mixer, as it states them."""
    return MIXERS[layer.mixer].flops(spec, options_of(layer), batch_size, length)


def mixer_decode_flops(spec: ModelSpec, layer: LayerSpec, length: int) -> int:
    """FLOPs of one token through one mixer with a cache of `length`, all of which is read.

    Read off the traced program, matrix products alone.
    """
    mixer = MIXERS[layer.mixer](spec, options_of(layer), jnp.float32)
    variables = {"params": _shapes(spec, layer)["layer_01"]["mixer"]}
    h_BTD, ctx = _inputs(spec, layer, 1, 1, jnp.float32)

    def init_cache(variables, ctx):
        return mixer.apply(variables, 1, length, ctx, method="init_cache")

    def decode(variables, h_BTD, cache, ctx):
        return mixer.apply(variables, h_BTD, cache, ctx, method="decode")

    cache = jax.eval_shape(init_cache, variables, ctx)
    return _product_flops(jax.make_jaxpr(decode)(variables, h_BTD, cache, ctx).jaxpr)


def _product_flops(jaxpr) -> int:
    """FLOPs of the matrix products in a jaxpr without loops, and in those that it calls."""
    total = 0
    for equation in jaxpr.eqns:
        assert equation.primitive.name not in ("scan", "while")
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
            total += 2 * inner * equation.outvars[0].aval.size
        for value in equation.params.values():
            if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
                total += _product_flops(getattr(value, "jaxpr", value))
    return total


def _feed_forward_flops(spec: ModelSpec, num_tokens: int) -> int:
    return 6 * num_tokens * spec.model_dim * spec.feed_forward_dim


def _prepass_layers(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """The layers that a fixed stream passes: those before the last one that reads a stream."""
    readers = [i for i, layer in enumerate(spec.layers) if MIXERS[layer.mixer].stream]
    return spec.layers[: readers[-1]] if readers else ()


def train_flops(spec: ModelSpec, batch_size: int) -> int:
    """FLOPs of one train step on rows of max_len tokens."""
    return 3 * forward_flops(spec, batch_size).total


def train_flops_per_token(spec: ModelSpec, batch_size: int) -> float:
    """FLOPs of training one token; the batch shares the fixed streams' pre-pass."""
    return train_flops(spec, batch_size) / (batch_size * spec.max_len)


def activation_bytes(spec: ModelSpec, batch_size: int, compute: Compute) -> int:
    """Bytes that the layers' forward keeps for the backward, rows of max_len tokens.

    Read off the traced program: the residuals of autodiff after the remat policy, without the
    parameters. A compiler may fuse some away, so it is the larger side of the truth. Embedding and
    loss keep a few (B, T, D) more.
    """
    kept = sum(layer_activation_bytes(spec, layer, batch_size, compute) for layer in spec.layers)
    if num_streams := len(decoder.stream_names(spec)):
        kept += sum(
            layer_activation_bytes(spec, layer, num_streams, compute)
            for layer in _prepass_layers(spec)
        )
    return kept


def layer_activation_bytes(
    spec: ModelSpec, layer: LayerSpec, batch_size: int, compute: Compute
) -> int:
    """What `activation_bytes` counts, of one block."""
    return _block_residual_bytes(spec, layer.kind, batch_size, compute)


def mixer_activation_bytes(spec: ModelSpec, layer: LayerSpec, batch_size: int, dtype) -> int:
    """The same of one mixer alone, without remat: what the paper's formula is of."""
    mixer = MIXERS[layer.mixer](spec, options_of(layer), dtype)

    def apply(params, h_BTD, ctx):
        return mixer.apply({"params": params}, h_BTD, ctx)

    params = _shapes(spec, layer)["layer_01"]["mixer"]
    return _residual_bytes(apply, params, *_inputs(spec, layer, batch_size, spec.max_len, dtype))


@functools.cache
def _block_residual_bytes(spec, kind, batch_size: int, compute: Compute) -> int:
    layer = LayerSpec(1, *kind)
    block = decoder.Block(spec, layer, compute.dtype)

    def apply(params, x_BTD, ctx):
        return block.apply({"params": params}, x_BTD, ctx)

    policy = decoder.REMAT_POLICIES[compute.remat]
    if policy is not None:
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
    params = _shapes(spec, layer)["layer_01"]
    inputs = _inputs(spec, layer, batch_size, spec.max_len, compute.dtype)
    return _residual_bytes(apply, params, *inputs)


def _inputs(spec: ModelSpec, layer: LayerSpec, batch_size: int, length: int, dtype):
    """Shapes of (x_BTD, ctx) for a block or mixer on rows of `length` tokens."""
    mixer = MIXERS[layer.mixer]
    x_BTD = jax.ShapeDtypeStruct((batch_size, length, spec.model_dim), dtype)
    stream_LD = jax.ShapeDtypeStruct((spec.max_len, spec.model_dim), dtype)
    return x_BTD, MixerContext(
        positions_BT=jax.ShapeDtypeStruct((1, length), jnp.int32),
        embeddings_BTD=x_BTD if mixer.uses_embeddings else None,
        stream_LD=stream_LD if mixer.stream else None,
    )


def _residual_bytes(apply, params, x_BTD, ctx) -> int:
    """Bytes of what the backward of `apply` needs, beside `params` and `ctx`, which stay anyway."""

    def residuals(x_BTD, params, ctx):
        def of_floats(x_BTD, params, embeddings_BTD, stream_LD):
            return apply(
                params, x_BTD, ctx.replace(embeddings_BTD=embeddings_BTD, stream_LD=stream_LD)
            )

        _, backward = jax.vjp(of_floats, x_BTD, params, ctx.embeddings_BTD, ctx.stream_LD)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(x_BTD, params, ctx).jaxpr
    staying = set(jaxpr.invars[1:])
    kept = {var for var in jaxpr.outvars if not isinstance(var, core.Literal)} - staying
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)


def cache_bytes(spec: ModelSpec, batch_size: int, length: int, dtype) -> int:
    """Bytes of the decode caches of all layers for `batch_size` rows of `length` tokens.

    What fixed-QK mixers keep of their stream is there once, whatever the number of rows.
    """
    itemsize = jnp.dtype(dtype).itemsize
    rows = sum(mixer_cache_bytes(spec, layer, length, itemsize) for layer in spec.layers)
    return batch_size * rows + _shared_cache_bytes(spec, length, itemsize)


def mixer_cache_bytes(spec: ModelSpec, layer: LayerSpec, length: int, itemsize: int) -> int:
    """Bytes of one row's cache in one layer, as the mixer states them."""
    return MIXERS[layer.mixer].cache_bytes(spec, options_of(layer), length, itemsize)


def _shared_cache_bytes(spec: ModelSpec, length: int, itemsize: int) -> int:
    """What the layers keep of their fixed streams."""
    return sum(
        MIXERS[layer.mixer].shared_cache_bytes(spec, options_of(layer), length, itemsize)
        for layer in spec.layers
    )
