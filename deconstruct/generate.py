"""Text from a checkpoint: cached decoding, greedy or sampled (`python -m deconstruct.generate`).

Axes: B batch (one row here), V vocabulary.
"""

import functools

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


def continue_ids(
    spec,
    params,
    fixed,
    prompt_ids,
    *,
    max_new_tokens,
    temperature=0.0,
    seed=0,
    end_id=None,
    num_ids=None,
):
    """Token ids that continue `prompt_ids`, one at a time through the mixers' own caches.

    Args:
      spec, params, fixed: the model; params unboxed, either layout.
      prompt_ids: at least one token id; the first should be the end-of-text that leads documents.
      max_new_tokens: how many to add at most.
      temperature: divides the logits before sampling; 0 takes the largest.
      seed: of the sampling; the same seed gives the same text.
      end_id: ends the text when it is chosen, and is left out of it.
      num_ids: only ids below it are chosen; None allows the whole vocabulary of the model.

    Returns:
      A list of new ids.

    Raises:
      ValueError: no prompt; more tokens than a fixed stream has positions.
    """
    if len(prompt_ids) == 0:
        raise ValueError("the prompt holds no token; give at least the end-of-text id")
    length = len(prompt_ids) + max_new_tokens
    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt_ids)] = prompt_ids
    greedy = temperature == 0.0
    decode = functools.partial(_decode, spec, greedy=greedy, end_id=end_id, num_ids=num_ids)
    decode = jax.jit(decode)
    tokens, count = decode(
        params, fixed, tokens, len(prompt_ids), max(temperature, 1e-6), jax.random.key(seed)
    )
    new = np.asarray(tokens)[len(prompt_ids) : int(count)].tolist()
    return new[:-1] if end_id is not None and new and new[-1] == end_id else new


def _decode(spec, params, fixed, tokens, prompt_len, temperature, key, *, greedy, end_id, num_ids):
    """Fills `tokens` from prompt_len on: (tokens, how many of them hold)."""
    length = tokens.shape[0]
    cache = decoder.init_cache(spec, params, fixed, 1, length)

    def unfinished(carry):
        position, tokens, _ = carry
        ended = False if end_id is None else tokens[position] == end_id
        return (position < length - 1) & ~((position >= prompt_len) & ended)

    def advance(carry):
        position, tokens, cache = carry
        logits_BV, cache = decoder.decode_step(
            spec, params, cache, tokens[position][None], position[None]
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

    start = (jnp.int32(0), tokens, cache)
    position, tokens, _ = jax.lax.while_loop(unfinished, advance, start)
    return tokens, position + 1


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
