"""Make a small target of another family: a 4-layer Qwen3 with a tokenizer and a chat template of its own.

It is trained from random weights on a corpus of the bundled target (see README.md), until its text is predictable
enough to draft for.

    python make_target.py CORPUS FOLDER [STEPS]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from eagle_tree import corpus
from eagle_tree.target import Target

VOCAB, LENGTH, ROWS, RATE = 4096, 192, 8, 2e-3
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations(folder: Path) -> list[tuple[str, str]]:
    """Question and answer of every sequence of a corpus of the bundled target, as text."""
    source = Target.from_pretrained("smollm2-135m")
    before, after, _ = corpus.chat_turns(source)
    decode = source.tokenizer.decode
    return [
        (
            decode(sequence.prompt_ids[len(before) : len(sequence.prompt_ids) - len(after)]),
            decode(sequence.answer_ids, skip_special_tokens=True),
        )
        for sequence in corpus.load(folder, source.fingerprint)
    ]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


def main(source: Path, folder: Path, steps: int) -> None:
    pairs = conversations(source)
    tokenizer = train_tokenizer([text for pair in pairs for text in pair])
    stream = []
    for question, answer in pairs:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        stream += tokenizer.encode(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)
    rows = torch.tensor(stream[: len(stream) // LENGTH * LENGTH]).view(-1, LENGTH)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    started = time.perf_counter()
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (ROWS,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 600)
