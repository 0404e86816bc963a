"""`python -m deconstruct.evaluate --checkpoint=DIR --tasks=all --data_dir=DIR --output=FILE.json`

Run again after a kill: finished tasks are not done again.
"""

import json
import pathlib
from typing import Any

from absl import flags

from deconstruct import entry, host_memory
from deconstruct.evaluate import data, metrics

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "run directory, or one step's directory")
_STEP = flags.DEFINE_integer("step", None, "step to read; the newest when left out")
_TASKS = flags.DEFINE_list("tasks", ["all"], "which; all means the paper's nine")
_DATA_DIR = flags.DEFINE_string("data_dir", None, f"the documents, as {data.FETCH} writes them")
_OUTPUT = flags.DEFINE_string(
    "output", None, "JSON file to write; the table goes beside it, as .md"
)
_PNG = flags.DEFINE_bool("png", False, "draw the table as well, beside the JSON")
_LIMIT = flags.DEFINE_integer("limit", None, "the first documents of each task", lower_bound=1)
_SKIP = flags.DEFINE_bool("skip", False, "leave out the layers that are not standard")
_KEEP = flags.DEFINE_string("spec_override", None, "leave out all layers but these, as in 1,3-5")
_MAX_LEN = flags.DEFINE_integer("max_len", None, "tokens read at once; the model's when left out")
_CONTEXTS = flags.DEFINE_list(
    "context_lengths", [], "WikiText's perplexity where so many tokens are read at once: 128,256"
)
_BOOTSTRAP = flags.DEFINE_integer(
    "bootstrap_iters", metrics.BOOTSTRAP_ITERATIONS, "resamples for errors; 0 gives no errors",
    lower_bound=0,
)  # fmt: skip
_LOG_SAMPLES = flags.DEFINE_bool("log_samples", False, "keep each document's answers in the JSON")
_LEAD = flags.DEFINE_bool("start_token", False, "put the start token before every context")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the arithmetic")
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens", None, "about how many tokens a batch holds; the platform's when left out"
)
_FSDP = flags.DEFINE_integer("fsdp", 1, "mesh axis of that name; rows are spread over the rest")
_TENSOR = flags.DEFINE_integer("tensor", 1, "mesh axis of that name")


def main(argv) -> None:
    del argv
    output, lengths = check_flags()
    host_memory.keep_pages()  # before JAX
    if _PNG.value:
        from deconstruct.evaluate import picture
    names = data.names_of(_TASKS.value)
    documents = data.read(_DATA_DIR.value, [*names, *(["wikitext"] if lengths else [])])
    from deconstruct.evaluate import report, run  # JAX, once the documents are there

    scorer = load_scorer()
    if lengths and max(lengths) > (longest := scorer.model.spec.max_len):
        raise ValueError(
            f"--context_lengths={max(lengths)}: the model was trained on {longest}; give at most "
            "that"
        )
    settings = settings_of(scorer, documents)
    progress_file = output.with_name(f"{output.name}.partial")
    results = run.evaluate(
        scorer,
        {name: documents[name] for name in names},
        limit=_LIMIT.value,
        bootstrap_iterations=_BOOTSTRAP.value,
        log_samples=_LOG_SAMPLES.value,
        progress_file=progress_file,
        settings=settings,
    )
    perplexities = run.perplexity_by_context(
        scorer,
        documents["wikitext"][: _LIMIT.value] if lengths else [],
        lengths,
        progress_file=progress_file,
        settings=settings,
    )
    label = ", ".join([f"{settings['checkpoint']} step {settings['step']}", *restrictions()])
    table = report.table(results, label, scorer.model.spec)
    text = report.markdown(table)
    if lengths:
        text += f"\n\n{report.markdown(report.context_table(perplexities, label))}"
        settings["wikitext_by_context"] = perplexities
    settings["compiled_shapes"] = len(scorer.shapes)
    if _PNG.value:
        picture.write(output.with_suffix(".png"), table)
    output.with_suffix(".md").write_text(text + "\n")
    whole = output.with_name(f"{output.name}.whole")
    whole.write_text(json.dumps(report.to_json(results, settings), indent=1))
    whole.replace(output)  # last and at once: where it is, all is done
    progress_file.unlink()
    print(text)
    print(f"done: {output} ({len(scorer.shapes)} shapes compiled)")


def check_flags() -> tuple[pathlib.Path, list[int]]:
    """(the output, the context lengths); ValueError for what needs no model to be refused."""
    for name, value in (
        ("checkpoint", _CHECKPOINT.value),
        ("data_dir", _DATA_DIR.value),
        ("output", _OUTPUT.value),
    ):
        if not value:
            how = f": name the folder of the documents, or fetch them with {data.FETCH}"
            how = how if name == "data_dir" else "; see --help"
            raise ValueError(f"--{name} is missing{how}")
    if _SKIP.value and _KEEP.value:
        raise ValueError("--skip and --spec_override both choose layers: give one of them")
    output = pathlib.Path(_OUTPUT.value).expanduser()
    if output.suffix != ".json" or output.is_dir():
        raise ValueError(f"--output={output}: name a file that ends in .json")
    if not output.parent.is_dir():
        raise ValueError(f"--output={output}: its folder does not exist; make it first")
    if not all(length.isdecimal() and int(length) > 0 for length in _CONTEXTS.value):
        raise ValueError(f"--context_lengths={','.join(_CONTEXTS.value)}: numbers of tokens only")
    return output, sorted({int(length) for length in _CONTEXTS.value})


def restrictions() -> list[str]:
    """What makes the figures others than those of the whole model on all documents."""
    return [
        f"{name}={value}" if value is not True else name
        for name, value in (
            ("skip", _SKIP.value),
            ("layers", _KEEP.value),
            ("limit", _LIMIT.value),
            ("max_len", _MAX_LEN.value),
            ("start token", _LEAD.value),
            ("bfloat16", _DTYPE.value == "bfloat16"),
        )
        if value
    ]


def load_scorer():
    """The model on a mesh of all devices, without the layers that are left out."""
    import dataclasses

    import jax.numpy as jnp

    from deconstruct import sharding, trained
    from deconstruct import spec as spec_lib
    from deconstruct.decoder import Compute
    from deconstruct.evaluate.scorer import Scorer

    mesh = sharding.make_mesh(fsdp=_FSDP.value, tensor=_TENSOR.value)
    model = trained.load(_CHECKPOINT.value, _STEP.value, mesh=mesh)
    spec, params = model.spec, model.params
    if _SKIP.value:
        spec, params = spec_lib.skip(spec, params)
    elif _KEEP.value:
        spec, params = spec_lib.keep_layers(spec, params, spec_lib.parse_numbers(_KEEP.value))
    print(f"layers of the model:\n{spec.table()}")
    return Scorer(
        dataclasses.replace(model, spec=spec, params=params),
        mesh,
        max_len=_MAX_LEN.value,
        compute=Compute(jnp.dtype(_DTYPE.value)),
        batch_tokens=_BATCH_TOKENS.value,
        lead=_LEAD.value,
    )


def settings_of(scorer, documents) -> dict[str, Any]:
    """All that the results depend on."""
    from deconstruct.evaluate.tasks import TASKS

    return {
        "checkpoint": _CHECKPOINT.value,
        "step": scorer.model.metadata.step,
        "checkpoint_sha256": scorer.model.files_sha256,
        "spec": json.loads(scorer.model.spec.to_json()),
        "tokenizer_sha256": scorer.model.tokenizer.sha256,
        "max_len": scorer.max_len,
        "dtype": _DTYPE.value,
        "start_token": _LEAD.value,
        "limit": _LIMIT.value,
        "bootstrap_iters": _BOOTSTRAP.value,
        "log_samples": _LOG_SAMPLES.value,
        "documents": {
            name: {"count": len(own), "sha256": data.sha256_of(own, TASKS[name].source)}
            for name, own in documents.items()
        },
    }


if __name__ == "__main__":
    entry.run(main)
