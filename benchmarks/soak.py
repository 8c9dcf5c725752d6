"""Everything at once for as long as you like: policies, schemas, tools, streams, cancellations, shared beginnings.

    python benchmarks/soak.py --seconds 3600

Starts a server and puts mixed requests to it, in rounds; every second round some clients go away in the middle, and
some requests run out of time. The same request must give the same text in whatever company, answers must keep to their
schemas, after each round what the clients counted must be what ``/metrics`` says, and memory must not grow once a
quarter of the time is over. Further arguments go to ``bitmtp serve``; with ``--replicas``, each of which has figures of
its own, the figures are not compared. Prints one JSON object a round and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema

POLICIES = ("autoregressive", "speculative", "auto", "confidence", "hybrid")
SHARED = "The otter left a letter under the old stone bridge before winter. " * 3
TASKS = ("Say what this is about.", "Name three birds.", "Write a line of a song.", "What is a bridge?")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bird", "town", "song"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA, "strict": True}}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2},
    {"temperature": 0},
    {"stop": ["e"]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "parallel_tool_calls": False},
)
LONG = 200  # tokens of a text whose client goes away
GROWTH = 1.1  # of memory, after the first quarter of the rounds
PROMPT, GENERATED = "bitmtp_prompt_tokens_total", "bitmtp_generated_tokens_total"
POLICY = 'bitmtp_policy_texts_total{{policy="{}"}}'
FIGURES = (GENERATED, PROMPT, "bitmtp_texts_total", "bitmtp_requests_total", *map(POLICY.format, POLICIES))


@dataclass
class Tally:
    """What the clients of a round saw."""

    ends: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)  # what those that went away cannot know
    wrong: list[str] = field(default_factory=list)


def body(index: int) -> dict[str, Any]:
    """The request of a number: a few hundred of them differ."""
    rng = random.Random(index)
    prompt = (SHARED if rng.random() < 0.5 else "") + rng.choice(TASKS)
    kind, policy = KINDS[index % len(KINDS)], POLICIES[index // len(KINDS) % len(POLICIES)]
    asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 48, "seed": index % 7, "temperature": 1}
    return {**asked, "decoding": {"policy": policy}, **kind}


def lines(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def ask(client: httpx.Client, asked: dict[str, Any], tally: Tally) -> str | None:
    """Send a request; what it said."""
    n, policy = asked.get("n", 1), POLICY.format(asked["decoding"]["policy"])
    tally.figures.update({"bitmtp_requests_total": 1, "bitmtp_texts_total": n, policy: n})
    answer = client.post("/v1/chat/completions", json=asked).json()
    if "error" in answer:
        tally.ends[answer["error"]["code"]] += 1
        tally.wrong.append(f"{asked}: {answer['error']['message']}")
        return None
    tally.figures[GENERATED] += answer["usage"]["completion_tokens"]
    tally.figures[PROMPT] += n * answer["usage"]["prompt_tokens"]
    for choice in answer["choices"]:
        tally.ends[choice["finish_reason"]] += 1
        check(asked, choice, tally)
    return json.dumps([[without_ids(choice["message"]), choice["finish_reason"]] for choice in answer["choices"]])


def give_up(client: httpx.Client, asked: dict[str, Any], rng: random.Random, tally: Tally) -> None:
    """Begin a long text, and go away after some events, or let it run out of time."""
    n, policy = asked.get("n", 1), POLICY.format(asked["decoding"]["policy"])
    tally.figures.update({"bitmtp_requests_total": 1, "bitmtp_texts_total": n})
    tally.unknown.update({PROMPT: n * 10_000, policy: n})
    late = n == 1 and rng.random() < 0.5
    long = {**asked, "max_tokens": LONG, "stream": True, "decoding": {**asked["decoding"], "trace": True}}
    events = rng.randrange(20)
    with client.stream(
        "POST", "/v1/chat/completions", json=long | ({"timeout": events / 10 + 0.1} if late else {})
    ) as got:
        for number, event in enumerate(lines(got)):
            tally.figures[GENERATED] += sum(len(choice.get("tokens", ())) for choice in event.get("choices", ()))
            if not late and number >= events:
                break
    tally.ends["late" if late else "left"] += 1
    if not late:
        tally.unknown[GENERATED] += n * LONG


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the random names of its calls."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"content": message["content"], "calls": calls}


def check(asked: dict[str, Any], choice: dict[str, Any], tally: Tally) -> None:
    """What was promised in a schema is kept."""
    message, ended = choice["message"], choice["finish_reason"] != "length"
    promised = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    if "response_format" in asked and ended:
        promised.append(message["content"])
    if asked.get("tool_choice") == "required" and ended and not promised:
        tally.wrong.append(f"{asked}: no call in {message}")
    for text in promised:
        try:
            jsonschema.validate(json.loads(text), SCHEMA)
        except (ValueError, jsonschema.ValidationError) as error:
            tally.wrong.append(f"{asked}: {text!r} is not by the schema ({error})")


def metrics(client: httpx.Client) -> Counter[str]:
    """The figures of the server, each summed over its labels; of requests only those for texts that were answered."""
    found: Counter[str] = Counter()
    for line in client.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        other = bare == "bitmtp_requests_total" and ('path="/v1/chat/completions"' not in name or '"200"' not in name)
        if name in FIGURES:
            found[name] += int(float(value))
        elif bare in (*FIGURES, "bitmtp_running", "bitmtp_waiting") and not other:
            found[bare] += int(float(value))
    return found


def settled(client: httpx.Client, seconds: float = 60) -> Counter[str]:
    """The figures once nothing is running or waiting."""
    end = time.monotonic() + seconds
    while (found := metrics(client))["bitmtp_running"] or found["bitmtp_waiting"]:
        if time.monotonic() > end:
            raise SystemExit(f"texts that nobody waits for still run: {dict(found)}")
        time.sleep(0.05)
    return found


def compare(tally: Tally, before: Counter[str], after: Counter[str]) -> None:
    """What the server counted must be what the clients did, as far as they can know."""
    for name in FIGURES:
        counted, low = after[name] - before[name], tally.figures[name]
        if not low <= counted <= low + tally.unknown[name]:
            tally.wrong.append(
                f"{name}: clients counted {low} (and at most {tally.unknown[name]} more), it says {counted}"
            )


def run_round(url: str, arguments: argparse.Namespace, number: int, texts: dict[int, str]) -> dict[str, Any]:
    """Requests for a while, then the comparison."""
    tallies, end = [Tally() for _ in range(arguments.clients)], time.monotonic() + arguments.round

    def work(client_number: int) -> None:
        rng, tally = random.Random(number * 1000 + client_number), tallies[client_number]
        with httpx.Client(base_url=url, timeout=600, verify=False) as client:
            while time.monotonic() < end:
                index = rng.randrange(arguments.pool)
                if number % 2 == 1 and rng.random() < 0.3:
                    give_up(client, body(index), rng, tally)
                    continue
                said = ask(client, body(index), tally)
                if said is not None and texts.setdefault(index, said) != said:
                    tally.wrong.append(f"request {index}: {said}, before {texts[index]}")

    with httpx.Client(base_url=url, timeout=60, verify=False) as client:
        before = settled(client)
        with ThreadPoolExecutor(arguments.clients) as threads:
            list(threads.map(work, range(arguments.clients)))
        whole = Tally()
        for tally in tallies:
            whole.ends += tally.ends
            whole.figures += tally.figures
            whole.unknown += tally.unknown
            whole.wrong += tally.wrong
        after = settled(client)
        if arguments.compared:
            compare(whole, before, after)
    return {"round": number, "ends": dict(whole.ends), "figures": dict(whole.figures), "wrong": whole.wrong}


@contextmanager
def serving(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """A server of its own: address and process id. It must end in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bitmtp", "serve", "--port", str(port), "--queue", "1000", *arguments]
    with open(os.devnull, "w") as nowhere, subprocess.Popen(command, stderr=nowhere) as process:
        try:
            wait_for_health(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
        if process.wait(60) not in (0, -signal.SIGTERM):  # uvicorn raises the signal again once all is done
            raise SystemExit(f"the server ended with {process.returncode}")


def wait_for_health(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers."""
    while process.poll() is None:
        try:
            if httpx.head(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit(f"the server ended with {process.returncode} before it answered")


def memory_mib(pid: int) -> int:
    """Resident memory of a process and those that it has started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    pages, family = 0, [pid]
    for member in family:
        family += children.get(member, ())
        with suppress(OSError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--round", type=float, default=15, help="seconds of a round")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pool", type=int, default=350, help="distinct requests")
    arguments, server = parser.parse_known_args()
    arguments.compared = "--replicas" not in server
    texts: dict[int, str] = {}
    wrong, memory = 0, list[int]()
    rounds = max(round(arguments.seconds / arguments.round), 1)
    with serving(server) as (url, pid):
        for number in range(rounds):
            report = run_round(url, arguments, number, texts)
            memory.append(memory_mib(pid))
            if number > max(rounds // 4, 8) and memory[-1] > GROWTH * memory[rounds // 4]:
                report["wrong"].append(f"memory grows: {memory} MiB")
            wrong += len(report["wrong"])
            print(json.dumps({**report, "memory_mib": memory[-1], "wrong": report["wrong"][:5]}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
