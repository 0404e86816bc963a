"""A small hybrid on English text, for a first run on two CPU cores.

The paper has no such row: four layers, of which the even ones are standard attention and the odd
ones `non_approximate`. The corpus is prepared on the first run. Command:

    python -m deconstruct.train --config=configs/quickstart.py --workdir=runs/quickstart

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/quickstart.py --topology=v5e:2x2

The argument is `mixer,plan`, so another layer's worth of curiosity is `quickstart.py:mlp,even`.
"""

from deconstruct import config as config_lib
from deconstruct import paper

VOCAB_SIZE = 8192


def get_config(argument="non_approximate,even"):
    config = config_lib.default()
    config.max_len = 256
    config.batch_size = 4
    config.num_steps = 500
    config.learning_rate = 2e-3
    config.checkpoint_every = config.validate_every = 100
    config.data.path = "data/wiki_leads"
    config.data.prepare_source = "wiki_leads"
    config.data.prepare_tokenizer = f"bpe:{VOCAB_SIZE}"
    config.data.validation_rows = 64
    config.model.vocab_size = VOCAB_SIZE
    config.model.num_layers = 4
    config.model.model_dim = 256
    config.model.feed_forward_dim = 768
    config.model.num_heads = 4
    config.model.mixer, config.model.plan = paper.mixer_and_plan(argument)
    config.optimizer.warmup_steps = 30
    config.optimizer.beta2 = 0.98
    config.log.diagnose_every = 100
    config.log.sample_prompt = "The city of"
    return config
