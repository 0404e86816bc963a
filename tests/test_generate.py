"""Generation through the caches against the plain forward, and the command."""

import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from models import make_fixed, make_params, make_spec, make_tokens

from deconstruct import decoder, generate, run, trained


@pytest.fixture(scope="module")
def model():
    spec = make_spec("rnd_emb_qk+approximate", "even", 4, max_len=24)
    return spec, make_params(spec), make_fixed(spec)


def greedy_by_forward(model, prompt, count):
    spec, params, fixed = model
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, spec.max_len), np.int32)
        padded[0, : len(ids)] = ids
        logits_BTV = decoder.logits(spec, params, fixed, padded)
        ids.append(int(jnp.argmax(logits_BTV[0, len(ids) - 1])))
    return ids[len(prompt) :]


def test_greedy_takes_the_likeliest_token_of_the_forward(model):
    prompt = make_tokens(1, 5)[0].tolist()
    new = generate.continue_ids(*model, prompt, max_new_tokens=6)
    assert new == greedy_by_forward(model, prompt, 6)


def test_the_end_token_ends_the_text_and_is_left_out(model):
    prompt = make_tokens(1, 5)[0].tolist()
    new = generate.continue_ids(*model, prompt, max_new_tokens=6)
    end = new[3]
    first = new.index(end)
    assert generate.continue_ids(*model, prompt, max_new_tokens=6, end_id=end) == new[:first]
    # In the prompt it ends nothing: every document begins with it.
    started = [end, *prompt]
    assert len(generate.continue_ids(*model, started, max_new_tokens=1, end_id=301)) == 1


def test_blocks_are_the_whole_in_parts(model):
    prompt = make_tokens(1, 5)[0].tolist()
    whole = generate.continue_ids(*model, prompt, max_new_tokens=7)
    options = {"max_new_tokens": 7, "block": 3, "room": 20}
    assert list(generate.blocks_of_ids(*model, prompt, **options)) == [
        whole[:3], whole[3:6], whole[6:]
    ]  # fmt: skip
    end = whole[4]
    blocks = generate.blocks_of_ids(*model, prompt, **options, end_id=end)
    assert [id for new in blocks for id in new] == whole[: whole.index(end)]


def test_calls_of_one_room_share_compiled_code(model):
    def count(length, room):
        prompt = make_tokens(1, length)[0].tolist()
        for _ in generate.blocks_of_ids(*model, prompt, max_new_tokens=5, block=2, room=room):
            pass
        return generate._decode._cache_size()

    before = count(3, 19)
    assert count(6, 19) == before
    assert count(6, 18) == before + 1


def test_sampling_follows_the_seed(model):
    prompt = make_tokens(1, 5)[0].tolist()

    def sample(seed, temperature=2.0):
        options = {"max_new_tokens": 8, "temperature": temperature, "seed": seed}
        return generate.continue_ids(*model, prompt, **options)

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)
    assert sample(0, 1e-4) == generate.continue_ids(*model, prompt, max_new_tokens=8)


def test_what_cannot_be_generated_is_refused(model):
    with pytest.raises(ValueError, match="holds no token"):
        generate.continue_ids(*model, [], max_new_tokens=1)
    with pytest.raises(ValueError, match="max_len=24"):
        generate.continue_ids(*model, [1, 2], max_new_tokens=23)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    config = tiny_run.write_config(folder, tiny_run.prepare_data(folder))
    run.train(tiny_run.load_config(config, num_steps=2), str(folder / "run"))
    return folder / "run"


def command(*flags):
    return tiny_run.run_command([sys.executable, "-m", "deconstruct.generate", *flags])


def test_the_command_continues_a_prompt(workdir):
    done = command(f"--checkpoint={workdir}", "--prompt=water stone", "--max_new_tokens=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("water stone") and len(done.stdout) > len("water stone\n")


def test_the_command_names_what_is_wrong(workdir):
    for flags, said in [
        ([], "--checkpoint is missing"),
        ([f"--checkpoint={workdir}/nowhere"], "does not exist"),
        ([f"--checkpoint={workdir}", "--step=7"], "has no step 7"),
    ]:
        done = command(*flags)
        assert done.returncode == 1
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ") and said in line


def test_another_tokenizer_is_refused(workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match="is not the one that its model was trained with"):
        trained.load(str(tmp_path / "run"))
    path.unlink()
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        trained.load(str(tmp_path / "run"))
