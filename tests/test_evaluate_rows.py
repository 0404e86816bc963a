"""From requests to rows of ids (E1, E3, E5, T1, T3), with a tokenizer whose ids are known."""

import pytest

from deconstruct.evaluate import rows
from deconstruct.evaluate.tasks import Pair, Whole
from deconstruct.tokenizer import train_bpe

L = 8


@pytest.fixture(scope="module")
def tokenizer():
    """Knows the words that it was trained on whole, and bytes."""
    return train_bpe(["Answer Ans wer the the cat sat on a mat . the cat sat on a mat "] * 50, 278)


def scored(encoded, request):
    """(ids before it that the model reads, id) of each token that counts for a request."""
    found = []
    for row in encoded.rows:
        for target in row.targets:
            if request not in target.requests:
                continue
            inputs, place = list(row.context), target.place
            if place >= len(inputs):
                new = place - len(inputs)
                branch = row.branches[new]
                inputs += [
                    id
                    for id, own in zip(row.new[: new + 1], row.branches, strict=False)
                    if own == branch
                ]
            else:
                inputs = inputs[: place + 1]
            found.append((inputs, target.id))
    return found


def expected(context, continuation, max_len=L):
    ids = [*context, *continuation][-(max_len + 1) :]
    first = len(ids) - len(continuation)
    return [(ids[:place], ids[place]) for place in range(first, len(ids))]


def ids_of(tokenizer, text):
    return tokenizer.encode(text).tolist()


PAIRS = {
    "plain": ("the cat", " sat", "the cat", " sat"),
    "context ends in a space": ("the cat ", "sat", "the cat", " sat"),
    "context ends in a newline": ("the cat\n", "sat", "the cat", "\nsat"),
    "continuation begins with a newline": ("the cat", "\n sat", "the cat", "\n sat"),
    "one token": ("the cat sat on", " a", "the cat sat on", " a"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_where_the_continuation_begins(tokenizer, name):
    context, continuation, before, after = PAIRS[name]
    encoded = rows.encode(tokenizer, [Pair(context, continuation)], 64)
    before, after = ids_of(tokenizer, before), ids_of(tokenizer, after)
    assert scored(encoded, 0) == expected(before, after, 64)


def test_a_token_that_spans_the_join(tokenizer):
    """The context's own ids, then what both together have beyond their number."""
    context, both = ids_of(tokenizer, "Answ"), ids_of(tokenizer, "Answer the cat")
    assert len(ids_of(tokenizer, "Answer")) == 1 and len(context) == 2
    encoded = rows.encode(tokenizer, [Pair("Answ", "er the cat")], 64)
    assert scored(encoded, 0) == expected(context, both[2:], 64)
    with pytest.raises(ValueError, match="continuation 'er' adds no token"):
        rows.encode(tokenizer, [Pair("Answ", "er")], 64)


@pytest.mark.parametrize("lead", [False, True])
def test_the_start_token(tokenizer, lead):
    """T3: before an empty context always, before another where asked for, and never twice."""
    start, spelled = tokenizer.eot_id, "<|endoftext|> the"
    requests = [Pair("", "the cat"), Pair("the", " cat"), Pair(" ", "the"), Pair(spelled, " cat")]
    encoded = rows.encode(tokenizer, requests, 64, lead)
    led = [start] if lead else []
    the, cat = ids_of(tokenizer, "the"), ids_of(tokenizer, " cat")
    assert scored(encoded, 0) == expected([start], ids_of(tokenizer, "the cat"), 64)
    assert scored(encoded, 1) == expected([*led, *the], cat, 64)
    assert scored(encoded, 2) == expected([start], ids_of(tokenizer, " the"), 64)
    plain = ids_of(tokenizer, spelled)
    assert start not in plain  # T1: a control token that is spelled is text
    assert scored(encoded, 3) == expected([*led, *plain], cat, 64)


@pytest.mark.parametrize("extra", [-1, 0, 1, 2 * L])
def test_a_long_context_loses_its_left_end(tokenizer, extra):
    """E3: max_len tokens are read at most; the last token is never read, only scored."""
    continuation = " cat sat"
    target = ids_of(tokenizer, continuation)
    words = L + 1 - len(target) + extra
    context = "the" + " the" * (words - 1)
    assert len(ids_of(tokenizer, context)) == words
    encoded = rows.encode(tokenizer, [Pair(context, continuation)], L)
    assert encoded.num_truncated == (extra > 0)
    assert scored(encoded, 0) == expected(ids_of(tokenizer, context), target)
    assert all(len(inputs) <= L for inputs, _ in scored(encoded, 0))


@pytest.mark.parametrize("extra", [0, 1, L - 1, L + 2])
def test_a_continuation_is_never_cut(tokenizer, extra):
    """E3: one that is longer than what is read at once goes in windows, as a whole text does."""
    continuation = " the" * (L + extra)
    ids = ids_of(tokenizer, continuation)
    encoded = rows.encode(tokenizer, [Pair("a cat", continuation)], L)
    assert len(ids) == L + extra and encoded.num_truncated == 1
    led, found = [*ids_of(tokenizer, " cat"), *ids], []
    for begin in range(0, len(ids), L):
        end = min(begin + L, len(ids))
        first = end - L if begin else 0
        found += [(led[first : place + 1], led[place + 1]) for place in range(begin, end)]
    assert scored(encoded, 0) == found


def test_continuations_of_one_context_share_its_row(tokenizer):
    choices = [" cat sat on", " mat", " the mat sat"]
    requests = [Pair("the cat", choice) for choice in choices] + [Pair("a mat", " sat")]
    encoded = rows.encode(tokenizer, requests, 64)
    assert len(encoded.rows) == 2
    for place, request in enumerate(requests):
        context = ids_of(tokenizer, request.context)
        target = ids_of(tokenizer, request.continuation)
        assert scored(encoded, place) == expected(context, target, 64)
    shared = encoded.rows[0]
    assert len(shared.new) == sum(len(ids_of(tokenizer, choice)) - 1 for choice in choices)


@pytest.mark.parametrize(
    "choices, context, new",
    [
        ([" cat sat on", " cat sat a mat"], " cat sat", 1),  # they part, and one goes on
        ([" cat sat on a mat", " cat sat"], " cat sat on a", 0),  # one ends where the other goes on
        ([" cat sat", " cat sat a mat", " cat sat on a"], " cat sat", 2),
        ([" cat", " cat"], "", 0),
        ([" cat", " mat"], "", 0),
    ],
)
def test_how_continuations_begin_is_read_once(tokenizer, choices, context, new):
    requests = [Pair("the cat", choice) for choice in choices]
    encoded = rows.encode(tokenizer, requests, 64)
    (row,) = encoded.rows
    assert row.context == ids_of(tokenizer, "the cat" + context) and len(row.new) == new
    assert len(row.targets) == len({(t.place, t.id) for t in row.targets})
    for place, choice in enumerate(choices):
        before, target = ids_of(tokenizer, "the cat"), ids_of(tokenizer, choice)
        assert scored(encoded, place) == expected(before, target, 64)


def test_contexts_that_are_cut_differently_are_not_shared(tokenizer):
    context = "the" + " the" * 9
    requests = [Pair(context, " cat"), Pair(context, " cat sat")]
    encoded = rows.encode(tokenizer, requests, L)
    assert len(encoded.rows) == 2 and encoded.num_truncated == 2
    for place, request in enumerate(requests):
        target = ids_of(tokenizer, request.continuation)
        assert scored(encoded, place) == expected(ids_of(tokenizer, context), target)


@pytest.mark.parametrize("length", [0, 1, L - 1, L, L + 1, 2 * L, 2 * L + 1, 3 * L])
def test_windows_score_each_token_once(tokenizer, length):
    """E5: the first after the start token; a later window is full and ends at its last target."""
    text = "the cat sat on a mat" * 9
    ids = ids_of(tokenizer, text)[:length]
    text = tokenizer.decode(ids)
    assert ids_of(tokenizer, text) == ids
    encoded = rows.encode(tokenizer, [Whole(text)], L)
    assert sorted(id for _, id in scored(encoded, 0)) == sorted(ids)
    led, found = [tokenizer.eot_id, *ids], []
    for begin in range(0, length, L):
        end = min(begin + L, length)
        first = max(0, end - L) if begin else 0
        found += [(led[first : place + 1], led[place + 1]) for place in range(begin, end)]
    assert scored(encoded, 0) == found
    assert all(len(row.context) <= L for row in encoded.rows)
