"""Speculative decoding against transformers' assisted generation, on the same weights.

    python benchmarks/assisted.py [--prompts 10] [--tokens 100] [--draft M] [--target M]

Three ways of writing the same number of tokens in float32 at temperature 0, in turn and in one
process: transformers' `generate` on the target alone; `generate` with the draft as
`assistant_model`; this project's speculative decoder on the same model objects. All texts must be
equal. Tokens a target pass count what the target's forward passes after the prompt have yielded.
By default the models of the default pair, loaded from their GGUF files by transformers; the draft
and the target may be folders or names on the hub. `lookup.py` compares with llama-cpp-python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specguard_chains import background
from specguard_chains.adapters import HuggingFaceEngine
from specguard_chains.decoding.decoder import Request
from specguard_chains.decoding.engine import Prompt
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative import SpeculativeDecoder
from specguard_chains.models import DEFAULT_PAIR, resolve_pair

QUESTIONS = [
    "Weng earns $12 an hour for babysitting. Yesterday she babysat for 50 minutes. How much?",
    "A train goes 60 km in 45 minutes. How far does it go in 3 hours at the same speed?",
    "Tom has 3 boxes of 12 pencils and gives away a third of them. How many are left?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shirt costs $40 and is reduced by 15 %. What does it cost now?",
    "Explain in three sentences why the sky is blue.",
    "Sum the whole numbers from 1 to 50. Show the steps.",
    "Write a Python function that reverses the words of a sentence.",
    "Ann reads 20 pages a day. How long does she need for two books of 310 pages each?",
    "A tank holds 240 litres and loses 5 litres an hour. When is it three quarters full?",
]


def load(name: str) -> tuple[Any, HuggingFaceEngine]:
    """Return a model in float32, and the engine over it."""
    path = Path(name)
    where: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model, HuggingFaceEngine(model, AutoTokenizer.from_pretrained(**where), n_ctx=1024)


class Passes:
    """Counts a model's forward passes."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1

    def of(self, work: Callable[[], Any]) -> tuple[Any, int, float]:
        """Return what work returns, the passes that it took, and the seconds."""
        before, start = self.count, time.perf_counter()
        result = work()
        return result, self.count - before, time.perf_counter() - start


def main() -> None:
    pair = resolve_pair(DEFAULT_PAIR)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft", default=str(pair.draft))
    parser.add_argument("--target", default=str(pair.target))
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()

    (draft_model, draft), (target_model, target) = map(load, (arguments.draft, arguments.target))
    passes = Passes(target_model)
    decoder = SpeculativeDecoder(draft, target, Speculation((1,) * 20))
    for model in (draft_model, target_model):  # plain greedy decoding, whatever the file says
        model.generation_config.update(
            do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=None
        )
    ways = ["target alone", "assistant_model", "speculative"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    equal = dict.fromkeys(ways, 0)
    for question in QUESTIONS[: arguments.prompts]:
        prompt = Prompt(messages=[{"role": "user", "content": question}])
        ids = torch.tensor([target.encode(prompt)])

        def generate(assistant: Any = None, ids: torch.Tensor = ids) -> list[int]:
            with torch.inference_mode():
                out = target_model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=arguments.tokens,
                    assistant_model=assistant,
                    do_sample=False,
                )
            tokens: list[int] = out[0, ids.shape[1] :].tolist()
            return tokens

        def speculate(prompt: Prompt = prompt) -> list[int]:
            request = Request(prompt, Sampling(temperature=0), max_tokens=arguments.tokens)
            text = "".join(step.text for step in background.run(decoder, request))
            return target.encode_text(text)

        for engine in (draft, target):
            engine.clear()
        results = {
            "target alone": passes.of(generate),
            "assistant_model": passes.of(lambda: generate(draft_model)),
            "speculative": passes.of(speculate),
        }
        expected = b"".join(map(target.token_bytes, results["target alone"][0]))
        written = len(results["target alone"][0])
        for way, (tokens, count, spent) in results.items():
            equal[way] += b"".join(map(target.token_bytes, tokens)) == expected
            seconds[way].append(spent)
            # The prompt's own pass yields the first token in `generate`, none in the decoder.
            rates[way].append(written / count)
        print(
            {way: f"{seconds[way][-1]:.1f} s, {rates[way][-1]:.2f} a pass" for way in ways},
            flush=True,
        )
    print(f"\n{len(seconds['speculative'])} prompts, up to {arguments.tokens} tokens, float32:")
    for way in ways:
        ratios = [a / b for a, b in zip(seconds[way], seconds["target alone"], strict=True)]
        print(
            f"  {way:16} {equal[way]} texts equal, {statistics.mean(rates[way]):5.2f} tokens a "
            f"target pass (the prompt's included), time to the target's alone: median "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
