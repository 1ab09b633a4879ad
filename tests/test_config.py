"""The config: what is wrong is named in one line, with the cure; what is right comes back from disk unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchpoint.config import ConfigError, dump, load, parse

GOOD = {"envs": [{"name": "backoffice"}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lerner": {}}, "lerner: unknown field; did you mean 'learner'?"),
        ({"limits": {"turn": 3}}, "limits.turn: unknown field; did you mean 'turns'?"),
        ({"limits": {"turns": "many"}}, "limits.turns: Input should be a valid integer"),
        ({"limits": {"turns": 0}}, "limits.turns: Input should be greater than or equal to 1 (found 0)"),
        ({"envs": []}, "envs: "),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: "),
        ({"scheduler": {"kind": "fixed", "expected": 10, "width": 1}}, "use kind: flat"),
        ({"scheduler": {"kind": "top_entropy", "width": 1}}, "use kind: flat"),
        ({"scheduler": {"kind": "fixd"}}, "scheduler: "),
        ({"scheduler": {"kind": "fixed", "expected": 10, "widht": 2}}, "scheduler.widht: unknown field"),
        ({"estimator": {"kind": "tree", "gamma": 2}}, "estimator.gamma"),
        ({"scheduler": {"kind": "top_entropy", "width": 2}}, "estimator 'tree' needs a predictable scheduler"),
        ({"noise": "loud"}, "noise: Input should be 'clean', 'paired', 'independent' or 'blocked'"),
        ({"learner": {"kl": -1}}, "learner.kl: "),
        ({"model": {"name": 3}}, "model.name: "),
    ],
)
def test_one_line_names_the_field_and_the_cure(change: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(GOOD | change, "c.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("c.yaml: ")
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="envs: missing"):
        parse({}, "c.yaml")


def test_overrides_reach_into_lists_and_make_sections(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("envs: [{name: backoffice}]\n")
    config = load(path, ["training.updates=7", "envs.0.name=alfworld", "scheduler={kind: flat, roots: 3}", "run=x/y"])
    assert (config.training.updates, config.envs[0].name, config.scheduler.roots, config.run) == (
        7,
        "alfworld",
        3,
        "x/y",
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.updates", "name=value"),
        ("=3", "name=value"),
        ("envs.5.name=x", "not a position in a list of 1"),
        ("run.deeper=3", "plain value"),
        ("seed=[1", "not YAML"),
        ("training.updatse=3", "did you mean 'updates'"),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: r\nenvs: [{name: backoffice}]\n")
    with pytest.raises(ConfigError, match=message):
        load(path, [override])


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "\x00", ""])
def test_files_that_are_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(path)
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.yaml")


def test_the_resolved_copy_is_the_same_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    config = parse(GOOD | {"scheduler": {"kind": "fixed", "expected": 10, "at": [0.25, 0.5], "width": [2, 3]}})
    path.write_text(dump(config))
    assert load(path) == config


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_valid(path: Path) -> None:
    assert load(path).envs
