"""WebShop's pages, actions and episodes."""

from __future__ import annotations

import asyncio
import json
import lzma
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchpoint import env as envs
from branchpoint.env import webshop
from branchpoint.env.webshop import catalog, words
from branchpoint.env.webshop.catalog import products
from branchpoint.env.webshop.world import LONGEST, WebShop, parse
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, Sandbox, Step, Task, settle

for package in ("bm25s", "Stemmer", "rapidfuzz"):
    pytest.importorskip(package, reason="pip install 'branchpoint[webshop]'")

PAGES = Path(__file__).parent / "data" / "webshop_pages.jsonl.xz"


def task(goal: int = 0, **dials: Any) -> Task:
    """A task by its goal's place."""
    shared = webshop.tasks("test", 1, **dials)[0]
    return Task(f"webshop/{goal}", "webshop", metadata={**shared.metadata, "goal": goal})


def opened(purpose: Task) -> tuple[WebShop, Step]:
    world = webshop.make(purpose)
    return world, world.reset()


def at(purpose: Task, *actions: str) -> tuple[WebShop, Step]:
    """A world after some actions."""
    world, step = opened(purpose)
    for action in actions:
        step = world.step(action)
    return world, step


def with_options() -> tuple[Task, catalog.Product]:
    """A task whose product has two options, and the product."""
    for place, purpose in enumerate(webshop.goals.goals("synthetic", 0)):
        shelf = products()[purpose.product]
        if len(shelf.options) == 2 and all(len(v) > 1 for v in shelf.options.values()):
            return task(place, queries="open"), shelf
    raise AssertionError("no product has two options")


@pytest.mark.parametrize("style", ["text", "text_rich"])
def test_pages_are_those_of_the_original(style: Any) -> None:
    """Recorded from the original's web page templates: every string, every mark, and what can be clicked, in order."""
    visits = [json.loads(line) for line in lzma.decompress(PAGES.read_bytes()).decode().splitlines()]
    pages = 0
    for visit in visits:
        world, step = opened(task(visit["goal"], style=style, show_attributes=True, max_steps=60))
        for turn in visit["turns"]:
            step = step if turn["action"] is None else world.step(turn["action"])
            assert step.observation == turn["rich" if style == "text_rich" else "text"]
            if step.info["page"] != "index":
                assert list(step.actions) == [f"click[{text}]" for text in turn["clickable"]]
            pages += 1
    assert pages == 96


def test_a_visit_in_full() -> None:
    purpose, shelf = with_options()
    goal = webshop.goals.goals("synthetic", 0)[purpose.metadata["goal"]].text
    (one, first), (two, second) = ((name, values) for name, values in shelf.options.items())
    world, step = opened(purpose)
    assert step.observation == f"WebShop [SEP] Instruction: [SEP] {goal} [SEP] Search"
    step = world.step(f"search[{shelf.title}]")
    head = f"Instruction: [SEP] {goal} [SEP] Back to Search"
    assert step.observation.startswith(
        f"{head} [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] {shelf.asin} [SEP] {shelf.title} [SEP] {shelf.tag}"
    )
    assert step.actions[:3] == ("click[back to search]", "click[next >]", f"click[{shelf.asin.lower()}]")
    assert len(step.actions) == 12
    step = world.step(f"click[{shelf.asin}]")
    values = " [SEP] ".join([one, *first, two, *second])
    item = (
        f"{head} [SEP] < Prev [SEP] {values} [SEP] {shelf.title} [SEP] Price: {shelf.tag} [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert step.observation == item
    step = world.step("click[features]")
    bullets = " [SEP] ".join(bullet.strip() for bullet in shelf.bullets)
    assert step.observation == f"{head} [SEP] < Prev [SEP] {bullets}"
    assert world.step("click[< prev]").observation == item
    assert world.step("click[reviews]").observation == f"{head} [SEP] < Prev"
    assert world.step("click[< prev]").observation == item
    for value in (first[0], first[1], second[0]):
        assert world.step(f"click[{value}]").observation == item
    assert dict(world.get_state().options) == {one: first[1], two: second[0]}
    step = world.step("click[Buy Now]")
    assert (step.done, step.truncated, step.actions) == (True, False, ())
    assert step.observation.endswith(f"Your score (min 0.0, max 1.0) [SEP] {step.reward}")
    with pytest.raises(EnvironmentFailure, match="reset"):
        world.step("click[buy now]")


def test_rich_text_marks_what_was_clicked() -> None:
    purpose, shelf = with_options()
    purpose = task(purpose.metadata["goal"], style="text_rich")
    value = next(iter(shelf.options.values()))[0]
    world, step = at(purpose, f"search[{shelf.title}]")
    assert f"\n\n[button] {shelf.asin} [button_]\n{shelf.title}\n{shelf.tag}\n" in step.observation
    world.step(f"click[{shelf.asin}]")
    chosen = world.step(f"click[{value}]").observation
    assert chosen.startswith(f"You have clicked {value}.\nInstruction:\n")
    assert f"\n  [clicked button] {value} [clicked button_]\n" in chosen
    assert "\n[button] Buy Now [button_]\n" in chosen
    assert f"\n\n[clicked button] {shelf.asin} [clicked button_]\n" in world.step("click[< prev]").observation


def test_a_visit_in_few_words() -> None:
    purpose, shelf = with_options()
    place = purpose.metadata["goal"]
    goal = webshop.goals.goals("synthetic", 0)[place]
    world, step = opened(task(place, style="compact"))
    instruction = shelf.synthetic.text.removeprefix("Find me ").lower() if shelf.synthetic else ""
    options = "".join(f"\n{name}: {value}" for name, value in goal.options)
    assert step.observation == f"want {instruction}{options}\nunder {goal.limit:.0f}"
    assert step.actions == ("find 1", "find 2", "find 3")
    step = world.step("find 1")
    lines = step.observation.split("\n")
    place = 1 + world.get_state().found.index(goal.product)
    assert lines[0] == "page 1"
    assert len(lines) == 11
    assert step.actions == ("back", "next", *(f"open {n}" for n in range(1, 11)))
    step = world.step(f"open {place}")
    title = re.findall(r"[a-z0-9]+(?:[.'-][a-z0-9]+)*", shelf.title.lower())
    assert lines[place].startswith(f"{place} {' '.join(title[:5])} ")
    first, *rest = step.observation.split("\n")
    assert first.startswith(f"item {' '.join(title[:8])} ")
    assert rest == [f"{name}: {' , '.join(values)}" for name, values in shelf.options.items()]
    values = [value for group in shelf.options.values() for value in group]
    assert step.actions == ("back", "prev", "buy", *(f"pick {value}" for value in values))
    for name, value in goal.options:
        step = world.step(f"pick {value}")
        assert f"\n{name} = {value}" in step.observation
    assert world.step("click[buy now]").observation == step.observation  # not an action of this style
    assert world.step("prev").observation.split("\n")[place] == lines[place] + " seen"
    assert world.step(f"open {place}").observation.split("\n")[1:] == rest
    for _, value in goal.options:
        world.step(f"pick {value}")
    step = world.step("buy")
    assert (step.observation, step.done, step.reward) == (f"done {step.reward:.2f}", True, own_score(goal))


def own_score(goal: webshop.goals.Goal) -> float:
    """What the text style gives for the goal's own product and options."""
    place = webshop.goals.goals("synthetic", 0).index(goal)
    return buy(task(place)).reward


def test_a_new_result_page_forgets_the_options_and_the_search_page_all() -> None:
    purpose, shelf = with_options()
    value = next(iter(shelf.options.values()))[0]
    world, _ = at(purpose, f"search[{shelf.title}]", f"click[{shelf.asin}]", f"click[{value}]")
    world.step("click[< prev]")
    assert (world.get_state().page, world.get_state().options) == ("results", ())
    world.step("click[back to search]")
    state = world.get_state()
    assert (state.page, state.keywords, state.seen, state.steps) == ("index", (), (), 5)


def test_result_pages_turn_without_end() -> None:
    world, step = at(task(), "search[women shirt]")
    assert "< Prev" not in step.observation
    for number in range(2, 8):
        step = world.step("click[next >]")
        assert f"Page {number} (Total results: 50) [SEP] < Prev [SEP] Next >" in step.observation
        assert len(step.actions) == (13 if number <= 5 else 3)
    assert "Page 6 " in world.step("click[< prev]").observation


def test_special_first_words() -> None:
    def found(query: str) -> list[catalog.Product]:
        return [products()[n] for n in at(task(), f"search[{query}]")[0].get_state().found]

    assert {p.category for p in found("<c> grocery")} == {"grocery"}
    assert len(found("<c> grocery")) == sum(p.category == "grocery" for p in products())
    assert {p.query for p in found("<q> console tables")} == {"console tables"}
    assert all("solid wood" in p.attributes for p in found("<a> solid wood"))
    assert found("<c>") == []


def test_random_products_follow_the_luck_and_each_draw_is_another() -> None:
    world, _ = opened(task(max_steps=50))
    world.reseed(Noise(1))
    world.step("search[<r>]")
    first = world.get_state()
    world.step("search[<r>]")
    assert first.found != world.get_state().found
    again, _ = opened(task(max_steps=50))
    again.reseed(Noise(1))
    again.step("search[<r>]")
    assert again.get_state().found == first.found
    again.reseed(Noise(2))
    again.set_state(first)
    assert "Page 2 " in again.step("click[next >]").observation
    assert again.get_state().found == first.found


@pytest.mark.parametrize(
    ("action", "parsed"),
    [
        ("search[Red Shoes]", ("search", "red shoes")),
        ("click[a[b]c]", ("click[a", "b]c")),  # the last bracket opens
        ("click[[x]", ("click[", "x")),
        ("search[a] then more", ("search", "a")),
        ("search[]", ("", "")),
        ("[x]", ("", "")),
        ("search", ("", "")),
        ("search[a\n]", ("", "")),
        ("", ("", "")),
        ("search[" + "a" * LONGEST + "]", ("", "")),
    ],
)
def test_actions_are_read_as_by_the_original(action: str, parsed: tuple[str, str]) -> None:
    assert parse(action) == parsed


@given(st.text("ab[]c \n", max_size=30))
def test_actions_are_read_as_by_the_expression(action: str) -> None:
    found = re.match(r"(.+)\[(.+)\]", action)
    assert parse(action) == ((found[1], found[2].lower()) if found else ("", ""))


@pytest.mark.parametrize(
    "action", ["click[buy now]", "click[search]", "click[b000000000]", "look", "search[]", "🛒[x]"]
)
def test_what_cannot_be_done_changes_nothing_and_costs_a_step(action: str) -> None:
    world, step = opened(task())
    after = world.step(action)
    assert (after.observation, after.actions, after.reward) == (step.observation, step.actions, 0.0)
    assert after.info["steps"] == 1
    assert not after.info["valid"]


def test_search_works_everywhere_or_on_the_search_page_only() -> None:
    first = at(task(), "search[lamp]", "search[shoe]")[1]
    strict = at(task(search_anywhere=False), "search[lamp]", "search[shoe]")[1]
    assert (first.info["valid"], strict.info["valid"]) == (True, False)
    assert first.observation == at(task(), "search[shoe]")[1].observation
    assert strict.observation == at(task(), "search[lamp]")[1].observation


def buy(purpose: Task) -> Step:
    """Buy the goal's own product with the goal's options."""
    goal = webshop.goals.goals("synthetic", 0)[purpose.metadata["goal"]]
    shelf = products()[goal.product]
    world, _ = at(purpose, f"search[{shelf.title}]", f"click[{shelf.asin}]")
    for option in goal.options:
        world.step(f"click[{option[1]}]")
    return world.step("click[buy now]")


def test_buying_what_is_wanted_is_a_success() -> None:
    done = [buy(task(place)) for place in range(0, 300, 12)]
    assert all(step.done for step in done)
    assert sum(step.reward == 1 and step.info["success"] for step in done) >= 24
    part = next((step for step in (buy(task(place)) for place in range(300)) if 0 < step.reward < 1), None)
    assert part is not None
    assert not part.info["success"]


def test_the_learner_sees_the_score_or_success_only() -> None:
    purpose, shelf = with_options()
    place = purpose.metadata["goal"]
    score, success = (
        at(task(place, reward=kind), f"search[{shelf.title}]", f"click[{shelf.asin}]", "click[buy now]")[1]
        for kind in ("score", "success")
    )
    assert 0 < score.reward < 1
    assert score.reward == score.info["score"] == success.info["score"]
    assert success.reward == 0.0


def test_the_step_limit_cuts() -> None:
    world, step = at(task(max_steps=3), "search[lamp]", "look")
    assert not step.truncated
    step = world.step("click[next >]")
    assert (step.done, step.truncated, step.actions, step.info["success"]) == (False, True, (), False)


def test_open_queries_list_no_search_and_give_a_grammar_that_fits_every_action() -> None:
    world, step = opened(task(queries="open"))
    assert step.actions == ()
    assert re.fullmatch(step.grammar, "search[red, shoes 7.5]")
    assert not re.fullmatch(step.grammar, "click[buy now]")
    luck = random.Random(0)
    for _ in range(14):
        step = world.step(luck.choice(step.actions) if step.actions else "search[shoes]")
        if step.done:
            break
        assert all(re.fullmatch(step.grammar, action) for action in step.actions)
    assert opened(task())[1].grammar == ""


def test_candidate_searches_come_from_the_goal_alone() -> None:
    for place in range(200):
        step = opened(task(place))[1]
        goal = webshop.goals.goals("synthetic", 0)[place].text.lower()
        assert 2 <= len(step.actions) <= words.MOST
        for action in step.actions:
            assert set(re.findall(r"\w+", action)) <= {"search", *re.findall(r"\w+", goal)}
    goal = "Find me machine wash men's shirts with cotton for gym with color: black, and size: 2x"
    goal += ", and price lower than 9.00 dollars"
    assert words.queries(goal)[:3] == (
        "machine wash men's shirts with cotton for gym color: black, and size: 2x",
        "machine wash men's shirts with cotton for gym",
        "gym black 2x",
    )
    assert words.limit(goal) == 9
    assert words.queries("i want [a] lamp.") != ()


def test_tasks_are_drawn_in_a_keyed_order() -> None:
    some, more = webshop.tasks("test", 5, seed=3), webshop.tasks("test", 20, seed=3)
    assert more[:5] == some
    assert some != webshop.tasks("test", 5, seed=4)
    assert not {t.id for t in some} & {t.id for t in webshop.tasks("test", price_seed=1)}
    assert len({t.id for t in webshop.tasks("train")}) == 5410
    assert all(json.loads(json.dumps(dict(t.metadata))) == t.metadata for t in some)
    assert not {t.id for t in webshop.tasks("train")} & {t.id for t in webshop.tasks("val")}


def test_marks_show_what_the_goal_names() -> None:
    purpose, shelf = with_options()
    place = purpose.metadata["goal"]
    goal = webshop.goals.goals("synthetic", 0)[place]
    plain, bare = opened(task(place, style="compact"))
    world, step = opened(task(place, style="compact", mark=True))
    assert step == bare  # the goal itself is said as ever
    wanted = {value.lower() for _, value in goal.options}
    products = webshop.catalog.products()
    step, bare = world.step("find 1"), plain.step("find 1")
    rows = zip(
        step.observation.split("\n")[1:], bare.observation.split("\n")[1:], world.get_state().found, strict=False
    )
    for row, plain_row, found in rows:
        assert row == plain_row + " over" * (min(products[found].prices) > goal.limit)
    opening = f"open {1 + world.get_state().found.index(goal.product)}"
    step, bare = world.step(opening), plain.step(opening)
    marked = [action.removeprefix("pick * ") for action in step.actions if action.startswith("pick * ")]
    assert set(marked) == wanted & {value.lower() for group in shelf.options.values() for value in group}
    assert marked
    assert step.observation.replace("* ", "") == bare.observation
    assert [action.replace("* ", "") for action in step.actions] == list(bare.actions)
    picked = world.step(f"pick * {marked[0]}")
    assert f"= * {marked[0]}" in picked.observation


@pytest.mark.parametrize(
    ("split", "arguments", "message"),
    [
        ("validation", {}, "split is 'validation'; use one of test, val, train"),
        ("train", {"source": "human"}, "split 'train' has no human goals: all 13 are in 'test'"),
        ("test", {"n": 501}, "n is 501; split 'test' has 500"),
        ("test", {"n": 0}, "n is 0"),
        ("test", {"style": "html"}, "style is 'html'; use one of 'text', 'text_rich'"),
        ("test", {"style": "compact", "queries": "open"}, "style 'compact' has no open queries"),
        ("test", {"mark": True}, "mark is true; only style 'compact' marks"),
        ("test", {"reward": "10"}, "reward is '10'"),
        ("test", {"layout": "mine"}, "layout is 'mine'"),
        ("test", {"max_steps": 0}, "max_steps is 0"),
        ("test", {"price_seed": "a"}, "price_seed is 'a'; use an integer"),
        ("test", {"show_attributes": 1}, "show_attributes is 1; use true or false"),
    ],
)
def test_bad_arguments_are_named(split: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        webshop.tasks(split, **arguments)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({}, "no 'goal'"), ({"goal": 6910}, "there are 6910 synthetic goals"), ({"goal": 0, "style": 3}, "style is 3")],
)
def test_bad_metadata_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        webshop.make(Task("t", "webshop", metadata=metadata))


def test_damaged_data_is_named(tmp_path: Path) -> None:
    path = tmp_path / "products.jsonl.xz"
    whole = (catalog.folder() / "products.jsonl.xz").read_bytes()
    row = json.loads(lzma.decompress(whole).decode().splitlines()[0])
    del row["tag"]
    for content, message in (
        (whole[:1000], "damaged"),
        (lzma.compress(b"{}\n"), "line 1: no field 'asin'"),
        (lzma.compress(json.dumps(row).encode()), "line 1: no field 'tag'"),
        (lzma.compress(b"[1]\n"), "line 1: not a product"),
        (lzma.compress(b"{\n"), "line 1: not a product"),
    ):
        path.write_bytes(content)
        with pytest.raises(EnvironmentFailure, match=message):
            catalog.read_products(path)
    with pytest.raises(EnvironmentFailure, match="missing"):
        catalog.read_products(tmp_path / "none.xz")
    for content, message in ((b'{"text": 1}', "not a list"), (b"[1]", "not a list"), (b"[", "not a list")):
        path.write_bytes(lzma.compress(content))
        with pytest.raises(EnvironmentFailure, match=message):
            catalog.read_texts(path)


@pytest.mark.parametrize(
    "dials", [{}, {"style": "compact"}, {"style": "text_rich", "queries": "open", "source": "human"}]
)
def test_the_contract_is_kept(dials: dict[str, Any]) -> None:
    plan = ("search[lamp for the table]",) if "queries" in dials else ()
    check_env(webshop.make, webshop.tasks("test", 1, **dials)[0], actions=plan).assert_ok()


def walk(step: Step, luck: random.Random) -> str:
    choices = [action for action in step.actions if action != "click[buy now]" or luck.random() < 0.2]
    return luck.choice(choices or ["search[<r>]"])


async def continuations(sandbox: Sandbox) -> None:
    """Restored at every third turn of a walk, a snapshot goes on as the original went on."""
    try:
        env = await settle(sandbox.open("branchpoint.env.webshop:make", task(40, max_steps=40), Noise(5)))
        step, luck, frozen = await settle(env.reset()), random.Random(1), []
        played: list[tuple[str, Step]] = []
        for turn in range(15):
            if turn % 3 == 0:
                frozen.append((turn, await settle(env.snapshot())))
            action = "search[<r>]" if turn in (4, 10) else walk(step, luck)
            step = await settle(env.step(action))
            played.append((action, step))
            if step.done:
                break
        assert len(played) > 6
        for start, snapshot in frozen:
            for _ in range(2):
                copy = await settle(snapshot.restore(Noise(5)))
                for action, right in played[start:]:
                    assert await settle(copy.step(action)) == right
                await settle(copy.close())
        await settle(env.close())
    finally:
        await settle(sandbox.close())


def test_snapshots_in_process_go_on_alike() -> None:
    asyncio.run(asyncio.wait_for(continuations(InProcess("state")), 60))


def test_forked_worlds_go_on_alike() -> None:
    asyncio.run(asyncio.wait_for(continuations(ForkServer(preload=("branchpoint.env.webshop.warm",))), 120))


ACTIONS = st.one_of(
    st.text(max_size=40),
    st.text(max_size=40).map("search[{}]".format),
    st.text(max_size=20).map("click[{}]".format),
    st.sampled_from(["click[next >]", "click[< prev]", "click[back to search]", "click[features]", "search[<a>]"]),
    st.integers(0, 100),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(ACTIONS, max_size=25), st.sampled_from(["text", "text_rich", "compact"]), st.integers(0, 6909))
def test_no_action_breaks_a_visit(actions: list[str | int], style: str, goal: int) -> None:
    """Numbers stand for listed actions. Equal actions give equal steps, also after a state was carried over."""
    world, step = opened(task(goal, style=style, max_steps=20))
    twin, _ = opened(task(goal, style=style, max_steps=20))
    for action in actions:
        if step.done or step.truncated:
            break
        text = action if isinstance(action, str) else step.actions[action % len(step.actions)]
        twin.set_state(world.get_state())
        step = world.step(text)
        assert twin.step(text) == step
        assert len(step.observation) < 50_000


def test_the_customer_buys_well_and_does_only_what_is_listed() -> None:
    scores = []
    for place in range(0, 120, 2):
        turns: dict[str, list[tuple[Step, str]]] = {}
        for style in ("text", "text_rich", "compact"):
            purpose = task(place, style=style)
            turns[style], last = envs.play(webshop.make(purpose), webshop.expert(purpose))
            assert all(action in step.actions for step, action in turns[style])
            assert last.done
        assert [action for _, action in turns["text"]] == [action for _, action in turns["text_rich"]]
        assert len(turns["compact"]) >= 3
        purpose = task(place, style="compact", mark=True)
        marked, end = envs.play(webshop.make(purpose), webshop.expert(purpose))
        assert [action.replace("* ", "") for _, action in marked] == [action for _, action in turns["compact"]]
        assert end == last
        scores.append(last.info["score"])
    assert sum(score == 1 for score in scores) / len(scores) >= 0.8
    assert sum(scores) / len(scores) >= 0.88


def test_it_is_listed() -> None:
    purpose = envs.tasks("webshop", "val", 1)[0]
    assert purpose.root == "webshop"
    assert envs.make("webshop")(purpose).reset().observation.startswith("WebShop")
    assert envs.preload("webshop") == ("branchpoint.env.webshop.warm",)
