"""Load on an OpenAI-compatible server: mixed prompts, a third of the requests cancelled, every finished text checked.

Each text is compared with the one that the same server wrote for the same request alone, before the load:

    bitmtp serve &
    python benchmarks/server_load.py --clients 8 --seconds 300 --pid $!

Prints one JSON object and exits with 1 if an answer was wrong, or an error other than 429 occurred.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SENTENCE = "the otter left a letter under the old stone bridge before winter and nobody in the garden saw the signal"
TASKS = ("Explain what this is about:", "Write a short story with these words:", "Sort these words and say why:")


@dataclass(frozen=True)
class Ask:
    """A request of the pool."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self, model: str | None) -> bytes:
        """JSON of a streamed chat request."""
        return json.dumps(
            {
                **({"model": model} if model else {}),
                "messages": [{"role": "user", "content": self.prompt}],
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


@dataclass
class Tally:
    """What happened."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


@dataclass
class Answer:
    """An answer as it came."""

    status: int
    text: str = ""
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    error: str | None = None


def pool(count: int, long_words: int) -> list[Ask]:
    """Distinct requests: half short, half long; half greedy, half sampled; long ones share beginnings by threes."""
    made = []
    for index in range(count):
        rng = random.Random(index // 6)
        words = long_words if index % 2 else 8
        text = " ".join(rng.choice(SENTENCE.split()) for _ in range(words))
        prompt = f"{TASKS[index % 3]} {text}" if index % 2 == 0 else f"{text}\n{TASKS[index % 3]}"
        made.append(Ask(prompt, 32 + 16 * (index % 5), 0.0 if index % 4 < 2 else 1.0, index))
    return made


async def stream(url: str, body: bytes, stop_after: int | None = None) -> Answer:
    """Send a request and read its events; go away after some of them if asked to."""
    parts = urlsplit(url)
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        answer = Answer(status=int((await reader.readline()).split()[1]))
        events = 0
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            _read_event(json.loads(line[6:]), answer, begun)
            events += 1
            if stop_after is not None and events > stop_after:
                break
        return answer
    finally:
        writer.transport.abort()


def _read_event(event: dict[str, Any], answer: Answer, begun: float) -> None:
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        if content := choice["delta"].get("content"):
            answer.last = time.perf_counter() - begun
            answer.first = answer.first or answer.last
            answer.text += content
            answer.tokens += 1  # servers that send no usage send an event a token
    if usage := event.get("usage"):
        answer.tokens = usage["completion_tokens"]


async def client(
    arguments: argparse.Namespace, number: int, asks: list[Ask], alone: list[Answer], tally: Tally
) -> None:
    """One client: a request after the other until time is up."""
    rng = random.Random(1000 + number)
    while time.perf_counter() < arguments.end:
        index = rng.randrange(len(asks))
        leave = rng.randrange(0, 20) if rng.random() < arguments.cancel else None
        answer = await stream(arguments.url, asks[index].body(arguments.model), leave)
        _note(tally, answer, alone[index], leave, f"request {index}")
        if answer.status == 429:
            await asyncio.sleep(rng.uniform(0.5, 1.5))


def _note(tally: Tally, answer: Answer, alone: Answer, leave: int | None, name: str) -> None:
    if answer.status != 200 or answer.error:
        tally.ends["429" if answer.status == 429 else f"error {answer.status} {answer.error}"] += 1
        return
    if not alone.text.startswith(answer.text) or (leave is None and answer.text != alone.text):
        tally.wrong.append(f"{name}: {answer.text!r}, alone {alone.text!r}")
    tally.ends["finished" if leave is None else "cancelled"] += 1
    if leave is not None:  # an event may bring several tokens, and the usage did not arrive
        answer.tokens = round(alone.tokens * len(answer.text) / max(len(alone.text), 1))
    tally.tokens += answer.tokens
    if answer.first:
        tally.ttft.append(answer.first)
    if answer.tokens > 8:
        tally.tpot.append((answer.last - answer.first) / (answer.tokens - 1))


async def watch_memory(arguments: argparse.Namespace, tally: Tally) -> None:
    """Resident memory of the server (MiB), 20 times."""
    while arguments.pid and time.perf_counter() < arguments.end:
        pages = int(Path(f"/proc/{arguments.pid}/statm").read_text().split()[1])
        tally.memory.append(pages * 4096 >> 20)
        await asyncio.sleep(arguments.seconds / 20)


def quantiles(values: list[float]) -> dict[str, float]:
    """p50 and p95 in milliseconds."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=20)
    return {"p50_ms": round(statistics.median(values) * 1e3, 2), "p95_ms": round(cuts[18] * 1e3, 2)}


async def main(arguments: argparse.Namespace) -> int:
    """Run, print, judge."""
    asks = pool(arguments.pool, arguments.long_words)
    alone = [await stream(arguments.url, ask.body(arguments.model)) for ask in asks]
    if bad := next((answer for answer in alone if answer.status != 200 or answer.error), None):
        print(f"a request failed before any load: {bad.status} {bad.error}", file=sys.stderr)
        return 1
    tally, begun = Tally(), time.perf_counter()
    arguments.end = begun + arguments.seconds
    clients = [client(arguments, number, asks, alone, tally) for number in range(arguments.clients)]
    await asyncio.gather(watch_memory(arguments, tally), *clients)
    seconds = time.perf_counter() - begun
    errors = sum(count for end, count in tally.ends.items() if end.startswith("error"))
    report = {
        "clients": arguments.clients,
        "seconds": round(seconds, 1),
        "ends": dict(tally.ends),
        "wrong": len(tally.wrong),
        "tokens_per_second": round(tally.tokens / seconds, 1),
        "ttft": quantiles(tally.ttft),
        "tpot": quantiles(tally.tpot),
        "memory_mib": tally.memory,
    }
    print(json.dumps(report))
    for line in tally.wrong[:5]:
        print(line, file=sys.stderr)
    return 1 if (tally.wrong and not arguments.no_check) or errors else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="model name to send; default: none")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--cancel", type=float, default=1 / 3, help="share of requests whose client goes away")
    parser.add_argument("--pool", type=int, default=24, help="distinct requests")
    parser.add_argument("--long-words", type=int, default=300, help="words of the long prompts")
    parser.add_argument("--pid", type=int, help="process whose memory to watch")
    parser.add_argument("--no-check", action="store_true", help="do not judge texts (for servers that promise nothing)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
