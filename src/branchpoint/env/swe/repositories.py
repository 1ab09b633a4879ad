"""The repositories that bugs are injected into: PyPI source distributions that ship their tests, fast suites first."""

from __future__ import annotations

from dataclasses import replace

from branchpoint.env.swe.task import Recipe, Repository

_PYTEST = "pytest==8.4.2"
_SRC = Recipe(paths=("src", ""))


def _needs(recipe: Recipe, *packages: str) -> Recipe:
    return replace(recipe, requirements=(_PYTEST, *packages))


_TABLE = (
    Repository(
        "inflection", "0.5.1", "inflection-0.5.1.tar.gz",
        "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        "MIT", "inflection", Recipe(targets=("test_inflection.py",)),
    ),
    Repository(
        "schema", "0.7.8", "schema-0.7.8.tar.gz",
        "e86cc08edd6fe6e2522648f4e47e3a31920a76e82cce8937535422e310862ab5",
        "MIT", "schema", Recipe(targets=("test_schema.py",)),
    ),
    Repository(
        "voluptuous", "0.16.0", "voluptuous-0.16.0.tar.gz",
        "006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05",
        "BSD-3-Clause", "voluptuous", Recipe(targets=("voluptuous/tests",)),
    ),
    Repository(
        "toolz", "1.0.0", "toolz-1.0.0.tar.gz",
        "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
        "BSD-3-Clause", "toolz", Recipe(targets=("toolz/tests",)),
    ),
    Repository(
        "funcy", "2.1", "funcy-2.1.tar.gz",
        "8979feb3de7120afd1d00e5a8eae810c1942e4bfbc91697151e9ee1e49f79284",
        "BSD-3-Clause", "funcy", _needs(Recipe(), "whatever==0.7"),
    ),
    Repository(
        "tabulate", "0.8.10", "tabulate-0.8.10.tar.gz",
        "6c57f3f3dd7ac2782770155f3adb2db0b1a269637e42f27599925e64b114f519",
        "MIT", "tabulate.py", Recipe(targets=("test",)),
    ),
    Repository(
        "cssselect", "1.6.0", "cssselect-1.6.0.tar.gz",
        "8c83a7139e97b93aa5ebdc0f46e785f7056a08a8bf201e597a6a2629d7eb11db",
        "BSD-3-Clause", "cssselect", _needs(Recipe(), "lxml==6.0.2"),
    ),
    Repository(
        "semver", "3.1.2", "semver-3.1.2.tar.gz",
        "bea193552413194252d33ff26ce0962b76669bd1c6fb17e8e203ac37f072feaf",
        "BSD-3-Clause", "src/semver", _SRC,
    ),
    Repository(
        "tinydb", "4.9.0", "tinydb-4.9.0.tar.gz",
        "6928b1fa785186bda7952a0ba05aaeedc883ede565ca9c7d608de44e5e75de70",
        "MIT", "tinydb", _needs(Recipe(), "PyYAML==6.0.3"),
    ),
    Repository(
        "cachetools", "8.0.2", "cachetools-8.0.2.tar.gz",
        "30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0",
        "MIT", "src/cachetools", _SRC,
    ),
    Repository(
        "python-slugify", "9.2.0", "python_slugify-9.2.0.tar.gz",
        "cee32948083476013804de1667724fb1362dacb71e47b1d5d92adf8db6ee3298",
        "MIT", "slugify", _needs(Recipe(), "text-unidecode==1.3"),
    ),
    Repository(
        "humanize", "4.17.0", "humanize-4.17.0.tar.gz",
        "1d6a36c453dbfbb3f0b34601d2e0b4ce5d48d780305cd45714843f0068fde6ac",
        "MIT", "src/humanize",
        replace(_needs(_SRC, "freezegun==1.5.5"), arguments=("--ignore=tests/test_benchmarks.py",)),
    ),
    Repository(
        "boltons", "26.2.0", "boltons-26.2.0.tar.gz",
        "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c",
        "BSD-3-Clause", "boltons", Recipe(),
    ),
    Repository(
        "markdown-it-py", "4.3.0", "markdown_it_py-4.3.0.tar.gz",
        "91a58fa5b72c71a40cf7177250fd767480d7a2bb3ac426ccfb76fb90305fdaaa",
        "MIT", "markdown_it",
        replace(
            _needs(Recipe(), "pytest-regressions==2.8.3", "mdurl==0.1.2"),
            plugins=("pytest_datadir.plugin", "pytest_regressions.plugin"),
        ),
    ),
    Repository(
        "sqlparse", "0.6.1", "sqlparse-0.6.1.tar.gz",
        "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7",
        "BSD-3-Clause", "sqlparse", Recipe(),
    ),
    Repository(
        "tomlkit", "0.15.2", "tomlkit-0.15.2.tar.gz",
        "83e32755ba1d20d9340bd069ee97e9f6232ba2346b63ffcba425de01f7e327a6",
        "MIT", "tomlkit", _needs(Recipe(), "PyYAML==6.0.3"),
    ),
)  # fmt: skip

REPOSITORIES = {repository.name: repository for repository in _TABLE}
"""By name."""

SPLITS = {
    "validation": ("toolz", "cssselect"),
    "test": ("tinydb", "python-slugify", "sqlparse"),
}
"""The repositories held out, by split; all others are for training."""


def split_of(name: str) -> str:
    """The split of a repository."""
    return next((split for split, names in SPLITS.items() if name in names), "train")
