"""Tokenizers made in the test process, and chat templates in the styles of well-known models."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|bos|>", "<|eot|>", "<|eom|>", "<|head|>", "<|/head|>", "<turn>", "</turn>",
    "<s>", "</s>", "<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>",
]  # fmt: skip

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGS_NARROW = CHATML_TAGS.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    "{{ m['content'] }}{%- endgeneration -%}{{ '<|im_end|>\n' }}",
).replace("{% generation %}", "{%- generation -%}")
CHATML_TAGS_WIDE = CHATML_TAGS.replace(
    "'<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "'<|im_end|>\n' }}{% endgeneration %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | tojson + '<|eom|>' }}"
    "{% else %}{{ '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
HEADER_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set c = m.content %}{% set r = m.reasoning_content | default('', true) %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or r) %}"
    "{{ '<think>\n' + r.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ c + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}"
    "{{ '<|assistant|>' + m.content.split('</think>')[-1].lstrip('\n') + '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
DROPS_SYSTEM = "{% for m in messages if m['role'] != 'system' %}" + CHATML.split("%}", 1)[1]
DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML

_TEXT = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the capital of France.",
    "user assistant system model Hello there! How are you today? I am fine, thank you very much for asking.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "Answer: <think>\nLet me think about this.\n</think>\n\nThe answer is 42.",
]


@functools.cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    return tokenizer.to_str()


@functools.cache
def _metaspace() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None = CHATML, kind: str = "byte_level", eos: str = "<|im_end|>"):
    """A small tokenizer with a chat template."""
    text = _byte_level() if kind == "byte_level" else _metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), bos_token="<|bos|>", eos_token=eos, chat_template=template
    )


def supervised_text(tokenizer, row) -> list[str]:
    """The supervised stretches of a token row, decoded."""
    stretches, current = [], []
    for token, taught in zip(row.input_ids, row.loss_mask, strict=True):
        if taught:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches + ([tokenizer.decode(current)] if current else [])


def chat(*texts: str, system: str | None = None) -> dict:
    """A row of alternating user and assistant messages."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}
