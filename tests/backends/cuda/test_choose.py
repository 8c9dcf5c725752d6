"""Choosing on the GPU against ``bitmtp.sampling`` and float64, on random logits; and equal to itself, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from bitmtp.backends.base import Head
from bitmtp.backends.cuda import choose as cuda_choose
from bitmtp.backends.cuda.choose import Chooser, chain_tables, choose_constants
from bitmtp.backends.cuda.compile import ARCHITECTURES, compile_kernels
from bitmtp.backends.cuda.layout import MAX_WIDTH, OUTPUT, PASS, TOP
from bitmtp.checkpoint import Checkpoint
from bitmtp.config import ModelConfig
from bitmtp.numerics import gumbel, mix64
from bitmtp.sampling import GREEDY, Choice, Sampling, adjust, choose

VOCABULARIES = (151_669, 49_152, 1000)


def config(vocabulary, rank=0, hidden=64):
    return ModelConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=64, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=64, max_position=512, eos_token_ids=(), embedding_bits=16, head_activation_bits=16, block_size=16,
        chain_rank=rank,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: its logits (for masks also its hidden state), its choice, and what it sees of its own sequence."""

    raw: np.ndarray
    choice: Choice = GREEDY
    position: int = 100
    token: int = 5
    head: Head = Head.EXACT
    visible: int = 1
    sequence: int = 0
    hidden: np.ndarray = field(default_factory=lambda: np.zeros(64, np.float32))


class Bench:
    """A chooser and what surrounds it; outputs are poisoned before each pass."""

    def __init__(self, gpu, made):
        self.gpu, self.config = gpu, made.config
        self.stride = -(-made.config.vocab_size // 16) * 16
        self.chooser = Chooser(gpu, made, self.stride)
        self.x_stride = -(-made.config.hidden_size // 16) * 16

    def _upload(self, array):
        self.kept.append(self.gpu.upload(array))
        return int(self.kept[-1].handle)

    def _fill(self, record, choice):
        sampling = choice.sampling
        record["key"] = mix64(sampling.seed + 0x9E3779B97F4A7C15 * (sampling.choice + 1))
        for name in ("temperature", "top_k", "top_p", "min_p"):
            record[name] = getattr(sampling, name)
        for name in ("repetition", "presence", "frequency"):
            record[name] = getattr(sampling, f"{name}_penalty")
        if sampling.penalised and len(choice.seen):
            record["num_seen"] = len(choice.seen)
            record["seen"], record["counts"] = self._upload(choice.seen), self._upload(choice.counts)
        if sampling.logit_bias:
            record["num_biased"] = len(sampling.logit_bias)
            record["biased"] = self._upload(np.array([token for token, _ in sampling.logit_bias], np.int32))
            record["bias"] = self._upload(np.array([value for _, value in sampling.logit_bias], np.float32))
        if choice.allowed is not None:
            record["allowed"] = self._upload(choice.allowed)

    def _pass(self, cases, top):
        made = np.zeros(1, PASS)
        state = made[0]
        state["width"], state["top"] = len(cases), top
        state["num_sequences"] = 1 + max(case.sequence for case in cases)
        for index, case in enumerate(cases):
            row, sequence = state["rows"][index], state["sequences"][case.sequence]
            if sequence["rows"] == 0:
                sequence["first"] = index
            row["index"] = sequence["rows"]
            sequence["rows"] += 1
            for name in ("visible", "token", "position", "sequence", "head"):
                row[name] = getattr(case, name)
            row["choice"] = -1 if case.choice is GREEDY else index
            self._fill(state["choices"][index], case.choice)
        return made

    def run(self, cases, *, top=0, filtered=False, width=None):
        """Outputs of a pass; ``width`` is what the launch is made for."""
        self.kept = []
        logits = np.full((MAX_WIDTH, self.stride), np.nan, np.float32)
        x = np.full((MAX_WIDTH, self.x_stride), np.nan, np.float32)
        for index, case in enumerate(cases):
            logits[index, : len(case.raw)] = case.raw
            x[index, : self.config.hidden_size] = case.hidden[: self.config.hidden_size]
        self.arguments = [self.gpu.upload(array) for array in (self._pass(cases, top), logits, x)]
        poison = np.frombuffer(b"\xff" * (MAX_WIDTH * OUTPUT.itemsize), OUTPUT)
        self.outputs = self.gpu.upload(poison)
        self.record(self.gpu.stream, width or len(cases), filtered)
        return self.gpu.read(self.outputs, OUTPUT, (MAX_WIDTH,))[: len(cases)]

    def record(self, stream, width, filtered=False):
        state, logits, x = self.arguments
        self.chooser.record(stream, width, state, logits, x, self.outputs, filtered=filtered, masks=True)


@pytest.fixture(scope="module", params=VOCABULARIES)
def bench(gpu, request, tmp_path_factory):
    return Bench(gpu, Checkpoint(tmp_path_factory.mktemp("none"), config(request.param), {}))


def logits_like(random, vocabulary):
    """A few large ones over a broad rest, as language models have them."""
    raw = random.normal(0, 2.5, vocabulary)
    raw[random.choice(vocabulary, 40, replace=False)] += random.uniform(6, 14, 40)
    return raw.astype(np.float32)


def agrees(output, case, tolerance=1e-3):
    """The same token as NumPy's, or one whose noisy logit is as good within rounding."""
    ids = np.arange(len(case.raw), dtype=np.int32)
    expected, sampling = choose(ids, case.raw, case.choice, case.position + 1), case.choice.sampling
    if output["token"] == expected:
        return True
    z = adjust(ids, case.raw, case.choice).astype(np.float64) / (sampling.temperature or 1)
    if sampling.temperature:
        z = z + gumbel(sampling.seed, sampling.choice, case.position + 1, ids)
    return sampling.temperature > 0 and abs(z[output["token"]] - z[expected]) < tolerance


def check_distribution(output, raw):
    e = np.exp(raw.astype(np.float64) - raw.max())
    p = e / e.sum()
    assert output["probability"] == pytest.approx(p[output["token"]], rel=1e-4)
    assert output["entropy"] == pytest.approx(-(p * np.log(np.maximum(p, 1e-300))).sum(), rel=1e-4, abs=1e-5)


def check_top(output, raw, top):
    order = np.lexsort((np.arange(len(raw)), -raw))[:top]
    np.testing.assert_array_equal(output["top_ids"][:top], order)
    np.testing.assert_array_equal(output["top_logits"][:top], raw[order])


@pytest.mark.parametrize(("width", "top"), [(1, 0), (1, 1), (3, 5), (8, 16), (17, 32), (64, 17)])
def test_greedy(bench, width, top):
    random = np.random.default_rng(width)
    cases = [Case(logits_like(random, bench.config.vocab_size)) for _ in range(width)]
    for output, case in zip(bench.run(cases, top=top), cases, strict=True):
        assert output["token"] == case.raw.argmax()
        assert output["parent"] == -1
        check_distribution(output, case.raw)
        check_top(output, case.raw, top)


@pytest.mark.parametrize("levels", [1, 2, 9])
def test_ties_go_to_the_lowest_id(bench, levels):
    random = np.random.default_rng(levels)
    raw = (random.integers(0, levels, bench.config.vocab_size) - levels // 2).astype(np.float32)
    raw[raw == 0] *= random.choice([-1, 1], (raw == 0).sum())  # -0 ties with 0
    output = bench.run([Case(raw)], top=TOP)[0]
    assert output["token"] == raw.argmax()
    check_distribution(output, raw)
    check_top(output, raw, TOP)


@pytest.mark.parametrize("place", [0, -1])
def test_the_ends_of_the_vocabulary(bench, place):
    raw = np.full(bench.config.vocab_size, -3, np.float32)
    raw[place] = 4
    assert bench.run([Case(raw)])[0]["token"] == place % len(raw)


def test_rows_without_a_head_are_left_alone(bench):
    raw = logits_like(np.random.default_rng(0), bench.config.vocab_size)
    outputs = bench.run([Case(raw, head=Head.NONE), Case(raw)], top=2, filtered=True, width=4)
    assert outputs[0].tobytes() == b"\xff" * OUTPUT.itemsize
    assert outputs[1]["token"] == raw.argmax()


def sampled(random, vocabulary, count, **parameters):
    return [
        Case(logits_like(random, vocabulary), Choice(Sampling(seed=seed, choice=seed % 3, **parameters)), 7 * seed)
        for seed in range(count)
    ]


FILTERS = {
    "k": {"top_k": 5}, "k of one": {"top_k": 1}, "large k": {"top_k": 900}, "p": {"top_p": 0.9},
    "p of none": {"top_p": 0.0}, "almost all": {"top_p": 0.9999}, "min": {"min_p": 0.02}, "tiny min": {"min_p": 1e-7},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.01}, "hot": {"temperature": 3.0, "top_p": 0.95},
    "hot k": {"temperature": 3.0, "top_k": 50}, "hot k and p": {"temperature": 4.0, "top_k": 3000, "top_p": 0.7},
    "hot large k and p": {"temperature": 9.0, "top_k": 30_000, "top_p": 0.9},
    "hot min": {"temperature": 5.0, "min_p": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(bench, temperature):
    cases = sampled(np.random.default_rng(1), bench.config.vocab_size, 64, temperature=temperature)
    outputs = bench.run(cases)
    assert all(agrees(*pair) for pair in zip(outputs, cases, strict=True))
    for output, case in zip(outputs, cases, strict=True):
        check_distribution(output, case.raw)


@pytest.mark.parametrize("name", FILTERS)
def test_filters(bench, name):
    parameters = {"temperature": 0.8} | FILTERS[name]
    cases = sampled(np.random.default_rng(2), bench.config.vocab_size, 24, **parameters)
    outputs = bench.run(cases, filtered=True)
    # Sums are rounded differently, so a token at the very edge of top-p may fall on either side.
    assert sum(agrees(*pair) for pair in zip(outputs, cases, strict=True)) >= len(cases) - (name == "almost all")
    for output, case in zip(outputs, cases, strict=True):
        check_distribution(output, case.raw)


def test_filters_among_ties(bench):
    """Of equal logits the lowest ids are kept."""
    raw = np.zeros(bench.config.vocab_size, np.float32)
    by_k = [Case(raw, Choice(Sampling(temperature=1, top_k=3, seed=seed))) for seed in range(30)]
    by_p = [replace(case, choice=Choice(replace(case.choice.sampling, top_k=0, top_p=4.5 / len(raw)))) for case in by_k]
    assert {output["token"] for output in bench.run(by_k, filtered=True)} == {0, 1, 2}
    assert {output["token"] for output in bench.run(by_p, filtered=True)} == {0, 1, 2, 3, 4}


def adjusted(random, vocabulary, **parameters):
    raw = logits_like(random, vocabulary)
    best = np.argsort(-raw)
    seen = np.unique(np.concatenate([best[:30:2], random.choice(vocabulary, 500)])).astype(np.int32)
    bias = tuple(sorted((int(token), float(random.normal(0, 5))) for token in best[:40:3]))
    allowed = random.integers(0, 1 << 32, vocabulary // 32 + 1, dtype=np.uint32)
    sampling = Sampling(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias=bias, **parameters
    )
    return Case(raw, Choice(sampling, seen, random.integers(0, 4, len(seen)).astype(np.int32), allowed))


def test_penalties_bias_and_grammar(bench):
    random = np.random.default_rng(3)
    greedy = [adjusted(random, bench.config.vocab_size) for _ in range(16)]
    warm = [adjusted(random, bench.config.vocab_size, temperature=0.9, seed=seed) for seed in range(16)]
    fine = [adjusted(random, bench.config.vocab_size, temperature=0.9, top_p=0.7, seed=seed) for seed in range(16)]
    cases = greedy + warm + fine
    for output, case in zip(bench.run(cases, filtered=True), cases, strict=True):
        assert agrees(output, case)
        check_distribution(output, case.raw)


def mixed(random, vocabulary):
    cases = [Case(logits_like(random, vocabulary), position=at) for at in range(4)]
    for parameters in ({}, {"top_k": 20}, {"top_p": 0.9}, {"temperature": 3.0, "top_p": 0.99}, {"min_p": 0.1}):
        cases += sampled(random, vocabulary, 4, **({"temperature": 1.0} | parameters))
    return [*cases, *(adjusted(random, vocabulary, temperature=1.0, top_k=9, seed=seed) for seed in range(4))]


def test_a_row_does_not_depend_on_its_pass(bench):
    """Alone or in a wide pass, in a wider launch, in whatever order, by the plain kernels or the filtered ones."""
    cases = mixed(np.random.default_rng(4), bench.config.vocab_size)
    wide = bench.run(cases, top=7, filtered=True)
    order = np.random.default_rng(5).permutation(len(cases))
    shuffled = bench.run([cases[i] for i in order], top=7, filtered=True, width=64)
    assert [shuffled[i].tobytes() for i in np.argsort(order)] == [output.tobytes() for output in wide]
    for case, output in zip(cases[:: len(cases) // 9], wide[:: len(cases) // 9], strict=True):
        assert bench.run([case], top=7, filtered=True)[0].tobytes() == output.tobytes()
    for case, output in zip(cases[:8], wide[:8], strict=True):
        assert bench.run([case], top=7)[0].tobytes() == output.tobytes()


# The chain


def chain_checkpoint(folder, vocabulary=3001, rank=96, hidden=64):
    random = np.random.default_rng(6)
    tensors = {
        "embedding.weight": random.normal(0, 1, (vocabulary, hidden)).astype(np.float16),
        "norm.weight": random.uniform(0.5, 1.5, hidden).astype(np.float32),
        "chain.hidden.weight": random.normal(0, hidden**-0.5, (rank, 2 * hidden)).astype(np.float32),
        "chain.output.weight": random.normal(0, (hidden * rank) ** -0.5, (hidden, rank)).astype(np.float32) * 4,
    }
    return Checkpoint(folder, config(vocabulary, rank, hidden), tensors)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chain_checkpoint(tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="module")
def chained(gpu, model):
    return Bench(gpu, model)


def added(checkpoint, hidden, parent, candidates):
    """What the chain adds, by the formula of docs/sampling.md in float64."""
    eps, size, tensors = checkpoint.config.norm_eps, checkpoint.config.hidden_size, checkpoint.tensors
    words = tensors["embedding.weight"].astype(np.float64)
    normed = [x / np.sqrt((x**2).mean() + eps) for x in (hidden.astype(np.float64), words[parent])]
    a = tensors["chain.hidden.weight"].astype(np.float64)
    inner = a[:, :size] @ (normed[0] * tensors["norm.weight"]) + a[:, size:] @ normed[1]
    return words[candidates] @ (tensors["chain.output.weight"] @ (inner / (1 + np.exp(-inner))))


def test_tables_multiply_the_chain_out(model):
    tables, random = chain_tables(model, block=1000), np.random.default_rng(7)
    hidden, candidates = random.normal(0, 2, 64).astype(np.float32), np.array([3, 2999, 3000])
    inner = tables.hidden @ (hidden / np.sqrt((hidden**2).mean() + model.config.norm_eps)) + tables.before[1234]
    shift = tables.after[candidates].astype(np.float32) @ (inner / (1 + np.exp(-inner)))
    np.testing.assert_allclose(shift, added(model, hidden, 1234, candidates), atol=0.01)
    assert len(tables.hidden) == 256
    assert not tables.before[:, 96:].any()


def block(random, vocabulary, start, depth, choice=GREEDY, hidden=64):
    """An anchor and its masks."""

    def case(index):
        return Case(
            logits_like(random, vocabulary), choice, start + index, 5 if index == 0 else -index, Head.EXACT,
            (2 << index) - 1, 0, random.normal(0, 2, hidden).astype(np.float32),
        )  # fmt: skip

    return [case(index) for index in range(depth)]


def check_link(model, output, case, parent, top):
    order = np.lexsort((np.arange(len(case.raw)), -case.raw))
    ids = order[:16].astype(np.int32)
    scored = case.raw[ids] + added(model, case.hidden, parent["token"], ids)
    place = choose(ids, scored.astype(np.float32), case.choice, case.position + 1)
    chosen = int(np.flatnonzero(ids == output["token"])[0])
    z = adjust(ids, scored.astype(np.float32), case.choice).astype(np.float64)
    if temperature := case.choice.sampling.temperature:
        z = z / temperature + gumbel(case.choice.sampling.seed, case.choice.sampling.choice, case.position + 1, ids)
    close = z[place] - z[chosen] < 0.02
    e, p = np.exp(scored - scored.max()), np.exp(case.raw.astype(np.float64) - case.raw.max())
    expected = e[chosen] / e.sum() * p[ids].sum() / p.sum()
    assert output["probability"] == pytest.approx(expected, rel=0.02)
    ranked = np.sort(scored)[::-1][: min(top, 16)]
    np.testing.assert_allclose(output["top_logits"][: len(ranked)], ranked, atol=0.02)
    np.testing.assert_array_equal(output["top_ids"][16:top], order[16:top])
    return chosen == place or close


@pytest.mark.parametrize("parameters", [
    {}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 4}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.05, "top_k": 9, "top_p": 0.9},
    {"repetition_penalty": 1.5, "logit_bias": tuple((token, 3.0) for token in range(0, 3001, 2))},
])  # fmt: skip
def test_the_chain(model, chained, parameters):
    random, agreed, links = np.random.default_rng(8), 0, 0
    for seed in range(6):
        seen = np.arange(0, 3001, 3, dtype=np.int32)
        choice = Choice(Sampling(seed=seed, **parameters), seen, np.ones_like(seen)) if parameters else GREEDY
        cases = block(random, 3001, 40, 16, choice)
        outputs = chained.run(cases, top=20, filtered=bool(parameters))
        assert outputs["parent"].tolist() == list(range(-1, 15))
        links += 15
        agreed += sum(check_link(model, outputs[i], cases[i], outputs[i - 1], 20) for i in range(1, 16))
    assert agreed >= links - 2  # a candidate at the very edge of top-p


def test_a_grammar_that_allows_no_candidate_is_left_out(chained):
    random = np.random.default_rng(9)
    plain = block(random, 3001, 10, 4)
    none = np.zeros(3001 // 32 + 1, np.uint32)
    closed = [plain[0], *(replace(case, choice=Choice(Sampling(), allowed=none)) for case in plain[1:])]
    assert chained.run(closed, filtered=True)["token"].tolist() == chained.run(plain)["token"].tolist()


def test_a_link_does_not_depend_on_its_pass(gpu, model, chained, monkeypatch):
    """Blocks of two sequences, two blocks on one text (a tree), other tiles: each block as if it were alone."""
    random = np.random.default_rng(10)
    first = block(random, 3001, 50, 8)
    second = block(random, 3001, 55, 9, Choice(Sampling(temperature=1.0, seed=4, top_p=0.9)))
    alone = [chained.run(part, top=5, filtered=True) for part in (first, second)]
    batch = [*first, *(replace(case, sequence=1) for case in second)]
    tree = [*first, *(replace(case, visible=case.visible << 8) for case in second)]
    for cases in (batch, tree):
        outputs = chained.run(cases, top=5, filtered=True, width=32)
        assert outputs["parent"].tolist() == [-1, *range(7), -1, *range(8, 16)]
        for name in ("token", "probability", "entropy", "top_ids", "top_logits"):
            np.testing.assert_array_equal(outputs[name], np.concatenate([part[name] for part in alone]))
    monkeypatch.setattr(cuda_choose, "_TILE", 2)
    assert Bench(gpu, model).run(second, top=5, filtered=True).tobytes() == alone[1].tobytes()


def test_a_mask_behind_a_row_without_a_head_is_chosen_plainly(chained):
    cases = block(np.random.default_rng(11), 3001, 20, 3)
    outputs = chained.run([replace(cases[0], head=Head.NONE), *cases[1:]])
    assert outputs["parent"][1:].tolist() == [-1, 1]
    assert outputs[1]["token"] == cases[1].raw.argmax()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("vocabulary", "rank", "hidden"), [(49_152, 256, 576), (151_669, 0, 2048)])
def test_compiles_without_spilling(architecture, vocabulary, rank, hidden):
    constants = choose_constants(config(vocabulary, rank, hidden), -(-vocabulary // 16) * 16, 5)
    usage = compile_kernels("choose.cu", constants, architecture).usage
    names = {"partials", "partials_adjusted", "merge", "gather", "filter"} | (
        {"chain", "chain_hidden"} if rank else set()
    )
    assert {kernel.kernel for kernel in usage} == names
    assert all(kernel.spill_bytes == 0 and kernel.registers <= 128 for kernel in usage)


# Timing: `python tests/backends/cuda/test_choose.py` on a machine with a GPU


TIMED = {
    "greedy": (GREEDY, 0),
    "with top 16": (GREEDY, 16),
    "sampled": (Choice(Sampling(temperature=1.0)), 0),
    "top-p": (Choice(Sampling(temperature=1.0, top_p=0.9)), 0),
    "top-p, hot": (Choice(Sampling(temperature=3.0, top_p=0.9)), 0),
    "top-k, hot": (Choice(Sampling(temperature=3.0, top_k=50)), 0),
}


def microseconds(bench, width, filtered, repeats=50):
    """Of one pass's choosing, from replays of a graph of many; the logits stay in the cache, as a head's do."""
    builder = bench.gpu.device.create_graph_builder()
    builder.begin_building()
    for _ in range(repeats):
        bench.record(builder, width, filtered)
    graph = builder.end_building().complete()
    times = []
    for _ in range(7):
        start, end = (bench.gpu.device.create_event({"timing_enabled": True}) for _ in range(2))
        bench.gpu.stream.record(start)
        graph.launch(bench.gpu.stream)
        bench.gpu.stream.record(end)
        bench.gpu.stream.sync()
        times.append((end - start) * 1000 / repeats)
    return float(np.median(times))


def main():
    from pathlib import Path

    from bitmtp.backends.cuda.device import Gpu

    gpu, random = Gpu(), np.random.default_rng(0)
    print("microseconds of everything after the head; with a chain all rows but the first are masks")
    for vocabulary, rank in ((151_669, 0), (49_152, 0), (49_152, 256)):
        made = chain_checkpoint(Path(), vocabulary, rank, 576) if rank else Checkpoint(Path(), config(vocabulary), {})
        bench = Bench(gpu, made)
        for width in (1, 2, 8, 16, 64):
            cases = block(random, vocabulary, 9, width, hidden=made.config.hidden_size)
            line = f"vocabulary {vocabulary:6d}  chain {rank:3d}  width {width:2d} "
            for name, (choice, top) in TIMED.items():
                filtered = name.startswith("top")
                bench.run([replace(case, choice=choice) for case in cases], top=top, filtered=filtered)
                line += f"  {name} {microseconds(bench, width, filtered):.1f}"
            print(line)


if __name__ == "__main__":
    main()
