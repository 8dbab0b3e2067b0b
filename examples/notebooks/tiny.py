"""A target small enough for a notebook that has nevertheless learned something: it counts, up and down, in steps.

`make(directory)` writes a Llama of about 0.3 million parameters that is trained on the spot (some seconds on a CPU),
its tokenizer with a chat template, training rows and held-out prompts. A drafter of it accepts tokens for the same
reason as a drafter of a large model: the target is sure of what comes next, except where the question decides.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

COUNT = 30
NUMBERS = [str(n) for n in range(COUNT)]
WORDS = ["count", "up", "down", "from", "by", "fruit", "apple", "pear", "plum", "fig", "then", "stop", "please"]
SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<answer>", "<unk>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} <answer> "
    "{% else %}{% generation %}{{ m['content'] }} {{ eos_token }}{% endgeneration %} {% endif %}{% endfor %}"
)
FRUIT = ["apple", "pear", "plum", "fig"]


def conversation(random_: random.Random) -> dict[str, list[dict[str, str]]]:
    """Count from somewhere in some direction and step, with a fruit now and then that only the question tells."""
    start, step = random_.randrange(COUNT), random_.choice([1, 2])
    up, fruit = random_.random() < 0.5, random_.choice(FRUIT)
    question = f"count {'up' if up else 'down'} from {start} by {step} fruit {fruit} please"
    values = [(start + (step if up else -step) * i) % COUNT for i in range(12)]
    answer = " ".join(f"{value} {fruit}" if i % 4 == 3 else str(value) for i, value in enumerate(values)) + " then stop"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *NUMBERS, *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<answer>"]})
    made.chat_template = TEMPLATE
    return made


def make(directory: str | Path = "tiny", *, steps: int = 250, seed: int = 0) -> Path:
    """Write target, rows and prompts, once.

    Returns:
        The directory, with ``target/``, ``train.jsonl`` and ``prompts.jsonl``.
    """
    root = Path(directory)
    if (root / "target" / "config.json").is_file():
        return root
    root.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(seed)
    rows = [conversation(random_) for _ in range(400)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"messages": conversation(random_)["messages"][:1]} for _ in range(40)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    words = tokenizer()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=192,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        texts = [words.apply_chat_template(conversation(random_)["messages"], tokenize=False) for _ in range(24)]
        batch = words(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(root / "target")
    words.save_pretrained(root / "target")
    return root


if __name__ == "__main__":
    print(make())
