"""tau-bench: all published solutions win, tools keep their rules, snapshots are cheap and independent."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import lzma
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grammar_kit import ODD, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from branchpoint import env as envs
from branchpoint.env import tau
from branchpoint.env.tau import domains
from branchpoint.env.tau.calls import Call, Malformed, Reply, parse
from branchpoint.env.tau.database import Database, equal, fingerprint
from branchpoint.env.tau.grade import grade, wanted
from branchpoint.env.tau.user import Brief, scripted
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.sandbox.replay import Replay
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, Message, Task, settle

SPLITS = [("retail", "train", 500), ("retail", "dev", 20), ("retail", "test", 115), ("airline", "test", 50)]
RETAIL, AIRLINE = domains.load("retail"), domains.load("airline")


def call(name: str, **args: Any) -> str:
    return json.dumps({"name": name, "arguments": args})


def task(domain: str, split: str, index: int, **dials: Any) -> Task:
    return tau.tasks(split, domain=domain, **dials)[index]


@pytest.mark.parametrize(("domain", "split", "size"), SPLITS)
def test_the_expert_wins_every_task_with_actions_of_the_grammar(domain: str, split: str, size: int) -> None:
    tasks = tau.tasks(split, domain=domain)
    assert len(tasks) == len({t.id for t in tasks}) == size
    grammar = re.compile(domains.load(domain).grammar)
    for each in tasks:
        turns, last = envs.play(tau.make(each), tau.expert(each))
        assert (last.reward, last.done, last.info["success"]) == (1.0, True, True), each.id
        for step, action in turns:
            assert grammar.fullmatch(action), action
            assert step.grammar == grammar.pattern


def test_tools_answer_and_change_records_as_the_published_ones_do() -> None:
    """Recorded with the original code: every answer, and which records have changed at the end of a sequence."""

    def digest(text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    packed = (Path(__file__).parent / "data" / "tau_calls.jsonl.xz").read_bytes()
    rows = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    assert sum(len(calls) for _, calls, _ in rows) > 3000
    for name, calls, end in rows:
        domain, changes = domains.load(name), {}
        for tool, args, expected in calls:
            changes, text = domain.run(changes, tool, args)
            assert expected == (text if expected.startswith("Error") else digest(text)), (tool, args, text)
        changed = [
            (table, key, fingerprint(record))
            for table in sorted(changes)
            for key, record in sorted(changes[table].items())
            if fingerprint(record) != fingerprint(domain.tables[table].get(key))
        ]
        assert end == digest(repr(changed))


def test_how_many_solutions_change_the_database() -> None:
    """Counted once with the published tools on the published data: 1 to 60 of retail test 54, airline 30 of 50."""
    retail = [wanted(RETAIL, p) for p in domains.problems("retail", "test")[:60]]
    airline = [wanted(AIRLINE, p) for p in domains.problems("airline", "test")]
    assert sum(not equal(RETAIL.tables, changes, {}) for changes in retail) == 54
    assert sum(not equal(AIRLINE.tables, changes, {}) for changes in airline) == 30


def test_the_grade_equals_a_comparison_of_whole_databases() -> None:
    """Brute force: apply the changes to a copy of everything, and compare all of it."""

    def whole(changes: Any) -> str:
        names = RETAIL.tables
        return fingerprint({t: {**RETAIL.tables[t], **changes.get(t, {})} for t in names})

    problems = domains.problems("retail", "test")[:3]
    ends = [wanted(RETAIL, p) for p in problems]
    ends.append(
        RETAIL.run({}, "modify_user_address", {**same_address("mei_kovacs_8020"), "user_id": "mei_kovacs_8020"})[0]
    )
    ends.append({})
    texts = [whole(end) for end in ends]
    assert texts[-1] == texts[-2]  # an address set to what it was
    for a, left in enumerate(ends):
        for b, right in enumerate(ends):
            assert equal(RETAIL.tables, left, right) == (texts[a] == texts[b])


def same_address(user_id: str) -> dict[str, Any]:
    return RETAIL.tables["users"][user_id]["address"]


def test_a_wrong_write_a_missing_write_and_an_unsaid_output_lose() -> None:
    problem = next(p for p in domains.problems("retail", "test") if p.outputs == ("10",))
    end = wanted(RETAIL, problem)
    assert grade(RETAIL, problem, end, ["There are 1,0 of them"]).success  # commas are taken out
    assert not grade(RETAIL, problem, end, ["There are some"]).success
    other = RETAIL.run(
        end,
        "modify_user_address",
        dict.fromkeys(RETAIL.tools["modify_user_address"].args, "x") | {"user_id": problem.user_id},
    )[0]
    assert not grade(RETAIL, problem, other, ["10"]).database
    world = tau.make(task("retail", "test", 0, reveal="opening"))
    world.reset()
    end = world.step("Goodbye.")
    assert (end.done, end.reward, end.info["database"]) == (True, 0.0, False)


def test_amounts_of_another_type_are_another_database() -> None:
    assert fingerprint({"b": 5, "a": [1]}) == fingerprint({"a": [1], "b": 5})
    assert len({fingerprint(v) for v in (5, 5.0, True, "5", [5])}) == 5
    assert fingerprint([1, 2]) != fingerprint([2, 1])


def test_cancelling_pays_back_to_the_gift_card_at_once() -> None:
    order = next(
        o
        for o in RETAIL.tables["orders"].values()
        if o["status"] == "pending" and [p["payment_method_id"][:4] for p in o["payment_history"]] == ["gift"]
    )
    card = order["payment_history"][0]["payment_method_id"]
    before = RETAIL.tables["users"][order["user_id"]]["payment_methods"][card]["balance"]
    changes, text = RETAIL.run(
        {}, "cancel_pending_order", {"order_id": order["order_id"], "reason": "no longer needed"}
    )
    after = changes["users"][order["user_id"]]["payment_methods"][card]["balance"]
    assert after == round(before + order["payment_history"][0]["amount"], 2)
    assert json.loads(text)["status"] == "cancelled"
    assert RETAIL.tables["orders"][order["order_id"]]["status"] == "pending"
    again, refused = RETAIL.run(
        changes, "cancel_pending_order", {"order_id": order["order_id"], "reason": "no longer needed"}
    )
    assert refused == "Error: non-pending order cannot be cancelled"
    assert again is changes


def test_booking_charges_seats_bags_and_insurance() -> None:
    """HAT136 on May 20: the published solution of airline task 0 pays 250 + 5 for two flights in economy."""
    booking = dict(domains.problems("airline", "test")[0].actions[0][1])
    fare = sum(
        AIRLINE.tables["flights"][f["flight_number"]]["dates"][f["date"]]["prices"]["economy"]
        for f in booking["flights"]
    )
    assert fare == 255
    changes, _ = AIRLINE.run({}, "book_reservation", booking)
    assert "certificate_7504069" not in changes["users"]["mia_li_3668"]["payment_methods"]
    assert changes["reservations"]["HATHAT"]["payment_history"][1]["amount"] == 5
    dearer = booking | {"insurance": "yes", "nonfree_baggages": 2}
    nothing, text = AIRLINE.run({}, "book_reservation", dearer)
    assert text == "Error: payment amount does not add up, total price is 385, but paid 255"
    assert nothing == {}
    twice = booking | {"payment_methods": [{"payment_id": "certificate_7504069", "amount": a} for a in (250, 5)]}
    assert AIRLINE.run({}, "book_reservation", twice)[0] == {}


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 2", "4.0"), ("(4.5-1)/3", "1.17"), ("-3 + 1", "-2.0"), ("7//2", "3.0"), ("2**10", "1024.0")],
)
def test_calculate(expression: str, value: str) -> None:
    assert RETAIL.run({}, "calculate", {"expression": expression})[1] == value


@pytest.mark.parametrize("expression", ["1/0", "a", "9**9**9**9", "(" * 150, "1 2", "", "2(3)", "1e400*1", "(-8)**.5"])
def test_calculate_refuses_what_it_cannot(expression: str) -> None:
    assert RETAIL.run({}, "calculate", {"expression": expression})[1].startswith("Error: ")


def test_a_failed_edit_leaves_no_trace() -> None:
    db = Database({"t": {"a": {"n": 1}}})
    db.edit("t", "a")["n"] = 2
    assert db.find("t", "a") == {"n": 2}
    assert db.changes == {"t": {"a": {"n": 2}}}
    below = db.changes
    again = Database({"t": {"a": {"n": 1}}}, below)
    again.edit("t", "a")["n"] = 3
    assert (below["t"]["a"], again.changes["t"]["a"]) == ({"n": 2}, {"n": 3})


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("", "empty"),
        ('{"name": "get_order_details"', "not one valid JSON object"),
        ('{"name": "nope", "arguments": {}}', "no tool 'nope'"),
        (call("get_order_details"), "get_order_details: order_id is missing"),
        (call("get_order_details", order_id=3), "get_order_details: order_id must be a string"),
        (call("get_order_details", order_id="#W1", x=1), "get_order_details takes no 'x'"),
        ('{"name": "think", "arguments": []}', "arguments must be an object"),
        ('{"name": "think", "arguments": {"thought": "a", "thought": "b"}}', "not one valid JSON object"),
        (call("return_delivered_order_items", order_id="", item_ids=[1], payment_method_id=""), "item_ids[0] must be"),
        (call("think", thought="\ud800"), "not valid Unicode"),
        ('{"name": "think", "arguments": ' + "[" * 3000, "too many brackets"),
        ("x" * 4001, "longer than 4000 characters"),
        (call("respond", text="hi"), "respond takes exactly content"),
        ("<tool_call>{}</tool_call><tool_call>{}</tool_call>", "exactly one complete"),
    ],
)
def test_bad_calls_are_answered_in_a_line(action: str, problem: str) -> None:
    said = parse(action, RETAIL.tools)
    assert isinstance(said, Malformed)
    assert problem in said.problem
    world = tau.make(task("retail", "test", 0))
    world.reset()
    step = world.step(action)
    assert step.observation == f"API output: Error: {said.problem}"
    assert step.info["malformed"] == said.problem


def test_numbers_are_checked() -> None:
    args = {"reservation_id": "NO6JO3", "nonfree_baggages": 0, "payment_id": "x"}
    for bad in (True, 1.5, "1", None, 10**400):
        assert isinstance(
            parse(call("update_reservation_baggages", total_baggages=bad, **args), AIRLINE.tools), Malformed
        )
    for bad in ("NaN", "Infinity", "1e999"):
        text = f'{{"name": "send_certificate", "arguments": {{"user_id": "mia_li_3668", "amount": {bad}}}}}'
        assert isinstance(parse(text, AIRLINE.tools), Malformed)


def test_the_forms_of_a_call_and_a_reply() -> None:
    plain = parse(call("think", thought="x"), RETAIL.tools)
    assert isinstance(plain, Call)
    assert parse(f"<tool_call>\n{plain.text()}\n</tool_call>", RETAIL.tools) == plain
    assert parse('{"name": "think", "arguments": "{\\"thought\\": \\"x\\"}"}', RETAIL.tools) == plain
    assert parse(" Hello ", RETAIL.tools) == Reply("Hello") == parse(call("respond", content="Hello"), RETAIL.tools)


@pytest.mark.parametrize("domain", [RETAIL, AIRLINE], ids=["retail", "airline"])
def test_what_the_grammar_matches_is_well_formed(domain: domains.Domain) -> None:
    rng, tools = random.Random(0), set()
    for _ in range(200):
        said = parse(sample(domain.grammar, rng), domain.tools)
        assert not isinstance(said, Malformed)
        if isinstance(said, Call):
            tools.add(said.tool.name)
            assert parse(said.text(), domain.tools) == said
    assert tools == set(domain.tools)


@pytest.mark.parametrize(("domain", "split", "index"), [("retail", "test", 33), ("airline", "test", 9)])
def test_a_world_goes_on_from_every_state_alike(domain: str, split: str, index: int) -> None:
    one = task(domain, split, index)
    agent, world = tau.expert(one), tau.make(one)
    step, states, actions, seen = world.reset(), [], [], []
    while not step.done:
        states.append(world.get_state())
        actions.append(agent.act(step))
        step = world.step(actions[-1])
        seen.append((step.observation, step.reward))
    for n, state in enumerate(states):
        other = tau.make(one)
        other.set_state(state)
        assert [(s.observation, s.reward) for s in map(other.step, actions[n:])] == seen[n:]


def test_copies_share_the_tables_and_nothing_else() -> None:
    world = tau.make(task("airline", "test", 0))
    world.reset()
    for twin in (copy.deepcopy(world), pickle.loads(pickle.dumps(world))):
        assert twin._domain is world._domain
        twin.step(call("send_certificate", user_id="mia_li_3668", amount=10))
        assert (
            twin.get_state().changes["users"]["mia_li_3668"]["payment_methods"]["certificate_3221322"]["amount"] == 10
        )
    assert world.get_state().changes == {}


def test_the_checker_passes() -> None:
    for one in (task("retail", "test", 1), task("airline", "test", 20, reveal="opening")):
        agent, world = tau.expert(one), tau.make(one)
        check_env("branchpoint.env.tau:make", one, actions=[a for _, a in envs.play(world, agent)[0]]).assert_ok()


WORLDS = ("branchpoint.env.tau.warm",)


@pytest.mark.parametrize("make", [InProcess, lambda: InProcess("pickle"), Replay, lambda: ForkServer(preload=WORLDS)])
def test_siblings_of_a_snapshot_are_independent(make: Callable[[], Any]) -> None:
    """One sibling plays on as the expert, one cancels nothing and says goodbye: only the first wins."""
    one = task("retail", "test", 1)
    agent, world = tau.expert(one), tau.make(one)
    script = [action for _, action in envs.play(world, agent)[0]]

    async def rewards() -> list[float]:
        box = make()
        try:
            env = await settle(box.open("branchpoint.env.tau:make", one, Noise(1, 1)))
            await settle(env.reset())
            for action in script[:3]:
                await settle(env.step(action))
            frozen = await settle(env.snapshot())
            last = []
            for rest in (["Goodbye."], script[3:], ["Goodbye."]):
                sibling = await settle(frozen.restore(Noise(1, 1)))
                steps = [await settle(sibling.step(action)) for action in rest]
                last.append(steps[-1].reward)
                assert steps[-1].done
                await settle(sibling.close())
            return last
        finally:
            await settle(box.close())

    assert asyncio.run(asyncio.wait_for(rewards(), 60)) == [0.0, 1.0, 0.0]


def test_the_user_tells_when_asked_confirms_and_ends() -> None:
    text = "You are Ann Lee in 12345. You want to return a lamp. Your order is #W1. Ask the agent to tell you when."
    brief = Brief("retail", "ann_lee_1", text)

    def talk(*replies: str) -> str:
        return scripted(brief, [Message("assistant", reply) for reply in replies], Noise())

    assert talk() == "Hi! I want to return a lamp."
    assert talk("What is your name?") == "I am Ann Lee in 12345."
    assert talk("Which order is it?") == "My order is #W1."
    assert talk("Shall I proceed?") == "Yes, please go ahead. I am Ann Lee in 12345."
    everything = "Please tell me everything?"
    assert talk(everything) == "I am Ann Lee in 12345. My order is #W1. Ask the agent to tell me when."
    assert talk(everything, "Do you confirm?") == "Yes, please go ahead."
    assert talk(everything, "Let me look.") == "All right."
    assert talk(everything, "It is done.") == tau.STOP
    assert talk(everything, "Anything else?") == tau.STOP
    assert talk("Hello.") == "I am Ann Lee in 12345."
    assert talk(everything, *["Why?"] * 5) == tau.STOP
    opens = scripted(Brief("retail", "ann_lee_1", text, "opening"), [], Noise())
    assert opens.startswith("Hi! I am Ann Lee in 12345. I want")


class Sampling:
    """A user that draws its words from its luck."""

    def __call__(self, brief: Brief, said: Any, noise: Noise) -> str:
        return str(int(noise.at("word").integers(10**9)))


sampling = Sampling()


def test_a_user_of_ones_own_is_called_with_keyed_luck() -> None:
    world = tau.make(task("retail", "test", 0, user="test_tau:sampling"))
    world.reseed(Noise(1, 1))
    first = [world.reset().observation, world.step("Hello").observation]
    assert first == [world.reset().observation, world.step("Something else").observation]
    assert first[0] != first[1]
    world.reseed(Noise(2, 2))
    assert world.reset().observation != first[0]


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"index": 50}, "index is 50; airline test has 0 to 49"),
        ({"domain": "hotel"}, "no split 'test' of 'hotel'"),
        ({"split": "train"}, "no split 'train' of 'airline'"),
        ({"reveal": "never"}, "use 'asked' or 'opening'"),
        ({"max_steps": 0}, "use a positive integer"),
        ({"user": "nowhere:user"}, "use 'scripted' or 'module:attribute'"),
    ],
)
def test_bad_dials_are_named(dials: dict[str, Any], message: str) -> None:
    metadata = {"domain": "airline", "split": "test", "index": 0, **dials}
    with pytest.raises(EnvironmentFailure, match=re.escape(message)):
        tau.make(Task("t", "tau", metadata=metadata))


def test_bad_arguments_of_tasks_are_named() -> None:
    for bad, message in (
        ({"split": "train", "domain": "airline"}, "no split"),
        ({"split": "test", "n": 116}, "n must be 0 to 115"),
        ({"split": "test", "user_model": "x"}, "no dial 'user_model'"),
    ):
        with pytest.raises(ValueError, match=message):
            tau.tasks(**bad)  # type: ignore[arg-type]
    assert tau.tasks("test", n=5, seed=1) != tau.tasks("test", n=5, seed=2)
    with pytest.raises(EnvironmentFailure, match="metadata; make tasks with"):
        tau.make(Task("t", "tau"))


def test_too_many_steps_cut_the_episode() -> None:
    world = tau.make(task("retail", "test", 0, max_steps=2))
    world.reset()
    assert not world.step(call("think", thought="x")).truncated
    assert world.get_state().calls == 1
    last = world.step("")
    assert (last.truncated, last.reward, last.info["success"]) == (True, 0.0, False)
    assert world.step("more").done


def test_the_event_of_a_call_is_its_tool_and_what_it_touches() -> None:
    lookup = tau.event_of(call("get_order_details", order_id="#W1"))
    assert lookup is not None
    assert (lookup.key, lookup.reads) == (("get_order_details", "#W1"), True)
    refund = {"item_ids": ["1"], "payment_method_id": "x"}
    one = tau.event_of(call("return_delivered_order_items", order_id="#W1", **refund))
    two = tau.event_of(call("return_delivered_order_items", order_id="#W1", **{**refund, "item_ids": ["2"]}))
    assert one == two != lookup
    assert one is not None
    assert not one.reads
    for nothing in ("Hello", call("think", thought="x"), call("calculate", expression="1"), '{"name"'):
        assert tau.event_of(nothing) is None


@settings(max_examples=112, deadline=None, derandomize=True)
@given(st.sampled_from([(RETAIL, 0), (RETAIL, 9), (RETAIL, 33), (AIRLINE, 0), (AIRLINE, 9)]), st.randoms(), st.text())
def test_no_action_breaks_a_world(where: tuple[domains.Domain, int], rng: random.Random, text: str) -> None:
    """1,008 actions: calls with values of any type and with real ones, broken calls, any text."""
    domain, index = where
    world = tau.make(task(domain.name, "test", index))
    step = world.reset()
    real = {k: v for _, args in domains.problems(domain.name, "test")[index].actions for k, v in args.items()}
    for _ in range(9):
        tool = rng.choice(list(domain.tools.values()))
        drawn = {k: real[k] if k in real and rng.random() < 0.8 else rng.choice(ODD) for k in tool.args}
        drawn |= {"x": 1} if rng.random() < 0.1 else {}
        whole = call(tool.name, **drawn)
        step = world.step(rng.choice([whole, whole, whole, whole, whole[: rng.randrange(len(whole))], text]))
        json.dumps(dict(step.info), allow_nan=False)
        step.observation.encode()
        if step.done or step.truncated:
            break
    assert step.reward in (0.0, 1.0)


def test_damaged_tables_are_named(tmp_path: Path) -> None:
    path = tmp_path / "orders.json.xz"
    for content, complaint in (
        (lzma.compress(b'{"#W1": {"order_id": "#W1"}}')[:40], "damaged"),
        (lzma.compress(b'{"#W1": {"status": "open"}}'), "record '#W1' without 'order_id'"),
        (lzma.compress(b'{"#W1": 1}'), "record '#W1' without 'order_id'"),
        (lzma.compress(b"[]"), "expected dict"),
    ):
        path.write_bytes(content)
        with pytest.raises(EnvironmentFailure, match=complaint):
            domains._records(path, "order_id")
    with pytest.raises(EnvironmentFailure, match="is missing"):
        domains._records(tmp_path / "none.json.xz", "order_id")
