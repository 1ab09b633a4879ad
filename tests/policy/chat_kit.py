"""A real byte-level tokenizer and real Jinja templates, built here: no network."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe useful.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
HEADERS = (  # bos once, a header for every turn, no separator after the end of a turn
    "{{ bos_token }}{%- for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '<|im_sep|>\\n\\n' + m['content'] | trim + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>\\n\\n' }}{%- endif %}"
)
INST = (  # alternating roles, a space before eos, bos again before each exchange
    "{%- for m in messages %}{%- if m['role'] == 'user' %}"
    "{%- if not loop.first and messages[loop.index0 - 1]['role'] == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}{%- elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + ' ' + eos_token }}{%- else %}"
    "{{ raise_exception('no such role') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ ' ' }}{%- endif %}"
)
SWALLOW = (  # the end token is declared to swallow the newline that follows it
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
WORDS = (  # no control tokens at all: an action ends with a string
    "{%- for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n###\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "swallow": SWALLOW, "words": WORDS}

# KNOWN FAULTS: history rewritten.
DROPS_THINKING = (
    "{%- for m in messages %}{%- set c = m['content'] %}{%- if m['role'] == 'assistant' and not loop.last %}"
    "{%- set c = c.split('</think>')[-1] %}{%- endif %}{{ '<|im_start|>' + m['role'] + '\\n' + c + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
OPENS_THINKING = DROPS_THINKING.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
COUNTS_TURNS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{%- if m['role'] == 'user' %}"
    "{{ 'turn ' ~ loop.index ~ ' of ' ~ messages | length ~ '. ' }}{%- endif %}{{ m['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer(template: str | None, merges: tuple[tuple[str, str], ...] = (), **special: Any) -> Any:
    """Bytes, the given merges, and the control tokens of all templates. It would add a bos token of its own."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks: list[Any] = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<e>"]
    backend.add_special_tokens([*marks, AddedToken("<|end|>", rstrip=True, special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"} | special
    special = {k: v for k, v in special.items() if v is not None}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, name_or_path="toy", **special)
