"""One update of TRL's GRPOTrainer at a time, on request: the other side of ``trl_update.py``.

Runs in a virtual environment of its own and imports nothing of Branchpoint. One JSON line comes out when it is ready
and one after each update; each line that comes in asks for one more update, and the end of input ends it.

    python benchmarks/trl_side.py rollout_func '{"steps": 4, "leaves": 8, ...}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OUT = os.fdopen(os.dup(1), "w")  # what libraries print must not mix with our lines
TEMPLATE = (
    "{% if tools %}<s>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role[:1] }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def tell(**line: Any) -> None:
    print(json.dumps(line), file=OUT, flush=True)


def tokenizer(vocabulary: int, tools: bool) -> Any:
    """One token a byte. The end token lies beyond what the model can say, so that every reply has its full length."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = [f"<{i}>" for i in range(len(letters), vocabulary)]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate([*letters, *marks])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=marks[-1], eos_token="<end>", chat_template=TEMPLATE
    )
    if made.eos_token_id < vocabulary:
        raise ValueError(f"the end token {made.eos_token_id} can be sampled")
    if tools:  # any reply of a random model counts as a call
        made.response_template = {"fields": {"content": {"content": "text"}}}
        made.parse_response = one_call
    return made


class Clock(TrainerCallback):
    """Waits for a line before each update and reports the processor time of the update."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts, self.start, self.before = counts, 0.0, torch.zeros(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.before = torch.cat([p.detach().flatten() for p in model.parameters()])
        if not sys.stdin.readline():
            os._exit(0)
        self.start = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        seconds = time.process_time() - self.start
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        tell(seconds=seconds, changed=float((after - self.before).abs().max()), **self.counts)


def rollout(shape: dict[str, Any]) -> Any:
    """A multi-turn ``rollout_func``: ``generate`` on the whole context at each turn, then an observation."""
    rng = random.Random(0)

    def run(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        asked = [[rng.randrange(256) for _ in range(shape["prompt"])]] * len(prompts)
        context, mask = torch.tensor(asked), torch.zeros(len(prompts), 0, dtype=torch.long)
        settings = transformers.GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=shape["action"], pad_token_id=0
        )
        model = trainer.accelerator.unwrap_model(trainer.model)
        for _ in range(shape["turns"]):
            with torch.no_grad():
                context = model.generate(context, attention_mask=torch.ones_like(context), generation_config=settings)
            seen = torch.tensor([[rng.randrange(256) for _ in range(shape["observation"])] for _ in prompts])
            ones = mask.new_ones(len(prompts), shape["action"])
            context, mask = torch.cat([context, seen], 1), torch.cat([mask, ones, torch.zeros_like(seen)], 1)
        completions = context[:, shape["prompt"] :].tolist()
        return {"prompt_ids": asked, "completion_ids": completions, "logprobs": None, "env_mask": mask.tolist()}

    return run


class Desk:
    """An environment with one tool."""

    def reset(self, **row: Any) -> None:
        """Start anew."""

    def look(self, place: str) -> str:
        """
        Look at a place.

        Args:
            place: The name of the place to look at, as it was shown before.

        Returns:
            What is there.
        """
        return "a red desk"


def one_call(ids: Any, prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    """Every reply is read as the same call."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def counted(trainer: Any, counts: dict[str, int]) -> None:
    """Count the tokens of each generation: sampled in all, prompt and completion of a rollout."""
    generate = trainer._generate

    def counting(prompts: Any) -> Any:
        result = generate(prompts)
        prompt, completion, mask = result[:3]
        counts.update(sampled=sum(map(sum, mask)), prompt=len(prompt[0]), completion=len(completion[0]))
        return result

    trainer._generate = counting


def main() -> None:
    mode, shape = sys.argv[1], json.loads(sys.argv[2])
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape["model"], eos_token_id=None))
    model.generation_config.eos_token_id = None
    counts: dict[str, int] = {}
    rng, tools = random.Random(1), mode == "environment_factory"
    # As many sampled tokens with one reply more than there are calls.
    reply = -(-shape["turns"] * shape["action"] // (shape["turns"] + 1))
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=shape["groups"] * shape["leaves"],
        num_generations=shape["leaves"],
        max_completion_length=1024,
        max_tool_calling_iterations=shape["turns"] if tools else None,
        generation_kwargs={"max_new_tokens": reply} if tools else None,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        max_steps=shape["steps"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )

    def reward(completions: Any, **_: Any) -> list[float]:
        return [rng.random() for _ in completions]

    trainer = GRPOTrainer(
        model=model,
        args=args,
        reward_funcs=reward,
        processing_class=tokenizer(shape["model"]["vocab_size"], tools),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "x" * 40}]] * 64}),
        rollout_func=None if tools else rollout(shape),
        environment_factory=Desk if tools else None,
        callbacks=[Clock(counts)],
    )
    counted(trainer, counts)
    tell(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__)
    trainer.train()


if __name__ == "__main__":
    main()
