"""Faults on any environment: what a fate depends on, its law in both arms, what each kind does, and the grader."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from branchpoint import env as envs
from branchpoint.env import alfworld, backoffice, faults, webshop
from branchpoint.env.backoffice.calls import TOOLS, call
from branchpoint.env.faults import Event, Faults, Faulty, FaultyState, json_calls, wrap
from branchpoint.noise import Noise
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, Step, Task

TOOLBOX = {"read": ("item",), "write": ("item",)}
RULE = json_calls(TOOLBOX, ("read",))


class Shelf:
    """Items with a number; ``write`` adds one to it, ``read`` says it, ``end`` ends with the sum of all as success."""

    def __init__(self, *, target: int = 1) -> None:
        self.items, self.calls, self.target = dict.fromkeys("abcdef", 0), 0, target

    def reset(self) -> Step:
        return Step("the shelf", actions=("x", "y"))

    def step(self, action: str) -> Step:
        self.calls += 1
        if action == "end":
            won = sum(self.items.values()) == self.target
            return Step("over", 2.0 * won, done=True, info={"success": won})
        if (event := RULE(action)) is None:
            return Step("what?", actions=("y", "z"))
        item = event.resources[0]
        self.items[item] += event.tool == "write"
        return Step(f"item {item}\nhas {self.items[item]}", actions=("x", "y"), info={"calls": self.calls})

    def close(self) -> None: ...


def use(tool: str, item: str, **more: Any) -> str:
    return json.dumps({"name": tool, "arguments": {"item": item, **more}})


def shelf(noise: Noise, rule: faults.Rule | None = RULE, **dials: Any) -> tuple[Faulty, Shelf]:
    inner = Shelf()
    world = wrap(inner, rule, Faults(**dials), noise)
    world.reset()
    return world, inner


def fates(noise: Noise, actions: Sequence[str], **dials: Any) -> list[str | None]:
    world, _ = shelf(noise, **dials)
    return [world.step(a).info.get("fate") for a in actions]


def luck_for(kind: str, action: str, **dials: Any) -> Noise:
    """A luck under which this action meets this fate, and its second try meets none."""
    event = RULE(action)
    assert event is not None
    chosen = Faults(**dials)
    for seed in range(20_000):
        first, then = (
            faults.draw(Noise(seed), chosen.p, chosen.shares(event.reads), "fault", *event.key, n) for n in (0, 1)
        )
        if first is not None and first[0] == kind and then is None:
            return Noise(seed)
    raise AssertionError(f"no luck gives {kind}")


# --- the law


@pytest.mark.parametrize("arm", ["paired", "independent"])
@pytest.mark.parametrize(("tool", "luck"), [("read", "training"), ("write", "training"), ("read", "no_outage")])
def test_every_branch_sees_the_declared_law(arm: Any, tool: str, luck: str) -> None:
    """Rate and mixture of the first call, over branches whose own luck is fresh; the marginals of both arms agree."""
    expected, n = Faults(luck=luck).shares(tool == "read"), 2000
    seen: Counter[str | None] = Counter()
    for seed in range(n):
        noise = Noise(seed).branch(arm, 1)
        seen[fates(noise, [use(tool, "a")], p=0.25, luck=luck)[0]] += 1
    hit = n - seen[None]
    assert abs(hit - 0.25 * n) < 4 * np.sqrt(n * 0.25 * 0.75)
    assert set(seen) - {None} == set(expected)
    assert chisquare([seen[k] for k in expected], [hit * s for s in expected.values()]).pvalue > 1e-3


def test_siblings_share_fates_when_paired_and_only_then() -> None:
    actions = [use(t, i) for i in "abcdef" for t in ("read", "write")]
    base, agree = Noise(3), Counter()
    for n in range(60):
        parent = base.child(n)
        for arm in ("paired", "independent"):
            one, two = (
                fates(parent.branch(arm, k), actions, p=0.5, luck={"transient": 1, "timeout": 1}) for k in (0, 1)
            )
            agree[arm] += sum(a == b for a, b in zip(one, two, strict=True))
    total = 60 * len(actions)
    assert agree["paired"] == total
    chance = 0.5**2 + 2 * 0.25**2  # both nothing, or both the same of two kinds
    assert abs(agree["independent"] - chance * total) < 4 * np.sqrt(total * chance * (1 - chance))


def test_the_clean_arm_and_rate_zero_have_no_faults() -> None:
    actions = [use("read", i) for i in "abcdef"] * 4
    assert set(fates(Noise(1, clean=True), actions, p=1.0)) == {None}
    assert set(fates(Noise(1), actions, p=0.0)) == {None}
    assert None not in fates(Noise(1), actions, p=1.0)


# --- what a fate depends on


@pytest.mark.parametrize("seed", range(20))
def test_rewording_does_not_change_fate(seed: int) -> None:
    """Free text, the order of the arguments, blanks and tags are no part of the event."""
    plain = [use(t, i) for i in "abc" for t in ("write", "read")]
    worded = [
        f'<tool_call>\n {{"arguments": {{"reason": "{"so " * n}", "item": "{i}"}}, "name": "{t}"}}  </tool_call>'
        for n, (i, t) in enumerate((i, t) for i in "abc" for t in ("write", "read"))
    ]
    dials = {"p": 0.5, "luck": {"transient": 1.0, "timeout": 1.0, "outage": 1.0}}
    assert fates(Noise(seed), plain, **dials) == fates(Noise(seed), worded, **dials)


@pytest.mark.parametrize("seed", range(20))
def test_order_and_chatter_do_not_change_fate(seed: int) -> None:
    dials = {"p": 0.5, "luck": {"transient": 1.0, "timeout": 1.0}}
    actions = [use(t, i) for i in "abcdef" for t in ("read", "write")]
    once = dict(zip(actions, fates(Noise(seed), actions, **dials), strict=True))
    back = dict(zip(actions[::-1], fates(Noise(seed), actions[::-1], **dials), strict=True))
    assert once == back
    talk = [x for a in actions for x in ("hello", a, "{broken", use("erase", "a"))]
    among = fates(Noise(seed), talk, **dials)
    assert among[1::4] == list(once.values())
    assert set(among[0::4] + among[2::4] + among[3::4]) == {None}


def test_a_second_try_draws_anew() -> None:
    both = [fates(Noise(s), [use("write", "a")] * 2, p=0.5, luck={"transient": 1.0}) for s in range(400)]
    counts = Counter((a is None, b is None) for a, b in both)
    assert chisquare([counts[a, b] for a in (True, False) for b in (True, False)]).pvalue > 1e-3


def test_what_the_json_rule_takes_for_a_call() -> None:
    assert RULE(use("read", "a", text="hello")) == Event("read", ("a",), reads=True)
    assert RULE('{"name": "write", "arguments": {"item": 7}}') == Event("write", ("7",))
    assert RULE('{"name": "write", "arguments": {"item": ["free text"]}}') == Event("write", ("",))
    odd = ("", "read", "[]", '{"name": "rm"}', '{"name": ["read"]}', "[" * 5000, '{"name": "read", "arguments": 3}')
    for text in (*odd, "é\x00", use("read", "a") * 2, "9" * 10_000):
        assert RULE(text) is None, text[:20]


# --- what each kind does


def test_a_transient_failure_is_not_carried_out_and_can_be_tried_again() -> None:
    action = use("write", "a")
    world, inner = shelf(luck_for("transient", action, p=0.3, luck={"transient": 1.0}), p=0.3, luck={"transient": 1.0})
    step = world.step(action)
    assert step.observation.startswith("TRANSIENT_FAILURE")
    assert (step.actions, step.reward, inner.items["a"], inner.calls) == (("x", "y"), 0.0, 0, 0)
    assert world.step(action).observation == "item a\nhas 1"


def test_a_time_out_is_carried_out_unseen() -> None:
    action, dials = use("write", "a"), {"p": 0.3, "luck": "held_out"}
    world, inner = shelf(luck_for("timeout", action, **dials), **dials)
    step = world.step(action)
    assert step.observation.startswith("TIMEOUT")
    assert (inner.items["a"], step.info["calls"], step.info["fate"]) == (1, 1, "timeout")


def test_an_outage_lasts_and_is_of_one_event() -> None:
    action, dials = use("write", "a"), {"p": 0.3, "luck": {"outage": 1.0}}
    world, inner = shelf(luck_for("outage", action, **dials), **dials)
    assert [world.step(action).info["fate"] for _ in range(5)] == ["outage"] * 5
    assert inner.calls == 0
    world.reseed(Noise(0, clean=True))
    assert world.step(action).info["fate"] == "outage"
    assert world.step(use("write", "b")).info["fate"] is None


def test_a_rate_limit_holds_its_tool_for_the_time_it_names() -> None:
    action, dials = use("write", "a"), {"p": 0.3, "luck": {"rate_limit": 1.0}, "errors": "json"}
    lengths = set()
    for seed in range(40):
        world, inner = shelf(Noise(seed), **dials)
        if world.step(action).info["fate"] is None:
            continue
        world.reset()
        after = json.loads(world.step(action).observation)["retry_after"]
        lengths.add(after)
        world.reseed(Noise(0, clean=True))
        assert world.step(use("read", "a")).info["fate"] is None, "another tool is free"
        told = [json.loads(world.step(use("write", "b")).observation)["retry_after"] for _ in range(after - 1)]
        assert told == list(range(after - 1, 0, -1))
        calls = inner.calls
        assert world.step(action).info["fate"] is None
        assert inner.calls == calls + 1
    assert lengths == set(faults.RETRY_AFTER)


def test_a_stale_read_gives_the_last_answer() -> None:
    read, write = use("read", "a"), use("write", "a")
    dials = {"p": 0.3, "luck": {"stale": 1.0}}
    for seed in range(300):
        if fates(Noise(seed), [read, write, read, read], **dials) == [None, None, "stale", None]:
            break
    world, _ = shelf(Noise(seed), **dials)
    assert [world.step(a).observation for a in (read, write, read, read)] == [
        "item a\nhas 0", "item a\nhas 1", "item a\nhas 0", "item a\nhas 1",
    ]  # fmt: skip
    assert Faults(**dials).shares(reads=False) == {}


def test_a_partial_answer_is_half_and_says_so() -> None:
    world, _ = shelf(Noise(0), p=1.0, luck={"partial": 1.0})
    assert world.step(use("read", "a")).observation == "item a\n[answer cut]"
    assert world.step(use("write", "a")).observation == "item a\nhas 1"


def test_listed_actions_are_their_own_events() -> None:
    world, inner = shelf(Noise(0), None, p=1.0, luck={"transient": 1.0})
    assert world.step("x").info["fate"] == "transient"
    assert world.step("z").info["fate"] is None, "not listed in this state"
    assert world.step("z").info["fate"] == "transient", "listed now"
    assert world.step("please x").info["fate"] is None
    assert inner.calls == 2


# --- the grader


@pytest.mark.parametrize(("won", "q", "q_up", "reward"), [(True, 1.0, 0.0, 0.0), (False, 0.0, 1.0, 1.0),
                                                         (True, 0.0, 1.0, 2.0), (False, 1.0, 0.0, 0.0)])  # fmt: skip
def test_the_grader_errs_and_the_truth_stays(won: bool, q: float, q_up: float, reward: float) -> None:
    world, _ = shelf(Noise(1), p=0.0, q=q, q_up=q_up)
    if won:
        world.step(use("write", "a"))
    last = world.step("end")
    assert last.reward == reward
    assert last.info["success"] is won
    assert last.info["observed"] is (won != ((q if won else q_up) == 1.0))


def test_flips_are_one_draw_an_episode_at_their_rate() -> None:
    def flipped(noise: Noise, chatter: int) -> bool:
        world, _ = shelf(noise, p=0.0, q=0.1)
        for _ in range(chatter):
            world.step("hello")
        world.step(use("write", "a"))
        return world.step("end").reward == 0

    n = 1500
    assert abs(sum(flipped(Noise(s), 0) for s in range(n)) - 0.1 * n) < 4 * np.sqrt(n * 0.09)
    assert [flipped(Noise(s), 0) for s in range(100)] == [flipped(Noise(s), 3) for s in range(100)]


# --- as an environment


def test_backoffice_declares_a_rule_that_knows_tools_and_resources_only() -> None:
    rule = backoffice.event_of
    a, b = (call("issue_refund", order="O0042", amount=n, reason=r) for n, r in ((5, "damaged"), (9, "lost")))
    assert rule(a.json()) == rule(b.compact()) == Event("issue_refund", ("O0042",))
    assert rule(call("get_order", order="O0042").json()) == Event("get_order", ("O0042",), reads=True)
    search = {rule(call("search_customers", query=q).json()) for q in ("Ann", "ann@example.org")}
    assert search == {Event("search_customers", (), reads=True)}
    assert [rule(t) for t in ("finish summary=x", "wait seconds=5", "nonsense", "get_order order=7")] == [None] * 4
    assert {t for t, tool in TOOLS.items() if tool.kind == "control"} == {"wait", "finish"}


def test_by_name_with_a_patient_expert() -> None:
    """Clean luck: the inner expert's result. Failures that pass: it wins, in more turns. The metadata survives JSON."""
    dials: dict[str, Any] = {"env": "backoffice", "luck": {"transient": 3, "rate_limit": 1}, "errors": "json"}
    won: dict[float, list[bool]] = {}
    length: dict[float, int] = {}
    for p in (0.0, 0.3):
        played = [
            envs.play(envs.make(t.root)(_json(t)), envs.expert(_json(t)))
            for t in envs.tasks("faults", "validation", 20, p=p, **dials)
        ]
        won[p], length[p] = [last.info["success"] for _, last in played], sum(len(turns) for turns, _ in played)
    assert won[0.0] == [True] * 20
    assert sum(won[0.3]) >= 19
    assert length[0.3] > 1.2 * length[0.0]


@pytest.mark.parametrize("luck", ["training", "held_out"])
def test_the_patient_expert_survives_every_fault(luck: str) -> None:
    """Also where the inner expert cannot read what it is told; without a fault its errors stay its own."""
    tasks = envs.tasks("faults", "train", 12, p=0.5, luck=luck, dials=dict(backoffice.DEMO))
    ends = [envs.play(faults.make(t), faults.expert(t), 20)[1] for t in tasks]
    assert sum(bool(e.info.get("success")) for e in ends) > 2

    class Broken:
        def act(self, step: Step) -> str:
            raise ValueError("cannot read")

    with pytest.raises(ValueError, match="cannot read"):
        faults.Patient(Broken()).act(Step("hello"))


def _json(task: Task) -> Task:
    return Task(task.id, task.root, task.prompt, task.seed, json.loads(json.dumps(task.metadata)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=200) | st.sampled_from([use(t, i) for t in TOOLBOX for i in "ab"]), max_size=20))
def test_no_text_breaks_it_and_equal_texts_give_equal_episodes(texts: list[str]) -> None:
    def seen() -> list[Any]:
        world, _ = shelf(Noise(5), p=0.5, q=0.5, q_up=0.5)
        return [(s.observation, s.reward, s.info) for s in map(world.step, texts)]

    assert seen() == seen()


@pytest.mark.parametrize("dials", [{"luck": "training"}, {"luck": "held_out", "dials": {"style": "compact"}}])
def test_it_keeps_the_contract(dials: dict[str, Any]) -> None:
    task = faults.tasks("train", 1, p=0.6, **dials)[0]
    asked = [call("list_orders", customer=f"C000{n % 3}").json() for n in range(20)]
    check_env(faults.make, task, actions=asked).assert_ok()
    assert isinstance(faults.make(task), FaultyState)


def test_a_snapshot_keeps_what_has_befallen() -> None:
    """In the inner world's own state, and as a copy where it has none: an outage goes on in every branch."""
    action, dials = use("write", "a"), {"p": 0.3, "luck": {"outage": 1.0}}

    def build(task: Task) -> Faulty:
        return wrap(Shelf(), RULE, Faults(**dials), Noise(0))

    async def run() -> list[str]:
        env = InProcess().open(build, Task("t", "x"), luck_for("outage", action, **dials))
        env.reset()
        env.step(action)
        frozen = env.snapshot()
        return [frozen.restore(Noise(n, clean=True)).step(action).info["fate"] for n in range(3)]

    assert asyncio.run(run()) == ["outage"] * 3


@pytest.mark.parametrize(
    ("dials", "word"),
    [
        ({"p": 1.5}, "p is a probability"),
        ({"q": "x"}, "q is a probability"),
        ({"luck": "bad"}, "training"),
        ({"luck": {"flood": 1}}, "flood"),
        ({"luck": {"outage": 0}}, "positive"),
        ({"luck": {}}, "positive"),
        ({"rate": 0.1}, "no dial 'rate'"),
        ({"keys": "json"}, "needs tools"),
        ({"keys": "words"}, "module:function"),
        ({"keys": "json", "tools": {"a": []}, "reads": ["b"]}, "'b'"),
        ({"env": "gym"}, "event_of"),
        ({"errors": "xml"}, "errors"),
        ({"env": "nowhere"}, "no environment"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(dials: dict[str, Any], word: str) -> None:
    if dials.get("env") == "gym":
        pytest.importorskip("gymnasium", reason='pip install "branchpoint[gym]"')
    with pytest.raises(ValueError, match=word) as error:
        envs.tasks("faults", "train", 1, **dials)
    assert "\n" not in str(error.value)


def test_a_task_from_elsewhere_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match=r"faults\.tasks"):
        faults.make(Task("t", "faults"))


def test_a_search_is_one_event_and_a_click_is_one_of_what_is_clicked() -> None:
    rule = webshop.event_of
    assert rule("search[red shoes]") == rule("search[<r>]") == Event("search")
    assert rule("click[B07XYZ]") == rule("click[b07xyz]") == Event("click", ("b07xyz",))
    assert rule("click[buy now]") != rule("click[b07xyz]")
    for nothing in ("", "search", "think[red]", "[search]", "buy now"):
        assert rule(nothing) is None


@pytest.mark.parametrize(
    ("full", "compact", "event"),
    [
        ("go to desk 1", "go to * desk_1", Event("go", ("desk_1",))),
        ("take mug 2 from desk 1", "take * mug_2 from * desk_1", Event("take", ("mug_2", "desk_1"))),
        ("move mug 2 to shelf 3", "move mug_2 to shelf_3", Event("move", ("mug_2", "shelf_3"))),
        ("heat egg 1 with microwave 1", "heat egg_1 with microwave_1", Event("heat", ("egg_1", "microwave_1"))),
        ("look", "look", Event("look", reads=True)),
        ("examine mug 2", "examine mug_2", Event("examine", ("mug_2",), reads=True)),
    ],
)
def test_the_event_of_a_household_command_is_its_verb_and_things(full: str, compact: str, event: Event) -> None:
    assert alfworld.event_of(full) == alfworld.event_of(compact) == event


def test_what_is_no_household_command_has_no_event() -> None:
    assert not any(map(alfworld.event_of, ("", "take mug", "go to desk 1 now", "please look", "take mug 1 from desk")))


@pytest.mark.parametrize(("env", "dials"), [("webshop", {}), ("alfworld", {"style": "compact"})])
def test_every_listed_action_of_shop_and_house_has_an_event(env: str, dials: dict[str, Any]) -> None:
    pytest.importorskip({"webshop": "bm25s", "alfworld": "alfworld"}[env])
    inner = envs.tasks(env, "test" if env == "webshop" else "valid_seen", 1, **dials)[0]
    world, luck = envs.make(env)(inner), random.Random(0)
    step = world.reset()
    for _ in range(12):
        assert all(envs.event_of(env)(action) for action in step.actions), step.actions
        if step.done or step.truncated:
            break
        step = world.step(luck.choice(step.actions))
    world.close()
