"""Text from a checkpoint: cached decoding, greedy or sampled (`python -m deconstruct.generate`).

Axes: B batch (one row here), V vocabulary.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from deconstruct import decoder, entry

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "run directory, or one step's directory")
_STEP = flags.DEFINE_integer("step", None, "step to read; the newest when left out")
_PROMPT = flags.DEFINE_string("prompt", "", "text to continue")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "tokens to add at most", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "0 takes the likeliest token; higher samples wider", lower_bound=0.0
)
_SEED = flags.DEFINE_integer("seed", 0, "random seed of the sampling")

_FLOAT32 = decoder.Compute()


def continue_ids(spec, params, fixed, prompt_ids, *, max_new_tokens, **options) -> list[int]:
    """All that `blocks_of_ids` yields, with its keywords."""
    options |= {"max_new_tokens": max_new_tokens, "block": max_new_tokens}
    return [id for new in blocks_of_ids(spec, params, fixed, prompt_ids, **options) for id in new]


def blocks_of_ids(
    spec,
    params,
    fixed,
    prompt_ids,
    *,
    max_new_tokens,
    block,
    room=None,
    temperature=0.0,
    seed=0,
    end_id=None,
    num_ids=None,
    compute=_FLOAT32,
) -> Iterator[list[int]]:
    """Token ids that continue `prompt_ids`, one at a time through the mixers' own caches.

    Args:
      spec, params, fixed: the model; params unboxed, either layout.
      prompt_ids: at least one token id; the first should be the end-of-text that leads documents.
      max_new_tokens: how many to add at most.
      block: how many are computed before they are yielded, so that a caller may stop there.
      room: tokens that the caches hold; None takes what is needed. Calls of one room share compiled
        code.
      temperature: divides the logits before sampling; 0 takes the largest.
      seed: of the sampling; the same seed gives the same text.
      end_id: ends the text when it is chosen, and is left out of it.
      num_ids: only ids below it are chosen; None allows the whole vocabulary of the model.
      compute: the dtype of the arithmetic.

    Yields:
      Lists of at most `block` new ids.

    Raises:
      ValueError: no prompt; more tokens than a fixed stream has positions.
    """
    if len(prompt_ids) == 0:
        raise ValueError("the prompt holds no token; give at least the end-of-text id")
    first, length = len(prompt_ids), len(prompt_ids) + max_new_tokens
    tokens = np.zeros(length if room is None else room, np.int32)
    tokens[:first] = prompt_ids
    greedy, temperature = temperature == 0.0, max(temperature, 1e-6)
    settings = {"greedy": greedy, "end_id": end_id, "num_ids": num_ids, "compute": compute}
    cache = _init_cache(spec, params, fixed, len(tokens), compute)
    key, tokens = jax.random.key(seed), jnp.asarray(tokens)
    position, done = jnp.int32(0), first
    while done < length:
        last = min(done + block, length) - 1
        position, tokens, cache = _decode(
            spec, params, cache, tokens, position, last, first, temperature, key, **settings
        )
        new = np.asarray(tokens)[done : int(position) + 1].tolist()
        if new[-1] == end_id:
            yield new[:-1]
            return
        yield new
        done += len(new)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _init_cache(spec, params, fixed, length, compute):
    return decoder.init_cache(spec, params, fixed, 1, length, compute=compute)


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("greedy", "end_id", "num_ids", "compute")
)
def _decode(
    spec,
    params,
    cache,
    tokens,
    position,
    last,
    prompt_len,
    temperature,
    key,
    *,
    greedy,
    end_id,
    num_ids,
    compute,
):
    """Chooses `tokens` from prompt_len to `last`, or to the end: (its last place, tokens, cache).

    The cache has seen the tokens before `position`.
    """

    def unfinished(carry):
        position, tokens, _ = carry
        ended = False if end_id is None else tokens[position] == end_id
        return (position < last) & ~((position >= prompt_len) & ended)

    def advance(carry):
        position, tokens, cache = carry
        logits_BV, cache = decoder.decode_step(
            spec, params, cache, tokens[position][None], position[None], compute=compute
        )
        logits_V = logits_BV[0, :num_ids]
        if greedy:
            chosen = jnp.argmax(logits_V)
        else:
            step_key = jax.random.fold_in(key, position)
            chosen = jax.random.categorical(step_key, logits_V / temperature)
        given = position + 1 < prompt_len
        chosen = jnp.where(given, tokens[position + 1], chosen.astype(tokens.dtype))
        return position + 1, tokens.at[position + 1].set(chosen), cache

    return jax.lax.while_loop(unfinished, advance, (position, tokens, cache))


def continue_text(spec, params, fixed, tokenizer, prompt: str, **kwargs) -> str:
    """The text that the model puts after `prompt`; keywords as for `continue_ids`."""
    prompt_ids = tokenizer.with_start(tokenizer.encode(prompt))
    kwargs |= {"end_id": tokenizer.eot_id, "num_ids": tokenizer.vocab_size}
    return tokenizer.decode(continue_ids(spec, params, fixed, prompt_ids, **kwargs))


def main(argv) -> None:
    del argv
    if _CHECKPOINT.value is None:
        raise ValueError("--checkpoint is missing: name a run's directory")
    from deconstruct import trained

    model = trained.load(_CHECKPOINT.value, _STEP.value)
    text = continue_text(
        model.spec,
        model.params,
        model.fixed,
        model.tokenizer,
        _PROMPT.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        temperature=_TEMPERATURE.value,
        seed=_SEED.value,
    )
    print(_PROMPT.value + text)


if __name__ == "__main__":
    entry.run(main)
