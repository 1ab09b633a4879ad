"""The documentation says what the code does: examples run, names exist, tables hold every field and its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from branchpoint import advantage, config, scheduler
from branchpoint.learner import LearnerConfig
from branchpoint.rollout import Limits
from branchpoint.testing import check_env

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = ["docs/tour.md", "docs/howto/environment.md"]
SECTIONS: dict[str, type[BaseModel]] = {
    "Run": config.RunConfig,
    "Environments: `envs.N`": config.EnvSpec,
    "Model: `model`": config.Model,
    "LoRA: `model.lora`": config.LoRA,
    "Chat: `model.chat`": config.Chat,
    "Warm start: `model.warm_start`": config.WarmStart,
    "`kind: process`": config.Process,
    "`kind: shell`": config.Shell,
    "`kind: container`": config.Container,
    "Sampling: `sampling`": config.Sampling,
    "Limits: `limits`": Limits,
    "Training: `training`": config.Training,
    "Budget: `training.budget`": config.Budget,
    "Learner: `learner`": LearnerConfig,
}


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def kinds(union: Any) -> list[type[BaseModel]]:
    return list(get_args(get_args(union)[0]))


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_example_environment_keeps_the_contract(page: str) -> None:
    module: dict[str, Any] = {"__name__": "guess"}
    for code in blocks(ROOT / page, "python"):
        exec(code, module)
    for split in ("train", "validation"):
        check_env(module["make"], module["tasks"](split, n=1)[0], actions=("0", "1", "2")).assert_ok()
    assert not {t.id for t in module["tasks"]("train")} & {t.id for t in module["tasks"]("validation", n=32)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_configurations_are_valid(page: Path) -> None:
    for text in blocks(page, "yaml"):
        raw = yaml.safe_load(text)
        config.parse({"envs": [{"name": "backoffice"}], **raw}, page.name)


def test_known_faults_name_tests_that_exist() -> None:
    named = 0
    for row in (ROOT / "docs/known_faults.md").read_text(encoding="utf-8").splitlines():
        file = ""
        for before, name in re.findall(r"`([\w/.]*)::(\w+)`", row):
            file = before or file
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
            named += 1
    assert named > 50


def table(title: str) -> dict[str, str]:
    """The defaults of a section's table by field, as written."""
    text = (ROOT / "docs/howto/config.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", text.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", section, re.MULTILINE))


def compare(model: type[BaseModel], written: dict[str, str]) -> None:
    fields = {n: f for n, f in model.model_fields.items() if n != "kind"}
    assert set(written) == set(fields), model.__name__
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        if default is PydanticUndefined:
            assert written[name] == "required", name
        elif isinstance(default, BaseModel) and written[name] == "its defaults":
            assert default == type(default)()
        else:
            found = yaml.safe_load(written[name].strip("`"))
            if isinstance(default, BaseModel):
                assert type(default).model_validate(found) == default, name
            else:
                assert found == (list(default) if isinstance(default, tuple) else default), name


@pytest.mark.parametrize("title", SECTIONS)
def test_the_tables_of_the_configuration(title: str) -> None:
    compare(SECTIONS[title], table(title))


@pytest.mark.parametrize("strategy", kinds(scheduler.Scheduler), ids=lambda s: s.__name__)
def test_the_tables_of_the_schedulers(strategy: type[BaseModel]) -> None:
    compare(strategy, table(f"`kind: {strategy.model_fields['kind'].default}`"))


@pytest.mark.parametrize("strategy", kinds(advantage.Estimator), ids=lambda s: s.__name__)
def test_the_table_of_the_estimators(strategy: type[BaseModel]) -> None:
    text = (ROOT / "docs/howto/config.md").read_text(encoding="utf-8")
    cell = re.search(rf"^\| `{strategy.model_fields['kind'].default}` \| (.*) \|$", text, re.MULTILINE)
    assert cell is not None
    found = {n: yaml.safe_load(d) for n, d in re.findall(r"`(\w+)` \([^)]*default ([^)]*)\)", cell[1])}
    assert found == {n: f.default for n, f in strategy.model_fields.items() if n != "kind"}
