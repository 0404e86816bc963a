"""SlimPajama as a TFDS builder: prepared rows, made unit by unit, found by TFDS's own functions.

    from deconstruct.data import slimpajama

    config = slimpajama.Config(
        name="pythia_2048", source="slimpajama/", tokenizer="EleutherAI/pythia-70m", max_len=2048
    )
    rows = tfds.data_source(
        "slimpajama", split="train", data_dir="data/", builder_kwargs={"config": config}
    )

The source is laid out as on the Hugging Face hub: LAYOUT, rows {"text", "meta":
{"redpajama_set_name"}}, or Parquet files with the columns text and meta. Any part of it will do:
files are found by their names, never counted. What is written is what `prepare` writes, and so
DATA_DIR/slimpajama/NAME/1.0.0 may be named wherever a prepared directory may, and
`tfds.builder_from_directory` reads it. None of this needs TensorFlow.
"""

import dataclasses
import fnmatch
import pathlib

import tensorflow_datasets as tfds

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import prepare, prepared, sources

LAYOUT = {
    "train": "train/chunk*/example_train_*.jsonl.zst",
    "validation": "validation/chunk*/example_holdout_*.jsonl.zst",
    "test": "test/chunk*/example_holdout_*.jsonl.zst",
}


@dataclasses.dataclass(eq=False, kw_only=True)
class Config(tfds.core.BuilderConfig):
    """What to make: the fields of `prepare.PrepareSettings` but the output, and a name for it."""

    source: str
    tokenizer: str
    max_len: int
    validation_share: float = 0.02
    sets: tuple[str, ...] | None = None
    skip_faults: bool = False
    num_processes: int | None = None
    runner: str = "processes"
    beam_options: str = ""

    def settings(self, output: str) -> prepare.PrepareSettings:
        """These settings, for a directory; raises ValueError for what none may be."""
        fields = {field.name for field in dataclasses.fields(prepare.PrepareSettings)}
        own = {name: value for name, value in vars(self).items() if name in fields}
        return prepare.PrepareSettings(**own, output=output)


class SlimPajama(tfds.core.GeneratorBasedBuilder):
    """The builder; it needs a `Config`."""

    name = "slimpajama"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, config: Config, **kwargs):
        """Raises ValueError for a config that is none of this module's."""
        if not isinstance(config, Config):
            raise ValueError(
                f"slimpajama needs a deconstruct.data.slimpajama.Config, not {config!r}; to read "
                "what is prepared, use tfds.builder_from_directory"
            )
        super().__init__(config=config, file_format=prepared.FILE_FORMAT, **kwargs)

    def download_and_prepare(self, **kwargs) -> None:
        """Prepares what is not prepared yet; nothing is downloaded, `kwargs` change nothing.

        TFDS's own would begin anew after each failure: it removes its directory.

        Raises:
          ValueError: the source is not laid out as SlimPajama, or as `prepare.prepare` raises it.
        """
        del kwargs
        settings = self.builder_config.settings(self.data_dir)
        if not (pathlib.Path(self.data_dir) / prepared.INFO_FILE).is_file():
            check_layout(settings.source)
        prepare.prepare(settings)
        self.info.read_from_directory(self.data_dir)

    def _info(self) -> tfds.core.DatasetInfo:
        config = self.builder_config
        vocab_size = (
            tokenizer_lib.bpe_size(config.tokenizer)
            or tokenizer_lib.load_tokenizer(config.tokenizer).vocab_size
        )
        features = prepared.features(config.max_len, vocab_size)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        raise NotImplementedError("rows are made by prepare, in units")

    def _generate_examples(self):
        raise NotImplementedError("rows are made by prepare, in units")


def check_layout(source: str) -> None:
    """Raises ValueError for a folder with a file that SlimPajama would not have there."""
    for file in sources.list_files(prepared.local_path(source, "source")):
        pattern = LAYOUT[file.split or "train"]
        if file.format != ".parquet" and not fnmatch.fnmatchcase(file.name, pattern):
            raise ValueError(
                f"{file.path} is not where SlimPajama's files are ({pattern}); other text is "
                f"prepared with {prepared.COMMAND}"
            )
