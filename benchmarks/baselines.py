"""Other ways to decode the same backbone, on the same prompts and threads, taking turns request by request.

    python benchmarks/baselines.py --data FOLDER --output baselines.jsonl --llama

* prompt lookup: the tokens that followed the last occurrence of the text's own ending are drafted, for nothing, and
  verified in one pass (github.com/apoorvumang/prompt-lookup-decoding), here on this project's backend;
* llama.cpp (`--llama`; needs `pip install llama-cpp-python gguf`): the backbone as a GGUF file of its `bitnet`
  architecture, ternary weights as Q4_0 and the embedding as Q8_0, which hold them but for the rounding of scales to 16
  bits (its ternary types want rows of a multiple of 256); plain, and with its own prompt lookup;
* `--gguf FILE`: any other GGUF file with the same tokenizer, in llama.cpp.

A run that was ended goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bitmtp import checkpoint
from bitmtp.backends.base import Head, causal_rows
from bitmtp.benchmark.environment import environment
from bitmtp.benchmark.records import ResultLog, model_fingerprint
from bitmtp.cli.render import print_table
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BitMTPError
from bitmtp.evaluation.intervals import bootstrap
from bitmtp.evaluation.plan import digest
from bitmtp.models import shipped_model
from bitmtp.sampling import GREEDY
from bitmtp.study.record import interleave
from bitmtp.study.workloads import WORKLOADS, build
from bitmtp.ternary import unpack

NGRAM = 3  # longest ending that is looked up


@dataclass(frozen=True, slots=True)
class Written:
    """A text: its token ids, milliseconds to the first one, seconds for the others."""

    ids: list[int]
    ttft: float
    seconds: float


class Contender(Protocol):
    """A way to write a text."""

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[Sequence[int]]:
        """Tokens as they are committed; the caller stops at ``max_tokens`` or an end-of-sequence token."""
        ...


def write(contender: Contender, prompt: list[int], max_tokens: int, eos: frozenset[int]) -> Written:
    """Write a text greedily and look at the clock."""
    ids, begun, first = list[int](), time.perf_counter(), 0.0
    for tokens in contender.stream(prompt, max_tokens):
        ids += tokens
        first = first or time.perf_counter()
        end = next((place for place, token in enumerate(ids) if token in eos), max_tokens - 1) + 1
        if len(ids) >= end:
            ids = ids[:end]
            break
    return Written(ids, (first - begun) * 1e3, time.perf_counter() - first)


@dataclass(frozen=True, slots=True)
class Ours:
    """This project's engine under a policy."""

    engine: Engine
    policy: Policy

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[Sequence[int]]:
        for chunk in self.engine.stream(Request(prompt, max_tokens, self.policy)):
            yield [chunk.token.id]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Prompt lookup on this project's backend; lossless."""

    engine: Engine
    proposals: int

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[Sequence[int]]:  # noqa: ARG002 (the caller stops)
        backend = self.engine.backend
        sequence = backend.open()
        try:
            text = [*prompt, backend.prefill(sequence, prompt).token]
            yield text[-1:]
            while True:
                rows = [text[-1], *look_up(text, self.proposals)]
                passed = backend.step(causal_rows(sequence, rows, len(text) - 1, [Head.EXACT] * len(rows), GREEDY))
                own = [output.token for output in passed if output is not None]
                stand = next((n for n, token in enumerate(rows[1:]) if token != own[n]), len(rows) - 1)
                backend.materialize(sequence, range(stand + 1))
                text += own[: stand + 1]
                yield own[: stand + 1]
        finally:
            backend.close(sequence)


def look_up(text: Sequence[int], count: int) -> list[int]:
    """What followed the last earlier occurrence of the text's ending, the longest ending of up to :data:`NGRAM`."""
    for length in range(min(NGRAM, len(text) - 1), 0, -1):
        ending = list(text[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == ending:
                return list(text[start + length : start + length + count])
    return []


class LlamaCpp:
    """A GGUF file in llama.cpp.

    Args:
        proposals: of its prompt lookup; 0: none.
    """

    def __init__(self, file: Path, threads: int, context: int, proposals: int = 0) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(NGRAM, proposals) if proposals else None
        self._llama: Any = Llama(
            str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False, draft_model=draft
        )

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[Sequence[int]]:  # noqa: ARG002 (the caller stops)
        self._llama.reset()
        for token in self._llama.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            yield [token]


def forced(file: Path, prompts: Sequence[list[int]], texts: Sequence[Written], context: int) -> float:
    """Share of the texts' tokens that the GGUF file chooses where the same text stands before them."""
    from llama_cpp import Llama

    llama: Any = Llama(str(file), n_ctx=context, n_batch=context, logits_all=True, verbose=False)
    right = total = 0
    for prompt, text in zip(prompts, texts, strict=True):
        llama.reset()
        llama.eval([*prompt, *text.ids])
        own = llama.scores[len(prompt) - 1 : len(prompt) + len(text.ids) - 1].argmax(axis=1)
        right, total = right + int((own == text.ids).sum()), total + len(text.ids)
    return right / total


def export(folder: Path, file: Path) -> None:
    """Write a checkpoint of rows with one scale and sub-norms as a GGUF file of the `bitnet` architecture."""
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFWriter

    loaded = checkpoint.read(folder)
    config, tensors = loaded.config, loaded.tensors
    if not (config.sub_norm and config.tie_embeddings and config.ternary_scale == "row" and config.embedding_bits == 8):
        raise BitMTPError(
            f"{folder}: only models with sub-norms, row scales and a tied 8-bit embedding can be exported"
        )
    writer = GGUFWriter(file, "bitnet")
    for add, value in (
        (writer.add_context_length, config.max_position),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_heads),
        (writer.add_head_count_kv, config.num_kv_heads),
        (writer.add_layer_norm_rms_eps, config.norm_eps),
        (writer.add_rope_freq_base, config.rope_theta),
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_tokenizer_model, "no_vocab"),
    ):
        add(value)  # type: ignore[operator]
    for name, new in _names(config.num_layers).items():
        tensor = tensors[f"{name}.weight"]
        if name == "embedding":
            writer.add_tensor(new, q8_0(tensor, tensors["embedding.scale"]), raw_dtype=Type.Q8_0)
        elif f"{name}.scale" in tensors:
            writer.add_tensor(new, q4_0(unpack(tensor, 2), tensors[f"{name}.scale"]), raw_dtype=Type.Q4_0)
        else:
            writer.add_tensor(new, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _names(layers: int) -> dict[str, str]:
    names = {"embedding": "token_embd.weight", "norm": "output_norm.weight"}
    parts = {
        "attention_norm": "attn_norm", "attention.q": "attn_q", "attention.k": "attn_k", "attention.v": "attn_v",
        "attention.sub_norm": "attn_sub_norm", "attention.o": "attn_output", "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.sub_norm": "ffn_sub_norm", "mlp.down": "ffn_down",
    }  # fmt: skip
    for layer in range(layers):
        names |= {f"layers.{layer}.{name}": f"blk.{layer}.{new}.weight" for name, new in parts.items()}
    return names


def q4_0(weights: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Integers -8 … 7 ``[out, in]`` with a scale a row → blocks of 32: float16 scale, 16 bytes of two codes."""
    out, inputs = weights.shape
    codes = (weights + 8).astype(np.uint8).reshape(out, inputs // 32, 2, 16)
    return _blocks(scales, codes[:, :, 0] | codes[:, :, 1] << 4)


def q8_0(weights: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Integers ``[out, in]`` with a scale a row → blocks of 32: float16 scale, 32 bytes."""
    return _blocks(scales, weights.view(np.uint8).reshape(len(weights), -1, 32))


def _blocks(scales: NDArray[np.float32], cells: NDArray[np.uint8]) -> NDArray[np.uint8]:
    heads = np.broadcast_to(scales.astype("<f2")[:, None, None], (*cells.shape[:2], 1)).copy().view(np.uint8)
    return np.concatenate([heads, cells], axis=2).reshape(len(cells), -1)


def contenders(engine: Engine, options: argparse.Namespace, backbone: Path) -> dict[str, Callable[[], Contender]]:
    """What makes each of those that take part, autoregressive decoding first.

    Args:
        backbone: where the exported GGUF file lies when they are made.
    """
    policies = {name: make_policy(name, engine.config.block_size) for name in ("autoregressive", "speculative")}
    found: dict[str, Callable[[], Contender]] = {}
    found |= {f"bitmtp, {name}": partial(Ours, engine, policy) for name, policy in policies.items()}
    found |= {f"bitmtp, prompt lookup, {count} proposals": partial(Lookup, engine, count) for count in (4, 8)}
    for count in (0, 4, 8) if options.llama else ():
        name = "llama.cpp, Q4_0" + (f", prompt lookup, {count} proposals" if count else "")
        found[name] = partial(LlamaCpp, backbone, options.threads, options.context, count)
    for file in options.gguf or ():
        found[f"llama.cpp, {Path(file).stem}"] = partial(LlamaCpp, Path(file), options.threads, options.context)
    return found


def measure(
    engine: Engine, folder: Path, options: argparse.Namespace, prompts: Sequence[list[int]], log: ResultLog
) -> dict[str, list[Written]]:
    """Every prompt by everybody, in turns; what the log holds is not done again."""
    with TemporaryDirectory() as place:
        backbone = Path(place) / "backbone.gguf"
        makers = contenders(engine, options, backbone)
        names, what = list(makers), f"{model_fingerprint(folder)} {options.threads} {options.max_tokens} {list(makers)}"
        keys = [digest(f"{what} {prompt}") for prompt in prompts]
        agreed = digest(f"agreement {keys}")
        if options.llama and not all(key in log for key in (*keys, agreed)):
            export(folder, backbone)
        if not all(key in log for key in keys):
            taking = {name: make() for name, make in makers.items()}
            _write_all(taking, engine, options, dict(zip(keys, prompts, strict=True)), log)
        texts = {name: [Written(**log[key]["texts"][name]) for key in keys] for name in names}
        if options.llama and agreed not in log:
            log.add(agreed, share=forced(backbone, prompts, texts[names[0]], options.context))
    if options.llama:
        print(f"teacher-forced, llama.cpp chooses {log[agreed]['share']:.1%} of the tokens that bitmtp chose")
    return texts


def _write_all(
    taking: dict[str, Contender],
    engine: Engine,
    options: argparse.Namespace,
    prompts: dict[str, list[int]],
    log: ResultLog,
) -> None:
    names, eos = list(taking), frozenset(engine.config.eos_token_ids)
    for contender in taking.values():  # buffers grow
        write(contender, next(iter(prompts.values())), 8, eos)
    for turn, (key, prompt) in enumerate(prompts.items()):
        if key not in log:
            order = [*names[turn % len(names) :], *names[: turn % len(names)]]
            done = {name: write(taking[name], prompt, options.max_tokens, eos) for name in order}
            log.add(key, texts={name: asdict(each) for name, each in done.items()})
            print(f"\r{turn + 1} of {len(prompts)} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def report(texts: dict[str, list[Written]], workloads: Sequence[str]) -> None:
    """A line for each; speeds are paired by text.

    Args:
        workloads: of each text.
    """
    base, names = next(iter(texts.values())), list(dict.fromkeys(workloads))
    rows = []
    for name, own in texts.items():
        pairs = list(zip(own, base, workloads, strict=True))
        speeds = [
            speed([(a, b) for a, b, workload in pairs if group in (workload, "all")]) for group in [*names, "all"]
        ]
        same = sum(a.ids == b.ids for a, b, _ in pairs)
        decoded = sum(len(each.ids) - 1 for each in own) / sum(each.seconds for each in own)
        ttft = np.median([each.ttft for each in own])
        rows.append([name, f"{decoded:.1f}", *speeds, f"{ttft:.0f}", f"{same} of {len(own)}"])
    print_table(
        f"{len(base)} requests; ×: against the first line's time per token, median over texts [95%]",
        ["", "tok/s", *(f"× {name}" for name in [*names, "all"]), "TTFT p50, ms", "same texts"],
        rows,
    )


def speed(pairs: Sequence[tuple[Written, Written]]) -> str:
    """Median over pairs of the second's time per token ÷ the first's."""
    ratio = np.array([_pace(b) / _pace(a) for a, b in pairs if len(a.ids) > 1 < len(b.ids)])
    if not len(ratio):
        return "-"
    found = bootstrap(len(ratio), lambda picks: np.median(ratio[picks], axis=1))
    return f"{found.value:.2f} [{found.low:.2f} {found.high:.2f}]"


def _pace(text: Written) -> float:
    return text.seconds / (len(text.ids) - 1)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the study's question files")
    parser.add_argument("--output", required=True, help="JSON lines; what is done is skipped")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of the study's")
    parser.add_argument("--limit", type=int, default=20, help="first requests of each workload")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--llama", action="store_true", help="the same backbone in llama.cpp")
    parser.add_argument("--gguf", action="append", help="another model in llama.cpp; may be repeated")
    return parser.parse_args()


def versions(options: argparse.Namespace) -> str:
    """What ran."""
    where = environment()
    words = [f"{where.cpu}, {options.threads} threads", f"bitmtp {where.bitmtp}", f"Python {where.python}"]
    if options.llama or options.gguf:
        import llama_cpp

        words.append(f"llama-cpp-python {llama_cpp.__version__}: {llama_cpp.llama_print_system_info().decode()}")
    return "; ".join(words)


def run(options: argparse.Namespace) -> None:
    """Measure and report."""
    folder = Path(options.model or shipped_model())
    engine = Engine.load(folder, backend=options.backend, threads=options.threads, context=options.context)
    requests = list(interleave([build(name, options.data, options.limit) for name in options.workloads.split(",")]))
    prompts = [engine.encode(Request(request.messages)) for request in requests]
    texts = measure(engine, folder, options, prompts, ResultLog(options.output))
    print(versions(options))
    report(texts, [request.workload for request in requests])


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"baselines: {error}")
