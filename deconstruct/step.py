"""One training step as a pure function, the state it carries, and where that state lies.

Axes: B batch, T time, D model, V vocabulary, M micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from deconstruct import decoder, layouts, mixers, objective, optim, sharding
from deconstruct.data.packing import Batch
from deconstruct.decoder import Compute
from deconstruct.mixers.base import visible
from deconstruct.spec import ModelSpec


@flax.struct.dataclass
class TrainState:
    """All that a step changes, and the fixed streams' start values, which nothing changes.

    Attributes:
      step: steps done, int32.
      skipped: steps whose update was dropped because it was not finite, int32.
      params: float32, in the layout of `Program.scan_layers`.
      opt_state: the optimizer's.
      fixed: from `decoder.init_fixed`.
    """

    step: jax.Array
    skipped: jax.Array
    params: Any
    opt_state: Any
    fixed: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a run computes, apart from its state: everything static of a step.

    Attributes:
      spec: the model, resolved.
      optimizer: from `optim.make_optimizer`; drops an update that is not finite.
      schedule: updates done -> learning rate, for the logs.
      compute: dtype and remat.
      scan_layers: parameters by segment, run under a scan; else per layer, unrolled.
      isolate_documents: whether mixers see only the token's own document.
      micro_batches: parts of the batch whose gradients are summed.
      z_loss: weight of log(Z)^2.
    """

    spec: ModelSpec
    optimizer: optax.GradientTransformationExtraArgs
    schedule: Callable[[Any], Any]
    compute: Compute = dataclasses.field(default_factory=Compute)
    scan_layers: bool = False
    isolate_documents: bool = False
    micro_batches: int = 1
    z_loss: float = 0.0


def _init_params(program: Program, key: jax.Array):
    params = decoder.init(program.spec, key)
    return layouts.stack_layers(program.spec, params) if program.scan_layers else params


def new_state(program: Program, seed: int, text_ids=None) -> TrainState:
    """The state before the first step. Its values depend on the spec and the seed alone."""
    params = nn.meta.unbox(_init_params(program, jax.random.key(seed)))
    return _state_of(program, params, text_ids)


def _state_of(program: Program, params, text_ids) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=program.optimizer.init(params),
        fixed=decoder.init_fixed(program.spec, text_ids),
    )


@functools.lru_cache
def _abstract_params(program: Program):
    """Shapes and axis names of the parameters; a trace of every layer, made once for a program."""
    return jax.eval_shape(functools.partial(_init_params, program), jax.random.key(0))


def state_shardings(program: Program, mesh: Mesh, abstract: TrainState) -> TrainState:
    """The NamedSharding of each leaf: moments lie as their parameters do, the rest everywhere."""
    params = sharding.param_shardings(_abstract_params(program), mesh)
    whole = sharding.replicated(mesh)
    opt_state = optax.tree_utils.tree_map_params(
        program.optimizer,
        lambda _, where: where,
        abstract.opt_state,
        params,
        transform_non_params=lambda _: whole,
    )
    fixed = jax.tree.map(lambda _: whole, abstract.fixed)
    return TrainState(step=whole, skipped=whole, params=params, opt_state=opt_state, fixed=fixed)


def check_mesh(program: Program, mesh: Mesh) -> None:
    """Refuses a mesh over which a parameter does not divide.

    Raises:
      ValueError: naming the parameter and the nearest sizes that fit.
    """
    sharding.check_params(_abstract_params(program), mesh)


@functools.lru_cache
def abstract_state(program: Program, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is computed. All callers share them."""
    text_ids = jnp.zeros((program.spec.max_len,), jnp.int32)
    params = nn.meta.unbox(_abstract_params(program))
    shapes = jax.eval_shape(lambda tree: _state_of(program, tree, text_ids), params)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        state_shardings(program, mesh, shapes),
    )


def init_state(program: Program, mesh: Mesh, seed: int, text_ids=None) -> TrainState:
    """`new_state`, made where it will lie."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(program, mesh))
    make = jax.jit(lambda: new_state(program, seed, text_ids), out_shardings=shardings)
    with jax.set_mesh(mesh):
        return make()


def train_step(program: Program, state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
    """One optimizer step.

    The loss is the mean over tokens of positive weight, summed over all micro-batches before it is
    divided. A step whose loss or gradient norm is not finite changes nothing but `step` and
    `skipped`.

    Returns:
      (the state after it, metrics: scalars loss, grad_norm, learning_rate, tokens (of weight above
      0), finite, skipped (steps so far), and layer_grad_norm with one entry a layer).
    """
    grads, sums = _gradients(program, state, batch)
    loss = sums.nll / sums.weight
    grad_norm = optim.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt_state = program.optimizer.update(
        grads, state.opt_state, state.params, grad_norm=grad_norm, finite=finite
    )
    metrics = {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": program.schedule(state.step - state.skipped),
        "tokens": jnp.sum(batch.weights_BT > 0, dtype=jnp.float32),
        "finite": finite,
        "skipped": state.skipped + jnp.where(finite, 0, 1),
        "layer_grad_norm": _layer_norms(program.spec, grads),
    }
    state = TrainState(
        step=state.step + 1,
        skipped=metrics["skipped"],
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        fixed=state.fixed,
    )
    return state, metrics


def _gradients(program: Program, state: TrainState, batch: Batch):
    """Gradients of the batch's mean loss, and its `objective.LossSums`.

    The fixed streams are run once, whatever the number of micro-batches; their gradient is summed
    over those and goes back through the pre-pass once.
    """
    length = batch.tokens_BT.shape[1]
    stream_states, streams_vjp = jax.vjp(
        lambda params: decoder.streams(program.spec, params, state.fixed, length, program.compute),
        state.params,
    )
    total_weight = jnp.sum(batch.weights_BT)

    def micro_loss(params, stream_states, micro: Batch):
        x_BTD = _hidden(program, params, state.fixed, micro, stream_states)
        loss_sum, sums = objective.weighted_loss(
            x_BTD,
            decoder.head_table(program.spec, params),
            micro.targets_BT,
            micro.weights_BT,
            vocab_size=program.spec.vocab_size,
            z_loss=program.z_loss,
        )
        return loss_sum / total_weight, sums

    micro_grads = jax.grad(micro_loss, argnums=(0, 1), has_aux=True)
    if program.micro_batches == 1:
        (grads, stream_grads), sums = micro_grads(state.params, stream_states, batch)
    else:

        def accumulate(carry, micro):
            (grads, stream_grads), sums = micro_grads(state.params, stream_states, micro)
            new = jax.tree.map(lambda x: x.astype(jnp.float32), (grads, stream_grads, sums))
            return jax.tree.map(jnp.add, carry, new), None

        shapes = jax.eval_shape(micro_grads, state.params, stream_states, _split(program, batch, 0))
        (grads, stream_grads), sums = jax.tree.map(lambda s: jnp.zeros(s.shape), shapes)
        carry, _ = jax.lax.scan(accumulate, (grads, stream_grads, sums), _split(program, batch))
        grads, stream_grads, sums = carry
        stream_grads = jax.tree.map(lambda g, s: g.astype(s.dtype), stream_grads, stream_states)
    if stream_states:
        (through_streams,) = streams_vjp(stream_grads)
        grads = jax.tree.map(jnp.add, grads, through_streams)
    return grads, sums


def _split(program: Program, batch: Batch, index: int | None = None):
    """The batch as (M, B / M, T) arrays, or micro-batch `index` of it.

    Row i goes to micro-batch i mod M, so that every device's rows spread over all of them.
    """

    def split(x_BT):
        parts = x_BT.reshape(-1, program.micro_batches, *x_BT.shape[1:])
        return parts.swapaxes(0, 1) if index is None else parts[:, index]

    return jax.tree.map(split, batch)


def _hidden(program: Program, params, fixed, batch: Batch, stream_states=None):
    return decoder.hidden(
        program.spec,
        params,
        fixed,
        batch.tokens_BT,
        compute=program.compute,
        stream_states=stream_states,
        **_documents(program, batch),
    )


def _documents(program: Program, batch: Batch) -> dict[str, jax.Array | None]:
    """What mixers are told of the documents in the batch: nothing where they are not isolated."""
    if not program.isolate_documents:
        return {"positions_BT": None, "segments_BT": None}
    return {"positions_BT": batch.positions_BT, "segments_BT": batch.segments_BT}


def _layer_norms(spec: ModelSpec, grads) -> jax.Array:
    """Gradient norm of each layer, (layers,), in order."""
    layers = layouts.unstack_layers(spec, grads)
    return jnp.stack([optim.global_norm(layers[layer.name]) for layer in spec.layers])


def validation_step(program: Program, params, fixed, batch: Batch) -> tuple[jax.Array, ...]:
    """(negative log-likelihood of each target in nats, its weight, its id), each (B, T)."""
    x_BTD = _hidden(program, params, fixed, batch)
    nll_BT = objective.token_losses(
        x_BTD,
        decoder.head_table(program.spec, params),
        batch.targets_BT,
        vocab_size=program.spec.vocab_size,
    )
    return nll_BT, batch.weights_BT, batch.targets_BT


def diagnose(program: Program, params, fixed, batch: Batch) -> dict[str, jax.Array]:
    """Per-layer measures on the first row, each (layers,): where the paper's explanation shows.

    Returns:
      largest_score: largest absolute pre-softmax score over visible pairs (section 6, figures 2
        and 6), NaN for a mixer without scores; residual_rms: root mean square of the state that
        enters the layer.
    """
    found = {"largest_score": [], "residual_rms": []}
    row = jax.tree.map(lambda x_BT: x_BT[:1], batch)
    documents = _documents(program, row)
    mask = visible(mixers.MixerContext(**documents), row.tokens_BT.shape[1])
    looks = decoder.each_layer(
        program.spec,
        params,
        fixed,
        row.tokens_BT,
        ["scores"],
        compute=program.compute,
        **documents,
    )
    for _, x_BTD, answers in looks:
        scores = answers["scores"]
        largest = jnp.nan if scores is None else jnp.max(jnp.where(mask, jnp.abs(scores), 0))
        found["largest_score"].append(largest)
        found["residual_rms"].append(jnp.sqrt(jnp.mean(jnp.square(x_BTD.astype(jnp.float32)))))
    return {name: jnp.stack([jnp.float32(v) for v in values]) for name, values in found.items()}


def compile_train_step(program: Program, mesh: Mesh, abstract_batch: Batch):
    """`train_step` compiled ahead of time for the mesh; the old state's buffers are donated.

    Args:
      abstract_batch: shapes of the global batch, with shardings.
    """
    return lower_train_step(program, mesh, abstract_batch).compile()


def compile_look(look: Callable, program: Program, mesh: Mesh, batch_size: int):
    """`validation_step` or `diagnose` compiled ahead of time: (params, fixed, batch) -> results."""
    state = abstract_state(program, mesh)
    compiled = jax.jit(functools.partial(look, program), out_shardings=sharding.replicated(mesh))
    with jax.set_mesh(mesh):
        batch = abstract_batch(program.spec, batch_size, mesh)
        return compiled.lower(state.params, state.fixed, batch).compile()


def lower_train_step(program: Program, mesh: Mesh, abstract_batch: Batch):
    """`train_step` lowered for the mesh, which need not be of devices that are here."""
    state = abstract_state(program, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(
        functools.partial(train_step, program),
        donate_argnums=0,
        out_shardings=(shardings, sharding.replicated(mesh)),
    )
    with jax.set_mesh(mesh):
        return step.lower(state, abstract_batch)


def abstract_batch(spec: ModelSpec, batch_size: int, mesh: Mesh) -> Batch:
    """Shapes, dtypes and shardings of one global batch."""
    where = sharding.batch_sharding(mesh)

    def array(dtype):
        return jax.ShapeDtypeStruct((batch_size, spec.max_len), dtype, sharding=where)

    ids = array(jnp.int32)
    return Batch(ids, ids, array(jnp.float32), ids, ids)
