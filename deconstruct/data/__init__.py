"""From text files to batches: sources, packing, the prepared format, `prepare` and the loader."""
