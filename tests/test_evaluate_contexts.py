"""WikiText's perplexity by the number of tokens that are read at once."""

import pytest
from test_evaluate_scorer import MAX_LEN, TEXT, make_model, make_scorer

from deconstruct.evaluate import run

PAGES = [{"page": f" = A page = \n {TEXT} \n"}, {"page": TEXT}]


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_each_length_is_that_of_a_model_that_reads_so_many(model):
    found = run.perplexity_by_context(make_scorer(model), PAGES, [5, MAX_LEN], progress=False)
    assert list(found) == [5, MAX_LEN] and found[5] != found[MAX_LEN]
    for length, perplexity in found.items():
        scorer = make_scorer(model, max_len=length)
        (result,) = run.evaluate(scorer, {"wikitext": PAGES}, progress=False)
        assert perplexity == pytest.approx(result.figures["word_perplexity,none"], rel=1e-6)


def test_lengths_that_are_done_are_not_done_again(model, tmp_path):
    """Nor do they get in the way of tasks in the same file."""
    scorer, asked = make_scorer(model), []
    score = scorer.score

    def counting(requests, on_rows, max_len=None):
        asked.append(max_len)
        return score(requests, on_rows, max_len)

    scorer.score = counting
    kept = {"progress_file": tmp_path / "kept", "settings": {"a": 1}, "progress": False}
    first = run.perplexity_by_context(scorer, PAGES, [5], **kept)
    (task,) = run.evaluate(scorer, {"wikitext": PAGES}, **kept)
    both = run.perplexity_by_context(scorer, PAGES, [5, 9], **kept)
    assert asked == [5, None, 9]
    assert task.task == "wikitext" and both[5] == first[5]
