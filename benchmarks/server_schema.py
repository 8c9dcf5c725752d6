"""JSON-schema requests under every policy: valid if they end, nearly all end, and no lossless text differs.

    bitmtp serve &
    python benchmarks/server_schema.py --count 200

Prints one JSON object and exits with 1 if an answer that ended is not valid, fewer than 95% end, or the texts differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema

POLICIES = ("autoregressive", "speculative", "auto", "confidence", "hybrid")
LOSSLESS = ("speculative", "auto")
TOPICS = ("a book", "a town", "a recipe", "a bird", "a bicycle", "a meeting", "a song", "a river")
PATTERNS = ("^[A-Z]{3}-[0-9]{2}$", "^(red|green|blue)$", "^[0-9]{4}-[0-1][0-9]$", "^#[0-9a-f]{6}$")


def leaf(rng: random.Random) -> dict[str, Any]:
    """A schema of a plain value, of bounded length."""
    return rng.choice(
        [
            {"type": "string", "maxLength": 24},
            {"type": "integer", "minimum": 0, "maximum": 9999},
            {"type": "boolean"},
            {"enum": rng.sample(["low", "middle", "high", "none", "both"], 3)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 5}]},
        ]
    )


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """An object whose members are values, arrays and objects."""
    names = rng.sample(["name", "size", "kind", "code", "parts", "place", "year", "notes"], rng.randint(2, 4))
    members: dict[str, Any] = {}
    for name in names:
        kind = rng.random()
        if kind < 0.2 and depth:
            members[name] = schema(rng, depth - 1)
        elif kind < 0.4:
            members[name] = {"type": "array", "items": leaf(rng), "minItems": 1, "maxItems": 3}
        else:
            members[name] = leaf(rng)
    return {"type": "object", "properties": members, "required": names, "additionalProperties": False}


def ask(arguments: argparse.Namespace, index: int, policy: str) -> dict[str, Any]:
    """The answer's choice."""
    rng = random.Random(index)
    asked = schema(rng, 2)
    names = ", ".join(asked["properties"])
    body = {
        "messages": [{"role": "user", "content": f"Describe {rng.choice(TOPICS)} as JSON with the members {names}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked, "strict": True}},
        "max_tokens": arguments.max_tokens,
        "temperature": 0 if index % 2 else 1,
        "seed": index,
        "decoding": {"policy": policy},
    }
    request = urllib.request.Request(
        f"{arguments.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return {"text": choice["message"]["content"], "ended": choice["finish_reason"] == "stop", "schema": asked}


def valid(answer: dict[str, Any]) -> bool:
    """Whether it is JSON that matches its schema."""
    try:
        jsonschema.validate(json.loads(answer["text"]), answer["schema"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main(arguments: argparse.Namespace) -> int:
    """Run, print, judge."""
    counts: dict[str, Counter[str]] = {policy: Counter() for policy in POLICIES}
    texts: dict[str, list[str]] = {}
    with ThreadPoolExecutor(arguments.clients) as threads:
        for policy in POLICIES:
            answers = list(threads.map(lambda index, p=policy: ask(arguments, index, p), range(arguments.count)))
            texts[policy] = [answer["text"] for answer in answers]
            for answer in answers:
                counts[policy]["ended"] += answer["ended"]
                counts[policy]["ended and invalid"] += answer["ended"] and not valid(answer)
            print(policy, dict(counts[policy]), file=sys.stderr)
    plain = texts["autoregressive"]
    differ = {name: sum(a != b for a, b in zip(texts[name], plain, strict=True)) for name in LOSSLESS}
    print(json.dumps({"count": arguments.count, "policies": counts, "differ from autoregressive": differ}))
    enough = all(each["ended"] >= 0.95 * arguments.count for each in counts.values())
    wrong = sum(differ.values()) + sum(each["ended and invalid"] for each in counts.values())
    return 0 if enough and not wrong else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=400)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse()))
