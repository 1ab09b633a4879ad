"""The shop as a world: a search page, result pages, product pages with options and further pages, and the purchase."""

from __future__ import annotations

import json
import re
from typing import Literal, NamedTuple

from branchpoint.env.webshop import compact, pages, words
from branchpoint.env.webshop.catalog import numbers, products
from branchpoint.env.webshop.dials import Dials
from branchpoint.env.webshop.goals import goals, prices
from branchpoint.env.webshop.reward import Outcome, grade
from branchpoint.env.webshop.search import HITS, search
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, Step, Task

LONGEST = 2000
"""Longer actions are not understood."""

_SPECIAL, _ESCAPED = re.compile(r"([\\^$.|?*+()\[\]{}])"), r"\\\1"


class Visit(NamedTuple):
    """The whole state of an episode. ``found``: numbers of the products of the last search, shown from page ``number``
    on; ``item``: number of the open product; ``draws``: how often random products were asked for."""

    page: Literal["start", "index", "results", "item", "sub", "done"] = "start"
    keywords: tuple[str, ...] = ()
    found: tuple[int, ...] = ()
    number: int = 0
    item: int = -1
    options: tuple[tuple[str, str], ...] = ()
    sub: str = ""
    seen: tuple[str, ...] = ()
    score: float = 0.0
    draws: int = 0
    steps: int = 0
    over: bool = True


def parse(action: str) -> tuple[str, str]:
    """Name and argument of ``name[argument]``, the argument in lower case; ("", "") for anything else.

    As the original's expression ``(.+)[(.+)]`` on the first line, but in linear time: the last bracket opens.
    """
    line = action.split("\n", 1)[0] if len(action) <= LONGEST else ""
    closing = line.rfind("]")
    opening = line.rfind("[", 1, max(closing - 1, 0))
    return (line[:opening], line[opening + 1 : closing].lower()) if opening > 0 else ("", "")


class WebShop:
    """One customer's visit. ``Step.actions``: what can be clicked, and on the search page candidate searches or, under
    ``queries="open"``, nothing; ``Step.grammar`` then allows any words.

    An action that cannot be done changes nothing and costs a step. Reward at the purchase, 0 before. ``info``: success
    (a score of 1), score, page, steps; after the purchase its parts too.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for a bad dial or damaged data, ImportError when the extra is not installed."""
        self._dials = Dials.of(task)
        self._goal = goals(self._dials.source, self._dials.price_seed)[self._dials.goal]
        self._queries = words.queries(self._goal.text) if self._dials.queries == "goal" else ()
        self._compact = self._dials.style == "compact"
        self._marks = compact.Marks.of(self._goal.text) if self._dials.mark else compact.Marks()
        self._noise = Noise(task.seed)
        self._visit = Visit()
        self._page: pages.Page = ()
        self._targets: dict[str, pages.Piece] = {}
        self._offered: dict[str, str] = {}

    def reseed(self, noise: Noise) -> None:
        """The luck to use from now on; only ``search[<r>]``, random products, draws from it."""
        self._noise = noise

    def get_state(self) -> Visit:
        """The state, immutable."""
        return self._visit

    def set_state(self, state: Visit) -> None:
        """Go on from a state of the same task."""
        self._show(state)

    def close(self) -> None:
        """Nothing is held open."""

    def reset(self) -> Step:
        """The search page."""
        self._show(Visit("index", over=False))
        return self._step()

    def step(self, action: str) -> Step:
        """Search or click. Raises EnvironmentFailure before reset or after the end."""
        before = self._visit
        if before.over:
            raise EnvironmentFailure("WebShop: the visit has not started or is over; call reset()")
        visit, outcome = before, None
        name, argument = parse(self._offered.get(action.strip(), "") if self._compact else action)
        if name == "search" and argument and (before.page == "index" or self._dials.search_anywhere):
            visit = self._search(tuple(argument.split(" ")))
        elif name == "click" and argument == pages.BUY.lower() and argument in self._targets:
            outcome = self._buy()
            visit = before._replace(page="done", score=outcome.score)
        elif name == "click" and argument in self._targets:
            visit = self._click(argument, self._targets[argument])
        steps = before.steps + 1
        self._show(visit._replace(steps=steps, over=outcome is not None or steps >= self._dials.max_steps))
        return self._step(outcome, valid=visit is not before)

    def _search(self, keywords: tuple[str, ...]) -> Visit:
        found, draws = self._find(keywords), self._visit.draws + (keywords[0] == "<r>")
        visit = self._visit._replace(page="results", keywords=keywords, found=found, number=1, draws=draws)
        return visit._replace(item=-1, options=())

    def _find(self, keywords: tuple[str, ...]) -> tuple[int, ...]:
        """The special first words list products at random, by attribute, by category and by product query."""
        first, rest = keywords[0], " ".join(keywords[1:]).strip()
        if first == "<r>":
            order = self._noise.at("webshop", "random products", self._visit.draws).permutation(len(products()))
            return tuple(order[:HITS].tolist())
        if first == "<a>":
            return tuple(n for n, product in enumerate(products()) if rest in product.attributes)
        if first == "<c>":
            return tuple(n for n, product in enumerate(products()) if rest == product.category)
        if first == "<q>":
            return tuple(n for n, product in enumerate(products()) if rest == product.query)
        return search(" ".join(keywords))

    def _click(self, argument: str, piece: pages.Piece) -> Visit:
        """Where a click leads. Result pages forget the product and its options, the search page all but the clock."""
        visit = self._visit
        match argument, visit.page:
            case "back to search", _:
                return Visit("index", draws=visit.draws, steps=visit.steps, over=False)
            case "next >", "results":
                return visit._replace(number=visit.number + 1)
            case "< prev", "results":
                return visit._replace(number=visit.number - 1)
            case "< prev", "sub":
                return visit._replace(page="item", sub="")
            case "< prev", _:
                return visit._replace(page="results", item=-1, options=())
            case (("description" | "features" | "reviews" | "attributes"), _):
                return visit._replace(page="sub", sub=argument.capitalize())
        if piece.kind == "link":
            return visit._replace(page="item", item=numbers()[piece.text], seen=(*visit.seen, piece.text))
        return visit._replace(options=tuple({**dict(visit.options), piece.name: piece.text}.items()))

    def _buy(self) -> Outcome:
        bought, chosen = products()[self._visit.item], [value for _, value in self._visit.options]
        wanted, price = products()[self._goal.product], prices(self._dials.price_seed)[self._visit.item]
        return grade(self._goal, wanted, bought, price, chosen, self._dials.option_rule)

    def _show(self, visit: Visit) -> None:
        self._visit = visit
        self._page = self._render(visit)
        self._targets = pages.targets(self._page)
        self._offered = self._offers()

    def _render(self, visit: Visit) -> pages.Page:
        goal = self._goal.text
        match visit.page:
            case "results":
                return pages.results(goal, [products()[n] for n in visit.found], visit.number)
            case "item":
                return pages.item(goal, products()[visit.item], self._dials.show_attributes)
            case "sub":
                return pages.sub(goal, products()[visit.item], visit.sub)
            case "done":
                return pages.done(visit.score)
        return pages.index(goal)

    def _step(self, outcome: Outcome | None = None, valid: bool = True) -> Step:
        visit, score = self._visit, outcome.score if outcome else 0.0
        reward = float(score == 1) if self._dials.reward == "success" else score
        info = {"success": score == 1, "score": score, "page": visit.page, "steps": visit.steps, "valid": valid}
        if outcome is not None:
            info |= {f"{name}_part": value for name, value in outcome._asdict().items() if name != "score"}
        actions, grammar = ((), "") if visit.over else (tuple(self._offered), self._grammar())
        cut = visit.over and outcome is None
        return Step(self._observation(), reward, outcome is not None, cut, actions, grammar, info)

    def _observation(self) -> str:
        if self._compact:
            return self._few_words()
        if self._dials.style == "text":
            return pages.text(self._page)
        address = f"{'+'.join(self._visit.keywords)}/{json.dumps(dict(self._visit.options))}"
        return pages.rich(self._page, address, self._visit.seen)

    def _few_words(self) -> str:
        visit = self._visit
        match visit.page:
            case "results":
                return compact.results([products()[n] for n in visit.found], visit.number, visit.seen, self._marks)
            case "item":
                return compact.item(products()[visit.item], dict(visit.options), self._marks)
            case "done":
                return compact.done(visit.score)
        return compact.index(self._goal.text)

    def _offers(self) -> dict[str, str]:
        """What ``Step.actions`` lists, each with the action of the original that it stands for."""
        if self._visit.page == "index":
            searches = [f"search[{text}]" for text in self._queries]
            return dict(zip(compact.FINDS if self._compact else searches, searches, strict=False))
        if self._compact:
            offered = compact.actions(self._targets, self._marks)
            return {action: f"click[{argument}]" for action, argument in offered.items()}
        return {action: action for action in (f"click[{argument}]" for argument in self._targets)}

    def _grammar(self) -> str:
        if self._dials.queries == "goal":
            return ""
        if self._visit.page == "index":
            return r"search\[[^\[\]\n]{1,200}\]"
        return rf"click\[({'|'.join(_SPECIAL.sub(_ESCAPED, text) for text in self._targets)})\]"
