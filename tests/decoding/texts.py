"""A byte-level tokenizer with a few merges and a chat template, made on the spot."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """261 single bytes and special tokens, and merges up to "stop" and "the "."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = [("s", "t"), ("o", "p"), ("st", "op"), ("t", "h"), ("th", "e"), ("the", "Ġ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", mask_token="<|mask|>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:4])})
    fast.chat_template = TEMPLATE
    return fast
