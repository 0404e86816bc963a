"""lm-evaluation-harness on our models: texts to continue, and tasks that are none of ours."""

import json
import sys

import harness
import numpy as np
import pytest
import tiny_run
from lm_eval.api.instance import Instance
from test_evaluate_scorer import MAX_LEN, SCORE_TOLERANCE, make_model, make_requests, make_scorer

from deconstruct import generate
from deconstruct.evaluate import adapter

PROMPT = "the cat sat"
NUM_NEW = 9


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def lm(model):
    return adapter.DeconstructLM(scorer=make_scorer(model))


def ask(method, *arguments):
    """The answer to one request."""
    kind = method.__name__
    return method([Instance(kind, {}, arguments, 0)], disable_tqdm=True)[0]


def continued(lm, prompt=PROMPT, **options):
    return ask(lm.generate_until, prompt, {"max_gen_toks": NUM_NEW, **options})


@pytest.fixture(scope="module")
def new_ids(model):
    """The ids that continue the prompt."""
    ids = model.tokenizer.encode(PROMPT)
    vocabulary = {"end_id": model.tokenizer.eot_id, "num_ids": model.tokenizer.vocab_size}
    options = {"max_new_tokens": NUM_NEW, **vocabulary}
    found = generate.continue_ids(model.spec, model.params, model.fixed, ids, **options)
    assert len(found) == NUM_NEW
    return found


@pytest.fixture(scope="module")
def whole(model, new_ids):
    return model.tokenizer.decode(new_ids)


@pytest.mark.parametrize("until", [None, [], "", ["", "not there"]])
def test_it_continues_greedily(lm, whole, until):
    assert continued(lm, until=until) == whole
    assert continued(lm) == whole


def test_the_start_token_leads_where_asked_for(model):
    """As in training, and as `deconstruct.generate` does."""
    led = adapter.DeconstructLM(scorer=make_scorer(model, lead=True))
    parts = model.spec, model.params, model.fixed, model.tokenizer
    expected = generate.continue_text(*parts, PROMPT, max_new_tokens=NUM_NEW)
    assert continued(led) == expected != continued(adapter.DeconstructLM(scorer=make_scorer(model)))
    assert continued(led, "") == generate.continue_text(*parts, "", max_new_tokens=NUM_NEW)


def test_an_empty_prompt_is_the_start_token(lm, model):
    parts = model.spec, model.params, model.fixed, model.tokenizer
    assert continued(lm, "") == generate.continue_text(*parts, "", max_new_tokens=NUM_NEW)


def test_the_end_token_ends_the_text(lm, model, new_ids, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "eot_id", new_ids[4])
    assert continued(lm) == model.tokenizer.decode(new_ids[: new_ids.index(new_ids[4])])


def test_stop_strings_are_cut(lm, model, new_ids, whole):
    late = whole[-3:]
    place = len(model.tokenizer.decode(new_ids[:5]))
    across = whole[place - 2 : place + 2]  # parts of two tokens
    assert 0 < whole.index(across) < whole.index(late)
    assert continued(lm, until=late) == whole[: whole.index(late)]
    assert continued(lm, until=[across]) == whole[: whole.index(across)]
    assert continued(lm, until=[late, "not there", across]) == whole[: whole.index(across)]
    assert continued(lm, until=[whole[0]]) == ""


def test_a_stop_string_ends_the_work(lm, model, new_ids, whole, monkeypatch):
    """It is found across two blocks, and no third is computed."""
    monkeypatch.setattr(adapter, "BLOCK", 3)
    blocks = []

    def counted(*args, **options):
        for block in blocks_of_ids(*args, **options):
            blocks.append(block)
            yield block

    blocks_of_ids = generate.blocks_of_ids
    monkeypatch.setattr(generate, "blocks_of_ids", counted)
    place = len(model.tokenizer.decode(new_ids[:3]))
    stop = whole[place - 2 : place + 1]
    assert whole.index(stop) == place - 2
    assert continued(lm, until=[stop]) == whole[: place - 2]
    assert blocks == [new_ids[:3], new_ids[3:6]]


def test_a_long_prompt_loses_its_left_end(lm, model):
    prompt = " ".join(f"the cat sat on {word} mat" for word in ("an", "old", "red", "a", "the"))
    ids = model.tokenizer.encode(prompt)
    assert len(ids) > MAX_LEN
    kept = model.tokenizer.decode(ids[-(MAX_LEN - NUM_NEW) :])
    assert model.tokenizer.encode(kept).tolist() == ids[-(MAX_LEN - NUM_NEW) :].tolist()
    assert continued(lm, prompt) == continued(lm, kept)
    assert continued(lm, prompt) != continued(lm, prompt[: len(kept)])


def test_how_many_tokens(lm, whole):
    names = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
    for name in names:
        assert ask(lm.generate_until, PROMPT, {name: NUM_NEW}) == whole
    with pytest.raises(ValueError, match=f"max_gen_toks=256 leaves no room .* {MAX_LEN} tokens"):
        ask(lm.generate_until, PROMPT, {})


def test_sampling_is_refused(lm, whole):
    for options in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(ValueError, match="greedily: leave do_sample and temperature out"):
            continued(lm, **options)
    for options in ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}):
        assert continued(lm, **options) == whole


def test_an_empty_context_is_the_start_token(lm):
    total, greedy = ask(lm.loglikelihood, "", PROMPT)
    assert total == pytest.approx(ask(lm.loglikelihood_rolling, PROMPT), rel=SCORE_TOLERANCE)
    assert greedy is False and isinstance(total, float)


def test_scores_are_the_scorers_own(model):
    requests = [r for r in make_requests() if len(r) == 2]
    instances = [Instance("loglikelihood", {}, tuple(request), 0) for request in requests]
    lm = adapter.DeconstructLM(scorer=make_scorer(model))
    found = lm.loglikelihood(instances, disable_tqdm=True)
    assert found == list(map(tuple, make_scorer(model).score(requests).answers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, whole):
    """Two tasks of one's own: one to choose, one to continue, with right and wrong answers."""
    path = tmp_path_factory.mktemp("own")
    documents = [
        {"question": "the cat", "choices": ["sat on a mat", "ran"], "gold": 0},
        {"question": "the dog", "choices": ["red sea", "ran to an old house", "by"], "gold": 1},
    ]
    write_lines(path / "choose.jsonl", documents)
    common = {"dataset_name": None, "test_split": "test"}
    config = {
        **common, "task": "own_choose", "output_type": "multiple_choice",
        "doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    harness.write_task(path, config, {"test": path / "choose.jsonl"})
    answers = [{"prompt": PROMPT, "answer": text} for text in (whole, whole[:-1], "red")]
    write_lines(path / "continue.jsonl", answers)
    config = {
        **common, "task": "own_continue", "output_type": "generate_until",
        "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": NUM_NEW, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    harness.write_task(path, config, {"test": path / "continue.jsonl"})
    return path


def write_lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def test_tasks_that_are_none_of_ours(lm, folder):
    evaluation = harness.run(lm, folder, ["own_choose", "own_continue"], bootstrap_iters=0)
    assert evaluation["results"]["own_continue"]["exact_match,none"] == pytest.approx(1 / 3)
    right = [
        np.argmax([ask(lm.loglikelihood, d["question"], f" {c}")[0] for c in d["choices"]])
        == d["gold"]
        for d in map(json.loads, (folder / "choose.jsonl").read_text().splitlines())
    ]
    assert evaluation["results"]["own_choose"]["acc,none"] == np.mean(right)


def command(folder, model_args, *flags):
    return tiny_run.run_command([
        sys.executable, "-m", "deconstruct.evaluate.adapter", "--model", "deconstruct",
        "--model_args", model_args, "--tasks", "own_choose", "--include_path", str(folder), *flags,
    ])  # fmt: skip


@pytest.mark.slow
def test_the_command_scores_a_checkpoint(trained_run, folder, tmp_path):
    args = f"checkpoint={trained_run},step=2,max_len=24,start_token=true"
    done = command(folder, args, "--output_path", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "own_choose" in done.stdout
    (path,) = tmp_path.rglob("results_*.json")
    assert 0 <= json.loads(path.read_text())["results"]["own_choose"]["acc,none"] <= 1


@pytest.mark.slow
def test_the_commands_mistakes_end_on_one_line(folder):
    done = command(folder, "checkpoint=/nowhere")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: /nowhere does not exist")
    assert "Traceback" not in done.stderr


def test_what_model_args_can_not_be(trained_run):
    of = adapter.DeconstructLM.create_from_arg_string
    with pytest.raises(ValueError, match="lack checkpoint=DIR"):
        of("step=2")
    with pytest.raises(ValueError, match="unknown model_args batchsize for deconstruct"):
        of(f"checkpoint={trained_run},batchsize=8", {"batch_size": 4, "device": None})
    with pytest.raises(ValueError, match="max_len=64: the model was trained on 32"):
        of(f"checkpoint={trained_run},max_len=64", {"batch_size": 4, "device": None})
