"""WebShop: find the product that an instruction asks for among 1,000 real ones, choose its options, buy it.

The shop of Yao et al. (2022, https://arxiv.org/abs/2207.01206), built anew from its behaviour: no web server, no Java.
6,910 goals made from product data and 13 written by people, the published reward, splits and texts. The products ship
with the package; search and reward need ``pip install "branchpoint[webshop]"``.
"""

from __future__ import annotations

from typing import Any

from branchpoint.env.faults import Event
from branchpoint.env.webshop import goals as _goals
from branchpoint.env.webshop import reward as _reward
from branchpoint.env.webshop import search as _search
from branchpoint.env.webshop.catalog import human_texts
from branchpoint.env.webshop.dials import Dials, Queries, Reward, Style
from branchpoint.env.webshop.expert import Expert
from branchpoint.env.webshop.goals import SPLITS, Layout, Source
from branchpoint.env.webshop.reward import Rule
from branchpoint.env.webshop.world import WebShop, parse
from branchpoint.noise import Noise
from branchpoint.world import Message, Task

__all__ = ["SPLITS", "Dials", "Expert", "WebShop", "event_of", "expert", "human_texts", "make", "preload", "tasks"]

RULES = (
    "You shop in a web store. Buy the product that the instruction asks for, with the options it names and within its "
    "price. Reply with one action a turn: search[words] on the search page, or click[text] with the text of a button, "
    "a product code or an option value of the page. Choose every option before click[buy now], which ends the visit."
)


def make(task: Task) -> WebShop:
    """The world of a task. Raises EnvironmentFailure for a bad dial, ImportError when the extra is not installed."""
    return WebShop(task)


def event_of(action: str) -> Event | None:
    """The key rule for :mod:`branchpoint.env.faults`: any search is one event, since its words are free text; a click
    is an event of what is clicked; None for other text. None is a read: each changes the page."""
    name, argument = parse(action)
    if name == "search":
        return Event("search")
    return Event("click", (argument,)) if name == "click" else None


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    *,
    source: Source = "synthetic",
    layout: Layout = "paper",
    price_seed: int = 0,
    style: Style = "text",
    reward: Reward = "score",
    option_rule: Rule = "pairs",
    queries: Queries = "goal",
    show_attributes: bool = False,
    search_anywhere: bool = True,
    mark: bool = False,
    max_steps: int = 15,
) -> tuple[Task, ...]:
    """``n`` goals of a split (all when None) in an order keyed by ``seed``; the first m of n are the tasks of ``n=m``.

    Args:
        source: ``synthetic`` goals or those of ``human`` wording, all 13 of which are in ``test``.
        layout: where the splits lie in the published order of goals: ``paper`` or ``verl-agent``.
        price_seed: of the prices of 93 products with a price range, and of all price limits.
        style: of observations. ``text``: strings with separators; ``text_rich``: lines with marked buttons;
            ``compact``: few words, for small models, with actions of their own.
        reward: what the learner sees at the purchase: the ``score`` in [0, 1], or 1 for ``success`` only.
        option_rule: how wanted options are compared with chosen values: ``pairs`` is the original's rule, by which 458
            of the 6,910 goals are out of reach for their own product; by ``values`` none is.
        queries: ``goal``: the search page lists searches cut from the goal's text; ``open``: it lists none, and every
            step has a grammar.
        show_attributes: products have a page of their attributes.
        search_anywhere: ``search[...]`` works on every page, as in the original, or on the search page only.
        mark: in style ``compact``, put ``*`` before the option values that the goal names and ``over`` behind prices
            above its limit: for models too small to compare words.
        max_steps: the step limit.

    Raises ValueError naming the argument that cannot be met.
    """
    dials = {
        "source": source,
        "price_seed": price_seed,
        "style": style,
        "reward": reward,
        "option_rule": option_rule,
        "queries": queries,
        "show_attributes": show_attributes,
        "search_anywhere": search_anywhere,
        "mark": mark,
        "max_steps": max_steps,
    }
    if problem := Dials(0, **dials).problem():
        raise ValueError(problem)
    places = _goals.split_of(source, layout, split, price_seed)
    if n is not None and not 0 < n <= len(places):
        raise ValueError(f"n is {n}; split {split!r} has {len(places)} {source} goals")
    order = Noise(seed).at("webshop", "order", source, layout, split).permutation(len(places))
    return tuple(_task(places[i], seed, dials) for i in order[:n].tolist())


def _task(goal: int, seed: int, dials: dict[str, Any]) -> Task:
    prompt = () if dials["style"] == "compact" else (Message("system", RULES),)
    other_prices = f"/prices-{dials['price_seed']}" if dials["price_seed"] else ""
    name = f"webshop/{dials['source']}/{goal}{other_prices}"
    return Task(name, "webshop", prompt, seed, {"goal": goal, **dials})


def expert(task: Task) -> Expert:
    """A scripted customer for one episode of the task; it plays from observations alone."""
    dials = Dials.of(task)
    return Expert(dials.max_steps, dials.style)


def preload() -> None:
    """Read products and goals and build the index now, e.g. in a process that is going to be forked."""
    _goals.goals("synthetic", 0)
    _search.search("warm")
    _reward.ratio("warm", "warm")
