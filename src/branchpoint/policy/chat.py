"""Messages <-> tokens, exactly.

A conversation is one growing row of tokens: what the template shows, what the policy sampled, what the template shows
next. Sampled tokens are never decoded and encoded again. What follows an action is the template's own text after an
assistant turn, taken once from a rendering with a placeholder in the action's place, so that a separator after the
end-of-turn token (often a newline) is kept and belongs to the observation.

This is exact only for a template that never changes what it has shown. :class:`ChatCodec` probes the template with
short conversations when it is built and refuses one that rewrites earlier turns.

No mask is ever made by comparing ids: a pad token equal to the end-of-turn token does no harm, a sampled end-of-turn
token is part of the action, and none is added to an action that was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from branchpoint.tree import Ints
from branchpoint.world import Message, Step, Task

Tokenizer = Any
"""A tokenizer of the Hugging Face kind: callable on text, with ``decode``, ``get_added_vocab``, ``eos_token_id``."""

_THINK = "<think>"
_PROBES = ("go 1", "<think>\nx\n</think>\n\ngo 1", "x</think>go 1")


class TemplateError(ValueError):
    """A chat template or tokenizer that cannot be used exactly; the message names it and the cure."""


class Codec(Protocol):
    """The words around the tokens, as an engine needs them."""

    stop_ids: tuple[int, ...]
    """Sampling one of these ends the action; the token is part of the action."""
    stop_strings: tuple[str, ...]
    """The action also ends where its text holds one of these."""
    vocabulary: int
    """Ids at or above are never sampled (a model's embedding may be padded beyond the tokenizer)."""

    def observe(self, task: Task, step: Step, first: bool) -> Ints:
        """The tokens that show a step; as the answer to an action, they start right after the sampled stop token."""
        ...

    def text(self, tokens: Ints | Sequence[int]) -> str:
        """The action as it is played: the stop token or stop string and what follows it taken off."""
        ...

    def encode(self, text: str) -> Ints:
        """The tokens of an action's text, without the stop token."""
        ...


def _ints(ids: Sequence[int]) -> Ints:
    out = np.array(ids, np.int32)
    out.flags.writeable = False
    return out


class _Words:
    """What both codecs share: encoding without special tokens, and the end of an action."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: tuple[int, ...], stop_strings: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.stop_strings = stop_strings
        self.vocabulary = len(tokenizer)

    def _ids(self, text: str, plain: bool = False) -> list[int]:
        """Tokens of a text. ``plain``: the spelling of a special token in it is ordinary text."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"]
        return [int(i) for i in ids]

    def _played(self, tokens: Ints | Sequence[int]) -> str:
        ids = [int(i) for i in tokens]
        ends = [i for i, t in enumerate(ids) if t in self.stop_ids]
        kept = ids[: ends[0]] if ends else ids
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        cuts = [text.index(s) for s in self.stop_strings if s in text]
        return text[: min(cuts)] if cuts else text


class ChatCodec(_Words):
    """The exact codec of a chat model, from the tokenizer's own Jinja template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        system: a system message in front of every conversation (a task's own system message replaces it).
        tools: JSON schemas of tools, handed to the template.
        answer_role: ``"user"`` or ``"tool"``: the role in which the world answers an action.
        history: ``"exact"`` refuses a template that rewrites earlier turns. ``"append"`` accepts it and keeps every
            earlier turn as it was sampled, which the template itself would not show (a thinking model then sees its
            old thinking).
        answer_after: only the text after the last occurrence of this marker is played (``"</think>"``).
        stop_strings: further strings that end an action, e.g. ``("Observation:",)``.
        template: a Jinja template to use in place of the tokenizer's own.
        template_args: variables for the template, e.g. ``{"enable_thinking": False}``.

    The spelling of a control token inside an observation is broken by a zero-width space, so that no observation can
    forge a turn.

    Raises:
        TemplateError: no template, a template that fails or rewrites earlier turns, no way to end an action.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer_role: Literal["user", "tool"] = "user",
        history: Literal["exact", "append"] = "exact",
        answer_after: str = "",
        stop_strings: tuple[str, ...] = (),
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, (), ())
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self.template = template or getattr(tokenizer, "chat_template", None)
        if not self.template:
            raise TemplateError(
                f"tokenizer {self.name!r} has no chat template: give one (template=...), use a chat model, "
                "or use PlainCodec with the small model's tokenizer"
            )
        if history not in ("exact", "append"):
            raise ValueError(f"history is {history!r}; expected 'exact' or 'append'")
        self._tools = list(tools) if tools else None
        self._args = dict(template_args or {})
        self._answer_role = answer_role
        self._answer_after = answer_after
        self._system = (Message("system", system),) if system else ()
        self._head = (*self._system, Message("user", "go"))
        self._mark = self._placeholder()
        self._end, end_id, end_string = self._closing()
        eos = tokenizer.eos_token_id
        self.stop_ids = tuple(dict.fromkeys(int(i) for i in (end_id, eos) if i is not None))
        self.stop_strings = (*((end_string,) if end_string else ()), *stop_strings)
        self._control = self._control_tokens(end_id)
        self._before = self._ids(self._mark + self._end)
        self._probe(history)

    def observe(self, task: Task, step: Step, first: bool) -> Ints:
        """The tokens that show a step.

        ``first``: the whole conversation up to the generation prompt. Consecutive messages of the user (a task's prompt
        and the first observation) are one message, because many templates insist on alternating roles.
        """
        if not first:
            return _ints(self._tail(self._safe(step.observation)))
        messages = [Message(m.role, self._safe(m.content)) for m in task.prompt]
        if not any(m.role == "system" for m in messages):
            messages = [*self._system, *messages]
        if step.observation or not messages or messages[-1].role != "user":
            if messages and messages[-1].role == "user":
                last = messages.pop().content
                messages.append(Message("user", f"{last}\n\n{self._safe(step.observation)}"))
            else:
                messages.append(Message("user", self._safe(step.observation)))
        return _ints(self._ids(self._render(messages, True)))

    def text(self, tokens: Ints | Sequence[int]) -> str:
        """The action as it is played: up to the stop, after ``answer_after``. A cut action is returned as far as it
        goes."""
        text = self._played(tokens)
        if self._answer_after and self._answer_after in text:
            text = text.rsplit(self._answer_after, 1)[1].lstrip()
        return text

    def encode(self, text: str) -> Ints:
        """The tokens of an action's text, without the stop token. Control tokens in it are ordinary text."""
        return _ints(self._ids(text, plain=True))

    def _render(self, messages: Sequence[Message], generate: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [{"role": m.role, "content": m.content} for m in messages],
                tools=self._tools,
                chat_template=self.template,
                add_generation_prompt=generate,
                tokenize=False,
                **self._args,
            )
        except Exception as error:  # a template raises whatever its author chose
            roles = ", ".join(m.role for m in messages)
            cure = "use answer_role='user'" if self._answer_role == "tool" else "check system, tools and template_args"
            raise TemplateError(f"chat template of {self.name!r} fails on roles ({roles}): {error}; {cure}") from error

    def _placeholder(self) -> str:
        shown = self._render(self._head, True)
        return next(m for m in (f"placeholder{i}" for i in range(len(shown) + 1)) if m not in shown)

    def _closing(self) -> tuple[str, int | None, str]:
        """How the template ends an assistant turn: the text up to the stop, and the stop's id or string."""
        turn = self._render((*self._head, Message("assistant", self._mark)), False)
        if self._mark not in turn:
            raise TemplateError(f"chat template of {self.name!r} does not show an assistant's content as it is")
        closing = turn.split(self._mark, 1)[1]
        body = closing.lstrip()
        added: dict[str, int] = self.tokenizer.get_added_vocab()
        found = max((t for t in added if t.strip() and body.startswith(t)), key=len, default="")
        if found:
            return closing[: len(closing) - len(body)] + found, int(added[found]), ""
        if body:
            return closing.rstrip(), None, closing.strip()
        if self.tokenizer.eos_token_id is not None:
            return "", None, ""
        if closing:
            return closing, None, closing
        raise TemplateError(
            f"chat template of {self.name!r} puts nothing after an assistant turn and its tokenizer has no eos token, "
            "so an action could not end: set tokenizer.eos_token or use another template (template=...)"
        )

    def _control_tokens(self, end_id: int | None) -> tuple[str, ...]:
        decoder = getattr(self.tokenizer, "added_tokens_decoder", {})
        tokens = {t.content for i, t in decoder.items() if t.special or i == end_id}
        return tuple(sorted((t for t in tokens if t.strip()), key=len, reverse=True))

    def _safe(self, text: str) -> str:
        for token in self._control:
            if token in text:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}" if len(token) > 1 else "\ufffd")
        return text

    def _tail(self, observation: str) -> list[int]:
        """The tokens from the stop of an action to the next generation prompt."""
        return self._after_stop(self._tail_text(observation, self._head))

    def _after_stop(self, tail: str) -> list[int]:
        if not self._end or (self.stop_strings and self._end.strip() in self.stop_strings):
            return self._ids(tail)
        # Tokenised behind the stop token, since a special token may swallow the white space that follows it.
        both = self._ids(self._mark + self._end + tail)
        if both[: len(self._before)] != self._before:
            raise TemplateError(f"tokenizer {self.name!r} merges {self._end!r} with what follows it")
        return both[len(self._before) :]

    def _tail_text(self, observation: str, head: Sequence[Message]) -> str:
        turns = (*head, Message("assistant", self._mark), Message(self._answer_role, observation))
        shown = self._render(turns, True).split(self._mark, 1)
        if len(shown) != 2 or not shown[1].startswith(self._end):
            raise self._rewrites("an assistant turn is not shown as it was once it has been answered")
        return shown[1][len(self._end) :]

    def _probe(self, history: str) -> None:
        """Refuses a template under which a context is not an extension of the one before it."""
        tail = self._tail_text("seen 9", self._head)
        longer = [*self._head, Message("assistant", "go 1"), Message(self._answer_role, "seen 8")]
        if self._tail_text("seen 9", longer) != tail:
            raise self._rewrites("what it shows for a turn depends on how many came before", curable=False)
        if history == "append":
            return
        opens = self._render(self._head, True).rstrip().endswith(_THINK)
        for answer in _PROBES if opens else _PROBES[:2]:
            self._probe_with(answer)

    def _probe_with(self, answer: str) -> None:
        messages = list(self._head)
        context = self._render(messages, True)
        for turn in range(1, 4):
            seen = f"seen {turn}"
            messages += [Message("assistant", answer), Message(self._answer_role, seen)]
            expected = context + answer + self._end + self._tail_text(seen, self._head)
            context = self._render(messages, True)
            if context != expected:
                at = next((i for i, (a, b) in enumerate(zip(context, expected, strict=False)) if a != b), 0)
                raise self._rewrites(
                    f"with the action {answer!r}, turn {turn + 1} shows {context[max(0, at - 20) : at + 20]!r} "
                    f"where {expected[max(0, at - 20) : at + 20]!r} was shown before"
                )

    def _rewrites(self, why: str, curable: bool = True) -> TemplateError:
        append = ", or history='append' to keep earlier turns as they were sampled" if curable else ""
        return TemplateError(
            f"chat template of {self.name!r} rewrites earlier turns: {why}; "
            f"use another template (template=... or template_args=...){append}"
        )


TASK, OBS, ACT, END = "<task>", "<obs>", "<act>", "<end>"


class PlainCodec(_Words):
    """A plain format for a small model: ``<task> words <obs> words <act> words <end> <obs> words <act> ...``.

    The task is the text of the prompt's messages other than system ones (a small model learns its rules from
    transcripts). Every line and every action starts with a space, so that a word is the same token wherever it stands.
    Nothing follows the stop token ``<end>`` but the next observation. Marks spelled out in an observation are ordinary
    text.

    Raises:
        TemplateError: the tokenizer lacks one of the four marks.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_vocab()
        missing = [m for m in (TASK, OBS, ACT, END) if m not in added]
        if missing:
            name = getattr(tokenizer, "name_or_path", "")
            raise TemplateError(
                f"tokenizer {name!r} lacks {' '.join(missing)}: the plain format needs the "
                "small model's tokenizer (branchpoint.policy.small); use ChatCodec for a chat model"
            )
        self._task, self._obs, self._act, end = (int(added[m]) for m in (TASK, OBS, ACT, END))
        super().__init__(tokenizer, (end,), ())

    def observe(self, task: Task, step: Step, first: bool) -> Ints:
        ids: list[int] = []
        if first:
            words = "\n".join(m.content for m in task.prompt if m.role != "system")
            ids = [self._task, *self._shown(words)] if words else []
        return _ints([*ids, self._obs, *self._shown(step.observation), self._act])

    def text(self, tokens: Ints | Sequence[int]) -> str:
        return self._played(tokens).removeprefix(" ")

    def encode(self, text: str) -> Ints:
        return _ints(self._words(text))

    def _shown(self, text: str) -> list[int]:
        return self._words(text.replace("\n", "\n "))

    def _words(self, text: str) -> list[int]:
        return self._ids(f" {text}", plain=True) if text else []
