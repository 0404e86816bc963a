"""The model as functions of (spec, params): embedding, blocks, final norm, logits.

Every function takes parameters in either of the layouts of `layouts.py`, per layer or by segment.

Axes: B batch, T time, D model, V vocabulary, L stream length, R stream rows (one a kind).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from deconstruct import layouts, sharding
from deconstruct import spec as spec_lib
from deconstruct.layers import GatedFeedForward, RMSNorm, Table
from deconstruct.layouts import Params
from deconstruct.mixers import MIXERS, Mixer, MixerContext, options_of
from deconstruct.spec import LayerSpec, ModelSpec

REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model is run, which changes no result beyond rounding.

    Attributes:
      dtype: of activations and matrix products; parameters stay float32.
      remat: a key of `REMAT_POLICIES`: what the backward recomputes.
    """

    dtype: jnp.dtype = jnp.float32
    remat: str = "none"


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    spec: ModelSpec
    layer: LayerSpec
    dtype: jnp.dtype

    def setup(self):
        spec = self.spec
        self.mixer_norm = RMSNorm(spec.norm_eps, self.dtype)
        self.mixer: Mixer = MIXERS[self.layer.mixer](spec, options_of(self.layer), self.dtype)
        self.feed_forward_norm = RMSNorm(spec.norm_eps, self.dtype)
        self.feed_forward = GatedFeedForward(spec.feed_forward_dim, spec.init_std, self.dtype)

    def mixer_inputs(self, x_BTD: jax.Array, ctx: MixerContext):
        """(h_BTD, ctx) as the mixer takes them: all that it reads has passed the input norm."""
        if ctx.embeddings_BTD is not None:
            ctx = ctx.replace(embeddings_BTD=self.mixer_norm(ctx.embeddings_BTD))
        if ctx.stream_LD is not None:
            ctx = ctx.replace(stream_LD=self.mixer_norm(ctx.stream_LD))
        return self.mixer_norm(x_BTD), ctx

    def __call__(self, x_BTD: jax.Array, ctx: MixerContext) -> jax.Array:
        x_BTD = x_BTD + self.mixer(*self.mixer_inputs(x_BTD, ctx))
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))

    def remember(self, x_BSD: jax.Array, ctx: MixerContext):
        return self.mixer.remember(*self.mixer_inputs(x_BSD, ctx))

    def extend(self, x_BTD: jax.Array, past, ctx: MixerContext) -> jax.Array:
        h_BTD, ctx = self.mixer_inputs(x_BTD, ctx)
        x_BTD = x_BTD + self.mixer.extend(h_BTD, past, ctx)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))

    def apply_mixer(self, x_BTD, ctx, method: str):
        """A method of the mixer (`scores`, `attention_map`, ...) on this layer's input."""
        return getattr(self.mixer, method)(*self.mixer_inputs(x_BTD, ctx))

    def init_cache(self, batch_size: int, length: int, ctx: MixerContext):
        _, ctx = self.mixer_inputs(jnp.zeros((1, 1, self.spec.model_dim), self.dtype), ctx)
        return self.mixer.init_cache(batch_size, length, ctx)

    def decode(self, x_B1D: jax.Array, cache, ctx: MixerContext):
        h_B1D, ctx = self.mixer_inputs(x_B1D, ctx)
        out_B1D, cache = self.mixer.decode(h_B1D, cache, ctx)
        x_B1D = x_B1D + out_B1D
        return x_B1D + self.feed_forward(self.feed_forward_norm(x_B1D)), cache


def _mixer(layer: LayerSpec) -> type[Mixer]:
    return MIXERS[layer.mixer]


def _table(spec: ModelSpec) -> Table:
    return Table(spec.vocab_size, spec.padded_vocab_size, spec.model_dim, spec.init_std)


def init(spec: ModelSpec, key: jax.Array) -> Params:
    """Initial parameters in the per-layer layout, each leaf boxed with its logical axis names.

    A layer's values depend on (key, its original number) alone, never on the mesh, the layout or
    the other layers. `nn.meta.unbox` gives plain arrays.
    """
    tokens_BT = jnp.zeros((1, 1), jnp.int32)
    x_BTD = jnp.zeros((1, 1, spec.model_dim))
    norm = RMSNorm(spec.norm_eps, jnp.float32)

    embedding_key, head_key = jax.random.split(jax.random.fold_in(key, 0))  # layers count from 1

    def init_table(table_key):
        return _table(spec).init(table_key, tokens_BT, jnp.float32)["params"]

    params = {"embedding": init_table(embedding_key)}
    for alike in _layers_by_kind(spec):
        layer = alike[0]
        ctx = MixerContext(
            positions_BT=tokens_BT,
            embeddings_BTD=x_BTD if _mixer(layer).uses_embeddings else None,
            stream_LD=x_BTD[0] if _mixer(layer).stream else None,
        )
        block = Block(spec, layer, jnp.float32)
        layer_keys = jnp.stack([jax.random.fold_in(key, other.number) for other in alike])
        stacked = jax.vmap(lambda k, block=block, ctx=ctx: block.init(k, x_BTD, ctx))(layer_keys)
        for index, other in enumerate(alike):
            params[other.name] = jax.tree.map(lambda leaf, i=index: leaf[i], stacked["params"])
    params["final_norm"] = norm.init(key, x_BTD)["params"]
    if not spec.tied_embeddings:
        params["head"] = init_table(head_key)
    return params


def _layers_by_kind(spec: ModelSpec) -> list[list[LayerSpec]]:
    """Layers of equal computation together, so that each kind's initialiser compiles once."""
    by_kind: dict[Any, list[LayerSpec]] = {}
    for layer in spec.layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    return list(by_kind.values())


def init_fixed(spec: ModelSpec, text_ids=None) -> dict[str, jax.Array]:
    """Start values of the fixed streams that the plan reads, by registry name; never trained.

    Args:
      spec: the model.
      text_ids: at least max_len token ids, for `fixed_seq_qk`.
    """
    starts = {}
    for layer in spec.layers:
        mixer = _mixer(layer)
        if mixer.stream and mixer.stream not in starts:
            starts[mixer.stream] = mixer.init_stream(spec, options_of(layer), text_ids)
    return starts


def stream_names(spec: ModelSpec) -> list[str]:
    """The fixed streams that the plan reads, in the order of their rows."""
    return sorted({_mixer(layer).stream for layer in spec.layers if _mixer(layer).stream})


def streams(spec: ModelSpec, params: Params, fixed, length: int, compute: Compute) -> Params:
    """The pre-pass: the state of each layer's own fixed stream as it enters that layer.

    One row a kind travels through every block, as an input would: at a layer of its own kind it
    gives its own queries and keys, at another kind's layer that kind's row gives them.

    Returns:
      In the layout of `params` without its tables: layer name -> (L, D), or segment name ->
      block name -> (repeats, L, D), for the layers that read a stream. Empty for plans without.
    """
    names = stream_names(spec)
    if not names:
        return {}
    if length > spec.max_len:
        raise ValueError(
            f"{length} tokens exceed max_len={spec.max_len}, where the fixed streams of "
            f"{', '.join(names)} end"
        )
    starts = []
    for name in names:
        start = MIXERS[name].start_stream(
            fixed[name], _embedder(spec, params, compute), compute.dtype
        )
        starts.append(start[:length])
    starts_RLD = jnp.stack(starts)

    def step(x_RLD, layer, layer_params, _, scanned):
        stream = _mixer(layer).stream
        entering_LD = x_RLD[names.index(stream)] if stream else None
        ctx = _context(layer, _arange(length), None, starts_RLD, entering_LD)
        x_RLD = _apply_block(spec, layer, layer_params, x_RLD, ctx, compute, scanned)
        return x_RLD, entering_LD

    return _run_layers(spec, params, starts_RLD, {}, step)[1]


def _first_states(stream_states, spec, params, fixed, length, compute) -> Params:
    """The streams' states at the first positions, of those that a caller has or made anew."""
    if stream_states is None:
        return streams(spec, params, fixed, length, compute)
    return jax.tree.map(lambda x_LD: x_LD[..., :length, :], stream_states)


def _embedder(spec, params, compute):
    table = _table(spec)
    return lambda tokens: table.apply({"params": params["embedding"]}, tokens, compute.dtype)


def _arange(length: int) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32)[None, :]


def _positions_in_runs(ids_BT: jax.Array) -> jax.Array:
    """Position of each token in its run of equal ids, (B, T) int32."""
    places_BT = jax.lax.broadcasted_iota(jnp.int32, ids_BT.shape, 1)
    is_first_BT = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)))
    return places_BT - jax.lax.cummax(jnp.where(is_first_BT, places_BT, 0), axis=1)


def _context(layer, positions_BT, segments_BT, embeddings_BTD, stream_LD) -> MixerContext:
    """The context of one layer: only what its mixer declares that it reads."""
    return MixerContext(
        positions_BT=positions_BT,
        segments_BT=segments_BT,
        embeddings_BTD=embeddings_BTD if _mixer(layer).uses_embeddings else None,
        stream_LD=stream_LD if _mixer(layer).stream else None,
    )


def _apply_block(spec, layer, layer_params, x_BTD, ctx, compute: Compute, scanned: bool):
    block = Block(spec, layer, compute.dtype)

    def apply(layer_params, x_BTD, ctx):
        return block.apply({"params": layer_params}, sharding.constrain_batch(x_BTD), ctx)

    policy = REMAT_POLICIES[compute.remat]
    if policy is not None:
        # Outside a scan, the compiler would merge what is recomputed with what was computed.
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=not scanned)
    return apply(layer_params, x_BTD, ctx)


def _run_layers(spec: ModelSpec, params: Params, x, per_layer: Params, step):
    """x through all layers, in either layout of `params`.

    Args:
      per_layer: what belongs to each layer beside its parameters, in their layout (may lack any).
      step: (x, layer, layer_params, layer's share of per_layer, whether this is inside a scan) ->
        (x, what to collect or None).

    Returns:
      (x, what the steps collected, in the layout of `params`).
    """
    collected = {}
    for index, segment in enumerate(spec_lib.segments(spec)):
        name = layouts.segment_name(index)
        unit = spec.layers[segment.start : segment.start + segment.unit_len]
        if name in params:
            x, outs = _scan_segment(unit, params[name], x, per_layer.get(name, {}), step)
            if outs:
                collected[name] = outs
            continue
        end = segment.start + segment.unit_len * segment.repeats
        for layer in spec.layers[segment.start : end]:
            x, out = step(x, layer, params[layer.name], per_layer.get(layer.name), False)
            if out is not None:
                collected[layer.name] = out
    return x, collected


def _scan_segment(unit, stacked_params, x, per_layer, step):
    """A scan over the repeats of `unit`."""

    def body(x, slices):
        params, extra = slices
        outs = {}
        for position, layer in enumerate(unit):
            name = layouts.block_name(position)
            x, out = step(x, layer, params[name], extra.get(name), True)
            if out is not None:
                outs[name] = out
        return x, outs

    return jax.lax.scan(body, x, (stacked_params, per_layer))


def hidden(
    spec: ModelSpec,
    params: Params,
    fixed,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    compute: Compute = Compute(),
    stream_states: Params | None = None,
) -> jax.Array:
    """The final hidden state after the last norm, (B, T, D) in the compute dtype.

    Args:
      spec: the model, resolved.
      params: unboxed, either layout.
      fixed: from `init_fixed`.
      tokens_BT: token ids below vocab_size.
      positions_BT: position of each token in its document; None counts the runs of `segments_BT`.
      segments_BT: document of each token, or None: the row is one document.
      stream_states: what `streams` gave, for as many positions or more, if the caller has it.

    Raises:
      ValueError: a row longer than a fixed stream.
    """
    length = tokens_BT.shape[1]
    if segments_BT is None:
        positions_BT = _arange(length)
    elif positions_BT is None:
        positions_BT = _positions_in_runs(segments_BT)
    stream_states = _first_states(stream_states, spec, params, fixed, length, compute)
    embeddings_BTD = sharding.constrain_batch(_embedder(spec, params, compute)(tokens_BT))

    def step(x_BTD, layer, layer_params, stream_LD, scanned):
        ctx = _context(layer, positions_BT, segments_BT, embeddings_BTD, stream_LD)
        return _apply_block(spec, layer, layer_params, x_BTD, ctx, compute, scanned), None

    x_BTD, _ = _run_layers(spec, params, embeddings_BTD, stream_states, step)
    return final_norm(spec, params, x_BTD, compute)


def branches(
    spec: ModelSpec,
    params: Params,
    fixed,
    context_BS: jax.Array,
    documents_BS: jax.Array,
    tokens_BT: jax.Array,
    branches_BT: jax.Array,
    follows_BT: jax.Array,
    *,
    compute: Compute = Compute(),
    stream_states: Params | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Final hidden states of contexts and of several continuations of each: (B, S, D), (B, T, D).

    The contexts are read once, whatever the number of their continuations, and a row may hold
    several of them. Equal to `hidden` of each context and continuation by themselves, up to
    rounding.

    Args:
      spec, params, fixed, compute, stream_states: as for `hidden`.
      context_BS: token ids.
      documents_BS: which context of its row a token belongs to; a context is a run of an id that
        the row has once.
      tokens_BT: a row's continuations, one behind the other.
      branches_BT: which continuation each token belongs to; a continuation is a run of an id that
        the row has once.
      follows_BT: the id of the context that each token follows.

    Raises:
      ValueError: more tokens than a fixed stream has positions.
    """
    length = context_BS.shape[1]
    past_BTS = follows_BT[:, :, None] == documents_BS[:, None, :]
    positions_BS = _positions_in_runs(documents_BS)
    positions_BT = jnp.sum(past_BTS, axis=2, dtype=jnp.int32)
    positions_BT += _positions_in_runs(branches_BT)
    longest = max(length, min(spec.max_len, length + tokens_BT.shape[1]))
    stream_states = _first_states(stream_states, spec, params, fixed, longest, compute)
    embed = _embedder(spec, params, compute)
    context_BSD, tokens_BTD = embed(context_BS), embed(tokens_BT)

    def step(carry, layer, layer_params, stream_LD, scanned):
        x_BSD, x_BTD = carry
        own = _context(layer, positions_BS, documents_BS, context_BSD, stream_LD)
        then = _context(layer, positions_BT, branches_BT, tokens_BTD, stream_LD)
        block = Block(spec, layer, compute.dtype)
        variables = {"params": layer_params}
        past = block.apply(variables, x_BSD, own, method="remember")
        x_BTD = block.apply(
            variables, x_BTD, past, then.replace(past_BTS=past_BTS), method="extend"
        )
        return (block.apply(variables, x_BSD, own), x_BTD), None

    hiddens, _ = _run_layers(spec, params, (context_BSD, tokens_BTD), stream_states, step)
    x_BSD, x_BTD = (final_norm(spec, params, x, compute) for x in hiddens)
    return x_BSD, x_BTD


def final_norm(spec: ModelSpec, params: Params, x_BTD: jax.Array, compute: Compute) -> jax.Array:
    return RMSNorm(spec.norm_eps, compute.dtype).apply({"params": params["final_norm"]}, x_BTD)


def head_table(spec: ModelSpec, params: Params) -> jax.Array:
    """The output table (padded V, D): the head's own, or the embedding's where they are tied."""
    return params["embedding" if spec.tied_embeddings else "head"]["table"]


def logits_of(spec: ModelSpec, params: Params, x_BTD: jax.Array, compute: Compute) -> jax.Array:
    """float32 logits over the true vocabulary of a final hidden state."""
    table_VD = head_table(spec, params)[: spec.vocab_size].astype(compute.dtype)
    return jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)


def logits(spec, params, fixed, tokens_BT, *, compute: Compute = Compute(), **kwargs) -> jax.Array:
    """float32 logits (B, T, vocab_size); arguments as for `hidden`."""
    x_BTD = hidden(spec, params, fixed, tokens_BT, compute=compute, **kwargs)
    return logits_of(spec, params, x_BTD, compute)


def each_layer(
    spec,
    params,
    fixed,
    tokens_BT,
    methods,
    *,
    positions_BT=None,
    segments_BT=None,
    compute: Compute = Compute(),
):
    """Looks into every layer: yields (layer, x_BTD entering it, {method: its mixer's answer}).

    `methods` are methods of the mixer such as "scores" and "attention_map"; the other arguments are
    as for `hidden`. A generator, so that the large maps of one layer can go before the next.
    """
    params = layouts.unstack_layers(spec, params)
    length = tokens_BT.shape[1]
    if segments_BT is None:
        positions_BT = _arange(length)
    stream_states = streams(spec, params, fixed, length, compute)
    embeddings_BTD = x_BTD = _embedder(spec, params, compute)(tokens_BT)
    for layer in spec.layers:
        stream_LD = stream_states.get(layer.name)
        ctx = _context(layer, positions_BT, segments_BT, embeddings_BTD, stream_LD)
        block = Block(spec, layer, compute.dtype)
        variables = {"params": params[layer.name]}
        answers = {
            method: block.apply(variables, x_BTD, ctx, method, method="apply_mixer")
            for method in methods
        }
        yield layer, x_BTD, answers
        x_BTD = block.apply(variables, x_BTD, ctx)


def init_cache(spec, params, fixed, batch_size: int, length: int, *, compute: Compute = Compute()):
    """An empty cache for `length` tokens a row: layer name -> its mixer's own cache."""
    params = layouts.unstack_layers(spec, params)
    stream_states = streams(spec, params, fixed, length, compute)
    cache = {}
    for layer in spec.layers:
        ctx = _context(layer, _arange(1), None, jnp.zeros((1, 1, spec.model_dim), compute.dtype),
                       stream_states.get(layer.name))  # fmt: skip
        cache[layer.name] = Block(spec, layer, compute.dtype).apply(
            {"params": params[layer.name]}, batch_size, length, ctx, method="init_cache"
        )
    return cache


def decode_step(spec, params, cache, tokens_B, positions_B, *, compute: Compute = Compute()):
    """One token a row: (float32 logits (B, vocab_size), the cache after it).

    Rows may stand at different positions; each position must be the number of tokens that the
    row's cache has seen.
    """
    params = layouts.unstack_layers(spec, params)
    embeddings_B1D = x_B1D = _embedder(spec, params, compute)(tokens_B[:, None])
    cache = dict(cache)
    for layer in spec.layers:
        ctx = _context(layer, positions_B[:, None], None, embeddings_B1D, None)
        x_B1D, cache[layer.name] = Block(spec, layer, compute.dtype).apply(
            {"params": params[layer.name]}, x_B1D, cache[layer.name], ctx, method="decode"
        )
    x_B1D = final_norm(spec, params, x_B1D, compute)
    return logits_of(spec, params, x_B1D, compute)[:, 0], cache
