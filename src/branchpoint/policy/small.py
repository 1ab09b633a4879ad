"""The embedded default: a Llama small enough to learn in a minute on one core, and a word-level tokenizer for it.

A word is one token, its leading space included. Names and numbers are separate tokens (``desk_1`` is ``desk _1``;
numbers go in pairs of digits, ``O0042`` is ``O 00 42``), so that what is learnt of one desk holds for the next. A word
that is not in the vocabulary is spelled in bytes: decoding always gives back exactly what was encoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from branchpoint.policy.chat import ACT, END, OBS, TASK
from branchpoint.policy.models import ModelError, llama, require, wrap

PAD = "<pad>"
MARKS = (PAD, TASK, OBS, ACT, END)
_WORDS = (
    r" ?\p{L}+(?:_\p{L}+)*=?"  # a word, the name of a tool, or the name of an argument with its sign
    r"|_\d{1,2}"  # the number of a thing: desk_1
    r"| ?\d{1,2}"  # numbers in pairs of digits
    r"| ?[^\s\p{L}\d]"  # one sign
    r"|\s"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shape of the model; the defaults give 0.85M parameters plus ``width`` a token of the vocabulary."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    hidden: int = 384
    context: int = 4096

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads, self.hidden, self.context) < 1 or self.width % (2 * self.heads):
            raise ModelError(f"sizes must be positive and width an even multiple of heads; got {self}")


def train_tokenizer(texts: Iterable[str], limit: int = 2048, least: int = 3) -> Any:
    """A Hugging Face tokenizer of the words in ``texts``.

    ``limit`` words at most, the most frequent first (ties by spelling), each seen at least ``least`` times; the marks,
    256 bytes and the pairs of digits come on top. Equal texts in any order give the same tokenizer.
    """
    tokenizers = require("tokenizers")
    splitter = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts: Counter[str] = Counter()
    for text in texts:
        lines = text.replace("\n", "\n ")  # as the plain format shows them
        counts.update(word for word, _ in splitter.pre_tokenize_str(f" {lines}"))
    known = sorted((w for w, n in counts.items() if n >= least), key=lambda w: (-counts[w], w))[:limit]
    pairs = [f"{before}{i:0{width}d}" for before in ("", "Ġ", "_") for width in (1, 2) for i in range(10**width)]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    entries = dict.fromkeys([*MARKS, *letters, *pairs, *known])
    vocabulary = {word: i for i, word in enumerate(entries)}
    # BPE without merges: a whole word if it is known, else its bytes.
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = splitter
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(MARKS))
    return wrap(backend, pad_token=PAD, eos_token=END, additional_special_tokens=[TASK, OBS, ACT])


def build(tokenizer: Any, sizes: Sizes | None = None, seed: int = 0) -> Any:
    """A fresh float32 ``LlamaForCausalLM`` for the tokenizer, embeddings tied. Equal seeds give equal weights."""
    sizes = sizes or Sizes()
    return llama(
        seed,
        vocab_size=len(tokenizer),
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
