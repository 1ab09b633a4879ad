"""From a config to the parts of a run: environments, model, policy, sandbox, learner. The only place that chooses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from branchpoint import env as envs
from branchpoint.advantage import Ppo
from branchpoint.config import Chat, ConfigError, Container, EnvSpec, RunConfig, Sampling, Shell
from branchpoint.critic import Critic
from branchpoint.learner import Learner
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.policy import chat, models, small
from branchpoint.policy.hf import HFPolicy
from branchpoint.policy.imitate import imitate, texts, to_rows
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.sandbox.machine import MachineSandbox
from branchpoint.sandbox.replay import Replay
from branchpoint.store import RunFolder, StoreError, replace, write_json, write_text
from branchpoint.train import Course, Run
from branchpoint.world import Sandbox, Step, Task, Transcript, settle

Say = Callable[[str], None]
Report = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class Words:
    """A model with the codec that speaks its language."""

    model: Any
    tokenizer: Any
    codec: Any


def courses(config: RunConfig) -> tuple[Course, ...]:
    """The environments of a run with their tasks. Raises ConfigError for a wrong name or dial."""
    return tuple(_course(spec, i) for i, spec in enumerate(config.envs))


def _course(spec: EnvSpec, index: int) -> Course:
    try:
        train = envs.tasks(spec.name, **spec.options, **spec.train)
        held_out = envs.tasks(spec.name, **spec.options, **spec.eval)
        make = envs.make(spec.name)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"envs.{index} ({spec.name}): {e}") from e
    if not train or not held_out:
        raise ConfigError(f"envs.{index} ({spec.name}): no task for train or eval; widen n, split or the dials")
    shared = {t.id for t in train} & {t.id for t in held_out}
    if shared:
        raise ConfigError(f"envs.{index} ({spec.name}): {len(shared)} tasks are in train and eval, e.g. {min(shared)}")
    return Course(spec.name, make, train, held_out, spec.share)


def words(
    config: RunConfig,
    lessons: tuple[Course, ...],
    folder: RunFolder,
    box: Sandbox,
    ledger: Ledger,
    say: Say,
    report: Report,
) -> Words:
    """The model as the run left it, or a new one (warm-started if the config says so)."""
    done = folder.checkpoints()
    spec = config.model
    if done:
        model, tokenizer = models.load(
            folder.checkpoint(done[-1]), spec.dtype, device=spec.device, revision=spec.revision
        )
        return _fitting(config, Words(model, tokenizer, codec_of(tokenizer, spec.chat)))
    shown = list(transcripts(config, lessons, box)) if spec.warm_start or spec.name == "small" else []
    if spec.name == "small":
        tokenizer = small.train_tokenizer(texts(shown))
        model = small.build(tokenizer, _sizes(spec.size), config.seed).to(spec.device, getattr(torch, spec.dtype))
    else:
        model, tokenizer = models.load(
            spec.name, spec.dtype, spec.lora, device=spec.device, revision=spec.revision, seed=config.seed
        )
    codec = codec_of(tokenizer, spec.chat)
    parts = _fitting(config, Words(model, tokenizer, codec))
    if spec.warm_start:
        rows = to_rows(codec, shown, restrict=spec.warm_start.restrict)
        say(f"warm start: {len(rows)} expert episodes, {sum(map(len, rows)):,} tokens, {spec.warm_start.epochs} epochs")
        with ledger.clock("learning_seconds"):
            imitate(model, rows, codec.vocabulary, spec.warm_start, seed=config.seed, report=report)
        ledger.warm_start_tokens += sum(map(len, rows)) * spec.warm_start.epochs
    return parts


def _fitting(config: RunConfig, parts: Words) -> Words:
    """The same parts, if a context can become as long as the limits say."""
    held = getattr(parts.model.config.get_text_config(), "max_position_embeddings", None)
    if held is not None and config.limits.context_tokens > held:
        cure = "raise model.size.context" if config.model.name == "small" else "choose another model"
        raise ConfigError(
            f"limits.context_tokens: {config.limits.context_tokens}, but this model holds {held} positions "
            f"(its max_position_embeddings); lower it, or {cure}"
        )
    return parts


def _sizes(given: dict[str, int]) -> small.Sizes:
    try:
        return small.Sizes(**given)
    except TypeError as e:
        raise ConfigError(f"model.size: {e}; known: {', '.join(small.Sizes.__dataclass_fields__)}") from None


def codec_of(tokenizer: Any, settings: Chat) -> Any:
    """The plain format for the small model's tokenizer, the chat template for any other."""
    if chat.ACT in tokenizer.get_added_vocab():
        return chat.PlainCodec(tokenizer)
    return chat.ChatCodec(tokenizer, **settings.model_dump())


def transcripts(config: RunConfig, lessons: tuple[Course, ...], box: Sandbox) -> Iterator[Transcript]:
    """Won expert episodes of every environment, of its training split and never of an evaluation task: shipped ones
    where there are, else played here, the run's own training tasks first. Worlds that act through a machine play in
    ``box``, the run's sandbox."""
    count = config.model.warm_start.episodes if config.model.warm_start else 64
    for spec, course in zip(config.envs, lessons, strict=True):
        held_out = {t.id for t in course.eval}
        dials = {k: v for k, v in (spec.options | spec.train).items() if k not in ("split", "n", "seed")}
        recorded = envs.transcripts(spec.name, **dials)
        found = recorded if recorded is not None else _played(spec, course, box, config.seed)
        wanted = count if spec.episodes is None else spec.episodes
        yield from islice((t for t in found if t[0].id not in held_out), wanted)


def _played(spec: EnvSpec, course: Course, box: Sandbox, seed: int) -> Iterator[Transcript]:
    """The expert's won episodes on the training tasks, then on the others of their split."""
    known = {t.id for t in course.train}
    dials: dict[str, Any] = {**spec.options, **spec.train, "n": None}
    for task in (*course.train, *(t for t in envs.tasks(spec.name, **dials) if t.id not in known)):
        try:
            if isinstance(box, MachineSandbox):
                luck = Noise(seed).child("warm start", task.id)
                turns, last = asyncio.run(_in_sandbox(box, task, envs.expert(task), luck))
            else:
                turns, last = envs.play(envs.make(task.root)(task), envs.expert(task))
        except ValueError as e:
            raise ConfigError(f"envs ({spec.name}): no expert to learn from ({e}); start from another model") from e
        if last.info.get("success", last.reward > 0):
            yield task, turns


async def _in_sandbox(
    box: Sandbox, task: Task, agent: envs.Agent, noise: Noise, limit: int = 200
) -> tuple[Sequence[tuple[Step, str]], Step]:
    """One episode as ``envs.play`` plays it, in a sandbox."""
    env = await settle(box.open(envs.make(task.root), task, noise))
    try:
        step, turns = await settle(env.reset()), []
        while not (step.done or step.truncated) and len(turns) < limit:
            turns.append((step, agent.act(step)))
            step = await settle(env.step(turns[-1][1]))
        return turns, step
    finally:
        await settle(env.close())


def run(
    config: RunConfig, lessons: tuple[Course, ...], folder: RunFolder, say: Say, report: Report, learns: bool = True
) -> Run:
    """All parts, wired; who runs it closes it. ``learns``: False for what only evaluates, which needs no reference."""
    box = sandbox(config, say)
    try:
        return _wired(config, lessons, folder, box, say, report, learns)
    except BaseException:
        asyncio.run(_shut(box))
        raise


async def _shut(box: Sandbox) -> None:
    await settle(box.close())


def _wired(
    config: RunConfig,
    lessons: tuple[Course, ...],
    folder: RunFolder,
    box: Sandbox,
    say: Say,
    report: Report,
    learns: bool,
) -> Run:
    ledger, start = Ledger(), time.perf_counter()
    parts = words(config, lessons, folder, box, ledger, say, report)
    settings = config.learner.model_copy(
        update={"temperature": config.sampling.temperature, "vocabulary": parts.codec.vocabulary}
        | ({} if learns else {"kl": 0.0})
    )
    learner = Learner(
        parts.model, settings, _reference(config, folder, parts) if learns else None, _critic(config, parts)
    )
    ledger.wall_seconds = time.perf_counter() - start

    def save(path: Path) -> None:
        models.save(parts.model, parts.tokenizer, path, {"run": folder.path.name, "updates": learner.updates})
        torch.save(learner.state_dict(), path / "learner.pt")

    def load(path: Path) -> None:
        try:
            learner.load_state_dict(torch.load(path / "learner.pt", weights_only=True))
        except (OSError, RuntimeError, EOFError, ValueError) as e:
            raise StoreError(f"{path}: the learner's state cannot be read ({e}); remove this checkpoint, resume") from e

    def policy(sampling: Sampling) -> HFPolicy:
        return HFPolicy(parts.model, parts.codec, sampling, context=config.limits.context_tokens)

    acting, greedy = policy(config.sampling), config.sampling.model_copy(update={"greedy": True})
    return Run(
        config=config,
        courses=lessons,
        policy=acting,
        eval_policy=policy(greedy) if config.training.eval_greedy else acting,
        sandbox=box,
        learner=learner,
        folder=folder,
        save=save,
        load=load,
        ledger=ledger,
    )


def sandbox(config: RunConfig, say: Say) -> Sandbox:
    """The sandbox that the config names."""
    chosen, limits = config.sandbox, config.limits
    if chosen.kind == "process":
        return ForkServer(
            preload=tuple(module for spec in config.envs for module in envs.preload(spec.name, spec.options)),
            step_timeout_s=limits.step_seconds,
            start_timeout_s=limits.start_seconds,
            memory_bytes=None if chosen.memory_mb is None else chosen.memory_mb << 20,
            huge_pages=chosen.huge_pages,
            unforkable=chosen.unforkable,
            say=say,
        )
    if chosen.kind == "container":
        return _told(_container(chosen), say)
    if chosen.kind == "shell":
        return _told(_shell(chosen), say)
    return InProcess() if chosen.kind == "state" else Replay()


def _told(made: MachineSandbox, say: Say) -> Sandbox:
    for limit in getattr(made.machines, "unenforced", ()):
        say(f"sandbox: not enforced here: {limit}")
    return made


def _shell(chosen: Shell) -> MachineSandbox:
    from branchpoint.sandbox import shell

    limits = shell.Limits(
        seconds=chosen.seconds,
        cpu_seconds=chosen.cpu_seconds,
        output_bytes=chosen.output_kb << 10,
        memory_bytes=chosen.memory_mb << 20,
        processes=chosen.processes,
        cpus=chosen.cpus,
        disk_bytes=chosen.disk_mb << 20,
        inodes=chosen.inodes,
        file_bytes=chosen.file_mb << 20,
    )
    host = shell.HOST if chosen.host is None else chosen.host
    return shell.Shell(chosen.folder, limits=limits, storage=chosen.storage, left=chosen.left, host=host)


def _container(chosen: Container) -> MachineSandbox:
    from branchpoint.sandbox import container

    return container.Container(
        chosen.socket,
        limits=container.Limits(
            seconds=chosen.seconds,
            output_bytes=chosen.output_kb << 10,
            memory_bytes=chosen.memory_mb << 20,
            processes=chosen.processes,
            cpus=chosen.cpus,
            disk_bytes=chosen.disk_mb << 20,
            file_bytes=chosen.file_mb << 20,
        ),
        capabilities=chosen.capabilities,
    )


def _critic(config: RunConfig, parts: Words) -> Critic | None:
    """The value head, for the estimator that has one."""
    chosen = config.estimator
    return Critic(parts.model, chosen.value_coef, chosen.value_lr) if isinstance(chosen, Ppo) else None


def _reference(config: RunConfig, folder: RunFolder, parts: Words) -> Any:
    """What the KL penalty pulls towards: the model before the first update, kept beside the checkpoints."""
    place = folder.path / "reference"
    if config.learner.kl == 0 or config.model.lora is not None:
        return None
    if not folder.checkpoints():
        replace(place, lambda p: models.save(parts.model, parts.tokenizer, p))
    return models.load(place, config.model.dtype, device=config.model.device)[0]


def versions() -> dict[str, str]:
    """What the run was made with."""
    from importlib.metadata import PackageNotFoundError, version
    from platform import machine, python_version

    found = {"python": python_version(), "machine": machine()}
    for name in ("branchpoint", "numpy", "torch", "transformers", "tokenizers", "peft", "alfworld", "textworld"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def prepare(config: RunConfig, text: str, folder: RunFolder, resume: bool, fresh: bool) -> None:
    """Make the run folder ready. Raises StoreError rather than mix two runs, and ModelError rather than clear one away
    for a model that is not there."""
    saved = folder.path / "config.yaml"
    if folder.started and not (resume or fresh):
        raise StoreError(
            f"{folder.path} holds a run: --resume goes on with it, --fresh starts over, run=... goes elsewhere"
        )
    if resume and not folder.started:
        raise StoreError(f"{folder.path} holds no run to resume; leave --resume out to start one")
    if resume and saved.read_text(encoding="utf-8") != text:
        raise StoreError(f"{saved} differs from this config: resume with the same settings, or start over with --fresh")
    if fresh:
        if config.model.name != "small":
            models.check(config.model.name, config.model.revision)  # before the old run is gone
        folder.clear()


def sign(text: str, folder: RunFolder) -> None:
    """Write down what the run is, once its parts stand (a start that failed leaves a folder that can be used)."""
    if not folder.started:
        write_json(folder.path / "versions.json", versions())
        write_text(folder.path / "config.yaml", text)
