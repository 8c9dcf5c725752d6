"""Same text: speculative token ids against autoregressive ones, over Spec-Bench.

    python benchmarks/exactness.py --data question.jsonl --output exactness.jsonl

Every question (its first turn, whole, in the chat template) is written autoregressively and speculatively with several
block sizes: greedy, and at temperature 1 with the question's number as seed; every eighth question also with penalties
and top-p. The texts of a question share passes, and their prompt's K/V, neither of which may change a token; every
eighth question writes each text alone as well. With ``--shapes`` it is trees, windowed drafts, the adaptive policy, and
shapes switched at random in the middle of a text instead, greedy and at temperature 1. The adaptive policy learns what
passes cost, as it does by default: its shapes differ from run to run, its texts must not. Texts must agree between
thread counts too. Results are appended to the output file and skipped by the next run; start a new file after a change
of the engine. Exit code 1 if any text differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from switched import write, write_switched

from bitmtp.benchmark.prompts import encode_prompts, read_prompts
from bitmtp.benchmark.records import ResultLog, model_fingerprint
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
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


def policies_of(engine: Engine) -> list[Policy]:
    """Autoregressive decoding first, then speculative decoding with each block size that the model has."""
    size = engine.config.block_size
    sizes = [each for each in BLOCK_SIZES if each <= size]
    return [
        make_policy("autoregressive", size),
        *(make_policy("speculative", size, block_size=each) for each in sizes),
    ]


def check(engine: Engine, index: int, prompt: list[int], max_tokens: int) -> dict[str, object]:
    """Write a question in every way; which texts differ from the autoregressive one, and from which token on.

    The seed is the question's number.
    """
    thorough, policies = index % SUBSET == 0, policies_of(engine)
    samplings = {name: each for name, each in SAMPLINGS.items() if thorough or name != "penalties"}
    requests = {
        (name, policy.block_size): Request(prompt, max_tokens, policy, sampling, seed=index)
        for name, sampling in samplings.items()
        for policy in policies
    }
    texts = dict(zip(requests, (each.token_ids for each in engine.generate_batch([*requests.values()])), strict=True))
    differs = {
        f"{name} D={size}": first_difference(texts[name, 1], ids)
        for (name, size), ids in texts.items()
        if ids != texts[name, 1]
    }
    for (name, size), request in requests.items() if thorough else ():
        alone = engine.generate(request).token_ids
        if alone != texts[name, 1]:
            differs[f"{name} D={size} alone"] = first_difference(texts[name, 1], alone)
    baselines = [texts[name, 1] for name in samplings]
    return {
        "texts": len(texts) * (2 if thorough else 1),
        "tokens": sum(map(len, texts.values())),
        "digest": hashlib.sha256(json.dumps(baselines).encode()).hexdigest(),
        "differs": differs,
    }


def check_shapes(engine: Engine, index: int, prompt: list[int], max_tokens: int) -> dict[str, object]:
    """As :func:`check`, under every kind of shape; also counts which of the rarer kinds of pass there were."""
    differs: dict[str, int] = {}
    baselines: list[list[int]] = []
    used: Counter[str] = Counter()
    for name, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1.0, seed=index))):
        written = write(engine, prompt, sampling, max_tokens)
        texts = {shape: text.written for shape, text in written.items()}
        texts["switched"] = write_switched(engine, prompt, sampling, max_tokens, index)
        alone = Request(prompt, max_tokens, make_policy("auto", engine.config.block_size), sampling, seed=index)
        texts["auto, alone"] = engine.generate(alone).token_ids  # in the backend's own loop, if it has one
        baselines.append(texts["autoregressive"])
        for shape, ids in texts.items():
            if ids != baselines[-1]:
                differs[f"{name} {shape}"] = first_difference(baselines[-1], ids)
        for text in written.values():
            stats = text.stats
            used.update(windowed=stats.windowed, copied=stats.copied, ahead=stats.ahead, ahead_used=stats.ahead_used)
    return {
        "texts": len(baselines) * len(texts),
        "tokens": sum(map(len, baselines)) * len(texts),
        "digest": hashlib.sha256(json.dumps(baselines).encode()).hexdigest(),
        "differs": differs,
        "used": used,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token that differs."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def summary(log: ResultLog, keys: dict[str, str]) -> int:
    """Print what was found; returns how many texts differ. ``keys`` maps a question to what it shares with others."""
    texts = wrong = 0
    used: Counter[str] = Counter()
    digests: dict[str, str] = {}
    for key, shared in keys.items():
        record = log[key]
        texts += record["texts"]
        used.update(record.get("used", {}))
        for name, place in record["differs"].items():
            wrong += 1
            print(f"MISMATCH {key}: {name} differs from token {place} on")
        if digests.setdefault(shared, record["digest"]) != record["digest"]:
            wrong += 1
            print(f"MISMATCH {key}: the autoregressive text differs between thread counts")
    print(f"{len(keys)} questions × thread counts, {texts} texts, {wrong} mismatches")
    if used:
        print("passes among them:", ", ".join(f"{count} {name}" for name, count in used.items()))
    return wrong


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--output", required=True, help="JSON lines; done cases are skipped")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--shapes", action="store_true", help="other shapes than plain blocks")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="first questions only")
    parser.add_argument("--every", type=int, default=1, help="every n-th question only")
    parser.add_argument("--start", type=int, default=0, help="first question; with --every, to share the work")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Check every case that is not done yet; the number of mismatches."""
    folder = Path(options.model or shipped_model())
    log, model = ResultLog(options.output), model_fingerprint(folder)
    keys: dict[str, str] = {}
    checking, kind = (check_shapes, " shapes") if options.shapes else (check, "")
    for threads in options.threads:
        engine = Engine.load(folder, backend=options.backend, threads=threads)
        prompts = encode_prompts(engine, read_prompts(options.data)[: options.limit])
        for index in range(options.start, len(prompts), options.every):
            shared = f"{model} {engine.backend.name} {options.max_tokens} {index}{kind}"
            key = f"{shared} threads={threads}"
            keys[key] = shared
            if key not in log:
                log.add(key, **checking(engine, index, prompts[index], options.max_tokens))
                print(f"\r{threads} threads, question {index + 1} of {len(prompts)} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return summary(log, keys)


if __name__ == "__main__":
    try:
        sys.exit(1 if run(parse()) else 0)
    except BitMTPError as error:
        sys.exit(f"exactness: {error}")
