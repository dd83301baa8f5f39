"""Seconds that transformers' continuous batching takes with each attention, on a model as large as is said, in one run.

`python benchmarks/continuous_batching.py` prints the median of each, and checks that the tokens are those of eager
attention.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import fastattn

IMPLEMENTATIONS = ("eager", "sdpa", fastattn.integrations.transformers.IMPLEMENTATION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt; they are spread from 16 to this")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=4, max_position_embeddings=8192, **sizes)
    model = LlamaForCausalLM(config).eval()
    lengths = torch.linspace(16, options.longest, options.requests).long().tolist()
    prompts = [torch.randint(1000, (n,)).tolist() for n in lengths]
    pages = sum(-(-(n + options.new_tokens) // 32) for n in lengths)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=pages + 8, max_batch_tokens=512)
    generation = GenerationConfig(max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=1000, pad_token_id=0)
    seconds: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    tokens = {}
    for _ in range(options.rounds):
        for name, taken in seconds.items():
            model.set_attn_implementation(name)
            start = time.perf_counter()
            results = model.generate_batch(
                inputs=prompts, generation_config=generation, continuous_batching_config=batching
            )
            taken.append(time.perf_counter() - start)
            tokens[name] = [result.generated_tokens for result in results.values()]
            assert tokens[name] == tokens["eager"], f"{name} has other tokens than eager"
    count = options.requests * options.new_tokens
    print(f"{options.requests} prompts of 16 to {options.longest} tokens, {options.new_tokens} new ones each, fp32")
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, median in medians.items():
        share = median / medians["sdpa"]
        print(f"{name:9} {median:6.2f} s  {1e3 * median / count:6.2f} ms a token  {share:5.2f} of the time with sdpa")


if __name__ == "__main__":
    main()
