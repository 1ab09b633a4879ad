"""The engine as a neighbour: slow, failing, cancelled and closed sessions harm nobody else."""

import asyncio

import numpy as np
import pytest
import torch
from chat_kit import CHATML, tokenizer
from sampler_kit import NONE, act, chosen, ids, model, policy, run, same, teacher

from branchpoint.config import Sampling
from branchpoint.noise import Noise
from branchpoint.policy.chat import ChatCodec
from branchpoint.policy.hf import HFPolicy
from branchpoint.session import Action
from branchpoint.world import PolicyFailure, Step


def test_a_slow_session_does_not_stall_others_and_an_idle_engine_does_not_run() -> None:
    p = policy(model(), stop=59)

    async def main() -> None:
        answered = asyncio.Event()

        async def slow() -> Action:
            s = p.open()
            await act(s, ids(0, length=5), 0)
            await answered.wait()
            return await act(s, ids(1, length=5), 1)

        async def quick() -> None:
            s = p.open()
            for turn in range(4):
                await act(s, ids(2, turn, length=5), turn)

        waiting = asyncio.create_task(slow())
        await quick()
        steps = p.engine.steps
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert p.engine.steps == steps
        assert len(asyncio.all_tasks()) == 2  # this test and the slow session
        answered.set()
        assert len((await waiting).tokens)

    run(main())


def test_sessions_share_forward_passes() -> None:
    p = policy(model(), stop=59)

    async def main() -> int:
        await asyncio.gather(*(act(p.open(), ids(k, length=6), k, 10) for k in range(20)))
        return p.engine.steps

    assert run(main()) <= 12


def test_a_failing_session_fails_alone() -> None:
    made = model()
    with torch.no_grad():
        made.model.embed_tokens.weight[59] = float("nan")
    p = policy(made, Sampling(restrict="actions"), stop=59)
    good = [ids(k, length=6) for k in range(3)]

    async def main(bad: bool) -> list[Action]:
        poison = act(p.open(), np.array([1, 59, 2], np.int32), 0)
        wrong = act(p.open(), ids(0, length=3), 0, step=Step("", actions=("abc", "")))
        work = [act(p.open(), o, k) for k, o in enumerate(good)]
        if not bad:
            poison.close()  # type: ignore[attr-defined]
            wrong.close()  # type: ignore[attr-defined]
            return await asyncio.gather(*work)
        one, two, *rest = await asyncio.gather(poison, wrong, *work, return_exceptions=True)
        assert isinstance(one, PolicyFailure)
        assert "not finite" in str(one)
        assert isinstance(two, PolicyFailure)
        assert "admissible action '' is empty" in str(two)
        return rest  # type: ignore[return-value]

    before, amid, after = run(main(False)), run(main(True)), run(main(False))
    assert all(same(a, b) and same(a, c) for a, b, c in zip(before, amid, after, strict=True))


def test_a_freed_slot_carries_nothing_over_even_after_nan() -> None:
    made = model()
    with torch.no_grad():
        made.model.embed_tokens.weight[59] = float("nan")

    async def main(poisoned: bool) -> Action:
        p = policy(made, stop=59)
        if poisoned:
            s = p.open()
            with pytest.raises(PolicyFailure):
                await act(s, np.full(90, 59, np.int32), 0)
            s.close()
            assert p.engine.store.used == 0
        return await act(p.open(), ids(0, length=6), 0)

    assert same(run(main(False)), run(main(True)))


def test_a_failing_model_fails_what_it_was_asked_and_nothing_after() -> None:
    made = model()
    p = policy(made, stop=59)

    def explode(*_: object) -> None:
        raise RuntimeError("out of memory")

    async def main() -> None:
        hook = made.model.layers[1].register_forward_pre_hook(explode)
        a, b = await asyncio.gather(
            act(p.open(), ids(0, length=4), 0), act(p.open(), ids(1, length=4), 0), return_exceptions=True
        )
        assert all(isinstance(x, PolicyFailure) and "RuntimeError: out of memory" in str(x) for x in (a, b))
        hook.remove()
        assert len((await act(p.open(), ids(0, length=4), 0)).tokens)

    run(main())
    assert made.config._attn_implementation == "sdpa"


class _Full(torch.Tensor):
    """No memory for a larger one."""

    def new_zeros(self, *_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("how", ["rows", "slots"])
def test_memory_that_ends_while_the_store_grows_spoils_nothing(how: str) -> None:
    """The second layer cannot grow, the first has: what sits in the store and what comes after stay the same bits."""

    async def main(full: bool) -> list[Action]:
        p = policy(model(), stop=59)
        held = [p.open() for _ in range(3)]
        for k, s in enumerate(held):
            await act(s, ids(k, length=30), k)
        store = p.engine.store
        if full:
            store.layers[1] = tuple(t.as_subclass(_Full) for t in store.layers[1])  # type: ignore[assignment]
            much = [
                act(p.open(), ids(9, length=300 if how == "rows" else 5), 9) for _ in range(1 if how == "rows" else 3)
            ]
            for failed in await asyncio.gather(*much, return_exceptions=True):
                assert isinstance(failed, PolicyFailure)
                assert "out of memory" in str(failed)
            store.layers[1] = tuple(t.as_subclass(torch.Tensor) for t in store.layers[1])  # type: ignore[assignment]
        fresh = [p.open() for _ in range(4)]
        return list(await asyncio.gather(*(act(s, ids(20 + k, length=9), k) for k, s in enumerate([*held, *fresh]))))

    assert all(same(a, b) for a, b in zip(run(main(True)), run(main(False)), strict=True))


def test_the_store_is_given_up_when_the_last_session_ends() -> None:
    """The learner's step wants the memory."""
    p = policy(model(), stop=59)

    async def main() -> list[Action]:
        sessions = [p.open() for _ in range(9)]
        actions = await asyncio.gather(*(act(s, ids(k, length=300), k) for k, s in enumerate(sessions)))
        forks = [s.fork(200) for s in sessions]
        for s in sessions:
            s.close()
        assert p.engine.store.layers, "the forks still read it"
        for s in forks:
            s.close()
        assert not p.engine.store.layers
        return list(actions)

    assert all(same(a, b) for a, b in zip(run(main()), run(main()), strict=True))


def test_a_cancelled_session_leaves_the_engine_going() -> None:
    p = policy(model(), stop=59)

    async def main() -> None:
        s = p.open()
        task = asyncio.create_task(act(s, ids(0, length=5), 0, 500))  # type: ignore[arg-type]
        other = asyncio.create_task(act(p.open(), ids(1, length=5), 1, 20))  # type: ignore[arg-type]
        for _ in range(6):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        s.close()
        s.close()
        assert len((await other).tokens)
        with pytest.raises(PolicyFailure, match="session is closed"):
            await act(s, ids(0, length=5), 0)

    run(main())
    assert len(run(act(p.open(), ids(0, length=5), 0)).tokens)  # and a second event loop finds it well


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    p = policy(model(), stop=59)

    async def main() -> None:
        task = asyncio.create_task(act(p.open(), ids(0, length=5), 0, 500))  # type: ignore[arg-type]
        for _ in range(6):
            await asyncio.sleep(0)
        p.close()
        with pytest.raises(PolicyFailure, match="closed while it sampled"):
            await task
        with pytest.raises(PolicyFailure, match="policy is closed"):
            await act(p.open(), ids(0, length=5), 0)

    run(main())


def test_rows_are_shared_until_written_and_all_slots_come_back() -> None:
    p = policy(model(), stop=59)

    async def main() -> None:
        s = p.open()
        a = await act(s, ids(0, length=30), 0)
        forks = [s.fork(30) for _ in range(20)]
        assert p.engine.store.used == 1
        s.close()
        assert p.engine.store.used == 1  # the forks still read it
        results = await asyncio.gather(*(act(f, NONE, 0) for f in forks))
        assert p.engine.store.used == 20
        assert all(r.tokens.tolist() == results[0].tokens.tolist() for r in results)
        assert len(a.tokens)
        for f in forks:
            f.close()
        assert p.engine.store.used == 0

    run(main())


def test_the_model_is_left_as_it_was_and_still_trains() -> None:
    made = model(attention_dropout=0.5).train()
    p = policy(made, stop=59)
    context = ids(0, length=20)
    a = run(act(p.open(), context, 0))
    assert made.training
    assert made.config._attn_implementation == "sdpa"
    loss = made(input_ids=torch.from_numpy(context)[None].long(), labels=torch.from_numpy(context)[None].long()).loss
    loss.backward()
    assert all(q.grad is not None and bool(torch.isfinite(q.grad).all()) for q in made.parameters())
    made.eval()
    np.testing.assert_allclose(a.logprobs, chosen(teacher(made, context, a.tokens), a.tokens), atol=1e-5)


def test_new_weights_are_used_at_once() -> None:
    made = model()
    p = policy(made, stop=59)
    context = ids(0, length=20)
    run(act(p.open(), context, 0))
    with torch.no_grad():
        for q in made.parameters():
            q.add_(torch.full_like(q, 0.05))
    a = run(act(p.open(), context, 0))
    np.testing.assert_allclose(a.logprobs, chosen(teacher(made, context, a.tokens), a.tokens), atol=1e-5)


def test_a_stop_string_may_span_tokens() -> None:
    tok = tokenizer(CHATML, merges=(), eos_token="<|im_end|>", pad_token="<|im_end|>")
    codec = ChatCodec(tok, stop_strings=("aab",))
    made = model(vocab=len(tok))
    torch.nn.init.zeros_(made.lm_head.weight)
    a, b = (int(tok.convert_tokens_to_ids(c)) for c in "ab")
    with torch.no_grad():
        made.lm_head.weight[[a, b]] = made.model.norm.weight.new_zeros(64)
    p = HFPolicy(made, codec, Sampling())

    async def main() -> list[Action]:
        # Only "a" and "b" can be said: every other id is far away through a bias of the final layer.
        bias = torch.full((len(tok),), -50.0)
        bias[[a, b]] = 0.0
        hook = made.lm_head.register_forward_hook(lambda m, x, y: y + bias)
        out = await asyncio.gather(*(act(p.open(), ids(k, length=5), k, 12) for k in range(30)))
        hook.remove()
        return list(out)

    actions = run(main())
    assert {x.stopped for x in actions} == {True, False}
    for x in actions:
        said = tok.decode(x.tokens.tolist())
        assert x.stopped == ("aab" in said)
        assert "aab" not in said[:-1]
        assert x.text == (said[:-3] if x.stopped else said)


def test_other_attention_is_refused() -> None:
    made = model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ValueError, match="full attention in every layer"):
        policy(made)


def test_a_codec_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="99 tokens for a model of 60"):
        policy(model(), vocabulary=99)


def test_noise_is_the_only_source_of_chance() -> None:
    p = policy(model(), stop=59)
    torch.manual_seed(0)
    a = run(p.open().act(ids(0, length=5), Step(""), Noise(1, 4), 10))
    torch.manual_seed(1)
    b = run(p.open().act(ids(0, length=5), Step(""), Noise(2, 4), 10))  # the luck of the world is not the policy's
    assert same(a, b)
