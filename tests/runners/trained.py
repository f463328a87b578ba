"""A tiny target that has learnt real text for half a minute: bytes of SmolLM2's own answers, in its chat format."""

from pathlib import Path

import torch

from runners.features.conversations import read_conversations
from runners.features.target import Target
from tests.runners.tiny import tiny_config, tiny_model, tiny_tokenizer

RESPONSES = Path(__file__).parents[2] / "data" / "smollm2-responses.jsonl"
STEPS, ROWS, LENGTH = 160, 24, 96


def trained_target(steps: int = STEPS) -> Target:
    """Eight layers, 48 wide; after training it writes English words and repeats itself, which is what drafts need."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(
        num_hidden_layers=8, hidden_size=48, intermediate_size=96, head_dim=12, initializer_range=0.05, vocab_size=264
    )
    model = tiny_model(config).train()
    texts = [
        tokenizer.apply_chat_template([message.model_dump() for message in one.messages], tokenize=False)
        for one in read_conversations(RESPONSES)[:200]
    ]
    stream = torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for _ in range(steps):
        starts = torch.randint(len(stream) - LENGTH, (ROWS,), generator=generator).tolist()
        batch = torch.stack([stream[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return Target(model.eval(), tokenizer, "trained-tiny")
