"""How many rows the embedding of Megatron-LM's model has."""

from __future__ import annotations

from onecard.errors import PlanError
from onecard.planning.audit.audit import Given
from onecard.planning.audit.settings import Settings
from onecard.planning.fit import Finding

TOKENIZERS = {
    "GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996,
}  # fmt: skip
"""Kinds that come with a vocabulary; others are told its size, or read a file."""


def vocabulary(settings: Settings, tp: int, given: Given, found: list[Finding]) -> int:
    """Rows of the embedding as they lie in memory: Megatron pads them."""
    if "vocab" in given.change:
        return 1
    said = settings.whole("vocab-size", 0, "{} rows of the vocabulary")
    fixed = settings.whole("pad-vocab-size-to", settings.whole("padded-vocab-size", 0, "vocab={}"), "vocab={}")
    multiple = settings.whole(
        "make-vocab-size-divisible-by", 128, "rows of the vocabulary are padded to a multiple of {} x tp"
    )
    tokenizer = settings.text("tokenizer-type") or "GPT2BPETokenizer" * settings.has("merge-file")
    if not said and not fixed and tokenizer in TOKENIZERS:
        said = TOKENIZERS[tokenizer]
        settings.assumed("vocab-size", said, f"that of {tokenizer}; --set vocab=... says another")
    if not said and not fixed:
        where = f"{settings.file}: does not say how many rows the vocabulary has"
        raise PlanError(f"{where}; write --vocab-size 128256, or say --set vocab=128256", "vocab-size")
    padded = fixed or -(-said // (multiple * tp)) * multiple * tp
    more = padded - said
    if said and more > 0:
        words = f"{said:,} rows of the vocabulary are padded to {padded:,}: {more:,} rows ({more / said:.1%}) that no token has"
        what = f"a multiple of {'--make-vocab-size-divisible-by'} x tp = {multiple * tp}"
        change = f"the tokenizer's size is not {what}; a smaller one pads less" if more > 0.01 * said else ""
        found.append(Finding("cost", "vocab", words, change, settings.lines.get("vocab-size", "")))
    return padded
