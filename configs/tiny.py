"""A model small enough to train with every mixer in an hour on two CPU cores.

The paper has no such row; `docs/losses.md` holds what came out. Prepare any English text first,
then train one mixer, or all of them with `tools.sweep`:

    python -m deconstruct.data.prepare --source=texts/ --tokenizer=bpe:4096 --max_len=128 \\
        --output=data/tiny
    python -m deconstruct.train --config=configs/tiny.py --workdir=runs/tiny

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/tiny.py --topology=v5e:2x2

The argument is `mixer,plan`.
"""

from deconstruct import config as config_lib
from deconstruct import paper


def get_config(argument="standard,uniform"):
    config = config_lib.default()
    config.max_len = 128
    config.batch_size = 16
    config.num_steps = 1500
    config.learning_rate = 2e-3
    config.checkpoint_every = config.validate_every = 500
    config.data.path = "data/tiny"
    config.data.validation_rows = 512
    config.model.vocab_size = 4096
    config.model.num_layers = 4
    config.model.model_dim = 128
    config.model.feed_forward_dim = 384
    config.model.num_heads = 4
    config.model.mixer, config.model.plan = paper.mixer_and_plan(argument)
    config.optimizer.warmup_steps = 100
    config.optimizer.beta2 = 0.98
    return config
