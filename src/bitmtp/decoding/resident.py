"""A text whose iterations the backend runs by itself (:class:`bitmtp.backends.base.ResidentBackend`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace

from bitmtp.backends.base import Backend, ResidentBackend, ResidentResult, ResidentText
from bitmtp.decoding.chooser import AdaptiveShaper
from bitmtp.decoding.decoder import Decoder, Source, Token
from bitmtp.decoding.state import State


def resident_text(decoder: Decoder) -> ResidentText | None:
    """A decoder's text for the resident loop, or None if something must look at it on the host.

    Penalties and grammars depend on the text; trees and windows on more than the loop knows. Of the
    adaptive policy's shapes it runs the linear ones.
    """
    state, policy, shaper = decoder.state, decoder.policy, decoder.shaper
    adaptive = shaper if isinstance(shaper, AdaptiveShaper) else None
    shaped = policy.topology or policy.window or shaper is not adaptive
    if shaped or state.grammar is not None or state.sampling.penalised:
        return None
    return ResidentText(
        block_size=policy.block_size,
        verify=policy.verify.value,
        bars=policy.bars,
        min_prefix=policy.min_prefix,
        verify_bound=policy.verify_bound,
        choice=state.choice(),
        limit=decoder.limit,
        eos_ids=decoder.eos_ids,
        committed=len(state.committed),
        pending=tuple(state.pending),
        adaptive=None if adaptive is None else adaptive.resident(state.committed),
    )


def can_reside(backend: Backend, decoder: Decoder) -> bool:
    """Whether :func:`decode_resident` should take a decoder; lets the backend make ready for it."""
    text, shaper = resident_text(decoder), decoder.shaper
    if text is None or not isinstance(backend, ResidentBackend):
        return False
    if isinstance(shaper, AdaptiveShaper) and shaper.wants_windows(text.committed):
        return False
    return backend.can_reside(replace(text, pending=text.pending[-1:]))  # prefill will have left one


def decode_resident(backend: Backend, decoder: Decoder) -> Generator[list[Token], None, None]:
    """Decode a started text to its end; yields what is committed as it comes. Closing it leaves the text sound.

    If ``ends`` (a stop string) ends the text and the loop has gone on meanwhile, the figures count those iterations.
    """
    text, result = resident_text(decoder), ResidentResult()
    assert text is not None
    assert isinstance(backend, ResidentBackend)
    run = backend.decode_resident(decoder.state.sequence, text, result)
    batches, came, tokens = 0, list[Token](), list[Token]()
    try:
        for batch in run:
            batches += 1
            came = [Token(token, Source(source)) for token, source in batch]
            tokens = decoder.kept(came)
            decoder.commit(tokens, 0)
            yield tokens
            if decoder.finish is not None:
                return
    finally:
        run.close()
        if batches == result.iterations:  # each batch was one
            _cut(result, came, len(tokens))
        _settle(backend, decoder.state, result.materialized)
        _record(decoder, result)


def _cut(result: ResidentResult, tokens: Sequence[Token], kept: int) -> None:
    """Leave what was dropped of the last iteration's tokens out of the figures."""
    if dropped := tokens[kept:]:
        lengths = Counter(result.lengths)
        lengths.subtract([len(tokens)])
        lengths.update([kept])
        result.lengths = dict(lengths)
        result.accepted -= sum(token.source is not Source.EXACT for token in dropped)


def _settle(backend: Backend, state: State, materialized: int) -> None:
    """The loop may have gone on behind the last token that was taken: that is forgotten."""
    state.materialized = min(materialized, len(state.committed) - 1)
    if state.materialized < materialized:
        backend.truncate(state.sequence, state.materialized)


def _record(decoder: Decoder, result: ResidentResult) -> None:
    stats = decoder.stats
    stats.lengths += Counter(result.lengths)
    for name in ("passes", "graph_replays", "iterations", "num_spec_steps", "proposed", "accepted", "copied"):
        setattr(stats, name, getattr(stats, name) + getattr(result, name))
