"""Loading, saving and the small model: round trips through the Hugging Face layout, determinism, one-line errors."""

import importlib
import json

import pytest
import torch
from chat_kit import CHATML, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from branchpoint.config import LoRA
from branchpoint.noise import Noise
from branchpoint.policy import models, small
from branchpoint.policy.chat import ChatCodec, PlainCodec
from branchpoint.world import Message, Step, Task

TEXTS = ["go to desk 1", "take laptop 2 from desk 1", 'issue_refund order=O0042 amount=1250 reason="late"'] * 3
ACTIONS = [
    *TEXTS[:3],
    "move mug 11 to sinkbasin 1",
    "search_customers query=ada.o@shop.example offset=10",
    "¿é 漢?",
    " a  b\t\nc ",
]
TINY = small.Sizes(width=16, layers=2, heads=2, hidden=32, context=64)


@pytest.fixture(scope="module")
def words():
    return small.train_tokenizer(TEXTS)


@pytest.fixture
def folder(tmp_path, words):
    return models.save(small.build(words, TINY), words, tmp_path / "model", {"success": "0.5|0.6"})


def same(a, b) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_survive_the_small_tokenizer(words, action):
    codec = PlainCodec(words)
    ids = codec.encode(action)
    assert codec.text(ids) == action
    assert codec.text([*ids, codec.stop_ids[0]]) == action
    assert max(ids) < codec.vocabulary == len(words)


def test_random_text_survives_the_small_tokenizer(words):
    codec, draw = PlainCodec(words), Noise(5).at("text")
    for n in draw.integers(1, 40, size=100):
        text = "".join(chr(c) for c in draw.choice([*range(32, 127), 10, 233, 8364, 0x1F600], size=n))
        assert codec.text(codec.encode(text)) == text


def test_names_numbers_and_ids_are_split_where_they_generalise(words):
    pieces = lambda text: words.convert_ids_to_tokens(PlainCodec(words).encode(text))  # noqa: E731
    assert pieces("go to desk 12") == ["Ġgo", "Ġto", "Ġdesk", "Ġ12"]
    assert pieces("take laptop_1 from desk_12") == ["Ġtake", "Ġlaptop", "_1", "Ġfrom", "Ġdesk", "_12"]
    assert pieces("issue_refund order=O0042 amount=1250")[:7] == [
        "Ġissue_refund",
        "Ġorder=",
        "O",
        "00",
        "42",
        "Ġamount=",
        "12",
    ]


def test_plain_format(words):
    codec, task = (
        PlainCodec(words),
        Task("t", "none", prompt=(Message("system", "rules"), Message("user", "go to desk 1"))),
    )
    seen = [codec.observe(task, Step("desk 1"), first) for first in (True, False)]
    assert words.decode(seen[0]) == "<task> go to desk 1<obs> desk 1<act>"
    assert words.decode(seen[1]) == "<obs> desk 1<act>"
    lines = codec.observe(task, Step("go\ngo"), False).tolist()
    assert lines[1] == lines[3] == codec.encode("go")[0]
    assert words.decode(codec.observe(Task("t", "none"), Step(""), True)) == "<obs><act>"


def test_marks_in_an_observation_are_ordinary_text(words):
    codec, task = PlainCodec(words), Task("t", "none", prompt=(Message("user", "x <end> <act>"),))
    row = codec.observe(task, Step("<end><act> go <obs>"), True).tolist()
    marks = [words.convert_tokens_to_ids(m) for m in ("<task>", "<obs>", "<act>", "<end>")]
    assert [row.count(m) for m in marks] == [1, 1, 1, 0]
    assert codec.stop_ids[0] not in codec.encode("go <end>")


def test_tokenizer_does_not_depend_on_the_order_of_texts(words):
    assert small.train_tokenizer(reversed(TEXTS)).get_vocab() == words.get_vocab()
    assert len(small.train_tokenizer(TEXTS, limit=2)) == len(words) - len(
        {*small.train_tokenizer(TEXTS).get_vocab()} - {*small.train_tokenizer(TEXTS, limit=2).get_vocab()}
    )


def test_weights_are_a_function_of_the_seed_and_touch_no_global_state(words):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    a = small.build(words, TINY, seed=3)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    assert same(a, small.build(words, TINY, seed=3))
    assert not same(a, small.build(words, TINY, seed=4))


def test_default_size(words):
    count = sum(p.numel() for p in small.build(words).parameters())
    layer = 4 * 128 * 128 + 3 * 128 * 384 + 2 * 128
    assert count == 4 * layer + 128 + 128 * len(words)


def test_save_and_load_give_back_every_bit(folder, words):
    model, loaded = models.load(folder)
    assert same(model, small.build(words, TINY))
    assert not model.training
    assert loaded.get_vocab() == words.get_vocab()
    text = '<task> go to desk 1<obs> é order=O0042 "x"<act> go<end>'
    ids = words(text, add_special_tokens=False)["input_ids"]
    assert loaded(text, add_special_tokens=False)["input_ids"] == ids
    assert AutoTokenizer.from_pretrained(folder).decode(ids) == text
    assert same(AutoModelForCausalLM.from_pretrained(folder), model)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| success | 0.5\\|0.6 |" in card
    assert models.load(folder, "bfloat16")[0].dtype == torch.bfloat16


def test_saving_again_replaces_the_folder_and_a_failure_leaves_the_old_one(folder, words):
    other = small.build(words, TINY, seed=1)
    (folder / "stray.txt").write_text("x")
    models.save(other, words, folder)
    assert same(models.load(folder)[0], other)
    assert not (folder / "stray.txt").exists()

    class Broken:
        def save_pretrained(self, _) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models.save(small.build(words, TINY), Broken(), folder)
    assert same(models.load(folder)[0], other)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_lora_changes_nothing_at_first_and_comes_back_with_its_base(folder, tmp_path):
    base, tok = models.load(folder)
    adapted, _ = models.load(folder, lora=LoRA(rank=2), seed=5)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(base(ids).logits, adapted(ids).logits)
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in n for n in trained)
    assert same(adapted, models.load(folder, lora=LoRA(rank=2), seed=5)[0])
    assert not same(adapted, models.load(folder, lora=LoRA(rank=2), seed=6)[0])
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.fill_(0.1)
    saved = models.save(adapted, tok, tmp_path / "adapter")
    assert sorted(p.name for p in saved.glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert "library_name: peft" in (saved / "README.md").read_text()
    back, _ = models.load(saved)
    assert torch.equal(back(ids).logits, adapted(ids).logits)
    assert not torch.equal(back(ids).logits, base(ids).logits)
    assert any(p.requires_grad for p in back.parameters())
    with pytest.raises(models.ModelError, match="already has an adapter"):
        models.load(saved, lora=LoRA(rank=2))


def hub(cache, name: str, **revisions) -> None:
    """A hub cache as a download leaves it: a model and tokenizer at each revision."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    for i, (revision, (model, tok)) in enumerate(revisions.items()):
        commit = f"{i + 1:040x}"
        (place / "refs" / revision).write_text(commit)
        models.save(model, tok, place / "snapshots" / commit)


def test_an_adapter_comes_back_with_the_revision_of_its_base(tmp_path, words, monkeypatch):
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    old, new = (small.build(words, TINY, seed=seed) for seed in (1, 2))
    hub(tmp_path / "cache", "owner/base", first=(old, words), main=(new, words))
    assert same(models.load("owner/base")[0], new)
    ids = torch.tensor([[1, 2, 3, 4]])
    adapted, tok = models.load("owner/base", lora=LoRA(rank=2), revision="first")
    assert torch.equal(adapted(ids).logits, old(ids).logits)
    saved = models.save(adapted, tok, tmp_path / "adapter")
    for revision in (None, "first"):
        assert torch.equal(models.load(saved, revision=revision)[0](ids).logits, old(ids).logits)
    assert torch.equal(models.load(saved, revision="main")[0](ids).logits, new(ids).logits)
    settings = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps(settings | {"revision": None}))  # as other tools leave it
    assert torch.equal(models.load(saved, revision="first")[0](ids).logits, old(ids).logits)
    whole = models.save(old, words, tmp_path / "whole")
    assert same(models.load(whole, revision="first")[0], old), "a folder has no revisions"
    for place in ("owner/base", str(saved), str(whole)):
        models.check(place, "first")
    for place in ("owner/other", str(tmp_path), "owner"):
        with pytest.raises(models.ModelError):
            models.check(place)
    with pytest.raises(models.ModelError):
        models.check("owner/base", "second")


def damage(folder, kind: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "header":
        weights.write_bytes(weights.read_bytes()[:20])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "no config":
        config.unlink()
    elif kind == "bad config":
        config.write_text(config.read_text()[:-30])
    elif kind == "more layers":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    elif kind == "no eos":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({k: v for k, v in settings.items() if k != "eos_token"})
        )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "cannot be loaded: .*cut short or damaged, copy it again"),
        ("header", "cannot be loaded: .*cut short or damaged, copy it again"),
        ("no weights", "cannot be loaded: .*no file named"),
        ("no config", "holds no config.json"),
        ("bad config", "cannot be loaded: .*config.json"),
        ("more layers", "lacks 9 weights, the first is model.layers.2"),
        ("no eos", "has no eos token, so no action could end"),
    ],
)
def test_damaged_folders_are_named_in_one_line(folder, kind, message):
    damage(folder, kind)
    with pytest.raises(models.ModelError, match=message) as error:
        models.load(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "nowhere", "a/b/c"])
def test_a_name_that_is_nothing_says_so(name):
    with pytest.raises(
        models.ModelError, match="does not exist: give a folder, a hub id owner/name, or one of smollm2"
    ):
        models.load(name)


def test_lora_targets_that_do_not_exist(folder):
    with pytest.raises(models.ModelError, match=r"lora.target_modules .'nope'. do not fit this model"):
        models.load(folder, lora=LoRA(target_modules=("nope",)))


def test_a_missing_package_names_the_extra():
    with pytest.raises(models.ModelError, match=r'pip install "branchpoint\[train\]"'):
        models.require("package_that_does_not_exist")


def test_a_padded_embedding_and_a_missing_pad_token(tmp_path):
    """Sixteen rows more than the tokenizer has: those ids do not exist for the codec. pad comes from eos."""
    tok = tokenizer(CHATML, pad_token=None)
    model = models.llama(
        0, vocab_size=len(tok) + 16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    loaded, back = models.load(models.save(model, tok, tmp_path / "padded"))
    assert back.pad_token_id == back.eos_token_id is not None
    codec = ChatCodec(back)
    assert codec.vocabulary == len(tok) == loaded.config.vocab_size - 16
    assert (
        codec.observe(Task("t", "n"), Step("x"), True).tolist()
        == ChatCodec(tok).observe(Task("t", "n"), Step("x"), True).tolist()
    )
    small_model = models.llama(
        0, vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(models.ModelError, match="tokens but the model embeds only 9"):
        models.load(models.save(small_model, tok, tmp_path / "narrow"))


@pytest.mark.slow
def test_smollm2_speaks_and_can_be_saved(tmp_path):
    pytest.importorskip("gguf")
    try:
        model, tok = models.load("smollm2")
    except models.ModelError as error:
        pytest.skip(str(error))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    codec = ChatCodec(tok)
    task = Task("t", "none", prompt=(Message("user", "What is the capital of France?"),))
    ids = codec.observe(task, Step(""), True).tolist()
    start = len(ids)
    with torch.no_grad():
        while ids[-1] not in codec.stop_ids and len(ids) < start + 16:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert codec.text(ids[start:]) == "The capital of France is Paris."
    back, _ = models.load(models.save(model, tok, tmp_path / "smollm2"))
    assert same(back, model)
