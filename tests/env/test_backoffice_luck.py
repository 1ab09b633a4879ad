"""Luck: what a fate depends on, its law in both arms, and what each kind does."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from branchpoint.env import backoffice
from branchpoint.env.backoffice.calls import TOOLS, call
from branchpoint.env.backoffice.luck import MIXTURES, WEIGHTS, Fate, fate, flipped, weights
from branchpoint.env.backoffice.scenario import FREE_TEXT
from branchpoint.env.backoffice.world import BackOffice
from branchpoint.noise import Noise
from branchpoint.world import Step, Task

LISTS = [n for n, t in TOOLS.items() if t.listing]


def open_world(noise: Noise, **dials: object) -> BackOffice:
    world = backoffice.make(backoffice.tasks("validation", 1, **dials)[0])
    world.reset()
    world.reseed(noise)
    return world


def orders_of(world: BackOffice) -> list[str]:
    return sorted(world.get_state().desk.orders)


def code(step: Step) -> str | None:
    return json.loads(step.observation).get("error")


def find_noise(kind: str, key: tuple[str, ...], mixture: str = "training", repeat: int = 0) -> Noise:
    """A luck that befalls this event with this kind, and leaves its next attempt alone."""
    for seed in range(20_000):
        noise = Noise(seed)
        now, then = (fate(noise, 0.25, mixture, key, repeat + i) for i in (0, 1))  # type: ignore[arg-type]
        if now is not None and now.kind == kind and then is None:
            return noise
    raise AssertionError(f"no luck gives {kind} for {key}")


# --- the law


@pytest.mark.parametrize("tool", ["list_orders", "get_order", "cancel_order"])
@pytest.mark.parametrize("arm", ["paired", "independent"])
def test_marginals_are_the_mixture_in_both_arms(tool: str, arm: str) -> None:
    n, p = 17_000, 0.25
    base = Noise(11)
    counts: Counter[str | None] = Counter()
    for i in range(n):
        noise = base.branch(arm, i)  # type: ignore[arg-type]
        met = fate(noise, p, "training", (tool, f"O{i % 10000:04d}"), i // 10000)
        counts[None if met is None else met.kind] += 1
    law = {None: 1 - p, **{k: p * w for k, w in weights(tool, "training").items()}}
    assert set(counts) <= set(law)
    assert chisquare([counts[k] for k in law], [n * law[k] for k in law]).pvalue > 1e-4


def test_mixture_weights_are_renormalised_over_the_kinds_that_apply() -> None:
    assert weights("list_orders", "training") == pytest.approx({k: WEIGHTS[k] for k in MIXTURES["training"]})
    assert weights("get_order", "training") == pytest.approx(
        {"transient": 45 / 85, "rate_limit": 15 / 85, "outage": 10 / 85, "stale": 15 / 85}
    )
    assert weights("issue_refund", "training") == pytest.approx(
        {"transient": 45 / 70, "rate_limit": 15 / 70, "outage": 10 / 70}
    )
    assert weights("issue_refund", "no_outage") == pytest.approx({"transient": 0.75, "rate_limit": 0.25})
    assert weights("issue_refund", "held_out") == {"timeout": 1.0}
    assert weights("get_order", "held_out") == {"dropout": 1.0}
    assert weights("wait", "training") == weights("finish", "training") == {}


def test_grader_noise_has_its_rate_and_one_draw() -> None:
    flips = [flipped(Noise(s), 0.1) for s in range(5000)]
    assert abs(np.mean(flips) - 0.1) < 4 * np.sqrt(0.09 / 5000)
    assert not any(flipped(Noise(s), 0.0) or flipped(Noise(s, clean=True), 0.9) for s in range(50))


def test_evaluation_luck_is_a_function_of_task_and_index() -> None:
    tasks = backoffice.tasks("test", 20)
    seeds = {(t.id, i): backoffice.evaluation_noise(t, i) for t in tasks for i in range(5)}
    assert len({n.seed for n in seeds.values()}) == 100
    again = backoffice.tasks("test", 20)
    assert all(backoffice.evaluation_noise(t, i) == seeds[t.id, i] for t in again for i in range(5))


# --- metamorphic: what a fate does not depend on


def fates(world: BackOffice, actions: list[str]) -> list[str | None]:
    return [world.step(a).info.get("fate") for a in actions]


def test_free_text_and_amounts_do_not_change_a_fate() -> None:
    kinds: set[str | None] = set()
    for seed in range(40):
        told = []
        for reason, amount, offset in (("requested", 1, 0), ("entirely other words", 7, 5)):
            world = open_world(Noise(seed), p=0.6, luck="no_outage")
            order = orders_of(world)[0]
            customer = world.get_state().desk.orders[order].customer
            actions = [
                call("search_customers", query=reason).compact(),
                "wait seconds=60",
                call("list_orders", customer=customer, offset=offset).compact(),
                "wait seconds=60",
                call("issue_refund", order=order, amount=amount, reason=reason).compact(),
                "wait seconds=60",
                call("create_ticket", customer=customer, category="billing", priority="low", summary=reason).compact(),
            ]
            told.append(fates(world, actions))
        assert told[0] == told[1]
        kinds |= set(told[0])
    assert {"transient", "rate_limit", "truncation", None} <= kinds


@pytest.mark.parametrize("style", ["json", "compact"])
def test_rewording_the_request_changes_the_text_and_nothing_else(style: str) -> None:
    for task in backoffice.tasks("train", 30, p=0.25, style=style):
        seen, ends = set(), []
        for wording in range(3):
            reworded = Task(task.id, task.root, task.prompt, task.seed, {**task.metadata, "wording": wording})
            world, agent = backoffice.make(reworded), backoffice.expert(reworded)
            world.reseed(Noise(3))
            step = world.reset()
            seen.add(step.observation)
            actions, told = [], []
            while not (step.done or step.truncated):
                actions.append(agent.act(step))
                step = world.step(actions[-1])
                told.append((step.observation, step.info.get("fate")))
            ends.append((actions, told, world.get_state().desk))
        assert len(seen) == (3 if style == "json" else 1)
        assert ends[0] == ends[1] == ends[2]


def test_the_order_of_unrelated_calls_does_not_change_their_fates() -> None:
    met = Counter()
    for seed in range(60):
        one, two = (open_world(Noise(seed), p=0.5, luck="held_out") for _ in range(2))
        reads = [f"get_order order={o}" for o in orders_of(one)[:5]]
        forward = dict(zip(reads, fates(one, reads), strict=True))
        backward = dict(zip(reversed(reads), fates(two, reads[::-1]), strict=True))
        assert forward == backward
        met.update(forward.values())
    assert met["dropout"] > 80
    assert met[None] > 80


@pytest.mark.parametrize("copying", ["get_state", "deepcopy", "pickle"])
def test_siblings_meet_one_fate_when_paired_and_their_own_when_independent(copying: str) -> None:
    agree = {"paired": 0, "independent": 0}
    total = 0
    for seed in range(50):
        root = Noise(seed)
        world = open_world(root, p=0.5, luck="no_outage")
        order = orders_of(world)[0]
        world.step(f"get_order order={order}")
        world.step("wait seconds=60")
        for arm in ("paired", "independent"):
            told = []
            for i in range(2):
                if copying == "get_state":
                    sibling = open_world(Noise(0), p=0.5, luck="no_outage")
                    sibling.set_state(world.get_state())
                else:
                    sibling = copy.deepcopy(world) if copying == "deepcopy" else pickle.loads(pickle.dumps(world))
                sibling.reseed(root.branch(arm, i))  # type: ignore[arg-type]
                reads = [a for o in orders_of(world)[:3] for a in (f"get_order order={o}", "wait seconds=60")]
                told.append(fates(sibling, reads))
            agree[arm] += told[0] == told[1]
        total += 1
    assert agree["paired"] == total
    assert agree["independent"] < total / 2
    # Three fates an episode: all three agree by chance in well under half of the cases at p = 0.5.


def test_the_repeat_counter_travels_with_the_snapshot() -> None:
    key = ("get_order", "O0001")
    noise = next(
        n
        for n in map(Noise, range(1000))
        if fate(n, 0.25, "training", key, 0) is None and fate(n, 0.25, "training", key, 1) is not None
    )
    world = open_world(noise, p=0.25)
    assert world.step("get_order order=O0001").info["fate"] is None
    saved = world.get_state()
    again = open_world(noise, p=0.25)
    again.set_state(saved)
    assert again.step("get_order order=O0001").info["fate"] == world.step("get_order order=O0001").info["fate"]
    assert world.get_state().repeats[key] == 2


# --- what each kind does


def test_no_luck_without_a_rate_or_in_the_clean_arm() -> None:
    for noise, p in ((Noise(1), 0.0), (Noise(1, clean=True), 1.0)):
        world = open_world(noise, p=p)
        assert fates(world, [f"get_order order={o}" for o in orders_of(world)[:8]]) == [None] * 8


def test_transient_failure_leaves_the_desk_alone_and_a_retry_draws_anew() -> None:
    world = open_world(Noise(0))
    order = next(o.id for o in world.get_state().desk.orders.values() if o.open)
    noise = find_noise("transient", ("cancel_order", order))
    world = open_world(noise, p=0.25)
    before = world.get_state().desk
    assert code(world.step(f"cancel_order order={order} reason=x")) == "TRANSIENT_FAILURE"
    assert world.get_state().desk is before
    assert code(world.step(f"cancel_order order={order} reason=x")) is None
    assert world.get_state().desk.orders[order].status == "cancelled"


def test_rate_limit_stops_every_call_until_it_is_waited_out() -> None:
    order = orders_of(open_world(Noise(0)))[0]
    noise = find_noise("rate_limit", ("get_order", order))
    world = open_world(noise, p=0.25)
    told = json.loads(world.step(f"get_order order={order}").observation)
    assert told["error"] == "RATE_LIMITED"
    assert told["retry_after"] in (5, 10, 20, 30)
    assert code(world.step("search_customers query=a")) == "RATE_LIMITED"
    world.step(f"wait seconds={told['retry_after'] - 1}")
    assert json.loads(world.step(f"get_order order={order}").observation)["retry_after"] == 1
    world.step("wait seconds=1")
    assert code(world.step(f"get_order order={order}")) is None
    assert world.get_state().repeats[("get_order", order)] == 2  # refused calls met no fate


def test_outage_lasts_for_that_request_alone() -> None:
    world = open_world(Noise(0))
    one, two = orders_of(world)[:2]
    seed = next(
        s
        for s in range(20_000)
        if (met := fate(Noise(s), 0.25, "training", ("get_order", one), 0))
        == Fate("outage", pick=met.pick if met else 0)
        and fate(Noise(s), 0.25, "training", ("get_order", two), 0) is None
    )
    world = open_world(Noise(seed), p=0.25)
    for _ in range(3):
        assert code(world.step(f"get_order order={one}")) == "SERVICE_UNAVAILABLE"
    world.step("wait seconds=600")
    assert code(world.step(f"get_order order={one}")) == "SERVICE_UNAVAILABLE"
    assert code(world.step(f"get_order order={two}")) is None


def test_a_stale_read_shows_the_desk_before_the_last_write() -> None:
    world = open_world(Noise(0))
    order = next(o.id for o in world.get_state().desk.orders.values() if o.open)
    key = ("get_order", order)
    seed = next(
        s
        for s in range(50_000)
        if fate(Noise(s), 0.25, "training", ("cancel_order", order), 0) is None
        and (met := fate(Noise(s), 0.25, "training", key, 0)) is not None
        and met.kind == "stale"
        and fate(Noise(s), 0.25, "training", key, 1) is None
    )
    world = open_world(Noise(seed), p=0.25)
    was = world.get_state().desk.orders[order].status
    world.step(f"cancel_order order={order} reason={FREE_TEXT}")
    assert json.loads(world.step(f"get_order order={order}").observation)["status"] == was
    assert json.loads(world.step(f"get_order order={order}").observation)["status"] == "cancelled"


def test_truncation_cuts_a_page_and_pagination_recovers_it() -> None:
    world = open_world(Noise(0))
    owners = Counter(o.customer for o in world.get_state().desk.orders.values())
    customer, n = next((c, k) for c, k in sorted(owners.items()) if 3 <= k <= 5)
    noise = find_noise("truncation", ("list_orders", customer))
    world = open_world(noise, p=0.25)
    first = json.loads(world.step(f"list_orders customer={customer}").observation)
    assert (len(first["orders"]), first["next_offset"], first["total"]) == (n // 2, n // 2, n)
    rest = json.loads(world.step(f"list_orders customer={customer} offset={first['next_offset']}").observation)
    assert len(first["orders"] + rest["orders"]) == n
    assert rest["next_offset"] is None


def test_held_out_kinds_commit_unseen_and_drop_one_field() -> None:
    order = next(o.id for o in open_world(Noise(0)).get_state().desk.orders.values() if o.open)
    noise = find_noise("timeout", ("cancel_order", order), "held_out")
    world = open_world(noise, p=0.25, luck="held_out")
    assert code(world.step(f"cancel_order order={order} reason=x")) == "TIMEOUT"
    assert world.get_state().desk.orders[order].status == "cancelled"
    assert code(world.step(f"cancel_order order={order} reason=x")) == "INVALID_STATE"
    noise = find_noise("dropout", ("get_order", order), "held_out")
    world = open_world(noise, p=0.25, luck="held_out")
    partial, whole = (json.loads(world.step(f"get_order order={order}").observation) for _ in range(2))
    assert len(whole) - len(partial) == 1
    assert partial.items() <= whole.items()
    assert partial["order"] == order


def test_challenge_set_fails_the_first_attempt_of_every_write_and_nothing_else() -> None:
    for task in backoffice.tasks("diagnostic", luck="challenge", p=0.25):
        world, agent = backoffice.make(task), backoffice.expert(task)
        world.reseed(Noise(1))
        step = world.reset()
        attempts: Counter[str] = Counter()
        while not (step.done or step.truncated):
            action = agent.act(step)
            step = world.step(action)
            name = json.loads(action)["name"]
            first = attempts[action] == 0 and TOOLS[name].kind == "write"
            attempts[action] += 1
            assert (step.info.get("fate") == "transient") == first
        assert step.info["success"]


def test_grader_noise_hides_a_true_success_and_nothing_else() -> None:
    task = backoffice.tasks("diagnostic", q=1.0)[0]
    for noise, observed in ((Noise(1), False), (Noise(1, clean=True), True)):
        world, agent = backoffice.make(task), backoffice.expert(task)
        world.reseed(noise)
        step = world.reset()
        while not (step.done or step.truncated):
            step = world.step(agent.act(step))
        assert step.info["success"] is True
        assert step.info["observed"] is observed
        assert step.reward == float(observed)
