"""Supervised starter: trains `tiny`, a small model with something left to learn.

A character-level tokenizer and a 4-layer Llama of 0.87 million parameters are trained from
scratch on the train split of the arithmetic task, and training stops when greedy accuracy on the
held-out split first reaches a target. Such a model answers about half of the problems and is
still unsure of most, which is what reinforcement learning needs to start from. It takes
about 40 seconds of one core.

    python sft.py --out models/tiny --seed 0 --target-accuracy 0.45
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from pretrained import new_folder, quiet_transformers
from tasks.arithmetic import Arithmetic
from tasks.task import Problem, encode_prompt

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0, 1, 2, 3
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
MAX_POSITIONS = 512
IGNORED = -100  # label of a position without loss
LOG_INTERVAL_S = 5.0


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: the printable ASCII and newline, 100 tokens with the special ones.

    Adds no beginning- or end-of-text token by itself, and decoding gives back exactly the text.

    >>> tokenizer = tiny_tokenizer()
    >>> len(tokenizer), tokenizer.decode(tokenizer(" 1 +2 =\\n")["input_ids"])
    (100, ' 1 +2 =\\n')
    """
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # the default joins tokens with spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LlamaForCausalLM:
    """A fresh 4-layer Llama, float32, 0.87 million parameters, the same for the same seed."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,  # head_dim 32, the smallest that inference engines accept
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> tuple[Tensor, Tensor]:
    """Prompts with their answers, padded on the right, with a loss on the answers only.

    Returns:
        tokens: int64 [B, L], prompt, answer and padding; the last token of the longest example
            is only ever a label.
        labels: int64 [B, L], the token that follows each position where that is part of the
            answer or the end of text, else `IGNORED`.
    """
    rows, starts = [], []
    for problem in problems:
        prompt = encode_prompt(tokenizer, problem, chat=False)
        answer = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
        rows.append(torch.tensor([*prompt, *answer, tokenizer.eos_token_id]))
        starts.append(len(prompt))
    padded = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=tokenizer.pad_token_id
    )  # [B, L + 1]
    position = torch.arange(1, padded.shape[1])
    start = torch.tensor(starts)[:, None]
    length = torch.tensor([len(row) for row in rows])[:, None]
    answered = (position >= start) & (position < length)  # [B, L]
    return padded[:, :-1], padded[:, 1:].masked_fill(~answered, IGNORED)


@torch.no_grad()
def greedy_accuracy(model: LlamaForCausalLM, tokens: Tensor, labels: Tensor) -> float:
    """Fraction of examples that greedy decoding answers exactly.

    One forward pass over the gold answers tells: greedy decoding writes the gold answer if and
    only if the likeliest token after every gold prefix is the gold token. No randomness is used.

    Args:
        model: the model to evaluate.
        tokens, labels: int64 [B, L], from `encode_examples`.
    """
    likeliest = model(input_ids=tokens, use_cache=False).logits.argmax(-1)  # [B, L]
    return ((likeliest == labels) | (labels == IGNORED)).all(-1).float().mean().item()


def train_until(
    model: LlamaForCausalLM,
    train: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    *,
    seed: int,
    target_accuracy: float,
    max_steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_steps: int,
    report: Callable[[int, float, float], None],
) -> float:
    """Train in place until held-out greedy accuracy reaches the target; return that accuracy.

    Accuracy rises from a tenth to one half within about a hundred steps, which come at a time
    that depends on the seed and the number of threads, and swings by a tenth within a few steps.
    So the stop is by accuracy, and every step is evaluated once the rise has begun.
    """
    tokens, labels = train
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    accuracy = 0.0
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / warmup_steps)
        chosen = torch.randint(len(tokens), (batch_size,), generator=generator)
        logits = model(input_ids=tokens[chosen], use_cache=False).logits  # [B, L, V]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[chosen].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % (1 if accuracy > 0.1 else 20) == 0 or step == max_steps:
            accuracy = greedy_accuracy(model, *held_out)
            if accuracy >= target_accuracy:
                report(step, loss.item(), accuracy)
                break
        report(step, loss.item(), accuracy)
    return accuracy


def build_tiny(
    out: str | Path,
    *,
    seed: int = 0,
    target_accuracy: float = 0.45,
    max_steps: int = 1200,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    warmup_steps: int = 50,
    num_threads: int = 1,
) -> float:
    """Train the tiny model on the CPU and write it with its tokenizer as a Hugging Face folder.

    The global random state and thread count are left as they were. The same settings on the same
    machine with the same number of threads give the same weights.

    Args:
        out: folder to create, written beside and renamed: a crash leaves nothing behind.
        seed: decides the initial weights and the order of the examples.
        target_accuracy: held-out greedy accuracy, 0..1, at which training stops.
        max_steps: optimizer steps at most; 300 to 400 reach the default target.
        batch_size: examples a step.
        learning_rate: AdamW's, after the warm-up.
        warmup_steps: steps of linear warm-up.
        num_threads: torch threads to train with. Where the cores are busy with something else,
            a second thread makes it many times slower: every operation waits for both.

    Returns:
        Held-out greedy accuracy of the model that was saved. It lies below the target, with a
        warning in the log, when `max_steps` came first.

    Raises:
        ValueError: a setting out of range, or `out` exists already.
    """
    if not 0.0 < target_accuracy <= 1.0:
        raise ValueError(f"target_accuracy={target_accuracy}: must lie above 0, at most 1")
    counts = {
        "max_steps": max_steps,
        "batch_size": batch_size,
        "warmup_steps": warmup_steps,
        "num_threads": num_threads,
    }
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    task = Arithmetic()
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=seed)
    with new_folder(out) as folder, _threads(num_threads), _progress(max_steps) as report:
        accuracy = train_until(
            model,
            encode_examples(tokenizer, task.problems("train")),
            encode_examples(tokenizer, task.problems("test")),
            seed=seed,
            target_accuracy=target_accuracy,
            max_steps=max_steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            report=report,
        )
        with quiet_transformers():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if accuracy < target_accuracy:
        logger.warning(
            "tiny: accuracy %.2f after max_steps=%d, below target_accuracy=%.2f",
            accuracy, max_steps, target_accuracy,
        )  # fmt: skip
    return accuracy


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(max_steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """Yield report(step, loss, accuracy): a live line in a terminal, else one every few seconds."""
    console = Console(stderr=True)
    start = last = time.monotonic()
    text = "tiny: step {}/{} loss {:.3f} held-out accuracy {:.2f}"
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("tiny", total=max_steps)
            yield lambda step, loss, accuracy: progress.update(
                bar, completed=step, description=text.format(step, max_steps, loss, accuracy)
            )
        return

    final = None

    def report(step: int, loss: float, accuracy: float) -> None:
        nonlocal last, final
        now = time.monotonic()
        final = text.format(step, max_steps, loss, accuracy) + f" elapsed {now - start:.0f} s"
        if now - last >= LOG_INTERVAL_S:
            last, line, final = now, final, None
            logger.info("%s", line)

    yield report
    if final is not None:
        logger.info("%s", final)


def main() -> None:
    """Command line of `build_tiny`."""
    parser = argparse.ArgumentParser(description="Train the tiny starting model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-accuracy", type=float, default=0.45, help="stop here (0..1)")
    parser.add_argument("--max-steps", type=int, default=1200)
    parser.add_argument("--num-threads", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        accuracy = build_tiny(**vars(arguments))
    except ValueError as error:
        raise SystemExit(f"sft.py: {error}") from error
    print(f"{arguments.out}: held-out greedy accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
