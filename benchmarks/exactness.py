"""Same text: speculative token ids against autoregressive ones, over Spec-Bench.

    python benchmarks/exactness.py --data question.jsonl --output exactness.jsonl

Every question (its first turn, whole, in the chat template) is written autoregressively and speculatively with several
block sizes: greedy, and at temperature 1 with the question's number as seed; every eighth question also with penalties
and top-p, and with all of its policies as one batch. Autoregressive texts must agree between thread counts too. Results
are appended to the output file and skipped by the next run; start a new file after a change of the engine. Exit code 1
if any text differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.benchmark.records import ResultLog, model_fingerprint
from bitmtp.decoding.policies import make_policy
from bitmtp.decoding.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BitMTPError
from bitmtp.models import shipped_model
from bitmtp.sampling import Sampling

BLOCK_SIZES = (2, 4, 8, 16)
SUBSET = 8  # every eighth question has the longer checks
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "penalties": Sampling(
        temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2
    ),
}


@dataclass(frozen=True)
class Case:
    """One question under one way of sampling."""

    index: int
    prompt: list[int]
    name: str

    def request(self, policy: Policy, max_tokens: int) -> Request:
        """What to generate; the seed is the question's number."""
        return Request(self.prompt, max_tokens, policy, SAMPLINGS[self.name], seed=self.index)


def cases(prompts: Sequence[list[int]]) -> Iterator[Case]:
    """Every case, questions in order."""
    for index, prompt in enumerate(prompts):
        yield Case(index, prompt, "greedy")
        yield Case(index, prompt, "sampled")
        if index % SUBSET == 0:
            yield Case(index, prompt, "penalties")


def check(engine: Engine, case: Case, max_tokens: int) -> dict[str, object]:
    """Write a case under every policy; which ones differ from the autoregressive text, and from which token on."""
    size = engine.config.block_size
    policies = [make_policy("autoregressive", size)]
    policies += [make_policy("speculative", size, block_size=each) for each in BLOCK_SIZES if each <= size]
    requests = [case.request(policy, max_tokens) for policy in policies]
    with engine.session() as session:  # the prompt is prefilled once: reuse must not matter either
        texts = []
        for request in requests:
            generation = session.generate(request)
            for _ in generation:
                pass
            texts.append(generation.result.token_ids)
    names = [str(policy.block_size) for policy in policies]
    if case.index % SUBSET == 0:
        texts += [result.token_ids for result in engine.generate_batch(requests)]
        names += [f"batch {name}" for name in names]
    differs = {name: first_difference(texts[0], ids) for name, ids in zip(names, texts, strict=True) if ids != texts[0]}
    digest = hashlib.sha256(json.dumps(texts[0]).encode()).hexdigest()
    return {"tokens": len(texts[0]), "texts": len(texts), "digest": digest, "differs": differs}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token that differs."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def summary(log: ResultLog, keys: dict[str, str]) -> int:
    """Print what was found; returns how many texts differ. ``keys`` maps each case to what it shares with others."""
    texts, wrong = Counter[str](), 0
    digests: dict[str, str] = {}
    for key, shared in keys.items():
        record = log[key]
        texts[key.rsplit(" ", 1)[1]] += record["texts"]
        for name, place in record["differs"].items():
            wrong += 1
            print(f"MISMATCH {key}: block size {name} differs from token {place} on")
        if digests.setdefault(shared, record["digest"]) != record["digest"]:
            wrong += 1
            print(f"MISMATCH {key}: the autoregressive text differs between thread counts")
    print(", ".join(f"{name}: {number} texts" for name, number in texts.items()))
    print(f"{len(keys)} cases, {wrong} mismatches")
    return wrong


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--output", required=True, help="JSON lines; done cases are skipped")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="first questions only")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Check every case that is not done yet; the number of mismatches."""
    folder = Path(options.model or shipped_model())
    log, model = ResultLog(options.output), model_fingerprint(folder)
    keys: dict[str, str] = {}
    for threads in options.threads:
        engine = Engine.load(folder, backend=options.backend, threads=threads)
        prompts = encode_prompts(engine, read_prompts(options.data)[: options.limit])
        for case in cases(prompts):
            shared = f"{model} {engine.backend.name} {options.max_tokens} {case.index} {case.name}"
            key = f"{model} {engine.backend.name} {options.max_tokens} {threads} {case.index} {case.name}"
            keys[key] = shared
            if key not in log:
                log.add(key, **check(engine, case, options.max_tokens))
                print(f"\r{threads} threads, question {case.index + 1} of {len(prompts)} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return summary(log, keys)


if __name__ == "__main__":
    try:
        sys.exit(1 if run(parse()) else 0)
    except BitMTPError as error:
        sys.exit(f"exactness: {error}")
