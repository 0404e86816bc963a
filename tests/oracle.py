"""The independent judge: the decoder in NumPy float64, one position at a time.

Written from the paper's equations (sections 3 and 4.2 of "Deconstructing Attention") and from the
parameter layout alone. It imports nothing of the package, so that the package's definition does
not judge itself. A row with several documents is decoded one document at a time: isolation is not
a mask here but the absence of everything else.

Axes: B batch, T query time, S key time, D model, H heads, K head size, G kv groups,
F feed-forward, V vocabulary, L stream length.
"""

import dataclasses
import math

import numpy as np

# Mixers whose queries and keys come from a fixed stream: they name the entry that starts it.
STREAM_MIXERS = ("rnd_emb_qk", "fixed_seq_qk")
MIXERS = ("standard", "mlp", "approximate", "non_approximate", "static_emb_qk", *STREAM_MIXERS)


@dataclasses.dataclass(frozen=True)
class OracleModel:
    """What the equations need beside the parameters. `layers` holds (original number, mixer)."""

    vocab_size: int
    num_heads: int
    num_kv_heads: int
    layers: tuple[tuple[int, str], ...]
    qkv_bias: bool = True
    qk_norm: bool = False
    tied_embeddings: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        for number, mixer in self.layers:
            if mixer not in MIXERS:
                raise ValueError(
                    f"layer {number}: the oracle has no equations for mixer {mixer!r}; "
                    "write them in tests/oracle.py from its definition"
                )


def logits(model, params, fixed, tokens_BT, segments_BT=None, positions_BT=None):
    """Next-token scores over the real vocabulary, float64.

    Args:
      model: an `OracleModel`.
      params: nested dict of arrays, `layer_01/mixer/query/kernel` and so on.
      fixed: start values of the streams that the model needs: `rnd_emb_qk` (L, D) and
        `fixed_seq_qk` (L,) token ids.
      tokens_BT: token ids.
      segments_BT: document ids, equal within a document and contiguous; None: a row is one
        document.
      positions_BT: positions within the document; None: they count from 0 in each document.
    """
    return _run(model, params, fixed, tokens_BT, segments_BT, positions_BT)[0]


def attention_maps(model, params, fixed, tokens_BT, segments_BT=None, positions_BT=None):
    """Each layer's A_BHTS in a dict by layer number; None for `mlp`. Arguments as in `logits`."""
    return _run(model, params, fixed, tokens_BT, segments_BT, positions_BT)[1]


def parameter_names(model) -> set[str]:
    """The parameters that the equations read, as paths joined by slashes."""
    names = {"embedding/table", "final_norm/scale"}
    if not model.tied_embeddings:
        names.add("head/table")
    for number, mixer in model.layers:
        if mixer == "mlp":
            own = ["gate/kernel", "up/kernel", "down/kernel"]
        else:
            own = [f"{part}/kernel" for part in ("query", "key", "value", "output")]
            if model.qkv_bias:
                own += [f"{part}/bias" for part in ("query", "key", "value")]
            if model.qk_norm:
                own += ["query_norm/scale", "key_norm/scale"]
        names |= {f"layer_{number:02d}/mixer/{name}" for name in own}
        names |= {
            f"layer_{number:02d}/{name}"
            for name in (
                "mixer_norm/scale",
                "feed_forward_norm/scale",
                "feed_forward/gate/kernel",
                "feed_forward/up/kernel",
                "feed_forward/down/kernel",
            )
        }
    return names


def _run(model, params, fixed, tokens_BT, segments_BT, positions_BT):
    params = _to_float64(params)
    tokens_BT = np.asarray(tokens_BT)
    num_rows, length = tokens_BT.shape
    streams = _stream_states(model, params, fixed)
    scores_BTV = np.zeros((num_rows, length, model.vocab_size))
    maps = {
        number: None if mixer == "mlp" else np.zeros((num_rows, model.num_heads, length, length))
        for number, mixer in model.layers
    }
    for b in range(num_rows):
        for start, stop in _documents(None if segments_BT is None else segments_BT[b], length):
            if positions_BT is None:
                positions_T = np.arange(stop - start)
            else:
                positions_T = np.asarray(positions_BT[b])[start:stop]
            scores_TV, document_maps = _decode_document(
                model, params, streams, tokens_BT[b, start:stop], positions_T
            )
            scores_BTV[b, start:stop] = scores_TV
            for number, map_HTS in document_maps.items():
                if map_HTS is not None:
                    maps[number][b, :, start:stop, start:stop] = map_HTS
    return scores_BTV, maps


def _to_float64(tree):
    if isinstance(tree, dict):
        return {key: _to_float64(value) for key, value in tree.items()}
    return np.asarray(tree, dtype=np.float64)


def _documents(segments_T, length):
    """(start, stop) of each run of equal ids."""
    if segments_T is None:
        return [(0, length)]
    starts = [t for t in range(length) if t == 0 or segments_T[t] != segments_T[t - 1]]
    return list(zip(starts, [*starts[1:], length], strict=True))


def _decode_document(model, params, streams, tokens_T, positions_T):
    """One document alone: its logits_TV and its map_HTS by layer number."""
    embedded_TD = [params["embedding"]["table"][token] for token in tokens_T]
    x_TD = embedded_TD
    maps = {}
    for index, (number, mixer) in enumerate(model.layers):
        stream_LD = streams[mixer][index] if mixer in STREAM_MIXERS else None
        layer = params[f"layer_{number:02d}"]
        x_TD, maps[number] = _block(model, layer, mixer, x_TD, embedded_TD, stream_LD, positions_T)
    head_VD = params["embedding" if model.tied_embeddings else "head"]["table"][: model.vocab_size]
    scale_D = params["final_norm"]["scale"]
    scores_TV = [head_VD @ _rms_norm(x_D, scale_D, model.norm_eps) for x_D in x_TD]
    return np.array(scores_TV), maps


def _stream_states(model, params, fixed):
    """For each stream that the model needs, the X_LD that enters each layer (equations 9 to 12).

    A stream passes through the same blocks as an input does. At a layer whose queries and keys
    come from a stream, they come from that layer's own kind, whichever stream is passing.
    """
    starts = {}
    for kind in STREAM_MIXERS:
        if kind in [mixer for _, mixer in model.layers]:
            start = np.asarray(fixed[kind])
            if kind == "fixed_seq_qk":
                start = params["embedding"]["table"][start]
            starts[kind] = [np.float64(row_D) for row_D in start]
    entering = {kind: [] for kind in starts}
    states = dict(starts)
    for number, mixer in model.layers:
        for kind, x_LD in states.items():
            entering[kind].append(x_LD)
        states = {
            kind: _block(
                model,
                params[f"layer_{number:02d}"],
                mixer,
                x_LD,
                starts[kind],
                states.get(mixer),
                range(len(x_LD)),
            )[0]
            for kind, x_LD in states.items()
        }
    return entering


def _block(model, layer, mixer, x_TD, embedded_TD, stream_LD, positions_T):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)); also the attention map or None."""

    def mixer_norm(vector_D):
        return _rms_norm(vector_D, layer["mixer_norm"]["scale"], model.norm_eps)

    hidden_TD = [mixer_norm(x_D) for x_D in x_TD]
    weights = layer["mixer"]
    if mixer == "mlp":
        mixed_TD, map_HTS = [_gated(weights, hidden_D) for hidden_D in hidden_TD], None
    else:
        if mixer in STREAM_MIXERS:
            source_TD = [mixer_norm(stream_LD[position]) for position in positions_T]
        elif mixer == "static_emb_qk":
            source_TD = [mixer_norm(embedded_D) for embedded_D in embedded_TD]
        else:
            source_TD = hidden_TD
        map_HTS = _attention_map(model, weights, mixer, source_TD, positions_T)
        mixed_TD = _attend(model, weights, map_HTS, hidden_TD)
    x_TD = [x_D + mixed_D for x_D, mixed_D in zip(x_TD, mixed_TD, strict=True)]
    scale_D = layer["feed_forward_norm"]["scale"]
    out_TD = [
        x_D + _gated(layer["feed_forward"], _rms_norm(x_D, scale_D, model.norm_eps)) for x_D in x_TD
    ]
    return out_TD, map_HTS


def _attention_map(model, weights, mixer, source_TD, positions_T):
    """A_HTS from the vectors that give the queries and keys."""
    query_THK, key_THK = [], []
    for source_D, position in zip(source_TD, positions_T, strict=True):
        query_HK = _heads(model, weights["query"], source_D, model.num_heads)
        key_HK = _per_query_head(model, _heads(model, weights["key"], source_D, model.num_kv_heads))
        if mixer == "non_approximate":
            query_HK = _silu(query_HK)
        if model.qk_norm:
            query_HK = _rms_norm(query_HK, weights["query_norm"]["scale"], model.norm_eps)
            key_HK = _rms_norm(key_HK, weights["key_norm"]["scale"], model.norm_eps)
        # A score of one position with itself does not see rotary, which only turns both alike.
        if mixer != "non_approximate":
            query_HK = _rotary(query_HK, position, model.rope_base)
            key_HK = _rotary(key_HK, position, model.rope_base)
        query_THK.append(query_HK)
        key_THK.append(key_HK)
    length = len(source_TD)
    map_HTS = np.zeros((model.num_heads, length, length))
    for t in range(length):
        terms_SH = []
        for s in range(t + 1):
            query_HK = query_THK[s if mixer == "non_approximate" else t]
            score_H = (query_HK * key_THK[s]).sum(-1) / math.sqrt(query_HK.shape[-1])
            terms_SH.append(score_H)
        terms_SH = np.array(terms_SH)
        if mixer == "approximate":
            terms_SH = 1 + terms_SH + terms_SH**2 / 2
        else:
            terms_SH = np.exp(terms_SH - terms_SH.max(axis=0))
        map_HTS[:, t, : t + 1] = (terms_SH / terms_SH.sum(axis=0)).T
    return map_HTS


def _attend(model, weights, map_HTS, hidden_TD):
    """Output projection of sum_s A[t, s] v[s], heads side by side."""
    value_THK = [
        _per_query_head(model, _heads(model, weights["value"], hidden_D, model.num_kv_heads))
        for hidden_D in hidden_TD
    ]
    out_TD = []
    for t in range(len(hidden_TD)):
        mixed_HK = sum(map_HTS[:, t, s, None] * value_THK[s] for s in range(t + 1))
        out_TD.append(mixed_HK.reshape(-1) @ weights["output"]["kernel"])
    return out_TD


def _heads(model, projection, source_D, num_heads):
    """One position's projection, cut into heads: columns h*K ... (h+1)*K-1 are head h."""
    flat = source_D @ projection["kernel"]
    if model.qkv_bias:
        flat = flat + projection["bias"]
    return flat.reshape(num_heads, -1)


def _per_query_head(model, vectors_GK):
    """The kv group of each query head: head h reads group h // (H // G)."""
    share = model.num_heads // model.num_kv_heads
    return np.array([vectors_GK[h // share] for h in range(model.num_heads)])


def _rotary(vectors_HK, position, base):
    """Rotate the pairs (k, k + K/2) by position / base^(2k/K): the half-split convention."""
    half = vectors_HK.shape[-1] // 2
    turned_HK = np.zeros_like(vectors_HK)
    for k in range(half):
        angle = position / base ** (2 * k / vectors_HK.shape[-1])
        first_H, second_H = vectors_HK[:, k], vectors_HK[:, k + half]
        turned_HK[:, k] = first_H * math.cos(angle) - second_H * math.sin(angle)
        turned_HK[:, k + half] = second_H * math.cos(angle) + first_H * math.sin(angle)
    return turned_HK


def _rms_norm(vector, scale, eps):
    return vector / np.sqrt((vector**2).mean(axis=-1, keepdims=True) + eps) * scale


def _gated(weights, hidden_D):
    """Down(SiLU(Gate(h)) * Up(h)): the feed-forward, and equations 4 and 5."""
    gate = _silu(hidden_D @ weights["gate"]["kernel"])
    return (gate * (hidden_D @ weights["up"]["kernel"])) @ weights["down"]["kernel"]


def _silu(x):
    return x / (1 + np.exp(-x))
