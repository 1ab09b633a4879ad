"""Restricted decoding: exactly what is well-formed can be sampled, and the recorded sets are the right ones."""

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from sampler_kit import NONE, model, run, same, teacher

from branchpoint.config import Sampling
from branchpoint.noise import Noise
from branchpoint.policy.chat import PlainCodec
from branchpoint.policy.hf import HFPolicy
from branchpoint.policy.restrict import Actions, Grammars
from branchpoint.policy.small import train_tokenizer
from branchpoint.session import Action
from branchpoint.world import PolicyFailure, Step

ACTIONS = ("go to desk 1", "go to desk 10", "go to bed 1", "take pen 1 from desk 1", "look", "inventory")
TOKENIZER = train_tokenizer([*ACTIONS] * 3)
CODEC = PlainCodec(TOKENIZER)
STOP = CODEC.stop_ids[0]


def sequences(actions: tuple[str, ...] = ACTIONS) -> list[list[int]]:
    return [[*CODEC.encode(a).tolist(), STOP] for a in actions]


def after(prefix: list[int]) -> list[int]:
    """Brute force: the ids that follow a prefix in some admissible action."""
    return sorted({s[len(prefix)] for s in sequences() if s[: len(prefix)] == prefix and len(s) > len(prefix)})


def sample(kind: str, step: Step, n: int, limit: int = 30) -> tuple[Any, np.ndarray, list[Action]]:
    made = model(vocab=len(TOKENIZER), sharpness=0.5)
    p = HFPolicy(made, CODEC, Sampling(restrict=kind))  # type: ignore[arg-type]
    context = CODEC.encode("go to desk 1 look")

    async def main() -> list[Action]:
        return await asyncio.gather(*(p.open().act(context, step, Noise(0, k), limit) for k in range(n)))

    return made, context, run(main())


def test_a_trie_holds_the_actions_and_nothing_else() -> None:
    state = Actions(CODEC.encode, STOP)
    words, pending = [], [[]]
    while pending:
        prefix = pending.pop()
        choice = state.start(ACTIONS)
        for token in prefix:
            choice.advance(token)
        assert choice.allowed().tolist() == (after(prefix) if prefix[-1:] != [STOP] else [])
        if prefix[-1:] == [STOP]:
            words.append(prefix)
        pending += [[*prefix, int(t)] for t in choice.allowed()]
    assert sorted(words) == sorted(sequences())
    with pytest.raises(ValueError, match="continues none of the admissible actions"):
        state.start(ACTIONS).advance(STOP)
    with pytest.raises(ValueError, match="is empty or contains the stop token"):
        state.start(("look", ""))


def test_only_admissible_actions_are_sampled_and_log_probabilities_are_renormalised() -> None:
    made, context, actions = sample("actions", Step("", actions=ACTIONS), 150)
    assert {a.text for a in actions} == set(ACTIONS)
    for a in actions:
        assert a.stopped
        assert a.tokens.tolist() in sequences()
        raw = teacher(made, context, a.tokens)
        assert a.allowed is not None
        for i, kept in enumerate(a.allowed):
            assert kept is not None
            assert kept.tolist() == after(a.tokens[:i].tolist())
            inside = raw[i, kept] - np.log(np.exp(raw[i, kept]).sum())
            assert a.logprobs[i] == pytest.approx(inside[kept.tolist().index(a.tokens[i])], abs=1e-5)
            assert a.entropies[i] == pytest.approx(-(np.exp(inside) * inside).sum(), abs=1e-5)
            assert a.raw_logprobs[i] == pytest.approx(raw[i, a.tokens[i]], abs=1e-5)
            if len(kept) == 1:
                assert a.logprobs[i] == 0.0
                assert a.entropies[i] == 0.0


def test_tokens_without_a_choice_cost_one_step_together() -> None:
    made, context = model(vocab=len(TOKENIZER), sharpness=0.5), CODEC.encode("look")
    (whole,) = sequences(("take pen 1 from desk 1",))
    p = HFPolicy(made, CODEC, Sampling(restrict="actions"))

    async def main() -> None:
        s = p.open()
        a = await s.act(context, Step("", actions=("take pen 1 from desk 1",)), Noise(0, 0), 30)
        assert p.engine.steps == 1
        assert a.tokens.tolist() == whole
        assert a.stopped
        raw = teacher(made, context, a.tokens)
        np.testing.assert_allclose(a.raw_logprobs, raw[np.arange(len(whole)), whole], atol=1e-5)
        cut = await p.open().act(context, Step("", actions=("take pen 1 from desk 1",)), Noise(0, 0), 3)
        assert (cut.tokens.tolist(), cut.stopped) == (whole[:3], False)
        after_it = CODEC.encode("look look")  # goes on behind the forced tokens, from what they left in the cache
        b = await s.act(after_it, Step("", actions=ACTIONS), Noise(0, 1), 30)
        raw = teacher(made, np.concatenate([context, a.tokens, after_it]), b.tokens)
        np.testing.assert_allclose(b.raw_logprobs, raw[np.arange(len(b.tokens)), b.tokens], atol=1e-5)

    run(main())


def test_a_restricted_action_is_the_same_bit_for_bit_in_any_company() -> None:
    made = model(vocab=len(TOKENIZER), sharpness=0.5)

    async def main(keys: list[int]) -> list[Action]:
        p = HFPolicy(made, CODEC, Sampling(restrict="actions"))

        async def one(k: int) -> list[Action]:
            for _ in range(7 * k % 5):
                await asyncio.sleep(0)
            s = p.open()
            a = await s.act(CODEC.encode("look " * (1 + k % 4)), Step("", actions=ACTIONS[k % 3 :]), Noise(0, k), 30)
            b = await s.act(CODEC.encode("go"), Step("", actions=ACTIONS[: 1 + k % 6]), Noise(0, k), 30)
            f = s.fork(s.length - len(b.tokens) + 1)
            return [a, b, await f.act(NONE, Step("", actions=ACTIONS[: 1 + k % 6]), Noise(1, k), 9, b.tokens[:1])]

        return [x for three in await asyncio.gather(*map(one, keys)) for x in three]

    crowd = run(main(list(range(24))))
    for k in range(0, 24, 5):
        assert all(same(a, b) for a, b in zip(run(main([k])), crowd[3 * k : 3 * k + 3], strict=True))


def test_frequencies_of_actions_are_their_probabilities() -> None:
    made, context, actions = sample("actions", Step("", actions=ACTIONS), 500)
    chance = []
    for s in sequences():
        raw, log = teacher(made, context, np.array(s, np.int32)), 0.0
        for i, t in enumerate(s):
            log += raw[i, t] - np.log(np.exp(raw[i, after(s[:i])]).sum())
        chance.append(np.exp(log))
    assert sum(chance) == pytest.approx(1.0, abs=1e-6)
    counts = np.array([sum(a.text == x for a in actions) for x in ACTIONS])
    expected = 500 * np.array(chance)
    assert ((counts - expected) ** 2 / expected).sum() < 32.0  # 5 degrees of freedom: p = 6e-6


def test_a_fork_in_the_middle_goes_on_in_the_trie() -> None:
    made = model(vocab=len(TOKENIZER), sharpness=0.5)
    p = HFPolicy(made, CODEC, Sampling(restrict="actions"))
    step, context = Step("", actions=ACTIONS), CODEC.encode("look")
    whole = sequences()[0]

    async def main() -> None:
        for cut in range(1, len(whole)):
            prefix = np.array(whole[:cut], np.int32)
            s = p.open()
            await s.act(np.concatenate([context, prefix]), Step(""), Noise(0, 0), 1)
            f = s.fork(len(context) + cut)
            a = await f.act(NONE, step, Noise(0, 1), 30, prefix=prefix)
            assert a.text in ACTIONS
            assert [*prefix, *a.tokens] in sequences()
            assert a.allowed is not None
            assert a.allowed[0] is not None
            assert a.allowed[0].tolist() == after(whole[:cut])
        with pytest.raises(PolicyFailure, match="continues none of the admissible actions"):
            await s.fork(len(context) + 2).act(NONE, step, Noise(0, 1), 30, prefix=np.array(whole[1:2], np.int32))

    run(main())


def test_a_step_without_actions_leaves_the_vocabulary_open() -> None:
    for kind in ("actions", "grammar"):
        assert all(a.allowed is None for a in sample(kind, Step(""), 3, 4)[2])


GRAMMAR = r"(go to|take) (desk|bed|pen) [0-9]{1,2}"
LANGUAGE = {f"{v} {n} {i}" for v in ("go to", "take") for n in ("desk", "bed", "pen") for i in range(10)}
LANGUAGE |= {f"{v} {n} {i:02d}" for v in ("go to", "take") for n in ("desk", "bed", "pen") for i in range(100)}


def test_only_what_the_grammar_matches_is_sampled_from_the_right_sets() -> None:
    pytest.importorskip("llguidance")
    pieces = [TOKENIZER.decode([i]) for i in range(len(TOKENIZER))]
    starts = {w[:i] for w in LANGUAGE for i in range(len(w) + 1)}
    _, _, actions = sample("grammar", Step("", grammar=GRAMMAR), 12)
    special = set(TOKENIZER.all_special_ids)
    for a in actions:
        assert a.stopped
        assert re.fullmatch(GRAMMAR, a.text)
        assert a.allowed is not None
        for i, kept in enumerate(a.allowed):
            said = TOKENIZER.decode(a.tokens[:i].tolist())
            right = {
                t
                for t, piece in enumerate(pieces)
                if t not in special and (said + piece).removeprefix(" ") in starts and "�" not in piece
            }
            right |= {STOP} if said.removeprefix(" ") in LANGUAGE else set()
            assert kept is not None
            if set(kept.tolist()) != right:  # where the text is forced, only its canonical tokens are open
                rest = [w[len(said.removeprefix(" ")) :] for w in LANGUAGE if w.startswith(said.removeprefix(" "))]
                forced = next(min(rest)[:n] for n in range(99, -1, -1) if all(w[:n] == min(rest)[:n] for w in rest))
                assert kept.tolist() == TOKENIZER(forced, add_special_tokens=False)["input_ids"][:1]


def test_a_grammar_says_what_is_wrong() -> None:
    pytest.importorskip("llguidance")
    grammars = Grammars(TOKENIZER, STOP, len(TOKENIZER))
    with pytest.raises(ValueError, match="does not compile"):
        grammars.start("(go")
    with pytest.raises(ValueError, match="does not fit the grammar"):
        grammars.start("look").advance(int(CODEC.encode("go")[0]))
    with pytest.raises(ValueError, match="fast tokenizer"):
        Grammars(None, STOP, 10)
    with pytest.raises(PolicyFailure, match="does not compile"):
        sample("grammar", Step("", grammar="(go"), 1)
