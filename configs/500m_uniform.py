"""The 500M model with one mixer in every layer; the argument is the mixer.

Paper, table 1, uniform rows (mean accuracy in %, WikiText word perplexity): standard 51.9, 38.1;
mlp 40.0, 993.5; approximate 50.2, 47.9; non_approximate 39.3, 9e4; rnd_emb_qk 48.0, 84.8;
fixed_seq_qk 50.0, 79.1; static_emb_qk 49.4, 79.9.
Device hours, as computed: 33.1 of one H200 (1.65e+15 FLOPs a step, 28,610 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/500m_uniform.py --workdir=runs/500m_uniform

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/500m_uniform.py --topology=v5e:4x4 \\
        --config.mesh.fsdp=16 --config.compute.micro_batches=1 --config.compute.remat=full
"""

from deconstruct import paper


def get_config(argument="standard"):
    return paper.uniform("500m", argument)
