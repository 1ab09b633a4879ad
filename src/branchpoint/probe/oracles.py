"""Checks the library against exact numbers: all trees of small processes, enumerated, through the library's own code.

A file of oracles is JSON. ``mdps`` holds processes (``trans``, ``pi``, ``block``, ``s0``) with their J and gradient,
the covariance traces of the tree estimator for designs and baselines (``tree``), and the moments of BPO (``bpo``).
``thm2`` holds variances of BPO's local advantage, ``A_select`` the biases of look-ahead selection, ``B_invalid`` those
of faulty estimators. All sections are optional; any file in this form works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from branchpoint.probe import cases
from branchpoint.probe.tabular import MalformedOracle, Mdp, vector

TOLERANCE = 1e-10
"""Allowed difference, relative to the expected number where that is larger than 1."""


@dataclass(frozen=True)
class Line:
    """One comparison. Of vectors, the largest difference and the norms are kept."""

    what: str
    expected: float
    found: float
    difference: float

    @property
    def ok(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, abs(self.expected))

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "DIFFERS"
        return (
            f"{verdict:7}  {self.what}: expected {self.expected:.12g}, found {self.found:.12g}, "
            f"difference {self.difference:.1e}"
        )


@dataclass(frozen=True)
class Report:
    """All comparisons of one file."""

    lines: tuple[Line, ...]

    @property
    def failed(self) -> int:
        return sum(not line.ok for line in self.lines)

    @property
    def status(self) -> int:
        """An exit status: 0 when all agree (and there was something to compare), else 1."""
        return int(self.failed > 0 or not self.lines)

    def __str__(self) -> str:
        if not self.lines:
            return "nothing to check: the file has none of mdps, thm2, A_select, B_invalid"
        worst = max(self.lines, key=lambda line: np.inf if np.isnan(line.difference) else line.difference)
        return (
            f"{len(self.lines)} numbers checked, {len(self.lines) - self.failed} ok, {self.failed} differ; "
            f"worst difference {worst.difference:.1e} ({worst.what})"
        )


def check(path: Path | str | None = None, progress: Callable[[str], None] | None = None) -> Report:
    """Compares every number of a file (None: the one shipped with the package).

    ``progress`` receives one line for each comparison as it is made, and the summary last. Raises MalformedOracle, with
    one line that says where, for a file that cannot be read as oracles.
    """
    say = progress or (lambda _: None)
    lines = []
    for line in _lines(_load(path)):
        lines.append(line)
        say(str(line))
    report = Report(tuple(lines))
    say(str(report))
    return report


def shipped() -> Mapping[str, Any]:
    """The oracles that come with the package."""
    return json.loads(resources.files("branchpoint.probe").joinpath("data/oracles.json").read_text())


def _load(path: Path | str | None) -> Mapping[str, Any]:
    if path is None:
        return shipped()
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as e:
        raise MalformedOracle(f"{path}: {e.strerror or e}") from e
    except ValueError as e:
        raise MalformedOracle(f"{path}: not JSON: {e}") from e
    if not isinstance(raw, Mapping):
        raise MalformedOracle(f"{path}: expected an object with the sections mdps, thm2, A_select, B_invalid")
    return raw


def _lines(raw: Mapping[str, Any]) -> Iterator[Line]:
    entries = _section(raw, "mdps", dict)
    mdps = {name: Mdp.parse(entry, name) for name, entry in entries.items()}
    try:
        for name, entry in entries.items():
            yield from _mdp(name, mdps[name], entry)
        for i, entry in enumerate(_section(raw, "thm2", list)):
            yield from _thm2(f"thm2[{i}]", mdps, entry)
        for name, entry in _section(raw, "A_select", dict).items():
            yield from _select(f"A_select.{name}", mdps, name, entry)
        yield from _invalid(mdps, _section(raw, "B_invalid", dict))
    except (KeyError, TypeError, AttributeError) as e:
        raise MalformedOracle(f"an entry is not in the expected form: {type(e).__name__}: {e}") from e


def _section(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    section = raw.get(name, kind())
    if not isinstance(section, kind):
        raise MalformedOracle(f"{name}: expected {kind.__name__}, found {type(section).__name__}")
    return section


def _compare(what: str, expected: Any, found: Any) -> Line:
    e, f = np.atleast_1d(vector(np.atleast_1d(expected).tolist(), what)), np.atleast_1d(found)
    if e.shape != f.shape:
        raise MalformedOracle(f"{what}: {e.shape[0]} numbers where {f.shape[0]} are due")
    difference = float(np.max(np.abs(e - f), initial=0.0))
    if len(e) == 1:
        return Line(what, float(e[0]), float(f[0]), difference)
    return Line(what + " (norm)", float(np.linalg.norm(e)), float(np.linalg.norm(f)), difference)


def _match(pattern: str, text: str, where: str) -> re.Match[str]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise MalformedOracle(f"{where}: {text!r} is not of a known form")
    return found


def _known(mdps: Mapping[str, Mdp], name: str, where: str) -> Mdp:
    matches = [m for n, m in mdps.items() if n == name]
    if not matches:
        raise MalformedOracle(f"{where}: process {name!r} is not among mdps ({', '.join(mdps) or 'none'})")
    return matches[0]


def _times(text: str, where: str) -> tuple[int, ...]:
    try:
        return tuple(int(t) for t in text.split(",") if t.strip())
    except ValueError as e:
        raise MalformedOracle(f"{where}: {text!r} is not a list of whole numbers") from e


def _mdp(name: str, mdp: Mdp, entry: Mapping[str, Any]) -> Iterator[Line]:
    at = f"mdps.{name}"
    if "J" in entry:
        yield _compare(f"{at}.J", entry["J"], mdp.mean_return)
    if "grad" in entry:
        yield _compare(f"{at}.grad", entry["grad"], mdp.gradient)
    designs: dict[cases.Design, dict[str, float]] = {}
    keys: dict[tuple[cases.Design, str], str] = {}
    for key in entry.get("tree", {}):
        m = _match(r"(nested|caterpillar) t=\[(.*)\] K=\[(.*)\] (nearest|root|mix([\d.]+))", key, f"{at}.tree")
        times, widths = _times(m[2], at), _times(m[3], at)
        if len(times) != len(widths):
            raise MalformedOracle(f"{at}.tree: {key!r}: as many times as widths")
        design = cases.Design(times, widths, nested=m[1] == "nested")
        designs.setdefault(design, {})[m[4]] = {"nearest": 1.0, "root": 0.0}.get(m[4]) or float(m[5] or 0.0)
        keys[design, m[4]] = key
    for design, gammas in designs.items():
        for label, found in cases.traces(mdp, design, gammas):
            yield from _tree(f"{at}.tree.{keys[design, label]}", entry["tree"][keys[design, label]], mdp, found)
    for key, wanted in entry.get("bpo", {}).items():
        yield from _bpo(f"{at}.bpo.{key}", key, wanted, mdp)


def _tree(what: str, wanted: Mapping[str, Any], mdp: Mdp, found: cases.Traces) -> Iterator[Line]:
    yield _compare(f"{what} | mean - grad J", 0.0, float(np.linalg.norm(found.mean - mdp.gradient)))
    if "cost" in wanted:
        yield _compare(f"{what} | cost", wanted["cost"], found.cost)
    for size, trace in wanted.get("trcov", {}).items():
        (roots,) = _times(size, what)
        yield _compare(f"{what} | tr Cov, B={size}", trace, found.of(roots))
        if roots in found.explicit:
            yield _compare(f"{what} | tr Cov, B={size}, all groups", trace, found.explicit[roots])


def _bpo(what: str, key: str, wanted: Mapping[str, Any], mdp: Mdp) -> Iterator[Line]:
    m = _match(r"t=\[(.*)\] K=(\d+) lam=([\d.]+) post=(none|inherit) norm=(sum|leaves|pairs)", key, what)
    times = _times(m[1], what)
    design = cases.Design(times, (int(m[2]),) * len(times), nested=False)
    found = cases.bpo(mdp, design, float(m[3]), m[4], m[5])
    for field, value in (("E", found.mean), ("trcov", found.trace), ("cost", found.cost)):
        if field in wanted:
            yield _compare(f"{what} | {field}", wanted[field], value)


def _thm2(what: str, mdps: Mapping[str, Mdp], entry: Mapping[str, Any]) -> Iterator[Line]:
    for field in ("mdp", "t", "K"):
        if field not in entry:
            raise MalformedOracle(f"{what}: field {field!r} is missing")
    what = f"{what} ({entry['mdp']}, t={entry['t']}, K={entry['K']})"
    found, law = cases.local_variance(_known(mdps, entry["mdp"], what), int(entry["t"]), int(entry["K"]))
    if "varA" in entry:
        yield _compare(f"{what} | Var A", entry["varA"], found)
    if "rhs" in entry:
        yield _compare(f"{what} | K/(K-1) E Var(R|s)", entry["rhs"], law)


def _select(what: str, mdps: Mapping[str, Mdp], key: str, wanted: Mapping[str, Any]) -> Iterator[Line]:
    m = _match(r"([^|]+)\|(?:(?:look-ahead )?top-(\d+)|thr(?:eshold H>([\d.]+) first (\d+))?)(?:\|K(\d+))?", key, what)
    mdp, width = _known(mdps, m[1], what), int(m[5] or 2)
    if m[2]:
        scheduler = cases.look_ahead(int(m[2]), width)
    else:
        scheduler = cases.threshold(float(m[3] or 0.6), int(m[4] or 1), width)
    found = cases.selection(mdp, scheduler, whole=not set(wanted) <= {"EU_minus_J", "grad_bias"})
    for field, value in wanted.items():
        if field not in found:
            raise MalformedOracle(f"{what}: field {field!r} is unknown; known are {', '.join(found)}")
        mine = found[field]
        if isinstance(mine, dict):
            if set(mine) != set(value):
                raise MalformedOracle(f"{what}.{field}: actions {sorted(value)} where {sorted(mine)} occur")
            for action in value:
                yield _compare(f"{what} | {field}[{action}]", value[action], mine[action])
        else:
            yield _compare(f"{what} | {field}", value, mine)


def _invalid(mdps: Mapping[str, Mdp], section: Mapping[str, Any]) -> Iterator[Line]:
    groups: dict[tuple[str, str], list[str]] = {}
    for key in section:
        m = _match(r"([^|]+)\|([^|]+)\|([^|]+)", key, "B_invalid")
        groups.setdefault((m[1], m[2]), []).append(m[3])
    yield from chain.from_iterable(_faults(mdps, section, *group, faults) for group, faults in groups.items())


def _faults(
    mdps: Mapping[str, Mdp], section: Mapping[str, Any], name: str, rule: str, faults: list[str]
) -> Iterator[Line]:
    where = f"B_invalid.{name}|{rule}"
    mdp = _known(mdps, name, where)
    m = _match(r"fixed t=(\d+),K=(\d+)|state rule: K=(\d+) at t>=(\d+) if r so far<([\d.]+)", rule, where)
    if m[1]:
        chosen = cases.fixed(mdp, cases.Design((int(m[1]),), (int(m[2]),), nested=True))
    else:
        chosen = cases.poor_so_far(int(m[3]), int(m[4]), float(m[5]))
    unknown = set(faults) - set(cases.FAULTS)
    if unknown:
        raise MalformedOracle(f"{where}: {sorted(unknown)} unknown; known are {', '.join(cases.FAULTS)}")
    for fault, found in cases.faults(mdp, chosen, faults).items():
        for field, value in section[f"{name}|{rule}|{fault}"].items():
            if field not in found:
                raise MalformedOracle(f"{where}|{fault}: field {field!r} is unknown; known are {', '.join(found)}")
            yield _compare(f"{where}|{fault} | {field}", value, found[field])
