"""What was prepared, in lines for people."""

from deconstruct.data import prepared


def summary(info: prepared.PreparedInfo) -> str:
    """Lines for each split and its sets, and where the data is."""
    lines = [f"{info.path}: vocabulary {info.vocab_size}, fingerprint {info.data_fingerprint}"]
    for split, counts in info.counts.items():
        lines.append(
            f"  {split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens in "
            f"{counts['rows']:,} rows of {info.max_len + 1}; {counts['empty_documents']:,} empty "
            f"documents left out; {counts['inexact_cuts']:,} inexact cuts of long texts"
        )
        document_tokens = sum(shard.document_tokens for shard in info.shards[split])
        if all(shard.document_tokens for shard in info.shards[split] if shard.rows):
            lines.append(
                f"    no token is lost: {document_tokens:,} of documents, "
                f"{counts['tokens']:,} in rows"
            )
        others = sum(shard.other_documents for shard in info.shards[split])
        if "sets" in info.builder_config:
            lines.append(f"    {others:,} documents of other sets left out")
        if "skip_faults" in info.builder_config:
            bad_rows = sum(shard.bad_rows for shard in info.shards[split])
            cut_files = sum(shard.cut_files for shard in info.shards[split])
            lines.append(
                f"    skipped: {bad_rows:,} bad rows, {cut_files:,} files or ends of files"
            )
        lines += [
            f"    {name}: {found.documents:,} documents, {found.text_bytes:,} bytes, "
            f"{found.tokens:,} tokens"
            for name, found in sorted(info.sets[split].items())
        ]
    return "\n".join(lines)
